"""The plain torch model, teacher-forced: what it thinks of given tokens, in pieces that bound the memory."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..backend import TORCH
from ..cache.batch import Batch, Caches, Sequence
from ..model import BerryLM
from ..tokenizer import Tokenizer
from .precision import full_fp32

PIECE = 1024  # tokens of one forward; a logits matrix of so many rows is held at a time
PAGE = 64


@dataclass
class Scored:
    """Of a sequence of T ids, per position 1 .. T - 1 (index 0 is position 1), on the CPU.

    logprobs: of the id that stands there; best: the most probable id; best_logprobs: its log-probability. float64 [T - 1].
    """

    logprobs: Tensor
    best: Tensor
    best_logprobs: Tensor


class Reference:
    """A checkpoint in one dtype on the torch backend. ``known``: ids from there on are no tokens and never the best."""

    def __init__(self, folder: str | Path, dtype: torch.dtype | str = "float32", device: str = "cpu"):
        self.model = BerryLM.from_pretrained(folder, dtype=dtype, device=device, backend=TORCH)
        tokenizer = Tokenizer.from_folder(folder)
        self.known = tokenizer.size if tokenizer else None

    @full_fp32()
    @torch.inference_mode()
    def score(self, ids: list[int]) -> Scored:
        """Teacher-force ``ids`` (two or more)."""
        model, T = self.model, len(ids)
        model.check_ids(torch.tensor([ids], dtype=torch.long))
        pages = -(-T // PAGE)
        caches = Caches.allocate(model.config, pages=pages, page_size=PAGE, slots=1, dtype=model.dtype, device=model.device)
        table, found = list(range(1, pages + 1)), []
        for begin in range(0, T, PIECE):
            piece = ids[begin : begin + PIECE]
            logits, _ = model.run(Batch.build([Sequence(piece, begin, table, slot=1, all_logits=True)], caches))
            target = ids[begin + 1 : begin + 1 + len(piece)]
            found.append(self._piece(logits[: len(target)], target))
        return Scored(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def _piece(self, logits: Tensor, target: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        chosen = logprobs.gather(-1, torch.tensor(target, device=logits.device)[:, None]).squeeze(-1)
        best_logprobs, best = logprobs[:, : self.known].max(-1)
        return chosen.double().cpu(), best.cpu(), best_logprobs.double().cpu()
