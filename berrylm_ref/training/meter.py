"""What a run measures about itself: losses by kind, expert usage, sharpness of the decays. Sums stay on the device."""

import math

import torch
from torch import Tensor

from ..ops.kda import CHUNK
from ..ops.kda_chunk import SUB_BLOCK
from .forward import Forward


class Meter:
    """Sums since the last ``read``, kept where the model is, so that a step waits for nothing."""

    def __init__(self, kinds: tuple[str, ...], layers: int, experts: int, device: str):
        self.kinds = kinds
        self.sums = {name: torch.zeros(len(kinds), device=device) for name in ("loss", "targets", "rows", "exact")}
        self.shares = torch.zeros(layers, experts, device=device)
        self.grad_norm = torch.zeros((), device=device)
        self.steps = self.tokens = 0

    @torch.no_grad()
    def add(self, batch, losses: Tensor, hits: Tensor, shares: list[Tensor], grad_norm: Tensor) -> None:
        """losses, hits [P] of a ``DeviceBatch``; shares [E] of each layer."""
        shape, counted = batch.ids.shape, batch.weights.view(batch.ids.shape)
        rows = {
            "loss": (losses * batch.weights).view(shape).sum(1),
            "targets": counted.sum(1),
            "rows": (batch.lengths > 0).float(),
            "exact": ((hits.view(shape) | (counted == 0)).all(1) & (batch.lengths > 0)).float(),
        }
        for name, values in rows.items():
            self.sums[name].index_add_(0, batch.kinds, values)
        self.shares += torch.stack(shares)
        self.grad_norm += grad_norm
        self.steps += 1
        self.tokens += batch.tokens

    def read(self) -> dict:
        """Means since the last time, by kind and together; waits for the device. ``exact``: share without a wrong token."""
        sums = {name: values.tolist() for name, values in self.sums.items()}
        steps = max(self.steps, 1)
        out = {
            "loss": sum(sums["loss"]) / max(sum(sums["targets"]), 1),
            "exact": sum(sums["exact"]) / max(sum(sums["rows"]), 1),
            "grad_norm": float(self.grad_norm) / steps,
            "kinds": {
                kind: {"loss": sums["loss"][i] / sums["targets"][i], "exact": sums["exact"][i] / sums["rows"][i]}
                for i, kind in enumerate(self.kinds)
                if sums["targets"][i]
            },
            "usage": [[round(x / steps, 4) for x in layer] for layer in self.shares.tolist()],
            "steps": self.steps,
            "tokens": self.tokens,
        }
        for values in (*self.sums.values(), self.shares, self.grad_norm):
            values.zero_()
        self.steps = self.tokens = 0
        return out


@torch.no_grad()
def sharpness(forward: Forward, ids: Tensor) -> list[dict[str, float]]:
    """Per linear layer the most that a channel forgets, in powers of two, within 64 tokens of a chunk and within 16 of a block.

    ids [B, T], T a multiple of 64; only rows without padding say something about the model.
    """
    _, trace = forward(ids, keep_gates=True)
    out = []
    for g in trace.gates:  # [B, T, HV, K]
        log2 = g.float() / math.log(2)
        out.append({f"per_{n}": float(log2.unflatten(1, (-1, n)).sum(2).amin()) for n in (CHUNK, SUB_BLOCK)})
    return out
