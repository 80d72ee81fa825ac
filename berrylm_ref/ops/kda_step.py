"""One decode step of a KDA layer for a batch of sequences, between its input projections and its output projection.

Everything a sequence remembers lies in two pools and is updated in place, in the sequence's own slot: the conv window and
the recurrent state. The step is written with the ops that the rest of the suite uses; the fused kernel does it in one launch.
"""

import torch
from torch import Tensor

from .conv import causal_conv_step
from .dtypes import compute_dtype
from .kda import recurrent_kda
from .norm import gated_rms_norm


@torch.no_grad()
def kda_decode_step(
    qkv: Tensor,
    z: Tensor,
    raw_gate: Tensor,
    beta_logit: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    *,
    key_heads: int,
    eps: float,
    lower_bound: float | None = None,
) -> Tensor:
    """One token for each of S sequences (Kimi Linear, arXiv:2510.26692): conv, gate, recurrence, gated norm. Inference only.

    H is ``key_heads``, C = 2 * H * K + HV * V channels in the order q, k, v, and W the taps of the conv. "Model dtype" is
    the dtype of ``qkv``; A_log, dt_bias and the states are fp32 whatever it is (fp64 with fp64).

    Args:
        qkv: [S, C] this token's raw projections, before the conv.
        z: [S, HV * V] the gate of the output norm.
        raw_gate: [S, HV * K] the raw decay gate, see ``kda_gate``.
        beta_logit: [S, HV] logit of the write strength.
        conv_weight: [C, W], W >= 2, the newest input meets the last tap.
        A_log, dt_bias: [HV], [HV * K] head-major. ``lower_bound`` makes the gate safe.
        norm_weight: [V], ``eps`` its epsilon.
        conv_pool: [slots, C, W - 1] the last W - 1 raw inputs of each slot, oldest first; shifted in place.
        state_pool: [slots, HV, K, V] the states, updated in place.
        slots: [S] int32 or int64. Slot 0 is scratch: its rows are padding, come back as zeros and touch neither pool.

    Returns:
        [S, HV * V] in the model dtype, ready for the output projection.

    Raises:
        ValueError: a shape or dtype that does not fit, a slot outside the pool, or a slot other than 0 that occurs twice.
    """
    _check(qkv, z, raw_gate, beta_logit, conv_weight, A_log, dt_bias, norm_weight, conv_pool, state_pool, slots, key_heads)
    HV, K, V = state_pool.shape[1:]
    out = torch.zeros_like(z)
    live = slots.nonzero().squeeze(-1)
    n = live.numel()
    if n == 0:
        return out
    at = slots[live].long()

    mixed, windows = causal_conv_step(qkv[live], conv_weight, conv_pool[at])
    q, k, v = mixed.split([key_heads * K, key_heads * K, HV * V], -1)
    o, state = recurrent_kda(
        q.reshape(n, 1, key_heads, K), k.reshape(n, 1, key_heads, K), v.reshape(n, 1, HV, V),
        raw_gate[live].view(n, 1, HV, K), beta_logit[live].view(n, 1, HV),
        initial_state=state_pool[at], output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
    )  # fmt: skip
    out[live] = gated_rms_norm(o.view(n, HV, V), z[live].view(n, HV, V), norm_weight, eps).view(n, HV * V)
    conv_pool[at] = windows
    state_pool[at] = state
    return out


def _check(qkv, z, raw_gate, beta_logit, conv_weight, A_log, dt_bias, norm_weight, conv_pool, state_pool, slots, key_heads):
    def refuse(name: str, expected: str, got) -> None:
        raise ValueError(f"kda_decode_step: {name}: expected {expected}, got {got}")

    if state_pool.dim() != 4:
        refuse("state_pool", "4 dimensions [slots, HV, K, V]", f"shape {tuple(state_pool.shape)}")
    if qkv.dim() != 2:
        refuse("qkv", "2 dimensions [S, C]", f"shape {tuple(qkv.shape)}")
    if conv_weight.dim() != 2 or conv_weight.shape[1] < 2:
        refuse("conv_weight", "shape [C, W] with at least 2 taps", f"shape {tuple(conv_weight.shape)}")
    n_slots, HV, K, V = state_pool.shape
    S, W = qkv.shape[0], conv_weight.shape[1]
    if key_heads < 1 or HV % key_heads:
        refuse("key_heads", f"a divisor of the {HV} value heads", key_heads)
    C = 2 * key_heads * K + HV * V
    shapes = {
        "qkv": (qkv, (S, C)), "z": (z, (S, HV * V)), "raw_gate": (raw_gate, (S, HV * K)),
        "beta_logit": (beta_logit, (S, HV)), "conv_weight": (conv_weight, (C, W)), "A_log": (A_log, (HV,)),
        "dt_bias": (dt_bias, (HV * K,)), "norm_weight": (norm_weight, (V,)),
        "conv_pool": (conv_pool, (n_slots, C, W - 1)), "slots": (slots, (S,)),
    }  # fmt: skip
    for name, (x, shape) in shapes.items():
        if tuple(x.shape) != shape:
            refuse(name, f"shape {shape}", f"shape {tuple(x.shape)}")

    if not qkv.is_floating_point():
        refuse("qkv", "a floating dtype", qkv.dtype)
    for name in ("z", "raw_gate", "beta_logit", "conv_weight", "norm_weight", "conv_pool"):
        if shapes[name][0].dtype != qkv.dtype:
            refuse(name, f"the dtype of qkv, {qkv.dtype}", shapes[name][0].dtype)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias), ("state_pool", state_pool)):
        if x.dtype != compute_dtype(qkv):
            refuse(name, str(compute_dtype(qkv)), x.dtype)
    if slots.dtype not in (torch.int32, torch.int64):
        refuse("slots", "int32 or int64", slots.dtype)
    ids = slots.tolist()
    if any(not 0 <= i < n_slots for i in ids):
        refuse("slots", f"slots from 0 to {n_slots - 1}", ids)
    owned = [i for i in ids if i]
    if len(set(owned)) != len(owned):
        refuse("slots", "every slot other than 0 at most once", ids)
