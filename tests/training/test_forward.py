"""The training forward is the model: same logits, and a gradient for every weight."""

import pytest
import torch
from helpers import assert_close, randomise, tiny_config

from berrylm_ref import BerryLM
from berrylm_ref.ops.moe import route
from berrylm_ref.training import regions
from berrylm_ref.training.forward import Forward
from berrylm_ref.training.recurrence import torch_recurrence

VARIANTS = {
    "as shipped": {},
    "tied, biased, plain mix": {"tie_word_embeddings": True, "attention_bias": True, "attn_res_gated": False},
    "bounded gate, no mixer, no output gate": {
        "kda_safe_gate": True, "kda_gate_lower_bound": -3.0, "attn_res_block_size": 0, "attn_output_gate": False,
        "norm_topk_prob": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_model(variant):
    """A checkpoint trained by other numbers than it is served by is worse than its loss said, and nobody sees why."""
    model = randomise(BerryLM(tiny_config(**VARIANTS[variant]), backend="torch"), seed=3)
    ids = torch.randint(0, 97, (3, 70), generator=torch.Generator().manual_seed(1))  # 70: a chunk and a piece of the next
    with torch.no_grad():
        assert_close(variant, Forward(model, torch_recurrence, torch.float32).logits(ids), model(ids), 1e-5)


def test_padding_and_neighbours_leave_a_row_alone():
    """Rows are padded on the right and share packed tensors: neither the padding nor the row before may reach into a row."""
    model = randomise(BerryLM(tiny_config(), backend="torch"), seed=3)
    forward = Forward(model, torch_recurrence, torch.float32)
    r = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 97, (2, 32), generator=r)
    other = ids.clone()
    other[0] = torch.randint(0, 97, (32,), generator=r)
    other[1, 20:] = 0
    with torch.no_grad():
        assert_close("row", forward.logits(other)[1, :20], forward.logits(ids)[1, :20], 1e-6)


def test_losses_are_the_cross_entropy_of_the_next_token():
    model = randomise(BerryLM(tiny_config(), backend="torch"), seed=5)
    forward = Forward(model, torch_recurrence, torch.float32)
    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        losses, hits = forward.losses(forward(ids)[0], ids.roll(-1, 1).flatten())
        logits = model(ids).flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, ids.roll(-1, 1).flatten(), reduction="none")
    assert_close("losses", losses, want, 1e-5)
    assert torch.equal(hits, logits.argmax(-1) == ids.roll(-1, 1).flatten())


def test_gradients_are_those_of_the_model():
    """Autograd through the package's own forward is the oracle: a detached tensor in a region would go unnoticed in the loss."""
    model = randomise(BerryLM(tiny_config(), dtype="float64", backend="torch"), seed=7)
    ids = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(4))
    grads = []
    for logits in (Forward(model, torch_recurrence, torch.float64).logits(ids), model(ids)):
        model.zero_grad()
        logits.square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, want in grads[1].items():
        if name.startswith("model.layers.0.attn_res"):
            # the first layer mixes the embeddings with themselves: whatever its mixer says, nothing changes
            assert want.abs().max() < 1e-12 and grads[0][name].abs().max() < 1e-12
            continue
        assert want.abs().max() > 0, name
        assert_close(name, grads[0][name], want, 1e-8)


def test_routes_equal_the_sorted_router_with_ties():
    """Of equal logits the lower id is chosen, as in the model: a padded row's logits are all equal."""
    logits = torch.randint(0, 3, (200, 9), generator=torch.Generator().manual_seed(0)).double()
    weights, probabilities = regions.routes(logits, 4, True)
    want, experts = route(logits, 4, True)
    assert_close("weights", weights, torch.zeros_like(weights).scatter(-1, experts, want), 1e-14)
    assert_close("probabilities", probabilities, logits.softmax(-1), 1e-14)


def test_balance_loss_is_one_when_even_and_counts_no_padding():
    """A router that sends all padding to one expert is fine; one that sends all tokens there is not."""
    model = randomise(BerryLM(tiny_config(), backend="torch"), seed=3)
    m = model.model.layers[0].mlp
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(1))
    live = torch.arange(12) < 8
    forward = Forward(model, torch_recurrence, torch.float32)

    def balance(tokens, which):
        return forward._moe(m, torch.zeros_like(tokens), tokens, which)[1:]

    with torch.no_grad():
        m.gate.weight.zero_()
        even, share = balance(x, live)
        assert float(even) == pytest.approx(1.0) and share.sum() == pytest.approx(1.0)
        m.gate.weight.normal_(generator=torch.Generator().manual_seed(2))
        (a, shares), (b, same) = balance(x, live), balance(x[:8], live[:8])
        assert float(a) == pytest.approx(float(b)) and torch.allclose(shares, same)
        m.gate.weight[:, 0] = torch.tensor([50.0, 40.0, 0, 0, 0])
        skewed, _ = balance(torch.eye(32)[:1].repeat(12, 1), live)
    assert float(skewed) == pytest.approx(2.5, rel=1e-3)  # all on expert 0 by probability, half of the choices: 5 * 1 * 1/2


@pytest.mark.slow
def test_regions_compile_whole_and_once_for_all_row_lengths(monkeypatch):
    """A graph break puts a region's intermediate results back into memory; a graph a bucket costs minutes at start-up."""
    compiler = torch.compile
    # traced and differentiated as on a GPU, without the code generator, which needs a minute here
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiler(f, backend="aot_eager", **options))
    model = randomise(BerryLM(tiny_config(), backend="torch"), seed=7)
    torch._dynamo.reset()
    forwards = [Forward(model, torch_recurrence, torch.float32, compiled=compiled) for compiled in (True, False)]
    graphs = []
    for shape in ((2, 48), (3, 32)):
        ids = torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(4))
        grads = []
        for forward in forwards:
            model.zero_grad()
            h, trace = forward(ids)
            (forward.losses(h, ids.flatten())[0].mean() + sum(trace.balance)).backward()
            grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for name, want in grads[1].items():
            if want.abs().max() > 1e-8:
                assert_close(name, grads[0][name], want, 1e-4)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] <= 6 + 3, graphs  # a graph a region, and "mix" for one, two and three committed streams
