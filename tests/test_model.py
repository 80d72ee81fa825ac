"""The model's switches against a second, plain implementation; its gradients; and what it refuses."""

import logging

import pytest
import torch
from helpers import assert_close, randomise, rel_l2, tiny_config
from plain_model import plain_model

from berrylm_ref import BerryLM, BerryLMConfig
from berrylm_ref.backend import TORCH
from berrylm_ref.cache.batch import Batch, Caches, Sequence

LINEAR, FULL = "linear_attention", "full_attention"
VARIANTS = {
    "default": {},
    "no mixer": {"attn_res_block_size": 0},
    "block of 1": {"attn_res_block_size": 1},
    "block longer than the model": {"attn_res_block_size": 9},
    "ungated mixer": {"attn_res_gated": False},
    "ungated mixer, block of 1, its own eps": {"attn_res_gated": False, "attn_res_block_size": 1, "attn_res_eps": 0.3},
    "safe gate": {"kda_safe_gate": True, "kda_gate_lower_bound": -0.7},
    "a bound that is not switched on": {"kda_gate_lower_bound": -0.7},
    "attention bias": {"attention_bias": True},
    "no output gate": {"attn_output_gate": False},
    "no output gate, bias": {"attn_output_gate": False, "attention_bias": True},
    "tied head": {"tie_word_embeddings": True},
    "weights not renormalised": {"norm_topk_prob": False},
    "every expert": {"num_experts_per_tok": 5},
    "one expert": {"num_experts_per_tok": 1},
    "no grouping": {"num_key_value_heads": 4, "linear_num_key_heads": 4},
    "one key head": {"num_key_value_heads": 1, "linear_num_key_heads": 1},
    "conv of 2": {"linear_conv_kernel_dim": 2},
    "conv of 5": {"linear_conv_kernel_dim": 5},
    "all channels rotated": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "linear only": {"layer_types": [LINEAR] * 4},
    "full only": {"layer_types": [FULL] * 4},
    "full first": {"layer_types": [FULL, LINEAR, LINEAR, FULL]},
    "large eps": {"rms_norm_eps": 0.1},
}


def prompt(*shape, seed=0):
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model():
    return randomise(BerryLM(tiny_config()), seed=0)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_switch_against_the_plain_model(variant):
    """In fp64, 70 tokens, more than a chunk: logits and each layer's stream; then cached, in two calls and single steps."""
    config = tiny_config(**variant)
    model = randomise(BerryLM(config, dtype="float64"), seed=0)
    ids = prompt(1, 70)
    logits, streams = plain_model(config, model.state_dict(), ids[0].tolist())
    out = model(ids, return_hidden_states=True)
    for i, (x, ref) in enumerate(zip(out.hidden_states, streams, strict=True)):
        assert_close(f"layer {i}", x[0], ref, 1e-13)
    assert_close("logits", out.logits[0], logits, 1e-13)
    caches = Caches.allocate(config, pages=5, page_size=16, slots=1, dtype=model.dtype, device="cpu")
    rows, begin = [], 0
    for end in (37, 66, 67, 68, 69, 70):
        part = Sequence(ids[0, begin:end].tolist(), begin, [1, 2, 3, 4, 5], 1, all_logits=True)
        rows.append(model.run(Batch.build([part], caches))[0])
        begin = end
    assert_close("cached", torch.cat(rows), logits, 1e-13)


@torch.no_grad()
@pytest.mark.parametrize("variant", [v for v in VARIANTS.values() if v and "kda_gate_lower_bound" not in v],
                         ids=[n for n, v in VARIANTS.items() if v and "kda_gate_lower_bound" not in v])  # fmt: skip
def test_every_switch_has_an_effect(variant):
    """A switch that is read nowhere would pass the comparison above if the plain model forgot it, too."""
    default = randomise(BerryLM(tiny_config()), seed=0)
    changed = BerryLM(tiny_config(**variant))
    source, shared = default.state_dict(), changed.state_dict()
    changed = randomise(changed, seed=0)
    fits = {n: source[n] for n, x in shared.items() if n in source and source[n].shape == x.shape}
    changed.load_state_dict(fits, strict=False)  # as alike as the shapes allow
    assert rel_l2(changed(prompt(1, 70)), default(prompt(1, 70))) > 1e-3


@torch.no_grad()
def test_the_safe_gate_is_off_unless_switched_on():
    """A bound alone is a number in the file; with kda_safe_gate it is a hard floor on the decay."""
    models = [
        randomise(BerryLM(tiny_config(**x)), seed=0)(prompt(1, 70))
        for x in ({}, {"kda_gate_lower_bound": -0.7}, {"kda_gate_lower_bound": -0.7, "kda_safe_gate": True})
    ]
    assert torch.equal(models[0], models[1])
    assert rel_l2(models[2], models[0]) > 1e-2
    lowest = randomise(BerryLM(tiny_config(kda_safe_gate=True, kda_gate_lower_bound=-1e30)), seed=0)
    assert torch.equal(lowest(prompt(1, 70)), models[0])  # a floor that nothing reaches


def test_no_mixer_has_no_mixer_parameters():
    """attn_res_block_size 0: nothing to train, nothing to save, nothing computed."""
    names = set(BerryLM(tiny_config(attn_res_block_size=0)).state_dict())
    assert not any("attn_res" in n for n in names)
    with_mixer = set(BerryLM(tiny_config()).state_dict())
    added = {f"model.layers.{i}.attn_res.{p}" for i in range(4) for p in ("pseudo_query", "gate")}
    assert with_mixer == names | added


@torch.no_grad()
def test_a_fresh_mixer_is_the_identity():
    """gate 0 leaves the stream exactly as it was, so a fresh model with mixers equals the one without."""
    plain = randomise(BerryLM(tiny_config(attn_res_block_size=0)), seed=0)
    mixed = BerryLM(tiny_config())
    missing, unexpected = mixed.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all("attn_res" in n for n in missing)
    assert torch.equal(mixed(prompt(2, 30)), plain(prompt(2, 30)))


def test_parameter_counts_of_the_released_size():
    """18.29B in all; 738.2M embeddings and head; MoE 406.06M, KDA 34.44M, attention 27.26M a layer."""
    model = BerryLM(BerryLMConfig(), device="meta")

    def millions(part):
        return sum(p.numel() for p in part.parameters()) / 1e6

    assert millions(model.model.embed_tokens) + millions(model.lm_head) == pytest.approx(738.2, abs=0.05)
    for layer in model.model.layers:
        assert millions(layer.mlp) == pytest.approx(406.06, abs=0.005)
        mixer = layer.linear_attn if layer.is_linear else layer.self_attn
        assert millions(mixer) == pytest.approx(34.44 if layer.is_linear else 27.26, abs=0.01)
    assert millions(model) == pytest.approx(18290, abs=10)


def test_gradients_reach_every_parameter():
    """Two sequences of more than a chunk: a directional finite difference in fp64, and no parameter left out.

    The first layer's mixer alone has none: the embeddings stand twice among its sources, so every mix of them is the same.
    """
    model = randomise(BerryLM(tiny_config(), dtype="float64"), seed=0)
    ids, weight = prompt(2, 70), torch.randn(2, 70, 97, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss():
        return (model(ids) * weight).sum() / 100

    loss().backward()
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-10}
    assert without == {"model.layers.0.attn_res.pseudo_query", "model.layers.0.attn_res.gate"}
    generator, step = torch.Generator().manual_seed(2), 1e-6
    for kind in ("", "A_log", "dt_bias", "conv1d", "attn_res", "q_norm", "mlp.gate.", "experts", "embed"):
        chosen = [p for n, p in model.named_parameters() if kind in n]
        way = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in chosen]
        expected = sum((p.grad * d).sum() for p, d in zip(chosen, way, strict=True))
        with torch.no_grad():
            ends = []
            for sign in (1, -2):
                for p, d in zip(chosen, way, strict=True):
                    p.add_(sign * step * d)
                ends.append(loss())
            for p, d in zip(chosen, way, strict=True):
                p.add_(step * d)
        assert_close(f"gradient along {kind or 'all'}", (ends[0] - ends[1]) / (2 * step), expected, 1e-5)


@torch.no_grad()
def test_the_clamped_form_runs_where_it_is_asked_for():
    """kda_intra, one name for all or one a linear layer: each layer's choice changes exactly what comes after it."""
    model = randomise(BerryLM(tiny_config()), seed=0)
    for layer in model.model.layers:
        if layer.is_linear:
            layer.linear_attn.dt_bias += 4  # hard enough for the clamp to show
    ids = prompt(1, 150)
    right = model(ids, return_hidden_states=True)
    for intra, wrong in (("difference", []), (["dyadic", "difference"], []), ("clamped", [0, 2]), ("sglang", [0, 2]),
                         (["clamped", "dyadic"], [0]), (["dyadic", "sglang"], [2])):  # fmt: skip
        model.set_kda_intra(intra)
        streams = model(ids, return_hidden_states=True).hidden_states
        for i, (x, ref) in enumerate(zip(streams, right.hidden_states, strict=True)):
            error = rel_l2(x, ref)
            if wrong and i >= wrong[0]:
                assert error > 1e-3, (intra, i, error)
            else:
                assert error < 2e-6, (intra, i, error)
    named = BerryLM(tiny_config(), kda_intra=["clamped", "dyadic"])
    assert [layer.linear_attn.intra for layer in named.model.layers if layer.is_linear] == ["clamped", "dyadic"]


def test_outputs(model):
    """[B, T, V] in the model dtype; with hidden states one [B, T, D] a layer; an empty batch is no error."""
    for shape in ((2, 5), (1, 1), (3, 0), (0, 4)):
        out = model(prompt(*shape), return_hidden_states=True)
        assert out.logits.shape == (*shape, 97) and len(out.hidden_states) == 4
        assert all(h.shape == (*shape, 32) for h in out.hidden_states)
        assert torch.equal(model(prompt(*shape)), out.logits)
    half = BerryLM(tiny_config(), dtype=torch.bfloat16)
    assert half(prompt(1, 3)).dtype == half.dtype == torch.bfloat16
    assert half.model.layers[0].linear_attn.A_log.dtype == torch.float32


def test_the_longest_input_is_accepted():
    model = BerryLM(tiny_config(max_position_embeddings=70))
    with torch.no_grad():
        assert model(prompt(1, 70)).shape == (1, 70, 97)
    with pytest.raises(ValueError, match="input_ids: expected at most 70 tokens, got 71"):
        model(prompt(1, 71))


@pytest.mark.parametrize(
    "ids, message",
    [
        (torch.tensor([[0, 97]]), r"expected ids in 0 .. 96, got 0 .. 97"),
        (torch.tensor([[-1, 5]]), r"expected ids in 0 .. 96, got -1 .. 5"),
        (torch.tensor([1, 2]), r"expected an int64 tensor \[B, T\], got \(2,\) torch.int64"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), r"expected an int64 tensor \[B, T\], got \(1, 2, 3\)"),
        (torch.tensor([[1, 2]], dtype=torch.int32), r"expected an int64 tensor \[B, T\], got \(1, 2\) torch.int32"),
        (torch.tensor([[1.0, 2.0]]), r"expected an int64 tensor \[B, T\], got \(1, 2\) torch.float32"),
        (torch.tensor([[True]]), r"expected an int64 tensor \[B, T\], got \(1, 1\) torch.bool"),
        ([[1, 2]], r"expected an int64 tensor \[B, T\], got \[\[1, 2\]\]"),
        (torch.zeros(1, 4097, dtype=torch.int64), r"expected at most 4096 tokens, got 4097"),
    ],
)
def test_refused_ids(model, ids, message):
    """CKPT-3: an id beyond the embedding rows must not read other memory."""
    with pytest.raises(ValueError, match=f"^BerryLM: input_ids: {message}"):
        model(ids)


OPTIONS = {
    "fp16": ({"dtype": torch.float16}, "dtype: expected one of .*'float32'.*, got torch.float16"),
    "a name of no dtype": ({"dtype": "float8"}, "dtype: expected one of .*'bfloat16', 'float32', 'float64'.*, got 'float8'"),
    "no dtype": ({"dtype": None}, "dtype: expected one of .*, got None"),
    "an unknown backend": ({"backend": "cuda"}, "backend.*: expected .*'torch'.*, got 'cuda'"),
    "no backend": ({"backend": None}, "backend.*: expected .*'torch'.*, got None"),
    "an unknown form": ({"kda_intra": "fused"}, r"BerryLM: kda_intra: expected one of .*'dyadic'.*, got 'fused'"),
    "too many forms": ({"kda_intra": ["dyadic"] * 9}, "BerryLM: kda_intra: expected 3 names, one a linear layer, got 9"),
    "no forms": ({"kda_intra": []}, "BerryLM: kda_intra: expected 3 names, one a linear layer, got 0"),
    "an unknown form among others": ({"kda_intra": ["dyadic", "x", "dyadic"]}, "BerryLM: kda_intra: expected one of .*got 'x'"),
}


@pytest.mark.parametrize("option, message", OPTIONS.values(), ids=OPTIONS)
def test_refused_options(golden, option, message):
    """The same words from the constructor and from a load; what was asked for runs, or an error says why not."""
    folder = golden / "hf-odd"
    with pytest.raises(ValueError, match=message):
        BerryLM(BerryLMConfig.from_pretrained(folder), **option)
    with pytest.raises(ValueError, match=message):
        BerryLM.from_pretrained(folder, **option)


def test_a_refused_choice_changes_nothing(model):
    before = [layer.linear_attn.intra for layer in model.model.layers if layer.is_linear]
    with pytest.raises(ValueError, match="kda_intra"):
        model.set_kda_intra(["difference", "fused"])
    assert [layer.linear_attn.intra for layer in model.model.layers if layer.is_linear] == before


def test_no_folder_and_no_config(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match="expected a config.json in it, got"):
            BerryLM.from_pretrained(folder)


def test_auto_says_what_it_chose(caplog):
    with caplog.at_level(logging.INFO, "berrylm_ref.backend"):
        model = BerryLM(tiny_config(), backend="auto")
    assert f"{model.backend.name} on cpu" in caplog.text
    assert BerryLM(tiny_config(), backend="torch").backend is TORCH
