"""The mixture of experts against a plain loop over tokens and choices, and the failures its router is known for."""

import pytest
import torch
from helpers import assert_close, rel_l2
from torch.nn.functional import silu

from berrylm_ref.ops.moe import _grouped, moe, route, swiglu

P, D, E, F, IS, K = 13, 12, 7, 10, 6, 3
FP64 = 1e-14


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weights(experts=E, seed=10):
    """router, gate_up_proj, down_proj, shared_gate_up, shared_down, shared_gate."""
    shapes = [(experts, D), (experts, 2 * F, D), (experts, D, F), (IS, D), (IS, D), (D, IS), (1, D)]
    router, gate_up, down, gate, up, shared_down, shared_gate = (randn(*s, seed=seed + i) for i, s in enumerate(shapes))
    return [router, gate_up, down, (gate, up), shared_down, shared_gate]


def plain_moe(x, router, gate_up, down, shared, shared_down, shared_gate, top_k=K, normalise=True):
    """One token at a time, one expert at a time, nothing sorted."""
    rows = []
    for token in x:
        p = torch.exp(router @ token) / torch.exp(router @ token).sum()
        chosen = sorted(range(len(p)), key=lambda e: -p[e])[:top_k]
        total = sum(p[e] for e in chosen) if normalise else 1.0
        out = torch.sigmoid(shared_gate @ token) * (shared_down @ (silu(shared[0] @ token) * (shared[1] @ token)))
        for e in chosen:
            gate, up = (gate_up[e] @ token).split(gate_up.shape[1] // 2)
            out = out + p[e] / total * (down[e] @ (silu(gate) * up))
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, K, E])
@pytest.mark.parametrize("normalise", [True, False])
def test_equals_a_plain_loop_over_tokens_and_experts(top_k, normalise):
    x, w = randn(P, D), weights()
    assert_close("moe", moe(x, *w, top_k=top_k, normalise=normalise), plain_moe(x, *w, top_k, normalise), FP64)


def test_swiglu_has_the_gate_half_first():
    x = randn(5, 2 * F)
    gate, up = x[:, :F], x[:, F:]
    assert_close("swiglu", swiglu(x), gate / (1 + torch.exp(-gate)) * up, FP64)
    assert rel_l2(swiglu(torch.cat([up, gate], 1)), swiglu(x)) > 0.1, "the halves are not interchangeable"


def near_equal_experts():
    """KRN-7: seven clear experts, then 1.003 against 1.000, which is one number in bfloat16."""
    logits = torch.zeros(1, 128)
    logits[0, :7], logits[0, 7], logits[0, 100] = 3.0, 1.000, 1.003
    return logits


def test_near_equal_experts_are_told_apart():
    """KRN-7: probabilities rounded to bfloat16 before the top-k made experts 7 and 100 a tie, and another expert was
    chosen. The set is decided in fp32 and the weights are renormalised there: their sum is 1 to the last bits."""
    logits = near_equal_experts()
    p, experts = route(logits, 8, True)
    assert sorted(experts[0].tolist()) == [0, 1, 2, 3, 4, 5, 6, 100]
    assert p.dtype == torch.float32 and abs(p.sum().item() - 1) < 1e-6
    assert 100 not in route(logits.bfloat16(), 8, True)[1], "rounded logits must lose this case, or it guards nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_route_keeps_at_least_fp32(dtype):
    p, experts = route(randn(4, E).to(dtype), K, True)
    assert p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and experts.dtype == torch.int64


@pytest.mark.parametrize("normalise", [True, False])
def test_route_returns_the_softmax_of_the_chosen(normalise):
    logits = randn(9, E)
    p, experts = route(logits, K, normalise)
    full = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    chosen = full.gather(1, experts)
    assert_close("weights", p, chosen / chosen.sum(-1, keepdim=True) if normalise else chosen, FP64)
    assert (p.diff(dim=1) <= 0).all(), "most probable first"
    others = full.scatter(1, experts, -1.0)
    assert (chosen.min(1).values >= others.max(1).values).all()


def test_of_equal_logits_the_lowest_id_comes_first():
    """torch.topk leaves the order of ties open, so CPU, GPU and kernel would route the same token to different experts."""
    logits = torch.tensor([[0.0] * 6, [-5.0] * 6, [1.0, 2.0, 1.0, 2.0, 1.0, 1.0], [-1.0, -2.0, -3.0, -1.0, -2.0, -1.0]])
    experts = route(logits, 4, True)[1]
    assert experts.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 3, 0, 2], [0, 3, 5, 1]]


def test_logits_far_below_the_largest_still_have_an_order():
    """Their probabilities are all 0 in fp32. The choice goes by logit, so it does not turn into the lowest ids."""
    experts = route(torch.tensor([[0.0, -400.0, -300.0, -200.0, -500.0]]), 3, True)[1]
    assert experts.tolist() == [[0, 3, 2]]


def test_permuting_the_tokens_permutes_the_outputs():
    x, w = randn(P, D), weights()
    order = torch.randperm(P, generator=torch.Generator().manual_seed(3))
    out = moe(x, *w, top_k=K, normalise=True)
    assert_close("permuted", moe(x[order], *w, top_k=K, normalise=True), out[order], FP64)


def test_a_token_alone_gets_what_it_gets_in_a_batch():
    """KRN-7: prefill and decode routed the same token differently."""
    x, w = randn(P, D), weights()
    out = moe(x, *w, top_k=K, normalise=True)
    alone = torch.cat([moe(row[None], *w, top_k=K, normalise=True) for row in x])
    assert_close("alone", alone, out, FP64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_short_way_of_one_token_is_the_long_one_bit_for_bit(dtype):
    """A decode step takes it, and a chunk of one token that another sequence shares a batch with does not."""
    x, (router, gate_up, down, shared, shared_down, shared_gate) = randn(1, D).to(dtype), weights()
    w = [y.to(dtype) for y in (router, gate_up, down)]
    closed = [tuple(torch.zeros_like(y, dtype=dtype) for y in shared), torch.zeros_like(shared_down, dtype=dtype)]
    short = moe(x, *w, *closed, shared_gate.to(dtype), top_k=K, normalise=True)
    p, experts = route(x @ w[0].T, K, True)
    assert torch.equal(short, _grouped(x, p.to(dtype), experts, *w[1:]))


def test_idle_experts_are_not_read():
    """Experts without a token may hold anything; here NaN, which a product with zero rows or zero weights would let out."""
    x, w = randn(4, D), weights(experts=40)
    want = moe(x, *w, top_k=K, normalise=True)
    used = route(x @ w[0].T, K, True)[1].unique()
    assert used.numel() < 40
    for i in (1, 2):
        poisoned = torch.full_like(w[i], float("nan"))
        poisoned[used] = w[i][used]
        w[i] = poisoned
    assert torch.equal(moe(x, *w, top_k=K, normalise=True), want)


@pytest.mark.parametrize("favourite", [0, 3, E - 1])
def test_all_tokens_to_one_expert(favourite):
    x, w = randn(P, D).abs(), weights()
    w[0] = torch.full_like(w[0], -1.0)
    w[0][favourite] = 1.0
    assert route(x @ w[0].T, 1, True)[1].unique().tolist() == [favourite]
    assert_close("one expert", moe(x, *w, top_k=1, normalise=True), plain_moe(x, *w, 1), FP64)


def test_a_closed_shared_gate_leaves_the_routed_experts_alone_and_an_open_one_adds_the_shared_in_full():
    x, w = randn(P, D).abs() + 0.1, weights()
    for sign, share in ((-1e3, 0.0), (1e3, 1.0)):
        gate = torch.full_like(w[5], sign)
        shared = swiglu(torch.cat([x @ w[3][0].T, x @ w[3][1].T], 1)) @ w[4].T
        routed = plain_moe(x, *w[:4], torch.zeros_like(w[4]), gate)
        assert_close("out", moe(x, *w[:5], gate, top_k=K, normalise=True), routed + share * shared, FP64)


def test_no_tokens():
    assert moe(randn(0, D), *weights(), top_k=K, normalise=True).shape == (0, D)


@pytest.mark.parametrize("top_k", [0, -1, E + 1])
def test_refuses_a_top_k_that_no_set_of_experts_has(top_k):
    with pytest.raises(ValueError, match=r"route: top_k: expected 1 \.\. 7"):
        moe(randn(2, D), *weights(), top_k=top_k, normalise=True)


@pytest.mark.parametrize("i, shape", [(0, (E + 1, D)), (0, (E, D + 1)), (2, (E, D, F + 1)), (2, (E - 1, D, F))])
def test_refuses_weights_that_do_not_fit_each_other(i, shape):
    w = weights()
    w[i] = randn(*shape)
    with pytest.raises(ValueError, match="moe: down_proj, router, x"):
        moe(randn(2, D), *w, top_k=K, normalise=True)


def test_a_residual_is_added_to_the_rounded_sum():
    """The stream's addition is part of the op for kernels' sake, and rounds as if it stood behind it."""
    w = [t.bfloat16() if torch.is_tensor(t) else tuple(u.bfloat16() for u in t) for t in weights()]
    x, h = randn(9, D).bfloat16(), 10 * randn(9, D, seed=1).bfloat16()
    y = moe(x, *w, top_k=K, normalise=True)
    assert torch.equal(moe(x, *w, top_k=K, normalise=True, residual=h), h + y)
    with pytest.raises(ValueError, match=r"moe: residual: expected shape \(9, .*\), got \(8, "):
        moe(x, *w, top_k=K, normalise=True, residual=h[:8])
