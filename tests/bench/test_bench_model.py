"""`berrylm bench model`: the counts behind the roofline, the checks that must be able to fail, and the whole command, tiny."""

import ast
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import randomise, rel_l2, tiny_config
from typer.testing import CliRunner

from berrylm_ref import LLM, BerryLM, BerryLMConfig
from berrylm_ref.backend import TORCH
from berrylm_ref.bench import load
from berrylm_ref.bench.configs import config_named
from berrylm_ref.bench.correctness import layer_profile, same_answers, upcast_model
from berrylm_ref.bench.experts import distinct_experts
from berrylm_ref.bench.load import measure
from berrylm_ref.bench.profile import group_of, summarise, without_inner
from berrylm_ref.bench.report import Report
from berrylm_ref.bench.roofline import Floors
from berrylm_ref.bench.targets import TARGETS, against_published
from berrylm_ref.cli import app
from berrylm_ref.random_weights import random_model

RATES = {"copy_bytes_per_s": 4.27e12, "matmul_flops_per_s": 700e12}


def tiny(seed=0, layers=None):
    return random_model(config_named("tiny", layers), dtype="float32", device="cpu", seed=seed)


@pytest.fixture(scope="module")
def official():
    """The floors of the official configuration; no weight of it is in memory."""
    return Floors.of(BerryLM(BerryLMConfig(), dtype=torch.bfloat16, device="meta", backend="torch"), RATES)


@pytest.mark.parametrize(
    "spec,tokens_per_s",
    [((1024, 512, 16), 2360), ((1024, 512, 64), 5090), ((1024, 2048, 64), 5670), ((8192, 512, 64), 2070)],
)
def test_the_limits_are_those_worked_out_by_hand(official, spec, tokens_per_s):
    assert official.workload(*spec)["tokens_per_s"] == pytest.approx(tokens_per_s, rel=0.015)


def test_the_bytes_of_a_step_are_those_worked_out_by_hand(official):
    """2.82 G parameters are read for one token, each once, and a state is read and written."""
    step = official.step_bytes(1, 0)
    assert step["MoE"] + step["products"] == pytest.approx(2 * 2.82e9, rel=0.005)
    assert step["KDA"] == 2 * 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert 1e3 * official.step_seconds(1, 1024) == pytest.approx(1.35, abs=0.01)
    assert official.expected_experts(1) == 8 and official.expected_experts(64) / 128 == pytest.approx(0.98, abs=0.005)
    assert official.step_bytes(64, 1000)["attention"] == 64 * 1000 * 10 * 2 * 2 * 256 * 2


def test_the_flops_of_a_prompt_count_causal_pairs_once(official):
    one, two = official.prefill_flops(4096), official.prefill_flops(8192)
    assert two["attention"] / one["attention"] == pytest.approx(4, rel=1e-3) and two["KDA"] == 2 * one["KDA"]
    active = sum(two[g] for g in ("MoE", "products")) / 2 / 8192
    assert active == pytest.approx(3.19e9 - 2 * 369e6, rel=0.01), "neither the embedding's row nor the head for each token"


def test_random_weights_are_alive_and_fixed_by_their_seed():
    """Zero norms and mixers hide faults, and one loud layer in forty ends in NaN or in one expert for all."""
    model, same, other = tiny(3, layers=40), tiny(3, layers=40), tiny(4, layers=40)
    for (name, p), q, r in zip(model.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) and torch.isfinite(p).all(), name
        if not name.endswith("A_log"):
            assert not torch.equal(p, r) and (p != 0).float().mean() > 0.99, name
    gates = model.model.layers[0].linear_attn
    assert float(gates.A_log.detach().exp().max()) == pytest.approx(72, rel=1e-5)
    assert -7 <= gates.dt_bias.min() <= gates.dt_bias.max() <= -2.6
    ids = torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = model(ids, return_hidden_states=True).hidden_states
    assert all(0.3 < h.std() < 3 for h in hidden)
    hit = distinct_experts(model, ids, [1, 2, 8])
    assert hit[1] == 4 < hit[2] < hit[8] and hit[8] > 0.8 * 16 * (1 - 0.75**8), "the router uses them about evenly"


def test_counting_experts_leaves_the_model_as_it_was():
    model = tiny()
    before = model.backend
    distinct_experts(model, torch.zeros(2, 3, dtype=torch.long), [1])
    assert model.backend is before


def test_the_reference_is_the_model_in_higher_precision(tmp_path):
    """Layers cast one at a time must be the model cast as a whole; A_log and the merged projections included."""
    model = randomise(BerryLM(tiny_config(), dtype=torch.bfloat16, backend="torch"), seed=5)
    model.save_pretrained(tmp_path)
    ids = torch.arange(90)[None] % 97
    with torch.no_grad():
        found = upcast_model(model, torch.float64)(ids)
        wanted = BerryLM.from_pretrained(tmp_path, dtype=torch.float64)(ids)
    assert found.dtype == torch.float64 and torch.equal(found, wanted)
    assert model.dtype == torch.bfloat16 and rel_l2(model(ids), wanted) > 1e-3


def test_a_layer_profile_notices_one_bad_op():
    model = tiny()
    assert layer_profile(model, 1, 70)["within_budget"]
    model.backend = replace(TORCH, rms_norm=lambda x, w, eps: TORCH.rms_norm(x, w, eps + 1e-4))
    found = layer_profile(model, 1, 70)
    assert not found["within_budget"] and found["rel_l2"][0]["ours"][-1] > 10 * found["rel_l2"][0]["torch"][-1]
    model.backend = replace(TORCH, rms_norm=lambda x, w, eps: x * float("nan"))
    assert layer_profile(model, 1, 70)["largest_ratio"] == float("inf"), "a NaN is infinitely far, not close to everything"


def test_answers_sent_twice_hit_and_notice_a_lost_snapshot(tmp_path, monkeypatch):
    llm = LLM.from_model(tiny(), max_total_tokens=2048)
    good = same_answers(llm, 2, 200, 8)
    assert good["identical"] and good["cached_tokens"] == good["expected_cached_tokens"] == [192, 192]
    assert not good["first_difference"] and good["smallest_gap"] >= 0 and good["whole"]["cached_tokens"] == [192, 192]
    monkeypatch.setattr(llm.engine.cache.pool, "restore", lambda snapshot, slot: None)
    bad = same_answers(llm, 2, 201, 8)
    assert not bad["identical"] and bad["first_difference"][0]["ids"][0] != bad["first_difference"][0]["ids"][1]
    report = Report(tmp_path / "r.json", 60, {})
    report.data |= {"sent_twice": bad, "cached_answers": {**good, "cached_tokens": [0, 0]}}
    assert [line.split(":")[0] for line in report.verdict()] == ["cached_answers", "sent_twice"]


def test_the_cached_pass_is_compared_with_products_of_its_own_sizes(monkeypatch):
    """In bf16 a whole prompt and its last tokens alone round differently: ids parted at near ties, and nothing was wrong."""
    llm, seen = LLM.from_model(tiny(), max_total_tokens=2048, chunked_prefill_size=128), []
    schedule = llm.engine.scheduler.schedule
    monkeypatch.setattr(llm.engine.scheduler, "schedule", lambda: [seen.append((p.start, p.end)) or p for p in schedule()])
    found = same_answers(llm, 1, 200, 1)
    assert seen[:5] == [(0, 64), (64, 128), (128, 192), (192, 200), (192, 200)], "cut, then cached"
    assert seen[5:] == [(0, 128), (128, 200), (192, 200)], "whole, then cached"
    assert found["most_moved"] == 0.0 and llm.engine.scheduler.token_budget == 128


def test_no_measurement_is_answered_from_the_cache_of_another():
    """Prompts drawn from one seed began alike: the second workload would have skipped its prefill."""
    llm = LLM.from_model(tiny(), max_total_tokens=4096, max_running_requests=2)
    for spec in ((130, 2, 1), (130, 2, 2), (200, 2, 2)):
        found = measure(llm, spec, seconds=0.3, deadline=time.monotonic() + 60)
        summary, rates = found["summary"], found["output_tokens_per_s_of_runs"]
        assert summary["cached_tokens"] == 0 and summary["prompt_tokens"] == spec[0] * spec[2] * found["runs"]
        assert len(rates) == found["runs"] and min(rates) <= found["output_tokens_per_s"] <= max(rates)


def test_a_ratio_above_one_is_better_for_times_and_for_rates():
    spec = (1024, 512, 1)
    assert against_published(spec, {"tpot_ms": 2.565})["times_better"] == 2 and against_published(spec, {"tpot_ms": None}) == {}
    found = against_published((1024, 512, 64), {"output_tokens_per_s": 4100.0})
    assert found["times_better"] > 1 and not found["reached"], "ahead of the published figure, and short of what is required"
    assert against_published((1, 2, 3), {}) == {} and len(TARGETS) == 5
    assert against_published(spec, {"tpot_ms": 1.0, "summary": {"cut_by_time_limit": True}}) == {}, "no measurement of it"
    two = against_published((1024, 512, 64), {"output_tokens_per_s": 6035.0}, 2)
    assert two["published"] == 6035 and two["reached"] and against_published(spec, {"tpot_ms": 1.0}, 4) == {}, "by number of GPUs"


def test_every_kernel_of_ours_has_a_group():
    """A renamed kernel would silently move its time into "other"."""
    folder, found = Path(__file__).parents[2] / "kernels" / "berrylm_kernels", set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                found.add(node.name)
    assert len(found) > 15
    groups = {name: group_of(name) for name in found}
    assert set(groups.values()) <= {"KDA", "MoE", "attention", "norms and AttnRes"}, groups
    assert groups["_gated_rms_norm_kernel"] == "norms and AttnRes" and groups["_gate_up_kernel"] == "MoE"
    assert group_of("nvjet_sm90_tst_128x64_64x8_2x1_v_bz_TNT") == "products"
    for name in ("Memcpy DtoD (Device -> Device)", "void at::native::vectorized_elementwise_kernel<4, ...>"):
        assert group_of(name) == "copies and element-wise"


def test_gaps_are_what_no_kernel_covers():
    events = [("_few_down_kernel", 0.0, 1000.0), ("_few_down_kernel", 500.0, 1000.0), ("x", 3000.0, 1000.0)]
    found = summarise(events, 2, {"MoE": 0.1})
    assert (found["span_ms"], found["busy_ms"], found["gaps_ms"], found["launches"]) == (2.0, 1.25, 0.75, 1.5)
    assert found["groups"]["MoE"] == {"ms": 1.0, "share": 0.5, "floor_ms": 0.1} and found["groups"]["other"]["floor_ms"] is None
    assert found["kernels"][0] == {"name": "_few_down_kernel", "group": "MoE", "calls": 1.0, "us": 1000.0, "share": 0.5}
    nested = [("a", 0.0, 10.0), ("b", 1.0, 4.0), ("c", 2.0, 1.0), ("d", 6.0, 1.0), ("e", 20.0, 1.0)]
    assert [length for _, _, length in without_inner(nested)] == [5.0, 3.0, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="expected kernels in the trace"):
        summarise([], 1, {})


def test_a_report_survives_a_part_and_says_what_is_missing(tmp_path, capsys):
    """A fault in the third part lost the first two with it."""
    report = Report(tmp_path / "deep" / "r.json", 60, {"machine": {"gpu": None}})
    report.part("good", lambda: {"a": 1 / 3, "rows": [{"x": 1}, {"x": [1, 2]}]})
    report.part("bad", lambda: 1 // 0)
    report.part("under", lambda x: x, 7, under="section")
    report.deadline = time.monotonic() - 1
    assert report.part("late", lambda: 1) is None
    found = json.loads(report.path.read_text())
    assert found["good"] == {"a": 0.33333, "rows": [{"x": 1}, {"x": [1, 2]}]} and found["section"] == {"under": 7}
    assert "ZeroDivisionError" in found["failures"]["bad"] and found["skipped"] == ["late"] and "late" not in found
    assert [line.split(":")[0] for line in report.verdict()] == ["bad", "late"] and "ZeroDivisionError" in capsys.readouterr().err


def invoke(*args):
    return CliRunner().invoke(app, ["bench", "model", *map(str, args)])


SMALL = ("--config", "tiny", "--random-weights", "--device", "cpu", "--dtype", "float32", "--max-total-tokens", 4096)


def test_the_whole_command_tiny(tmp_path, monkeypatch):
    few = {"REQUESTS": 5, "TOGETHER": 3, "PROMPTS": (5, 90), "ANSWERS": (2, 6)}
    for name, value in few.items():
        monkeypatch.setattr(load, f"TRAFFIC_{name}", value)
    out = tmp_path / "model.json"
    done = invoke(
        *SMALL, "--workloads", "64/4@1,64/4@3", "--seconds-per-workload", 0, "--profile", "--check", "--long", "--out", out,
        "--traffic", "--prefill-tokens", 128, "--profile-batches", "1,3", "--profile-context", 64, "--check-tokens", 130,
        "--twice-tokens", 150, "--long-tokens", 2100, "--layers", 2, "--overlap",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert not found["failures"] and not found["skipped"] and found["settings"]["layers"] == 2
    assert found["memory"]["kv_tokens"] == 4096 and found["memory"]["overlap"] and found["weights"]["parameters"] > 0
    assert {name: w["runs"] for name, w in found["workloads"].items()} == {"64/4@1": 1, "64/4@3": 1}
    assert found["workloads"]["64/4@3"]["against_published"] == {}, "nothing is published about a tiny model"
    assert len(found["long_context"]["step_seconds"]) == 3, "two chunks, and with overlap the token comes a step later"
    assert set(found["profile"]) == {"decode_1", "decode_3", "prefill_128"}
    assert all("products" in p["groups"] and p["busy_ms"] <= p["span_ms"] for p in found["profile"].values())
    assert found["sent_twice"]["cached_tokens"] == [128] and found["layer_profile"]["reference"] == "float64"
    assert list(found["first_token_ms"]) == ["16", "64"] and min(found["first_token_ms"].values()) > 0
    assert found["traffic"]["requests"] == 5 and 5 * 2 <= found["traffic"]["output_tokens"] <= 5 * 6
    assert torch.is_grad_enabled(), "and the process is left as it was"


def test_two_ranks_are_measured_like_one(tmp_path):
    """Every rank loads its own part of the weights that were drawn; the limit is that of two that read side by side."""
    found = {}
    for tp in (1, 2):
        out = tmp_path / f"{tp}.json"
        done = invoke(
            *SMALL, "--tp", tp, "--workloads", "64/4@2", "--seconds-per-workload", 0, "--profile", "--check", "--out", out,
            "--prefill-tokens", 128, "--profile-batches", 1, "--profile-context", 64, "--check-tokens", 130, "--layers", 2,
            "--twice-tokens", 150,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        found[tp] = json.loads(out.read_text())
        assert not found[tp]["failures"] and not found[tp]["skipped"] and found[tp]["settings"]["tp"] == tp
        assert found[tp]["sent_twice"]["cached_tokens"] == [128]
    assert found[2]["memory"]["snapshot_bytes"] == found[1]["memory"]["snapshot_bytes"] // 2
    assert "experts_a_layer" not in found[2] and not torch.distributed.is_initialized()


@pytest.mark.slow
def test_the_workloads_over_http_from_another_process(tmp_path):
    out = tmp_path / "model.json"
    done = invoke(
        *SMALL, "--workloads", "32/3@1", "--http", "--http-workloads", "32/3@2", "--seconds-per-workload", 0,
        "--prefill-tokens", 0, "--out", out,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert list(found["workloads"]) == ["32/3@1"] and list(found["http"]) == ["32/3@2"]
    found = found["http"]["32/3@2"]
    assert found["summary"]["output_tokens"] == 6 and found["tpot_ms"] > 0


def test_a_time_limit_leaves_what_there_was(tmp_path):
    out = tmp_path / "model.json"
    done = invoke(*SMALL, "--workloads", "64/4@1", "--time-limit", 0, "--out", out)
    assert done.exit_code == 1 and "FAILED weights: skipped" in done.stdout
    assert json.loads(out.read_text())["skipped"] == ["weights"]


@pytest.mark.parametrize(
    "args,message",
    [
        (["--config", "tiny", "--device", "cpu"], "expected --random-weights"),
        (["--config", "/nowhere", "--device", "cpu", "--random-weights"], "expected a config.json"),
        (["--config", "tiny", "--random-weights", "--device", "nope"], "device: expected one that is here"),
        ([*SMALL, "--workloads", "1k"], "expected INPUT/OUTPUT@CONCURRENCY"),
        ([*SMALL, "--tp", "3"], "num_attention_heads: expected a multiple of tp = 3, got 4"),
        ([*SMALL, "--http-workloads", "1k/8@1"], "http_workloads: expected --http with it"),
        ([*SMALL, "--profile-batches", "1,0"], "profile_batches: expected sizes as 1,16,64"),
    ],
)
def test_wrong_arguments_are_status_2_before_anything_runs(args, message, tmp_path):
    done = invoke(*args, "--out", tmp_path / "x.json")
    assert done.exit_code == 2 and message in done.stderr and not (tmp_path / "x.json").exists()
