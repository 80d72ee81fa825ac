"""``berrylm serve``: the OpenAI-compatible server."""

from typing import Annotated

import typer

from .common import BackendName, Device, Dtype, Model, clear_errors


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on", min=0, max=65535)] = 30000,
    served_model_name: Annotated[str | None, typer.Option(help="name in /v1/models; default: the folder's name")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: BackendName = "auto",
) -> None:
    """Serve an OpenAI-compatible API."""
    with clear_errors():
        try:
            import uvicorn

            from ..server.app import create_app
        except ImportError as error:
            raise ValueError(f"serve: expected the extra 'server' to be installed (berrylm-ref[server]), got {error}") from error
        from ..engine.llm import LLM

        llm = LLM(model, dtype=dtype, device=device, backend=backend)
        name = served_model_name or model.resolve().name
        prompt = '"Hello"' if llm.tokenizer else "[1, 2, 3]"
        print("try:")
        print(f"  curl http://{host}:{port}/v1/completions -H 'Content-Type: application/json' \\")
        print(f"""    -d '{{"model": "{name}", "prompt": {prompt}, "max_tokens": 16, "temperature": 0}}'""", flush=True)
        uvicorn.run(create_app(llm, name), host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
