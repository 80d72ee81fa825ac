"""Which model is measured: the official configuration, a tiny one for trials on a CPU, or a folder's."""

from dataclasses import replace
from pathlib import Path

from ..config import BerryLMConfig

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "kda_gate_bottleneck": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "attn_res_block_size": 2,
}


def config_named(name: str, layers: int | None = None) -> BerryLMConfig:
    """"berrylm-os", "tiny", or a folder with config.json; ``layers``: only so many of its layers, in the usual pattern."""
    if name == "berrylm-os":
        config = BerryLMConfig()
    elif name == "tiny":
        config = BerryLMConfig(**TINY)
    else:
        config = BerryLMConfig.from_pretrained(Path(name))
    return config if layers is None else replace(config, num_hidden_layers=layers, layer_types=None)
