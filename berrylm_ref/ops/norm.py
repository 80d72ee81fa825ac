"""The three norms of the model: zero-centred RMSNorm, the gated RMSNorm of the KDA output, and the l2norm of its q and k."""

from torch import Tensor
from torch.nn.functional import silu

from .dtypes import compute_dtype

L2_EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (1 + weight): the weight is stored around zero (arXiv:1910.07467, zero-centred).

    x [..., D], weight [D]. Everything in fp32 (fp64 for fp64), one cast at the end.
    """
    _check(x, weight, "rms_norm")
    y = x.to(compute_dtype(x))
    y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (y * (1 + weight.to(y.dtype))).to(x.dtype)


def add_rms_norm(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual add and the norm that follows it: (h + y, rms_norm(h + y)), the sum rounded to h's dtype first.

    h, y [..., D], weight [D]. Both results [..., D].
    """
    h = h + y
    return h, rms_norm(h, weight, eps)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of a head's output, times a plain weight, times silu(z): the norm comes before the gate.

    x, z [..., V], weight [V] (centred at 1). The normalised value is cast to x's dtype before the weight, the gate is
    taken in fp32, and the result is cast.
    """
    _check(x, weight, "gated_rms_norm")
    if z.shape != x.shape:
        raise ValueError(f"gated_rms_norm: z: expected shape {tuple(x.shape)}, got {tuple(z.shape)}")
    dtype = compute_dtype(x)
    y = x.to(dtype)
    y = (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    return (weight * y * silu(z.to(dtype))).to(x.dtype)


def l2norm(x: Tensor, eps: float = L2_EPS) -> Tensor:
    """x * rsqrt(sum(x^2) + eps) over the last dimension, in fp32 (fp64 for fp64), cast at the end."""
    y = x.to(compute_dtype(x))
    return (y * (y.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def _check(x: Tensor, weight: Tensor, op: str) -> None:
    if tuple(weight.shape) != tuple(x.shape[-1:]):
        raise ValueError(f"{op}: weight: expected shape {tuple(x.shape[-1:])}, got {tuple(weight.shape)}")
