"""OpenAI's completions: prompt logprobs by echo (ours, vLLM) or by the field prompt_logprobs (vLLM)."""

import json
import re
from itertools import product
from typing import Any

from .client import Answer, Http, Refused, missing, reading

SCORING = {"echo": {"echo": True}, "prompt_logprobs": {"prompt_logprobs": 0}, "none": {}}
# asked for where the server knows them: run past end tokens, name tokens by id
OPTIONAL = {"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
NAMED_ID = re.compile(r"token_id:(\d+)")


class CompletionsApi:
    """``/v1/completions``. What the server takes is tried once, on a short prompt; the fullest answer decides."""

    name = "completions"

    def __init__(self, http: Http, trial: list[int]):
        self.http, self.optional, self.scoring, self.tops = http, dict(OPTIONAL), "none", 0
        models = http.get("/v1/models")
        with reading(f"{http.url}/v1/models", models):
            self.model = (models.get("data") or [{}])[0].get("id")
        best, refusals = None, []
        for scoring, tops in product(SCORING, (0, 1)):
            try:
                answer = self._ask(trial, 2, scoring, tops)
            except Refused as error:
                refusals.append(error)
                continue
            lacks = missing(answer)
            if best is None or len(lacks) < len(best):
                best, self.scoring, self.tops = lacks, scoring, tops
            if not lacks:
                break
        if best is None:
            raise refusals[-1]
        self.lacks = best

    def answer(self, ids: list[int], new_tokens: int, score_from: int | None = None) -> Answer:
        return self._ask(ids, new_tokens, self.scoring if score_from == 0 else "none", self.tops)

    def _ask(self, ids: list[int], new_tokens: int, scoring: str, tops: int) -> Answer:
        body = {"prompt": ids, "max_tokens": new_tokens, "temperature": 0, "logprobs": tops, **SCORING[scoring]}
        if self.model is not None:
            body["model"] = self.model
        while True:
            try:
                found = self.http.post("/v1/completions", {**body, **self.optional})
                with reading(f"{self.http.url}/v1/completions", found):
                    return self._read(found, ids, new_tokens, scoring)
            except Refused as error:
                unknown = refused_field(error, self.optional)
                if unknown is None:
                    raise
                del self.optional[unknown]

    def _read(self, found: dict[str, Any], ids: list[int], new_tokens: int, scoring: str) -> Answer:
        choice = found["choices"][0]
        table = choice.get("logprobs") or {}
        values, names = table.get("token_logprobs"), table.get("tokens") or []
        prompt = None
        if scoring == "echo" and values is not None and len(values) > new_tokens:
            prompt, values, names = values[1 : len(ids)], values[len(ids) :], names[len(ids) :]
        elif scoring == "prompt_logprobs" and choice.get("prompt_logprobs"):
            rows = choice["prompt_logprobs"]
            prompt = [row[str(i)]["logprob"] for i, row in zip(ids[1:], rows[1:], strict=True)]
        output = choice.get("token_ids")
        if output is None and names and all(NAMED_ID.fullmatch(name) for name in names):
            output = [int(NAMED_ID.fullmatch(name)[1]) for name in names]
        details = (found.get("usage") or {}).get("prompt_tokens_details") or {}
        return Answer(
            ids=None if output is None else output[-new_tokens:],  # with echo some servers list the prompt's too
            logprobs=values[:new_tokens] if values else None,
            prompt_logprobs=prompt,
            cached_tokens=details.get("cached_tokens"),
        )


def refused_field(error: Refused, fields: dict[str, Any]) -> str | None:
    """The optional field that a 400 or 422 is about."""
    if error.status not in (400, 422):
        return None
    try:
        param = (json.loads(error.text).get("error") or {}).get("param")
    except (ValueError, AttributeError):
        param = None
    return param if param in fields else next((name for name in fields if name in error.text), None)
