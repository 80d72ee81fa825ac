"""What a step can't avoid: bytes that it must read, products that it must form, and the time they take at measured rates."""

from dataclasses import dataclass

from ..config import BerryLMConfig
from ..engine.memory import kv_token_bytes, state_bytes
from ..model import BerryLM

PREFILL_SHARE = 0.45  # of the matrix rate: what prefill is taken to reach in the limit of a workload
GROUPS = ("KDA", "MoE", "attention", "norms and AttnRes", "products")  # of the profile, as far as they have a floor


@dataclass(frozen=True)
class Floors:
    """Counts for one model, times at ``copy`` bytes/s and ``matmul`` FLOP/s."""

    config: BerryLMConfig
    expert_bytes: float  # one expert of one layer
    mlp_bytes: int  # routers and shared experts of all layers
    other_bytes: int  # all that is left but the embedding: projections, norms, head
    mlp_products: float  # multiplications a token: the experts it is routed to, shared expert, router
    other_products: int  # multiplications a token: projections, without the head
    head_products: int
    token_kv_bytes: int
    slot_bytes: int
    copy: float
    matmul: float

    @classmethod
    def of(cls, model: BerryLM, ceilings: dict[str, float]) -> "Floors":
        c = model.config
        expert = mlp = other = mlp_products = other_products = 0
        for name, p in model.named_parameters():
            if ".experts." in name:
                expert += p.nbytes
                mlp_products += p.numel() * c.num_experts_per_tok / c.num_experts
            elif ".mlp." in name:
                mlp += p.nbytes
                mlp_products += p.numel()
            elif name == "model.embed_tokens.weight":
                other += p.nbytes if c.tie_word_embeddings else 0  # as the head; else a step gathers a few rows
            else:
                other += p.nbytes
                is_product = p.dim() == 2 and name != "lm_head.weight"
                other_products += p.numel() if is_product else 0
        return cls(
            config=c,
            expert_bytes=expert / c.num_experts / c.num_hidden_layers,
            mlp_bytes=mlp,
            other_bytes=other,
            mlp_products=mlp_products,
            other_products=other_products,
            head_products=c.vocab_size * c.hidden_size,
            token_kv_bytes=kv_token_bytes(c, model.dtype),
            slot_bytes=state_bytes(c, model.dtype),
            copy=ceilings["copy_bytes_per_s"],
            matmul=ceilings["matmul_flops_per_s"],
        )

    def expected_experts(self, batch: int) -> float:
        """Distinct experts of a layer that ``batch`` tokens hit when every expert is as likely as any other."""
        E, k = self.config.num_experts, self.config.num_experts_per_tok
        return E * (1 - (1 - k / E) ** batch)

    def step_bytes(self, batch: int, context: float, experts: float | None = None) -> dict[str, float]:
        """Bytes of one decode step, by group: weights once, states read and written, keys and values of ``context`` tokens.

        ``experts``: distinct experts a layer, None: as expected.
        """
        experts = self.expected_experts(batch) if experts is None else experts
        return {
            "KDA": 2.0 * batch * self.slot_bytes,
            "MoE": self.mlp_bytes + experts * self.expert_bytes * self.config.num_hidden_layers,
            "attention": batch * context * self.token_kv_bytes,
            "products": float(self.other_bytes),
        }

    def prefill_flops(self, tokens: int) -> dict[str, float]:
        """Useful FLOPs of one prompt of ``tokens``, by group; a multiplication and its addition are two.

        Projections, routed and shared experts for every token, the head for the last; scores and sums over the causal half; the
        recurrence's three products with the state a token (whatever a chunk form adds is not useful), and its convolution.
        """
        c = self.config
        state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
        linear = len(c.linear_layers) * (6 * state + 2 * c.conv_dim * c.linear_conv_kernel_dim)
        pairs = tokens * (tokens + 1) / 2
        return {
            "KDA": float(linear * tokens),
            "MoE": 2.0 * self.mlp_products * tokens,
            "attention": len(c.full_layers) * 4 * c.num_attention_heads * c.head_dim * pairs,
            "products": 2.0 * self.other_products * tokens + 2 * self.head_products,
        }

    def step_seconds(self, batch: int, context: float, experts: float | None = None) -> float:
        return sum(self.step_bytes(batch, context, experts).values()) / self.copy

    def prefill_seconds(self, tokens: int, share: float = 1.0) -> float:
        return sum(self.prefill_flops(tokens).values()) / self.matmul / share

    def workload(self, given: int, wanted: int, concurrency: int, experts: float | None = None) -> dict[str, float]:
        """The limit of one wave of ``concurrency`` requests: prefill at PREFILL_SHARE, then decode at the floor of its bytes."""
        prefill = concurrency * self.prefill_seconds(given, PREFILL_SHARE)
        step = self.step_seconds(concurrency, given + wanted / 2, experts)
        return {
            "step_ms": 1e3 * step,
            "prefill_seconds": prefill,
            "tokens_per_s": concurrency * wanted / (prefill + wanted * step),
            "experts_hit_share": (self.expected_experts(concurrency) if experts is None else experts) / self.config.num_experts,
        }
