"""The two things that are put side by side, by name: torch-fp32, triton-bf16, triton-bf16+clamped, fla-bf16, transformers."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..backend import REGISTRY, TORCH, Backend, get_backend
from ..cache.batch import Batch
from ..model import BerryLM, as_device
from ..ops.kda import INTRA
from . import fla_backend  # noqa: F401 - registers the backend "fla"
from .precision import full_fp32
from .transformers_side import TransformersSide

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
SHORT_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class Side:
    """A model, the ops that run in it, and how its linear layers form their scores. Sides may share a model."""

    name: str
    model: BerryLM
    backend: Backend = TORCH
    intra: str | list[str] = "dyadic"

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @full_fp32()
    @torch.inference_mode()
    def run(self, batch: Batch, ops: Backend | None = None) -> tuple[Tensor, list[Tensor]]:
        """Logits and the stream behind every layer; with ``ops`` in the backend's place."""
        before = self.model.backend
        self.model.set_kda_intra(self.intra)
        self.model.backend = ops or self.backend
        try:
            return self.model.run(batch, keep_hidden=True)
        finally:
            self.model.backend = before


@dataclass
class Sides:
    """Makes sides of one checkpoint; a model is loaded once for each dtype. ValueError where the device is not there."""

    folder: Path
    device: str = "cpu"
    models: dict[torch.dtype, BerryLM] = field(default_factory=dict)

    def __post_init__(self):
        as_device(self.device)

    def model(self, dtype: torch.dtype) -> BerryLM:
        if dtype not in self.models:
            self.models[dtype] = BerryLM.from_pretrained(self.folder, dtype=dtype, device=self.device, backend=TORCH)
        return self.models[dtype]

    def plain(self, dtype: torch.dtype) -> Side:
        """The torch ops in ``dtype``: what a floor is measured with."""
        return Side(f"torch-{SHORT_NAMES[dtype]}", self.model(dtype))

    def side(self, name: str) -> "Side | TransformersSide":
        """ValueError that says what a name looks like, or why that side can't run here."""
        base, _, intra = name.partition("+")
        if base.partition("-")[0] == "transformers" and not intra:
            return TransformersSide(name, self.folder, check_dtype(name, base.partition("-")[2] or "fp32"), self.device)
        kind, _, short = base.rpartition("-")
        if kind not in REGISTRY or (intra and (intra not in INTRA or kind == "fla")):
            raise ValueError(
                f"parity layers: side: expected one of {sorted(REGISTRY)} and of {tuple(DTYPES)}, as torch-fp32, after all but "
                f"fla-* also one of {tuple('+' + x for x in INTRA)}, or transformers, got {name!r}"
            )
        dtype = check_dtype(name, short)
        backend = get_backend(kind, self.device, dtype)
        return Side(name, self.model(dtype), backend, intra or "dyadic")


def check_dtype(name: str, short: str) -> torch.dtype:
    if short not in DTYPES:
        raise ValueError(f"parity layers: side: expected one of {tuple(DTYPES)} after the dash, got {name!r}")
    return DTYPES[short]


def lower(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The least precise of them."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
