"""Programmatic dependent launch (compute capability 9.0 on): a kernel starts while the one before it in the stream still runs.

A decode step is a chain of several hundred short kernels, whose starts add up. What has to hold in every kernel that is
launched so, in each of its programs:

1. before ``await_earlier`` it reads weights and nothing else: other memory may be written at that moment, or still be read;
2. every path comes through ``await_earlier``, so that a kernel is not through before all those before it are.
"""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = 64  # with more rows than a decode step has, a kernel fills the GPU by itself, and programs that wait are in its way


@triton.jit
def await_earlier():
    """Wait until every earlier kernel is through, and let the next one start as soon as all programs of this one run."""
    gdc_wait()
    gdc_launch_dependents()


def overlaps(rows: int, x: Tensor) -> bool:
    """Whether kernels on so many tokens are launched so, on the device of x: the value of their flag PDL."""
    return rows <= ROWS and _can_overlap(x.device)


@cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def options(pdl: bool) -> dict[str, bool]:
    """The launch option; the interpreter does not know it."""
    return {"launch_pdl": True} if pdl else {}
