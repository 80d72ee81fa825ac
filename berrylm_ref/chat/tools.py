"""Split content into text and tool calls in the model's text format. One state machine, `feed` and `finish`; `parse` is one
`feed` and one `finish`.

| where | seen | result |
|---|---|---|
| content | `<tool_call>`, whitespace, `<function=NAME>` | a call begins; its name is given at once, known function or not |
| content | `<tool_call>` and anything else | text, the tag included; so is every other tag, a bare `<function=` too |
| content | whitespace next to a block, at the start or the end of all content | dropped; between two texts it stays |
| content | the text ends between `<tool_call>` and the `>` of `<function=NAME>` | dropped; a shorter start of a tag is text |
| call | `<parameter=KEY>` | a value begins; one newline right after it is layout |
| call | `</function>` | the call is complete |
| call | `</tool_call>` | the call is complete, the block ends (`</function>` was missing) |
| call | `<tool_call>` or `<function=` | the call ends, not complete; what was seen is read as the next one's beginning |
| call | any other text, `<parameter=` without a key included | dropped |
| after `</function>` | whitespace, `</tool_call>` | the block ends |
| after `</function>` | whitespace, `<function=NAME>` | another call of this block |
| after `</function>` | anything else | content; one `</tool_call>` in it is dropped, up to the next call |
| value | `</parameter>` and, after whitespace, one of `<parameter=` `</function>` `</tool_call>` `<tool_call>` \
`<function=` | the value ends |
| value | `<parameter=KEY>` | the value ends (its closing tag was missing) |
| value | `</function>` and, after whitespace, one of `</tool_call>` `<tool_call>` `<function=` | the value ends (missing) |
| value | `</tool_call>` and, after whitespace, `<tool_call>` | the value ends (missing) |
| value | `<tool_call>` and, after whitespace, `<function=` | value and call end: no argument moves to another call |
| value | `<function=NAME>` and, after whitespace, `<parameter=`, `</function>` or `</tool_call>` | likewise |
| value | any other text, these tags elsewhere included | the value, verbatim |
| value | one newline right before its end | layout |
| value | a key that this call already has | dropped; the first one wins |
| call, value | the text ends | ends what is open, not complete; an unfinished tag is dropped |

The end of the text counts as each tag that must follow another. NAME and KEY: 1 to 256 characters without `<`, `>` and
line breaks, spaces around them aside. `values.py` has the table of types. Held back: a suffix that can still become one of
these tags with what must follow it, the newline or the whitespace before it that may be layout, and every value that is
not a plain string.
"""

from typing import Any

from berrylm_ref.chat.calls import CallSink, ToolCall, ToolCallDelta
from berrylm_ref.chat.markup import (
    BLOCK_CLOSE,
    BLOCK_OPEN,
    FUNCTION_CLOSE,
    FUNCTION_HEAD,
    MORE,
    NO,
    PARAMETER_CLOSE,
    PARAMETER_HEAD,
    cut,
    follows,
    literal,
    named,
    one_of,
    skip_space,
)
from berrylm_ref.chat.schema import parameter_types

# What must follow a tag, after whitespace, for it to end a value.
_VALUE_ENDS = {
    PARAMETER_CLOSE: (PARAMETER_HEAD, FUNCTION_CLOSE, BLOCK_CLOSE, BLOCK_OPEN, FUNCTION_HEAD),
    FUNCTION_CLOSE: (BLOCK_CLOSE, BLOCK_OPEN, FUNCTION_HEAD),
    BLOCK_CLOSE: (BLOCK_OPEN,),
    BLOCK_OPEN: (FUNCTION_HEAD,),
}


class ToolCallParser:
    """Content and tool calls of what the reasoning parser gives as content; the rules are in the module's table.

    Args:
        tools: OpenAI tool dicts, or None.
    Errors: ValueError for malformed tools, naming the place; for a `delta` that is no str; for `feed` or `finish` after
        `finish`. No text is an error.
    """

    def __init__(self, tools: Any = None):
        self._sink = CallSink(parameter_types(tools))
        self._tools = tools
        self._text = ""  # not consumed yet
        self._step = self._content
        self._finished = False
        self._owed = False  # a block's `</tool_call>` may still come
        self._value_begins = False

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far; the arguments of one that is still open are not JSON yet."""
        return self._sink.calls

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """(content, calls) of a whole text. What was fed to this parser before plays no part."""
        parser = ToolCallParser(self._tools)
        content = parser.feed(text).content
        return content + parser.finish().content, parser.calls

    def feed(self, delta: str) -> ToolCallDelta:
        """Take the next piece of the text; give what is certain by now and was not given before."""
        if not isinstance(delta, str):
            raise ValueError(f"ToolCallParser.feed: delta: expected a str, got {type(delta).__name__}")
        self._refuse_after_finish("feed")
        self._text += delta
        return self._run(final=False)

    def finish(self) -> ToolCallDelta:
        """The text has ended: give what was held back and close what is open."""
        self._refuse_after_finish("finish")
        self._finished = True
        return self._run(final=True)

    def _refuse_after_finish(self, operation: str) -> None:
        if self._finished:
            raise ValueError(f"ToolCallParser.{operation}: expected a parser whose text goes on, got a finished one")

    def _run(self, final: bool) -> ToolCallDelta:
        while self._text and self._step(final):
            pass
        if final:
            self._end_of_text()
        return self._sink.take()

    def _end_of_text(self) -> None:
        if self._step == self._value:
            self._sink.close_value()
        if self._step in (self._value, self._call):
            self._sink.close_call(complete=False)
        else:
            self._sink.end_content()

    # Each step consumes text and may move to another step; it gives False when it needs more text than there is.

    def _content(self, final: bool) -> bool:
        at = self._text.find("<")
        while at >= 0:
            head = literal(self._text, at, BLOCK_OPEN)
            end, name = named(self._text, skip_space(self._text, head), FUNCTION_HEAD) if head >= 0 else (head, "")
            close = literal(self._text, at, BLOCK_CLOSE) if self._owed else NO
            if end >= 0 or close >= 0 or MORE in (end, close) and not final:
                break
            if end == MORE and head >= 0:  # cut off inside the opening of a call
                self._sink.write(self._text[:at])
                self._sink.block()
                self._text = ""
                return False
            at = self._text.find("<", at + 1)
        else:
            self._sink.write(self._text)
            self._text = ""
            return False
        self._sink.write(self._text[:at])
        self._text = self._text[at if MORE in (end, close) else max(end, close) :]
        if end >= 0:
            self._open_call(name)
        elif close >= 0:
            self._sink.block()
            self._owed = False
        return end >= 0 or close >= 0

    def _call(self, final: bool) -> bool:
        tags = (FUNCTION_CLOSE, BLOCK_CLOSE, BLOCK_OPEN, FUNCTION_HEAD, PARAMETER_HEAD)
        _, tag, rest = cut(self._text, tags, final)
        self._text = rest
        if tag == PARAMETER_HEAD:
            end, key = named(tag + rest, 0, PARAMETER_HEAD)
            if end == MORE:
                self._text = tag + rest
                return False
            if end >= 0:
                self._text = rest[end - len(tag) :]
                self._sink.open_value(key)
                self._step, self._value_begins = self._value, True
        elif tag:
            self._sink.close_call(complete=tag in (FUNCTION_CLOSE, BLOCK_CLOSE))
            self._step = self._content if tag in (BLOCK_CLOSE, BLOCK_OPEN) else self._after
            self._owed = self._step == self._after
            self._text = tag + rest if tag in (BLOCK_OPEN, FUNCTION_HEAD) else rest
        return bool(tag)

    def _value(self, final: bool) -> bool:
        if self._value_begins:
            self._value_begins = False
            self._text = self._text.removeprefix("\n")
        at, end = self._text.find("<"), NO
        while at >= 0:
            end = _value_end(self._text, at)
            if end != NO:
                break
            at = self._text.find("<", at + 1)
        if end == MORE and final:
            end = at  # what was cut off is markup
        stop = at if at >= 0 else len(self._text)
        if self._text.endswith("\n", 0, stop):
            stop -= 1  # layout if the value ends here; until that is known it waits
        self._sink.add(self._text[:stop])
        if end < 0:
            self._text = self._text[stop:]
            return False
        self._text = self._text[end:]
        self._sink.close_value()
        self._step = self._call
        return True

    def _after(self, final: bool) -> bool:
        at = skip_space(self._text, 0)
        close = literal(self._text, at, BLOCK_CLOSE)
        end, name = named(self._text, at, FUNCTION_HEAD)
        if close >= 0:
            self._text = self._text[close:]
            self._step, self._owed = self._content, False
        elif end >= 0:
            self._text = self._text[end:]
            self._open_call(name)
        elif MORE in (close, end):
            return False
        else:
            self._step = self._content
        return True

    def _open_call(self, name: str) -> None:
        self._sink.open_call(name)
        self._step = self._call


def _value_end(text: str, at: int) -> int:
    """Whether the value ends at `at`: the position from which the call's text goes on, NO or MORE."""
    for tag, after in _VALUE_ENDS.items():
        end = literal(text, at, tag)
        if end >= 0:
            found = follows(text, end, after)
            return found if found < 0 else end if tag == PARAMETER_CLOSE else at
    parameter, _ = named(text, at, PARAMETER_HEAD)
    function, _ = named(text, at, FUNCTION_HEAD)
    if function >= 0:
        function = follows(text, function, (PARAMETER_HEAD, FUNCTION_CLOSE, BLOCK_CLOSE))
    if parameter >= 0 or function >= 0:
        return at
    return MORE if MORE in (parameter, function, one_of(text, at, tuple(_VALUE_ENDS))) else NO
