"""The evaluation: right answers count, wrong ones don't, and it asks the same questions every time."""

import json
import time
from random import Random

import pytest
from served import free_port, saying, serving
from typer.testing import CliRunner

from berrylm_ref import LLM, BerryLM
from berrylm_ref.cli import app
from berrylm_ref.training.ask import Reply, ServedClient, read_reply
from berrylm_ref.training.batches import load_texts
from berrylm_ref.training.checkpoint import save_checkpoint
from berrylm_ref.training.data import conversation
from berrylm_ref.training.evaluate import count, evaluate, evaluate_served, score, weights_hash
from berrylm_ref.training.initial import initialise
from berrylm_ref.training.recipe import MICRO, SHIPPED
from berrylm_ref.training.tasks import CAP, TASKS, last_number, no_call, same_calls, same_number, same_text

NAMES = [task.name for task in TASKS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """An untrained micro model with the shipped tokenizer and template."""
    folder = tmp_path_factory.mktemp("untrained")
    tokenizer, _ = load_texts(SHIPPED)
    model = BerryLM(MICRO.config(tokenizer.fast.token_to_id("<|end|>")), backend="torch")
    initialise(model, seed=0)
    save_checkpoint(model, folder, SHIPPED)
    return folder


def true_reply(task, i, template):
    """The reply of a perfect model: the answer of the sample itself, rendered after the prompt and read by the parsers."""
    item = task.items(i + 1 if task.share == 1 else round((i + 1) / task.share))[i]
    sample = conversation(task.kind, Random(f"evaluation/{task.kind}/{task.split}/{i}"), task.split)
    question = item.question
    prompt = template.render(question.messages, question.tools, enable_thinking=question.thinking)
    answer = dict(sample.messages[len(question.messages)])
    if not question.thinking:
        answer.pop("reasoning_content", None)
    whole = template.render([*question.messages, answer], question.tools, add_generation_prompt=False)
    assert whole.startswith(prompt), "the answer does not continue the prompt"
    text = whole[len(prompt) :].removesuffix("<|end|>")
    return item, read_reply(question, text, 1, "stop"), text


@pytest.mark.parametrize("name", NAMES)
def test_the_true_answer_counts_and_a_changed_one_does_not(name):
    """Scoring goes through template and parsers: a right answer that they bend would look like a weak model."""
    task = next(task for task in TASKS if task.name == name)
    _, template = load_texts(SHIPPED)
    for i in range(6):
        item, reply, text = true_reply(task, i, template)
        assert task.right(item.expected, reply), (text, item.expected)
        assert not task.right(
            item.expected, read_reply(item.question, "</think>7 pears" if item.question.thinking else "", 1, "stop")
        ) or (task.right is no_call)
    items = task.items(20)
    assert len({str(item.question.messages) for item in items}) > 0.7 * len(items)  # few wordings meet by chance


def test_the_questions_are_the_same_every_time_and_thinking_off_gets_the_same_problems():
    on, off = (next(t for t in TASKS if t.name == name) for name in ("problems", "problems, thinking off"))
    assert on.items(10) == on.items(10) and on.items(10) == on.items(30)[:10]
    assert [i.question.messages for i in on.items(10)] == [i.question.messages for i in off.items(10)]
    assert {i.question.thinking for i in on.items(10)} == {True} and {i.question.thinking for i in off.items(10)} == {False}
    assert all(1 <= i.steps <= 4 for i in on.items(30))


def test_answers_that_look_right_and_are_not():
    """A cut-off reply, a call instead of a number, another argument, one call too many."""
    assert last_number("3 + 4 is 7.") == 7 and last_number("none") is None
    assert same_number("The answer is 12.", Reply("", "So it is 12 then.")) and not same_number(
        "The answer is 12.", Reply("", "112")
    )
    assert not same_number("The answer is 12.", Reply("", "12", [("calculator", {})]))
    assert not same_text("The day of Ella is Monday.", Reply("", "The day of Ella is Tuesday."))
    calls = [("get_weather", {"city": "Rome"})]
    assert same_calls(calls, Reply("", "", list(calls)))
    for wrong in ([], calls * 2, [("get_weather", {"city": "Roma"})], [("get_time", {"city": "Rome"})], [("get_weather", {})]):
        assert not same_calls(calls, Reply("", "", wrong))
    task = TASKS[0]
    item = task.items(1)[0]
    right = Reply("", item.expected, tokens=9, finish_reason="stop")
    cut = Reply("", item.expected, tokens=CAP, finish_reason="length")
    unfinished = Reply("", item.expected, tokens=3)
    out = score(task, [(item, right), (item, cut), (item, unfinished)])
    assert (out["asked"], out["answered"], out["accuracy"], out["at_cap"]) == (3, 2, 0.5, 0.5)
    assert out["by_steps"] == {str(item.steps): {"asked": 2, "accuracy": 0.5}} and len(out["mistakes"]) == 1


def test_an_untrained_model_is_evaluated_and_scores_nothing(checkpoint, tmp_path):
    """The command on a model that knows nothing: every reply is wrong or runs into the cap, and the JSON says where it ran."""
    out = tmp_path / "eval.json"
    arguments = ["--problems", "1", "--tasks", "problems; retrieval 256", "--out", str(out)]
    result = CliRunner().invoke(app, ["eval", "--in-process", "--model", str(checkpoint), *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert list(report["tasks"]) == ["problems", "retrieval 256"] and report["settings"]["backend"] == "torch"
    for row in report["tasks"].values():
        assert row["answered"] == 1 and row["accuracy"] == 0.0 and 0 < row["tokens"] <= CAP
    assert report["machine"]["versions"]["torch"] and report["speed"]["single_stream_tokens_per_s"] > 0
    assert "problems" in result.output and "tokens/s" in result.output


def test_what_has_no_answer_in_time_is_counted_not_scored(checkpoint):
    report = evaluate(checkpoint, problems=2, only=["tool call"], deadline=time.monotonic())
    row = report["tasks"]["tool call"]
    assert (row["asked"], row["answered"], row["accuracy"], row["at_cap"]) == (2, 0, None, None)


def test_an_unknown_task_is_refused_with_the_names(checkpoint):
    with pytest.raises(ValueError, match="expected some of .*retrieval 4k.* got .*poetry"):
        evaluate(checkpoint, only=["poetry"])


@pytest.fixture(scope="module")
def shipped_server():
    with serving(LLM(SHIPPED, max_total_tokens=8192), api_key="secret") as client:
        yield str(client.base_url)


def test_a_server_gives_the_answers_of_the_engine_in_process(shipped_server):
    """Both go by the same template and parsers: a client that reads another field, or drops a call, scores another model."""
    only = ["problems", "tool call", "tools listed, none fits", "problems, thinking off"]
    seen = []
    there = evaluate_served(shipped_server, api_key="secret", problems=3, batch=4, only=only, progress=seen.append)
    here = evaluate(SHIPPED, problems=3, only=only)
    assert there["tasks"] == here["tasks"]
    assert there["tasks"]["problems"]["accuracy"] == 1.0 == there["tasks"]["tool call"]["accuracy"]
    assert seen == list(range(1, count(only, 3) + 1)) and there["speed"]["single_stream_tokens_per_s"] > 0
    assert there["settings"]["model"] == "tiny" and here["settings"]["weights_sha256"] == weights_hash(SHIPPED)


def test_a_call_over_http_is_read_whole(shipped_server):
    """finish_reason "tool_calls" is an end by itself; reasoning and arguments arrive as the in-process parsers give them."""
    question = next(t for t in TASKS if t.name == "tool calls, several").items(2)[0].question
    (reply,) = ServedClient(shipped_server, "secret").ask([question])
    assert reply.finish_reason == "stop" and len(reply.calls) >= 2 and reply.tokens > 20
    assert all(isinstance(arguments, dict) and arguments for _, arguments in reply.calls)


def test_what_the_server_refuses_ends_the_evaluation_with_its_words(shipped_server):
    with pytest.raises(ValueError, match="expected status 200, got 401"):
        evaluate_served(shipped_server, problems=1)
    too_long = next(t for t in TASKS if t.name == "problems").items(1)[0].question
    with pytest.raises(ValueError, match="got 400.*max_tokens"):
        ServedClient(shipped_server, "secret").ask([type(too_long)(too_long.messages, None, True, 0)] * 3)


@pytest.mark.slow
def test_the_command_starts_a_server_and_compares(checkpoint, tmp_path, monkeypatch):
    """As the README says it: one command for everything, the clamped scores included; the key in the environment fits both."""
    monkeypatch.setenv("BERRYLM_API_KEY", "secret")
    out = tmp_path / "eval.json"
    arguments = ["--problems", "1", "--tasks", "retrieval 256", "--compare", "clamped", "--batch", "2", "--out", str(out)]
    result = CliRunner().invoke(app, ["eval", "--model", str(checkpoint), *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert list(report["tasks"]) == ["retrieval 256"] and list(report["compared"]["tasks"]) == ["problems"]
    settings, other = report["settings"], report["compared"]["settings"]
    assert (settings["how"], settings["kda_intra"], other["kda_intra"]) == ("launched", "dyadic", "clamped")
    assert settings["model"] == checkpoint.name and settings["weights_sha256"] == weights_hash(checkpoint)


def test_a_server_of_others_is_taken_as_it_is():
    for option in (["--in-process"], ["--compare", "clamped"], ["--kda-intra", "clamped"]):
        done = CliRunner().invoke(app, ["eval", "--url", "http://127.0.0.1:1", *option])
        assert done.exit_code == 2 and "expected no --in-process" in done.stderr
    done = CliRunner().invoke(app, ["eval", "--url", f"http://127.0.0.1:{free_port()}"])
    assert done.exit_code == 2 and "expected a server at" in done.stderr


@pytest.mark.parametrize("listed", ["[1, 2]", "null", "{}", '{"data": []}'])
def test_a_server_that_lists_no_model_ends_the_evaluation_in_one_line(listed):
    body = listed.encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with saying(head.encode() + body) as url:
        done = CliRunner().invoke(app, ["eval", "--url", url])
    assert done.exit_code == 2 and "/v1/models: expected an answer of this protocol's form, got" in done.stderr
