"""Mixture of experts for a few tokens, where reading the weights is all that takes time: no sorting, no padding to tiles.

A program of the first kernel has some rows of one expert, which it finds itself in the router's logits: a launch less. A
program of the second has some columns of the result over all of the token's experts in turn, so that nothing is left to add.
Both multiply on the plain units: a matrix unit would work on one row in sixteen.

Symbols: P tokens, D width of the stream, F width of an expert, E experts; slot: a token's choice of that rank, the last
slot the shared expert.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .moe_router import choice
from .overlap import await_earlier, options, overlaps


@triton.jit
def _rows_times(p_w, p_v, o_n, o_k, N: tl.constexpr, K: tl.constexpr, IS_EVEN: tl.constexpr):
    """Elementwise, in fp32: rows o_n and columns o_k of a matrix [N, K] times those columns of a vector.

    All of a program's loads should be under way at once. So the vector is read once per row, which the L1 cache serves: a
    one-dimensional load would be brought into the tile's layout through shared memory, behind a barrier each time. And there
    are masks only where something lies outside.
    """
    p_w, p_v = p_w + o_n[:, None] * K + o_k[None, :], p_v + o_n[:, None] * 0 + o_k[None, :]
    if IS_EVEN:
        b_w, b_v = tl.load(p_w), tl.load(p_v)
    else:
        m = (o_n < N)[:, None] & (o_k < K)[None, :]
        b_w, b_v = tl.load(p_w, mask=m, other=0.0), tl.load(p_v, mask=m, other=0.0)
    return b_w.to(tl.float32) * b_v.to(tl.float32)


@triton.jit
def _few_gate_up_kernel(
    x, logits, gate_up, shared_gate, shared_up, hidden, experts, weights, stride_x, stride_logits,
    E: tl.constexpr, BE: tl.constexpr, TOP_K: tl.constexpr, IS_NORMALISED: tl.constexpr,
    SLOTS: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden[token, slot] = silu(gate x) * (up x) for BN rows of one expert; the choice is written down for the other kernel."""
    IS_EVEN: tl.constexpr = F % BN == 0 and D % BK == 0
    if PDL:
        await_earlier()
    i_n, i_s, i_p = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if i_s < TOP_K:
        expert, weight = choice(logits + i_p * stride_logits, i_s, E, BE, TOP_K, IS_NORMALISED)
        p_gate = gate_up + expert.to(tl.int64) * (2 * F * D)
        p_up = p_gate + F * D
        if i_n == 0:
            tl.store(experts + i_p * TOP_K + i_s, expert)
            tl.store(weights + i_p * TOP_K + i_s, weight)
    else:
        p_gate, p_up = shared_gate, shared_up
    o_n = i_n * BN + tl.arange(0, BN)
    b_gate, b_up = tl.zeros((BN, BK), tl.float32), tl.zeros((BN, BK), tl.float32)
    for k in tl.static_range(0, D, BK):
        o_k = k + tl.arange(0, BK)
        b_gate += _rows_times(p_gate, x + i_p * stride_x, o_n, o_k, F, D, IS_EVEN)
        b_up += _rows_times(p_up, x + i_p * stride_x, o_n, o_k, F, D, IS_EVEN)
    b_g, b_u = tl.sum(b_gate, 1), tl.sum(b_up, 1)
    b_h = (b_g / (1.0 + tl.exp(-b_g)) * b_u).to(hidden.dtype.element_ty)
    tl.store(hidden + (i_p * SLOTS + i_s) * F + o_n, b_h, mask=o_n < F)


@triton.jit
def _few_down_kernel(
    hidden, experts, weights, gate_logits, down, shared_down, residual, out, stride_gate, stride_residual,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    USE_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[token] = sum over slots of weight * (down hidden[token, slot]) for BN columns; to the rounded sum the residual is
    added."""
    IS_EVEN: tl.constexpr = D % BN == 0 and F % BK == 0
    if PDL:
        await_earlier()
    i_n, i_p = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_n = i_n * BN + tl.arange(0, BN)
    b_out = tl.zeros((BN, BK), tl.float32)
    for i_s in tl.static_range(SLOTS):
        if i_s < TOP_K:
            p_down = down + tl.load(experts + i_p * TOP_K + i_s).to(tl.int64) * (D * F)
            weight = tl.load(weights + i_p * TOP_K + i_s)
        else:
            p_down, weight = shared_down, tl.sigmoid(tl.load(gate_logits + i_p * stride_gate).to(tl.float32))
        for k in tl.static_range(0, F, BK):
            o_k = k + tl.arange(0, BK)
            b_out += _rows_times(p_down, hidden + (i_p * SLOTS + i_s) * F, o_n, o_k, D, F, IS_EVEN) * weight
    b_y = tl.sum(b_out, 1).to(out.dtype.element_ty)
    if USE_RESIDUAL:
        b_h = tl.load(residual + i_p * stride_residual + o_n, mask=o_n < D, other=0.0)
        b_y = (b_h.to(tl.float32) + b_y.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + i_p * D + o_n, b_y, mask=o_n < D)


def moe_few(
    x: Tensor, logits: Tensor, gate_logits: Tensor, top_k: int, normalise: bool, gate_up_proj: Tensor, down_proj: Tensor,
    shared: tuple[Tensor, Tensor, Tensor] | None, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """x [P, D]; logits [P, E], and gate_logits [P, 1] of the shared expert; shared: its gate, up and down projection, of the
    routed experts' width, or None to leave it out; residual [P, D] to add to the result. Returns [P, D]."""
    (P, D), (E, _, F) = x.shape, down_proj.shape
    weights = torch.empty((P, top_k), dtype=torch.float32, device=x.device)
    experts = torch.empty((P, top_k), dtype=torch.int32, device=x.device)
    slots, pdl = top_k + (shared is not None), overlaps(P, x)
    gate, up, down = shared or (gate_up_proj, gate_up_proj, down_proj)  # without a shared expert no program follows them
    hidden = torch.empty((P, slots, F), dtype=x.dtype, device=x.device)
    out = torch.empty((P, D), dtype=x.dtype, device=x.device)
    BN, BK = 16, min(256, triton.next_power_of_2(D))
    _few_gate_up_kernel[(triton.cdiv(F, BN), slots, P)](
        x, logits, gate_up_proj, gate, up, hidden, experts, weights, x.stride(0), logits.stride(0),
        E, triton.next_power_of_2(E), top_k, normalise, slots, D, F, BN, BK, pdl, num_warps=4, **options(pdl),
    )  # fmt: skip
    BN, BK = 8, min(256, triton.next_power_of_2(F))
    _few_down_kernel[(triton.cdiv(D, BN), P)](
        hidden, experts, weights, gate_logits, down_proj, down, residual, out,
        gate_logits.stride(0), 0 if residual is None else residual.stride(0),
        top_k, slots, D, F, BN, BK, residual is not None, pdl, num_warps=8, **options(pdl),
    )  # fmt: skip
    return out
