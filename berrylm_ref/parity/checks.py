"""What a comparison of ops says: one check for every tensor that goes into an op or comes out of it."""

import inspect
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..backend import TORCH
from ..ops.moe import route
from ..shadow import measure

FACTOR = 3.0  # how much worse than the floor's own error a right implementation may be on one tensor
LEAST = {torch.float64: 1e-13, torch.float32: 3e-8, torch.bfloat16: 2e-3}  # rel-L2 of rounding a tensor once; fp64: of a sum
OUTPUTS = {
    "attn_res_norm": ("mixed", "normed"),
    "add_rms_norm": ("sum", "normed"),
    "qk_norm_rope": ("q", "k", "gate", "keys in their pages", "values in their pages"),
    "causal_conv": ("y", "windows"),
    "chunk_kda": ("o", "final state", "boundary states"),
    "kda_decode_step": ("o", "conv windows", "states"),
}


@dataclass
class Check:
    """One tensor of one call. ``layer`` is the number of layers for what comes after them.

    what: "input NAME", "output NAME" or "call"; error: rel-L2 against the trusted side; floor: the same for right torch ops in
    the lower of the two dtypes; before: the op before this one.
    """

    forward: int
    layer: int
    call: int
    op: str
    what: str
    error: float
    before: str = ""
    floor: float = 0.0
    budget: float = math.inf

    @property
    def over(self) -> bool:
        return not self.error <= self.budget

    @property
    def key(self) -> tuple[int, int, int, str, str]:
        return self.forward, self.layer, self.call, self.op, self.what

    def sentence(self) -> str:
        """Where to look."""
        size = f"rel-L2 {self.error:.1e}, the floor {self.floor:.1e}, budget {self.budget:.1e}"
        if self.what.startswith("output"):
            return f"layer {self.layer}, {self.op}: its {self.what} is off on right inputs: {size}"
        between = f"between {self.before} and it" if self.before else "before it"
        return f"layer {self.layer}, {self.op}: its {self.what} is off, and what makes it so lies {between}: {size}"


@cache
def parameter_names(op: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(TORCH, op)).parameters)


def named_arguments(op: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, tuples of tensors as name[0], name[1]; in the order of the signature."""
    flat: dict[str, Any] = {}
    for name, value in {**dict(zip(parameter_names(op), args, strict=False)), **kwargs}.items():
        if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            flat |= {f"{name}[{i}]": x for i, x in enumerate(value)}
        else:
            flat[name] = value
    return flat


def distance(found: Any, wanted: Any, rows: Tensor | None = None) -> float:
    """rel-L2 of two tensors (of ``rows`` alone); anything else, and whole numbers, are equal or infinitely far."""
    if not isinstance(found, Tensor) or not isinstance(wanted, Tensor):
        same = found is wanted or (not isinstance(found, Tensor) and not isinstance(wanted, Tensor) and found == wanted)
        return 0.0 if same else math.inf
    if found.shape != wanted.shape:
        return math.inf
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(found, wanted.to(found.device)) else math.inf
    if rows is not None:
        found, wanted = found[rows], wanted[rows]
    return measure(found, wanted.to(found.device))[0] if wanted.numel() else 0.0


def certain_rows(trusted: dict[str, Any], low: torch.dtype) -> Tensor:
    """[P] bool: tokens of a moe call whose choice of experts is no near-tie, so that rounding may not change it.

    The gap between the last expert chosen and the first one left out must be four times what ``low`` does to a score.
    """
    scores = trusted["x"].double() @ trusted["router"].double().T  # [P, E]
    rounded = linear(trusted["x"].to(low), trusted["router"].to(low)).double()
    top_k = trusted["top_k"]
    if top_k == scores.shape[-1]:
        return torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    order = route(scores, top_k + 1, False)[1]
    gap = scores.gather(-1, order[:, top_k - 1 : top_k]) - scores.gather(-1, order[:, top_k:])
    return gap.squeeze(-1) > 4 * (scores - rounded).abs().amax(-1)


def set_budgets(checks: list[Check], floor: list[Check], dtype: torch.dtype, factor: float) -> None:
    """Give every check the floor measured at the same place."""
    at = {check.key: check.error for check in floor}
    for check in checks:
        check.floor = at.get(check.key, 0.0)
        check.budget = factor * max(check.floor, LEAST[dtype])


def first_over(checks: list[Check]) -> Check | None:
    """The first check out of budget: the lowest layer, there the earliest forward and call."""
    over = [check for check in checks if check.over]
    return min(over, key=lambda check: (check.layer, check.forward, check.call), default=None)

