"""The model cut into functions of tensors only, each a region that torch.compile takes whole.

They work on P = rows * length packed tokens, so that one compiled graph serves every batch shape: only the recurrence and the
attention, which stand between the regions, know where a row begins. Weights come as arguments, so that all layers of a kind
share a graph. ``h``, the residual stream, keeps its own dtype (fp32 in training); products run in ``dtype``.

The numbers are those of ``berrylm_ref.ops``, which checks arguments and reads lengths on the host and so cannot be compiled.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad, silu

from ..ops.attention import qk_norm_rope
from ..ops.dtypes import compute_dtype
from ..ops.kda import kda_gate
from ..ops.norm import gated_rms_norm, l2norm, rms_norm


def product(x: Tensor, weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """x [P, in] times weight [out, in], both rounded to ``dtype``."""
    return linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def mix(
    h: Tensor, committed: list[Tensor], query: Tensor, gate: Tensor | None, eps: float, norm_weight: Tensor, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """``ops.attnres.attn_res_norm``, source by source: nothing is stacked but one score a token. All streams [P, D]."""
    sources = [*committed, h]
    wide = compute_dtype(h)
    scores = []
    for source in sources:
        s = source.to(wide)
        scores.append((s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * query).sum(-1))
    p = torch.stack(scores).softmax(0)  # [sources, P]
    mixed = sum(p[n].unsqueeze(-1) * source.to(wide) for n, source in enumerate(sources)).to(h.dtype)
    if gate is not None:
        mixed = h + torch.tanh(gate) * (mixed - h)
    return mixed, rms_norm(mixed, norm_weight, norm_eps)


def short_conv(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """``ops.conv.causal_conv`` for rows that begin at position 0: shifted copies, and no tap reaches before its row.

    x [P, C], weight [C, W], positions [P].
    """
    wide, taps = compute_dtype(x), weight.shape[-1]
    x, y = x.to(wide), 0
    for back in range(taps):
        shifted = pad(x[: x.shape[0] - back], (0, 0, back, 0))
        y = y + torch.where((positions >= back).unsqueeze(-1), shifted, 0) * weight[:, taps - 1 - back].to(wide)
    return silu(y)


def linear_in(
    x: Tensor,
    positions: Tensor,
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    f_down: Tensor,
    f_up: Tensor,
    conv: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    heads: tuple[int, int, int, int],
    lower_bound: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """What the recurrence takes: q and k normalised [P, H, K], v [P, HV, V], g [P, HV, K] and beta [P, HV] not rounded.

    ``heads`` is (H, HV, K, V). The last result is the output gate [P, HV, V].
    """
    H, HV, K, V = heads
    mixed = short_conv(product(x, qkv, dtype), conv, positions)
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    raw = product(product(x, f_down, dtype), f_up, dtype).unflatten(-1, (HV, K))
    beta = product(x, b, dtype).to(compute_dtype(x)).sigmoid()
    q, k = (l2norm(t.unflatten(-1, (H, K))).to(dtype).contiguous() for t in (q, k))
    v = v.unflatten(-1, (HV, V)).to(dtype).contiguous()
    return q, k, v, kda_gate(raw, A_log, dt_bias, lower_bound), beta, product(x, z, dtype).unflatten(-1, (HV, V))


def linear_out(
    h: Tensor, o: Tensor, z: Tensor, norm: Tensor, eps: float, out: Tensor, post_norm: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gated norm, output projection, residual add and the norm that follows: (h, x), both [P, D]. o [P, HV, V]."""
    y = gated_rms_norm(o, z, norm, eps)
    h = h + product(y.flatten(-2), out, dtype).to(h.dtype)
    return h, rms_norm(h, post_norm, eps)


def full_in(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: tuple[Tensor, Tensor | None],
    k: tuple[Tensor, Tensor | None],
    v: tuple[Tensor, Tensor | None],
    q_norm: Tensor,
    k_norm: Tensor,
    heads: tuple[int, int],
    gated: bool,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v of the attention, all [P, heads, D] with the key heads repeated, and the output gate or None."""
    n, n_kv = heads
    q, k, v = (product(x, w, dtype, bias).unflatten(-1, (m, -1)) for (w, bias), m in ((q, n), (k, n_kv), (v, n_kv)))
    q, k, gate = qk_norm_rope(q, k, q_norm, k_norm, eps, cos, sin, output_gate=gated)
    k, v = (t.repeat_interleave(n // n_kv, dim=1) for t in (k, v))
    return q, k, v, gate


def full_out(
    h: Tensor,
    o: Tensor,
    gate: Tensor | None,
    out: Tensor,
    bias: Tensor | None,
    post_norm: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Output gate, projection, residual add and the norm that follows. o [P, heads, D]."""
    o = o if gate is None else o * torch.sigmoid(gate)
    h = h + product(o.flatten(-2), out, dtype, bias).to(h.dtype)
    return h, rms_norm(h, post_norm, eps)


def routes(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """``ops.moe.route`` without a sort: (weight of every expert, 0 if not chosen; all probabilities), both [P, E].

    An expert is chosen if fewer than top_k are ahead of it; of equal logits the lower id is ahead.
    """
    probabilities = logits.softmax(-1)
    mine, other = logits.unsqueeze(-1), logits.unsqueeze(-2)  # [P, E, 1], [P, 1, E]
    ids = torch.arange(logits.shape[-1], device=logits.device)
    ahead = (other > mine) | ((other == mine) & (ids < ids.unsqueeze(-1)))
    weights = torch.where(ahead.sum(-1) < top_k, probabilities, 0)
    return (weights / weights.sum(-1, keepdim=True) if normalise else weights), probabilities


def moe(
    h: Tensor,
    x: Tensor,
    live: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: tuple[Tensor, Tensor, Tensor, Tensor],
    top_k: int,
    normalise: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Every expert for every token as two products, the routing weight (mostly zero) multiplied between them.

    For few small experts this beats sorting: the products are large and regular. The router stays unrounded. ``live`` [P] is 1
    for tokens that are no padding. ``shared``: gate, up, down and its sigmoid gate. Returns the stream [P, D], the balance loss
    (E sum_e f_e p_e, arXiv:2101.03961, equation 4; 1 if even) and each expert's share of the choices [E].
    """
    E, twice, D = gate_up.shape
    weights, probabilities = routes(linear(x, router), top_k, normalise)
    inner = product(x, gate_up.view(E * twice, D), dtype).unflatten(-1, (E, 2, twice // 2))
    inner = silu(inner[:, :, 0]) * inner[:, :, 1] * weights.to(dtype).unsqueeze(-1)  # [P, E, I]
    y = product(inner.flatten(1), down.transpose(0, 1).reshape(D, -1), dtype)
    gate, up, back, gate_of_all = shared
    common = product(silu(product(x, gate, dtype)) * product(x, up, dtype), back, dtype)
    y = y + torch.sigmoid(product(x, gate_of_all, dtype)) * common
    live = live.to(weights.dtype).unsqueeze(-1)
    count = live.sum().clamp_min(1)
    share = ((weights > 0) * live).sum(0) / (count * top_k)
    balance = E * (share * (probabilities * live).sum(0) / count).sum()
    return h + y.to(h.dtype), balance, share


def token_losses(h: Tensor, norm: Tensor, eps: float, head: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cross entropy of each token [P] and whether the target was the most probable one [P]."""
    logits = product(rms_norm(h, norm, eps), head, dtype)
    logits = logits.to(compute_dtype(logits))
    return cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets
