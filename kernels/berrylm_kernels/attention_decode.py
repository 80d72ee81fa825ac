"""One query a sequence against keys and values in pages: split over the keys, then merged (arXiv:1805.02867, flash decoding).

A program owns one KV head of one sequence and a contiguous share of its keys, which it reads once for all G query heads of the
group. Shares follow the sequence's own length. A second kernel adds up the shares and applies the gate. Nothing here waits for
the host: lengths stay on the device, and a share without keys ends at once.

tl.dot wants 16 rows, and 8 query heads leave half of them empty. The lower half repeats the queries; when the probabilities
are rounded for the second product, the upper half takes the rounded value and the lower half what the rounding dropped. The
sum of the two carries 16 bits instead of 8, at no cost in time.

Symbols: N sequences, S splits, G query heads a KV head, BG rows of the dot, BS keys a step, D head size,
BD the power of two over it.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import await_earlier, options, overlaps

LOG2E = tl.constexpr(1.4426950408889634)
STEP = {torch.bfloat16: (64, 4, 2), torch.float32: (16, 4, 2)}  # keys a step, warps, pipeline stages
MIN_SHARE = 64  # keys of the smallest split: one step of the bfloat16 kernel
RESIDENT = 3  # programs of the bfloat16 kernel that a multiprocessor of sm_90 holds
WAVES = 3  # rounds of programs over the device: evens out sequences of different lengths
MAX_SPLITS = 256
BM, BMD = 64, 64  # splits and channels that a program of the merge holds at once


@triton.jit
def _share(total, S, BS: tl.constexpr, MIN_SHARE: tl.constexpr):
    """Keys a split: a multiple of BS, so that only the last step of a sequence is ragged."""
    return tl.cdiv(tl.maximum(tl.cdiv(total, S), MIN_SHARE), BS) * BS


@triton.jit(do_not_specialize=["scale", "S"])
def _decode_kernel(
    q, k_pages, v_pages, page_table, cu_seqlens, context_lens, parts, lses,
    stride_q, stride_qh, stride_k, stride_kt, stride_kh, stride_v, stride_vt, stride_vh, stride_table, scale, S,
    PAGE: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, MIN_SHARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        await_earlier()
    i_h, i_s, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(cu_seqlens + i_n).to(tl.int64)
    if tl.load(cu_seqlens + i_n + 1) - row != 1:
        return
    total = tl.load(context_lens + i_n).to(tl.int32) + 1
    share = _share(total, S, BS, MIN_SHARE)
    begin = i_s * share
    end = tl.minimum(begin + share, total)
    if begin >= end:
        return

    dtype = q.dtype.element_ty
    HALF: tl.constexpr = BG // 2
    o_g, o_s, o_d = tl.arange(0, BG), tl.arange(0, BS), tl.arange(0, BD)
    m_d = o_d < D
    i_g = o_g % HALF  # the query head inside the group
    b_q = tl.load(
        q + row * stride_q + (i_h * G + i_g)[:, None] * stride_qh + o_d[None, :],
        mask=(i_g < G)[:, None] & m_d[None, :], other=0.0,
    )  # fmt: skip
    peak = tl.full([BG], float("-inf"), tl.float32)
    size = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, BD], tl.float32)
    for s in range(begin, end, BS):
        o_t = s + o_s
        m_t = o_t < end
        page = tl.load(page_table + i_n * stride_table + o_t // PAGE, mask=m_t, other=0).to(tl.int64)
        m = m_t[:, None] & m_d[None, :]
        p_k = k_pages + (page * stride_k + o_t % PAGE * stride_kt + i_h * stride_kh)[:, None] + o_d[None, :]
        b_k = tl.load(p_k, mask=m, other=0.0)  # [BS, BD]
        p_v = v_pages + (page * stride_v + o_t % PAGE * stride_vt + i_h * stride_vh)[:, None] + o_d[None, :]
        b_v = tl.load(p_v, mask=m, other=0.0)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * (scale * LOG2E)  # [BG, BS]
        scores = tl.where(m_t[None, :], scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        keep = tl.exp2(peak - top)
        p = tl.exp2(scores - top[:, None])
        size = size * keep + tl.sum(p, 1)
        rounded = p.to(dtype)
        dropped = (p - rounded.to(tl.float32)).to(dtype)
        b_p = tl.where((o_g < HALF)[:, None], rounded, dropped)
        acc = tl.dot(b_p, b_v, acc * keep[:, None], input_precision="ieee")
        peak = top
    acc = acc / size[:, None]
    b_o = tl.sum(tl.reshape(acc, [2, HALF, BD]), 0)
    b_lse = tl.max(tl.reshape(peak + tl.log2(size), [2, HALF]), 0)  # both halves hold the same
    o_h = tl.arange(0, HALF)
    o_part = ((i_n * HK + i_h) * G + o_h) * S + i_s
    tl.store(parts + o_part[:, None] * D + o_d[None, :], b_o, mask=(o_h < G)[:, None] & m_d[None, :])
    tl.store(lses + o_part, b_lse, mask=o_h < G)


@triton.jit(do_not_specialize=["S"])
def _merge_kernel(
    parts, lses, gate, cu_seqlens, context_lens, out, stride_gate, stride_gh, S,
    HQ: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, MIN_SHARE: tl.constexpr, BM: tl.constexpr, BMD: tl.constexpr,
    USE_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        await_earlier()
    i_d, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(cu_seqlens + i_n).to(tl.int64)
    if tl.load(cu_seqlens + i_n + 1) - row != 1:
        return
    total = tl.load(context_lens + i_n).to(tl.int32) + 1
    used = tl.cdiv(total, _share(total, S, BS, MIN_SHARE))  # the splits that had keys
    o_s, o_d = tl.arange(0, BM), i_d * BMD + tl.arange(0, BMD)
    m_d = o_d < D
    base = (i_n * HQ + i_h) * S
    peak = float("-inf")
    size = 0.0
    acc = tl.zeros([BMD], tl.float32)
    for s in range(0, used, BM):
        m_s = s + o_s < used
        b_lse = tl.load(lses + base + s + o_s, mask=m_s, other=float("-inf"))
        p_part = parts + (base + s + o_s)[:, None] * D + o_d[None, :]
        b_part = tl.load(p_part, mask=m_s[:, None] & m_d[None, :], other=0.0)
        top = tl.maximum(peak, tl.max(b_lse, 0))
        keep, b_w = tl.exp2(peak - top), tl.exp2(b_lse - top)
        acc = acc * keep + tl.sum(b_part * b_w[:, None], 0)
        size = size * keep + tl.sum(b_w, 0)
        peak = top
    dtype = out.dtype.element_ty
    b_o = (acc / size).to(dtype)
    if USE_GATE:
        b_gate = tl.load(gate + row * stride_gate + i_h * stride_gh + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_gate = (1.0 / (1.0 + tl.exp(-b_gate))).to(dtype)
        b_o = (b_o.to(tl.float32) * b_gate.to(tl.float32)).to(dtype)
    tl.store(out + (row * HQ + i_h) * D + o_d, b_o, mask=m_d)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def split_count(sequences: int, kv_heads: int, capacity: int, device: torch.device) -> int:
    """Splits a sequence, from what the host knows: whole waves of programs over the device, none without a chance of keys."""
    pairs, wave = sequences * kv_heads, RESIDENT * _multiprocessors(device)
    most = min(triton.cdiv(capacity, MIN_SHARE), MAX_SPLITS)
    waves = max(1, min(WAVES, most * pairs // wave))
    return max(1, min(waves * wave // pairs, most))


def decode_rows(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, cu_seqlens: Tensor, context_lens: Tensor, scale: float,
    gate: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Write the rows of ``out`` whose sequence has exactly one query; the arguments as ``paged_attention`` checked them."""
    N, (_, HQ, D), (_, PAGE, HK, _) = page_table.shape[0], q.shape, k_pages.shape
    G, BD, (BS, warps, stages) = HQ // HK, max(16, triton.next_power_of_2(D)), STEP[q.dtype]
    BG = max(16, 2 * triton.next_power_of_2(G))
    S = split_count(N, HK, page_table.shape[1] * PAGE, q.device)
    parts = torch.empty(N * HQ * S * (D + 1), dtype=torch.float32, device=q.device)
    parts, lses = parts[: N * HQ * S * D], parts[N * HQ * S * D :]
    pdl = overlaps(len(q), q)
    _decode_kernel[(HK, S, N)](
        q, k_pages, v_pages, page_table, cu_seqlens, context_lens, parts, lses, q.stride(0), q.stride(1),
        *k_pages.stride()[:3], *v_pages.stride()[:3], page_table.stride(0), scale, S,
        PAGE, HK, G, D, BG, BS, BD, MIN_SHARE, pdl, num_warps=warps, num_stages=stages, **options(pdl),
    )  # fmt: skip
    _merge_kernel[(triton.cdiv(D, BMD), HQ, N)](
        parts, lses, gate, cu_seqlens, context_lens, out, *((0, 0) if gate is None else gate.stride()[:2]), S,
        HQ, D, BS, MIN_SHARE, BM, BMD, gate is not None, pdl, num_warps=4, **options(pdl),
    )  # fmt: skip
