"""The scores inside a chunk: q k^T and k k^T with the decay from each key to each query, in three forms.

Each takes b_q, b_k [64, BK] and the log2 decays b_g [64, BK] of some key channels, and adds their part of

    a_q[i, j] = sum_c q_ic k_jc exp2(G_ic - G_jc)   j <= i
    a_k[i, j] = sum_c k_ic k_jc exp2(G_ic - G_jc)   j <  i
"""

import triton
import triton.language as tl

FORMS = {"dyadic": 0, "difference": 1, "clamped": 2}
LIMIT = tl.constexpr(126.0)  # of an exponent in the clamped form


@triton.jit
def dyadic_scores(b_q, b_k, b_g, a_q, a_k, TOT, SCORES: tl.constexpr):
    """Exact at every decay. Also returns since and until for the whole chunk, which every form needs: SCORES=False stops there.

    Before level l, with blocks of 2^l tokens: since[i] is the decay from before i's block to i, until[j] the decay from j
    to the end of j's block. Odd blocks are queries, the even block before each its keys: the decay from j to i is
    until[j] * since[i]. Only factors <= 1 are multiplied and nothing is divided or subtracted, so nothing overflows,
    underflow is the true value, and one huge step costs its neighbours no precision.

    TOT [64, BK] fp32 in memory hands a block's total decay (since at its last row) to the block beside it.
    """
    BK: tl.constexpr = b_g.shape[1]
    DT: tl.constexpr = b_q.dtype
    o_i = tl.arange(0, 64)
    o_c = tl.arange(0, BK)[None, :]
    since = tl.exp2(b_g)
    until = tl.full([64, BK], 1.0, tl.float32)
    if SCORES:
        qk = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)  # a token reads its own key undecayed
        a_q += tl.where(o_i[:, None] == o_i[None, :], qk[:, None], 0.0)
    for level in range(6):
        b = o_i >> level
        odd = ((b & 1) == 1)[:, None]
        last = (((o_i + 1) & ((1 << level) - 1)) == 0)[:, None]
        tl.debug_barrier()  # the level before is read
        tl.store(TOT + (o_i[:, None] * BK + o_c), since, mask=last)
        tl.debug_barrier()
        total = tl.load(TOT + (((((b ^ 1) + 1) << level) - 1)[:, None] * BK + o_c))  # of the block beside this row's
        if SCORES:
            decay = tl.where(odd, since, until).to(DT)
            qs = b_q * decay
            ks = b_k * decay
            pair = odd & ((b - 1)[:, None] == b[None, :])  # each j < i is in one pair of one level: a select, not a sum
            a_q = tl.where(pair, tl.dot(qs, tl.trans(ks), a_q, input_precision="ieee"), a_q)
            a_k = tl.where(pair, tl.dot(ks, tl.trans(ks), a_k, input_precision="ieee"), a_k)
        since = tl.where(odd, since * total, since)
        until = tl.where(odd, until, until * total)
    return since, until, a_q, a_k


@triton.jit
def difference_scores(b_q, b_k, b_g, a_q, a_k):
    """Exact and direct: from the last key to the first, its decay to every later token summed on its own."""
    o_i = tl.arange(0, 64)
    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    d = tl.zeros(b_g.shape, tl.float32)
    for n in range(64):
        j = 63 - n
        g_next = tl.sum(tl.where((o_i == j + 1)[:, None], b_g, 0.0), 0)
        k_j = tl.sum(tl.where((o_i == j)[:, None], b_k, 0.0), 0)
        d = tl.where((o_i > j)[:, None], d + g_next[None, :], 0.0)
        keys = k_j[None, :] * tl.exp2(d)
        column = o_i[None, :] == j
        a_q += tl.where(column & (o_i >= j)[:, None], tl.sum(b_q * keys, 1)[:, None], 0.0)
        a_k += tl.where(column & (o_i > j)[:, None], tl.sum(b_k * keys, 1)[:, None], 0.0)
    return a_q, a_k


@triton.jit
def clamped_scores(b_q, b_k, b_g, a_q, a_k):
    """The known failure (sglang#39971): one anchor per 16 tokens, both exponents clamped; forgotten keys come back."""
    DT: tl.constexpr = b_q.dtype
    o_i = tl.arange(0, 64)
    G = tl.cumsum(b_g, 0)
    for b in range(4):
        anchor = tl.sum(tl.where((o_i == 16 * b)[:, None], G, 0.0), 0)[None, :]
        rows = tl.exp2(tl.minimum(tl.maximum(G - anchor, -LIMIT), LIMIT))
        keys = tl.trans((b_k.to(tl.float32) * tl.exp2(tl.minimum(tl.maximum(anchor - G, -LIMIT), LIMIT))).to(DT))
        qs = (b_q.to(tl.float32) * rows).to(DT)
        ks = (b_k.to(tl.float32) * rows).to(DT)
        inside = (o_i >> 4 == b)[:, None]
        a_q += tl.where(inside & (o_i[:, None] >= o_i[None, :]), tl.dot(qs, keys, input_precision="ieee"), 0.0)
        a_k += tl.where(inside & (o_i[:, None] > o_i[None, :]), tl.dot(ks, keys, input_precision="ieee"), 0.0)
    return a_q, a_k
