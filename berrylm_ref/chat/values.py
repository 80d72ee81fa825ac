"""The text of one argument value as JSON, typed by the tool's schema.

| parameter allows | text (whitespace around it aside) | JSON |
|---|---|---|
| string only | anything | the string, untouched: `null`, `123` and `true` too |
| an enum with this very string | that string | the string, before any other reading: `none` stays `"none"` |
| null, or not string | `null` | `null` |
| boolean | `true`, `false` in any case (`True`) | `true`, `false` |
| integer | `5`, `-5`, `+5`, `007`, `5.0` | `5`, `-5`, `5`, `7`, `5` |
| number | `5`, `-0.5`, `1e3`, `.5`, `5.` | as it stands where that is JSON: `5`, `-0.5`, `1e3`; else made so: `0.5`, `5.0` |
| integer or number | beyond the range of a double (`1e400`) | a string: other readers would take it for infinity |
| object, array | JSON of that type, nested at most 200 deep | the same, spaced as all arguments are |
| any | all that none of these rows takes (`nan`, `5.5` for an integer, `{'a': 1}`, nothing at all) | the string, untouched |

A parameter that allows several types is tried in this order, string last.
"""

import json
import math
import re

from berrylm_ref.chat.schema import ParameterType

MAX_DEPTH = 200  # far below the recursion limit of Python's JSON reader, whose effect depends on the caller's stack

_INTEGER = re.compile(r"([+-]?)([0-9]+)(?:\.0+)?")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


def value_json(text: str, kind: ParameterType) -> str:
    """`text` as JSON of a type that `kind` allows, by the table above; a string where none fits."""
    found = None if kind.only_string or text in kind.words else _typed(text.strip(), kind.kinds)
    return f'"{escaped(text)}"' if found is None else found


def escaped(text: str) -> str:
    """`text` between the quotes of a JSON string, non-ASCII characters as they are. Every character is escaped on its own, so
    a string may be escaped in pieces. Lone surrogates, which JSON text inside a value can bring in, have no UTF-8 form."""
    return _legible(text)[1:-1]


def _legible(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _typed(text: str, kinds: frozenset[str]) -> str | None:
    if text == "null" and ("null" in kinds or "string" not in kinds):
        return "null"
    if "boolean" in kinds and text.lower() in ("true", "false"):
        return text.lower()
    if "integer" in kinds and (found := _integer(text)) is not None:
        return found
    if "number" in kinds and (found := _number(text)) is not None:
        return found
    if "object" in kinds and text.startswith("{") or "array" in kinds and text.startswith("["):
        return _container(text)
    return None


def _integer(text: str) -> str | None:
    match = _INTEGER.fullmatch(text)
    if match is None or not math.isfinite(float(text)):
        return None
    return str(int(match[1] + (match[2].lstrip("0") or "0")))


def _number(text: str) -> str | None:
    if _NUMBER.fullmatch(text) is None or not math.isfinite(float(text)):
        return None
    return text if _JSON_NUMBER.fullmatch(text) else str(float(text))


def _container(text: str) -> str | None:
    if _depth(text) > MAX_DEPTH:
        return None
    try:
        return _legible(json.loads(text))
    except ValueError:  # not JSON, or NaN, or a number out of range
        return None


def _depth(text: str) -> int:
    deepest = depth = 0
    for token in _BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token.group(), 0)
        deepest = max(deepest, depth)
    return deepest
