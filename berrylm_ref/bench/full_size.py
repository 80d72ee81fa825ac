"""``berrylm bench model``: the parts of the measurement in their order, each into the report as soon as it is done."""

import gc
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..backend import get_backend
from ..config import BerryLMConfig
from ..engine.llm import LLM
from ..model import BerryLM, as_dtype
from ..random_weights import random_model
from .correctness import layer_profile, same_answers
from .experts import measured_experts
from .load import TRAFFIC_TOGETHER, measure, measure_over_http, traffic
from .long_context import DECODED, long_context
from .machine import ceilings, folder_name, machine, synchronize
from .profile import profile_decode, profile_prefill
from .report import Report
from .roofline import PREFILL_SHARE, Floors
from .server import served
from .steps import first_token_seconds
from .targets import PREFILL_TARGET, PUBLISHED_BY, TARGETS, against_published
from .workload import Workload

RESULTS = Path(__file__).parents[2] / "kernels" / "benchmarks" / "results"
PREFILL_RUNS = 5
FIRST_TOKENS = (16, 64, 256, 1024, 2048, 4096)  # prompts whose time to the first token is measured, up to the longest wanted


@dataclass(frozen=True)
class Settings:
    """What to measure; lengths are tokens, limits seconds. ``engine``: options of ``LLM`` beside the model."""

    config: BerryLMConfig
    name: str
    folder: Path | None = None  # a checkpoint in place of random weights
    dtype: str = "bfloat16"
    device: str = "cuda"
    backend: str = "auto"
    seed: int = 0
    workloads: tuple[tuple[int, int, int], ...] = tuple(TARGETS)
    seconds_per_workload: float = 30.0
    time_limit: float = 540.0
    http: bool = False
    http_workloads: tuple[tuple[int, int, int], ...] | None = None  # None: all of them
    profile: bool = False
    check: bool = False
    long: bool = False
    traffic: bool = False
    prefill_tokens: int = 8192
    profile_batches: tuple[int, ...] = (1, 16, 64)
    profile_context: int = 1024
    check_prompts: int = 3
    check_tokens: int = 2048
    check_twice_tokens: int = 8050
    check_new_tokens: int = 32
    long_tokens: int | None = None  # None: all but room for the decoded tokens
    tp: int = 1
    engine: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def measure_model(s: Settings, out: Path | None = None) -> Report:
    """Run the parts that ``s`` asks for. The report's file is written after each; its failures are for the caller to judge."""
    device = torch.device(s.device)
    facts = {"command": "berrylm bench model", "machine": machine(device), "settings": described(s)}
    name = "model.json" if s.tp == 1 else f"model_tp{s.tp}.json"
    report = Report(out or RESULTS / folder_name(facts["machine"]) / name, s.time_limit, facts)
    model = build(s, report)
    if model is None:
        return report
    rates = report.part("ceilings", ceilings, device)
    if s.check and s.tp == 1:  # of several ranks none has the whole model
        report.part("layer_profile", layer_profile, model, s.check_prompts, s.check_tokens)
    floors = Floors.of(model, {name: s.tp * rate for name, rate in rates.items()}) if rates else None  # ranks read side by side
    held: list[LLM] = []
    with TemporaryDirectory() as scratch:
        source: BerryLM | Path = model
        if s.tp > 1:  # every rank reads or draws its own part
            source = s.folder or Path(scratch)
            if not s.folder:
                s.config.save_pretrained(source)
        model = None
        free_memory(device)
        report.part("memory", start_engine, s, source, held)
    if not rates or not held:
        return report
    (llm,) = held
    gc.collect()
    gc.freeze()  # as a server does when it is up
    try:
        measure_engine(s, report, llm, floors)
    finally:
        llm.close()
        gc.unfreeze()
    report.data["peak_memory_bytes"] = peak_memory(device)
    report.write()
    print("\n".join(lines_of(report.data)), flush=True)
    return report


def measure_engine(s: Settings, report: Report, llm: LLM, floors: Floors) -> None:
    """Everything that needs no more than the engine."""
    measure_speed(s, report, llm, floors)
    if s.check:
        report.part("cached_answers", same_answers, llm, s.check_prompts, s.check_tokens, s.check_new_tokens)
        report.part("sent_twice", same_answers, llm, 1, s.check_twice_tokens, s.check_new_tokens)
    if s.long:
        tokens = s.long_tokens or s.config.max_position_embeddings - 2 * DECODED
        arguments = (llm, tokens, s.profile_context, report.deadline)
        report.part("long_context", with_peak, torch.device(s.device), long_context, *arguments)


def measure_speed(s: Settings, report: Report, llm: LLM, floors: Floors) -> None:
    """Prefill, experts hit, workloads here and over HTTP, the profile."""
    if s.prefill_tokens:
        report.part("prefill", prefill_rate, llm, floors, s.prefill_tokens)
        report.part("first_token_ms", first_tokens, llm, [n for n in FIRST_TOKENS if n <= s.prefill_tokens])
    if s.traffic:
        report.part("traffic", traffic, llm, report.deadline)
    batches = sorted({c for _, _, c in s.workloads} | set(s.profile_batches if s.profile else ()))
    count = batches and s.tp == 1  # counted in one model here; else all experts are taken to be as likely
    hit = (report.part("experts_a_layer", measured_experts, llm, batches) or {}) if count else {}
    for spec in s.workloads:
        report.part(name_of(spec), one_workload, s, report, llm, floors, spec, hit, under="workloads")
    if s.http:
        with ExitStack() as stack:
            url = report.part("server", lambda: stack.enter_context(served(llm)))
            for spec in over_http(s) if url else ():
                report.part(name_of(spec), one_over_http, s, report, url, spec, under="http")
    if s.profile:
        for n in s.profile_batches:
            arguments = (llm, floors, n, s.profile_context, hit.get(n), report.deadline)
            report.part(f"decode_{n}", profile_decode, *arguments, under="profile")
        if s.prefill_tokens:
            report.part(f"prefill_{s.prefill_tokens}", profile_prefill, llm, floors, s.prefill_tokens, under="profile")


def over_http(s: Settings) -> tuple[tuple[int, int, int], ...]:
    return s.workloads if s.http_workloads is None else s.http_workloads


def described(s: Settings) -> dict[str, Any]:
    left_out = ("config", "folder")
    out = {k: v for k, v in asdict(s).items() if k not in left_out}
    weights = "a checkpoint" if s.folder else f"random, seed {s.seed}"
    return {**out, "layers": s.config.num_hidden_layers, "weights": weights, "published_by": PUBLISHED_BY}


def build(s: Settings, report: Report) -> BerryLM | None:
    """The model on its device, for several ranks only its shapes; the time it took and its size into the report."""
    held: list[BerryLM] = []

    def make() -> dict[str, Any]:
        begin, device = time.monotonic(), torch.device(s.device)
        options = {"dtype": s.dtype, "device": s.device, "backend": s.backend}
        if s.tp > 1:
            backend = get_backend(s.backend, device, as_dtype(s.dtype))
            held.append(BerryLM(s.config, dtype=s.dtype, device="meta", backend=backend))
        else:
            held.append(
                BerryLM.from_pretrained(s.folder, **options) if s.folder else random_model(s.config, seed=s.seed, **options)
            )
        synchronize(device)
        parameters = list(held[0].parameters())
        facts = {"parameters": sum(p.numel() for p in parameters), "bytes": sum(p.nbytes for p in parameters)}
        print(f"{facts['parameters']:,} parameters, {facts['bytes'] / 1e9:.1f} GB, in {time.monotonic() - begin:.1f} s")
        return {**facts, "backend": held[0].backend.name, "peak_memory_bytes": peak_memory(device)}

    report.part("weights", make)
    return held[0] if held else None


def start_engine(s: Settings, source: BerryLM | Path, held: list[LLM]) -> dict[str, Any]:
    """The engine of a model, or of the ranks that share a folder's; how many tokens and snapshots fit beside the weights."""
    running = max([c for _, _, c in (*s.workloads, *over_http(s))] + list(s.profile_batches) + [TRAFFIC_TOGETHER] * s.traffic)
    options = {"max_running_requests": running, **s.engine}
    if isinstance(source, BerryLM):
        held.append(LLM.from_model(source, **options))
    else:
        seed = None if s.folder else s.seed
        held.append(LLM(source, dtype=s.dtype, device=s.device, backend=s.backend, tp=s.tp, random_weights=seed, **options))
    cache = held[0].engine.cache
    pool, sizes = cache.pool, cache.pool.sizes
    facts = {
        "kv_tokens": sizes.pages * sizes.page_size,
        "page_size": sizes.page_size,
        "snapshots": sizes.snapshots,
        "snapshot_bytes": pool.snapshot_bytes,
        "running_requests": sizes.slots,
        "prefix_cache": cache.strategy,
        "prefill_chunk": held[0].engine.scheduler.token_budget,
        "overlap": held[0].engine.overlap,
        "all_reduce": held[0].model.shard.all_reduce.name,
        "decode_buckets": held[0].engine.runner.buckets,
        "prefill_buckets": held[0].engine.runner.prefill_buckets,
        "cache_bytes": sum(x.nbytes for x in vars(pool.caches).values()),
        "peak_memory_bytes": peak_memory(torch.device(s.device)),
    }
    print(
        f"{facts['kv_tokens']:,} tokens of KV, {facts['snapshots']} snapshots of {facts['snapshot_bytes'] / 1e6:.1f} MB and "
        f"{facts['running_requests']} running sequences fit beside the weights ({facts['cache_bytes'] / 1e9:.1f} GB); "
        f"peak memory so far {facts['peak_memory_bytes'] / 1e9:.1f} GB; all-reduce: {facts['all_reduce']}"
    )
    return facts


def prefill_rate(llm: LLM, floors: Floors, tokens: int) -> dict[str, Any]:
    """One prompt's time to first token, several times, as useful FLOPs over the measured matrix rate."""
    first_token_seconds(llm, tokens, "prefill, warm-up")
    seconds = [first_token_seconds(llm, tokens, "prefill", i) for i in range(PREFILL_RUNS)]
    flops, median = floors.prefill_flops(tokens), statistics.median(seconds)
    share = sum(flops.values()) / median / floors.matmul
    print(f"prefill of {tokens}: {1e3 * median:.1f} ms, {tokens / median:,.0f} tokens/s, {share:.1%} of the matrix rate")
    return {
        "tokens": tokens, "seconds": seconds, "median_seconds": median, "useful_flops": flops,
        "share_of_matmul_rate": share, **PREFILL_TARGET,
    }  # fmt: skip


def first_tokens(llm: LLM, lengths: list[int]) -> dict[int, float]:
    """{tokens of a prompt alone: milliseconds to its first token}, medians."""
    found = {}
    for tokens in lengths:
        seconds = [first_token_seconds(llm, tokens, "first token", i) for i in range(2 + PREFILL_RUNS)]
        found[tokens] = 1e3 * statistics.median(seconds[2:])  # the first compile and fill caches
    print("first token, ms by tokens of the prompt: " + ", ".join(f"{n}: {ms:.1f}" for n, ms in found.items()))
    return found


def one_workload(s: Settings, report: Report, llm: LLM, floors: Floors, spec: tuple[int, int, int], hit: dict) -> dict[str, Any]:
    """A workload's runs, the published figure, and the limit that bytes and FLOPs set."""
    found = measure(llm, spec, s.seconds_per_workload, report.deadline)
    limit = {"prefill_share": PREFILL_SHARE, **floors.workload(*spec, hit.get(spec[2]))}
    found["limit"] = limit
    found["against_published"] = against_published(spec, found, s.tp) if s.config == BerryLMConfig() else {}
    print(line_of(found), flush=True)
    return found


def one_over_http(s: Settings, report: Report, url: str, spec: tuple[int, int, int]) -> dict[str, Any]:
    """The same workload once, from a client in a process of its own."""
    found = measure_over_http(url, s.config.vocab_size, spec, report.left)
    found["against_published"] = against_published(spec, found, s.tp) if s.config == BerryLMConfig() else {}
    print(line_of(found), flush=True)
    return found


def name_of(spec: tuple[int, int, int]) -> str:
    return Workload(*spec, requests=spec[2]).name


def lines_of(data: dict[str, Any]) -> list[str]:
    """All that was found about speed, once more in short: the end of the output is what is read."""
    lines = [f"{name}: {line_of(found)}" for name, found in data.get("workloads", {}).items()]
    lines += [f"{name} over HTTP: {line_of(found)}" for name, found in data.get("http", {}).items()]
    for name, p in data.get("profile", {}).items():
        lines.append(f"{name}: {p['wall_ms']:.2f} ms by the clock; traced: {p['busy_ms']:.2f} busy, {p['gaps_ms']:.2f} in gaps")
        lines.append(f"  floor {p['floor_ms']:.3f} ms")
        lines += [f"  {group}: {x['ms']:.3f} ms, floor {x['floor_ms'] or 0:.3f}" for group, x in p["groups"].items()]
    return [*lines, f"peak memory {data['peak_memory_bytes'] / 1e9:.1f} GB"]


def line_of(found: dict[str, Any]) -> str:
    if "cut_by_time_limit" in found["summary"]:
        return f"cut by the time limit, {found['summary']['requests']} requests had ended"
    line = f"{found['output_tokens_per_s']:.0f} tok/s, TPOT {found['tpot_ms'] or float('nan'):.2f} ms"
    if limit := found.get("limit"):
        line += f"; limit {limit['tokens_per_s']:.0f} tok/s, step {limit['step_ms']:.2f} ms"
    if against := found.get("against_published"):
        line += f"; published {against['published']}, ours {against['ours']:.2f}, {against['times_better']:.2f} times better"
    return line


def with_peak(device: torch.device, fn, *args) -> dict[str, Any]:
    """What ``fn`` returns, and the peak of memory so far."""
    return {**fn(*args), "peak_memory_bytes": peak_memory(device)}


def peak_memory(device: torch.device) -> int:
    """Most bytes that tensors took on a GPU; 0 on a CPU, where nobody counts them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def free_memory(device: torch.device) -> None:
    """What the last part left in torch's own cache would be missing when the engine takes its share of what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
