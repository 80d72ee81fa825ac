"""From logits to tokens, for all rows of a batch at once; a row's draw depends on its own request alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .params import SamplingParams


@dataclass
class Row:
    """What the sampler must know of the sequence behind one row of logits."""

    params: SamplingParams
    seed: int  # of this choice, fixed for its whole life
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    allowed: Tensor | None = None  # [V] bool: tokens that may follow here


@dataclass
class TokenLogprob:
    """log p of a token under the model itself (before penalties and temperature), and of the most probable ones."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def sample(logits: Tensor, rows: list[Row], known: int | None = None) -> Tensor:
    """logits [R, V] -> token ids [R]. Ids from ``known`` on are not the tokenizer's and never chosen.

    The order is: penalties, allowed tokens, temperature, top-k, top-p over what top-k left, min-p, one draw. The draw is a
    hash of the request's seed and the position, so that it is the same alone, in any batch and after a restart.
    """
    scores = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if known is not None and known < scores.shape[-1]:
        scores = scores.clone()
        scores[:, known:] = float("-inf")
    scores = _penalise(scores, rows)
    for i, row in enumerate(rows):
        if row.allowed is not None:
            scores[i] = scores[i].masked_fill(~row.allowed.to(scores.device), float("-inf"))
    tokens = scores.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        tokens[drawn] = _draw(scores[drawn], [rows[i] for i in drawn])
    return tokens


def _penalise(scores: Tensor, rows: list[Row]) -> Tensor:
    touched = [i for i, row in enumerate(rows) if row.params.penalised]
    if not touched:
        return scores.clone() if any(row.allowed is not None for row in rows) else scores
    scores, V = scores.clone(), scores.shape[-1]
    for i in touched:
        row, p = rows[i], rows[i].params
        made = torch.bincount(torch.as_tensor(row.output_ids, dtype=torch.long), minlength=V).to(scores.device)
        seen = torch.bincount(torch.as_tensor(row.prompt_ids, dtype=torch.long), minlength=V).to(scores.device) + made > 0
        s = scores[i]
        s = torch.where(seen, torch.where(s > 0, s / p.repetition_penalty, s * p.repetition_penalty), s)
        scores[i] = s - made * p.frequency_penalty - (made > 0) * p.presence_penalty
    return scores


def _draw(scores: Tensor, rows: list[Row]) -> Tensor:
    def column(values, dtype=scores.dtype):
        return torch.tensor(values, dtype=dtype, device=scores.device)[:, None]

    V = scores.shape[-1]
    scores = scores / column([r.params.temperature for r in rows])
    scores, ids = scores.sort(dim=-1, descending=True, stable=True)  # [R, V]
    rank = torch.arange(V, device=scores.device)
    scores = scores.masked_fill(rank >= column([min(r.params.top_k or V, V) for r in rows], torch.long), float("-inf"))
    p = scores.softmax(-1)
    before = p.cumsum(-1) - p
    # the most probable token always stays: a tiny top_p is 0 in fp32, and 0 >= 0
    p = p.masked_fill((before >= column([r.params.top_p for r in rows])) & (rank > 0), 0)
    p = p.masked_fill(p < column([r.params.min_p for r in rows]) * p[:, :1], 0)
    cdf = p.cumsum(-1)
    seeds = column([to_int64(r.seed) for r in rows], torch.long)
    u = uniform(seeds, column([len(r.output_ids) for r in rows], torch.long)).to(scores.dtype)
    place = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)
    last = (p > 0).sum(-1, keepdim=True) - 1  # rounding must not push the draw past the last candidate
    return ids.gather(-1, place.minimum(last)).squeeze(-1)


def token_logprobs(logits: Tensor, tokens: Tensor, top: list[int]) -> list[TokenLogprob]:
    """logits [R, V], the tokens [R] that came there, and how many alternatives each row wants."""
    logprobs = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).log_softmax(-1)
    most = min(max(top, default=0), logits.shape[-1])
    values, ids = (x.tolist() for x in logprobs.topk(most, -1))
    chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1).tolist()
    return [
        TokenLogprob(token, logprob, list(zip(ids[i][:k], values[i][:k], strict=True)))
        for i, (token, logprob, k) in enumerate(zip(tokens.tolist(), chosen, top, strict=True))
    ]


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index`` of a request: choices differ, and each is the same on every run."""
    return seed if index == 0 else int(mix(torch.tensor(to_int64(seed)) + mix(torch.tensor(index))))


def to_int64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def uniform(seed: Tensor, step: Tensor) -> Tensor:
    """float64 in [0, 1) from int64 seed and step: 53 bits of a SplitMix64 hash, the same on every device."""
    bits = mix(mix(seed) + step)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


def mix(x: Tensor) -> Tensor:
    """The SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014) on wrapping int64."""
    x = x + to_int64(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & (2**34 - 1))) * to_int64(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * to_int64(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (2**33 - 1))
