"""Three passes of every prompt through a server: cold, the same again, and the conversation continued."""

from collections.abc import Callable
from dataclasses import dataclass

from .client import Answer, Api
from .progress import quiet
from .prompts import Prompt

COLD, HIT, TURN = PASSES = ("cold", "cache hit", "multi-turn")
GRID = 64  # tokens between the states that a server keeps


@dataclass
class Served:
    """One prompt's answers. ``turn_ids`` are the ids of the third pass: prompt, first answer, next turn."""

    prompt: Prompt
    cold: Answer
    hit: Answer
    turn: Answer | None
    turn_ids: list[int] | None

    def passes(self) -> list[tuple[str, list[int], Answer]]:
        """(pass, ids that were sent, answer)."""
        found = [(COLD, self.prompt.ids, self.cold), (HIT, self.prompt.ids, self.hit)]
        return found if self.turn is None else [*found, (TURN, self.turn_ids, self.turn)]


def ask(api: Api, prompts: list[Prompt], new_tokens: int, on_step: Callable[[str], None] = quiet) -> list[Served]:
    """One prompt after the other, so that nothing but the passes themselves decides what is cached.

    The cold pass scores the whole prompt, the others its end: what comes before may then be reused, and of a recurrent state
    servers keep the one at the last multiple of 64 tokens. (To score a position its predecessor must run.)
    """
    found = []
    for number, prompt in enumerate(prompts, 1):
        where = f"{number} of {len(prompts)}, {prompt.name}"
        on_step(f"{where}, {len(prompt.ids)} ids: {COLD}")
        cold = api.answer(prompt.ids, new_tokens, score_from=0)
        kept = (len(prompt.ids) - 1) // GRID * GRID
        on_step(f"{where}, {len(prompt.ids)} ids: {HIT}")
        hit = api.answer(prompt.ids, new_tokens, score_from=kept + 1 if 0 < kept < len(prompt.ids) - 1 else None)
        turn = turn_ids = None
        if cold.ids is not None:
            turn_ids = prompt.ids + cold.ids + prompt.follow
            on_step(f"{where}, {len(turn_ids)} ids: {TURN}")
            turn = api.answer(turn_ids, new_tokens, score_from=len(turn_ids) - len(prompt.follow))
        found.append(Served(prompt, cold, hit, turn, turn_ids))
    return found
