"""One parity run: ask, score, sum up. The command prints what this returns."""

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..model import BerryLM
from .client import Api
from .connect import limits
from .progress import quiet
from .prompts import Prompt
from .reference import Reference
from .score import Row, compare
from .served import GRID, HIT, ask
from .summary import WINDOW, Line, findings, long_windows, summarise

BUDGET = 1.2  # the largest multiple of the floor that still counts as the same arithmetic


@dataclass
class Result:
    """``rows`` per prompt and pass, ``lines`` per kind and pass, ``windows`` of the documents, ``findings``: what is wrong,
    ``limits``: what the server did not give, ``about``: what was run."""

    rows: list[Row]
    lines: list[Line]
    windows: list[dict[str, Any]]
    findings: list[str]
    limits: list[str]
    about: dict[str, Any]

    @property
    def total(self) -> Line:
        return self.lines[-1]

    def as_dict(self) -> dict[str, Any]:
        lines = [{**asdict(x), "ratio": x.ratio, "decoded_ratio": x.decoded_ratio} for x in self.lines]
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            for side in ("port", "floor"):
                row[side] = {k: v.tolist() for k, v in row[side].items()}
        return {
            "about": self.about, "limits": self.limits, "findings": self.findings, "lines": lines, "windows": self.windows,
            "rows": rows,
        }  # fmt: skip


def measure(
    folder: str | Path,
    api: Api,
    prompts: list[Prompt],
    *,
    new_tokens: int = 16,
    reference_dtype: str = "float32",
    device: str = "cpu",
    budget: float = BUDGET,
    window: int = WINDOW,
    on_step: Callable[[str], None] = quiet,
) -> Result:
    """Ask ``api`` about ``prompts`` and judge the answers by ``folder`` in ``reference_dtype`` and in bf16 (the floor).

    Raises ValueError where the server refuses or the prompts do not fit the model.
    """
    on_step("loading the reference")
    reference = Reference(folder, reference_dtype, device)
    for prompt in prompts:
        ids = torch.tensor([prompt.ids + prompt.follow], dtype=torch.long)
        reference.model.check_ids(ids)
    served = ask(api, prompts, new_tokens, lambda step: on_step(f"asking {step}"))
    rows = compare(served, reference, Reference(folder, "bfloat16", device), lambda step: on_step(f"reference {step}"))
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "machine": machine(device),
        "model": parameters(reference.model),
        "protocol": api.name,
        "reference": f"torch {reference_dtype}",
        "floor": "torch bfloat16",
        "new_tokens": new_tokens,
        "prompts": [{"name": p.name, "tokens": len(p.ids), "sha256": fingerprint(p.ids)} for p in prompts],
    }
    unsaid = [*limits(api), *cache_limits(rows)]
    return Result(rows, summarise(rows), long_windows(rows, window), findings(rows, budget), unsaid, about)


def cache_limits(rows: list[Row]) -> list[str]:
    """What the pass for cache hits can't show."""
    cached = [row.cached_tokens for row in rows if row.stage == HIT and row.tokens > GRID]
    if cached and None in cached:
        return ["the server does not say how many tokens came from its cache (vLLM: --enable-prompt-tokens-details)"]
    if cached and not any(cached):
        return ["no token came from the server's cache when prompts were sent again: cache hits are not measured"]
    return []


def machine(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else platform.machine()


def parameters(model: BerryLM) -> dict[str, int]:
    return {"layers": model.config.num_hidden_layers, "parameters": sum(p.numel() for p in model.parameters())}


def fingerprint(ids: list[int]) -> str:
    """Tells whether two runs scored the same ids."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
