"""The HTTP application: what it is made of, what it says about itself, and errors in OpenAI's form."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from ..engine.background import EngineStopped
from ..engine.llm import LLM
from . import completions, generate
from .auth import ApiKey
from .chat import chat_routes
from .gate import Gate
from .guard import Guard
from .limits import Limits
from .metrics import CONTENT_TYPE, Metrics
from .protocol import ApiError, check_model
from .tokens import token_routes


def create_app(llm: LLM, model_name: str, limits: Limits | None = None, api_key: str | None = None) -> FastAPI:
    """Serve ``llm`` under ``model_name``; its engine runs in a thread from the app's start to its end.

    limits: None for the defaults. api_key: what every route but /health asks for; ValueError if no header can carry it.
    """
    metrics = Metrics(llm.engine)
    gate = Gate(llm.engine, limits or Limits(), metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gate.start()
        yield
        await asyncio.to_thread(gate.stop)

    app = FastAPI(title="BerryLM reference", lifespan=lifespan)
    app.state.llm, app.state.model_name, app.state.engine = llm, model_name, gate
    app.add_middleware(Guard, gate=gate, key=None if api_key is None else ApiKey(api_key))
    add_error_handlers(app)
    for router in (completions.router, chat_routes(llm, model_name), generate.router, token_routes(llm, model_name)):
        app.include_router(router)

    @app.get("/health")
    async def health() -> dict[str, str]:
        if not gate.alive:
            raise ApiError(503, "the engine has stopped")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    card = {
        "id": model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "berrylm",
        "max_model_len": llm.config.max_position_embeddings,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")  # a path: names may hold slashes
    async def one_model(model: str) -> dict[str, Any]:
        check_model(model, model_name)
        return card

    return app


def add_error_handlers(app: FastAPI) -> None:
    """Whatever goes wrong, the client reads OpenAI's error object."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(validation_error(error).body, 400)

    @app.exception_handler(HTTPException)  # the framework's own: no such route or method, a body that can't be read
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(ApiError(error.status_code, str(error.detail)).body, error.status_code, error.headers)

    @app.exception_handler(EngineStopped)
    async def stopped(_: Request, error: EngineStopped) -> JSONResponse:
        return JSONResponse(ApiError(503, str(error)).body, 503)

    @app.exception_handler(Exception)  # a fault of ours: the log has it, the client need not know more
    async def fault(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(ApiError(500, "internal error").body, 500)


def validation_error(error: RequestValidationError) -> ApiError:
    """The first fault pydantic found, with the field it concerns."""
    fault = error.errors()[0]
    where = [str(x) for x in fault["loc"] if x != "body"]
    field = where[0] if where and fault["type"] != "json_invalid" else None
    if field == "sampling_params" and len(where) > 1:
        field = f"sampling_params.{where[1]}"
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"{'.'.join(where)}: this field is not supported", field, "unsupported_field")
    return ApiError(400, f"{field or 'body'}: {fault['msg']}", field)
