"""Between the projections and the scores: per-head norm and partial rotary embedding of q and k in one launch, which also
appends k and v to their pages.

A program owns BR heads, of q, k or v. A rotated channel needs its partner half a rotary width away: both halves are read a second
time (a hit in the cache) and normed by the same factor, so no row has to be taken apart in registers.

Symbols: P tokens, D head size, R rotary channels, BR rows a program (row = token * heads + head), BD and BH the
powers of two over D and R / 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import cdiv, expect_dtype, expect_floats, expect_integers, expect_shape, next_power_of_2, warps_for
from .launch import launch
from .overlap import await_earlier, options, overlaps

TILE = 2048  # elements a program holds


@triton.jit
def _page_rows(pages, places, i_p, i_h, m_r, heads: tl.constexpr, D: tl.constexpr):
    """Where head i_h of token i_p lies in the pages."""
    return pages + (tl.load(places + i_p, mask=m_r, other=0).to(tl.int64) * heads + i_h) * D


@triton.jit
def _norm_rope_rows(
    x, weight, cos, sin, out, pages, places, rows, stride_p, stride_h, o_r, eps,
    heads: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, APPEND: tl.constexpr,
):  # fmt: skip
    dtype = out.dtype.element_ty
    i_p, i_h = o_r // heads, o_r % heads  # [BR, 1]
    m_r = o_r < rows
    p_x, p_out = x + i_p * stride_p + i_h * stride_h, out + o_r * D
    p_page = p_out
    if APPEND:
        p_page = _page_rows(pages, places, i_p, i_h, m_r, heads, D)

    o_d = tl.arange(0, BD)[None, :]
    b_x = tl.load(p_x + o_d, mask=m_r & (o_d < D), other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(b_x * b_x, 1)[:, None] / D + eps)
    b_x = b_x * factor * (1.0 + tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32))
    m_rest = m_r & (o_d >= R) & (o_d < D)
    tl.store(p_out + o_d, b_x.to(dtype), mask=m_rest)
    if APPEND:
        tl.store(p_page + o_d, b_x.to(dtype), mask=m_rest)

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
    b_a = (b_ac.to(dtype).to(tl.float32) - b_bs.to(dtype).to(tl.float32)).to(dtype)
    b_b = (b_bc.to(dtype).to(tl.float32) + b_as.to(dtype).to(tl.float32)).to(dtype)
    tl.store(p_out + o_a, b_a, mask=m)
    tl.store(p_out + HALF + o_a, b_b, mask=m)
    if APPEND:
        tl.store(p_page + o_a, b_a, mask=m)
        tl.store(p_page + HALF + o_a, b_b, mask=m)


@triton.jit(do_not_specialize=["P", "eps"])
def _qk_norm_rope_kernel(
    q, k, v, q_weight, k_weight, cos, sin, q_out, k_out, k_pages, v_pages, places,
    stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, P, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
    APPEND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        await_earlier()
    i_r = tl.program_id(0).to(tl.int64)
    of_q, of_k = tl.cdiv(P * HQ, BR), tl.cdiv(P * HK, BR)
    o_r = tl.arange(0, BR)[:, None]
    if i_r < of_q:
        _norm_rope_rows(
            q, q_weight, cos, sin, q_out, None, None, P * HQ, stride_q, stride_qh, i_r * BR + o_r, eps,
            HQ, D, R, BD, BH, False,
        )  # fmt: skip
    elif i_r < of_q + of_k:
        _norm_rope_rows(
            k, k_weight, cos, sin, k_out, k_pages, places, P * HK, stride_k, stride_kh, (i_r - of_q) * BR + o_r, eps,
            HK, D, R, BD, BH, APPEND,
        )  # fmt: skip
    elif APPEND:
        o_v, o_d = (i_r - of_q - of_k) * BR + o_r, tl.arange(0, BD)[None, :]
        m_v = o_v < P * HK
        b_v = tl.load(v + o_v // HK * stride_v + o_v % HK * stride_vh + o_d, mask=m_v & (o_d < D), other=0.0)
        tl.store(_page_rows(v_pages, places, o_v // HK, o_v % HK, m_v, HK, D) + o_d, b_v, mask=m_v & (o_d < D))


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    output_gate: bool,
    append: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split off the gate, norm each head (zero-centred), rotate the first channels (rotate-half form).

    q [P, heads, 2D] with ``output_gate``, each head's rows being [query | gate], else [P, heads, D]; k [P, kv_heads, D]; weights
    [D]; cos and sin [P, rotary_dim] in q's dtype. ``append`` = (v, k_pages, v_pages, places): the keys and v [P, kv_heads, D]
    are also written into contiguous pages [pages, page_size, kv_heads, D], token p at places[p] = page * page_size + offset,
    which nobody checks.

    Returns q [P, heads, D], k [P, kv_heads, D] and the gate [P, heads, D] or None; the gate is a view of the q given, not a copy.
    """
    _check(q, k, q_weight, k_weight, cos, sin, output_gate)
    if append is not None:
        _check_append(k, *append)
    v, k_pages, v_pages, places = append or (k, None, None, None)
    q, gate = q.chunk(2, -1) if output_gate else (q, None)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (P, HQ, D), HK, R = q.shape, k.shape[1], cos.shape[1]
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    BD = next_power_of_2(D)
    BR, pdl = max(1, TILE // BD), overlaps(P, q)
    if P:
        launch(
            _qk_norm_rope_kernel, (cdiv(P * HQ, BR) + (2 if append else 1) * cdiv(P * HK, BR),),
            (q, k, v, q_weight.contiguous(), k_weight.contiguous(), cos.contiguous(), sin.contiguous(), q_out, k_out,
             k_pages, v_pages, places),
            (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], P, eps),
            dict(HQ=HQ, HK=HK, D=D, R=R, BR=BR, BD=BD, BH=next_power_of_2(max(R // 2, 1)), APPEND=append is not None, PDL=pdl),
            num_warps=warps_for(BR * BD), enable_fp_fusion=False, **options(pdl),
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


def _check_append(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, places: Tensor) -> None:
    op = "qk_norm_rope"
    expect_shape(op, "v", v, tuple(k.shape))
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dim() != 4 or pages.shape[2:] != k.shape[1:] or not pages.is_contiguous():
            expected = f"contiguous [pages, page_size, {k.shape[1]}, {k.shape[2]}]"
            raise ValueError(f"{op}: {name}: expected {expected}, got {tuple(pages.shape)} with strides {pages.stride()}")
    expect_shape(op, "places", places, (k.shape[0],))
    expect_floats(op, k=k, v=v, k_pages=k_pages, v_pages=v_pages)
    expect_dtype(op, k.dtype, v=v, k_pages=k_pages, v_pages=v_pages)
    expect_integers(op, k.device, places=places)
    if not places.is_contiguous():
        raise ValueError(f"{op}: places: expected a contiguous tensor, got strides {places.stride()}")
