"""Router of the mixture of experts, and the plan of its grouped products: which rows of which expert every block takes.

A *pair* is a token with one of its choices; its number is slot * P + token, slot 0 the most probable expert. Sorted by
expert, the pairs are the *rows* of the grouped products. All of it stays on the device: block lists have the length of the
worst case, and blocks that hold nothing say so.

Symbols: P tokens, E experts, BE the power of two over E, D width of the stream, BT tokens, pairs or blocks a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import cdiv, next_power_of_2
from .launch import launch
from .overlap import await_earlier, options, overlaps

LOWEST = tl.constexpr(-3.4028234663852886e38)
APART = tl.constexpr(8)  # counters lie 32 bytes apart: atomic adds to one sector wait for each other
ONE_PROGRAM = 2048  # logits that one program holds: 16 tokens with 128 experts; for more, several are quicker


@triton.jit
def load_logits(logits, mask):
    """Logits in fp32, and the keys to sort them by: -inf outside the mask, finite inside.

    A NaN compares with nothing: a token with NaN logits would choose no expert and leave its pairs unwritten. Its weights
    are NaN all the same.
    """
    b_logit = tl.load(logits, mask=mask, other=float("-inf")).to(tl.float32)
    return b_logit, tl.where(mask, tl.where(b_logit >= LOWEST, b_logit, LOWEST), float("-inf"))


@triton.jit
def choice(logits, i_s, E: tl.constexpr, BE: tl.constexpr, TOP_K: tl.constexpr, IS_NORMALISED: tl.constexpr):
    """Expert and weight of one token's choice of rank i_s, lowest id first among equals.

    Every expert counts those before it: BE * BE comparisons, but nothing waits for the round before, as in ``_route_kernel``.
    """
    BC: tl.constexpr = 32 if BE > 32 else BE
    o_e = tl.arange(0, BE)
    b_logit, b_key = load_logits(logits + o_e, o_e < E)
    others = ()
    for c in tl.static_range(0, BE, BC):  # all loads before the first reduction, which is a barrier
        others = others + (load_logits(logits + c + tl.arange(0, BC), c + tl.arange(0, BC) < E)[1],)
    b_rank = tl.zeros((BE,), tl.int32)
    for c in tl.static_range(0, BE, BC):
        b_other = others[c // BC]
        is_tie = (b_other[None, :] == b_key[:, None]) & (c + tl.arange(0, BC)[None, :] < o_e[:, None])
        b_rank += tl.sum(((b_other[None, :] > b_key[:, None]) | is_tie).to(tl.int32), 1)
    b_p = tl.exp(b_logit - tl.max(b_logit, 0))
    total = tl.sum(tl.where(b_rank < TOP_K, b_p, 0.0) if IS_NORMALISED else b_p, 0)
    m_this = b_rank == i_s
    return tl.sum(tl.where(m_this, o_e, 0), 0), tl.sum(tl.where(m_this, b_p, 0.0), 0) / total


@triton.jit
def _logits_kernel(
    x, router, shared_gate, logits, stride_x,
    E: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of the router, or the shared expert's gate as its row E, times one token."""
    i_n, i_p = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_n, o_k = i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    p_rows = tl.where(o_n < E, router + o_n * D, shared_gate)  # [BN]
    if IS_ALIGNED:  # newer compilers lose that in the choice between pointers
        p_rows = tl.multiple_of(p_rows, 16)
    tiles = ()
    for k in tl.static_range(0, D, BK):
        m_w = (o_n <= E)[:, None] & (k + o_k < D)[None, :]
        tiles = tiles + (tl.load(p_rows[:, None] + (k + o_k)[None, :], mask=m_w, other=0.0),)
    if PDL:
        await_earlier()
    b_sum = tl.zeros((BN, BK), tl.float32)
    for k in tl.static_range(0, D, BK):
        b_x = tl.load(x + i_p * stride_x + k + o_k, mask=k + o_k < D, other=0.0).to(tl.float32)
        b_sum += tiles[k // BK].to(tl.float32) * b_x[None, :]
    tl.store(logits + i_p * (E + 1) + o_n, tl.sum(b_sum, 1).to(logits.dtype.element_ty), mask=o_n <= E)


@triton.jit(do_not_specialize=["stride_token", "stride_slot"])
def _route_kernel(
    logits, weights, experts, counts, ranks, stride_logits, stride_token, stride_slot,
    E: tl.constexpr, BE: tl.constexpr, TOP_K: tl.constexpr, IS_NORMALISED: tl.constexpr, USE_RANKS: tl.constexpr,
):  # fmt: skip
    """Softmax and the TOP_K most probable experts, lowest id first among equals; for the plan also each pair's rank among
    the pairs of its expert. One token and one warp a program: every reduction stays inside the warp.

    Ranks come in the order of the atomic adds: any order gives the same output, since the rows of a product do not meet.
    """
    i_p, o_e = tl.program_id(0).to(tl.int64), tl.arange(0, BE)
    b_logit, b_key = load_logits(logits + i_p * stride_logits + o_e, o_e < E)
    b_slot = tl.full((BE,), -1, tl.int32)  # the choice that an expert is, -1 none
    for i_s in tl.static_range(TOP_K):
        m_hit = o_e == tl.min(tl.where(b_key == tl.max(b_key, 0), o_e, BE), 0)
        b_slot = tl.where(m_hit, i_s, b_slot)
        b_key = tl.where(m_hit, float("-inf"), b_key)
    m_chosen = b_slot >= 0
    b_p = tl.exp(b_logit - tl.max(b_logit, 0))
    total = tl.sum(tl.where(m_chosen, b_p, 0.0) if IS_NORMALISED else b_p, 0)
    p_pair = i_p * stride_token + b_slot * stride_slot
    tl.store(weights + p_pair, b_p / total, mask=m_chosen)
    tl.store(experts + p_pair, o_e.to(experts.dtype.element_ty), mask=m_chosen)
    if USE_RANKS:
        tl.store(ranks + p_pair, tl.atomic_add(counts + o_e * APART, 1, mask=m_chosen, sem="relaxed"), mask=m_chosen)


@triton.jit(do_not_specialize=["P", "pairs", "blocks"])
def _plan_kernel(
    experts, counts, ranks, rows, order, block_list, P, pairs, blocks,
    E: tl.constexpr, BE: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """A program places BT pairs, or lists BT blocks. The shared expert is expert E and has every token; its blocks lead."""
    o_e = tl.arange(0, BE)
    b_count = tl.load(counts + o_e * APART, mask=o_e < E, other=0)
    b_begin = tl.cumsum(b_count, 0) - b_count
    i_t = tl.program_id(0) - (blocks + BT - 1) // BT
    if i_t >= 0:
        o_p = i_t * BT + tl.arange(0, BT)
        m_routed = o_p < P * TOP_K
        b_expert = tl.load(experts + o_p, mask=m_routed, other=0)
        b_row = tl.gather(b_begin, b_expert, 0) + tl.load(ranks + o_p, mask=m_routed, other=0)
        b_row = tl.where(m_routed, b_row, o_p)
        tl.store(rows + o_p, b_row, mask=o_p < pairs)
        tl.store(order + b_row, o_p, mask=o_p < pairs)
    else:
        o_b = tl.program_id(0) * BT + tl.arange(0, BT)
        shared = (pairs - P * TOP_K + BM - 1) // BM
        b_blocks = (b_count + BM - 1) // BM
        b_last = tl.cumsum(b_blocks, 0)
        b_at = o_b - shared
        b_expert = tl.sum(((b_last[None, :] <= b_at[:, None]) & (o_e < E)[None, :]).to(tl.int32), 1)
        b_e = tl.minimum(b_expert, E - 1)
        b_first = tl.gather(b_begin, b_e, 0) + (b_at - tl.gather(b_last - b_blocks, b_e, 0)) * BM
        b_end = tl.gather(b_begin + b_count, b_e, 0)
        is_shared = o_b < shared
        b_expert = tl.where(is_shared, E, tl.where(b_expert < E, b_expert, -1))
        b_first, b_end = tl.where(is_shared, P * TOP_K + o_b * BM, b_first), tl.where(is_shared, pairs, b_end)
        _store_block(block_list + o_b * 3, b_expert, b_first, b_end, o_b < blocks)
        if tl.program_id(0) == 0:
            tl.store(block_list + blocks * 3, shared + tl.sum(b_blocks, 0))


@triton.jit(do_not_specialize=["P", "blocks"])
def _plan_at_once_kernel(
    logits, weights, rows, order, block_list, stride_logits, P, blocks,
    E: tl.constexpr, BE: tl.constexpr, TOP_K: tl.constexpr, IS_NORMALISED: tl.constexpr,
    BM: tl.constexpr, BP: tl.constexpr, USE_SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Both kernels above in one program for up to BP tokens: a launch, not three, and no counters to clear.

    A pair's rank among those of its expert is the number of earlier tokens that chose it, too.
    """
    if PDL:
        await_earlier()
    o_p, o_e = tl.arange(0, BP), tl.arange(0, BE)
    m_p = o_p < P
    p_logits = logits + tl.minimum(o_p, P - 1)[:, None] * stride_logits + o_e[None, :]
    b_logit, b_key = load_logits(p_logits, (o_e < E)[None, :])
    b_slot = tl.full((BP, BE), -1, tl.int32)
    for i_s in tl.static_range(TOP_K):
        b_best = tl.where(b_key == tl.max(b_key, 1)[:, None], o_e[None, :], BE)
        m_hit = o_e[None, :] == tl.min(b_best, 1)[:, None]
        b_slot = tl.where(m_hit, i_s, b_slot)
        b_key = tl.where(m_hit, float("-inf"), b_key)
    m_chosen = (b_slot >= 0) & m_p[:, None]
    b_p = tl.exp(b_logit - tl.max(b_logit, 1)[:, None])
    total = tl.sum(tl.where(b_slot >= 0, b_p, 0.0) if IS_NORMALISED else b_p, 1)
    o_pair = b_slot * P + o_p[:, None]
    tl.store(weights + o_pair, b_p / total[:, None], mask=m_chosen)

    b_one = m_chosen.to(tl.int32)
    b_count = tl.sum(b_one, 0)
    b_begin = tl.cumsum(b_count, 0) - b_count
    b_row = b_begin[None, :] + tl.cumsum(b_one, 0) - b_one
    tl.store(rows + o_pair, b_row, mask=m_chosen)
    tl.store(order + b_row, o_pair, mask=m_chosen)

    shared = 0
    if USE_SHARED:
        shared = (P + BM - 1) // BM
        tl.store(rows + TOP_K * P + o_p, TOP_K * P + o_p, mask=m_p)
        tl.store(order + TOP_K * P + o_p, TOP_K * P + o_p, mask=m_p)
    b_blocks = (b_count + BM - 1) // BM
    b_last = shared + tl.cumsum(b_blocks, 0)
    for i in tl.static_range((BP + BM - 1) // BM):  # blocks of an expert: it has each token once at most
        if i < shared:
            _store_block(block_list + i * 3, E, TOP_K * P + i * BM, (TOP_K + 1) * P, True)
        p_block = block_list + (b_last - b_blocks + i) * 3
        _store_block(p_block, o_e, b_begin + i * BM, b_begin + b_count, i < b_blocks)
    used = shared + tl.sum(b_blocks, 0)
    for i in range(used, blocks, BE):
        tl.store(block_list + (i + o_e) * 3, -1, mask=i + o_e < blocks)
    tl.store(block_list + blocks * 3, used)


@triton.jit
def _store_block(p_block, expert, first, end, mask):
    tl.store(p_block, expert, mask=mask)
    tl.store(p_block + 1, first, mask=mask)
    tl.store(p_block + 2, end, mask=mask)


def is_aligned(elements: int, *matrices: Tensor) -> bool:
    """Whether every multiple of so many elements into any of these starts at a multiple of 16 bytes."""
    for m in matrices:
        if m.data_ptr() % 16 or elements * m.element_size() % 16:
            return False
    return True


def project_logits(x: Tensor, router: Tensor, shared_gate: Tensor) -> Tensor:
    """x [P, D] times the router and the shared expert's gate: [P, E + 1] in x's dtype. Made for a few tokens."""
    (P, D), E = x.shape, router.shape[0]
    logits = x.new_empty((P, E + 1))
    BN, BK, pdl = 4, min(1024, next_power_of_2(D)), overlaps(P, x)
    launch(
        _logits_kernel, (cdiv(E + 1, BN), P), (x, router, shared_gate, logits), (x.stride(0),),
        dict(E=E, D=D, BN=BN, BK=BK, IS_ALIGNED=is_aligned(D, router, shared_gate), PDL=pdl), num_warps=4, **options(pdl),
    )  # fmt: skip
    return logits


def launch_route(
    logits: Tensor, top_k: int, normalise: bool, weights: Tensor, experts: Tensor, slot_major: bool,
    counts: Tensor | None = None, ranks: Tensor | None = None,
) -> None:  # fmt: skip
    """logits [P, E]; weights, experts and ranks [P, top_k], or [top_k, P] when ``slot_major``; counts [E, APART], zero."""
    P, E = logits.shape
    launch(
        _route_kernel, (P,), (logits, weights, experts, counts, ranks),
        (logits.stride(0), 1 if slot_major else top_k, P if slot_major else 1),
        dict(E=E, BE=next_power_of_2(E), TOP_K=top_k, IS_NORMALISED=normalise, USE_RANKS=ranks is not None), num_warps=1,
    )  # fmt: skip


def plan(logits: Tensor, top_k: int, normalise: bool, with_shared: bool, BM: int) -> tuple[Tensor, ...]:
    """Route and sort without the host.

    Returns weights [top_k, P] fp32; rows [slots, P] int32, the row of each pair; order [slots * P] int32, the pair of each
    row; blocks [n + 1, 3] int32, (expert or -1 for none, first row, end of the expert's rows) of at most BM rows each, and
    behind them the number of blocks in use. Slots are top_k, and one more with the shared expert.
    """
    P, E = logits.shape
    routed, slots = P * top_k, top_k + with_shared
    hit = min(E, routed)
    blocks = (routed - hit) // BM + hit + with_shared * cdiv(P, BM)  # worst case
    weights = torch.empty((top_k, P), dtype=torch.float32, device=logits.device)
    # One allocation each: a view into another's middle may be less aligned, and Triton would compile for that once more.
    rows, order = (torch.empty((slots, P), dtype=torch.int32, device=logits.device) for _ in range(2))
    block_list = torch.empty((blocks + 1, 3), dtype=torch.int32, device=logits.device)
    BE, BP = next_power_of_2(E), next_power_of_2(P)
    if BP * BE <= ONE_PROGRAM:
        pdl = overlaps(P, logits)
        launch(
            _plan_at_once_kernel, (1,), (logits, weights, rows, order, block_list), (logits.stride(0), P, blocks),
            dict(E=E, BE=BE, TOP_K=top_k, IS_NORMALISED=normalise, BM=BM, BP=BP, USE_SHARED=with_shared, PDL=pdl),
            num_warps=8, **options(pdl),
        )  # fmt: skip
        return weights, rows, order.view(-1), block_list
    counts = torch.zeros((E, APART.value), dtype=torch.int32, device=logits.device)
    experts, ranks = (torch.empty((top_k, P), dtype=torch.int32, device=logits.device) for _ in range(2))
    launch_route(logits, top_k, normalise, weights, experts, True, counts, ranks)
    BT = 64
    launch(
        _plan_kernel, (cdiv(blocks, BT) + cdiv(slots * P, BT),), (experts, counts, ranks, rows, order, block_list),
        (P, slots * P, blocks), dict(E=E, BE=BE, TOP_K=top_k, BM=BM, BT=BT), num_warps=4,
    )  # fmt: skip
    return weights, rows, order.view(-1), block_list
