"""Split generated text into reasoning and content in the model's text format. One state machine, `feed` and `finish`;
`parse` is one `feed` and one `finish`.

| where | seen | result |
|---|---|---|
| start | optional whitespace, `<think>` | dropped; the reasoning begins (a model may repeat the tag that the template wrote) |
| start | anything else | reasoning with `in_reasoning`, else content, first character included |
| reasoning | `</think>` | dropped; the content begins |
| reasoning | `<tool_call>` | the reasoning ends at once; `<tool_call>` is the first text of the content |
| reasoning | another `<think>` | text like any other |
| reasoning | whitespace at either end | dropped, whatever ends it, the end of the text included |
| reasoning | the text ends, also inside a tag | all of it was reasoning; an unfinished tag is text |
| content after `</think>` | newlines at its start | dropped; spaces stay, they may indent code |
| content after `</think>`, or without reasoning | any tag | text like any other, `</think>` and `<think>` too |
| content after `<tool_call>` in the reasoning | `</think>` outside a call | dropped, wherever it comes |
| content after `<tool_call>` in the reasoning | `</think>` inside a call | text: it may be part of an argument |

"Inside a call" is from `<tool_call>`, whitespace and `<function=` to `</function>` or `</tool_call>`.

Held back: a suffix that can still become a tag, and with it the whitespace that ends the reasoning so far or, at the
start, stands before a possible `<think>`.
"""

from dataclasses import dataclass

from berrylm_ref.chat.markup import (
    BLOCK_CLOSE,
    BLOCK_OPEN,
    FUNCTION_CLOSE,
    FUNCTION_HEAD,
    MORE,
    THINK_CLOSE,
    THINK_OPEN,
    cut,
    literal,
    skip_space,
)


@dataclass(frozen=True)
class ReasoningDelta:
    """What one `feed` or `finish` adds; "" where it adds nothing."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Reasoning and content of one generated text; the rules are in the module's table.

    Args:
        in_reasoning: the prompt ends with an opened `<think>`, so the text starts inside the reasoning. Otherwise only
            a `<think>` that the model opens itself, at the start, begins one.
    Errors: ValueError for arguments of another type, and for `feed` or `finish` after `finish`.
    """

    def __init__(self, in_reasoning: bool = True):
        if not isinstance(in_reasoning, bool):
            raise ValueError(f"ReasoningParser: in_reasoning: expected a bool, got {in_reasoning!r}")
        self.in_reasoning = in_reasoning
        self._text = ""  # not consumed yet
        self._step = self._start
        self._finished = False
        self._reasoning: list[str] = []  # of the current call of feed or finish
        self._content: list[str] = []
        self._space = ""  # whitespace after the reasoning sent so far
        self._any_reasoning = False

    @property
    def reasons(self) -> bool:
        """Text that comes now is reasoning, as far as what has come can say."""
        return self._step == self._think or (self.in_reasoning and self._step == self._start)

    def parse(self, text: str) -> tuple[str, str]:
        """(reasoning, content) of a whole text. What was fed to this parser before plays no part."""
        parser = ReasoningParser(self.in_reasoning)
        first, last = parser.feed(text), parser.finish()
        return first.reasoning + last.reasoning, first.content + last.content

    def feed(self, delta: str) -> ReasoningDelta:
        """Take the next piece of the text; give what is certain by now and was not given before."""
        if not isinstance(delta, str):
            raise ValueError(f"ReasoningParser.feed: delta: expected a str, got {type(delta).__name__}")
        self._refuse_after_finish("feed")
        self._text += delta
        return self._run(final=False)

    def finish(self) -> ReasoningDelta:
        """The text has ended: give what was held back."""
        self._refuse_after_finish("finish")
        self._finished = True
        return self._run(final=True)

    def _refuse_after_finish(self, operation: str) -> None:
        if self._finished:
            raise ValueError(f"ReasoningParser.{operation}: expected a parser whose text goes on, got a finished one")

    def _run(self, final: bool) -> ReasoningDelta:
        while self._text and self._step(final):
            pass
        delta = ReasoningDelta("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        return delta

    # Each step consumes text and may move to another step; it gives False when it needs more text than there is.

    def _start(self, final: bool) -> bool:
        at = skip_space(self._text, 0)
        end = literal(self._text, at, THINK_OPEN)
        if end == MORE and not final:
            return False
        if end >= 0:
            self._text = self._text[end:]
        self._step = self._think if end >= 0 or self.in_reasoning else self._pass
        return True

    def _think(self, final: bool) -> bool:
        text, tag, self._text = cut(self._text, (THINK_CLOSE, BLOCK_OPEN), final)
        solid = text.rstrip()
        if solid:
            self._reasoning.append(self._space + solid if self._any_reasoning else solid.lstrip())
            self._any_reasoning = True
            self._space = ""
        self._space += text[len(solid) :]
        if tag == THINK_CLOSE:
            self._step = self._answer
        elif tag == BLOCK_OPEN:
            self._content.append(tag)
            self._step = self._call_head
        return bool(tag)

    def _answer(self, final: bool) -> bool:
        self._text = self._text.lstrip("\n")
        if self._text:
            self._step = self._pass
        return bool(self._text)

    def _pass(self, final: bool) -> bool:
        self._content.append(self._text)
        self._text = ""
        return False

    def _call_head(self, final: bool) -> bool:
        at = skip_space(self._text, 0)
        self._content.append(self._text[:at])
        self._text = self._text[at:]
        end = literal(self._text, 0, FUNCTION_HEAD)
        if end == MORE and not final:
            return False
        self._step = self._in_call if end >= 0 else self._outside
        return True

    def _in_call(self, final: bool) -> bool:
        text, tag, self._text = cut(self._text, (FUNCTION_CLOSE, BLOCK_CLOSE), final)
        self._content.append(text + tag)
        if tag:
            self._step = self._outside
        return bool(tag)

    def _outside(self, final: bool) -> bool:
        text, tag, self._text = cut(self._text, (THINK_CLOSE, BLOCK_OPEN), final)
        self._content.append(text)
        if tag == BLOCK_OPEN:
            self._content.append(tag)
            self._step = self._call_head
        return bool(tag)
