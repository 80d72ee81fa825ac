"""``berrylm bench``: measurements of a server or an engine (``serve``) and of the model at full size (``model``)."""

import typer

from .bench_model import model
from .bench_serve import serve

bench = typer.Typer(no_args_is_help=True, help="Measure: serve (an engine or a server under load), model (at full size).")
for command in (serve, model):
    bench.command()(command)
