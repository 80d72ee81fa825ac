"""The HTTP application: routes, and errors in OpenAI's form."""

import asyncio
import time
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from ..engine.llm import LLM
from ..engine.request import ContextLengthError
from .protocol import ApiError, CompletionRequest, completion_response


def create_app(llm: LLM, model_name: str) -> FastAPI:
    """Serve ``llm`` under ``model_name``; requests are answered one at a time, in the order they came."""
    app = FastAPI(title="BerryLM reference")
    turn, started = asyncio.Lock(), int(time.time())

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(validation_error(error).body, 400)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(ApiError(error.status_code, str(error.detail)).body, error.status_code)

    @app.get("/health")
    async def health() -> dict[str, str]:
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

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> dict[str, Any]:
        check_model(body.model, model_name)
        try:
            params = body.sampling_params()
            requests = [r for prompt in body.prompts() for r in llm.requests(prompt, params)]
            for request in requests:
                llm.check_fits(request)
        except ContextLengthError as error:
            raise ApiError(400, str(error), "prompt", "context_length_exceeded") from error
        except ValueError as error:
            raise ApiError(400, str(error), named_field(str(error))) from error
        async with turn:
            await asyncio.to_thread(llm.run, requests)
        return completion_response([r.output() for r in requests], model_name, llm)

    return app


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
