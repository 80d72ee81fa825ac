"""One decode step of a KDA layer, twin of ``berrylm_ref/ops/kda_step.py``: everything between its projections.

Two launches. The first one makes what a step needs of each head: conv, l2norm, decay. Every channel of the conv windows
belongs to one program of it, which shifts them in place; the value heads that share a key head (GVA) read the finished q
and k. Were the window shifted where it is used, one value head could read what another has already moved. The second launch
updates the states, a program per value head, and ends with the gated norm.

The state is the traffic: read once, written once, 2 * 4 * HV * K * V bytes a sequence; all else is about 5 % of that at the
model's sizes. A tile of it stays in registers from its load to its store. To read it only once, the output is taken from the
decayed state: with D = diag(exp(g)), e = beta (v - (D S)^T k) and S' = D S + k e^T,

    o = S'^T q = (D S)^T q + (k . q) e,

so that both sums over K need D S alone. From compute capability 9.0 on the second launch may start while the first one runs
(programmatic dependent launch): it loads its first tile and only then waits.

To time it: ``kda_decode_step`` with the arguments of its twin can be captured in a CUDA graph as it stands; replays advance
the pools in place.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import INTERPRETED
from .overlap import await_earlier, options, overlaps

__all__ = ["kda_decode_step"]

FLOATS = (torch.float32, torch.float16, *(() if INTERPRETED else (torch.bfloat16,)))  # the interpreter cuts bf16 casts
GROUP = 8  # heads a program of the first launch takes: a step of 64 takes 73.6 us so (kda_step.json), and took 75.0 with one
TILE = 128 * 64  # elements of a state that 4 warps hold in registers; a whole state or 8 warps were slower


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)). A plain log of 1 + e loses e's digits when x is well below 0, where most gates of the model lie.

    log1p(e) = 2 artanh(s) with s = e / (2 + e) <= 1/3; the series is cut where its next term is below 1e-8 of the sum.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    t = s * s
    p = 1.0 / 15.0
    p = p * t + 1.0 / 13.0
    p = p * t + 1.0 / 11.0
    p = p * t + 1.0 / 9.0
    p = p * t + 1.0 / 7.0
    p = p * t + 1.0 / 5.0
    p = p * t + 1.0 / 3.0
    return tl.maximum(x, 0.0) + 2.0 * s * (p * t + 1.0)


@triton.jit
def _load_window(p_x, p_window, o_c, m_c, W: tl.constexpr, BW: tl.constexpr):
    """The last W inputs of some channels, this token's last: [channels, BW], zero past W."""
    o_w = tl.arange(0, BW)[None, :]
    p_past, p_now = p_window + o_c[:, None] * (W - 1) + o_w, p_x + o_c[:, None] + tl.zeros_like(o_w)
    return tl.load(tl.where(o_w == W - 1, p_now, p_past), mask=m_c[:, None] & (o_w < W), other=0.0)


@triton.jit
def _load_taps(p_weight, o_c, m_c, W: tl.constexpr, BW: tl.constexpr):
    o_w = tl.arange(0, BW)[None, :]
    return tl.load(p_weight + o_c[:, None] * W + o_w, mask=m_c[:, None] & (o_w < W), other=0.0)


@triton.jit
def _store_window(p_window, window, o_c, m_c, W: tl.constexpr, BW: tl.constexpr):
    """Drop the oldest input."""
    o_w = tl.arange(0, BW)[None, :]
    m = m_c[:, None] & (o_w >= 1) & (o_w < W)
    tl.store(p_window + o_c[:, None] * (W - 1) + o_w - 1, window, mask=m)


@triton.jit
def _conv(p_x, p_window, p_weight, o_c, m_c, W: tl.constexpr, BW: tl.constexpr):
    """Conv and SiLU of one token in fp32, rounded to the model dtype; the windows move on. Returns fp32 [channels]."""
    window = _load_window(p_x, p_window, o_c, m_c, W, BW)
    y = _silu(tl.sum(window.to(tl.float32) * _load_taps(p_weight, o_c, m_c, W, BW).to(tl.float32), 1))
    tl.debug_barrier()  # another thread may still have to load what this one moves
    _store_window(p_window, window, o_c, m_c, W, BW)
    return y.to(window.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["n_slots", "scale"])
def _prepare_kernel(
    qkv, raw_gate, conv_weight, A_log, dt_bias, conv_pool, slots, ready,
    stride_qkv, stride_gate, stride_conv, n_slots, scale, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BG: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes BG heads: first those of q and k, 2 * H a row, then the HV value heads, for v and decay.

    ready [S, 2 * H * K + HV * V + HV * K] fp32: q (scaled), k, v in the order of the channels, then exp(g).
    """
    if PDL:
        await_earlier()  # then the second launch may start: it loads states, so whatever ran before this one must be through
    P: tl.constexpr = (2 * H + HV) // BG
    i_s, i_p = tl.program_id(0).to(tl.int64) // P, tl.program_id(0) % P
    slot = tl.load(slots + i_s).to(tl.int64)
    if (slot <= 0) | (slot >= n_slots):
        return
    p_x, p_window = qkv + i_s * stride_qkv, conv_pool + slot * stride_conv
    p_ready = ready + i_s * (2 * H * K + HV * V + HV * K)
    i_k, i_v = tl.arange(0, BG * BK), tl.arange(0, BG * BV)
    m_k, m_v = i_k % BK < K, i_v % BV < V
    if i_p * BG < 2 * H:
        o_qk = (i_p * BG + i_k // BK) * K + i_k % BK
        y = tl.reshape(_conv(p_x, p_window, conv_weight, o_qk, m_k, W, BW), [BG, BK])
        length = tl.rsqrt(tl.sum(y * y, 1) + 1e-6) * tl.where(i_p * BG + tl.arange(0, BG) < H, scale, 1.0)
        tl.store(p_ready + o_qk, tl.reshape(y * length[:, None], [BG * BK]), mask=m_k)
    else:
        i_hv = i_p * BG - 2 * H  # the first of them
        o_g = (i_hv + i_k // BK) * K + i_k % BK
        o_v = 2 * H * K + (i_hv + i_v // BV) * V + i_v % BV
        raw = tl.load(raw_gate + i_s * stride_gate + o_g, mask=m_k, other=0.0).to(tl.float32)
        bias, rate = tl.load(dt_bias + o_g, mask=m_k, other=0.0), tl.load(A_log + i_hv + i_k // BK)
        tl.store(p_ready + o_v, _conv(p_x, p_window, conv_weight, o_v, m_v, W, BW), mask=m_v)
        g = -tl.exp(rate) * _softplus(raw + bias)
        if lower_bound is not None:
            g = tl.maximum(g, lower_bound)
        tl.store(p_ready + 2 * H * K + HV * V + o_g, tl.exp(g), mask=m_k)


@triton.jit(do_not_specialize=["n_slots", "eps"])
def _update_kernel(
    ready, z, beta_logit, norm_weight, state_pool, slots, out,
    stride_z, stride_beta, stride_state, n_slots, eps,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per row and value head: its state in NV tiles [BK, BV] (1 up to K = V = 128), then the norm over all of V."""
    i_s, i_hv = tl.program_id(0).to(tl.int64) // HV, tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    dtype = out.dtype.element_ty
    p_out = out + i_s * (HV * V) + i_hv * V

    slot = tl.load(slots + i_s).to(tl.int64)
    if (slot <= 0) | (slot >= n_slots):  # padding: a defined row, and no traffic on the pools
        if PDL:
            await_earlier()  # whoever follows this launch may count on the first one, too
        for i in tl.static_range(NV):
            o_v = i * BV + tl.arange(0, BV)
            tl.store(p_out + o_v, tl.zeros([BV], dtype), mask=o_v < V)
        return

    p_S = state_pool + slot * stride_state + i_hv * (K * V) + o_k[:, None] * V + tl.arange(0, BV)[None, :]
    b_S = tl.load(p_S, mask=m_k[:, None] & (tl.arange(0, BV) < V)[None, :], other=0.0)
    beta = _sigmoid(tl.load(beta_logit + i_s * stride_beta + i_hv).to(tl.float32))
    if PDL:
        await_earlier()
    p_ready = ready + i_s * (2 * H * K + HV * V + HV * K)
    b_q = tl.load(p_ready + i_h * K + o_k, mask=m_k, other=0.0)
    b_k = tl.load(p_ready + (H + i_h) * K + o_k, mask=m_k, other=0.0)
    decay = tl.load(p_ready + 2 * H * K + HV * V + i_hv * K + o_k, mask=m_k, other=0.0)
    qk = tl.sum(b_q * b_k, 0)

    tiles, squares = (), 0.0
    for i in tl.static_range(NV):
        o_v = i * BV + tl.arange(0, BV)
        m_v = o_v < V
        b_v = tl.load(p_ready + 2 * H * K + i_hv * V + o_v, mask=m_v, other=0.0)
        weight = tl.load(norm_weight + o_v, mask=m_v, other=0.0).to(tl.float32)
        gate = tl.load(z + i_s * stride_z + i_hv * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_S *= decay[:, None]
        e = beta * (b_v - tl.sum(b_S * b_k[:, None], 0))
        o = (tl.sum(b_S * b_q[:, None], 0) + qk * e).to(dtype).to(tl.float32)
        squares += tl.sum(o * o, 0)
        tiles += ((o, weight, gate),)
        b_S += b_k[:, None] * e[None, :]
        if i + 1 < NV:
            b_next = tl.load(p_S + (i + 1) * BV, mask=m_k[:, None] & (o_v + BV < V)[None, :], other=0.0)
        tl.debug_barrier()  # threads may hold copies of an element: all have loaded before any of them stores
        tl.store(p_S + i * BV, b_S, mask=m_k[:, None] & m_v[None, :])
        if i + 1 < NV:
            b_S = b_next
    rstd = tl.rsqrt(squares / V + eps)
    for i in tl.static_range(NV):
        o_v = i * BV + tl.arange(0, BV)
        o, weight, gate = tiles[i]
        y = (weight * (o * rstd).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(p_out + o_v, (y * _silu(gate)).to(dtype), mask=o_v < V)


def kda_decode_step(
    qkv: Tensor,
    z: Tensor,
    raw_gate: Tensor,
    beta_logit: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    *,
    key_heads: int,
    eps: float,
    lower_bound: float | None = None,
) -> Tensor:
    """One token for each of S sequences: conv, gate, recurrence and gated norm, the pools updated in place.

    The arguments are those of ``berrylm_ref.ops.kda_step.kda_decode_step``: qkv [S, C], z [S, HV * V], raw_gate
    [S, HV * K], beta_logit [S, HV], conv_weight [C, W], norm_weight [V] and conv_pool [slots, C, W - 1] in one dtype of
    ``FLOATS``; A_log [HV], dt_bias [HV * K] and state_pool [slots, HV, K, V] in fp32; slots [S] int32 or int64. K and V at
    most 256. The projections may be columns of a wider matrix and the pools slices of a larger one: the first stride is free.

    Slots are read on the GPU alone and never checked: a row whose slot is 0 or outside the pool is padding, it comes back
    as zeros and touches neither pool; two rows with the same live slot race. Nothing here waits for the GPU.

    A row's result depends neither on the other rows nor on their number, bit for bit. Returns [S, HV * V]. Raises
    ValueError, by name, for a shape, dtype, device or stride that does not fit.
    """
    _check(
        qkv, z, raw_gate, beta_logit, conv_weight, A_log, dt_bias, norm_weight, conv_pool, state_pool, slots, key_heads
    )
    S, W = qkv.shape[0], conv_weight.shape[1]
    (n_slots, HV, K, V), H = state_pool.shape, key_heads
    out = torch.empty(S, HV * V, dtype=qkv.dtype, device=qkv.device)
    if S == 0:
        return out
    ready = torch.empty(S, 2 * H * K + HV * V + HV * K, dtype=torch.float32, device=qkv.device)
    BK, BV, BW = (triton.next_power_of_2(n) for n in (K, V, W))
    BG, pdl = math.gcd(GROUP, 2 * H, HV), overlaps(S, qkv)
    _prepare_kernel[(S * (2 * H + HV) // BG,)](
        qkv, raw_gate, conv_weight, A_log, dt_bias, conv_pool, slots, ready,
        qkv.stride(0), raw_gate.stride(0), conv_pool.stride(0), n_slots, K**-0.5, lower_bound,
        H, HV, K, V, W, BG, BK, BV, BW, pdl, num_warps=min(8, max(1, BG * BK * BW // 256)), **options(pdl),
    )  # fmt: skip
    BV = min(BV, TILE // BK)
    _update_kernel[(S * HV,)](
        ready, z, beta_logit, norm_weight, state_pool, slots, out,
        z.stride(0), beta_logit.stride(0), state_pool.stride(0), n_slots, eps,
        H, HV, K, V, BK, BV, triton.cdiv(V, BV), pdl,
        num_warps=min(4 if BK <= 128 else 8, max(1, BK * BV // 1024)), **options(pdl),
    )  # fmt: skip
    return out


def _check(
    qkv, z, raw_gate, beta_logit, conv_weight, A_log, dt_bias, norm_weight, conv_pool, state_pool, slots, key_heads
):
    def refuse(name: str, expected: str, got) -> None:
        raise ValueError(f"kda_decode_step: {name}: expected {expected}, got {got}")

    if state_pool.dim() != 4:
        refuse("state_pool", "4 dimensions [slots, HV, K, V]", f"shape {tuple(state_pool.shape)}")
    if qkv.dim() != 2:
        refuse("qkv", "2 dimensions [S, C]", f"shape {tuple(qkv.shape)}")
    if conv_weight.dim() != 2 or conv_weight.shape[1] < 2:
        refuse("conv_weight", "shape [C, W] with at least 2 taps", f"shape {tuple(conv_weight.shape)}")
    n_slots, HV, K, V = state_pool.shape
    S, W = qkv.shape[0], conv_weight.shape[1]
    if not (1 <= K <= 256 and 1 <= V <= 256):
        refuse("state_pool", "K and V from 1 to 256", f"shape {tuple(state_pool.shape)}")
    if key_heads < 1 or HV % key_heads:
        refuse("key_heads", f"a divisor of the {HV} value heads", key_heads)
    C, dtype = 2 * key_heads * K + HV * V, qkv.dtype
    if dtype not in FLOATS:
        refuse("qkv", f"one of {FLOATS}", dtype)
    if not (INTERPRETED or qkv.is_cuda):
        refuse("qkv", "a CUDA tensor (or TRITON_INTERPRET=1 before triton's import)", qkv.device)
    # name, tensor, shape, dtype, how many leading dimensions may have any stride
    for name, x, shape, wanted, free in (
        ("qkv", qkv, (S, C), dtype, 1), ("z", z, (S, HV * V), dtype, 1), ("raw_gate", raw_gate, (S, HV * K), dtype, 1),
        ("beta_logit", beta_logit, (S, HV), dtype, 1), ("conv_weight", conv_weight, (C, W), dtype, 0),
        ("A_log", A_log, (HV,), torch.float32, 0), ("dt_bias", dt_bias, (HV * K,), torch.float32, 0),
        ("norm_weight", norm_weight, (V,), dtype, 0), ("conv_pool", conv_pool, (n_slots, C, W - 1), dtype, 1),
        ("state_pool", state_pool, (n_slots, HV, K, V), torch.float32, 1), ("slots", slots, (S,), slots.dtype, 0),
    ):  # fmt: skip
        if x.shape != shape:
            refuse(name, f"shape {shape}", f"shape {tuple(x.shape)}")
        if x.dtype != wanted:
            refuse(name, str(wanted), x.dtype)
        if x.device != qkv.device:
            refuse(name, f"the device of qkv, {qkv.device}", x.device)
        if not (x.is_contiguous() or free and S and x[0].is_contiguous()):
            refuse(name, "contiguous memory" + " behind the first dimension" * free, f"strides {x.stride()}")
    if slots.dtype not in (torch.int32, torch.int64):
        refuse("slots", "int32 or int64", slots.dtype)
