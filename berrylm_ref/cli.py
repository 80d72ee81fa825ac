"""The ``berrylm`` command."""

import logging
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[Path, typer.Option(help="checkpoint folder: config.json, safetensors, maybe tokenizer.json")]
Dtype = Annotated[str, typer.Option(help="float64, float32 or bfloat16")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
BackendName = Annotated[str, typer.Option("--backend", help="auto, or which implementation of the ops runs")]


@app.callback()
def setup() -> None:
    """BerryLM reference: generate from a checkpoint or serve it."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="text of the prompt")] = None,
    ids: Annotated[str | None, typer.Option(help="token ids of the prompt, separated by spaces or commas")] = None,
    max_tokens: Annotated[int, typer.Option(help="most new tokens")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="fixes the draws")] = None,
    shadow: Annotated[Path | None, typer.Option(help="CSV: compare every op with its torch twin on the same tensors")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: BackendName = "auto",
) -> None:
    """Continue one prompt; prints text, or token ids when the folder has no tokenizer."""
    from contextlib import nullcontext

    from .backend import TORCH
    from .engine.llm import LLM
    from .engine.params import SamplingParams
    from .shadow import Shadow

    if (prompt is None) == (ids is None):
        raise typer.BadParameter("expected exactly one of --prompt and --ids")
    with clear_errors():
        tokens = None if ids is None else token_ids(ids)
        llm = LLM(model, dtype=dtype, device=device, backend=backend)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        request = llm.requests(prompt if tokens is None else tokens, params)[0]
        with nullcontext() if shadow is None else Shadow(llm.model, shadow, TORCH):
            for text in llm.stream(request):
                print(text, end="", flush=True)
        print("" if llm.tokenizer else " ".join(map(str, request.output_ids)))


@app.command()
def shadow_report(
    file: Annotated[Path, typer.Argument(help="CSV written by generate --shadow")],
    budget: Annotated[float | None, typer.Option(help="largest rel-L2 allowed; default: by dtype")] = None,
) -> None:
    """Summarise a shadow run: error of each op, and the first layer that leaves its budget (then the exit status is 1)."""
    from rich.console import Console
    from rich.table import Table

    from .shadow import report

    with clear_errors():
        summary, first = report(file, budget)
        table = Table("op", "calls", "min", "median", "p99", "max", title="rel-L2 of each op against its torch twin")
        for row in summary:
            table.add_row(row["op"], str(row["calls"]), *(f"{row[k]:.1e}" for k in ("min", "median", "p99", "max")))
        Console().print(table)
        if first is None:
            print("every call is within its budget")
        else:
            print(f"first out of budget: layer {first['layer']}, {first['op']}, rel-L2 {first['rel_l2']:.1e}, {first['shape']}")
            raise typer.Exit(1)


@app.command()
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

            from .server.app import create_app
        except ImportError as error:
            raise ValueError(f"serve: expected the extra 'server' to be installed (berrylm-ref[server]), got {error}") from error
        from .engine.llm import LLM

        llm = LLM(model, dtype=dtype, device=device, backend=backend)
        name = served_model_name or model.resolve().name
        prompt = '"Hello"' if llm.tokenizer else "[1, 2, 3]"
        print("try:")
        print(f"  curl http://{host}:{port}/v1/completions -H 'Content-Type: application/json' \\")
        print(f"""    -d '{{"model": "{name}", "prompt": {prompt}, "max_tokens": 16, "temperature": 0}}'""", flush=True)
        uvicorn.run(create_app(llm, name), host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)


def token_ids(text: str) -> list[int]:
    try:
        return [int(x) for x in text.replace(",", " ").split()]
    except ValueError as error:
        raise ValueError(f"generate: ids: expected integers separated by spaces or commas, got {text!r}") from error


class clear_errors:
    """A refusal of ours, or a file that can't be opened, ends the command with one line and status 2, not with a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, ValueError | OSError):
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


def main() -> None:
    app()


if __name__ == "__main__":
    main()
