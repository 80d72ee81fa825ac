"""Noise that compounds: how errors grow over layers and tokens, and when the text drifts. For notebooks and for the curious.

Each call of a right bf16 kernel is within half a per cent of the truth, and after dozens of layers and tokens the text may still
differ. What tells a bug from noise is not the size at the end but the comparison with the floor at every step.
"""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import silu

from ..backend import Backend
from ..cache.batch import Batch, Caches, Sequence
from ..ops.dtypes import compute_dtype
from .layers import grow, trace
from .reference import PAGE
from .sides import Side


def one_rounding_moved(backend: Backend) -> Backend:
    """The same backend with one cast later: the gated norm rounds once at its end, not also before its weight.

    As right as the other (more precise, even), and not bitwise the same: what an engine's fused kernel often does.
    """

    def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = compute_dtype(x)
        y = x.to(dtype)
        y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (weight.to(dtype) * y * silu(z.to(dtype))).to(x.dtype)

    return replace(backend, name=f"{backend.name}, one rounding moved", gated_rms_norm=gated_rms_norm)


def error_growth(trusted: Side, others: list[Side], ids: list[int]) -> dict[str, Tensor]:
    """For each of ``others`` its rel-L2 against ``trusted``, token by token behind every layer: [layers, len(ids)].

    All run over the same ``ids`` (6 or more), in two pieces and then single tokens, each with its own caches.
    """
    wanted = trace(trusted, [ids])
    return {side.name: grow(wanted, trace(side, [ids])).tokens for side in others}


@dataclass
class Drift:
    """Greedy continuations of one prompt. ids: of the side; same: how many of them before the first that differs."""

    ids: list[int]
    same: int


def drift(trusted: Side, others: list[Side], ids: list[int], new_tokens: int) -> dict[str, Drift]:
    """Let every side write ``new_tokens`` by itself; the trusted one's under its own name as well."""
    wanted = greedy(trusted, ids, new_tokens)
    found = {trusted.name: Drift(wanted, new_tokens)}
    for side in others:
        mine = greedy(side, ids, new_tokens)
        same = next((i for i, (x, y) in enumerate(zip(mine, wanted, strict=True)) if x != y), new_tokens)
        found[side.name] = Drift(mine, same)
    return found


def greedy(side: Side, ids: list[int], new_tokens: int) -> list[int]:
    """The most probable token, again and again, on caches of its own."""
    pages = -(-(len(ids) + new_tokens) // PAGE)
    model = side.model
    caches = Caches.allocate(model.config, pages=pages, page_size=PAGE, slots=1, dtype=model.dtype, device=model.device)
    made: list[int] = []
    tokens, context = ids, 0
    while len(made) < new_tokens:
        logits, _ = side.run(Batch.build([Sequence(tokens, context, list(range(1, pages + 1)), slot=1)], caches))
        context += len(tokens)
        tokens = [int(logits[-1].argmax())]
        made += tokens
    return made
