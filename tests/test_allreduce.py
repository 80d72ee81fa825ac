"""The sum over ranks: one kernel over peers' memory only where every rank has found it right, else NCCL, and the log says why."""

import logging

import pytest
import torch
import torch.distributed as dist

from berrylm_ref import allreduce
from berrylm_ref.allreduce import SMALL, VARIABLE, AllReduce, choose

GPU = torch.device("cuda", 0)


@pytest.fixture
def prepared(monkeypatch, caplog):
    """Prepare with stand-ins for peers' memory, its check, and the other ranks; the result, and what the log said."""

    def run(memory=None, fault=None, others=True, dtype=torch.bfloat16, device=GPU, why=None):
        def buffer(device, dtype):
            if memory:
                raise RuntimeError(f"{memory}\nand where")
            return torch.zeros(SMALL // dtype.itemsize, dtype=dtype), "0"

        monkeypatch.setattr(allreduce, "shared_buffer", buffer)
        monkeypatch.setattr(allreduce, "everywhere", lambda holds, device: holds and others)
        monkeypatch.setattr(AllReduce, "check", lambda self, device, dtype: fault)
        reduce = AllReduce()
        with caplog.at_level(logging.INFO):
            reduce.prepare(device, dtype, why)
        return reduce, caplog.text

    return run


@pytest.mark.parametrize(
    "case, said",
    [
        ({"memory": "no access to peers"}, "NCCL for every size: no access to peers\n"),
        ({"fault": "ranks differ at 4096 bytes"}, "NCCL for every size: ranks differ at 4096 bytes"),
        ({"others": False}, "NCCL for every size: another rank"),
    ],
)
def test_what_is_not_right_everywhere_is_not_used(prepared, case, said):
    """One rank that adds up by itself while the others call NCCL would wait for ever."""
    reduce, log = prepared(**case)
    assert said in log and reduce.name == "none", "before there is a group"


def test_the_environment_can_ask_for_nccl(prepared, monkeypatch):
    monkeypatch.setenv(VARIABLE, "nccl")
    reduce, log = prepared(why=choose())
    assert f"NCCL for every size: {VARIABLE}=nccl" in log and "one-shot" not in reduce.name
    monkeypatch.setenv(VARIABLE, "ring")
    with pytest.raises(ValueError, match=f"{VARIABLE}: expected one of .*'nccl'.*, got 'ring'"):
        choose()


def test_the_second_start_of_a_process_takes_nccl(monkeypatch):
    """torch counts what it has exchanged about peers' memory: this process at two, new ranks at none, and both would wait."""
    monkeypatch.setattr(allreduce, "_started", False)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose() is None and "not the first" in choose()


def test_small_messages_take_the_kernel_and_large_ones_nccl(prepared, monkeypatch):
    """Every rank must choose alike: by shape and dtype."""
    reduce, log = prepared()
    assert "one-shot" in reduce.name and reduce.name in log
    calls = []
    monkeypatch.setattr(dist, "all_reduce", lambda x: calls.append(x.shape))
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_copy", lambda mine, x, op, group: calls.append(mine.shape) or x)
    rows = SMALL // 4096
    for x, taken in [((1, 2048), True), ((rows, 2048), True), ((rows + 1, 2048), False), ((1, 7), False), ((0, 2048), False)]:
        x = torch.zeros(x, dtype=torch.bfloat16)
        assert reduce.takes(x) == taken
        reduce(x)
        assert calls.pop() == x.shape
    assert not reduce.takes(torch.zeros(8))


@pytest.mark.parametrize("case", [{"device": torch.device("cpu")}, {"dtype": torch.float64}])
def test_elsewhere_nothing_is_set_up(prepared, case):
    reduce, log = prepared(memory="not to be asked for", **case)
    assert not log and reduce.name == "none"
