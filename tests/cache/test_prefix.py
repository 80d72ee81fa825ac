"""What is reused, through the whole engine: how deep a hit is, and that it changes nothing."""

import logging
import random
from dataclasses import replace

import pytest
import torch
from helpers import randomise, tiny_config
from models import VOCAB, checkpoint, small_llm

from berrylm_ref import LLM, BerryLM, SamplingParams
from berrylm_ref.backend import TORCH
from berrylm_ref.cache.batch import Batch, Caches, Sequence
from berrylm_ref.cache.prefix import resolve_strategy

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def prompt(length, seed=0):
    rng = random.Random(seed * 100_003 + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def ask(llm, tokens, max_tokens=3):
    out = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))[0]
    llm.engine.check()
    return out


def test_every_prompt_length_hits_its_last_boundary_the_second_time():
    """Zero hits under 528 tokens in one engine, a hit that shrinks as the prompt grows in another: all lengths 1 .. 300."""
    llm, off = small_llm(max_total_tokens=40_000, snapshot_bytes=2**25), small_llm(prefix_cache="off")
    last = 0
    for length in range(1, 301):
        tokens = prompt(length)
        first, second, plain = ask(llm, tokens), ask(llm, tokens), ask(off, tokens)
        assert first.token_ids == second.token_ids == plain.token_ids
        hit = second.cached_tokens
        assert (length - 1) // 64 * 64 <= hit <= length - 1 and hit >= last, f"{length} tokens: {hit} cached after {last}"
        last = hit


@pytest.mark.parametrize("length,cached,turn", [(6050, 6016, 6080), (8050, 8000, None)])
def test_long_prompts_and_a_second_turn(length, cached, turn):
    """A 6,050-token prompt twice: 6016; with 40 tokens generated and a second turn on top: 6080; 8,050 tokens: 8000."""
    llm = small_llm(dtype="float32", max_total_tokens=24_000)
    tokens = prompt(length)
    first = ask(llm, tokens, max_tokens=40)
    second = ask(llm, tokens, max_tokens=40)
    assert second.cached_tokens == cached and second.token_ids == first.token_ids
    if turn is not None:
        assert ask(llm, tokens + first.token_ids + prompt(30, seed=1)).cached_tokens == turn


@pytest.mark.parametrize("length,made", [(1, 63), (1, 64), (1, 65), (63, 2), (64, 1), (100, 28), (100, 29), (128, 1), (130, 200)])
def test_a_continued_conversation_reuses_the_last_boundary_it_passed(length, made):
    """N prompt and M generated tokens continued: at least floor((N + M - 1) / 64) * 64; the last token never ran."""
    llm = small_llm()
    tokens = prompt(length)
    out = ask(llm, tokens, max_tokens=made)
    turn = tokens + out.token_ids + prompt(5, seed=2)
    again = ask(llm, turn)
    assert again.cached_tokens == (length + made - 1) // 64 * 64
    assert again.token_ids == ask(small_llm(prefix_cache="off"), turn).token_ids


def test_siblings_reuse_up_to_the_deepest_snapshot_and_the_fork_becomes_one():
    """B shares 200 tokens with A, whose only state lies at 256: B finds nothing, but leaves one at 192 for C."""
    llm, trunk = small_llm(), prompt(300)
    ask(llm, trunk)
    hits = [ask(llm, trunk[:200] + prompt(80, seed)).cached_tokens for seed in (1, 2, 3)]
    assert hits == [0, 192, 192]
    assert ask(llm, trunk).cached_tokens == 256, "the split must not cost A its own hit"


def test_no_buffer_reuses_exactly_the_end_of_a_request():
    llm = small_llm(prefix_cache="no_buffer", page_size=1)
    tokens = prompt(70)
    out = ask(llm, tokens, max_tokens=9)
    assert ask(llm, tokens).cached_tokens == 0, "its only state lies past this prompt"
    turn = tokens + out.token_ids + [5]
    again = ask(llm, turn)
    assert again.cached_tokens == 70 + 9 - 1
    assert again.token_ids == ask(small_llm(prefix_cache="off"), turn).token_ids


def test_no_buffer_keeps_the_end_of_a_request_that_made_one_token():
    """Its prompt had been filed already, so that the state at its end looked like nothing new."""
    llm = small_llm(prefix_cache="no_buffer", page_size=1)
    tokens = prompt(70)
    turn = tokens + ask(llm, tokens, max_tokens=1).token_ids + [5]
    again = ask(llm, turn)
    assert again.cached_tokens == 70
    assert again.token_ids == ask(small_llm(prefix_cache="off"), turn).token_ids


def test_a_snapshot_shares_no_memory_with_whoever_made_or_restored_it():
    """PFX-1: decode once updated the stored state in place; the first hit was right and the later ones were not."""
    llm = small_llm()
    prefix = prompt(128)
    ask(llm, prefix + [1])
    caches = llm.engine.cache.pool.caches
    (node,) = [n for n in llm.engine.cache.tree.nodes if n.depth == 128]

    def checksum():
        return caches.snapshot_state[:, node.snapshot].clone(), caches.snapshot_conv[:, node.snapshot].clone()

    before = checksum()
    cold = [ask(small_llm(prefix_cache="off"), prefix + [x], max_tokens=32).token_ids for x in (2, 3)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    both = llm.generate([prefix + [2], prefix + [3]], params)
    assert [o.cached_tokens for o in both] == [128, 128] and [o.token_ids for o in both] == cold
    assert all(torch.equal(a, b) for a, b in zip(before, checksum(), strict=True))
    assert ask(llm, prefix + [2], max_tokens=32).token_ids == cold[0]


def test_cancelling_a_hit_before_its_first_step_leaves_nothing_behind():
    """PFX-3: a matched state copied for a request that is never run was owned by nobody. 100 times, then all slots taken."""
    llm = small_llm(max_running_requests=8)
    tokens = prompt(200)
    ask(llm, tokens)
    engine = llm.engine
    for _ in range(100):
        request = llm.requests(tokens, GREEDY)[0]
        engine.add(request)
        engine.scheduler.schedule()  # admitted, restored, not run
        engine.cancel(request)
        engine.check()
    assert all(n.locks == 0 for n in engine.cache.tree.nodes)
    requests = [llm.requests(prompt(70 + i), GREEDY)[0] for i in range(9)]
    for request in requests:
        engine.add(request)
    engine.scheduler.schedule()
    assert len(engine.scheduler.waiting) == 1, "eight slots run, the ninth waits"
    for running in list(engine.scheduler.running):  # as if the forward had failed: all are put back
        engine.scheduler.release(running)
        engine.scheduler.waiting.appendleft(running.request)
    engine.check()
    while not engine.idle:
        engine.step()
        engine.check()
    assert all(r.finished for r in requests)


def test_a_request_that_must_wait_evicts_nothing():
    """A large request at the head of the queue once emptied the tree, step after step, and was not admitted for it."""
    llm = small_llm(max_total_tokens=640, max_running_requests=4)
    engine, tree = llm.engine, llm.engine.cache.tree
    ask(llm, prompt(200))
    kept = tree.page_count
    running = llm.requests(prompt(300, seed=3), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
    engine.add(running)
    engine.step()
    before = tree.page_count
    assert before >= kept
    engine.add(llm.requests(prompt(400, seed=4), GREEDY)[0])
    for _ in range(5):
        engine.step()
        engine.check()
        assert len(engine.scheduler.waiting) == 1 and tree.page_count == before
    while not engine.idle:
        engine.step()
    engine.check()


def test_padding_rows_never_touch_a_live_slot():
    """CACHE-2: slot 0 and page 0 belong to nobody, full of NaN or not."""
    model = BerryLM.from_pretrained(checkpoint(), dtype="float64")
    results = []
    for poison in (0.0, float("nan")):
        caches = Caches.allocate(model.config, pages=8, page_size=16, slots=2, dtype=torch.float64, device="cpu")
        for pool in (caches.k_pages, caches.v_pages, caches.conv, caches.state):
            pool[:, 0] = poison
        for start in (0, 70):
            part = Sequence(prompt(90)[start : start + 70], start, [1, 2, 3, 4, 5, 6], slot=1)
            with torch.inference_mode():
                logits, _ = model.run(Batch.build([part], caches))
        results.append((logits.clone(), caches.state[:, 1].clone(), caches.conv[:, 1].clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(ValueError, match=r"sequences\[0\].slot: expected 1 .. 2, got 0"):
        Batch.build([Sequence([1], 0, [1], slot=0)], caches)
    with pytest.raises(ValueError, match="expected every sequence in its own slot"):
        Batch.build([Sequence([1], 0, [1], slot=1), Sequence([1], 0, [2], slot=1)], caches)
    with pytest.raises(ValueError, match=r"pages: expected room for 17 tokens, got 1 x 16"):
        Batch.build([Sequence([1] * 17, 0, [1], slot=1)], caches)


def test_bf16_snapshots_are_an_option_and_nearly_exact():
    exact, rounded = small_llm(), small_llm(snapshot_dtype="bfloat16")
    tokens, params = prompt(200), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    for llm in (exact, rounded):
        ask(llm, tokens)
    assert rounded.engine.cache.pool.snapshot_bytes < 0.6 * exact.engine.cache.pool.snapshot_bytes
    a, b = (llm.generate([tokens], params)[0] for llm in (exact, rounded))
    assert a.cached_tokens == b.cached_tokens == 192
    gaps = [abs(x.logprob - y.logprob) for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    assert 0 < max(gaps) < 0.05, "rounded once to 8 bits, then carried"


@pytest.mark.parametrize("declares,page_size,chosen", [(True, 16, "extra_buffer"), (False, 1, "no_buffer"), (False, 16, "off")])
def test_auto_follows_what_the_backend_declares(declares, page_size, chosen, caplog):
    """Never a list of model names: a backend made here gets what it declares, and the log says so."""
    backend = replace(TORCH, name="made-in-a-test", boundary_states=declares, state_grid=64)
    with caplog.at_level(logging.INFO, logger="berrylm_ref"):
        llm = small_llm(backend=backend, page_size=page_size)
    assert llm.engine.cache.strategy == chosen and f"prefix_cache auto: {chosen}" in caplog.text


def test_a_backends_own_grid_is_threaded_through():
    """A backend whose chunks are longer keeps states at its own multiples."""
    llm = small_llm(backend=replace(TORCH, name="grid-128", state_grid=128))
    tokens = prompt(300)
    ask(llm, tokens)
    assert ask(llm, tokens).cached_tokens == 256 and ask(llm, tokens[:250]).cached_tokens == 0
    assert ask(llm, tokens[:250]).cached_tokens == 128


@pytest.mark.parametrize(
    "asked,facts,reason",
    [
        ("extra_buffer", {"boundary_states": False}, "expected a KDA backend with boundary states"),
        ("extra_buffer", {"page_size": 48}, "expected page_size to divide the grid of 64 tokens, got 48"),
        ("no_buffer", {}, "expected page_size 1"),
        ("radix", {}, "expected 'auto' or one of"),
    ],
)
def test_a_strategy_that_cannot_be_honoured_is_refused_with_the_reason(asked, facts, reason):
    with pytest.raises(ValueError, match=reason):
        resolve_strategy(asked, **{"boundary_states": True, "grid": 64, "page_size": 16, **facts})


@pytest.mark.parametrize("name,value", [("page_size", 0), ("max_running_requests", -1), ("max_total_tokens", 1.5)])
def test_sizes_are_checked_by_name(name, value):
    with pytest.raises(ValueError, match=f"LLM: {name}: expected an integer, 1 or more, got"):
        LLM(checkpoint(), **{name: value})


@pytest.mark.parametrize("value", [-1, 1.5, "1", True])
def test_snapshot_bytes_are_checked_and_may_be_zero(value):
    """-1 passed and broke the books of the pool."""
    with pytest.raises(ValueError, match="LLM: snapshot_bytes: expected an integer, 0 or more, got"):
        LLM(checkpoint(), snapshot_bytes=value)
    llm, tokens = small_llm(snapshot_bytes=0), prompt(200)
    assert ask(llm, tokens).token_ids == ask(llm, tokens).token_ids
    assert ask(llm, tokens).cached_tokens == 0


@pytest.mark.parametrize("interval", [1, 3])
def test_models_of_one_kind_of_layer_get_a_cache_too(tmp_path, interval):
    """Without a linear layer a snapshot has no bytes, and their number was a division by zero."""
    config = tiny_config(num_hidden_layers=2, full_attention_interval=interval, attn_res_block_size=1)
    randomise(BerryLM(config), seed=1).save_pretrained(tmp_path)
    llm, tokens = LLM(tmp_path, dtype="float64"), prompt(200)
    first, second = ask(llm, tokens), ask(llm, tokens)
    assert first.token_ids == second.token_ids and second.cached_tokens == 192
