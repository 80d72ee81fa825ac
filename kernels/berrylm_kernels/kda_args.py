"""What a KDA launch needs to know: the arguments checked and counted. No kernel runs here.

Symbols: B batch, T tokens, N sequences, P packed tokens, H key heads, HV value heads, K and V head sizes, M boundaries.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import INTERPRETED, expect_shape, next_power_of_2

CHUNK = 64  # tokens a chunk; the front kernel's ladder has log2(CHUNK) levels
INTRA = ("dyadic", "difference", "clamped", "sglang")
MIN_WIDTH, MAX_WIDTH = 16, 256  # of K and V
SGLANG_TILES = 256  # its heuristic: chunks * value heads up to which it takes the fused, clamped form


@dataclass(slots=True)
class KDACall:
    """One checked call. The tokens of q, k, v, g, beta lie at one stride, of any size, whether in [P, ..] or in [B, T, ..] (a
    view costs the host 1 us); inside a token they are contiguous."""

    q: Tensor  # [.., H, K]
    k: Tensor  # [.., H, K]
    v: Tensor  # [.., HV, V]
    g: Tensor  # [.., HV, K], natural log, or the raw gate
    beta: Tensor  # [.., HV], or its logit
    scale: float
    l2norm: bool
    raw_gate: bool
    beta_logit: bool
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV * K]
    lower_bound: float | None
    initial_state: Tensor | None  # [N, HV, K, V] contiguous
    cu_seqlens: Tensor | None  # [N + 1] on q's device; None: sequences of T tokens each
    N: int
    T: int  # tokens of a sequence without cu_seqlens, else P
    chunks: int  # of all sequences; an upper bound where cu_seqlens was not read
    intra: str  # never "sglang"
    boundaries: Tensor | None  # [M, 2] int32 (sequence, tokens), ascending
    places: Tensor | None  # [M]: which row of the table answers the m-th pair asked for; None: the m-th
    heads: tuple[int, int, int, int] | None = None  # H, HV, K, V; None: read off q and v
    strides: tuple[int, ...] | None = None  # from token to token of q, k, v, g and beta; None: read off them

    def __post_init__(self):
        if self.heads is None:
            self.heads = self.q.shape[-2], self.v.shape[-2], self.q.shape[-1], self.v.shape[-1]
        if self.strides is None:
            self.strides = *(x.stride(-3) for x in (self.q, self.k, self.v, self.g)), self.beta.stride(-2)


def check_call(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    intra: str = "dyadic",
    state_boundaries: list[tuple[int, int]] | Tensor | None = None,
) -> KDACall:
    """Validate. Every error is a ValueError that names op, argument, expected, got."""
    if intra not in INTRA:
        raise ValueError(f"{op}: intra: expected one of {INTRA}, got {intra!r}")
    (B, T), heads, strides = _check_tensors(op, q.is_cuda, _seen(q), _seen(k), _seen(v), _seen(g), _seen(beta))
    _, HV, K, V = heads
    if use_gate_in_kernel:
        expect_shape(op, "A_log", A_log, (HV,))
        expect_shape(op, "dt_bias", dt_bias, (HV * K,))
        A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
    elif A_log is not None or dt_bias is not None or lower_bound is not None:
        raise ValueError(f"{op}: A_log, dt_bias, lower_bound: expected only with use_gate_in_kernel=True, got them without")
    lengths = [T] * B
    if cu_seqlens is not None:
        lengths = _check_offsets(op, cu_seqlens, B, T)
        B = cu_seqlens.numel() - 1  # sequences from here on
    if initial_state is not None:
        expect_shape(op, "initial_state", initial_state, (B, HV, K, V))
        initial_state = initial_state.contiguous()
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias), ("initial_state", initial_state)):
        if x is not None:
            _check_place(op, name, x, q.device)
    if torch.is_grad_enabled():
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
        for name, x in zip(names, (q, k, v, g, beta, A_log, dt_bias, initial_state), strict=True):
            if x is not None and x.requires_grad:
                raise ValueError(f"{op}: {name}: expected no gradient (this kernel has no backward), got requires_grad=True")
    if intra == "sglang":
        known = lengths if lengths is not None else _read_lengths(cu_seqlens)
        intra = "clamped" if _count_chunks(known) * HV <= SGLANG_TILES else "difference"
    boundaries, places = _boundary_table(op, state_boundaries, B, lengths, q.device)
    if strides is None:
        q, k, v, g, beta = map(_by_token, (q, k, v, g, beta))
    return KDACall(
        q, k, v, g, beta,
        K**-0.5 if scale is None else float(scale), use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        A_log, dt_bias, lower_bound, initial_state, None if cu_seqlens is None else cu_seqlens.to(q.device), B, T,
        T // CHUNK + B if lengths is None else _count_chunks(lengths), intra, boundaries, places, heads, strides,
    )  # fmt: skip


class Seen(NamedTuple):
    """What a check may ask of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _seen(x: Tensor) -> tuple:
    """The fields of ``Seen``, which costs the host more to make."""
    return x.shape, x.stride(), x.dtype, x.device


@lru_cache(maxsize=1024)
def _check_tensors(op: str, is_cuda: bool, *seen: tuple) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, ...] | None]:
    """Checks q, k, v, g and beta -> (B, T), (H, HV, K, V), token strides; no strides if one of them must be copied or viewed
    otherwise first. Kept, as a model calls with the same few layouts; an error is not."""
    q, k, v, g, beta = (Seen(*x) for x in seen)
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g)):
        if len(x.shape) != 4:
            raise ValueError(f"{op}: {name}: expected 4 dimensions [B, T, heads, width], got shape {tuple(x.shape)}")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    expect_shape(op, "k", k, (B, T, H, K))
    expect_shape(op, "v", v, (B, T, HV, V))
    expect_shape(op, "g", g, (B, T, HV, K))
    expect_shape(op, "beta", beta, (B, T, HV))
    if H == 0 or HV == 0 or HV % H:
        raise ValueError(f"{op}: v: expected value heads to be a multiple of the {H} key heads, got {HV}")
    for name, width in (("q", K), ("v", V)):
        if not MIN_WIDTH <= width <= MAX_WIDTH:
            raise ValueError(f"{op}: {name}: expected a head size of {MIN_WIDTH} to {MAX_WIDTH}, got {width}")
    if q.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{op}: q: expected float32 or bfloat16, got {q.dtype}")
    if INTERPRETED and q.dtype != torch.float32:
        raise ValueError(
            f"{op}: q: expected float32 under TRITON_INTERPRET=1, whose dot multiplies bit patterns, got {q.dtype}"
        )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{op}: {name}: expected q's dtype {q.dtype}, got {x.dtype}")
    if not INTERPRETED and not is_cuda:
        raise ValueError(f"{op}: q: expected a CUDA tensor (or TRITON_INTERPRET=1 before triton's import), got {q.device}")
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        _check_place(op, name, x, q.device)
    in_place = all(_has_one_token_stride(x) for x in (q, k, v, g, beta))
    return (B, T), (H, HV, K, V), tuple(x.stride[1] for x in (q, k, v, g, beta)) if in_place else None


def _has_one_token_stride(x: Seen) -> bool:
    """Whether every token of x [B, T, ...] is contiguous and they all lie at one stride."""
    (B, T, *_, width), (sequence, token, *inside) = x.shape, x.stride
    return (B == 1 or sequence == T * token) and inside == [width, 1][-len(inside) :]


def _check_place(op: str, name: str, x: Tensor | Seen, device: torch.device) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{op}: {name}: expected float32, bfloat16 or float16, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{op}: {name}: expected device {device}, q's, got {x.device}")


def _check_offsets(op: str, cu_seqlens: Tensor, B: int, T: int) -> list[int] | None:
    """The lengths, or None where reading them would wait for a GPU: kernels then clamp every offset to [0, T]."""
    if B != 1:
        raise ValueError(f"{op}: q: expected batch size 1 with cu_seqlens, got {B}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: cu_seqlens: expected an int32 or int64 tensor [N + 1], got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if not cu_seqlens.device.type == "cpu":
        return None
    offsets = cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
    if offsets[0] != 0 or offsets[-1] != T or any(length < 0 for length in lengths):
        raise ValueError(f"{op}: cu_seqlens: expected 0 <= ... <= T = {T} without a decrease, got {offsets}")
    return lengths


def _read_lengths(cu_seqlens: Tensor) -> list[int]:
    return cu_seqlens.diff().tolist()


def _count_chunks(lengths: list[int]) -> int:
    return sum(-(-length // CHUNK) for length in lengths)


def _by_token(x: Tensor) -> Tensor:
    """x [B, T, ...] as it is, or as [P, ...] if only that has one token stride; copied only if nothing has or a token is not
    contiguous."""
    B, T, *_, width = x.shape
    sequence, token, *inside = x.stride()
    if B != 1 and sequence != T * token:
        x = x.flatten(0, 1)
    return x if inside == [width, 1][-len(inside) :] else x.contiguous()


def _boundary_table(
    op: str, boundaries: list[tuple[int, int]] | Tensor | None, N: int, lengths: list[int] | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """The pairs in ascending order, and where each pair asked for went (None: nowhere else)."""
    if boundaries is None:
        return None, None
    if isinstance(boundaries, Tensor):
        if boundaries.dim() != 2 or boundaries.shape[1] != 2 or boundaries.dtype != torch.int32 or boundaries.device != device:
            raise ValueError(
                f"{op}: state_boundaries: expected pairs, or an int32 tensor [M, 2] on {device}, "
                f"got {tuple(boundaries.shape)} {boundaries.dtype} on {boundaries.device}"
            )
        return boundaries.contiguous(), None
    for n, tokens in boundaries:
        inside = 0 <= n < N and tokens > 0 and tokens % CHUNK == 0
        if not inside or (lengths is not None and tokens > lengths[n]):
            raise ValueError(
                f"{op}: state_boundaries: expected (sequence < {N}, positive multiple of {CHUNK} within its length), "
                f"got ({n}, {tokens}) with lengths {'on the GPU' if lengths is None else lengths}"
            )
    order = sorted(range(len(boundaries)), key=lambda m: boundaries[m])
    table = torch.tensor([boundaries[m] for m in order], dtype=torch.int32).view(-1, 2)
    if device.type == "cuda":
        table = table.pin_memory()  # or the copy waits for all that the device has to do before it
    table = table.to(device, non_blocking=True)
    if order == list(range(len(order))):
        return table, None
    places = [0] * len(order)
    for row, m in enumerate(order):
        places[m] = row
    return table, torch.tensor(places).to(device)


@cache
def padded(width: int) -> int:
    """The power of two a head size is padded to in tiles and in scratch."""
    return next_power_of_2(width)


class Scratch:
    """What the front launch leaves for the state launch; the layout is in ``kda_front.py``. One allocation."""

    __slots__ = ("W", "U", "QG", "KG", "AQ", "DD")

    def __init__(self, x: KDACall):
        _, HV, K, V = x.heads
        tiles, BK, PV, dtype = x.chunks * HV, padded(K), padded(V), x.q.dtype
        of_k, of_v, of_a = tiles * CHUNK * BK, tiles * CHUNK * PV, tiles * CHUNK * CHUNK
        of_d = tiles * BK * torch.float32.itemsize // dtype.itemsize
        parts = torch.empty(3 * of_k + of_v + of_a + of_d, dtype=dtype, device=x.q.device)
        self.W, self.QG, self.KG, self.U, self.AQ, d = parts.split_with_sizes([of_k, of_k, of_k, of_v, of_a, of_d])
        self.DD = d.view(torch.float32)
