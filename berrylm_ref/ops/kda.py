"""Kimi Delta Attention: the gated delta rule with one decay per key channel (Kimi Linear, arXiv:2510.26692).

Per value head, with a state S [K, V] that maps keys to values:

    S <- diag(exp(g_t)) S                         forget, each key channel at its own rate
    S <- S + k_t (beta_t (v_t - S^T k_t))^T       write what the decayed state gets wrong about v_t, at strength beta_t
    o_t = S^T q_t                                 read

``recurrent_kda`` is this loop and the oracle of the suite. ``chunk_kda`` computes the same numbers 64 tokens at a time.
Symbols: B batch, T tokens, N sequences, P packed tokens, H key heads, HV value heads, K and V head sizes.
"""

import torch
from torch import Tensor

from .kda_chunk import SCORES, boundary_table, chunk_states, sglang_choice
from .kda_inputs import CHUNK, final_state_dtype, kda_gate, prepare_kda

__all__ = ["CHUNK", "INTRA", "chunk_kda", "kda_gate", "recurrent_kda"]

INTRA = (*SCORES, "sglang")


def recurrent_kda(
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
) -> tuple[Tensor, Tensor | None]:
    """One token at a time (arXiv:2510.26692, equation 1). The arguments are those of ``chunk_kda``, without ``intra``."""
    x = prepare_kda(
        "recurrent_kda", q, k, v, g, beta, scale=scale, initial_state=initial_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    lengths = x.lengths
    state, o = x.state.clone(), torch.zeros_like(x.v)
    for t in range(max(lengths, default=0)):
        live = [n for n, length in enumerate(lengths) if length > t]  # sequences that still have a token
        row = [x.offsets[n] + t for n in live]
        if len(live) == len(lengths) == len(x.v):  # one token for each sequence, in order: nothing to pick
            live = row = slice(None)
        S = state[live] * x.g[row].exp().unsqueeze(-1)  # [n, HV, K, V]
        error = x.v[row] - torch.einsum("nhk,nhkv->nhv", x.k[row], S)
        S = S + x.k[row].unsqueeze(-1) * (x.beta[row].unsqueeze(-1) * error).unsqueeze(-2)
        o[row] = torch.einsum("nhk,nhkv->nhv", x.q[row], S)
        state[live] = S
    return o.to(v.dtype).view_as(v), state.to(final_state_dtype(v)) if output_final_state else None


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
    """KDA in chunks of 64 tokens: matrix products inside a chunk, the recurrence between chunks. Differentiable.

    Args:
        q, k: [B, T, H, K]. ``scale`` multiplies q; None is K ** -0.5.
        v: [B, T, HV, V]; HV is a multiple of H, value head j reads key head j // (HV / H).
        g: [B, T, HV, K], natural-log decay <= 0; with ``use_gate_in_kernel`` the raw gate, see ``kda_gate``
            (A_log [HV], dt_bias [HV * K], optional lower_bound).
        beta: [B, T, HV] in [0, 1]; with ``use_beta_sigmoid_in_kernel`` its logit.
        initial_state: [B, HV, K, V], or [N, HV, K, V] with ``cu_seqlens``; None is zeros.
        cu_seqlens: [N + 1] integers: B is 1 and sequence n is tokens cu_seqlens[n]:cu_seqlens[n + 1]; it may be empty.
        intra: how the scores inside a chunk are formed: "dyadic" (exact at every decay), "difference" (exact, direct,
            slow), "clamped" (one anchor per 16 tokens with clamped exponents: the known failure) or "sglang" (clamped
            when chunks * value heads <= 256, else difference).
        state_boundaries: (sequence, tokens) pairs, tokens a positive multiple of 64 within that sequence: the states after
            exactly so many tokens of this call. Also an int32 tensor [M, 2].

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state [B or N, HV, K, V] in fp32 (fp64 for fp64 inputs), None unless
        ``output_final_state``. With ``state_boundaries`` also a third tensor [len(state_boundaries), HV, K, V].

    Raises:
        ValueError: a shape, dtype, offset, boundary or ``intra`` that does not fit, named.
    """
    if intra not in INTRA:
        raise ValueError(f"chunk_kda: intra: expected one of {INTRA}, got {intra!r}")
    x = prepare_kda(
        "chunk_kda", q, k, v, g, beta, scale=scale, initial_state=initial_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    wanted = boundary_table("chunk_kda", state_boundaries, x.lengths)
    if intra == "sglang":
        intra = sglang_choice(x.lengths, v.shape[2])
    o, state, kept = chunk_states(x, SCORES[intra], wanted)
    o, out_dtype = o.to(v.dtype).view_as(v), final_state_dtype(v)
    final = state.to(out_dtype) if output_final_state else None
    return (o, final) if state_boundaries is None else (o, final, kept.to(out_dtype))
