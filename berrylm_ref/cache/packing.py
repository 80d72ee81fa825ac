"""Numbers on their way to the device: many short lists as one int64 tensor, in one copy."""

from array import array
from collections.abc import Iterable
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

SIZES = 6  # numbers at the start of a packed batch


def shapes_of(N: int, widest: int, P: int, M: int, K: int, U: int, taps: int) -> list[tuple[int, ...]]:
    """Of the parts of a packed batch, in order; K states are kept (their pairs as K numbers), U tokens are unknown."""
    return [(P,), (P,), (N + 1,), (N,), (N, widest), (M,), (N,), (P,), (K,), (K, taps), (U,), (U,), (K,)]


def starts(shapes: list[tuple[int, ...]]) -> list[int]:
    """Where each part begins behind the sizes, and the end: at 16 bytes, or Triton compiles a kernel once more."""
    return list(accumulate((-(-prod(shape) // 2) * 2 for shape in shapes), initial=SIZES))


def views(packed: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [packed[i : i + prod(shape)].view(shape) for i, shape in zip(starts(shapes), shapes, strict=False)]


def joined(rows: Iterable[Iterable[int]]) -> Tensor:
    """All of ``rows`` behind each other, an int64 tensor on the host; thousands of numbers by a third of what ``ints`` takes."""
    out = array("q")
    for row in rows:
        out.fromlist(list(row))
    return torch.frombuffer(out, dtype=torch.long) if out else torch.empty(0, dtype=torch.long)


def ints(values: Iterable[int]) -> Tensor:
    """An int64 tensor on the host."""
    return torch.tensor(list(values), dtype=torch.long)


def upload(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """int64 tensors of the host as tensors on ``device``, in one copy, for which a GPU makes nobody wait.

    Each starts at 16 bytes: Triton compiles a kernel once more for an argument that does not.
    """
    if device.type != "cuda":
        return [part.to(device) for part in parts]
    starts = list(accumulate((-(-part.numel() // 2) * 2 for part in parts), initial=0))
    host = torch.empty(max(starts[-1], 1), dtype=torch.long, pin_memory=True)  # torch hands it on only when the copy is through
    for start, part in zip(starts, parts, strict=False):
        host[start : start + part.numel()] = part.flatten()
    there = host.to(device, non_blocking=True)
    return [there[start : start + part.numel()].view(part.shape) for start, part in zip(starts, parts, strict=False)]
