"""What a turn may consist of when tool calls are forced, limited or forbidden: an automaton over the bytes of its text.

| place | what may follow | then |
|---|---|---|
| think | any text that does not end the turn | `</think>`: lead; `<tool_call>`: head |
| text | any text | `<tool_call>`: head, or with `never` it can't be written |
| lead | up to two newlines, `<tool_call>` | head |
| head | newline, `<function=NAME>` with the name of an allowed function | body |
| body | newline, `<parameter=KEY>`, newline, with a declared key not used yet | value |
| body, all required keys used | newline, `</function>`, newline, `</tool_call>` | done |
| value | any text without another tag of a call | `</parameter>`: body |
| done | the end of the turn; with `many` also lead | |

It works on bytes, so it does not matter how the tokens cut the text: a tag can't be smuggled in letter by letter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .markup import (
    BLOCK_CLOSE,
    BLOCK_OPEN,
    FUNCTION_CLOSE,
    FUNCTION_HEAD,
    PARAMETER_CLOSE,
    PARAMETER_HEAD,
    THINK_CLOSE,
    named,
)
from .schema import parameter_types


@dataclass(frozen=True)
class Place:
    """A row of the table; in `body` and `value` also the function and its keys used so far."""

    kind: str
    function: str = ""
    used: frozenset[str] = frozenset()


@dataclass(frozen=True)
class State:
    """A place, and the bytes there that are the beginning of what must, may or must not follow."""

    place: Place
    begun: bytes = b""


@dataclass(frozen=True)
class Rule:
    """Literals: one of `then`'s keys must come, byte by byte. Text: anything may come; a key of `then` ends it, and what is in
    `never` can't be completed. `may_end`: the turn may end here, for literals only before the first byte."""

    text: bool
    then: dict[bytes, Place]
    never: tuple[bytes, ...] = ()
    may_end: bool = False

    @cached_property
    def marks(self) -> tuple[bytes, ...]:
        return (*self.then, *self.never)


@dataclass
class Grammar:
    """functions: {name: (declared keys, required keys)} that may be called; start: the first place; many: calls may follow
    the first one; calls: with False no call can be opened from `text`."""

    functions: Mapping[str, tuple[tuple[str, ...], frozenset[str]]]
    start: str
    many: bool = False
    calls: bool = True
    _rules: dict[Place, Rule] = field(default_factory=dict)

    def step(self, state: State, byte: int) -> State | None:
        """The state after one more byte, None where it may not follow."""
        rule = self.rule(state.place)
        begun = state.begun + bytes((byte,))
        if not rule.text:
            if begun in rule.then:
                return State(rule.then[begun])
            return State(state.place, begun) if any(x.startswith(begun) for x in rule.then) else None
        for mark in rule.marks:
            if begun.endswith(mark):
                return State(rule.then[mark]) if mark in rule.then else None
        while begun and not any(x.startswith(begun) for x in rule.marks):
            begun = begun[1:]
        return State(state.place, begun)

    def feed(self, state: State, raw: bytes) -> State | None:
        for byte in raw:
            state = self.step(state, byte)
            if state is None:
                return None
        return state

    def may_end(self, state: State) -> bool:
        rule = self.rule(state.place)
        return rule.may_end and (rule.text or not state.begun)

    def rule(self, place: Place) -> Rule:
        if place not in self._rules:
            self._rules[place] = self._make_rule(place)
        return self._rules[place]

    def _make_rule(self, place: Place) -> Rule:
        head = Place("head")
        leads = {("\n" * n + BLOCK_OPEN).encode(): head for n in range(3)}
        match place.kind:
            case "think":
                return Rule(True, {THINK_CLOSE.encode(): Place("lead"), BLOCK_OPEN.encode(): head})
            case "text" if self.calls:
                return Rule(True, {BLOCK_OPEN.encode(): head}, may_end=True)
            case "text":
                return Rule(True, {}, never=(BLOCK_OPEN.encode(),), may_end=True)
            case "lead":
                return Rule(False, leads)
            case "head":
                return Rule(False, {f"\n{FUNCTION_HEAD}{name}>".encode(): Place("body", name) for name in self.functions})
            case "body":
                return Rule(False, self._body(place))
            case "value":
                tags = (PARAMETER_HEAD, FUNCTION_CLOSE, BLOCK_CLOSE, BLOCK_OPEN, FUNCTION_HEAD)
                back = Place("body", place.function, place.used)
                return Rule(True, {PARAMETER_CLOSE.encode(): back}, never=tuple(tag.encode() for tag in tags))
            case "done":
                return Rule(False, leads if self.many else {}, may_end=True)
        raise ValueError(f"Grammar: start: expected 'think', 'text' or 'lead', got {place.kind!r}")

    def _body(self, place: Place) -> dict[bytes, Place]:
        keys, required = self.functions[place.function]
        then = {
            f"\n{PARAMETER_HEAD}{key}>\n".encode(): Place("value", place.function, place.used | {key})
            for key in keys
            if key not in place.used
        }
        if required <= place.used:
            then[f"\n{FUNCTION_CLOSE}\n{BLOCK_CLOSE}".encode()] = Place("done")
        return then


def callable_functions(tools: list[dict[str, Any]]) -> dict[str, tuple[tuple[str, ...], frozenset[str]]]:
    """{function name: (keys that can be written as a tag, required ones among them)}; ValueError for malformed tools."""
    found = {}
    for i, (name, types) in enumerate(parameter_types(tools).items()):
        keys = tuple(key for key in types if named(f"{PARAMETER_HEAD}{key}>", 0, PARAMETER_HEAD)[1] == key)
        required = (tools[i]["function"].get("parameters") or {}).get("required") or []
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            where = f"tools[{i}].function.parameters.required"
            raise ValueError(f"tool_choice: {where}: expected a list of names, got {str(required)[:80]!r}")
        found[name] = (keys, frozenset(required) & frozenset(keys))
    return found
