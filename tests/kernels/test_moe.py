"""The MoE kernels against the torch op in fp64: in the interpreter in fp32, on a GPU in bfloat16 as well.

Token counts stand for the paths: up to 4 the streaming one, above it the sorted one, and from 65 on the library's logits.
"""

import pytest
import torch
from helpers import assert_close, rel_l2
from torch.nn.functional import linear

from berrylm_kernels import moe_router
from berrylm_kernels.arguments import INTERPRETED
from berrylm_kernels.moe import moe, route, swiglu
from berrylm_kernels.moe_gemm import launch_down, launch_gate_up
from berrylm_kernels.moe_router import plan, project_logits
from berrylm_kernels.moe_tiles import Tile
from berrylm_ref.ops import moe as ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.gpu
FP32 = 1e-6
PATHS = [1, 4, 5, 70]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weights(D, E, F, Fs, dtype=torch.float32, seed=10):
    """router, gate_up_proj, down_proj, shared_gate_up, shared_down, shared_gate."""
    shapes = [(E, D), (E, 2 * F, D), (E, D, F), (Fs, D), (Fs, D), (D, Fs), (1, D)]
    router, gate_up, down, gate, up, shared_down, shared_gate = (
        (randn(*s, seed=seed + i) * s[-1] ** -0.5).to(dtype) for i, s in enumerate(shapes)
    )
    return [router, gate_up, down, (gate, up), shared_down, shared_gate]


def clear_tokens(P, router, top_k, dtype=torch.float32):
    """P random tokens whose last choice leads the next expert by more than logits can be rounded apart."""
    x = randn(4 * P + 8, router.shape[1], dtype=dtype, seed=1)
    best = linear(x.double(), router.double()).topk(min(top_k + 1, router.shape[0])).values
    if best.shape[1] > top_k:
        x = x[best[:, top_k - 1] - best[:, top_k] > 0.02]
    assert len(x) >= P
    return x[:P].contiguous()


def double(w):
    return [tuple(t.double() for t in x) if isinstance(x, tuple) else x.double() for x in w]


def routed_in(x, w, top_k, normalise):
    """The op in fp64, but with the routing that x's dtype gives: its logits are rounded there."""
    p, experts = ops.route(linear(x, w[0]), top_k, normalise)
    router, gate_up, down, (gate, up), shared_down, shared_gate = double(w)
    x = x.double()
    share = torch.sigmoid(linear(x, shared_gate))
    out = share * linear(ops.swiglu(torch.cat([linear(x, gate), linear(x, up)], -1)), shared_down)
    for e in experts.unique().tolist():
        token, slot = (experts == e).nonzero(as_tuple=True)
        y = linear(ops.swiglu(linear(x[token], gate_up[e])), down[e])
        out.index_add_(0, token, p[token, slot, None].double() * y)
    return out


@pytest.mark.parametrize("P", PATHS)
@pytest.mark.parametrize(
    "D, E, F, Fs, top_k",
    [(64, 8, 32, 32, 2), (40, 5, 10, 14, 2), (21, 3, 33, 33, 3), (48, 17, 24, 24, 4)],
    ids=["even", "shared of another width", "odd, all experts", "E no power of two"],
)
def test_equals_the_torch_op_in_fp64(P, D, E, F, Fs, top_k):
    w = weights(D, E, F, Fs)
    x = clear_tokens(P, w[0], top_k)
    want = ops.moe(x.double(), *double(w), top_k=top_k, normalise=True)
    assert_close("moe", moe(x, *w, top_k=top_k, normalise=True), want, FP32)


@pytest.mark.parametrize("P", PATHS)
def test_weights_need_not_be_renormalised(P):
    w = weights(24, 6, 16, 16)
    x = clear_tokens(P, w[0], 2)
    want = ops.moe(x.double(), *double(w), top_k=2, normalise=False)
    assert rel_l2(ops.moe(x.double(), *double(w), top_k=2, normalise=True), want) > 0.01
    assert_close("moe", moe(x, *w, top_k=2, normalise=False), want, FP32)


@pytest.mark.parametrize("Fs", [16, 24], ids=["shared expert fused", "shared expert apart"])
@pytest.mark.parametrize("P", PATHS)
def test_a_residual_is_added_to_the_rounded_sum(P, Fs):
    """The stream's addition belongs to the last kernel. In bf16 h + (a + b) and (h + a) + b differ in every third value."""
    w = weights(24, 6, 16, Fs)
    x, h = clear_tokens(P, w[0], 2), 100 * randn(P, 24, seed=7)
    wide = torch.full((P, 40), float("nan"), device=DEVICE)
    wide[:, 8:32] = h
    y = moe(x, *w, top_k=2, normalise=True)
    for residual in (h, wide[:, 8:32]):
        assert torch.equal(moe(x, *w, top_k=2, normalise=True, residual=residual), h + y)
    want = ops.moe(x.double(), *double(w), top_k=2, normalise=True, residual=h.double())
    assert_close("moe", h + y, want, FP32)


@GPU
@pytest.mark.parametrize("P", [1, 5, 300])
def test_a_residual_is_added_to_the_rounded_sum_in_bf16(P):
    w = weights(512, 16, 256, 256, torch.bfloat16)
    x, h = randn(P, 512, dtype=torch.bfloat16), randn(P, 512, dtype=torch.bfloat16, seed=7)
    y = moe(x, *w, top_k=2, normalise=True)
    assert torch.equal(moe(x, *w, top_k=2, normalise=True, residual=h), h + y)


@GPU
@pytest.mark.parametrize("P", [1, 4, 5, 64, 70, 300, 1500, 4096])
def test_bf16_is_no_worse_than_torch_in_bf16(P):
    """The rule for kernels: at most 1.1 times the error of the same maths in torch at that dtype. One count for each tile."""
    w = weights(512, 16, 256, 256, torch.bfloat16)
    x = clear_tokens(P, w[0], 2, torch.bfloat16)
    want = routed_in(x, w, 2, True)
    peer = rel_l2(ops.moe(x, *w, top_k=2, normalise=True), want)
    assert_close("moe", moe(x, *w, top_k=2, normalise=True), want, 1.1 * peer)


@GPU
@pytest.mark.parametrize("P", [1, 5, 300])
def test_bf16_of_odd_sizes(P):
    """Nothing here is a multiple of a tile: masks, and the plain product where the persistent one would be the faster."""
    w = weights(72, 5, 40, 24, torch.bfloat16)
    x = clear_tokens(P, w[0], 2, torch.bfloat16)
    want = routed_in(x, w, 2, True)
    peer = rel_l2(ops.moe(x, *w, top_k=2, normalise=True), want)
    assert_close("moe", moe(x, *w, top_k=2, normalise=True), want, 1.1 * peer)


def some_logits():
    near = torch.zeros(1, 128)
    near[0, :7], near[0, 7], near[0, 100] = 3.0, 1.000, 1.003
    return {
        "random": (randn(70, 128), 8),
        "KRN-7": (near.to(DEVICE), 8),
        "all equal": (torch.full((3, 128), 0.25, device=DEVICE), 8),
        "all zero, both signs": (torch.tensor([[0.0, -0.0] * 8], device=DEVICE), 3),
        "all negative": (-randn(9, 20).abs() - 50, 5),
        "tied": (randn(40, 64).round(), 8),
        "far apart": (200 * randn(9, 33), 8),
        "some -inf": (randn(9, 33).masked_fill(randn(9, 33, seed=5) > 0, float("-inf")), 8),
        "every expert": (randn(5, 7), 7),
        "one expert": (randn(5, 1), 1),
    }


@pytest.mark.parametrize("name", some_logits())
@pytest.mark.parametrize("normalise", [True, False])
def test_route_chooses_what_fp32_torch_chooses(name, normalise):
    """KRN-7: near-equal experts stay apart, equal ones come lowest id first, padding up to a power of two never wins."""
    logits, top_k = some_logits()[name]
    p, experts = route(logits, top_k, normalise)
    want, want_experts = ops.route(logits, top_k, normalise)
    assert torch.equal(experts, want_experts)
    assert p.dtype == torch.float32 and experts.dtype == torch.int64
    assert_close("weights", p, want, 3e-7)


@pytest.mark.parametrize("P", PATHS)
def test_near_equal_experts_are_told_apart_on_every_path(P):
    """KRN-7 through the whole op: the paths choose for themselves, and each must choose in fp32. Expert 100 leads expert 7 by
    0.003 in the logits, less than bfloat16 sees, and answers something else."""
    D, E = 16, 128
    router = torch.zeros(E, D, device=DEVICE)
    router[:7, 0], router[7, 0], router[100, 0] = 3.0, 1.000, 1.003
    w = weights(D, E, 16, 16)
    w[0] = router
    x = randn(P, D)
    x[:, 0] = 1.0
    assert 100 in ops.route(linear(x, router), 8, True)[1][0]
    assert_close("moe", moe(x, *w, top_k=8, normalise=True), ops.moe(x.double(), *double(w), top_k=8, normalise=True), FP32)


@pytest.mark.parametrize("P", PATHS)
def test_permuting_the_tokens_permutes_the_outputs(P):
    """The order inside an expert's rows is left to atomic adds: it must not be seen in any result. To the bit, that is, but for
    products on the CPU, the interpreter's and the library's, which round by a row's place."""
    w = weights(64, 8, 32, 32)
    x = clear_tokens(P, w[0], 2)
    order = torch.randperm(P, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    out = moe(x, *w, top_k=2, normalise=True)
    permuted = moe(x[order], *w, top_k=2, normalise=True)
    if not INTERPRETED or P <= 4:
        assert torch.equal(permuted, out[order])
    assert_close("permuted", permuted, out[order], FP32)


@pytest.mark.parametrize("P", PATHS)
def test_idle_experts_are_not_read(P):
    """Experts without a token may hold anything: their NaN must not come out through padding rows or zero weights."""
    E = 30
    w = weights(32, E, 16, 16)
    w[0][20:] = -w[0][:20].abs().sum()  # some experts that nobody takes, whatever the number of tokens
    x = randn(P, 32).abs()
    want = moe(x, *w, top_k=2, normalise=True)
    used = route(linear(x, w[0]), 2, True)[1].unique()
    assert used.numel() < E
    for i in (1, 2):
        poisoned = torch.full_like(w[i], float("nan"))
        poisoned[used] = w[i][used]
        w[i] = poisoned
    out = moe(x, *w, top_k=2, normalise=True)
    assert torch.isfinite(want).all() and torch.equal(out, want)


@pytest.mark.parametrize("favourite", [0, 6])
@pytest.mark.parametrize("P", PATHS)
def test_all_tokens_to_one_expert(P, favourite):
    """All blocks of the plan belong to one expert, the first or the last: the list is as long as the worst case allows."""
    w = weights(32, 7, 16, 16)
    w[0] = torch.full_like(w[0], -1.0)
    w[0][favourite] = 1.0
    x = randn(P, 32).abs()
    assert_close("moe", moe(x, *w, top_k=1, normalise=True), ops.moe(x.double(), *double(w), top_k=1, normalise=True), FP32)


@pytest.mark.parametrize("P", PATHS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_token_of_nan_harms_no_other(P):
    """NaN compares with nothing, so its token might choose no expert and leave row numbers unwritten: whatever memory held
    would then be followed. Its own result is NaN, as in torch; the others are untouched, bit for bit."""
    w = weights(32, 5, 16, 16)
    x = randn(P, 32)
    want = moe(x, *w, top_k=2, normalise=True)
    x[P // 2] = float("nan")
    out = moe(x, *w, top_k=2, normalise=True)
    others = torch.arange(P, device=DEVICE) != P // 2
    assert out[P // 2].isnan().all() and torch.equal(out[others], want[others])


@pytest.mark.parametrize("P", [1, 4, 5])
def test_x_may_be_a_view_and_what_lies_beside_it_stays_unread(P):
    w = weights(32, 5, 16, 16)
    x = randn(P, 32)
    buffer = torch.full((P + 2, 48), float("nan"), device=DEVICE)
    buffer[1:-1, 8:40] = x
    view = buffer[1:-1, 8:40]
    assert not view.is_contiguous() or P == 1
    assert torch.equal(moe(view, *w, top_k=2, normalise=True), moe(x, *w, top_k=2, normalise=True))


@pytest.mark.parametrize("P", [5, 37, 90])
def test_half_tiles_change_nothing(P):
    """Blocks of 1, 2, .. rows up to full ones: those of at most 16 take a tile of 16, the others one of 32."""
    D, E, F = 40, 6, 24
    w = weights(D, E, F, F)
    x = randn(P, D)
    _, rows, order, blocks = plan(randn(P, E) + torch.arange(E, device=DEVICE), 2, True, True, 32)
    tokens = order.long() % P
    expert = torch.empty(rows.numel(), dtype=torch.int64)
    for e, first, end in blocks[: blocks[-1, 0]].tolist():
        expert[first : min(first + 32, end)] = e
    gate_up = torch.cat([w[1], torch.cat(w[3])[None]]).double()[expert.to(DEVICE)]
    want = ops.swiglu(torch.einsum("pd,pfd->pf", x[tokens].double(), gate_up))
    for halves in (False, True):
        got = launch_gate_up(x, w[1], w[3], order, blocks, Tile(32, 16, 32, 4, 2, halves))
        assert_close(f"halves={halves}", got, want, FP32)


def shifted(tensor):
    """The same numbers, contiguous, but starting one element into an allocation."""
    if isinstance(tensor, tuple):
        return tuple(shifted(t) for t in tensor)
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=GPU)])
@pytest.mark.parametrize("P", [1, 5, 200])
def test_weights_may_start_anywhere_in_memory(P, dtype):
    """16-byte copies and tensor descriptors need aligned addresses. Weights cut from one flat buffer need not have them."""
    w = weights(128, 4, 64, 64, dtype)
    x = clear_tokens(P, w[0], 2, dtype)
    moved = [shifted(t) for t in w]
    assert moved[1].data_ptr() % 16 and moved[1].is_contiguous()
    want = routed_in(x, w, 2, True)
    budget = FP32 if dtype == torch.float32 else 1.1 * rel_l2(ops.moe(x, *w, top_k=2, normalise=True), want)
    assert_close("moe", moe(x, *moved, top_k=2, normalise=True), want, budget)


@pytest.mark.parametrize("at_once", [True, False], ids=["one program", "many"])
@pytest.mark.parametrize("P, E, top_k, BM", [(1, 5, 2, 16), (37, 128, 8, 16), (20, 10, 3, 32), (140, 4, 1, 64), (70, 3, 3, 16)])
@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize("skew", [0.0, 30.0])
def test_plan_covers_every_pair_once(P, E, top_k, BM, with_shared, skew, at_once, monkeypatch):
    """Blocks: no row twice, none left out, none of another expert, and never more of them than the list has room for."""
    monkeypatch.setattr(moe_router, "ONE_PROGRAM", 2**20 if at_once else 0)
    logits = randn(P, E) + skew * torch.arange(E, device=DEVICE) / E
    p, rows, order, blocks = plan(logits, top_k, True, with_shared, BM)
    want, experts = ops.route(logits, top_k, True)
    assert_close("weights", p.T, want, 3e-7)
    slots = top_k + with_shared
    order, rows, blocks, used = order.cpu(), rows.cpu(), blocks[:-1].cpu(), blocks[-1, 0].item()
    expert = torch.cat([experts.T.flatten().cpu(), torch.full((with_shared * P,), E)])[order.long()]  # of each row
    assert order.sort().values.tolist() == list(range(slots * P))
    assert torch.equal(order[rows.flatten().long()].long(), torch.arange(slots * P))
    covered = []
    for e, begin, end in blocks.tolist():
        if e >= 0:
            covered += range(begin, min(begin + BM, end))
            assert expert[begin:end].eq(e).all() and expert[end : end + 1].ne(e).all()
    assert sorted(covered) == list(range(slots * P))
    assert used == (blocks[:, 0] >= 0).sum() and (blocks[:used, 0] >= 0).all()
    assert (blocks[: with_shared * -(-P // BM), 0] == E).all(), "the shared expert's blocks lead"


@pytest.mark.parametrize("P, with_shared", [(37, True), (37, False), (1, True), (70, True)])
def test_persistent_product_equals_the_plain_one(P, with_shared):
    """Its programs take tile after tile, shared ones first, and a tile reads rows of the next expert, or from behind the end,
    that it must not store. In the interpreter 3 or 9 programs for up to 50 tiles."""
    D, E, F, top_k, BM = 96, 6, 64, 2, 16
    _, rows, _, blocks = plan(randn(P, E), top_k, True, with_shared, BM)
    hidden = torch.full((rows.numel() + 5, F), float("nan"), device=DEVICE)[: rows.numel()]
    hidden.copy_(randn(rows.numel(), F))
    down, shared = randn(E, D, F, seed=1), randn(D, F if with_shared else F + 3, seed=2)
    count = with_shared * -(-P // BM)
    want = launch_down(hidden, down, shared, blocks, count, Tile(BM, 32, 32, 4, 2))
    for per_multiprocessor in (1, 3):
        got = launch_down(hidden, down, shared, blocks, count, Tile(BM, 32, 32, 4, 2, False, per_multiprocessor))
        assert_close("persistent", got, want.double(), 2e-7)


@pytest.mark.parametrize("P", [1, 3])
def test_projected_logits_end_with_the_shared_gate(P):
    x, router, gate = randn(P, 100), randn(10, 100, seed=1), randn(1, 100, seed=2)
    assert_close("logits", project_logits(x, router, gate), x.double() @ torch.cat([router, gate]).double().T, FP32)


@pytest.mark.parametrize("shape", [(5, 20), (2, 3, 34), (0, 8), (1500, 2)])
def test_swiglu_equals_the_torch_op(shape):
    x = randn(*shape) * 3
    assert_close("swiglu", swiglu(x), ops.swiglu(x.double()), FP32)
    wide = torch.full((*shape[:-1], shape[-1] + 5), float("nan"), device=DEVICE)
    wide[..., : shape[-1]] = x
    assert torch.equal(swiglu(wide[..., : shape[-1]]), swiglu(x))


def test_no_tokens():
    w = weights(32, 5, 16, 16)
    assert moe(randn(0, 32), *w, top_k=2, normalise=True).shape == (0, 32)
    assert route(randn(0, 5), 2, True)[0].shape == (0, 2)


@GPU
@pytest.mark.parametrize("P", PATHS)
def test_one_captured_graph_serves_any_routing(P):
    """No host sync and no shape that depends on the routing: the graph captured for one batch is right for the next."""
    w = weights(256, 16, 128, 128, torch.bfloat16)
    x = randn(P, 256, dtype=torch.bfloat16)
    moe(x, *w, top_k=2, normalise=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x, *w, top_k=2, normalise=True)
    for seed in (1, 2):
        x.copy_(randn(P, 256, dtype=torch.bfloat16, seed=seed) + seed * w[0][3])
        graph.replay()
        assert torch.equal(out, moe(x, *w, top_k=2, normalise=True))


@GPU
@pytest.mark.parametrize("P", [1, 16, 300, 2048])
def test_repeats_are_bitwise_equal(P):
    """KRN-4: 50 forwards, one distinct output, though the rows of an expert come in another order each time."""
    w = weights(512, 16, 256, 256, torch.bfloat16)
    x = randn(P, 512, dtype=torch.bfloat16)
    first = moe(x, *w, top_k=2, normalise=True)
    assert all(torch.equal(moe(x, *w, top_k=2, normalise=True), first) for _ in range(50))


def refused(match, x=None, top_k=2, residual=None, **changes):
    names = ["router", "gate_up_proj", "down_proj", "shared_gate_up", "shared_down", "shared_gate"]
    w = dict(zip(names, weights(32, 5, 16, 16), strict=True)) | changes
    with pytest.raises(ValueError, match=match):
        moe(randn(3, 32) if x is None else x, *w.values(), top_k=top_k, normalise=True, residual=residual)


def test_refusals_name_the_argument():
    gate_up = weights(32, 5, 16, 16)[1]
    refused(r"moe: top_k: expected 1 \.\. 5, got 6", top_k=6)
    refused(r"moe: router: expected shape \(5, 32\), got \(4, 32\)", router=randn(4, 32))
    refused(r"moe: down_proj: expected shape \(5, 32, 16\)", down_proj=randn(5, 16, 32))
    refused(r"moe: x: expected shape \(3, 32\), got \(3, 31\)", x=randn(3, 31))
    refused(r"moe: x, gate_up_proj", x=randn(3, 4, 32))
    refused(r"moe: shared_gate: expected shape \(1, 32\)", shared_gate=randn(2, 32))
    refused(r"moe: gate_up_proj: expected a contiguous tensor", gate_up_proj=gate_up.mT.contiguous().mT)
    refused(r"moe: residual: expected shape \(3, 32\), got \(3, 31\)", residual=randn(3, 31))
    refused(r"moe: residual: expected torch.float32", residual=randn(3, 32).double())
    refused(r"moe: router: expected torch.float32", router=randn(5, 32).double())
    with pytest.raises(ValueError, match=r"route: top_k: expected 1 \.\. 5, got 0"):
        route(randn(3, 5), 0, True)
    with pytest.raises(ValueError, match="swiglu: gate_up: expected an even last dimension"):
        swiglu(randn(3, 5))


@pytest.mark.skipif(not INTERPRETED, reason="about the interpreter, and TRITON_INTERPRET is not set")
def test_bf16_under_the_interpreter_is_refused():
    """KRN-5: its bfloat16 dot multiplies bit patterns and says nothing."""
    refused("float32 under TRITON_INTERPRET=1", x=randn(3, 32, dtype=torch.bfloat16))
