"""Norms in one pass over each row, twins of ``berrylm_ref/ops/norm.py``: a row is read once and kept in registers.

Symbols: R rows, D width of a row, BR rows a program, BD the power of two over D.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import cdiv, expect_dtype, expect_floats, expect_shape, next_power_of_2, packed_rows, warps_for
from .launch import launch
from .overlap import await_earlier, options, overlaps

L2_EPS = 1e-6
TILE = 2048  # elements a program holds: one row of the residual stream, or 16 heads of 128


@triton.jit(do_not_specialize=["R", "eps"])
def _rms_norm_kernel(
    x, y, weight, added, out, stride_x, stride_y, R, eps,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    USE_ADD: tl.constexpr, USE_WEIGHT: tl.constexpr, IS_MEAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        await_earlier()
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    m = (o_r < R) & (o_d < D)
    b_x = tl.load(x + o_r * stride_x + o_d, mask=m, other=0.0).to(tl.float32)
    if USE_ADD:
        b_y = tl.load(y + o_r * stride_y + o_d, mask=m, other=0.0).to(tl.float32)
        b_sum = (b_x + b_y).to(added.dtype.element_ty)  # the stream goes on rounded, and so does the norm's input
        tl.store(added + o_r * D + o_d, b_sum, mask=m)
        b_x = b_sum.to(tl.float32)
    size = tl.sum(b_x * b_x, 1)[:, None]
    if IS_MEAN:
        size = size / D
    b_x = b_x * tl.rsqrt(size + eps)
    if USE_WEIGHT:
        b_x = b_x * (1.0 + tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32))
    tl.store(out + o_r * D + o_d, b_x.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["R", "eps"])
def _gated_rms_norm_kernel(
    x, z, weight, out, stride_x, stride_xh, stride_z, stride_zh, R, eps,
    H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A row is one head of one token."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    m = (o_r < R) & (o_d < D)
    b_x = tl.load(x + o_r // H * stride_x + o_r % H * stride_xh + o_d, mask=m, other=0.0).to(tl.float32)
    b_z = tl.load(z + o_r // H * stride_z + o_r % H * stride_zh + o_d, mask=m, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1)[:, None] / D + eps)
    b_y = b_w * b_y.to(x.dtype.element_ty).to(tl.float32)
    if weight.dtype == x.dtype:
        b_y = b_y.to(x.dtype.element_ty).to(tl.float32)
    b_y = b_y * (b_z / (1.0 + tl.exp(-b_z)))
    tl.store(out + o_r * D + o_d, b_y.to(out.dtype.element_ty), mask=m)


def _tile(width: int) -> tuple[int, int, int]:
    """BR, BD and warps."""
    BD = next_power_of_2(width)
    BR = max(1, TILE // BD)
    return BR, BD, warps_for(BR * BD)


def _launch_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor | None, eps: float, mean: bool) -> tuple[Tensor, Tensor]:
    """(x + y, or x itself without y; its norm)."""
    rows, others = packed_rows(x), None if y is None else packed_rows(y)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    added = x if y is None else torch.empty_like(out)
    (R, D), (BR, BD, warps) = rows.shape, _tile(x.shape[-1])
    pdl = overlaps(R, x)
    if R:
        launch(
            _rms_norm_kernel, (cdiv(R, BR),),
            (rows, others, weight, added, out), (rows.stride(0), 0 if y is None else others.stride(0), R, eps),
            dict(D=D, BR=BR, BD=BD, USE_ADD=y is not None, USE_WEIGHT=weight is not None, IS_MEAN=mean, PDL=pdl),
            num_warps=warps, **options(pdl),
        )  # fmt: skip
    return added, out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (1 + weight), in fp32 with one cast at the end (arXiv:1910.07467, zero-centred).

    x [..., D] float32 or bfloat16, weight [D].
    """
    expect_floats("rms_norm", x=x, weight=weight)
    expect_shape("rms_norm", "weight", weight, tuple(x.shape[-1:]))
    return _launch_rms_norm(x, None, weight.contiguous(), eps, True)[1]


def add_rms_norm(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(h + y, rms_norm(h + y)), the sum rounded to h's dtype first. h, y [..., D], weight [D]. Both results [..., D]."""
    expect_floats("add_rms_norm", h=h, y=y, weight=weight)
    expect_dtype("add_rms_norm", h.dtype, y=y)
    expect_shape("add_rms_norm", "y", y, tuple(h.shape))
    expect_shape("add_rms_norm", "weight", weight, tuple(h.shape[-1:]))
    return _launch_rms_norm(h, y, weight.contiguous(), eps, True)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm of x, cast to x's dtype, times the plain weight, times silu(z) in fp32, cast: the norm before the gate.

    x, z [..., V], weight [V] (centred at 1). Of [P, heads, V] any strides between tokens and between heads are read in place.
    """
    expect_floats("gated_rms_norm", x=x, z=z, weight=weight)
    expect_shape("gated_rms_norm", "z", z, tuple(x.shape))
    expect_shape("gated_rms_norm", "weight", weight, tuple(x.shape[-1:]))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.dim() != 3:
        x, z = (packed_rows(t).unsqueeze(1) for t in (x, z))
    x, z = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, z))
    (P, H, D), (BR, BD, warps) = x.shape, _tile(x.shape[-1])
    if P * H:
        launch(
            _gated_rms_norm_kernel, (cdiv(P * H, BR),),
            (x, z, weight.contiguous(), out), (*x.stride()[:2], *z.stride()[:2], P * H, eps),
            dict(H=H, D=D, BR=BR, BD=BD), num_warps=warps,
        )  # fmt: skip
    return out


def l2norm(x: Tensor, eps: float = L2_EPS) -> Tensor:
    """x * rsqrt(sum(x^2) + eps) over the last dimension, in fp32, cast at the end."""
    expect_floats("l2norm", x=x)
    return _launch_rms_norm(x, None, None, eps, False)[1]
