"""The evaluation of a checkpoint: held-out problems, tool calls and retrieval, greedy, with their token counts and speed."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from ..backend import Backend
from ..engine.llm import LLM
from ..shipped import served_name
from .ask import LocalClient, Progress, Question, Reply, ServedClient
from .batches import load_texts
from .record import machine
from .tasks import CAP, TASKS, Item, Task


def evaluate(
    folder: str | Path,
    *,
    problems: int = 200,
    device: str = "cpu",
    backend: str | Backend = "auto",
    dtype: str = "float32",
    kda_intra: str = "dyadic",
    batch: int | None = None,
    only: list[str] | None = None,
    deadline: float | None = None,
    progress: Progress | None = None,
) -> dict:
    """Ask the checkpoint in ``folder``, in this process, all tasks, or the ones named in ``only``.

    problems: of a whole task; the same number gives the same problems. batch: questions in one forward, None is 32, on a GPU 256.
    deadline: of ``time.monotonic``; what has no answer by then is left out and counted. Returns what the JSON holds.
    """
    tasks = chosen(only)
    _, template = load_texts(folder)
    running = batch or (256 if device == "cuda" else 32)
    llm = LLM(folder, dtype=dtype, device=device, backend=backend, kda_intra=kda_intra, max_running_requests=running)
    client = LocalClient(llm, template)
    settings = {
        "how": "in process", "model": served_name(folder), "weights_sha256": weights_hash(folder), "problems": problems,
        "device": device, "backend": llm.model.backend.name, "dtype": dtype, "kda_intra": kda_intra, "batch": running,
        "max_new_tokens": CAP,
    }  # fmt: skip
    return result(client, lambda questions: client.ask(questions, deadline, progress), tasks, problems, settings)


def evaluate_served(
    url: str,
    *,
    problems: int = 200,
    api_key: str | None = None,
    batch: int = 32,
    only: list[str] | None = None,
    progress: Progress | None = None,
    **settings,
) -> dict:
    """As ``evaluate``, of the model behind ``url``, through its chat API and reasoning parser; ``batch`` questions at a time.

    settings: what is known of the server, for the record. ValueError where it refuses a question.
    """
    tasks, client = chosen(only), ServedClient(url, api_key, batch)
    settings |= {"model": client.model, "problems": problems, "batch": batch, "max_new_tokens": CAP}
    return result(client, lambda questions: client.ask(questions, progress), tasks, problems, settings)


def result(
    client: LocalClient | ServedClient,
    ask: Callable[[list[Question]], list[Reply]],
    tasks: list[Task],
    problems: int,
    settings: dict,
) -> dict:
    """What the JSON holds."""
    speed = client.single_stream()
    items = {task.name: task.items(problems) for task in tasks}
    begin = time.monotonic()
    replies = iter(ask([item.question for part in items.values() for item in part]))
    seconds = time.monotonic() - begin
    results, tokens = {}, 0
    for task in tasks:
        pairs = [(item, next(replies)) for item in items[task.name]]
        tokens += sum(reply.tokens for _, reply in pairs)
        results[task.name] = score(task, pairs)
    return {
        "tasks": results,
        "speed": {
            "single_stream_tokens_per_s": round(speed, 1),
            "batched_tokens_per_s": round(tokens / seconds, 1),
            "seconds": round(seconds, 1),
        },
        "settings": settings,
        "machine": machine(),
    }


def chosen(only: list[str] | None) -> list[Task]:
    """The tasks named in ``only``; None is all."""
    unknown = sorted(set(only or ()) - {task.name for task in TASKS})
    tasks = [task for task in TASKS if only is None or task.name in only]
    if unknown or not tasks:
        raise ValueError(f"eval: tasks: expected some of {[task.name for task in TASKS]}, got {unknown or only}")
    return tasks


def count(only: list[str] | None, problems: int) -> int:
    """How many questions they are."""
    return sum(len(task.items(problems)) for task in chosen(only))


def weights_hash(folder: str | Path) -> str:
    """SHA-256 of the weights, file by file in the order of their names: which ones a result is of."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def score(task, pairs: list[tuple[Item, Reply]]) -> dict:
    """Accuracy over the answered questions, the share that hit the token cap, mean new tokens, and accuracy by steps."""
    ended = [(item, reply) for item, reply in pairs if reply.finish_reason is not None]
    # an answer that was cut off is wrong whatever it says
    right = [reply.finish_reason == "stop" and task.right(item.expected, reply) for item, reply in ended]
    out = {
        "asked": len(pairs),
        "answered": len(ended),
        "accuracy": share(right),
        "at_cap": share([reply.finish_reason == "length" for _, reply in ended]),
        "tokens": round(sum(reply.tokens for _, reply in ended) / max(len(ended), 1), 1),
    }
    steps = sorted({item.steps for item, _ in ended if item.steps is not None})
    if steps:
        by = {n: [ok for ok, (item, _) in zip(right, ended, strict=True) if item.steps == n] for n in steps}
        out["by_steps"] = {str(n): {"asked": len(oks), "accuracy": share(oks)} for n, oks in by.items()}
    wrong = [(item, reply) for ok, (item, reply) in zip(right, ended, strict=True) if not ok]
    out["mistakes"] = [example(item, reply) for item, reply in wrong[:3]]
    return out


def share(flags: list[bool]) -> float | None:
    return round(sum(flags) / len(flags), 4) if flags else None


def example(item: Item, reply: Reply) -> dict:
    """A wrong answer beside the right one, cut to a readable length."""
    got = f"{reply.reasoning} | {reply.content} {reply.calls or ''}".strip()
    asked = item.question.messages[-1]["content"] or ""
    return {"asked": asked[-200:], "expected": str(item.expected)[:200], "got": got[-300:]}


def print_table(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "answered", "accuracy", "at cap", "tokens", "by steps", title="evaluation, greedy")
    for name, row in result["tasks"].items():
        by = ", ".join(f"{n}: {part['accuracy']:.2f} of {part['asked']}" for n, part in row.get("by_steps", {}).items())
        shown = ["-" if row[k] is None else f"{row[k]:.3f}" for k in ("accuracy", "at_cap")]
        table.add_row(name, f"{row['answered']}/{row['asked']}", *shown, f"{row['tokens']:.0f}", by)
    Console(width=130).print(table)
    speed = result["speed"]
    print(
        f"{speed['single_stream_tokens_per_s']} tokens/s in one stream, {speed['batched_tokens_per_s']} batched, "
        f"{speed['seconds']} s for all",
        flush=True,
    )
