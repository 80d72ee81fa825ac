"""Paged attention and the q/k kernel against the torch ops in fp64: in the interpreter in fp32, on a GPU in bfloat16 as well."""

import pytest
import torch
from helpers import assert_close, rel_l2

from berrylm_kernels import attention, attention_decode
from berrylm_kernels.attention import attend, paged_attention, qk_norm_rope
from berrylm_ref.ops import attention as ops
from berrylm_ref.ops.rope import rope_angles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
FP32 = 5e-7
EPS = 1e-6


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def batch(contexts, lengths, heads=8, kv_heads=2, D=32, page_size=16, dtype=torch.float32, gate=True):
    """The arguments of paged_attention: pages in shuffled order, spare slots and spare pages NaN, table entries past a sequence's
    pages naming a page that does not exist. The gate is the second half of a fused projection, a strided view."""
    totals = [c + n for c, n in zip(contexts, lengths, strict=True)]
    counts = [-(-total // page_size) for total in totals]
    pages = sum(counts) + 2
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(7)).tolist()
    k_pages, v_pages = (torch.full((pages, page_size, kv_heads, D), float("nan"), device=DEVICE, dtype=dtype) for _ in "kv")
    table = torch.full((len(totals), max(counts, default=0) + 3), 10**8, dtype=torch.int32)
    for n, (total, count) in enumerate(zip(totals, counts, strict=True)):
        table[n, :count] = torch.tensor([order.pop() for _ in range(count)])
        for pool, seed in ((k_pages, n), (v_pages, n + 1000)):
            rows = torch.full((count * page_size, kv_heads, D), float("nan"), device=DEVICE, dtype=dtype)
            rows[:total] = randn(total, kv_heads, D, dtype=dtype, seed=seed)
            pool[table[n, :count].long().to(DEVICE)] = rows.view(count, page_size, kv_heads, D)
    both = randn(sum(lengths), heads, 2 * D, dtype=dtype)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    contexts = torch.tensor(contexts, dtype=torch.long).to(DEVICE)
    call = [both[..., :D], k_pages, v_pages, table.to(DEVICE), cu_seqlens, contexts, D**-0.5]
    return [*call, both[..., D:] if gate else None]


def in_fp64(call):
    return ops.paged_attention(*(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in call))


def check(call, same=None, **keywords):
    """Within 1.1x the error of the torch op at this dtype (fp32 inside, one cast, the gate), or that of ``same``."""
    want = in_fp64(call)
    same = ops.paged_attention(*call) if same is None else same
    o = paged_attention(*call, **keywords)
    assert_close("o", o, want, max(FP32, 1.1 * rel_l2(same, want)))
    return o


@pytest.fixture
def splits(monkeypatch):
    """Set the number of splits, and allow small ones: at these lengths the kernel would not cut a sequence."""

    def force(count):
        monkeypatch.setattr(attention_decode, "MIN_SHARE", 32)
        monkeypatch.setattr(attention_decode, "split_count", lambda *facts: count)

    return force


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_decode_equals_the_torch_op_at_any_page_size(page_size, dtype, splits):
    """Contexts around the 32 keys of the smallest share and around whole pages. max_query_len=1 reads no length on the host."""
    splits(3)
    check(batch([0, 1, 15, 16, 31, 32, 70], [1] * 7, heads=4, page_size=page_size, dtype=dtype), max_query_len=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_any_number_of_splits_gives_the_result(count, dtype, splits, monkeypatch):
    """40 splits of at least 32 keys: those without a key write nothing and must not be read, and the 18 that 550 keys
    fill take the merge two rounds of 16."""
    splits(count)
    monkeypatch.setattr(attention_decode, "BM", 16)
    check(batch([5, 70, 550], [1] * 3, dtype=dtype, heads=2, kv_heads=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, D", [(1, 1, 16), (16, 2, 64), (6, 2, 24), (12, 1, 40), (2, 2, 256)])
def test_groups_and_head_sizes_off_the_tile(heads, kv_heads, D, dtype, splits):
    """KRN-6: query head j reads KV head j // (heads / kv_heads); groups of 1, 3, 8 and 12 in tiles of 16 or 32 rows."""
    splits(2)
    check(batch([50, 3], [1, 1], heads, kv_heads, D, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_batches_take_both_paths(dtype, splits, monkeypatch):
    """Decode rows, a whole prompt, chunks that continue one (lower-right mask), and empty sequences, in one call. The prefill
    rows may round their probabilities to the model dtype, as fused attention does; the decode rows equal a decode call's."""
    splits(2)
    for contexts, lengths, gate in (([70, 0, 7, 20, 33, 0], [1, 9, 0, 5, 1, 1], True), ([3, 0], [4, 2], False)):
        call = batch(contexts, lengths, dtype=dtype, gate=gate)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "attend", in_bfloat16)
            same = ops.paged_attention(*call)
        o, alone = check(call, same), paged_attention(*call, max_query_len=1)
        for n, length in enumerate(lengths):
            rows = slice(sum(lengths[:n]), sum(lengths[: n + 1]))
            assert length != 1 or torch.equal(o[rows], alone[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_share_calls_and_change_no_bit(dtype, splits, monkeypatch):
    """KRN-2: prompts and chunks that stand together are gathered and attended in one call. Each equals, bit for bit, the same
    sequence in a call of its own, whether it shares calls or is long enough to go alone, and the long do not join."""
    splits(2)
    monkeypatch.setattr(attention, "SHORT", 60)
    monkeypatch.setattr(attention, "TOGETHER", 70)
    contexts, lengths = [0, 5, 0, 64, 0, 9, 30, 0, 40], [9, 3, 40, 6, 1, 0, 11, 2, 25]
    call = batch(contexts, lengths, kv_heads=1, dtype=dtype)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "attend", in_bfloat16)
        same = ops.paged_attention(*call)
    o = check(call, same)
    for n, length in enumerate(lengths):
        rows = slice(sum(lengths[:n]), sum(lengths[: n + 1]))
        q, k_pages, v_pages, table, _, context, scale, gate = call
        ends = torch.tensor([0, length], device=DEVICE)
        one = [q[rows], k_pages, v_pages, table[n : n + 1], ends, context[n : n + 1], scale, gate[rows]]
        assert torch.equal(o[rows], paged_attention(*one))


def test_which_neighbours_share_a_call():
    """Empty sequences and decode rows part their neighbours, which need not be gathered or attended; so do long sequences, full
    chunks with a cuDNN kernel of their own, and more keys than one gather may take."""
    lengths = [5, 7, 1, 4096, 3, 3, 0, 2, 2, 2]
    contexts = [0, 9, 100, 0, 8189, 8188, 5, 0, 65530, 8000]
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    assert attention._runs(offsets, contexts) == [(0, 2), (3, 4), (4, 5), (5, 6), (7, 8), (8, 9), (9, 10)]
    assert attention._runs([4096 * n - n for n in range(18)], [0] * 17) == [(0, 16), (16, 17)]
    assert attention._runs([0, 2, 6], [0, 4096]) == [(0, 2)]
    assert attention._runs([0], []) == []


def test_the_shared_call_fits_torchs_operator():
    """The arguments in the operator's own terms: torch checks shapes and types of the call without a GPU, on the meta device."""
    q, k = (torch.empty(tokens, heads, 256, dtype=torch.bfloat16, device="meta") for tokens, heads in ((9, 16), (14, 2)))
    begins = torch.empty(3, dtype=torch.int32, device="meta")
    o = attention._flash(q, k, k, begins, begins, 5, 9, 256**-0.5)
    assert o.shape == q.shape and o.dtype == q.dtype


@pytest.mark.gpu
def test_prompts_of_the_models_shape_together():
    """Prompts and chunks that continue one at the model's head size, among decode rows: within 1.1x of bfloat16, and the bits of
    a call of their own."""
    contexts, lengths = [0, 0, 700, 2000, 0, 1500, 0, 0, 0, 9], [1024, 1000, 1, 257, 64, 513, 2, 8192, 1024, 1]
    call = batch(contexts, lengths, 16, 2, 256, 16, torch.bfloat16)
    o = paged_attention(*call)
    for n, length in enumerate(lengths):
        rows = slice(sum(lengths[:n]), sum(lengths[: n + 1]))
        q, k_pages, v_pages, table, _, context, scale, gate = call
        ends = torch.tensor([0, length], device=DEVICE)
        one = [q[rows], k_pages, v_pages, table[n : n + 1], ends, context[n : n + 1], scale, gate[rows]]
        if length > 1:
            assert torch.equal(o[rows], paged_attention(*one))
            total, size = contexts[n] + length, k_pages.shape[1]
            pages = table[n, : -(-total // size)].long()
            k, v = (x[pages].flatten(0, 1)[:total] for x in (k_pages, v_pages))
            exact = ops.attend(q[rows][-64:].double(), k.double(), v.double(), scale) * gate[rows][-64:].double().sigmoid()
            same = in_bfloat16(q[rows][-64:], k, v, scale) * gate[rows][-64:].sigmoid()
            assert_close("o", o[rows][-64:], exact, 1.1 * rel_l2(same, exact))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_gate(dtype, splits):
    splits(2)
    check(batch([70, 0], [1, 1], dtype=dtype, gate=False), max_query_len=1)


def test_empty_sequences_among_decode_rows_and_empty_batches(splits):
    """KRN-2: a sequence without a query costs nothing and shifts nobody's row; an all-empty call returns an empty output."""
    splits(2)
    call = batch([9, 70, 5, 0], [0, 1, 0, 1])
    assert torch.equal(check(call, max_query_len=1), check(call))
    check(batch([3, 5], [0, 0]), max_query_len=1)
    check(batch([3, 5], [0, 0]))
    assert paged_attention(*batch([], []), max_query_len=1).shape == (0, 8, 32)


def test_scores_far_apart_stay_finite(splits):
    """Scores of +-1e4 in one split and near 0 in the next: the merge weighs by log-sum-exp, not by plain sums."""
    splits(3)
    call = batch([95], [1], heads=2, kv_heads=1)
    call[1][call[3][0, 3].item()] *= 1e4
    o = paged_attention(*call)
    assert torch.isfinite(o).all()
    assert_close("o", o, in_fp64(call), 1e-5)


def test_the_number_of_splits_follows_what_the_host_knows():
    """From batch size, heads and table width alone: no length is read. Never more splits than smallest shares in the table."""
    device = torch.device(DEVICE)
    for sequences, capacity in ((1, 1), (1, 128), (1, 129), (64, 8192), (1, 262144), (100_000, 262144)):
        count = attention_decode.split_count(sequences, 2, capacity, device)
        assert 1 <= count <= min(-(-capacity // attention_decode.MIN_SHARE), attention_decode.MAX_SPLITS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, S", [(1, 1), (1, 9), (5, 5), (3, 8), (37, 64), (0, 4)])
def test_attend_has_the_lower_right_mask(T, S, dtype):
    """torch's is_causal is upper-left: a chunk that continues a prompt would hardly see its context."""
    q, k, v = randn(T, 4, 32, dtype=dtype), randn(S, 2, 32, dtype=dtype, seed=1), randn(S, 2, 32, dtype=dtype, seed=2)
    want = ops.attend(q.double(), k.double(), v.double(), 0.3)
    o = attend(q, k, v, 0.3)
    assert o.shape == q.shape and o.dtype == q.dtype
    assert_close("attend", o, want, max(2 * FP32, 1.1 * rel_l2(in_bfloat16(q, k, v, 0.3), want)))


def in_bfloat16(q, k, v, scale):
    """``attend`` in torch at q's dtype: matrix products of values in it, probabilities rounded to it."""
    T, S, ratio = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)))
    hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
    p = (q.float() @ k.float().mT * scale).masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype)
    return (p @ v).transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, D, rotary", [(4, 2, 32, 8), (16, 2, 256, 64), (3, 1, 24, 24), (2, 1, 20, 6), (2, 2, 16, 0)]
)
@pytest.mark.parametrize("output_gate", [True, False])
def test_qk_norm_rope_equals_the_torch_op(heads, kv_heads, D, rotary, output_gate, dtype):
    """The gate is returned as the view it is, not copied; bf16 rounds both products and their sum, as torch does."""
    P = 7
    q, k = randn(P, heads, 2 * D if output_gate else D, dtype=dtype), randn(P, kv_heads, D, dtype=dtype, seed=1)
    weights = 0.2 * randn(D, dtype=dtype, seed=2), 0.2 * randn(D, dtype=dtype, seed=3)
    angles = rope_angles(torch.arange(P, device=DEVICE) + 1000, rotary, 1e7, dtype)
    got = qk_norm_rope(q, k, *weights, EPS, *angles, output_gate)
    same = ops.qk_norm_rope(q, k, *weights, EPS, *angles, output_gate)
    want = ops.qk_norm_rope(*(x.double() for x in (q, k, *weights)), EPS, *(x.double() for x in angles), output_gate)
    for name, x, torch_x, exact in zip(("q", "k"), got, same, want, strict=False):
        assert x.shape == exact.shape and x.dtype == dtype
        assert_close(name, x, exact, max(FP32, 1.1 * rel_l2(torch_x, exact)))
        assert (x == torch_x).double().mean() > (0.99 if dtype == torch.bfloat16 else 0.0)
    assert (got[2] is None) if not output_gate else torch.equal(got[2], q[..., D:])


def test_qk_norm_rope_reads_strided_heads_and_nothing_beside_them():
    """q, k and v as column ranges of one fused projection; the rest of it is NaN."""
    fused = torch.full((6, 4 * 64 + 5 * 32), float("nan"), device=DEVICE)
    fused[:, : 4 * 64], fused[:, 4 * 64 + 32 : 4 * 64 + 96] = randn(6, 256), randn(6, 64, seed=1)
    q, k = fused[:, :256].view(6, 4, 64), fused[:, 288:352].view(6, 2, 32)
    weights, angles = (randn(32, seed=2), randn(32, seed=3)), rope_angles(torch.arange(6, device=DEVICE), 8, 1e7, torch.float32)
    got = qk_norm_rope(q, k, *weights, EPS, *angles, True)
    want = qk_norm_rope(q.contiguous(), k.contiguous(), *weights, EPS, *angles, True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("kv_heads, D", [(2, 32), (1, 24)])
def test_keys_and_values_go_into_their_pages_and_nowhere_else(kv_heads, D):
    """The append that belongs to the layer, in the launch that makes the keys; v is a column range of a wider projection."""
    P, dtype = 9, torch.float32
    q, k = randn(P, 4, 2 * D), randn(P, kv_heads, D, seed=1)
    v = torch.full((P, 3 * kv_heads * D), float("nan"), device=DEVICE)[:, kv_heads * D : 2 * kv_heads * D].unflatten(-1, (-1, D))
    v.copy_(randn(P, kv_heads, D, seed=4))
    common = randn(D, seed=2), randn(D, seed=3), EPS, *rope_angles(torch.arange(P, device=DEVICE), 8, 1e7, dtype), True
    places = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:P].to(DEVICE)
    want = qk_norm_rope(q, k, *common)
    for op in (qk_norm_rope, ops.qk_norm_rope):
        pages = [torch.full((10, 4, kv_heads, D), 7.0, device=DEVICE) for _ in range(2)]
        got = op(q, k, *common, append=(v, *pages, places))
        assert all(rel_l2(a, b) < FP32 for a, b in zip(got, want, strict=True))
        for x, page in ((got[1], pages[0]), (v, pages[1])):
            rows = page.flatten(0, 1)
            assert torch.equal(rows[places], x)
            others = torch.ones(40, dtype=torch.bool, device=DEVICE).index_fill(0, places, False)
            assert (rows[others] == 7.0).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"v": torch.ones(3, 2, 16)}, r"v: expected shape \(3, 2, 32\)"),
        ({"k_pages": torch.ones(5, 4, 1, 32)}, r"k_pages: expected contiguous \[pages, page_size, 2, 32\], got \(5, 4, 1, 32\)"),
        ({"v_pages": torch.ones(5, 8, 2, 32)[:, ::2]}, r"v_pages: expected contiguous .* with strides"),
        ({"v_pages": torch.ones(5, 4, 2, 32).double()}, "v_pages: expected torch.float32"),
        ({"places": torch.zeros(2, dtype=torch.int64)}, r"places: expected shape \(3,\), got \(2,\)"),
        ({"places": torch.zeros(3)}, "places: expected int32 or int64"),
    ],
)
def test_what_cannot_be_appended_is_refused_by_name(change, message):
    append = {"v": torch.ones(3, 2, 32), "k_pages": torch.ones(5, 4, 2, 32), "v_pages": torch.ones(5, 4, 2, 32),
              "places": torch.arange(3)} | change  # fmt: skip
    angles = torch.ones(3, 8, device=DEVICE)
    with pytest.raises(ValueError, match=f"^qk_norm_rope: {message}"):
        qk_norm_rope(randn(3, 4, 32), randn(3, 2, 32), randn(32), randn(32), EPS, angles, angles, False,
                     tuple(x.to(DEVICE) for x in append.values()))  # fmt: skip


def test_qk_norm_rope_of_no_tokens():
    angles = rope_angles(torch.arange(0, device=DEVICE), 8, 1e7, torch.float32)
    q, k, _ = qk_norm_rope(randn(0, 4, 32), randn(0, 2, 32), randn(32), randn(32), EPS, *angles, False)
    assert q.shape == (0, 4, 32) and k.shape == (0, 2, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("context", [8191, 100_000, 262_143])
def test_long_contexts_at_the_models_shape(context):
    """Up to the model's whole window: the last page of the table, 64-bit offsets into the pool, every split in use."""
    check(batch([context, 0, context // 3], [1, 1, 1], 16, 2, 256, 16, torch.bfloat16), max_query_len=1)


@pytest.mark.gpu
def test_pool_offsets_past_32_bits():
    """A pool of 2.2e9 elements: an offset in 32 bits would wrap to another page."""
    pages, size = 135_000, 16
    pool = torch.zeros(pages, size, 2, 512, dtype=torch.bfloat16, device=DEVICE)  # k and v in one allocation
    last = torch.arange(pages - 40, pages, device=DEVICE)
    pool[last] = randn(40, size, 2, 512, dtype=torch.bfloat16)
    q, one = randn(1, 16, 256, dtype=torch.bfloat16, seed=1), torch.tensor([0, 1], device=DEVICE)
    call = [q, pool[..., :256], pool[..., 256:], last[None], one, torch.tensor([639], device=DEVICE), 256**-0.5]
    small = [q, pool[last, ..., :256], pool[last, ..., 256:], torch.arange(40, device=DEVICE)[None], *call[4:]]
    assert torch.equal(paged_attention(*call, max_query_len=1), check(small, max_query_len=1))


@pytest.mark.gpu
def test_decode_is_captured_in_a_graph_and_follows_its_inputs():
    """A captured step must read lengths and pages from the device at replay: nothing of the capture's batch may be baked in."""
    call = batch([500, 30, 0], [1, 1, 1], 16, 2, 256, 16, torch.bfloat16)
    paged_attention(*call, max_query_len=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = paged_attention(*call, max_query_len=1)
    call[5].copy_(torch.tensor([200, 29, 0]))
    call[0].normal_()
    graph.replay()
    assert torch.equal(o, paged_attention(*call, max_query_len=1)) and rel_l2(o, in_fp64(call)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_prompts_are_captured_in_a_graph_and_follow_its_inputs(kv_heads):
    """One call over a room of keys, sequences without a query among them: bit for bit what those lengths get without it."""
    call = batch([500, 0, 64, 0, 0, 7000], [130, 40, 2, 0, 0, 70], 8 * kv_heads, kv_heads, 256, 16, torch.bfloat16)
    begins, room = torch.zeros(7, dtype=torch.int32, device=DEVICE), 16384

    def fill(contexts, lengths):
        call[4].copy_(torch.tensor([0, *lengths]).cumsum(0))
        call[5].copy_(torch.tensor(contexts))
        begins.copy_(torch.tensor([0, *(c + n for c, n in zip(contexts, lengths, strict=True))]).cumsum(0))

    fill([500, 0, 64, 0, 0, 7000], [130, 40, 2, 0, 0, 70])
    options = {"max_query_len": 242, "key_offsets": (begins, room)}
    check(call, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = paged_attention(*call, **options)
    shorter = [3, 0, 0, 0, 0, 6900], [200, 17, 0, 0, 0, 25]
    for contexts, lengths in (([500, 0, 64, 0, 0, 7000], [130, 40, 2, 0, 0, 70]), shorter):
        fill(contexts, lengths)
        graph.replay()
        assert torch.equal(o, paged_attention(*call)) and rel_l2(o, in_fp64(call)) < 1e-2


@pytest.mark.gpu
def test_fifty_calls_give_one_result():
    """KRN-4: a race shows as another result on the same inputs."""
    call = batch([5000, 777, 1, 64], [1] * 4, 16, 2, 256, 16, torch.bfloat16)
    first = paged_attention(*call, max_query_len=1)
    assert all(torch.equal(paged_attention(*call, max_query_len=1), first) for _ in range(50))


@pytest.mark.gpu
def test_a_broken_promise_leaves_no_other_row_changed():
    """A sequence of two queries under max_query_len=1 is skipped; its neighbours are right."""
    call = batch([100, 30, 50], [1, 2, 1], dtype=torch.bfloat16)
    o, want = paged_attention(*call, max_query_len=1), paged_attention(*call)
    assert torch.equal(o[[0, 3]], want[[0, 3]])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.ones(2, 4)}, "paged_attention: q: expected [P, heads, D], got (2, 4)"),
        ({"q": torch.ones(2, 3, 16)}, "paged_attention: k_pages: expected [pages, page_size, a divisor of 3, 16], got"),
        ({"q": torch.ones(2, 4, 512)}, "paged_attention: q: expected a head size up to 256, got 512"),
        ({"v_pages": torch.ones(5, 4, 2, 8)}, "paged_attention: v_pages: expected shape (5, 4, 2, 16), got (5, 4, 2, 8)"),
        ({"page_table": torch.zeros(1, 3, dtype=torch.int32)}, "paged_attention: page_table: expected 2 rows, got (1, 3)"),
        ({"page_table": torch.zeros(2, 3)}, "paged_attention: page_table: expected int32 or int64, got torch.float32"),
        ({"context_lens": torch.zeros(3, dtype=torch.long)}, "paged_attention: context_lens: expected shape (2,), got (3,)"),
        ({"gate": torch.ones(2, 4, 32)}, "paged_attention: gate: expected shape (2, 4, 16), got (2, 4, 32)"),
        ({"q": torch.ones(2, 4, 16, dtype=torch.float64)}, "paged_attention: q: expected torch.float32"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, message):
    call = {
        "q": torch.ones(2, 4, 16), "k_pages": torch.ones(5, 4, 2, 16), "v_pages": torch.ones(5, 4, 2, 16),
        "page_table": torch.zeros(2, 3, dtype=torch.int32), "cu_seqlens": torch.tensor([0, 1, 2]),
        "context_lens": torch.zeros(2, dtype=torch.long),
    }  # fmt: skip
    with pytest.raises(ValueError) as error:
        paged_attention(**{name: x.to(DEVICE) for name, x in (call | change).items()}, scale=1.0)
    assert str(error.value).startswith(message)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is only in use on a machine without a GPU")
def test_the_interpreter_refuses_bfloat16():
    """KRN-5: its bf16 dot multiplies bit patterns and returns values near 1e10 without a word."""
    call = batch([3], [1], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="^paged_attention: q: expected torch.float32 under TRITON_INTERPRET=1"):
        paged_attention(*call)
