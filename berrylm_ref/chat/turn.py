"""One generated turn as its client sees it: reasoning, content and calls, while its text grows or all at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engine.detokenizer import Detokenizer
from ..engine.request import Request
from ..tokenizer import Tokenizer
from .calls import CallFragment, ToolCall
from .markup import BLOCK_OPEN, THINK_OPEN
from .reasoning import ReasoningParser
from .tools import ToolCallParser


@dataclass
class TurnDelta:
    """What one `feed` or `finish` adds."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallFragment] = field(default_factory=list)


class Turn:
    """The reasoning parser and, behind it, the tool parser; without tools all that is no reasoning is content."""

    def __init__(self, in_reasoning: bool, tools: list[dict] | None):
        self._reasoning = ReasoningParser(in_reasoning)
        self._tools = ToolCallParser(tools) if tools else None

    @property
    def calls(self) -> list[ToolCall]:
        return self._tools.calls if self._tools else []

    def feed(self, text: str) -> TurnDelta:
        found = self._reasoning.feed(text)
        return self._split(found.reasoning, found.content)

    def finish(self) -> TurnDelta:
        """The text has ended."""
        found = self._reasoning.finish()
        delta = self._split(found.reasoning, found.content)
        if self._tools:
            last = self._tools.finish()
            delta.content += last.content
            if delta.calls and last.calls and delta.calls[-1].index == last.calls[0].index:
                delta.calls[-1].arguments += last.calls.pop(0).arguments
            delta.calls += last.calls
        return delta

    def _split(self, reasoning: str, content: str) -> TurnDelta:
        if self._tools is None:
            return TurnDelta(reasoning, content)
        found = self._tools.feed(content)
        return TurnDelta(reasoning, found.content, found.calls)

    def finish_reason(self, request: Request) -> str:
        """How `request`, whose text this is, ended: "length" whenever the limit ended it; "tool_calls" if it ended by itself
        and made a call. A call that a stop string cut off is none to run: "stop"."""
        if request.finish_reason != "stop" or not self.calls:
            return request.finish_reason
        cut = isinstance(request.matched, str) and not self.calls[-1].complete
        return "stop" if cut else "tool_calls"


def opens_reasoning(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the prompt ends with an opened `<think>`, so that the turn starts inside the reasoning."""
    return tokenizer.decode(prompt_ids[-16:], skip_special=False).rstrip().endswith(THINK_OPEN)


def reasoning_tokens(output_ids: Sequence[int], tokenizer: Tokenizer, in_reasoning: bool) -> int:
    """How many of a turn's tokens are reasoning, the tag that closes it included; a call that ends it is none of it."""
    parser, detokenizer, count = ReasoningParser(in_reasoning), Detokenizer(tokenizer), 0
    for token in output_ids:
        before = parser.reasons
        content = parser.feed(detokenizer.feed(token)).content
        if before and not parser.reasons:
            return count + (not content.startswith(BLOCK_OPEN))
        count += parser.reasons
    return count
