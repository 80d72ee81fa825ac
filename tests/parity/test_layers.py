"""Two sides in lockstep: a planted fault of each kind is flagged, and located to its layer and op; right sides pass."""

import inspect
import json
import random
import sys
import textwrap
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from berrylm_ref import BerryLM
from berrylm_ref import model as model_file
from berrylm_ref.backend import REGISTRY, TORCH
from berrylm_ref.cli import app
from berrylm_ref.parity import fla_backend
from berrylm_ref.parity.growth import drift, error_growth, one_rounding_moved
from berrylm_ref.parity.layers import compare_layers
from berrylm_ref.parity.layers_report import verdict
from berrylm_ref.parity.sides import Side, Sides

LINEAR, FULL = 2, 3  # the layers that faults are planted in: the last linear one of the first block, the first full one


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "hf-tiny-default"


@pytest.fixture(scope="module")
def sides(folder):
    return Sides(folder)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(5)
    return [[rng.randrange(128) for _ in range(n)] for n in (104, 33)]


def in_layer(model, layer, op, fault):
    """The torch backend whose ``op`` is ``fault`` while ``layer`` runs; and what takes the hooks off."""
    now = SimpleNamespace(layer=None)
    hooks = [m.register_forward_pre_hook(lambda *_, i=i: setattr(now, "layer", i)) for i, m in enumerate(model.model.layers)]
    right = getattr(TORCH, op)
    planted = replace(TORCH, name="planted", **{op: lambda *a, **k: fault(*a, **k) if now.layer == layer else right(*a, **k)})
    return planted, lambda: [hook.remove() for hook in hooks]


def judged(sides, prompts, op, layer, fault, trusted=torch.float64, dtype=torch.float32):
    """The report on a model that has ``fault`` in one op of one layer."""
    model = sides.model(dtype)
    backend, remove = in_layer(model, layer, op, fault)
    try:
        return compare_layers(sides, sides.plain(trusted), Side("planted", model, backend), prompts)
    finally:
        remove()


def assert_found(report, layer, op, what, also=frozenset()):
    print(verdict(report))
    assert not report.ok
    assert (report.found.layer, report.found.op) == (layer, op) and report.found.what.startswith(what)
    assert f"layer {layer}, {op}" in verdict(report)
    others = {(c.layer, c.op) for c in report.checks if c.over and (c.layer, c.op) != (layer, op)}
    assert others == also, f"in lockstep nothing else may look wrong: {others}"


def transposed_state(*args, **kwargs):
    o, state, *kept = TORCH.chunk_kda(*args, **kwargs)
    return o, state.transpose(-1, -2).contiguous(), *kept


def late_state(q, k, v, g, beta, *, cu_seqlens, **kwargs):
    """The output is right, the state handed on lacks every sequence's last token."""
    o, _, *kept = TORCH.chunk_kda(q, k, v, g, beta, cu_seqlens=cu_seqlens, **kwargs)
    last = (cu_seqlens[1:] - 1).tolist()
    g, beta = g.clone(), beta.clone()
    g[:, last] = beta[:, last] = -1e4  # neither forgets nor writes
    return o, TORCH.chunk_kda(q, k, v, g, beta, cu_seqlens=cu_seqlens, **kwargs)[1], *kept


def late_boundary_state(*args, state_boundaries=None, **kwargs):
    """Right in one go; what the prefix cache keeps is another token's."""
    found = TORCH.chunk_kda(*args, state_boundaries=state_boundaries, **kwargs)
    if state_boundaries is None:
        return found
    o, state, kept = found
    return o, state, kept * 1.01


def wrong_head_map(q, k, v, *rest, **kwargs):
    heads = [j % q.shape[2] for j in range(v.shape[2])]
    return TORCH.chunk_kda(q[:, :, heads], k[:, :, heads], v, *rest, **kwargs)


def coarse_beta(q, k, v, g, beta, *, use_beta_sigmoid_in_kernel, **kwargs):
    assert use_beta_sigmoid_in_kernel
    return TORCH.chunk_kda(q, k, v, g, beta.bfloat16().sigmoid().to(v.dtype), **kwargs)


def clamped(*args, intra, **kwargs):
    return TORCH.chunk_kda(*args, intra="clamped", **kwargs)


@pytest.mark.parametrize(
    "fault,what",
    [
        (clamped, "output o"), (transposed_state, "output final state"), (late_state, "output final state"),
        (late_boundary_state, "output boundary states"), (wrong_head_map, "output o"), (coarse_beta, "output o"),
    ],
)  # fmt: skip
def test_a_fault_in_the_chunk_kernel_is_found_there(sides, prompts, fault, what):
    """KRN: a wrong state looks like a right prefill, and beta in bf16 like rounding; both are found on the same inputs."""
    assert_found(judged(sides, prompts, "chunk_kda", LINEAR, fault), LINEAR, "chunk_kda", what)


def test_a_fault_that_only_decoding_has(sides, prompts):
    """Prefill and decode are two kernels: the second may be wrong alone, and only in what it remembers."""

    def wrong_step(*args, **kwargs):
        out = TORCH.kda_decode_step(*args, **kwargs)
        args[9][args[10].long()] *= 1.001
        return out

    report = judged(sides, prompts, "kda_decode_step", LINEAR, wrong_step)
    assert_found(report, LINEAR, "kda_decode_step", "output states")
    assert report.found.forward == 2, "the first single token"


def rolled(x, width):
    return x.roll(width, -1)


def rotary_on_the_wrong_half(q, k, q_weight, k_weight, eps, cos, sin, output_gate, append=None):
    """The last channels of every head are rotated in place of the first."""
    width, gate = cos.shape[-1], None
    if output_gate:
        q, gate = q.chunk(2, -1)
    q, k, _ = TORCH.qk_norm_rope(
        rolled(q, width), rolled(k, width), rolled(q_weight, width), rolled(k_weight, width), eps, cos, sin, False
    )
    q, k = rolled(q, -width), rolled(k, -width)
    if append is not None:
        v, k_pages, v_pages, rows = append
        k_pages.flatten(0, 1)[rows.long()], v_pages.flatten(0, 1)[rows.long()] = k, v
    return q, k, gate


def swapped_halves(q, *rest):
    return TORCH.qk_norm_rope(torch.cat(q.chunk(2, -1)[::-1], -1), *rest)


@pytest.mark.parametrize("fault", [rotary_on_the_wrong_half, swapped_halves])
def test_a_fault_between_projections_and_scores_is_found_there(sides, prompts, fault):
    assert_found(judged(sides, prompts, "qk_norm_rope", FULL, fault), FULL, "qk_norm_rope", "output q")


def swapped_experts(x, router, gate_up_proj, *rest, **kwargs):
    return TORCH.moe(x, router, torch.cat(gate_up_proj.chunk(2, 1)[::-1], 1), *rest, **kwargs)


def test_gate_and_up_rows_swapped_in_the_experts(sides, prompts):
    """silu(up) * gate has the right shape and the right size; near-ties of the router are left out and counted."""
    report = judged(sides, prompts, "moe", FULL, swapped_experts, torch.float32, torch.bfloat16)
    assert_found(report, FULL, "moe", "output value")
    assert 0 < report.left_out < len(report.rows), "of all tokens in all layers"


def edited(sides, dtype, old, new):
    """A model of another class whose ``run`` is ours with one edit."""
    source = textwrap.dedent(inspect.getsource(BerryLM.run))
    assert source.count(old) == 1, source
    names = dict(vars(model_file))
    exec(source.replace(old, new), names)
    own = Sides(sides.folder).model(dtype)
    own.__class__ = type("Edited", (BerryLM,), {"run": names["run"]})
    return Side("edited", own)


def test_a_commit_one_layer_late_is_found_where_it_is_missed(sides, prompts):
    """The stream is right until the first mixer after the block reads what is not there yet: no op is wrong, one input is."""
    late = edited(sides, torch.float32, "(i + 1) % c.attn_res_block_size == 0", "i and i % c.attn_res_block_size == 0")
    report = compare_layers(sides, sides.plain(torch.float64), late, prompts)
    assert_found(report, 4, "attn_res_norm", "input committed", also={(i, "attn_res_norm") for i in (5, 6, 7)})
    assert "between" in report.found.sentence() or "before" in report.found.sentence()


def test_swapped_rows_of_a_projection_are_found_as_an_input(sides, prompts):
    """The op is right and gets the wrong thing: a loader that took [gate | query] for [query | gate]."""
    model = Sides(sides.folder).model(torch.float32)
    weight = model.model.layers[FULL].self_attn.q_proj.weight
    with torch.no_grad():
        weight.copy_(weight.unflatten(0, (-1, 2, model.config.head_dim)).flip(1).flatten(0, 2))
    report = compare_layers(sides, sides.plain(torch.float64), Side("swapped", model), prompts)
    assert_found(report, FULL, "qk_norm_rope", "input q")
    assert report.first_layer == FULL


def test_another_number_of_calls_is_a_finding(sides, prompts):
    """A model that leaves an op out has nothing to compare from there on; that is said, not raised."""
    short = edited(sides, torch.float32, "x = ops.rms_norm(h[batch.logit_rows], self.model.norm.weight, c.rms_norm_eps)", "x = h")
    report = compare_layers(sides, sides.plain(torch.float64), short, prompts)
    assert report.found.what == "call (rms_norm expected)" and report.first_layer is None


@pytest.mark.parametrize(
    "a,b", [("torch-fp64", "torch-fp32"), ("torch-fp32", "torch-bf16"), ("torch-fp32", "torch-fp32+difference"),
            ("torch-bf16", "torch-fp32"), ("torch-fp64", "torch-fp64+difference")],
)  # fmt: skip
def test_right_sides_are_within_budget(sides, prompts, a, b):
    """Another order of sums, another precision: noise is no bug, in either direction."""
    report = compare_layers(sides, sides.side(a), sides.side(b), prompts)
    worst = max(report.checks, key=lambda c: c.error / c.budget)
    print(verdict(report), f"; the worst tensor has {worst.error / worst.budget:.2f} of its budget: {worst.op} {worst.what}")
    assert report.ok and len(report.rows) == sum(map(len, prompts))
    assert {c.op for c in report.checks} >= {"chunk_kda", "kda_decode_step", "paged_attention", "moe", "lm_head", "kept snapshot"}


def test_the_clamp_is_found_against_its_own_dtype(sides, prompts):
    """KRN-1: fp32 against fp32, where the floor can't be the distance of the two."""
    report = compare_layers(sides, sides.plain(torch.float32), sides.side("torch-fp32+clamped"), prompts)
    assert report.floor_of == "torch-fp32 against torch-fp64" and report.first_layer == 0
    assert (report.found.layer, report.found.op) == (0, "chunk_kda")
    wrong = {c.op for c in report.checks if c.over}
    assert wrong == {"chunk_kda", "kept snapshot"} or wrong == {"chunk_kda"}


def test_growth_tells_a_moved_rounding_from_the_clamp(sides, prompts):
    """Per layer and token a bf16 kernel with one rounding moved stays with the right one; the clamped one does not."""
    fp32, bf16 = sides.plain(torch.float32), sides.plain(torch.bfloat16)
    moved = Side("moved", bf16.model, one_rounding_moved(TORCH))
    wrong = Side("clamped", bf16.model, TORCH, "clamped")
    found = error_growth(fp32, [bf16, moved, wrong], prompts[0])
    assert {x.shape for x in found.values()} == {(8, len(prompts[0]))}
    right, shifted, off = (found[side.name].median(-1).values for side in (bf16, moved, wrong))
    assert (found["moved"] != found[bf16.name]).any() and (shifted < 1.3 * right).all() and (off > 4 * right).all()
    texts = drift(fp32, [bf16, wrong], prompts[0][:40], 12)
    assert texts[fp32.name].same == 12 and texts["clamped"].same <= texts[bf16.name].same


def test_a_backend_of_ones_own_is_one_option_away(folder, tmp_path):
    """A porter's kernel stands in one op's place; the command judges it without a line of ours."""
    (tmp_path / "port.py").write_text(
        "from dataclasses import replace\nfrom berrylm_ref.backend import TORCH, register_backend\n"
        "def norm(x, z, weight, eps): return TORCH.gated_rms_norm(x, z, weight, 10 * eps)\n"
        "register_backend('my-port', lambda device, dtype: replace(TORCH, name='my-port', gated_rms_norm=norm))\n"
    )
    args = ["--model", str(folder), "--a", "torch-fp64", "--b", "my-port-fp32", "--length", "20"]
    try:
        done = CliRunner().invoke(app, ["parity", "layers", *args, "--load", str(tmp_path / "port.py")])
    finally:
        REGISTRY.pop("my-port", None)
    assert done.exit_code == 1 and "out of budget: layer 0, gated_rms_norm: its output value" in done.stdout, done.output


@pytest.mark.parametrize(
    "name,message",
    [
        ("torch-fp16", "expected one of ('fp64', 'fp32', 'bf16') after the dash, got 'torch-fp16'"),
        ("torch", "got 'torch'"), ("numpy-fp32", "got 'numpy-fp32'"),
        ("torch-fp32+wild", "got 'torch-fp32+wild'"), ("fla-bf16+clamped", "got 'fla-bf16+clamped'"),
        ("fla-bf16", "backend 'fla': expected a CUDA device"), ("triton-bf16", "expected"),
        ("transformers-fp32", "expected a transformers that has the model"),
    ],
)  # fmt: skip
def test_a_side_that_can_not_run_says_why(sides, name, message):
    if name == "fla-bf16" and torch.cuda.is_available():
        pytest.skip("has a GPU: the side runs")
    if name == "triton-bf16" and torch.cuda.is_available():
        pytest.skip("has a GPU: the side runs")
    with pytest.raises(ValueError) as error:
        sides.side(name)
    assert message in str(error.value)


def test_the_fla_side_has_its_kernel_in_one_slot(sides, prompts, monkeypatch):
    """KRN: a stand-in with fla's signature shows what its kernel is given; the real one needs a GPU."""
    given = []

    def kernel(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, safe_gate=False, **kwargs):
        given.append(v.shape[1])
        return TORCH.chunk_kda(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state, **kwargs
        )

    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.kda", SimpleNamespace(chunk_kda=kernel))
    backend = fla_backend.make(torch.device("cuda"), torch.bfloat16)
    side = Side("fla-bf16", sides.model(torch.bfloat16), backend)
    report = compare_layers(sides, sides.plain(torch.float32), side, prompts)
    assert report.ok and not backend.boundary_states and len(given) == 2 * 2 * 6, "free and in lockstep, two pieces, six layers"
    assert not any(c.op == "kept snapshot" for c in report.checks)
    with pytest.raises(ValueError, match="chunk_kda of fla: expected intra 'dyadic', no state_boundaries, got 'clamped', none"):
        backend.chunk_kda(*[None] * 5, intra="clamped")
    with pytest.raises(ValueError, match="chunk_kda of fla: lower_bound: expected none, .* got -5.0"):
        backend.chunk_kda(*[None] * 5, lower_bound=-5.0)
    with pytest.raises(ValueError, match="backend 'fla': expected bfloat16"):
        fla_backend.make(torch.device("cuda"), torch.float32)


def test_transformers_is_compared_layer_by_layer(sides, prompts, monkeypatch):
    """The official code has no ops of ours: its layers are compared, and the report says why no op is named."""
    berry = Sides(sides.folder).model(torch.float32)
    berry.model.layers[FULL].self_attn.q_norm.weight.data += 0.01
    layers = [torch.nn.Identity() for _ in berry.model.layers]

    class Official:
        """The official model as far as it is looked at: layers that return [B, T, D], and logits."""

        model = SimpleNamespace(layers=layers)

        def to(self, device):
            return self

        def eval(self):
            return self

        def __call__(self, ids, use_cache):
            out = berry(ids, return_hidden_states=True)
            for layer, h in zip(layers, out.hidden_states, strict=True):
                layer(h)
            return out

    import transformers

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: Official())
    report = compare_layers(sides, sides.plain(torch.float64), sides.side("transformers"), prompts)
    assert report.first_layer == FULL and not report.checks and "no op is named" in verdict(report)


@pytest.mark.parametrize("backend", ["triton", "port"])
def test_scores_are_chosen_on_any_side_that_has_them(folder, monkeypatch, backend):
    """Only torch took +clamped: a kernel's own clamped form could not be put beside its exact one."""
    monkeypatch.setitem(REGISTRY, backend, lambda device, dtype: replace(TORCH, name=backend))
    side = Sides(folder).side(f"{backend}-fp32+clamped")
    assert (side.backend.name, side.intra, side.dtype) == (backend, "clamped", torch.float32)


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_that_is_not_there_is_one_line(folder, device):
    """An unknown name ended in a traceback of torch."""
    args = ["--model", str(folder), "--a", "torch-fp32", "--b", "fla-bf16", "--device", device]
    done = CliRunner().invoke(app, ["parity", "layers", *args])
    assert done.exit_code == 2 and f"error: device: expected one that is here, as 'cpu', got '{device}'" in done.stderr


def test_both_sides_run_in_full_fp32(sides, prompts):
    """TF32, switched on from outside, would be the trusted side's own error of 1e-3."""
    seen = set()

    def watched(*args):
        seen.add(torch.get_float32_matmul_precision())
        return TORCH.rms_norm(*args)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        side = Side("watched", sides.model(torch.float32), replace(TORCH, name="watched", rms_norm=watched))
        compare_layers(sides, sides.plain(torch.float64), side, prompts[1:])
        assert seen == {"highest"} and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_command_names_the_op_and_writes_what_it_found(folder, tmp_path):
    done = CliRunner().invoke(
        app,
        ["parity", "layers", "--model", str(folder), "--a", "torch-fp32", "--b", "torch-fp32+clamped", "--length", "90",
         "--json", str(tmp_path / "l.json"), "--plot", str(tmp_path / "l.png")],
    )  # fmt: skip
    assert done.exit_code == 1 and "out of budget: layer 0, chunk_kda" in done.stdout
    lines = done.stderr.splitlines()
    assert [line.split(" s  ")[1] for line in lines[:3]] == [
        "loading torch-fp32 and torch-fp32+clamped", "torch-fp32 alone: forward 1 of 6, prefill",
        "torch-fp32 alone: forward 2 of 6, continued prefill",
    ], "a run of minutes printed nothing"  # fmt: skip
    assert lines[-1].endswith(" s  torch-fp32 in lockstep with torch-fp64: forward 6 of 6, decode")
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "l.json").read_text())["found"]["op"] == "chunk_kda"
    few = ["parity", "layers", "--model", str(folder), "--a", "torch-fp64", "--b", "torch-fp32", "--ids", "1 2 3"]
    done = CliRunner().invoke(app, few)
    assert done.exit_code == 2 and "prompts[0]: expected at least 6 ids, got 3" in done.stderr
