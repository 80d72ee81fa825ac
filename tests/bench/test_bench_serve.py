"""`berrylm bench serve`: what it sends is what it says, and its figures follow from what was seen."""

import asyncio
import json
import math

import pytest
from models import VOCAB, checkpoint, small_llm
from typer.testing import CliRunner

from berrylm_ref.bench.client import body_pieces, parse_url, run_over_http
from berrylm_ref.bench.drive import drive, make, run_in_process
from berrylm_ref.bench.plot import plot
from berrylm_ref.bench.server import served
from berrylm_ref.bench.timing import Run, Timing, spread
from berrylm_ref.bench.workload import Workload, parse_workload
from berrylm_ref.cli import app


@pytest.fixture(scope="module")
def llm():
    return small_llm(max_running_requests=4)


def test_shared_prefixes_are_shared_inside_a_group_only():
    load = Workload(40, 1, 2, 5, "shared-prefix", prefix_len=32, groups=2, seed=3)
    prompts = load.prompts(VOCAB)
    assert [len(p) for p in prompts] == [40] * 5 and len({tuple(p) for p in prompts}) == 5
    heads = [tuple(p[:32]) for p in prompts]
    assert heads[0] == heads[2] == heads[4] != heads[1] == heads[3]
    assert prompts == load.prompts(VOCAB) and all(0 <= i < VOCAB for p in prompts for i in p)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"input_len": 0}, "input_len: expected 1 or more, got 0"),
        ({"kind": "zipf"}, "kind: expected one of"),
        ({"prefix_len": 4}, "expected none with random prompts"),
        ({"kind": "shared-prefix", "prefix_len": 8}, "prefix_len: expected 1 .. input_len - 1 = 7, got 8"),
    ],
)
def test_a_workload_that_means_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Workload(**{"input_len": 8, "output_len": 1, "concurrency": 1, "requests": 1, **options})


def test_names_of_workloads():
    assert parse_workload("1k/512@64") == (1024, 512, 64) and Workload(1024, 512, 64, 64).name == "1k/512@64"
    for bad in ("1k/512", "1k@3", "a/b@c", ""):
        with pytest.raises(ValueError, match="expected INPUT/OUTPUT@CONCURRENCY"):
            parse_workload(bad)


def test_the_figures_follow_from_the_times():
    """TPOT is over the tokens after the first: dividing by all of them flatters short answers."""
    timings = [Timing(0.0, 10, first=0.5, last=1.5, output_tokens=5), Timing(1.0, 10, first=1.1, last=1.1, output_tokens=1)]
    found = Run(2.0, timings).summary()
    assert found["requests_per_s"] == 1 and found["output_tokens_per_s"] == 3 and found["total_tokens_per_s"] == 13
    assert found["tpot_ms"] == {"mean": 250.0, "median": 250.0, "p99": 250.0}, "one token has no TPOT"
    assert found["ttft_ms"]["p99"] == 500
    assert spread(list(range(1, 101)))["p99"] == 99 and spread([math.nan]) is None


def test_no_more_run_than_were_asked_for_and_each_to_its_full_length(llm):
    seen = []
    load = Workload(20, 6, 3, 7, seed=1)
    run = run_in_process(llm, load, progress=lambda n: seen.append((n, len(llm.engine.scheduler.running))))
    assert [n for n, _ in seen] == list(range(1, 8)) and max(running for _, running in seen) <= 3
    assert [t.output_tokens for t in run.timings] == [6] * 7 and not run.cut
    assert all(t.sent < t.first < t.last for t in run.timings) and run.timings == sorted(run.timings, key=lambda t: t.sent)
    llm.engine.check()


def test_a_time_limit_ends_a_run_and_leaves_nothing_behind(llm):
    load = Workload(20, 400, 2, 50)
    run = drive(llm.engine, make(llm, load), 2, deadline=0.0)
    assert run.cut and not run.timings and run.summary()["cut_by_time_limit"]
    assert llm.engine.idle and llm.engine.scheduler.cache.pool.slots.free_count == 4
    llm.engine.check()


def test_the_same_load_over_http_hits_the_same_prefixes():
    """The client counts by the server's own usage, so that both ways report the same tokens and hits."""
    load = Workload(140, 4, 1, 4, "shared-prefix", prefix_len=128, groups=1)
    here = run_in_process(small_llm(), load)
    with served(small_llm()) as url:
        there = run_over_http(url, load, VOCAB)
    for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
        assert [getattr(t, name) for t in here.timings] == [getattr(t, name) for t in there.timings], name
    assert sum(t.cached_tokens for t in there.timings) == 3 * 128
    assert all(0 < t.ttft and 0 < t.tpot for t in there.timings)


def test_what_the_server_refuses_ends_the_run_with_its_words():
    words = "status 200, got HTTP/1.1 400.*KV memory"
    with served(small_llm(max_total_tokens=256)) as url, pytest.raises(ValueError, match=words):
        run_over_http(url, Workload(200, 100, 2, 3), VOCAB)
    with pytest.raises(OSError):
        run_over_http(url, Workload(8, 1, 1, 1), VOCAB)
    for bad in ("localhost:3", "https://x", "http://x:port", "http://x/v1"):
        with pytest.raises(ValueError, match="expected http://HOST:PORT"):
            parse_url(bad)


def test_a_chunk_of_the_transfer_may_end_anywhere():
    """An event cut in two by the transfer encoding was read as two broken lines."""

    async def read(cuts):
        reader = asyncio.StreamReader()
        text, pieces = b"data: {}\n\ndata: [DONE]\n\n", []
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            pieces.append(f"{end - begin:x};x=1\r\n".encode() + text[begin:end] + b"\r\n")
        reader.feed_data(b"".join(pieces) + b"0\r\n\r\n")
        return b"".join([piece async for piece in body_pieces(reader, chunked=True)]) == text

    assert asyncio.run(read([3, 9])) and asyncio.run(read([]))


def invoke(*args):
    return CliRunner().invoke(app, ["bench", "serve", *map(str, args)])


def test_the_command_in_process_writes_json_and_a_picture(tmp_path):
    out, png = tmp_path / "r.json", tmp_path / "r.png"
    small = ("--input-len", 16, "--output-len", 3, "--requests", 4, "--concurrency", 2, "--warmup", 1)
    done = invoke("--model", checkpoint(), *small, "--out", out, "--plot", png)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert json.loads(done.stdout) == found and found["requests"] == 4 and found["output_tokens"] == 12
    assert found["how"] == "in process" and png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_command_launches_a_server_and_measures_it(monkeypatch):
    """The key in the environment closes the server that is launched, too: the client must show it."""
    monkeypatch.setenv("BERRYLM_API_KEY", "secret")
    small = ("--input-len", 16, "--output-len", 3, "--requests", 4, "--concurrency", 2, "--warmup", 1)
    done = invoke("--launch", "--model", checkpoint(), *small)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["output_tokens"] == 12


@pytest.mark.parametrize(
    "args,message",
    [
        (["--url", "http://x", "--launch", "--model", "/"], "expected --launch"),
        (["--url", "http://127.0.0.1:1"], "--vocab-size"),
        (["--url", "http://127.0.0.1:1", "--vocab-size", "9"], "error:"),
        (["--model", "/nowhere"], "expected a config.json"),
        (["--model", "/nowhere", "--requests", "0"], "requests: expected 1 or more"),
    ],
)
def test_wrong_arguments_are_status_2(args, message):
    done = invoke(*args)
    assert done.exit_code == 2 and message in done.stderr


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="plot: expected matplotlib"):
        plot(Run(1.0), "x", tmp_path / "x.png")
