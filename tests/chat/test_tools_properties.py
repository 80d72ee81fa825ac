"""ToolCallParser on texts that nobody wrote down: random, cut off, with parts missing, and long."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toolcalls import assert_json, call, stream, tool, value, whole


@pytest.mark.parametrize("last", range(1, 6))
def test_every_beginning_of_two_calls_is_valid(last):
    """API-3: cut at each place, a call is either whole or marked as not complete, and a value is never made up."""
    body = [value("a", "x <y>\n"), value("n", "42"), value("o", '{"k": [1]}'), value("b", "é"), value("q", "</x>")][
        :last
    ]
    text = "hi\n" + call("".join(body)) + "\n" + call(value("a", "7"), "g")
    full = whole(text)
    arguments = [json.loads(made) for _, made, _ in full[1]]
    for end in range(len(text) + 1):
        content, calls = whole(text[:end])
        assert (content, calls) == stream(text[:end])
        assert_json(calls)
        for (name, made, complete), (full_name, full_made, _), values in zip(calls, full[1], arguments, strict=False):
            made_values = json.loads(made)
            assert name == full_name
            assert list(made_values) == list(values)[: len(made_values)]
            assert not complete or made == full_made
            assert all(made_values[key] == values[key] for key in list(made_values)[:-1])
        assert len(calls) <= 2 and "tool_call>" not in content


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "<function=g>",
    "</function>",
    "<parameter=a>",
    "<parameter=n>",
    "</parameter>",
    "<function=",
    "<parameter=",
    "<tool_call>\n<function=f>\n",
    "\n</parameter>\n",
    "\n</function>\n</tool_call>",
    "</think>",
    "<",
    "</",
    ">",
    "=",
    "\n",
    " ",
    "x",
    "5",
    "null",
    '"',
    "\\",
    "{",
    '{"a": 1}',
    "漢",
    "\ud800",
    "<tool",
    "</para",
    "</func",
    "<parameter=s>",
    "<parameter=o>\n",
]


@settings(max_examples=1000)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=16), st.data())
def test_every_cut_of_any_text_gives_the_same(parts, data):
    """Texts made of tags and halves of tags, cut anywhere: joined deltas are the one-shot result, arguments are valid JSON,
    and no text raises."""
    text = "".join(parts)
    expected = whole(text)
    assert_json(expected[1])
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert stream(pieces) == expected
    assert stream(text) == expected


@settings(max_examples=600)
@given(st.data())
def test_no_argument_moves_to_another_call(data):
    """Calls whose closers are missing at random, with junk between their parts: the keys that a call has were written after
    its own name, however many calls stand in a row."""
    junk = st.sampled_from(
        ["", "", "\n", " x ", "</parameter>", "<parameter=\n7", "{", "</think>", "<tool_call>", "<div>", "</para"]
    )
    text = ""
    for i in range(data.draw(st.integers(2, 4))):
        text += f"<tool_call>{data.draw(st.sampled_from(['', chr(10)]))}<function=f{i}>"
        for j in range(data.draw(st.integers(0, 2))):
            text += f"{data.draw(junk)}<parameter=k{i}_{j}>{data.draw(junk)}v{i}{data.draw(junk)}"
            text += data.draw(st.sampled_from(["</parameter>", ""]))
        text += (
            data.draw(st.sampled_from(["</function>", ""]))
            + data.draw(st.sampled_from(["</tool_call>", ""]))
            + data.draw(junk)
        )
    content, calls = whole(text)
    assert [name for name, _, _ in calls] == sorted({name for name, _, _ in calls})
    for name, arguments, _ in calls:
        for key, made in json.loads(arguments).items():
            assert key.startswith("k" + name[1:] + "_"), text
            assert "v" + name[1:] in made, text
    assert stream(text) == (content, calls)


NAMES = st.text('abcxyz_漢 .-"\\', min_size=1, max_size=8).map(str.strip).filter(bool)
STRINGS = st.text(max_size=20) | st.text("<>/=\n ap\\\"'", max_size=20)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KINDS = {
    "string": STRINGS,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "object": st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3),
    "array": st.lists(JSON_VALUES, max_size=3),
}


@settings(max_examples=400)
@given(
    st.lists(st.tuples(NAMES, st.dictionaries(NAMES, st.sampled_from(list(KINDS)), max_size=4)), max_size=3), st.data()
)
def test_written_calls_are_read_back(plan, data):
    """A template writes calls in the model's format, the parser reads back the same names and values, whole and by
    character: the oracle here is Python's own JSON, not the parser."""
    plan = list({name: (name, kinds) for name, kinds in plan}.values())
    tools = [tool(name, **{key: {"type": kind} for key, kind in kinds.items()}) for name, kinds in plan]
    values = [{key: data.draw(KINDS[kind]) for key, kind in kinds.items()} for _, kinds in plan]
    text = "\n".join(
        call(
            "".join(value(k, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for k, v in made.items()),
            name,
        )
        for (name, _), made in zip(plan, values, strict=True)
    )
    content, calls = whole(text, tools)
    assert content == "" and all(complete for _, _, complete in calls)
    assert [name for name, _, _ in calls] == [name for name, _ in plan]
    assert [json.loads(arguments) for _, arguments, _ in calls] == values
    assert stream(text, tools) == (content, calls)


def test_long_texts_do_not_stall():
    """Held text is looked at again with every piece: a tag that never ends, whitespace or many `<` must not make a server
    walk through all of it in Python each time. One character at a time these texts run in about a second."""
    lead = "<tool_call><function=f><parameter=a>\n"
    start = time.process_time()
    for text in (
        "x" * 40_000,
        "<" * 40_000,
        "\n" * 20_000,
        "<parameter=" + "k" * 40_000,
        "</parameter>" + " " * 20_000,
    ):
        assert len(stream(lead + text)[1]) == 1
    assert len(stream(" " * 20_000 + "<function=" * 2_000)[0]) == 40_000
    assert time.process_time() - start < 30
