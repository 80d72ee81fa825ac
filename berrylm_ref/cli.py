"""The ``berrylm`` command."""

import logging

import typer

from .commands.bench import bench
from .commands.chat import chat
from .commands.eval import evaluate
from .commands.generate import generate
from .commands.parity import parity
from .commands.scale import scale
from .commands.serve import serve
from .commands.shadow_report import shadow_report
from .commands.train_nano import train_nano

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (generate, chat, shadow_report, serve, scale, train_nano):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(bench, name="bench")
app.add_typer(parity, name="parity")


@app.callback()
def setup() -> None:
    """BerryLM reference: generate from a checkpoint or serve it."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
