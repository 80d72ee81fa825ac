"""The shadow run: a wrong kernel planted in one layer is found there, by name, and nowhere else."""

from dataclasses import fields, replace

import pytest
import torch
from models import VOCAB, checkpoint, small_llm
from typer.testing import CliRunner

from berrylm_ref import LLM, SamplingParams
from berrylm_ref.backend import REGISTRY, TORCH, register_backend
from berrylm_ref.cli import app
from berrylm_ref.engine import llm as llm_file
from berrylm_ref.shadow import COLUMNS, Shadow, report

PROMPT = torch.randint(VOCAB, (70,), generator=torch.Generator().manual_seed(1)).tolist()


def other_functions(op):
    return lambda *args, **kwargs: op(*args, **kwargs)


OPS = {f.name: op for f in fields(TORCH) if callable(op := getattr(TORCH, f.name))}
COPY = replace(TORCH, **{name: other_functions(op) for name, op in OPS.items()}, name="copy")  # computes the same


def run(backend, path):
    llm = small_llm(backend=backend)
    with Shadow(llm.model, path, TORCH):
        out = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    assert llm.model.backend is backend, "closing takes the wrappers off"
    return out.token_ids


def test_a_right_backend_is_within_budget_and_every_op_has_its_rows(tmp_path):
    tokens = run(COPY, tmp_path / "s.csv")
    alone = small_llm(backend=TORCH).generate([PROMPT], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    assert tokens == alone.token_ids, "shadowing does not change what runs"
    summary, first = report(tmp_path / "s.csv")
    calls = {row["op"]: row["calls"] for row in summary}
    # prefill and 3 decode steps of 2 layers, one linear and one full; the final norm once a forward
    assert calls == {
        "attn_res_norm": 8, "causal_conv": 1, "chunk_kda": 1, "gated_rms_norm": 1, "kda_decode_step": 3, "add_rms_norm": 8,
        "moe": 8, "qk_norm_rope": 4, "paged_attention": 4, "rms_norm": 4,
    }  # fmt: skip
    assert first is None and all(row["max"] == 0 for row in summary)


def test_a_backend_beside_itself_is_refused(tmp_path):
    """A check that can't fail: torch beside torch wrote a file of zeros, which read as kernels that are right."""
    path = tmp_path / "s.csv"
    path.write_text("kept")
    with pytest.raises(ValueError, match="got 'torch', whose ops are those of the twin 'torch': there is nothing to compare"):
        Shadow(small_llm().model, path, TORCH)
    assert path.read_text() == "kept"


def test_ops_of_the_twin_itself_have_no_rows(tmp_path):
    """One op of a port's own: nine rows of zeros a layer would hide that nothing else was compared."""
    run(replace(TORCH, name="port", moe=COPY.moe), tmp_path / "s.csv")
    assert [row["op"] for row in report(tmp_path / "s.csv")[0]] == ["moe"]


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
    run(replace(COPY, **{op: planted}), path)
    summary, first = report(path)
    assert (first["op"], first["layer"]) == (op, layer)
    assert [row["op"] for row in summary if row["max"] > 1e-12] == [op], "its followers get the same input and stay clean"
    assert len(summary) == 10


def test_a_nan_is_infinitely_far(tmp_path):
    path = tmp_path / "s.csv"
    run(replace(TORCH, gated_rms_norm=lambda *a: TORCH.gated_rms_norm(*a) * float("nan")), path)
    assert report(path)[1]["op"] == "gated_rms_norm" and report(path)[1]["rel_l2"] == float("inf")


@pytest.fixture
def copy():
    """The name of a backend that can be compared with torch on any machine."""
    register_backend("copy", lambda device, dtype: COPY)
    yield "copy"
    del REGISTRY["copy"]


def test_the_command_writes_and_reads_it(tmp_path, copy):
    path, cli = tmp_path / "s.csv", CliRunner()
    ids = " ".join(map(str, PROMPT[:9]))
    args = ["generate", "--model", str(checkpoint()), "--ids", ids, "--max-tokens", "3"]
    done = cli.invoke(app, [*args, "--backend", copy, "--shadow", str(path)])
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
    for place in ("/nowhere/x.csv", "/"):
        done = cli.invoke(app, [*args, "--backend", copy, "--shadow", place])
        assert done.exit_code == 2 and done.stderr.splitlines()[-1].endswith(f"'{place}'")


def test_a_shadow_run_replays_no_graph(tmp_path, copy, monkeypatch):
    """On a GPU decode steps are replayed from CUDA graphs, which call no op: a run was judged by its prefill alone."""
    given = {}

    def recording(*args, **options):
        given.update(options)
        return LLM(*args, **options)

    monkeypatch.setattr(llm_file, "LLM", recording)
    args = ["generate", "--model", str(checkpoint()), "--ids", "1 2", "--max-tokens", "2", "--backend", copy]
    assert CliRunner().invoke(app, args).exit_code == 0 and given["cuda_graphs"] is None
    assert CliRunner().invoke(app, [*args, "--shadow", str(tmp_path / "s.csv")]).exit_code == 0 and given["cuda_graphs"] is False
