"""The workloads of the published figures, through the engine in this process and over HTTP."""

import json
import random
import statistics
import subprocess
import sys
import time
from itertools import count
from typing import Any

from ..engine.llm import LLM
from ..engine.params import SamplingParams
from .drive import drive, run_in_process
from .timing import Run
from .workload import Workload, random_prompts

WARMUP_TOKENS, WARMUP_PROMPTS = 8, 2**17  # new tokens of a request; prompt tokens up to which a whole wave is run
HTTP_SEED = 10**6  # far from the seeds of the runs in this process
TRAFFIC_REQUESTS, TRAFFIC_TOGETHER = 96, 32
TRAFFIC_PROMPTS, TRAFFIC_ANSWERS = (100, 1000), (40, 200)  # tokens, drawn evenly


def warm_up(llm: LLM, given: int, concurrency: int) -> None:
    """Compile and capture what the workload will use: a wave of short answers, of long prompts only so many that they fill two
    forwards, then a batch of decodes."""
    enough = max(4, 2 * llm.engine.scheduler.token_budget // given)
    prompts = concurrency if concurrency * given <= WARMUP_PROMPTS else min(concurrency, enough)
    run_in_process(llm, Workload(given, WARMUP_TOKENS, prompts, prompts, seed=-1))
    run_in_process(llm, Workload(min(given, 64), WARMUP_TOKENS, concurrency, concurrency, seed=-2))


def measure(llm: LLM, spec: tuple[int, int, int], seconds: float, deadline: float) -> dict[str, Any]:
    """Runs of one full wave each (``concurrency`` requests, all sent at once, with prompts of their own) that fit in ``seconds``.

    At least one run; ``deadline`` cuts it. Output tokens over wall time is the median of the runs, TPOT and TTFT those of all
    requests.
    """
    given, wanted, concurrency = spec
    warm_up(llm, given, concurrency)
    runs: list[Run] = []
    begin = time.monotonic()
    for seed in count():
        started = time.monotonic()
        runs.append(run_in_process(llm, Workload(given, wanted, concurrency, concurrency, seed=seed), deadline=deadline))
        now = time.monotonic()
        if now - begin + (now - started) > min(seconds, deadline - begin):
            break
    whole = [run for run in runs if not run.cut] or runs  # a cut run counts only where there is no other
    every = Run(sum(r.seconds for r in whole), [t for r in whole for t in r.timings], whole[0].cut, whole[0].partial_tokens)
    found = every.summary()
    return {
        "runs": len(whole),
        "requests_a_run": concurrency,
        "seconds_cap": seconds,
        "output_tokens_per_s": statistics.median(run.output_tokens_per_s for run in whole),
        "output_tokens_per_s_of_runs": [run.output_tokens_per_s for run in whole],
        "tpot_ms": found["tpot_ms"] and found["tpot_ms"]["median"],
        "summary": found,
    }


def traffic(llm: LLM, deadline: float) -> dict[str, Any]:
    """Requests of all lengths that come and go: so many at a time, the next one sent when one has ended, prompts read between the
    decode steps of the others. Twice, with other prompts; the second is measured."""
    for seed in range(2):
        rng = random.Random(seed)
        prompts = random_prompts(llm.config.vocab_size, TRAFFIC_REQUESTS, TRAFFIC_PROMPTS[1], "traffic", seed)
        requests = []
        for prompt in prompts:
            params = SamplingParams(temperature=0, max_tokens=rng.randint(*TRAFFIC_ANSWERS), ignore_eos=True)
            requests += llm.requests(prompt[: rng.randint(*TRAFFIC_PROMPTS)], params)
        run = drive(llm.engine, requests, TRAFFIC_TOGETHER, deadline=deadline)
    found = {"together": TRAFFIC_TOGETHER, "prompts": TRAFFIC_PROMPTS, "answers": TRAFFIC_ANSWERS, **run.summary()}
    first, each = (found[name]["median"] for name in ("ttft_ms", "tpot_ms"))
    print(f"traffic: {found['output_tokens_per_s']:.0f} tok/s, first token after {first:.0f} ms, TPOT {each:.1f} ms")
    return found


def measure_over_http(url: str, vocab_size: int, spec: tuple[int, int, int], time_left: float) -> dict[str, Any]:
    """The same wave from a process of its own, ``berrylm bench serve --url``: the client takes no time from the engine.

    Not warmed up: the runs in this process have compiled what there is to compile.
    """
    given, wanted, concurrency = spec
    options = {
        "--url": url, "--vocab-size": vocab_size, "--input-len": given, "--output-len": wanted, "--concurrency": concurrency,
        "--requests": concurrency, "--warmup": 0, "--seed": HTTP_SEED,
    }  # fmt: skip
    command = [sys.executable, "-m", "berrylm_ref.cli", "bench", "serve", *(str(x) for pair in options.items() for x in pair)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, time_left))
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"bench: http: expected {spec} to end within the time limit, {time_left:.0f} s were left") from error
    if done.returncode:
        raise ValueError(f"bench: http: expected the client to end well, got: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout)
    return {
        "output_tokens_per_s": found["output_tokens_per_s"],
        "tpot_ms": found["tpot_ms"] and found["tpot_ms"]["median"],
        "summary": {k: v for k, v in found.items() if k not in ("workload", "how")},
    }
