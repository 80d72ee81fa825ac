"""From logits to tokens, for all rows of a batch at once; a row's draw depends on its own request alone.

Nothing here waits for the device, apart from penalties and allowed tokens, which need the host's lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.packing import ints, upload
from .params import SamplingParams

FAR = 2**31 - 1  # more tokens than any vocabulary has


@dataclass
class Row:
    """What the sampler must know of the sequence behind one row of logits."""

    params: SamplingParams
    seed: int  # of this choice, fixed for its whole life
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    allowed: Tensor | None = None  # [V] bool: tokens that may follow here
    ahead: int = 0  # tokens drawn after output_ids that are still on their way to the host

    @property
    def special(self) -> bool:
        """Its scores depend on more than the logits."""
        return self.params.penalised or self.allowed is not None


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
    if known is not None:
        logits = logits[:, :known]
    drawn, special = [i for i, row in enumerate(rows) if not row.params.greedy], any(row.special for row in rows)
    if not drawn and not special:
        return logits.argmax(-1)
    scores = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if special:
        scores = _rescore(scores, rows)
    if len(drawn) == len(rows):
        return _draw(scores, *upload([_controls(rows)], scores.device))
    tokens = scores.argmax(-1)
    if drawn:
        at, controls = upload([ints(drawn), _controls([rows[i] for i in drawn])], scores.device)
        tokens[at] = _draw(scores[at], controls)
    return tokens


def _rescore(scores: Tensor, rows: list[Row]) -> Tensor:
    """Penalties, then the tokens that are not allowed; a copy."""
    scores, V = scores.clone(), scores.shape[-1]
    for i, row in enumerate(rows):
        p, s = row.params, scores[i]
        if p.penalised:
            made = torch.bincount(ints(row.output_ids), minlength=V)[:V].to(scores.device)
            seen = torch.bincount(ints(row.prompt_ids), minlength=V)[:V].to(scores.device) + made > 0
            s = torch.where(seen, torch.where(s > 0, s / p.repetition_penalty, s * p.repetition_penalty), s)
            s = s - made * p.frequency_penalty - (made > 0) * p.presence_penalty
        scores[i] = s if row.allowed is None else s.masked_fill(~row.allowed[:V].to(s.device), float("-inf"))
    return scores


def _controls(rows: list[Row]) -> Tensor:
    """[6, R] int64: temperature, top-p and min-p as the bits of fp64, then top-k, seed, position."""
    params = [row.params for row in rows]
    floats = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
    whole = [
        [min(p.top_k or FAR, FAR) for p in params],
        [to_int64(r.seed) for r in rows],
        [len(r.output_ids) + r.ahead for r in rows],
    ]
    return torch.cat([torch.tensor(floats, dtype=torch.float64).view(torch.long), torch.tensor(whole, dtype=torch.long)])


def _draw(scores: Tensor, controls: Tensor) -> Tensor:
    temperature, top_p, min_p = controls[:3].view(torch.float64).to(scores.dtype).unsqueeze(-1)  # [R, 1] each
    top_k, seed, position = controls[3:].unsqueeze(-1)
    scores, ids = (scores / temperature).sort(dim=-1, descending=True, stable=True)  # [R, V]
    rank = torch.arange(scores.shape[-1], device=scores.device)
    p = scores.masked_fill(rank >= top_k, float("-inf")).softmax(-1)
    before = p.cumsum(-1) - p
    # the most probable token always stays: a tiny top_p is 0 in fp32, and 0 >= 0
    p = p.masked_fill((before >= top_p) & (rank > 0), 0)
    p = p.masked_fill(p < min_p * p[:, :1], 0)
    cdf = p.cumsum(-1)
    u = uniform(seed, position).to(scores.dtype)
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
