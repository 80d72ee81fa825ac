"""The one precision rule of the reference ops."""

import torch


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype that decays, states, softmax, norms and routers use: float64 if any input is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
