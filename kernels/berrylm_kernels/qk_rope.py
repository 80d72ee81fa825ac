"""Between the projections and the scores: per-head norm and partial rotary embedding of q and k in one launch.

A program owns BR heads, of q or of k. A rotated channel needs its partner half a rotary width away: both halves are read a second
time (a hit in the cache) and normed by the same factor, so no row has to be taken apart in registers.

Symbols: P tokens, D head size, R rotary channels, BR rows a program (row = token * heads + head), BD and BH the
powers of two over D and R / 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import expect_dtype, expect_floats, expect_shape, warps_for

TILE = 2048  # elements a program holds


@triton.jit
def _norm_rope_rows(
    x, weight, cos, sin, out, rows, stride_p, stride_h, o_r, eps,
    heads: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    dtype = out.dtype.element_ty
    i_p = o_r // heads  # [BR, 1]
    m_r = o_r < rows
    p_x, p_out = x + i_p * stride_p + o_r % heads * stride_h, out + o_r * D

    o_d = tl.arange(0, BD)[None, :]
    b_x = tl.load(p_x + o_d, mask=m_r & (o_d < D), other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(b_x * b_x, 1)[:, None] / D + eps)
    b_x = b_x * factor * (1.0 + tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32))
    tl.store(p_out + o_d, b_x.to(dtype), mask=m_r & (o_d >= R) & (o_d < D))

    HALF: tl.constexpr = R // 2
    o_a = tl.arange(0, BH)[None, :]  # channels of the first half, each with its partner in the second
    m_h = o_a < HALF
    m = m_r & m_h
    b_a = tl.load(p_x + o_a, mask=m, other=0.0).to(tl.float32)
    b_b = tl.load(p_x + HALF + o_a, mask=m, other=0.0).to(tl.float32)
    b_a = b_a * factor * (1.0 + tl.load(weight + o_a, mask=m_h, other=0.0).to(tl.float32))
    b_b = b_b * factor * (1.0 + tl.load(weight + HALF + o_a, mask=m_h, other=0.0).to(tl.float32))
    b_a, b_b = b_a.to(dtype).to(tl.float32), b_b.to(dtype).to(tl.float32)
    p_cos, p_sin = cos + i_p * R + o_a, sin + i_p * R + o_a
    b_ac = b_a * tl.load(p_cos, mask=m, other=0.0).to(tl.float32)
    b_bs = b_b * tl.load(p_sin, mask=m, other=0.0).to(tl.float32)
    b_bc = b_b * tl.load(p_cos + HALF, mask=m, other=0.0).to(tl.float32)
    b_as = b_a * tl.load(p_sin + HALF, mask=m, other=0.0).to(tl.float32)
    # the products are rounded before they are added (enable_fp_fusion would merge a product and the sum into one bf16 fma)
    b_a = b_ac.to(dtype).to(tl.float32) - b_bs.to(dtype).to(tl.float32)
    b_b = b_bc.to(dtype).to(tl.float32) + b_as.to(dtype).to(tl.float32)
    tl.store(p_out + o_a, b_a.to(dtype), mask=m)
    tl.store(p_out + HALF + o_a, b_b.to(dtype), mask=m)


@triton.jit(do_not_specialize=["P", "eps"])
def _qk_norm_rope_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out, stride_q, stride_qh, stride_k, stride_kh, P, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    i_r = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(P * HQ, BR)
    o_r = tl.arange(0, BR)[:, None]
    if i_r < tiles:
        _norm_rope_rows(
            q, q_weight, cos, sin, q_out, P * HQ, stride_q, stride_qh, i_r * BR + o_r, eps, HQ, D, R, BD, BH
        )  # fmt: skip
    else:
        _norm_rope_rows(
            k, k_weight, cos, sin, k_out, P * HK, stride_k, stride_kh, (i_r - tiles) * BR + o_r, eps, HK, D, R, BD, BH
        )  # fmt: skip


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, output_gate: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split off the gate, norm each head (zero-centred), rotate the first channels (rotate-half form).

    q [P, heads, 2D] with ``output_gate``, each head's rows being [query | gate], else [P, heads, D]; k [P, kv_heads, D]; weights
    [D]; cos and sin [P, rotary_dim] in q's dtype. Returns q [P, heads, D], k [P, kv_heads, D] and the gate [P, heads, D] or
    None; the gate is a view of the q given, not a copy.
    """
    _check(q, k, q_weight, k_weight, cos, sin, output_gate)
    q, gate = q.chunk(2, -1) if output_gate else (q, None)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (P, HQ, D), HK, R = q.shape, k.shape[1], cos.shape[1]
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    BD = triton.next_power_of_2(D)
    BR = max(1, TILE // BD)
    if P:
        _qk_norm_rope_kernel[(triton.cdiv(P * HQ, BR) + triton.cdiv(P * HK, BR),)](
            q, k, q_weight.contiguous(), k_weight.contiguous(), cos.contiguous(), sin.contiguous(), q_out, k_out,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), P, eps, HQ, HK, D, R, BR, BD,
            triton.next_power_of_2(max(R // 2, 1)), num_warps=warps_for(BR * BD), enable_fp_fusion=False,
        )  # fmt: skip
    return q_out, k_out, gate


def _check(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, output_gate: bool) -> None:
    op = "qk_norm_rope"
    if q.dim() != 3 or q.shape[-1] % (2 if output_gate else 1):
        raise ValueError(f"{op}: q: expected [P, heads, {'2D' if output_gate else 'D'}], got {tuple(q.shape)}")
    P, D = q.shape[0], q.shape[-1] // (2 if output_gate else 1)
    if k.dim() != 3 or k.shape[0] != P or k.shape[2] != D:
        raise ValueError(f"{op}: k: expected [{P}, kv_heads, {D}], got {tuple(k.shape)}")
    expect_shape(op, "q_weight", q_weight, (D,))
    expect_shape(op, "k_weight", k_weight, (D,))
    if cos.dim() != 2 or cos.shape[0] != P or cos.shape[1] % 2 or cos.shape[1] > D:
        raise ValueError(f"{op}: cos: expected [{P}, an even width up to {D}], got {tuple(cos.shape)}")
    expect_shape(op, "sin", sin, tuple(cos.shape))
    expect_floats(op, q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    expect_dtype(op, q.dtype, k=k, cos=cos, sin=sin)
