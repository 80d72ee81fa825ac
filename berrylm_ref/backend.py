"""Which implementation of each op runs: explicit, never a silent fallback.

A backend is a set of functions with the signatures of ``berrylm_ref.ops``. "torch" is those functions; "triton" replaces the
ones ``berrylm_kernels`` has. What was asked for is what runs, or an error says why not.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .ops import attention, attnres, conv, kda, kda_step, moe, norm

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One implementation of every op the model calls.

    ``boundary_states``: its ``chunk_kda`` hands out states at multiples of ``state_grid`` tokens, which decides what the prefix
    cache can do with it.
    """

    name: str
    rms_norm: Callable
    add_rms_norm: Callable
    gated_rms_norm: Callable
    attn_res_norm: Callable
    qk_norm_rope: Callable
    paged_attention: Callable
    causal_conv: Callable
    chunk_kda: Callable
    kda_decode_step: Callable
    moe: Callable
    boundary_states: bool = True
    state_grid: int = 64


TORCH = Backend(
    name="torch",
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    gated_rms_norm=norm.gated_rms_norm,
    attn_res_norm=attnres.attn_res_norm,
    qk_norm_rope=attention.qk_norm_rope,
    paged_attention=attention.paged_attention,
    causal_conv=conv.causal_conv,
    chunk_kda=kda.chunk_kda,
    kda_decode_step=kda_step.kda_decode_step,
    moe=moe.moe,
)


def _torch_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    return TORCH


def _triton_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Every op from ``berrylm_kernels``; it needs a CUDA device, or Triton's interpreter and fp32 on a CPU."""
    try:
        from berrylm_kernels import arguments, attention, attnres, conv, kda, moe, norm
    except ImportError as error:
        raise ValueError(f"backend 'triton': expected triton to be importable (pip install triton), got: {error}") from error
    if arguments.INTERPRETED:
        if dtype != torch.float32:
            raise ValueError(f"backend 'triton': expected float32 under TRITON_INTERPRET=1, got {dtype}")
    elif device.type != "cuda":
        raise ValueError(
            "backend 'triton': expected a CUDA device, or TRITON_INTERPRET=1 set before triton is imported to run the "
            f"kernels on a CPU, got device {device}"
        )
    elif dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"backend 'triton': expected float32 or bfloat16, got {dtype}; float64 runs on backend 'torch'")
    return Backend(
        name="triton",
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        gated_rms_norm=norm.gated_rms_norm,
        attn_res_norm=attnres.attn_res_norm,
        qk_norm_rope=attention.qk_norm_rope,
        paged_attention=attention.paged_attention,
        causal_conv=conv.causal_conv,
        chunk_kda=kda.chunk_kda,
        kda_decode_step=kda.kda_decode_step,
        moe=moe.moe,
    )


REGISTRY: dict[str, Callable[[torch.device, torch.dtype], Backend]] = {"torch": _torch_backend, "triton": _triton_backend}


def register_backend(name: str, make: Callable[[torch.device, torch.dtype], Backend]) -> None:
    """Make ``backend=name`` available; ``make(device, dtype)`` is called when it is asked for and may refuse with a ValueError.

    What the backend declares is what callers go by.
    """
    if name in REGISTRY or name == "auto":
        raise ValueError(f"register_backend: name: expected a new one, got {name!r}")
    REGISTRY[name] = make


def get_backend(name: str | Backend, device: torch.device | str, dtype: torch.dtype) -> Backend:
    """The backend called ``name``; a ``Backend`` passes through. "auto" is triton on a CUDA device, else torch, and logged."""
    if isinstance(name, Backend):
        return name
    device = torch.device(device)
    if name == "auto":
        name = "triton" if device.type == "cuda" and dtype in (torch.float32, torch.bfloat16) else "torch"
        log.info("backend auto: %s on %s", name, device)
    if name not in REGISTRY:
        raise ValueError(f"get_backend: name: expected 'auto' or one of {sorted(REGISTRY)}, got {name!r}")
    return REGISTRY[name](device, dtype)
