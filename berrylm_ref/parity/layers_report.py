"""A comparison of layers for the eye: a table, the verdict, a picture, JSON."""

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .layers import LayerReport
from .report import print_whole


def print_layers(report: LayerReport, console: Console) -> None:
    table = Table(title=f"{report.b} against {report.a}; the floor is {report.floor_of}")
    for name in ("layer", "rel-L2", "floor", "x floor", "growth", "worst tensor in lockstep", "rel-L2", "budget"):
        table.add_column(name, justify="left" if name.startswith("worst") else "right", no_wrap=True)
    for row in report.by_layer():
        mark = " <" if row["layer"] == report.first_layer else ""
        ratio = f"{row['error'] / row['floor']:.2f}" if row["floor"] else "-"
        growth = "-" if row["growth"] is None else f"{row['growth']:.2f}"
        op = ("-", "-", "-") if row["op"] is None else (row["op"], f"{row['op_error']:.1e}", f"{row['op_budget']:.1e}")
        table.add_row(f"{row['layer']}{mark}", f"{row['error']:.2e}", f"{row['floor']:.2e}", ratio, growth, *op)
    print_whole(console, table)
    growth, floor = report.growth, report.floor
    console.print(f"logits: rel-L2 {growth.logits:.2e}, floor {floor.logits:.2e}", soft_wrap=True)
    console.print(f"top-1 agreement {growth.top1:.2%}, floor {floor.top1:.2%}, {len(report.rows)} tokens", soft_wrap=True)
    if report.left_out:
        console.print(f"left out of the moe rows: {report.left_out} tokens whose choice of experts is a near-tie", soft_wrap=True)
    console.print(verdict(report), soft_wrap=True)


def verdict(report: LayerReport) -> str:
    """One line that says where to look."""
    if report.why_no_ops:
        first = report.first_layer
        where = "every layer is within budget" if first is None else f"first layer out of budget: {first}"
        return f"{where} ({report.why_no_ops}, so no op is named)"
    if report.found is not None:
        return f"out of budget: {report.found.sentence()}"
    if report.first_layer is not None:
        return (
            f"layer {report.first_layer} is the first that leaves its budget running free, yet every op is within its own on the "
            "same inputs: small errors that add up, or a choice of experts that rounding decides"
        )
    return "every layer and every op is within budget"


def layers_json(report: LayerReport) -> dict:
    return {
        "a": report.a, "b": report.b, "floor_of": report.floor_of, "layers": report.by_layer(),
        "top1": report.growth.top1, "floor_top1": report.floor.top1, "logits": report.growth.logits,
        "floor_logits": report.floor.logits, "first_layer": report.first_layer, "left_out": report.left_out,
        "found": report.found and asdict(report.found), "verdict": verdict(report), "checks": [asdict(c) for c in report.checks],
    }  # fmt: skip


def write_layers(report: LayerReport, path: str | Path) -> None:
    Path(path).write_text(json.dumps(layers_json(report)) + "\n", encoding="utf-8")


def draw_layers(report: LayerReport, path: str | Path) -> None:
    """PNG: error over the layers, and where the ops stand in their budgets. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"parity layers: plot: expected matplotlib to be installed, got {error}") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(report.growth.layers, "o-", label=f"{report.b} against {report.a}")
    left.plot(report.floor.layers, "s--", label=f"floor: {report.floor_of}")
    left.set(yscale="log", xlabel="layer", ylabel="rel-L2 of the stream", title="running free")
    left.legend(fontsize="small")
    for op in dict.fromkeys(check.op for check in report.checks):
        found = [check for check in report.checks if check.op == op]
        right.plot([c.layer for c in found], [max(c.error / c.budget, 1e-6) for c in found], ".", label=op)
    right.axhline(1, color="black", linewidth=1)
    right.set(yscale="log", xlabel="layer", ylabel="error / budget", title="op by op, on the same inputs")
    if report.checks:
        right.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
