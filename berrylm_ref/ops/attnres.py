"""Gated Block Attention Residuals: each layer mixes the streams committed so far (arXiv:2603.15031)."""

import torch
from torch import Tensor

from .dtypes import compute_dtype
from .norm import rms_norm


def attn_res(h: Tensor, committed: Tensor, pseudo_query: Tensor, gate: Tensor | None, eps: float, gated: bool = True) -> Tensor:
    """Softmax attention over depth, per token: sources are the committed streams in order, then h itself.

    key_n = rms_norm(s_n) without a weight; p = softmax_n <key_n, pseudo_query>; mix = sum_n p_n s_n over the *raw* sources,
    all in fp32 (fp64 for fp64). Mix is cast to h's dtype; then h + tanh(gate) * (mix - h), tanh in fp32, cast, and each of the
    three operations rounded in h's dtype. A zero gate is the exact identity, a zero pseudo-query the uniform mean. Without
    ``gated`` the result is mix.

    h [P, D]; committed [blocks, P, D], block 0 the embeddings; pseudo_query [D]; gate []. Returns [P, D].
    """
    D = h.shape[-1]
    if committed.dim() != 3 or tuple(committed.shape[1:]) != tuple(h.shape):
        raise ValueError(f"attn_res: committed: expected [blocks, {h.shape[0]}, {D}], got {tuple(committed.shape)}")
    if tuple(pseudo_query.shape) != (D,):
        raise ValueError(f"attn_res: pseudo_query: expected shape ({D},), got {tuple(pseudo_query.shape)}")
    if gated and (gate is None or gate.numel() != 1):
        raise ValueError(f"attn_res: gate: expected one number, got {None if gate is None else tuple(gate.shape)}")
    dtype = compute_dtype(h)
    sources = torch.cat([committed, h[None]]).to(dtype)  # [blocks + 1, P, D]
    keys = sources * (sources.square().mean(-1, keepdim=True) + eps).rsqrt()
    p = (keys @ pseudo_query.to(dtype)).softmax(0)  # [blocks + 1, P]
    mix = torch.einsum("np,npd->pd", p, sources).to(h.dtype)
    return h + torch.tanh(gate.to(dtype)).to(h.dtype) * (mix - h) if gated else mix


def attn_res_norm(
    h: Tensor,
    committed: Tensor,
    pseudo_query: Tensor,
    gate: Tensor | None,
    eps: float,
    gated: bool,
    norm_weight: Tensor,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """``attn_res`` and the layer's input norm: (mixed, rms_norm(mixed, norm_weight, norm_eps)), both [P, D].

    The residual goes on from the *mixed* stream.
    """
    mixed = attn_res(h, committed, pseudo_query, gate, eps, gated)
    return mixed, rms_norm(mixed, norm_weight, norm_eps)
