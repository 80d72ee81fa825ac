"""How many pages, slots and snapshots an engine gets."""

import torch

from ..cache.pool import PoolSizes
from ..config import BerryLMConfig

MIB = 2**20
CPU_KV_BYTES = 1024 * MIB  # zeroed lazily by the system: untouched pages cost nothing
CPU_SNAPSHOT_BYTES = 512 * MIB
GPU_KV_SHARE, GPU_SNAPSHOT_SHARE = 0.70, 0.15  # of what is free beside the weights


def kv_token_bytes(config: BerryLMConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values a token leaves in all full-attention layers."""
    return 2 * len(config.full_layers) * config.num_key_value_heads * config.head_dim * dtype.itemsize


def state_bytes(config: BerryLMConfig, dtype: torch.dtype, state_dtype: torch.dtype | None = None) -> int:
    """Bytes of a slot or a snapshot: conv windows (model dtype) and states (fp32, fp64 for fp64) of all linear layers."""
    c, states = config, state_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
    window = c.conv_dim * (c.linear_conv_kernel_dim - 1) * dtype.itemsize
    state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim * states.itemsize
    return len(c.linear_layers) * (window + state)


def plan_sizes(
    config: BerryLMConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    max_running_requests: int,
    max_total_tokens: int | None,
    snapshot_bytes: int | None,
    snapshot_dtype: torch.dtype | None,
    keep_snapshots: bool,
    free: int | None = None,
) -> PoolSizes:
    """Fill what is left open: KV for ``max_total_tokens`` tokens, snapshots for ``snapshot_bytes`` bytes.

    By default a share of the free GPU memory, on a CPU a fixed budget; at least one whole context and four snapshots a running
    request, at most 32 contexts and 4096 snapshots, so that a tiny model does not take what it can't use. ``free``: bytes of
    GPU memory that are free on every rank, None: what is free here.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] if free is None else free
        free -= (max_running_requests + 1) * state_bytes(config, dtype)
    if max_total_tokens is None:
        budget = CPU_KV_BYTES if free is None else int(free * GPU_KV_SHARE)
        context = config.max_position_embeddings
        fit = budget // max(1, kv_token_bytes(config, dtype))
        max_total_tokens = min(max(fit, context), 32 * context)
    snapshots = 0
    if keep_snapshots:
        each = max(1, state_bytes(config, dtype, snapshot_dtype))  # no linear layer, no bytes
        least = 4 * max_running_requests
        if snapshot_bytes is None:
            budget = CPU_SNAPSHOT_BYTES if free is None else int(free * GPU_SNAPSHOT_SHARE)
            snapshots = min(max(budget // each, least), 4096)
        else:
            snapshots = snapshot_bytes // each
    return PoolSizes(-(-max_total_tokens // page_size), page_size, max_running_requests, snapshots, snapshot_dtype)
