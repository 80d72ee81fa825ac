"""The server over a real socket: the routes, limits and errors that a client meets first."""

import json
import socket
import threading
import time

import httpx
import pytest
import uvicorn
from models import small_llm

from berrylm_ref import SamplingParams
from berrylm_ref.server.app import create_app


@pytest.fixture(scope="module")
def llm():
    return small_llm(with_tokenizer=True)


@pytest.fixture(scope="module")
def client(llm):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(create_app(llm, "tiny"), host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as c:
        yield c
    server.should_exit = True
    thread.join(10)


def streamed(client, **body):
    """The chunks of a stream, which must end with [DONE]."""
    with client.stream("POST", "/v1/completions", json={"prompt": [1, 2, 3], "temperature": 0, "stream": True, **body}) as r:
        assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in r.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def complete(client, **body):
    return client.post("/v1/completions", json={"prompt": [1, 2, 3], "temperature": 0, **body})


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_health_and_models(client, llm):
    assert client.get("/health").json() == {"status": "ok"}
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny" and card["object"] == "model"
    assert card["max_model_len"] == llm.config.max_position_embeddings


def test_a_completion_is_what_the_library_generates(client, llm):
    want = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5))[0]
    body = complete(client, max_tokens=5).json()
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    assert body["choices"] == [
        {"index": 0, "text": want.text, "token_ids": want.token_ids, "finish_reason": "length", "logprobs": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_text_prompts_lists_and_several_choices(client, llm):
    ids = llm.tokenizer.encode("hi")
    bodies = [
        {"prompt": p, "n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 3} for p in ("hi", ids, ["hi", "hi"], [ids, ids])
    ]
    one, same, two, both = (complete(client, **b).json() for b in bodies)
    assert [c["token_ids"] for c in one["choices"]] == [c["token_ids"] for c in same["choices"]]
    assert [c["index"] for c in two["choices"]] == [0, 1, 2, 3] and two["choices"][:2] == one["choices"]
    assert [c["token_ids"] for c in two["choices"]] == [c["token_ids"] for c in both["choices"]]
    assert two["usage"]["prompt_tokens"] == 4, "each prompt counts once, not once a choice"


def test_logprobs_in_the_completions_form(client):
    found = complete(client, max_tokens=3, logprobs=2).json()["choices"][0]["logprobs"]
    assert [len(found[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [3, 3, 3, 3]
    assert max(found["top_logprobs"][0].values()) == found["token_logprobs"][0], "greedy took the most probable"


def test_alternatives_that_are_no_text_keep_names_of_their_own(client, llm):
    """API-5: half a character decodes to U+FFFD, as many others do; twenty alternatives became ten."""
    found = complete(client, max_tokens=12, logprobs=20, ignore_eos=True).json()["choices"][0]
    names, tokens = found["logprobs"]["top_logprobs"], found["logprobs"]["tokens"]
    assert [len(x) for x in names] == [20] * 12 and "\ufffd" not in "".join(tokens)
    for token, name, top in zip(found["token_ids"], tokens, names, strict=True):
        raw = llm.tokenizer.bytes_of(token)
        assert name == ("bytes:" + "".join(f"\\x{b:02x}" for b in raw) if raw[0] >= 0x80 else raw.decode())
        assert any(n.startswith("bytes:") for n in top)


@pytest.mark.parametrize(
    "body,param",
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"), ({"temperature": -0.1}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"), ({"n": 0}, "n"), ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"),
        ({"prompt": [300]}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": [[1], "a"]}, "prompt"),
        ({"stream": 1}, "stream"), ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 2}, "best_of"), ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"stop": [""]}, "stop"), ({"n": 0, "stream": True}, "n"),
    ],
)  # fmt: skip
def test_a_bad_field_is_a_400_that_names_it(client, body, param):
    """API-1: not a default, not a 200 with nothing, not a 500; an unknown field is refused, never ignored."""
    assert error_of(complete(client, **body), 400)["param"] == param
    assert complete(client, max_tokens=1).status_code == 200, "the next request is answered"


def test_null_means_unset(client):
    fields = ("max_tokens", "top_p", "n", "stop", "seed", "logprobs", "top_k", "model")
    with_nulls, without = complete(client, **dict.fromkeys(fields)).json(), complete(client).json()
    assert with_nulls["choices"] == without["choices"] and len(without["choices"][0]["token_ids"]) == 16


def test_broken_json_wrong_model_wrong_route(client):
    assert error_of(client.post("/v1/completions", content=b"{"), 400)["message"].startswith("body:")
    assert error_of(client.post("/v1/completions", content=json.dumps([1])), 400)
    as_json = {"headers": {"content-type": "application/json"}}
    for content in (b"", b"\xff\xfe", b"[" * 100_000, b"null"):  # the third once came back in the framework's own form
        assert error_of(client.post("/v1/completions", content=content, **as_json), 400)
    for name, value in {"prompt": b'"a\\ud800"', "temperature": b"1" * 400, "seed": b"1" * 5000, "model": b'"\\ud800"'}.items():
        content = b'{"prompt": [1], "' + name.encode() + b'": ' + value + b"}"
        response = client.post("/v1/completions", content=content, **as_json)
        assert error_of(response, response.status_code)["param"] in (name, None) and response.status_code in (400, 404)
    assert error_of(complete(client, model="other"), 404)["code"] == "model_not_found"
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get("/v1/completions"), 405)


def test_too_long_is_context_length_exceeded(client, llm):
    """API-1: one token too many is refused by name, and the server goes on."""
    context = llm.config.max_position_embeddings
    error = error_of(complete(client, prompt=[1] * context), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    error = error_of(complete(client, prompt=[1] * 4000, max_tokens=200), 400)
    assert "fit the 4096 tokens of KV memory" in error["message"] and error["param"] == "max_tokens"
    assert complete(client, max_tokens=1).status_code == 200


def test_requests_at_the_same_time_are_all_answered(client, llm):
    want = complete(client, max_tokens=8).json()["choices"][0]["token_ids"]
    got = [None] * 6

    def ask(i):
        got[i] = complete(client, max_tokens=8).json()["choices"][0]["token_ids"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert got == [want] * 6
    llm.engine.check()


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_whole_answer_says(client, n):
    """ENG-2, API-4: texts, ids, logprobs and reasons of every choice, joined, are those of the answer without streaming."""
    body = {"prompt": "hey", "n": n, "seed": 7, "temperature": 1.0, "max_tokens": 16, "logprobs": 1, "stop": ["e", "zz"]}
    whole = complete(client, **body).json()["choices"]
    joined = [{"text": "", "token_ids": [], "tokens": [], "text_offset": []} for _ in range(n)]
    for chunk in streamed(client, **body):
        assert "usage" not in chunk, "API-2: not unasked"
        (choice,) = chunk["choices"]
        mine = joined[choice["index"]]
        assert "finish_reason" not in mine, "nothing after the end"
        mine["text"] += choice["text"]
        mine["token_ids"] += choice["token_ids"]
        mine["tokens"] += choice["logprobs"]["tokens"]
        mine["text_offset"] += choice["logprobs"]["text_offset"]
        if choice["finish_reason"]:
            mine["finish_reason"] = choice["finish_reason"]
    for got, want in zip(joined, whole, strict=True):
        assert got.pop("tokens") == want["logprobs"]["tokens"]
        assert got.pop("text_offset") == want["logprobs"]["text_offset"], "offsets do not start again in every chunk"
        assert got == {k: want[k] for k in got} and "finish_reason" in got


def test_the_usage_chunk_comes_only_when_asked_and_last(client):
    """API-2: choices [] and the totals, null on the others; the same numbers as without streaming."""
    plain = complete(client, max_tokens=4, n=2, temperature=1.0, seed=1).json()["usage"]
    *others, last = streamed(client, max_tokens=4, n=2, temperature=1.0, seed=1, stream_options={"include_usage": True})
    assert last["choices"] == [] and all(o["usage"] is None for o in others)
    assert {k: last["usage"][k] for k in list(plain)[:3]} == {k: plain[k] for k in list(plain)[:3]}
    assert all("usage" not in c for c in streamed(client, max_tokens=4, stream_options={"include_usage": False}))


def test_clients_that_leave_free_their_slots(client, llm):
    """ENG-1: four streams closed after a chunk, four plain requests closed after 0.2 s; then an ordinary one."""
    scheduler = llm.engine.scheduler
    for _ in range(4):
        body = {"prompt": [1, 2, 3], "stream": True, "max_tokens": 3500, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as r:
            next(r.iter_lines())
    for _ in range(4):
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"prompt": [1], "max_tokens": 3500, "ignore_eos": True}, timeout=0.2)
    assert complete(client, max_tokens=2).status_code == 200
    end = time.monotonic() + 20
    while scheduler.running or scheduler.waiting:
        assert time.monotonic() < end, "a client that left still runs"
        time.sleep(0.05)
    llm.engine.check()
    assert llm.engine.cache.pool.slots.free_count == llm.engine.cache.pool.slots.capacity


def test_turn_two_reports_its_cached_tokens(client):
    turn = complete(client, prompt=list(range(100, 170)), max_tokens=70).json()["choices"][0]["token_ids"]
    again = complete(client, prompt=list(range(100, 170)) + turn, max_tokens=1).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 128


def test_a_fault_in_the_engine_is_a_503_and_not_a_hang():
    """PFX-3: whoever waits is told, and /health tells the rest."""
    from fastapi.testclient import TestClient

    broken = small_llm(with_tokenizer=True)
    broken.engine.step = lambda: 1 / 0
    with TestClient(create_app(broken, "broken")) as c:
        assert c.get("/health").status_code == 200
        assert error_of(complete(c), 503)["type"] == "server_error"
        error_of(complete(c), 503)
        error_of(complete(c, stream=True), 503)
        error_of(c.get("/health"), 503)


def test_a_fault_in_mid_stream_is_an_event_that_the_client_reads():
    """PFX-3: the connection was just dropped, which looks like a network problem."""
    from fastapi.testclient import TestClient

    broken = small_llm(with_tokenizer=True)
    steps, step = [], broken.engine.step
    broken.engine.step = lambda: steps.append(1) or (step() if len(steps) < 5 else 1 / 0)
    with TestClient(create_app(broken, "broken")) as c:
        body = {"prompt": [1, 2], "stream": True, "max_tokens": 50, "ignore_eos": True}
        lines = [x for x in c.post("/v1/completions", json=body).text.splitlines() if x]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
