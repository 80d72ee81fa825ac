"""Loading a checkpoint: damage is named before any weight is used, round trips are exact, what must stay fp32 stays."""

import json
import math
import struct

import pytest
import torch
from helpers import randomise, tiny_config
from safetensors.torch import load_file, save_file

from berrylm_ref import BerryLM, weights
from berrylm_ref.weights import INDEX, SINGLE

KEEP_FP32 = ("A_log", "dt_bias")


@pytest.fixture(scope="module")
def model():
    return randomise(BerryLM(tiny_config()), seed=0).eval()


@pytest.fixture
def folder(model, tmp_path):
    """A single-file checkpoint."""
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    return tmp_path


def same(a, b):
    """Bit for bit, names and dtypes included."""
    a, b = a.state_dict(), b.state_dict()
    return list(a) == list(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def edit(folder, change):
    """Rewrite model.safetensors after ``change`` altered its dictionary of tensors."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refused(folder, *messages):
    with pytest.raises(ValueError) as error:
        BerryLM.from_pretrained(folder)
    for message in messages:
        assert message in str(error.value), str(error.value)
    return str(error.value)


DAMAGE = {
    "cut by one byte": lambda b: b[:-1],
    "cut to 4 bytes": lambda b: b[:4],
    "empty": lambda b: b"",
    "one byte appended": lambda b: b + b"\0",
    "header length 2^40": lambda b: struct.pack("<Q", 2**40) + b[8:],
    "header length 2^63": lambda b: struct.pack("<Q", 2**63) + b[8:],
    "header length 0": lambda b: struct.pack("<Q", 0) + b[8:],
    "header not JSON": lambda b: b[:8] + b"}" + b[9:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_ckpt_1_a_damaged_file_is_named(folder, damage):
    """CKPT-1: an obscure header error, or 2^40 bytes allocated for a bad header."""
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(damage(whole))
    refused(folder, str(folder / SINGLE), "expected a whole safetensors file, got ")


@pytest.mark.parametrize("damage", ["cut by one byte", "cut to 4 bytes", "header length 2^40"])
def test_ckpt_1_a_damaged_shard_is_named(sharded, damage):
    shard = sorted(sharded.glob("model-*-of-*.safetensors"))[1]
    shard.write_bytes(DAMAGE[damage](shard.read_bytes()))
    refused(sharded, str(shard), "expected a whole safetensors file, got ")


GATE_UP = "model.layers.2.mlp.experts.gate_up_proj"
MISFITS = {
    "a missing tensor": (lambda t: t.pop("model.norm.weight"), "model.norm.weight: missing from the checkpoint"),
    "a missing scalar": (
        lambda t: t.pop("model.layers.1.attn_res.gate"),
        "model.layers.1.attn_res.gate: missing from the checkpoint",
    ),
    "an unknown tensor": (lambda t: t.update({"model.extra": torch.ones(2)}), "model.extra: nothing in the model wants it"),
    "an unknown layer": (
        lambda t: t.update({"model.layers.4.input_layernorm.weight": torch.ones(32)}),
        "model.layers.4.input_layernorm.weight: nothing in the model wants it",
    ),
    "a wrong shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(31)}),
        "model.norm.weight: expected shape (32,), got (31,) in model.safetensors",
    ),
    "a flat conv weight": (
        lambda t: t.update({"model.layers.0.linear_attn.conv1d.weight": torch.ones(80, 4)}),
        "model.layers.0.linear_attn.conv1d.weight: expected shape (80, 1, 4), got (80, 4) in",
    ),
    "a scalar with a dimension": (
        lambda t: t.update({"model.layers.1.attn_res.gate": torch.ones(1)}),
        "model.layers.1.attn_res.gate: expected shape (), got (1,) in",
    ),
    "one expert more": (
        lambda t: t.update({GATE_UP: torch.ones(6, 20, 32)}),
        f"{GATE_UP}: expected shape (5, 20, 32), got (6, 20, 32) in",
    ),
    "integers": (
        lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}),
        "model.norm.weight: expected a float dtype, got I32 in model.safetensors",
    ),
    "8-bit floats": (
        lambda t: t.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}),
        "model.norm.weight: expected a float dtype, got F8_E4M3 in model.safetensors",
    ),
}


@pytest.mark.parametrize("change, message", MISFITS.values(), ids=MISFITS)
def test_ckpt_1_a_tensor_that_does_not_fit_is_named(folder, change, message):
    """CKPT-1: the model started with uninitialised weights. One fault is reported once, and only it."""
    edit(folder, change)
    assert ";" not in refused(folder, "checkpoint does not fit the configuration: " + message)


def test_ckpt_1_nothing_is_read_before_everything_fits(folder, monkeypatch):
    """CKPT-1: the refusal comes before memory is taken for weights, and no tensor is copied."""
    edit(folder, lambda t: t.pop("model.norm.weight"))
    monkeypatch.setattr(BerryLM, "to_empty", lambda *a, **k: pytest.fail("weights were allocated"))
    monkeypatch.setattr(weights, "load", lambda *a: pytest.fail("weights were read"))
    refused(folder, "model.norm.weight: missing")


def test_ckpt_1_all_faults_are_listed_the_first_twenty_by_name(folder):
    edit(folder, lambda t: (t.pop("model.norm.weight"), t.update({"odd": torch.ones(1)})))
    refused(folder, "odd: nothing in the model wants it; model.norm.weight: missing from the checkpoint")
    edit(folder, lambda t: t.update({f"odd.{i:02}": torch.ones(1) for i in range(30)}))
    refused(folder, "odd.18: nothing", "(and 12 more)")


def test_ckpt_1_other_float_dtypes_are_converted_on_purpose(model, folder):
    """CKPT-1: fp16, bf16 and fp64 tensors in one file load; values of theirs that fit are exact."""
    edit(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].double()}))
    edit(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].half()}))
    loaded = BerryLM.from_pretrained(folder)
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.half().float())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_rotary_frequencies_of_older_files_are_ignored(model, folder):
    edit(folder, lambda t: t.update({f"model.{p}rotary_emb.inv_freq": torch.ones(4) for p in ("", "layers.1.self_attn.")}))
    assert same(BerryLM.from_pretrained(folder), model)


def test_ckpt_1_a_shard_that_the_index_names_is_missing(sharded):
    """CKPT-1: it was dropped, and the model started with what memory held."""
    shard = sorted(sharded.glob("model-*-of-*.safetensors"))[2]
    shard.unlink()
    refused(sharded, INDEX, f"missing: {shard.name}")


def test_ckpt_1_a_stale_shard_beside_the_index_is_not_read(model, sharded):
    """The index says what belongs to the checkpoint: damaged or foreign files beside it don't matter."""
    (sharded / "model-00001-of-00002.safetensors").write_bytes(b"not a checkpoint")
    save_file({"odd": torch.ones(2)}, sharded / "model-00099-of-00099.safetensors")
    save_file({"odd": torch.ones(2)}, sharded / SINGLE)
    assert same(BerryLM.from_pretrained(sharded), model)


INDEX_FAULTS = {
    "a tensor in another shard": (
        lambda i: i["weight_map"].update({"lm_head.weight": i["weight_map"]["model.embed_tokens.weight"]}),
        "lm_head.weight: expected in model-",
    ),
    "a tensor that no shard holds": (
        lambda i: i["weight_map"].update({"odd": i["weight_map"]["model.norm.weight"]}),
        "expected odd in model-",
    ),
    "a tensor that it leaves out": (
        lambda i: i["weight_map"].pop("model.norm.weight"),
        "model.norm.weight: expected in no file by the index, got it here",
    ),
    "no map": (lambda i: i.pop("weight_map"), "expected a JSON object with a weight_map"),
    "a list": (lambda i: i.update({"weight_map": ["a"]}), "expected a JSON object with a weight_map"),
    "a number for a file": (lambda i: i.update({"weight_map": {"a": 1}}), "expected a JSON object with a weight_map"),
    "nothing for a file": (lambda i: i["weight_map"].update({"a": ""}), "expected the names of files beside it, got ''"),
    "a file elsewhere": (
        lambda i: i["weight_map"].update({"a": "../model.safetensors"}),
        "expected the names of files beside it, got '../model.safetensors'",
    ),
}


@pytest.mark.parametrize("change, message", INDEX_FAULTS.values(), ids=INDEX_FAULTS)
def test_ckpt_1_an_index_that_contradicts_its_shards(sharded, change, message):
    edit_json(sharded / INDEX, change)
    refused(sharded, str(sharded), message)


def test_ckpt_1_unreadable_index_or_no_checkpoint(sharded, tmp_path):
    (sharded / INDEX).write_text("{")
    refused(sharded, str(sharded / INDEX), "expected a JSON object with a weight_map")
    (sharded / INDEX).unlink()
    refused(sharded, f"expected {SINGLE} or {INDEX} in it, got {str(sharded)!r}")


def per_expert(tensors, layers=range(4), keep=False):
    """Stacked experts -> one tensor an expert and projection, as older exports have it."""
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up, down = tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"]
        if not keep:
            del tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"]
        for e in range(5):
            gate, up = gate_up[e].chunk(2)
            for kind, x in (("gate", gate), ("up", up), ("down", down[e])):
                tensors[f"{prefix}.{e}.{kind}_proj.weight"] = x.clone()


def test_per_expert_names_load(model, folder):
    """Gate rows before up rows, every expert in its place; layers may differ in how they are stored."""
    edit(folder, per_expert)
    assert same(BerryLM.from_pretrained(folder), model)
    model.save_pretrained(folder)
    edit(folder, lambda t: per_expert(t, layers=[1, 2]))
    assert same(BerryLM.from_pretrained(folder), model)


def test_per_expert_tensors_spread_over_shards(model, folder):
    """The pieces of one parameter may lie in different files."""
    tensors = load_file(folder / SINGLE)
    per_expert(tensors)
    files = {f"part-{i}.safetensors": {n: x for n, x in list(tensors.items())[i::3]} for i in range(3)}
    for name, part in files.items():
        save_file(part, folder / name)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {n: name for name, part in files.items() for n in part}}))
    assert same(BerryLM.from_pretrained(folder), model)


EXPERTS = "model.layers.2.mlp.experts"
EXPERT_FAULTS = {
    "one projection missing": (
        lambda t: (per_expert(t), t.pop(f"{EXPERTS}.3.up_proj.weight")),
        f"{EXPERTS}.3.up_proj.weight: missing from the checkpoint",
    ),
    "one expert more": (
        lambda t: (per_expert(t), t.update({f"{EXPERTS}.5.up_proj.weight": torch.ones(10, 32)})),
        f"{EXPERTS}.5.up_proj.weight: nothing in the model wants it",
    ),
    "an expert twice": (
        lambda t: (per_expert(t), t.update({f"{EXPERTS}.01.up_proj.weight": torch.ones(10, 32)})),
        f"{EXPERTS}.01.up_proj.weight: nothing in the model wants it",
    ),
    "a wrong shape": (
        lambda t: (per_expert(t), t.update({f"{EXPERTS}.1.up_proj.weight": torch.ones(20, 32)})),
        f"{EXPERTS}.1.up_proj.weight: expected shape (10, 32), got (20, 32) in",
    ),
    "whole and in pieces": (
        lambda t: t.update({f"{EXPERTS}.1.down_proj.weight": torch.ones(32, 10)}),
        f"{EXPERTS}.down_proj: expected once, got it whole and as {EXPERTS}.1.down_proj.weight",
    ),
}


@pytest.mark.parametrize("change, message", EXPERT_FAULTS.values(), ids=EXPERT_FAULTS)
def test_per_expert_faults_are_named(folder, change, message):
    """Pieces beside a whole tensor were once accepted in silence: which one won depended on the order in the file."""
    edit(folder, change)
    refused(folder, message)


def test_ckpt_3_tied_stays_one_tensor(tmp_path):
    """CKPT-3: a tied model saves no head, loads without one, and both uses are the same memory."""
    model = randomise(BerryLM(tiny_config(tie_word_embeddings=True)), seed=1)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / SINGLE)
    loaded = BerryLM.from_pretrained(tmp_path)
    assert same(loaded, model) and "lm_head.weight" not in loaded.state_dict()
    assert loaded.head is loaded.model.embed_tokens.weight
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids), model(ids))


def test_ckpt_3_a_tied_file_that_holds_a_head_as_well(tmp_path):
    """CKPT-3: a loader choked on it. The same values are accepted in any dtype, others are a contradiction."""
    model = randomise(BerryLM(tiny_config(tie_word_embeddings=True), dtype="bfloat16"), seed=1)
    model.save_pretrained(tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert same(BerryLM.from_pretrained(tmp_path, dtype="bfloat16"), model)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].float()}))
    assert same(BerryLM.from_pretrained(tmp_path, dtype="bfloat16"), model)
    edit(tmp_path, lambda t: t["lm_head.weight"][-1, -1].add_(1))
    refused(tmp_path, "lm_head.weight: expected the embedding with tie_word_embeddings, got other values")
    edit(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(96, 32)}))
    refused(tmp_path, "lm_head.weight: expected shape (97, 32), got (96, 32)")
    edit(tmp_path, lambda t: (t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")})))
    refused(tmp_path, "model.embed_tokens.weight: missing from the checkpoint")


def test_ckpt_3_an_untied_config_without_a_head_in_the_file(folder):
    """CKPT-3: a loader invented one."""
    edit(folder, lambda t: t.pop("lm_head.weight"))
    refused(folder, "lm_head.weight: missing from the checkpoint")


VARIANTS = {
    "default": {},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "no output gate": {"attn_output_gate": False},
    "no mixer": {"attn_res_block_size": 0},
    "ungated mixer": {"attn_res_gated": False},
    "safe gate": {"kda_safe_gate": True, "kda_gate_lower_bound": -5.0},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_save_then_load_is_bit_exact(tmp_path, variant, dtype):
    model = randomise(BerryLM(tiny_config(**variant), dtype=dtype), seed=2)
    for limit in ("2GB", "30KB"):
        model.save_pretrained(tmp_path, max_shard_size=limit)
        loaded = BerryLM.from_pretrained(tmp_path, dtype=dtype)
        assert same(loaded, model)
        assert loaded.config == model.config.with_dtype(dtype) and not loaded.training
    names = set(model.state_dict())
    assert ("model.layers.1.self_attn.q_proj.bias" in names) == (variant.get("attention_bias", False))
    assert any("attn_res" in n for n in names) == (variant.get("attn_res_block_size") != 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_loading_casts_to_the_dtype_asked_for(model, folder, dtype):
    """Not to the dtype of the file, and exactly as a cast of the tensor; decay rates in fp32 or better."""
    loaded = BerryLM.from_pretrained(folder, dtype=dtype)
    for name, p in loaded.named_parameters():
        stays = dtype == "bfloat16" and name.endswith(KEEP_FP32)
        assert p.dtype == (torch.float32 if stays else getattr(torch, dtype)), name
        assert torch.equal(p, model.get_parameter(name).to(p.dtype)), name


def decay_parameters(model):
    return {n: p.detach() for n, p in model.named_parameters() if n.endswith(KEEP_FP32)}


def test_ckpt_2_decay_rates_stay_fp32_after_a_load_in_bf16(tmp_path):
    """CKPT-2: ln 12.3 rounded to bf16 moves the decay rate by 0.6 %, and the error compounds over the tokens."""
    model = randomise(BerryLM(tiny_config()), seed=0)
    with torch.no_grad():
        model.model.layers[0].linear_attn.A_log.fill_(math.log(12.3))
    assert model.model.layers[0].linear_attn.A_log[0] != model.model.layers[0].linear_attn.A_log[0].bfloat16()
    model.save_pretrained(tmp_path)
    before = decay_parameters(model)
    for dtype in (torch.bfloat16, "bfloat16", torch.float32):
        loaded = decay_parameters(BerryLM.from_pretrained(tmp_path, dtype=dtype))
        assert all(loaded[n].dtype == torch.float32 and torch.equal(loaded[n], before[n]) for n in before)
    half = BerryLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "again")
    again = decay_parameters(BerryLM.from_pretrained(tmp_path / "again", dtype=torch.float32))
    assert all(torch.equal(again[n], before[n]) for n in before)  # a bf16 checkpoint stores them in fp32


CASTS = {
    ".to(bfloat16)": lambda m: m.to(torch.bfloat16),
    ".to('cpu', bfloat16)": lambda m: m.to("cpu", torch.bfloat16),
    ".bfloat16()": lambda m: m.bfloat16(),
    ".half()": lambda m: m.half(),
    ".bfloat16().half()": lambda m: m.bfloat16().half(),
    ".half().float()": lambda m: m.half().float(),
    ".double().bfloat16()": lambda m: m.double().bfloat16(),
    ".apply per module": lambda m: m.apply(lambda part: part.bfloat16()),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_ckpt_2_decay_rates_stay_fp32_after_a_blanket_cast(cast):
    """CKPT-2: whoever casts the whole model casts these as well, unless the module itself refuses."""
    model = randomise(BerryLM(tiny_config()), seed=0)
    before = {n: p.clone() for n, p in decay_parameters(model).items()}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in before.values())
    cast(model)
    after = decay_parameters(model)
    assert all(after[n].dtype == torch.float32 and torch.equal(after[n], before[n]) for n in before)
    assert model.model.norm.weight.dtype != torch.float32 or cast is CASTS[".half().float()"]
    assert all(p.requires_grad for p in model.parameters())


def test_ckpt_2_double_keeps_its_precision():
    model = randomise(BerryLM(tiny_config(), dtype="float64"), seed=0)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
