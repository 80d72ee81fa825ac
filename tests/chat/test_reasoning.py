"""ReasoningParser: the split between the two, the same for every way of cutting the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import all_cuts

from berrylm_ref.chat import ReasoningParser

CALL = "<tool_call><function=f></function></tool_call>"
LONG_CALL = "<tool_call>\n<function=f>\n<parameter=a>\n</think>\n</parameter>\n</function>\n</tool_call>"

# (in_reasoning, text, reasoning, content)
TABLE = {
    "closed": (True, "\nplan\n</think>\n\nanswer", "plan", "answer"),
    "never closed": (True, "I should add", "I should add", ""),
    "never closed, spaces": (True, "  I should\n add \n", "I should\n add", ""),
    "empty": (True, "", "", ""),
    "only spaces": (True, " \n ", "", ""),
    "no reasoning": (True, "</think>answer", "", "answer"),
    "empty reasoning": (True, "\n\n</think>\n\n", "", ""),
    "indented answer": (True, "p</think>\n\n    if x:\n", "p", "    if x:\n"),
    "repeated opening": (True, "\n<think>plan</think>answer", "plan", "answer"),
    "opening inside": (True, "what is <think>?</think>answer", "what is <think>?", "answer"),
    "tags in the answer": (True, "p</think>a <think>b</think> <tool_call>c", "p", "a <think>b</think> <tool_call>c"),
    "near tags": (True, "a < b <</think </ think> <tool_calls </think>x", "a < b <</think </ think> <tool_calls", "x"),
    "cut off in a tag": (True, "plan </thin", "plan </thin", ""),
    "cut off in a call tag": (True, "plan <tool_cal", "plan <tool_cal", ""),
    "cut off after a call tag": (True, "plan <tool_call>", "plan", "<tool_call>"),
    "call": (True, f"plan {CALL}", "plan", CALL),
    "call at once": (True, CALL, "", CALL),
    "stray close": (True, f"plan {CALL} no</think>{CALL}", "plan", f"{CALL} no{CALL}"),
    "two stray closes": (True, f"plan {CALL}</think>a</think>b", "plan", f"{CALL}ab"),
    "close inside an argument": (True, f"plan {LONG_CALL}</think>\n{LONG_CALL}", "plan", f"{LONG_CALL}\n{LONG_CALL}"),
    "mention of the call tag": (True, "a <tool_call> or no</think>b", "a", "<tool_call> or nob"),
    "two call tags": (True, f"a <tool_call>\n{CALL}</think>", "a", f"<tool_call>\n{CALL}"),
    "call cut off": (True, "a <tool_call>\n<func", "a", "<tool_call>\n<func"),
    "stray close cut off": (True, f"a {CALL}</thi", "a", f"{CALL}</thi"),
    "missing block close": (
        True,
        "a <tool_call><function=f></function> b</think>",
        "a",
        "<tool_call><function=f></function> b",
    ),
    "off": (False, "answer </think> more", "", "answer </think> more"),
    "off, spaces": (False, " \n answer\n", "", " \n answer\n"),
    "off, only spaces": (False, " \n", "", " \n"),
    "off, opened itself": (False, "\n<think>\nplan\n</think>\nanswer", "plan", "answer"),
    "off, opened late": (False, "x<think>plan</think>", "", "x<think>plan</think>"),
    "off, opening cut off": (False, " <thin", "", " <thin"),
    "off, opening broken": (False, " <thinly", "", " <thinly"),
    "off, opened and called": (False, f"<think>p{CALL}</think>", "p", CALL),
    "off, call": (False, CALL + "</think>", "", CALL + "</think>"),
}


def stream(in_reasoning, pieces):
    parser = ReasoningParser(in_reasoning)
    deltas = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


@pytest.mark.parametrize("case", TABLE)
def test_table_of_rules_at_every_cut(case):
    """Each row is a rule; it must hold whole and however the text is cut."""
    in_reasoning, text, reasoning, content = TABLE[case]
    assert ReasoningParser(in_reasoning).parse(text) == (reasoning, content)
    for pieces in all_cuts(text):
        assert stream(in_reasoning, pieces) == (reasoning, content), pieces


def test_prs5_reasoning_that_the_limit_cut_is_not_content():
    """PRS-5: the one-shot path gave a thought without `</think>` to the user as the answer."""
    assert ReasoningParser(in_reasoning=True).parse("I should add") == ("I should add", "")
    assert ReasoningParser(in_reasoning=False).parse("I should add") == ("", "I should add")


def test_prs5_call_inside_reasoning_ends_it_and_stray_close_reaches_no_one():
    """PRS-5: a call drafted in the reasoning was run twice, or `</think>` showed up in the answer."""
    text = f"plan {CALL} no</think>{CALL}"
    for pieces in all_cuts(text):
        reasoning, content = stream(True, pieces)
        assert reasoning == "plan"
        assert content.count(CALL) == 2
        assert "think" not in reasoning + content


def test_call_tag_ends_the_reasoning_at_once():
    """The tool parser must get the tag with the very piece that completes it."""
    parser = ReasoningParser()
    assert parser.feed("plan <tool_call").content == ""
    assert parser.feed(">").content == "<tool_call>"


def test_only_what_may_be_a_tag_or_trailing_space_is_held():
    """API-4's rule for the tags: text is sent as soon as no tag can come of it."""
    text = "so x < y, a <b> and <thinking> </thin ice> <tool_kit>   \n\n but\t1<2 <<</think </t"
    for in_reasoning, tags in ((True, ("</think>", "<tool_call>")), (False, ())):
        parser, fed, sent = ReasoningParser(in_reasoning), "", ""
        for char in text:
            delta = parser.feed(char)
            fed, sent = fed + char, sent + delta.reasoning + delta.content
            assert fed.startswith(sent)
            held = fed[len(sent) :].lstrip()
            assert held == "" or any(tag.startswith(held) and tag != held for tag in tags), (fed, held)
            if not in_reasoning:
                assert sent == fed


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<", ">", "/", "=", "\n", " ", "x",
          "<thi", "</thi", "<tool", "think>", "漢", "\r\n", "<function=", "<parameter=a>", "</parameter>"]  # fmt: skip


@settings(max_examples=600)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14), st.booleans(), st.data())
def test_every_cut_of_any_text_gives_the_same(parts, in_reasoning, data):
    """Texts made of tags and halves of tags, cut anywhere: joined deltas are the one-shot result, no text raises, and all
    that is dropped is tags and whitespace."""
    text = "".join(parts)
    whole = ReasoningParser(in_reasoning).parse(text)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert stream(in_reasoning, pieces) == whole
    assert stream(in_reasoning, text) == whole
    assert whole[0] == whole[0].strip()
    assert other_characters("".join(whole)) == other_characters(text)


def other_characters(text):
    """All but whitespace and the characters of the tags that may be dropped."""
    return [char for char in text if char not in "</think>" and not char.isspace()]


def test_parse_does_not_depend_on_what_was_fed_before():
    """A server keeps one parser a request and may ask it for both paths."""
    parser = ReasoningParser()
    parser.feed("half a tho")
    assert parser.parse("plan</think>answer") == ("plan", "answer")
    assert parser.feed("ught</think>x").reasoning == "ught"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: ReasoningParser("yes"), r"ReasoningParser: in_reasoning: expected a bool, got 'yes'"),
        (lambda: ReasoningParser().feed(b"x"), r"ReasoningParser.feed: delta: expected a str, got bytes"),
        (lambda: ReasoningParser().parse(None), r"ReasoningParser.feed: delta: expected a str, got NoneType"),
    ],
)
def test_wrong_arguments_are_named(use, message):
    """Errors say operation, argument, expected and got."""
    with pytest.raises(ValueError, match=message):
        use()


@pytest.mark.parametrize("operation", ["feed", "finish"])
def test_a_finished_parser_refuses_more(operation):
    """Text after `finish` would be parsed from a state that the rules don't know."""
    parser = ReasoningParser()
    parser.finish()
    with pytest.raises(ValueError, match=rf"ReasoningParser\.{operation}: expected a parser whose text goes on"):
        getattr(parser, operation)(*["x"] * (operation == "feed"))
