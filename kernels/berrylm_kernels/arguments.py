"""What the kernels ask of their arguments. Every error is a ValueError that names operation, argument, expected, got."""

import torch
import triton
from torch import Tensor


@triton.jit
def _probe():
    pass


INTERPRETED = not isinstance(_probe, triton.JITFunction)  # TRITON_INTERPRET=1 when triton was imported
ALLOWED = (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16)


def expect_floats(op: str, **tensors: Tensor | None) -> None:
    """float32 or bfloat16 and all on one device that Triton runs on; None is skipped. Under the interpreter float32 only: its
    casts to bfloat16 truncate, and its bfloat16 dot multiplies bit patterns, both without a word."""
    first = device = None
    for name, x in tensors.items():
        if x is None:
            continue
        if device is None:
            first, device = name, x.device
            if not INTERPRETED and not x.is_cuda:
                raise ValueError(
                    f"{op}: {name}: expected a CUDA tensor (or TRITON_INTERPRET=1 before triton's import), got {device}"
                )
        if x.dtype not in ALLOWED:
            where = " under TRITON_INTERPRET=1" if INTERPRETED else ""
            raise ValueError(f"{op}: {name}: expected {' or '.join(map(str, ALLOWED))}{where}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{op}: {name}: expected device {device}, that of {first}, got {x.device}")


def expect_shape(op: str, name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is None or x.shape != shape:
        raise ValueError(f"{op}: {name}: expected shape {shape}, got {None if x is None else tuple(x.shape)}")


def expect_integers(op: str, device: torch.device, **tensors: Tensor) -> None:
    """int32 or int64 index tensors on ``device``."""
    for name, x in tensors.items():
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{op}: {name}: expected int32 or int64, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{op}: {name}: expected device {device}, got {x.device}")


def expect_dtype(op: str, dtype: torch.dtype, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dtype != dtype:
            raise ValueError(f"{op}: {name}: expected {dtype}, got {x.dtype}")


def packed_rows(x: Tensor) -> Tensor:
    """x as [rows, width], each row contiguous; copied only where no view does it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def cdiv(n: int, size: int) -> int:
    """triton.cdiv, and below triton.next_power_of_2, take the host 2 us each."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0


def warps_for(elements: int, per_warp: int = 512) -> int:
    """Warps for a tile of so many elements; the default gives a lane two 16-byte loads of bfloat16."""
    return max(1, min(16, next_power_of_2(elements) // per_warp))
