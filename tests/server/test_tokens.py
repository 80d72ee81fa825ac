"""/tokenize and /detokenize, and the echo of /v1/completions: texts and ids that a client sees are those the model gets."""

import json
import shutil

import pytest
import torch
from chat_models import chat_llm
from models import checkpoint, small_llm
from served import error_of, serving

from berrylm_ref import LLM, SamplingParams

TEXT = "héllo <user> 🫐\n"
TEMPLATE = "{% for m in messages %}<user>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(checkpoint(True), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return LLM(folder, dtype="float64", max_total_tokens=4096, snapshot_bytes=2**22)


@pytest.fixture(scope="module")
def client(llm):
    with serving(llm) as client:
        yield client


def complete(client, **body):
    response = client.post("/v1/completions", json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_text_to_ids_and_back(client, llm):
    got = client.post("/tokenize", json={"prompt": TEXT, "model": "tiny"}).json()
    assert got["tokens"] == llm.tokenizer.encode(TEXT) and got["count"] == len(got["tokens"])
    assert got["max_model_len"] == llm.config.max_position_embeddings
    assert client.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": TEXT}
    assert complete(client, prompt=TEXT, max_tokens=1)["usage"]["prompt_tokens"] == got["count"]
    for flag in (True, False):  # this tokenizer has none to add
        assert client.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": flag}).json() == got
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_messages_become_what_the_template_writes(client, llm):
    messages = [{"role": "user", "content": "a<eos>"}]
    special = {t: llm.tokenizer.encode(t)[0] for t in ("<user>", "<eos>", "<think>")}
    plain = [llm.tokenizer.encode(c)[0] for c in "a<eos>"]
    want = [special["<user>"], *plain, special["<eos>"], special["<think>"]]
    assert client.post("/tokenize", json={"messages": messages}).json()["tokens"] == want, "a client's tag stays text"
    body = {"messages": messages, "add_generation_prompt": False}
    assert client.post("/tokenize", json=body).json()["tokens"] == want[:-1]


def test_messages_are_those_of_the_chat_route():
    """A developer is a system here too: the route refused what the chat route takes."""
    roles = [[{"role": role, "content": "Be brief."}, {"role": "user", "content": "hi"}] for role in ("system", "developer")]
    with serving(chat_llm()) as client:
        system, developer = (client.post("/tokenize", json={"messages": messages}).json() for messages in roles)
        assert developer["tokens"] == system["tokens"]
        answer = client.post("/v1/chat/completions", json={"messages": roles[1], "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens"] == developer["count"]


@pytest.mark.parametrize(
    "path,body,param",
    [
        ("tokenize", {}, "prompt"), ("tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("tokenize", {"prompt": 1}, "prompt"),
        ("tokenize", {"messages": []}, "messages"), ("tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("tokenize", {"messages": "a"}, "messages"), ("tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "add_special_tokens"),
        ("tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("tokenize", {"messages": [{"role": "user", "content": "a", "name": "me"}]}, "messages[0].name"),
        ("tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "cache": 1}]},
         "tools[0].cache"),
        ("detokenize", {}, "tokens"), ("detokenize", {"tokens": [299]}, "tokens"), ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens"), ("detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)  # fmt: skip
def test_a_bad_field_is_a_400_that_names_it(client, path, body, param):
    """API-1."""
    assert error_of(client.post(f"/{path}", json=body), 400)["param"] == param


def test_half_a_surrogate_pair_is_a_400(client):
    """JSON can spell it, UTF-8 can't: the tokenizer raised a TypeError."""
    response = client.post("/tokenize", content=b'{"prompt": "a\\ud800"}', headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == "prompt"


def test_without_a_tokenizer_or_a_template_it_says_so():
    with serving(small_llm()) as client:
        assert "tokenizer.json" in error_of(client.post("/tokenize", json={"prompt": "a"}), 400)["message"]
        assert "tokenizer.json" in error_of(client.post("/detokenize", json={"tokens": [1]}), 400)["message"]
        assert complete(client, prompt=[5, 6], echo=True, max_tokens=1)["choices"][0]["token_ids"][:2] == [5, 6]
    with serving(small_llm(with_tokenizer=True)) as client:
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert error_of(client.post("/tokenize", json=body), 400)["param"] == "messages"


@pytest.mark.parametrize("made", [0, 3])
def test_echo_scores_the_prompt_as_one_forward_does(client, llm, made):
    """Legacy scoring: the prompt's own log-probabilities stand before those of the answer; the first has none."""
    ids = llm.tokenizer.encode(TEXT)
    got = complete(client, prompt=TEXT, echo=True, logprobs=2, max_tokens=made)
    (choice,), usage = got["choices"], got["usage"]
    alone = small_llm(with_tokenizer=True, sequential=True)
    want = alone.generate([ids], SamplingParams(temperature=0, max_tokens=max(made, 1)))[0]
    answer = want.text if made else ""
    assert choice["text"] == TEXT + answer and choice["token_ids"] == ids + want.token_ids[:made]
    assert choice["finish_reason"] == "length" and usage["completion_tokens"] == made and usage["prompt_tokens"] == len(ids)
    with torch.inference_mode():
        rows = llm.model(torch.tensor([choice["token_ids"]])).log_softmax(-1)[0]
    scores = choice["logprobs"]
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    wanted = [rows[i, t].item() for i, t in enumerate(choice["token_ids"][1:])]
    assert scores["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-9)
    tops = [sorted(rows[i].topk(2).values.tolist()) for i in range(len(wanted))]
    assert [sorted(t.values()) for t in scores["top_logprobs"][1:]] == [pytest.approx(t, abs=1e-9) for t in tops]
    assert len(scores["tokens"]) == len(scores["text_offset"]) == len(ids) + made


@pytest.mark.parametrize("body", [{"max_tokens": 4}, {"max_tokens": 0}, {"max_tokens": 4, "n": 2, "seed": 1, "temperature": 1.0}])
def test_a_stream_with_echo_says_what_the_whole_answer_says(client, body):
    body = {"prompt": TEXT, "echo": True, "logprobs": 1, **body}
    whole = complete(client, **body)["choices"]
    with client.stream("POST", "/v1/completions", json={"temperature": 0, **body, "stream": True}) as r:
        lines = [line.removeprefix("data: ") for line in r.iter_lines() if line.startswith("data: ")]
    for want in whole:
        mine = [c for line in lines[:-1] for c in json.loads(line)["choices"] if c["index"] == want["index"]]
        assert "".join(c["text"] for c in mine) == want["text"] and mine[0]["text"].startswith(TEXT)
        assert sum((c["token_ids"] for c in mine), []) == want["token_ids"]
        for key in ("tokens", "text_offset"):
            assert sum((c["logprobs"][key] for c in mine), []) == want["logprobs"][key]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [want["finish_reason"]]


def test_max_tokens_0_needs_echo(client):
    """API-1: a 200 with nothing in it is no answer."""
    assert error_of(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0}), 400)["param"] == "max_tokens"
    assert error_of(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0, "echo": False}), 400)
