"""The outermost layer: who may call, how much a body may bring and how long that may take, and how each call ended."""

import asyncio

from fastapi.responses import JSONResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .auth import ApiKey
from .delivery import CLIENT_GONE
from .gate import Call, Gate, current, shutting_down
from .protocol import ApiError

OPEN = ("/health",)  # no key needed


class Guard:
    """ASGI middleware. Order: key, shutdown, places, body. Strangers hold nothing, and a body is read before anything runs."""

    def __init__(self, app: ASGIApp, gate: Gate, key: ApiKey | None):
        self.app, self.gate, self.key = app, gate, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, call = 500, None  # until something is sent

        async def seen(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            if self.key and scope["path"] not in OPEN:
                self.key.check(scope["headers"])
            if self.gate.draining:
                raise shutting_down()
            if scope["method"] == "POST":
                call = self.gate.enter()
                current.set(call)
                receive = await self._with_body(scope, receive)
                if receive is None:
                    call.outcome = "left"
                    return
            await self.app(scope, receive, seen)
        except SendTimeoutError:  # the client reads no more; the connection is closed, for the response is not complete
            call.outcome = "left"
        except ApiError as error:  # before the app saw the call: it handles its own
            response = JSONResponse(error.body, error.status, {**error.headers, "connection": "close"})
            await response(scope, receive, seen)  # closed: what the client still sends is not read
        finally:
            if call:
                self.gate.leave(call)
            self._count(scope, status, call)

    async def _with_body(self, scope: Scope, receive: Receive) -> Receive | None:
        """``receive`` with the whole body as its first message; None if the client left; ApiError beyond the limits."""
        limits = self.gate.limits
        said = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if int(said) > limits.body_bytes:  # the protocol below has checked that it is a number
            raise limits.body_too_long()
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > limits.body_bytes:
                        raise limits.body_too_long()
                    if not message.get("more_body"):
                        break
        except TimeoutError as error:
            raise limits.body_too_slow() from error
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return replay

    def _count(self, scope: Scope, status: int, call: Call | None) -> None:
        route = scope.get("route")
        outcome = call and call.outcome
        if not outcome:
            outcome = "left" if status == CLIENT_GONE else "ok" if status < 400 else "refused" if status < 500 else "failed"
        self.gate.metrics.requests.labels(getattr(route, "path", "other"), outcome).inc()
