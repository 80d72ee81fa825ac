"""AdamW in three groups, and its rate as a function of how much of the time budget is spent."""

import torch
from torch import nn

from .recipe import Recipe

GATES = ("A_log", "dt_bias")  # the decays: slow
UNDECAYED = ("embed_tokens.weight", "conv1d.weight", "mlp.gate.weight", "shared_expert_gate.weight")


def make_optimiser(model: nn.Module, recipe: Recipe, device: str) -> torch.optim.AdamW:
    """No weight decay on norms, decays, gates, the router and embeddings. Each group knows its peak rate as ``peak``."""
    named = list(model.named_parameters())
    gates = [p for name, p in named if name.endswith(GATES)]
    plain = [p for name, p in named if not name.endswith(GATES) and (p.dim() < 2 or name.endswith(UNDECAYED))]
    matrices = [p for name, p in named if not name.endswith(GATES) and not (p.dim() < 2 or name.endswith(UNDECAYED))]
    groups = [
        {"params": gates, "peak": recipe.gate_rate, "weight_decay": 0.0},
        {"params": plain, "peak": recipe.rate, "weight_decay": 0.0},
        {"params": matrices, "peak": recipe.rate, "weight_decay": recipe.weight_decay},
    ]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, fused=device == "cuda")


def rate_factor(recipe: Recipe, progress: float) -> float:
    """The share of the peak rate when ``progress`` (0 .. 1) of the budget is spent: up, level, linearly down to zero."""
    if progress < recipe.warmup:
        return max(progress / recipe.warmup, 0.01)
    return min(1.0, max(0.0, 1 - progress) / (1 - recipe.decay_from))


def set_rate(optimiser: torch.optim.Optimizer, factor: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = group["peak"] * factor
