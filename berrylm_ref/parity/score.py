"""Served tokens against the reference, and against the floor: bf16 torch on the very same ids."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .client import Answer
from .progress import quiet
from .reference import Reference, Scored
from .served import HIT, Served

NONE = torch.zeros(0, dtype=torch.float64)


@dataclass
class Distance:
    """How far one side is from the reference on one pass. |delta logprob| float64, in nats.

    prompt: per prompt token but the first; decoded: per generated token; equal: [n] bool, the token is the reference's argmax;
    gap: [n] what the reference loses by that token against its own best, 0 where equal.
    """

    prompt: Tensor = field(default_factory=lambda: NONE)
    decoded: Tensor = field(default_factory=lambda: NONE)
    equal: Tensor = field(default_factory=lambda: NONE.bool())
    gap: Tensor = field(default_factory=lambda: NONE)


@dataclass
class Row:
    """One pass of one prompt: the port, the floor on the same ids, and what the cache did (None: the server does not say)."""

    name: str
    kind: str
    stage: str  # "cold", "cache hit", "multi-turn"
    tokens: int
    cached_tokens: int | None
    same_ids: bool | None  # of a cache hit: the ids of the cold pass
    port: Distance
    floor: Distance


def compare(
    served: list[Served], reference: Reference, floor: Reference, on_step: Callable[[str], None] = quiet
) -> list[Row]:
    """Teacher-force every served sequence through both models; each is run once where one is the beginning of another."""
    rows = []
    for number, one in enumerate(served, 1):
        passes = one.passes()
        sequences = [ids + (answer.ids or []) for _, ids, answer in passes]
        longest: list[list[int]] = []
        for ids in sorted(sequences, key=len, reverse=True):
            if not any(other[: len(ids)] == ids for other in longest):
                longest.append(ids)
        scored = []
        for ids in longest:
            pair = []
            for side in (reference, floor):
                on_step(f"{number} of {len(served)}, {one.prompt.name}, {len(ids)} ids: {side.model.dtype}")
                pair.append(side.score(ids))
            scored.append((ids, *pair))
        for (stage, ids, answer), sequence in zip(passes, sequences, strict=True):
            _, ref, low = next(s for s in scored if s[0][: len(sequence)] == sequence)
            same = answer.ids == one.cold.ids if stage == HIT and answer.ids is not None else None
            port, base = distances(len(ids), answer, ref, low)
            rows.append(Row(one.prompt.name, one.prompt.kind, stage, len(ids), answer.cached_tokens, same, port, base))
    return rows


def distances(count: int, answer: Answer, ref: Scored, low: Scored) -> tuple[Distance, Distance]:
    """(port, floor) on ``count`` prompt ids and the answer's ids after them."""
    port, base = Distance(), Distance()
    if answer.prompt_logprobs is not None:
        prompt = slice(answer.scored_from - 1, count - 1)
        port.prompt = delta(answer.prompt_logprobs, ref.logprobs[prompt])
        base.prompt = delta(low.logprobs[prompt], ref.logprobs[prompt])
    if answer.ids is not None:
        made = slice(count - 1, count - 1 + len(answer.ids))
        if answer.logprobs is not None:
            port.decoded = delta(answer.logprobs, ref.logprobs[made])
        base.decoded = delta(low.logprobs[made], ref.logprobs[made])
        port.equal = ref.best[made] == torch.tensor(answer.ids)
        port.gap = (ref.best_logprobs[made] - ref.logprobs[made]) * ~port.equal
        base.equal = ref.best[made] == low.best[made]
    return port, base


def delta(found, wanted: Tensor) -> Tensor:
    """|found - wanted|; what is no number is infinitely far."""
    found = torch.as_tensor(found, dtype=torch.float64)
    if found.shape != wanted.shape:
        raise ValueError(f"parity: log-probabilities: expected {wanted.numel()}, got {found.numel()}")
    return (found - wanted).abs().nan_to_num(nan=math.inf, posinf=math.inf)


def windows(x: Tensor, size: int) -> list[float]:
    """Means over ``size`` tokens each, the last one over what is left."""
    return [part.mean().item() for part in x.split(size)] if x.numel() else []
