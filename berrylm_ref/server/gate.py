"""The way to the engine: who may use it now, for how long, and what is counted on the way."""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass

from ..engine.background import BackgroundEngine, EngineStopped
from ..engine.engine import Engine, Event
from ..engine.request import ContextLengthError, Request
from .limits import Limits
from .metrics import Metrics
from .protocol import ApiError


@dataclass(eq=False)
class Call:
    """One HTTP call from its first byte to its last; what it holds is given back at its end, however it ends."""

    gate: "Gate"
    choices: int = 0
    outcome: str | None = None  # what its status can't tell: "failed" within a stream, "left"


current: ContextVar[Call] = ContextVar("call")


class Gate:
    """What routes use as the engine: ``stream`` and ``alive`` of a BackgroundEngine, behind limits and counters.

    ``draining``: whoever is here may finish, nobody new comes in. One event loop uses it.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics):
        self.limits, self.metrics = limits, metrics
        self.calls = self.choices = 0
        self.draining = False
        self._engine = engine
        self._places = engine.scheduler.max_running + limits.queue
        self._background: BackgroundEngine | None = None

    def start(self) -> None:
        self._background = BackgroundEngine(self._engine)

    def stop(self) -> None:
        """End the engine; who still waits gets EngineStopped."""
        self._background.stop()

    @property
    def alive(self) -> bool:
        return self._background is not None and self._background.alive

    def enter(self) -> Call:
        """A new call; ApiError when there are too many."""
        if self.calls >= self.limits.calls:
            raise self.limits.too_many_calls()
        self.calls += 1
        return Call(self)

    def leave(self, call: Call) -> None:
        self.calls -= 1
        self.choices -= call.choices

    def check_choices(self, count: int) -> None:
        """ValueError for more choices than a call may ever have."""
        most = min(self.limits.choices, self._places)
        if count > most:
            raise ValueError(f"generate: n: expected at most {most} choices in a call, prompts x n, got {count}")

    def check(self, requests: list[Request]) -> None:
        """ValueError for requests beyond the limits of one call."""
        self.check_choices(len(requests))
        most, longest = self.limits.prompt_tokens, max(len(request.prompt_ids) for request in requests)
        if most is not None and longest > most:
            raise ContextLengthError(f"generate: prompts: expected at most {most} tokens, this server's limit, got {longest}")

    def stream(self, requests: list[Request]) -> AsyncIterator[list[Event]]:
        """As BackgroundEngine.stream; ApiError at once when the queue is full. Their places are the current call's."""
        if self.choices + len(requests) > self._places:
            raise self.limits.queue_full()
        call = current.get()
        call.choices += len(requests)
        self.choices += len(requests)
        return self._events(requests, call)

    async def _events(self, requests: list[Request], call: Call) -> AsyncIterator[list[Event]]:
        last, left = dict.fromkeys(requests, time.monotonic()), len(requests)
        call.outcome = "left"  # unless it gets to another end
        try:
            async with aclosing(self._background.stream(requests, self.limits.generation_seconds)) as batches:
                async for events in batches:
                    now = time.monotonic()
                    for event in events:
                        self.metrics.token(event, now - last[event.request])
                        last[event.request] = now
                        left -= event.finish_reason is not None
                    call.outcome = call.outcome if left else None
                    yield events
        except TimeoutError as error:
            call.outcome = "failed"
            raise self.limits.too_slow() from error
        except EngineStopped:
            call.outcome = "failed"
            raise


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
