"""What goes over the wire: request bodies, responses and errors in OpenAI's form.

A field that is not listed is refused by name, never ignored; null means unset.
"""

import time
import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool, StrictFloat, StrictInt, StrictStr

from ..engine.llm import LLM
from ..engine.params import SamplingParams
from ..engine.request import Output

SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "n",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
Number = StrictInt | StrictFloat | None


class CompletionRequest(BaseModel):
    """POST /v1/completions. ``prompt``: text, token ids, or a list of either."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    max_tokens: StrictInt | None = None
    temperature: Number = None
    top_p: Number = None
    top_k: StrictInt | None = None
    min_p: Number = None
    n: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    seed: StrictInt | None = None
    logprobs: StrictInt | None = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None

    def sampling_params(self) -> SamplingParams:
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        return SamplingParams(logprobs=self.logprobs, **{k: v for k, v in given.items() if v is not None})

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ApiError(Exception):
    """An error that the client sees: {"error": {message, type, param, code}}."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def completion_response(outputs: list[Output], model: str, llm: LLM) -> dict[str, Any]:
    """OpenAI's text_completion object; ``token_ids`` beside each text serves models without a tokenizer."""
    n = max(output.index for output in outputs) + 1
    prompts = sum(len(output.prompt_token_ids) for output in outputs if output.index == 0)
    made = sum(len(output.token_ids) for output in outputs)
    choices = [
        {
            "index": i // n * n + output.index,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "logprobs": completion_logprobs(output, llm),
        }
        for i, output in enumerate(outputs)
    ]
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made},
    }


def completion_logprobs(output: Output, llm: LLM) -> dict[str, Any] | None:
    """The four parallel lists of the completions API; a token is its text, or "token_id:N" without a tokenizer."""
    if output.logprobs is None:
        return None

    def name(token: int) -> str:
        return llm.tokenizer.decode([token], skip_special=False) if llm.tokenizer else f"token_id:{token}"

    tokens = [name(x.token) for x in output.logprobs]
    offsets = [0]
    for text in tokens[:-1]:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": tokens,
        "token_logprobs": [x.logprob for x in output.logprobs],
        "top_logprobs": [{name(i): p for i, p in x.top} for x in output.logprobs],
        "text_offset": offsets,
    }
