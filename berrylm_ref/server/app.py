"""The HTTP application: routes, and errors in OpenAI's form."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException

from ..engine.background import BackgroundEngine, EngineStopped
from ..engine.engine import Event
from ..engine.llm import LLM
from ..engine.request import ContextLengthError
from .protocol import ApiError, CompletionAnswer, CompletionRequest

CLIENT_GONE = 499  # nobody reads it; it stands in the log


def create_app(llm: LLM, model_name: str) -> FastAPI:
    """Serve ``llm`` under ``model_name``; its engine runs in a thread from the app's start to its end."""
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.engine = BackgroundEngine(llm.engine)
        yield
        await asyncio.to_thread(app.state.engine.stop)

    app = FastAPI(title="BerryLM reference", lifespan=lifespan)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(validation_error(error).body, 400)

    @app.exception_handler(HTTPException)  # the framework's own: no such route or method, a body that can't be read
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(ApiError(error.status_code, str(error.detail)).body, error.status_code)

    @app.get("/health")
    async def health() -> dict[str, str]:
        if not app.state.engine.alive:
            raise ApiError(503, "the engine has stopped")
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {
            "id": model_name,
            "object": "model",
            "created": started,
            "owned_by": "berrylm",
            "max_model_len": llm.config.max_position_embeddings,
        }
        return {"object": "list", "data": [card]}

    @app.exception_handler(EngineStopped)
    async def stopped(_: Request, error: EngineStopped) -> JSONResponse:
        return JSONResponse(ApiError(503, str(error)).body, 503)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        check_model(body.model, model_name)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: expected only with stream: true", "stream_options")
        try:
            params = body.sampling_params()
            requests = [r for prompt in body.prompts() for r in llm.requests(prompt, params)]
            for request in requests:
                llm.check_fits(request)
        except ContextLengthError as error:
            raise ApiError(400, str(error), "prompt", "context_length_exceeded") from error
        except ValueError as error:
            raise ApiError(400, str(error), named_field(str(error))) from error
        if not app.state.engine.alive:
            raise EngineStopped("the engine has stopped")
        answer = CompletionAnswer(requests, model_name, llm.tokenizer)
        events = app.state.engine.stream(requests)
        if body.stream:
            usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return EventSourceResponse(chunks(answer, events, usage))
        if not await drained(events, http):
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(answer.whole())

    return app


async def chunks(answer: CompletionAnswer, events: AsyncIterator[Event], usage: bool) -> AsyncIterator[str]:
    """Server-sent events: a chunk where text or an end came, the usage chunk if asked for, [DONE]."""
    extra = {"usage": None} if usage else {}
    try:
        async with aclosing(events):
            async for event in events:
                if event.text or event.finish_reason or answer.tokenizer is None:
                    yield json.dumps({**answer.chunk(event), **extra})
    except EngineStopped as error:  # the status has been sent; the client reads it here
        yield json.dumps(ApiError(503, str(error)).body)
        return
    if usage:
        yield json.dumps({**answer.head, "choices": [], "usage": answer.usage()})
    yield "[DONE]"


async def drained(events: AsyncIterator[Event], http: Request) -> bool:
    """Read ``events`` to the end; False if the client went away first (the framework tells only streaming handlers)."""

    async def drain() -> None:
        async with aclosing(events):
            async for _ in events:
                pass

    async def gone() -> None:
        while not await http.is_disconnected():
            await asyncio.sleep(0.1)

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


def check_model(asked: str | None, served: str) -> None:
    if asked is not None and asked != served:
        raise ApiError(404, f"model: expected {served!r}, got {asked!r}", "model", "model_not_found")


def named_field(message: str) -> str | None:
    """The argument that an error of ours names: "operation: argument: expected ..., got ..."."""
    parts = message.split(": ")
    name = parts[1] if len(parts) > 2 else None
    return "prompt" if name == "prompts" else name


def validation_error(error: RequestValidationError) -> ApiError:
    """The first fault pydantic found, with the field it concerns."""
    fault = error.errors()[0]
    where = [str(x) for x in fault["loc"] if x != "body"]
    field = where[0] if where and fault["type"] != "json_invalid" else None
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"{field}: this field is not supported", field, "unsupported_field")
    return ApiError(400, f"{field or 'body'}: {fault['msg']}", field)
