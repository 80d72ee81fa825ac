"""Kimi Delta Attention in Triton: ``chunk_kda``, the twin of ``berrylm_ref.ops.kda.chunk_kda``.

Two launches: a front kernel (everything inside a chunk; chunks side by side) and a state kernel (from chunk to chunk).
They exist in two tiers: "plain", in Triton, for any GPU and for the interpreter, and "hopper", for what the model runs
on an H100 or H200. Both take the same scratch layout, see ``kda_front.py``.
"""

from functools import cache

import torch
from torch import Tensor

from . import kda_front, kda_state
from .arguments import INTERPRETED
from .kda_args import INTRA, KDACall, Scratch, check_call
from .kda_decode import kda_decode_step

__all__ = ["INTRA", "TIERS", "chunk_kda", "chunk_kda_tier", "hopper_available", "kda_decode_step"]

TIERS = ("plain", "hopper")


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    intra: str = "dyadic",
    state_boundaries: list[tuple[int, int]] | Tensor | None = None,
):
    """KDA in chunks of 64 tokens (arXiv:2510.26692), exact at every decay. Forward only.

    Args:
        q, k: [B, T, H, K], fp32 or bf16; K and V are 16 to 256. ``scale`` multiplies q; None is K ** -0.5.
        v: [B, T, HV, V] in q's dtype; HV is a multiple of H, value head j reads key head j // (HV / H).
        g: [B, T, HV, K], natural-log decay <= 0; with ``use_gate_in_kernel`` the raw gate (A_log [HV], dt_bias [HV * K],
            optional lower_bound).
        beta: [B, T, HV] in [0, 1]; with ``use_beta_sigmoid_in_kernel`` its logit.
        initial_state: [B, HV, K, V], or [N, HV, K, V] with ``cu_seqlens``; None is zeros.
        cu_seqlens: [N + 1] int32 or int64: B is 1 and sequence n is tokens cu_seqlens[n]:cu_seqlens[n + 1]; it may be empty.
            On the CPU its content is checked. On the GPU it is not read by the host: each offset is clamped to [0, T], and
            output rows outside every sequence are left unwritten.
        intra: "dyadic" (exact), "difference" (exact, direct, slow), "clamped" (the known failure) or "sglang" (clamped
            when chunks * value heads <= 256, else difference; waits for the GPU if cu_seqlens lies there).
        state_boundaries: (sequence, tokens) pairs, tokens a positive multiple of 64 within that sequence. Also an int32 tensor
            [M, 2] on q's device, ascending, for CUDA graphs; nothing is read from it by the host. A pair that turns
            out to be no boundary of its sequence gets NaN.

    g, beta, A_log, dt_bias and initial_state may be fp32, bf16 or fp16. Views whose tokens are contiguous [heads, width] are
    read in place at any token stride; other views are copied first.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state [B or N, HV, K, V] in fp32, None unless ``output_final_state``. With
        ``state_boundaries`` also a third tensor [len(state_boundaries), HV, K, V].

    Promises, bit for bit: repeats are equal; a sequence depends neither on its neighbours in the packed batch nor on
    tokens of later chunks. Inside one chunk a decay of a later token may change the rounding of an earlier output.

    Raises:
        ValueError: a shape, dtype, device, offset, boundary or ``intra`` that does not fit, named.
    """
    return chunk_kda_tier(
        None, q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        cu_seqlens=cu_seqlens, intra=intra, state_boundaries=state_boundaries,
    )  # fmt: skip


def chunk_kda_tier(
    tier: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    output_final_state: bool = False,
    **options,
):
    """``chunk_kda`` with the tier named: "plain", "hopper" (an error where it can't run) or None for the best."""
    if tier is not None and tier not in TIERS:
        raise ValueError(f"chunk_kda_tier: tier: expected None or one of {TIERS}, got {tier!r}")
    x = check_call("chunk_kda", q, k, v, g, beta, **options)
    if tier is None:
        tier = "hopper" if hopper_available(x) else "plain"
    elif tier == "hopper" and not hopper_available(x):
        raise ValueError(
            f"chunk_kda_tier: tier: expected bf16, K = V = 128, intra 'dyadic' and a GPU of capability 9.x for 'hopper', got "
            f"{x.q.dtype}, K = {x.heads[2]}, V = {x.heads[3]}, {x.intra!r} on {x.q.device}"
        )
    with torch.cuda.device_of(q):  # Triton launches on the current device
        scratch = Scratch(x)
        if x.chunks and tier == "hopper":
            front, state = _hopper_launches()
            front(x, scratch)
            o, final, kept = state(x, scratch, output_final_state)
        else:
            if x.chunks:
                kda_front.front(x, scratch)
            o, final, kept = kda_state.state(x, scratch, output_final_state)
    if o.shape != v.shape:
        o = o.view(v.shape)
    if kept is None:
        return o, final
    return o, final, kept if x.places is None else kept[x.places]


@cache
def _hopper_launches():
    from . import kda_front_hopper, kda_state_hopper  # they import Gluon, which the plain tier does without

    return kda_front_hopper.front, kda_state_hopper.state


def hopper_available(x: KDACall) -> bool:
    """Whether the Hopper tier takes this call."""
    if INTERPRETED or x.intra != "dyadic" or x.q.dtype != torch.bfloat16 or x.heads[2:] != (128, 128):
        return False
    return _is_hopper(x.q.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9
