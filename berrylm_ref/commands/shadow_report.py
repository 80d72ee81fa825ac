"""``berrylm shadow-report``: what a shadow run found."""

from pathlib import Path
from typing import Annotated

import typer

from .common import clear_errors


def shadow_report(
    file: Annotated[Path, typer.Argument(help="CSV written by generate --shadow")],
    budget: Annotated[float | None, typer.Option(help="largest rel-L2 allowed; default: by dtype")] = None,
) -> None:
    """Summarise a shadow run: error of each op, and the first layer that leaves its budget (then the exit status is 1)."""
    from rich.console import Console
    from rich.table import Table

    from ..shadow import report

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
