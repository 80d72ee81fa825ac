"""Bare calculations, alone and in chains: where exactness is learned, with all lengths, carries, borrows and zeros."""

from random import Random

from .arithmetic import LIMIT, calculate
from .problem import Problem, Step, number, possible

ONE = [
    "{}",
    "{}=",
    "What is {}?",
    "Compute {}.",
    "Calculate {}.",
    "How much is {}?",
    "{} = ?",
]
NEXT = {
    "+": ["plus {}", "add {}", "+{}"],
    "-": ["minus {}", "take away {}", "-{}"],
    "*": ["times {}", "multiply by {}", "*{}"],
    "/": ["divide by {}", "divided by {}", "/{}"],
}


def drill(rng: Random) -> Problem:
    """One to four calculations, each with the result of the one before."""
    count = rng.choice((1, 1, 2, 3, 4))
    steps = [first_step(rng)]
    while len(steps) < count and (step := _next_step(calculate(*steps[-1]), rng)):
        steps.append(step)
    a, op, b = steps[0]
    space = rng.choice(("", " "))
    text = f"{a}{space}{op}{space}{b}"
    if len(steps) == 1:
        text = rng.choice(ONE).format(text)
    else:
        text += "".join(f", {rng.choice(NEXT[op]).format(b)}" for _, op, b in steps[1:])
    return Problem(text, tuple(steps), calculate(*steps[-1]))


def first_step(rng: Random) -> Step:
    """Any calculation within the bounds, the operations alike."""
    while True:
        step = _DRAW[rng.choice("+-*/")](rng)
        if possible(*step, rest=True):
            return step


def _next_step(value: int, rng: Random) -> Step | None:
    for _ in range(8):
        op = rng.choice("+-*/")
        if op == "/":
            b = rng.choice([d for d in range(2, 10) if value % d == 0] or [0])
        elif op == "*":
            b = _factor(rng)
        else:
            b = _other(rng, value)
        if possible(value, op, b):
            return value, op, b
    return None


def _sum(rng: Random) -> Step:
    a = number(rng, 1)
    return (a, "+", _other(rng, a)) if rng.random() < 0.5 else (_other(rng, a), "+", a)


def _difference(rng: Random) -> Step:
    a = number(rng, 2, LIMIT)
    if rng.random() < 0.15:  # close numbers: the result has fewer digits than the columns
        return a, "-", max(1, a - number(rng, 1, 99))
    return a, "-", min(_other(rng, a), a - 1)


def _product(rng: Random) -> Step:
    b = _factor(rng)
    return number(rng, 2, LIMIT // b), "*", b


def _quotient(rng: Random) -> Step:
    b = rng.randint(2, 9)
    a = number(rng, b, LIMIT)
    return (a if rng.random() < 0.3 else max(b, a - a % b)), "/", b


def _factor(rng: Random) -> int:
    return rng.randint(2, 9) if rng.random() < 0.6 else rng.randint(10, 99)


def _other(rng: Random, a: int) -> int:
    """A second operand; half of the time as long as the first, where carries and borrows run through all columns."""
    length = len(str(a))
    return rng.randint(10 ** (length - 1), 10**length - 1) if rng.random() < 0.5 else number(rng, 1)


_DRAW = {"+": _sum, "-": _difference, "*": _product, "/": _quotient}
