"""``make demo``: the whole chain once, and at every step whether it is right.

First the proof that the model is exact: logits of the official test checkpoint beside those of the official code. Then the
shipped checkpoint behind a real socket: a question that needs thinking, a second one that goes on from it and finds the first in
the cache, a tool called and its result answered. What is right is calculated here; the first thing that is not as it should be
ends the run with status 1.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from . import BerryLM
from .commands.chat import CALCULATOR, calculate, harmless
from .parity.client import Http
from .parity.launch import launched

LIMIT = 1e-5  # fp32 noise is near 1e-6; any real mistake shows above 4e-5
GRID = 64  # tokens between two states that the prefix cache may keep
QUESTION = "Freya opens 36 drawers with 11 tiles each and finds 2990 more under the table. How many tiles is that?"
FOLLOW_UP = "And 187 less than that?"
CALL = "What is 734*12? Use the calculator."
console = Console(highlight=False, soft_wrap=True)


def main(folder: Path, golden: Path) -> None:
    exact(golden)
    try:
        with launched(folder) as url:
            http = Http(url)
            (card,) = http.get("/v1/models")["data"]
            show("server", f"{card['id']} at {url}, {card['max_model_len']:,} tokens of context")
            thinking(http)
            tool(http)
    except ValueError as error:
        sys.exit(f"demo: {error}")
    show("done", "server stopped; all as it should be")


def exact(folder: Path) -> None:
    """The logits of the checkpoint in ``folder`` beside the official ones."""
    check((folder / "golden.safetensors").is_file(), f"expected golden.safetensors beside a checkpoint in {folder}")
    golden, model = load_file(folder / "golden.safetensors"), BerryLM.from_pretrained(folder)
    with torch.inference_mode():
        logits = model(golden["input_ids"])
    error = float((logits.double() - golden["logits"].double()).norm() / golden["logits"].double().norm())
    show("exact", f"logits {list(logits.shape)} of the official test checkpoint: rel-L2 to the official ones {error:.1e}")
    check(error <= LIMIT, f"expected the official logits within {LIMIT:.0e}, got {error:.1e}")


def thinking(http: Http) -> None:
    """A problem of two steps, then a question that only makes sense after it."""
    messages, sent = [], 0
    for question, sum_text, right in (
        (QUESTION, "36*11+2990", 36 * 11 + 2990),
        (FOLLOW_UP, "36*11+2990-187", 36 * 11 + 2990 - 187),
    ):
        messages.append({"role": "user", "content": question})
        answer = ask(http, messages)
        message, usage = answer["message"], answer["usage"]
        check(bool(message["reasoning_content"]), f"expected reasoning, got {message}")
        show("thinking", message["reasoning_content"], "dim")
        show("answer", message["content"])
        check(message["content"] == f"The answer is {right}.", f"expected {sum_text} = {right}, got {message['content']!r}")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        show("right", f"{sum_text} = {right}; {usage['prompt_tokens']} tokens in, {cached} of them cached", "green")
        due = max(sent - 1, 0) // GRID * GRID  # the turn before, but for its last token
        check(cached >= due and (cached > 0) == (due > 0), f"expected at least {due} cached tokens, got {cached}")
        messages.append(message)
        sent = usage["total_tokens"]
    check(due > 0, f"expected a first turn of more than {GRID} tokens, so that something is cached")


def tool(http: Http) -> None:
    """A call, run here, and the answer to its result."""
    messages = [{"role": "user", "content": CALL}]
    called = ask(http, messages, [CALCULATOR])["message"]
    calls = called.get("tool_calls") or []
    check(len(calls) == 1, f"expected one call, got {called}")
    function = calls[0]["function"]
    show("call", f"{function['name']}({function['arguments']})", "yellow")
    check(json.loads(function["arguments"]) == {"expression": "734*12"}, "expected calculator with expression 734*12")
    result = calculate(function)
    show("result", result, "yellow")
    messages += [called, {"role": "tool", "tool_call_id": calls[0]["id"], "content": result}]
    answer = ask(http, messages, [CALCULATOR], shown=False)["message"]["content"]
    show("answer", answer)
    check(answer == f"The answer is {734 * 12}.", f"expected 734*12 = {734 * 12}, got {answer!r}")
    show("right", f"734*12 = {734 * 12}", "green")


def ask(http: Http, messages: list[dict], tools: list[dict] | None = None, shown: bool = True) -> dict[str, Any]:
    """The model's turn, greedy: ``message`` and ``usage``."""
    if shown:
        show("question", messages[-1]["content"], "bold")
    body = {"messages": messages, "temperature": 0, "max_tokens": 320, **({"tools": tools} if tools else {})}
    answer = http.post("/v1/chat/completions", body)
    return {"message": answer["choices"][0]["message"], "usage": answer["usage"]}


def show(label: str, text: str, style: str = "") -> None:
    for i, line in enumerate(harmless(str(text)).splitlines() or [""]):
        console.print(f"{'' if i else label:10}{line}", style=style, markup=False)


def check(ok: bool, message: str) -> None:
    if not ok:
        sys.exit(f"demo: {message}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m berrylm_ref.demo CHECKPOINT_FOLDER FOLDER_WITH_GOLDEN_TENSORS")
    main(*map(Path, sys.argv[1:]))
