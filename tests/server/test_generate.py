"""/generate, what a parity harness asks: token ids in, ids and log-probabilities out, in SGLang's form."""

import json

import pytest
import torch
from models import small_llm
from served import error_of, serving

from berrylm_ref import SamplingParams

PROMPT = [i * 7 % 250 for i in range(200)]


@pytest.fixture(scope="module")
def llm():
    return small_llm(with_tokenizer=True)


@pytest.fixture(scope="module")
def client(llm):
    with serving(llm) as client:
        yield client


def post(client, **body):
    sampling = {"temperature": 0, "max_new_tokens": 4, **body.pop("sampling_params", {})}
    return client.post("/generate", json={"sampling_params": sampling, **body})


def generate(client, **body):
    response = post(client, **body)
    assert response.status_code == 200, response.text
    return response.json()


def logprobs_of_model(llm, ids):
    """Row i: the log-probabilities of what comes at position i + 1, by one forward of the whole model."""
    with torch.inference_mode():
        return llm.model(torch.tensor([ids])).log_softmax(-1)[0]


def test_the_answer_is_what_the_library_generates(client):
    alone = small_llm(with_tokenizer=True, sequential=True)
    want = alone.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))[0]
    got = generate(client, input_ids=[1, 2, 3])
    assert got["text"] == want.text and got["output_ids"] == want.token_ids
    meta = got["meta_info"]
    assert meta.pop("id") and meta == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "finish_reason": {"type": "length", "length": 4},
    }
    assert generate(client, text="\x01\x02\x03")["meta_info"]["prompt_tokens"] == 3


@pytest.mark.parametrize("start", [0, 1, 64, 65, 130, 199, 200])
def test_prompt_scores_from_any_start_are_those_of_one_forward(client, llm, start):
    """Scores must not depend on how much of the prompt was reused; position 0 has none, and nothing before start is sent."""
    for known in (PROMPT, PROMPT[: start or 1]):  # now the cache has states before, around and after the start
        generate(client, input_ids=known)
    got = generate(client, input_ids=PROMPT, return_logprob=True, logprob_start_len=start, top_logprobs_num=2)
    meta = got["meta_info"]
    assert meta["cached_tokens"] == max(0, start - 1) // 64 * 64, "the prefix before start is reused, not more"
    rows = logprobs_of_model(llm, PROMPT + got["output_ids"])
    scored = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    top = meta["input_top_logprobs"] + meta["output_top_logprobs"]
    assert len(scored) == len(top) == 200 - start + 4
    for position, (entry, others) in enumerate(zip(scored, top, strict=True), start):
        logprob, token, nothing = entry
        assert token == (PROMPT + got["output_ids"])[position] and nothing is None
        if position == 0:
            assert logprob is None and others is None
            continue
        assert logprob == pytest.approx(rows[position - 1, token].item(), abs=1e-9)
        values, ids = rows[position - 1].topk(2)
        assert [x[1] for x in others] == ids.tolist()
        assert [x[0] for x in others] == pytest.approx(values.tolist(), abs=1e-9)


def test_without_a_start_only_the_output_is_scored_and_the_cache_helps(client):
    first = generate(client, input_ids=PROMPT, return_logprob=True)["meta_info"]
    again = generate(client, input_ids=PROMPT, return_logprob=True, logprob_start_len=-1)["meta_info"]
    assert again["cached_tokens"] == 192 and "output_top_logprobs" not in again
    assert first["input_token_logprobs"] == again["input_token_logprobs"] == []
    scores = [[x[0] for x in meta["output_token_logprobs"]] for meta in (first, again)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-9) and len(scores[0]) == 4
    assert "output_token_logprobs" not in generate(client, input_ids=PROMPT)["meta_info"]


def test_a_prompt_is_scored_without_an_answer(client, llm):
    body = {"input_ids": PROMPT[:70], "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    got = generate(client, **body)
    assert got["output_ids"] == got["meta_info"]["output_token_logprobs"] == [] and got["text"] == ""
    assert got["meta_info"]["finish_reason"] == {"type": "length", "length": 0} and got["meta_info"]["completion_tokens"] == 0
    rows = logprobs_of_model(llm, PROMPT[:70])
    want = [rows[i, PROMPT[i + 1]].item() for i in range(69)]
    assert [x[0] for x in got["meta_info"]["input_token_logprobs"][1:]] == pytest.approx(want, abs=1e-9)


def test_lists_and_choices_come_back_as_lists(client):
    """One prompt in a list is a list of one: a harness that sends batches must not meet a bare object now and then."""
    one = generate(client, input_ids=[1, 2, 3])
    several = generate(client, input_ids=[[1, 2, 3], PROMPT, [1, 2, 3]])
    assert len(several) == 3 and several[0]["output_ids"] == several[2]["output_ids"] == one["output_ids"]
    assert isinstance(generate(client, input_ids=[[1, 2, 3]]), list) and isinstance(generate(client, text=["a"]), list)
    seeded = {"temperature": 1.0, "n": 3, "seed": 7, "max_new_tokens": 8}
    choices = generate(client, input_ids=[1, 2, 3], sampling_params=seeded)
    again = generate(client, input_ids=[1, 2, 3], sampling_params={**seeded, "seed": None, "sampling_seed": 7})
    assert [c["output_ids"] for c in choices] == [c["output_ids"] for c in again]
    assert len({tuple(c["output_ids"]) for c in choices}) == 3 == len({c["meta_info"]["id"] for c in choices})


def test_a_stop_says_what_it_matched(client):
    ids = generate(client, input_ids=PROMPT, sampling_params={"max_new_tokens": 12, "ignore_eos": True})
    token = next(i for i in ids["output_ids"] if ids["output_ids"].index(i) > 2)
    stopped = generate(client, input_ids=PROMPT, sampling_params={"max_new_tokens": 12, "stop_token_ids": [token]})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    letter = next(c for c in ids["text"] if c.isascii())
    stopped = generate(client, input_ids=PROMPT, sampling_params={"max_new_tokens": 12, "stop": ["never there", letter]})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": letter}
    assert stopped["text"] == ids["text"].partition(letter)[0]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_grows_to_the_whole_answer(client, n):
    body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 100, "top_logprobs_num": 1}
    body["sampling_params"] = {"temperature": 1.0, "seed": 3, "n": n, "max_new_tokens": 6, "ignore_eos": True}
    whole = generate(client, **body)
    with client.stream("POST", "/generate", json={**body, "stream": True}) as r:
        lines = [line.removeprefix("data: ") for line in r.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert len(chunks) == 6 * n
    for i, want in enumerate(whole if n > 1 else [whole]):
        mine = [c for c in chunks if c.get("index", 0) == i]
        for before, after in zip(mine, mine[1:], strict=False):
            assert after["text"].startswith(before["text"]) and after["output_ids"][:-1] == before["output_ids"]
            assert before["meta_info"]["finish_reason"] is None and "output_token_logprobs" not in before["meta_info"]
        last = mine[-1]
        assert last["meta_info"].pop("id") != want["meta_info"].pop("id")
        scores = [m["meta_info"].pop(k) for m in (last, want) for k in ("input_token_logprobs", "output_token_logprobs")]
        assert [x[1] for x in scores[0] + scores[1]] == [x[1] for x in scores[2] + scores[3]]
        assert last["text"] == want["text"] and last["output_ids"] == want["output_ids"]
        assert last["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]


@pytest.mark.parametrize(
    "body,param",
    [
        ({}, "input_ids"), ({"text": "a", "input_ids": [1]}, "input_ids"), ({"input_ids": []}, "input_ids"),
        ({"text": ""}, "text"), ({"text": []}, "text"), ({"input_ids": [[]]}, "input_ids"), ({"input_ids": [300]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"), ({"input_ids": "1"}, "input_ids"),
        ({"input_ids": [1], "image_data": "x"}, "image_data"), ({"input_ids": [1], "return_logprob": [True]}, "return_logprob"),
        ({"input_ids": [1], "logprob_start_len": 0}, "return_logprob"),
        ({"input_ids": [1], "top_logprobs_num": 2}, "return_logprob"),
        ({"input_ids": [1], "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"input_ids": [1], "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": "4"}}, "sampling_params.max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"seed": 1, "sampling_seed": 1}}, "sampling_params.sampling_seed"),
    ],
)  # fmt: skip
def test_a_bad_field_is_a_400_that_names_it(client, body, param):
    """API-1: an unsupported field is refused by name, nested ones with their place."""
    error = error_of(post(client, **body), 400)
    assert error["param"] == param and (param in error["message"] or param == "input_ids")


def test_an_empty_list_of_prompts_is_not_answered_with_nothing(client, llm):
    error_of(post(client, text=[]), 400)
    error = error_of(post(client, input_ids=[1] * llm.config.max_position_embeddings), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "input_ids"
