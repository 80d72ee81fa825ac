"""The memory of running sequences and of snapshots. Page, slot and snapshot 0 are scratch for padding and belong to nobody."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import BerryLMConfig


@dataclass
class Caches:
    """The memory of all layers; a sequence owns whole pages and one slot.

    k_pages, v_pages: [full layers, pages, page_size, kv_heads, head_dim], model dtype
    conv:             [linear layers, slots, C, W - 1], model dtype: the last raw inputs of the convolution, oldest first
    state:            [linear layers, slots, HV, K, V], fp32 (fp64 for a fp64 model)
    snapshot_conv, snapshot_state: the same for snapshots in place of slots
    """

    k_pages: Tensor
    v_pages: Tensor
    conv: Tensor
    state: Tensor
    snapshot_conv: Tensor
    snapshot_state: Tensor

    @classmethod
    def allocate(
        cls,
        config: BerryLMConfig,
        *,
        pages: int,
        page_size: int,
        slots: int,
        snapshots: int = 0,
        snapshot_dtype: torch.dtype | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "Caches":
        """Zeroed memory for so many usable pages, slots and snapshots, beside the scratch ones at index 0."""
        c, full, linear = config, len(config.full_layers), len(config.linear_layers)
        kv = (full, pages + 1, page_size, c.num_key_value_heads, c.head_dim)
        conv = (c.conv_dim, c.linear_conv_kernel_dim - 1)
        state = (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            k_pages=zeros(*kv, dtype=dtype),
            v_pages=zeros(*kv, dtype=dtype),
            conv=zeros(linear, slots + 1, *conv, dtype=dtype),
            state=zeros(linear, slots + 1, *state, dtype=state_dtype),
            snapshot_conv=zeros(linear, snapshots + 1, *conv, dtype=dtype),
            snapshot_state=zeros(linear, snapshots + 1, *state, dtype=snapshot_dtype or state_dtype),
        )

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[2]

    def clear_slot(self, slot: int) -> None:
        """A new sequence starts from a zero state and a zero window."""
        self.conv[:, slot] = 0
        self.state[:, slot] = 0
