"""`berrylm chat`: what is read, shown, kept and given up, with a real engine here and a real server elsewhere."""

import io
import json
import re

import pytest
from chat_models import Scripted, chat_checkpoint
from models import checkpoint
from rich.console import Console
from served import all_free, free_port, saying, serving, whole
from toolcalls import call, value
from typer.testing import CliRunner

from berrylm_ref.chat.session import Conversation, LocalModel, RemoteModel
from berrylm_ref.cli import app
from berrylm_ref.commands.chat import CALCULATOR, calculate, converse, harmless

SUM = call(value("expression", "17*3"), name="calculator")


@pytest.fixture(scope="module")
def scripted():
    with Scripted() as model:
        yield model


@pytest.fixture(scope="module", params=["here", "server"])
def speaker(request, scripted):
    if request.param == "here":
        yield LocalModel(scripted.llm)
        return
    with serving(scripted.llm, api_key="secret") as client:
        yield RemoteModel(str(client.base_url), "secret")


def talk(speaker, lines, monkeypatch, console=None, **options):
    """The conversation after ``lines`` came through a pipe, and what stood on the screen."""
    screen = console or Console(file=io.StringIO(), force_terminal=True, width=200, highlight=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    conversation = Conversation(speaker, **options)
    converse(conversation, screen)
    return conversation, screen.file.getvalue()


def test_thinking_is_dimmed_and_turn_two_is_cached(speaker, scripted, monkeypatch):
    """The reasoning goes back with the messages, so the second prompt begins with all of the first turn."""
    scripted.says = "it is a greeting, and a friendly one as far as I can see</think>Good day to you, and many more of them!"
    hi = f"hi from {type(speaker).__name__}"  # the other parameter's turns are in the cache
    conversation, screen = talk(speaker, [hi, "again"], monkeypatch)
    assert "\x1b[2mi\x1b[0m\x1b[2mt" in screen and "\x1b[2mG" not in screen and "G" in screen
    reasoning, content = scripted.says.split("</think>")
    turn = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    assert conversation.messages == [{"role": "user", "content": hi}, turn, {"role": "user", "content": "again"}, turn]
    (prompt, _, made), (_, cached, _) = re.findall(r"stop; (\d+) tokens in, (\d+) of them cached, (\d+) out", screen)
    assert int(made) == len(scripted.tokens(scripted.says))
    assert int(cached) == (int(prompt) + int(made) - 1) // 64 * 64 > 0


def test_reset_think_and_what_is_no_command(speaker, scripted, monkeypatch):
    scripted.says = lambda prompt: "Hello" if prompt.endswith("</think>") else "so</think>Hello"
    conversation, screen = talk(speaker, ["hi", "/reset", "", "/think off", "/what", "ho"], monkeypatch)
    assert [m["content"] for m in conversation.messages] == ["ho", "Hello"]
    assert conversation.messages[1]["reasoning_content"] is None and not conversation.thinking
    assert "a new conversation" in screen and "reasoning off" in screen and "/reset forgets" in screen


def test_calls_are_shown_run_and_answered(speaker, scripted, monkeypatch):
    scripted.says = lambda prompt: '</think>It is 51.' if '{"result": 51}' in prompt else "ask</think>" + SUM
    conversation, screen = talk(speaker, ["What is 17*3?"], monkeypatch, tools=[CALCULATOR])
    assert 'calculator({"expression": "17*3"})' in screen and '= {"result": 51}' in screen
    roles = [m["role"] for m in conversation.messages]
    assert roles == ["user", "assistant", "tool", "assistant"] and conversation.messages[-1]["content"] == "It is 51."


def chunk(delta, reason=None, **more):
    """A server's line of a stream."""
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **more}) + "\n\n"


def calling(function, index=0):
    return chunk({"tool_calls": [{"index": index, "id": "a", "function": function}]})


def ended(reason):
    return chunk({}, reason, usage={"prompt_tokens": 1, "completion_tokens": 1})


MODELS = whole('{"data": [{"id": "m"}]}')


def test_a_call_that_the_limit_cut_off_is_not_run(monkeypatch):
    """API-3: its arguments are whole JSON, but they may be half of what was meant. (`finish_reason` is "length".)"""
    call = calling({"name": "calculator", "arguments": '{"expression": "17*3"}'})
    for reason, results in (("length", 0), ("tool_calls", 1)):
        with saying(MODELS, whole(call + ended(reason)), whole(ended("stop"))) as url:
            conversation, screen = talk(RemoteModel(url), ["What is 17*3?"], monkeypatch, tools=[CALCULATOR])
        assert [m["role"] for m in conversation.messages].count("tool") == results == screen.count('= {"result": 51}')


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-x\r\n", whole("data: {\n\n"), whole('data: {"id": 1}\n\n'), whole(chunk(None)), whole(calling(None)),
        whole(calling({"name": "calculator"}, index=3)), whole(calling({"arguments": "{}"})),
    ],
)  # fmt: skip
def test_a_server_that_speaks_something_else_ends_the_turn_and_not_the_chat(said, monkeypatch):
    with saying(MODELS, said, whole(chunk({"content": "fine"}) + ended("stop"))) as url:
        conversation, screen = talk(RemoteModel(url), ["hi", "hi again"], monkeypatch)
    assert "error: " in screen and [m["content"] for m in conversation.messages] == ["hi again", "fine"]
    with saying(said) as url, pytest.raises(ValueError):
        RemoteModel(url)


class Interrupted(Console):
    """Ctrl-C when some of an answer has been printed."""

    def print(self, *objects, **options):
        super().print(*objects, **options)
        if objects and objects[0] == "5":
            raise KeyboardInterrupt


def test_ctrl_c_stops_the_answer_and_forgets_the_turn(speaker, scripted, monkeypatch):
    """The engine runs nothing on for nobody, and the conversation goes on from before."""
    scripted.says = lambda prompt: "a</think>" + ("0123456789" * 20 if "count" in prompt else "fine")
    console = Interrupted(file=io.StringIO(), width=200, highlight=False)
    conversation, screen = talk(speaker, ["hi", "count", "hi again"], monkeypatch, console=console)
    assert [m["content"] for m in conversation.messages] == ["hi", "fine", "hi again", "fine"]
    assert "012345\nstopped; this turn is forgotten" in screen and "6789" not in screen
    all_free(scripted.llm.engine)


def test_an_error_ends_the_turn_and_not_the_chat(speaker, scripted, monkeypatch):
    """A prompt that does not fit is said; the next line is answered."""
    scripted.says = "a</think>fine"
    conversation, screen = talk(speaker, ["x" * 20_000, "hi"], monkeypatch)
    assert "error: " in screen and "expected at most 16383 tokens" in screen.replace("\n", " ")
    assert [m["content"] for m in conversation.messages] == ["hi", "fine"]


def test_the_command_reads_a_pipe(scripted):
    """From the shell: the same, with the model loaded by the command; the end of the input ends it."""
    scripted.says = "hm</think>Hello there"
    done = CliRunner().invoke(app, ["chat", "--model", str(chat_checkpoint()), "--no-think", "--dtype", "float64"], input="hi\n")
    assert done.exit_code == 0 and "Hello there" in done.stdout and "0 of them cached" in done.stdout


def test_what_it_cant_talk_to_is_one_line_and_status_2(scripted):
    def refusal(*args):
        done = CliRunner().invoke(app, ["chat", *map(str, args)])
        assert done.exit_code == 2
        return done.stderr

    assert "expected a folder with tokenizer.json and chat_template.jinja" in refusal("--model", checkpoint())
    assert "expected --url or --model, got both" in refusal("--model", checkpoint(), "--url", "http://127.0.0.1:1")
    assert "Connection refused" in refusal("--url", f"http://127.0.0.1:{free_port()}")
    with serving(scripted.llm, api_key="secret") as client:
        assert "401" in refusal("--url", client.base_url, "--api-key", "guess")


@pytest.mark.parametrize(
    ("expression", "result"),
    [("17*3", 51), (" 7 / 2", 3), ("-4 - -6", 2), ("10**9", None), ("1/0", None), ("__import__('os')", None), (5, None)],
)
def test_the_calculator_is_no_interpreter(expression, result):
    found = json.loads(calculate({"name": "calculator", "arguments": json.dumps({"expression": expression})}))
    assert found.get("result") == result and ("error" in found) == (result is None)
    assert "error" in json.loads(calculate({"name": "calculator", "arguments": "[1]"})), "another server's model may write that"


def test_escape_sequences_are_not_obeyed():
    assert harmless("a\x1b]0;title\x07 漢🫐\n\tb") == "a\ufffd]0;title\ufffd 漢🫐\n\tb"
