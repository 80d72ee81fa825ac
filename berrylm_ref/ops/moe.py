"""Mixture of experts with top-k routing and a gated shared expert (arXiv:2401.06066, sections 3.1 and 3.2)."""

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from .dtypes import compute_dtype


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Softmax over the experts, the top_k of it, renormalised over these when asked: all in fp32 (fp64 for fp64).

    Rounding before the top-k would turn near-equal experts into ties and choose another set. Of equal logits the lowest id
    comes first; torch.topk would leave that open. logits [P, E]. Returns weights [P, top_k] in that precision and expert ids
    [P, top_k] int64, most probable first.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(f"route: top_k: expected 1 .. {logits.shape[-1]}, got {top_k}")
    logits = logits.to(compute_dtype(logits))
    experts = torch.sort(logits, dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = logits.softmax(-1).gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True) if normalise else weights, experts


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [..., 2I] with the gate half first (arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def moe(
    x: Tensor,
    router: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    shared_gate_up: tuple[Tensor, Tensor],
    shared_down: Tensor,
    shared_gate: Tensor,
    *,
    top_k: int,
    normalise: bool,
    residual: Tensor | None = None,
) -> Tensor:
    """sum_e weight_e down_e(swiglu(gate_up_e x)) + sigmoid(shared_gate x) * shared(x), and ``residual`` + that if there is one.

    x [P, D]; router [E, D], its logits in x's dtype; gate_up_proj [E, 2I, D], gate rows first; down_proj [E, D, I]; the shared
    expert's gate and up projections [Is, D] each, its down projection [D, Is], and its gate [1, D]. Weights are cast to x's
    dtype; experts are added in the order of their ids, whoever the neighbours are (the products may still round differently
    with the number of rows). The residual [P, D] is added to the rounded sum. Returns [P, D].
    """
    E, twice, D = gate_up_proj.shape
    if tuple(down_proj.shape) != (E, D, twice // 2) or tuple(router.shape) != (E, D) or x.shape[-1] != D:
        raise ValueError(
            f"moe: down_proj, router, x: expected {(E, D, twice // 2)}, {(E, D)} and [.., {D}], got {tuple(down_proj.shape)}, "
            f"{tuple(router.shape)} and {tuple(x.shape)}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"moe: residual: expected shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    weights, experts = route(linear(x, router), top_k, normalise)
    weights = weights.to(x.dtype)
    if x.shape[0] == 1:  # a decode step of one sequence: the same sums in the same order, and nothing to sort into groups
        out = torch.zeros_like(x)
        for e, weight in sorted(zip(experts[0].tolist(), weights[0], strict=True), key=lambda pair: pair[0]):
            out = out + linear(swiglu(linear(x, gate_up_proj[e])), down_proj[e]) * weight
    else:
        out = _grouped(x, weights, experts, gate_up_proj, down_proj)
    gate, up = shared_gate_up
    shared = linear(silu(linear(x, gate)) * linear(x, up), shared_down)
    out = out + torch.sigmoid(linear(x, shared_gate)) * shared
    return out if residual is None else residual + out


def _grouped(x: Tensor, weights: Tensor, experts: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
    """The routed experts' sum [P, D]: each expert once, on all of its tokens; weights and experts [P, top_k]."""
    E, top_k = gate_up_proj.shape[0], experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # (token, choice) pairs, expert by expert
    counts = experts.flatten().bincount(minlength=E).tolist()
    token, weight = order // top_k, weights.flatten()[order].unsqueeze(-1)
    out, begin = torch.zeros_like(x), 0
    for e, count in enumerate(counts):
        if not count:
            continue
        rows = token[begin : begin + count]
        y = linear(swiglu(linear(x[rows], gate_up_proj[e])), down_proj[e])
        out.index_add_(0, rows, y * weight[begin : begin + count])
        begin += count
    return out
