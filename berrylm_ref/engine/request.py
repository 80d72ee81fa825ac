"""One choice of one request while it runs, and what is left of it when it has ended."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..tokenizer import Tokenizer
from .detokenizer import Detokenizer, StopStrings
from .params import SamplingParams
from .sampler import Row, TokenLogprob, choice_seed


@dataclass
class Output:
    """What a choice came to; if asked, ``logprobs`` per new and ``prompt_logprobs`` per prompt token (None for the first)."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str  # "stop" | "length"
    cached_tokens: int = 0
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(eq=False)
class Request:
    """``prompt_ids`` and, growing, ``output_ids``; ends on an end token, a stop string, or after ``max_new`` tokens."""

    prompt_ids: list[int]
    params: SamplingParams
    end_ids: frozenset[int]
    max_new: int
    seed: int
    index: int = 0
    tokenizer: Tokenizer | None = None
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int | None = None  # None until it is admitted
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    score_from: int = 0  # with params.prompt_logprobs: the first position scored; the reused prefix may reach up to it
    constraint: Callable[[Sequence[int]], Tensor | None] | None = None  # output ids -> [V] bool, what may follow; None: anything

    def __post_init__(self):
        self.tokens = self.prompt_ids + self.output_ids
        self._detokenizer = Detokenizer(self.tokenizer) if self.tokenizer else None
        self._stops = StopStrings(self.params.stop)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def matched(self) -> int | str | None:
        """The token or the stop string that ended it; None if something else did, or nothing yet."""
        if self.finish_reason != "stop":
            return None
        return self._stops.matched if self._stops.stopped else self.output_ids[-1]

    @property
    def steered(self) -> bool:
        """What may come next depends on the tokens made so far, which the host must have for it."""
        return self.params.penalised or self.constraint is not None

    @property
    def row(self) -> Row:
        allowed = self.constraint(self.output_ids) if self.constraint else None
        return Row(self.params, self.seed, self.prompt_ids, self.output_ids, allowed)

    def append(self, token: int) -> str:
        """Take the next token; returns the text that became certain. Sets ``finish_reason`` when it was the last."""
        self.output_ids.append(token)
        self.tokens.append(token)
        stop = token in self.params.stop_ids or (not self.params.ignore_eos and token in self.end_ids)
        delta = "" if stop or not self._detokenizer else self._stops.feed(self._detokenizer.feed(token))
        reason = None
        if stop or self._stops.stopped:
            reason = "stop"
        elif len(self.output_ids) >= self.max_new:
            reason = "length"
        if reason and self._detokenizer and not self._stops.stopped:
            delta += self._stops.feed(self._detokenizer.finish())
            if not self._stops.stopped:
                delta += self._stops.finish()
        self.text += delta
        self.finish_reason = reason  # last: another thread that sees it has the whole text
        return delta

    def output(self) -> Output:
        return Output(
            prompt_token_ids=self.prompt_ids,
            token_ids=self.output_ids,
            text=self.text,
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens or 0,
            index=self.index,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs,
        )


class ContextLengthError(ValueError):
    """The prompt leaves no room for a token."""


def make_requests(
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    context: int,
    end_ids: frozenset[int],
    tokenizer: Tokenizer | None,
) -> list[Request]:
    """The ``params.n`` choices of one prompt. Raises ValueError before anything is allocated."""
    if not prompt_ids:
        raise ValueError("generate: prompts: expected at least one token in each prompt, got an empty one")
    bad = next((i for i in prompt_ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size), None)
    if bad is not None:
        raise ValueError(f"generate: prompts: expected token ids in 0 .. {vocab_size - 1}, got {bad!r}")
    room = context - len(prompt_ids)
    if room < 1:
        raise ContextLengthError(
            f"generate: prompts: expected at most {context - 1} tokens, the context of {context} less one to generate, "
            f"got {len(prompt_ids)}"
        )
    if params.stop and tokenizer is None:
        raise ValueError("generate: stop: expected only with a tokenizer, the model folder has no tokenizer.json")
    seed = secrets.randbits(63) if params.seed is None else params.seed
    max_new = room if params.max_tokens is None else min(params.max_tokens, room)
    return [
        Request(list(prompt_ids), params, end_ids, max_new, choice_seed(seed, i), index=i, tokenizer=tokenizer)
        for i in range(params.n)
    ]
