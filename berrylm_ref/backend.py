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


REGISTRY: dict[str, Callable[[], Backend]] = {"torch": lambda: TORCH}


def register_backend(name: str, make: Callable[[], Backend]) -> None:
    """Make ``backend=name`` available; ``make`` is called when it is asked for. What it declares is what callers go by."""
    if name in REGISTRY or name == "auto":
        raise ValueError(f"register_backend: name: expected a new one, got {name!r}")
    REGISTRY[name] = make


def get_backend(name: str | Backend, device: torch.device | str, dtype: torch.dtype) -> Backend:
    """The backend called ``name``; "auto" chooses and logs what it chose. A ``Backend`` passes through."""
    if isinstance(name, Backend):
        return name
    if name == "auto":
        name = "torch"
        log.info("backend auto: %s on %s", name, torch.device(device))
    if name not in REGISTRY:
        raise ValueError(f"get_backend: name: expected 'auto' or one of {sorted(REGISTRY)}, got {name!r}")
    return REGISTRY[name]()
