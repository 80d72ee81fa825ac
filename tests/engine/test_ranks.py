"""Two gloo processes answer as one does; and when one of them dies, everything ends, and says which."""

import gc
import json
import os
import random
import signal
import subprocess
import threading
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
import torch.distributed as dist
from helpers import assert_close, randomise, tiny_config
from models import byte_tokenizer
from two_ranks import SECONDS, children, ended, opened, outcome, recorded, serving, started, wait_for

from berrylm_ref import LLM, BerryLM, BerryLMConfig, SamplingParams
from berrylm_ref.backend import TORCH
from berrylm_ref.engine.memory import kv_token_bytes, plan_sizes, state_bytes
from berrylm_ref.engine.mirror import PACKET, Line
from berrylm_ref.engine.ranks import RankDied, keep_objects


@cache
def folder(kv_heads=2, **overrides):
    """A model of two layers, one of each kind, that two ranks can share."""
    path = Path(mkdtemp(prefix="berrylm-test-"))
    fields = {"num_hidden_layers": 2, "vocab_size": 300, "attn_res_block_size": 1, "max_position_embeddings": 16384}
    config = tiny_config(**fields, num_key_value_heads=kv_heads, **overrides)
    randomise(BerryLM(config), seed=11).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_logits_ids_and_cached_tokens_are_those_of_one_process(kv_heads):
    """Prefill, decode, a prompt sent twice, and a second turn; one KV head is held by both ranks."""
    first = [(7 * i + 3) % 290 for i in range(200)]
    greedy = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    with opened(folder(kv_heads)) as alone, opened(folder(kv_heads), tp=2) as two:
        answers = []
        for llm in (alone, two):
            logits = recorded(llm)
            turn = llm.generate([first], greedy)[0]
            again = llm.generate([first], greedy)[0]
            more = llm.generate([first + turn.token_ids + [5, 6, 7]], greedy)[0]
            answers.append(([turn, again, more], logits))
            llm.engine.check()
        (here, expected), (there, found) = answers
        assert [a.token_ids for a in there] == [a.token_ids for a in here]
        assert [a.cached_tokens for a in there] == [a.cached_tokens for a in here] == [0, 192, 256]
        assert len(found) == len(expected) == 3 * 70
        for name, of in (("prefill", [0]), ("decode", range(1, 70)), ("cached", [70]), ("second turn", [140])):
            worst = max(of, key=lambda i: (found[i] - expected[i]).abs().max())
            assert_close(f"{name}, {kv_heads} KV heads", found[worst], expected[worst], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_a_crowd_with_little_memory_gets_the_same_answers(overlap):
    """Chunks, evictions, retractions, cancellations, and a message longer than a packet. fp64: no near-ties in the router."""
    rng = random.Random(5)
    stem = [rng.randrange(290) for _ in range(1100)]
    prompts = [stem[: rng.randrange(1, 400)] + [rng.randrange(290) for _ in range(5)] for _ in range(10)] + [stem]
    params = [SamplingParams(temperature=0, max_tokens=rng.randrange(1, 90), ignore_eos=True) for _ in prompts]
    options = {"dtype": "float64", "max_total_tokens": 1408, "chunked_prefill_size": 256, "max_running_requests": 6}
    options |= {"overlap": overlap, "prefill_buckets": [200] if overlap else []}
    with opened(folder(), **options) as alone, opened(folder(), **options, tp=2) as two:
        for llm in (alone, two):
            llm.engine.add(gone := llm.requests(stem[:300], SamplingParams(max_tokens=50))[0])
            for _ in range(4):
                llm.engine.step()
            llm.engine.cancel(gone)
        for _ in range(2):
            here, there = alone.generate(prompts, params), two.generate(prompts, params)
            assert [a.token_ids for a in there] == [a.token_ids for a in here]
            assert [a.cached_tokens for a in there] == [a.cached_tokens for a in here]
        assert two.engine.scheduler.retractions == alone.engine.scheduler.retractions > 0


def test_seeded_sampling_draws_the_same_tokens():
    params = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=30, seed=7, ignore_eos=True)
    with opened(folder(), dtype="float64") as alone, opened(folder(), dtype="float64", tp=2) as two:
        assert two.generate(["ab"], params)[0].token_ids == alone.generate(["ab"], params)[0].token_ids


def test_weights_that_are_drawn_are_those_of_one_process(tmp_path):
    """Of the folder only config.json is there; each rank draws, and together they are the model that one process draws."""
    BerryLMConfig.from_pretrained(folder()).save_pretrained(tmp_path)
    options = {"dtype": "float64", "random_weights": 5}
    with opened(tmp_path, **options) as alone, opened(tmp_path, **options, tp=2) as two:
        asked, params = [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        first, second = recorded(alone), recorded(two)
        assert two.generate(asked, params)[0].token_ids == alone.generate(asked, params)[0].token_ids
        assert_close("drawn", torch.cat(second), torch.cat(first), 1e-12)


def test_messages_arrive_as_they_were_said(monkeypatch):
    """Shorter than a packet, exactly one, one byte more, and many packets long; with numbers that follow, and without."""
    wire = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source, group: wire.append(tensor.clone()))
    line = Line(None)
    line.later("clear", 3)
    sizes = [1, *range(PACKET - 60, PACKET), 5 * PACKET]
    for size in sizes:
        line.say("x", "a" * size)
        line.say("y", "b" * size, numbers=torch.arange(size) - 1)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source, group: tensor.copy_(wire.pop(0)))
    heard = [(Line(None).hear(), Line(None).hear()) for _ in sizes]
    assert heard[0][0] == [["clear", 3], ["x", "a"]] and [m[-1] for m, _ in heard] == [["x", "a" * size] for size in sizes]
    for size, (_, [[*said, numbers]]) in zip(sizes, heard, strict=True):
        assert said == ["y", "b" * size] and torch.equal(numbers, torch.arange(size) - 1)
    assert not wire


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tp": 3}, "tensor parallel: num_attention_heads: expected a multiple of tp = 3, got 4"),
        ({"tp": 4}, "tensor parallel: linear_num_key_heads: expected a multiple of tp = 4, got 2"),
        ({"tp": 0}, "LLM: tp: expected an integer, 1 or more, got 0"),
        ({"tp": 2, "sequential": True}, "LLM: tp: expected 1 with sequential=True, got 2"),
        ({"tp": 2, "device": "cpu:0"}, "LLM: device: expected 'cpu' or 'cuda' with tp = 2, got 'cpu:0'"),
        ({"tp": 2, "backend": TORCH}, "LLM: backend: expected a name with tp = 2"),
        ({"tp": 2, "dtype": "int8"}, "dtype: expected one of"),
        ({"tp": 2, "backend": "none"}, "get_backend: name: expected 'auto' or one of"),
        ({"tp": 2, "prefix_cache": "no_buffer"}, "prefix_cache: no_buffer: expected page_size 1"),
        ({"tp": 2, "chunked_prefill_size": 5}, "chunked_prefill_size: expected 64 tokens or more"),
    ],
)
def test_what_is_refused_leaves_no_process_behind(options, message):
    """Heads that don't divide are said before anything is started; a refusal found later ends what was."""
    before = children(os.getpid())
    with pytest.raises(ValueError, match=message):
        LLM(folder(), **options)
    assert children(os.getpid()) == before and not dist.is_initialized()


def test_one_group_a_process():
    """A second one would send its messages into the first one's group."""
    with opened(folder(), tp=2), pytest.raises(ValueError, match="LLM: tp: expected no process group in this process"):
        LLM(folder(), tp=2)
    with pytest.raises(ValueError, match="LLM: tp: expected 1 with a model in memory, got 2"):
        LLM.from_model(BerryLM(tiny_config()), tp=2)


def test_signals_stay_those_of_the_program():
    """torch's launcher takes the signals of the process that starts it: Ctrl-C must still be ours."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with opened(folder(), tp=2) as llm:
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
        (pid,) = llm.ranks.pids().values()
        os.kill(pid, signal.SIGTERM)  # a terminal's Ctrl-C or a service manager's stop reaches all: rank 0 answers it
        os.kill(pid, signal.SIGINT)
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids
    assert ended(pid)


@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_dies_is_named_and_nothing_hangs(busy):
    """Rank 0 would wait for the dead one's part of a sum for ever."""
    with opened(folder(), tp=2) as llm:
        (pid,) = llm.ranks.pids().values()
        llm.generate([[1, 2]], SamplingParams(max_tokens=3))
        if busy:
            threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        else:
            os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(RankDied, match=rf"rank 1 of 2 \(pid {pid}\) was ended by SIGKILL"):
            llm.generate([[1, 2]], SamplingParams(max_tokens=4000, ignore_eos=True))
        assert time.monotonic() - begin < SECONDS and ended(pid)
        with pytest.raises(RankDied, match="rank 1 of 2"):  # and it stays so
            llm.generate([[1, 2]])
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_rank_that_died_first_is_named():
    """The others see a connection close and fail as well: the one to look at is the third."""
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "moe_intermediate_size": 12}
    with opened(folder(**heads, shared_expert_intermediate_size=16), tp=4) as llm:
        pids = llm.ranks.pids()
        threading.Timer(0.5, os.kill, (pids[3], signal.SIGKILL)).start()
        with pytest.raises(RankDied, match=rf"rank 3 of 4 \(pid {pids[3]}\) was ended by SIGKILL"):
            llm.generate([[1, 2]], SamplingParams(max_tokens=4000, ignore_eos=True))
        assert all(ended(pid) for pid in pids.values())


def test_a_step_that_breaks_off_ends_the_ranks(monkeypatch):
    """The others wait in an all-reduce of the broken step: the next one would add up two different moments."""
    with opened(folder(), tp=2) as llm:
        (pid,) = llm.ranks.pids().values()
        monkeypatch.setattr(llm.model, "run", lambda batch: 1 / 0)
        with pytest.raises(RankDied, match="a step broke off.*ZeroDivisionError"):
            llm.generate([[1, 2]])
        assert ended(pid)

def test_what_is_kept_from_collection_is_given_back():
    """A collection among all of torch's objects takes 0.1 s, for which ranks wait; but an engine that is closed must be freed."""
    with opened(folder(), tp=2):
        keep_objects()
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_no_rank_outlives_the_first():
    """Killed with SIGKILL, rank 0 can't tell anyone."""
    code = f"from berrylm_ref import LLM; llm = LLM({str(folder())!r}, tp=2); print(llm.ranks.pids()[1], flush=True); input()"
    parent = started(["-c", code], stdin=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    assert not ended(pid)
    store = Path(json.loads(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[5])["store"])
    assert store.exists()
    parent.kill()
    parent.wait()
    wait_for(lambda: ended(pid) and not store.parent.exists())


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_a_server_ends_with_its_rank(busy):
    """A server that goes on without a rank would take requests and answer none."""
    with serving(folder()) as (server, pid, client):
        body = {"prompt": [1, 2, 3], "max_tokens": 12_000 if busy else 5, "ignore_eos": True}
        asked = []
        ask = threading.Thread(target=lambda: asked.append(outcome(client, body)))
        ask.start()
        if busy:
            time.sleep(1)
        else:
            ask.join()
            assert asked == [200]
        begin = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        _, said = server.communicate(timeout=SECONDS)
        print(f"ended after {time.monotonic() - begin:.1f} s")
        ask.join()
        assert server.returncode == 1 and f"error: tensor parallel: rank 1 of 2 (pid {pid}) was ended by SIGKILL" in said
        assert not busy or asked[0] != 200

@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_stopped_leaves_no_rank(number):
    with serving(folder()) as (server, pid, _):
        server.send_signal(number)
        server.wait(SECONDS)
        wait_for(lambda: ended(pid))
        assert server.returncode == (0 if number == signal.SIGTERM else -number)


def test_sizes_follow_the_memory_that_every_rank_has():
    """Pages and snapshots are numbered alike on all ranks: what rank 0 has room for, the GPU of another may not have."""
    config = tiny_config(max_position_embeddings=1024)
    common = {"dtype": torch.bfloat16, "device": torch.device("cuda", 0), "page_size": 16, "max_running_requests": 2}
    common |= {"max_total_tokens": None, "snapshot_bytes": None, "snapshot_dtype": None, "keep_snapshots": True}
    held = 3 * state_bytes(config, torch.bfloat16)  # two slots and the scratch one
    for share in (1 << 20, 1 << 21):
        sizes = plan_sizes(config, **common, free=share + held)
        assert sizes.pages * 16 * kv_token_bytes(config, torch.bfloat16) == pytest.approx(0.70 * share, rel=0.05)
        assert sizes.snapshots * state_bytes(config, torch.bfloat16) == pytest.approx(0.15 * share, rel=0.15)


def test_more_gpus_than_there_are_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="LLM: tp: expected at most 1, the GPUs there are, got 2"):
        LLM(folder(), tp=2, device="cuda")
