"""The configuration: every field checked once, older spellings read, unknown fields carried along."""

import dataclasses
import json

import pytest
from helpers import tiny_config

from berrylm_ref import BerryLMConfig

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LINEAR, FULL = "linear_attention", "full_attention"

POSITIVE = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "full_attention_interval", "linear_key_head_dim", "linear_value_head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "kda_gate_bottleneck", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size",
]  # fmt: skip
SWITCHES = [
    "attention_bias", "attn_output_gate", "kda_safe_gate", "norm_topk_prob", "attn_res_gated", "tie_word_embeddings",
]  # fmt: skip
# field (as the error names it), the arguments, what is expected, what came
REFUSED = [
    *((f, {f: 0}, "1 or more", "0") for f in POSITIVE),
    *((f, {f: -4}, "1 or more", "-4") for f in POSITIVE),
    *((f, {f: 8.0}, "an integer", "8.0") for f in POSITIVE),
    *((f, {f: True}, "an integer", "True") for f in POSITIVE),
    *((f, {f: None}, "an integer", "None") for f in POSITIVE),
    *((f, {f: "8"}, "an integer", "'8'") for f in POSITIVE),
    *((f, {f: 1}, "true or false", "1") for f in SWITCHES),
    *((f, {f: None}, "true or false", "None") for f in SWITCHES),
    *((f, {f: "false"}, "true or false", "'false'") for f in SWITCHES),
    *((f, {f: 0.0}, "a number between 0 and 1", "0.0") for f in ("rms_norm_eps", "attn_res_eps")),
    *((f, {f: -1e-6}, "a number between 0 and 1", "-1e-06") for f in ("rms_norm_eps", "attn_res_eps")),
    *((f, {f: 1}, "a number between 0 and 1", "1") for f in ("rms_norm_eps", "attn_res_eps")),
    *((f, {f: float("nan")}, "a finite number", "nan") for f in ("rms_norm_eps", "attn_res_eps")),
    *((f, {f: "1e-6"}, "a finite number", "'1e-6'") for f in ("rms_norm_eps", "attn_res_eps")),
    ("hidden_act", {"hidden_act": "gelu"}, "'silu'", "'gelu'"),
    ("hidden_act", {"hidden_act": None}, "a string", "None"),
    ("dtype", {"dtype": 16}, "a string", "16"),
    ("attn_res_block_size", {"attn_res_block_size": -1}, "0 or more", "-1"),
    ("attn_res_block_size", {"attn_res_block_size": False}, "an integer", "False"),
    ("linear_conv_kernel_dim", {"linear_conv_kernel_dim": 1}, "2 or more", "1"),  # no window to carry between calls
    ("linear_num_value_heads", {"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads = 2", "3"),
    ("num_attention_heads", {"num_attention_heads": 3}, "a multiple of num_key_value_heads = 2", "3"),
    ("num_experts_per_tok", {"num_experts_per_tok": 6}, "at most num_experts = 5", "6"),
    ("layer_types", {"layer_types": [LINEAR, FULL, LINEAR, "mamba"]}, "only 'linear_attention' and 'full_", "'mamba'"),
    ("layer_types", {"layer_types": [LINEAR, FULL, LINEAR, None]}, "only 'linear_attention' and 'full_", "None"),
    ("layer_types", {"layer_types": [LINEAR] * 3}, "num_hidden_layers = 4 entries", "3"),
    ("layer_types", {"layer_types": []}, "num_hidden_layers = 4 entries", "0"),
    ("layer_types", {"layer_types": LINEAR}, "a list", "'linear_attention'"),
    ("kda_gate_lower_bound", {"kda_safe_gate": True}, "a negative number with kda_safe_gate", "None"),
    ("kda_gate_lower_bound", {"kda_safe_gate": True, "kda_gate_lower_bound": 0.0}, "a negative number", "0.0"),
    ("kda_gate_lower_bound", {"kda_gate_lower_bound": 5}, "a negative number", "5"),
    ("kda_gate_lower_bound", {"kda_gate_lower_bound": float("nan")}, "a finite number", "nan"),
    ("kda_gate_lower_bound", {"kda_gate_lower_bound": float("-inf")}, "a finite number", "-inf"),
    ("kda_gate_lower_bound", {"kda_gate_lower_bound": True}, "a finite number", "True"),
    ("eos_token_id", {"eos_token_id": "</s>"}, "a token id or a list of them", "'</s>'"),
    ("eos_token_id", {"eos_token_id": [1, "</s>"]}, "a token id or a list of them", "[1, '</s>']"),
    ("eos_token_id", {"eos_token_id": [True]}, "a token id or a list of them", "[True]"),
    ("bos_token_id", {"bos_token_id": 1.5}, "an integer", "1.5"),
    ("pad_token_id", {"pad_token_id": [0]}, "an integer", "[0]"),
    ("rope_parameters", {"rope_parameters": None}, "a mapping", "None"),
    ("rope_parameters", {"rope_parameters": [1e4]}, "a mapping", "[10000.0]"),
    ("rope_parameters.rope_type", {"rope_parameters": {**ROPE, "rope_type": "yarn"}}, "'default'", "'yarn'"),
    ("rope_parameters.rope_theta", {"rope_parameters": {**ROPE, "rope_theta": 0}}, "a positive number", "0"),
    ("rope_parameters.rope_theta", {"rope_parameters": {**ROPE, "rope_theta": None}}, "a positive number", "None"),
    ("rope_parameters.rope_theta", {"rope_parameters": {**ROPE, "rope_theta": True}}, "a positive number", "True"),
    ("rope_parameters.rope_theta", {"rope_parameters": {**ROPE, "rope_theta": float("inf")}}, "a positive", "inf"),
    *(
        ("rope_parameters.partial_rotary_factor", {"rope_parameters": {**ROPE, "partial_rotary_factor": x}}, "in (0, 1]", repr(x))
        for x in (0, 1.01, -0.5, None, "0.5", True, float("nan"))
    ),
    (
        "rope_parameters.partial_rotary_factor",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.2}},
        "an even number of rotated channels",
        "3",
    ),
    ("rope_parameters.partial_rotary_factor", {"head_dim": 1}, "an even number of rotated channels", "0"),
    ("extra", {"extra": ["use_cache"]}, "a mapping", "['use_cache']"),
]  # fmt: skip


@pytest.mark.parametrize("field, change, expected, got", REFUSED, ids=[f"{f} = {g}" for f, _, _, g in REFUSED])
def test_a_refused_value_is_named(field, change, expected, got):
    """The error says which field, what was expected and what came, whichever way the value arrives."""
    with pytest.raises(ValueError) as error:
        tiny_config(**change)
    message = str(error.value)
    assert message.startswith(f"BerryLMConfig: {field}: expected ") and message.endswith(f", got {got}"), message
    assert expected in message
    if "rope_parameters" not in change and "extra" not in change:
        with pytest.raises(ValueError, match=f"^BerryLMConfig: {field}: "):
            BerryLMConfig.from_dict({**tiny_config().to_dict(), "layer_types": None, **change})


def test_every_integer_and_switch_is_in_the_table():
    """A new field without a check would slip through: the tables above follow the dataclass."""
    by_default = {f.name: f.default for f in dataclasses.fields(BerryLMConfig)}
    integers = {n for n, x in by_default.items() if isinstance(x, int) and not isinstance(x, bool)}
    assert integers - {"attn_res_block_size", "linear_conv_kernel_dim"} == set(POSITIVE)
    assert {n for n, x in by_default.items() if isinstance(x, bool)} == set(SWITCHES)


def test_defaults_are_the_official_18b_model():
    """The released model's config.json holds these; a field it leaves out must not change its meaning."""
    c = BerryLMConfig()
    assert (c.vocab_size, c.hidden_size, c.num_hidden_layers, c.max_position_embeddings) == (180224, 2048, 40, 262144)
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rotary_dim, c.rope_theta) == (16, 2, 256, 64, 1e7)
    assert (c.linear_num_key_heads, c.linear_num_value_heads) == (16, 32)
    assert (c.linear_key_head_dim, c.linear_value_head_dim) == (128, 128)
    assert (c.conv_dim, c.linear_conv_kernel_dim, c.kda_gate_bottleneck) == (8192, 4, 128)
    assert (c.num_experts, c.num_experts_per_tok) == (128, 8)
    assert (c.moe_intermediate_size, c.shared_expert_intermediate_size) == (512, 512)
    assert (c.attn_res_block_size, c.attn_res_gated, c.attn_res_eps, c.rms_norm_eps) == (8, True, 1e-6, 1e-6)
    assert (c.norm_topk_prob, c.attn_output_gate, c.attention_bias, c.tie_word_embeddings) == (True, True, False, False)
    assert (c.kda_safe_gate, c.kda_gate_lower_bound, c.hidden_act, c.attn_res_commits) == (False, None, "silu", 6)
    assert len(c.linear_layers) == 30 and len(c.full_layers) == 10


@pytest.mark.parametrize("interval, full", [(4, [3, 7]), (3, [2, 5, 8]), (1, list(range(9))), (9, [8]), (10, [])])
def test_null_layer_types_follow_the_interval(interval, full):
    """(i + 1) % interval == 0 is full attention: counted from one, not from zero."""
    for layer_types in ({}, {"layer_types": None}):
        c = BerryLMConfig(num_hidden_layers=9, full_attention_interval=interval, **layer_types)
        assert c.full_layers == full
        assert c.linear_layers == [i for i in range(9) if i not in full]
        assert c.layer_types == tuple(FULL if i in full else LINEAR for i in range(9))


def test_explicit_layer_types_win_over_the_interval():
    c = tiny_config(layer_types=[FULL, LINEAR, LINEAR, FULL], full_attention_interval=2)
    assert c.full_layers == [0, 3] and c.linear_layers == [1, 2]


@pytest.mark.parametrize("size, commits", [(0, 1), (1, 5), (2, 3), (3, 2), (4, 2), (5, 1)])
def test_committed_streams(size, commits):
    """The embeddings are block 0; a block that the last layer does not finish is not committed."""
    assert tiny_config(attn_res_block_size=size).attn_res_commits == commits


DEFAULTS = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    "raw, changed",
    [
        ({}, {}),
        ({"rope_parameters": None}, {}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 5e5}},
            {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        ),
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),  # the newest spelling wins
        ({"rope_scaling": {"rope_theta": 1.0}, "rope_theta": 5e5}, {"rope_theta": 5e5}),
    ],
)
def test_rope_spellings_old_and_new(raw, changed):
    c = BerryLMConfig.from_dict(raw)
    assert c.rope_parameters == {**DEFAULTS, **changed}
    assert c.extra == {}  # none of the spellings is taken for an unknown field
    assert BerryLMConfig.from_dict(c.to_dict()) == c


@pytest.mark.parametrize(
    "raw, message",
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type: expected 'default', got 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_parameters.rope_type: expected 'default', got 'linear'"),
        ({"rope_scaling": "linear"}, "rope_parameters: expected a mapping, got 'linear'"),
        ({"rope_theta": None}, "rope_parameters.rope_theta: expected a positive number, got None"),
        ({"partial_rotary_factor": 2}, r"rope_parameters.partial_rotary_factor: expected a number in \(0, 1\], got 2"),
        ({"model_type": "llama"}, "model_type: expected 'berrylm', got 'llama'"),
    ],
)
def test_refused_files(raw, message):
    with pytest.raises(ValueError, match=f"BerryLMConfig: {message}"):
        BerryLMConfig.from_dict(raw)


def test_torch_dtype_is_the_older_name_of_dtype():
    assert BerryLMConfig.from_dict({"torch_dtype": "bfloat16"}).dtype == "bfloat16"
    c = BerryLMConfig.from_dict({"torch_dtype": "bfloat16", "dtype": "float32"})
    assert c.dtype == "float32" and "torch_dtype" not in c.to_dict()


@pytest.mark.parametrize("eos, ids", [(None, ()), (0, (0,)), (7, (7,)), ([7, 9], (7, 9)), ([], ())])
def test_ckpt_3_end_ids_are_one_or_several(eos, ids):
    """CKPT-3: eos_token_id may be a list; token 0 is an id like any other, not "unset"."""
    c = tiny_config(eos_token_id=eos)
    assert c.eos_token_ids == ids
    assert BerryLMConfig.from_dict(c.to_dict()).eos_token_ids == ids


def test_round_trip_keeps_unknown_fields(tmp_path):
    """Fields of a later version come back as they were, at the top level, beside ours."""
    unknown = {"router_aux_loss_coef": 0.001, "use_cache": True, "future": {"a": [1, None]}, "extra": 3}
    c = BerryLMConfig.from_dict({**tiny_config(eos_token_id=[1, 2], dtype="bfloat16").to_dict(), **unknown})
    c.save_pretrained(tmp_path / "new" / "folder")
    written = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    assert {n: written[n] for n in unknown} == unknown
    assert written["model_type"] == "berrylm" and written["architectures"] == ["BerryLMForCausalLM"]
    assert written["layer_types"] == [LINEAR, FULL, LINEAR, FULL]
    assert BerryLMConfig.from_pretrained(tmp_path / "new" / "folder") == c
    assert [p.name for p in (tmp_path / "new" / "folder").iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", ["hf-tiny-default", "hf-odd", "hf-odd/sharded"])
def test_official_files_round_trip(golden, tmp_path, name):
    """What the official save_pretrained wrote comes back field by field, with our own fields added at their defaults."""
    official = json.loads((golden / name / "config.json").read_text())
    c = BerryLMConfig.from_pretrained(golden / name)
    c.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {n: written[n] for n in official} == official
    added = set(written) - set(official)
    assert all(written[n] == getattr(BerryLMConfig(), n) for n in added), added


def test_nothing_changes_afterwards():
    """Frozen; and neither the caller's mapping nor what to_dict handed out reaches back into it."""
    rope = dict(ROPE)
    c = tiny_config(rope_parameters=rope)
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.hidden_size = 8
    rope["rope_theta"] = 1.0
    c.to_dict()["rope_parameters"]["rope_theta"] = 2.0
    assert c.rope_theta == 1e4


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "folder: expected a config.json in it, got"),
        ("{", "config.json: expected JSON, got"),
        ("[]", "config.json: expected a JSON object, got list"),
        (b"\xff\xfe\x00", "config.json: expected JSON, got"),
    ],
)
def test_unreadable_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        BerryLMConfig.from_pretrained(tmp_path)
