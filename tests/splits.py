"""Ways of cutting a text into the pieces that a streaming parser is fed."""

import random


def two_way(text):
    """Every cut into two pieces, the empty ones included."""
    return [[text[:at], text[at:]] for at in range(len(text) + 1)]


def random_cuts(text, seed, count=10):
    """`count` cuts at random places, with random numbers of pieces."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


def all_cuts(text):
    """Whole, character by character, every two-way cut, and random ones: what the nasty tables run."""
    return [[text], list(text), *two_way(text), *random_cuts(text, seed=len(text))]
