"""A model of random weights, drawn where they will be used: for measurements that need the sizes and not the sense.

The scales are those of a trained model as far as they decide what runs: every layer's output is small beside the stream, so
that 40 of them stay finite; the router sees inputs that differ, so that experts are hit evenly; decays reach exp(A_log) = 72
and about -490 in log2 over 64 tokens, the sharpness of the official weights.
"""

import math

import torch
from torch import Tensor

from ..backend import Backend, get_backend
from ..config import BerryLMConfig
from ..model import BerryLM, as_device, as_dtype

SHARPEST, MILDEST = 72.0, 0.5  # exp(A_log) of the last and the first head
TO_STREAM = ("out_proj.weight", "o_proj.weight", "down_proj", "down_proj.weight")  # what ends in the residual stream


def random_model(
    config: BerryLMConfig,
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    device: torch.device | str = "cuda",
    backend: str | Backend = "auto",
    seed: int = 0,
) -> BerryLM:
    """A BerryLM on ``device``, every tensor drawn in place in ``dtype``; a seed fixes it for one device type and version."""
    dtype, device = as_dtype(dtype), as_device(device)
    model = BerryLM(config, dtype=dtype, device="meta", backend=get_backend(backend, device, dtype))
    model.to_empty(device=device)
    fill(model, seed)
    return model.eval()


@torch.no_grad()
def fill(model: BerryLM, seed: int) -> None:
    """Draw every parameter of ``model`` anew, in place."""
    rng = torch.Generator(model.device).manual_seed(seed)
    for name, p in model.named_parameters():
        draw(name, p, (2 * model.config.num_hidden_layers) ** -0.5, rng)


def draw(name: str, p: Tensor, damping: float, rng: torch.Generator) -> None:
    """One parameter by its name in the checkpoint; ``damping`` scales what is added to the stream."""
    if name.endswith("A_log"):
        p.copy_(torch.linspace(math.log(MILDEST), math.log(SHARPEST), len(p)))
    elif name.endswith("dt_bias"):
        p.uniform_(-7, -2.6, generator=rng)
    elif name.endswith("attn_res.gate"):
        p.uniform_(0.5, 1.5, generator=rng)
    elif name.endswith("embed_tokens.weight"):
        p.normal_(generator=rng)
    elif name.endswith("linear_attn.norm.weight"):
        p.normal_(1, 0.1, generator=rng)
    elif name.endswith(("norm.weight", ".bias")):
        p.normal_(0, 0.1, generator=rng)
    else:  # [.., out, in]; pseudo_query [D] likewise, its products are with vectors of length sqrt(D)
        scale = p.shape[-1] ** -0.5
        if name.endswith("f_up_proj.weight"):
            scale *= 0.1  # dt_bias leads; the input moves a decay by a tenth of it
        elif name.endswith(TO_STREAM) and not name.endswith("f_down_proj.weight"):
            scale *= damping
        p.normal_(0, scale, generator=rng)
