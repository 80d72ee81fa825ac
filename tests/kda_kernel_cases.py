"""Inputs for the KDA kernels, and the error that bf16 operands cost in any implementation."""

import math

import torch

from berrylm_ref.ops.kda_chunk import invert_unit_lower
from berrylm_ref.ops.kda_inputs import CHUNK
from berrylm_ref.ops.norm import l2norm

# log2 of the decay over 64 tokens, and the range of dt_bias that gives it (raw gate N(0, 0.5^2), exp(A_log) 1 to 72)
REGIMES = {"-8": (-9, -7), "-235": (-8, -3.5), "-563": (-7, -2.6), "-2359": (-6, -1), "-9210": (-5, 1)}


def make_inputs(T, H=1, HV=2, K=16, V=32, B=1, seed=0, dtype=torch.float32, device="cpu"):
    """[q, k, v, g, beta] with mild decays; g in fp32."""
    r = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, T, H, K, generator=r) for _ in range(2))
    v = torch.randn(B, T, HV, V, generator=r)
    g = -2.0 * torch.rand(B, T, HV, K, generator=r)
    beta = torch.rand(B, T, HV, generator=r)
    return [q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), g.to(device), beta.to(device, dtype)]


def raw_gate(regime, T, HV, K, seed=1, device="cpu"):
    """The raw gate [1, T, HV, K] of a regime, and its A_log [HV] and dt_bias [HV * K]."""
    r = torch.Generator().manual_seed(seed)
    low, high = REGIMES[regime]
    raw = 0.5 * torch.randn(1, T, HV, K, generator=r)
    dt_bias = low + (high - low) * torch.rand(HV * K, generator=r)
    return raw.to(device), torch.linspace(0, math.log(72), HV).to(device), dt_bias.to(device)


def _bf16(x):
    return x.bfloat16().float()


def bf16_chunk_kda(q, k, v, g, beta):
    """The chunk form in torch with every operand of a matrix product rounded to bf16, sums in fp32: o and final state.

    One sequence from a zero state, q and k normalised inside. What a bf16 kernel can be asked to match.
    """
    T, HV, K = g.shape[1:]
    rows = -(-T // CHUNK) * CHUNK
    repeat = HV // q.shape[2]

    def chunked(x):  # [1, T, HV, ...] -> [chunks, HV, 64, ...]
        x = torch.cat([x[0].float(), x.new_zeros(rows - T, *x.shape[2:]).float()])
        return x.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    q = chunked(l2norm(q.float()).repeat_interleave(repeat, 2) * K**-0.5)
    k = chunked(l2norm(k.float()).repeat_interleave(repeat, 2))
    v, g, beta = chunked(v), chunked(g), chunked(beta).unsqueeze(-1)
    A, L = torch.zeros(2, *q.shape[:2], CHUNK, CHUNK, device=q.device)
    A += torch.diag_embed((q * k).sum(-1))
    s = 1
    while s < CHUNK:
        for b in range(0, CHUNK, 2 * s):
            keys, queries = slice(b, b + s), slice(b + s, b + 2 * s)
            since = g[:, :, queries].cumsum(2).exp()
            until = (g[:, :, keys].flip(2).cumsum(2).flip(2) - g[:, :, keys]).exp()
            right = _bf16(k[:, :, keys] * until).mT
            A[:, :, queries, keys] = _bf16(q[:, :, queries] * since) @ right
            L[:, :, queries, keys] = _bf16(k[:, :, queries] * since) @ right
        s *= 2
    inverse = _bf16(invert_unit_lower(beta * L) * beta.mT)
    G = g.cumsum(2)
    w, u = _bf16(inverse @ _bf16(k * G.exp())), _bf16(inverse @ _bf16(v))
    q, A, k, decay = _bf16(q * G.exp()), _bf16(A), _bf16(k * (G[:, :, -1:] - G).exp()), G[:, :, -1].exp().unsqueeze(-1)
    S, o = torch.zeros(HV, K, v.shape[-1], device=q.device), torch.zeros_like(u)
    for c in range(len(o)):
        new = _bf16(u[c] - w[c] @ _bf16(S))
        o[c] = q[c] @ _bf16(S) + A[c] @ new
        S = decay[c] * S + k[c].mT @ new
    return o.transpose(1, 2).flatten(0, 1)[:T].bfloat16().unsqueeze(0), S.unsqueeze(0)
