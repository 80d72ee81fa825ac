"""POST /v1/chat/completions: the request body and what its fields become.

As OpenAI's API, with these decisions:

| field | meaning here |
|---|---|
| temperature, top_p, top_k, min_p, repetition_penalty | unset: what generation_config.json says, else OpenAI's default |
| max_completion_tokens, max_tokens | one thing, both only if equal; unset: what context and KV memory hold; reasoning counts |
| stop | looked for in the generated text as it is, reasoning and tags included |
| logprobs, top_logprobs | of every generated token, reasoning, tags and the end token included |
| tools[].function.strict | only false: the values of arguments are not held to the schema |
| tool_choice, parallel_tool_calls | the table of `chat/forcing.py` |
| chat_template_kwargs | only enable_thinking (default true) |
| response_format | only {"type": "text"} |
| user | taken, of no effect, as in OpenAI's API |
| messages[].role | developer is system |
| messages[].refusal, name, annotations, audio, function_call | only null, as client libraries send them |

Any other field is refused by name; null means unset.
"""

import re
from typing import Any

from pydantic import StrictBool, StrictInt, StrictStr

from ..engine.params import SamplingParams
from .body import Body, Many
from .protocol import SAMPLING_FIELDS, ApiError, Number, StreamOptions

MAX_DEPTH = 100  # of nested JSON in messages and tools; Python's own limit depends on the caller's stack
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MESSAGE_FIELDS = {
    "system": {"content"},
    "developer": {"content"},
    "user": {"content"},
    "assistant": {"content", "reasoning_content", "tool_calls"},
    "tool": {"content", "tool_call_id"},
}


class ChatRequest(Body):
    """POST /v1/chat/completions; the module's table has what is not OpenAI's."""

    model: StrictStr | None = None
    messages: Many[dict[str, Any]]
    tools: Many[dict[str, Any]] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    temperature: Number = None
    top_p: Number = None
    top_k: StrictInt | None = None
    min_p: Number = None
    n: StrictInt | None = None
    stop: StrictStr | Many[StrictStr] | None = None
    ignore_eos: StrictBool | None = None
    seed: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    response_format: dict[str, Any] | None = None
    user: StrictStr | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Refuse what pydantic can't see."""
        check_messages(self.messages)
        check_tools(self.tools)
        for name in ("tool_choice", "chat_template_kwargs", "response_format"):
            check_depth(name, getattr(self, name))
        if self.response_format is not None and self.response_format != {"type": "text"}:
            refuse("response_format", '{"type": "text"}', self.response_format)
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "logprobs: true beside it", self.logprobs)
        one, other = self.max_tokens, self.max_completion_tokens
        if one is not None and other is not None and one != other:
            refuse("max_tokens", f"max_completion_tokens, {other}, or nothing", one)

    def enable_thinking(self) -> bool:
        """chat_template_kwargs, of which this is all."""
        given = self.chat_template_kwargs or {}
        known_fields("chat_template_kwargs", given, {"enable_thinking"})
        thinking = given.get("enable_thinking")
        if thinking is not None and not isinstance(thinking, bool):
            refuse("chat_template_kwargs.enable_thinking", "true or false", thinking)
        return thinking is not False

    def choice(self) -> tuple[str, str | None]:
        """tool_choice as (auto, none, required or function, name of the function)."""
        given = "auto" if self.tool_choice is None else self.tool_choice
        if given in ("auto", "none", "required"):
            return given, None
        match given:
            case {"type": "function", "function": {"name": str(name), **more}, **rest} if not more and not rest:
                return "function", name
        refuse("tool_choice", '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}', given)

    def sampling_params(self, defaults: dict[str, Any], room: int) -> SamplingParams:
        """``defaults``: what an unset field means for this model; ``room``: most new tokens where the request sets no limit."""
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS if name != "stop_token_ids"}
        given["max_tokens"] = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        given = {"max_tokens": room, **defaults, **{k: v for k, v in given.items() if v is not None}}
        return SamplingParams(logprobs=(self.top_logprobs or 0) if self.logprobs else None, **given)

    def names(self) -> dict[str, str]:
        """What this request calls the arguments that an error of the library names."""
        only_other = self.max_tokens is None and self.max_completion_tokens is not None
        limit = {"max_tokens": "max_completion_tokens"} if only_other else {}
        return {"prompts": "messages", "logprobs": "top_logprobs", **limit}


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Refuse roles and fields that there aren't; what the rest must be is the template's to say."""
    check_depth("messages", messages)
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or role not in MESSAGE_FIELDS:
            refuse(f"messages[{i}].role", "one of " + ", ".join(MESSAGE_FIELDS), role)
        known_fields(f"messages[{i}]", message, {"role"} | MESSAGE_FIELDS[role])
        parts = message.get("content")
        for k, part in enumerate(parts if isinstance(parts, list) else []):
            known_fields(f"messages[{i}].content[{k}]", part, {"type", "text"})
        calls = message.get("tool_calls")
        for k, call in enumerate(calls if isinstance(calls, list) else []):
            known_fields(f"messages[{i}].tool_calls[{k}]", call, {"id", "type", "function"})
            function = call.get("function") if isinstance(call, dict) else None
            known_fields(f"messages[{i}].tool_calls[{k}].function", function, {"name", "arguments"})


def check_tools(tools: list[dict[str, Any]] | None) -> None:
    check_depth("tools", tools)
    for i, tool in enumerate(tools or []):
        known_fields(f"tools[{i}]", tool, {"type", "function"})
        function = tool.get("function")
        known_fields(f"tools[{i}].function", function, {"name", "description", "parameters", "strict"})
        if isinstance(function, dict):
            check_function(f"tools[{i}].function", function)


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked messages as the template knows them."""
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def check_function(where: str, function: dict[str, Any]) -> None:
    name, strict, description = function.get("name"), function.get("strict"), function.get("description")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        refuse(f"{where}.name", "1 to 64 letters, digits, _, - and .", name)
    if strict not in (None, False):
        refuse(f"{where}.strict", "false", strict)
    if description is not None and not isinstance(description, str):
        refuse(f"{where}.description", "text", description)


def known_fields(where: str, given: Any, known: set[str]) -> None:
    """Refuse a field that is not ``known``, unless it is null. What is no object is for others to refuse."""
    for name, value in given.items() if isinstance(given, dict) else ():
        if name not in known and value is not None:
            raise ApiError(400, f"{where}.{name}: this field is not supported", f"{where}.{name}", "unsupported_field")


def check_depth(name: str, value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [x for v in level if isinstance(v, dict | list) for x in (v.values() if isinstance(v, dict) else v)]
    if level:
        raise ApiError(400, f"{name}: expected at most {MAX_DEPTH} levels of nesting, got more", name)


def refuse(field: str, expected: str, got: Any) -> None:
    shown = repr(got)
    raise ApiError(400, f"{field}: expected {expected}, got {shown if len(shown) <= 80 else shown[:77] + '...'}", field)
