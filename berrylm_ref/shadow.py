"""The torch twin beside every kernel, on the very same tensors, during a real run: one CSV row a call.

``Shadow`` puts a wrapper between the model and each op. The kernel's result is what the run goes on with, and every op is judged
on the input it really got, so an error shows in the op that makes it and not in those after it.
"""

import csv
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COLUMNS = ("op", "layer", "rel_l2", "max_diff", "shape", "dtype")
BUDGET = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}  # rel-L2 between two right implementations of one op
POOLS, SLOTS = slice(8, 10), 10  # arguments of kda_decode_step that it changes in place, and the slots it changes


class Shadow:
    """Open while attached; ``close`` (or a ``with`` block) takes the wrappers off and closes the file.

    Sees the ops that ``model`` calls: what an engine replays from a CUDA graph it does not (``LLM(..., cuda_graphs=False)``).
    """

    def __init__(self, model: Any, path: str | Path, twin: Any):
        """``model``: a BerryLM; ``twin``: the backend whose ops run beside those of ``model.backend``.

        Ops that are the twin's own have nothing beside them and get no rows; ValueError where that is all of them.
        """
        self._model, self._backend = model, model.backend
        names = [f.name for f in dataclasses.fields(self._backend) if callable(getattr(self._backend, f.name))]
        ops = [op for op in names if getattr(self._backend, op) is not getattr(twin, op)]
        if not ops:
            raise ValueError(
                f"shadow: backend: expected one with ops of its own, as 'triton', got {self._backend.name!r}, whose ops are "
                f"those of the twin {twin.name!r}: there is nothing to compare, every difference would be 0"
            )
        self._file = open(path, "w", newline="")
        self._rows = csv.writer(self._file)
        self._rows.writerow(COLUMNS)
        self._layer = len(model.model.layers)  # what runs outside a layer counts as behind the last
        self._hooks = []
        for i, layer in enumerate(model.model.layers):
            self._hooks.append(layer.register_forward_pre_hook(lambda *_, i=i: setattr(self, "_layer", i)))
            self._hooks.append(layer.register_forward_hook(lambda *_: setattr(self, "_layer", len(model.model.layers))))
        wrapped = {op: self._wrap(op, getattr(self._backend, op), getattr(twin, op)) for op in ops}
        model.backend = dataclasses.replace(self._backend, **wrapped)

    def __enter__(self) -> "Shadow":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        self._model.backend = self._backend
        for hook in self._hooks:
            hook.remove()
        self._file.close()

    def _wrap(self, op: str, kernel: Callable, twin: Callable) -> Callable:
        def both(*args: Any, **kwargs: Any) -> Any:
            if op != "kda_decode_step":
                expected = twin(*args, **kwargs)
                found = kernel(*args, **kwargs)
                self._compare(op, tensors(found), tensors(expected))
                return found
            copies, rows = own_slots(args)
            expected = twin(*args[:8], *copies, rows, *args[11:], **kwargs)
            found = kernel(*args, **kwargs)
            live = rows > 0  # padding rows share the scratch slot and mean nothing
            pools = [pool[args[SLOTS][live]] for pool in args[POOLS]]
            self._compare(op, [found[live], *pools], [expected[live], *(c[rows[live]] for c in copies)])
            return found

        return both

    def _compare(self, op: str, found: list[Tensor], expected: list[Tensor]) -> None:
        """One row: of several results the one that is furthest off."""
        worst = max((measure(a, b) for a, b in zip(found, expected, strict=True) if b.numel()), default=None)
        if worst is not None:
            rel_l2, max_diff, shape = worst
            dtype = str(found[0].dtype).removeprefix("torch.")
            self._rows.writerow([op, self._layer, f"{rel_l2:.3e}", f"{max_diff:.3e}", shape, dtype])


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result, in order; None is left out."""
    parts = result if isinstance(result, tuple) else (result,)
    return [x for x in parts if x is not None]


def own_slots(args: tuple) -> tuple[list[Tensor], Tensor]:
    """Copies of the pools that hold only the slots in use, behind a scratch slot of their own, and the slots' new numbers."""
    slots = args[SLOTS].long()
    rows = torch.arange(1, len(slots) + 1, device=slots.device) * (slots > 0)
    return [torch.cat([torch.zeros_like(pool[:1]), pool[slots]]) for pool in args[POOLS]], rows


def measure(x: Tensor, ref: Tensor) -> tuple[float, float, str]:
    """rel-L2, largest difference and shape; a NaN counts as infinitely far."""
    x, ref = x.double(), ref.double()
    size, off = ref.norm().item(), (x - ref).norm().item()
    rel_l2 = off / size if size else (0.0 if off == 0 else float("inf"))
    if rel_l2 != rel_l2:
        rel_l2 = float("inf")
    return rel_l2, (x - ref).abs().max().item(), "x".join(map(str, x.shape))


def report(path: str | Path, budget: float | None = None) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Per op the calls and min, median, p99 and max of rel-L2; and the first row, in layer order, that leaves its budget.

    ``budget``: None is the dtype's own, ``BUDGET``.
    """
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or tuple(rows[0]) != COLUMNS:
        raise ValueError(f"shadow report: path: expected a CSV with the columns {', '.join(COLUMNS)}, got {str(path)!r}")
    by_op: dict[str, list[float]] = {}
    for number, row in enumerate(rows, 1):
        try:
            row["rel_l2"], row["layer"] = float(row["rel_l2"]), int(row["layer"])
            row["budget"] = BUDGET[row["dtype"]] if budget is None else budget
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"shadow report: path: expected numbers and a known dtype in row {number}, got {row}") from error
        by_op.setdefault(row["op"], []).append(row["rel_l2"])
    summary = [
        {
            "op": op,
            "calls": len(values),
            "min": min(values),
            "median": statistics.median(values),
            "p99": sorted(values)[min(len(values) - 1, int(0.99 * len(values)))],
            "max": max(values),
        }
        for op, values in by_op.items()
    ]
    over = [row for row in rows if row["rel_l2"] > row["budget"]]
    return summary, min(over, key=lambda row: row["layer"], default=None)
