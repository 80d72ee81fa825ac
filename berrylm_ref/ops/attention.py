"""Causal grouped-query attention over keys and values that lie in pages."""

import torch
from torch import Tensor

from .dtypes import compute_dtype
from .norm import rms_norm
from .rope import apply_rope

QUERY_ROWS = 1024  # queries scored at once: bounds the score matrix of a long prompt


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    output_gate: bool,
    append: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What stands between the projections and the scores: split off the gate, norm each head, rotate.

    q [P, heads, 2D] with ``output_gate``, each head's rows being [query | gate], else [P, heads, D]; k [P, kv_heads, D];
    weights [D], zero-centred; cos and sin [P, rotary_dim]. ``append`` = (v, k_pages, v_pages, places): the keys and v
    [P, kv_heads, D] are also written into the pages [pages, page_size, kv_heads, D], token p at places[p] = page * page_size +
    offset. Returns q [P, heads, D], k [P, kv_heads, D], and the gate [P, heads, D] or None.
    """
    q, gate = q.chunk(2, -1) if output_gate else (q, None)
    q, k = apply_rope(rms_norm(q, q_weight, eps), cos, sin), apply_rope(rms_norm(k, k_weight, eps), cos, sin)
    if append is not None:
        v, k_pages, v_pages, places = append
        k_pages.flatten(0, 1)[places] = k
        v_pages.flatten(0, 1)[places] = v
    return q, k, gate


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T + mask) v for one sequence whose last T of S tokens are the queries (arXiv:1706.03762).

    Query t sees keys 0 .. S - T + t: the mask is aligned to the lower right, which matters once a chunk continues a prompt.
    q [T, heads, D]; k, v [S, kv_heads, D], heads a multiple of kv_heads (arXiv:2305.13245). Scores, softmax and the
    weighted sum in fp32 (fp64 for fp64), one cast at the end. Returns [T, heads, D].
    """
    dtype, (T, heads, _), S = compute_dtype(q), q.shape, k.shape[0]
    k, v = (x.to(dtype).repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    out = []
    for t in range(0, T, QUERY_ROWS):
        rows = q[t : t + QUERY_ROWS].to(dtype)
        last = torch.arange(S - T + t, S - T + t + rows.shape[0], device=q.device)
        scores = torch.einsum("thd,shd->hts", rows, k) * scale
        hidden = torch.arange(S, device=q.device) > last[:, None]
        out.append(torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(out).to(q.dtype) if out else q


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
    """``attend`` for N packed sequences whose keys and values, those of this call included, lie in pages.

    q [P, heads, D]; k_pages, v_pages [pages, page_size, kv_heads, D]; page_table [N, most pages], sequence n's pages in
    order; cu_seqlens [N + 1] over the queries; context_lens [N] tokens of each sequence before this call; the result is
    multiplied by sigmoid(gate), gate [P, heads, D], in q's dtype. Returns [P, heads, D].

    ``max_query_len`` promises that no sequence has more queries (with 1 the kernel twin reads no length on the host): checked.
    ``lengths``: cu_seqlens and context_lens as the host knows them; without it they are read from the device. ``key_offsets``:
    what the kernel twin needs to read none of them, ([N + 1] int32, where each sequence's keys begin side by side; room for how
    many keys).
    """
    offsets, contexts = lengths or (cu_seqlens.tolist(), context_lens.tolist())
    page_size = k_pages.shape[1]
    if tuple(page_table.shape[:1]) != (len(offsets) - 1,):
        raise ValueError(f"paged_attention: page_table: expected {len(offsets) - 1} rows, got {tuple(page_table.shape)}")
    longest = max((end - begin for begin, end in zip(offsets, offsets[1:], strict=False)), default=0)
    if max_query_len is not None and longest > max_query_len:
        raise ValueError(f"paged_attention: max_query_len: expected at least {longest}, the longest query, got {max_query_len}")
    out = []
    for n, context in enumerate(contexts):
        begin, end = offsets[n], offsets[n + 1]
        total = context + end - begin
        pages = page_table[n, : -(-total // page_size)]
        k, v = (x[pages].flatten(0, 1)[:total] for x in (k_pages, v_pages))
        out.append(attend(q[begin:end], k, v, scale))
    o = torch.cat(out) if out else q
    return o if gate is None else o * torch.sigmoid(gate)
