"""What the tool parser gives: the deltas, the calls, and the sink that its steps write to."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from berrylm_ref.chat.arguments import ArgumentWriter
from berrylm_ref.chat.markup import skip_space
from berrylm_ref.chat.schema import ParameterType


@dataclass
class CallFragment:
    """What one `feed` or `finish` adds to one call: its name the first time, else None, and more JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class ToolCallDelta:
    """What one `feed` or `finish` adds; at most one fragment a call, in order."""

    content: str = ""
    calls: list[CallFragment] = field(default_factory=list)


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is a JSON object; `complete` says that its `</function>` or `</tool_call>` was seen, so that a
    caller can tell a call that a token limit cut off."""

    name: str
    arguments: str
    complete: bool


@dataclass
class _Call:
    name: str
    writer: ArgumentWriter
    sent: list[str] = field(default_factory=list)
    complete: bool = False


class CallSink:
    """Gathers content and calls into the next delta. Whitespace next to a block (from `<tool_call>` to `</tool_call>`)
    waits: between two texts it is content, at the start or the end of all content it is layout.

    Args:
        functions: {function name: {parameter name: its types}}; the values of a function it lacks are strings.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, ParameterType]]):
        self._functions = functions
        self._calls: list[_Call] = []
        self._delta = ToolCallDelta()
        self._space = ""  # whitespace after the content sent so far
        self._any_content = False
        self._by_block = False  # a block stands next to that whitespace

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far; the arguments of one that is still open are not JSON yet."""
        return [ToolCall(call.name, "".join(call.sent), call.complete) for call in self._calls]

    def take(self) -> ToolCallDelta:
        """What came since the last `take`."""
        delta, self._delta = self._delta, ToolCallDelta()
        return delta

    def write(self, text: str) -> None:
        """Content."""
        solid = text.rstrip()
        if solid:
            lead = self._space + solid[: skip_space(solid, 0)]
            self._delta.content += solid.lstrip() if self._by_block and not self._any_content else lead + solid.lstrip()
            self._any_content, self._by_block, self._space = True, False, ""
        self._space += text[len(solid) :]

    def block(self) -> None:
        """A block, or what is left of one, stands here."""
        self._by_block = True

    def end_content(self) -> None:
        """The text has ended outside a call."""
        if not self._by_block:
            self._delta.content += self._space

    def open_call(self, name: str) -> None:
        """A call begins; everything up to `close_call` is its own."""
        self.block()
        self._calls.append(_Call(name, ArgumentWriter(self._functions.get(name, {}))))
        self._delta.calls.append(CallFragment(len(self._calls) - 1, name))

    def open_value(self, key: str) -> None:
        """A value of the open call begins."""
        self._send(self._calls[-1].writer.begin(key))

    def add(self, text: str) -> None:
        """Text of the open value."""
        self._send(self._calls[-1].writer.add(text))

    def close_value(self) -> None:
        """The open value ends."""
        self._send(self._calls[-1].writer.end())

    def close_call(self, complete: bool) -> None:
        """The open call ends; no value of it is open."""
        self._calls[-1].complete = complete
        self._send(self._calls[-1].writer.close())

    def _send(self, arguments: str) -> None:
        if not arguments:
            return
        self._calls[-1].sent.append(arguments)
        if not self._delta.calls:
            self._delta.calls.append(CallFragment(len(self._calls) - 1))
        self._delta.calls[-1].arguments += arguments
