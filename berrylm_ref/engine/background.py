"""The engine in a thread of its own: the one thread that touches model and caches, fed and read from an event loop."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from .engine import Engine, Event
from .request import Request

log = logging.getLogger(__name__)


class EngineStopped(RuntimeError):
    """The engine ended, by a fault or at shutdown; no request of it will go on."""


class Late:
    """Put into an inbox when its time is over."""


@dataclass(frozen=True, eq=False)
class Listener:
    """Where the events of some requests go: a queue that its event loop owns. None: the engine has stopped."""

    loop: asyncio.AbstractEventLoop
    inbox: "asyncio.Queue[list[Event] | type[Late] | None]"


def hand_out(items: dict[Listener, list[Event] | None]) -> None:
    """Each listener's item into its inbox. A loop is woken once for all of its listeners: that is a system call."""
    loops: dict[asyncio.AbstractEventLoop, list[Listener]] = {}
    for listener in items:
        loops.setdefault(listener.loop, []).append(listener)

    def put(listeners: list[Listener]) -> None:
        for listener in listeners:
            listener.inbox.put_nowait(items[listener])

    for loop, listeners in loops.items():
        with suppress(RuntimeError):  # the loop is closed: nobody reads any more, and the others must not suffer for it
            loop.call_soon_threadsafe(put, listeners)


class BackgroundEngine:
    """Runs ``engine.step()`` while there is work, sleeps otherwise. A request whose reader goes away is cancelled."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._listeners: dict[Request, Listener] = {}
        self._lock = threading.Lock()  # over "is it still running" and the queue: nothing is added to a dead engine
        self._fault: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="berrylm-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._stopped

    async def stream(self, requests: list[Request], seconds: float | None = None) -> AsyncIterator[list[Event]]:
        """Run checked ``requests`` together; yields their events step by step, until all have finished.

        Closed early, or cancelled, it frees what its requests hold by the engine's next step. Raises EngineStopped, and
        TimeoutError where they take longer than ``seconds``: then nothing of them runs on, even if it is read later.
        """
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue()

        def end() -> None:
            inbox.put_nowait(Late)
            self._cancel(requests)  # by the timer, for the reader may be behind

        self._send(("add", requests, Listener(loop, inbox)))
        timer = None if seconds is None else loop.call_later(seconds, end)  # one, not one a token
        left = set(requests)
        try:
            while left:
                item = await inbox.get()
                if item is None:
                    raise EngineStopped("the engine has stopped") from self._fault
                if item is Late:
                    raise TimeoutError(f"the requests took longer than {seconds:g} seconds")
                left.difference_update([event.request for event in item if event.finish_reason])
                yield item
        finally:
            if timer:
                timer.cancel()
            if left:
                self._cancel(list(left))

    def stop(self, timeout: float = 30) -> None:
        """End the thread after its step; whoever still reads gets EngineStopped."""
        with self._lock:
            if not self._stopped:
                self._commands.put(("stop", [], None))
        self._thread.join(timeout)

    def _send(self, command: tuple) -> None:
        with self._lock:
            if self._stopped:
                raise EngineStopped("the engine has stopped") from self._fault
            self._commands.put(command)

    def _cancel(self, requests: list[Request]) -> None:
        with suppress(EngineStopped):  # then it holds nothing of theirs for anyone
            self._send(("cancel", requests, None))

    def _loop(self) -> None:
        try:
            while self._take_commands(wait=self.engine.idle):
                made: dict[Listener, list[Event]] = {}
                for event in self.engine.step():
                    listener = self._listeners.get(event.request)
                    if listener is None:
                        continue  # of a thread that shares the engine: it reads the request itself
                    made.setdefault(listener, []).append(event)
                    if event.finish_reason:
                        del self._listeners[event.request]
                hand_out(made)
        except BaseException as fault:
            log.exception("the engine stopped")
            self._fault = fault
        with self._lock:
            self._stopped = True
            waiting = set(self._listeners.values())
            while not self._commands.empty():  # sent during the last step: nobody would ever take them
                _, _, listener = self._commands.get()
                waiting |= {listener} - {None}
        hand_out(dict.fromkeys(waiting))

    def _take_commands(self, wait: bool) -> bool:
        """Everything that waits, at least one command if ``wait``; False when told to stop."""
        while wait or not self._commands.empty():
            kind, requests, listener = self._commands.get()
            wait = False
            if kind == "stop":
                return False
            for request in requests:
                if kind == "add":
                    self._listeners[request] = listener
                    self.engine.add(request)
                elif self._listeners.pop(request, None) is not None:
                    self.engine.cancel(request)
            wait = self.engine.idle and self._commands.empty()
        return True
