"""flash-linear-attention's chunk kernel in the KDA slot of the torch backend, as the backend "fla"."""

from dataclasses import replace

import torch
from torch import Tensor

from ..backend import REGISTRY, TORCH, Backend, register_backend


def make(device: torch.device, dtype: torch.dtype) -> Backend:
    """Everything but ``chunk_kda`` is torch: what differs is the kernel's doing. It needs a GPU and bf16."""
    if device.type != "cuda":
        raise ValueError(f"backend 'fla': expected a CUDA device, its kernels have no other, got device {device}")
    if dtype != torch.bfloat16:
        raise ValueError(f"backend 'fla': expected bfloat16, got {dtype}")
    try:
        from fla.ops.kda import chunk_kda as kernel
    except ImportError as error:
        raise ValueError(f"backend 'fla': expected flash-linear-attention to be importable, got: {error}") from error

    def chunk_kda(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
        intra: str = "dyadic", state_boundaries=None, lower_bound: float | None = None, **kwargs,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The arguments of ``ops.kda.chunk_kda``; fla forms its scores in its own way, hands out no boundary states, and calls
        another function of the gate its lower bound (a scaled sigmoid, no maximum)."""
        if intra != "dyadic" or state_boundaries is not None:
            got = f"{intra!r}, {'none' if state_boundaries is None else len(state_boundaries)}"
            raise ValueError(f"chunk_kda of fla: expected intra 'dyadic', no state_boundaries, got {got}")
        if lower_bound is not None:
            raise ValueError(f"chunk_kda of fla: lower_bound: expected none, for its own means something else, got {lower_bound}")
        return kernel(q, k, v, g, beta, **kwargs)

    return replace(TORCH, name="fla", chunk_kda=chunk_kda, boundary_states=False)


if "fla" not in REGISTRY:
    register_backend("fla", make)
