"""tool_choice and parallel_tool_calls, enforced: which tokens may follow, a function of the output ids alone.

| tool_choice | parallel_tool_calls | what the turn can be |
|---|---|---|
| none, with tools | either | reasoning and text; `<tool_call>` can't be written. The prompt still lists the tools: \
it stays the same from turn to turn, and so in the prefix cache |
| auto | true (default) | anything; nothing is enforced |
| auto | false | as the model likes up to `<tool_call>`; then one well-formed call of a function there is, then the end |
| required | true (default) | reasoning if thinking is on, ended by `</think>` or by the call; one or more calls; no content |
| required | false | the same with exactly one call |
| a function | either | the same with exactly one call, of this function |
| no tools | | anything; what looks like a call is text |

A forced call is well formed (`grammar.py` has the table): an end token can't come before it is closed, names and keys are
declared ones, each key at most once and the required ones at least once. What a value says is up to the model, but for the
tags of a call. Reasoning counts towards max_tokens; the limit, a stop string and a client that leaves still end a turn
anywhere, and then it may hold less than was asked for.

Where a tag is a token of its own only this token is allowed for it, not the letters that spell it: the model has never seen
it written otherwise.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..tokenizer import Tokenizer
from .grammar import Grammar, Place, State, callable_functions

MARK_ENDS = frozenset(b">=")  # the last bytes of all tags: a token without them can't complete one


class Vocabulary:
    """A model's tokens as a grammar needs them. vocab_size: rows of its logits; end_ids: the tokens that end a turn."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]):
        self.vocab_size, self.end_ids, self.special_ids = vocab_size, end_ids, tokenizer.special_ids
        silent = self.special_ids | end_ids
        self.raw = {i: raw for i, raw in tokenizer.token_bytes.items() if raw and i not in silent}
        missing = set(range(256)) - {raw[0] for raw in self.raw.values() if len(raw) == 1}
        if missing or not end_ids:  # a call could neither go on nor end
            got = f"one without byte {min(missing)}" if missing else "a model without end tokens"
            raise ValueError(f"tool_choice: tokenizer: expected a token for every byte, and an end token, got {got}")
        added = tokenizer.fast.get_added_tokens_decoder()
        self.tags = frozenset(raw for i, raw in self.raw.items() if i in added)
        self.by_first_byte: dict[int, list[int]] = {}
        for i, raw in self.raw.items():
            self.by_first_byte.setdefault(raw[0], []).append(i)
        self.markup = [i for i, raw in self.raw.items() if not MARK_ENDS.isdisjoint(raw)]
        self.plain = torch.zeros(vocab_size, dtype=torch.bool)  # what may follow in any text
        self.plain[list(self.raw.keys() - set(self.markup))] = True
        self.plain[list(self.special_ids - end_ids)] = True  # these write nothing


class Masks:
    """The allowed tokens of every state that a grammar has come to, made once and kept."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary):
        self.grammar, self.vocabulary = grammar, vocabulary
        self._made: dict[State, Tensor] = {}

    def allowed(self, state: State) -> Tensor:
        """[V] bool."""
        if state not in self._made:
            self._made[state] = self._make(state)
        return self._made[state]

    def advance(self, state: State, token: int) -> State:
        """The state after an allowed token."""
        after = self.grammar.feed(state, self.vocabulary.raw.get(token, b""))
        if after is None:
            raise ValueError(f"tool_choice: token: expected one that may follow in {state}, got {token}")
        return after

    def _make(self, state: State) -> Tensor:
        v, rule = self.vocabulary, self.grammar.rule(state.place)
        if rule.text:
            mask, candidates = v.plain.clone(), v.markup
        else:
            mask = torch.zeros(v.vocab_size, dtype=torch.bool)
            firsts = {option[len(state.begun)] for option in rule.then if option.startswith(state.begun)}
            candidates = [i for byte in firsts for i in v.by_first_byte[byte]]
        fit = [i for i in candidates if self.grammar.feed(state, v.raw[i]) is not None]
        if not rule.text:
            tags = [v.raw[i] for i in fit if v.raw[i] in v.tags]
            fit = [i for i in fit if not any(tag != v.raw[i] and tag.startswith(v.raw[i]) for tag in tags)]
        mask[fit] = True
        mask[list(v.end_ids)] = self.grammar.may_end(state)
        return mask


class Constraint:
    """What may follow the output ids of one choice of a request. They mostly grow, so what was read of them is kept."""

    def __init__(self, masks: Masks):
        self._masks = masks
        self._start = self._state = State(Place(masks.grammar.start))
        self._read: list[int] = []

    def __call__(self, output_ids: Sequence[int]) -> Tensor:
        """[V] bool."""
        if self._read != output_ids[: len(self._read)]:
            self._state, self._read = self._start, []
        for token in output_ids[len(self._read) :]:
            self._state = self._masks.advance(self._state, token)
            self._read.append(token)
        return self._masks.allowed(self._state)


class ToolForcing:
    """Makes the constraints of a server; the masks of tools that come again, as in every turn of a chat, are kept."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]):
        @lru_cache(maxsize=1)
        def vocabulary() -> Vocabulary:
            return Vocabulary(tokenizer, vocab_size, end_ids)

        @lru_cache(maxsize=32)
        def masks(functions: str, **options: Any) -> Masks:
            listed = {name: (tuple(keys), frozenset(need)) for name, (keys, need) in json.loads(functions).items()}
            return Masks(Grammar(listed, **options), vocabulary())

        self._masks = masks

    def constraint(
        self, tools: list[dict] | None, choice: str, function: str | None, parallel: bool, in_reasoning: bool
    ) -> Constraint | None:
        """The constraint of one choice by the module's table; None where nothing is enforced.

        choice: "auto", "none", "required", or "function" with its name in `function`. Errors: ValueError for malformed tools,
        calls asked for without tools, or a function that is not among them.
        """
        functions = callable_functions(tools or [])
        if choice == "function":
            if function not in functions:
                raise ValueError(f"tool_choice: tool_choice: expected a function of tools, got {function!r}")
            functions = {function: functions[function]}
        if not functions:
            if choice == "required":
                raise ValueError("tool_choice: tool_choice: expected tools to choose from with 'required', got none")
            return None
        if choice == "auto" and parallel:
            return None
        listed = json.dumps({name: (keys, sorted(need)) for name, (keys, need) in functions.items()})
        if choice in ("auto", "none"):
            return Constraint(self._masks(listed, start="text", calls=choice == "auto"))
        many = choice == "required" and parallel
        return Constraint(self._masks(listed, start="think" if in_reasoning else "lead", many=many))
