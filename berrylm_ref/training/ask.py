"""Ask a model: questions in, replies out. ``LocalClient`` runs an engine in this process, ``ServedClient`` asks a server."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from ..chat import ReasoningParser, ToolCallParser
from ..chat.template import ChatTemplate
from ..engine.llm import LLM
from ..engine.params import SamplingParams
from ..parity.client import Http, reading

Progress = Callable[[int], None]  # called with how many have been answered
SPEED_PROMPT, SPEED_TOKENS = "The answer is", 64  # of the single stream that is timed


@dataclass(frozen=True)
class Question:
    """messages and tools in OpenAI form; ``thinking`` on or off; at most ``max_tokens`` new tokens, chosen greedily."""

    messages: list[dict]
    tools: list[dict] | None
    thinking: bool
    max_tokens: int


@dataclass(frozen=True)
class Reply:
    """calls: (name, arguments). finish_reason: "stop", "length", or None where the time was up before the end."""

    reasoning: str
    content: str
    calls: list[tuple[str, dict]] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None


class LocalClient:
    """Answers through an ``LLM``, all questions at once by continuous batching, read by the parsers that serve it."""

    def __init__(self, llm: LLM, template: ChatTemplate):
        self.llm, self.template = llm, template

    def ask(
        self, questions: Sequence[Question], deadline: float | None = None, progress: Progress | None = None
    ) -> list[Reply]:
        """A reply for each question. After ``deadline`` (of ``time.monotonic``) what still runs is cut off."""
        requests = []
        for q in questions:
            ids = self.template.encode(q.messages, q.tools, tokenizer=self.llm.tokenizer, enable_thinking=q.thinking)
            requests += self.llm.requests(ids, SamplingParams(temperature=0.0, max_tokens=q.max_tokens))
        engine, ended = self.llm.engine, 0
        for request in requests:
            engine.add(request)
        try:
            while not all(r.finished for r in requests) and (deadline is None or time.monotonic() < deadline):
                ended += sum(event.finish_reason is not None for event in engine.step())
                if progress:
                    progress(ended)
        finally:
            for request in requests:
                engine.cancel(request)
        return [read_reply(q, r.text, len(r.output_ids), r.finish_reason) for q, r in zip(questions, requests, strict=True)]

    def single_stream(self) -> float:
        """Tokens a second of one stream after a warm-up of the same length."""
        params = SamplingParams(temperature=0.0, max_tokens=SPEED_TOKENS, ignore_eos=True)
        return rate(lambda: self.llm.generate(SPEED_PROMPT, params))


class ServedClient:
    """Asks an OpenAI-compatible server, whose parsers split reasoning, content and calls; ``concurrency`` questions at a time."""

    def __init__(self, url: str, api_key: str | None = None, concurrency: int = 32):
        self.http, self.concurrency = Http(url, api_key), concurrency
        listed = self.http.get("/v1/models")
        with reading(f"{self.http.url}/v1/models", listed):
            self.model = listed["data"][0]["id"]

    def ask(self, questions: Sequence[Question], progress: Progress | None = None) -> list[Reply]:
        """A reply for each question. ValueError with the server's words where it refuses one."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(self._ask, question) for question in questions]
            try:
                for ended, future in enumerate(as_completed(futures), 1):
                    future.result()
                    if progress:
                        progress(ended)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def _ask(self, question: Question) -> Reply:
        body = {
            "model": self.model,
            "messages": question.messages,
            "temperature": 0,
            "max_tokens": question.max_tokens,
            "chat_template_kwargs": {"enable_thinking": question.thinking},
            **({"tools": question.tools} if question.tools else {}),
        }
        answer = self.http.post("/v1/chat/completions", body)
        with reading(f"{self.http.url}/v1/chat/completions", answer):
            choice, usage = answer["choices"][0], answer["usage"]
            message, reason = choice["message"], choice["finish_reason"]
            functions = [call["function"] for call in message.get("tool_calls") or []]
            return Reply(
                message.get("reasoning_content") or "",
                message["content"] or "",
                [(function["name"], arguments_of(function["arguments"])) for function in functions],
                usage["completion_tokens"],
                "stop" if reason == "tool_calls" else reason,
            )

    def single_stream(self) -> float:
        """Tokens a second of one stream, as its client sees them, after a warm-up of the same length."""
        body = {"model": self.model, "prompt": SPEED_PROMPT, "max_tokens": SPEED_TOKENS, "temperature": 0, "ignore_eos": True}
        return rate(lambda: self.http.post("/v1/completions", body))


def rate(generate: Callable[[], object]) -> float:
    generate()
    begin = time.monotonic()
    generate()
    return SPEED_TOKENS / (time.monotonic() - begin)


def read_reply(question: Question, text: str, tokens: int, finish_reason: str | None) -> Reply:
    """What a generated text says: reasoning, content and calls, by the parsers that serve it."""
    reasoning, content = ReasoningParser(in_reasoning=question.thinking).parse(text)
    content, calls = ToolCallParser(question.tools).parse(content)
    return Reply(reasoning, content, [(call.name, arguments_of(call.arguments)) for call in calls], tokens, finish_reason)


def arguments_of(text: str) -> dict:
    """A call's arguments. A text that is no JSON, of a call that was cut off, is kept under an empty name: it equals nothing."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"": text}
