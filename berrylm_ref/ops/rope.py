"""Rotary position embedding on the first part of a head (arXiv:2104.09864, rotate-half form)."""

import torch
from torch import Tensor


def rope_angles(positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [N, rotary_dim] for absolute positions [N].

    Frequency c of rotary_dim / 2 is theta ** (-2c / rotary_dim): divided by the *rotary* dimension, not the head's. The
    angles are fp32 whatever the model dtype (fp64 for fp64), only cos and sin are cast: bf16 angles are off by 2 % at
    position 100.
    """
    if rotary_dim % 2:
        raise ValueError(f"rope_angles: rotary_dim: expected an even number, got {rotary_dim}")
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device).to(precision) / rotary_dim
    angle = positions.to(precision)[:, None] / theta**exponent  # [N, rotary_dim / 2]
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first cos.shape[-1] channels of every head; the rest passes. x [N, heads, D], cos and sin [N, rotary_dim]."""
    width = cos.shape[-1]
    rotated, rest = x[..., :width], x[..., width:]
    first, second = rotated.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([rotated * cos + torch.cat([-second, first], -1) * sin, rest], -1)
