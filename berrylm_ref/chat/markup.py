"""Tags in a text that is still growing: yes, no, or not known yet.

A streaming parser must not decide from the text so far what the rest of the text could change. So each matcher looks for
a tag at one position and gives the position after it, `NO`, or `MORE`: all of the text from there on could still become
the tag. `NO` and a position are final, no later text changes them; that is why every way of cutting a text gives the
same result.
"""

import re

NO = -1
MORE = -2

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
BLOCK_OPEN, BLOCK_CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_HEAD, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER_HEAD, PARAMETER_CLOSE = "<parameter=", "</parameter>"

MAX_NAME = 256  # a bound on how much text a tag that never ends can hold back

_SPACE = re.compile(r"\s*")
_NAME_END = re.compile(r"[<>\r\n]")


def skip_space(text: str, at: int) -> int:
    """The first position from `at` on that is not whitespace."""
    return _SPACE.match(text, at).end()


def literal(text: str, at: int, tag: str) -> int:
    """The position after `tag` where it stands at `at`, else NO or MORE."""
    if text.startswith(tag, at):
        return at + len(tag)
    return MORE if len(text) - at < len(tag) and tag.startswith(text[at:]) else NO


def one_of(text: str, at: int, tags: tuple[str, ...]) -> int:
    """`literal` for the first of `tags` that stands at `at`; MORE where one of them still could."""
    ends = [literal(text, at, tag) for tag in tags]
    best = max(ends)
    return best if best >= 0 else MORE if MORE in ends else NO


def follows(text: str, at: int, tags: tuple[str, ...]) -> int:
    """Whether whitespace and one of `tags` stand at `at`: the position after them, NO or MORE."""
    return one_of(text, skip_space(text, at), tags)


def named(text: str, at: int, head: str) -> tuple[int, str]:
    """A tag such as `<function=NAME>` at `at`: (position after it, NAME), else (NO or MORE, "").

    A name has 1 to MAX_NAME characters, spaces around it aside, and no `<`, `>` or line break: a head without a name
    must not swallow the text up to the next `>`.
    """
    start = literal(text, at, head)
    if start < 0:
        return start, ""
    stop = _NAME_END.search(text, start, start + MAX_NAME + 1)
    if stop is None:
        return (NO if len(text) - start > MAX_NAME else MORE), ""
    name = text[start : stop.start()].strip()
    return (stop.end(), name) if stop.group() == ">" and name else (NO, "")


def cut(text: str, tags: tuple[str, ...], final: bool) -> tuple[str, str, str]:
    """Split at the first of `tags`: (text before it, the tag, text after it).

    Without one: (text that can't belong to a tag, "", the tail that still can); with `final` there is no such tail.
    """
    at = text.find("<")
    while at >= 0:
        end = one_of(text, at, tags)
        if end >= 0:
            return text[:at], text[at:end], text[end:]
        if end == MORE and not final:
            return text[:at], "", text[at:]
        at = text.find("<", at + 1)
    return text, "", ""
