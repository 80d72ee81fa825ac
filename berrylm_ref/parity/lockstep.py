"""Two sides op by op: every op of one is given the other's inputs, and what it returns is replaced by the other's outputs.

    trusted side:   x -> op 1 -> y1 -> projections -> op 2 -> y2 -> ...
                         |       |                    |
    other side:     x -> op 1 -> (y1 taken over) ->   op 2 ...
                         checked                      its inputs checked, then run on the trusted ones, its outputs checked

So no error travels further than from one op to the next. An op whose outputs are off is wrong itself; an op whose inputs are off
although all ops before it were given right values stands behind wrong projections, wiring or caches.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..backend import Backend
from ..cache.batch import Batch
from .checks import OUTPUTS, Check, certain_rows, distance, named_arguments
from .in_place import isolated, places, write
from .sides import Side


@dataclass
class Call:
    """One op call of the trusted side: ``args`` as before the call, ``outputs`` with what it wrote in place at their end."""

    layer: int
    op: str
    args: tuple
    kwargs: dict[str, Any]
    outputs: list[Tensor | None]


class OtherCalls(Exception):
    """The other side calls other ops than the trusted one."""


class Watch:
    """Wraps the ops of a side for one forward, and knows the layer that runs. Use as a context manager."""

    def __init__(self, side: Side):
        self.side, self.layers = side, side.model.model.layers
        self.layer = len(self.layers)
        names = [f.name for f in dataclasses.fields(side.backend) if callable(getattr(side.backend, f.name))]
        wrapped = {op: self._wrapped(op, getattr(side.backend, op)) for op in names}
        self.ops: Backend = dataclasses.replace(side.backend, **wrapped)

    def __enter__(self) -> "Watch":
        self._hooks = []
        for i, layer in enumerate(self.layers):
            self._hooks.append(layer.register_forward_pre_hook(lambda *_, i=i: setattr(self, "layer", i)))
            self._hooks.append(layer.register_forward_hook(lambda *_: setattr(self, "layer", len(self.layers))))
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _wrapped(self, op: str, run):
        return lambda *args, **kwargs: self.called(op, run, args, kwargs)


class Recorder(Watch):
    """Keeps the calls of the trusted side."""

    def __init__(self, side: Side):
        super().__init__(side)
        self.calls: list[Call] = []

    def called(self, op: str, run, args: tuple, kwargs: dict[str, Any]) -> Any:
        before = isolated(op, args)
        found = run(*args, **kwargs)
        outputs = list(found) if isinstance(found, tuple) else [found]
        self.calls.append(Call(self.layer, op, before, kwargs, outputs + places(op, args)))
        return found


@dataclass
class Follower(Watch):
    """Checks the other side against ``calls``. ``weights``: the storage of its parameters, compared in the first forward only.
    ``low``: the lower of the two dtypes."""

    side: Side
    calls: list[Call]
    forward: int
    low: torch.dtype
    weights: set[int] = field(repr=False)
    checks: list[Check] = field(default_factory=list)
    left_out: int = 0  # tokens of moe calls that are near-ties

    def __post_init__(self):
        super().__init__(self.side)
        self.next = 0

    def called(self, op: str, run, args: tuple, kwargs: dict[str, Any]) -> Any:
        call = self.calls[self.next] if self.next < len(self.calls) else None
        if call is None or (call.op, call.layer) != (op, self.layer):
            expected = "no further call" if call is None else f"{call.op} in layer {call.layer}"
            self._add(op, f"call ({expected} expected)", float("inf"))
            raise OtherCalls
        own_args = isolated(op, args)
        own, trusted = named_arguments(op, own_args, kwargs), named_arguments(op, call.args, call.kwargs)
        for name, value in own.items():
            if name != "intra" and (self.forward == 0 or not self._is_weight(value)):
                self._add(op, f"input {name}", distance(value, trusted.get(name)))
        given = tuple(self._taken(mine, theirs) for mine, theirs in zip(own_args, call.args, strict=True))
        named = {k: v if k == "intra" else self._taken(v, call.kwargs.get(k)) for k, v in kwargs.items()}
        found = run(*given, **named)
        outputs = list(found) if isinstance(found, tuple) else [found]
        returned = len(outputs)
        outputs += places(op, given)
        self._check_outputs(op, call, outputs, trusted)
        result = [None if x is None else like(x, y) for x, y in zip(call.outputs, outputs, strict=True)]
        write(op, args, result[returned:])
        self.next += 1
        return tuple(result[:returned]) if isinstance(found, tuple) else result[0]

    def _check_outputs(self, op: str, call: Call, outputs: list[Tensor | None], trusted: dict[str, Any]) -> None:
        if len(outputs) != len(call.outputs):
            self._add(op, f"output count ({len(call.outputs)} expected, got {len(outputs)})", float("inf"))
            raise OtherCalls
        rows = None
        if op == "moe":
            rows = certain_rows(trusted, self.low)
            self.left_out += int((~rows).sum())
        for i, (found, wanted) in enumerate(zip(outputs, call.outputs, strict=True)):
            names = OUTPUTS.get(op)
            self._add(op, f"output {names[i] if names else 'value'}", distance(found, wanted, rows))

    def _taken(self, mine: Any, theirs: Any) -> Any:
        """The trusted argument in the form of our own; weights are ours."""
        if isinstance(mine, tuple) and isinstance(theirs, tuple):
            return tuple(self._taken(a, b) for a, b in zip(mine, theirs, strict=True))
        if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
            return theirs
        return mine if self._is_weight(mine) and mine.shape == theirs.shape else like(theirs, mine).clone()

    def _is_weight(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self.weights

    def _add(self, op: str, what: str, error: float) -> None:
        before = self.calls[self.next - 1].op if self.next else ""
        self.checks.append(Check(self.forward, self.layer, self.next, op, what, error, before))


def like(x: Tensor, form: Tensor | None) -> Tensor:
    """``x`` in the dtype and on the device of ``form``."""
    return x if form is None else x.to(form.device, form.dtype)


def weight_storage(side: Side) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in side.model.parameters()}


def record(side: Side, batch: Batch) -> tuple[list[Call], Tensor, list[Tensor]]:
    """One forward of the trusted side: its calls, its logits, its stream behind every layer."""
    with Recorder(side) as recorder:
        logits, hidden = side.run(batch, recorder.ops)
    return recorder.calls, logits, hidden


def follow(
    side: Side, batch: Batch, calls: list[Call], logits: Tensor, forward: int, low: torch.dtype, weights: set[int]
) -> Follower:
    """The same forward of the other side, in lockstep; its checks end with the head's. OtherCalls leaves a check that says so."""
    with Follower(side, calls, forward, low, weights) as follower:
        try:
            found, _ = side.run(batch, follower.ops)
        except OtherCalls:
            return follower
    if follower.next < len(calls):
        follower._add("forward", f"call ({calls[follower.next].op} expected)", float("inf"))
    follower._add("lm_head", "output logits", distance(found, logits))
    return follower


