"""What is scored: seeded prompts, the same on every machine, or the reader's own."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..tokenizer import Tokenizer

SHORT, DOCUMENT = (20, 400), (6000, 8000)  # ids in a prompt of either kind
FOLLOW = (8, 40)  # ids of the next turn
NAMES = ("Anna", "Борис", "Clara", "Дмитрий", "Elena", "Фёдор")
THINGS = ("apples", "книг", "pencils", "билетов", "stones", "яблок")
SENTENCES = (
    "{name} has {a} {thing} and buys {b} more.",
    "У {name} было {a} {thing}, осталось {b}.",
    "How much is {a} + {b}?",
    "Сколько будет {a} - {b}?",
    "On page {a} there is a picture of {b} {thing}.",
    "Если {name} отдаст {b} {thing}, то останется {a}.",
)


@dataclass(frozen=True)
class Prompt:
    """``ids`` are sent; ``follow`` are the ids of the next turn, after the answer. kind: "short" or "document"."""

    name: str
    kind: str
    ids: list[int]
    follow: list[int]


def seeded_prompts(
    *, vocab_size: int, context: int, tokenizer: Tokenizer | None, new_tokens: int, short: int = 8, documents: int = 2,
    document_length: int | None = None, quick: bool = False, seed: int = 0,
) -> list[Prompt]:  # fmt: skip
    """``short`` prompts of 20 to 400 ids and ``documents`` of 6000 to 8000 (or ``document_length``), cut to the context.

    Text in two languages where there is a tokenizer, any ids of the vocabulary where there is none. ``quick``: prompts of at most
    120 ids and documents of 600. Raises ValueError where the context leaves no room for a prompt.
    """
    room = context - 2 * new_tokens - FOLLOW[1] - 1
    if room < SHORT[0]:
        raise ValueError(f"parity: new_tokens: expected room for prompts of {SHORT[0]} ids in a context of {context}, got {room}")
    rng = random.Random(seed)
    longest = 120 if quick else SHORT[1]
    lengths = [("short", SHORT[0] + (longest - SHORT[0]) * i // max(short - 1, 1)) for i in range(short)]
    low, high = (document_length,) * 2 if document_length else (600, 600) if quick else DOCUMENT
    lengths += [("document", low + (high - low) * i // max(documents - 1, 1)) for i in range(documents)]
    prompts = []
    for i, (kind, length) in enumerate(lengths):
        length, follow = min(length, room), rng.randint(*FOLLOW)
        ids = draw(length + follow, vocab_size, tokenizer, rng)
        prompts.append(Prompt(f"{kind} {i}", kind, ids[:length], ids[length:]))
    return prompts


def draw(count: int, vocab_size: int, tokenizer: Tokenizer | None, rng: random.Random) -> list[int]:
    """``count`` ids of seeded text, or of seeded noise."""
    if tokenizer is None:
        return [rng.randrange(vocab_size) for _ in range(count)]
    text, ids = "", []
    while len(ids) < count:
        for _ in range(count // 4 + 8):
            sentence = rng.choice(SENTENCES)
            words = {"name": rng.choice(NAMES), "thing": rng.choice(THINGS)}
            text += sentence.format(**words, a=rng.randint(2, 999), b=rng.randint(2, 999)) + " "
        ids = tokenizer.encode(text)
    return ids[:count]


def read_prompts(path: str | Path, tokenizer: Tokenizer | None, seed: int = 0) -> list[Prompt]:
    """One prompt a line: a JSON list of ids, or a JSON string where there is a tokenizer. From 1000 ids on it is a document."""
    rng, prompts = random.Random(seed), []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
        except ValueError as error:
            raise ValueError(f"parity: prompts: expected JSON in line {number} of {path}, got {line[:60]!r}") from error
        if isinstance(given, str) and tokenizer is not None:
            given = tokenizer.encode(given)
        if not isinstance(given, list) or len(given) < 2 or not all(type(i) is int for i in given):
            raise ValueError(
                f"parity: prompts: expected in line {number} of {path} a list of two or more token ids, or a text where the "
                f"model folder has a tokenizer.json, got {line[:60]!r}"
            )
        kind = "document" if len(given) >= 1000 else "short"
        prompts.append(Prompt(f"line {number}", kind, given, follow_of(given, rng)))
    if not prompts:
        raise ValueError(f"parity: prompts: expected at least one line in {path}, got none")
    return prompts


def follow_of(ids: Sequence[int], rng: random.Random) -> list[int]:
    """A next turn made of the prompt's own ids: certainly in the vocabulary."""
    return [rng.choice(ids) for _ in range(rng.randint(*FOLLOW))]
