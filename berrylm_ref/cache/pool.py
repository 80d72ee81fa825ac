"""Pages, state slots and snapshots: who has how many, and the copies between slots and snapshots."""

from dataclasses import dataclass

import torch

from ..config import BerryLMConfig
from .caches import Caches


class Allocator:
    """Hands out the indices 1 .. capacity; 0 is scratch and never handed out."""

    def __init__(self, name: str, capacity: int):
        self.name, self.capacity = name, capacity
        self._free = list(range(capacity, 0, -1))
        self._taken = bytearray(capacity + 1)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` indices; the caller has made sure that they are there."""
        if count > len(self._free):
            raise RuntimeError(f"{self.name}: expected at most {len(self._free)} to be taken, got {count}")
        out = [self._free.pop() for _ in range(count)]
        for i in out:
            self._taken[i] = 1
        return out

    def give_back(self, indices: list[int]) -> None:
        for i in indices:
            if not self._taken[i]:
                raise RuntimeError(f"{self.name}: {i} was given back but is not taken")
            self._taken[i] = 0
            self._free.append(i)


@dataclass(frozen=True)
class PoolSizes:
    """Usable pages of ``page_size`` tokens, running sequences, and snapshots; ``snapshot_dtype`` None: as the states."""

    pages: int
    page_size: int
    slots: int
    snapshots: int = 0
    snapshot_dtype: torch.dtype | None = None


class Pool:
    """The tensors of ``Caches`` and three allocators over them.

    A running sequence owns its slot; a snapshot is a copy of a slot at one moment and is only ever copied back: nothing that
    runs reads or writes a snapshot in place.
    """

    def __init__(self, config: BerryLMConfig, sizes: PoolSizes, *, dtype: torch.dtype, device: torch.device | str):
        self.sizes = sizes
        self.caches = Caches.allocate(
            config,
            pages=sizes.pages,
            page_size=sizes.page_size,
            slots=sizes.slots,
            snapshots=sizes.snapshots,
            snapshot_dtype=sizes.snapshot_dtype,
            dtype=dtype,
            device=device,
        )
        self.pages = Allocator("pages", sizes.pages)
        self.slots = Allocator("slots", sizes.slots)
        self.snapshots = Allocator("snapshots", sizes.snapshots)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot: the conv windows and states of all linear layers."""
        c = self.caches
        return c.snapshot_conv[:, 0].nbytes + c.snapshot_state[:, 0].nbytes

    def new_slot(self) -> int:
        """A slot with a zero state and zero windows."""
        slot = self.slots.take(1)[0]
        self.caches.clear_slot(slot)
        return slot

    def save(self, slot: int, snapshot: int) -> None:
        """Copy a slot's windows and states into a snapshot."""
        c = self.caches
        c.snapshot_conv[:, snapshot] = c.conv[:, slot]
        c.snapshot_state[:, snapshot] = c.state[:, slot]

    def restore(self, snapshot: int, slot: int) -> None:
        """Copy a snapshot into a slot: the sequence goes on from its own copy."""
        c = self.caches
        c.conv[:, slot] = c.snapshot_conv[:, snapshot]
        c.state[:, slot] = c.snapshot_state[:, snapshot]
