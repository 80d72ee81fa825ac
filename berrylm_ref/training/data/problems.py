"""Word problems with their worked solutions: fixed wordings (`templates`) and stories composed of events (`stories`)."""

import re
from random import Random

from .arithmetic import calculate
from .problem import Problem, Step, choices, fill, number, possible, worded
from .stories import story
from .templates import HELD, SEEN

RESULTS = "xyz"  # the names of the results of steps 1, 2, 3


class Template:
    """One entry of `templates`, taken apart once."""

    def __init__(self, text: str, steps: str, ranges: str):
        self._parts = choices(text)
        self.rest = steps.endswith(" r")
        self._steps = [re.fullmatch(r"(\w+)([-+*/])(\w+)", step).groups() for step in steps.removesuffix(" r").split()]
        self._ranges: list[tuple] = []
        for item in ranges.split():
            name, _, rule = item.partition("=")
            low, dots, high = rule.partition("..")
            self._ranges.append((name, int(low), int(high)) if dots else (name, compile(rule, rule, "eval"), None))
        known = {name for name, *_ in self._ranges} | set(RESULTS)
        used = [name for first, _, second in self._steps for name in (first, second)]
        self._free = list(dict.fromkeys(name for name in used if name not in known and not name.isdigit()))

    def draw(self, rng: Random) -> Problem | None:
        """One problem, or None where the drawn numbers break a bound."""
        values = {name: number(rng) for name in self._free}
        for name, low, high in self._ranges:
            values[name] = eval(low, {}, values) if high is None else number(rng, low, high)
        steps: list[Step] = []
        shown = dict(values)
        for name, (first, op, second) in zip((*RESULTS, "last"), self._steps, strict=False):
            a, b = (values[v] if v in values else int(v) for v in (first, second))
            if not possible(a, op, b, self.rest):
                return None
            values[name] = calculate(a, op, b)
            steps.append((a, op, b))
        return Problem(fill(worded(self._parts, rng), shown, rng), tuple(steps), calculate(*steps[-1]))


TEMPLATES = {"seen": [Template(*entry) for entry in SEEN], "held": [Template(*entry) for entry in HELD]}


def draw_problem(rng: Random, split: str = "train") -> Problem:
    """A problem of the split: "train" has no held-out calculation, "operands" at least one, in the same wordings; "templates"
    has wordings that training never shows, with any numbers."""
    while True:
        if split != "templates" and rng.random() < 0.4:
            problem = story(rng)
        else:
            problem = rng.choice(TEMPLATES["held" if split == "templates" else "seen"]).draw(rng)
        if problem and (split == "templates" or problem.held_out == (split == "operands")):
            return problem
