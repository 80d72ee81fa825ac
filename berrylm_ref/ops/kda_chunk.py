"""The chunk form of KDA: what happens inside 64 tokens, and how states pass from chunk to chunk.

Unrolling the recurrence over a chunk that starts at state S, with G the inclusive cumulative log-decay:

    A[i, j] = sum_c q_ic k_jc exp(G_ic - G_jc)            j <= i   (scores)
    L[i, j] = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)     j <  i
    (I + L) U = diag(beta) (V - (K * exp(G)) S)           what each token really writes (the WY / UT form)
    O = (Q * exp(G)) S + A U
    S' = diag(exp(G_C)) S + (K * exp(G_C - G))^T U

Every exponent above is <= 0. The whole difficulty is to form A and L with matrix products, which needs the factors
exp(G_i - G_n) exp(G_n - G_j) around an anchor n: only for j < n <= i are both harmless.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from .kda_inputs import CHUNK, KDAInputs

SUB_BLOCK = 16  # tokens that share an anchor in the "clamped" form
EXPONENT_LIMIT = 126.0  # its clamp, in powers of two


def _merge(blocks: Tensor, cross: Tensor) -> Tensor:
    """Diagonal blocks [..., 2n, s, s] and what stands below each pair [..., n, s, s] -> blocks [..., n, 2s, 2s]."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return torch.cat([torch.cat([first, torch.zeros_like(cross)], -1), torch.cat([cross, second], -1)], -2)


def dyadic_scores(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Exact at every decay: blocks of 1, 2, 4, ... tokens are paired, anchored where the second one begins.

    A query in the second block and a key in the first have j < n <= i, so both exponents are sums of non-positive terms;
    underflow is the true value. The sums are taken inside the two blocks: a difference of long cumulative sums would
    cancel after one huge step. q, k, g [..., C, K], C a power of two. Returns (A with its diagonal, the strict lower
    triangle of k k^T with decay), both [..., C, C].
    """
    C = g.shape[-2]
    qk = (q * k).sum(-1)[..., None, None]  # [..., C, 1, 1]: one token reads its own key undecayed
    kk = torch.zeros_like(qk)
    s = 1
    while s < C:
        (_, q2), (k1, k2), (g1, g2) = (x.unflatten(-2, (-1, 2, s)).unbind(-3) for x in (q, k, g))  # [..., C/2s, s, K]
        since = pad(g2[..., 1:, :], (0, 0, 1, 0)).cumsum(-2).exp()  # exp(G_i - G_n), n the first token of the second block
        until = torch.cat([g1[..., 1:, :], g2[..., :1, :]], -2).flip(-2).cumsum(-2).flip(-2).exp()  # exp(G_n - G_j)
        keys = (k1 * until).transpose(-1, -2)
        qk, kk = _merge(qk, (q2 * since) @ keys), _merge(kk, (k2 * since) @ keys)
        s *= 2
    return qk.squeeze(-3), kk.squeeze(-3)


def difference_scores(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Exact and direct: for each key j the decay since j is summed on its own, no anchor, no matrix product."""
    C = g.shape[-2]
    row = torch.arange(C, device=g.device)[:, None]
    qk, kk = [], []
    for j in range(C):
        keys = g.masked_fill(row <= j, 0).cumsum(-2).exp() * k[..., j : j + 1, :]  # [..., C, K]
        qk.append((q * keys).sum(-1))
        kk.append((k * keys).sum(-1))
    return torch.stack(qk, -1).tril(), torch.stack(kk, -1).tril(-1)


def clamped_scores(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The known failure (sglang#39971), kept as an exhibit: one anchor per 16 tokens, both exponents clamped to +-126.

    Inside a sub-block the key's exponent G_n - G_j is >= 0. Where a channel decays by more than 2^126 between n and i,
    exp2(-126) * exp2(126) = 1 stands where exp2(G_i - G_j) ~ 0 should: forgotten keys come back at full weight.
    """
    C = g.shape[-2]
    G = g.cumsum(-2) * math.log2(math.e)
    rows = []
    for n in range(0, C, SUB_BLOCK):
        end = n + SUB_BLOCK
        anchor = G[..., n : n + 1, :]
        since = (G[..., n:end, :] - anchor).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp2()
        until = (anchor - G[..., :end, :]).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp2()
        keys = pad(k[..., :end, :] * until, (0, 0, 0, C - end)).transpose(-1, -2)
        rows.append((q[..., n:end, :] * since @ keys, k[..., n:end, :] * since @ keys))
    qk, kk = (torch.cat(x, -2) for x in zip(*rows, strict=True))
    return qk.tril(), kk.tril(-1)


SCORES = {"dyadic": dyadic_scores, "difference": difference_scores, "clamped": clamped_scores}


def sglang_choice(lengths: list[int], value_heads: int) -> str:
    """Which form SGLang's heuristic runs: the fused, clamped one when the grid is small, that is for every short prefill."""
    chunks = sum(-(-length // CHUNK) for length in lengths)
    return "clamped" if chunks * value_heads <= 256 else "difference"


def invert_unit_lower(L: Tensor) -> Tensor:
    """(I + L)^-1 for strictly lower triangular L [..., C, C], C a power of two, from small blocks up.

    With T1, T2 the inverses of two neighbouring blocks and X the part of L below them, the pair's inverse has -T2 X T1
    there. Nothing cancels; Neumann doubling (I - L)(I + L^2)(I + L^4)... is equal on paper and fails for equal keys, where
    the powers of L grow to 1e8 before they cancel.
    """
    C = L.shape[-1]
    T = L.new_ones(*L.shape[:-1], 1, 1)  # [..., C, 1, 1]
    s = 1
    while s < C:
        first, second = T.unflatten(-3, (-1, 2)).unbind(-3)
        tiles = L.unflatten(-1, (-1, 2, s)).unflatten(-4, (-1, 2, s))  # [..., C/2s, 2, s, C/2s, 2, s]
        X = tiles.select(-5, 1).select(-2, 0).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., C/2s, s, s]
        T = _merge(T, -(second @ X @ first))
        s *= 2
    return T.squeeze(-3)


def boundary_table(
    op: str, boundaries: list[tuple[int, int]] | Tensor | None, lengths: list[int]
) -> dict[tuple[int, int], list[int]]:
    """(sequence, chunk whose end is asked for) -> places in the answer."""
    table: dict[tuple[int, int], list[int]] = {}
    if isinstance(boundaries, Tensor):
        if boundaries.dim() != 2 or boundaries.shape[1] != 2 or boundaries.dtype != torch.int32:
            got = f"{tuple(boundaries.shape)} {boundaries.dtype}"
            raise ValueError(f"{op}: state_boundaries: expected pairs, or an int32 tensor [M, 2], got {got}")
        boundaries = boundaries.tolist()
    boundaries = boundaries or []
    for place, (n, tokens) in enumerate(boundaries):
        if not 0 <= n < len(lengths) or tokens <= 0 or tokens % CHUNK or tokens > lengths[n]:
            raise ValueError(
                f"{op}: state_boundaries: expected (sequence < {len(lengths)}, positive multiple of {CHUNK} within its "
                f"length), got ({n}, {tokens}) with lengths {lengths}"
            )
        table.setdefault((n, tokens // CHUNK - 1), []).append(place)
    return table


def chunk_states(x: KDAInputs, scores, wanted: dict[tuple[int, int], list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """All chunks at once for what is inside them, then chunk by chunk for the states, all sequences side by side.

    Returns o [P, HV, V], final states [N, HV, K, V] and the wanted boundary states [M, HV, K, V].
    """
    counts = [-(-length // CHUNK) for length in x.lengths]
    begins = [0]
    for count in counts:
        begins.append(begins[-1] + count)
    P = x.q.shape[0]
    rows = torch.full((begins[-1] * CHUNK,), P, dtype=torch.long)  # row P is a token that does nothing
    for n, length in enumerate(x.lengths):
        at = begins[n] * CHUNK
        rows[at : at + length] = torch.arange(x.offsets[n], x.offsets[n] + length)
    rows = rows.to(x.q.device)

    def chunked(t: Tensor) -> Tensor:  # [P, HV, ...] -> [chunks, HV, C, ...]
        return torch.cat([t, t.new_zeros(1, *t.shape[1:])])[rows].unflatten(0, (-1, CHUNK)).transpose(1, 2)

    q, k, v, g, beta = (chunked(t) for t in (x.q, x.k, x.v, x.g, x.beta))
    A, kk = scores(q, k, g)
    T = invert_unit_lower(beta.unsqueeze(-1) * kk)
    decay = g.cumsum(-2).exp()  # from the chunk's first token
    rest = pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2).exp()  # to its last
    w = T @ (beta.unsqueeze(-1) * k * decay)  # [chunks, HV, C, K]
    u = T @ (beta.unsqueeze(-1) * v)  # [chunks, HV, C, V]
    q, k = q * decay, (k * rest).transpose(-1, -2)
    decay = decay[..., -1, :, None]  # [chunks, HV, K, 1]

    state, o = x.state.clone(), torch.zeros_like(u)
    kept: list[Tensor | None] = [None] * sum(map(len, wanted.values()))
    for i in range(max(counts, default=0)):
        live = [n for n, count in enumerate(counts) if count > i]
        c = [begins[n] + i for n in live]
        S = state[live]
        new = u[c] - w[c] @ S
        o[c] = q[c] @ S + A[c] @ new
        S = decay[c] * S + k[c] @ new
        state[live] = S
        for at, n in enumerate(live):
            for place in wanted.get((n, i), ()):
                kept[place] = S[at]
    out = x.v.new_zeros(P + 1, *x.v.shape[1:]).index_copy(0, rows, o.transpose(1, 2).flatten(0, 1))[:P]
    return out, state, torch.stack(kept) if kept else state[:0]
