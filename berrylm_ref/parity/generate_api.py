"""SGLang's own protocol: POST /generate with input_ids."""

from typing import Any

from .client import Answer, Http, missing, reading


class GenerateApi:
    """``/generate`` with return_logprob; prompts are scored behind logprob_start_len."""

    name = "generate"

    def __init__(self, http: Http, trial: list[int]):
        self.http = http
        self.lacks = missing(self.answer(trial, 2, score_from=0))

    def answer(self, ids: list[int], new_tokens: int, score_from: int | None = None) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        if score_from is not None:
            body["logprob_start_len"] = score_from
        found = self.http.post("/generate", body)
        with reading(f"{self.http.url}/generate", found):
            return self._read(found[0] if isinstance(found, list) else found, ids, new_tokens, score_from)

    def _read(self, found: dict[str, Any], ids: list[int], new_tokens: int, score_from: int | None) -> Answer:
        meta = found.get("meta_info") or {}
        made, scored = meta.get("output_token_logprobs"), meta.get("input_token_logprobs")
        output = found.get("output_ids") or ([row[1] for row in made] if made else None)
        return Answer(
            ids=None if output is None else output[-new_tokens:],
            logprobs=[row[0] for row in made] if made else None,
            prompt_logprobs=self._prompt(ids[score_from:], scored) if score_from is not None and scored else None,
            scored_from=(score_from or 0) + 1,
            cached_tokens=meta.get("cached_tokens"),
        )

    def _prompt(self, ids: list[int], rows: list[list]) -> list[float]:
        if [row[1] for row in rows] != ids:
            raise ValueError(f"{self.http.url}/generate: input_token_logprobs: expected the {len(ids)} ids sent, got others")
        return [row[0] for row in rows[1:]]  # of the first one SGLang says nothing
