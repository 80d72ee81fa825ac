"""The sum over all ranks of tensor parallel: torch.distributed, and on GPUs for small messages one kernel over peers' memory.

A decode step has two all-reduces a layer, of 4 KB for one sequence and 256 KB for 64, and what they take is their start. With
symmetric memory every rank puts its part where the others can read it, waits until all have, and adds up all parts in the
order of the ranks: one kernel, and the same bits everywhere. Multicast is never used.
"""

import logging
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)
VARIABLE, CHOICES = "BERRYLM_ALL_REDUCE", ("auto", "nccl")  # nccl: for every size
SMALL = 512 * 1024  # bytes up to which one kernel reads all parts; beyond, NCCL moves less
ALIGNED = 16  # bytes, of what a thread loads
CHECK_SECONDS = 20


_started = False  # torch numbers what processes exchange about peers' memory, and ranks started later begin anew


def choose() -> str | None:
    """Why NCCL takes every size, for all ranks of a start alike; None: it need not. ValueError for an unknown choice."""
    global _started
    found = os.environ.get(VARIABLE, "auto")
    if found not in CHOICES:
        raise ValueError(f"tensor parallel: {VARIABLE}: expected one of {CHOICES}, got {found!r}")
    if found == "nccl":
        return f"{VARIABLE}=nccl"
    again, _started = _started, True
    return "these are not the first ranks that this process starts" if again else None


class AllReduce:
    """``all_reduce(x)`` is the sum of every rank's x, the same bits on each; x may be overwritten."""

    def __init__(self):
        self._buffer: Tensor | None = None

    @property
    def name(self) -> str:
        if self._buffer is not None:
            return f"one-shot over peers' memory up to {SMALL // 1024} KiB, NCCL beyond"
        return dist.get_backend() if dist.is_initialized() else "none"

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self._buffer is not None and self.takes(x):
            mine = self._buffer[: x.numel()].view(x.shape)
            return self._one_shot(mine, x, "sum", self._group)
        options = dist.AllreduceOptions()  # what dist.all_reduce does, without its checks and its log
        options.reduceOp, options.asyncOp = dist.ReduceOp.SUM, False
        work = dist.group.WORLD.allreduce([x], options)
        if work is not None:  # NCCL has put it into the current stream
            work.wait()
        return x

    def takes(self, x: Tensor) -> bool:
        """Whether one kernel does it: by shape and dtype alone, on which all ranks agree."""
        return x.dtype == self._buffer.dtype and 0 < x.nbytes <= SMALL and x.nbytes % ALIGNED == 0

    def prepare(self, device: torch.device, dtype: torch.dtype, fault: str | None = None) -> None:
        """Set up the one kernel and compare it with NCCL; all ranks call it, and use it where it is right on each of them.

        fault: why not, if that is known.
        """
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float32):
            return
        for stage in (self.set_up, self.add_up, self.compare):
            try:
                fault = fault or stage(device, dtype)
            except (RuntimeError, AttributeError) as error:  # no access to peers' memory, or a torch without the kernel
                fault = str(error).splitlines()[0]
            if not everywhere(fault is None, device):  # else some ranks would wait for others in the next stage
                self._buffer = None
                log.warning("all-reduce: NCCL for every size: %s", fault or "another rank can't have it otherwise")
                return
        log.info("all-reduce: %s", self.name)

    def set_up(self, device: torch.device, dtype: torch.dtype) -> None:
        """SMALL bytes that every rank of the group can read."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")  # one buffer for ever needs no pool that must end in order
        import torch.distributed._symmetric_memory as memory

        self._one_shot, self._group = torch.ops.symm_mem.one_shot_all_reduce_copy, dist.group.WORLD.group_name
        buffer = memory.empty(SMALL // dtype.itemsize, dtype=dtype, device=device)
        memory.rendezvous(buffer, self._group)
        self._buffer = buffer

    def add_up(self, device: torch.device, dtype: torch.dtype) -> None:
        """Sums of several sizes, at once, that must end."""
        rng = torch.Generator(device).manual_seed(dist.get_rank() + 1)
        sizes = [ALIGNED // dtype.itemsize, 2048, 13 * 2048, SMALL // dtype.itemsize]
        self._whole = [torch.randint(-60, 60, (n,), generator=rng, device=device).to(dtype) for n in sizes]
        parts = [torch.randn(n, generator=rng, device=device).to(dtype) for n in sizes]
        self._sums = [self(x) for x in self._whole], [self(x) for x in parts]
        done = torch.cuda.Event()
        done.record()
        end = time.monotonic() + CHECK_SECONDS
        while not done.query():
            if time.monotonic() > end:
                raise TimeoutError(f"tensor parallel: the sum over peers' memory does not end: set {VARIABLE}=nccl")
            time.sleep(0.001)

    def compare(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """What is wrong with the sums, or None. Whole numbers add up exactly: NCCL must find the same; of others the bits must
        be the same on every rank."""
        (whole, sums), faults = (self._whole, self._sums), []
        del self._whole, self._sums
        for x, found in zip(whole, sums[0], strict=True):
            dist.all_reduce(x)
            if not torch.equal(found, x):
                faults.append(f"one kernel and NCCL differ at {x.nbytes} bytes")
        for found in sums[1]:
            first = found.clone()
            dist.broadcast(first, 0)
            if not torch.equal(found, first):
                faults.append(f"ranks differ at {found.nbytes} bytes")
        return "; ".join(faults) or None


def everywhere(holds: bool, device: torch.device) -> bool:
    """Whether it holds on every rank."""
    verdict = torch.tensor([holds], dtype=torch.int32, device=device)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict.item())
