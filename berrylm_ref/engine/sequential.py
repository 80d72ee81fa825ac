"""The twin of the engine: one request after the other, nothing shared, nothing reused. Slow, and easy to believe."""

from collections.abc import Iterator

import torch

from ..cache.batch import Batch, Caches, Sequence
from ..model import BerryLM
from .request import Request
from .sampler import sample, token_logprobs

PAGE_SIZE = 16


@torch.inference_mode()
def run_alone(model: BerryLM, request: Request, known: int | None = None) -> Iterator[str]:
    """Prefill the prompt in one forward, then decode token by token; yields the text of each step."""
    total = len(request.prompt_ids) + request.max_new
    pages = -(-total // PAGE_SIZE)
    caches = Caches.allocate(model.config, pages=pages, page_size=PAGE_SIZE, slots=1, dtype=model.dtype, device=model.device)
    tokens, context, params = request.prompt_ids, 0, request.params
    while not request.finished:
        scored = context == 0 and params.prompt_logprobs is not None
        part = Sequence(tokens, context, list(range(1, pages + 1)), slot=1, all_logits=scored)
        logits, _ = model.run(Batch.build([part], caches))
        if scored:
            asked = [params.prompt_logprobs] * (len(tokens) - 1)
            request.prompt_logprobs = [None, *token_logprobs(logits[:-1], logits.new_tensor(tokens[1:]).long(), asked)]
        chosen = sample(logits[-1:], [request.row], known)
        if params.logprobs is not None:
            request.logprobs += token_logprobs(logits[-1:], chosen, [params.logprobs])
        context += len(tokens)
        tokens = chosen.tolist()
        yield request.append(tokens[0])
