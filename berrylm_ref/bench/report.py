"""The file a measurement fills part by part, so that a run that is cut short leaves what it had."""

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Report:
    """Parts by name, written after each. A part that fails is noted and the others still run."""

    def __init__(self, path: Path, time_limit: float, facts: dict[str, Any]):
        self.path, self.deadline = path, time.monotonic() + time_limit
        self.data: dict[str, Any] = {**facts, "failures": {}, "skipped": [], "seconds": {}}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def left(self) -> float:
        """Seconds until the time limit."""
        return self.deadline - time.monotonic()

    def part(self, name: str, fn: Callable[..., Any], *args: Any, under: str | None = None) -> Any:
        """Run ``fn(*args)`` and keep what it returns as ``name``, in the section ``under``; None if it failed or came too late.

        The guard is broad on purpose: minutes of a lent machine must not be lost to a fault in one part. It is not silent: the
        fault is printed, kept in the file, and ends the command with an error.
        """
        section, label = (self.data.setdefault(under, {}), f"{under} {name}") if under else (self.data, name)
        if self.left <= 0:
            self.data["skipped"].append(label)
            print(f"SKIPPED {label}: the time limit has passed", flush=True)
            self.write()
            return None
        print(f"== {label}", flush=True)
        begin = time.monotonic()
        try:
            section[name] = fn(*args)
        except Exception as error:
            traceback.print_exc()
            self.data["failures"][label] = f"{type(error).__name__}: {error}"[:500]
        self.data["seconds"][label] = round(time.monotonic() - begin, 2)
        self.write()
        return section.get(name)

    def verdict(self) -> list[str]:
        """What went wrong: parts that failed or were skipped, and checks that did not hold. A slow result is no fault."""
        wrong = [f"{name}: {why}" for name, why in self.data["failures"].items()]
        wrong += [f"{name}: skipped, the time limit had passed" for name in self.data["skipped"]]
        cut = [name for name, found in self.data.get("workloads", {}).items() if "cut_by_time_limit" in found["summary"]]
        wrong += [f"workloads {name}: cut by the time limit" for name in cut]
        if not self.data.get("layer_profile", {}).get("within_budget", True):
            wrong.append(f"layer_profile: {self.data['layer_profile']['largest_ratio']:.2f} times the error of torch")
        for name in ("cached_answers", "sent_twice"):
            found = self.data.get(name, {})
            if not found.get("identical", True):
                wrong.append(f"{name}: the ids differ: {found['first_difference']}")
            if found.get("cached_tokens") != found.get("expected_cached_tokens"):
                wrong.append(f"{name}: hits {found['cached_tokens']}, expected {found['expected_cached_tokens']}")
        return wrong

    def write(self) -> None:
        """The file appears whole or not at all."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(text(rounded(self.data)) + "\n")
        os.replace(partial, self.path)


def text(x: Any, margin: str = "") -> str:
    """JSON with a line for each container that holds no other: a kernel of a profile is one line, and a diff can be read."""
    inner = list(x.values()) if isinstance(x, dict) else x if isinstance(x, list) else []
    if not any(isinstance(v, dict | list) for v in inner):
        return json.dumps(x)
    deeper = margin + " "
    if isinstance(x, dict):
        lines, ends = [f"{deeper}{json.dumps(k)}: {text(v, deeper)}" for k, v in x.items()], "{}"
    else:
        lines, ends = [deeper + text(v, deeper) for v in x], "[]"
    return f"{ends[0]}\n" + ",\n".join(lines) + f"\n{margin}{ends[1]}"


def rounded(x: Any) -> Any:
    """Floats to five significant digits: a file to be read and committed."""
    if isinstance(x, float):
        return float(f"{x:.5g}")
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    return [rounded(v) for v in x] if isinstance(x, list | tuple) else x
