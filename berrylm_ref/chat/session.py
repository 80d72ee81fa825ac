"""A conversation with a model, here or behind a server: turns out as they come, and the messages that they add up to."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engine.llm import LLM, sampling_defaults
from ..engine.params import SamplingParams
from .calls import CallFragment
from .template import ChatTemplate
from .turn import Turn, TurnDelta, opens_reasoning


@dataclass(frozen=True)
class Ended:
    """How a turn ended, and what it cost. cached: of the prompt's tokens, those that did not have to run."""

    reason: str
    prompt: int
    cached: int
    made: int


class ChatModel(Protocol):
    """What a conversation asks. ``answer`` yields the turn's deltas and, last, how it ended; closed early, it is cancelled."""

    def answer(self, messages: list[dict], tools: list[dict] | None, thinking: bool) -> Iterator[TurnDelta | Ended]: ...


class LocalModel:
    """An engine in this process; it samples as the model's generation_config.json says."""

    def __init__(self, llm: LLM):
        template = ChatTemplate.from_folder(llm.folder) if llm.folder and llm.tokenizer else None
        if template is None:
            raise ValueError("chat: model: expected a folder with tokenizer.json and chat_template.jinja, got one without")
        self._llm, self._template, self._defaults = llm, template, sampling_defaults(llm.folder)

    def answer(self, messages: list[dict], tools: list[dict] | None, thinking: bool) -> Iterator[TurnDelta | Ended]:
        llm = self._llm
        prompt = self._template.encode(messages, tools, tokenizer=llm.tokenizer, enable_thinking=thinking)
        (request,) = llm.requests(prompt, SamplingParams(**self._defaults, max_tokens=llm.room(len(prompt))))
        turn = Turn(opens_reasoning(prompt, llm.tokenizer), tools)
        with closing(llm.stream(request)) as texts:
            for text in texts:
                yield turn.feed(text)
        yield turn.finish()
        yield Ended(turn.finish_reason(request), len(prompt), request.cached_tokens or 0, len(request.output_ids))


class RemoteModel:
    """An OpenAI-compatible server at ``url``; ``key`` is its API key."""

    def __init__(self, url: str, key: str | None = None):
        self._url, self._key = url.rstrip("/").removesuffix("/v1"), key
        with self._open("/v1/models") as listed, self._in_form():
            self._name = json.load(listed)["data"][0]["id"]

    def answer(self, messages: list[dict], tools: list[dict] | None, thinking: bool) -> Iterator[TurnDelta | Ended]:
        body = {
            "model": self._name,
            "messages": messages,
            "chat_template_kwargs": {"enable_thinking": thinking},
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"tools": tools} if tools else {}),
        }
        reason, ended = "", None
        with self._open("/v1/chat/completions", body) as lines:
            for chunk in self._chunks(lines):
                with self._in_form():
                    choices, usage = chunk["choices"], chunk.get("usage")
                    deltas = [turn_delta(choice["delta"]) for choice in choices]
                    reason = next((choice["finish_reason"] for choice in choices if choice["finish_reason"]), reason)
                    if usage:
                        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                        ended = Ended(reason, usage["prompt_tokens"], cached, usage["completion_tokens"])
                yield from deltas
        if ended is None:
            raise ValueError(f"chat: {self._url}: expected a stream that ends with its usage, got one that broke off")
        yield ended

    def _chunks(self, lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
        try:
            for line in lines:
                text = line.decode().strip().removeprefix("data: ")
                if not text.startswith("{"):  # [DONE], the lines between
                    continue
                chunk = json.loads(text)
                if "error" in chunk:
                    raise ValueError(f"chat: {self._url}: {chunk['error']['message']}")
                yield chunk
        except http.client.HTTPException as error:
            raise ValueError(f"chat: {self._url}: expected a whole stream, got {error!r}") from error

    @contextmanager
    def _in_form(self) -> Iterator[None]:
        """Errors of a look into what the server sent become a ValueError."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"chat: {self._url}: expected answers in OpenAI's form, got others ({error!r})") from error

    def _open(self, route: str, body: dict[str, Any] | None = None) -> Any:
        """A response to read; ValueError with what the server says where it refuses, OSError where there is none."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self._url + route, data, headers))
        except urllib.error.HTTPError as error:
            raise ValueError(f"chat: {self._url}{route}: {error.code} {error.read().decode(errors='replace')}") from error
        except http.client.HTTPException as error:
            raise ValueError(f"chat: {self._url}{route}: expected an HTTP server, got {error!r}") from error


def turn_delta(delta: dict[str, Any]) -> TurnDelta:
    """The delta of a chunk as the ``Turn`` of its server gave it."""
    calls = [
        CallFragment(call["index"], call["function"].get("name"), call["function"].get("arguments") or "")
        for call in delta.get("tool_calls") or []
    ]
    return TurnDelta(delta.get("reasoning_content") or "", delta.get("content") or "", calls)


@dataclass
class Conversation:
    """``messages`` so far. A turn that is not heard to its end leaves no trace in them."""

    model: ChatModel
    tools: list[dict] | None = None
    thinking: bool = True
    messages: list[dict] = field(default_factory=list)

    def say(self, *messages: dict) -> Iterator[TurnDelta | Ended]:
        """Add ``messages``, a user's or the results of calls, and hear the model's turn."""
        asked = [*self.messages, *messages]
        reasoning, content, calls = "", "", []
        with closing(self.model.answer(asked, self.tools, self.thinking)) as parts:
            for part in parts:
                if isinstance(part, TurnDelta):
                    reasoning, content = reasoning + part.reasoning, content + part.content
                    for fragment in part.calls:
                        if fragment.index != len(calls) - (fragment.name is None):
                            raise ValueError(f"chat: tool_calls: expected one call after the other, got index {fragment.index}")
                        if fragment.name is not None:
                            function = {"name": fragment.name, "arguments": ""}
                            calls.append({"id": f"call_{len(asked)}_{len(calls)}", "type": "function", "function": function})
                        calls[fragment.index]["function"]["arguments"] += fragment.arguments
                yield part
        turn = {"role": "assistant", "content": content or None, "reasoning_content": reasoning or None}
        self.messages = [*asked, {**turn, "tool_calls": calls} if calls else turn]

    def reset(self) -> None:
        self.messages = []
