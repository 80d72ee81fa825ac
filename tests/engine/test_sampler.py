"""Sampling: the filters against plain formulas, the draw against its distribution, seeds against neighbours."""

import math
import time

import pytest
import torch

from berrylm_ref.engine.params import SamplingParams
from berrylm_ref.engine.request import Request
from berrylm_ref.engine.sampler import Row, choice_seed, sample, token_logprobs, uniform


def row(seed=0, outputs=(), prompt=(), allowed=None, **params):
    return Row(SamplingParams(**params), seed, list(prompt), list(outputs), allowed)


def frequencies(logits, draws=4000, **params):
    rows = [row(seed, **params) for seed in range(draws)]
    tokens = sample(logits.expand(draws, -1), rows)
    return torch.bincount(tokens, minlength=logits.shape[-1]).double() / draws


@pytest.mark.parametrize(
    "params,expected",
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3, 0.01 / 0.3]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"min_p": 0.45}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_k": 3, "top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_draws_follow_the_filtered_distribution(params, expected):
    """4000 draws, 4.5 standard deviations; what a filter removes never comes."""
    got = frequencies(torch.tensor([[0.2, 0.4, 0.1, 0.3]]).log(), **params)[[1, 3, 0, 2]]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert ((got - expected).abs() <= 4.5 * (expected * (1 - expected) / 4000).sqrt()).all(), got


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_zero_and_tiny_temperatures_are_greedy_and_finite(temperature):
    """API-1: a logit of 1e4 over 1e-6 is no number; both mean greedy."""
    logits = torch.tensor([[1e4, -1e4, 9.9e3]])
    assert sample(logits, [row(temperature=temperature)]).tolist() == [0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e6}, {"temperature": 1e-5}, {"top_p": 1e-300}, {"min_p": 1e-300}, {"top_k": 2**63}, {"top_k": 10**30},
        {"repetition_penalty": 1e-6}, {"repetition_penalty": 1e6}, {"seed": -(2**63)}, {"seed": 2**64 - 1},
    ],
)  # fmt: skip
def test_the_most_extreme_values_that_pass_still_draw_a_token(params):
    """API-1: top_p 1e-300 left no candidate, top_k 2**63 fitted no tensor: one such request ended the engine for all."""
    logits = torch.tensor([[1e4, -1e4, 9.9e3, 3.0]])
    for prompt in ([], [0, 1, 2]):
        assert 0 <= sample(logits, [row(prompt=prompt, **params)], known=3).item() < 3


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.5]])
    presence = row(temperature=0, outputs=[0, 0], presence_penalty=1.2)
    frequency = row(temperature=0, outputs=[0, 0], frequency_penalty=0.6)
    repetition = row(temperature=0, prompt=[0], repetition_penalty=3.0)
    assert sample(logits.expand(3, -1), [presence, frequency, repetition]).tolist() == [1, 1, 1]
    negative = row(temperature=0, prompt=[0, 1, 3], repetition_penalty=9.0)  # -1 would win if a negative logit shrank
    assert sample(torch.tensor([[0.1, 0.1, -1.0, -0.5]]), [negative]).tolist() == [0]


def test_ids_that_the_tokenizer_does_not_know_are_never_chosen():
    """CKPT-3: a padded row of the head with the largest logit."""
    logits = torch.tensor([[0.0, 1.0, 50.0]])
    assert sample(logits, [row(temperature=0)], known=2).tolist() == [1]
    assert all(sample(logits, [row(seed)], known=2).item() < 2 for seed in range(50))


def test_allowed_tokens_bound_every_choice():
    allowed = torch.tensor([False, True, True, False])
    logits = torch.tensor([[9.0, 1.0, 2.0, 9.0]])
    assert sample(logits, [row(temperature=0, allowed=allowed)]).tolist() == [2]
    assert logits.tolist() == [[9.0, 1.0, 2.0, 9.0]], "the caller's logits are not changed"


def test_a_draw_depends_on_seed_and_position_alone():
    """ENG-2: with one global generator a seed depends on the traffic beside it."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    rows = [row(seed, outputs=range(seed)) for seed in (3, 7, 9)]
    together = sample(logits, rows).tolist()
    assert together == [sample(logits[i : i + 1], [rows[i]]).item() for i in range(3)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1]).tolist()


def test_choices_of_one_seed_differ_and_repeat():
    seeds = [choice_seed(7, i) for i in range(64)]
    assert seeds[0] == 7 and len(set(seeds)) == 64 and seeds == [choice_seed(7, i) for i in range(64)]


def test_the_hash_is_uniform_over_seeds_and_over_steps():
    """Kolmogorov-Smirnov at 1e-6 on both axes, on the smallest seeds, where a weak hash would show a pattern."""
    n = 20_000
    index = torch.arange(n)
    for u in (uniform(index, torch.zeros_like(index)), uniform(torch.zeros_like(index), index)):
        gap = (u.sort().values - torch.arange(n) / n).abs().max().item()
        assert 0 <= u.min() and u.max() < 1 and gap < math.sqrt(-math.log(5e-7) / (2 * n))


def test_logprobs_are_the_models_own():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    found = token_logprobs(logits, torch.tensor([0]), [2])[0]
    assert found.token == 0 and found.logprob == pytest.approx(math.log(0.25))
    assert found.top == [(1, pytest.approx(math.log(0.75))), (0, pytest.approx(math.log(0.25)))]


@pytest.mark.parametrize(
    "field,value",
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", 1e7), ("temperature", 10**400),
        ("temperature", "1"), ("top_k", -1), ("top_p", 0), ("top_p", 1.01),
        ("min_p", -0.1), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("n", 0),
        ("seed", 1.0), ("logprobs", 21), ("presence_penalty", 2.1), ("frequency_penalty", -3),
        ("repetition_penalty", 0), ("repetition_penalty", 1e-300), ("repetition_penalty", 1e300), ("stop", ""),
        ("stop", ["a", ""]), ("stop", 3), ("stop", ["a"] * 65), ("stop", ["a" * 10**6, ""]),
        ("stop_token_ids", [-1]), ("stop_token_ids", 5), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_refusals_name_field_expected_and_got(field, value):
    """API-1: zero is not "unset", and a wrong value is refused before anything runs."""
    with pytest.raises(ValueError, match=f"SamplingParams: {field}: expected .*, got ") as refusal:
        SamplingParams(**{field: value})
    assert len(str(refusal.value)) < 300, "what came is shown, but a client's megabytes are not sent back"


def test_a_million_stop_ids_hold_nobody_up():
    """They came with every token of every choice: 10 ms each, in the one thread that runs all requests."""
    params = SamplingParams(stop_token_ids=list(range(100, 1_000_100)), max_tokens=None)
    request = Request([1], params, frozenset(), 10_000, 0)
    begin = time.monotonic()
    while not request.finished:
        request.append(len(request.output_ids) % 100 if len(request.output_ids) < 3000 else 1_000_099)
    print(f"{time.monotonic() - begin:.3f} s for {len(request.output_ids)} tokens")
    assert request.finish_reason == "stop" and len(request.output_ids) == 3001 and time.monotonic() - begin < 5
