"""The forward of training: the package's model on whole rows, differentiable, and fast enough to train with.

It reads the parameters of a ``BerryLM`` and runs the regions of ``regions.py``; the recurrence is an argument. In fp32 with the
torch recurrence the logits equal the model's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..model import BerryLM
from ..ops.rope import rope_angles
from . import regions

LOSS_ROWS = 15360  # tokens whose logits are formed at once


@dataclass
class Trace:
    """What a forward leaves beside the stream: per layer the balance loss [] and expert shares [E]; gates if asked for."""

    balance: list[Tensor] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)
    gates: list[Tensor] = field(default_factory=list)  # per linear layer g [B, T, HV, K], natural log


class Forward:
    """``forward(ids)`` -> stream [P, D] and a ``Trace``; ``losses`` finishes it. P = B * T.

    recurrence: (q, k, v, g, beta), all [B, T, ...], q and k normalised, g the log-decay, beta in (0, 1) -> o [B, T, HV, V].
    dtype: of the products. compiled: every region through torch.compile.
    """

    def __init__(self, model: BerryLM, recurrence: Callable[..., Tensor], dtype: torch.dtype, compiled: bool = False):
        self.model, self.config, self.recurrence, self.dtype = model, model.config, recurrence, dtype
        names = ("mix", "linear_in", "linear_out", "full_in", "full_out", "moe", "token_losses")
        self.region = {name: getattr(regions, name) for name in names}
        if compiled:
            # one graph a region, and for "mix" one a number of committed streams, with and without gradients
            torch._dynamo.config.recompile_limit = 4 * (self.config.attn_res_commits + 1)
            self.region = {name: torch.compile(f, dynamic=False, fullgraph=True) for name, f in self.region.items()}

    def __call__(self, ids: Tensor, live: Tensor | None = None, keep_gates: bool = False) -> tuple[Tensor, Trace]:
        """ids [B, T]; live [B, T], false for padding (it counts neither for balance nor for the shares)."""
        c, (B, T) = self.config, ids.shape
        live = torch.ones_like(ids, dtype=torch.bool) if live is None else live
        positions = torch.arange(T, device=ids.device).repeat(B)  # [P]
        rope = rope_angles(positions, c.rotary_dim, c.rope_theta, self.dtype)
        h = self.model.model.embed_tokens.weight[ids.flatten()]  # [P, D]
        committed, trace = [h.view_as(h)], Trace()  # a view: a graph must not depend on whether both are one tensor
        for i, layer in enumerate(self.model.model.layers):
            h, x = self._mix(layer, h, committed)
            if layer.is_linear:
                h, x = self._linear(layer, h, x, positions, (B, T), trace.gates if keep_gates else None)
            else:
                h, x = self._full(layer, h, x, rope, (B, T))
            h, balance, share = self._moe(layer.mlp, h, x, live.flatten())
            trace.balance.append(balance)
            trace.shares.append(share)
            if c.attn_res_block_size and (i + 1) % c.attn_res_block_size == 0:
                committed.append(h.view_as(h))
        return h, trace

    def losses(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """h [P, D], targets [P] -> cross entropy [P] in fp32, and whether the target is the most probable token [P]."""
        run, norm, eps = self.region["token_losses"], self.model.model.norm.weight, self.config.rms_norm_eps
        parts = zip(h.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True)
        done = [run(rows, norm, eps, self.model.head, wanted, self.dtype) for rows, wanted in parts]
        return torch.cat([loss for loss, _ in done]), torch.cat([hit for _, hit in done])

    def logits(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, vocab_size], for comparison with the model."""
        h, _ = self(ids)
        x = regions.rms_norm(h, self.model.model.norm.weight, self.config.rms_norm_eps)
        return regions.product(x, self.model.head, self.dtype).view(*ids.shape, -1)

    def _mix(self, layer, h: Tensor, committed: list[Tensor]) -> tuple[Tensor, Tensor]:
        c, norm = self.config, layer.input_layernorm.weight
        if not c.attn_res_block_size:
            return h, regions.rms_norm(h, norm, c.rms_norm_eps)
        gate = layer.attn_res.gate if c.attn_res_gated else None
        return self.region["mix"](h, committed, layer.attn_res.pseudo_query, gate, c.attn_res_eps, norm, c.rms_norm_eps)

    def _linear(self, layer, h: Tensor, x: Tensor, positions: Tensor, shape: tuple[int, int], gates: list | None):
        c, a = self.config, layer.linear_attn
        heads = (c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        *inputs, z = self.region["linear_in"](
            x, positions, a.in_proj_qkv.weight, a.in_proj_z.weight, a.in_proj_b.weight, a.f_down_proj.weight,
            a.f_up_proj.weight, a.conv1d.weight.squeeze(1), a.A_log, a.dt_bias, heads, a.lower_bound, self.dtype,
        )  # fmt: skip
        inputs = [t.unflatten(0, shape) for t in inputs]
        if gates is not None:
            gates.append(inputs[3])
        o = self.recurrence(*inputs).flatten(0, 1)
        return self.region["linear_out"](
            h, o, z, a.norm.weight, c.rms_norm_eps, a.out_proj.weight, layer.post_attention_layernorm.weight, self.dtype
        )

    def _full(self, layer, h: Tensor, x: Tensor, rope: tuple[Tensor, Tensor], shape: tuple[int, int]):
        c, a = self.config, layer.self_attn
        q, k, v, gate = self.region["full_in"](
            x, *rope, *((p.weight, p.bias) for p in (a.q_proj, a.k_proj, a.v_proj)), a.q_norm.weight, a.k_norm.weight,
            (c.num_attention_heads, c.num_key_value_heads), c.attn_output_gate, c.rms_norm_eps, self.dtype,
        )  # fmt: skip
        q, k, v = (t.unflatten(0, shape).transpose(1, 2) for t in (q, k, v))  # [B, heads, T, D]
        o = scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.head_dim**-0.5).transpose(1, 2).flatten(0, 1)
        return self.region["full_out"](
            h, o, gate, a.o_proj.weight, a.o_proj.bias, layer.post_attention_layernorm.weight, c.rms_norm_eps, self.dtype
        )

    def _moe(self, m, h: Tensor, x: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = m.shared_expert
        shared = (s.gate_proj.weight, s.up_proj.weight, s.down_proj.weight, m.shared_expert_gate.weight)
        return self.region["moe"](
            h, x, live, m.gate.weight, m.experts.gate_up_proj, m.experts.down_proj, shared,
            self.config.num_experts_per_tok, self.config.norm_topk_prob, self.dtype,
        )  # fmt: skip
