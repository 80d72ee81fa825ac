"""One step of training: a batch to the device, loss, gradients, update."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .batches import HostBatch
from .forward import Forward
from .meter import Meter
from .recipe import Recipe


@dataclass(frozen=True)
class DeviceBatch:
    """ids [B, T]; targets [P], the next token of each; weights [P], 1 where it is to be learnt; live [B, T], no padding."""

    ids: Tensor
    targets: Tensor
    weights: Tensor
    live: Tensor
    lengths: Tensor
    kinds: Tensor
    tokens: int  # without padding


def to_device(batch: HostBatch, device: str) -> DeviceBatch:
    def move(array) -> Tensor:
        x = torch.from_numpy(array)
        return x.pin_memory().to(device, non_blocking=True) if device == "cuda" else x

    ids, lengths = move(batch.ids).long(), move(batch.lengths)
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    weights = torch.nn.functional.pad(move(batch.targets)[:, 1:], (0, 1))
    live = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    tokens = int(batch.lengths.sum())
    return DeviceBatch(ids, shifted.flatten(), weights.flatten().float(), live, lengths, move(batch.kinds), tokens)


class Step:
    """``step(batch)``: one update; returns the loss [], not waited for."""

    def __init__(self, forward: Forward, optimiser: torch.optim.Optimizer, recipe: Recipe, meter: Meter):
        self.forward, self.optimiser, self.recipe, self.meter = forward, optimiser, recipe, meter
        self.parameters = list(forward.model.parameters())

    def loss(self, batch: DeviceBatch) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """(what is minimised, losses [P], hits [P], expert shares): mean over the targets plus the balance loss."""
        h, trace = self.forward(batch.ids, batch.live)
        losses, hits = self.forward.losses(h, batch.targets)
        mean = (losses * batch.weights).sum() / batch.weights.sum().clamp_min(1)
        balance = torch.stack(trace.balance).mean()
        return mean + self.recipe.balance * balance, losses, hits, trace.shares

    def __call__(self, batch: DeviceBatch) -> Tensor:
        loss, losses, hits, shares = self.loss(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.meter.add(batch, losses.detach(), hits, shares, norm)
        return loss.detach()
