"""What goes over the wire: request bodies, responses and errors in OpenAI's form.

A field that is not listed is refused by name, never ignored; null means unset.
"""

import time
import uuid
from typing import Any

from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr

from ..engine.engine import Event
from ..engine.params import SamplingParams
from ..engine.request import Request
from ..engine.sampler import TokenLogprob
from ..tokenizer import Tokenizer
from .body import Body, Many

SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "n",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
Number = StrictFloat | StrictInt | None  # float first: what fits neither is called no valid number


class StreamOptions(Body):
    """``include_usage``: one more chunk at the end, without choices, with the totals."""

    include_usage: StrictBool | None = None


class CompletionRequest(Body):
    """POST /v1/completions. ``prompt``: text, token ids, or a list of either.

    ``echo`` puts the prompt before the answer, and with ``logprobs`` scores it; then ``max_tokens`` may be 0.
    """

    model: StrictStr | None = None
    prompt: StrictStr | Many[StrictStr] | Many[StrictInt] | Many[Many[StrictInt]]
    max_tokens: StrictInt | None = None
    temperature: Number = None
    top_p: Number = None
    top_k: StrictInt | None = None
    min_p: Number = None
    n: StrictInt | None = None
    stop: StrictStr | Many[StrictStr] | None = None
    stop_token_ids: Many[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    seed: StrictInt | None = None
    logprobs: StrictInt | None = None
    echo: StrictBool | None = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    @property
    def scores_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self) -> SamplingParams:
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.scores_only:
            given["max_tokens"] = 1  # the engine's least; the answer leaves it out
        return SamplingParams(logprobs=self.logprobs, prompt_logprobs=self.logprobs if self.echo else None, **given)

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ApiError(Exception):
    """An error that the client sees: {"error": {message, type, param, code}}, with this status and these headers.

    Half a surrogate pair, which the name of a client's field can hold, is written as its escape: UTF-8 has no form for it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        message, param = (text and text.encode("utf-8", "backslashreplace").decode() for text in (message, param))
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def check_model(asked: str | None, served: str) -> None:
    if asked is not None and asked != served:
        raise ApiError(404, f"model: expected {served!r}, got {asked!r}", "model", "model_not_found")


def check_stream(stream: bool | None, options: StreamOptions | None) -> None:
    if options is not None and not stream:
        raise ApiError(400, "stream_options: expected only with stream: true", "stream_options")


class CompletionAnswer:
    """The text_completion objects of one call, whole or in chunks; choices are counted prompt by prompt."""

    def __init__(self, body: CompletionRequest, requests: list[Request], model: str, tokenizer: Tokenizer | None):
        self.body, self.requests, self.tokenizer = body, requests, tokenizer
        self.place = {request: i for i, request in enumerate(requests)}
        self.sent = dict.fromkeys(requests, 0)  # tokens already in chunks
        self.offset = dict.fromkeys(requests, 0)  # characters in the names of those tokens
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(r, r.text, 0, len(r.output_ids), r.finish_reason) for r in self.requests]
        return {**self.head, "choices": choices, "usage": self.usage()}

    def opening(self) -> list[dict[str, Any]]:
        return []  # an echoed prompt comes with the first token: its scores are there then

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """What came since this request's last chunk: text, tokens, the reason when it was the last; nothing without a text."""
        request = event.request
        begin = self.sent[request]
        if not (event.text or event.finish_reason or self.tokenizer is None or (self.body.echo and not begin)):
            return []
        self.sent[request] = event.made
        choice = self._choice(request, event.text, begin, event.made, event.finish_reason)
        if choice["logprobs"]:  # offsets count on from chunk to chunk
            offsets = [self.offset[request] + x for x in choice["logprobs"]["text_offset"]]
            self.offset[request] += sum(map(len, choice["logprobs"]["tokens"]))
            choice["logprobs"]["text_offset"] = offsets
        return [{**self.head, "choices": [choice]}]

    def usage(self) -> dict[str, Any]:
        """Each prompt once, however many choices it has; the completions summed."""
        first = [r for r in self.requests if r.index == 0]
        prompt = sum(len(r.prompt_ids) for r in first)
        made = 0 if self.body.scores_only else sum(len(r.output_ids) for r in self.requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens or 0 for r in first)},
        }

    def _choice(self, request: Request, text: str, begin: int, end: int, reason: str | None) -> dict[str, Any]:
        """Tokens begin:end of the answer and their ``text``; an echoed prompt belongs to the first of them."""
        ids, scores = request.output_ids[begin:end], request.logprobs[begin:end]
        if self.body.scores_only:
            ids, scores, text, reason = [], [], "", "length"
        if self.body.echo and not begin:
            ids, scores = request.prompt_ids + ids, (request.prompt_logprobs or []) + scores
            text = (self.tokenizer.decode(request.prompt_ids, skip_special=False) if self.tokenizer else "") + text
        wanted = request.params.logprobs is not None
        return {
            "index": self.place[request],
            "text": text,
            "token_ids": ids,  # beside the text, for models without a tokenizer
            "finish_reason": reason,
            "logprobs": completion_logprobs(ids, scores, self.tokenizer) if wanted else None,
        }


def completion_logprobs(ids: list[int], scores: list[TokenLogprob | None], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The four parallel lists of the completions API, over names of tokens; null where nothing came before a token."""

    def name(token: int) -> str:
        return token_name(token, tokenizer)

    tokens = [name(i) for i in ids]
    offsets = [0]
    for text in tokens:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": tokens,
        "token_logprobs": [x and x.logprob for x in scores],
        "top_logprobs": [x and {name(i): p for i, p in x.top} for x in scores],
        "text_offset": offsets[:-1],
    }


def token_name(token: int, tokenizer: Tokenizer | None) -> str:
    """A token's text; its bytes as "bytes:\\xf0\\x9f" if they are only a part of characters, "token_id:N" if it has none.

    Different tokens have different names: alternatives are keyed by them.
    """
    raw = tokenizer.bytes_of(token) if tokenizer else b""
    try:
        return raw.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
