"""Exchanges with calls: one, several in one turn, up to the call or up to the answer, and tools that are not there."""

import json
from random import Random

from .exchange import Exchange, assistant, user
from .toolbox import TOOLS, arguments, result

MISSING = "I have no tool for that."


def tool_exchange(rng: Random, thinking: bool, split: str, count: int = 1, answered: bool = True) -> Exchange:
    """`count` calls in one turn; `answered`: with their results and the answer. Split "operands": unseen values, "templates":
    unseen wordings."""
    names = [rng.choice(list(TOOLS))] * count if rng.random() < 0.5 else rng.sample(list(TOOLS), count)
    if count > 1 and names[0] in ("set_timer", "send_message"):  # their texts run on, so that two are hard to tell apart
        names = ["get_weather"] * count
    given = [arguments(name, rng, split == "operands") for name in names]
    if len({str(item) for item in given}) < count:
        return tool_exchange(rng, thinking, split, count, answered)
    asked = [_question(name, values, rng, split) for name, values in zip(names, given, strict=True)]
    calls = list(zip(names, given, strict=True))
    ids = [f"call_{i}" for i in range(count)]
    thoughts = "\n".join(TOOLS[name].brief.format(**values) for name, values in calls) if thinking else None
    messages = [user(" ".join(asked)), assistant(None, thoughts, [_call(i, *call) for i, call in zip(ids, calls, strict=True)])]
    answers = []
    if answered:
        for i, (name, values) in zip(ids, calls, strict=True):
            found = result(name, values, rng)
            messages.append({"role": "tool", "tool_call_id": i, "content": json.dumps(found)})
            answers.append(TOOLS[name].answer.format(**values, **found))
        messages.append(assistant(" ".join(answers), "The tool has answered." if thinking else None))
    return Exchange(messages, " ".join(answers), tools=tuple(dict.fromkeys(names)), calls=calls)


def missing_tool(rng: Random, thinking: bool, split: str) -> Exchange:
    """A question for a tool that is not listed."""
    name = rng.choice([name for name in TOOLS if name != "calculator"])
    question = _question(name, arguments(name, rng, split == "operands"), rng, split)
    answer = assistant(MISSING, f"There is no {name} here." if thinking else None)
    return Exchange([user(question), answer], MISSING, without=(name,))


def listed(names: tuple[str, ...], without: tuple[str, ...], rng: Random, extra: int) -> list[dict]:
    """Definitions of `names` and up to `extra` others, in any order."""
    others = [name for name in TOOLS if name not in names and name not in without]
    chosen = [*names, *rng.sample(others, min(extra, len(others)))]
    rng.shuffle(chosen)
    return [TOOLS[name].definition(rng) for name in chosen]


def _question(name: str, values: dict, rng: Random, split: str) -> str:
    questions = TOOLS[name].questions
    return (questions[-1] if split == "templates" else rng.choice(questions[:-1])).format(**values)


def _call(call_id: str, name: str, values: dict) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
