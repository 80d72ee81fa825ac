"""``kda_front.py`` for Hopper, in Gluon: bf16, K = V = 128, intra "dyadic". Same scratch, same contract.

One program of four warps per chunk and value head, two programs a multiprocessor: that is all its registers and shared
memory. A [64, 128] tile is worked on as two panels of 64 channels. The scores are in ``kda_scores_hopper.py``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_tiles import (
    ACC,
    ACC_16,
    FLAT,
    LEFT,
    LEFT_16,
    LINE,
    LOG2E,
    PANEL,
    RIGHT_16,
    ROWS,
    TILE,
    banded,
    barrier,
    exp2,
    flat,
    locate,
    plus,
    scaled_once,
)
from .kda_args import KDACall, Scratch, padded
from .kda_scores_hopper import chunk_scores, chunk_sums
from .launch import launch


@gluon.jit
def log2_decay(x, rate, bias, lower_bound, RAW: gl.constexpr, BOUND: gl.constexpr):
    """log2 of the decay. A raw gate goes through -rate * softplus(x + bias) first, see ``kda_front.log2_decay``."""
    x = x.to(gl.float32)
    if RAW:
        x += bias
        y = exp2(-gl.abs(x) * LOG2E)
        z = y / (2.0 + y)  # log1p(y) = 2 atanh(z), z <= 1/3
        zz = z * z
        series = 1.0 + zz * (1.0 / 3.0 + zz * (1.0 / 5.0 + zz * (1.0 / 7.0 + zz * (1.0 / 9.0 + zz * (1.0 / 11.0)))))
        x = -rate * (gl.maximum(x, 0.0) + 2.0 * z * series)
        if BOUND:
            x = gl.maximum(x, lower_bound)
    return x * LOG2E


@gluon.jit
def load_panel(g, left, sg, p):
    o_i = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, PANEL)), 1)
    o_c = gl.arange(0, 64, layout=gl.SliceLayout(0, PANEL)) + p * 64
    return gl.load(g + o_i * sg + gl.expand_dims(o_c, 0), mask=o_i < left, other=0.0)


@gluon.jit
def sum_decays(b_g, A_log, dt_bias, s_c, p, left, i_hv, lower_bound, RAW: gl.constexpr, BOUND: gl.constexpr):
    """Panel p of the decays into shared memory: log2, summed from the first token of each band of 16."""
    rate = 0.0
    bias = 0.0
    if RAW:
        o_c = gl.arange(0, 64, layout=gl.SliceLayout(0, PANEL)) + p * 64
        rate = exp2(gl.load(A_log + i_hv).to(gl.float32) * LOG2E)
        bias = gl.expand_dims(gl.load(dt_bias + i_hv * 128 + o_c).to(gl.float32), 0)
    b_g = log2_decay(b_g, rate, bias, lower_bound, RAW, BOUND)
    if RAW:
        b_g = gl.where(gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, PANEL)), 1) < left, b_g, 0.0)
    s_c.index(p).store(flat(gl.associative_scan(banded(b_g), 1, plus)))


@gluon.jit
def between(o_i, o_j, LEVEL: gl.constexpr):
    """Whether i is in the second and j in the first block of one pair of 2^LEVEL-token blocks."""
    return (((o_i >> LEVEL) - 1) == (o_j >> LEVEL)) & (((o_i >> LEVEL) & 1) == 1)


@gluon.jit
def as_right(x):
    """x^T -> x as right operand of a small product: the same registers."""
    return gl.convert_layout(gl.permute(x.to(gl.float16), (0, 2, 1)), RIGHT_16)


@gluon.jit
def sandwich(t, low, t_again):
    """t low t_again for one 16 x 16 block a warp, the last two as right operands."""
    zero = gl.zeros([4, 16, 16], gl.float32, ACC_16)
    x = mma_v2(gl.convert_layout(t.to(gl.float16), LEFT_16), low, zero)
    return mma_v2(gl.convert_layout(x.to(gl.float16), LEFT_16), t_again, zero)


@gluon.jit
def inverse(low, o_i, o_j):
    """(I + low)^-1 for strictly lower triangular low [64, 64], from small blocks up: below two of them stands -T2 L21 T1.

    Up to 16 tokens every warp inverts its own diagonal block in registers. It keeps the transposed inverse as well, since
    what is a result of one is the right operand of the other. fp16 operands: |T| <= 1 for unit keys and strengths <= 1, and
    fp16 has tf32's mantissa at twice the rate.
    """
    wide = gl.reshape(low, [4, 16, 4, 16])
    L4: gl.constexpr = wide.type.layout
    L1: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L4)))
    L0: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L4)))
    block_i = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=L1), 1), 2), 3)
    block_j = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=L0), 0), 1), 3)
    diagonal = block_i == block_j
    own = gl.convert_layout(gl.sum(gl.where(diagonal, wide, 0.0), 2), ACC_16)  # [4, 16, 16], one block a warp
    own_t = gl.convert_layout(gl.permute(own, (0, 2, 1)), ACC_16)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, ACC_16))), 0), 2)
    c = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, ACC_16))), 0), 1)
    t = gl.where(r == c, 1.0, 0.0) - gl.where(between(r, c, 0), own, 0.0)
    t_t = gl.where(r == c, 1.0, 0.0) - gl.where(between(c, r, 0), own_t, 0.0)
    for level in gl.static_range(1, 4):
        x = sandwich(t, as_right(own_t), as_right(t_t))
        x_t = sandwich(t_t, as_right(own), as_right(t))
        t = gl.where(between(r, c, level), -x, t)
        t_t = gl.where(between(c, r, level), -x_t, t_t)
    blocks = gl.expand_dims(gl.convert_layout(t, gl.SliceLayout(2, L4)), 2)
    t = gl.convert_layout(gl.reshape(gl.where(diagonal, blocks, 0.0), [64, 64]), ACC)

    s_l = gl.allocate_shared_memory(gl.float16, [64, 64], TILE)
    s_t = gl.allocate_shared_memory(gl.float16, [64, 64], TILE)
    zero = gl.zeros([64, 64], gl.float32, ACC)
    s_l.store(low.to(gl.float16))
    for level in gl.static_range(4, 6):
        half = t.to(gl.float16)
        s_t.store(half)
        fence_async_shared()
        barrier()
        x = warpgroup_mma(gl.convert_layout(half, LEFT), s_l, zero, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        x = warpgroup_mma(gl.convert_layout(x.to(gl.float16), LEFT), s_t, zero, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        t = gl.where(between(o_i, o_j, level), -x, t)
        barrier()  # everyone has read s_t
    return t


@gluon.jit(do_not_specialize=["T", "N"])
def kda_front_hopper_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu,
    W, U, QG, KG, AQ, DD,
    T, N, sq, sk, sv, sg, sb, scale, lower_bound,
    H: gl.constexpr, HV: gl.constexpr, BN: gl.constexpr,
    L2NORM: gl.constexpr, RAW: gl.constexpr, BOUND: gl.constexpr, LOGIT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Strides sq ... sb are those of a token."""
    tile = gl.program_id(0).to(gl.int64)
    i_hv = gl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    bos, length, t0 = locate(gl.program_id(0) // HV, cu, T, N, BN, PACKED)
    left = length - t0  # tokens of the sequence from here on
    if left <= 0:
        return
    row = (bos + t0).to(gl.int64)
    q += row * sq + i_h * 128
    k += row * sk + i_h * 128
    v += row * sv + i_hv * 128
    g += row * sg + i_hv * 128
    beta += row * sb + i_hv

    s_c = gl.allocate_shared_memory(gl.float32, [2, 64, 64], FLAT)
    s_q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    s_k = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    s_r = gl.allocate_shared_memory(gl.float32, [3, 64], LINE)  # per token: q's factor, 1/|k|, beta
    o_r = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS)), 1)
    o_c = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS)), 0)
    m_r = o_r < left
    g0 = load_panel(g, left, sg, 0)
    g1 = load_panel(g, left, sg, 1)
    q0 = gl.load(q + o_r * sq + o_c, mask=m_r, other=0.0)
    q1 = gl.load(q + o_r * sq + o_c + 64, mask=m_r, other=0.0)
    k0 = gl.load(k + o_r * sk + o_c, mask=m_r, other=0.0)
    k1 = gl.load(k + o_r * sk + o_c + 64, mask=m_r, other=0.0)
    o_b = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    b = gl.load(beta + o_b * sb, mask=o_b < left, other=0.0).to(gl.float32)
    if LOGIT:
        b = gl.where(o_b < left, 1.0 / (1.0 + exp2(-b * LOG2E)), 0.0)
    sum_decays(g0, A_log, dt_bias, s_c, 0, left, i_hv, lower_bound, RAW, BOUND)
    sum_decays(g1, A_log, dt_bias, s_c, 1, left, i_hv, lower_bound, RAW, BOUND)
    s_q.index(0).store(q0)
    s_q.index(1).store(q1)
    s_k.index(0).store(k0)
    s_k.index(1).store(k1)
    f0 = k0.to(gl.float32)
    f1 = k1.to(gl.float32)
    r_k = gl.rsqrt(gl.sum(f0 * f0 + f1 * f1, 1) + 1e-6)
    r_q = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, ROWS)) * scale
    if L2NORM:
        f0 = q0.to(gl.float32)
        f1 = q1.to(gl.float32)
        r_q *= gl.rsqrt(gl.sum(f0 * f0 + f1 * f1, 1) + 1e-6)
    s_r.index(0).store(r_q)
    s_r.index(1).store(r_k)
    s_r.index(2).store(b)
    barrier()

    o_i = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, ACC)), 1)
    o_j = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, ACC)), 0)
    a_q, a_k = chunk_scores(s_c, s_q, s_k, o_i, o_j)
    # 1/|q| and 1/|k| are applied to rows and columns of results, where they cost no rounding to bf16
    r_i = gl.expand_dims(s_r.index(1).load(gl.SliceLayout(1, ACC)), 1)
    r_j = gl.expand_dims(s_r.index(1).load(gl.SliceLayout(0, ACC)), 0)
    b_i = gl.expand_dims(s_r.index(2).load(gl.SliceLayout(1, ACC)), 1)
    a_q *= gl.expand_dims(s_r.index(0).load(gl.SliceLayout(1, ACC)), 1)
    if L2NORM:
        a_q *= r_j
        a_k *= (b_i * r_i) * r_j
    else:
        # the inverse is taken of |k_i| L_ij / |k_j|, whose entries are those of unit keys and strengths beta |k|^2
        a_k *= (b_i / r_i) * r_j
    gl.store(AQ + tile * 4096 + o_r * 64 + o_c, gl.convert_layout(a_q.to(gl.bfloat16), ROWS))
    v0 = gl.load(v + o_r * sv + o_c, mask=m_r, other=0.0)  # on its way during the inverse
    v1 = gl.load(v + o_r * sv + o_c + 64, mask=m_r, other=0.0)
    t = inverse(a_k, o_i, o_j)
    b_j = gl.expand_dims(s_r.index(2).load(gl.SliceLayout(0, ACC)), 0)
    r_j = gl.expand_dims(s_r.index(1).load(gl.SliceLayout(0, ACC)), 0)
    if L2NORM:
        t_v = gl.convert_layout((t * b_j).to(gl.bfloat16), LEFT)
        t_k = gl.convert_layout((t * (b_j * r_j)).to(gl.bfloat16), LEFT)
    else:
        r_i = gl.expand_dims(s_r.index(1).load(gl.SliceLayout(1, ACC)), 1)
        t_v = gl.convert_layout((t * r_i * (b_j / r_j)).to(gl.bfloat16), LEFT)
        t_k = t_v

    s_v = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    s_kd = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    s_v.index(0).store(v0)
    s_v.index(1).store(v1)
    zero = gl.zeros([64, 64], gl.float32, ACC)
    o_t = gl.arange(0, 64, layout=gl.SliceLayout(1, PANEL))
    p_t = gl.expand_dims(o_t * 128, 1) + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, PANEL)), 0)
    for p in range(2):
        before, half, total = chunk_sums(s_c, p)
        c = banded(s_c.index(p).load(PANEL)) + before  # from the chunk's first token
        decay = exp2(flat(c))
        rest = exp2(flat(total - c))
        b_k = s_k.index(p).load(PANEL)
        s_kd.index(p).store(scaled_once(b_k, decay))
        fence_async_shared()
        barrier()
        w = warpgroup_mma(t_k, s_kd.index(p), zero, use_acc=False, is_async=True)
        u = warpgroup_mma(t_v, s_v.index(p), zero, use_acc=False, is_async=True)
        o = tile * 8192 + p * 64
        if L2NORM:
            rest *= gl.expand_dims(s_r.index(1).load(gl.SliceLayout(1, PANEL)), 1)
        gl.store(KG + o + p_t, scaled_once(b_k, rest))
        decay *= gl.expand_dims(s_r.index(0).load(gl.SliceLayout(1, PANEL)), 1)
        gl.store(QG + o + p_t, scaled_once(s_q.index(p).load(PANEL), decay))
        all_of_it = gl.reshape(total, [64])
        gl.store(DD + tile * 128 + p * 64 + gl.arange(0, 64, layout=all_of_it.type.layout), exp2(all_of_it))
        w, u = warpgroup_mma_wait(0, deps=[w, u])
        gl.store(W + o + o_r * 128 + o_c, gl.convert_layout(w.to(gl.bfloat16), ROWS))
        u = gl.convert_layout(gl.permute(u.to(gl.bfloat16), (1, 0)), ROWS)
        gl.store(U + tile * 8192 + p * 4096 + o_r * 64 + o_c, u)


def front(x: KDACall, s: Scratch) -> None:
    """Fill the scratch tensors of every tile."""
    H, HV, _, _ = x.heads
    launch(
        kda_front_hopper_kernel, (x.chunks * HV,),
        (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, s.W, s.U, s.QG, s.KG, s.AQ, s.DD),
        (x.T, x.N, *x.strides, x.scale, 0.0 if x.lower_bound is None else x.lower_bound),
        dict(H=H, HV=HV, BN=padded(max(x.N, 128)), L2NORM=x.l2norm, RAW=x.raw_gate, BOUND=x.lower_bound is not None,
             LOGIT=x.beta_logit, PACKED=x.cu_seqlens is not None),
        num_warps=4,
    )  # fmt: skip
