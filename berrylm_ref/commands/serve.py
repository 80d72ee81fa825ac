"""``berrylm serve``: the OpenAI-compatible server."""

import gc
import json
import shlex
from typing import Annotated

import typer

from .common import SHIPPED, BackendName, Device, Dtype, KdaIntra, Model, clear_errors


def serve(
    model: Model = SHIPPED,
    host: Annotated[str, typer.Option(help="address to listen on; any but a loopback one lets other machines in")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0: a free one", min=0, max=65535)] = 30000,
    served_model_name: Annotated[str | None, typer.Option(help="name in /v1/models; default: the folder's name")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="BERRYLM_API_KEY", help="asked for on every route but /health")] = None,
    reasoning_parser: Annotated[str, typer.Option(help="how answers are read: berrylm, the only one there is")] = "berrylm",
    tool_call_parser: Annotated[str, typer.Option(help="how calls are read: berrylm, the only one there is")] = "berrylm",
    max_body_bytes: Annotated[int, typer.Option(help="of a call's body")] = 8 * 2**20,
    body_timeout: Annotated[float, typer.Option(help="seconds for a whole body to arrive")] = 30,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="of one prompt; default: what the context holds")] = None,
    max_choices: Annotated[int, typer.Option(help="prompts x n of one call")] = 128,
    max_calls: Annotated[int, typer.Option(help="calls at a time")] = 256,
    max_queue: Annotated[int, typer.Option(help="choices that wait for a place in the batch")] = 256,
    generation_timeout: Annotated[float, typer.Option(help="seconds from a call's admission to its last token")] = 600,
    send_timeout: Annotated[float, typer.Option(help="seconds that a stream waits for its client to read on")] = 30,
    header_timeout: Annotated[float, typer.Option(help="seconds for a request's head to arrive")] = 10,
    idle_timeout: Annotated[int, typer.Option(help="seconds that a connection may idle between two requests")] = 5,
    shutdown_grace: Annotated[float, typer.Option(help="seconds that running calls have after SIGTERM or SIGINT")] = 5,
    max_running_requests: Annotated[int, typer.Option(help="sequences in one forward")] = 32,
    max_total_tokens: Annotated[int | None, typer.Option(help="KV memory in tokens; default: by the memory there is")] = None,
    kda_intra: KdaIntra = "dyadic",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: BackendName = "auto",
    tp: Annotated[int, typer.Option(help="processes that share every layer, a GPU each; if one dies, the server ends")] = 1,
) -> None:
    """Serve an OpenAI-compatible API until a signal: the first lets running calls finish, the second doesn't."""
    with clear_errors():
        try:
            from ..server.app import create_app
            from ..server.graceful import GracefulServer, bound
            from ..server.limits import Limits
        except ImportError as error:
            raise ValueError(f"serve: expected the extra 'server' to be installed (berrylm-ref[server]), got {error}") from error
        from ..engine.llm import LLM
        from ..shipped import served_name

        for option, value in (("reasoning_parser", reasoning_parser), ("tool_call_parser", tool_call_parser)):
            if value != "berrylm":
                raise ValueError(f"serve: {option}: expected 'berrylm', got {value!r}")
        limits = Limits(
            body_bytes=max_body_bytes,
            body_seconds=body_timeout,
            prompt_tokens=max_prompt_tokens,
            choices=max_choices,
            calls=max_calls,
            queue=max_queue,
            generation_seconds=generation_timeout,
            send_seconds=send_timeout,
        )
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            backend=backend,
            kda_intra=kda_intra,
            max_running_requests=max_running_requests,
            max_total_tokens=max_total_tokens,
            tp=tp,
        )
        if llm.ranks:
            llm.ranks.exits = True
        at = f"[{host}]" if ":" in host else host
        name = served_model_name or served_name(model)
        app = create_app(llm, name, limits, api_key)
        place = bound(host, port)
        port = place.getsockname()[1]
        print(f"try:\n  {example(llm, name, f'http://{at}:{port}', bool(api_key))}", flush=True)
        server = GracefulServer(
            app, host=host, port=port, grace=shutdown_grace, header_seconds=header_timeout, idle_seconds=idle_timeout
        )
        gc.collect()
        gc.freeze()  # a collection among all that start-up made stops every stream for a tenth of a second and more
        server.run(sockets=[place])
        llm.close()


def example(llm, name: str, url: str, key: bool) -> str:
    """A curl command for a shell: a chat where the model has a template, else a completion."""
    if llm.tokenizer and (llm.folder / "chat_template.jinja").is_file():
        route, body = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
    else:
        route, body = "completions", {"prompt": "Hello" if llm.tokenizer else [1, 2, 3], "max_tokens": 16}
    header = """ -H "Authorization: Bearer $BERRYLM_API_KEY\"""" if key else ""
    data = shlex.quote(json.dumps({"model": name, **body, "temperature": 0}))
    return f"curl {url}/v1/{route} -H 'Content-Type: application/json'{header} \\\n    -d {data}"
