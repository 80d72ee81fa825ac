"""What the commands share: options, and how a refusal ends one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
KdaIntra = Annotated[str, typer.Option(help="scores of the linear layers: dyadic, difference, clamped or sglang")]
BackendName = Annotated[str, typer.Option("--backend", help="auto, or which implementation of the ops runs")]


class clear_errors:
    """A refusal of ours, or a file that can't be opened, ends the command with one line and status 2, not with a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, ValueError | OSError):
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; gives the function to call with how many of ``total`` have ended."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda ended: progress.update(task, completed=ended)
