"""The weights a training begins with."""

import math

import torch

from ..model import BerryLM
from .recipe import DT_BIAS, DT_BIAS_FASTEST, MOST_RATE

EMBEDDING_STD = 0.3
GAIN = 0.5  # of a projection: its outputs for unit inputs


@torch.no_grad()
def initialise(model: BerryLM, seed: int) -> None:
    """In place, on the CPU. Forget rates exp(A_log) are geometric from 1 to 72 over the heads. The slow heads are the memory;
    the fastest forgets all of the past at every token, so a kernel that brings the past back spoils the whole of its output.
    What adds to the residual stream is scaled by 1 / sqrt(2 layers)."""
    c, r = model.config, torch.Generator().manual_seed(seed)
    depth = (2 * c.num_hidden_layers) ** -0.5
    for name, p in model.named_parameters():
        kind = name.rpartition(".")[0].rpartition(".")[2]  # of the module
        if name.endswith("A_log"):
            p.copy_(torch.linspace(0, math.log(MOST_RATE), p.numel()))
        elif name.endswith("dt_bias"):
            heads = p.view(c.linear_num_value_heads, -1)  # [HV, K]
            heads[:-1].uniform_(*DT_BIAS, generator=r)
            heads[-1].uniform_(*DT_BIAS_FASTEST, generator=r)
        elif kind == "embed_tokens":
            p.normal_(std=EMBEDDING_STD, generator=r)
        elif kind == "conv1d":
            p.normal_(std=0.3, generator=r)
            p[:, 0, -1] += 0.7  # the present token passes
        elif p.dim() >= 2:  # projections and experts: [.., out, in]
            into_stream = kind in ("out_proj", "o_proj", "down_proj") or name.endswith("experts.down_proj")
            p.normal_(std=GAIN * p.shape[-1] ** -0.5 * (depth if into_stream else 1), generator=r)
