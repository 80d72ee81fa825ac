"""When each request was sent and answered, and the figures that follow from it."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Timing:
    """One request, in seconds of one clock: sent, first token, last token."""

    sent: float
    prompt_tokens: int
    first: float = math.nan
    last: float = math.nan
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        """Time per output token after the first; NaN where there is only one."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan


@dataclass
class Run:
    """The requests that ended, in the order in which they were sent; ``seconds`` from the first sent to the last token.

    ``cut``: a time limit ended the run before all requests had ended. Then ``partial_tokens`` counts what the others got.
    """

    seconds: float
    timings: list[Timing] = field(default_factory=list)
    cut: bool = False
    partial_tokens: int = 0

    @property
    def output_tokens_per_s(self) -> float:
        return (sum(t.output_tokens for t in self.timings) + self.partial_tokens) / self.seconds

    def summary(self) -> dict[str, Any]:
        """What ``berrylm bench serve`` reports; times in milliseconds."""
        prompt, output = (sum(getattr(t, name) for t in self.timings) for name in ("prompt_tokens", "output_tokens"))
        out = {
            "requests": len(self.timings),
            "seconds": self.seconds,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "cached_tokens": sum(t.cached_tokens for t in self.timings),
            "requests_per_s": len(self.timings) / self.seconds,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": (prompt + output) / self.seconds,
            "ttft_ms": spread([1e3 * t.ttft for t in self.timings]),
            "tpot_ms": spread([1e3 * t.tpot for t in self.timings]),
        }
        return out | ({"cut_by_time_limit": True, "unfinished_output_tokens": self.partial_tokens} if self.cut else {})


def spread(values: list[float]) -> dict[str, float] | None:
    """Mean, median and p99 (nearest rank) of what is a number; None where nothing is."""
    values = sorted(v for v in values if not math.isnan(v))
    if not values:
        return None
    p99 = values[math.ceil(0.99 * len(values)) - 1]
    return {"mean": statistics.fmean(values), "median": statistics.median(values), "p99": p99}
