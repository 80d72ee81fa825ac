"""Second launch of chunk_kda: states from chunk to chunk, and outputs. One program per sequence, value head, BV columns.

Per chunk, with the front launch's tiles and the state S as the chunk found it:

    N = U - W S          what the tokens really write
    O = QG S + AQ N
    S = diag(DD) S + KG^T N

The chunks of a sequence must follow each other, so this is the critical path. S is kept transposed, [BV, K]: it is the left
operand of both products and stays in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kda_args import KDACall, Scratch, padded
from .launch import launch


@triton.jit
def advance(
    S, W, U, QG, KG, AQ, DD, o, i_v, i_hv, chunk0, start, stop, bos, length,
    HV: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, PV: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Chunks start <= i < stop of a sequence whose chunk 0 is chunk0 of all: writes their outputs, returns S [BV, BK]."""
    DT: tl.constexpr = W.dtype.element_ty
    PREC: tl.constexpr = "tf32x3"  # of fp32 tiles: as good as fp32 here, and on the tensor cores
    o_i = tl.arange(0, 64)
    o_v = tl.arange(0, BV)
    o_w = o_i[:, None] * BK + tl.arange(0, BK)[None, :]
    for i in tl.range(start, stop, num_stages=STAGES):
        tile = (chunk0 + i).to(tl.int64) * HV + i_hv  # 64-bit bases; offsets inside a tile fit 32
        b_w = tl.load(W + tile * (64 * BK) + o_w)  # [64, BK]
        b_u = tl.load(U + tile * (64 * PV) + i_v * (64 * BV) + (o_v[:, None] * 64 + o_i[None, :])).to(tl.float32)  # [BV, 64]
        S_in = S.to(DT)
        new = (b_u - tl.dot(S_in, tl.trans(b_w), input_precision=PREC)).to(DT)
        b_q = tl.load(QG + tile * (64 * BK) + o_w)
        b_a = tl.load(AQ + tile * 4096 + (o_i[:, None] * 64 + o_i[None, :]))
        b_o = tl.dot(S_in, tl.trans(b_q), input_precision=PREC)
        b_o = tl.dot(new, tl.trans(b_a), b_o, input_precision=PREC)
        row = (bos + i * 64).to(tl.int64)
        m_o = (o_i < length - i * 64)[:, None] & (i_v * BV + o_v < V)[None, :]
        p_o = o + (row * HV + i_hv) * V + i_v * BV + (o_i[:, None] * (HV * V) + o_v[None, :])
        tl.store(p_o, tl.trans(b_o.to(DT)), mask=m_o)
        b_k = tl.load(KG + tile * (64 * BK) + o_w)
        b_d = tl.load(DD + tile * BK + tl.arange(0, BK))
        S = tl.dot(new, b_k, S * b_d[None, :], input_precision=PREC)
    return S


@triton.jit(do_not_specialize=["T", "N", "M", "chunks"])
def kda_state_kernel(
    W, U, QG, KG, AQ, DD, initial, o, final, cu, boundaries, kept,
    T, N, M, chunks,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, PV: tl.constexpr, BV: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, KEPT: tl.constexpr,
    PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BK, PV: padded head sizes. ``boundaries`` [M, 2] is ascending; its row m is answered in kept[m]."""
    i_v = tl.program_id(0) % (PV // BV)
    i_hv = (tl.program_id(0) // (PV // BV)) % HV
    n = tl.program_id(0) // (PV // BV * HV)
    if PACKED:
        o_n = tl.arange(0, BN)
        begin = tl.load(cu + o_n, mask=o_n < N, other=0).to(tl.int32)
        end = tl.load(cu + o_n + 1, mask=o_n < N, other=0).to(tl.int32)
        begin = tl.minimum(tl.maximum(begin, 0), T)
        lengths = tl.maximum(tl.minimum(end, T) - begin, 0)
        chunk0 = tl.sum(tl.where(o_n < n, (lengths + 63) // 64, 0), 0)
        bos = tl.sum(tl.where(o_n == n, begin, 0), 0)
        length = tl.sum(tl.where(o_n == n, lengths, 0), 0)
        # offsets that decrease (never read by the host) may ask for more tiles than there are
        count = tl.maximum(tl.minimum((length + 63) // 64, chunks - chunk0), 0)
    else:
        count = (T + 63) // 64
        chunk0 = n * count
        bos = n * T
        length = T

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    o_s = o_k[None, :] * V + o_v[:, None]
    own = (n.to(tl.int64) * HV + i_hv) * (K * V)
    S = tl.zeros([BV, BK], tl.float32)
    if INITIAL:
        S += tl.load(initial + own + o_s, mask=m_s, other=0.0).to(tl.float32)
    if KEPT:
        # rows m0 <= m < m1 of the table are this sequence's: stop at each, then run to the end
        o_m = tl.arange(0, BM)
        owner = tl.load(boundaries + 2 * o_m, mask=o_m < M, other=0)
        m0 = tl.sum(((owner < n) & (o_m < M)).to(tl.int32), 0)
        m1 = tl.sum(((owner <= n) & (o_m < M)).to(tl.int32), 0)
        start = 0
        for m in range(m0, m1 + 1):
            tokens = tl.load(boundaries + 2 * m + 1, mask=m1 > m, other=0)
            stop = tl.where(m1 > m, tl.minimum(tokens // 64, count), count)
            S = advance(
                S, W, U, QG, KG, AQ, DD, o, i_v, i_hv, chunk0, start, stop, bos, length, HV, V, BK, PV, BV, STAGES
            )
            # past the end, between boundaries or out of order, which the host could not know: NaN rather than a wrong state
            reached = (tokens <= length) & (tokens == stop * 64) & (start <= stop)
            m_o = m_s & (o_v < tl.where(m1 > m, V, 0))[:, None]
            p_s = kept + (tl.cast(m, tl.int64) * HV + i_hv) * (K * V) + o_s
            tl.store(p_s, tl.where(reached, S, float("nan")), mask=m_o)
            start = tl.maximum(start, stop)
    else:
        S = advance(S, W, U, QG, KG, AQ, DD, o, i_v, i_hv, chunk0, 0, count, bos, length, HV, V, BK, PV, BV, STAGES)
    if FINAL:
        tl.store(final + own + o_s, S, mask=m_s)


def state(x: KDACall, s: Scratch, output_final_state: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """-> o [P, HV, V] in v's dtype, final state [N, HV, K, V] fp32 if asked, kept states [M, HV, K, V] in the table's order."""
    _, HV, K, V = x.heads
    device, BK, PV = x.q.device, padded(K), padded(V)
    o = torch.empty_like(x.v, memory_format=torch.contiguous_format)  # a shape given as torch.Size costs the host 1 us
    final = torch.empty(x.N, HV, K, V, device=device) if output_final_state else None
    M = 0 if x.boundaries is None else x.boundaries.shape[0]
    kept = None if x.boundaries is None else torch.empty(M, HV, K, V, device=device)
    if not x.N:
        return o, final, kept
    BV, stages, warps = tiling(BK, PV, x.q.dtype)
    launch(
        kda_state_kernel, (PV // BV * HV * x.N,),
        (s.W, s.U, s.QG, s.KG, s.AQ, s.DD, x.initial_state, o, final, x.cu_seqlens, x.boundaries, kept),
        (x.T, x.N, M, x.chunks),
        dict(HV=HV, K=K, V=V, BK=BK, PV=PV, BV=BV, BN=padded(max(x.N, 16)), BM=padded(max(M, 16)),
             INITIAL=x.initial_state is not None, FINAL=output_final_state, KEPT=M > 0, PACKED=x.cu_seqlens is not None,
             STAGES=stages),
        num_warps=warps,
    )  # fmt: skip
    return o, final, kept


def tiling(BK: int, PV: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Columns a program holds, stages of its loop, warps: S must fit the registers and the stages the shared memory."""
    if dtype == torch.float32:
        return 16, 1, 8
    return (min(PV, 64), 3, 4) if BK <= 128 else (16, 2, 4)
