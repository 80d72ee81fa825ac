"""A conversation, and the exchange it is made of: a question, what leads to its answer, and the answer."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Conversation:
    """One sample.

    messages: in OpenAI form; assistant messages may carry `reasoning_content` and `tool_calls`.
    tools: OpenAI tool dicts, or None.
    thinking: whether it is served with thinking on.
    meta: what is right: `answers`, a text for each user message that has one; `calls`, (name, arguments) in order.
    """

    messages: list[dict]
    tools: list[dict] | None
    thinking: bool
    meta: dict[str, Any]


@dataclass
class Exchange:
    """A user message up to the last assistant message that answers it. `tools`: the names that must be listed for it;
    `without`: those that must not, because the answer would then call them."""

    messages: list[dict]
    answer: str
    tools: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    calls: list[tuple[str, dict]] = field(default_factory=list)
    number: int | None = None  # the answer of a calculation, for a question that goes on from it


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str | None, thinking: str | None = None, calls: list[dict] | None = None) -> dict:
    """An assistant message; thinking None where it is off."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking is not None:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message
