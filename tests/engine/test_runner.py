"""Static batches against batches packed anew, and steps launched before the last one is read."""

import gc
import random
import sys
import tracemalloc
from dataclasses import replace

import pytest
import torch
from models import VOCAB, arrive, small_llm

from berrylm_ref import SamplingParams
from berrylm_ref.backend import TORCH
from berrylm_ref.cache.batch import Batch, Room, Sequence
from berrylm_ref.cache.pool import Pool, PoolSizes
from berrylm_ref.engine.engine import Readback
from berrylm_ref.engine.runner import UNKNOWN, ladder

TRUNK = [random.Random(4).randrange(VOCAB) for _ in range(220)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def twin():
    return small_llm(sequential=True)


def ids(outs):
    return [o.token_ids for o in outs]


def unforeseen(twin, prompt, count):
    """Parameters with which a token ends the answer to ``prompt`` after exactly ``count`` tokens, and these tokens."""
    for seed in range(100):
        made = ids(twin.generate([prompt], SamplingParams(seed=seed, max_tokens=count, ignore_eos=True)))[0]
        if made[-1] not in made[:-1]:
            return SamplingParams(seed=seed, max_tokens=count + 40, stop_token_ids=[made[-1]]), made
    raise AssertionError("no seed ends on a new token")


def test_the_ladder_ends_with_the_largest_batch():
    assert ladder(1) == [1] and ladder(5) == [1, 2, 4, 5]
    assert ladder(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]


def test_options_that_cannot_be_honoured_are_refused():
    with pytest.raises(ValueError, match="LLM: cuda_graphs: expected backend 'triton' on a CUDA device, got 'torch' on cpu"):
        small_llm(cuda_graphs=True)
    with pytest.raises(ValueError, match="LLM: decode_buckets: expected an integer, 1 or more, got 0"):
        small_llm(decode_buckets=[4, 0])
    with pytest.raises(ValueError, match="LLM: prefill_buckets: expected an integer, 1 or more, got '64'"):
        small_llm(prefill_buckets=["64"])
    for name in ("decode_buckets", "prefill_buckets"):  # a generator would be used up by the check
        for wrong in (64, 0, "64", {64}, (size for size in [64])):
            with pytest.raises(ValueError, match=f"LLM: {name}: expected a list of integers, got "):
                small_llm(**{name: wrong})
    with pytest.raises(ValueError, match=r"LLM: prefill_buckets: expected none with backend 'x', which hands out no boundary"):
        small_llm(prefill_buckets=[64], backend=replace(TORCH, name="x", boundary_states=False))
    with pytest.raises(ValueError, match=r"LLM: prefill_buckets: expected none with kda_intra 'sglang', got \[12000\]"):
        small_llm(prefill_buckets=[12000], kda_intra="sglang")  # 70 tokens would run as 12000 do, in another form


def test_a_room_runs_with_nobody_in_it():
    """So it is captured: one smaller than the grid would keep a state of its padding that isn't there, on a GPU out of bounds."""
    runner = small_llm(prefill_buckets=[97, 1, 64, 63, 64, 5000, 10**6]).engine.runner
    assert runner.prefill_buckets == [64, 97], "nor one that is larger than the memory"
    for static in runner._rooms.values():
        static.numbers.copy_(Batch.pack([], runner.caches, static.room))
        with torch.inference_mode():
            assert runner._prefill_step(static).isfinite().all()


@pytest.mark.parametrize("bucket", [4, 8])
def test_padded_rows_touch_nobody(bucket, twin):
    """CACHE-2: three sequences in a bucket of 4 and of 8, scratch full of NaN: the same tokens, and scratch stays as it was."""
    llm = small_llm(decode_buckets=[bucket], max_running_requests=3)
    caches = llm.engine.cache.pool.caches
    for scratch in (caches.k_pages[:, 0], caches.v_pages[:, 0], caches.conv[:, 0], caches.state[:, 0]):
        scratch.fill_(torch.nan)
    prompts = [TRUNK[:70], TRUNK[30:35], TRUNK[10:99]]
    padded = []
    step = llm.engine.runner._step

    def watched(static):
        logits = step(static)
        padded.append(logits[3:].isfinite().all().item())
        return logits

    llm.engine.runner._step = watched
    assert ids(llm.generate(prompts, GREEDY)) == ids(twin.generate(prompts, GREEDY))
    assert all(padded) and len(padded) == 19, "padded rows are defined"
    assert caches.conv[:, 0].isnan().all() and caches.state[:, 0].isnan().all()


@pytest.mark.parametrize("options", [{}, {"prefix_cache": "off"}, {"prefix_cache": "no_buffer", "page_size": 1}], ids=str)
def test_padded_prompts_touch_nobody(options, twin):
    """CACHE-2: prompts of all lengths in rooms, scratch full of NaN, and their second turns: the tokens of the twin."""
    llm = small_llm(prefill_buckets=[300, 96, 192], max_running_requests=6, overlap=True, **options)
    caches, runner, rooms = llm.engine.cache.pool.caches, llm.engine.runner, []
    for pool in (caches.k_pages, caches.v_pages, caches.conv, caches.state, caches.snapshot_conv, caches.snapshot_state):
        pool[:, 0] = torch.nan
    prefill = runner.prefill
    runner.prefill = lambda tokens, count, packed: rooms.append((tokens, count)) or prefill(tokens, count, packed)
    for lengths in ([70], [64, 5], [1, 2, 3, 4], [65, 30, 20, 9], [128, 64], [63, 64, 65], [190]):
        prompts = [TRUNK[i : i + length] for i, length in enumerate(lengths)]
        outs = llm.generate(prompts, GREEDY)
        assert ids(outs) == ids(twin.generate(prompts, GREEDY)), lengths
        prompts = [prompt + out.token_ids for prompt, out in zip(prompts, outs, strict=True)]
        assert ids(llm.generate(prompts, GREEDY)) == ids(twin.generate(prompts, GREEDY)), f"{lengths}, second turn"
        llm.engine.check()
    assert {tokens for tokens, _ in rooms} == {96, 192, 300} and {count for _, count in rooms} >= {1, 2, 3, 4}


def test_a_room_takes_what_fits_it():
    """Tokens, sequences, pages, kept states; room for a state kept for nobody; nothing that wants more rows or is not known."""
    room = Room(tokens=192, sequences=3, pages=20, boundaries=2)  # 320 tokens of 16 a page
    kept = [(64, 1)]
    fits = [Sequence([1] * 100), Sequence([1] * 92, boundaries=kept)]
    assert room.takes(fits, 16) and room.takes([Sequence([1] * 128)], 16)
    assert not room.takes([Sequence([1] * 129)], 16), "no 64 tokens left"
    assert room.takes([Sequence([1] * 192, boundaries=kept)], 16) and not room.takes([Sequence([1] * 193, boundaries=kept)], 16)
    assert not room.takes([*fits, Sequence([1])], 16) and not room.takes([Sequence([1])] * 3, 16)
    assert room.takes([Sequence([1], 128)], 16) and not room.takes([Sequence([1], 129)], 16)
    assert not room.takes([Sequence([1] * 70, boundaries=kept * 3)], 16)
    assert not room.takes([Sequence([1] * 9, all_logits=True)], 16) and not room.takes([Sequence([UNKNOWN])], 16)


def test_rooms_and_batches_as_they_are_agree():
    """Logits, states kept and what the slots hold, for random batches after random contexts."""
    rng, model = random.Random(5), small_llm().model
    sizes = PoolSizes(64, 16, 4, 8)
    room = Room(tokens=256, sequences=4, pages=40, boundaries=5)
    for _ in range(12):
        first, second, free = [], [], iter(range(1, 65))
        for slot in rng.sample(range(1, 5), rng.randrange(1, 4)):
            context, new = rng.randrange(60), rng.randrange(1, 80)
            pages = [next(free) for _ in range(-(-(context + new) // 16))]
            tokens = [rng.randrange(VOCAB) for _ in range(context + new)]
            boundaries = [(64, slot)] if new >= 64 else []
            if context:
                first.append(Sequence(tokens[:context], 0, pages, slot))
            second.append(Sequence(tokens[context:], context, pages, slot, boundaries=boundaries))
        assert room.takes(second, 16)
        found = []
        for padded in (True, False):
            pool = Pool(model.config, sizes, dtype=torch.float64, device="cpu")
            with torch.no_grad():
                model.run(Batch.build(first, pool.caches))
                packed = Batch.pack(second, pool.caches, room if padded else None)
                batch = Batch.in_room(packed, room, pool.caches) if padded else Batch.unpack(packed, pool.caches)
                logits = model.run(batch)[0][: len(second)]
            parts = (x[:, 1:] for x in vars(pool.caches).values())
            found.append((logits, *parts))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_decodes_run_as_they_do_alone_beside_prompts(twin):
    """A step with both: the decodes in their bucket, the prompt behind them, rows and newest tokens in the order of the parts."""
    llm = small_llm(overlap=True, decode_buckets=[2], max_running_requests=4, prefill_buckets=[128])
    calls, runner = [], llm.engine.runner
    for name in ("decode", "prefill", "extend"):
        inner = getattr(runner, name)
        setattr(runner, name, lambda *a, name=name, inner=inner: calls.append(name) or inner(*a))
    requests = [llm.requests(TRUNK[i : i + n], GREEDY)[0] for i, n in enumerate((70, 33, 90, 150))]
    arrive(llm.engine, requests, steps=3)
    want = twin.generate([r.prompt_ids for r in requests], GREEDY)
    assert [r.output_ids for r in requests] == ids(want)
    assert ("decode", "prefill") in zip(calls, calls[1:], strict=False)
    assert "extend" in calls, "three decodes fit no bucket, and the last prompt no room"


def test_logits_of_decodes_outlive_the_prompts_behind_them(twin):
    """Graphs share their memory: one that runs later may write where the logits of the one before lie."""
    llm = small_llm(decode_buckets=[3], max_running_requests=3, prefill_buckets=[192])
    runner = llm.engine.runner
    prefill, overwritten = runner.prefill, []

    def reuses(*numbers):
        for static in runner._static.values():
            if static.logits is not None:
                static.logits.fill_(-torch.inf)
                overwritten.append(static)
        return prefill(*numbers)

    runner.prefill = reuses
    prompts = [TRUNK[:70], TRUNK[30:60], TRUNK[:100]]
    requests = [llm.requests(prompt, GREEDY)[0] for prompt in prompts]
    arrive(llm.engine, requests, steps=2)
    assert [r.output_ids for r in requests] == ids(twin.generate(prompts, GREEDY)) and len(overwritten) == 2


def test_the_page_table_follows_slots_pages_and_batches(twin):
    """Slots change hands, decodes go on to new pages inside mixed batches, and batches change their bucket."""
    llm = small_llm(prefix_cache="off", page_size=1, decode_buckets=[1, 3], max_running_requests=3, chunked_prefill_size=64)
    lengths = [(20 + 37 * i, replace(GREEDY, max_tokens=60 - 9 * i, logprobs=0)) for i in range(5)]
    requests = [llm.requests(TRUNK[:length], params)[0] for length, params in lengths]
    for now in range(300):
        if now % 17 == 0 and now // 17 < len(requests):
            llm.engine.add(requests[now // 17])
        llm.engine.step()
        llm.engine.check()
    for request in requests:
        (want,) = twin.generate([request.prompt_ids], request.params)
        assert [x.logprob for x in request.logprobs] == pytest.approx([x.logprob for x in want.logprobs], abs=1e-10)


def test_a_page_that_moved_to_the_tree_is_read_there(twin):
    """Two run the last token of one prompt at once; the second's page is the tree's afterwards, its own is someone else's."""
    llm = small_llm(prefix_cache="no_buffer", page_size=1, decode_buckets=[2], max_running_requests=2)
    first = llm.generate([TRUNK[:40]], GREEDY)[0]
    asked = [TRUNK[:40] + first.token_ids] * 2
    params = replace(GREEDY, logprobs=0)
    outs = llm.generate(asked, params)
    assert [o.cached_tokens for o in outs] == [59, 59]
    for out, want in zip(outs, twin.generate(asked, params), strict=True):
        assert [x.logprob for x in out.logprobs] == pytest.approx([x.logprob for x in want.logprobs], abs=1e-10)


def test_attention_takes_the_lengths_that_the_host_has():
    """A read of a length in every layer: the host then waits for each of them."""
    llm = small_llm()
    batch = Batch.build([Sequence(TRUNK[:9], 0, [1], 1), Sequence(TRUNK[:5], 3, [2], 2)], llm.engine.cache.pool.caches)
    assert batch.lengths == (batch.cu_seqlens.tolist(), batch.context_lens.tolist()) == ([0, 9, 14], [0, 3])


def test_a_step_is_launched_before_the_last_one_is_read(monkeypatch):
    order, read = [], Readback.read
    monkeypatch.setattr(Readback, "read", lambda self: order.append("read") or read(self))
    for overlap in (False, True):
        order.clear()
        llm = small_llm(overlap=overlap)
        forward = llm.engine._forward
        llm.engine._forward = lambda parts, forward=forward: order.append("run") or forward(parts)
        llm.generate([TRUNK[:20]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        if overlap:
            assert order == ["run", "run", "read", "run", "read", "run", "read", "read"], "and none too many: the end is foreseen"
        else:
            assert order == ["run", "read"] * 4


@pytest.mark.parametrize("params", [{"presence_penalty": 1.5}, {"logprobs": 2}, {"prompt_logprobs": 0}])
def test_rows_that_need_the_host_are_right_beside_others(params, twin):
    """Penalties count tokens that must be known: such a step is read at once, and the others do not notice."""
    llm = small_llm(overlap=True, max_running_requests=4)
    prompts = [TRUNK[:20], TRUNK[5:60], TRUNK[:33]]
    mixed = [GREEDY, SamplingParams(temperature=1.0, seed=1, max_tokens=9, ignore_eos=True, **params), GREEDY]
    got, want = llm.generate(prompts, mixed), twin.generate(prompts, mixed)
    assert ids(got) == ids(want)
    for a, b in zip(got, want, strict=True):
        for found, right in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
            assert (found is None) == (right is None) and len(found or []) == len(right or [])


def test_a_constraint_sees_every_token_before_the_next_is_drawn(twin):
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    llm, seen = small_llm(overlap=True), []
    request = llm.requests(TRUNK[:20], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0]
    allowed[:7] = True
    request.constraint = lambda output: seen.append(list(output)) or allowed
    llm.run([request])
    assert [len(s) for s in seen] == list(range(6)) and max(request.output_ids) < 7


@pytest.mark.parametrize("cut", [0, 1])
def test_an_unforeseen_end_keeps_the_state_before_it(cut, twin):
    """The last token runs, to 128: the state kept at 64 must not move there, or a turn without the end token finds none."""
    prompt = TRUNK[:60]
    params, made = unforeseen(twin, prompt, 68)
    llm = small_llm(overlap=True)
    (out,) = llm.generate([prompt], params)
    assert out.token_ids == made and out.finish_reason == "stop"
    llm.engine.check()
    asked = (prompt + made)[: 128 - cut] + [5, 6]
    (again,) = llm.generate([asked], GREEDY)
    assert again.cached_tokens == 64
    assert again.token_ids == twin.generate([asked], GREEDY)[0].token_ids


@pytest.mark.parametrize("foreseen", [False, True])
def test_no_buffer_files_the_state_that_the_slot_is_in(foreseen, twin):
    """An end that nobody foresaw has run its last token, one by length has not; either way the state is that of its tokens."""
    params, made = unforeseen(twin, TRUNK[:50], 6)
    if foreseen:
        params = replace(params, max_tokens=len(made), stop_token_ids=())
    llm = small_llm(overlap=True, prefix_cache="no_buffer", page_size=1)
    assert ids(llm.generate([TRUNK[:50]], params)) == [made]
    asked = TRUNK[:50] + made + [1, 2, 3]
    (again,) = llm.generate([asked], GREEDY)
    assert again.cached_tokens == 50 + len(made) - foreseen
    assert again.token_ids == twin.generate([asked], GREEDY)[0].token_ids


@pytest.mark.parametrize("options", [{"decode_buckets": []}, {"overlap": True, "decode_buckets": ladder(64)}], ids=len)
def test_a_thousand_requests_leave_nothing_behind(options):
    """64 at a time, lengths mixed, a tenth cancelled: everything is given back, and memory is flat over the second half."""
    llm = small_llm(dtype="float32", max_running_requests=64, max_total_tokens=64 * 48, snapshot_bytes=2**19, **options)
    engine, rng, running, sent, traced = llm.engine, random.Random(3), [], 0, {}
    tracemalloc.start()
    while sent < 1000 or not engine.idle:
        running = [r for r in running if not r.finished]
        while sent < 1000 and len(running) < 70:
            prompt = TRUNK[: rng.randrange(20)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
            params = SamplingParams(temperature=sent % 2, max_tokens=rng.randrange(1, 9), stop_token_ids=[3, 4])
            running += llm.requests(prompt, params)
            engine.add(running[-1])
            sent += 1
            if sent % 10 == 0:
                engine.cancel(running.pop(rng.randrange(len(running))))
        engine.step()
        mark = sent // 500 * 500
        if mark and mark not in traced:
            engine.check()
            gc.collect()
            tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
            traced[mark] = tracemalloc.get_traced_memory()[0], tensors
    tracemalloc.stop()
    engine.check()
    engine.cache._free(engine.cache.tree.evict_pages(10**6))
    for allocator in (engine.cache.pool.pages, engine.cache.pool.slots, engine.cache.pool.snapshots):
        assert allocator.free_count == allocator.capacity
    print(f"bytes of Python objects, and tensors, after 500 and 1000 requests: {traced}")
    smallest = 500 * sys.getsizeof([])  # an empty list for each request
    assert traced[1000][0] - traced[500][0] < smallest and traced[1000][1] - traced[500][1] < 10
