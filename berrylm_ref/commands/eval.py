"""``berrylm eval``: how good a checkpoint is."""

from pathlib import Path
from typing import Annotated

import typer

from .common import BackendName, Device, Dtype, Model, clear_errors


def evaluate(
    model: Model,
    problems: Annotated[int, typer.Option(help="questions of a whole task", min=1)] = 200,
    tasks: Annotated[str | None, typer.Option(help="names of tasks, separated by semicolons; default: all")] = None,
    batch: Annotated[int | None, typer.Option(help="questions in one forward", min=1)] = None,
    kda_intra: Annotated[str, typer.Option(help="scores of the linear layers: dyadic, difference, clamped or sglang")] = "dyadic",
    out: Annotated[Path | None, typer.Option(help="JSON to write")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: BackendName = "auto",
) -> None:
    """Held-out word problems, tool calls and retrieval; prints a table."""
    import json

    from ..training.evaluate import evaluate, print_table

    with clear_errors():
        only = None if tasks is None else [name.strip() for name in tasks.split(";")]
        result = evaluate(
            model, problems=problems, device=device, backend=backend, dtype=dtype, kda_intra=kda_intra, batch=batch, only=only
        )
        print_table(result)
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(result, indent=1) + "\n")
