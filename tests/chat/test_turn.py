"""A whole turn through both parsers: however its text is cut, a client gets the same reasoning, content and calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toolcalls import TOOLS, call, value

from berrylm_ref.chat.turn import Turn

PIECES = st.sampled_from([
    "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "x<5", "漢🫐", "no", call(value("n", "5")),
    call(value("a", "say </think> and </parameter>"), name="g"), "<tool_call>\n<function=f>\n<parameter=a>\n", "</func", "<",
])  # fmt: skip
TEXTS = st.lists(PIECES, max_size=8).map("".join)


def heard(text, cuts, in_reasoning, tools):
    """(reasoning, content, [(name, arguments)]) of the joined deltas."""
    turn, reasoning, content, calls = Turn(in_reasoning, tools), "", "", []
    ends = [0, *sorted(cuts), len(text)]
    deltas = [turn.feed(text[a:b]) for a, b in zip(ends, ends[1:], strict=False)] + [turn.finish()]
    for delta in deltas:
        reasoning, content = reasoning + delta.reasoning, content + delta.content
        assert len({part.index for part in delta.calls}) == len(delta.calls), "one fragment a call in a delta"
        for part in delta.calls:
            if part.name is not None:
                calls.append([part.name, ""])
            calls[part.index][1] += part.arguments
    assert [(c.name, c.arguments) for c in turn.calls] == [tuple(c) for c in calls]
    return reasoning, content, calls


@given(st.data(), TEXTS, st.booleans(), st.booleans())
def test_every_way_of_cutting_a_turn_gives_the_same(data, text, in_reasoning, with_tools):
    """Two parsers in a row: what one holds back must reach the other all the same, also at the end."""
    tools = TOOLS if with_tools else None
    whole = heard(text, [], in_reasoning, tools)
    assert heard(text, range(1, len(text)), in_reasoning, tools) == whole
    assert heard(text, data.draw(st.sets(st.integers(0, len(text)), max_size=5)), in_reasoning, tools) == whole
    assert with_tools or not whole[2]


@pytest.mark.parametrize("in_reasoning", [True, False])
def test_a_turn_of_nothing(in_reasoning):
    assert heard("", [], in_reasoning, TOOLS) == ("", "", []) == heard("", [], in_reasoning, None)
