"""A run as a picture: how long tokens took, and what every request waited for."""

from pathlib import Path

from .timing import Run


def plot(run: Run, title: str, path: Path) -> None:
    """Write a PNG: the distributions of TTFT and TPOT, and a bar a request (waiting for its first token, then decoding)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"bench: plot: expected matplotlib to be installed (pip install matplotlib), got: {error}") from error
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplot_mosaic([["ttft", "line"], ["tpot", "line"]], width_ratios=[2, 3])
    for name in ("ttft", "tpot"):
        values = sorted(1e3 * getattr(t, name) for t in run.timings)
        shares = [(i + 1) / len(values) for i in range(len(values))]
        axes[name].step(values, shares, where="post")
        axes[name].set(xlabel=f"{name.upper()}, ms", ylabel="share of requests", ylim=(0, 1.02))
    begin = min(t.sent for t in run.timings)
    rows = range(len(run.timings))
    for label, starts, ends in (
        ("first token", [t.sent for t in run.timings], [t.first for t in run.timings]),
        ("decode", [t.first for t in run.timings], [t.last for t in run.timings]),
    ):
        widths = [end - start for start, end in zip(starts, ends, strict=True)]
        axes["line"].barh(rows, widths, left=[start - begin for start in starts], height=0.9, label=label)
    axes["line"].set(xlabel="seconds", ylabel="request, in the order sent")
    axes["line"].invert_yaxis()
    axes["line"].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
