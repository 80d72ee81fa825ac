"""A model of random weights, drawn where they will be used: for measurements that need the sizes and not the sense.

The scales are those of a trained model as far as they decide what runs: every layer's output is small beside the stream, so
that 40 of them stay finite; the router sees inputs that differ, so that experts are hit evenly; decays reach exp(A_log) = 72
and about -490 in log2 over 64 tokens, the sharpness of the official weights.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from .backend import Backend, get_backend
from .config import BerryLMConfig
from .model import BerryLM, as_device, as_dtype
from .sharding import Shard

SHARPEST, MILDEST = 72.0, 0.5  # exp(A_log) of the last and the first head
TO_STREAM = ("out_proj.weight", "o_proj.weight", "down_proj", "down_proj.weight")  # what ends in the residual stream


def random_model(
    config: BerryLMConfig,
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    device: torch.device | str = "cuda",
    backend: str | Backend = "auto",
    kda_intra: str | list[str] = "dyadic",
    shard: Shard | None = None,
    seed: int = 0,
) -> BerryLM:
    """A BerryLM on ``device``, every tensor drawn there in ``dtype``; a seed fixes it for one device type and version.

    Of a ``shard`` the values are those that the whole model has there: one whole tensor is in memory beside it at a time.
    """
    dtype, device = as_dtype(dtype), as_device(device)
    backend = get_backend(backend, device, dtype)
    model = BerryLM(config, dtype=dtype, device="meta", backend=backend, kda_intra=kda_intra, shard=shard)
    model.to_empty(device=device)
    fill(model, seed)
    return model.eval()


def load_or_draw(folder: str | Path, seed: int | None, *, shard: Shard | None = None, **options) -> BerryLM:
    """The checkpoint in ``folder``, or with a ``seed`` a model of its config.json; ``options``: those that both take."""
    if seed is None:
        return BerryLM.from_pretrained(folder, shard=shard, **options)
    return random_model(BerryLMConfig.from_pretrained(folder), shard=shard, seed=seed, **options)


@torch.no_grad()
def fill(model: BerryLM, seed: int) -> None:
    """Draw every parameter of ``model`` anew, in place."""
    rng, damping = torch.Generator(model.device).manual_seed(seed), (2 * model.config.num_hidden_layers) ** -0.5
    for name, p in model.named_parameters():
        if model.shard.size == 1:
            draw(name, p, damping, rng)
            continue
        whole = torch.empty(model.shard.whole_shape(name, tuple(p.shape)), dtype=p.dtype, device=p.device)
        draw(name, whole, damping, rng)
        p.copy_(model.shard.part(name, whole))


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
