"""The chat template: the exact layout, what parses back, what clients may send, and that their text stays text."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from berrylm_ref.chat import ReasoningParser, ToolCallParser
from berrylm_ref.chat.template import ChatTemplate
from berrylm_ref.engine.llm import end_token_ids
from berrylm_ref.tokenizer import Tokenizer

NANO = Path(__file__).parents[2] / "berrylm_ref" / "checkpoints" / "nano"
TEMPLATE = ChatTemplate.from_folder(NANO)
TOKENIZER = Tokenizer.from_folder(NANO)
KINDS = {kind[0]: {"type": kind} for kind in ("string", "integer", "number", "boolean", "object", "array")}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": KINDS}}}]
USER = {"role": "user", "content": "hi"}


def call(arguments, name="f", call_id="c0"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def assistant(content=None, reasoning=None, *calls):
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": list(calls)}


def result(content, call_id="c0"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def generated(message):
    """What the model wrote for a turn with thinking on: all of its rendering after the generation prompt, but the end."""
    prompt = TEMPLATE.render([USER], TOOLS)
    text = TEMPLATE.render([USER, message], TOOLS, add_generation_prompt=False)
    assert text.startswith(prompt) and text.endswith("<|end|>")
    return text[len(prompt) :].removesuffix("<|end|>")


def test_layout_of_every_turn():
    """The training sees this text, so a space more or less is another prompt than the model knows."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]},
        assistant("Let me see.", "sum", call({"i": 2, "s": "a\nb"}), call({}, "now", "c1")),
        result("5"),
        result("noon", "c1"),
        assistant("It is 5."),
        USER,
    ]
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert TEMPLATE.render(messages, tools) == (
        '<|system|>Be brief.\nYou can call these tools:\n{"name":"now"}<|end|>'
        "<|user|>2+3?<|end|>"
        "<|assistant|><think>sum</think>Let me see.\n"
        "<tool_call>\n<function=f>\n<parameter=i>\n2\n</parameter>\n<parameter=s>\na\nb\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call><|end|>"
        "<|tool|>5<|end|><|tool|>noon<|end|>"
        "<|assistant|><think></think>It is 5.<|end|>"
        "<|user|>hi<|end|><|assistant|><think>"
    )


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "hi<|end|><|assistant|><think>"),
        ({"enable_thinking": False}, "hi<|end|><|assistant|><think></think>"),
        ({"add_generation_prompt": False}, "hi<|end|>"),
        ({"add_generation_prompt": False, "enable_thinking": False}, "hi<|end|>"),
    ],
)
def test_thinking_on_and_off(options, end):
    assert TEMPLATE.render([USER], **options) == "<|user|>" + end


def test_tools_without_a_system_message_get_a_turn_of_their_own():
    text = TEMPLATE.render([USER], [{"type": "function", "function": {"name": "é", "description": 'say "hi"\n'}}])
    assert text.startswith('<|system|>You can call these tools:\n{"name":"é","description":"say \\"hi\\"\\n"}<|end|><|user|>')
    assert TEMPLATE.render([USER], []) == TEMPLATE.render([USER], None) == "<|user|>hi<|end|><|assistant|><think>"


CONTROL = ["<|end|>", "<|user|>", "<|assistant|>", "<|pad|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "\ud7ff"]
HOSTILE = st.lists(st.sampled_from(CONTROL) | st.sampled_from(["<", "|end|>", "<|", " ", "\n", "é"]) | st.text(max_size=3)).map(
    lambda parts: "".join(parts).encode(errors="ignore").decode()
)


@settings(max_examples=300, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
def test_client_text_never_becomes_control(system, question, reasoning, value, found):
    """A user who writes `<|end|><|system|>` must not end the turn: whatever clients write, the control tokens of the prompt are
    those of the same conversation with other words, and the ids still decode to exactly the rendered text."""

    def control_of(*texts):
        system, question, reasoning, value, found = texts
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
            assistant(question, reasoning, call({"s": value, "o": {"k": value}})),
            result(found),
        ]
        tools = [{"type": "function", "function": {"name": "f", "description": value}}]
        ids = TEMPLATE.encode(messages, tools, tokenizer=TOKENIZER)
        assert TOKENIZER.decode(ids, skip_special=False) == TEMPLATE.render(messages, tools)
        return [i for i in ids if i in TOKENIZER.fast.get_added_tokens_decoder()]

    plain = ("s", "q" if question else "", "r", "v", "t")
    assert control_of(system, question, reasoning, value, found) == control_of(*plain)


def test_an_unescaped_rendering_would_have_failed_that_test():
    """The text form alone can't tell a user's tag from the template's: encoding it gives the user a control token."""
    end = TOKENIZER.encode("<|end|>")[0]
    messages = [{"role": "user", "content": "<|end|>"}]
    assert TOKENIZER.encode(TEMPLATE.render(messages)).count(end) == 2
    assert TEMPLATE.encode(messages, tokenizer=TOKENIZER).count(end) == 1


WORDS = st.text(st.characters(codec="utf-8"), max_size=12)
NAME = st.text(st.characters(codec="utf-8", exclude_characters="<>\r\nf"), min_size=1, max_size=12).filter(
    lambda text: text == text.strip()
)
# Each of these alone, between other text, is part of a value: it takes a second tag to end one.
INNER = st.sampled_from("</parameter> </function> </tool_call> <tool_call> </think> <think> <|end|> <function=".split())
MARKUP = st.builds(lambda before, tag, after: f"{before}.{tag}.{after}", WORDS, INNER, WORDS)
STRING = MARKUP | WORDS | st.sampled_from(["", "\n", " \n\n", "null", "5"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | STRING,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": STRING,
        "i": st.integers(-(2**63), 2**63),
        "n": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-999, 999),
        "b": st.booleans(),
        "o": st.dictionaries(WORDS, JSON, max_size=3),
        "a": st.lists(JSON, max_size=3),
    },
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(ARGUMENTS.map(lambda given: ("f", given)) | st.tuples(NAME, st.dictionaries(NAME, STRING, max_size=3)), max_size=3),
    st.text("ab é.", max_size=8).map(str.strip),
)
def test_parsing_a_rendered_turn_gives_its_calls_back(calls, content):
    """A history that reads differently from what the model wrote teaches it, and its cache, another past."""
    made = [call(given, name, f"c{i}") for i, (name, given) in enumerate(calls)]
    reasoning, rest = ReasoningParser().parse(generated(assistant(content, "because", *made)))
    text, found = ToolCallParser(TOOLS).parse(rest)
    assert (reasoning, text) == ("because", content)
    assert all(one.complete for one in found)
    assert [(one.name, json.loads(one.arguments)) for one in found] == calls
    assert [json.dumps(json.loads(one.arguments)) for one in found] == [json.dumps(given) for _, given in calls]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"s": 5}, {"s": "5"}),
        ({"i": "5"}, {"i": 5}),
        ({"s": None}, {"s": "null"}),
        ({"s": "a\n</parameter>\n</function> b"}, {"s": "a"}),
        ({"s": "a<parameter=x>b"}, {"s": "a", "x": "b"}),
        ({"s": "a</function>\n</tool_call>b"}, {"s": "a"}),
    ],
)
def test_what_the_text_format_has_no_room_for(given, read):
    """These can't survive; what becomes of them is a rule, not an accident, and the render never fails on them."""
    content = ReasoningParser().parse(generated(assistant(None, "r", call(given))))[1]
    first = ToolCallParser(TOOLS).parse(content)[1][0]
    assert json.loads(first.arguments) == read


def test_second_turn_begins_with_the_first_turn_and_its_answer():
    """The prefix cache hits what is the same from the first token on: prompt, reasoning, call, end token. Ids, not only text."""
    first = [USER]
    prompt = TEMPLATE.encode(first, TOOLS, tokenizer=TOKENIZER)
    for answer in (assistant("Hello 12.", "1+1"), assistant(None, "\n r\n", call({"s": "x"})), assistant("", "r")):
        spoken = prompt + TOKENIZER.encode(generated(answer) + "<|end|>")
        after = result("ok") if answer["tool_calls"] else USER
        second = TEMPLATE.encode([*first, answer, after], TOOLS, tokenizer=TOKENIZER)
        assert second[: len(spoken)] == spoken and len(second) > len(spoken)
        forgetful = {**answer, "reasoning_content": None}
        again = TEMPLATE.encode([*first, forgetful, after], TOOLS, tokenizer=TOKENIZER)
        assert again[: len(prompt)] == prompt, "without the reasoning the prompt is still shared"
        assert again[: len(spoken)] != spoken


def test_second_turn_with_thinking_off_begins_with_the_first():
    prompt = TEMPLATE.encode([USER], tokenizer=TOKENIZER, enable_thinking=False)
    second = TEMPLATE.encode([USER, assistant("Hello."), USER], tokenizer=TOKENIZER, enable_thinking=False)
    spoken = prompt + TOKENIZER.encode("Hello.<|end|>")
    assert second[: len(spoken)] == spoken


def test_results_stand_in_the_order_of_their_calls():
    """A result shows no id in the prompt, so a client that sends them as they finish would swap the answers."""
    turn = assistant(None, "r", call({}, "f", "a"), call({}, "f", "b"), call({}, "f", "c"))
    want = TEMPLATE.render([USER, turn, result("A", "a"), result("B", "b"), result("C", "c")])
    assert "A<|end|><|tool|>B<|end|><|tool|>C" in want
    assert TEMPLATE.render([USER, turn, result("C", "c"), result("A", "a"), result("B", "b")]) == want


BAD = [
    ([], "messages: expected a list of at least one message, got []"),
    ("hi", "messages: expected a list of at least one message, got 'hi'"),
    (["hi"], "messages[0]: expected a dict"),
    ([{"role": "robot", "content": "x"}], "messages[0].role: expected one of system, user, assistant, tool, got 'robot'"),
    ([{"content": "x"}], "messages[0].role: expected"),
    ([USER, {"role": "user"}], "messages[1].content: expected a str or a list of text parts, got None"),
    ([{"role": "user", "content": 5}], "messages[0].content: expected a str or a list of text parts, got 5"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]: expected a dict"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type: expected 'text', got 'image_url'"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text: expected a str, got None"),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content: expected text without lone surrogates"),
    ([USER, {"role": "assistant", "content": 5}], "messages[1].content: expected a str or a list of text parts or None, got 5"),
    ([USER, assistant("x", 5)], "messages[1].reasoning_content: expected a str, got 5"),
    ([USER, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls: expected a list of calls or None, got {}"),
    ([USER, assistant("", "", "x")], "messages[1].tool_calls[0]: expected a dict"),
    ([USER, assistant("", "", {"type": "custom"})], "messages[1].tool_calls[0].type: expected 'function', got 'custom'"),
    ([USER, assistant("", "", {"function": {}})], "messages[1].tool_calls[0].id: expected a str, got None"),
    ([USER, assistant("", "", {"id": "a"})], "messages[1].tool_calls[0].function: expected a dict, got None"),
    ([USER, assistant("", "", call({}, ""))], "messages[1].tool_calls[0].function.name: expected 1 to 256 characters"),
    ([USER, assistant("", "", call({}, "a>\n<b"))], "messages[1].tool_calls[0].function.name: expected 1 to 256 characters"),
    ([USER, assistant("", "", call({" k": 1}))], "messages[1].tool_calls[0].function.arguments: key: expected 1 to 256"),
    ([USER, assistant("", "", call([1]))], "messages[1].tool_calls[0].function.arguments: expected JSON text of an object"),
    ([USER, assistant("", "", call({"k": "\ud800"}))], "function.arguments.k: expected text without lone surrogates"),
    ([USER, assistant("", "", call({"k": float("inf")}))], "function.arguments: expected JSON text of an object"),
    ([USER, result("x")], "messages[1].tool_call_id: expected the id of a call before it, got 'c0'"),
    ([USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id: expected the id of a call before it, got None"),
]


@pytest.mark.parametrize(("messages", "told"), BAD, ids=[told for _, told in BAD])
def test_malformed_messages_are_refused_by_field(messages, told):
    """API-1: a client learns which field of which message is wrong; jinja's own errors would name a line of the template."""
    with pytest.raises(ValueError, match=re.escape(f"{told}")) as refused:
        TEMPLATE.encode(messages, tokenizer=TOKENIZER)
    assert str(refused.value).startswith("ChatTemplate: messages")


@pytest.mark.parametrize("arguments", ["{", "", "null", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000])
def test_arguments_that_are_no_object(arguments):
    """Deeply nested text must be a refusal, not a RecursionError."""
    broken = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ValueError, match=r"messages\[1\].tool_calls\[0\].function.arguments: expected JSON text of an object"):
        TEMPLATE.render([USER, assistant(None, None, broken)])


def test_malformed_options_and_tools_are_refused():
    with pytest.raises(ValueError, match="enable_thinking: expected a bool, got 'yes'"):
        TEMPLATE.render([USER], enable_thinking="yes")
    with pytest.raises(ValueError, match="add_generation_prompt: expected a bool, got None"):
        TEMPLATE.render([USER], add_generation_prompt=None)
    with pytest.raises(ValueError, match=r"tools\[0\].type: expected 'function'"):
        TEMPLATE.render([USER], [{}])
    with pytest.raises(ValueError, match=r"tools\[0\]: expected a value that JSON can write"):
        TEMPLATE.render([USER], [{"type": "function", "function": {"name": "f", "description": {1, 2}}}])


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ nothing }}", "{% for %}", "{{ messages[9].role }}"]
)
def test_a_template_from_a_strange_checkpoint_is_sandboxed(source):
    """A template is code that came with weights: it may neither reach Python's insides nor change the client's messages."""
    with pytest.raises(ValueError, match="ChatTemplate: source: expected"):
        ChatTemplate(source).render([USER])


def test_render_leaves_the_messages_alone():
    messages = [USER, assistant(None, None, call({"s": "x"})), result("ok")]
    before = json.dumps(messages)
    TEMPLATE.encode(messages, TOOLS, tokenizer=TOKENIZER)
    assert json.dumps(messages) == before


def test_a_folder_without_template_has_none(tmp_path):
    assert ChatTemplate.from_folder(tmp_path) is None


def test_generation_ends_at_the_token_that_ends_a_turn():
    """CKPT-3: the end id of generation_config.json is the template's, and the file carries the model's sampling defaults."""
    assert list(end_token_ids(NANO, ())) == TOKENIZER.encode("<|end|>")
    declared = json.loads((NANO / "generation_config.json").read_text(encoding="utf-8"))
    assert (declared["temperature"], declared["top_k"], declared["top_p"]) == (0.8, 20, 0.95)
    assert [declared["pad_token_id"]] == TOKENIZER.encode("<|pad|>")
