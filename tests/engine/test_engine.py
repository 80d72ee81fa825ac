"""Continuous batching against its twin: each request gets the answer it would get alone."""

import asyncio
import random
import threading
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from models import VOCAB, checkpoint, small_llm

from berrylm_ref import LLM, SamplingParams
from berrylm_ref.engine.background import BackgroundEngine, EngineStopped
from berrylm_ref.engine.llm import end_token_ids
from berrylm_ref.engine.request import ContextLengthError

TRUNK = [random.Random(4).randrange(VOCAB) for _ in range(220)]


@pytest.fixture(scope="module")
def twin():
    return small_llm(sequential=True)


def run(llm, prompts, params):
    outs = llm.generate(prompts, params)
    llm.engine.check()
    assert llm.engine.idle and llm.engine.cache.pool.slots.free_count == llm.engine.cache.pool.slots.capacity
    return outs


jobs = st.lists(
    st.tuples(st.integers(0, 200), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60), st.integers(1, 16)),
    min_size=1,
    max_size=6,
)


PLAIN, OVERLAP = {"decode_buckets": []}, {"overlap": True, "decode_buckets": [2, 8]}
MODES = pytest.mark.parametrize("mode", [PLAIN, OVERLAP], ids=["plain", "overlap"])


@settings(max_examples=40)
@given(
    jobs=jobs, pages=st.integers(18, 40), budget=st.sampled_from([64, 130, 2048]), running=st.integers(1, 4),
    mode=st.sampled_from([PLAIN, OVERLAP]),
)  # fmt: skip
def test_random_batches_equal_the_sequential_twin(jobs, pages, budget, running, mode, twin):
    """Random lengths, shared prefixes, pools small enough to retract; greedy and sampled, fp64."""
    llm = small_llm(max_total_tokens=pages * 16, chunked_prefill_size=budget, max_running_requests=running, **mode)
    prompts = [TRUNK[:shared] + tail for shared, tail, _ in jobs]
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=count, ignore_eos=True) for i, (_, _, count) in enumerate(jobs)
    ]
    got, want = run(llm, prompts, params), twin.generate(prompts, params)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]


@st.composite
def traffic(draw):
    """Requests with a step of arrival, and for some a step at which they are cancelled."""
    made = draw(st.lists(st.tuples(st.integers(0, 30), jobs.map(lambda j: j[0]), st.integers(0, 120)), min_size=2, max_size=8))
    return [(arrival, job, arrival + life if life < 25 else None) for arrival, job, life in made]


@settings(max_examples=40)
@given(
    traffic=traffic(), pages=st.integers(18, 40), budget=st.sampled_from([64, 130]), running=st.integers(1, 4),
    mode=st.sampled_from([PLAIN, OVERLAP]), cache=st.sampled_from([("extra_buffer", 16), ("no_buffer", 1), ("off", 16)]),
)  # fmt: skip
def test_arrivals_and_cancellations_leave_the_others_their_answers(traffic, pages, budget, running, mode, cache, twin):
    """Who is not cancelled gets the twin's greedy ids, with ends that nobody foresees; conservation after every step."""
    strategy, size = cache
    llm = small_llm(
        max_total_tokens=pages * 16, chunked_prefill_size=budget, max_running_requests=running, prefix_cache=strategy,
        page_size=size, **mode,
    )  # fmt: skip
    engine, requests = llm.engine, []
    for i, (_, (shared, tail, count), _) in enumerate(traffic):
        params = SamplingParams(temperature=0, max_tokens=count, stop_token_ids=[11, 22, 33, 44, 55, 66, 77] if i % 2 else [])
        requests.append(llm.requests(TRUNK[:shared] + tail, params)[0])
    for now in range(2000):
        for (arrival, _, cancelled), request in zip(traffic, requests, strict=True):
            if arrival == now:
                engine.add(request)
            if cancelled == now:
                engine.cancel(request)
        engine.step()
        engine.check()
        if now > 60 and engine.idle:
            break
    assert engine.idle and engine.cache.pool.slots.free_count == running
    for (_, _, cancelled), request in zip(traffic, requests, strict=True):
        if cancelled is None or request.finished:
            assert request.output_ids == twin.generate([request.prompt_ids], request.params)[0].token_ids
    engine.cache._free(engine.cache.tree.evict_pages(10**6))
    for allocator in (engine.cache.pool.pages, engine.cache.pool.snapshots):
        assert allocator.free_count == allocator.capacity


@MODES
def test_fp32_on_fixed_seeds_equals_the_twin(mode):
    rng = random.Random(5)
    prompts = [TRUNK[: rng.randrange(200)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))] for _ in range(8)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=12, ignore_eos=True) for i in range(8)]
    llm = small_llm(dtype="float32", max_total_tokens=1024, max_running_requests=5, **mode)
    want = small_llm(dtype="float32", sequential=True).generate(prompts, params)
    assert [o.token_ids for o in run(llm, prompts, params)] == [o.token_ids for o in want]


@MODES
def test_a_preempted_request_starts_over_with_the_same_answer(mode, twin):
    """CACHE-3: room for one and a half; two 200-token prompts, 100 new tokens; the state must not survive the retraction."""
    llm = small_llm(max_total_tokens=464, prefix_cache="off", max_running_requests=2, **mode)
    prompts = [TRUNK[:200], TRUNK[20:220]]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    got, want = run(llm, prompts, params), twin.generate(prompts, params)
    assert llm.engine.scheduler.retractions > 0
    for a, b in zip(got, want, strict=True):
        assert a.token_ids == b.token_ids and len(a.token_ids) == len(a.logprobs) == 100
        assert len(a.prompt_logprobs) == 200, "scored once, not once a try"
        for x, y in zip(a.prompt_logprobs[1:] + a.logprobs, b.prompt_logprobs[1:] + b.logprobs, strict=True):
            assert x.token == y.token and abs(x.logprob - y.logprob) < 1e-9


@MODES
def test_seeds_give_the_same_sample_alone_in_a_batch_after_a_retraction_and_on_a_hit(mode, twin):
    """ENG-2: the same on each run and under load; choices differ; usage and reasons are each choice's own."""
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=16, ignore_eos=True)
    want = [o.token_ids for o in twin.generate([TRUNK[:100]], params)]
    assert len({tuple(t) for t in want}) > 1
    llm = small_llm(max_total_tokens=800, max_running_requests=4, **mode)
    noise = [SamplingParams(temperature=1.0, max_tokens=30)] * 3
    for _ in range(2):
        outs = run(llm, [TRUNK[50:150], TRUNK[:100], TRUNK[:64] + [3]], [noise[0], params, noise[1]])
        assert [o.token_ids for o in outs[1:4]] == want and [o.index for o in outs[1:4]] == [0, 1, 2]
    assert outs[1].cached_tokens == 64
    tight = small_llm(max_total_tokens=208, max_running_requests=4, **mode)
    outs = run(tight, [TRUNK[50:150], TRUNK[:100]], [SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True), params])
    assert tight.engine.scheduler.retractions and [o.token_ids for o in outs[1:]] == want


@MODES
def test_one_choice_may_end_early(mode, twin):
    """ENG-2: when the first choice ends, the others go on."""
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=16, ignore_eos=True)
    first = twin.generate([TRUNK[:100]], params)
    stop = first[1].token_ids[2]
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=16, stop_token_ids=[stop])
    for llm in (twin, small_llm(**mode)):
        outs = llm.generate([TRUNK[:100]], params)
        assert outs[1].finish_reason == "stop" and outs[1].token_ids == first[1].token_ids[:3]
        assert any(o.finish_reason == "length" and len(o.token_ids) == 16 for o in outs)


@MODES
def test_cancelling_at_any_moment_frees_everything(mode):
    """ENG-1: generation ran on to the token limit for a client that was gone."""
    llm = small_llm(max_running_requests=4, chunked_prefill_size=64, **mode)
    engine = llm.engine
    for steps in range(6):
        requests = [llm.requests(TRUNK[i : i + 150], SamplingParams(max_tokens=3000))[0] for i in range(5)]
        for request in requests:
            engine.add(request)
        for _ in range(steps):
            engine.step()
        for request in requests:
            engine.cancel(request)
            engine.cancel(request)  # twice is harmless
            engine.check()
        assert engine.idle and engine.cache.pool.slots.free_count == 4
    assert len(run(llm, [TRUNK[:10]], SamplingParams(max_tokens=2))[0].token_ids) == 2


def test_a_closed_stream_cancels_its_request():
    llm = small_llm()
    stream = llm.stream(llm.requests(TRUNK[:70], SamplingParams(max_tokens=100, ignore_eos=True))[0])
    next(stream)
    stream.close()
    assert llm.engine.idle
    llm.engine.check()


@pytest.mark.parametrize("strategy,page_size", [("extra_buffer", 16), ("no_buffer", 1), ("off", 16)])
@pytest.mark.parametrize("broken", [1, 2, 3, 9])
@MODES
def test_a_forward_that_broke_off_leaves_no_trace(strategy, page_size, broken, mode, twin):
    """An interrupt after the layers had written: the next step took the token a second time from a state that had it already,
    and a snapshot nobody had filled was filed."""
    llm = small_llm(prefix_cache=strategy, page_size=page_size, chunked_prefill_size=128, **mode)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    prompts, real, calls = [TRUNK[:200], TRUNK[:70]], llm.model.run, []

    def run_and_break(batch, **options):
        calls.append(batch)
        out = real(batch, **options)
        if len(calls) == broken:
            raise KeyboardInterrupt
        return out

    llm.model.run = run_and_break
    kept, gone = (llm.requests(p, params)[0] for p in prompts)
    llm.engine.add(kept)
    with pytest.raises(KeyboardInterrupt):
        for _ in llm.stream(gone):
            llm.engine.check()
        while not kept.finished:
            llm.engine.step()
    llm.engine.check()
    while not kept.finished:
        llm.engine.step()
    for prompt in (*prompts, *prompts):  # what was filed is right
        (again,), (want,) = run(llm, [prompt], params), twin.generate([prompt], params)
        assert again.token_ids == want.token_ids
    assert kept.output_ids == twin.generate([prompts[0]], params)[0].token_ids
    assert len(kept.logprobs) == 12 and len(kept.prompt_logprobs) == 200


def test_streams_side_by_side_lose_no_text():
    """One stream's step made text for the other as well, and threw it away."""
    llm = small_llm(with_tokenizer=True)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    a, b, c = (llm.requests(p, params)[0] for p in ("one", "two", "three"))
    first, second = llm.stream(a), llm.stream(b)
    got = [next(first), next(second)]
    llm.generate("four", params)
    llm.engine.add(c)
    for _ in range(40):
        got = [got[0] + next(first, ""), got[1] + next(second, "")]
    assert got == [a.text, b.text] == [small_llm(with_tokenizer=True).generate(p, params)[0].text for p in ("one", "two")]


def test_one_request_twice_is_refused():
    """Both took its tokens as their own and ran out of their pages."""
    llm = small_llm()
    request = llm.requests(TRUNK[:70], SamplingParams(max_tokens=30, ignore_eos=True))[0]
    stream = llm.stream(request)
    next(stream)
    with pytest.raises(ValueError, match="expected one that does not run yet"):
        next(llm.stream(request))
    assert len(list(stream)) == 29
    again = llm.requests([1, 2], SamplingParams(max_tokens=2))[0]
    with pytest.raises(ValueError, match="expected one that does not run yet"):
        llm.run([again, again])
    assert llm.engine.idle
    llm.engine.check()


@pytest.mark.parametrize("declared", ["true", '"5"', "[1, null]", "[true]", "{}"])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path, declared):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {declared}}}')
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id: expected a token id or a list of them, got"):
        end_token_ids(tmp_path, ())


def test_a_stream_whose_request_was_cancelled_elsewhere_ends():
    """It stepped an idle engine for ever."""
    llm = small_llm()
    request = llm.requests(TRUNK[:70], SamplingParams(max_tokens=100, ignore_eos=True))[0]
    stream = llm.stream(request)
    next(stream)
    llm.engine.cancel(request)
    assert list(stream) == [] and llm.engine.idle


def test_threads_may_generate_at_the_same_time(twin):
    """Two steps at once ran sequences in pages that they did not have."""
    llm, params = small_llm(), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    got = {}

    def ask(i):
        got[i] = llm.generate([TRUNK[i : i + 70], TRUNK[:100]], params)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    for i in range(4):
        want = twin.generate([TRUNK[i : i + 70], TRUNK[:100]], params)
        assert [o.token_ids for o in got[i]] == [o.token_ids for o in want]
    llm.engine.check()


@pytest.mark.parametrize("n", [1, 3])
def test_a_reader_slower_than_the_engine_gets_every_piece(n):
    """ENG-2: with the request itself as the word for "finished", a slow reader's stream ended at the first piece it read."""
    llm = small_llm(with_tokenizer=True)
    requests = llm.requests("hello", SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, n=n))

    async def read():
        background, events = BackgroundEngine(llm.engine), []
        async for came in background.stream(requests):
            events += came
            while not all(r.finished for r in requests):
                time.sleep(0.01)  # the event loop is busy until the engine is done
        background.stop()
        return events

    events = asyncio.run(read())
    for request in requests:
        mine = [e for e in events if e.request is request]
        assert "".join(e.text for e in mine) == request.text and [e.made for e in mine] == list(range(1, 21))
        assert [e.finish_reason for e in mine] == [None] * 19 + ["length"]


def test_an_event_loop_is_woken_once_a_step_for_all_of_its_streams():
    """A wake-up a token is a system call a token, made by the thread that the device waits for."""
    llm, params = small_llm(), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    step, steps, wakes = llm.engine.step, [], []
    llm.engine.step = lambda: steps.append(1) or step()

    async def read(background, first):
        return [e.made for events in [x async for x in background.stream(llm.requests([first, 2], params))] for e in events]

    async def all_of_them():
        loop, background = asyncio.get_running_loop(), BackgroundEngine(llm.engine)
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: wakes.append(1) or wake(*args)
        try:
            return await asyncio.gather(*(read(background, i) for i in range(4)))
        finally:
            background.stop()

    assert asyncio.run(all_of_them()) == [list(range(1, 31))] * 4
    assert 30 <= len(wakes) <= len(steps) < 60, (len(wakes), len(steps))


def test_what_takes_too_long_ends_though_its_reader_is_behind():
    """ENG-1: the time limit lay behind all the text that a slow client had not read, and the request ran to its natural end."""
    llm = small_llm()
    (request,) = requests = llm.requests([1, 2], SamplingParams(max_tokens=3000, ignore_eos=True))

    async def read():
        background = BackgroundEngine(llm.engine)
        try:
            batches = background.stream(requests, 0.3)
            await anext(batches)
            await asyncio.sleep(0.8)  # as a client that takes nothing
            made, idle = len(request.output_ids), llm.engine.idle
            with pytest.raises(TimeoutError, match="longer than 0.3 seconds"):
                while True:
                    await anext(batches)
            return made, idle
        finally:
            background.stop()

    made, idle = asyncio.run(read())
    assert idle, f"{made} tokens, and it runs on"
    assert 1 < made == len(request.output_ids) < 3000


def test_a_reader_whose_event_loop_is_gone_does_not_end_the_engine():
    """Its text arrived at a closed loop, and that ended the engine for everyone else."""
    llm = small_llm()
    stepping, go, step = threading.Event(), threading.Event(), llm.engine.step
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)

    def slow_step():
        stepping.set()
        go.wait(10)
        return step()

    llm.engine.step = slow_step

    async def leave():
        background = BackgroundEngine(llm.engine)
        reader = asyncio.create_task(anext(background.stream(llm.requests([1, 2], params))))
        await asyncio.to_thread(stepping.wait, 10)
        reader.cancel()
        return background

    async def read(background):
        return [event async for events in background.stream(llm.requests([3, 4], params)) for event in events]

    background = asyncio.run(leave())
    go.set()
    assert len(asyncio.run(asyncio.wait_for(read(background), 20))) == 50
    background.stop()
    assert llm.engine.idle


def test_a_request_sent_while_the_engine_breaks_is_told():
    """PFX-3: it waited in the queue of an engine that had ended, for ever."""
    llm = small_llm()
    stepping, go = threading.Event(), threading.Event()

    def step():
        stepping.set()
        go.wait(10)
        raise RuntimeError("broken")

    llm.engine.step = step

    async def one(background):
        with pytest.raises(EngineStopped):
            async for _ in background.stream(llm.requests([1, 2], SamplingParams(max_tokens=2))):
                pass

    async def both():
        background = BackgroundEngine(llm.engine)
        first = asyncio.create_task(one(background))
        await asyncio.to_thread(stepping.wait, 10)
        late = asyncio.create_task(one(background))
        await asyncio.sleep(0.1)
        go.set()
        await asyncio.wait_for(asyncio.gather(first, late), 10)

    asyncio.run(both())


def test_nobody_starves_behind_small_requests():
    """A long prompt keeps its turn while short ones keep coming: first come, first served."""
    llm = small_llm(max_total_tokens=320, max_running_requests=4, chunked_prefill_size=64)
    engine = llm.engine
    long = llm.requests(TRUNK, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for i in range(3):
        engine.add(llm.requests(TRUNK[i : i + 40], short)[0])
    engine.add(long)
    for i in range(200):
        engine.add(llm.requests([i % VOCAB, 1, 2], short)[0])
        engine.step()
        if long.finished:
            break
    assert long.finished and i < 120


@pytest.mark.parametrize("length", [3, 150])
def test_a_long_answer_does_not_keep_others_out_of_the_smallest_budget(length):
    """Its decode took one of the 64 tokens, a chunk of the grid no longer fitted: everyone else waited for its end."""
    llm = small_llm(max_running_requests=4, chunked_prefill_size=64)
    long = llm.requests([1, 2], SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True))[0]
    short = llm.requests(TRUNK[:length], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0]
    llm.engine.add(long)
    llm.engine.step()
    llm.engine.add(short)
    for _ in range(10):
        llm.engine.step()
    assert short.finished and len(long.output_ids) == 11


def test_what_can_never_fit_is_refused_at_once_with_the_numbers():
    llm = small_llm(max_total_tokens=64)
    with pytest.raises(ValueError, match=r"fit the 64 tokens of KV memory, got 60 \+ 5 = 65"):
        llm.generate([[1, 2], TRUNK[:60]], SamplingParams(max_tokens=5))
    assert llm.engine.idle, "nothing of the call was queued"


@pytest.mark.parametrize("seed", [-1, True, 1.5, "3"])
def test_a_seed_of_random_weights_is_a_number(seed):
    with pytest.raises(ValueError, match=f"LLM: random_weights: expected an integer, 0 or more, got {seed!r}"):
        LLM(checkpoint(), random_weights=seed)


def test_a_model_in_memory_is_not_drawn_anew(twin):
    """It was not, and nobody was told: the seed was dropped."""
    with pytest.raises(ValueError, match="LLM.from_model: model, options: .*got random_weights, which the model has settled"):
        LLM.from_model(twin.model, random_weights=3)


def test_the_end_of_the_context():
    """API-1: context - 1 tokens yield one token and "length"; context and more are refused."""
    llm = small_llm(dtype="float32", max_total_tokens=20_000)
    context = llm.config.max_position_embeddings
    out = llm.generate([[1] * (context - 1)], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0]
    assert len(out.token_ids) == 1 and out.finish_reason == "length"
    for length in (context, context + 1):
        with pytest.raises(ContextLengthError, match=f"expected at most {context - 1} tokens"):
            llm.generate([[1] * length])


def test_end_tokens_are_the_union_of_both_files(tmp_path, twin):
    """CKPT-3: one file's end token once replaced the other's."""
    import json
    import shutil

    folder = shutil.copytree(checkpoint(), tmp_path / "model")
    made = twin.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].token_ids
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [made[4]]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": made[2]}))
    llm = LLM(folder, dtype="float64")
    assert llm.end_ids == {made[2], made[4]}
    out = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=6))[0]
    assert out.finish_reason == "stop" and out.token_ids == made[: made.index(made[2]) + 1]
    assert len(llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].token_ids) == 6


def test_text_in_text_out_and_stop_strings_over_token_boundaries():
    """API-4, one byte a token: the stop spans tokens and is cut from the text."""
    llm = small_llm(with_tokenizer=True)
    whole = llm.generate("hello", SamplingParams(temperature=1.0, seed=3, max_tokens=40))[0]
    assert max(whole.token_ids) < llm.tokenizer.size and whole.text == llm.tokenizer.decode(whole.token_ids)
    stop = whole.text[10:13]
    out = llm.generate("hello", SamplingParams(temperature=1.0, seed=3, max_tokens=40, stop=stop))[0]
    assert out.finish_reason == "stop" and out.text == whole.text[: whole.text.index(stop)]
    pieces = list(llm.stream(llm.requests("hello", SamplingParams(temperature=1.0, seed=3, max_tokens=40))[0]))
    assert "".join(pieces) == whole.text and len(pieces) == 40


@pytest.mark.parametrize(
    "prompts,message",
    [
        ([[]], "expected at least one token in each prompt"),
        ([[97]], r"expected token ids in 0 .. 96, got 97"),
        ([[True]], "got True"),
        (["text"], "the model folder has no tokenizer.json, got text"),
        ([5], "expected text or a list of token ids, got int"),
        (["a\ud800"], "the model folder has no tokenizer.json, got text"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(prompts, message):
    llm = small_llm()
    with pytest.raises(ValueError, match=f"generate: prompts: .*{message}"):
        llm.generate([[1, 2], *prompts])
    with pytest.raises(ValueError, match="prompts: expected Unicode text"):
        small_llm(with_tokenizer=True).generate("a\ud800")
    for wrong in (None, 5):
        with pytest.raises(ValueError, match="prompts: expected a list of texts or"):
            llm.generate(wrong)
    for wrong in ({"temperature": 0}, [{"temperature": 0}]):
        with pytest.raises(ValueError, match="params: expected SamplingParams, got {"):
            llm.generate([[1]], wrong)
    with pytest.raises(ValueError, match="stop: expected only with a tokenizer"):
        llm.generate([[1]], SamplingParams(stop="x"))
    assert llm.engine.idle
