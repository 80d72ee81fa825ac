"""How many experts a decode step really reads: a count, where the roofline would have to assume that all are as likely."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..cache.batch import Batch
from ..engine.llm import LLM
from ..engine.params import SamplingParams
from ..model import BerryLM
from ..ops.moe import route
from .workload import random_prompts


def measured_experts(llm: LLM, batches: list[int], tokens: int = 128) -> dict[int, float]:
    """{batch: distinct experts a layer} of the last tokens of so many answers, each ``tokens`` after as many of prompt."""
    prompts = random_prompts(llm.config.vocab_size, max(batches), tokens, "experts")
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    ids = torch.tensor([out.prompt_token_ids + out.token_ids for out in outputs], device=llm.model.device)
    return distinct_experts(llm.model, ids, batches)


@torch.no_grad()
def distinct_experts(model: BerryLM, ids: Tensor, batches: list[int]) -> dict[int, float]:
    """For the last token of the first so many rows of ``ids`` [B, T]: distinct experts, the mean over all layers."""
    rows = torch.arange(1, len(ids) + 1, device=ids.device) * ids.shape[1] - 1
    chosen: list[Tensor] = []  # [B, k] of every layer
    plain = model.backend

    def counting(x: Tensor, router: Tensor, *weights, top_k: int, normalise: bool, **options) -> Tensor:
        chosen.append(route(linear(x[rows], router), top_k, normalise)[1])
        return plain.moe(x, router, *weights, top_k=top_k, normalise=normalise, **options)

    model.backend = replace(plain, moe=counting)
    try:
        batch = Batch.stateless(ids)
        batch.logit_rows = rows
        model.run(batch)
    finally:
        model.backend = plain
    return {n: sum(len(experts[:n].unique()) for experts in chosen) / len(chosen) for n in batches}
