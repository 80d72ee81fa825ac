"""The forwards of a comparison: two pieces of every prompt, then single tokens, so that each state is handed on once or more."""

from dataclasses import dataclass

import torch

from ..cache.batch import Batch, Caches, Sequence
from ..model import BerryLM

PAGE = 16
DECODE = 4  # single tokens at the end
LEAST = DECODE + 2  # ids of a prompt
GRID = 64  # where chunk_kda hands out states


@dataclass
class Schedule:
    """Which tokens of which prompt run in which forward.

    cuts[n] are the prompt's piece boundaries: a first piece of two thirds (it ends inside a chunk of 64), a second one, then
    tokens one by one. ``boundaries``: the first piece also hands out its state at the last multiple of 64, into a snapshot.
    """

    prompts: list[list[int]]
    boundaries: bool = True

    def __post_init__(self):
        for n, ids in enumerate(self.prompts):
            if len(ids) < LEAST:
                raise ValueError(f"parity layers: prompts[{n}]: expected at least {LEAST} ids, got {len(ids)}")
        self.cuts = []
        for ids in self.prompts:
            end = len(ids) - DECODE
            self.cuts.append([0, max(1, min(end - 1, end * 2 // 3)), *range(end, len(ids) + 1)])

    @property
    def forwards(self) -> int:
        return 2 + DECODE

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(prompt, position) of every packed row, forward by forward."""
        return [
            (n, t) for i in range(self.forwards) for n, cuts in enumerate(self.cuts) for t in range(cuts[i], cuts[i + 1])
        ]  # fmt: skip

    def step(self, forward: int) -> str:
        kind = "prefill" if forward == 0 else "continued prefill" if forward == 1 else "decode"
        return f"forward {forward + 1} of {self.forwards}, {kind}"

    def caches(self, model: BerryLM) -> Caches:
        return Caches.allocate(
            model.config, pages=sum(map(self._pages, self.prompts)), page_size=PAGE, slots=len(self.prompts),
            snapshots=len(self.prompts), dtype=model.dtype, device=model.device,
        )  # fmt: skip

    def batch(self, forward: int, caches: Caches) -> Batch:
        """Every prompt's part of this forward, with logits for all of its tokens."""
        sequences, page = [], 1
        for n, ids in enumerate(self.prompts):
            begin, end = self.cuts[n][forward : forward + 2]
            count = self._pages(ids)
            kept = end // GRID * GRID if self.boundaries and forward == 0 else 0
            sequences.append(
                Sequence(
                    ids[begin:end], begin, list(range(page, page + count)), slot=n + 1, all_logits=True,
                    boundaries=[(kept, n + 1)] if kept else [],
                )
            )  # fmt: skip
            page += count
        return Batch.build(sequences, caches)

    def _pages(self, ids: list[int]) -> int:
        return -(-len(ids) // PAGE)


def check_prompts(prompts: list[list[int]], model: BerryLM) -> None:
    """ValueError for ids that the model has not."""
    for ids in prompts:
        model.check_ids(torch.tensor([ids], dtype=torch.long))
