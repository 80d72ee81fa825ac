"""The short causal convolution in front of KDA: depthwise, no bias, followed by SiLU."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from .dtypes import compute_dtype


def causal_conv(x: Tensor, weight: Tensor, windows: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """y_t = silu(sum_w weight[:, w] * x[t - W + 1 + w]) per channel and sequence, where the window stands before token 0.

    x [P, C] packed raw projections; weight [C, W]; windows [N, C, W - 1], the last W - 1 raw inputs of each sequence,
    oldest first (zeros for a new one); cu_seqlens [N + 1]. Accumulated and activated in fp32 (fp64 for fp64), cast once.

    Returns y [P, C] and the new windows [N, C, W - 1] in the windows' dtype; an empty sequence keeps its window bit for bit.
    """
    P, C = x.shape
    N, W = cu_seqlens.numel() - 1, weight.shape[-1]
    if tuple(weight.shape) != (C, W):
        raise ValueError(f"causal_conv: weight: expected shape ({C}, kernel), got {tuple(weight.shape)}")
    if tuple(windows.shape) != (N, C, W - 1):
        raise ValueError(f"causal_conv: windows: expected shape {(N, C, W - 1)}, got {tuple(windows.shape)}")
    dtype, starts = compute_dtype(x), cu_seqlens[:-1]
    # one row list in which every sequence's window stands before its tokens
    owner = torch.repeat_interleave(torch.arange(N, device=x.device), cu_seqlens.diff(), output_size=P)
    begins = starts + torch.arange(N, device=x.device) * (W - 1)  # where each sequence's window starts in it
    rows = x.new_empty(P + N * (W - 1), C, dtype=torch.promote_types(x.dtype, windows.dtype))
    taps = torch.arange(W - 1, device=x.device)
    rows[begins[:, None] + taps] = windows.transpose(1, 2).to(rows.dtype)
    first = torch.arange(P, device=x.device) + owner * (W - 1)  # the oldest tap of each token
    rows[first + W - 1] = x.to(rows.dtype)
    y = sum(rows[first + w].to(dtype) * weight[:, w].to(dtype) for w in range(W))
    ends = begins + cu_seqlens.diff()
    return silu(y).to(x.dtype), rows[ends[:, None] + taps].transpose(1, 2).to(windows.dtype)


def causal_conv_step(x: Tensor, weight: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """``causal_conv`` for one token of each of N sequences, to the last bit, without the bookkeeping of lengths.

    x [N, C]; weight [C, W]; windows [N, C, W - 1]. Returns y [N, C] and the new windows [N, C, W - 1]. Shapes are the caller's.
    """
    dtype, wide = compute_dtype(x), torch.promote_types(x.dtype, windows.dtype)
    taps = torch.cat([windows.to(wide), x.to(wide).unsqueeze(-1)], -1)  # [N, C, W]
    y = sum(taps[..., w].to(dtype) * weight[:, w].to(dtype) for w in range(weight.shape[-1]))
    return silu(y).to(x.dtype), taps[..., 1:].to(windows.dtype)
