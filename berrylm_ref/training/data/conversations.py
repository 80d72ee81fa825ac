"""The kinds of samples and their shares."""

from random import Random

from .arithmetic import calculate
from .drills import drill
from .exchange import Conversation, Exchange, assistant, user
from .problem import Problem, number, possible
from .problems import draw_problem
from .retrieval import retrieval
from .splits import check_split
from .talk import talk
from .tool_use import listed, missing_tool, tool_exchange

# kind -> share of the training tokens
KINDS = {
    "problem": 0.30,  # word problems, thinking on
    "drill": 0.20,  # bare calculations, thinking on
    "problem_direct": 0.06,  # the same, thinking off
    "drill_direct": 0.03,
    "tool_call": 0.06,  # one call, up to the call
    "tool_multi": 0.04,  # two or three calls, half of them with results and answer
    "tool_answer": 0.05,  # one call, its result and the answer
    "tool_unused": 0.02,  # tools listed, none needed or the needed one missing
    "talk": 0.04,
    "multi_turn": 0.04,
    "retrieval_256": 0.04,
    "retrieval_1k": 0.07,
    "retrieval_4k": 0.05,
}
SYSTEMS = [
    "You are BerryLM nano.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are BerryLM nano, a small model. Be exact.",
    "Work step by step.",
]
FOLLOW_UPS = [
    ("And if {b} more come?", "+"),
    ("Now add {b}.", "+"),
    ("What if {b} are added?", "+"),
    ("And if {b} of them are lost?", "-"),
    ("Now take away {b}.", "-"),
    ("And {b} less than that?", "-"),
    ("And {b} times that?", "*"),
    ("Now multiply it by {b}.", "*"),
]


def conversation(kind: str, rng: Random, split: str = "train") -> Conversation:
    """One sample of `kind`, a key of KINDS; the same state of `rng` gives the same sample.

    split: "train"; "operands": what training shows, with calculations or values that it never shows; "templates": wordings
    that it never shows.
    Errors: ValueError for another kind or split.
    """
    check_split(split)
    if kind not in KINDS:
        raise ValueError(f"conversation: kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if kind.startswith("retrieval"):
        return retrieval(kind, rng, rng.random() < 0.4, split)
    if kind.startswith(("problem", "drill")):
        thinking = not kind.endswith("direct")
        problem = draw_problem(rng, split) if kind.startswith("problem") else _drill(rng, split)
        return _whole([_solved(problem, thinking)], None, thinking, rng)
    thinking = rng.random() < 0.6
    if kind == "talk":
        return _whole([talk(rng, thinking, split)], None, thinking, rng)
    if kind == "multi_turn":
        return _several_turns(rng, thinking, split)
    if kind == "tool_unused":
        exchange = rng.choice((missing_tool, talk, _unaided))(rng, thinking, split)
    elif kind == "tool_multi":
        exchange = tool_exchange(rng, thinking, split, rng.choice((2, 2, 3)), rng.random() < 0.5)
    else:
        exchange = tool_exchange(rng, thinking, split, 1, kind == "tool_answer")
    return _whole([exchange], listed(exchange.tools, exchange.without, rng, rng.randint(0, 3)), thinking, rng)


def _drill(rng: Random, split: str) -> Problem:
    while True:  # bare calculations have no wordings to hold out
        problem = drill(rng)
        if split == "templates" or problem.held_out == (split == "operands"):
            return problem


def _solved(problem: Problem, thinking: bool) -> Exchange:
    answer = assistant(problem.reply, problem.thinking if thinking else None)
    return Exchange([user(problem.question), answer], problem.reply, without=("calculator",), number=problem.answer)


def _unaided(rng: Random, thinking: bool, split: str) -> Exchange:
    return _solved(draw_problem(rng, split), thinking)


def _follow_up(answer: int, rng: Random, thinking: bool, split: str) -> Exchange | None:
    """A question that goes on from the answer before it; None where that has too few numbers for one of the split."""
    for _ in range(20):
        text, op = rng.choice(FOLLOW_UPS)
        step = (answer, op, number(rng, 2, 30 if op == "*" else 9999))
        if possible(*step):
            problem = Problem(text.format(b=step[2]), (step,), calculate(*step))
            if split == "templates" or problem.held_out == (split == "operands"):
                return _solved(problem, thinking)
    return None


def _whole(exchanges: list[Exchange], tools: list[dict] | None, thinking: bool, rng: Random) -> Conversation:
    messages = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.15 else []
    messages += [message for exchange in exchanges for message in exchange.messages]
    meta = {"answers": [e.answer for e in exchanges], "calls": [call for e in exchanges for call in e.calls]}
    return Conversation(messages, tools or None, thinking, meta)


def _several_turns(rng: Random, thinking: bool, split: str) -> Conversation:
    """Two to four exchanges with one list of tools. Some clients keep the reasoning to themselves: in a third of them the earlier
    turns have none."""
    exchanges: list[Exchange] = []
    with_tools = rng.random() < 0.5
    for i in range(rng.randint(2, 4)):
        call = with_tools and rng.random() < 0.6
        exchange = None
        if exchanges and exchanges[-1].number is not None and rng.random() < 0.6:
            exchange = _follow_up(exchanges[-1].number, rng, thinking, split)
        if exchange is None:
            exchange = tool_exchange(rng, thinking, split) if call else rng.choice((talk, _unaided))(rng, thinking, split)
        exchanges.append(exchange)
        for message in exchanges[-1].messages:  # ids are unique in a conversation
            for made in message.get("tool_calls", ()):
                made["id"] += f"_{i}"
            if "tool_call_id" in message:
                message["tool_call_id"] += f"_{i}"
        if i and thinking and rng.random() < 0.33:
            _forget(exchanges[-2])
    needed = tuple(dict.fromkeys(name for e in exchanges for name in e.tools))
    tools = listed(needed, ("calculator",), rng, rng.randint(0, 2)) if with_tools else None
    return _whole(exchanges, tools, thinking, rng)


def _forget(exchange: Exchange) -> None:
    for message in exchange.messages:
        message.pop("reasoning_content", None)
