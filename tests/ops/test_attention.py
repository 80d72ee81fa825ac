"""Attention over pages against a plain loop over queries and keys, and each step that is easy to get wrong."""

import pytest
import torch
from helpers import assert_close, rel_l2

from berrylm_ref.ops import attention
from berrylm_ref.ops.attention import attend, paged_attention, qk_norm_rope
from berrylm_ref.ops.norm import rms_norm
from berrylm_ref.ops.rope import apply_rope, rope_angles

SCALE = 0.3


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_attend(q, k, v, scale):
    """One query and one head at a time; query t of T is token S - T + t of S."""
    T, S, ratio = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for t in range(T):
        seen = S - T + t + 1
        for head in range(q.shape[1]):
            scores = torch.stack([(q[t, head] * k[s, head // ratio]).sum() * scale for s in range(seen)])
            weights = torch.exp(scores - scores.max())
            out[t, head] = (weights[:, None] * v[:seen, head // ratio]).sum(0) / weights.sum()
    return out


def in_pages(sequences, page_size, seed=0):
    """Keys or values of several sequences laid out in pages of one pool, in shuffled order, the rest of the pool NaN.

    sequences: list of [S, kv_heads, D]. Returns the pool and the page table; unused table entries name an unused page.
    """
    counts = [-(-x.shape[0] // page_size) for x in sequences]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = torch.full((sum(counts) + 2, page_size, *sequences[0].shape[1:]), float("nan"), dtype=sequences[0].dtype)
    table = torch.full((len(sequences), max(counts, default=0) + 1), order.pop())
    for n, x in enumerate(sequences):
        for page, begin in enumerate(range(0, x.shape[0], page_size)):
            table[n, page] = order.pop()
            rows = x[begin : begin + page_size]
            pool[table[n, page], : rows.shape[0]] = rows
    return pool, table


def batch(contexts, lengths, heads=4, kv_heads=2, D=8, page_size=4, dtype=torch.float64):
    """The arguments of paged_attention, and what each sequence alone would be asked."""
    ks = [randn(c + n, kv_heads, D, dtype=dtype, seed=10 + i) for i, (c, n) in enumerate(zip(contexts, lengths, strict=True))]
    vs = [randn(c + n, kv_heads, D, dtype=dtype, seed=90 + i) for i, (c, n) in enumerate(zip(contexts, lengths, strict=True))]
    q = randn(sum(lengths), heads, D, dtype=dtype)
    (k_pages, table), (v_pages, _) = in_pages(ks, page_size), in_pages(vs, page_size)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    alone = [(q[b:e], k, v) for b, e, k, v in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], ks, vs, strict=False)]
    return (q, k_pages, v_pages, table, cu_seqlens, torch.tensor(contexts)), alone


@pytest.mark.parametrize("T, S", [(1, 1), (1, 9), (5, 5), (3, 8), (7, 8)])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_attend_is_the_formula(T, S, heads, kv_heads):
    """KRN-6 as well: query head j reads KV head j // (heads / kv_heads)."""
    q, k, v = randn(T, heads, 8), randn(S, kv_heads, 8, seed=1), randn(S, kv_heads, 8, seed=2)
    assert_close("attend", attend(q, k, v, SCALE), plain_attend(q, k, v, SCALE), 1e-14)


def test_a_chunk_that_continues_a_prompt_needs_the_lower_right_mask():
    """torch's is_causal starts the diagonal at the upper left: the first query of a chunk would see one key of its context."""
    q, k, v = randn(3, 2, 8), randn(8, 2, 8, seed=1), randn(8, 2, 8, seed=2)
    whole = attend(torch.cat([randn(5, 2, 8, seed=3), q]), k, v, SCALE)[5:]
    assert_close("chunk", attend(q, k, v, SCALE), whole, 1e-14)
    upper_left = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=SCALE
    ).transpose(0, 1)
    assert rel_l2(upper_left, whole) > 0.1


def test_query_blocks_do_not_change_the_result(monkeypatch):
    """Long prompts are scored a block of queries at a time; each block has its own lower-right mask."""
    q, k, v = randn(11, 2, 8), randn(15, 2, 8, seed=1), randn(15, 2, 8, seed=2)
    whole = attend(q, k, v, SCALE)
    monkeypatch.setattr(attention, "QUERY_ROWS", 4)
    assert_close("in blocks of 4", attend(q, k, v, SCALE), whole, 1e-15)


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_pages_of_any_size_hold_mixed_batches(page_size):
    """Decode rows, whole prompts, continued chunks and empty sequences in one call; unused slots of the pool are NaN."""
    call, alone = batch([0, 16, 15, 64, 7, 0, 33], [1, 1, 0, 1, 5, 70, 3], page_size=page_size)
    o = paged_attention(*call, SCALE)
    assert_close("paged", o, torch.cat([plain_attend(*x, SCALE) for x in alone]), 1e-14)


def test_batches_of_nothing_but_empty_sequences():
    """KRN-2: an all-empty call returns an empty output."""
    (q, k_pages, v_pages, table, cu_seqlens, contexts), _ = batch([3, 5], [0, 0])
    assert paged_attention(q, k_pages, v_pages, table, cu_seqlens, contexts, SCALE).shape == (0, 4, 8)
    nobody = torch.zeros(0, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    assert paged_attention(q, k_pages, v_pages, *nobody, SCALE).shape == (0, 4, 8)


def test_neighbours_do_not_change_a_sequence():
    call, alone = batch([0, 16, 7], [4, 1, 5])
    o = paged_attention(*call, SCALE)
    assert torch.equal(o, torch.cat([attend(*x, SCALE) for x in alone]))


def test_the_gate_is_a_sigmoid_in_the_model_dtype():
    """The attention output, cast, times sigmoid(gate) in q's dtype, which rounds again."""
    for dtype in (torch.float64, torch.bfloat16):
        call, _ = batch([0, 16], [4, 1], dtype=dtype)
        gate = 3 * randn(5, 4, 8, dtype=dtype, seed=5)
        assert torch.equal(paged_attention(*call, SCALE, gate), paged_attention(*call, SCALE) * torch.sigmoid(gate))


def test_bfloat16_scores_softmax_and_sum_are_fp32_with_one_cast():
    q, k, v = (randn(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate([(20, 4, 32), (60, 2, 32), (60, 2, 32)]))
    exact = plain_attend(q.double(), k.double(), v.double(), SCALE)
    o = attend(q, k, v, SCALE)
    assert o.dtype == torch.bfloat16
    assert rel_l2(o, exact) <= 1.01 * rel_l2(exact.bfloat16(), exact)


@pytest.mark.parametrize("rotary", [0, 4, 8])
def test_qk_norm_rope_norms_each_head_and_then_rotates(rotary):
    q, k = randn(6, 4, 8), randn(6, 2, 8, seed=1)
    q_weight, k_weight = randn(8, seed=2), randn(8, seed=3)
    cos, sin = rope_angles(torch.arange(6) + 5, rotary, 1e7, torch.float64)
    q_out, k_out, gate = qk_norm_rope(q, k, q_weight, k_weight, 1e-6, cos, sin, output_gate=False)
    assert gate is None
    for x, weight, out in ((q, q_weight, q_out), (k, k_weight, k_out)):
        for head in range(x.shape[1]):
            want = apply_rope(rms_norm(x[:, head : head + 1], weight, 1e-6), cos, sin)
            assert_close("head", out[:, head : head + 1], want, 1e-15)


def test_q_rows_are_query_and_gate_per_head():
    """A mistake that costs 0.20 on the logits: [q0 | gate0 | q1 | gate1 ...], not all queries and then all gates."""
    both, k = randn(6, 4, 16), randn(6, 2, 8, seed=1)
    weights = randn(8, seed=2), randn(8, seed=3)
    angles = rope_angles(torch.arange(6), 4, 1e7, torch.float64)
    q, _, gate = qk_norm_rope(both, k, *weights, 1e-6, *angles, output_gate=True)
    want, _, _ = qk_norm_rope(both[..., :8].contiguous(), k, *weights, 1e-6, *angles, output_gate=False)
    assert torch.equal(q, want) and torch.equal(gate, both[..., 8:])
    flat = both.reshape(6, -1)
    assert not torch.equal(gate, flat[:, 32:].view(6, 4, 8))


def test_positions_continue_when_decode_takes_over():
    """0.044 on the logits: the rotated keys of the prompt stay; a decode step that restarts at position 0 sees other angles."""
    T, D = 9, 8
    q, k, v = randn(T, 4, D), randn(T, 2, D, seed=1), randn(T, 2, D, seed=2)
    weights = randn(D, seed=3), randn(D, seed=4)

    def turned(rows, positions):
        angles = rope_angles(positions, D, 100.0, torch.float64)
        return qk_norm_rope(q[rows], k[rows], *weights, 1e-6, *angles, output_gate=False)

    whole_q, whole_k, _ = turned(slice(None), torch.arange(T))
    want = attend(whole_q, whole_k, v, SCALE)[-1:]
    step_q, step_k, _ = turned(slice(T - 1, T), torch.tensor([T - 1]))
    assert_close("decode", attend(step_q, torch.cat([whole_k[:-1], step_k]), v, SCALE), want, 1e-14)
    wrong_q, wrong_k, _ = turned(slice(T - 1, T), torch.tensor([0]))
    assert rel_l2(attend(wrong_q, torch.cat([whole_k[:-1], wrong_k]), v, SCALE), want) > 0.01


def test_a_broken_promise_on_the_query_length_is_refused():
    call, alone = batch([3, 0], [1, 2])
    with pytest.raises(ValueError, match="^paged_attention: max_query_len: expected at least 2, the longest query, got 1$"):
        paged_attention(*call, SCALE, max_query_len=1)
    assert torch.equal(paged_attention(*call, SCALE, max_query_len=2), paged_attention(*call, SCALE))


def test_a_page_table_of_another_batch_is_refused():
    (q, k_pages, v_pages, table, cu_seqlens, contexts), _ = batch([3, 0], [1, 2])
    with pytest.raises(ValueError, match="^paged_attention: page_table: expected 2 rows, got"):
        paged_attention(q, k_pages, v_pages, table[:1], cu_seqlens, contexts, SCALE)
