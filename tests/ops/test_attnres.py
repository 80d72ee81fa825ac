"""The depth mixer against a plain loop over tokens and sources, and each step that is easy to get wrong."""

import math

import pytest
import torch
from helpers import assert_close, rel_l2

from berrylm_ref.ops.attnres import attn_res, attn_res_norm
from berrylm_ref.ops.norm import rms_norm

EPS = 1e-6


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_mix(h, committed, pseudo_query):
    """softmax over depth, token by token; keys are normed, values are raw."""
    rows = []
    for t in range(h.shape[0]):
        sources = [*committed[:, t], h[t]]
        weights = []
        for s in sources:
            key = s / ((s * s).mean() + EPS).sqrt()
            weights.append(math.exp((key * pseudo_query).sum()))
        rows.append(sum(w * s for w, s in zip(weights, sources, strict=True)) / sum(weights))
    return torch.stack(rows)


@pytest.mark.parametrize("blocks", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("gate", [0.0, 0.3, -2.0, 40.0])
def test_gated_mixer_is_the_formula(blocks, gate):
    h, committed, query = randn(7, 24), randn(blocks, 7, 24, seed=1), randn(24, seed=2)
    mix = plain_mix(h, committed, query)
    assert_close("mix", attn_res(h, committed, query, None, EPS, gated=False), mix, 1e-14)
    out = attn_res(h, committed, query, torch.tensor(gate, dtype=h.dtype), EPS)
    assert_close("out", out, h + math.tanh(gate) * (mix - h), 1e-14)


def test_only_keys_are_normed_the_values_are_raw():
    """1.5 on the logits when wrong. Scaling one source must scale its share of the mix and, but for eps, not its weight."""
    h, committed, query = randn(5, 16), randn(1, 5, 16, seed=1), randn(16, seed=2)
    mix = attn_res(h, committed, query, None, EPS, gated=False)
    share = mix - attn_res(h, committed * 0.999, query, None, EPS, gated=False)
    wider = attn_res(h, committed * 100, query, None, EPS, gated=False)
    assert_close("99 times a thousandth of the share", wider - mix, share * 99e3, 1e-5)


def test_the_current_stream_is_the_last_source_and_counts_twice_after_a_commit():
    """Right after a commit, and at layer 0 with the embeddings, the same stream stands twice among the sources."""
    h, other, query = randn(5, 16), randn(5, 16, seed=1), randn(16, seed=2)
    twice = attn_res(h, torch.stack([other, h]), query, None, EPS, gated=False)
    assert_close("twice", twice, plain_mix(h, torch.stack([other, h]), query), 1e-14)
    assert rel_l2(attn_res(h, other[None], query, None, EPS, gated=False), twice) > 0.01, "once would be another mix"
    assert_close("layer 0", attn_res(h, h[None], query, None, EPS, gated=False), h, 1e-15)


def test_the_embeddings_take_part_as_block_0():
    """A mistake that costs 0.18 on the logits: leaving the first committed stream out is another mix."""
    h, committed, query = randn(5, 16), randn(3, 5, 16, seed=1), randn(16, seed=2)
    full = attn_res(h, committed, query, None, EPS, gated=False)
    assert rel_l2(attn_res(h, committed[1:], query, None, EPS, gated=False), full) > 0.1


def test_gate_zero_is_the_exact_identity():
    """In bf16 too, where h + 0 * (mix - h) must not round through another path."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        h, committed = randn(5, 16, dtype=dtype), randn(3, 5, 16, dtype=dtype, seed=1)
        out = attn_res(h, committed, randn(16, dtype=dtype, seed=2), torch.zeros((), dtype=dtype), EPS)
        assert torch.equal(out, h)


def test_pseudo_query_zero_is_the_uniform_mean():
    h, committed = randn(5, 16), randn(3, 5, 16, seed=1)
    mix = attn_res(h, committed, torch.zeros(16, dtype=h.dtype), None, EPS, gated=False)
    assert_close("mean", mix, torch.cat([committed, h[None]]).mean(0), 1e-15)


def test_a_zero_source_and_large_logits_stay_finite():
    """eps keeps the norm of a zero stream finite; the softmax subtracts its maximum, so logits of 1e4 do not overflow."""
    h, committed = randn(5, 16, dtype=torch.float32), torch.zeros(2, 5, 16)
    out = attn_res(h, committed, 1e4 * randn(16, dtype=torch.float32, seed=2), torch.ones(()), EPS)
    assert torch.isfinite(out).all()


def test_the_mixer_is_token_local():
    """Changing one token changes no other one, so chunked prefill and decode need no state for the mixer."""
    h, committed, query = randn(5, 16), randn(3, 5, 16, seed=1), randn(16, seed=2)
    gate = torch.tensor(0.5, dtype=h.dtype)
    out = attn_res(h, committed, query, gate, EPS)
    poisoned = committed.clone()
    poisoned[:, 2] = 1e30
    again = attn_res(h, poisoned, query, gate, EPS)
    kept = [0, 1, 3, 4]
    assert torch.equal(again[kept], out[kept])


def test_bfloat16_rounds_the_mix_the_gate_and_each_of_three_operations():
    """Mix in fp32, cast; tanh in fp32, cast; subtract, multiply, add, each rounded in bf16."""
    h, committed = randn(64, 128, dtype=torch.bfloat16), randn(4, 64, 128, dtype=torch.bfloat16, seed=1)
    query, gate = randn(128, dtype=torch.bfloat16, seed=2), torch.tensor(0.7, dtype=torch.bfloat16)
    mix = attn_res(h, committed, query, None, EPS, gated=False)
    sources = torch.cat([committed, h[None]]).double()
    exact = plain_mix(h.double(), committed.double(), query.double())
    assert (mix.double() - exact).abs().max() <= 2**-8 * sources.abs().max() and mix.dtype == torch.bfloat16
    assert (mix == exact.bfloat16()).double().mean() > 0.99
    t = gate.float().tanh().bfloat16().float()
    step = (mix.float() - h.float()).bfloat16().float()
    want = (h.float() + (t * step).bfloat16().float()).bfloat16()
    assert torch.equal(attn_res(h, committed, query, gate, EPS), want)
    once = (h.float() + gate.float().tanh() * (mix.float() - h.float())).bfloat16()
    assert not torch.equal(want, once), "the test would not see a blend in fp32"


def test_the_residual_goes_on_from_the_mixed_stream():
    """A mistake that costs 0.29 on the logits: the first result is the mixed stream, not h, and the norm is the norm of it."""
    for dtype in (torch.float64, torch.bfloat16):
        h, committed = randn(5, 16, dtype=dtype), randn(3, 5, 16, dtype=dtype, seed=1)
        query, gate, weight = randn(16, dtype=dtype, seed=2), torch.tensor(0.5, dtype=dtype), randn(16, dtype=dtype, seed=3)
        mixed, normed = attn_res_norm(h, committed, query, gate, EPS, True, weight, 1e-5)
        assert torch.equal(mixed, attn_res(h, committed, query, gate, EPS))
        assert torch.equal(normed, rms_norm(mixed, weight, 1e-5))
        assert rel_l2(mixed, h) > 0.05
        ungated, _ = attn_res_norm(h, committed, query, None, EPS, False, weight, 1e-5)
        assert torch.equal(ungated, attn_res(h, committed, query, None, EPS, gated=False))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"committed": torch.ones(2, 3, 8)}, "attn_res: committed: expected [blocks, 4, 8], got (2, 3, 8)"),
        ({"committed": torch.ones(4, 8)}, "attn_res: committed: expected [blocks, 4, 8], got (4, 8)"),
        ({"pseudo_query": torch.ones(1, 8)}, "attn_res: pseudo_query: expected shape (8,), got (1, 8)"),
        ({"gate": None}, "attn_res: gate: expected one number, got None"),
        ({"gate": torch.ones(2)}, "attn_res: gate: expected one number, got (2,)"),
    ],
)
def test_wrong_shapes_are_refused_by_name(change, message):
    call = {"h": torch.ones(4, 8), "committed": torch.ones(2, 4, 8), "pseudo_query": torch.ones(8), "gate": torch.ones(())}
    with pytest.raises(ValueError) as error:
        attn_res(**call | change, eps=EPS)
    assert str(error.value) == message
