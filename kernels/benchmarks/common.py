"""What every benchmark of the kernels shares: the machine it ran on, a timer, measured ceilings, a file for the results."""

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import torch

FLUSH_BYTES = 256 << 20  # more than any L2
RESULTS = Path(__file__).parent / "results"


def need_gpu() -> torch.device:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU, and torch.cuda.is_available() is False")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda")


def versions(*names: str) -> dict[str, str | None]:
    """Installed versions of distributions; None for one that is not installed."""
    out = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "triton", *names):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = None
    return out


def machine(*names: str) -> dict:
    """GPU, driver, versions, date: what a number needs to carry."""
    card = torch.cuda.get_device_properties(0)
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        driver = None
    return {
        "gpu": card.name,
        "multiprocessors": card.multi_processor_count,
        "l2_bytes": card.L2_cache_size,
        "driver": driver,
        "versions": versions(*names),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


class Timer:
    """Medians of graph replays in microseconds, each after L2 was flushed: by reading, since lines that a flush wrote would be
    written back at the cost of what is timed."""

    def __init__(self, reps: int = 30):
        self.reps = reps
        self.flush = torch.zeros(FLUSH_BYTES // 8, dtype=torch.int64, device="cuda")

    def replay(self, fn) -> float:
        """fn captured once and replayed; whatever fn allocates belongs to the graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fn()
            fn()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        return self.events(graph.replay)

    def events(self, fn) -> float:
        fn()
        pairs = []
        for _ in range(self.reps):
            self.flush.sum()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            fn()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3

    def host(self, fn, calls: int = 50) -> float:
        """What one eager call costs the host: a burst of calls that the GPU never makes wait, median of five bursts."""
        fn()
        bursts = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                fn()
            bursts.append((time.perf_counter() - begin) / calls * 1e6)
        torch.cuda.synchronize()
        return statistics.median(bursts)


def ceilings(timer: Timer) -> dict[str, float]:
    """Copy bandwidth (bytes read and written a second) and bf16 matrix rate on random data, as measured here."""
    n = 1 << 31
    x, y = torch.empty(n, dtype=torch.uint8, device="cuda").random_(), torch.empty(n, dtype=torch.uint8, device="cuda")
    copy = timer.events(lambda: y.copy_(x))
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    b = torch.randn_like(a)
    matmul = timer.events(lambda: a @ b)
    return {"copy_bytes_per_s": 2 * n / copy * 1e6, "bf16_flops_per_s": 2 * 8192**3 / matmul * 1e6}


class Report:
    """Collects parts. A part that fails is recorded and the others still run; ``finish`` then exits non-zero."""

    def __init__(self, name: str, *distributions: str):
        self.name = name
        self.data: dict = {"script": f"kernels/benchmarks/{name}.py", "machine": machine(*distributions), "failures": {}}

    def part(self, name: str, fn):
        """Run fn() and keep what it returns under ``name``. The guard is broad on purpose: one peer's crash must not lose
        the others' numbers. It is not silent: the failure is printed, kept and turns the exit status."""
        try:
            self.data[name] = fn()
        except Exception as error:
            traceback.print_exc()
            self.data["failures"][name] = f"{type(error).__name__}: {error}"
        sys.stdout.flush()
        return self.data.get(name)

    def fail(self, name: str, why: str) -> None:
        print(f"FAILED {name}: {why}", flush=True)
        self.data["failures"][name] = why

    def finish(self, folder: Path | None = None) -> None:
        gpu = self.data["machine"]["gpu"].lower().replace("nvidia", "").split()[0]
        folder = folder or RESULTS / gpu
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.data, indent=1) + "\n")
        print(f"wrote {path}")
        for name, why in self.data["failures"].items():
            print(f"FAILED {name}: {why}")
        sys.stdout.flush()
        if self.data["failures"]:
            sys.exit(1)


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repetitions")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file; default: results/<gpu>")
    return parser.parse_args()
