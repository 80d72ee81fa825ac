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


@dataclass(frozen=True)
class Listener:
    """Where the text of a request goes: a queue that its event loop owns."""

    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue

    def put(self, item: Event | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody reads any more, and the others must not suffer for it
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, item)


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

    async def stream(self, requests: list[Request]) -> AsyncIterator[Event]:
        """Run checked ``requests`` together; yields every event of theirs, until all have finished.

        Closed early, or cancelled, it frees what its requests hold by the engine's next step. Raises EngineStopped.
        """
        listener = Listener(asyncio.get_running_loop(), asyncio.Queue())
        self._send(("add", requests, listener))
        left = set(requests)
        try:
            while left:
                event = await listener.inbox.get()
                if event is None:
                    raise EngineStopped("the engine has stopped") from self._fault
                if event.finish_reason:
                    left.discard(event.request)
                yield event
        finally:
            if left:
                with suppress(EngineStopped):  # then it holds nothing of theirs for anyone
                    self._send(("cancel", list(left), None))

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

    def _loop(self) -> None:
        try:
            while self._take_commands(wait=self.engine.idle):
                for event in self.engine.step():
                    if event.request not in self._listeners:
                        continue  # of a thread that shares the engine: it reads the request itself
                    self._listeners[event.request].put(event)
                    if event.finish_reason:
                        del self._listeners[event.request]
        except BaseException as fault:
            log.exception("the engine stopped")
            self._fault = fault
        with self._lock:
            self._stopped = True
            waiting = set(self._listeners.values())
            while not self._commands.empty():  # sent during the last step: nobody would ever take them
                _, _, listener = self._commands.get()
                waiting |= {listener} - {None}
        for listener in waiting:
            listener.put(None)

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
