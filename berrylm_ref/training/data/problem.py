"""A word problem: what it is, and what all generators of them share."""

import re
from dataclasses import dataclass
from random import Random

from . import words
from .arithmetic import LIMIT, calculate, lines, worked
from .splits import held_out_pair

Step = tuple[int, str, int]
_SENTENCE = re.compile(r"(?<=[.?] )[a-z]|^[a-z]")


@dataclass(frozen=True)
class Problem:
    """A question in words, the calculations that answer it, and the answer."""

    question: str
    steps: tuple[Step, ...]
    answer: int

    @property
    def thinking(self) -> str:
        """The worked calculations, a line each."""
        return "\n".join(worked(*step) for step in self.steps)

    @property
    def reply(self) -> str:
        return reply(self.answer)

    @property
    def held_out(self) -> bool:
        """Whether a calculation in it is kept from the training."""
        return any(held_out_pair(*line) for step in self.steps for line in lines(*step))


def reply(answer: int) -> str:
    """The fixed form in which every answer to a calculation ends."""
    return f"The answer is {answer}."


def number(rng: Random, low: int = 2, high: int = LIMIT - 1) -> int:
    """A number from low to high, all lengths alike, with more zeros than chance would give."""
    length = rng.randint(len(str(low)), len(str(high)))
    drawn = rng.randint(max(low, 10 ** (length - 1)), min(high, 10**length - 1))
    if drawn >= 100 and rng.random() < 0.15:
        place = 10 ** rng.randint(1, length - 1)
        drawn = drawn // place * place if rng.random() < 0.5 else drawn - drawn // (place // 10) % 10 * (place // 10)
    return max(low, drawn)


def possible(a: int, op: str, b: int, rest: bool = False) -> bool:
    """Whether `a op b` stays inside the bounds of `arithmetic` with operands and result of at least 1."""
    if not (1 <= a <= LIMIT and 1 <= b <= LIMIT and 1 <= calculate(a, op, b) <= LIMIT):
        return False
    return op in "+-" or op == "*" and 2 <= b < 100 or op == "/" and 2 <= b <= 9 and (rest or a % b == 0)


def fill(text: str, numbers: dict[str, int], rng: Random) -> str:
    """`text` with its fields filled in and a capital at the start of every sentence."""
    first, second = rng.sample(words.NAMES, 2)
    colour, other = rng.sample(words.COLOURS, 2)
    she = first in words.SHE
    fields = {"A": first, "B": second, "o": rng.choice(words.THINGS), "c": colour, "e": other}
    fields |= {"he": "she" if she else "he", "him": "her" if she else "him", "his": "her" if she else "his"}
    fields |= {"k": rng.choice(words.BOXES)}
    fields |= {"f": rng.choice(words.PEOPLE), "t": rng.choice(words.ITEMS)}
    fields |= {"s": rng.choice(words.PLACES), "D": rng.choice(words.DAYS)}
    filled = text.format_map(fields | numbers)
    return _SENTENCE.sub(lambda found: found[0].upper(), filled)




def choices(text: str) -> list[list[str]]:
    """`text` cut at its `[x|y]`: lists of alternatives, those of fixed text with one entry."""
    return [part.split("|") for part in re.split(r"\[([^\]]*)\]", text)]


def worded(parts: list[list[str]], rng: Random) -> str:
    """One of the wordings."""
    return "".join(part[0] if len(part) == 1 else rng.choice(part) for part in parts)
