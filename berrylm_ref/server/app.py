"""The HTTP application: routes, and errors in OpenAI's form."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..engine.background import BackgroundEngine, EngineStopped
from ..engine.llm import LLM
from . import completions, generate
from .protocol import ApiError


def create_app(llm: LLM, model_name: str) -> FastAPI:
    """Serve ``llm`` under ``model_name``; its engine runs in a thread from the app's start to its end."""
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.engine = BackgroundEngine(llm.engine)
        yield
        await asyncio.to_thread(app.state.engine.stop)

    app = FastAPI(title="BerryLM reference", lifespan=lifespan)
    app.state.llm, app.state.model_name = llm, model_name

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

    for router in (completions.router, generate.router):
        app.include_router(router)
    return app


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
