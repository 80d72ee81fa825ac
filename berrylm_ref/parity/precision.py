"""fp32 products that are fp32: an environment variable or a program may have told a GPU to round their factors to TF32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_fp32() -> Iterator[None]:
    """A trusted side in TF32 is 1e-3 off by itself, and every other one seems to be."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
