"""The two grouped products of the mixture of experts, and the weighted sum over each token's rows.

Both products walk the block list of the plan: a block is at most BM rows of one expert. The first fuses SwiGLU: a weight tile
holds gate and up rows in turn, so that the two halves of a pair are neighbours in the accumulator. The second leaves one
row a pair, in x's dtype, and ``_combine_kernel`` adds a token's rows in the order of its choices: no atomics, so results
are bitwise repeatable and a token's result does not depend on its neighbours.

Symbols: D width of the stream, F width of an expert, E routed experts; expert E is the shared one.
"""

import triton
import triton.language as tl
from torch import Tensor

from .arguments import cdiv, next_power_of_2
from .launch import launch
from .moe_persistent import launch_down_persistent
from .moe_router import is_aligned
from .moe_tiles import Tile
from .overlap import await_earlier, options, overlaps


@triton.jit
def _gate_up_tile(
    x, p_gate, p_up, order, hidden, stride_x, P, first, end, i_n,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    o_m = first + tl.arange(0, BM)
    m_m = o_m < end
    token = tl.load(order + o_m, mask=m_m, other=0) % P
    o_r, o_k = tl.arange(0, 2 * BN), tl.arange(0, BK)
    o_w = i_n * BN + o_r // 2  # rows 2j and 2j + 1: gate and up of column j
    m_w = o_w < F
    p_w = tl.where(o_r % 2 == 0, p_gate, p_up)
    if IS_ALIGNED:  # newer compilers lose that in the choice between pointers, and with it the asynchronous copies
        p_w = tl.multiple_of(p_w, 16)
    p_w += o_w * D
    p_x = x + token.to(tl.int64) * stride_x
    b_acc = tl.zeros((BM, 2 * BN), tl.float32)
    for k in range(0, D, BK):
        m_x, m_r = m_m[:, None], None
        if F % BN:
            m_r = m_w[None, :]
        if D % BK:
            m_k = k + o_k < D
            m_x = m_x & m_k[None, :]
            m_r = m_w[None, :] & m_k[:, None]
        b_x = tl.load(p_x[:, None] + (k + o_k)[None, :], mask=m_x, other=0.0)
        b_w = tl.load(p_w[None, :] + (k + o_k)[:, None], mask=m_r, other=None if m_r is None else 0.0)
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision="ieee")
    b_gate, b_up = tl.split(tl.reshape(b_acc, (BM, BN, 2)))
    b_h = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    o_n = i_n * BN + tl.arange(0, BN)
    p_h = hidden + o_m.to(tl.int64)[:, None] * F + o_n[None, :]
    tl.store(p_h, b_h.to(hidden.dtype.element_ty), mask=m_m[:, None] & (o_n < F)[None, :])


@triton.jit(do_not_specialize=["P"])
def _gate_up_kernel(
    x, gate_up, shared_gate, shared_up, order, block_list, hidden, stride_x, P,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    IS_ALIGNED: tl.constexpr, USE_HALVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden[row] = silu(gate x) * (up x) for BM rows and BN columns of one expert.

    An expert's last block may be nearly empty: with 256 rows an expert on average, half of them need a third block of 128.
    """
    if PDL:
        await_earlier()
    NN: tl.constexpr = (F + BN - 1) // BN
    BH: tl.constexpr = BM // 2
    i_b, i_n = tl.program_id(0) // NN, tl.program_id(0) % NN
    expert = tl.load(block_list + i_b * 3)
    if expert < 0:
        return
    first, end = tl.load(block_list + i_b * 3 + 1), tl.load(block_list + i_b * 3 + 2)
    if expert < E:
        p_gate = gate_up + expert.to(tl.int64) * (2 * F * D)
        p_up = p_gate + F * D
    else:
        p_gate, p_up = shared_gate, shared_up
    if USE_HALVES:
        if end - first <= BH:
            _gate_up_tile(x, p_gate, p_up, order, hidden, stride_x, P, first, end, i_n, D, F, BH, BN, BK, IS_ALIGNED)
            return
    _gate_up_tile(x, p_gate, p_up, order, hidden, stride_x, P, first, end, i_n, D, F, BM, BN, BK, IS_ALIGNED)


@triton.jit
def _down_kernel(
    hidden, down, shared_down, block_list, out, depth,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = down hidden[row] for BM rows and BN columns of one expert. ``depth`` is F once more, unknown to the compiler,
    which would unroll a loop of few rounds, and spill."""
    if PDL:
        await_earlier()
    NN: tl.constexpr = (D + BN - 1) // BN
    i_b, i_n = tl.program_id(0) // NN, tl.program_id(0) % NN
    expert = tl.load(block_list + i_b * 3)
    if expert < 0:
        return
    o_m = tl.load(block_list + i_b * 3 + 1) + tl.arange(0, BM)
    m_m = o_m < tl.load(block_list + i_b * 3 + 2)
    if expert < E:
        p_down = down + expert.to(tl.int64) * (D * F)
    else:
        p_down = shared_down
    o_n, o_k = i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    p_w = p_down + o_n * F
    p_h = hidden + o_m.to(tl.int64) * F
    b_acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, depth, BK):
        m_h, m_r = m_m[:, None], None
        if D % BN:
            m_r = (o_n < D)[None, :]
        if F % BK:
            m_k = k + o_k < F
            m_h = m_h & m_k[None, :]
            m_r = (o_n < D)[None, :] & m_k[:, None]
        b_h = tl.load(p_h[:, None] + (k + o_k)[None, :], mask=m_h, other=0.0)
        b_w = tl.load(p_w[None, :] + (k + o_k)[:, None], mask=m_r, other=None if m_r is None else 0.0)
        b_acc = tl.dot(b_h, b_w, b_acc, input_precision="ieee")
    p_out = out + o_m.to(tl.int64)[:, None] * D + o_n[None, :]
    tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=m_m[:, None] & (o_n < D)[None, :])


@triton.jit(do_not_specialize=["P"])
def _combine_kernel(
    y, rows, weights, gate_logits, residual, out, stride_gate, stride_residual, P,
    D: tl.constexpr, TOP_K: tl.constexpr, BD: tl.constexpr, USE_SHARED: tl.constexpr, USE_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[token] = sum of its rows of y by weight, the shared expert's row last by the sigmoid of its logit; to the rounded
    sum the residual is added."""
    if PDL:
        await_earlier()
    i_p, o_d = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_out = tl.zeros((BD,), tl.float32)
    for i_s in tl.static_range(TOP_K):
        row = tl.load(rows + i_s * P + i_p).to(tl.int64)
        b_out += tl.load(weights + i_s * P + i_p) * tl.load(y + row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    if USE_SHARED:
        row = tl.load(rows + TOP_K * P + i_p).to(tl.int64)
        gate = tl.load(gate_logits + i_p * stride_gate).to(tl.float32)
        b_out += tl.sigmoid(gate) * tl.load(y + row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_out = b_out.to(out.dtype.element_ty)
    if USE_RESIDUAL:
        b_h = tl.load(residual + i_p.to(tl.int64) * stride_residual + o_d, mask=m_d, other=0.0)
        b_out = (b_h.to(tl.float32) + b_out.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + i_p.to(tl.int64) * D + o_d, b_out, mask=m_d)


def launch_gate_up(x, gate_up_proj, shared_gate_up, order, blocks, tile: Tile) -> Tensor:
    """silu(gate x) * (up x), [rows, F]; x [P, D] with contiguous rows."""
    E, twice, D = gate_up_proj.shape
    hidden = x.new_empty((order.shape[0], twice // 2))
    grid, pdl = ((blocks.shape[0] - 1) * cdiv(twice // 2, tile.BN),), overlaps(x.shape[0], x)
    launch(
        _gate_up_kernel, grid, (x, gate_up_proj, *shared_gate_up, order, blocks, hidden), (x.stride(0), x.shape[0]),
        dict(E=E, D=D, F=twice // 2, BM=tile.BM, BN=tile.BN, BK=tile.BK,
             IS_ALIGNED=is_aligned(twice // 2 * D, gate_up_proj, *shared_gate_up), USE_HALVES=tile.halves, PDL=pdl),
        num_warps=tile.warps, num_stages=tile.stages, **options(pdl),
    )  # fmt: skip
    return hidden


def launch_down(hidden, down_proj, shared_down, blocks, shared_blocks: int, tile: Tile, pdl: bool = False) -> Tensor:
    """[rows, D]; the first shared_blocks blocks are the shared expert's. ``pdl``: see ``overlap``."""
    E, D, F = down_proj.shape
    if tile.per_multiprocessor and D % tile.BN == 0 and F % tile.BK == 0 and is_aligned(F, down_proj, shared_down):
        return launch_down_persistent(hidden, down_proj, shared_down, blocks, shared_blocks, tile)
    y = hidden.new_empty((hidden.shape[0], D))
    launch(
        _down_kernel, ((blocks.shape[0] - 1) * cdiv(D, tile.BN),), (hidden, down_proj, shared_down, blocks, y), (F,),
        dict(E=E, D=D, F=F, BM=tile.BM, BN=tile.BN, BK=tile.BK, PDL=pdl),
        num_warps=tile.warps, num_stages=tile.stages, **options(pdl),
    )  # fmt: skip
    return y


def launch_combine(y, rows, weights, gate_logits, residual) -> Tensor:
    """[P, D]; without the shared expert gate_logits is None, without a residual that."""
    (top_k, P), D = weights.shape, y.shape[1]
    out = y.new_empty((P, D))
    BD, pdl = min(1024, next_power_of_2(D)), overlaps(P, y)
    launch(
        _combine_kernel, (P, cdiv(D, BD)), (y, rows, weights, gate_logits, residual, out),
        (*(0 if x is None else x.stride(0) for x in (gate_logits, residual)), P),
        dict(D=D, TOP_K=top_k, BD=BD, USE_SHARED=gate_logits is not None, USE_RESIDUAL=residual is not None, PDL=pdl),
        num_warps=max(1, BD // 256), **options(pdl),
    )  # fmt: skip
    return out
