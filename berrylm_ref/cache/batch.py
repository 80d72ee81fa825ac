"""What one forward reads and writes: N packed sequences, their positions, and where each one's memory lies.

Prefill, a later chunk of a prompt, decode and any mixture are the same batch: a sequence brings T new tokens after `context`
tokens that are already in the caches. Page 0 and slot 0 are scratch for padding and belong to nobody.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from .caches import Caches
from .packing import SIZES, ints, joined, shapes_of, starts, views


@dataclass
class Sequence:
    """One sequence's part in a forward: ``tokens`` after ``context`` earlier ones.

    ``pages`` hold context + new tokens, in order; ``slot`` holds its conv windows and states. ``all_logits``: a row of logits
    for every new token, else for the last one. ``boundaries``: (new tokens, snapshot) pairs; what the sequence remembers after
    exactly so many of them is copied there.
    """

    tokens: list[int]
    context: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    all_logits: bool = False
    boundaries: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Room:
    """The sizes of a batch that stands for every smaller one: what is missing is padding, and nothing depends on lengths.

        sequences   [0 .. n) those that run   [n .. sequences - 1) empty ones   the last: all tokens that are left, of nobody

    Padding runs over slot 0 and page 0; its state begins with zeros. States kept for nobody go to snapshot 0: the last one that
    is wanted, once more, or one of the last sequence, which then has ``grid`` tokens or more.
    """

    tokens: int
    sequences: int
    pages: int  # of a sequence, and of all together in tokens
    boundaries: int
    grid: int = 64

    def takes(self, sequences: list[Sequence], page_size: int) -> bool:
        """Whether ``sequences`` fit, with every token known and one row of logits each."""
        tokens, kept = sum(len(s.tokens) for s in sequences), sum(len(s.boundaries) for s in sequences)
        left = self.tokens - tokens
        return (
            len(sequences) < self.sequences
            and left >= (0 if kept else self.grid)
            and kept <= self.boundaries
            and sum(s.context for s in sequences) + self.tokens <= self.pages * page_size
            and not any(s.all_logits or not s.tokens or s.tokens[-1] < 0 for s in sequences)
        )

    def padded(self, sequences: list[Sequence]) -> list[Sequence]:
        """``sequences`` and the padding."""
        left = self.tokens - sum(len(s.tokens) for s in sequences)
        return [*sequences, *[Sequence([])] * (self.sequences - len(sequences) - 1), Sequence([0] * left)]


@dataclass
class Batch:
    """The tensors of one forward; P packed new tokens of N sequences.

    input_ids, positions, kv_rows [P] (kv_rows: page * page_size + offset); cu_seqlens [N + 1]; context_lens, slots [N];
    page_table [N, most pages]; logit_rows [M], rows of P that want logits.
    Without ``caches`` nothing is read or kept: the keys and values of this call serve as pages of one token.
    """

    input_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    page_table: Tensor
    logit_rows: Tensor
    max_query_len: int
    lengths: tuple[list[int], list[int]] | None = None  # cu_seqlens and context_lens as the host knows them
    slots: Tensor | None = None
    kv_rows: Tensor | None = None
    caches: Caches | None = None
    boundaries: Tensor | None = None  # [kept, 2] int32, ascending: (sequence, new tokens) whose states are kept
    snapshots: Tensor | None = None  # where each of them goes
    window_rows: Tensor | None = None  # [len(boundaries), W - 1] rows of P: the inputs in the window at that moment
    key_offsets: tuple[Tensor, int] | None = None  # where each one's keys begin side by side, [N + 1] int32; room for so many
    padded: bool = False  # the last sequence is padding and begins with zeros

    @classmethod
    def stateless(cls, input_ids: Tensor) -> "Batch":
        """[B, T] ids as B sequences that start and end here, logits for every token."""
        B, T = input_ids.shape
        rows = torch.arange(B * T, device=input_ids.device)
        return cls(
            input_ids=input_ids.flatten(),
            positions=rows % T if T else rows,
            cu_seqlens=torch.arange(B + 1, device=input_ids.device) * T,
            context_lens=torch.zeros(B, dtype=torch.long, device=input_ids.device),
            page_table=rows.view(B, T),
            logit_rows=rows,
            max_query_len=T,
            lengths=([n * T for n in range(B + 1)], [0] * B),
        )

    @classmethod
    def build(cls, sequences: list[Sequence], caches: Caches, last: Tensor | None = None) -> "Batch":
        """Pack ``sequences``, in one copy to the device; raises ValueError where their pages or slots do not fit.

        ``last`` [slots]: the newest token of each slot's sequence, on the device; it stands in for tokens given as -1, which the
        host does not know yet.
        """
        return cls.unpack(cls.pack(sequences, caches), caches, last)

    @classmethod
    def pack(cls, sequences: list[Sequence], caches: Caches, room: Room | None = None) -> Tensor:
        """The host's half of ``build``: int64 numbers that ``unpack`` takes, here or in a process with caches of that size.

        With a ``room``, which must take them, they are as many as any other batch's in it, and for ``in_room``.
        """
        _check(sequences, caches)
        size, taps = caches.page_size, caches.conv.shape[-1]
        kept = sorted((n, t, snapshot) for n, s in enumerate(sequences) for t, snapshot in s.boundaries)
        real = len(sequences)
        if room:
            sequences = room.padded(sequences)
            spare = (*kept[-1][:2], 0) if kept else (room.sequences - 1, room.grid, 0)
            kept += [spare] * (room.boundaries - len(kept))
        pairs = torch.tensor([(n, t) for n, t, _ in kept], dtype=torch.int32).view(-1, 2)
        lengths, contexts = [len(s.tokens) for s in sequences], [s.context for s in sequences]
        offsets = list(accumulate(lengths, initial=0))
        widest = room.pages if room else max((len(s.pages) for s in sequences), default=0)
        counts = [length if s.all_logits else min(length, 1) for length, s in zip(lengths, sequences, strict=True)]

        slots = ints(s.slot for s in sequences)
        table = torch.zeros(len(sequences), widest, dtype=torch.long)
        for row, s in zip(table, sequences, strict=True):
            row[: len(s.pages)] = joined([s.pages[:widest]])
        ids = joined(s.tokens for s in sequences)
        owner = torch.arange(len(lengths)).repeat_interleave(ints(lengths))  # [P], the sequence of each token
        positions = torch.arange(len(ids)) + (ints(contexts) - ints(offsets[:-1]))[owner]
        kv_rows = table[owner, positions // size] * size + positions % size
        skipped = ints(accumulate(length - count for length, count in zip(lengths, counts, strict=True)))
        logit_rows = torch.arange(sum(counts)) + skipped.repeat_interleave(ints(counts))
        if room:  # a row for every sequence, some of them nobody's
            logit_rows = torch.cat([logit_rows[:real], logit_rows.new_zeros(len(sequences) - real)])
        windows = joined(list(range(offsets[n] + t - taps, offsets[n] + t)) for n, t, _ in kept)
        unknown = (ids < 0).nonzero().squeeze(-1)

        sizes = len(sequences), widest, len(ids), len(logit_rows), len(kept), len(unknown)
        shapes = shapes_of(*sizes, taps)
        packed = torch.empty(starts(shapes)[-1], dtype=torch.long, pin_memory=caches.state.device.type == "cuda")
        packed[: len(sizes)] = ints(sizes)
        parts = [
            ids, positions, ints(offsets), ints(contexts), table, logit_rows, slots, kv_rows, ints(s for _, _, s in kept),
            windows, unknown, slots[owner[unknown]], pairs.view(torch.long),
        ]  # fmt: skip
        for place, part in zip(views(packed, shapes), parts, strict=True):
            place.copy_(part.view(place.shape))
        return packed

    @classmethod
    def unpack(cls, packed: Tensor, caches: Caches, last: Tensor | None = None) -> "Batch":
        """What ``pack`` gave, on the device; nothing of it may change afterwards."""
        taps = caches.conv.shape[-1]
        shapes = shapes_of(*packed[:SIZES].tolist(), taps)
        there = packed.to(caches.state.device, non_blocking=True)  # pinned, it is handed on only when the copy is through
        _, _, offsets, contexts, *_ = views(packed, shapes)
        ids, *_, unknown, theirs, _ = parts = views(there, shapes)
        if len(unknown):
            ids[unknown] = last[theirs]
        lengths = offsets.tolist(), contexts.tolist()
        longest = max((end - begin for begin, end in pairwise(lengths[0])), default=0)
        return cls._of(parts, caches, max_query_len=longest, lengths=lengths)

    @classmethod
    def in_room(cls, numbers: Tensor, room: Room, caches: Caches) -> "Batch":
        """What ``pack`` gave for ``room``, in a buffer on the device that is filled anew for the next batch. No host reads it."""
        _, _, cu_seqlens, context_lens, *_ = parts = views(numbers, room_shapes(room, caches))
        begins = pad((context_lens + cu_seqlens.diff()).cumsum(0), (1, 0)).int()
        keys = begins, room.pages * caches.page_size
        return cls._of(parts, caches, max_query_len=room.tokens, key_offsets=keys, padded=True)

    @classmethod
    def _of(cls, parts: list[Tensor], caches: Caches, **known) -> "Batch":
        """A batch of what ``pack`` laid out, in its order, and what else is known of it."""
        ids, positions, cu_seqlens, context_lens, table, logit_rows, slots, kv_rows, snapshots, windows, _, _, pairs = parts
        return cls(
            input_ids=ids,
            positions=positions,
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            page_table=table,
            logit_rows=logit_rows,
            slots=slots,
            kv_rows=kv_rows,
            caches=caches,
            boundaries=pairs.view(torch.int32).view(-1, 2) if len(pairs) else None,
            snapshots=snapshots,
            window_rows=windows,
            **known,
        )

    @property
    def decode_only(self) -> bool:
        """Every sequence brings exactly one token."""
        return self.caches is not None and self.max_query_len == 1 and len(self.input_ids) == len(self.context_lens)

    def load_linear(self, layer: int, x: Tensor, channels: int, taps: int) -> tuple[Tensor, Tensor | None]:
        """Conv windows [N, C, W - 1] and states [N, HV, K, V] (None: zeros) of linear layer ``layer``, as copies."""
        if self.caches is None:
            return x.new_zeros(len(self.context_lens), channels, taps), None
        # indexing with a tensor asks the host twice as much as these, which take whole rows
        windows, states = (pool[layer].index_select(0, self.slots) for pool in (self.caches.conv, self.caches.state))
        if self.padded:
            windows[-1].zero_()
            states[-1].zero_()
        return windows, states

    def store_linear(self, layer: int, windows: Tensor, state: Tensor) -> None:
        """Every sequence's new windows and state, into its own slot."""
        if self.caches is not None:
            self.caches.conv[layer].index_copy_(0, self.slots, windows)
            self.caches.state[layer].index_copy_(0, self.slots, state)

    def keep_boundaries(self, layer: int, raw: Tensor, states: Tensor) -> None:
        """States [M, HV, K, V] at the boundaries, and the windows: raw conv inputs [P, C] just before each."""
        kept = self.caches.snapshot_state[layer]
        kept.index_copy_(0, self.snapshots, states.to(kept.dtype))
        windows = raw.index_select(0, self.window_rows.flatten()).view(*self.window_rows.shape, -1)
        self.caches.snapshot_conv[layer].index_copy_(0, self.snapshots, windows.transpose(1, 2))


def _check(sequences: list[Sequence], caches: Caches) -> None:
    size, slots, taps = caches.page_size, caches.state.shape[1], caches.conv.shape[-1]
    for n, s in enumerate(sequences):
        total = s.context + len(s.tokens)
        if total > len(s.pages) * size:
            raise ValueError(f"Batch: sequences[{n}].pages: expected room for {total} tokens, got {len(s.pages)} x {size}")
        if not 0 < s.slot < slots:
            raise ValueError(f"Batch: sequences[{n}].slot: expected 1 .. {slots - 1}, got {s.slot}")
    kept = [(n, tokens, snapshot) for n, s in enumerate(sequences) for tokens, snapshot in s.boundaries]
    if any(tokens < taps for _, tokens, _ in kept):
        raise ValueError(f"Batch: boundaries: expected {taps} new tokens or more before each, got {kept}")
    taken = [s.slot for s in sequences]
    if len(set(taken)) < len(taken):
        raise ValueError(f"Batch: sequences: expected every sequence in its own slot, got slots {taken}")


def room_shapes(room: Room, caches: Caches) -> list[tuple[int, ...]]:
    """Of the parts of every batch packed for ``room``."""
    N, taps = room.sequences, caches.conv.shape[-1]
    return shapes_of(N, room.pages, room.tokens, N, room.boundaries, 0, taps)
