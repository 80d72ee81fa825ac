"""The recipes: every number of a training run in one place. ``NANO`` makes the shipped checkpoint, ``MICRO`` tries the same path
on a CPU in a minute."""

from dataclasses import dataclass, field

from ..config import BerryLMConfig
from ..shipped import shipped_checkpoint

SHIPPED = shipped_checkpoint()  # its tokenizer and template are the ones to train with
MOST_RATE = 72.0  # of the forget gates, as in the large model
DT_BIAS = (-7.0, -2.0)  # uniform, in all heads but the fastest
DT_BIAS_FASTEST = (-2.0, 0.0)  # it forgets 13 to 72 powers of two a token: all it says is of the present token


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run. Rates are AdamW's; tokens are those of one step, padding included.

    buckets: row lengths, each a divisor of tokens; a batch has rows of one length. unit_batches: batches of one seeded unit of
    data, which one worker makes. warmup, decay_from: fractions of the time budget; the rate rises, stays, then falls linearly to
    zero. gate_rate: for A_log and dt_bias, slow so that the decays stay as sharp as they begin.
    """

    name: str
    model: dict = field(default_factory=dict)
    minutes: float
    tokens: int
    buckets: tuple[int, ...]
    unit_batches: int = 48
    rate: float = 2e-3
    gate_rate: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    balance: float = 0.01
    warmup: float = 0.02
    decay_from: float = 0.4
    kinds: tuple[str, ...] | None = None  # None is all

    def __post_init__(self):
        odd = [length for length in self.buckets if self.tokens % length]
        if odd or list(self.buckets) != sorted(self.buckets):
            raise ValueError(f"Recipe: buckets: expected rising divisors of tokens = {self.tokens}, got {self.buckets}")

    def config(self, end_id: int, pad_id: int | None = None) -> BerryLMConfig:
        return BerryLMConfig(**self.model, eos_token_id=end_id, pad_token_id=pad_id)


NANO_MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "kda_gate_bottleneck": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 80,
    "shared_expert_intermediate_size": 128,
    "attn_res_block_size": 3,
}
NANO = Recipe(
    name="nano",
    model=NANO_MODEL,
    minutes=7.0,
    tokens=61440,  # every bucket divides it, so that all batches have one shape once rows are packed
    buckets=(32, 64, 96, 128, 192, 256, 384, 512, 1024, 4096),
)
MICRO = Recipe(
    name="micro",
    model=NANO_MODEL
    | {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "kda_gate_bottleneck": 16,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "attn_res_block_size": 1,
    },
    minutes=0.75,
    tokens=480,
    buckets=(48, 96, 160, 240),
    unit_batches=24,
    rate=1e-2,
    kinds=("problem", "drill", "talk", "drill_direct"),
)
RECIPES = {recipe.name: recipe for recipe in (NANO, MICRO)}
