"""The model at full size against itself in higher precision, and cached answers against uncached ones."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..backend import TORCH, Backend
from ..engine.llm import LLM
from ..engine.params import SamplingParams
from ..engine.request import Output
from ..model import BerryLM
from .workload import random_prompts

BUDGET = 1.1  # times the error of the same maths in torch, the project's measure for a kernel


class Upcast(nn.Module):
    """A layer that runs in ``dtype``: its weights are copied and cast when it is called, and forgotten after."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.is_linear, self.dtype = layer.is_linear, dtype
        self._layer = [layer]  # in a list, so that nothing registers it and casts it in place

    def forward(self, *args) -> Tensor:
        return copy.deepcopy(self._layer[0]).to(self.dtype)(*args)


def upcast_model(model: BerryLM, dtype: torch.dtype) -> BerryLM:
    """The same weights run in ``dtype`` by the torch ops; a layer at a time is in memory twice, embedding and head stay."""
    twin = BerryLM(model.config, dtype=dtype, device="meta", backend=TORCH)
    twin.model.layers = nn.ModuleList(Upcast(layer, dtype) for layer in model.model.layers)
    twin.model.embed_tokens = copy.deepcopy(model.model.embed_tokens).to(dtype)
    twin.model.norm = copy.deepcopy(model.model.norm).to(dtype)
    if model.lm_head is not None:
        twin.lm_head = copy.deepcopy(model.lm_head).to(dtype)
    return twin.eval()


def streams(model: BerryLM, backend: Backend, ids: Tensor) -> list[Tensor]:
    """The stream after every layer, and the logits last."""
    plain, model.backend = model.backend, backend
    try:
        out = model(ids, return_hidden_states=True)
    finally:
        model.backend = plain
    return [*out.hidden_states, out.logits]


def distance(x: Tensor, ref: Tensor) -> float:
    """|x - ref| / |ref|; infinity for what is not finite."""
    error = torch.linalg.vector_norm(x.to(ref.dtype) - ref) / torch.linalg.vector_norm(ref)
    return float(error) if torch.isfinite(error) else float("inf")


@torch.no_grad()
def layer_profile(model: BerryLM, prompts: int, tokens: int) -> dict[str, Any]:
    """rel-L2 of the stream after each layer, of the model as it runs and of torch in the same dtype, against higher precision.

    For a model in fp32 the reference is fp64, else fp32. ``within_budget``: no layer is further off than BUDGET times torch.
    """
    precise = torch.float64 if model.dtype == torch.float32 else torch.float32
    reference = upcast_model(model, precise)
    rows, agreement = [], {"ours": [], "torch": []}
    for prompt in random_prompts(model.config.vocab_size, prompts, tokens, "layer profile"):
        ids = torch.tensor([prompt], device=model.device)
        wanted = streams(reference, TORCH, ids)
        best = wanted[-1].argmax(-1)
        found = {}
        for name, backend in (("ours", model.backend), ("torch", TORCH)):
            got = streams(model, backend, ids)
            found[name] = [distance(x, ref) for x, ref in zip(got, wanted, strict=True)]
            agreement[name].append(float((got[-1].argmax(-1) == best).float().mean()))
        rows.append(found)
        print(f"prompt {len(rows)}: logits off by {found['ours'][-1]:.3g}, torch's by {found['torch'][-1]:.3g}", flush=True)
    ratios = [[a / b if b else float(a > 0) for a, b in zip(row["ours"], row["torch"], strict=True)] for row in rows]
    largest, prompt, layer = max((ratio, n, i) for n, row in enumerate(ratios) for i, ratio in enumerate(row))
    return {
        "backend": model.backend.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "reference": str(precise).removeprefix("torch."),
        "prompts": prompts,
        "tokens": tokens,
        "rel_l2": rows,  # a prompt each; layer by layer, the logits last
        "top1_agreement": agreement,
        "largest_ratio": largest,
        "largest_at": {"prompt": prompt, "layer": layer},
        "within_budget": largest <= BUDGET,
    }


def same_answers(llm: LLM, prompts: int, tokens: int, new_tokens: int) -> dict[str, Any]:
    """Greedy answers to prompts that the engine has not seen, then to the same again: the second time from the prefix cache.

    The first time a forward ends where the reuse will begin, so that both compute the same products: those of another size round
    differently, and among the tokens of a large vocabulary two are soon so close that this decides. The ids must be the same.
    ``whole``: other prompts, the first time in forwards as large as they come; there the gaps say what rounding can have done.
    """
    vocab = llm.config.vocab_size
    cut = compare_twice(llm, random_prompts(vocab, prompts, tokens, "answers twice"), new_tokens, cut=True)
    whole = compare_twice(llm, random_prompts(vocab, prompts, tokens, "answers twice, whole"), new_tokens, cut=False)
    for name, x in (("cut where the reuse begins", cut), ("whole", whole)):
        hits, ids, far = x["cached_tokens"], "the same" if x["identical"] else "others", x["most_moved"]
        print(f"{prompts} x {tokens} tokens, {name}: hits {hits}, ids {ids}, log p moved by {far:.2g}", flush=True)
    return {**cut, "whole": whole}


def compare_twice(llm: LLM, prompts: list[list[int]], new_tokens: int, cut: bool) -> dict[str, Any]:
    """Each prompt sent twice, alone. Where the ids part, the lead of the best token says whether rounding can have done it."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=2)
    grid, firsts = llm.engine.cache.grid, []
    reused = [(len(p) - 1) // grid * grid for p in prompts]
    for prompt, depth in zip(prompts, reused, strict=True):
        with forwards_that_end_at(llm, depth if cut else 0):
            firsts.append(llm.generate([prompt], params)[0])
    seconds = [llm.generate([p], params)[0] for p in prompts]
    pairs = list(zip(firsts, seconds, strict=True))
    return {
        "cached_tokens": [second.cached_tokens for second in seconds],
        "expected_cached_tokens": reused,
        "identical": all(a.token_ids == b.token_ids for a, b in pairs),
        "first_difference": [difference for a, b in pairs if (difference := first_difference(a, b))],
        "smallest_gap": min(gap(x) for a in firsts for x in a.logprobs),
        "most_moved": max(moved(a, b) for a, b in pairs),
    }


@contextmanager
def forwards_that_end_at(llm: LLM, depth: int) -> Iterator[None]:
    """Prompts in forwards of one length, one of which ends after ``depth`` tokens, a multiple of the grid; 0: as they come."""
    scheduler, grid = llm.engine.scheduler, llm.engine.cache.grid
    before = scheduler.token_budget
    if depth:
        scheduler.token_budget = max(n for n in range(grid, before + 1, grid) if depth % n == 0)
    try:
        yield
    finally:
        scheduler.token_budget = before


def moved(a: Output, b: Output) -> float:
    """By how much the log-probability of a chosen token differs, as far as the two answers agree."""
    same = zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=True)
    out = 0.0
    for x, y, first, second in same:
        if x != y:
            break
        out = max(out, abs(first.logprob - second.logprob))
    return out


def first_difference(a: Output, b: Output) -> dict[str, Any] | None:
    """Where two answers part, and how much the best token led the next one in each, in nats."""
    for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
        if x != y:
            return {"at": i, "ids": [x, y], "gaps": [gap(a.logprobs[i]), gap(b.logprobs[i])]}
    return None


def gap(found) -> float:
    best, second = (logprob for _, logprob in found.top[:2])
    return best - second
