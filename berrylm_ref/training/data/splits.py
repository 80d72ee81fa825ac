"""What is held out: operand pairs and values by a hash, so that no list has to be kept and any text can be checked."""

from zlib import crc32

SPLITS = ("train", "operands", "templates")
FREE_BELOW = 100  # pairs of smaller numbers are the tables that every calculation needs, so they are never held out


def held_out_pair(a: int, op: str, b: int) -> bool:
    """Whether the calculation `a op b` is kept from the training: one in ten with an operand from `FREE_BELOW` on."""
    if max(a, b) < FREE_BELOW:
        return False
    if op in "+*" and a < b:
        a, b = b, a
    return crc32(f"{a}{op}{b}".encode()) % 10 == 0


def held_out_value(value: str) -> bool:
    """Whether the training never shows this number, or this combination of words, as a fact: one in ten."""
    return crc32(f"value {value}".encode()) % 10 == 0


def held_out_call(name: str, arguments: dict) -> bool:
    """Whether the training never shows this call: one in ten. Each of its words occurs in other calls or facts: what a token
    means can't be learned from not seeing it."""
    return crc32(f"call {name} {sorted(arguments.items())}".encode()) % 10 == 0


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"conversation: split: expected one of {', '.join(SPLITS)}, got {split!r}")
