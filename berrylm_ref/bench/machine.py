"""The machine a number was measured on, and what its memory and matrix units really reach."""

import importlib.metadata
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch

COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 24}
MATMUL_SIZE = {"cuda": 8192, "cpu": 256}
REPETITIONS = 20


def machine(device: torch.device) -> dict:
    """Device, driver, versions and date: what a number needs to carry."""
    names = ("torch", "triton", "berrylm-ref")
    out = {
        "gpu": None,
        "driver": None,
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **{n: version(n) for n in names}},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    if device.type != "cuda":
        return {**out, "threads": torch.get_num_threads()}
    card = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        out["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        pass  # stays None: the numbers are good without it
    return {**out, "gpu": card.name, "multiprocessors": card.multi_processor_count, "memory_bytes": card.total_memory}


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def folder_name(machine: dict) -> str:
    """h200 of "NVIDIA H200"; cpu without a GPU."""
    return machine["gpu"].lower().replace("nvidia", "").split()[0] if machine["gpu"] else "cpu"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(fn: Callable[[], object], device: torch.device, repetitions: int = REPETITIONS) -> float:
    """Median time of one call, on the device's own clock where it has one."""
    fn()
    times = []
    for _ in range(repetitions):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            fn()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            fn()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def ceilings(device: torch.device) -> dict[str, float]:
    """Bytes read and written a second by a large copy, and FLOP/s of a square product of random data, bf16 on a GPU."""
    count, n = COPY_BYTES[device.type], MATMUL_SIZE[device.type]
    x, y = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    x.random_()
    copy = median_seconds(lambda: y.copy_(x), device)
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    b = torch.randn_like(a)
    product = median_seconds(lambda: a @ b, device)
    return {"copy_bytes_per_s": 2 * count / copy, "matmul_flops_per_s": 2 * n**3 / product, "matmul_size": n}
