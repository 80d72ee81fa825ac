"""What a forward needs on the device, and how it gets there: in one copy, without waiting for the device.

Sequences that bring one token run over static buffers of the next bucket's size, on a GPU as one CUDA graph:

    rows    [0 ...... n) the sequences    [n ...... bucket) padding: token 0 at position 0 of slot 0 and page 0, which are scratch

What changes with every token is copied in (ids, positions, slots, the page of each row). What rarely changes lies on the device
by slot: the page table, which a decode step extends itself, and the newest token of every sequence, for steps that are
launched before the host knows it.

Prompts are packed anew by ``Batch.pack``: a few short ones into a ``Room``, which on a GPU is a graph as well, since their
thousand launches take the host longer than the device; others as they are. In a step that has both, decodes run first, as they
do alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.batch import Batch, Caches, Room, Sequence, room_shapes
from ..cache.packing import ints, starts, upload
from ..model import BerryLM
from .scheduler import Part

UNKNOWN = -1  # a token that the device has and the host does not know yet
PREFILL_BUCKETS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)  # tokens; beyond, the host keeps up
ROOM_SEQUENCES, ROOM_KEYS, ROOM_BOUNDARIES = 5, 32768, 8  # of a bucket; keys: earlier tokens and new ones


def ladder(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... up to ``most`` sequences, which is the last."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + (power // 2 if power > 8 else power))
    return [size for size in sizes if size < most] + [most]


@dataclass
class Static:
    """The buffers of one bucket of decodes."""

    meta: Tensor  # [4, rows]: ids, positions, slots, pages
    cu_seqlens: Tensor
    rows: Tensor
    logits: Tensor | None = None
    graph: "torch.cuda.CUDAGraph | None" = None


@dataclass
class StaticRoom:
    """The buffer of one bucket of prompts."""

    room: Room
    numbers: Tensor  # as ``Batch.pack`` gives them
    slots: Tensor  # a part of it
    logits: Tensor | None = None
    graph: "torch.cuda.CUDAGraph | None" = None


class Runner:
    """Runs parts of sequences through the model.

    buckets: how many sequences of one token the static path has; none, and every batch is packed anew. prefill_buckets: how many
    tokens of prompts. graphs: capture them in CUDA graphs, now.
    """

    def __init__(
        self, model: BerryLM, caches: Caches, buckets: list[int], graphs: bool = False, prefill_buckets: list[int] | None = None
    ):
        self.model, self.caches, self.buckets = model, caches, sorted(buckets)
        device, slots, size = caches.state.device, caches.state.shape[1], caches.page_size
        self.device = device
        width = min(-(-model.config.max_position_embeddings // size), caches.k_pages.shape[1])
        self.table = torch.zeros(slots, width, dtype=torch.int32, device=device)  # by slot: the pages of its sequence
        self.last = torch.zeros(slots, dtype=torch.long, device=device)  # by slot: its newest token
        self.slots: Tensor | None = None  # of the last forward's parts
        self._static: dict[int, Static] = {}
        least, most = model.backend.state_grid, width * size  # a smaller room could take nothing, not even its own padding
        self._rooms = {tokens: self._room(tokens) for tokens in sorted(prefill_buckets or []) if least <= tokens <= most}
        if graphs:
            self.capture()

    def forward(self, parts: list[Part]) -> Tensor:
        """Logits [rows, V]: one row a part, one a token where the prompt is scored. Valid until the next forward."""
        count = next((i for i, part in enumerate(parts) if part.end - part.start > 1), len(parts))  # decodes come first
        size = next((b for b in self.buckets if b >= count), None)
        if not count or size is None:
            return self._prompts(parts)
        logits = self.decode(size, *self._rows(parts[:count]))
        if count < len(parts):
            # a room's graph was captured first, out of the same memory: it may write where these logits lie
            logits, slots = logits.clone(), self.slots
            logits = torch.cat([logits, self._prompts(parts[count:])])
            self.slots = torch.cat([slots, self.slots])
        return logits

    def _prompts(self, parts: list[Part]) -> Tensor:
        """Logits of parts of any length."""
        sequences = [
            Sequence(
                part.running.tokens[part.start : part.end] or [UNKNOWN],
                part.start,
                part.running.lease.pages,
                part.running.lease.slot,
                all_logits=part.scored,
                boundaries=part.boundaries,
            )
            for part in parts
        ]
        room = next((s.room for s in self._rooms.values() if s.room.takes(sequences, self.caches.page_size)), None)
        if room is None:
            return self.extend(sequences)
        return self.prefill(room.tokens, len(sequences), Batch.pack(sequences, self.caches, room))

    def extend(self, sequences: list[Sequence]) -> Tensor:
        """A batch that is packed anew."""
        return self.extend_packed(Batch.pack(sequences, self.caches))

    def extend_packed(self, packed: Tensor) -> Tensor:
        """The numbers of ``Batch.pack``, of caches of this size."""
        batch = Batch.unpack(packed, self.caches, self.last)
        self.slots = batch.slots
        return self.model.run(batch)[0]

    def prefill(self, tokens: int, count: int, packed: Tensor) -> Tensor:
        """The numbers of ``Batch.pack`` for the bucket of so many tokens; ``count`` sequences of them are somebody's."""
        static = self._rooms[tokens]
        static.numbers.copy_(packed, non_blocking=True)  # pinned, it is handed on only when the copy is through
        logits = self._run(static, self._prefill_step)
        self.slots = static.slots[:count]
        return logits[:count]

    def decode(self, size: int, rows: list[tuple[int, int, int, int]], stale: list[tuple[int, int, int]]) -> Tensor:
        """A batch over the buffers of bucket ``size``: (token, position, slot, page) of every row, and (slot, place, page) of
        pages that the table does not have."""
        static, n = self._buffers(size), len(rows)
        meta = torch.zeros(4, static.meta.shape[1], dtype=torch.long, pin_memory=self.device.type == "cuda")
        meta[:, :n] = torch.tensor(rows, dtype=torch.long).T
        if stale:
            slots, places, pages = upload([ints(column) for column in zip(*stale, strict=True)], self.device)
            self.table[slots, places] = pages.int()
        static.meta.copy_(meta, non_blocking=True)
        logits = self._run(static, self._step)
        self.slots = static.meta[2, :n]
        return logits[:n]

    def remember(self, at: Tensor | None, tokens: Tensor) -> None:
        """``tokens`` are the newest of the last forward's parts, or of its parts ``at``."""
        self.note(self.slots if at is None else self.slots[at], tokens)

    def note(self, slots: Tensor, tokens: Tensor) -> None:
        """``tokens`` are the newest of the sequences in ``slots``."""
        self.last[slots] = tokens

    def _run(self, static: Static | StaticRoom, step: Callable) -> Tensor:
        """Logits of one step over filled buffers."""
        if static.graph is not None:
            static.graph.replay()
        else:
            static.logits = step(static)
        return static.logits

    def _rows(self, parts: list[Part]) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int]]]:
        """What ``decode`` takes; the newest page of a sequence comes with its row."""
        rows, stale = [], []
        for part in parts:
            running, start = part.running, part.start
            tokens, lease = running.tokens, running.lease
            page = start // self.caches.page_size
            stale += [(lease.slot, place, lease.pages[place]) for place in range(running.sent, page)]
            running.sent = page + 1
            rows.append((tokens[start] if start < len(tokens) else UNKNOWN, start, lease.slot, lease.pages[page]))
        return rows, stale

    def _step(self, static: Static) -> Tensor:
        """One token for every row; nothing in here waits for the host."""
        rows, size = static.rows, self.caches.page_size
        ids, positions, slots, pages = static.meta[:, : len(rows)]
        ids = torch.where(ids == UNKNOWN, self.last[slots], ids)
        self.table[slots, positions // size] = pages.int()
        batch = Batch(
            input_ids=ids,
            positions=positions,
            cu_seqlens=static.cu_seqlens,
            context_lens=positions,
            page_table=self.table[slots],
            logit_rows=rows,
            max_query_len=1,
            slots=slots,
            kv_rows=pages * size + positions % size,
            caches=self.caches,
        )
        return self.model.run(batch)[0]

    def _prefill_step(self, static: StaticRoom) -> Tensor:
        """The prompts in a room; nothing in here waits for the host."""
        return self.model.run(Batch.in_room(static.numbers, static.room, self.caches))[0]

    def _room(self, tokens: int) -> StaticRoom:
        pages = min(self.table.shape[1], -(-max(ROOM_KEYS, tokens) // self.caches.page_size))
        room = Room(tokens, ROOM_SEQUENCES, pages, ROOM_BOUNDARIES, self.model.backend.state_grid)
        shapes = room_shapes(room, self.caches)
        numbers = torch.zeros(starts(shapes)[-1], dtype=torch.long, device=self.device)
        return StaticRoom(room, numbers, Batch.in_room(numbers, room, self.caches).slots)

    def _buffers(self, size: int) -> Static:
        if size not in self._static:
            stride = size + size % 2  # every row at 16 bytes
            meta = torch.zeros(4, stride, dtype=torch.long, device=self.device)
            rows = torch.arange(size + 1, device=self.device)
            self._static[size] = Static(meta, rows, rows[:size])
        return self._static[size]

    def release(self) -> None:
        """Give up the buffers and graphs: what was captured in them, as NCCL's communicator, can't end before."""
        self._static.clear()
        self._rooms.clear()

    @property
    def prefill_buckets(self) -> list[int]:
        return list(self._rooms)

    @torch.inference_mode()
    def capture(self) -> None:
        """One graph a bucket out of one pool of memory: the largest first, and the others fit into what it took."""
        pool, every = None, [(static, self._prefill_step) for static in reversed(self._rooms.values())]
        for static in self._rooms.values():
            static.numbers.copy_(Batch.pack([], self.caches, static.room))
        every += [(self._buffers(size), self._step) for size in reversed(self.buckets)]
        with torch.cuda.device(self.device):
            for static, step in every:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):  # kernels compile and libraries take their workspace outside the capture
                    for _ in range(2):
                        step(static)
                torch.cuda.current_stream().wait_stream(side)
                static.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(static.graph, pool=pool, capture_error_mode="thread_local"):
                    static.logits = step(static)
                pool = static.graph.pool()
