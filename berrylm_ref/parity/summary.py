"""Rows of a parity run into numbers, and numbers into a verdict."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .score import Distance, Row, windows
from .served import COLD, PASSES

WINDOW = 8192
PART = 3.0


@dataclass
class Line:
    """The rows of one kind and pass together. None: not measured."""

    kind: str
    stage: str
    prompts: int
    tokens: int
    cached_tokens: int | None
    mean: float | None
    max: float | None
    floor_mean: float | None
    floor_max: float | None
    greedy: float | None
    floor_greedy: float | None
    decoded_mean: float | None
    decoded_max: float | None
    floor_decoded_mean: float | None
    floor_decoded_max: float | None
    gap: float | None  # largest loss, in the reference's nats, by a token that is not its argmax
    same_ids: int | None  # cache hits whose ids are those of the cold pass, of ``prompts``

    @property
    def ratio(self) -> float | None:
        """Mean |delta logprob| over prompts as a multiple of the floor."""
        return over(self.mean, self.floor_mean)

    @property
    def decoded_ratio(self) -> float | None:
        return over(self.decoded_mean, self.floor_decoded_mean)


def over(x: float | None, floor: float | None) -> float | None:
    if x is None or floor is None:
        return None
    return x / floor if floor else (0.0 if x == 0 else float("inf"))


def summarise(rows: list[Row]) -> list[Line]:
    """One line for each kind of prompt and pass, then one over everything."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    groups = [(k, s, [r for r in rows if (r.kind, r.stage) == (k, s)]) for k in kinds for s in PASSES]
    return [line(k, s, found) for k, s, found in [*groups, ("all", "all", rows)] if found]


def line(kind: str, stage: str, rows: list[Row]) -> Line:
    port, floor = (joined([getattr(row, side) for row in rows]) for side in ("port", "floor"))
    cached = [row.cached_tokens for row in rows]
    same = [row.same_ids for row in rows if row.same_ids is not None]
    decoded = port.decoded.numel() > 0
    return Line(
        kind=kind, stage=stage, prompts=len(rows), tokens=sum(row.tokens for row in rows),
        cached_tokens=None if None in cached else sum(cached),
        mean=mean(port.prompt), max=largest(port.prompt), floor_mean=mean(floor.prompt), floor_max=largest(floor.prompt),
        greedy=mean(port.equal), floor_greedy=mean(floor.equal),
        decoded_mean=mean(port.decoded), decoded_max=largest(port.decoded),
        floor_decoded_mean=mean(floor.decoded) if decoded else None,
        floor_decoded_max=largest(floor.decoded) if decoded else None,
        gap=largest(port.gap), same_ids=sum(same) if same else None,
    )  # fmt: skip


def joined(parts: list[Distance]) -> Distance:
    return Distance(*(torch.cat([getattr(p, name) for p in parts]) for name in ("prompt", "decoded", "equal", "gap")))


def mean(x: Tensor) -> float | None:
    return x.double().mean().item() if x.numel() else None


def largest(x: Tensor) -> float | None:
    return x.max().item() if x.numel() else None


def long_windows(rows: list[Row], size: int = WINDOW) -> list[dict[str, Any]]:
    """Per document the means over windows of ``size`` tokens: a state that goes wrong late shows in the later ones."""
    return [
        {"name": row.name, "tokens": row.tokens, "port": windows(row.port.prompt, size), "floor": windows(row.floor.prompt, size)}
        for row in rows
        if row.kind == "document" and row.stage == COLD and row.port.prompt.numel()
    ]


def findings(rows: list[Row], budget: float) -> list[str]:
    """What a correct port does not show.

    Over everything the mean may be ``budget`` floors; over one kind and pass, whose tokens are few, ``PART`` times that: a cold
    pass that is right must not hide a cache that is wrong. A token other than the reference's argmax is a near-tie while the
    reference itself loses no more by it than twice the largest error of the floor: both scores may be off by that. More is a bug.
    """
    out = []
    for x in reversed(summarise(rows)):
        most = budget if x.kind == "all" else PART * budget
        where = "everywhere" if x.kind == "all" else f"{x.kind}, {x.stage}"
        what, ratio = ("prompts", x.ratio) if x.ratio is not None else ("decoded tokens", x.decoded_ratio)
        if ratio is not None and not ratio <= most:
            out.append(f"{where}: mean |delta logprob| over {what} is {ratio:.2f}x the floor, budget {most:g}x")
    noise = max((largest(torch.cat([row.floor.prompt, row.floor.decoded])) or 0.0 for row in rows), default=0.0)
    for row in rows:
        wrong = (row.port.gap > 2 * noise).nonzero().flatten().tolist()
        if wrong:
            gap = row.port.gap[wrong[0]].item()
            out.append(
                f"{row.name}, {row.stage}: generated token {wrong[0]} loses {gap:.3g} nats against the reference's argmax; "
                f"the floor explains {2 * noise:.3g}"
            )
        if row.stage == COLD and row.cached_tokens:
            out.append(f"{row.name}: the cold pass was not cold, {row.cached_tokens} tokens were cached; try another --seed")
    return out
