"""What the commands share: options, and how a refusal ends one."""

from pathlib import Path
from typing import Annotated

import typer

from ..shipped import shipped_checkpoint

SHIPPED = shipped_checkpoint()  # what every command takes unless it is given another
Model = Annotated[
    Path,
    typer.Option(help="checkpoint folder: config.json, safetensors, maybe tokenizer.json", show_default="the shipped one"),
]
Dtype = Annotated[str, typer.Option(help="float64, float32 or bfloat16")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
BackendName = Annotated[str, typer.Option("--backend", help="auto, or which implementation of the ops runs")]


class clear_errors:
    """A refusal of ours, or a file that can't be opened, ends the command with one line and status 2, not with a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, ValueError | OSError):
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
