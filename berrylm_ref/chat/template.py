"""From OpenAI messages to the prompt: the checkpoint's chat_template.jinja, run in a sandbox on validated messages.

The shipped template writes, without a space or newline of its own between the parts of a turn:

    <|system|>TEXT<|end|>                                       with the tools, one JSON object a line, in the first one
    <|user|>TEXT<|end|>
    <|assistant|><think>REASONING</think>CONTENT CALLS<|end|>   calls in the model's format
    <|tool|>RESULT<|end|>                                       results of one turn in the order of its calls
    <|assistant|><think>                                        the generation prompt; thinking off: <think></think>

So turn two's prompt starts with turn one's prompt and answer, and a prefix cache hits all of it, if the client sends the
reasoning back as `reasoning_content` and the model closed its reasoning before a call. Without `reasoning_content` the turn
has an empty block, as with thinking off: the common prefix then ends where that turn's reasoning began.
"""

import json
import re
import reprlib
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..tokenizer import Tokenizer
from .markup import MAX_NAME
from .schema import parameter_types

ROLES = ("system", "user", "assistant", "tool")
BREAK = "\ud800"  # marks a cut in client text; a lone surrogate, which no valid client text contains
_NAME = re.compile(rf"[^<>\r\n]{{1,{MAX_NAME}}}")


class ChatTemplate:
    """A chat template. It sees `messages`, `tools`, `add_generation_prompt` and `enable_thinking`; each message has `role` and
    `content`, an assistant's also `reasoning_content` and `tool_calls` (`name`, `arguments`: {key: text}); a tool is JSON text.
    """

    def __init__(self, source: str):
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"ChatTemplate: source: expected a jinja2 template, got {error}") from error

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ChatTemplate | None":
        """The folder's chat_template.jinja, or None: a folder without one serves no chat."""
        path = Path(folder) / "chat_template.jinja"
        return cls(path.read_text(encoding="utf-8").removesuffix("\n")) if path.is_file() else None

    def render(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool = True,
    ) -> str:
        """The prompt as text. To feed a model use `encode`: here a user's `<|end|>` looks like the template's own.

        Args:
            messages: dicts with `role` and `content` (a string or a list of text parts; None for an assistant); an assistant's
                may have `reasoning_content` and `tool_calls` (`id`, `type`, `function`: `name` and `arguments`, JSON of an
                object); a tool's has the `tool_call_id` of a call before it.
            tools: OpenAI tool dicts.
            add_generation_prompt: end with the beginning of the assistant's next turn.
            enable_thinking: begin that turn inside the reasoning; else with a closed, empty one.
        Errors: ValueError that names the field, before the template runs.

        `ToolCallParser` reads a rendered call back as it was, except where the text format has no room: content before a call
        loses whitespace at its ends; a value is typed by the schema (of a string parameter 5 becomes "5", of an integer "5"
        becomes 5); a string that holds what ends a value (`<parameter=k>`, or `</parameter>` and then another tag: the table of
        `tools`) ends there.
        """
        return self._render(messages, tools, add_generation_prompt, enable_thinking, str)

    def encode(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        *,
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        enable_thinking: bool = True,
    ) -> list[int]:
        """The prompt as token ids. Only the template writes control tokens: where a client's text spells one (`<|end|>`,
        `<think>`) the text is cut after its first character, so that it is encoded as the text it is."""

        def plain(text: str) -> str:
            return tokenizer.added_pattern.sub(lambda found: found[0][:1] + BREAK + found[0][1:], text)

        text = self._render(messages, tools, add_generation_prompt, enable_thinking, plain)
        return [i for piece in text.split(BREAK) for i in tokenizer.encode(piece)]

    def _render(
        self, messages: Any, tools: Any, add_generation_prompt: bool, enable_thinking: bool, plain: Callable[[str], str]
    ) -> str:
        for name, value in (("add_generation_prompt", add_generation_prompt), ("enable_thinking", enable_thinking)):
            if not isinstance(value, bool):
                raise _wrong(name, "a bool", value)
        seen = {"messages": _messages(messages, plain), "tools": _tools(tools, plain)}
        try:
            return self._template.render(
                **seen, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
            )
        except TemplateError as error:
            raise ValueError(f"ChatTemplate: source: expected a template for these messages, got {error}") from error


# Validation; each function gives what the template sees, client text passed through `plain`.


def _messages(messages: Any, plain: Callable[[str], str]) -> list[dict]:
    if not isinstance(messages, list | tuple) or not messages:
        raise _wrong("messages", "a list of at least one message", messages)
    turns: list[dict] = []
    ids: dict[str, int] = {}  # of the calls so far; a repeated id means the later call
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise _wrong(where, "a dict", message)
        role = message.get("role")
        if role not in ROLES:
            raise _wrong(f"{where}.role", f"one of {', '.join(ROLES)}", role)
        turn = {"role": role, "content": plain(_content(f"{where}.content", message.get("content"), role == "assistant"))}
        if role == "assistant":
            reasoning = message.get("reasoning_content")
            turn["reasoning_content"] = "" if reasoning is None else plain(_text(f"{where}.reasoning_content", reasoning))
            turn["tool_calls"] = []
            for k, call in enumerate(_calls(f"{where}.tool_calls", message.get("tool_calls"))):
                made, call_id = _call(f"{where}.tool_calls[{k}]", call, plain)
                ids[call_id] = len(ids)
                turn["tool_calls"].append(made)
        elif role == "tool":
            call_id = message.get("tool_call_id")
            if not isinstance(call_id, str) or call_id not in ids:
                raise _wrong(f"{where}.tool_call_id", "the id of a call before it", call_id)
            turn["order"] = ids[call_id]
        turns.append(turn)
    return _in_order_of_calls(turns)


def _in_order_of_calls(turns: list[dict]) -> list[dict]:
    """Neighbouring results, sorted by their call: a result does not show its id, so its place must say whose it is."""
    ordered: list[dict] = []
    for is_result, group in groupby(turns, key=lambda turn: turn["role"] == "tool"):
        neighbours = list(group)
        ordered += sorted(neighbours, key=lambda turn: turn["order"]) if is_result else neighbours
    return ordered


def _content(where: str, value: Any, optional: bool) -> str:
    if isinstance(value, list | tuple):
        parts = []
        for i, part in enumerate(value):
            if not isinstance(part, Mapping):
                raise _wrong(f"{where}[{i}]", "a dict", part)
            if part.get("type") != "text":
                raise _wrong(f"{where}[{i}].type", "'text'", part.get("type"))
            parts.append(_text(f"{where}[{i}].text", part.get("text")))
        return "".join(parts)
    if value is None and optional:
        return ""
    return _text(where, value, "a str or a list of text parts" + (" or None" if optional else ""))


def _calls(where: str, value: Any) -> list | tuple:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _wrong(where, "a list of calls or None", value)
    return value


def _call(where: str, call: Any, plain: Callable[[str], str]) -> tuple[dict, str]:
    if not isinstance(call, Mapping):
        raise _wrong(where, "a dict", call)
    if call.get("type", "function") != "function":
        raise _wrong(f"{where}.type", "'function'", call.get("type"))
    call_id = _text(f"{where}.id", call.get("id"))
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(f"{where}.function", "a dict", function)
    name = _name(f"{where}.function.name", function.get("name"))
    place = f"{where}.function.arguments"
    written = _text(place, function.get("arguments"))
    try:
        arguments = json.loads(written)
        values = {key: value if isinstance(value, str) else _json(place, value) for key, value in arguments.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise _wrong(place, "JSON text of an object", written) from error
    texts = {_name(f"{place}: key", key): plain(_text(f"{place}.{key}", value)) for key, value in values.items()}
    return {"name": name, "arguments": texts}, call_id


def _tools(tools: Any, plain: Callable[[str], str]) -> list[str]:
    parameter_types(tools)  # refuses what the parser of the answer would refuse
    return [plain(_text(f"tools[{i}]", _json(f"tools[{i}]", tool["function"]))) for i, tool in enumerate(tools or ())]


def _json(where: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(where, "a value that JSON can write", value) from error


def _name(where: str, value: Any) -> str:
    text = _text(where, value)
    if not _NAME.fullmatch(text) or text != text.strip():
        raise _wrong(where, f"1 to {MAX_NAME} characters without <, >, line breaks and spaces at the ends", value)
    return text


def _text(where: str, value: Any, expected: str = "a str") -> str:
    if not isinstance(value, str):
        raise _wrong(where, expected, value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _wrong(where, "text without lone surrogates", value) from error
    return value


def _wrong(where: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"ChatTemplate: {where}: expected {expected}, got {reprlib.repr(got)}")
