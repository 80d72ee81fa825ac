"""Tensor parallel: rank 0 decides, and every rank does the same to its own caches.

    rank 0        scheduler -> pool: clear, save, restore ┐
                            -> runner: prefill, decode .. ├─ one message a call ─> the same calls, in the same order
    other ranks   pool and runner of their own            ┘

A message is JSON: a list of [name, arguments...]. The copies between slots and snapshots wait for the forward that comes after
them. A batch that is packed anew is packed by rank 0 alone, and its numbers follow the message: tens of thousands, which take
milliseconds as text. Tokens that the host does not know yet go from device to device.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..cache.batch import Batch, Sequence
from ..cache.pool import Pool
from .runner import Runner

PACKET = 4096  # bytes of the first part of a message, enough for a decode step of 64 sequences
LENGTH = 8  # bytes of its length, at the start, and as many for how many numbers follow


class Line:
    """Messages from rank 0 to all others, over a group of CPU processes. pinned: the numbers go on to a GPU."""

    def __init__(self, group: dist.ProcessGroup, pinned: bool = False):
        self.group, self.pinned = group, pinned
        self._waiting: list[list[Any]] = []
        self._packet = torch.zeros(PACKET, dtype=torch.uint8)

    def later(self, name: str, *arguments: Any) -> None:
        """Goes out with the next message."""
        self._waiting.append([name, *arguments])

    def say(self, name: str, *arguments: Any, numbers: Tensor | None = None) -> None:
        """``numbers``: int64, on the host; they arrive as the last argument."""
        message = json.dumps([*self._waiting, [name, *arguments]], separators=(",", ":")).encode()
        self._waiting = []
        head, rest = message[: PACKET - 2 * LENGTH], message[PACKET - 2 * LENGTH :]
        count = 0 if numbers is None else numbers.numel()
        packet = len(message).to_bytes(LENGTH, "big") + count.to_bytes(LENGTH, "big") + head
        self._packet[: len(packet)] = torch.frombuffer(bytearray(packet), dtype=torch.uint8)
        dist.broadcast(self._packet, 0, self.group)
        if rest:
            dist.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0, self.group)
        if count:
            dist.broadcast(numbers, 0, self.group)

    def hear(self) -> list[list[Any]]:
        """Wait for the next message."""
        dist.broadcast(self._packet, 0, self.group)
        packet = bytes(self._packet.numpy())
        length, count = (int.from_bytes(packet[i : i + LENGTH], "big") for i in (0, LENGTH))
        message = packet[2 * LENGTH :][:length]
        if length > len(message):
            rest = torch.empty(length - len(message), dtype=torch.uint8)
            dist.broadcast(rest, 0, self.group)
            message += bytes(rest.numpy())
        calls = json.loads(message)
        if count:
            numbers = torch.empty(count, dtype=torch.long, pin_memory=self.pinned)
            dist.broadcast(numbers, 0, self.group)
            calls[-1].append(numbers)
        return calls


class LeadingPool(Pool):
    """Rank 0's pool: what it does to slots and snapshots, the others do to theirs."""

    def __init__(self, line: Line, *args, **options):
        super().__init__(*args, **options)
        self.line = line

    def new_slot(self) -> int:
        slot = super().new_slot()
        self.line.later("clear", slot)
        return slot

    def save(self, slot: int, snapshot: int) -> None:
        self.line.later("save", slot, snapshot)
        super().save(slot, snapshot)

    def restore(self, snapshot: int, slot: int) -> None:
        self.line.later("restore", snapshot, slot)
        super().restore(snapshot, slot)


class LeadingRunner(Runner):
    """Rank 0's runner. ``ranks``: the others; a step that breaks off leaves them out of step, so it ends them."""

    def __init__(self, ranks, *args, **options):
        super().__init__(*args, **options)
        self.ranks = ranks

    def extend(self, sequences: list[Sequence]) -> Tensor:
        packed = Batch.pack(sequences, self.caches)
        with self.ranks.in_step() as line:
            line.say("extend", numbers=packed)
            return self.extend_packed(packed)

    def prefill(self, tokens: int, count: int, packed: Tensor) -> Tensor:
        with self.ranks.in_step() as line:
            line.say("prefill", tokens, count, numbers=packed)
            return super().prefill(tokens, count, packed)

    def decode(self, size: int, rows: list, stale: list) -> Tensor:
        with self.ranks.in_step() as line:
            line.say("decode", size, rows, stale)
            return super().decode(size, rows, stale)

    def note(self, slots: Tensor, tokens: Tensor) -> None:
        with self.ranks.in_step() as line:
            drawn = torch.stack([slots, tokens])
            line.say("note", len(tokens))
            dist.broadcast(drawn, 0)
            super().note(slots, tokens)


@torch.inference_mode()
def follow(line: Line, pool: Pool, runner: Runner) -> None:
    """What every other rank does, until it is told to stop."""

    def note(count: int) -> None:
        drawn = torch.empty(2, count, dtype=torch.long, device=runner.device)
        dist.broadcast(drawn, 0)
        runner.note(*drawn)

    calls = {
        "clear": pool.caches.clear_slot,
        "save": pool.save,
        "restore": pool.restore,
        "extend": runner.extend_packed,
        "prefill": runner.prefill,
        "decode": runner.decode,
        "note": note,
    }
    while True:
        for name, *arguments in line.hear():
            if name == "stop":
                return
            calls[name](*arguments)
