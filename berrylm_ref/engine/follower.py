"""The program of every rank but the first: ``python -m berrylm_ref.engine.follower RANK PARENT JOB``, started by ``ranks``."""

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

from ..cache.pool import Pool, PoolSizes
from ..model import BerryLM, as_dtype
from .mirror import Line, follow
from .ranks import Job, keep_objects, leave, ready, stopped
from .runner import Runner

LOOK_SECONDS = 0.5


def main(rank: int, parent: int, job: Job) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they are rank 0's to answer: it says stop, or ends
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(parent, job), daemon=True).start()
    torch.set_num_threads(job.threads)
    if job.device == "cuda":
        torch.cuda.set_device(job.device_of(rank))  # before anything runs: kernels start on the current device
    model = job.load(rank)
    store = dist.FileStore(job.store, job.size)
    store.set(ready(rank), "")
    line = job.join(rank, store, model)
    runner = None
    try:
        pool = told_pool(line, model)
        runner = pool and told_runner(line, model, pool)
        if runner:
            keep_objects()
            follow(line, pool, runner)
    except RuntimeError:
        # A connection that closes is mostly another rank's death: if it was rank 0 the thread ends this process meanwhile, if
        # not, rank 0 finds the one that died first, and not this one.
        time.sleep(4 * LOOK_SECONDS)
        raise
    store.set(stopped(rank), "")
    leave(runner, model.device)


def told_pool(line: Line, model: BerryLM) -> Pool | None:
    """Pages and slots of rank 0's count; None if it says stop instead."""
    ((_, *sizes),) = line.hear()
    if not sizes:
        return None
    (fields,) = sizes
    kept = fields.pop("snapshot_dtype")
    sizes = PoolSizes(**fields, snapshot_dtype=None if kept is None else as_dtype(kept))
    return Pool(model.local, sizes, dtype=model.dtype, device=model.device)


def told_runner(line: Line, model: BerryLM, pool: Pool) -> Runner | None:
    """A runner with rank 0's buckets, captured while it captures its own; None if it says stop instead."""
    ((_, *options),) = line.hear()
    return Runner(model, pool.caches, *options) if options else None


def end_with(parent: int, job: Job) -> None:
    """No rank outlives rank 0, however that ends; in a thread, since a collective may wait for ever."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    shutil.rmtree(os.path.dirname(job.store), ignore_errors=True)  # which rank 0 had no time to do
    os._exit(1)


if __name__ == "__main__":
    status = 1
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)  # the destructors of NCCL may wait for a rank that is gone, and this one's end is what tells rank 0
