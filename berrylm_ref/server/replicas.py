"""Replicas on Ray Serve (extra ``scale``): whole models with caches of their own; prompts that begin alike go to the same one.

    client ── HTTP ──> Serve's proxy ──> Front ── handle, session_id ──> Replica: create_app(LLM(...)) ── events back ──> client

Which replica is Ray Serve's to choose: its ConsistentHashRouter sends equal session ids to the same one, tries the next where
that is full, and forgets one that died; Serve's controller starts another in its place. ``Front`` only says which requests
belong together. All routes, limits and errors are those of the server; an answer's events pass one by one.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..engine.llm import LLM
from .app import create_app
from .limits import Limits
from .protocol import ApiError

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
IDS, CHARACTERS = 64, 256  # of a prompt's beginning: less can't be reused, the states are kept at every 64th token
HEALTH_SECONDS = 2


class Replica:
    """One model and its application."""

    def __init__(self, folder: str, name: str, limits: Limits, api_key: str | None, options: dict[str, Any]):
        self.llm = LLM(folder, **options)
        self.app = create_app(self.llm, name, limits, api_key)
        self.app.state.engine.start()

    def check_health(self) -> None:
        """Serve asks every few seconds, and replaces a replica that raises."""
        if not self.app.state.engine.alive:
            raise RuntimeError("the engine has stopped")

    async def ask(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """The ASGI messages that answer one call. Closed early, the call is cancelled as if its client had left."""
        messages: asyncio.Queue = asyncio.Queue()
        incoming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not incoming:
                await asyncio.Event().wait()  # the client is still there; when it leaves, the task is cancelled
            return incoming.pop()

        task = asyncio.create_task(self.app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    return
            task.result()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


class Front:
    """Hands every call to a replica, and its answer back while it is made."""

    def __init__(self, replicas: DeploymentHandle):
        self._replicas = replicas.options(method_name="ask", stream=True)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        scope = {name: request.scope[name] for name in ("type", "http_version", "method", "path", "query_string", "headers")}
        scope |= {"asgi": {"version": "3.0"}, "scheme": "http", "raw_path": scope["path"].encode(), "root_path": ""}
        messages = self._replicas.options(session_id=key_of(body)).remote(scope, body)
        try:
            start = await anext(messages)
        except RayError:
            error = ApiError(503, "the replica of this request has ended; another one takes the next", code="replica_ended")
            return JSONResponse(error.body, error.status)
        response = StreamingResponse(parts(messages), start["status"])
        response.raw_headers = start["headers"]
        return response


async def parts(messages: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """The body of an answer. A replica that ends in mid-answer breaks the connection: half an answer must not look whole."""
    async for message in messages:
        yield message.get("body", b"")


def key_of(body: bytes) -> str:
    """Equal for calls whose prompts begin alike: a conversation keeps its key from turn to turn. A hash, as it is a header."""
    try:
        asked = json.loads(body)
    except ValueError:  # the replica will say so
        return ""
    return hashlib.sha256(json.dumps(beginning(asked)).encode()).hexdigest() if isinstance(asked, dict) else ""


def beginning(asked: dict[str, Any]) -> Any:
    """What decides: up to the first question of a chat, the first tokens or characters of any other prompt."""
    messages = asked.get("messages")
    if isinstance(messages, list):
        first = next((i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "user"), 0)
        return [asked.get("tools"), messages[: first + 1]]
    prompt = next((asked[name] for name in ("prompt", "input_ids", "text") if asked.get(name)), "")
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    return prompt[:IDS] if isinstance(prompt, list) else str(prompt)[:CHARACTERS]


def deployment(
    folder: str | Path,
    replicas: int,
    name: str,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    **options: Any,
) -> serve.Application:
    """What ``serve.run`` takes: ``replicas`` models of ``folder``. options: those of ``LLM``; on "cuda" each has ``tp`` GPUs."""
    limits = limits or Limits()
    gpus = options.get("tp", 1) if options.get("device") == "cuda" else 0
    replica = serve.deployment(
        Replica,
        num_replicas=replicas,
        max_ongoing_requests=limits.calls,
        health_check_period_s=HEALTH_SECONDS,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    front = serve.deployment(Front, max_ongoing_requests=limits.calls * replicas, ray_actor_options={"num_cpus": 0})
    return front.bind(replica.bind(str(Path(folder).resolve()), name, limits, api_key, options))
