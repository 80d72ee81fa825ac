"""First launch of chunk_kda: everything inside a chunk that does not need the state. One program per chunk and value head.

With G the cumulative log2 decay from the chunk's first token, and A, L, T = (I + L)^-1 as in ``berrylm_ref/ops/kda_chunk.py``:

    W  [tile, 64, K]  T diag(beta) (k exp2(G))    what the old state says about each token's value
    U  [tile, V, 64]  (T diag(beta) v)^T          what each token would write into an empty state
    QG [tile, 64, K]  scale q exp2(G)             queries that read the old state
    KG [tile, 64, K]  k exp2(G_last - G)          keys as the chunk's end sees them
    AQ [tile, 64, 64] scale A                     queries that read this chunk's own tokens
    DD [tile, K] fp32 exp2(G_last)                what is left of the old state

tile = chunk * HV + value head, chunks counted over all sequences in order. Head sizes are padded to powers of two with zeros, and
so are the rows past a sequence's end (no key, no value, no decay): the state is exact at tails.
"""

import torch
import triton
import triton.language as tl

from .kda_args import CHUNK, KDACall, Scratch, padded
from .kda_scores import FORMS, clamped_scores, difference_scores, dyadic_scores
from .launch import launch

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def locate(i_c, cu, T, N, BN: tl.constexpr, PACKED: tl.constexpr):
    """Chunk i_c of all chunks -> (first row of its sequence, length of its sequence, its first token in the sequence)."""
    if PACKED:
        o_n = tl.arange(0, BN)
        begin = tl.load(cu + o_n, mask=o_n < N, other=0).to(tl.int32)
        end = tl.load(cu + o_n + 1, mask=o_n < N, other=0).to(tl.int32)
        begin = tl.minimum(tl.maximum(begin, 0), T)  # offsets on a GPU were never read by the host
        length = tl.maximum(tl.minimum(end, T) - begin, 0)
        count = (length + 63) // 64
        upto = tl.cumsum(count, 0)
        here = (i_c < upto) & (i_c >= upto - count)  # nowhere past the last chunk: length 0
        bos = tl.sum(tl.where(here, begin, 0), 0)
        first = tl.sum(tl.where(here, upto - count, 0), 0)
        length = tl.sum(tl.where(here, length, 0), 0)
        return bos, length, (i_c - first) * 64
    else:
        count = (T + 63) // 64
        return (i_c // count) * T, T, (i_c % count) * 64


@triton.jit
def log2_decay(x, rate, bias, lower_bound, RAW: tl.constexpr, BOUND: tl.constexpr):
    """log2 of a token's decay. A raw gate goes through -rate * softplus(x + bias) first."""
    x = x.to(tl.float32)
    if RAW:
        x += bias
        # softplus(x) = max(x, 0) + log1p(y), y = exp(-|x|). log1p(y) = 2 atanh(z), z = y / (2 + y) <= 1/3, is a short series
        # that keeps its relative precision where log(1 + y) has lost it.
        y = tl.exp2(-tl.abs(x) * LOG2E)
        z = y / (2.0 + y)
        zz = z * z
        series = 1.0 / 13.0 + zz * (1.0 / 15.0)
        series = 1.0 / 9.0 + zz * (1.0 / 11.0 + zz * series)
        series = 1.0 / 5.0 + zz * (1.0 / 7.0 + zz * series)
        series = 1.0 + zz * (1.0 / 3.0 + zz * series)
        x = -rate * (tl.maximum(x, 0.0) + 2.0 * z * series)
        if BOUND:
            x = tl.maximum(x, lower_bound)
    return x * LOG2E


@triton.jit
def invert(low, PREC: tl.constexpr):
    """(I + low)^-1 for strictly lower triangular low [64, 64], from small blocks up.

    With T1, T2 the inverses of two neighbouring blocks and X what stands below them in low, -T2 X T1 stands there.
    """
    o_i = tl.arange(0, 64)
    inv = tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0)
    for level in range(6):
        b = o_i >> level
        pair = ((b & 1) == 1)[:, None] & ((b - 1)[:, None] == b[None, :])
        t = inv.to(low.dtype)
        x = tl.dot(tl.dot(t, low, input_precision=PREC).to(low.dtype), t, input_precision=PREC)
        inv = tl.where(pair, -x, inv)
    return inv


@triton.jit(do_not_specialize=["T", "N"])
def kda_front_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu,
    W, U, QG, KG, AQ, DD, TOT,
    T, N, sq, sk, sv, sg, sb, scale, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr, PV: tl.constexpr, BN: tl.constexpr,
    FORM: tl.constexpr, L2NORM: tl.constexpr, RAW: tl.constexpr, BOUND: tl.constexpr, LOGIT: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """sq ... sb: token strides. PK, PV: padded head sizes, BK, BV columns at a time. TOT: scratch of this kernel alone."""
    DT: tl.constexpr = q.dtype.element_ty
    # unit keys and beta <= 1 keep |T| <= 1: fp16 has tf32's mantissa at twice the rate. Other keys may leave fp16's range.
    IT: tl.constexpr = tl.float16 if DT == tl.bfloat16 and L2NORM else tl.float32
    PREC: tl.constexpr = "ieee" if DT == tl.float32 else "tf32"
    i_hv = tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    bos, length, t0 = locate(tl.program_id(0) // HV, cu, T, N, BN, PACKED)
    if t0 >= length:
        return
    # 64-bit bases; offsets inside a tile fit 32
    tile = tl.program_id(0).to(tl.int64)
    row = (bos + t0).to(tl.int64)
    q += row * sq + i_h * K
    k += row * sk + i_h * K
    v += row * sv + i_hv * V
    g += row * sg + i_hv * K
    W += tile * (64 * PK)
    QG += tile * (64 * PK)
    KG += tile * (64 * PK)
    U += tile * (64 * PV)

    o_i = tl.arange(0, 64)
    m_i = o_i < length - t0
    b_beta = tl.load(beta + row * sb + i_hv + o_i * sb, mask=m_i, other=0.0).to(tl.float32)  # [64]
    if LOGIT:
        b_beta = tl.where(m_i, 1.0 / (1.0 + tl.exp2(-b_beta * LOG2E)), 0.0)
    rate = 0.0
    if RAW:
        rate = tl.exp2(tl.load(A_log + i_hv).to(tl.float32) * LOG2E)
    # 1 / |q| and 1 / |k| scale rows and columns of results, where they cost no rounding to DT
    r_q = tl.full([64], 1.0, tl.float32) * scale
    r_k = tl.full([64], 1.0, tl.float32)
    if L2NORM:
        qq = tl.zeros([64], tl.float32)
        kk = tl.zeros([64], tl.float32)
        for i_k in range(PK // BK):
            o_k = i_k * BK + tl.arange(0, BK)
            m = m_i[:, None] & (o_k < K)[None, :]
            b_q = tl.load(q + (o_i[:, None] * sq + o_k[None, :]), mask=m, other=0.0).to(tl.float32)
            b_k = tl.load(k + (o_i[:, None] * sk + o_k[None, :]), mask=m, other=0.0).to(tl.float32)
            qq += tl.sum(b_q * b_q, 1)
            kk += tl.sum(b_k * b_k, 1)
        r_q *= tl.rsqrt(qq + 1e-6)
        r_k *= tl.rsqrt(kk + 1e-6)

    a_q = tl.zeros([64, 64], tl.float32)  # q k^T with decay, j <= i
    a_k = tl.zeros([64, 64], tl.float32)  # k k^T with decay, j < i
    for i_k in range(PK // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        m = m_i[:, None] & (o_k < K)[None, :]
        b_q = tl.load(q + (o_i[:, None] * sq + o_k[None, :]), mask=m, other=0.0)  # [64, BK]
        b_k = tl.load(k + (o_i[:, None] * sk + o_k[None, :]), mask=m, other=0.0)
        b_g = tl.load(g + (o_i[:, None] * sg + o_k[None, :]), mask=m, other=0.0)
        bias = tl.zeros([BK], tl.float32)
        if RAW:
            bias = tl.load(dt_bias + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_g = tl.where(m, log2_decay(b_g, rate, bias[None, :], lower_bound, RAW, BOUND), 0.0)
        if FORM == 1:
            a_q, a_k = difference_scores(b_q, b_k, b_g, a_q, a_k)
        elif FORM == 2:  # unit keys from the start: 2^126 times a longer one leaves the range, and NaN is not how this form fails
            n_q = (b_q.to(tl.float32) * r_q[:, None]).to(DT)
            n_k = (b_k.to(tl.float32) * r_k[:, None]).to(DT)
            a_q, a_k = clamped_scores(n_q, n_k, b_g, a_q, a_k)
        since, until, a_q, a_k = dyadic_scores(b_q, b_k, b_g, a_q, a_k, TOT + tile * (64 * BK), FORM == 0)
        p = o_i[:, None] * PK + o_k[None, :]
        b_q = b_q.to(tl.float32) * since
        b_k = b_k.to(tl.float32)
        tl.store(W + p, (b_k * since).to(DT))  # the right operand of w, in w's place until T is known
        tl.store(QG + p, (b_q * r_q[:, None]).to(DT))
        tl.store(KG + p, (b_k * r_k[:, None] * until).to(DT))
        tl.store(DD + tile * PK + o_k, tl.sum(tl.where((o_i == 63)[:, None], since, 0.0), 0))

    if FORM != 2:
        a_q *= r_q[:, None] * r_k[None, :]
    tl.store(AQ + tile * 4096 + (o_i[:, None] * 64 + o_i[None, :]), a_q.to(DT))
    a_k *= b_beta[:, None] if FORM == 2 else (r_k * b_beta)[:, None] * r_k[None, :]
    inv = invert(a_k.to(IT), PREC)
    inv_w = (inv * (b_beta * r_k)[None, :]).to(DT)
    tl.debug_barrier()  # other threads of this program wrote W
    for i_k in range(PK // BV):
        o_k = i_k * BV + tl.arange(0, BV)
        p = W + (o_i[:, None] * PK + o_k[None, :])
        tl.store(p, tl.dot(inv_w, tl.load(p), input_precision="ieee").to(DT))
    inv_u = (inv * b_beta[None, :]).to(DT)
    for i_v in range(PV // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        m = m_i[:, None] & (o_v < V)[None, :]
        b_v = tl.load(v + (o_i[:, None] * sv + o_v[None, :]), mask=m, other=0.0)
        b_u = tl.dot(inv_u, b_v, input_precision="ieee")
        tl.store(U + (o_v[:, None] * 64 + o_i[None, :]), tl.trans(b_u).to(DT))


def front(x: KDACall, s: Scratch) -> None:
    """Fill the scratch tensors of every tile."""
    H, HV, K, V = x.heads
    PK, PV = padded(K), padded(V)
    BK, BV = tiling(PK, PV, x.q.dtype, x.intra)
    TOT = torch.empty(x.chunks * HV * CHUNK * BK, dtype=torch.float32, device=x.q.device)
    launch(
        kda_front_kernel, (x.chunks * HV,),
        (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, s.W, s.U, s.QG, s.KG, s.AQ, s.DD, TOT),
        (x.T, x.N, *x.strides, x.scale, 0.0 if x.lower_bound is None else x.lower_bound),
        dict(H=H, HV=HV, K=K, V=V, BK=BK, PK=PK, BV=BV, PV=PV, BN=padded(max(x.N, 16)),
             FORM=FORMS[x.intra], L2NORM=x.l2norm, RAW=x.raw_gate, BOUND=x.lower_bound is not None, LOGIT=x.beta_logit,
             PACKED=x.cu_seqlens is not None),
        num_warps=8, num_stages=1,
    )  # fmt: skip


def tiling(PK: int, PV: int, dtype: torch.dtype, intra: str) -> tuple[int, int]:
    """Columns of K and of V a program takes at a time: as many as its registers hold."""
    if dtype == torch.float32:
        return 16, 16
    return min(PK, 128 if PK == 128 and intra == "dyadic" else 64), min(PK, PV, 64)
