"""Facts hidden in filler text, and questions about them turn after turn: answers are short, so each text is asked often."""

import re
from random import Random

from . import words
from .exchange import Conversation, assistant, user
from .splits import held_out_value

SIZES = {"retrieval_256": 230, "retrieval_1k": 780, "retrieval_4k": 3600}  # tokens of the text, about
QUESTIONS = {"retrieval_256": (4, 6), "retrieval_1k": (6, 8), "retrieval_4k": (8, 10)}
ASK = ["What is the {} of {}?", "Which {} has {}?", "Tell me the {} of {}.", "And the {} of {}?", "I need the {} of {}."]
NUMBERED = "code locker room badge desk number".split()
NAMED = ["colour", "city", "day"]

SUBJECTS = """the old farmer|a young teacher|the tall driver|my neighbour|the quiet painter|a happy child|the baker|the captain
the doctor|a tired worker|the singer|our guide|the gardener|a small dog|the grey cat|the postman|a stranger|the student
the smith|an old sailor""".replace("\n", "|").split("|")
VERBS = """carried|found|saw|moved|painted|opened|closed|cleaned|watched|brought|forgot|repaired|sold|bought|left|followed
washed|counted|kept|lost""".replace("\n", "|").split("|")
OBJECTS = """a basket|the red door|an empty box|the long table|a silver spoon|the map|a wooden chair|the window
a heavy stone|the boat|a letter|the lamp|a piece of bread|the fence|an umbrella|the garden gate
a bicycle|the blue coat|a bag of apples|the clock
""".strip().replace("\n", "|").split("|")
PLACES = """near the river|behind the house|at the market|in the morning|after the rain|before noon|on the hill|by the lake
under the bridge|in the village|along the road|beside the church|at night|in the forest|without a word|once again|for a while
with great care|in the snow|at the station""".replace("\n", "|").split("|")
OPENINGS = "Then|Later|Soon|Sometimes|After that|In the end|Every day|One day|That evening|Meanwhile".split("|")
_TOKEN = re.compile(r"\d|[A-Za-z]+|[^\sA-Za-z\d]")


def retrieval(kind: str, rng: Random, thinking: bool, split: str) -> Conversation:
    """A text with facts and questions about them. Split "operands": all values unseen; "templates": an unseen wording."""
    low, high = QUESTIONS[kind]
    asked = rng.randint(low, high)
    facts = _facts(rng, asked + rng.randint(2, 6), split == "operands")
    told = [f"The {what} of {who} is {value}." for (what, who), value in facts.items()]
    text, size = list(told), sum(map(length, told))
    while size < SIZES[kind] * 0.94:
        text.append(_sentence(rng))
        size += length(text[-1])
    rng.shuffle(text)
    messages, answers = [], []
    for i, (what, who) in enumerate(rng.sample(list(facts), asked)):
        value = facts[what, who]
        wording = (ASK[-1] if split == "templates" else rng.choice(ASK[:-1])).format(what, who)
        messages.append(user(f"{' '.join(text)}\n\n{wording}" if i == 0 else wording))
        answers.append(f"The {what} of {who} is {value}.")
        messages.append(assistant(answers[-1], f"{what} {who} {value}" if thinking else None))
    values = [answer.split()[-1].removesuffix(".") for answer in answers]
    return Conversation(messages, None, thinking, {"answers": answers, "calls": [], "values": values})


def length(text: str) -> int:
    """About how many tokens: words, digits and marks."""
    return len(_TOKEN.findall(text))


def _facts(rng: Random, count: int, unseen: bool) -> dict[tuple[str, str], str]:
    """{(attribute, person): value}. Few people and attributes, so that neither of the two alone tells the fact."""
    people = rng.sample(words.NAMES, max(3, count // 2))
    facts: dict[tuple[str, str], str] = {}
    while len(facts) < count:
        what = rng.choice(NUMBERED if rng.random() < 0.8 else NAMED)
        who, value = rng.choice(people), _value(what, rng)
        if held_out_fact(what, who, value) == unseen:
            facts.setdefault((what, who), value)
    return facts


def held_out_fact(what: str, who: str, value: str) -> bool:
    """Numbers are held out as such, words (a city, a day) with the person: each word must be learned somewhere."""
    return held_out_value(value if value.isdigit() else f"{what} {who} {value}")


def _value(what: str, rng: Random) -> str:
    lists = {"colour": words.COLOURS, "city": words.CITIES, "day": words.DAYS}
    return rng.choice(lists[what]) if what in lists else str(rng.randint(100, 9999))


def _sentence(rng: Random) -> str:
    subject = rng.choice(SUBJECTS)
    opening = f"{rng.choice(OPENINGS)} {subject}" if rng.random() < 0.4 else subject[0].upper() + subject[1:]
    place = f" {rng.choice(PLACES)}" if rng.random() < 0.7 else ""
    return f"{opening} {rng.choice(VERBS)} {rng.choice(OBJECTS)}{place}."
