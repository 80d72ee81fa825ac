"""The shadow run: a wrong kernel planted in one layer is found there, by name, and nowhere else."""

from dataclasses import replace

import pytest
import torch
from models import VOCAB, checkpoint, small_llm
from typer.testing import CliRunner

from berrylm_ref import SamplingParams
from berrylm_ref.backend import TORCH
from berrylm_ref.cli import app
from berrylm_ref.shadow import COLUMNS, Shadow, report

PROMPT = torch.randint(VOCAB, (70,), generator=torch.Generator().manual_seed(1)).tolist()


def run(backend, path):
    llm = small_llm(backend=backend)
    with Shadow(llm.model, path, TORCH):
        out = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    assert llm.model.backend is backend, "closing takes the wrappers off"
    return out.token_ids


def test_a_right_backend_is_within_budget_and_every_op_has_its_rows(tmp_path):
    tokens = run(replace(TORCH, name="copy"), tmp_path / "s.csv")
    assert tokens == run(TORCH, tmp_path / "t.csv"), "shadowing does not change what runs"
    summary, first = report(tmp_path / "s.csv")
    calls = {row["op"]: row["calls"] for row in summary}
    # prefill and 3 decode steps of 2 layers, one linear and one full; the final norm once a forward
    assert calls == {
        "attn_res_norm": 8, "causal_conv": 1, "chunk_kda": 1, "gated_rms_norm": 1, "kda_decode_step": 3, "add_rms_norm": 8,
        "moe": 8, "qk_norm_rope": 4, "paged_attention": 4, "rms_norm": 4,
    }  # fmt: skip
    assert first is None and all(row["max"] == 0 for row in summary)


def wrong_moe(*args, **kwargs):
    return TORCH.moe(*args, **{**kwargs, "top_k": 1})


def wrong_attention(q, *args, **kwargs):
    return TORCH.paged_attention(q * 1.001, *args, **kwargs)


def wrong_state(*args, **kwargs):
    """Right output, wrong memory: only the pools show it."""
    out = TORCH.kda_decode_step(*args, **kwargs)
    args[9][args[10]] *= 1.01
    return out


@pytest.mark.parametrize(
    "op,planted,layer", [("moe", wrong_moe, 0), ("paged_attention", wrong_attention, 1), ("kda_decode_step", wrong_state, 0)]
)
def test_a_planted_wrong_kernel_is_found(tmp_path, op, planted, layer):
    path = tmp_path / "s.csv"
    run(replace(TORCH, **{op: planted}), path)
    summary, first = report(path)
    assert (first["op"], first["layer"]) == (op, layer)
    assert [row["op"] for row in summary if row["max"] > 1e-12] == [op], "its followers get the same input and stay clean"


def test_a_nan_is_infinitely_far(tmp_path):
    path = tmp_path / "s.csv"
    run(replace(TORCH, gated_rms_norm=lambda *a: TORCH.gated_rms_norm(*a) * float("nan")), path)
    assert report(path)[1]["op"] == "gated_rms_norm" and report(path)[1]["rel_l2"] == float("inf")


def test_the_command_writes_and_reads_it(tmp_path):
    path, cli = tmp_path / "s.csv", CliRunner()
    ids = " ".join(map(str, PROMPT[:9]))
    done = cli.invoke(app, ["generate", "--model", str(checkpoint()), "--ids", ids, "--max-tokens", "3", "--shadow", str(path)])
    assert done.exit_code == 0 and len(done.stdout.split()) == 3
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    done = cli.invoke(app, ["shadow-report", str(path)])
    assert done.exit_code == 0 and "every call is within its budget" in done.stdout
    rows = path.read_text().replace("0.000e+00,0.000e+00", "3.000e-02,1.000e+00", 1)
    path.write_text(rows)
    done = cli.invoke(app, ["shadow-report", str(path)])
    assert done.exit_code == 1 and "first out of budget: layer 0, attn_res_norm, rel-L2 3.0e-02" in done.stdout
    path.write_text("a,b\n1,2\n")
    assert cli.invoke(app, ["shadow-report", str(path)]).exit_code == 2
