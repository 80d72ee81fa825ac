"""How an answer reaches its client: whole or as server-sent events, and what happens when the client goes away."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Message, Send

from ..engine.background import EngineStopped
from ..engine.engine import Event
from ..engine.request import Request
from .gate import Gate
from .protocol import ApiError, StreamOptions

CLIENT_GONE = 499  # nobody reads it; it stands in the log


class Answer(Protocol):
    """What a route makes of its requests' events. ``head``: the fields that every chunk and the whole answer begin with."""

    head: dict[str, Any]

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first token."""

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """The chunks of one event; [] where it brings nothing to send."""

    def whole(self) -> dict[str, Any]:
        """The answer without streaming, after all requests have ended."""

    def usage(self) -> dict[str, Any]: ...


async def deliver(
    http: HttpRequest,
    engine: Gate,
    answer: Answer,
    requests: list[Request],
    stream: bool,
    options: StreamOptions | None,
) -> Response:
    """Run checked ``requests`` and send ``answer``. A client that leaves frees what they hold by the engine's next step."""
    if not engine.alive:
        raise EngineStopped("the engine has stopped")
    events = engine.stream(requests)
    if stream:
        lines = server_sent(answer, events, options is not None and bool(options.include_usage))
        return EventStream(lines, send_timeout=engine.limits.send_seconds)
    if not await drained(events, http):
        return Response(status_code=CLIENT_GONE)
    return JSONResponse(answer.whole())


class EventStream(EventSourceResponse):
    """The library's response with a cheaper time limit: its own scope took a quarter of all that a token costs here."""

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self.send_timeout):
                await send(message)
        except TimeoutError as error:
            raise SendTimeoutError() from error


async def server_sent(answer: Answer, batches: AsyncIterator[list[Event]], usage: bool) -> AsyncIterator[bytes]:
    """The opening, a chunk where text or an end came, the usage chunk if asked for, [DONE].

    What came together is sent together: a client that is behind costs no more than one that keeps up.
    """
    extra = {"usage": None} if usage else {}
    try:
        async with aclosing(batches):
            if opening := answer.opening():
                yield b"".join(sse({**chunk, **extra}) for chunk in opening)
            async for events in batches:
                if lines := b"".join(sse({**chunk, **extra}) for event in events for chunk in answer.chunks(event)):
                    yield lines
    except EngineStopped as error:  # the status has been sent; the client reads it here
        yield sse(ApiError(503, str(error)).body)
        return
    except ApiError as error:  # it took too long
        yield sse(error.body)
        return
    if usage:
        yield sse({**answer.head, "choices": [], "usage": answer.usage()})
    yield b"data: [DONE]\r\n\r\n"


def sse(body: dict[str, Any]) -> bytes:
    """One event; JSON has no line break inside."""
    return b"data: %b\r\n\r\n" % json.dumps(body).encode()


async def drained(events: AsyncIterator[list[Event]], http: HttpRequest) -> bool:
    """Read ``events`` to the end; False if the client went away first (the framework tells only streaming handlers)."""

    async def drain() -> None:
        async with aclosing(events):
            async for _ in events:
                pass

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    work, watch = asyncio.create_task(drain()), asyncio.create_task(gone())
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return True
        return False
    except asyncio.CancelledError as error:  # the server ends and waits no longer: this client is still there and is told
        raise EngineStopped("the server is shutting down") from error
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
