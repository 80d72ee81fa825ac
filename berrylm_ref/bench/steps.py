"""The engine step by step: prompts brought to the point that is measured, then so many steps by the clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..engine.llm import LLM
from ..engine.params import SamplingParams
from ..engine.request import Request
from .machine import synchronize
from .workload import random_prompts

SILENCE = 5  # seconds after which a long prefill says how far it is
SETTLED = 4  # tokens each request has made before decode counts as steady


def new_requests(llm: LLM, count: int, length: int, new_tokens: int, *purpose) -> list[Request]:
    """Greedy requests with random prompts of ``length`` tokens, others for every ``purpose``."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    prompts = random_prompts(llm.config.vocab_size, count, length, *purpose)
    return [request for prompt in prompts for request in llm.requests(prompt, params)]


@contextmanager
def running(llm: LLM, requests: list[Request]) -> Iterator[None]:
    """``requests`` in the engine; on leaving, those that have not ended are cancelled."""
    try:
        for request in requests:
            llm.engine.add(request)
        yield
    finally:
        for request in requests:
            llm.engine.cancel(request)


def until_decoding(llm: LLM, requests: list[Request], deadline: float) -> list[float]:
    """Step until each request has made SETTLED tokens; returns the seconds of every step up to the last first token."""
    seconds, said = [], time.monotonic()
    while min(len(r.output_ids) for r in requests) < SETTLED:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the time limit has passed after {len(seconds)} steps of prefill")
        waits = not all(r.output_ids for r in requests)
        begin = time.perf_counter()
        llm.engine.step()
        if waits:
            seconds.append(time.perf_counter() - begin)
        if time.monotonic() > said + SILENCE:
            said = time.monotonic()
            print(f"step {len(seconds)} of the prefill, {sum(seconds):.1f} s", flush=True)
    return seconds


def step_seconds(llm: LLM, steps: int) -> float:
    """Mean of ``steps`` steps; the clock stops when the device has finished."""
    device = llm.model.device
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        llm.engine.step()
    synchronize(device)
    return (time.perf_counter() - begin) / steps


def first_token_seconds(llm: LLM, length: int, *purpose) -> float:
    """From sending one random prompt to its first token."""
    (request,) = new_requests(llm, 1, length, 1, *purpose)
    synchronize(llm.model.device)
    begin = time.perf_counter()
    with running(llm, [request]):
        while not request.finished:
            llm.engine.step()
        return time.perf_counter() - begin
