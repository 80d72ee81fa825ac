"""The whole command on the micro recipe, and the parts of it that decide how a run goes."""

import json

import pytest
import torch
from typer.testing import CliRunner

from berrylm_ref import LLM, BerryLM, SamplingParams
from berrylm_ref.cli import app
from berrylm_ref.training.initial import initialise
from berrylm_ref.training.meter import sharpness
from berrylm_ref.training.optimiser import make_optimiser, rate_factor
from berrylm_ref.training.recipe import MICRO, NANO
from berrylm_ref.training.record import thin


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The command as a user types it, evaluation included: (folder, result)."""
    out = tmp_path_factory.mktemp("micro")
    arguments = ["train-nano", "--config", "micro", "--device", "cpu", "--workers", "1", "--out", str(out), "--problems", "1"]
    return out, CliRunner().invoke(app, [*arguments, "--minutes", "0.75", "--limit-minutes", "4", "--eval-minutes", "0.2"])


@pytest.mark.slow
def test_micro_halves_its_loss_and_leaves_a_checkpoint(run):
    """The path of the shipped checkpoint, end to end: if this breaks, nobody can make it again."""
    out, result = run
    assert result.exit_code == 0, result.output
    log = json.loads((out / "training_log.json").read_text())
    losses = [loss for _, loss in log["curve"]]
    last = losses[-max(3, len(losses) // 5) :]
    print(f"loss {losses[0]:.2f} -> {sum(last) / len(last):.2f} in {log['steps']} steps")
    assert sum(last) / len(last) < losses[0] / 2
    assert (out / "training_log.json").stat().st_size < 100_000 and (out / "training_loss.png").stat().st_size > 1000
    assert log["machine"]["versions"]["torch"] and log["seed"] == 0 and log["evaluation"]["tasks"]["problems"]["asked"] == 1
    llm = LLM(out)
    assert llm.tokenizer and len(llm.generate(["<|user|>Hi"], SamplingParams(temperature=0, max_tokens=4))[0].token_ids) <= 4
    assert "timeline:" in result.output


@pytest.mark.slow
def test_every_weight_moves(run):
    """A weight that no gradient reaches keeps its initial value: a mechanism that is on paper only."""
    out, _ = run
    trained = BerryLM.from_pretrained(out)
    fresh = BerryLM(trained.config, backend="torch")
    initialise(fresh, seed=0)
    for (name, now), before in zip(trained.named_parameters(), fresh.parameters(), strict=True):
        first = before if now.dtype == torch.float32 and name.endswith(("A_log", "dt_bias")) else before.bfloat16().float()
        if not name.startswith("model.layers.0.attn_res"):  # mixes the embeddings with themselves
            assert not torch.equal(now, first), name


@pytest.mark.slow
def test_decays_stay_sharp_through_a_training(run):
    """Issue of the clamp: it shows only where a channel forgets more than 126 powers of two within 16 tokens."""
    log = json.loads((run[0] / "training_log.json").read_text())
    for entry in log["sharpness"]:
        assert entry["layers"][0]["per_64"] < -400 and entry["layers"][0]["per_16"] < -126, entry


def test_the_rate_follows_the_clock_and_ends_at_zero():
    """A run that is slower than planned must still finish its decay: unfinished, the loss is much worse."""
    factors = [rate_factor(NANO, i / 1000) for i in range(1001)]
    assert factors[0] > 0 and max(factors) == 1.0 and factors[-1] == 0.0
    assert all(b <= a for a, b in zip(factors[400:], factors[401:], strict=False))
    assert factors[int(1000 * NANO.warmup)] == 1.0 and rate_factor(NANO, 1.5) == 0.0


def test_no_decay_for_norms_gates_and_embeddings():
    """Weight decay on dt_bias pulls it to zero: every channel then forgets at once."""
    model = BerryLM(MICRO.config(0), backend="torch")
    gates, plain, matrices = make_optimiser(model, MICRO, "cpu").param_groups
    names = {p: name for name, p in model.named_parameters()}
    assert sum(len(group["params"]) for group in (gates, plain, matrices)) == len(names)
    assert {names[p].rpartition(".")[2] for p in gates["params"]} == {"A_log", "dt_bias"} and gates["peak"] == MICRO.gate_rate
    assert gates["weight_decay"] == plain["weight_decay"] == 0.0 < matrices["weight_decay"]
    kept = [names[p] for p in matrices["params"]]
    assert not any(word in name for name in kept for word in ("norm", "embed", "mlp.gate.", "pseudo_query", "conv1d"))
    assert any(name.endswith("experts.down_proj") for name in kept) and "lm_head.weight" in kept


def test_the_initial_model_is_sharp_and_of_the_shipped_size():
    model = BerryLM(NANO.config(4091), backend="torch")
    initialise(model, seed=1)
    assert 8e6 < sum(p.numel() for p in model.parameters()) < 14e6
    rates = model.model.layers[0].linear_attn.A_log.detach().exp()
    assert float(rates[-1]) == pytest.approx(72, rel=1e-5) and float(rates[0]) == pytest.approx(1)


def test_sharpness_is_the_sum_of_the_logarithms():
    """Read off a forward whose gates are known: 64 tokens at -1 nat a token are 92.3 powers of two, 16 are 23.1."""

    class Fixed:
        def __call__(self, ids, keep_gates):
            gates = torch.zeros(1, 128, 2, 4)
            gates[0, 64:, 1, 2] = -1.0
            return None, type("Trace", (), {"gates": [gates]})

    (layer,) = sharpness(Fixed(), torch.zeros(1, 128))
    assert layer["per_64"] == pytest.approx(-92.33, abs=0.01) and layer["per_16"] == pytest.approx(-23.08, abs=0.01)


def test_thin_keeps_the_ends():
    points = list(range(1000))
    kept = thin(points, 48)
    assert kept[0] == 0 and kept[-1] == 999 and len(kept) <= 49 and thin([]) == []


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--config", "huge"], "config"),
        (["--kernels", "fla"], "kernels"),
        (["--device", "tpu"], "device"),
        (["--texts", "/nowhere"], "tokenizer"),
    ],
)
def test_what_cannot_run_is_refused_at_once(tmp_path, arguments, word):
    result = CliRunner().invoke(app, ["train-nano", "--config", "micro", "--device", "cpu", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 2 and word in result.output and not any(tmp_path.iterdir())
