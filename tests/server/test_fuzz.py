"""Calls made up from the app's own OpenAPI schema: whatever comes, it is an answer or a 4xx, and the next call is answered."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from models import checkpoint
from served import all_free, serving

from berrylm_ref import LLM
from berrylm_ref.server.app import create_app

# Values beside the schema's: the edges of types, of ranges and of JSON itself.
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.sampled_from([0, -1, 1, 2, 1e308, -1e-308, 0.5, 10**400]),
    st.text(max_size=5), st.just("\ud800"), st.lists(st.integers(-1, 300), max_size=4), st.just([]), st.just({}), st.just([[]]),
    st.just("<user>"), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
# Where the schema says only "integer" or "string", most calls should get past the first check.
LIKELY = {
    "max_tokens": st.integers(1, 8), "max_new_tokens": st.integers(1, 8), "max_completion_tokens": st.integers(1, 8),
    "n": st.integers(1, 3), "prompt": st.text(max_size=20) | st.lists(st.integers(0, 299), min_size=1, max_size=80),
    "input_ids": st.lists(st.integers(0, 299), min_size=1, max_size=80), "logprobs": st.integers(0, 20) | st.booleans(),
    "temperature": st.floats(0, 2), "top_p": st.floats(0.01, 1), "min_p": st.floats(0, 1), "top_k": st.integers(-1, 50),
    "model": st.just("tiny"), "tokens": st.lists(st.integers(0, 263), max_size=20), "logprob_start_len": st.integers(-1, 20),
    "top_logprobs_num": st.integers(0, 20), "stop": st.text(min_size=1, max_size=2), "seed": st.integers(0, 2**63),
    "role": st.sampled_from(["user", "system", "assistant", "tool"]),
    "messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text()}), min_size=1, max_size=3),
}  # fmt: skip
NEEDED = ("input_ids", "max_tokens", "sampling_params", "max_new_tokens")  # of short answers


@cache
def model():
    """With a chat template, so that the chat route has something to do."""
    folder = Path(mkdtemp(prefix="berrylm-fuzz-")) / "model"
    shutil.copytree(checkpoint(True), folder)
    template = "{% for m in messages %}<user>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return LLM(folder, max_total_tokens=256, snapshot_bytes=2**22)  # an answer without a limit is short too


@cache
def schema():
    return create_app(model(), "tiny").openapi()


def values(spec, name, wild, depth=0):
    """What ``spec`` allows; ``wild``: now and then something else."""
    if "$ref" in spec:
        spec = schema()["components"]["schemas"][spec["$ref"].rpartition("/")[2]]
    if depth > 4:
        return ODD
    options = spec.get("anyOf") or spec.get("oneOf")
    kind = spec.get("type")
    if name in LIKELY and kind != "object":
        fitting = LIKELY[name]
    elif options:
        fitting = st.one_of([values(option, name, wild, depth + 1) for option in options])
    elif "enum" in spec or "const" in spec:
        fitting = st.sampled_from(spec.get("enum", [spec.get("const")]))
    elif kind == "object" and "properties" in spec:
        fitting = objects(spec, wild, depth)
    elif kind == "array":
        fitting = st.lists(values(spec.get("items", {}), name, wild, depth + 1), max_size=3)
    else:
        numbers = {"integer": st.integers(-1 if wild else 1, 20), "number": st.floats(-1 if wild else 0.1, 3 if wild else 1)}
        fitting = {"string": st.text(max_size=8), "boolean": st.booleans(), **numbers}.get(kind, ODD)
    return st.integers(0, 9).flatmap(lambda i: ODD if i == 7 else fitting) if wild else fitting


def objects(spec, wild, depth=0):
    """A few of the fields, the required ones nearly always, rarely one that doesn't exist."""
    fields = {name: values(field, name, wild, depth + 1) for name, field in spec["properties"].items()}
    needed = [name for name in fields if name in spec.get("required", ()) or name in NEEDED]
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    extra = st.integers(0, 20).map(lambda i: {"no_such_field": 1} if wild and i == 7 else {})
    picked = chosen.flatmap(lambda names: st.fixed_dictionaries({n: fields[n] for n in {*names, *needed}}))
    return st.tuples(picked, extra).map(lambda parts: parts[0] | parts[1])


@cache
def calls():
    """(method, path, content): every operation of the schema, bodies as above, some of them damaged."""
    found = []
    for path, operations in schema()["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody")
            if body is None:
                found.append(st.tuples(st.just(method), st.just(path), st.binary(max_size=10)))
                continue
            spec = body["content"]["application/json"]["schema"]
            sent = st.one_of(values(spec, "body", wild) for wild in (False, True)).map(lambda value: json.dumps(value).encode())
            damaged = st.tuples(sent, st.integers(0, 60), st.binary(max_size=3)).map(lambda p: p[0][: p[1]] + p[2] + p[0][p[1] :])
            content = st.integers(0, 20).flatmap(lambda i, a=damaged, b=sent: a if i == 7 else b)
            found += [st.tuples(st.just(method), st.just(path), content)] * 4
    return st.one_of(found)


@pytest.mark.slow
def test_2000_calls_bring_no_5xx_and_a_good_one_is_answered_afterwards():
    """API-1 in bulk. Every refusal is OpenAI's error object; a stream that began ends with [DONE]."""
    llm, statuses = model(), {}
    with serving(llm) as client:
        good = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
        want = client.post("/v1/completions", json=good).json()["choices"]

        @settings(max_examples=2000, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        @given(calls())
        def run(call):
            method, path, content = call
            response = client.request(method, path, content=content, headers={"content-type": "application/json"})
            key = path, response.status_code // 100
            statuses[key] = statuses.get(key, 0) + 1
            assert response.status_code < 500, (path, content, response.text)
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}, (path, content)
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert response.text.rstrip().endswith("data: [DONE]"), (path, content, response.text)

        run()
        print(dict(sorted(statuses.items())))
        assert sum(statuses.values()) >= 2000
        for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"):
            assert statuses.get((path, 2)) and statuses.get((path, 4)), f"{path}: only one kind of answer: {statuses}"
        assert client.post("/v1/completions", json=good).json()["choices"] == want
        all_free(llm.engine)
