"""Causal grouped-query attention over pages, twin of ``berrylm_ref/ops/attention.py``.

A sequence with one query goes through the split decode kernel, a longer one through torch's fused attention on its gathered
pages: there the work is in the matrix products, and the library's are hard to beat. On an H200 a whole prompt of 8192 tokens
runs at 640 TFLOP/s (cuDNN), a chunk that continues one at 300 (torch has no lower-right mask for cuDNN). cuDNN compiles a
kernel for every new length, which takes longer than many prompts: lengths that are no multiple of ``RECURRING`` go to
FlashAttention-2. Short ones cost the host more than the GPU: neighbours share one gather, one such call and one gate. Which way
a sequence goes depends on its own lengths alone, and so do its bits; but with ``key_offsets`` all go the last way, even a single
query and a long context.
"""

from contextlib import nullcontext
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from .arguments import cdiv, expect_dtype, expect_floats, expect_integers, expect_shape, next_power_of_2, warps_for
from .attention_decode import decode_rows
from .launch import launch
from .qk_rope import qk_norm_rope

__all__ = ["attend", "paged_attention", "qk_norm_rope"]

MAX_HEAD_DIM = 256
TILE = 2048  # elements a program of the gather or the gate holds
RECURRING = 4096  # whole prompts of a multiple of it, as the engine's full chunks, are worth a kernel of their length
SHORT = 8192  # keys below which a sequence shares its calls with its neighbours
TOGETHER = 65536  # keys that one such call gathers at most, or as many as its one sequence has


@triton.jit(do_not_specialize=["rows"])
def _gate_kernel(
    o, gate, out, stride_o, stride_oh, stride_gate, stride_gh, rows,
    HQ: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out = o * sigmoid(gate), the sigmoid and the product rounded; a row is one head of one token."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    m = (o_r < rows) & (o_d < D)
    dtype = out.dtype.element_ty
    b_o = tl.load(o + o_r // HQ * stride_o + o_r % HQ * stride_oh + o_d, mask=m, other=0.0).to(tl.float32)
    b_g = tl.load(gate + o_r // HQ * stride_gate + o_r % HQ * stride_gh + o_d, mask=m, other=0.0).to(tl.float32)
    b_g = (1.0 / (1.0 + tl.exp(-b_g))).to(dtype).to(tl.float32)
    tl.store(out + o_r * D + o_d, (b_o * b_g).to(dtype), mask=m)


@triton.jit(do_not_specialize=["stride_table", "first"])
def _gather_kernel(
    k_pages, v_pages, page_table, begins, k, v, stride_k, stride_kt, stride_v, stride_vt, stride_table, first,
    SIZE: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """BT tokens of sequence first + i_n, each W elements, from their pages to where begins[i_n] says in k and v."""
    i_t, i_n = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(begins + i_n).to(tl.int64), tl.load(begins + i_n + 1).to(tl.int64)
    if begin + i_t * BT >= end:
        return
    o_t, o_w = i_t * BT + tl.arange(0, BT), tl.arange(0, BW)[None, :]
    m_t = begin + o_t < end
    page = tl.load(page_table + (first + i_n).to(tl.int64) * stride_table + o_t // SIZE, mask=m_t, other=0).to(tl.int64)
    o_out = (begin + o_t)[:, None] * W + o_w
    m = m_t[:, None] & (o_w < W)
    b_k = tl.load(k_pages + (page * stride_k + o_t % SIZE * stride_kt)[:, None] + o_w, mask=m, other=0.0)
    b_v = tl.load(v_pages + (page * stride_v + o_t % SIZE * stride_vt)[:, None] + o_w, mask=m, other=0.0)
    tl.store(k + o_out, b_k, mask=m)
    tl.store(v + o_out, b_v, mask=m)


def _gather(
    k_pages: Tensor, v_pages: Tensor, page_table: Tensor, first: int, count: int, longest: int, total: int, begins: Tensor
) -> list[Tensor]:  # fmt: skip
    """The keys and values of ``count`` sequences from ``first`` on in one piece each, [total, kv_heads, D]; ``longest``: keys
    that one of them has at most."""
    size, kv_heads, D = k_pages.shape[1:]
    k_pages, v_pages = (x if x.stride(2) == D else x.contiguous() for x in (k_pages, v_pages))
    k, v = (k_pages.new_empty((total, kv_heads, D)) for _ in range(2))
    W, BW = kv_heads * D, next_power_of_2(kv_heads * D)
    BT = max(1, TILE // BW)
    launch(
        _gather_kernel, (cdiv(longest, BT), count), (k_pages, v_pages, page_table, begins, k, v),
        (*k_pages.stride()[:2], *v_pages.stride()[:2], page_table.stride(0), first),
        dict(SIZE=size, W=W, BT=BT, BW=BW), num_warps=warps_for(BT * BW),
    )  # fmt: skip
    return [k, v]


def _store_gated(o: Tensor, gate: Tensor | None, out: Tensor) -> None:
    """o * sigmoid(gate), or o alone, into the contiguous ``out``. All [T, heads, D]."""
    if gate is None:
        out.copy_(o)
        return
    o = o if o.stride(-1) == 1 else o.contiguous()
    T, HQ, D = o.shape
    BD = next_power_of_2(D)
    BR = max(1, TILE // BD)
    launch(
        _gate_kernel, (cdiv(T * HQ, BR),), (o, gate, out), (*o.stride()[:2], *gate.stride()[:2], T * HQ),
        dict(HQ=HQ, D=D, BR=BR, BD=BD), num_warps=warps_for(BR * BD),
    )  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T + mask) v for one sequence whose last T of S tokens are the queries (arXiv:1706.03762).

    Query t sees keys 0 .. S - T + t. torch's ``is_causal`` aligns the mask to the upper left, which is this one only while
    T = S; a chunk that continues a prompt gets the lower-right mask. q [T, heads, D]; k, v [S, kv_heads, D], heads a multiple
    of kv_heads. Returns [T, heads, D].
    """
    _check_heads("attend", q, k, v)
    T, S = q.shape[0], k.shape[0]
    if not T:
        return q
    if q.dtype == torch.float32:  # only the 16-bit kernels read grouped heads; without them the whole mask would be written out
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, D]
    mask = {"is_causal": True} if T == S else {"attn_mask": causal_lower_right(T, S)}
    fused = q.is_cuda and q.dtype != torch.float32 and T == S
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if fused and T % RECURRING else nullcontext():
        o = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **mask)
    return o[0].transpose(0, 1)


def _goes_alone(T: int, S: int) -> bool:
    """Whether T queries over S keys are worth calls of their own; nothing but these may decide it, or bits would change with
    the neighbours."""
    return S >= SHORT or (T == S and T % RECURRING == 0)


def _runs(offsets: list[int], contexts: list[int]) -> list[tuple[int, int]]:
    """The ranges of sequences that share a call: neighbours of more than one query, or one that goes alone."""
    runs, keys, is_open = [], 0, False
    for n, context in enumerate(contexts):
        T = offsets[n + 1] - offsets[n]
        S, alone = context + T, T > 1 and _goes_alone(T, context + T)
        joins = is_open and T > 1 and not alone and keys + S <= TOGETHER
        if joins:
            runs[-1] = runs[-1][0], n + 1
        elif T > 1:
            runs.append((n, n + 1))
        keys, is_open = (keys if joins else 0) + S, T > 1 and not alone
    return runs


def _attend_run(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor,
    first: int, lengths: list[int], totals: list[int], scale: float,
) -> Tensor:  # fmt: skip
    """``attend`` for sequences first, first + 1, .. of so many queries and keys. q [sum of lengths, heads, D]."""
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    begins = _offsets(tuple(totals), q.device, stream)
    k, v = _gather(k_pages, v_pages, page_table, first, len(totals), max(totals), sum(totals), begins)
    if len(lengths) == 1 and _goes_alone(lengths[0], totals[0]):
        return attend(q, k, v, scale)
    if not _takes_packed(q):
        parts = zip(q.split(lengths), k.split(totals), v.split(totals), strict=True)
        return torch.cat([attend(*part, scale) for part in parts])
    return _flash(q, k, v, _offsets(tuple(lengths), q.device, stream), begins, max(lengths), max(totals), scale)


def _takes_packed(q: Tensor) -> bool:
    """Whether the library's kernel for packed sequences does."""
    return q.is_cuda and q.dtype != torch.float32 and q.shape[2] % 8 == 0


def _flash(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float) -> Tensor:
    """FlashAttention-2 over packed sequences: grouped heads, and the lower-right mask of each sequence's own lengths
    (arXiv:2307.08691). Its tiles are a sequence's own, and without a sequence of one query it never splits the keys."""
    return torch.ops.aten._flash_attention_forward(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, True, False, scale=scale)[0]


@lru_cache(maxsize=64)
def _offsets(lengths: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """[N + 1] int32 on ``device``: where each of N packed sequences begins. Kept, as every layer asks for the same; by
    ``stream``, as another one would not wait for the copy."""
    begins = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
    return begins.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else begins


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    scale: float,
    gate: Tensor | None = None,
    max_query_len: int | None = None,
    lengths: tuple[list[int], list[int]] | None = None,
    key_offsets: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Attention for N packed sequences whose keys and values, those of this call included, lie in pages.

    q [P, heads, D]; k_pages, v_pages [pages, page_size, kv_heads, D]; page_table [N, most pages], sequence n's pages in
    order; cu_seqlens [N + 1] over the queries; context_lens [N] tokens of each sequence before this call; the result is
    multiplied by sigmoid(gate), gate [P, heads, D], in q's dtype. Returns [P, heads, D].

    ``max_query_len=1`` promises that no sequence has more than one query. The call then reads no length on the host and can
    be captured in a CUDA graph; rows of a sequence that breaks the promise are left unwritten. Otherwise the host needs the
    lengths: ``lengths`` are cu_seqlens and context_lens as it knows them, without it they are read, which waits for the device.

    ``key_offsets``, ([N + 1] int32, where each sequence's keys begin side by side; room for how many keys), make any batch one
    that can be captured: on a GPU in bf16, with a head size that is a multiple of 8, all sequences then share one call over that
    room. It promises that their keys fit it, and ``max_query_len`` that no sequence has more queries.
    """
    _check(q, k_pages, v_pages, page_table, cu_seqlens, context_lens, gate)
    q, k_pages, v_pages, page_table, gate = (
        x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k_pages, v_pages, page_table, gate)
    )
    cu_seqlens, context_lens = cu_seqlens.contiguous(), context_lens.contiguous()
    N, out = context_lens.numel(), torch.empty_like(q, memory_format=torch.contiguous_format)
    if not N:
        return out
    if key_offsets is not None and max_query_len is not None and _takes_packed(q):
        begins, room = key_offsets
        k, v = _gather(k_pages, v_pages, page_table, 0, N, min(room, page_table.shape[1] * k_pages.shape[1]), room, begins)
        o = _flash(q, k, v, cu_seqlens.int(), begins, max_query_len, room, scale)
        _store_gated(o, gate, out)
        return out
    offsets = contexts = None
    if max_query_len != 1:
        if lengths is None:
            read = torch.cat([cu_seqlens, context_lens]).tolist()  # one wait for both
            lengths = read[: N + 1], read[N + 1 :]
        offsets, contexts = lengths
    if offsets is None or any(end - begin == 1 for begin, end in zip(offsets, offsets[1:], strict=False)):
        decode_rows(q, k_pages, v_pages, page_table, cu_seqlens, context_lens, scale, gate, out)
    for first, end in _runs(offsets, contexts) if offsets else ():
        lengths = [offsets[n + 1] - offsets[n] for n in range(first, end)]
        totals = [contexts[first + i] + length for i, length in enumerate(lengths)]
        rows = slice(offsets[first], offsets[end])
        o = _attend_run(q[rows], k_pages, v_pages, page_table, first, lengths, totals, scale)
        _store_gated(o, None if gate is None else gate[rows], out[rows])
    return out


def _check_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{op}: {name}: expected [tokens, heads, D], got {tuple(x.shape)}")
    heads, D = q.shape[1:]
    if k.shape[2] != D or not k.shape[1] or heads % k.shape[1]:
        raise ValueError(f"{op}: k: expected [tokens, a divisor of {heads}, {D}], got {tuple(k.shape)}")
    expect_shape(op, "v", v, tuple(k.shape))
    if q.shape[0] > k.shape[0]:
        raise ValueError(f"{op}: q: expected at most the {k.shape[0]} tokens of k, got {q.shape[0]}")
    expect_floats(op, q=q, k=k, v=v)
    expect_dtype(op, q.dtype, k=k, v=v)


def _check(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, cu_seqlens: Tensor, context_lens: Tensor, gate: Tensor | None
) -> None:  # fmt: skip
    op = "paged_attention"
    if q.dim() != 3:
        raise ValueError(f"{op}: q: expected [P, heads, D], got {tuple(q.shape)}")
    heads, D = q.shape[1:]
    if D > MAX_HEAD_DIM:
        raise ValueError(f"{op}: q: expected a head size up to {MAX_HEAD_DIM}, got {D}")
    if k_pages.dim() != 4 or k_pages.shape[3] != D or not k_pages.shape[2] or heads % k_pages.shape[2]:
        raise ValueError(f"{op}: k_pages: expected [pages, page_size, a divisor of {heads}, {D}], got {tuple(k_pages.shape)}")
    expect_shape(op, "v_pages", v_pages, tuple(k_pages.shape))
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"{op}: cu_seqlens: expected [N + 1], got {tuple(cu_seqlens.shape)}")
    N = cu_seqlens.numel() - 1
    expect_shape(op, "context_lens", context_lens, (N,))
    if page_table.dim() != 2 or page_table.shape[0] != N:
        raise ValueError(f"{op}: page_table: expected {N} rows, got {tuple(page_table.shape)}")
    if gate is not None:
        expect_shape(op, "gate", gate, tuple(q.shape))
        expect_dtype(op, q.dtype, gate=gate)
    expect_floats(op, q=q, k_pages=k_pages, v_pages=v_pages, gate=gate)
    expect_dtype(op, q.dtype, k_pages=k_pages, v_pages=v_pages)
    expect_integers(op, q.device, page_table=page_table, cu_seqlens=cu_seqlens, context_lens=context_lens)
