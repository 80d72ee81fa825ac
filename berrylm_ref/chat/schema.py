"""OpenAI tool dicts, validated and reduced to what typing an argument needs: the types each parameter allows."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_KINDS[type(None)] = "null"


@dataclass(frozen=True)
class ParameterType:
    """The JSON types a parameter allows, and the strings among its enum values.

    | schema | types |
    |---|---|
    | `type`: a name or a list of names | these; an unknown name is string |
    | no `type`, `anyOf` or `oneOf` | those of all members together |
    | neither, `enum` or `const` | the types of the values |
    | none of them (`{}`, `true`, `$ref`, `allOf`) | string |
    """

    kinds: frozenset[str] = frozenset({"string"})
    words: frozenset[str] = frozenset()

    @property
    def only_string(self) -> bool:
        """Every value is a string as it stands, so it can be sent before its end is seen."""
        return self.kinds == {"string"}


STRING = ParameterType()


def parameter_types(tools: Any) -> dict[str, dict[str, ParameterType]]:
    """{function name: {parameter name: its types}} of OpenAI tool dicts; None is no tools.

    Errors: ValueError that names the place in `tools`, what was expected and what came. Two tools of one name are refused: a
    call could not say which it means.
    """
    if tools is None:
        return {}
    if not isinstance(tools, list | tuple):
        raise _wrong("tools", "a list of tool dicts or None", tools)
    functions: dict[str, dict[str, ParameterType]] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping):
            raise _wrong(where, "a dict", tool)
        if tool.get("type") != "function":
            raise _wrong(f"{where}.type", "'function'", tool.get("type"))
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _wrong(f"{where}.function", "a dict", function)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise _wrong(f"{where}.function.name", "a non-empty str", name)
        if name in functions:
            raise _wrong(f"{where}.function.name", "a name no other tool has", name)
        functions[name] = _parameters(f"{where}.function.parameters", function.get("parameters"))
    return functions


def _parameters(where: str, schema: Any) -> dict[str, ParameterType]:
    if schema is None:
        return {}
    if not isinstance(schema, Mapping):
        raise _wrong(where, "a JSON schema (dict) or None", schema)
    properties = schema.get("properties")
    if properties is None:
        return {}
    if not isinstance(properties, Mapping):
        raise _wrong(f"{where}.properties", "a dict", properties)
    return {key: _parameter(f"{where}.properties.{key}", value) for key, value in properties.items()}


def _parameter(where: str, schema: Any) -> ParameterType:
    kinds: set[str] = set()
    words: set[str] = set()
    pending = [(where, schema)]  # a list, not recursion: a schema is a client's and may nest as deep as it likes
    while pending:
        place, part = pending.pop()
        if part is True or part is False:  # JSON Schema's shorthands for "anything" and "nothing"
            kinds.add("string")
            continue
        if not isinstance(part, Mapping):
            raise _wrong(place, "a JSON schema (dict)", part)
        values = _list(f"{place}.enum", part.get("enum", []))
        if "const" in part:
            values = [*values, part["const"]]
        words.update(value for value in values if isinstance(value, str))
        members = [
            (f"{place}.{key}[{i}]", member)
            for key in ("anyOf", "oneOf")
            for i, member in enumerate(_list(f"{place}.{key}", part.get(key, [])))
        ]
        if part.get("type") is not None:
            kinds |= _type_names(f"{place}.type", part["type"])
        elif members:
            pending += members
        elif values:
            kinds |= {_KINDS.get(type(value), "string") for value in values}
        else:
            kinds.add("string")
    return ParameterType(frozenset(kinds), frozenset(words))


def _type_names(where: str, value: Any) -> set[str]:
    names = value if isinstance(value, list | tuple) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        raise _wrong(where, "a type name or a list of them", value)
    return {name if name in _KINDS.values() else "string" for name in names}


def _list(where: str, value: Any) -> list:
    if not isinstance(value, list | tuple):
        raise _wrong(where, "a list", value)
    return list(value)


def _wrong(where: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"ToolCallParser: {where}: expected {expected}, got {reprlib.repr(got)}")
