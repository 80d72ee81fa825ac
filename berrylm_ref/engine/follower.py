"""The program of every rank but the first: ``python -m berrylm_ref.engine.follower RANK PARENT JOB``, started by ``ranks``."""

import json
import os
import shutil
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from ..cache.pool import Pool, PoolSizes
from ..model import as_dtype
from .mirror import follow
from .ranks import Job, ready
from .runner import Runner

LOOK_SECONDS = 0.5


def main(rank: int, parent: int, job: Job) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they are rank 0's to answer: it says stop, or ends
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(parent, job), daemon=True).start()
    torch.set_num_threads(job.threads)
    model = job.load(rank)
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)
    store = dist.FileStore(job.store, job.size)
    store.set(ready(rank), "")
    line = job.join(rank, store)
    ((_, sizes),) = line.hear()
    kept = sizes.pop("snapshot_dtype")
    sizes = PoolSizes(**sizes, snapshot_dtype=None if kept is None else as_dtype(kept))
    pool = Pool(model.local, sizes, dtype=model.dtype, device=model.device)
    ((_, buckets, graphs),) = line.hear()
    try:
        follow(line, pool, Runner(model, pool.caches, buckets, graphs))
    except RuntimeError:
        # A connection that closes is mostly another rank's death: if it was rank 0 the thread ends this process meanwhile, if
        # not, rank 0 finds the one that died first, and not this one.
        time.sleep(4 * LOOK_SECONDS)
        raise
    dist.destroy_process_group()


def end_with(parent: int, job: Job) -> None:
    """No rank outlives rank 0, however that ends; in a thread, since a collective may wait for ever."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    shutil.rmtree(os.path.dirname(job.store), ignore_errors=True)  # which rank 0 had no time to do
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
