"""What the full-size model is measured against: the published serving figures on one H200, and what this project asks for."""

from typing import Any

PUBLISHED_BY = "SGLang on NVIDIA H200: default settings, random prompts, ignore_eos"
# input, output, concurrency: published, at least (at most for TPOT), aim
TARGETS = {
    (1024, 512, 1): ("tpot_ms", 5.13, 3.0, 2.5),
    (1024, 512, 16): ("output_tokens_per_s", 1612, 1800, 2000),
    (1024, 512, 64): ("output_tokens_per_s", 3957, 4200, 4600),
    (1024, 2048, 64): ("output_tokens_per_s", 4448, 4600, 4900),
    (8192, 512, 64): ("output_tokens_per_s", 1689, 1750, 1900),
}
ON_TWO = {  # published for the same server on two of them; each is to be beaten
    (1024, 512, 1): ("tpot_ms", 4.0),
    (1024, 512, 16): ("output_tokens_per_s", 2321),
    (1024, 512, 64): ("output_tokens_per_s", 6035),
    (1024, 2048, 64): ("output_tokens_per_s", 6888),
    (8192, 512, 64): ("output_tokens_per_s", 2891),
}
BY_GPUS = {1: TARGETS, 2: {spec: (name, published, published, published) for spec, (name, published) in ON_TWO.items()}}
PREFILL_TARGET = {"least_share": 0.40, "aim_share": 0.45}  # of the measured matrix rate


def against_published(spec: tuple[int, int, int], found: dict[str, Any], gpus: int = 1) -> dict[str, Any]:
    """Figure published for so many GPUs, ours and how many times better ours is; empty where one of them is missing, and where
    a time limit cut the run: it is no measurement of the workload."""
    name, published, least, aim = BY_GPUS.get(gpus, {}).get(spec, (None,) * 4)
    ours = found.get(name)
    if ours is None or "cut_by_time_limit" in found.get("summary", {}):
        return {}
    better = published / ours if name == "tpot_ms" else ours / published
    reached = ours <= least if name == "tpot_ms" else ours >= least
    return {
        "figure": name, "published": published, "ours": ours, "times_better": better,
        "required": least, "aim": aim, "reached": reached,
    }  # fmt: skip
