"""The sum over ranks: one kernel over peers' memory only where every rank has found it right, else NCCL, and the log says why."""

import logging
from types import SimpleNamespace

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
        def set_up(self, device, dtype):
            if memory:
                raise RuntimeError(f"{memory}\nand where")
            self._buffer, self._group = torch.zeros(SMALL // dtype.itemsize, dtype=dtype), "0"

        monkeypatch.setattr(AllReduce, "set_up", set_up)
        monkeypatch.setattr(AllReduce, "add_up", lambda self, device, dtype: None)
        monkeypatch.setattr(AllReduce, "compare", lambda self, device, dtype: fault)
        monkeypatch.setattr(allreduce, "everywhere", lambda holds, device: holds and others)
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

    world = SimpleNamespace(allreduce=lambda tensors, options: calls.append(tensors[0].shape))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    reduce._one_shot = lambda mine, x, op, group: calls.append(mine.shape) or x
    rows = SMALL // 4096
    for x, taken in [((1, 2048), True), ((rows, 2048), True), ((rows + 1, 2048), False), ((1, 7), False), ((0, 2048), False)]:
        x = torch.zeros(x, dtype=torch.bfloat16)
        assert reduce.takes(x) == taken
        reduce(x)
        assert calls.pop() == x.shape
    assert not reduce.takes(torch.zeros(8))


class Summing(AllReduce):
    """Stands in for the kernel: what it gives on this one rank, changed by ``error``."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __call__(self, x):
        return x + self.error


@pytest.mark.parametrize("error, said", [(0, None), (1, "one kernel and NCCL differ at 16 bytes")])
def test_sums_that_are_not_those_of_nccl_are_noticed(monkeypatch, error, said):
    """A kernel that reads before its peers have written adds up what was there before."""

    class Done:
        record, query = lambda self: None, lambda self: True

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lambda x: None)
    monkeypatch.setattr(dist, "broadcast", lambda x, source: None)
    monkeypatch.setattr(torch.cuda, "Event", Done)
    reduce, cpu = Summing(error), torch.device("cpu")
    reduce.add_up(cpu, torch.bfloat16)
    found = reduce.compare(cpu, torch.bfloat16)
    assert found is None if said is None else said in found

    monkeypatch.setattr(dist, "broadcast", lambda x, source: x.add_(1))
    reduce.add_up(cpu, torch.bfloat16)
    assert "ranks differ at 4096 bytes" in reduce.compare(cpu, torch.bfloat16)


def test_sums_that_do_not_end_are_an_error(monkeypatch):
    class Never:
        record, query = lambda self: None, lambda self: False

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", Never)
    monkeypatch.setattr(allreduce, "CHECK_SECONDS", 0.01)
    with pytest.raises(TimeoutError, match=f"does not end: set {VARIABLE}=nccl"):
        Summing(0).add_up(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("case", [{"device": torch.device("cpu")}, {"dtype": torch.float64}])
def test_elsewhere_nothing_is_set_up(prepared, case):
    reduce, log = prepared(memory="not to be asked for", **case)
    assert not log and reduce.name == "none"
