"""Prefix reuse for running sequences: what each one holds, what it leaves behind, and which states are worth keeping.

Strategies, resolved from what the KDA backend declares, never from a model's name:

    extra_buffer   states at multiples of `grid` tokens come out of the chunk kernel in the same forward: the last one of every
                   prompt, the one at or before a fork, the last one passed while decoding
    no_buffer      only the state at the end of a request; pages of one token
    off            nothing is reused: the twin that tests compare with

    tokens of a sequence   [0 ........ lease.filed) [ ........ lease.pages) whole pages in the tree, then private ones
    pages                   owned by the tree         owned by the lease
"""

import logging
from dataclasses import dataclass, field

from .pool import Pool
from .radix import Freed, Node, RadixTree

log = logging.getLogger(__name__)
STRATEGIES = ("extra_buffer", "no_buffer", "off")


def resolve_strategy(asked: str, *, boundary_states: bool, grid: int, page_size: int) -> str:
    """What "auto" becomes; ValueError where the strategy asked for can't be honoured, with the reason."""
    if asked not in ("auto", *STRATEGIES):
        raise ValueError(f"prefix_cache: expected 'auto' or one of {STRATEGIES}, got {asked!r}")
    fits = grid % page_size == 0
    if asked == "auto":
        if boundary_states and fits:
            chosen = "extra_buffer"
        else:
            chosen = "no_buffer" if page_size == 1 else "off"
        log.info("prefix_cache auto: %s (boundary states: %s, grid %d, page_size %d)", chosen, boundary_states, grid, page_size)
        return chosen
    if asked == "extra_buffer" and not boundary_states:
        raise ValueError("prefix_cache: extra_buffer: expected a KDA backend with boundary states, this one declares none")
    if asked == "extra_buffer" and not fits:
        raise ValueError(f"prefix_cache: extra_buffer: expected page_size to divide the grid of {grid} tokens, got {page_size}")
    if asked == "no_buffer" and page_size != 1:
        raise ValueError(f"prefix_cache: no_buffer: expected page_size 1, since a request may end anywhere, got {page_size}")
    return asked


@dataclass
class Lease:
    """What one running sequence holds. ``depth`` tokens were reused; ``wanted`` are the depths whose states it will keep."""

    node: Node
    slot: int
    pages: list[int]
    depth: int
    filed: int  # tokens whose pages belong to the tree
    wanted: list[int]
    snapshots: dict[int, int] = field(default_factory=dict)  # kept, not yet filed: depth -> id
    decode_depth: int | None = None  # which of them the decode loop keeps moving forward


class PrefixCache:
    """The pool's pages, slots and snapshots between running sequences and the tree. One thread uses it."""

    def __init__(self, pool: Pool, strategy: str, grid: int = 64):
        if strategy not in STRATEGIES:
            raise ValueError(f"PrefixCache: strategy: expected one of {STRATEGIES}, got {strategy!r}")
        self.pool, self.strategy, self.grid = pool, strategy, grid
        self.tree = RadixTree(pool.sizes.page_size)

    def begin(self, tokens: list[int], limit: int | None = None) -> Lease | None:
        """Match, lock, reserve pages and restore for a sequence that has to run ``tokens``.

        None, with nothing held or evicted, while no slot is free or the pages can't be had. ``limit``: reuse at most so many
        tokens.
        """
        if not self.pool.slots.free_count:
            return None
        wanted, node, pages, depth = set(), self.tree.root, [], 0
        if self.strategy != "off":
            match = self.tree.match(tokens, limit)
            node, pages, depth = match.node, list(match.pages), match.depth
            if self.strategy == "extra_buffer":
                count, grid = len(tokens), self.grid
                wanted = {(count - 1) // grid * grid, count // grid * grid, match.shared // grid * grid}
        self.tree.lock(node)
        lease = Lease(node, 0, pages, depth, depth, sorted(d for d in wanted if d > depth))
        if not self.reserve(lease, len(tokens)):
            self.tree.unlock(node)
            return None
        lease.slot = self.pool.new_slot()
        if depth:
            # copied now: from here on the node may lose its snapshot, and the sequence never writes into it
            self.pool.restore(node.snapshot, lease.slot)
        return lease

    def reserve(self, lease: Lease, tokens: int) -> bool:
        """Make room for ``tokens`` tokens in all, evicting from the tree if need be; False, and nothing taken, if it can't."""
        missing = -(-tokens // self.pool.sizes.page_size) - len(lease.pages)
        if missing <= 0:
            return True
        short = missing - self.pool.pages.free_count
        if short > self.tree.page_count - self.tree.locked_page_count:
            return False
        if short > 0:
            self._free(self.tree.evict_pages(short))
        lease.pages += self.pool.pages.take(missing)
        return True

    def boundaries(self, lease: Lease, start: int, end: int) -> list[tuple[int, int]]:
        """(tokens after start, snapshot id) for the wanted depths in (start, end]; the forward must fill these snapshots."""
        out = []
        for depth in [d for d in lease.wanted if start < d <= end]:
            lease.wanted.remove(depth)
            snapshot = self._new_snapshot()
            if snapshot is not None:
                lease.snapshots[depth] = snapshot
                out.append((depth - start, snapshot))
        return out

    def decoded(self, lease: Lease, consumed: int) -> None:
        """After a decode step: on the grid the state is kept, in place of the last one kept while decoding."""
        if self.strategy != "extra_buffer" or consumed % self.grid or consumed in lease.snapshots:
            return
        old = lease.decode_depth
        snapshot = self._new_snapshot() if old is None else lease.snapshots.pop(old)
        if snapshot is not None:
            self.pool.save(lease.slot, snapshot)
            lease.snapshots[consumed], lease.decode_depth = snapshot, consumed

    def file(self, lease: Lease, tokens: list[int]) -> None:
        """Hand the whole pages and the kept states of ``tokens``, all consumed, to the tree; the sequence goes on."""
        if self.strategy == "off":
            return
        kept = {d: s for d, s in lease.snapshots.items() if d <= len(tokens)}
        done = self.tree.insert(tokens, lease.pages, kept)
        for depth in kept:
            del lease.snapshots[depth]
        lease.decode_depth = None if lease.decode_depth in kept else lease.decode_depth
        self.pool.pages.give_back(done.surplus_pages)
        self.pool.snapshots.give_back(done.surplus_snapshots)
        self.tree.lock(done.node)
        self.tree.unlock(lease.node)
        lease.node, lease.filed = done.node, done.node.depth
        lease.pages[: len(done.pages)] = done.pages

    def end(self, lease: Lease, tokens: list[int]) -> None:
        """The sequence stops after having consumed ``tokens``: file them, give everything back."""
        if self.strategy == "no_buffer" and len(tokens) > lease.depth:
            snapshot = self._new_snapshot()
            if snapshot is not None:
                self.pool.save(lease.slot, snapshot)
                lease.snapshots[len(tokens)] = snapshot
        self.file(lease, tokens)
        self.drop(lease)

    def drop(self, lease: Lease) -> None:
        """Give back what the lease holds and file nothing: its states may be of no known moment."""
        self.tree.unlock(lease.node)
        self.pool.pages.give_back(lease.pages[lease.filed // self.pool.sizes.page_size :])
        self.pool.snapshots.give_back(list(lease.snapshots.values()))
        self.pool.slots.give_back([lease.slot])
        lease.pages, lease.snapshots = [], {}

    def check(self, leases: list[Lease]) -> None:
        """Conservation: free + held by the tree + held by ``leases`` = total, for pages, slots and snapshots."""
        self.tree.check()
        size = self.pool.sizes.page_size
        private = [p for lease in leases for p in lease.pages[lease.filed // size :]]
        filed = [p for n in self.tree.nodes for p in n.pages]
        held = [s for lease in leases for s in lease.snapshots.values()]
        kept = [n.snapshot for n in self.tree.nodes if n.snapshot is not None]
        slots = [lease.slot for lease in leases]
        for allocator, used in (
            (self.pool.pages, private + filed),
            (self.pool.snapshots, held + kept),
            (self.pool.slots, slots),
        ):
            assert len(set(used)) == len(used), f"{allocator.name}: one has two owners"
            assert len(used) + allocator.free_count == allocator.capacity, (
                f"{allocator.name}: {len(used)} held and {allocator.free_count} free of {allocator.capacity}"
            )
        locks = {n: 0 for n in self.tree.nodes}
        for lease in leases:
            for n in lease.node.path():
                locks[n] += 1
        assert all(n.locks == count for n, count in locks.items()), "a node's locks differ from the leases on its path"

    def _new_snapshot(self) -> int | None:
        """A free snapshot, the least recently used one of the tree if none is free; None if running sequences hold all."""
        if not self.pool.snapshots.free_count:
            self._free(self.tree.evict_snapshots(1))
        return self.pool.snapshots.take(1)[0] if self.pool.snapshots.free_count else None

    def _free(self, freed: Freed) -> None:
        self.pool.pages.give_back(freed.pages)
        self.pool.snapshots.give_back(freed.snapshots)
