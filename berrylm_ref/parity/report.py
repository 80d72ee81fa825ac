"""A parity run for the eye: a table, windows of long documents, a picture."""

import json
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from .measure import Result
from .score import windows
from .served import COLD

WIDEST = 250  # columns of a table


def number(x: float | None, form: str = ".1e") -> str:
    return "-" if x is None else format(x, form)


def print_result(result: Result, console: Console) -> None:
    """Every number with the floor's beside it."""
    for limit in result.limits:
        console.print(limit, soft_wrap=True)
    reference, floor = result.about["reference"], result.about["floor"]
    table = Table(title=f"|delta logprob| against {reference}; below it the floor, {floor} on the same ids", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0))  # fmt: skip
    for name in ("prompts", "pass", "n", "tokens", "cached", "mean", "max", "x floor", "greedy", "decoded max", "ids as cold"):
        table.add_column(name, justify="left" if name in ("prompts", "pass") else "right", no_wrap=True)
    for x in result.lines:
        table.add_row(
            x.kind, x.stage, str(x.prompts), str(x.tokens), "?" if x.cached_tokens is None else str(x.cached_tokens),
            number(x.mean), number(x.max), number(x.ratio, ".3g"), number(x.greedy, ".1%"), number(x.decoded_max),
            "-" if x.same_ids is None else f"{x.same_ids}/{sum(row.same_ids is not None for row in chosen(result, x))}",
        )  # fmt: skip
        floors = number(x.floor_mean), number(x.floor_max), "", number(x.floor_greedy, ".1%"), number(x.floor_decoded_max)
        table.add_row("", "", "", "", "floor", *floors, "", style="dim")
    print_whole(console, table)
    for row in result.windows:
        parts = ", ".join(f"{a:.2e} ({b:.2e})" for a, b in zip(row["port"], row["floor"], strict=True))
        console.print(f"{row['name']}, {row['tokens']} tokens, means by window (floor): {parts}", soft_wrap=True)
    total = result.total
    if total.mean is not None:
        console.print(f"port {total.mean:.4g}, floor {total.floor_mean:.4g}: {total.ratio:.3g} times the floor", soft_wrap=True)
    elif total.decoded_mean is not None:
        floor, ratio = total.floor_decoded_mean, total.decoded_ratio
        console.print(f"decoded: port {total.decoded_mean:.4g}, floor {floor:.4g}: {ratio:.3g} times the floor", soft_wrap=True)
    for finding in result.findings:
        console.print(f"out of budget: {finding}", soft_wrap=True)


def chosen(result: Result, x) -> list:
    return [row for row in result.rows if x.kind == "all" or (row.kind, row.stage) == (x.kind, x.stage)]


def print_whole(console: Console, table: Table) -> None:
    """No number is cut off: where the output is narrower than the table, its lines are longer."""
    Console(file=console.file, force_terminal=console.is_terminal, width=WIDEST).print(table)


def write_json(result: Result, path: str | Path) -> None:
    Path(path).write_text(json.dumps(result.as_dict()) + "\n", encoding="utf-8")


def draw(result: Result, path: str | Path) -> None:
    """PNG: |delta logprob| as shares of tokens, and its mean along the documents. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"parity: plot: expected matplotlib to be installed, got {error}") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for side, style in (("port", "-"), ("floor", "--")):
        for name in ("prompt", "decoded"):
            x = torch.cat([getattr(getattr(row, side), name) for row in result.rows]).sort().values
            if x.numel():
                left.plot(x.clamp_min(1e-9), torch.arange(1, len(x) + 1) / len(x), style, label=f"{side}, {name} tokens")
        for row in result.rows:
            if row.kind == "document" and row.stage == COLD and row.port.prompt.numel():
                means = [max(x, 1e-9) for x in windows(getattr(row, side).prompt, 256)]
                right.plot([256 * i for i in range(len(means))], means, style, marker=".", label=f"{side}, {row.name}")
    left.set(xscale="log", xlabel="|delta logprob| (nats)", ylabel="share of tokens at or below", title="all tokens")
    right.set(yscale="log", xlabel="position", ylabel="mean over 256 tokens", title="documents")
    for axes in (left, right):
        if axes.has_data():
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
