"""Where the time of a step goes: every kernel, the gaps between them, and the floor of each group."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..engine.llm import LLM
from .machine import synchronize
from .roofline import Floors
from .steps import first_token_seconds, new_requests, running, step_seconds, until_decoding

# The first pattern found in a kernel's name decides.
PATTERNS = (
    ("between ranks", r"nccl|all_?reduce"),
    ("KDA", r"kda|_prepare_kernel|_update_kernel|_conv_kernel"),
    ("MoE", r"_few_|_gate_up|_down_|_combine|_logits_kernel|_route_|_plan_|_swiglu|moe|expert"),
    ("attention", r"_decode_kernel|_merge_kernel|_gate_kernel|^_gather_kernel|qk_norm_rope|flash|fmha|attention"),
    ("norms and AttnRes", r"norm_kernel|attn_res"),
    ("sampling", r"sampl|argmax|topk|sort|softmax|multinomial"),
    ("products", r"nvjet|gemm|gemv|cutlass|xmma|splitk|cublas|^aten::(mm|addmm|bmm)$"),
    ("copies and element-wise", r"memcpy|memset|copy|elementwise|vectorized|index|gather|scatter|fill|cat|reduce|aten::"),
)
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
STEPS, CLOCKED_STEPS, NAME_LENGTH, LISTED = 3, 32, 90, 48


def group_of(kernel: str) -> str:
    return next((group for group, pattern in PATTERNS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def trace(fn: Callable[[], object], device: torch.device) -> list[tuple[str, float, float]]:
    """(name, start, duration) in microseconds of what the device ran during ``fn``, in order; on a CPU ops without their inner
    ones."""
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        fn()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = DEVICE_EVENTS if device.type == "cuda" else ("cpu_op",)
    found = [(e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("ph") == "X" and e.get("cat") in wanted]
    found.sort(key=lambda e: (e[1], -e[2]))
    return found if device.type == "cuda" else without_inner(found)


def without_inner(events: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Nested events, in order, each shortened by those directly inside it."""
    own, open_ones = [length for _, _, length in events], []
    for i, (_, start, length) in enumerate(events):
        while open_ones and events[open_ones[-1]][1] + events[open_ones[-1]][2] <= start:
            open_ones.pop()
        if open_ones:
            own[open_ones[-1]] -= length
        open_ones.append(i)
    return [(name, start, length) for (name, start, _), length in zip(events, own, strict=True)]


def summarise(events: list[tuple[str, float, float]], steps: int, floors_ms: dict[str, float]) -> dict[str, Any]:
    """Per step: milliseconds by group with their floors, gaps in which nothing ran, and the kernels that took longest."""
    if not events:
        raise ValueError("bench: profile: expected kernels in the trace, got none")
    span = max(start + length for _, start, length in events) - events[0][1]
    busy, end = 0.0, events[0][1]
    for _, start, length in events:
        busy += max(0.0, start + length - max(start, end))
        end = max(end, start + length)
    groups, kernels = defaultdict(float), defaultdict(lambda: [0, 0.0])
    for name, _, length in events:
        groups[group_of(name)] += length
        kernels[name][0] += 1
        kernels[name][1] += length
    order = sorted(kernels, key=lambda name: -kernels[name][1])
    return {
        "span_ms": span / steps / 1e3,
        "busy_ms": busy / steps / 1e3,
        "gaps_ms": (span - busy) / steps / 1e3,
        "floor_ms": sum(floors_ms.values()),
        "launches": len(events) / steps,
        "groups": {
            group: {"ms": us / steps / 1e3, "share": us / span, "floor_ms": floors_ms.get(group)}
            for group, us in sorted(groups.items(), key=lambda item: -item[1])
        },
        "kernels": [
            {
                "name": name[:NAME_LENGTH],
                "group": group_of(name),
                "calls": kernels[name][0] / steps,
                "us": kernels[name][1] / steps,
                "share": kernels[name][1] / span,
            }
            for name in order[:LISTED]
        ],
    }


def profile_decode(llm: LLM, floors: Floors, batch: int, context: int, experts: float | None, deadline: float) -> dict[str, Any]:
    """Decode steps of ``batch`` sequences at ``context`` tokens under the profiler, and the step by the clock without it."""
    room = 128 + batch * context // 1024  # no one may end before the last has begun and all steps are done
    requests = new_requests(llm, batch, context, room, "profile")
    with running(llm, requests):
        until_decoding(llm, requests, deadline)
        wall = step_seconds(llm, CLOCKED_STEPS)
        trace(llm.engine.step, llm.model.device)  # the profiler's own start-up
        events = trace(lambda: [llm.engine.step() for _ in range(STEPS)], llm.model.device)
    moved = floors.step_bytes(batch, context, experts)
    found = summarise(events, STEPS, {group: 1e3 * size / floors.copy for group, size in moved.items()})
    return {"batch": batch, "context": context, "experts_a_layer": experts, "wall_ms": 1e3 * wall, **found}


def profile_prefill(llm: LLM, floors: Floors, tokens: int) -> dict[str, Any]:
    """The prefill of one prompt under the profiler, and by the clock without it."""
    first_token_seconds(llm, tokens, "profile, warm-up")
    wall = first_token_seconds(llm, tokens, "profile, by the clock")
    trace(lambda: first_token_seconds(llm, min(tokens, 64), "profile, its start-up"), llm.model.device)
    events = trace(lambda: first_token_seconds(llm, tokens, "profile"), llm.model.device)
    needed = floors.prefill_flops(tokens)
    found = summarise(events, 1, {group: 1e3 * flops / floors.matmul for group, flops in needed.items()})
    return {"tokens": tokens, "wall_ms": 1e3 * wall, **found}
