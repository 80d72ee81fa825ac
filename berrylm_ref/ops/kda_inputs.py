"""What both forms of KDA do before their loop: check the arguments, apply the optional fusions, pack the sequences."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .dtypes import compute_dtype
from .norm import l2norm

CHUNK = 64


@dataclass
class KDAInputs:
    """P packed tokens of N sequences, in compute precision; q is normalised (if asked) and scaled."""

    q: Tensor  # [P, HV, K], each key head repeated for its value heads
    k: Tensor  # [P, HV, K]
    v: Tensor  # [P, HV, V]
    g: Tensor  # [P, HV, K] natural log
    beta: Tensor  # [P, HV]
    state: Tensor  # [N, HV, K, V]
    offsets: list[int]  # N + 1; sequence n is rows offsets[n]:offsets[n + 1]

    @property
    def lengths(self) -> list[int]:
        return [b - a for a, b in zip(self.offsets, self.offsets[1:], strict=False)]


def kda_gate(raw: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """Log-decay per value head and key channel (Kimi Linear, arXiv:2510.26692, section 4), natural log, always <= 0.

    g = -exp(A_log)[h] * softplus(raw[h, k] + dt_bias[h, k]), in fp32 (fp64 for fp64 inputs); with ``lower_bound`` (the
    "safe gate") g = max(g, lower_bound): a hard maximum, not a scaled sigmoid.

    raw [..., HV, K]; A_log [HV]; dt_bias [HV * K], head-major. Returns [..., HV, K].
    """
    dtype = compute_dtype(raw, A_log)
    heads, width = raw.shape[-2:]
    rate = A_log.to(dtype).exp()[:, None]  # [HV, 1]
    g = -rate * softplus(raw.to(dtype) + dt_bias.to(dtype).view(heads, width))
    return g if lower_bound is None else g.clamp_min(lower_bound)


def prepare_kda(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
) -> KDAInputs:
    """Validate (every error is a ValueError that names op, argument, expected, got) and pack."""
    offsets = check_kda(op, q, k, v, g, beta, initial_state, cu_seqlens)
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    if use_gate_in_kernel:
        _check_shape(op, "A_log", A_log, (HV,))
        _check_shape(op, "dt_bias", dt_bias, (HV * K,))
    elif A_log is not None or dt_bias is not None or lower_bound is not None:
        raise ValueError(f"{op}: A_log, dt_bias, lower_bound: expected only with use_gate_in_kernel=True, got them without")

    dtype = compute_dtype(q, k, v, g)
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))  # [P, ...]
    g = kda_gate(g, A_log, dt_bias, lower_bound).to(dtype) if use_gate_in_kernel else g.to(dtype)
    beta = beta.to(dtype).sigmoid() if use_beta_sigmoid_in_kernel else beta.to(dtype)
    q, k = q.to(dtype), k.to(dtype)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q = q * (K**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(HV // H, dim=1) for x in (q, k))  # value head j reads key head j // (HV / H)
    if initial_state is None:
        state = v.new_zeros(len(offsets) - 1, HV, K, V, dtype=dtype)
    else:
        state = initial_state.to(dtype)
    return KDAInputs(q, k, v.to(dtype), g, beta, state, offsets)


def check_kda(op, q, k, v, g, beta, initial_state, cu_seqlens) -> list[int]:
    """Shapes and dtypes of DESIGN's signature; returns the N + 1 sequence offsets into the flattened tokens."""
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g)):
        if x.dim() != 4:
            raise ValueError(f"{op}: {name}: expected 4 dimensions [B, T, heads, width], got shape {tuple(x.shape)}")
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        if not x.is_floating_point():
            raise ValueError(f"{op}: {name}: expected a floating dtype, got {x.dtype}")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    _check_shape(op, "k", k, (B, T, H, K))
    _check_shape(op, "v", v, (B, T, HV, V))
    _check_shape(op, "g", g, (B, T, HV, K))
    _check_shape(op, "beta", beta, (B, T, HV))
    if H == 0 or HV % H:
        raise ValueError(f"{op}: v: expected value heads to be a multiple of the {H} key heads, got {HV}")
    if cu_seqlens is None:
        offsets = [b * T for b in range(B + 1)]
    else:
        if B != 1:
            raise ValueError(f"{op}: q: expected batch size 1 with cu_seqlens, got {B}")
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"{op}: cu_seqlens: expected an integer tensor [N + 1], got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
            )
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets[-1] != T or any(b < a for a, b in zip(offsets, offsets[1:], strict=False)):
            raise ValueError(f"{op}: cu_seqlens: expected 0 <= ... <= T = {T} without a decrease, got {offsets}")
    if initial_state is not None:
        _check_shape(op, "initial_state", initial_state, (len(offsets) - 1, HV, K, V))
    return offsets


def _check_shape(op: str, name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is None or tuple(x.shape) != shape:
        got = "None" if x is None else f"shape {tuple(x.shape)}"
        raise ValueError(f"{op}: {name}: expected shape {shape}, got {got}")


def final_state_dtype(v: Tensor) -> torch.dtype:
    """States leave in fp32 whatever the activations are; fp64 inputs keep fp64."""
    return torch.float64 if v.dtype == torch.float64 else torch.float32
