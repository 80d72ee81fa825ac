"""ToolCallParser: the model's call format, the same for every way of cutting the text."""

import json

import pytest
from splits import all_cuts
from toolcalls import TOOLS, assert_json, call, stream, value, whole

from berrylm_ref.chat import ReasoningParser, ToolCallParser


def one(text, tools=TOOLS):
    """The arguments of the only call of `text`, the same at every cut."""
    expected = whole(text, tools)
    assert_json(expected[1])
    for pieces in all_cuts(text):
        assert stream(pieces, tools) == expected, pieces
    ((_, arguments, _),) = expected[1]
    return json.loads(arguments)


# text -> (content, [(name, arguments, complete)]). Every row is a rule of the module's table.
TABLE = {
    "no tags": ("hello <b> a < b\n", ("hello <b> a < b\n", [])),
    "nothing": ("", ("", [])),
    "space only": (" \n", (" \n", [])),
    "unknown function": (call(value("n", "5"), "other"), ("", [("other", '{"n": "5"}', True)])),
    "unknown parameter": (call(value("zz", "5")), ("", [("f", '{"zz": "5"}', True)])),
    "text around": (
        f" I look.\n\n{call()}\n\n{call()}\nDone.\n",
        (" I look.\n\n\n\n\nDone.\n", [("f", "{}", True)] * 2),
    ),
    "text before": (f"I look.\n\n{call()}\n", ("I look.", [("f", "{}", True)])),
    "text after": (f"\n{call()}\n  Done. ", ("Done. ", [("f", "{}", True)])),
    "tag in prose": ("use <tool_call> to call <function=f>", ("use <tool_call> to call <function=f>", [])),
    "tag in prose at the end": ("use <tool_call>", ("use", [])),
    "doubled opening": ("<tool_call>" + call(), ("<tool_call>", [("f", "{}", True)])),
    "broken function": (
        "<tool_call><function=\nf></function></tool_call>",
        ("<tool_call><function=\nf></function></tool_call>", []),
    ),
    "nameless function": ("<tool_call><function=></tool_call>", ("<tool_call><function=></tool_call>", [])),
    "no block": ("<function=f></function>", ("<function=f></function>", [])),
    "other format": ('<tool_call>{"name": "f"}</tool_call>', ('<tool_call>{"name": "f"}</tool_call>', [])),
    "stray closers": ("a</parameter></function></tool_call>", ("a</parameter></function></tool_call>", [])),
    "spaces in names": (
        "<tool_call><function= f ><parameter= a >1</parameter></function></tool_call>",
        ("", [("f", '{"a": "1"}', True)]),
    ),
    "key repeated": (
        call(value("a", "1") + value("a", "2") + value("b", "3")),
        ("", [("f", '{"a": "1", "b": "3"}', True)]),
    ),
    "typed key repeated": (call(value("n", "1") + value("n", "2")), ("", [("f", '{"n": 1}', True)])),
    "key without value": (
        "<tool_call><function=f><parameter=a></function></tool_call>",
        ("", [("f", '{"a": ""}', True)]),
    ),
    "empty values": (call(value("a", "") + value("n", "")), ("", [("f", '{"a": "", "n": ""}', True)])),
    "junk before": (call("so <x> </parameter>\n" + value("a", "1")), ("", [("f", '{"a": "1"}', True)])),
    "junk after": (call(value("a", "1") + "so"), ("", [("f", '{"a": "1\\n</parameter>\\nso"}', True)])),
    "junk between": (
        call("<parameter=a>1</parameter> so <parameter=b>2</parameter>"),
        ("", [("f", '{"a": "1</parameter> so ", "b": "2"}', True)]),
    ),
    "nested braces": (
        call(value("o", '{"x": {"y": [1, "}"]}}') + value("a", '{"')),
        ("", [("f", '{"o": {"x": {"y": [1, "}"]}}, "a": "{\\""}', True)]),
    ),
    "wrong types": (call(value("n", "five") + value("o", "[1]")), ("", [("f", '{"n": "five", "o": "[1]"}', True)])),
    # closers that are missing
    "no parameter close, parameter": (
        "<tool_call><function=f><parameter=a>\n1\n<parameter=n>\n2\n</function></tool_call>",
        ("", [("f", '{"a": "1", "n": 2}', True)]),
    ),
    "no parameter close, function": (
        "<tool_call><function=f><parameter=n>2\n</function>\n</tool_call>",
        ("", [("f", '{"n": 2}', True)]),
    ),
    "no function close": (
        "<tool_call><function=f><parameter=n>2</parameter></tool_call> x",
        ("x", [("f", '{"n": 2}', True)]),
    ),
    "no block close": ("<tool_call><function=f></function> x", ("x", [("f", "{}", True)])),
    "late block close": (
        "<tool_call><function=f></function> x </tool_call> y </tool_call>",
        ("x  y </tool_call>", [("f", "{}", True)]),
    ),
    "second block close": (call() + " x </tool_call>", ("x </tool_call>", [("f", "{}", True)])),
    "no function close, second block close": (
        "<tool_call><function=f></tool_call> x </tool_call>",
        ("x </tool_call>", [("f", "{}", True)]),
    ),
    "two functions": (
        "<tool_call><function=f></function><function=now></function></tool_call>",
        ("", [("f", "{}", True), ("now", "{}", True)]),
    ),
    "function close broken": (
        "<tool_call><function=f></function><function=\n></tool_call>",
        ("<function=\n>", [("f", "{}", True)]),
    ),
    "no block close, next call": ("<tool_call><function=f></function>" + call(), ("", [("f", "{}", True)] * 2)),
    "no closers, next call": (
        "<tool_call><function=f><parameter=a>1" + call(value("a", "2"), "g"),
        ("", [("f", '{"a": "1"}', False), ("g", '{"a": 2}', True)]),
    ),
    "late block close, space": ("<tool_call><function=f></function> x </tool_call> \n", ("x", [("f", "{}", True)])),
    "no closers, next function empty": (
        "<tool_call><function=f><parameter=a>1<function=g></tool_call>",
        ("", [("f", '{"a": "1"}', False), ("g", "{}", True)]),
    ),
    "no parameter close, function close at the end": (
        "<tool_call><function=f><parameter=n>2</function>\n",
        ("", [("f", '{"n": 2}', True)]),
    ),
    "no function close, next call": (
        "<tool_call><function=f><parameter=a>1</parameter>" + call("", "g"),
        ("", [("f", '{"a": "1"}', False), ("g", "{}", True)]),
    ),
    "no block, next function": (
        "<tool_call><function=f><parameter=a>1</parameter><function=g><parameter=a>2</parameter></function>",
        ("", [("f", '{"a": "1"}', False), ("g", '{"a": 2}', True)]),
    ),
    "no closers, next function": (
        "<tool_call><function=f><parameter=a>1<function=g><parameter=a>2</parameter></function>",
        ("", [("f", '{"a": "1"}', False), ("g", '{"a": 2}', True)]),
    ),
    "next block broken": (
        "<tool_call><function=f><parameter=a>1</parameter><tool_call><parameter=b>2</parameter>",
        ("<tool_call><parameter=b>2</parameter>", [("f", '{"a": "1"}', False)]),
    ),
    "next function broken": (
        "<tool_call><function=f><parameter=a>1<tool_call><function=\n><parameter=b>2</parameter>",
        ("<tool_call><function=\n><parameter=b>2</parameter>", [("f", '{"a": "1"}', False)]),
    ),
    "block closed in a value": (
        "<tool_call><function=f><parameter=a>\n1\n</tool_call>\n" + call(),
        ("", [("f", '{"a": "1"}', True), ("f", "{}", True)]),
    ),
    # tags that are text
    "all tags in a value": (
        call(value("a", "</function>, </tool_call>, <tool_call>, <function=x>, </think>, <parameter=>.")),
        ("", [("f", '{"a": "</function>, </tool_call>, <tool_call>, <function=x>, </think>, <parameter=>."}', True)]),
    ),
    "only a tag in a value": (call(value("a", "</function>")), ("", [("f", '{"a": "</function>"}', True)])),
    "double close": (call("<parameter=a>1</parameter></parameter>"), ("", [("f", '{"a": "1</parameter>"}', True)])),
    "long name": (call("<parameter=" + "k" * 257 + ">1</parameter>"), ("", [("f", "{}", True)])),
    "longest name": (
        call("<parameter=" + "k" * 256 + ">1</parameter>"),
        ("", [("f", '{"' + "k" * 256 + '": "1"}', True)]),
    ),
    # the text ends
    "cut in the block tag": ("a <tool_ca", ("a <tool_ca", [])),
    "cut in the function tag": ("a <tool_call>\n<function=f", ("a", [])),
    "cut after the name": ("<tool_call><function=f>", ("", [("f", "{}", False)])),
    "cut in the key": ("<tool_call><function=f><parameter=a", ("", [("f", "{}", False)])),
    "cut before the value": ("<tool_call><function=f><parameter=a>", ("", [("f", '{"a": ""}', False)])),
    "cut in a string": ("<tool_call><function=f><parameter=a>\nBerl", ("", [("f", '{"a": "Berl"}', False)])),
    "cut in a number": ("<tool_call><function=f><parameter=n>\n12", ("", [("f", '{"n": 12}', False)])),
    "cut in an object": ('<tool_call><function=f><parameter=o>\n{"a": ', ("", [("f", '{"o": "{\\"a\\": "}', False)])),
    "cut in a close": ("<tool_call><function=f><parameter=n>\n12\n</para", ("", [("f", '{"n": 12}', False)])),
    "cut after a close": (
        "<tool_call><function=f><parameter=n>\n12\n</parameter>\n</fun",
        ("", [("f", '{"n": 12}', False)]),
    ),
    "cut after the function": ("<tool_call><function=f></function>\n</tool", ("", [("f", "{}", True)])),
}


@pytest.mark.parametrize("case", TABLE)
def test_table_of_rules_at_every_cut(case):
    """Each row is a rule; it must hold whole and however the text is cut."""
    text, expected = TABLE[case]
    assert whole(text) == expected
    assert_json(expected[1])
    for pieces in all_cuts(text):
        assert stream(pieces) == expected, pieces


def test_prs1_exactly_one_newline_a_side_is_layout():
    """PRS-1: stripped values lost the indentation of code and its last newline."""
    code = "<parameter=old>\n    if x:\n        return 1\n\n</parameter>"
    made = one(call(code + "\n<parameter=two>\n  \n</parameter><parameter=inline>  x </parameter>" + value("nl", "\n")))
    assert made == {"old": "    if x:\n        return 1\n", "two": "  ", "inline": "  x ", "nl": "\n"}
    assert one(call("<parameter=a>  </parameter>")) == {"a": "  "}
    assert one(call("<parameter=n>  5 \t</parameter>")) == {"n": 5}


@pytest.mark.parametrize(
    "text", ["x<5 && y>3", "<div></div>", "a </para", "docs say </parameter> closes it", "a <", "\r\n<\n", "<<a>>"]
)
def test_prs2_markup_inside_values_is_verbatim(text):
    """PRS-2: a value with `<` was lost or held for ever, and a literal `</parameter>` cut it short."""
    assert one(call(value("a", text) + value("n", "5"))) == {"a": text, "n": 5}
    assert one(call(f"<parameter=s>{text}</parameter>", "g")) == {"s": text.removesuffix("\n")}


@pytest.mark.parametrize(
    "broken", ["<parameter=\n7", "<parameter=\n7\n</parameter>", "<parameter=>7</parameter>", "<parameter= ><"]
)
def test_prs2_broken_element_leaves_valid_json_and_takes_nothing_along(broken):
    """PRS-2: a name-less `<parameter=` swallowed the text up to the next `>` as a key."""
    assert one(call(broken)) == {}
    assert one(call(broken + value("a", "1"))) == {"a": "1"}
    assert one(call(value("a", "1") + broken)) == {"a": "1"}
    assert one("<tool_call><function=f>" + broken) == {}


def test_prs3_calls_without_arguments_and_several_calls():
    """PRS-3: no parameters became an empty string, every call had index 0, and non-ASCII text was escaped in one path only."""
    text = (
        "<tool_call><function=now></function></tool_call>"
        "<tool_call><function=weather><parameter=city>Zürich 漢</parameter></function></tool_call>"
    )
    expected = ("", [("now", "{}", True), ("weather", '{"city": "Zürich 漢"}', True)])
    assert whole(text) == expected
    for pieces in all_cuts(text):
        assert stream(pieces) == expected, pieces


def test_prs5_calls_inside_reasoning_come_through_both_parsers_in_order():
    """PRS-5: the two parsers in a row, piece by piece as a server runs them."""
    text = (
        "plan <tool_call><function=f></function></tool_call> no</think><tool_call><function=f></function></tool_call>"
    )
    for pieces in all_cuts(text):
        reasoning, tools = ReasoningParser(), ToolCallParser(TOOLS)
        thought = content = ""
        for piece in pieces:
            first = reasoning.feed(piece)
            thought, content = thought + first.reasoning, content + tools.feed(first.content).content
        last = reasoning.finish()
        content += tools.feed(last.content).content + tools.finish().content
        assert (thought + last.reasoning, content) == ("plan", "no")
        assert [(c.name, c.arguments, c.complete) for c in tools.calls] == [("f", "{}", True)] * 2


def test_name_comes_at_once_and_strings_come_as_they_grow():
    """A client shows the call while it is written; only typed values wait for their end."""
    parser = ToolCallParser(TOOLS)
    (named,) = parser.feed("<tool_call>\n<function=f>").calls
    assert (named.index, named.name, named.arguments) == (0, "f", "")
    assert parser.feed("\n<parameter=a>").calls[0].arguments == '{"a": "'
    assert parser.feed("\nsay").calls[0].arguments == "say"
    assert parser.feed(' "x" < \n').calls[0].arguments == ' \\"x\\" < '
    assert parser.feed("<b>").calls[0].arguments == "\\n<b>"
    assert parser.feed("</parameter>\n").calls == []
    part = parser.feed("<parameter=n>4").calls[0]
    assert (part.name, part.arguments) == (None, '", "n": ')
    assert parser.feed("2\n</parameter>").calls == []
    assert parser.feed("\n</function>").calls[0].arguments == "42}"


def test_only_what_may_be_a_tag_or_layout_is_held():
    """PRS-2: text with `<` was held for ever. In content and in a string value, what is held could still be a tag."""
    text = "if x < y: a <b> <toolbox> </para </parameters> <function>  \n\n but\t1<2 <<</func <parameter"
    parser, fed, sent = ToolCallParser(TOOLS), "", ""
    for char in text:
        fed, sent = fed + char, sent + parser.feed(char).content
        held = fed[len(sent) :].lstrip()
        assert fed.startswith(sent) and "<tool_call>".startswith(held) and held != "<tool_call>", (fed, held)
    parser, fed, sent = ToolCallParser(TOOLS), "", ""
    parser.feed("<tool_call><function=f><parameter=a>\n")
    tags = ("</parameter>", "</function>", "</tool_call>", "<tool_call>", "<function=", "<parameter=")
    for char in text:
        fed, sent = fed + char, sent + "".join(part.arguments for part in parser.feed(char).calls)
        plain = json.loads(f'"{sent}"')
        held = fed[len(plain) :].removeprefix("\n")
        assert fed.startswith(plain) and any(tag.startswith(held) for tag in tags), (fed, held)


def test_parse_does_not_depend_on_what_was_fed_before():
    """A server keeps one parser a request and may ask it for both paths."""
    parser = ToolCallParser(TOOLS)
    parser.feed("<tool_call><function=f><parameter=a>x")
    content, (made,) = parser.parse(call(value("n", "1")))
    assert (content, made.arguments, made.complete) == ("", '{"n": 1}', True)
    assert parser.feed("y").calls[0].arguments == "y"


@pytest.mark.parametrize("tools", [None, [], ()])
def test_without_tools_every_value_is_a_string(tools):
    """A model may call what it was not offered; the server decides what that means."""
    assert whole(call(value("n", "5")), tools) == ("", [("f", '{"n": "5"}', True)])


def test_wrong_use_is_refused_by_name():
    """Errors say operation, argument, expected and got."""
    with pytest.raises(ValueError, match=r"ToolCallParser\.feed: delta: expected a str, got bytes"):
        ToolCallParser().feed(b"x")
    parser = ToolCallParser()
    parser.finish()
    with pytest.raises(ValueError, match=r"ToolCallParser\.feed: expected a parser whose text goes on"):
        parser.feed("x")
    with pytest.raises(ValueError, match=r"ToolCallParser\.finish: expected a parser whose text goes on"):
        parser.finish()
