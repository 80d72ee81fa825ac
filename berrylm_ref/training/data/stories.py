"""Stories: a beginning, up to three events that change one number, and a question; thousands of wordings from a few lists."""

from random import Random

from .arithmetic import LIMIT, calculate
from .problem import Problem, Step, choices, fill, number, possible, worded

# Each entry: what is told, and the calculations; `v` is the number so far, other letters are new numbers.
STARTS = [
    ("{A} has {a} {o}.", ""),
    ("{A} [starts with|started with|owns|keeps|begins with] {a} {o}.", ""),
    ("There are {a} {o} [in the {s}|on the table|at the {s}|at the beach].", ""),
    ("The {s} [owned|had|owns|has] {a} {o}.", ""),
    ("[This morning|On {D}|Yesterday] {A} [had|found|collected|counted] {a} {o}.", ""),
    ("{A} has {a} {c} {o} and {b} {e} {o}.", "a+b"),
    ("{A} has {a} {o} and {B} has {b} {o}. They put them together.", "a+b"),
    ("{A} [fills|packs|brings|buys] {m} {k} with {a} {o} each.", "a*m"),
    ("In the {s} there are {m} {k} of {a} {o}.", "a*m"),
    ("[Each|Every one] of {A}'s {m} {k} [contains|holds] {a} {o}.", "a*m"),
    ("{A} [sold|brought|made] {a} {o} on {D} and {b} the day [after|before].", "a+b"),
    ("{A} has {m} times as many {o} as {B}, who has {a} {o}.", "a*m"),
    ("{B} has {a} {o}. {A} has {b} more.", "a+b"),
    ("{B} has {a} {o}. {A} has {b} fewer.", "a-b"),
]
EVENTS = [
    ("[Then|Later|After that] {A} [buys|finds|gets|makes|receives|adds] {a} more.", "v+a"),
    ("{B} [brings|gives {A}|sends] {a} more {o}.", "v+a"),
    ("On {D} {a} {o} [arrive|are added|are bought|come in].", "v+a"),
    ("{A} [already had|also has|owns] {a} other {o}.", "v+a"),
    ("[Then|Later|Next] {A} [loses|sells|gives away|uses up|breaks|hands out] {a}.", "v-a"),
    ("{B} [takes|borrows|buys|carries off] {a} of them.", "v-a"),
    ("{A} [eats|throws away|threw away|lost|sold|gave {B}] {a} {o}.", "v-a"),
    ("They [throw away|lose|sell|use] {a} of them.", "v-a"),
    ("[Sadly|One day] {a} of the {o} [break|are stolen|turn out broken|fall into the river].", "v-a"),
    ("On {D} {a} {o} [are sold|get lost|are taken away|are used].", "v-a"),
    ("[After a week|A month later|Soon] the number [doubles|has doubled].", "v*2"),
    ("[After a week|A month later|Soon] there are {m} times as many.", "v*m"),
    ("[Half|One half] of them [are sold|are given away|go to {B}].", "v/2"),
]
QUESTIONS = [
    ("How many {o} are there [now|in the end|at the end]?", ""),
    ("How many {o} are left?", ""),
    ("How many {o} [is that|does that make]?", ""),
    ("How many {o} [does {A} have|are there] [now|in the end|altogether]?", ""),
    ("What is the number of {o} now?", ""),
]
SHARES = [
    ("They are [shared|split|divided] equally among {d} {f}. How many {o} does each get?", "v/d"),
    ("They are put into {d} {k}, the same number in each. How many are in one of them?", "v/d"),
    ("{A} packs [them|all of them|the rest] [equally into|into] {d} {k}. How many {o} are in each?", "v/d"),
    ("{d} {f} get them, each the same number. How many {o} [are that|does one get|does each get]?", "v/d"),
    ("Each of them costs {m} dollars. How many dollars are they worth?", "v*m"),
]

_PARTS = {text: choices(text) for entries in (STARTS, EVENTS, QUESTIONS, SHARES) for text, _ in entries}


def story(rng: Random) -> Problem | None:
    """A story with one to four calculations, or None where its numbers break a bound of the arithmetic."""
    told: list[str] = []
    steps: list[Step] = []
    value = _tell(rng.choice(STARTS), 0, told, steps, rng)
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
        if value and len(steps) < 3:
            value = _tell(rng.choice(EVENTS), value, told, steps, rng)
    if value:
        ends = QUESTIONS if steps and rng.random() < 0.7 else SHARES
        value = _tell(rng.choice(ends), value, told, steps, rng)
    return Problem(fill(" ".join(told), {}, rng), tuple(steps), value) if value else None


def _tell(entry: tuple[str, str], value: int, told: list[str], steps: list[Step], rng: Random) -> int:
    """Adds one sentence and its calculation; gives the new number, 0 where the calculation is out of bounds."""
    text, rule = entry
    top = {"v+a": LIMIT - value, "v-a": value - 1, "a-b": LIMIT}.get(rule, LIMIT // 2)
    if top < 2:
        return 0
    a = number(rng, 2, min(top, LIMIT - 1))
    b = number(rng, 2, max(2, a - 1) if rule == "a-b" else LIMIT - a if a < LIMIT - 2 else 2)
    m, d = (number(rng, 2, 30) if "{k}" in text else rng.randint(2, 9)), rng.randint(2, 9)
    if rule:
        first, op, second = rule
        numbers = {"v": value, "a": a, "b": b, "m": m, "d": d, "2": 2}
        step = (numbers[first], op, numbers[second])
        if not possible(*step):
            return 0
        steps.append(step)
        value = calculate(*step)
    else:
        value = value or a
    spoken = worded(_PARTS[text], rng)
    for name, drawn in zip("abmd", (a, b, m, d), strict=True):
        spoken = spoken.replace(f"{{{name}}}", str(drawn))
    told.append(spoken)
    return value
