"""The error measure of the project, the assertion that reports it, and a small model away from its initial values."""

import torch

from berrylm_ref import BerryLMConfig


def rel_l2(x, ref):
    """|x - ref| / |ref| in fp64. For an all-zero ref: 0 if x is zero too, else infinity."""
    x = torch.as_tensor(x).detach().to("cpu", torch.float64)
    ref = torch.as_tensor(ref).detach().to("cpu", torch.float64)
    assert x.shape == ref.shape, f"rel_l2: shape {tuple(x.shape)} against the reference's {tuple(ref.shape)}"
    error, size = torch.linalg.vector_norm(x - ref).item(), torch.linalg.vector_norm(ref).item()
    if size == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / size


def assert_close(name, x, ref, budget):
    """Assert rel_l2(x, ref) <= budget. Prints error and budget on success as well, so that slack can be seen.

    A NaN or an infinity on either side fails: an infinite reference would make any error look small.
    """
    ref = torch.as_tensor(ref)
    assert torch.isfinite(ref).all(), f"{name}: the reference is not finite"
    error = rel_l2(x, ref)
    ratio = f", {error / budget:.2f} of it" if budget else ""
    line = f"{name}: rel-L2 {error:.3e}, budget {budget:.3e}{ratio}"
    print(line)
    assert error <= budget, line


def tiny_config(**overrides):
    """A small model in which nothing that could be confused has the same size; block size 2 commits three streams."""
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "kda_gate_bottleneck": 6,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 14,
        "attn_res_block_size": 2,
    }
    return BerryLMConfig(**{**fields, **overrides})


@torch.no_grad()
def randomise(model, seed):
    """Give every parameter of ``model`` a value away from its trivial one, in place; returns the model.

    A fresh model has zero norm weights and zero mixers: a test with it can't see them used wrongly. The decays are those of
    a sharp model: exp(A_log) up to 72. The same seed and configuration give the same values for every dtype and device.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(shape, std=1.0, mean=0.0):
        return torch.empty(shape).normal_(mean, std, generator=rng)

    def uniform(shape, low, high):
        return torch.empty(shape).uniform_(low, high, generator=rng)

    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            value = uniform(p.shape, -0.7, 4.27)
        elif name.endswith("dt_bias"):
            value = uniform(p.shape, -6.0, 1.0)
        elif name.endswith("attn_res.gate"):
            value = uniform(p.shape, 0.5, 1.5)
        elif name.endswith("attn_res.pseudo_query"):
            value = normal(p.shape)
        elif name.endswith("conv1d.weight"):
            value = normal(p.shape, 0.5)
        elif name.endswith("embed_tokens.weight"):
            value = normal(p.shape)
        elif name.endswith("linear_attn.norm.weight"):
            value = normal(p.shape, 0.3, mean=1.0)
        elif name.endswith("norm.weight") or name.endswith(".bias"):
            value = normal(p.shape, 0.3)
        else:  # projections and experts: [.., out, in]
            value = normal(p.shape, p.shape[-1] ** -0.5)
        p.copy_(value)
    return model
