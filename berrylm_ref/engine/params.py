"""How a request wants its tokens chosen and ended."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

GREEDY_BELOW = 1e-5  # a temperature below this is greedy: logits divided by it would overflow
EXTREME = 1e6  # temperatures and repetition penalties further out than this (or its inverse) overflow fp32 scores
MOST_STOPS = 64  # stop strings: with every token each of them is looked for, while everyone else waits


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Every field is checked; ValueError names field, expected and got.

    temperature: 0 is greedy, at most 1e6. top_k: 0 keeps all. top_p in (0, 1], min_p in [0, 1] relative to the most probable
    token. max_tokens: most new tokens, None as many as the context holds. stop: up to 64 strings that end the text (they are cut
    off); they are looked for in the text alone, where special tokens are hidden and never match. stop_token_ids: ids that end it,
    those of special tokens too; ignore_eos: run on past the model's end tokens. seed: fixes the draws of this request,
    independent of its neighbours, taken modulo 2^64. n: choices. logprobs: None, or how many alternatives (0..20) to report
    beside each chosen token; prompt_logprobs: the same for the prompt's own tokens. Presence and frequency penalties (-2..2)
    count the generated tokens, the repetition penalty (1e-6..1e6) those of the prompt too.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", tuple(stop) if isinstance(stop, list | tuple) else stop)
        ids = self.stop_token_ids
        object.__setattr__(self, "stop_token_ids", tuple(ids) if isinstance(ids, list | tuple) else ids)
        self._number("temperature", 0, EXTREME)
        self._integer("top_k", 0)
        self._number("top_p", 0, 1, open_low=True)
        self._number("min_p", 0, 1)
        self._integer("max_tokens", 1, optional=True)
        self._integer("seed", -(2**63), 2**64 - 1, optional=True)
        self._integer("n", 1, 128)
        self._integer("logprobs", 0, 20, optional=True)
        self._integer("prompt_logprobs", 0, 20, optional=True)
        self._number("presence_penalty", -2, 2)
        self._number("frequency_penalty", -2, 2)
        self._number("repetition_penalty", 1 / EXTREME, EXTREME)
        if not isinstance(self.ignore_eos, bool):
            refuse("ignore_eos", "true or false", self.ignore_eos)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            refuse("stop", "a non-empty string or a list of them", self.stop)
        if len(self.stop) > MOST_STOPS:
            refuse("stop", f"at most {MOST_STOPS} strings", len(self.stop))
        if not isinstance(self.stop_token_ids, tuple) or not all(is_int(i) and i >= 0 for i in self.stop_token_ids):
            refuse("stop_token_ids", "a list of token ids", self.stop_token_ids)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """``stop_token_ids``, asked with every token: however many there are, that takes the same time."""
        return frozenset(self.stop_token_ids)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def _number(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        if not ok or not low <= value <= high or (open_low and value == low):  # a NaN is in no range
            where = f"more than {low}" if open_low else f"{low:g} or more"
            refuse(name, f"a finite number, {where}, at most {high:g}", value)

    def _integer(self, name: str, low: int, high: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not is_int(value) or value < low or (high is not None and value > high):
            refuse(name, f"an integer, {low} or more" + (f", at most {high}" if high is not None else ""), value)


def is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def refuse(name: str, expected: str, got) -> None:
    raise ValueError(f"SamplingParams: {name}: expected {expected}, got {reprlib.repr(got)}")
