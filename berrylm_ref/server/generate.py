"""POST /generate in SGLang's form: token ids or text in, ids and log-probabilities out; what a parity harness asks.

Differences from SGLang, all of them:

    input_token_logprobs   begin with the position ``logprob_start_len`` itself; SGLang has null there. Position 0 is null.
    a stream               carries text and ids cumulatively, as there, but log-probabilities only in a choice's last chunk:
                           twenty alternatives a token, sent again with every token, would hold up everyone else
    max_new_tokens 0       only where prompt log-probabilities are asked for; one position of the context must still be free
"""

import uuid
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import StrictBool, StrictInt, StrictStr

from ..engine.engine import Event
from ..engine.llm import LLM
from ..engine.params import SamplingParams
from ..engine.request import Request
from ..engine.sampler import TokenLogprob
from .body import Body, Many
from .calls import prepared
from .delivery import deliver
from .gate import Gate
from .protocol import ApiError, Number

router = APIRouter()


class GenerateSampling(Body):
    """``sampling_params``: SGLang's names; top_k -1 (or 0) keeps all tokens, ``sampling_seed`` is ``seed``."""

    temperature: Number = None
    top_k: StrictInt | None = None
    top_p: Number = None
    min_p: Number = None
    max_new_tokens: StrictInt | None = None
    stop: StrictStr | Many[StrictStr] | None = None
    stop_token_ids: Many[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    n: StrictInt | None = None
    seed: StrictInt | None = None
    sampling_seed: StrictInt | None = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None


class GenerateRequest(Body):
    """Either ``text`` or ``input_ids``, one prompt or a list of them. null means unset."""

    text: StrictStr | Many[StrictStr] | None = None
    input_ids: Many[StrictInt] | Many[Many[StrictInt]] | None = None
    sampling_params: GenerateSampling | None = None
    return_logprob: StrictBool | None = None
    logprob_start_len: StrictInt | None = None
    top_logprobs_num: StrictInt | None = None
    stream: StrictBool | None = None

    @property
    def source(self) -> str:
        """Which field the prompts are in; ApiError unless it is exactly one."""
        given = [name for name in ("text", "input_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ApiError(400, f"input_ids: expected exactly one of text and input_ids, got {len(given)} of them", "input_ids")
        return given[0]

    @property
    def batch(self) -> bool:
        """A list of prompts is answered by a list, also if there is one in it."""
        prompts = getattr(self, self.source)
        return isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)

    def prompts(self) -> list[str | list[int]]:
        prompts = getattr(self, self.source)
        return list(prompts) if self.batch else [prompts]

    @property
    def start(self) -> int | None:
        """The first prompt position to be scored, None if none is."""
        start = self.logprob_start_len
        return None if not self.return_logprob or start is None or start == -1 else start

    def params(self) -> SamplingParams:
        """ValueError by the library's names; what it doesn't know is checked here."""
        given = self.sampling_params or GenerateSampling()
        fields = {k: v for k, v in given.model_dump().items() if v is not None}
        if "seed" in fields and "sampling_seed" in fields:
            raise ValueError("generate: sampling_seed: expected only one of seed and sampling_seed, got both")
        seed = fields.pop("sampling_seed", fields.get("seed"))
        if fields.get("top_k") == -1:
            fields["top_k"] = 0
        most = fields.pop("max_new_tokens", 128)
        if most == 0 and self.start is None:
            raise ValueError("generate: max_tokens: expected 1 or more unless prompt log-probabilities are asked for, got 0")
        if not self.return_logprob and (self.top_logprobs_num or self.logprob_start_len not in (None, -1)):
            raise ValueError("generate: return_logprob: expected true, since other fields ask for log-probabilities, got false")
        if self.start is not None and self.start < 0:
            raise ValueError(f"generate: logprob_start_len: expected -1 or a position of the prompt, got {self.start}")
        top = (self.top_logprobs_num or 0) if self.return_logprob else None
        scored = None if self.start is None else top
        return SamplingParams(**{**fields, "seed": seed, "max_tokens": most or 1, "logprobs": top, "prompt_logprobs": scored})

    def names(self) -> dict[str, str]:
        """Library name -> name in this call."""
        sampling = {name: f"sampling_params.{name}" for name in GenerateSampling.model_fields}
        top = {"logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num"}
        return {**sampling, **top, "prompts": self.source, "max_tokens": "sampling_params.max_new_tokens"}

    def requests(self, llm: LLM, gate: Gate) -> list[Request]:
        params, requests = self.params(), []
        gate.check_choices(len(self.prompts()) * params.n)  # before anything is made of them
        for prompt in self.prompts():
            for request in llm.requests(prompt, params):
                llm.check_fits(request)
                count = len(request.prompt_ids)
                if self.start is not None and self.start > count:
                    raise ValueError(f"generate: logprob_start_len: expected at most {count}, its length, got {self.start}")
                request.score_from = self.start or 0
                requests.append(request)
        return requests


class GenerateAnswer:
    """SGLang's objects for the choices of one call."""

    def __init__(self, body: GenerateRequest, requests: list[Request]):
        self.head: dict[str, Any] = {}  # the chunks have nothing in common
        self.body, self.requests = body, requests
        self.place = {request: i for i, request in enumerate(requests)}
        self.ids = {request: uuid.uuid4().hex for request in requests}
        self.text = dict.fromkeys(requests, "")
        self.many = body.batch or len(requests) > 1
        self.scores_only = body.sampling_params is not None and body.sampling_params.max_new_tokens == 0

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        choices = [self._choice(r, r.text, len(r.output_ids), r.finish_reason) for r in self.requests]
        return choices if self.many else choices[0]

    def opening(self) -> list[dict[str, Any]]:
        return []

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """The choice as it was at this event, from its beginning."""
        self.text[event.request] += event.text
        choice = self._choice(event.request, self.text[event.request], event.made, event.finish_reason)
        return [{**choice, "index": self.place[event.request]} if self.many else choice]

    def usage(self) -> dict[str, Any]:
        return {}  # every choice has its own counts

    def _choice(self, request: Request, text: str, made: int, reason: str | None) -> dict[str, Any]:
        made = 0 if self.scores_only else made
        meta = {
            "id": self.ids[request],
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": made,
            "cached_tokens": request.cached_tokens or 0,
            "finish_reason": self._reason(request, reason, made),
        }
        if self.body.return_logprob and reason:
            scored = (request.prompt_logprobs or [])[request.score_from :]
            meta |= self._logprobs("input", request.prompt_ids[request.score_from :], scored)
            meta |= self._logprobs("output", request.output_ids[:made], request.logprobs[:made])
        text = "" if self.scores_only else text
        return {"text": text, "output_ids": request.output_ids[:made], "meta_info": meta}

    def _reason(self, request: Request, reason: str | None, made: int) -> dict[str, Any] | None:
        if reason is None:
            return None
        if reason == "length" or self.scores_only:
            return {"type": "length", "length": made}
        return {"type": "stop", "matched": request.matched}

    def _logprobs(self, side: str, ids: list[int], found: list[TokenLogprob | None]) -> dict[str, Any]:
        """[logprob, id, null] a token, and with alternatives a list of the same for each; null where nothing scored it."""
        named = {f"{side}_token_logprobs": [[x and x.logprob, i, None] for i, x in zip(ids, found, strict=False)]}
        if self.body.top_logprobs_num:
            named[f"{side}_top_logprobs"] = [x and [[p, i, None] for i, p in x.top] for x in found]
        return named


@router.post("/generate")
async def generate(body: GenerateRequest, http: HttpRequest) -> Response:
    state = http.app.state
    requests = await prepared(lambda: body.requests(state.llm, state.engine), body.names())
    return await deliver(http, state.engine, GenerateAnswer(body, requests), requests, bool(body.stream), None)
