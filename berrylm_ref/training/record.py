"""The record of a run: one small JSON and one picture beside the checkpoint."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

POINTS = 240  # of the loss curve that are kept
LOG, PICTURE = "training_log.json", "training_loss.png"
PACKAGES = ("torch", "triton", "flash-linear-attention", "fla-core", "tokenizers", "numpy")


def machine() -> dict:
    """Where a number was measured: processor, GPU, versions."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found = {"cpu": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "versions": versions}
    found["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    if torch.cuda.is_available():
        found["gpu"], found["cuda"] = torch.cuda.get_device_name(0), torch.version.cuda
    return found


def processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the code that runs, None outside a checkout."""
    here = Path(__file__).parent
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def thin(points: list, most: int = POINTS) -> list:
    """Every n-th point, the last one always."""
    stride = max(1, -(-len(points) // most))
    return points[::stride] if not points or points[::stride][-1] is points[-1] else [*points[::stride], points[-1]]


def write_log(folder: str | Path, log: dict) -> None:
    """The log as JSON, the curve thinned out; it appears whole or not at all."""
    path = Path(folder) / LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(log | {"curve": thin(log["curve"]), "kinds": thin(log["kinds"], 48)}, indent=1)
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n")
    os.replace(partial, path)


def plot_loss(folder: str | Path, log: dict) -> None:
    """The loss over the steps, all together and by kind, as a PNG."""
    try:
        import matplotlib
    except ImportError as error:
        print(f"no loss plot: expected matplotlib (berrylm-ref[train]), got {error}", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    axes.plot([p[0] for p in log["curve"]], [p[1] for p in log["curve"]], color="black", linewidth=0.6, label="all")
    for kind in sorted({kind for entry in log["kinds"] for kind in entry["kinds"]}):
        points = [(e["step"], e["kinds"][kind]["loss"]) for e in log["kinds"] if kind in e["kinds"]]
        axes.plot(*zip(*points, strict=True), linewidth=1.0, label=kind)
    axes.set(xlabel="step", ylabel="cross entropy a target token (nat)", yscale="log")
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(Path(folder) / PICTURE, dpi=100)
    pyplot.close(figure)
