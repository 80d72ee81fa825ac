"""Scores inside a chunk of 64 tokens for the Hopper front kernel: the dyadic ladder, and the shortcut most chunks take.

Decays lie in shared memory as log2, summed inside bands of 16 tokens: a thread holds the 16 tokens of a band for two channels, so
that anchors of blocks of up to 16 tokens are registers of its own; larger ones are sums of a few band totals.

Most chunks decay little. Where every channel loses less than 2^LIMIT in each half of a block, one anchor in the block's
middle serves queries and keys on both sides of it, exactly: no exponent overflows. The largest such block of 64, 32, 16 or
8 tokens is the chunk's tier. Pairs in larger blocks take the ladder's levels; without a tier the ladder goes down to single
tokens. Levels run from coarse to fine and each overwrites the diagonal blocks of the one before: a select, no sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .hopper_tiles import (
    ACC,
    BANDS,
    PANEL,
    band_index,
    band_row,
    banded,
    barrier,
    exp2,
    fixed,
    flat,
    larger,
    scaled,
    scaled_once,
    token_index,
)

LIMIT = fixed(100.0)  # leaves 2^27 for the size of a raw q or k


@gluon.jit
def band_total(s_c, p, BAND: gl.constexpr):
    """[1, 1, 64]: a band's last sum."""
    row = s_c.index(p).slice(BAND * 16 + 15, 1).load(PANEL)
    return gl.convert_layout(gl.reshape(row, [1, 1, 64]), BANDS)


@gluon.jit
def chunk_sums(s_c, p):
    """-> what the bands before each band sum to [4, 1, 64], the first half's sum and the chunk's [1, 1, 64]."""
    t0 = band_total(s_c, p, 0)
    half = t0 + band_total(s_c, p, 1)
    t2 = band_total(s_c, p, 2)
    b = band_index()
    before = gl.where(b == 0, 0.0, gl.where(b == 1, t0, gl.where(b == 2, half, half + t2)))
    return before, half, half + t2 + band_total(s_c, p, 3)


@gluon.jit
def anchor(c, s_c, p, LEVEL: gl.constexpr):
    """The sum where the second of each pair of 2^LEVEL-token blocks begins, as the band counts it."""
    o_t = token_index()
    if LEVEL == 5:
        before, half, total = chunk_sums(s_c, p)
        a = half - before
    elif LEVEL == 4:
        a = gl.where((band_index() & 1) == 1, 0.0, band_row(c, 15))
    elif LEVEL == 3:
        a = band_row(c, 8)
    elif LEVEL == 2:
        a = gl.where(o_t < 8, band_row(c, 4), band_row(c, 12))
    elif LEVEL == 1:
        a0 = gl.where(o_t < 4, band_row(c, 2), band_row(c, 6))
        a = gl.where(o_t < 8, a0, gl.where(o_t < 12, band_row(c, 10), band_row(c, 14)))
    else:
        a0 = gl.where(o_t < 2, band_row(c, 1), band_row(c, 3))
        a1 = gl.where(o_t < 6, band_row(c, 5), band_row(c, 7))
        a2 = gl.where(o_t < 10, band_row(c, 9), band_row(c, 11))
        a3 = gl.where(o_t < 14, band_row(c, 13), band_row(c, 15))
        a = gl.where(o_t < 8, gl.where(o_t < 4, a0, a1), gl.where(o_t < 12, a2, a3))
    return a


@gluon.jit
def failing_tiers(s_c, p):
    """How many of the tiers 64, 32, 16, 8 some channel of panel p decays too much for; [4, 1, 64] per band and channel."""
    c = banded(s_c.index(p).load(PANEL))
    end = band_row(c, 15)
    c4 = band_row(c, 4)
    c8 = band_row(c, 8)
    c12 = band_row(c, 12)
    before, half, total = chunk_sums(s_c, p)
    a = half - before
    of_64 = gl.maximum(gl.abs(a), gl.abs(end - a)) > LIMIT
    of_32 = -end > LIMIT
    of_16 = gl.maximum(-c8, c8 - end) > LIMIT
    of_8 = gl.maximum(gl.maximum(-c4, c4 - c8), gl.maximum(c8 - c12, c12 - end)) > LIMIT
    return of_64.to(gl.int32) + of_32.to(gl.int32) + of_16.to(gl.int32) + of_8.to(gl.int32)


@gluon.jit
def chunk_tier(s_c):
    """log2 of the tokens of the chunk's tier, 0 if it has none."""
    failing = gl.maximum(failing_tiers(s_c, 0), failing_tiers(s_c, 1))
    failing = gl.reduce(gl.reduce(gl.reduce(failing, 2, larger), 1, larger), 0, larger)
    return gl.where(failing == 4, 0, 6 - failing)


@gluon.jit
def issue(rows, keys, x, p):
    """Panel p of rows keys^T, accumulated in x, once the product over the other panel is done."""
    x = warpgroup_mma_wait(0, deps=[x])
    fence_async_shared()
    barrier()
    return warpgroup_mma(rows.index(p), keys.index(p).permute((1, 0)), x, use_acc=p > 0, is_async=True)


@gluon.jit
def product(rows, keys):
    zero = gl.zeros([64, 64], gl.float32, ACC)
    y = warpgroup_mma(rows.index(0), keys.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(rows.index(1), keys.index(1).permute((1, 0)), y, is_async=True)


@gluon.jit
def ladder_level(s_c, s_q, s_k, s_qs, s_ks, a_q, a_k, o_i, o_j, LEVEL: gl.constexpr):
    """Scores between the two blocks of each pair of 2^LEVEL-token blocks; queries and keys share one factor <= 1."""
    x = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, ACC))
    for p in gl.static_range(2):
        c = banded(s_c.index(p).load(PANEL))
        f = flat(exp2(-gl.abs(c - anchor(c, s_c, p, LEVEL))))
        s_qs.index(p).store(scaled(s_q.index(p).load(PANEL), f))
        s_ks.index(p).store(scaled(s_k.index(p).load(PANEL), f))
        x = issue(s_qs, s_ks, x, p)
    y = product(s_ks, s_ks)
    inside = (o_i >> (LEVEL + 1)) == (o_j >> (LEVEL + 1))  # finer levels overwrite what is wrong here
    x = warpgroup_mma_wait(2, deps=[x])
    a_q = gl.where(inside, x, a_q)
    y = warpgroup_mma_wait(0, deps=[y])
    barrier()  # the next level overwrites what every warp has read
    return a_q, gl.where(inside, y, a_k)


@gluon.jit
def tier_blocks(s_c, s_q, s_k, s_qs, s_ks, s_kk, a_q, a_k, o_i, o_j, tier):
    """Scores inside the diagonal blocks of 2^tier tokens (tier 0: a token reads itself, undecayed)."""
    x = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, ACC))
    decayed = gl.where(tier == 0, 0.0, 1.0)
    for p in range(2):  # not unrolled: every chunk runs this, and the instruction cache is short
        c = banded(s_c.index(p).load(PANEL))
        a = gl.where(tier == 5, anchor(c, s_c, p, 4), anchor(c, s_c, p, 3))
        a = gl.where(tier == 6, anchor(c, s_c, p, 5), a)
        a = gl.where(tier == 3, anchor(c, s_c, p, 2), a)
        d = flat(c * decayed - a * decayed)
        e = exp2(d)
        b_k = s_k.index(p).load(PANEL)
        s_qs.index(p).store(scaled_once(s_q.index(p).load(PANEL), e))
        s_ks.index(p).store(scaled_once(b_k, e))
        s_kk.index(p).store(scaled_once(b_k, exp2(-d)))
        x = issue(s_qs, s_kk, x, p)
    y = product(s_ks, s_kk)
    inside = ((o_i ^ o_j) >> tier) == 0
    x = warpgroup_mma_wait(2, deps=[x])
    a_q = gl.where(inside & (o_i >= o_j), x, a_q)  # above the diagonal x may be inf
    y = warpgroup_mma_wait(0, deps=[y])
    return a_q, gl.where(inside & (o_i > o_j), y, a_k)


@gluon.jit
def chunk_scores(s_c, s_q, s_k, o_i, o_j):
    """-> sum_c q_ic k_jc exp2(G_ic - G_jc) for j <= i, the same of k and k for j < i, zeros elsewhere; [64, 64] each."""
    tier = chunk_tier(s_c)
    a_q = gl.zeros([64, 64], gl.float32, ACC)
    a_k = gl.zeros([64, 64], gl.float32, ACC)
    s_qs = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], s_q.layout)
    s_ks = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], s_q.layout)
    if tier < 6:
        a_q, a_k = ladder_level(s_c, s_q, s_k, s_qs, s_ks, a_q, a_k, o_i, o_j, 5)
        if tier < 5:
            a_q, a_k = ladder_level(s_c, s_q, s_k, s_qs, s_ks, a_q, a_k, o_i, o_j, 4)
            if tier < 4:
                a_q, a_k = ladder_level(s_c, s_q, s_k, s_qs, s_ks, a_q, a_k, o_i, o_j, 3)
                if tier < 3:
                    a_q, a_k = ladder_level(s_c, s_q, s_k, s_qs, s_ks, a_q, a_k, o_i, o_j, 2)
                    a_q, a_k = ladder_level(s_c, s_q, s_k, s_qs, s_ks, a_q, a_k, o_i, o_j, 1)
                    a_q, a_k = ladder_level(s_c, s_q, s_k, s_qs, s_ks, a_q, a_k, o_i, o_j, 0)
        a_q = gl.where(o_i > o_j, a_q, 0.0)
        a_k = gl.where(o_i > o_j, a_k, 0.0)
    s_kk = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], s_q.layout)
    return tier_blocks(s_c, s_q, s_k, s_qs, s_ks, s_kk, a_q, a_k, o_i, o_j, tier)
