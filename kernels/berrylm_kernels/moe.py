"""Mixture of experts, twin of ``berrylm_ref/ops/moe.py`` (arXiv:2401.06066, sections 3.1 and 3.2).

Two paths. For a few tokens ``moe_few`` streams the weights of the experts hit. For more, ``moe_router`` sorts the tokens by
expert on the device, and ``moe_gemm`` and ``moe_persistent`` multiply block by block, with the tiles of ``moe_tiles``: small
ones while the weights set the time, large ones once the arithmetic does. Nothing waits for the host, so that all of it
can be captured in a CUDA graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, silu

from .arguments import cdiv, expect_dtype, expect_floats, expect_shape, packed_rows
from .moe_few import moe_few
from .moe_gemm import launch_combine, launch_down, launch_gate_up
from .moe_router import launch_route, plan, project_logits
from .moe_tiles import tiles
from .overlap import overlaps

FEW = 4  # tokens up to which an expert that two of them hit is better read twice than sorted
DECODE = 64  # tokens up to which one small kernel projects the logits faster than a library product


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Softmax over the experts, the top_k of it, renormalised over these when asked, all in fp32, in one kernel.

    logits [P, E] float32 or bfloat16. Returns weights [P, top_k] fp32 and expert ids [P, top_k] int64, most probable first,
    the lowest id first among equals.
    """
    if logits.dim() != 2:
        raise ValueError(f"route: logits: expected [P, E], got {tuple(logits.shape)}")
    _check_top_k("route", top_k, logits.shape[1])
    expect_floats("route", logits=logits)
    P = logits.shape[0]
    weights = torch.empty((P, top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((P, top_k), dtype=torch.int64, device=logits.device)
    if P:
        launch_route(packed_rows(logits), top_k, normalise, weights, experts, False)
    return weights, experts


def _check_top_k(op: str, top_k: int, experts: int) -> None:
    if not 1 <= top_k <= experts:
        raise ValueError(f"{op}: top_k: expected 1 .. {experts}, got {top_k}")


@triton.jit(do_not_specialize=["elements"])
def _swiglu_kernel(gate_up, out, stride, elements, F: tl.constexpr, BE: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BE + tl.arange(0, BE)
    p_gate, m = gate_up + o // F * stride + o % F, o < elements
    b_gate = tl.load(p_gate, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + F, mask=m, other=0.0).to(tl.float32)
    tl.store(out + o, (b_gate / (1.0 + tl.exp(-b_gate)) * b_up).to(out.dtype.element_ty), mask=m)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [..., 2F] with the gate half first (arXiv:2002.05202), float32 or bfloat16, rounded once."""
    expect_floats("swiglu", gate_up=gate_up)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu: gate_up: expected an even last dimension, got {tuple(gate_up.shape)}")
    F, rows = gate_up.shape[-1] // 2, packed_rows(gate_up)
    out = torch.empty((*gate_up.shape[:-1], F), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _swiglu_kernel[(cdiv(out.numel(), 1024),)](rows, out, rows.stride(0), out.numel(), F, 1024, num_warps=4)
    return out


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

    x [P, D] float32 or bfloat16; router [E, D], its logits rounded to x's dtype; gate_up_proj [E, 2F, D], gate rows first;
    down_proj [E, D, F]; the shared expert's gate and up projections [Is, D] each, its down projection [D, Is], and its gate
    [1, D]. Weights are in x's dtype and contiguous. Choices are weighed and added in fp32, in the order of their
    probability: a token's result does not depend on which tokens stand beside it, only, by rounding, on how many.
    The residual [P, D] is added to the rounded sum. Returns [P, D].
    """
    _check(x, router, gate_up_proj, down_proj, shared_gate_up, shared_down, shared_gate, top_k, residual)
    P, E = x.shape[0], router.shape[0]
    if not P:
        return torch.empty_like(x)
    x, residual = packed_rows(x), None if residual is None else packed_rows(residual)
    shared, is_fused = (*shared_gate_up, shared_down), shared_down.shape[1] == down_proj.shape[2]
    added = residual if is_fused else None  # by the last kernel
    if P <= DECODE:
        logits = project_logits(x, router, shared_gate)
        logits, gate_logits = logits[:, :E], logits[:, E:]
    else:
        logits, gate_logits = linear(x, router), linear(x, shared_gate)
    if P <= FEW:
        fused = shared if is_fused else None
        out = moe_few(x, logits, gate_logits, top_k, normalise, gate_up_proj, down_proj, fused, added)
    else:
        first, second = tiles(P * top_k / E, x.dtype)
        weights, rows, order, blocks = plan(logits, top_k, normalise, is_fused, first.BM)
        hidden = launch_gate_up(x, gate_up_proj, shared_gate_up, order, blocks, first)
        y = launch_down(hidden, down_proj, shared_down, blocks, is_fused * cdiv(P, first.BM), second, overlaps(P, x))
        out = launch_combine(y, rows, weights, gate_logits if is_fused else None, added)
    if is_fused:
        return out
    gate, up = shared_gate_up
    out = out + torch.sigmoid(gate_logits) * linear(silu(linear(x, gate)) * linear(x, up), shared_down)
    return out if residual is None else residual + out


def _check(x, router, gate_up_proj, down_proj, shared_gate_up, shared_down, shared_gate, top_k, residual) -> None:
    if x.dim() != 2 or gate_up_proj.dim() != 3 or gate_up_proj.shape[1] % 2:
        shapes = f"{tuple(x.shape)} and {tuple(gate_up_proj.shape)}"
        raise ValueError(f"moe: x, gate_up_proj: expected [P, D] and [E, 2F, D], got {shapes}")
    (E, twice, D), shared_width = gate_up_proj.shape, shared_down.shape[-1]
    tensors = {
        "router": (router, (E, D)),
        "down_proj": (down_proj, (E, D, twice // 2)),
        "shared_gate_up[0]": (shared_gate_up[0], (shared_width, D)),
        "shared_gate_up[1]": (shared_gate_up[1], (shared_width, D)),
        "shared_down": (shared_down, (D, shared_width)),
        "shared_gate": (shared_gate, (1, D)),
        "gate_up_proj": (gate_up_proj, (E, twice, D)),
    }
    expect_shape("moe", "x", x, (x.shape[0], D))
    for name, (tensor, shape) in tensors.items():
        expect_shape("moe", name, tensor, shape)
        if not tensor.is_contiguous():
            raise ValueError(f"moe: {name}: expected a contiguous tensor, got strides {tensor.stride()}")
    given = {name: tensor for name, (tensor, _) in tensors.items()}
    if residual is not None:
        expect_shape("moe", "residual", residual, tuple(x.shape))
        given["residual"] = residual
    expect_floats("moe", x=x, **given)
    expect_dtype("moe", x.dtype, **given)
    _check_top_k("moe", top_k, E)
