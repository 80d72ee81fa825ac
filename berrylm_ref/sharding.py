"""Tensor parallel: the part of every tensor that a rank holds, and the three places where ranks meet (arXiv:1909.08053).

Every rank has the whole stream [P, D] and runs a model of its own: one with fewer heads, narrower experts and fewer rows of the
vocabulary, whose sizes are ``Shard.local``. A mixer and a MoE then give a part of the sum:

    x ──> norm ──> mixer: heads of rank r ──> all-reduce ──> + ──> norm ──> experts: columns of rank r ──> all-reduce ──> +
          same on every rank                                       same on every rank, router included

The embedding gives a row on the rank that has it and zeros elsewhere, added up; the head's logits are put side by side.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding

from .allreduce import AllReduce
from .backend import Backend
from .config import BerryLMConfig

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
Widths = Callable[[BerryLMConfig], tuple[int, ...]]


@dataclass(frozen=True)
class Cut:
    """Every rank has its share of ``dim``; ``stacked``: that dimension holds several matrices, and each of them is cut.

    kv: by KV heads, of which several ranks hold the same one where there are fewer heads than ranks.
    """

    dim: int
    stacked: Widths | None = None
    kv: bool = False


def qkv(c: BerryLMConfig) -> tuple[int, ...]:
    """The rows of in_proj_qkv and of the convolution: q, k, v."""
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    return keys, keys, c.linear_num_value_heads * c.linear_value_head_dim


def gate_up(c: BerryLMConfig) -> tuple[int, ...]:
    """The rows of an expert's gate_up_proj."""
    return c.moe_intermediate_size, c.moe_intermediate_size


SAME, FIRST = "same", "first"  # whole on every rank; whole on rank 0 and zero on the others, since what it gives is added up
ROWS, COLUMNS = Cut(0), Cut(1)
CUTS: dict[str, Cut | str] = {
    "embed_tokens.weight": ROWS,
    "lm_head.weight": ROWS,
    "model.norm.weight": SAME,
    "attn_res.pseudo_query": SAME,
    "attn_res.gate": SAME,
    "input_layernorm.weight": SAME,
    "post_attention_layernorm.weight": SAME,
    # linear attention: key heads with their value heads
    "linear_attn.in_proj_qkv.weight": Cut(0, qkv),
    "linear_attn.in_proj_z.weight": ROWS,
    "linear_attn.in_proj_b.weight": ROWS,
    "linear_attn.f_down_proj.weight": SAME,
    "linear_attn.f_up_proj.weight": ROWS,
    "linear_attn.conv1d.weight": Cut(0, qkv),
    "linear_attn.A_log": ROWS,
    "linear_attn.dt_bias": ROWS,
    "linear_attn.norm.weight": SAME,
    "linear_attn.out_proj.weight": COLUMNS,
    # full attention: query heads with their KV head
    "self_attn.q_proj.weight": ROWS,
    "self_attn.q_proj.bias": ROWS,
    "self_attn.k_proj.weight": Cut(0, kv=True),
    "self_attn.k_proj.bias": Cut(0, kv=True),
    "self_attn.v_proj.weight": Cut(0, kv=True),
    "self_attn.v_proj.bias": Cut(0, kv=True),
    "self_attn.q_norm.weight": SAME,
    "self_attn.k_norm.weight": SAME,
    "self_attn.o_proj.weight": COLUMNS,
    "self_attn.o_proj.bias": FIRST,
    # experts: every rank has all of them, each by its share of the intermediate width
    "mlp.gate.weight": SAME,
    "mlp.experts.gate_up_proj": Cut(1, gate_up),
    "mlp.experts.down_proj": Cut(2),
    "mlp.experts.gate_proj.weight": ROWS,  # one expert in a file of its own
    "mlp.experts.up_proj.weight": ROWS,
    "mlp.experts.down_proj.weight": COLUMNS,
    "mlp.shared_expert.gate_proj.weight": ROWS,
    "mlp.shared_expert.up_proj.weight": ROWS,
    "mlp.shared_expert.down_proj.weight": COLUMNS,
    "mlp.shared_expert_gate.weight": SAME,
}
DIVIDED = (  # fields of the configuration of which each rank has an equal part
    "num_attention_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True)
class Shard:
    """Rank ``rank`` of ``size``; alone, it holds everything and meets nobody.

    Raises ValueError, naming the field, where ``size`` does not divide what is cut.
    """

    config: BerryLMConfig
    rank: int = 0
    size: int = 1
    local: BerryLMConfig = field(init=False)
    all_reduce: AllReduce = field(default_factory=AllReduce, init=False, compare=False, repr=False)

    def __post_init__(self):
        if not 0 <= self.rank < self.size:
            raise ValueError(f"Shard: rank: expected 0 .. size - 1, got rank {self.rank} of {self.size}")
        sizes, heads = {name: getattr(self.config, name) for name in DIVIDED}, self.config.num_key_value_heads
        for name, value in sizes.items():
            if value % self.size:
                raise ValueError(f"tensor parallel: {name}: expected a multiple of tp = {self.size}, got {value}")
        if heads % self.size and self.size % heads:
            expected = f"a multiple or a divisor of tp = {self.size}"
            raise ValueError(f"tensor parallel: num_key_value_heads: expected {expected}, got {heads}")
        local = self.config
        if self.size > 1:
            parts = {name: value // self.size for name, value in sizes.items()}
            local = replace(self.config, **parts, num_key_value_heads=max(1, heads // self.size))
        object.__setattr__(self, "local", local)

    def spans(self, name: str, shape: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]] | None:
        """(dimension, ranges [begin, end) of it) that this rank holds of a tensor of ``shape``, in order; None: all of it."""
        cut = cut_of(name)
        if self.size == 1 or cut == SAME or cut == FIRST and self.rank == 0:
            return None
        if cut == FIRST:
            return 0, []
        parts, begin, out = self._parts(cut), 0, []
        part = self.rank * parts // self.size
        for width in cut.stacked(self.config) if cut.stacked else (shape[cut.dim],):
            out.append((begin + part * width // parts, begin + (part + 1) * width // parts))
            begin += width
        return cut.dim, out

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank holds of the tensor ``whole``."""
        spans = self.spans(name, tuple(whole.shape))
        if spans is None:
            return whole
        dim, ranges = spans
        if not ranges:  # held by another rank, and added up with zeros
            return torch.zeros_like(whole)
        return torch.cat([whole.narrow(dim, begin, end - begin) for begin, end in ranges], dim)

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor of which this rank holds ``shape``."""
        cut = cut_of(name)
        if self.size == 1 or isinstance(cut, str):
            return tuple(shape)
        return *shape[: cut.dim], shape[cut.dim] * self._parts(cut), *shape[cut.dim + 1 :]

    def _parts(self, cut: Cut) -> int:
        """How many different ones there are."""
        return min(self.size, self.config.num_key_value_heads) if cut.kv else self.size

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, the same bits on each; ``x`` may be overwritten."""
        return self.all_reduce(x) if self.size > 1 else x

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """ids [P], this rank's rows [vocab_size / size, D] -> [P, D]."""
        if self.size == 1:
            return embedding(ids, weight)
        local = ids - self.rank * len(weight)
        mine = (local >= 0) & (local < len(weight))
        return self.reduce(torch.where(mine.unsqueeze(-1), embedding(torch.where(mine, local, 0), weight), 0))

    def gather(self, logits: Tensor) -> Tensor:
        """[M, vocab_size / size] of every rank -> [M, vocab_size]."""
        if self.size == 1:
            return logits
        parts = logits.new_empty(self.size, *logits.shape)
        all_gather(parts.flatten(0, 1), logits)
        return parts.movedim(0, 1).flatten(1)

    def backend(self, ops: Backend) -> Backend:
        """``ops`` with the two all-reduces of a layer: before the sum of the mixer, and before that of the MoE.

        Each residual is added once, after the all-reduce: every rank has the same.
        """
        if self.size == 1:
            return ops

        def add_rms_norm(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            return ops.add_rms_norm(h, self.reduce(y), weight, eps)

        def moe(x: Tensor, *weights, residual: Tensor | None = None, **options) -> Tensor:
            y = self.reduce(ops.moe(x, *weights, **options))
            return y if residual is None else residual + y

        return replace(ops, add_rms_norm=add_rms_norm, moe=moe)


def cut_of(name: str) -> Cut | str:
    """How the tensor of this name in the checkpoint is cut."""
    plain = re.sub(r"\.\d+(?=\.)", "", name)  # without the numbers of layer and expert
    for suffix, cut in CUTS.items():
        if plain == suffix or plain.endswith("." + suffix):
            return cut
    raise ValueError(f"tensor parallel: {name}: expected a tensor that CUTS describes")
