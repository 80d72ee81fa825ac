"""Texts with tool calls in the model's format, and both ways of parsing them."""

import json

from berrylm_ref.chat import ToolCallParser


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool("f", a={"type": "string"}, b={"type": "string"}, n={"type": "integer"}, o={"type": "object"}),
    tool("g", a={"type": "integer"}, s={"type": ["string", "null"]}),
    {"type": "function", "function": {"name": "now"}},
]


def call(body="", name="f"):
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def value(key, text):
    return f"<parameter={key}>\n{text}\n</parameter>\n"


def stream(pieces, tools=TOOLS):
    """Joined deltas as (content, [(name, arguments, complete)]). Asserts what a client relies on while it reads them."""
    parser = ToolCallParser(tools)
    content, names, arguments = "", [], []
    for delta in [parser.feed(piece) for piece in pieces] + [parser.finish()]:
        content += delta.content
        assert [part.index for part in delta.calls] == sorted({part.index for part in delta.calls})
        for part in delta.calls:
            if part.name is not None:
                assert part.index == len(names), "a name comes once, calls in order"
                names.append(part.name)
                arguments.append("")
            assert part.index == len(names) - 1, "only the last call grows"
            arguments[part.index] += part.arguments
    assert [(c.name, c.arguments) for c in parser.calls] == list(zip(names, arguments, strict=True))
    return content, [(c.name, c.arguments, c.complete) for c in parser.calls]


def whole(text, tools=TOOLS):
    content, calls = ToolCallParser(tools).parse(text)
    return content, [(c.name, c.arguments, c.complete) for c in calls]


def assert_json(calls):
    """Each call's arguments are one JSON object: strict, no key twice, and it survives UTF-8."""

    def once(pairs):
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    def refuse(constant):
        raise AssertionError(constant)

    for _, arguments, _ in calls:
        arguments.encode()
        assert isinstance(json.loads(arguments, object_pairs_hook=once, parse_constant=refuse), dict)
