"""/metrics: what Prometheus reads adds up with what the calls did."""

import pytest
from models import small_llm
from prometheus_client.parser import text_string_to_metric_families
from served import all_free, serving

from berrylm_ref.server.limits import Limits

PROMPT = list(range(130))


@pytest.fixture
def llm():
    return small_llm(with_tokenizer=True)


def read(client):
    """{sample name, for the calls (name, route, outcome): value}."""
    response = client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=")
    samples = [s for f in text_string_to_metric_families(response.text) for s in f.samples]
    return {(s.name, s.labels["route"], s.labels["outcome"]) if "route" in s.labels else s.name: s.value for s in samples}


def complete(client, **body):
    return client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, "max_tokens": 4, **body})


def test_tokens_times_and_outcomes_add_up(llm):
    with serving(llm, limits=Limits(generation_seconds=2, prompt_tokens=200)) as client:
        assert read(client)["berrylm_generated_tokens_total"] == 0
        complete(client)
        complete(client)  # 128 of its 130 tokens are cached
        complete(client, n=2, seed=1, temperature=1.0, max_tokens=3)
        complete(client, max_tokens=-1)
        complete(client, prompt=[1] * 201)
        client.get("/nowhere")
        client.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
        found = read(client)
        assert found["berrylm_prompt_tokens_total"] == 4 * 130 + 1
        assert found["berrylm_cached_tokens_total"] == 3 * 128
        assert found["berrylm_generated_tokens_total"] == 2 * 4 + 2 * 3 + 2
        assert found["berrylm_time_to_first_token_seconds_count"] == 5
        assert found["berrylm_time_per_output_token_seconds_count"] == 16 - 5
        assert 0 < found["berrylm_time_to_first_token_seconds_sum"] < 60
        assert found["berrylm_requests_total", "/v1/completions", "ok"] == 3
        assert found["berrylm_requests_total", "/v1/completions", "refused"] == 2
        assert found["berrylm_requests_total", "/generate", "ok"] == 1
        assert found["berrylm_requests_total", "other", "refused"] == 1
        assert found["berrylm_requests_total", "/metrics", "ok"] == 1


def test_a_client_that_leaves_and_an_answer_that_fails_are_told_apart(llm):
    with serving(llm, limits=Limits(generation_seconds=1)) as client:
        body = {"prompt": [1], "max_tokens": 3500, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert "generation_timeout" in list(response.iter_lines())[-2]
        complete(client, max_tokens=3500, ignore_eos=True)
        all_free(llm.engine)
        found = read(client)
        assert found["berrylm_requests_total", "/v1/completions", "left"] == 1
        assert found["berrylm_requests_total", "/v1/completions", "failed"] == 2


def test_gauges_show_the_engine_as_it_is(llm):
    pool = llm.engine.cache.pool
    with serving(llm) as client:
        body = {"prompt": PROMPT, "max_tokens": 3500, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            found = read(client)
            assert found["berrylm_running"] == 1 and found["berrylm_waiting"] == 0
            assert found["berrylm_free_slots"] == pool.slots.capacity - 1
            assert found["berrylm_free_pages"] <= pool.pages.capacity - 9
            assert found["berrylm_free_snapshots"] < pool.snapshots.capacity
        all_free(llm.engine)
        found = read(client)
        assert found["berrylm_running"] == 0 and found["berrylm_free_slots"] == pool.slots.capacity


def test_two_apps_in_a_process_count_for_themselves(llm):
    """A registry of the library's own would refuse the second app, or add the two up."""
    with serving(llm) as one, serving(small_llm(with_tokenizer=True)) as two:
        complete(one)
        assert read(one)["berrylm_generated_tokens_total"] == 4 and read(two)["berrylm_generated_tokens_total"] == 0
