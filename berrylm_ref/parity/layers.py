"""Two implementations inside the model: how the error of each layer grows, and the first op that makes more than the floor."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cache.batch import Batch, Caches
from .checks import FACTOR, Check, distance, first_over, set_budgets
from .lockstep import follow, record, weight_storage
from .progress import quiet
from .schedule import Schedule, check_prompts
from .sides import Side, Sides, lower
from .transformers_side import TransformersSide

HIDDEN_FACTOR = 2.0  # free running: how much further than the floor a layer's stream may be


@dataclass
class Trace:
    """A free run. logits [P, vocab_size], hidden: [P, D] for each layer; rows: (prompt, position) of each of the P rows."""

    logits: Tensor
    hidden: list[Tensor]
    rows: list[tuple[int, int]]


@dataclass
class Growth:
    """Of one side against the trusted one, running free.

    layers: rel-L2 of the stream behind each layer; tokens [layers, P]: the same token by token; top1: share of rows with the same
    most probable id; logits: rel-L2.
    """

    layers: list[float]
    tokens: Tensor
    top1: float
    logits: float


@dataclass
class LayerReport:
    """``floor`` is the plain torch side of the lower dtype against that of the higher one, measured on the same ids.

    checks: of every op tensor, in lockstep (empty for a side without ops to look into); found: the first one out of budget;
    left_out: tokens of moe calls that are near-ties of the router; why_no_ops: set where there are no checks.
    """

    a: str
    b: str
    floor_of: str
    growth: Growth
    floor: Growth
    first_layer: int | None
    rows: list[tuple[int, int]]
    checks: list[Check] = field(default_factory=list)
    found: Check | None = None
    left_out: int = 0
    why_no_ops: str = ""

    @property
    def ok(self) -> bool:
        return self.first_layer is None and self.found is None

    def by_layer(self) -> list[dict[str, Any]]:
        """One row a layer: the free run's error, the floor's, their growth over the layer before, the worst op in lockstep."""
        out = []
        for i, (error, floor) in enumerate(zip(self.growth.layers, self.floor.layers, strict=True)):
            checks = [c for c in self.checks if c.layer == i]
            worst = max(checks, key=lambda c: c.error / c.budget, default=None)
            before = self.growth.layers[i - 1] if i else 0.0
            out.append(
                {
                    "layer": i, "error": error, "floor": floor, "growth": error / before if before else None,
                    "op": worst and f"{worst.op}, {worst.what}",
                    "op_error": worst and worst.error, "op_budget": worst and worst.budget,
                }
            )  # fmt: skip
        return out


def compare_layers(
    sides: Sides,
    a: Side | TransformersSide,
    b: Side | TransformersSide,
    prompts: list[list[int]],
    *,
    factor: float = FACTOR,
    hidden_factor: float = HIDDEN_FACTOR,
    on_step: Callable[[str], None] = quiet,
) -> LayerReport:
    """``b`` against the trusted ``a`` on ``prompts`` (6 ids or more each); ``sides`` makes the two that measure the floor.

    Free running, every prompt goes through in pieces and single tokens, except beside a side that only takes whole prompts. In
    lockstep (see ``lockstep``) every op of ``b`` gets the inputs of ``a``.
    """
    low = lower((a.dtype, b.dtype))
    high = next((x.dtype for x in (a, b) if x.dtype != low), higher(low))
    floor_a, floor_b = (x if x == sides.plain(d) else sides.plain(d) for x, d in ((a, high), (b, low)))
    check_prompts(prompts, sides.model(low))
    free: dict[int, Trace] = {}
    ops_visible = isinstance(a, Side) and isinstance(b, Side)
    for side in (a, b, floor_a, floor_b):
        if id(side) not in free:
            free[id(side)] = trace(side, prompts, in_pieces=ops_visible, on_step=on_step)
    growth, floor = grow(free[id(a)], free[id(b)]), grow(free[id(floor_a)], free[id(floor_b)])
    budgets = [hidden_budget(x, low, hidden_factor) for x in floor.layers]
    first = next((i for i, (x, most) in enumerate(zip(growth.layers, budgets, strict=True)) if not x <= most), None)
    report = LayerReport(
        a=a.name, b=b.name, floor_of=f"{floor_b.name} against {floor_a.name}", growth=growth, floor=floor, first_layer=first,
        rows=free[id(a)].rows,
    )  # fmt: skip
    if not ops_visible:
        report.why_no_ops = "a side of transformers has no ops to look into"
        return report
    if floor_a is a:
        found = lockstep(a, [b] if floor_b is b else [b, floor_b], prompts, low, on_step)
        (report.checks, report.left_out), (floor_checks, _) = found[0], found[-1]
    else:
        ((report.checks, report.left_out),) = lockstep(a, [b], prompts, low, on_step)
        ((floor_checks, _),) = lockstep(floor_a, [floor_b], prompts, low, on_step)
    set_budgets(report.checks, floor_checks, low, factor)
    report.found = first_over(report.checks)
    return report


def higher(dtype: torch.dtype) -> torch.dtype:
    """What the rounding of ``dtype`` is measured with."""
    return torch.float32 if dtype == torch.bfloat16 else torch.float64


def hidden_budget(floor: float, low: torch.dtype, factor: float) -> float:
    """A stream that two right implementations share may still be rounded once more."""
    return factor * max(floor, {torch.float64: 1e-13, torch.float32: 1e-7, torch.bfloat16: 2e-3}[low])


@torch.inference_mode()
def trace(
    side: Side | TransformersSide, prompts: list[list[int]], in_pieces: bool = True, on_step: Callable[[str], None] = quiet
) -> Trace:
    """A free run over ``prompts``, in pieces with caches or each one whole."""
    if in_pieces:
        schedule = Schedule(prompts, side.backend.boundary_states)
        caches = schedule.caches(side.model)
        parts = []
        for i in range(schedule.forwards):
            on_step(f"{side.name} alone: {schedule.step(i)}")
            parts.append(side.run(schedule.batch(i, caches)))
        rows = schedule.rows
    else:
        on_step(f"{side.name} alone: whole prompts")
        parts = [whole(side, ids) for ids in prompts]
        rows = [(n, t) for n, ids in enumerate(prompts) for t in range(len(ids))]
    hidden = [torch.cat(x) for x in zip(*(h for _, h in parts), strict=True)]
    return Trace(torch.cat([logits for logits, _ in parts]), hidden, rows)


def whole(side: Side | TransformersSide, ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    if isinstance(side, TransformersSide):
        return side.whole(ids)
    return side.run(Batch.stateless(torch.tensor([ids], device=side.model.device)))


def grow(a: Trace, b: Trace) -> Growth:
    """``b`` against ``a``."""
    tokens = []
    for x, y in zip(a.hidden, b.hidden, strict=True):
        x = x.double()
        tokens.append((y.double() - x).norm(dim=-1) / x.norm(dim=-1))
    return Growth(
        layers=[distance(y, x) for x, y in zip(a.hidden, b.hidden, strict=True)],
        tokens=torch.stack(tokens).cpu(),
        top1=(a.logits.argmax(-1) == b.logits.argmax(-1)).double().mean().item(),
        logits=distance(b.logits, a.logits),
    )


def lockstep(
    trusted: Side, others: list[Side], prompts: list[list[int]], low: torch.dtype, on_step: Callable[[str], None] = quiet
) -> list[tuple[list[Check], int]]:
    """For each of ``others`` its checks against ``trusted``, and how many tokens of moe calls were left out as near-ties.

    A forward is recorded, followed by all, and forgotten, so that one forward's tensors are held at a time.
    """
    schedule = Schedule(prompts, all(side.backend.boundary_states for side in (trusted, *others)))
    caches = schedule.caches(trusted.model)
    own = [schedule.caches(side.model) for side in others]
    found: list[tuple[list[Check], int]] = [([], 0) for _ in others]
    for forward in range(schedule.forwards):
        on_step(f"{' and '.join(side.name for side in others)} in lockstep with {trusted.name}: {schedule.step(forward)}")
        calls, logits, _ = record(trusted, schedule.batch(forward, caches))
        for n, side in enumerate(others):
            checks, left_out = found[n]
            if any(check.what.startswith("call") for check in checks):
                continue  # it went another way before
            batch = schedule.batch(forward, own[n])
            follower = follow(side, batch, calls, logits, forward, low, weight_storage(side))
            more = snapshot_checks(side, forward, own[n], caches) if forward == 0 and schedule.boundaries else []
            found[n] = (checks + follower.checks + more, left_out + follower.left_out)
    return found


def snapshot_checks(side: Side, forward: int, own: Caches, trusted: Caches) -> list[Check]:
    """What a prefix cache would find: windows and states kept at a boundary, by linear layer."""
    return [
        Check(forward, layer, 0, "kept snapshot", f"input {name}", distance(x[i], y[i]), before="chunk_kda")
        for i, layer in enumerate(side.model.config.linear_layers)
        for name, x, y in (
            ("windows", own.snapshot_conv, trusted.snapshot_conv), ("states", own.snapshot_state, trusted.snapshot_state)
        )
    ]  # fmt: skip
