"""Argument values typed by a tool's JSON schema, and the tools' own validation."""

import json

import pytest
from toolcalls import call, tool, value

from berrylm_ref.chat import ToolCallParser


def arguments(schema, text, key="x"):
    """The arguments of a call with one parameter; the same whole and by character."""
    text = call(value(key, text))
    content, (made,) = ToolCallParser([tool("f", x=schema)]).parse(text)
    assert (content, made.name, made.complete) == ("", "f", True)
    parser = ToolCallParser([tool("f", x=schema)])
    deltas = [parser.feed(char) for char in text] + [parser.finish()]
    assert "".join(part.arguments for delta in deltas for part in delta.calls) == made.arguments
    return made.arguments


INTEGER_OR_NULL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
MODE = {"type": "string", "enum": ["none", "all"]}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        # the rows of PRS-4
        (INTEGER_OR_NULL, "5", "5"),
        (INTEGER_OR_NULL, "null", "null"),
        ({"type": ["integer", "null"]}, "5", "5"),
        ({"type": ["integer", "null"]}, "null", "null"),
        (MODE, "none", '"none"'),
        ({"anyOf": [MODE, {"type": "null"}]}, "none", '"none"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, "123", '"123"'),
        ({"type": "string"}, "true", '"true"'),
        ({"type": "number"}, "1e400", '"1e400"'),
        ({"type": "number"}, "nan", '"nan"'),
        ({"type": "number"}, "-Infinity", '"-Infinity"'),
        ({"type": "boolean"}, "True", "true"),
        # null
        ({"type": "integer"}, "null", "null"),
        ({"type": "object"}, " null ", "null"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "None", '"None"'),
        ({"type": ["string", "null"]}, "", '""'),
        ({"type": ["string", "integer"]}, "null", '"null"'),
        ({"type": ["string", "null"], "enum": ["null", None]}, "null", '"null"'),
        # integers and numbers
        ({"type": "integer"}, "-5", "-5"),
        ({"type": "integer"}, "+5", "5"),
        ({"type": "integer"}, "007", "7"),
        ({"type": "integer"}, "-0", "0"),
        ({"type": "integer"}, "5.0", "5"),
        ({"type": "integer"}, "5.5", '"5.5"'),
        ({"type": "integer"}, "1_000", '"1_000"'),
        ({"type": "integer"}, "٣", '"٣"'),
        ({"type": "integer"}, "0" * 5000 + "1", "1"),
        ({"type": "integer"}, "9" * 5000, '"' + "9" * 5000 + '"'),
        ({"type": "integer"}, str(2**64), str(2**64)),
        ({"type": "integer"}, "true", '"true"'),
        ({"type": "number"}, "5", "5"),
        ({"type": "number"}, "-0.50", "-0.50"),
        ({"type": "number"}, "1e3", "1e3"),
        ({"type": "number"}, ".5", "0.5"),
        ({"type": "number"}, "+5.", "5.0"),
        ({"type": "number"}, "1e", '"1e"'),
        ({"type": ["number", "integer"]}, "5", "5"),
        # booleans
        ({"type": "boolean"}, "FALSE", "false"),
        ({"type": "boolean"}, "1", '"1"'),
        # objects and arrays
        ({"type": "object"}, '{"a":{"b":[1,2.5,null,"é"]}}', '{"a": {"b": [1, 2.5, null, "é"]}}'),
        ({"type": "array"}, "[]", "[]"),
        ({"type": "array"}, '{"a": 1}', '"{\\"a\\": 1}"'),
        ({"type": "object"}, "{'a': 1}", "\"{'a': 1}\""),
        ({"type": "array"}, "[NaN]", '"[NaN]"'),
        ({"type": "array"}, "[1e400]", '"[1e400]"'),
        ({"type": "array"}, '["\\ud800", "\\ud83e\\uded0"]', '["\\ud800", "🫐"]'),
        ({"type": "array"}, "[" * 200 + "]" * 200, "[" * 200 + "]" * 200),
        ({"type": "array"}, "[" * 201 + "]" * 201, '"' + "[" * 201 + "]" * 201 + '"'),
        ({"type": "array"}, "[" * 50000, '"' + "[" * 50000 + '"'),
        ({"type": "array"}, '["' + "[" * 300 + '"]', '["' + "[" * 300 + '"]'),
        # unions, enums and schemas without a type
        ({"oneOf": [{"type": "boolean"}, {"type": "array"}]}, "[1]", "[1]"),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["string", "integer"]}, " five ", '" five "'),
        ({"anyOf": [{"anyOf": [{"type": "number"}]}, {"type": "null"}]}, "1.5", "1.5"),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["1", 2]}, "1", '"1"'),
        ({"enum": ["a", None, True]}, "null", "null"),
        ({"enum": ["a", None, True]}, "true", "true"),
        ({"const": 5}, "5", "5"),
        ({}, "5", '"5"'),
        (True, "5", '"5"'),
        ({"description": "any"}, "null", '"null"'),
        ({"$ref": "#/$defs/X"}, '{"a": 1}', '"{\\"a\\": 1}"'),
        ({"anyOf": [{"$ref": "#/$defs/X"}, {"type": "null"}]}, "null", "null"),
        ({"type": "date"}, "5", '"5"'),
        ({"type": ["date", "integer"]}, "5", "5"),
    ],
)
def test_prs4_values_are_typed_by_the_schema(schema, text, expected):
    """PRS-4: `anyOf` and type lists were read as strings or objects, and an allowed `none` became null."""
    made = arguments(schema, text)
    assert made == '{"x": ' + expected + "}"
    made.encode()
    json.loads(made, parse_constant=pytest.fail)


def test_prs4_parameter_that_the_schema_lacks_stays_a_string():
    """PRS-4: an unknown parameter was guessed at."""
    assert arguments({"type": "integer"}, "5", key="unknown") == '{"unknown": "5"}'


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("f", r"tools: expected a list of tool dicts or None, got 'f'"),
        ([None], r"tools\[0\]: expected a dict, got None"),
        ([{"type": "code"}], r"tools\[0\]\.type: expected 'function', got 'code'"),
        ([tool("f"), {"type": "function"}], r"tools\[1\]\.function: expected a dict, got None"),
        ([{"type": "function", "function": {}}], r"tools\[0\]\.function\.name: expected a non-empty str, got None"),
        ([tool("f"), tool("f")], r"tools\[1\]\.function\.name: expected a name no other tool has, got 'f'"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            r"function\.parameters: expected a JSON schema",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"properties": 1}}}],
            r"parameters\.properties: expected a dict",
        ),
        ([tool("f", x="string")], r"properties\.x: expected a JSON schema \(dict\), got 'string'"),
        ([tool("f", x={"type": 5})], r"properties\.x\.type: expected a type name or a list of them, got 5"),
        ([tool("f", x={"type": []})], r"properties\.x\.type: expected a type name or a list of them, got \[\]"),
        ([tool("f", x={"enum": "ab"})], r"properties\.x\.enum: expected a list, got 'ab'"),
        ([tool("f", x={"anyOf": {"type": "null"}})], r"properties\.x\.anyOf: expected a list"),
        (
            [tool("f", x={"anyOf": [{"type": "null"}, 7]})],
            r"properties\.x\.anyOf\[1\]: expected a JSON schema \(dict\), got 7",
        ),
    ],
)
def test_malformed_tools_are_refused_by_place(tools, message):
    """A client's schema error is a 400 that names the field, not a failure in the middle of a stream."""
    with pytest.raises(ValueError, match="ToolCallParser: .*" + message):
        ToolCallParser(tools)


def test_deeply_nested_schema_is_no_error():
    """A schema nested beyond the recursion limit must not take the server down."""
    schema = {"type": "integer"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert arguments(schema, "5") == '{"x": 5}'
