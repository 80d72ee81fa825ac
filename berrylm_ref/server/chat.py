"""The chat route: from messages to requests, and from their events to chat.completion objects."""

import time
import uuid
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from ..chat.forcing import ToolForcing
from ..chat.template import ChatTemplate
from ..chat.turn import Turn, TurnDelta, opens_reasoning, reasoning_tokens
from ..engine.engine import Event
from ..engine.llm import LLM, sampling_defaults
from ..engine.request import Request
from ..engine.sampler import TokenLogprob
from ..tokenizer import Tokenizer
from .calls import prepared
from .chat_protocol import ChatRequest, template_messages
from .delivery import deliver
from .gate import Gate
from .protocol import ApiError, check_model, check_stream, token_name


def chat_routes(llm: LLM, model_name: str) -> APIRouter:
    """POST /v1/chat/completions for ``llm``, whose engine the app keeps as ``app.state.engine``.

    A model without tokenizer or template answers 400. Raises ValueError for a damaged template or generation_config.json.
    """
    template = ChatTemplate.from_folder(llm.folder) if llm.folder and llm.tokenizer else None
    defaults = sampling_defaults(llm.folder) if llm.folder else {}
    forcing = ToolForcing(llm.tokenizer, llm.config.vocab_size, llm.end_ids)
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, http: HttpRequest) -> Response:
        check_model(body.model, model_name)
        check_stream(body.stream, body.stream_options)
        if template is None:
            raise ApiError(400, "messages: this model has no tokenizer.json with a chat_template.jinja beside it", "messages")
        requests = await prepared(lambda: made(body, http.app.state.engine), body.names())
        answer = ChatAnswer(requests, model_name, llm.tokenizer, body.tools if body.choice()[0] != "none" else None)
        return await deliver(http, http.app.state.engine, answer, requests, bool(body.stream), body.stream_options)

    def made(body: ChatRequest, gate: Gate) -> list[Request]:
        body.check()
        choice, function = body.choice()
        parallel, thinking = body.parallel_tool_calls is not False, body.enable_thinking()
        prompt = template.encode(template_messages(body.messages), body.tools, tokenizer=llm.tokenizer, enable_thinking=thinking)
        params = body.sampling_params(defaults, llm.room(len(prompt)))
        gate.check_choices(params.n)  # before anything is made of them
        requests = llm.requests(prompt, params)
        in_reasoning = opens_reasoning(prompt, llm.tokenizer)
        for request in requests:
            llm.check_fits(request)
            request.constraint = forcing.constraint(body.tools, choice, function, parallel, in_reasoning)
        return requests

    return routes


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class Choice:
    """One choice while its text comes."""

    def __init__(self, request: Request, in_reasoning: bool, tools: list[dict] | None):
        self.request = request
        self.turn = Turn(in_reasoning, tools)
        self.scored = 0  # tokens whose logprobs have been sent

    def fields(self, delta: TurnDelta) -> dict[str, Any]:
        """``delta`` as fields of a message; what is empty is left out."""
        calls = []
        for part in delta.calls:
            call = {"index": part.index, "function": {"arguments": part.arguments}}
            if part.name is not None:
                call |= {"id": call_id(), "type": "function"}
                call["function"]["name"] = part.name
            calls.append(call)
        fields = {"reasoning_content": delta.reasoning, "content": delta.content, "tool_calls": calls}
        return {name: value for name, value in fields.items() if value}


class ChatAnswer:
    """The chat.completion of one call, or its chunks; both come from the same ``Turn``.

    A stream begins with a chunk a choice that has the role, ends a choice with an empty delta and the reason. Logprobs stand
    in the first chunk that is sent when a token has come.
    """

    def __init__(self, requests: list[Request], model: str, tokenizer: Tokenizer, tools: list[dict] | None):
        self.requests, self.tokenizer, self.tools = requests, tokenizer, tools
        self.in_reasoning = opens_reasoning(requests[0].prompt_ids, tokenizer)
        self.choices = {request: Choice(request, self.in_reasoning, tools) for request in requests}
        self.head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk(r, {"role": "assistant", "content": None}) for r in self.requests]

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        choice = self.choices[event.request]
        delta = choice.fields(choice.turn.feed(event.text))
        chunks = [self._chunk(event.request, delta, event.made)] if delta else []
        if event.finish_reason:
            rest = choice.fields(choice.turn.finish())
            chunks += [self._chunk(event.request, rest, event.made)] if rest else []
            chunks.append(self._chunk(event.request, {}, event.made, choice.turn.finish_reason(event.request)))
        return chunks

    def whole(self) -> dict[str, Any]:
        choices = [self._whole(Choice(request, self.in_reasoning, self.tools)) for request in self.requests]
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """The prompt once, however many choices it has; the completions summed."""
        first, made = self.requests[0], sum(len(r.output_ids) for r in self.requests)
        reasoning = sum(reasoning_tokens(r.output_ids, self.tokenizer, self.in_reasoning) for r in self.requests)
        return {
            "prompt_tokens": len(first.prompt_ids),
            "completion_tokens": made,
            "total_tokens": len(first.prompt_ids) + made,
            "prompt_tokens_details": {"cached_tokens": first.cached_tokens or 0},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def _whole(self, choice: Choice) -> dict[str, Any]:
        request, turn = choice.request, choice.turn
        first, last = turn.feed(request.text), turn.finish()
        message = {
            "role": "assistant",
            "content": (first.content + last.content) or None,
            "reasoning_content": (first.reasoning + last.reasoning) or None,
        }
        if turn.calls:
            message["tool_calls"] = [
                {"id": call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
        return {
            "index": request.index,
            "message": message,
            "logprobs": self._logprobs(request, request.logprobs),
            "finish_reason": turn.finish_reason(request),
        }

    def _chunk(self, request: Request, delta: dict[str, Any], made: int = 0, reason: str | None = None) -> dict[str, Any]:
        choice = self.choices[request]
        found = request.logprobs[choice.scored : made]
        choice.scored += len(found)
        choices = [
            {
                "index": request.index,
                "delta": delta,
                "logprobs": self._logprobs(request, found) if found else None,
                "finish_reason": reason,
            }
        ]
        return {**self.head, "choices": choices}

    def _logprobs(self, request: Request, found: list[TokenLogprob]) -> dict[str, Any] | None:
        if request.params.logprobs is None:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            raw = self.tokenizer.bytes_of(token)
            return {"token": token_name(token, self.tokenizer), "logprob": logprob, "bytes": list(raw)}

        content = [{**entry(x.token, x.logprob), "top_logprobs": [entry(i, p) for i, p in x.top]} for x in found]
        return {"content": content, "refusal": None}
