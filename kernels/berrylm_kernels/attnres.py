"""The gated depth mixer and the norm behind it in one kernel, twin of ``berrylm_ref/ops/attnres.py`` (arXiv:2603.15031).

One program owns one token and meets its sources one after the other: a source is read once, and while its row is in
registers it gives its logit (one reduction for its size, one for its product with the pseudo-query) and enters a mix that is
rescaled whenever a larger logit comes (the online softmax of arXiv:1805.02867, here over depth). Then the row of the mix is
still there for the blend and for the input norm of the layer. Bytes a token: (blocks + 1) rows in, two out.

Symbols: P tokens, D width of the stream, BD the power of two over D.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import expect_dtype, expect_floats, expect_shape, next_power_of_2, packed_rows, warps_for
from .launch import launch
from .overlap import await_earlier, options, overlaps

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    """By its series near 0, where 1 - exp(-2|x|) would lose the digits that a small gate consists of."""
    s = x * x
    near = x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0)))))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(s < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def _logit(b_s, b_q, eps, D: tl.constexpr):
    """<rms_norm(s), pseudo-query>, base 2."""
    return tl.sum(b_s * b_q, 0) * tl.rsqrt(tl.sum(b_s * b_s, 0) / D + eps) * LOG2E


@triton.jit(do_not_specialize=["blocks", "eps", "norm_eps"])
def _attn_res_kernel(
    h, committed, pseudo_query, gate, norm_weight, mixed, normed,
    stride_h, stride_block, stride_row, blocks, eps, norm_eps,
    D: tl.constexpr, BD: tl.constexpr, IS_GATED: tl.constexpr, USE_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_p = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    dtype = mixed.dtype.element_ty
    b_q = tl.load(pseudo_query + o_d, mask=m_d, other=0.0).to(tl.float32)
    if PDL:
        await_earlier()
    p_row = committed + i_p * stride_row + o_d
    b_next = tl.load(p_row, mask=o_d < tl.where(blocks > 0, D, 0), other=0.0)  # always one source ahead
    b_h = tl.load(h + i_p * stride_h + o_d, mask=m_d, other=0.0).to(tl.float32)

    top = _logit(b_h, b_q, eps, D)
    total, b_mix = 1.0, b_h
    for i in range(blocks):
        b_s = b_next.to(tl.float32)
        p_row += stride_block
        b_next = tl.load(p_row, mask=o_d < tl.where(i + 1 < blocks, D, 0), other=0.0)
        logit = _logit(b_s, b_q, eps, D)
        peak = tl.maximum(top, logit)
        keep, p = tl.exp2(top - peak), tl.exp2(logit - peak)
        b_mix = b_mix * keep + b_s * p
        total = total * keep + p
        top = peak
    b_out = (b_mix / total).to(dtype)
    if IS_GATED:  # three operations, each rounded in the stream's dtype (enable_fp_fusion would merge two into one bf16 fma)
        b_t = _tanh(tl.load(gate).to(tl.float32)).to(dtype).to(tl.float32)
        b_step = (b_out.to(tl.float32) - b_h).to(dtype).to(tl.float32)
        b_out = (b_h + (b_t * b_step).to(dtype).to(tl.float32)).to(dtype)
    tl.store(mixed + i_p * D + o_d, b_out, mask=m_d)
    if USE_NORM:
        b_x = b_out.to(tl.float32)
        b_w = tl.load(norm_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / D + norm_eps) * (1.0 + b_w)
        tl.store(normed + i_p * D + o_d, b_x.to(dtype), mask=m_d)


def _launch(
    h: Tensor, committed: Tensor, pseudo_query: Tensor, gate: Tensor | None, eps: float,
    norm_weight: Tensor | None, norm_eps: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """gate None: not gated; norm_weight None: no norm."""
    P, D = h.shape
    h = packed_rows(h)
    if committed.stride(-1) != 1:
        committed = committed.contiguous()
    mixed = h.new_empty((P, D))
    normed = None if norm_weight is None else torch.empty_like(mixed)
    BD, pdl = next_power_of_2(D), overlaps(P, h)
    if P:
        norm_weight = None if norm_weight is None else norm_weight.contiguous()
        launch(
            _attn_res_kernel, (P,), (h, committed, pseudo_query.contiguous(), gate, norm_weight, mixed, normed),
            (h.stride(0), committed.stride(0), committed.stride(1), committed.shape[0], eps, norm_eps),
            dict(D=D, BD=BD, IS_GATED=gate is not None, USE_NORM=norm_weight is not None, PDL=pdl),
            num_warps=warps_for(BD), enable_fp_fusion=False, **options(pdl),
        )  # fmt: skip
    return mixed, normed


def attn_res(h: Tensor, committed: Tensor, pseudo_query: Tensor, gate: Tensor | None, eps: float, gated: bool = True) -> Tensor:
    """Softmax attention over depth, per token: the sources are the committed streams in order, then h itself.

    key_n = rms_norm(s_n) without a weight; p = softmax_n <key_n, pseudo_query>; mix = sum_n p_n s_n over the raw sources, in
    fp32, cast to h's dtype; then h + tanh(gate) * (mix - h) with tanh in fp32 and each operation rounded in h's dtype.
    Without ``gated`` the result is mix.

    h [P, D] float32 or bfloat16; committed [blocks, P, D] in h's dtype, any strides between rows and blocks, so that a
    view buffer[:blocks, :P] of a larger buffer is not copied; pseudo_query [D]; gate []. Returns [P, D].
    """
    _check("attn_res", h, committed, pseudo_query, gate, gated)
    return _launch(h, committed, pseudo_query, gate if gated else None, eps, None, 0.0)[0]


def attn_res_norm(
    h: Tensor,
    committed: Tensor,
    pseudo_query: Tensor,
    gate: Tensor | None,
    eps: float,
    gated: bool,
    norm_weight: Tensor,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """``attn_res`` and the layer's input norm: (mixed, rms_norm(mixed, norm_weight, norm_eps)), both [P, D].

    The residual goes on from the *mixed* stream, rounded to h's dtype, and so does the norm.
    """
    _check("attn_res_norm", h, committed, pseudo_query, gate, gated)
    expect_floats("attn_res_norm", h=h, norm_weight=norm_weight)
    expect_shape("attn_res_norm", "norm_weight", norm_weight, (h.shape[1],))
    return _launch(h, committed, pseudo_query, gate if gated else None, eps, norm_weight, norm_eps)


def _check(op: str, h: Tensor, committed: Tensor, pseudo_query: Tensor, gate: Tensor | None, gated: bool) -> None:
    if h.dim() != 2:
        raise ValueError(f"{op}: h: expected [P, D], got {tuple(h.shape)}")
    if committed.dim() != 3 or committed.shape[1:] != h.shape:
        raise ValueError(f"{op}: committed: expected [blocks, {h.shape[0]}, {h.shape[1]}], got {tuple(committed.shape)}")
    expect_shape(op, "pseudo_query", pseudo_query, (h.shape[1],))
    if gated and (gate is None or gate.numel() != 1):
        raise ValueError(f"{op}: gate: expected one number, got {None if gate is None else tuple(gate.shape)}")
    expect_floats(op, h=h, committed=committed, pseudo_query=pseudo_query, gate=gate if gated else None)
    expect_dtype(op, h.dtype, committed=committed)
