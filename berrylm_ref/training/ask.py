"""Ask a model: questions in, replies out. ``LocalClient`` runs an engine in this process; a server's client has the same verb."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..chat import ReasoningParser, ToolCallParser
from ..chat.template import ChatTemplate
from ..engine.llm import LLM
from ..engine.params import SamplingParams


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
    """Answers through an ``LLM``, all questions at once by continuous batching."""

    def __init__(self, llm: LLM, template: ChatTemplate):
        self.llm, self.template = llm, template

    def ask(self, questions: Sequence[Question], deadline: float | None = None) -> list[Reply]:
        """A reply for each question. After ``deadline`` (of ``time.monotonic``) what still runs is cut off."""
        requests = []
        for q in questions:
            ids = self.template.encode(q.messages, q.tools, tokenizer=self.llm.tokenizer, enable_thinking=q.thinking)
            requests += self.llm.requests(ids, SamplingParams(temperature=0.0, max_tokens=q.max_tokens))
        engine = self.llm.engine
        for request in requests:
            engine.add(request)
        try:
            while not all(r.finished for r in requests) and (deadline is None or time.monotonic() < deadline):
                engine.step()
        finally:
            for request in requests:
                engine.cancel(request)
        return [read_reply(q, r.text, len(r.output_ids), r.finish_reason) for q, r in zip(questions, requests, strict=True)]


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
