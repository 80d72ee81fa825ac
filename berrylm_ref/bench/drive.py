"""Drive an engine in this process: so many requests in flight, the next one sent when one has ended."""

import math
import time
from collections import deque
from collections.abc import Callable

from ..engine.engine import Engine
from ..engine.llm import LLM
from ..engine.params import SamplingParams
from ..engine.request import Request
from .timing import Run, Timing
from .workload import Workload

Progress = Callable[[int], None]  # told how many requests have ended


def make(llm: LLM, workload: Workload) -> list[Request]:
    """The greedy requests of ``workload``, run to their full length; checking them is not part of what is timed."""
    params = SamplingParams(temperature=0, max_tokens=workload.output_len, ignore_eos=True)
    return [r for prompt in workload.prompts(llm.config.vocab_size) for r in llm.requests(prompt, params)]


def drive(
    engine: Engine, requests: list[Request], concurrency: int, *, deadline: float = math.inf, progress: Progress | None = None
) -> Run:
    """Run ``requests``, at most ``concurrency`` at a time. At ``deadline`` (of ``time.monotonic``) those left are cancelled."""
    waiting, flying, run = deque(requests), {}, Run(seconds=0.0)
    ended = 0
    begin = last = time.perf_counter()
    try:
        while waiting or flying:
            if time.monotonic() > deadline:
                run.cut = True
                break
            while waiting and len(flying) < concurrency:
                request = waiting.popleft()
                flying[request] = Timing(time.perf_counter(), len(request.prompt_ids))
                engine.add(request)
            for event in engine.step():
                last, timing = time.perf_counter(), flying[event.request]
                if not timing.output_tokens:
                    timing.first = last
                timing.output_tokens = event.made
                if event.finish_reason:
                    timing.last, timing.cached_tokens = last, event.request.cached_tokens
                    run.timings.append(flying.pop(event.request))
                    ended += 1
                    if progress:
                        progress(ended)
    finally:
        for request in flying:  # cut, or interrupted
            engine.cancel(request)
    run.partial_tokens = sum(t.output_tokens for t in flying.values())
    run.timings.sort(key=lambda t: t.sent)
    run.seconds = max(last - begin, 1e-9)
    return run


def run_in_process(llm: LLM, workload: Workload, **options) -> Run:
    """``workload`` on the engine of ``llm``; ``options`` are those of ``drive``."""
    if llm.engine is None:
        raise ValueError("bench: llm: expected one with an engine, got sequential=True")
    return drive(llm.engine, make(llm, workload), workload.concurrency, **options)
