"""The processes of tensor parallel, started by torch's launcher and watched: one rank a process, this one is rank 0."""

import atexit
import gc
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes

from ..allreduce import choose
from ..cache.pool import Pool, PoolSizes
from ..config import BerryLMConfig
from ..model import BerryLM, as_dtype
from ..random_weights import load_or_draw
from ..sharding import Shard
from .mirror import LeadingPool, LeadingRunner, Line
from .runner import Runner

log = logging.getLogger(__name__)
START_SECONDS = 600  # for every rank to have its weights
STOP_SECONDS = 5  # for every rank to end when told to
WATCH_SECONDS = 0.2
IDLE = timedelta(days=3650)  # a rank may wait for the next message as long as it likes; that rank 0 is there, it watches itself


class RankDied(RuntimeError):
    """A rank has ended, or the ranks are out of step: nothing runs any more."""


@dataclass(frozen=True)
class Job:
    """What every rank loads; ``folder`` of a checkpoint, ``device`` "cpu" or "cuda", ``threads`` of torch.

    The same threads everywhere: what ranks compute alike must come out alike to the bit, or their routers part.
    """

    folder: str
    size: int
    dtype: str
    device: str
    backend: str
    kda_intra: str | list[str]
    store: str
    threads: int
    seed: int | None = None  # draws the weights of the folder's config.json
    nccl: str | None = None  # why it takes every size (see ``allreduce``)

    def device_of(self, rank: int) -> torch.device:
        return torch.device("cuda", rank) if self.device == "cuda" else torch.device("cpu")

    def load(self, rank: int) -> BerryLM:
        shard = Shard(BerryLMConfig.from_pretrained(self.folder), rank, self.size)
        options = {"dtype": self.dtype, "device": self.device_of(rank), "backend": self.backend, "kda_intra": self.kda_intra}
        return load_or_draw(self.folder, self.seed, shard=shard, **options)

    def join(self, rank: int, store: dist.Store, model: BerryLM) -> Line:
        """Meet the other ranks: NCCL between GPUs, gloo between CPU processes, and gloo for messages, which no GPU waits for."""
        device = model.device
        os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # a communicator is whole before a graph is captured
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # else torch keeps the Python stack of each collective
        backend = "nccl" if device.type == "cuda" else "gloo"
        place = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(backend, store=store, rank=rank, world_size=self.size, **place)
        line = Line(dist.new_group(backend="gloo", timeout=IDLE), pinned=device.type == "cuda")
        model.shard.all_reduce.prepare(device, model.dtype, self.nccl)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what loading took
            store.set(free(rank), str(torch.cuda.mem_get_info(device)[0]))
        return line


class Ranks:
    """The other ranks, as rank 0 sees them.

    A rank that dies is named in ``fault`` and in the log, the others are ended, and a step raises RankDied. ``exits``: end this
    process as well, for a server, and on GPUs, where a kernel that waits for a lost rank can't be ended otherwise.
    """

    def __init__(
        self, folder: str | Path, size: int, *, dtype, device: str, backend: str, kda_intra: str | list[str], seed: int | None
    ):
        check(folder, size, device, backend)
        nccl = choose() if device == "cuda" else None
        name = str(as_dtype(dtype)).removeprefix("torch.")
        self.fault: str | None = None
        self.exits = device == "cuda"
        self.line: Line | None = None
        self.free: int | None = None  # bytes, on the GPU that has least
        self._runner: Runner | None = None
        self._died, self._closing = threading.Event(), threading.Event()
        self._scratch = tempfile.mkdtemp(prefix="berrylm-ranks-")
        store = os.path.join(self._scratch, "store")
        self.job = Job(str(folder), size, name, device, backend, kda_intra, store, torch.get_num_threads(), seed, nccl)
        use_loopback()
        self._processes = launch(self.job, self._scratch)
        atexit.register(self.close)
        self._watch = threading.Thread(target=self._watch_them, name="berrylm-ranks", daemon=True)
        self._watch.start()

    def load(self) -> BerryLM:
        """This rank's part of the model, and all ranks in one group."""
        try:
            model = self.job.load(0)
            store = dist.FileStore(self.job.store, self.job.size)
            end = time.monotonic() + START_SECONDS
            while not store.check([ready(rank) for rank in range(1, self.job.size)]):
                if self.fault or time.monotonic() > end:
                    raise RankDied(self.fault or f"tensor parallel: a rank was not ready after {START_SECONDS} s")
                time.sleep(0.02)
            self._store, self.line = store, self.job.join(0, store, model)
            if self.job.device == "cuda":
                self.free = min(int(store.get(free(rank))) for rank in range(self.job.size))
            return model
        except BaseException:
            self.close()
            raise

    def pool(self, config: BerryLMConfig, sizes: PoolSizes, **options) -> Pool:
        """Every rank's pages and slots, of rank 0's count."""
        kept = sizes.snapshot_dtype
        fields = asdict(sizes) | {"snapshot_dtype": None if kept is None else str(kept).removeprefix("torch.")}
        self.line.say("pool", fields)
        return LeadingPool(self.line, config, sizes, **options)

    def runner(self, model: BerryLM, caches, *options) -> Runner:
        self.line.say("runner", *options)  # they capture their graphs while this one does
        self._runner = LeadingRunner(self, model, caches, *options)
        if self.job.device == "cuda":
            keep_objects()
        return self._runner

    @contextmanager
    def in_step(self) -> Iterator[Line]:
        """Around what all ranks do together."""
        if self.fault:
            raise RankDied(self.fault)
        try:
            yield self.line
        except BaseException as error:
            self._died.wait(1)  # a rank that has died is found within this time
            self.fault = self.fault or f"tensor parallel: a step broke off, and the ranks are out of step: {error!r}"
            self.close()
            if self.exits:
                threading.Thread(target=self._exit, daemon=True).start()
            raise RankDied(self.fault) from error

    def close(self) -> None:
        """End the other ranks, and wait until they have ended."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self.line and not self.fault:
            self.line.say("stop")
            others = [stopped(rank) for rank in range(1, self.job.size)]
            wait_until(lambda: self._store.check(others) or all(x is not None for x in self.statuses().values()))
            if self.job.device == "cuda":  # NCCL's communicator ends on all ranks at once
                self._leave()
            wait_until(lambda: all(status is not None for status in self.statuses().values()))
        self._end()

    def statuses(self) -> dict[int, int | None]:
        """The exit status of every other rank, None while it runs."""
        return {i + 1: handler.proc.poll() for i, handler in self._processes.subprocess_handlers.items()}

    def pids(self) -> dict[int, int]:
        return {i + 1: pid for i, pid in self._processes.pids().items()}

    def _end(self) -> None:
        self._processes.close(signal.SIGKILL)
        gc.unfreeze()
        if self.job.device == "cpu" and dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(self._scratch, ignore_errors=True)
        atexit.unregister(self.close)

    def _leave(self) -> None:
        """End this rank's part of NCCL, in a thread: it can wait for ever."""
        thread = threading.Thread(target=leave, args=(self._runner, self.job.device_of(0)), daemon=True)
        thread.start()
        thread.join(STOP_SECONDS)
        if thread.is_alive():
            log.error("tensor parallel: NCCL did not end within %d s: this process will exit with status 1", STOP_SECONDS)
            atexit.register(os._exit, 1)

    def _exit(self) -> None:
        """End this process, after a second in which the engine says so to whoever waits."""
        time.sleep(1)
        print(f"error: {self.fault}", file=sys.stderr, flush=True)
        shutil.rmtree(self._scratch, ignore_errors=True)
        os._exit(1)

    def _watch_them(self) -> None:
        while not self._closing.wait(WATCH_SECONDS):
            for rank, status in self.statuses().items():
                if status is None:
                    continue
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
                self.fault = f"tensor parallel: rank {rank} of {self.job.size} (pid {self.pids()[rank]}) {how}"
                self._died.set()
                log.error("%s", self.fault)
                self._processes.close(signal.SIGKILL)
                if self.exits:
                    self._exit()
                return


def check(folder: str | Path, size: int, device: str, backend: str) -> None:
    """ValueError before anything is started."""
    Shard(BerryLMConfig.from_pretrained(folder), 0, size)
    if device not in ("cpu", "cuda"):
        raise ValueError(f"LLM: device: expected 'cpu' or 'cuda' with tp = {size}, got {device!r}")
    if device == "cuda" and torch.cuda.device_count() < size:
        raise ValueError(f"LLM: tp: expected at most {torch.cuda.device_count()}, the GPUs there are, got {size}")
    if not isinstance(backend, str):
        raise ValueError(f"LLM: backend: expected a name with tp = {size}, which other processes know, got {backend!r}")
    if dist.is_initialized():
        raise ValueError(f"LLM: tp: expected no process group in this process, for it joins one with tp = {size}")


def launch(job: Job, scratch: str) -> PContext:
    """Start ranks 1 .. size - 1. torch's launcher takes over the signals of this process; they are given back."""
    main = threading.current_thread() is threading.main_thread()
    held = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)} if main else {}
    count = job.size - 1
    description = json.dumps(asdict(job))
    arguments = {i: ("-m", "berrylm_ref.engine.follower", i + 1, os.getpid(), description) for i in range(count)}
    try:
        return start_processes(
            "berrylm", sys.executable, arguments, {i: {} for i in range(count)}, DefaultLogsSpecs(log_dir=scratch)
        )
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)


def ready(rank: int) -> str:
    """The key that a rank sets when it has its weights."""
    return f"ready/{rank}"


def stopped(rank: int) -> str:
    """The key that a rank sets when it has been told to stop."""
    return f"stopped/{rank}"


def free(rank: int) -> str:
    """The key of the bytes that are free on a rank's GPU beside its weights."""
    return f"free/{rank}"


def leave(runner: Runner | None, device: torch.device) -> None:
    """End this rank's part of the process group, when nothing runs any more; all ranks do so at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if runner:
            runner.release()
    dist.destroy_process_group()


def keep_objects() -> None:
    """What is there when all is set up stays: a collection among all of torch's objects stops a rank, and the others wait."""
    gc.collect()
    gc.freeze()


def wait_until(condition: Callable[[], bool], seconds: float = STOP_SECONDS) -> None:
    """Until it holds or so many seconds have passed."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def use_loopback() -> None:
    """gloo listens on the address of the host's name unless it is told where; all ranks are on this machine."""
    if sys.platform == "linux" and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
