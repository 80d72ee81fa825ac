"""Kernels that start while the one before them still runs: what each must not do before it has waited, and that chains agree."""

import ast
from pathlib import Path

import pytest
import torch

import berrylm_kernels
from berrylm_kernels import attnres, moe, norm, overlap

FOLDER = Path(berrylm_kernels.__file__).parent
WEIGHTS = {"pseudo_query", "p_rows"}  # p_rows: of the router and the shared expert's gate
OWN = "kda_decode.py"  # has its own pair of kernels, and a test of it


def overlapping_kernels():
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(a.arg == "PDL" for a in node.args.args) and path.name != OWN:
                found.append(pytest.param(node, id=f"{path.stem}.{node.name}"))
    return found


def calls(tree, name):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name:
            yield node


def breaches(kernel):
    """What stands before the wait and must not; or that there is none."""
    found = []
    for statement in kernel.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "PDL":
            return found if ast.unparse(statement.body[0]) == "await_earlier()" else ["no wait"]
        found += [f"store to {ast.unparse(call.args[0])}" for call in calls(statement, "store")]
        names = {ast.unparse(call.args[0]): {n.id for n in ast.walk(call.args[0]) if isinstance(n, ast.Name)}
                 for call in calls(statement, "load")}  # fmt: skip
        found += [f"load of {where}" for where, used in names.items() if not used & WEIGHTS]
        found += ["return" for node in ast.walk(statement) if isinstance(node, ast.Return)]
    return ["no wait"]


@pytest.mark.parametrize("kernel", overlapping_kernels())
def test_nothing_but_weights_is_touched_before_the_wait(kernel):
    """A load of an activation there reads what the kernel before it is about to write, once in a thousand runs; a return there
    lets the kernel after it start while the one before it still runs."""
    assert breaches(kernel) == []


def test_the_check_above_sees_each_breach():
    broken = """
def kernel(x, out, PDL):
    if tl.load(x) < 0:
        return
    tl.store(out, 0)
    if PDL:
        await_earlier()
def without(x, out, PDL):
    tl.store(out, tl.load(x))
"""
    first, second = ast.parse(broken).body
    assert breaches(first) == ["load of x", "return", "store to out"]
    assert "no wait" in breaches(second)
    assert len(overlapping_kernels()) > 8


def test_the_interpreter_and_long_batches_go_without():
    x = torch.ones(1)
    assert not overlap.overlaps(1, x) and overlap.options(False) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("P", [1, 4, 5, 64])
def test_a_chain_of_layers_gives_the_same_with_and_without(P, monkeypatch):
    """Norm, mixture of experts and mixer, layer after layer in one graph, buffers reused all along, and between two kernels a
    copy, which is no kernel: 200 replays, to the bit."""
    D, E, F, layers = 512, 16, 256, 12

    def randn(*shape):
        return (torch.randn(*shape) * shape[-1] ** -0.5).to("cuda", torch.bfloat16)

    torch.manual_seed(0)
    weights = [(randn(E, D), randn(E, 2 * F, D), randn(E, D, F), (randn(F, D), randn(F, D)), randn(D, F), randn(1, D))
               for _ in range(layers)]  # fmt: skip
    w, query, gate = randn(D), randn(D) * 9, torch.ones((), device="cuda", dtype=torch.bfloat16)
    start, committed = randn(P, D) * 20, randn(3, P, D) * 20

    def chain():
        h, y, streams = start, start, committed.clone()
        for one in weights:
            h, x = norm.add_rms_norm(h, y, w, 1e-6)
            h = moe.moe(x, *one, top_k=2, normalise=True, residual=h)
            streams[1] = h
            h, y = attnres.attn_res_norm(h, streams, query, gate, 1e-6, True, w, 1e-6)
        return h

    assert overlap.overlaps(P, start) == (torch.cuda.get_device_capability()[0] >= 9)
    with monkeypatch.context() as patch:
        patch.setattr(overlap, "ROWS", 0)
        want = chain().clone()
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(200):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
