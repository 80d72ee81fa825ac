"""What a benchmark asks for: prompts of token ids, so many requests of them, so many at a time."""

import zlib
from dataclasses import dataclass
from itertools import count

import torch

KINDS = ("random", "shared-prefix")


@dataclass(frozen=True)
class Workload:
    """``requests`` prompts of ``input_len`` tokens, each answered with ``output_len``, ``concurrency`` of them in flight.

    random: every prompt on its own. shared-prefix: the first ``prefix_len`` tokens are common to all prompts of a group, of
    which there are ``groups``, served in turn. The same ``seed`` gives the same prompts.
    """

    input_len: int
    output_len: int
    concurrency: int
    requests: int
    kind: str = "random"
    prefix_len: int = 0
    groups: int = 1
    seed: int = 0

    def __post_init__(self):
        for name in ("input_len", "output_len", "concurrency", "requests", "groups"):
            if getattr(self, name) < 1:
                refuse(name, "1 or more", getattr(self, name))
        if self.kind not in KINDS:
            refuse("kind", f"one of {KINDS}", self.kind)
        if self.kind == "random" and (self.prefix_len or self.groups > 1):
            refuse("prefix_len, groups", "none with random prompts", (self.prefix_len, self.groups))
        if self.kind == "shared-prefix" and not 0 < self.prefix_len < self.input_len:
            refuse("prefix_len", f"1 .. input_len - 1 = {self.input_len - 1}", self.prefix_len)

    @property
    def name(self) -> str:
        return f"{short(self.input_len)}/{short(self.output_len)}@{self.concurrency}"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Ids drawn evenly from 0 .. vocab_size - 1."""
        prefixes = random_prompts(vocab_size, self.groups, self.prefix_len, "prefixes", self)
        own = random_prompts(vocab_size, self.requests, self.input_len - self.prefix_len, "own", self)
        return [prefixes[i % self.groups] + rest for i, rest in zip(count(), own, strict=False)]


def random_prompts(vocab_size: int, rows: int, length: int, *purpose) -> list[list[int]]:
    """``rows`` lists of ``length`` ids. All that is given decides what is drawn, the lengths too: from one seed for all, the
    prompts of one measurement would begin as those of another, and the prefix cache would answer in place of the model.
    """
    rng = torch.Generator().manual_seed(zlib.crc32(repr((rows, length, *purpose)).encode()))
    return torch.randint(vocab_size, (rows, length), generator=rng).tolist()


def parse_workload(text: str) -> tuple[int, int, int]:
    """(input, output, concurrency) of "1k/512@64"; k is 1024."""
    try:
        lengths, concurrency = text.split("@")
        given, wanted = (int(x[:-1]) * 1024 if x.endswith("k") else int(x) for x in lengths.split("/"))
        return given, wanted, int(concurrency)
    except ValueError as error:
        raise ValueError(f"bench: workloads: expected INPUT/OUTPUT@CONCURRENCY as 1k/512@64, got {text!r}") from error


def parse_workloads(text: str) -> tuple[tuple[int, int, int], ...]:
    """Several with commas between them; '' for none."""
    return tuple(parse_workload(part) for part in text.split(",") if part)


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def refuse(name: str, expected: str, got) -> None:
    raise ValueError(f"bench: {name}: expected {expected}, got {got!r}")
