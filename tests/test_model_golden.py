"""The whole model against the tensors that the official code computed.

The noise of fp32 is not guessed: each folder's meta.json says how far the official fp32 model is from itself in fp64. Three
times that, and never more than 1e-5, is a match; a real mistake is 1e-2 or more, a wrong eps 4e-5.
"""

import json
from dataclasses import replace

import pytest
import torch
from helpers import assert_close, rel_l2
from plain_model import plain_model
from safetensors.torch import load_file

from berrylm_ref import BerryLM
from berrylm_ref import model as model_file
from berrylm_ref.cache.batch import Batch, Caches, Sequence
from berrylm_ref.ops import kda

FOLDERS = ["hf-odd", "hf-odd/sharded", "hf-tiny-default"]
PREFILL, STEPS = 100, 20


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request, golden):
    return golden / request.param


@pytest.fixture(scope="module")
def recorded(folder):
    """The tensors that belong to a checkpoint folder: in it, or in the folder above for another way of storing it."""
    place = folder if (folder / "golden.safetensors").is_file() else folder.parent
    meta = json.loads((place / "meta.json").read_text())["measured"]
    return {**load_file(place / "golden.safetensors"), "meta": meta}


@pytest.fixture(scope="module")
def model(folder):
    return BerryLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def budget(recorded):
    return min(3 * recorded["meta"]["fp32_vs_full_float64_rel_l2"], 1e-5)


@pytest.fixture(scope="module")
def full(model, recorded):
    with torch.no_grad():
        return model(recorded["input_ids"], return_hidden_states=True)


def test_every_recorded_configuration_is_here(golden):
    """A folder added to golden/ must be added to the list above."""
    found = {str(path.parent.relative_to(golden)) for path in golden.rglob("config.json")}
    assert found == set(FOLDERS)


def test_logits(full, recorded, budget):
    assert full.logits.dtype == torch.float32
    assert_close("logits", full.logits, recorded["logits"], budget)
    worst = (full.logits - recorded["logits"]).abs().max().item()
    print(f"max abs {worst:.2e}")
    assert worst <= 1e-4


def test_the_stream_that_each_layer_returns(full, model, recorded, budget):
    """Before the next layer's mix and before the final norm; the first wrong layer is the one to look at."""
    assert len(full.hidden_states) == model.config.num_hidden_layers
    for i, h in enumerate(full.hidden_states):
        assert h.shape == (*recorded["input_ids"].shape, model.config.hidden_size)
        assert_close(f"layer {i}", h[0], recorded[f"hidden_states.{i}"], budget)


@torch.no_grad()
def prefilled(model, ids):
    """Caches after the first 100 tokens of both sequences, and each one's pages: not in order, not from the first page."""
    caches = Caches.allocate(model.config, pages=40, page_size=16, slots=5, dtype=model.dtype, device="cpu")
    pages, slots = [list(range(40, 30, -1)), list(range(3, 23, 2))], [4, 2]
    rows = [Sequence(ids[b][:PREFILL], 0, pages[b], slots[b], all_logits=True) for b in (0, 1)]
    logits, _ = model.run(Batch.build(rows, caches))
    return caches, pages, slots, logits.view(2, PREFILL, -1)


def test_memory_after_a_prefill(model, recorded, budget):
    """Conv windows hold raw projections, oldest first, W - 1 of them; states are [HV, K, V]."""
    caches, _, slots, logits = prefilled(model, recorded["input_ids"].tolist())
    assert_close("prefill logits", logits, recorded["logits"][:, :PREFILL], budget)
    for n, layer in enumerate(model.config.linear_layers):
        window, state = recorded[f"prefill_conv_state.{layer}"][:, 1:], recorded[f"prefill_recurrent_state.{layer}"]
        assert_close(f"window of layer {layer}", caches.conv[n, slots[0]], window, budget)
        assert_close(f"state of layer {layer}", caches.state[n, slots[0]], state, budget)


@torch.no_grad()
def test_cached_decode(model, recorded, budget):
    """CACHE-1, CACHE-2: 100 tokens at once, then 20 one by one: the same numbers as one pass, and as the official ones."""
    ids = recorded["input_ids"].tolist()
    caches, pages, slots, _ = prefilled(model, ids)
    rows = []
    for p in range(PREFILL, PREFILL + STEPS):
        batch = Batch.build([Sequence(ids[b][p : p + 1], p, pages[b], slots[b]) for b in (0, 1)], caches)
        assert batch.decode_only
        rows.append(model.run(batch)[0])
    floor = min(3 * recorded["meta"]["fp32_decode_vs_full_rel_l2"], 1e-5)
    assert_close("decode", torch.stack(rows, 1), recorded["decode_logits"], floor)
    assert_close("decode against full", torch.stack(rows, 1), recorded["logits"][:, PREFILL : PREFILL + STEPS], floor)


@torch.no_grad()
def test_greedy_tokens_are_identical(model, recorded):
    """24 tokens from a cached loop and from full recomputation: the top-two gaps are a thousand times the noise."""
    prompt, expected = recorded["greedy_prompt_ids"], recorded["greedy_ids"][0].tolist()
    assert len(expected) == 24
    ids = prompt
    for _ in range(24):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    assert ids[0, prompt.shape[1] :].tolist() == expected
    caches = Caches.allocate(model.config, pages=5, page_size=16, slots=1, dtype=model.dtype, device="cpu")
    new, context, out = prompt[0].tolist(), 0, []
    while len(out) < 24:
        logits, _ = model.run(Batch.build([Sequence(new, context, [5, 1, 4, 2, 3], 1)], caches))
        context += len(new)
        new = [logits[0].argmax().item()]
        out += new
    assert out == expected


@torch.no_grad()
def test_bf16_is_no_further_off_than_the_official_bf16(folder, recorded):
    """bf16 says little (3 % of the expert choices differ), but it must not be worse than the official code's."""
    logits = BerryLM.from_pretrained(folder, dtype=torch.bfloat16)(recorded["input_ids"])
    assert logits.dtype == torch.bfloat16
    assert_close("bf16", logits, recorded["logits"], 1.2 * rel_l2(recorded["logits_bf16"], recorded["logits"]))


@torch.no_grad()
def test_fp64_is_between_the_official_fp32_and_the_truth(folder, full, recorded, budget):
    """The fp64 model, the loop's or the chunks': the official fp32 and ours are both within the recorded noise of it."""
    model = BerryLM.from_pretrained(folder, dtype="float64")
    exact = model(recorded["input_ids"])
    assert exact.dtype == torch.float64
    assert_close("official fp32", recorded["logits"], exact, budget)
    assert_close("our fp32", full.logits, exact, budget)
    model.set_kda_intra("difference")
    assert_close("difference form", model(recorded["input_ids"]), exact, 1e-12)


@torch.no_grad()
def test_the_plain_model_is_the_official_one(model, recorded, budget):
    """The second implementation, which the other model tests compare every switch with, reproduces the recorded tensors."""
    ids = recorded["input_ids"][0, :70].tolist()
    logits, streams = plain_model(model.config, model.state_dict(), ids)
    assert_close("logits", logits, recorded["logits"][0, :70], budget)
    for i, x in enumerate(streams):
        assert_close(f"layer {i}", x, recorded[f"hidden_states.{i}"][:70], budget)


@torch.no_grad()
@pytest.mark.parametrize("change", ["eps", "positions", "head order"])
def test_these_bounds_see_real_mistakes(folder, model, recorded, budget, change, monkeypatch):
    """The smallest known mistakes that a wider bound would let through, planted one at a time."""
    ids = recorded["input_ids"]
    if change == "eps":
        eps = 1e-5 if model.config.rms_norm_eps == 1e-6 else 1e-6
        wrong = BerryLM.from_pretrained(folder)
        for part in (wrong, *wrong.model.layers):  # the norms of the stream only: in those of the heads it shows at once
            part.config = replace(model.config, rms_norm_eps=eps)
        logits = wrong(ids)
    elif change == "positions":
        right = model_file.rope_angles
        monkeypatch.setattr(model_file, "rope_angles", lambda p, *a: right(torch.where(p > 75, p - 1, p), *a))
        logits = model(ids)
    else:
        prepare = kda.prepare_kda

        def tiled(op, q, k, v, *args, **options):
            ratio = v.shape[2] // q.shape[2]
            return prepare(op, q.repeat(1, 1, ratio, 1), k.repeat(1, 1, ratio, 1), v, *args, **options)

        monkeypatch.setattr(kda, "prepare_kda", tiled)
        logits = model(ids)
    error = rel_l2(logits, recorded["logits"])
    print(f"{change}: rel-L2 {error:.1e}, {error / budget:.0f} times the budget")
    assert error > 5 * budget
