"""The short causal convolution of a packed batch in one launch, twin of ``berrylm_ref/ops/conv.py``.

A program owns BT * STEPS packed rows and BC channels. Most lie inside one sequence, past its first W - 1 tokens: such a program
loads the taps' weights once and reads x at W shifts, which mostly hit the cache. In the others each row finds its own sequence,
and a tap that would lie before the sequence's first token comes from its window. The last N programs of the grid write the
new windows, one sequence each.

Symbols: P packed rows, C channels, N sequences, W taps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import cdiv, expect_floats, expect_integers, expect_shape, next_power_of_2, packed_rows
from .launch import launch

BT, BC = 16, 256  # rows and channels of a tile
MANY = 2048  # rows from which on a program takes four tiles instead of one, to load its weights less often
BA = 8  # rows of a tile across sequences: fewer, or its addresses would take the registers of the common case


@triton.jit
def _owners(o_t, cu_seqlens, N, BT: tl.constexpr, BN: tl.constexpr):
    """The sequence of each row: how many sequences end at or before it. An empty one owns no row."""
    b_n = tl.zeros([BT], tl.int32)
    for i in range(0, N, BN):
        o_n = i + tl.arange(0, BN)
        b_ends = tl.load(cu_seqlens + 1 + o_n, mask=o_n < N, other=2147483647)
        b_n += tl.sum((b_ends[None, :] <= o_t[:, None]).to(tl.int32), 1)
    return b_n


@triton.jit
def _store_silu(p_out, b_y, mask):
    tl.store(p_out, (b_y / (1.0 + tl.exp(-b_y))).to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def _rows_inside(
    x, weight, out, stride_x, t0, o_c, C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STEPS: tl.constexpr
):
    """Rows t0 .. t0 + BT * STEPS - 1, all of whose taps lie in x."""
    m_c = (o_c < C)[None, :]
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (tl.load(weight + o_c * W + w, mask=o_c < C, other=0.0).to(tl.float32)[None, :],)
    for i in range(STEPS):
        o_t = (t0 + i * BT + tl.arange(0, BT)).to(tl.int64)[:, None]
        p_x = x + o_t * stride_x + o_c[None, :]
        b_y = tl.zeros([BT, BC], tl.float32)
        for w in tl.static_range(W):
            b_y += tl.load(p_x + (w - W + 1) * stride_x, mask=m_c, other=0.0).to(tl.float32) * taps[w]
        _store_silu(out + o_t * C + o_c[None, :], b_y, m_c)


@triton.jit
def _rows_across(
    x, weight, windows, cu_seqlens, out, stride_x, P, N, t0, o_c,
    C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows t0 .. t0 + BT - 1 of any sequences. Of the two loads of a tap at most one is unmasked."""
    o_t = t0 + tl.arange(0, BT)
    m_c = (o_c < C)[None, :]
    b_n = _owners(o_t, cu_seqlens, N, BT, BN)
    m_t = (o_t < P) & (b_n < N)
    b_into = o_t - tl.maximum(tl.load(cu_seqlens + b_n, mask=m_t, other=0), 0).to(tl.int32)  # tokens before this one
    p_x = x + (o_t.to(tl.int64) * stride_x)[:, None] + o_c[None, :]
    p_window = windows + (b_n.to(tl.int64) * (C * (W - 1)))[:, None] + (o_c * (W - 1))[None, :]
    b_y = tl.zeros([BT, BC], tl.float32)
    for w in tl.static_range(W):
        at = b_into - (W - 1) + w  # the tap's token; before the sequence's first it is -1 and less
        m_x, m_w = (m_t & (at >= 0))[:, None] & m_c, (m_t & (at < 0))[:, None] & m_c
        b_x = tl.load(p_x + (w - W + 1) * stride_x, mask=m_x, other=0.0).to(tl.float32)
        b_x += tl.load(p_window + (at + W - 1)[:, None], mask=m_w, other=0.0).to(tl.float32)
        b_y += b_x * tl.load(weight + o_c * W + w, mask=o_c < C, other=0.0).to(tl.float32)[None, :]
    _store_silu(out + (o_t.to(tl.int64) * C)[:, None] + o_c[None, :], b_y, m_t[:, None] & m_c)


@triton.jit
def _new_window(x, windows, cu_seqlens, new_windows, stride_x, P, i_n, o_c, C: tl.constexpr, W: tl.constexpr):
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n), 0), P)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n + 1), begin), P)
    m_c = o_c < C
    o_w = i_n.to(tl.int64) * (C * (W - 1)) + o_c * (W - 1)
    for w in tl.static_range(W - 1):
        o_x = end - (W - 1) + w
        if o_x >= begin:
            b_x = tl.load(x + o_x.to(tl.int64) * stride_x + o_c, mask=m_c, other=0.0).to(new_windows.dtype.element_ty)
        else:  # shorter than the window: an older tap moves up, and without a token none moves at all
            b_x = tl.load(windows + o_w + (o_x - begin + W - 1), mask=m_c, other=0.0)
        tl.store(new_windows + o_w + w, b_x, mask=m_c)


@triton.jit(do_not_specialize=["P", "N"])
def _conv_kernel(
    x, weight, windows, cu_seqlens, out, new_windows, stride_x, P, N,
    C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BA: tl.constexpr, BC: tl.constexpr,
    STEPS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(P, BT * STEPS)
    i_t = tl.program_id(0) // tl.cdiv(C, BC)
    o_c = tl.program_id(0) % tl.cdiv(C, BC) * BC + tl.arange(0, BC)
    if i_t < tiles:
        t0 = i_t * (BT * STEPS)
        i_n = tl.sum(_owners(t0 + tl.zeros([1], tl.int32), cu_seqlens, N, 1, BN), 0)
        begin = tl.load(cu_seqlens + i_n, mask=i_n < N, other=0)
        end = tl.minimum(tl.load(cu_seqlens + i_n + 1, mask=i_n < N, other=0), P)
        if (begin >= 0) & (t0 - begin >= W - 1) & (end >= t0 + BT * STEPS):
            _rows_inside(x, weight, out, stride_x, t0, o_c, C, W, BT, BC, STEPS)
        else:
            for t in range(t0, tl.minimum(t0 + BT * STEPS, P), BA):
                _rows_across(x, weight, windows, cu_seqlens, out, stride_x, P, N, t, o_c, C, W, BA, BC, BN)
    else:
        _new_window(x, windows, cu_seqlens, new_windows, stride_x, P, i_t - tiles, o_c, C, W)


def causal_conv(x: Tensor, weight: Tensor, windows: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """y_t = silu(sum_w weight[:, w] * x[t - W + 1 + w]) per channel and sequence, where the window stands before token 0.

    x [P, C] float32 or bfloat16, packed raw projections; weight [C, W]; windows [N, C, W - 1], the last W - 1 raw inputs of
    each sequence, oldest first (zeros for a new one); cu_seqlens [N + 1] int32 or int64, from 0 to P. Accumulated and
    activated in fp32, cast once.

    Returns y [P, C] and the new windows [N, C, W - 1] in the windows' dtype; an empty sequence keeps its window bit for bit.
    """
    _check(x, weight, windows, cu_seqlens)
    x = packed_rows(x)
    (P, C), N, W = x.shape, windows.shape[0], weight.shape[1]
    windows = windows.contiguous()
    y, new_windows = x.new_empty((P, C)), torch.empty_like(windows)
    steps = 4 if P >= MANY else 1
    if P + N:
        launch(
            _conv_kernel, (cdiv(C, BC) * (cdiv(P, BT * steps) + N),),
            (x, weight.contiguous(), windows, cu_seqlens.contiguous(), y, new_windows), (x.stride(0), P, N),
            dict(C=C, W=W, BT=BT, BA=BA, BC=BC, STEPS=steps, BN=min(128, next_power_of_2(max(N, 1)))), num_warps=8,
        )  # fmt: skip
    return y, new_windows


def _check(x: Tensor, weight: Tensor, windows: Tensor, cu_seqlens: Tensor) -> None:
    op = "causal_conv"
    if x.dim() != 2:
        raise ValueError(f"{op}: x: expected [P, C], got {tuple(x.shape)}")
    C = x.shape[1]
    if weight.dim() != 2 or weight.shape[0] != C or not weight.shape[1]:
        raise ValueError(f"{op}: weight: expected shape ({C}, kernel), got {tuple(weight.shape)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"{op}: cu_seqlens: expected [N + 1], got {tuple(cu_seqlens.shape)}")
    expect_shape(op, "windows", windows, (cu_seqlens.numel() - 1, C, weight.shape[1] - 1))
    expect_floats(op, x=x, weight=weight, windows=windows)
    expect_integers(op, x.device, cu_seqlens=cu_seqlens)
