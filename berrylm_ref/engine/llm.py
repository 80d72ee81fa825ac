"""``LLM``: a checkpoint folder that answers prompts."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from ..model import BerryLM
from ..tokenizer import Tokenizer
from .params import SamplingParams
from .request import Output, Request, make_requests
from .sequential import run_alone


class LLM:
    """Load ``folder`` and generate; requests run one after the other.

    A folder without tokenizer.json works with token ids. The end tokens are the union of those that config.json and
    generation_config.json declare. ``dtype`` "float64" is for property tests: there the router has no near-ties.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype | str = "float32",
        device: str = "cpu",
        backend: str = "auto",
        kda_intra: str | list[str] = "dyadic",
    ):
        self.model = BerryLM.from_pretrained(folder, dtype=dtype, device=device, backend=backend, kda_intra=kda_intra)
        self.config = self.model.config
        self.tokenizer = Tokenizer.from_folder(folder)
        self.end_ids = end_token_ids(folder, self.config.eos_token_ids)
        if self.tokenizer and self.tokenizer.size > self.config.vocab_size:
            raise ValueError(
                f"LLM: tokenizer.json: expected ids below vocab_size = {self.config.vocab_size}, got {self.tokenizer.size - 1}"
            )

    def generate(
        self, prompts: list[str] | list[list[int]] | str, params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[Output]:
        """One output a prompt (``params.n`` of them each, prompt by prompt). Raises ValueError before anything runs."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = params if isinstance(params, list) else [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"generate: params: expected one, or one for each of {len(prompts)} prompts, got {len(params)}")
        requests = [r for prompt, p in zip(prompts, params, strict=True) for r in self.requests(prompt, p)]
        for request in requests:
            for _ in self.stream(request):
                pass
        return [request.output() for request in requests]

    def requests(self, prompt: str | list[int], params: SamplingParams) -> list[Request]:
        """The choices of one prompt, checked, not yet started."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("generate: prompts: expected token ids, the model folder has no tokenizer.json, got text")
            prompt = self.tokenizer.encode(prompt)
        elif not isinstance(prompt, list | tuple):
            raise ValueError(f"generate: prompts: expected text or a list of token ids, got {type(prompt).__name__}")
        return make_requests(
            list(prompt),
            params,
            vocab_size=self.config.vocab_size,
            context=self.config.max_position_embeddings,
            end_ids=self.end_ids,
            tokenizer=self.tokenizer,
        )

    def stream(self, request: Request) -> Iterator[str]:
        """Run one request; yields the text of every step, "" where none became certain."""
        return run_alone(self.model, request, self.tokenizer.size if self.tokenizer else None)


def end_token_ids(folder: str | Path, declared: tuple[int, ...]) -> frozenset[int]:
    """The union of the ids in config.json (``declared``) and generation_config.json: neither replaces the other."""
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return frozenset(declared)
    try:
        more = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: expected a JSON object, got {error}") from error
    more = [] if more is None else [more] if isinstance(more, int) else more
    if not isinstance(more, list) or not all(isinstance(i, int) for i in more):
        raise ValueError(f"{path}: eos_token_id: expected a token id or a list of them, got {more!r}")
    return frozenset(declared) | frozenset(more)
