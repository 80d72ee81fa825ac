"""The configuration of a BerryLM model: every field of config.json, checked once, never changed afterwards."""

import json
import math
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
IDENTITY = {"architectures": ["BerryLMForCausalLM"], "model_type": "berrylm"}
OPTIONAL = {"layer_types", "kda_gate_lower_bound", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"}
FRACTION_FIELDS = {"rms_norm_eps", "attn_res_eps"}
LEAST = {"attn_res_block_size": 0, "linear_conv_kernel_dim": 2}  # of the integers; 1 for the others


@dataclass(frozen=True, kw_only=True)
class BerryLMConfig:
    """The fields of the official config.json with their official defaults (the 18B model).

    ``layer_types`` None becomes full attention at every ``full_attention_interval``-th layer, linear attention elsewhere.
    Fields this class does not know are kept in ``extra`` and written back. Raises ValueError that names field, expected
    and got.
    """

    vocab_size: int = 180224
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    hidden_act: str = "silu"
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=lambda: dict(DEFAULT_ROPE))
    attention_bias: bool = False
    attn_output_gate: bool = True
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    kda_gate_bottleneck: int = 128
    kda_safe_gate: bool = False
    kda_gate_lower_bound: float | None = None
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    attn_res_block_size: int = 8
    attn_res_gated: bool = True
    attn_res_eps: float = 1e-6
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    dtype: str | None = None  # of the stored weights
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        for f in fields(self):
            self._check_type(f.name, getattr(self, f.name))
        if self.layer_types is None:
            every = self.full_attention_interval
            types = (FULL if (i + 1) % every == 0 else LINEAR for i in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", tuple(types))
        else:
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        for name in ("rope_parameters", "extra"):  # the caller's mapping may change later
            object.__setattr__(self, name, dict(getattr(self, name)))
        self._check_values()

    def _check_type(self, name: str, value: Any) -> None:
        if value is None and name in OPTIONAL:
            return
        if name in ("layer_types", "rope_parameters", "extra", "eos_token_id"):
            expected = {"layer_types": (list, tuple), "eos_token_id": (int, list)}.get(name, dict)
            ok = isinstance(value, expected) and not isinstance(value, bool)
            if ok and name == "eos_token_id" and isinstance(value, list):
                ok = all(isinstance(x, int) and not isinstance(x, bool) for x in value)
            expected = {"layer_types": "a list", "eos_token_id": "a token id or a list of them"}.get(name, "a mapping")
        elif name in ("hidden_act", "dtype"):
            ok, expected = isinstance(value, str), "a string"
        elif name in FRACTION_FIELDS or name == "kda_gate_lower_bound":
            ok, expected = is_number(value), "a finite number"
        elif isinstance(type(self).__dataclass_fields__[name].default, bool):
            ok, expected = isinstance(value, bool), "true or false"
        else:
            ok, expected = isinstance(value, int) and not isinstance(value, bool), "an integer"
            if ok and name not in OPTIONAL and value < LEAST.get(name, 1):
                ok, expected = False, f"{LEAST.get(name, 1)} or more"
        if not ok:
            refuse(name, expected, value)

    def _check_values(self) -> None:
        if self.hidden_act != "silu":
            refuse("hidden_act", "'silu'", self.hidden_act)
        for name in FRACTION_FIELDS:
            if not 0 < getattr(self, name) < 1:
                refuse(name, "a number between 0 and 1", getattr(self, name))
        unknown = [t for t in self.layer_types if t not in (LINEAR, FULL)]
        if unknown:
            refuse("layer_types", f"only {LINEAR!r} and {FULL!r}", unknown[0])
        if len(self.layer_types) != self.num_hidden_layers:
            refuse("layer_types", f"num_hidden_layers = {self.num_hidden_layers} entries", len(self.layer_types))
        if self.linear_num_value_heads % self.linear_num_key_heads:
            expected = f"a multiple of linear_num_key_heads = {self.linear_num_key_heads}"
            refuse("linear_num_value_heads", expected, self.linear_num_value_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            expected = f"a multiple of num_key_value_heads = {self.num_key_value_heads}"
            refuse("num_attention_heads", expected, self.num_attention_heads)
        if self.num_experts_per_tok > self.num_experts:
            refuse("num_experts_per_tok", f"at most num_experts = {self.num_experts}", self.num_experts_per_tok)
        bound = self.kda_gate_lower_bound
        if self.kda_safe_gate and bound is None:
            refuse("kda_gate_lower_bound", "a negative number with kda_safe_gate", bound)
        if bound is not None and bound >= 0:
            refuse("kda_gate_lower_bound", "a negative number (natural-log decay per token)", bound)
        rope = self.rope_parameters
        if rope.get("rope_type", "default") != "default":
            refuse("rope_parameters.rope_type", "'default'", rope["rope_type"])
        if not is_number(rope.get("rope_theta")) or rope["rope_theta"] <= 0:
            refuse("rope_parameters.rope_theta", "a positive number", rope.get("rope_theta"))
        factor = rope.get("partial_rotary_factor")
        if not is_number(factor) or not 0 < factor <= 1:
            refuse("rope_parameters.partial_rotary_factor", "a number in (0, 1]", factor)
        if self.rotary_dim % 2 or self.rotary_dim == 0:
            refuse("rope_parameters.partial_rotary_factor", "an even number of rotated channels", self.rotary_dim)

    @property
    def rope_theta(self) -> float:
        return float(self.rope_parameters["rope_theta"])

    @property
    def rotary_dim(self) -> int:
        """Channels of a full-attention head that are rotated."""
        return int(self.head_dim * self.rope_parameters["partial_rotary_factor"])

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: q, k and v side by side."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_layers(self) -> list[int]:
        return [i for i, t in enumerate(self.layer_types) if t == LINEAR]

    @property
    def full_layers(self) -> list[int]:
        return [i for i, t in enumerate(self.layer_types) if t == FULL]

    @property
    def attn_res_commits(self) -> int:
        """Committed streams after the last layer, the embeddings (block 0) included."""
        return 1 + (self.num_hidden_layers // self.attn_res_block_size if self.attn_res_block_size else 0)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.eos_token_id
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "BerryLMConfig":
        """From the content of a config.json, also an older one (``rope_scaling``, ``rope_theta``, ``torch_dtype``)."""
        raw = dict(raw)
        if raw.get("model_type", "berrylm") != "berrylm":
            refuse("model_type", "'berrylm'", raw["model_type"])
        older, rope_parameters = raw.pop("rope_scaling", None), raw.pop("rope_parameters", None)
        top_level = {name: raw.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in raw}
        rope = dict(DEFAULT_ROPE)
        for source in (older, top_level, rope_parameters):  # the newest spelling wins
            if source is not None and not isinstance(source, dict):
                refuse("rope_parameters", "a mapping", source)
            rope.update(source or {})
        if "type" in rope:  # the oldest spelling
            rope["rope_type"] = rope.pop("type")
        raw["rope_parameters"] = rope
        if "torch_dtype" in raw:
            raw.setdefault("dtype", raw.pop("torch_dtype"))
        known = {f.name for f in fields(cls)} - {"extra"}
        return cls(
            **{name: value for name, value in raw.items() if name in known},
            extra={name: value for name, value in raw.items() if name not in known and IDENTITY.get(name) != value},
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "BerryLMConfig":
        """Read ``folder``/config.json."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"BerryLMConfig: folder: expected a config.json in it, got {str(folder)!r}")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"BerryLMConfig: {path}: expected JSON, got {error}") from error
        if not isinstance(raw, dict):
            raise ValueError(f"BerryLMConfig: {path}: expected a JSON object, got {type(raw).__name__}")
        return cls.from_dict(raw)

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds: every field, and the unknown ones as they came."""
        out = {**IDENTITY, **self.extra}
        out.update({f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"})
        out["layer_types"], out["rope_parameters"] = list(self.layer_types), dict(self.rope_parameters)
        return out

    def with_dtype(self, dtype: str) -> "BerryLMConfig":
        """The same model stored in ``dtype``."""
        return replace(self, dtype=dtype)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``folder``/config.json; it appears whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json.partial").write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")
        os.replace(folder / "config.json.partial", folder / "config.json")


def is_number(value: Any) -> bool:
    """A finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def refuse(name: str, expected: str, got: Any) -> None:
    raise ValueError(f"BerryLMConfig: {name}: expected {expected}, got {got!r}")
