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
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


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


@pytest.mark.parametrize(
    "body,param",
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"), ({"temperature": -0.1}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"), ({"n": 0}, "n"), ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"),
        ({"prompt": [300]}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": [[1], "a"]}, "prompt"),
        ({"stream": True}, "stream"), ({"best_of": 2}, "best_of"), ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"stop": [""]}, "stop"),
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
