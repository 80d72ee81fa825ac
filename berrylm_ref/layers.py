"""The modules of a layer, with the checkpoint's names. They hold parameters; what runs are the backend's ops.

The host sets the time of a short prefill: inside a layer no projection is called as a module, views are made by ``view``, and
parameters are taken from their dicts (``weight_of``).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .backend import Backend
from .cache.batch import Batch
from .config import LINEAR, BerryLMConfig
from .merged import Merged

LOW_PRECISION = (torch.bfloat16, torch.float16)
FP32 = ("A_log", "dt_bias")  # what stays in it


def random_weight(*shape: int) -> Tensor:
    """N(0, 0.02^2), the initial value of embeddings and experts."""
    return torch.empty(shape).normal_(std=0.02)


def weight_of(module: nn.Module, name: str) -> Tensor:
    """``module.<name>.weight``, in a sixth of the time that nn.Module's search for two attributes takes."""
    return module._modules[name]._parameters["weight"]


class Norm(nn.Module):
    """Holder of a norm's weight; the gated norm's is centred at one, the others at zero."""

    def __init__(self, width: int, centre: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), centre))


class AttnRes(nn.Module):
    """Holder of a layer's depth mixer: [D] pseudo-query and scalar gate. At zero both, the layer sees its own stream."""

    def __init__(self, config: BerryLMConfig):
        super().__init__()
        self.pseudo_query = nn.Parameter(torch.zeros(config.hidden_size))
        self.gate = nn.Parameter(torch.zeros(()))


class KimiDeltaAttention(Merged):
    """Linear attention: projections, short convolution, forget gate, the recurrence, gated norm (arXiv:2510.26692).

    A_log and dt_bias stay fp32 when the module is cast to bf16 or fp16: rounded, a decay rate moves by up to 0.8 %, and it
    compounds.
    """

    merged = ("in_proj_qkv", "in_proj_z", "f_down_proj", "in_proj_b")  # the narrow one last: the others begin aligned

    def __init__(self, config: BerryLMConfig):
        super().__init__()
        c = config
        self.config = c
        heads, keys, values = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        self.in_proj_qkv = nn.Linear(c.hidden_size, c.conv_dim, bias=False)
        self.in_proj_z = nn.Linear(c.hidden_size, heads * values, bias=False)
        self.in_proj_b = nn.Linear(c.hidden_size, heads, bias=False)
        self.f_down_proj = nn.Linear(c.hidden_size, c.kda_gate_bottleneck, bias=False)
        self.f_up_proj = nn.Linear(c.kda_gate_bottleneck, heads * keys, bias=False)
        self.conv1d = nn.Conv1d(c.conv_dim, c.conv_dim, c.linear_conv_kernel_dim, groups=c.conv_dim, bias=False)
        self.A_log = nn.Parameter(torch.linspace(0, 72, heads + 1)[1:].log() if heads > 1 else torch.zeros(1))
        self.dt_bias = nn.Parameter(torch.empty(heads * keys).uniform_(-7, -2.6))
        self.norm = Norm(values, centre=1.0)
        self.out_proj = nn.Linear(heads * values, c.hidden_size, bias=False)
        self.lower_bound = c.kda_gate_lower_bound if c.kda_safe_gate else None
        self.intra = "dyadic"

    def _apply(self, fn, recurse=True):
        before = {name: getattr(self, name).data for name in FP32}
        super()._apply(fn, recurse)
        for name, old in before.items():
            now = getattr(self, name)
            if now.dtype in LOW_PRECISION:
                now.data = old.to(now.device, torch.float32)
        return self

    def forward(self, x: Tensor, batch: Batch, layer: int, ops: Backend) -> Tensor:
        """x [P, D] -> [P, D]; ``layer`` counts the linear layers."""
        c, P = self.config, x.shape[0]
        H, K = c.linear_num_key_heads, c.linear_key_head_dim
        HV, V = c.linear_num_value_heads, c.linear_value_head_dim
        qkv, z, down, beta = self.project(x)
        raw_gate = linear(down, weight_of(self, "f_up_proj"))
        weight = weight_of(self, "conv1d").squeeze(1)  # [C, W]
        norm, out, A_log, dt_bias = weight_of(self, "norm"), weight_of(self, "out_proj"), *map(self._parameters.get, FP32)
        if batch.decode_only:
            o = ops.kda_decode_step(
                qkv, z, raw_gate, beta, weight, A_log, dt_bias, norm,
                batch.caches.conv[layer], batch.caches.state[layer], batch.slots,
                key_heads=H, eps=c.rms_norm_eps, lower_bound=self.lower_bound,
            )  # fmt: skip
            return linear(o, out)
        windows, state = batch.load_linear(layer, qkv, c.conv_dim, c.linear_conv_kernel_dim - 1)
        raw = qkv
        qkv, windows = ops.causal_conv(raw, weight, windows, batch.cu_seqlens)
        q, k, v = qkv.split_with_sizes([H * K, H * K, HV * V], -1)
        o, state, *kept = ops.chunk_kda(
            q.view(1, P, H, K), k.view(1, P, H, K), v.view(1, P, HV, V), raw_gate.view(1, P, HV, K), beta.unsqueeze(0),
            initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, A_log=A_log, dt_bias=dt_bias, lower_bound=self.lower_bound,
            cu_seqlens=batch.cu_seqlens, intra=self.intra, state_boundaries=batch.boundaries,
        )  # fmt: skip
        batch.store_linear(layer, windows, state)
        if kept:
            batch.keep_boundaries(layer, raw, *kept)
        o = ops.gated_rms_norm(o.squeeze(0), z.view(P, HV, V), norm, c.rms_norm_eps)
        return linear(o.reshape(P, HV * V), out)


class GatedAttention(Merged):
    """Full attention: grouped queries, per-head norm of q and k, partial rotary, sigmoid output gate."""

    merged = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: BerryLMConfig):
        super().__init__()
        c = config
        self.config = c
        heads, kv_heads, width = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, heads * width * (2 if c.attn_output_gate else 1), bias=c.attention_bias)
        self.k_proj = nn.Linear(c.hidden_size, kv_heads * width, bias=c.attention_bias)
        self.v_proj = nn.Linear(c.hidden_size, kv_heads * width, bias=c.attention_bias)
        self.o_proj = nn.Linear(heads * width, c.hidden_size, bias=c.attention_bias)
        self.q_norm = Norm(width)
        self.k_norm = Norm(width)

    def forward(self, x: Tensor, batch: Batch, layer: int, rope: tuple[Tensor, Tensor], ops: Backend) -> Tensor:
        """x [P, D] -> [P, D]; ``layer`` counts the full layers."""
        c, P = self.config, x.shape[0]
        heads, kv_heads, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        q, k, v = self.project(x)
        q = q.view(P, heads, q.shape[-1] // heads)  # [P, heads, 2D]: query and gate, head by head
        k, v = k.view(P, kv_heads, D), v.view(P, kv_heads, D)
        append = None
        if batch.caches is not None:
            append = v, batch.caches.k_pages[layer], batch.caches.v_pages[layer], batch.kv_rows
        q, k, gate = ops.qk_norm_rope(
            q, k, weight_of(self, "q_norm"), weight_of(self, "k_norm"), c.rms_norm_eps, *rope, c.attn_output_gate, append
        )
        _, k_pages, v_pages, _ = append or (v, k.unsqueeze(1), v.unsqueeze(1), None)  # without caches: pages of one token
        o = ops.paged_attention(
            q, k_pages, v_pages, batch.page_table, batch.cu_seqlens, batch.context_lens, D**-0.5, gate,
            max_query_len=batch.max_query_len, lengths=batch.lengths, key_offsets=batch.key_offsets,
        )  # fmt: skip
        out = self._modules["o_proj"]._parameters
        return linear(o.reshape(P, heads * D), out["weight"], out["bias"])


class Experts(nn.Module):
    """Holder of the routed experts: gate_up_proj [E, 2I, D] with the gate rows first, down_proj [E, D, I]."""

    def __init__(self, config: BerryLMConfig):
        super().__init__()
        E, D, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(random_weight(E, 2 * width, D))
        self.down_proj = nn.Parameter(random_weight(E, D, width))


class SharedExpert(nn.Module):
    """Holder of the expert that every token passes."""

    def __init__(self, config: BerryLMConfig):
        super().__init__()
        D, width = config.hidden_size, config.shared_expert_intermediate_size
        self.gate_proj = nn.Linear(D, width, bias=False)
        self.up_proj = nn.Linear(D, width, bias=False)
        self.down_proj = nn.Linear(width, D, bias=False)


class MoE(nn.Module):
    """Top-k of E experts plus a shared expert behind a sigmoid gate."""

    def __init__(self, config: BerryLMConfig):
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared_expert = SharedExpert(config)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor, residual: Tensor, ops: Backend) -> Tensor:
        """x [P, D] -> residual + the experts' sum, [P, D]."""
        shared, experts = self._modules["shared_expert"], self._modules["experts"]._parameters
        return ops.moe(
            x, weight_of(self, "gate"), experts["gate_up_proj"], experts["down_proj"],
            (weight_of(shared, "gate_proj"), weight_of(shared, "up_proj")), weight_of(shared, "down_proj"),
            weight_of(self, "shared_expert_gate"),
            top_k=self.config.num_experts_per_tok, normalise=self.config.norm_topk_prob, residual=residual,
        )  # fmt: skip


class Layer(nn.Module):
    """Mix over depth, then a token mixer and a MoE, each behind its norm and added to the *mixed* stream."""

    def __init__(self, config: BerryLMConfig, index: int):
        super().__init__()
        self.config = config
        self.is_linear = config.layer_types[index] == LINEAR
        if config.attn_res_block_size:
            self.attn_res = AttnRes(config)
        self.input_layernorm = Norm(config.hidden_size)
        if self.is_linear:
            self.linear_attn = KimiDeltaAttention(config)
        else:
            self.self_attn = GatedAttention(config)
        self.post_attention_layernorm = Norm(config.hidden_size)
        self.mlp = MoE(config)

    def forward(self, h: Tensor, committed: Tensor, batch: Batch, kind_index: int, rope, ops: Backend) -> Tensor:
        """h [P, D], committed [blocks, P, D] -> [P, D]; ``kind_index`` counts the layers of this layer's kind."""
        c, modules = self.config, self._modules
        norm = weight_of(self, "input_layernorm")
        if c.attn_res_block_size:
            mixer = modules["attn_res"]._parameters
            h, x = ops.attn_res_norm(
                h, committed, mixer["pseudo_query"], mixer["gate"] if c.attn_res_gated else None, c.attn_res_eps,
                c.attn_res_gated, norm, c.rms_norm_eps,
            )  # fmt: skip
        else:
            x = ops.rms_norm(h, norm, c.rms_norm_eps)
        if self.is_linear:
            x = modules["linear_attn"](x, batch, kind_index, ops)
        else:
            x = modules["self_attn"](x, batch, kind_index, rope, ops)
        h, x = ops.add_rms_norm(h, x, weight_of(self, "post_attention_layernorm"), c.rms_norm_eps)
        return modules["mlp"](x, h, ops)
