"""The harness against servers on real sockets: ours, faulty ones, and others' protocols."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from models import checkpoint
from served import saying, serving, whole
from typer.testing import CliRunner

import berrylm_ref
from berrylm_ref import LLM, BerryLM, SamplingParams
from berrylm_ref.backend import TORCH
from berrylm_ref.cli import app
from berrylm_ref.parity.client import Answer, Http
from berrylm_ref.parity.completions_api import CompletionsApi
from berrylm_ref.parity.connect import connect
from berrylm_ref.parity.generate_api import GenerateApi
from berrylm_ref.parity.launch import launched
from berrylm_ref.parity.measure import measure
from berrylm_ref.parity.prompts import read_prompts, seeded_prompts
from berrylm_ref.parity.reference import Reference, Scored
from berrylm_ref.parity.score import distances, windows
from berrylm_ref.tokenizer import Tokenizer

NEW = 6
SHIPPED = Path(berrylm_ref.__file__).parent / "checkpoints" / "nano"


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "hf-tiny-default"


@pytest.fixture(scope="module")
def prompts():
    return seeded_prompts(
        vocab_size=128, context=4096, tokenizer=None, new_tokens=NEW, short=4, documents=1, document_length=300, quick=True
    )


def over_http(folder, prompts, protocol="auto", **options):
    with serving(LLM(folder, max_total_tokens=4096, **options)) as client:
        api = connect(Http(str(client.base_url)), protocol, prompts[0].ids[:4])
        return measure(folder, api, prompts, new_tokens=NEW, window=128)


@pytest.mark.parametrize("protocol", ["generate", "completions"])
def test_our_server_in_fp32_is_the_reference(folder, prompts, protocol):
    """What is promised: mean |delta logprob| below 1e-5, every greedy token the argmax, a cached pass with the same ids."""
    result = over_http(folder, prompts, protocol)
    total = result.total
    print(total)
    assert result.about["protocol"] == protocol and not result.findings and not result.limits
    assert total.mean < 1e-5 and total.decoded_max < 1e-4 and total.greedy == 1.0
    assert total.same_ids == len(prompts) and total.floor_mean > 1e-3, "the floor is bf16's, measured"
    lines = {(x.kind, x.stage): x for x in result.lines}
    assert lines["short", "cold"].cached_tokens == 0 < lines["document", "cache hit"].cached_tokens
    assert lines["document", "multi-turn"].cached_tokens >= 256
    assert (lines["document", "cache hit"].mean is None) == (protocol == "completions"), "only /generate scores an end"
    (document,) = result.windows
    assert len(document["port"]) == len(document["floor"]) == 3, "300 tokens, windows of 128"


def test_our_server_in_bf16_is_at_the_floor(folder, prompts):
    result = over_http(folder, prompts, dtype="bfloat16")
    print(result.total)
    assert 0.8 < result.total.ratio < 1.2 and not result.findings


def test_the_shipped_checkpoint_keeps_the_promise():
    """On trained weights and on text, the numbers that the README gives."""
    if not (SHIPPED / "config.json").is_file():
        pytest.skip(f"no weights in {SHIPPED.relative_to(SHIPPED.parents[2])} yet")
    text = seeded_prompts(
        vocab_size=4096, context=4096, tokenizer=Tokenizer.from_folder(SHIPPED), new_tokens=NEW, short=3, documents=1,
        document_length=300, quick=True,
    )  # fmt: skip
    fp32, bf16 = over_http(SHIPPED, text), over_http(SHIPPED, text, dtype="bfloat16")
    print(fp32.total, bf16.total, sep="\n")
    assert fp32.total.mean < 1e-5 and fp32.total.greedy == 1.0 and fp32.total.same_ids == len(text) and not fp32.findings
    assert bf16.total.ratio < 1.2 and not bf16.findings


def test_a_clamped_server_is_far_above_the_floor(folder, prompts):
    """KRN-1: bf16 or not, the clamp is no rounding; the greedy tokens that it costs are said with what they lose."""
    result = over_http(folder, prompts, dtype="bfloat16", kda_intra="clamped")
    assert result.total.ratio > 3 and result.findings[0].endswith("x the floor, budget 1.2x")
    print(*result.findings, sep="\n")
    assert any("loses" in finding for finding in result.findings[1:])


def test_a_cache_that_keeps_a_wrong_state_shows_in_the_later_passes_alone(folder, prompts):
    """CAC: the cold pass is perfect. Snapshots of another moment come back only when a prefix is used again."""

    def chunk_kda(*args, state_boundaries=None, **kwargs):
        found = TORCH.chunk_kda(*args, state_boundaries=state_boundaries, **kwargs)
        return found if state_boundaries is None else (*found[:2], torch.zeros_like(found[2]))

    result = over_http(folder, prompts, backend=replace(TORCH, name="forgetful", chunk_kda=chunk_kda))
    lines = {(x.kind, x.stage): x for x in result.lines}
    assert lines["short", "cold"].mean < 1e-5 and lines["document", "cold"].mean < 1e-5
    assert lines["document", "cache hit"].mean > 1e-2 and lines["document", "multi-turn"].mean > 1e-2
    assert lines["document", "cache hit"].decoded_max > 1e-2
    named = "\n".join(result.findings)
    assert "document, cache hit: mean" in named and "document, multi-turn: mean" in named and "cold: mean" not in named


class OtherServer(BaseHTTPRequestHandler):
    """vLLM's completions as its documentation shows them, SGLang's /generate, or a server with less; tokens by our engine."""

    llm: LLM
    kind: str

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply({"data": [{"id": "other"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != "Bearer key":
            return self.reply({"error": {"message": "no key"}}, 401)
        if self.path == "/generate":
            return self.generate(body) if self.kind == "sglang" else self.reply({"detail": "Not Found"}, 404)
        if self.kind == "bare":
            return self.reply({"choices": [{"text": "x", "logprobs": None}]})
        scored = self.kind == "vllm" and body.get("prompt_logprobs") is not None
        if body.get("echo"):
            return self.reply({"error": {"message": "echo is not supported", "param": "echo"}}, 400)
        if "ignore_eos" in body and self.kind == "plain":
            return self.reply({"message": "Unrecognized field: ignore_eos"}, 422)
        out = self.run(body["prompt"], body["max_tokens"], scored)
        names = [f"token_id:{x.token}" for x in out.logprobs]
        choice = {"text": "", "logprobs": {"tokens": names, "token_logprobs": [x.logprob for x in out.logprobs]}}
        if scored:
            rows = zip(body["prompt"][1:], out.prompt_logprobs[1:], strict=True)
            choice["prompt_logprobs"] = [None, *({str(i): {"logprob": x.logprob, "rank": 1}} for i, x in rows)]
        self.reply({"choices": [choice], "usage": {"prompt_tokens": 1, "prompt_tokens_details": None}})

    def generate(self, body):
        ids, sampling, start = body["input_ids"], body["sampling_params"], body.get("logprob_start_len", -1)
        out = self.run(ids, sampling["max_new_tokens"], start >= 0)
        meta = {"cached_tokens": 0, "output_token_logprobs": [[x.logprob, x.token, None] for x in out.logprobs]}
        if start >= 0:
            pairs = list(zip(ids, out.prompt_logprobs, strict=True))[start:]
            meta["input_token_logprobs"] = [[x.logprob if n else None, i, None] for n, (i, x) in enumerate(pairs)]
        self.reply({"text": "", "output_ids": out.token_ids, "meta_info": meta})

    def run(self, ids, count, scored):
        params = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, prompt_logprobs=0 if scored else None
        )
        return self.llm.generate([ids], params)[0]

    def reply(self, body, status=200):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def other(folder):
    """url of a server of some kind; one request at a time."""
    servers = []

    def start(kind):
        llm = LLM(folder, max_total_tokens=4096, prefix_cache="off")
        handler = type("Handler", (OtherServer,), {"llm": llm, "kind": kind})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return Http(f"http://127.0.0.1:{servers[-1].server_port}/v1/", api_key="key")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind,protocol", [("vllm", "completions"), ("sglang", "generate")])
def test_other_protocols_are_understood(folder, prompts, other, kind, protocol):
    """vLLM refuses echo for token prompts in some versions and has its own field; SGLang leaves the first score out."""
    api = connect(other(kind), "auto", prompts[0].ids[:4])
    result = measure(folder, api, prompts[2:4], new_tokens=NEW)
    assert api.name == protocol and not api.lacks and not result.findings
    assert result.total.mean < 1e-5 and result.total.greedy == 1.0 and result.total.same_ids == 2
    (limit,) = result.limits
    assert ("does not say how many tokens" if kind == "vllm" else "no token came from the server's cache") in limit


def test_a_server_without_prompt_logprobs_is_told_and_the_rest_measured(folder, prompts, other):
    """API-5: half an answer must not read like a whole one."""
    api = connect(other("plain"), "auto", prompts[0].ids[:4])
    assert "ignore_eos" not in api.optional, "a field that is refused by name is left out"
    result = measure(folder, api, prompts[:2], new_tokens=NEW)
    assert result.limits[:2] == [
        "the server's completions protocol does not give log-probabilities of the prompt's tokens: "
        "no |delta logprob| over prompts",
        "still measured: greedy agreement, identical ids, multi-turn and decoded tokens; |delta logprob| on decoded tokens",
    ]
    total = result.total
    assert total.mean is None and total.ratio is None and total.greedy == 1.0 and total.decoded_max < 1e-4
    assert total.decoded_ratio < 0.1


def test_a_server_with_nothing_to_compare_is_refused(prompts, other):
    with pytest.raises(ValueError, match="gives neither log-probabilities nor token ids here.*--protocol"):
        connect(other("bare"), "auto", prompts[0].ids[:4])


def test_wrong_addresses_keys_and_names_are_named(prompts, other):
    http = other("vllm")
    with pytest.raises(ValueError, match="expected status 200, got 401: .*no key"):
        connect(replace_key(http), "auto", prompts[0].ids[:4])
    with pytest.raises(ValueError, match="protocol: expected 'auto' or one of"):
        connect(http, "grpc", [1])
    with pytest.raises(ValueError, match="expected a server at http://127.0.0.1:9"):
        connect(Http("http://127.0.0.1:9"), "generate", [1])
    with pytest.raises(ValueError, match="url: expected http://host:port, got '127.0.0.1:3'"):
        Http("127.0.0.1:3")


@pytest.mark.parametrize(
    "reply,message",
    [
        (b"SSH-2.0-x\r\n", "a whole answer"), (b"", "a whole answer"), (whole("{}", more=9), "a whole answer"),
        (whole("[1]"), "this protocol's form"), (whole("null"), "this protocol's form"), (whole("[]"), "this protocol's form"),
        (whole('{"meta_info": {"output_token_logprobs": 5}}'), "this protocol's form"), (whole("x"), "expected JSON"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("protocol", ["generate", "completions"])
def test_a_server_that_dies_or_speaks_something_else_is_named(protocol, reply, message):
    """One line instead of a traceback from within the HTTP client or the look into the answer."""
    with saying(reply) as url:
        with pytest.raises(ValueError, match=message):
            connect(Http(url), protocol, [1, 2])


def replace_key(http):
    return Http(http.url)


@pytest.mark.parametrize("api", [GenerateApi, CompletionsApi])
def test_the_protocols_have_the_same_face(api):
    assert api.name in ("generate", "completions") and callable(api.answer)


def test_what_is_no_number_is_infinitely_far():
    """A NaN in a mean would be skipped by every comparison."""
    ref = Scored(torch.zeros(3).double(), torch.tensor([1, 2, 3]), torch.zeros(3).double())
    port, floor = distances(2, Answer(ids=[2, 9], logprobs=[0.5, float("nan")], prompt_logprobs=[0.0]), ref, ref)
    assert port.prompt.tolist() == [0.0] and port.decoded.tolist() == [0.5, float("inf")]
    assert port.equal.tolist() == [True, False] and floor.equal.all()
    assert windows(torch.tensor([1.0, 3.0, 5.0]), 2) == [2.0, 5.0]


def byte_level():
    return Tokenizer.from_folder(checkpoint(with_tokenizer=True))


def test_the_built_in_prompts_are_fixed_and_fit(tmp_path):
    options = {"vocab_size": 50, "context": 7000, "tokenizer": None, "new_tokens": 16}
    one, same = seeded_prompts(**options), seeded_prompts(**options)
    assert one == same and one != seeded_prompts(**options, seed=1)
    assert [len(p.ids) for p in one if p.kind == "short"][:: 7] == [20, 400]
    assert [len(p.ids) for p in one if p.kind == "document"] == [6000, 7000 - 32 - 40 - 1]
    with pytest.raises(ValueError, match="expected room for prompts of 20 ids in a context of 64"):
        seeded_prompts(**{**options, "context": 64})
    path = tmp_path / "p.jsonl"
    path.write_text("[1, 2, 3]\n\n" + json.dumps([5] * 1000) + "\n")
    assert [(p.kind, len(p.ids)) for p in read_prompts(path, None)] == [("short", 3), ("document", 1000)]
    text = seeded_prompts(**{**options, "tokenizer": byte_level()})
    assert [len(p.ids) for p in text] == [len(p.ids) for p in one] and all(p.follow for p in text)
    path.write_text('[1, 2]\n"text"\n')
    with pytest.raises(ValueError, match="in line 2 .*tokenizer.json, got '\"text\"'"):
        read_prompts(path, None)


def assert_steps(stderr, *parts):
    """Lines of seconds and a step, in this order among others."""
    steps = [re.fullmatch(r" *(\d+\.\d) s  (.+)", line) for line in stderr.splitlines() if " INFO " not in f" {line}"]
    assert all(steps), stderr
    times = [float(step[1]) for step in steps]
    assert times == sorted(times)
    left = iter(step[2] for step in steps)
    assert all(any(part in step for step in left) for part in parts), stderr


def test_the_command_launches_a_server_measures_and_ends_it(folder, tmp_path):
    """Real processes: the server is another one, in a group of its own, and gone afterwards."""
    files = {"--json": tmp_path / "p.json", "--plot": tmp_path / "p.png"}
    done = CliRunner().invoke(
        app,
        ["parity", "--model", str(folder), "--launch", "--short", "2", "--documents", "0", "--quick", "--new-tokens", "4",
         *(str(x) for pair in files.items() for x in pair)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert_steps(
        done.stderr,
        "starting a server", "loading the reference",
        "asking 1 of 2, short 0, 20 ids: cold", "asking 1 of 2, short 0, 20 ids: cache hit", "ids: multi-turn",
        "asking 2 of 2, short 1, 120 ids: cold", "reference 1 of 2, short 0, ", "ids: torch.bfloat16",
        "reference 2 of 2, short 1, ", "ids: torch.bfloat16",
    )  # fmt: skip
    assert "times the floor" in done.stdout and (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["lines"][-1]["mean"] < 1e-5 and not found["findings"]
    assert CliRunner().invoke(app, ["parity", "--model", str(folder)]).exit_code == 2, "neither --url nor --launch"
    assert CliRunner().invoke(app, ["parity", "--launch", "--url", "http://127.0.0.1:1"]).exit_code == 2


def test_documents_that_the_context_cuts_are_named(folder):
    """65536 ids were asked for, 16311 measured, and only the table's column of tokens showed it."""
    args = ["--model", str(folder), "--url", "http://127.0.0.1:9", "--short", "0", "--document-length"]
    cut, whole_one = (CliRunner().invoke(app, ["parity", *args, length]) for length in ("65536", "100"))
    assert "documents have 4023 ids, not 65536: the context of the model holds 4096" in cut.stderr
    assert "documents have" not in whole_one.stderr and "expected a server at" in whole_one.stderr


def test_a_reference_device_that_is_not_there_is_refused_before_a_server_starts(monkeypatch):
    monkeypatch.setattr("berrylm_ref.parity.launch.subprocess.Popen", None)
    done = CliRunner().invoke(app, ["parity", "--launch", "--reference-device", "cuda:99"])
    assert done.exit_code == 2 and "device: expected one that is here, as 'cpu', got 'cuda:99'" in done.stderr


def test_a_trusted_side_in_fp32_is_in_fp32(folder, monkeypatch):
    """Some containers switch TF32 on by an environment variable: the reference would be 1e-3 off, and every port with it."""
    seen = []
    run = BerryLM.run
    monkeypatch.setattr(BerryLM, "run", lambda *args: seen.append(torch.get_float32_matmul_precision()) or run(*args))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        Reference(folder).score([1, 2, 3])
        assert seen == ["highest"] and torch.get_float32_matmul_precision() == "high", "and what the caller chose is left to him"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_launched_server_ends_with_its_measurement(folder):
    """Also when that is told to stop: a forgotten server holds a GPU."""
    code = (
        "import sys, time; from berrylm_ref.parity.launch import launched\n"
        "with launched(sys.argv[1]) as url: print(url, flush=True); time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    url = process.stdout.readline().strip()
    assert Http(url).get("/health")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ValueError, match="expected a server at"):
        Http(url, timeout=5).get("/health")


def test_a_server_that_dies_at_its_start_shows_its_last_words(tmp_path):
    begin = time.monotonic()
    with pytest.raises(ValueError, match="parity: launch: expected a server at .*\n[\\s\\S]*config.json"), launched(tmp_path):
        pass
    assert time.monotonic() - begin < 60
