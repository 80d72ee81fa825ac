"""``kda_state.py`` for Hopper, in Gluon: bf16, K = V = 128. Same scratch in, same answers out.

A chunk is four matrix products, and the chunks of a sequence follow each other: latency is everything. One program per
sequence, value head and 64 columns of v, in three roles that meet at barriers in shared memory:

- ``load_tiles``, one warp, lets the copy engine fetch tiles, STAGES chunks ahead.
- ``advance``, four warps, does nothing that another role can do. The state S^T [64, 128] stays in its registers, in fp32
  and, as left operand, in bf16.
- ``store_outputs``, one warp, masks the tail and writes o.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper_tiles import ACC, LEFT, LEFT_WIDE, ROWS, TILE, WIDE, barrier, clamped_offsets, fixed, tma_load
from .kda_args import KDACall, Scratch, padded
from .launch import launch

STAGES = fixed(3)
DECAY = fixed(gl.NVMMASharedLayout(0, 32, 2))  # shared memory of one chunk's decay, [1, 128] in fp32
ONE_WARP = fixed(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


@gluon.jit
def next_stage(i, phase):
    """A remainder would cost the critical path more."""
    i += 1
    wrapped = i == STAGES
    return gl.where(wrapped, 0, i), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def load_tiles(d_k, d_v, d_d, s_w, s_q, s_u, s_k, s_a, s_d, full, done, tile, tiles, i_v, count, HV: gl.constexpr):
    """The tiles of a sequence into one stage after the other. d_k: W, QG, KG behind each other; d_v: U, AQ."""
    i = count * 0
    phase = count * 0
    for _ in range(count):
        mbarrier.wait(done.index(i), phase ^ 1)  # the first round finds every stage free
        b = full.index(i)
        mbarrier.expect(b, 3 * 16384 + 2 * 8192 + 512)
        tma_load(d_v, [tile * 128 + i_v * 64, 0], b, s_u.index(i))
        tma_load(d_k, [tile * 64, 0], b, s_w.index(i))
        tma_load(d_k, [(tiles + tile) * 64, 0], b, s_q.index(i))
        tma_load(d_k, [(2 * tiles + tile) * 64, 0], b, s_k.index(i))
        tma_load(d_v, [(2 * tiles + tile) * 64, 0], b, s_a.index(i))
        tma_load(d_d, [tile, 0], b, s_d.index(i))
        tile += HV
        i, phase = next_stage(i, phase)


@gluon.jit
def store_outputs(o, s_o, done, free, length, count, HV: gl.constexpr):
    """Outputs from shared memory to o, the sequence's first row."""
    o_r = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, ONE_WARP)), 1)
    o_c = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, ONE_WARP)), 0)
    o += o_r * (HV * 128) + o_c
    i = count * 0
    phase = count * 0
    for t in range(count):
        mbarrier.wait(done.index(i), phase)
        gl.store(o, s_o.index(t % 2).load(ONE_WARP), mask=o_r < length - t * 64)
        mbarrier.arrive(free.index(t % 2), count=1)
        o += 64 * HV * 128
        i, phase = next_stage(i, phase)


@gluon.jit
def advance(
    initial, final, boundaries, kept, s_w, s_q, s_u, s_k, s_a, s_d, s_o, s_minus, full, done, free,
    n, i_hv, i_v, length, count, M,
    HV: gl.constexpr, BM: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    """The state from chunk to chunk. Products are issued before the last ones are done, so that the matrix unit finds
    the next one waiting; U enters through a product with -I, which costs it less than unpacking costs the warps:

        -N = -I U + S^T W^T  and  O = S^T QG^T    issued together; N is rounded in the shadow of O
        G = N KG  and  O += N AQ^T                issued together; S = diag(DD) S + G in the shadow of O
    """
    o_v = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE)), 1)
    o_k = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE)), 0)
    p_s = o_k * 128 + i_v * 64 + o_v
    p_n = (n.to(gl.int64) * HV + i_hv) * 16384
    S = gl.zeros([64, 128], gl.float32, WIDE)
    if INITIAL:
        S += gl.load(initial + p_n + p_s).to(gl.float32)
    m = 0
    m1 = 0
    if KEPT:
        # rows m <= .. < m1 of the ascending table are this sequence's
        LM: gl.constexpr = gl.BlockedLayout([BM // 128], [32], [4], [0])
        o_m = gl.arange(0, BM, layout=LM)
        owner = gl.load(boundaries + 2 * o_m, mask=o_m < M, other=0)
        m = gl.sum(((owner < n) & (o_m < M)).to(gl.int32), 0)
        m1 = gl.sum(((owner <= n) & (o_m < M)).to(gl.int32), 0)
    zero = gl.zeros([64, 64], gl.float32, ACC)
    wide = gl.zeros([64, 128], gl.float32, WIDE)
    S_in = gl.convert_layout(S.to(gl.bfloat16), LEFT)
    i = count * 0
    phase = count * 0
    for t in range(count):
        mbarrier.wait(full.index(i), phase)
        minus = warpgroup_mma(s_minus, s_u.index(i), zero, use_acc=False, is_async=True)
        minus = warpgroup_mma(S_in, s_w.index(i).permute((1, 0)), minus, is_async=True)
        b_o = warpgroup_mma(S_in, s_q.index(i).permute((1, 0)), zero, use_acc=False, is_async=True)
        minus = warpgroup_mma_wait(1, deps=[minus])
        new = (-minus).to(gl.bfloat16)
        # a product of its own: scaling an accumulator while another product is in flight would make the compiler wait
        G = warpgroup_mma(gl.convert_layout(new, LEFT_WIDE), s_k.index(i), wide, use_acc=False, is_async=True)
        b_o = warpgroup_mma(gl.convert_layout(new, LEFT), s_a.index(i).permute((1, 0)), b_o, is_async=True)
        mbarrier.wait(free.index(t % 2), ((t // 2) & 1) ^ 1)
        G = warpgroup_mma_wait(1, deps=[G])
        S = S * s_d.index(i).load(WIDE) + G
        if KEPT:
            m = keep(kept, boundaries, S, p_s, m, m1, t + 1, length, i_hv, HV)
        S_in = gl.convert_layout(S.to(gl.bfloat16), LEFT)
        b_o = warpgroup_mma_wait(0, deps=[b_o])
        s_o.index(t % 2).permute((1, 0)).store(b_o.to(gl.bfloat16))
        barrier()  # every warp has stored its outputs and is done with the stage
        mbarrier.arrive(done.index(i), count=1)
        i, phase = next_stage(i, phase)
    if KEPT:
        keep(kept, boundaries, S, p_s, m, m1, count + 1, length, i_hv, HV)
    if FINAL:
        gl.store(final + p_n + p_s, S)


@gluon.jit
def keep(kept, boundaries, S, p_s, m, m1, chunk, length, i_hv, HV: gl.constexpr):
    """Answer the boundaries of up to ``chunk`` chunks, from row m on; past the last chunk, all. Returns the first row not
    answered. Only one of exactly ``chunk`` chunks is S. Others are no boundary of this sequence, or out of order, which the
    host could not know: no number is better than a wrong one."""
    last = chunk * 64 > length
    due = m < m1
    if due:
        due = last | (gl.load(boundaries + 2 * m + 1) <= chunk * 64)
    while due:
        tokens = gl.load(boundaries + 2 * m + 1)
        reached = (tokens == chunk * 64) & (tokens <= length)
        gl.store(kept + (m.to(gl.int64) * HV + i_hv) * 16384 + p_s, gl.where(reached, S, float("nan")))
        m += 1
        due = m < m1
        if due:
            due = last | (gl.load(boundaries + 2 * m + 1) <= chunk * 64)
    return m


@gluon.jit(do_not_specialize=["T", "N", "M", "chunks"])
def kda_state_hopper_kernel(
    d_k, d_v, d_d, initial, o, final, cu, boundaries, kept,
    T, N, M, chunks,
    HV: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr,
    INITIAL: gl.constexpr, FINAL: gl.constexpr, KEPT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    i_v = gl.program_id(0) % 2
    i_hv = (gl.program_id(0) // 2) % HV
    n = gl.program_id(0) // (2 * HV)
    if PACKED:
        LN: gl.constexpr = gl.BlockedLayout([BN // 128], [32], [4], [0])
        o_n = gl.arange(0, BN, layout=LN)
        begin, lengths = clamped_offsets(o_n, cu, T, N)
        chunk0 = gl.sum(gl.where(o_n < n, (lengths + 63) // 64, 0), 0)
        bos = gl.sum(gl.where(o_n == n, begin, 0), 0)
        length = gl.sum(gl.where(o_n == n, lengths, 0), 0)
        # offsets that decrease (never read by the host) may ask for more tiles than there are
        count = gl.maximum(gl.minimum((length + 63) // 64, chunks - chunk0), 0)
    else:
        count = (T + 63) // 64
        chunk0 = n * count
        bos = n * T
        length = T
    o += (bos.to(gl.int64) * HV + i_hv) * 128 + i_v * 64

    s_w = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], TILE)
    s_q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], TILE)
    s_k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], TILE)
    s_u = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
    s_a = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
    s_d = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], DECAY)
    s_o = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    s_minus = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    o_i = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS)), 1)
    o_j = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS)), 0)
    s_minus.store(gl.where(o_i == o_j, -1.0, 0.0).to(gl.bfloat16))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())  # a stage's tiles are there
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())  # a stage's chunk is computed
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # outputs have left shared memory
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    barrier()
    tile = chunk0 * HV + i_hv
    tiles = chunks * HV
    gl.warp_specialize(
        [
            (advance, (
                initial, final, boundaries, kept, s_w, s_q, s_u, s_k, s_a, s_d, s_o, s_minus, full, done, free,
                n, i_hv, i_v, length, count, M, HV, BM, INITIAL, FINAL, KEPT,
            )),
            (load_tiles, (
                d_k, d_v, d_d, s_w, s_q, s_u, s_k, s_a, s_d, full, done, tile, tiles, i_v, count, HV,
            )),
            (store_outputs, (o, s_o, done, free, length, count, HV)),
        ],
        [1, 1],
        [40, 64],
    )  # fmt: skip


@dataclass(frozen=True)
class Address:
    """What a descriptor needs of a tensor. Scratch comes back at the same place call after call, so descriptors are kept for
    places, without keeping the memory."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


@lru_cache(maxsize=256)
def descriptors(W: int, U: int, DD: int, tiles: int) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """W, QG, KG as rows of 128; U, AQ as rows of 64; DD. Arguments are addresses."""
    return (
        TensorDescriptor(Address(W, torch.bfloat16), [3 * 64 * tiles, 128], [128, 1], [64, 128], TILE.value),
        TensorDescriptor(Address(U, torch.bfloat16), [3 * 64 * tiles, 64], [64, 1], [64, 64], TILE.value),
        TensorDescriptor(Address(DD, torch.float32), [tiles, 128], [128, 1], [1, 128], DECAY.value),
    )


def state(x: KDACall, s: Scratch, output_final_state: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """-> o [P, HV, V] in q's dtype, final state [N, HV, K, V] fp32 if asked, kept states [M, HV, K, V] in the table's
    order. There is at least one chunk."""
    _, HV, K, V = x.heads
    device = x.q.device
    o = torch.empty_like(x.v, memory_format=torch.contiguous_format)  # a shape given as torch.Size costs the host 1 us
    final = torch.empty(x.N, HV, K, V, device=device) if output_final_state else None
    M = 0 if x.boundaries is None else x.boundaries.shape[0]
    kept = None if x.boundaries is None else torch.empty(M, HV, K, V, device=device)
    launch(
        kda_state_hopper_kernel, (2 * HV * x.N,),
        (*descriptors(s.W.data_ptr(), s.U.data_ptr(), s.DD.data_ptr(), x.chunks * HV),
         x.initial_state, o, final, x.cu_seqlens, x.boundaries, kept),
        (x.T, x.N, M, x.chunks),
        dict(HV=HV, BN=padded(max(x.N, 128)), BM=padded(max(M, 128)),
             INITIAL=x.initial_state is not None, FINAL=output_final_state, KEPT=M > 0, PACKED=x.cu_seqlens is not None),
        num_warps=4,
    )  # fmt: skip
    return o, final, kept
