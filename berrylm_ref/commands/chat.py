"""``berrylm chat``: talk to a model in the terminal."""

import json
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import SHIPPED, BackendName, Device, Dtype, clear_errors

if TYPE_CHECKING:
    from rich.console import Console

    from ..chat.session import Conversation, Ended

HELP = "/reset forgets the conversation, /think on and /think off switch the reasoning, Ctrl-C stops an answer, Ctrl-D leaves"
ROUNDS = 8  # of calls and results within one turn of the user
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def chat(
    model: Annotated[Path | None, typer.Option(help="checkpoint folder with a chat template; default: the shipped one")] = None,
    url: Annotated[str | None, typer.Option(help="talk to the server at this address instead")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="BERRYLM_API_KEY", help="the server's key")] = None,
    think: Annotated[bool, typer.Option(help="begin with the reasoning on")] = True,
    calculator: Annotated[bool, typer.Option(help="offer a calculator that runs here: two integers, one of + - * /")] = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: BackendName = "auto",
) -> None:
    """Chat: the reasoning dimmed, calls as they are made, and after each answer what the prefix cache saved."""
    from rich.console import Console

    from ..chat.session import Conversation, LocalModel, RemoteModel

    with clear_errors():
        if url is not None and model is not None:
            raise ValueError("chat: url: expected --url or --model, got both")
        if url is None:
            from ..engine.llm import LLM

            speaker = LocalModel(LLM(model or SHIPPED, dtype=dtype, device=device, backend=backend))
        else:
            speaker = RemoteModel(url, api_key)
    console = Console(highlight=False)
    console.print(HELP, style="dim", markup=False)
    converse(Conversation(speaker, [CALCULATOR] if calculator else None, think), console)


def converse(conversation: "Conversation", console: "Console") -> None:
    """Read lines and answer them until the input ends."""
    while True:
        try:
            line = console.input("[bold]> [/]").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:  # an empty line, as shells do
            console.print()
            continue
        if line.startswith("/"):
            console.print(command(conversation, line), style="dim", markup=False)
        elif line:
            try:
                turns(conversation, line, console)
            except KeyboardInterrupt:
                console.print("\nstopped; this turn is forgotten", style="dim")
            except (ValueError, OSError) as error:  # too long, the server is gone: the conversation can go on
                console.print(f"error: {error}", style="red", markup=False)


def command(conversation: "Conversation", line: str) -> str:
    """Do what ``line`` says; returns what to tell the user."""
    match line.split():
        case ["/reset"]:
            conversation.reset()
            return "a new conversation"
        case ["/think", ("on" | "off") as how]:
            conversation.thinking = how == "on"
            return f"reasoning {how}"
    return HELP


def turns(conversation: "Conversation", text: str, console: "Console") -> None:
    """The user's turn and the model's, with the calculator's in between where it is called. All of it counts, or nothing.

    A call that a limit cut off is not run: it may be half of what was meant.
    """
    before, heard = conversation.messages, False
    asked = [{"role": "user", "content": text}]
    try:
        for _ in range(ROUNDS):
            ended = show(conversation, asked, console)
            calls = conversation.messages[-1].get("tool_calls", [])
            if ended.reason != "tool_calls" or not calls or not conversation.tools:
                break
            asked = [{"role": "tool", "tool_call_id": call["id"], "content": calculate(call["function"])} for call in calls]
            for result in asked:
                console.print(f"= {result['content']}", style="yellow", markup=False)
        heard = True
    finally:
        if not heard:
            conversation.messages = before


def show(conversation: "Conversation", asked: list[dict], console: "Console") -> "Ended":
    """Say ``asked`` and print the model's turn while it comes; returns how it ended."""
    from ..chat.session import Ended

    style, printed = None, False
    with closing(conversation.say(*asked)) as parts:
        for part in parts:
            if isinstance(part, Ended):
                ended = part
                continue
            for text, its in ((part.reasoning, "dim"), (part.content, "")):
                if text:
                    lead = "\n" if printed and its != style else ""
                    console.print(lead + harmless(text), end="", style=its, markup=False, soft_wrap=True)
                    style, printed = its, True
    if printed:
        console.print()
    for call in conversation.messages[-1].get("tool_calls", []):
        function = call["function"]
        console.print(harmless(f"{function['name']}({function['arguments']})"), style="yellow", markup=False, soft_wrap=True)
    summary = f"[{ended.reason}; {ended.prompt} tokens in, {ended.cached} of them cached, {ended.made} out]"
    console.print(summary, style="dim", markup=False)
    return ended


def harmless(text: str) -> str:
    """``text`` without what a terminal would obey: a model may write an escape sequence."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def calculate(function: dict[str, str]) -> str:
    """The result of a call as JSON text, for the model; a division gives the quotient, as the shipped model learned it."""
    arguments = json.loads(function["arguments"])
    expression = arguments.get("expression") if isinstance(arguments, dict) else None
    found = re.fullmatch(r"\s*(-?\d{1,15})\s*([-+*/])\s*(-?\d{1,15})\s*", str(expression))
    if function["name"] != "calculator" or found is None:
        return json.dumps({"error": "expected calculator with two integers and one of + - * /"})
    a, op, b = int(found[1]), found[2], int(found[3])
    if op == "/" and b == 0:
        return json.dumps({"error": "division by zero"})
    return json.dumps({"result": a + b if op == "+" else a - b if op == "-" else a * b if op == "*" else a // b})
