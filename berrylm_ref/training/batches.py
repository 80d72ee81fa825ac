"""Batches of conversations, made by worker processes ahead of the training, the same whatever their number.

The data are a sequence of units, each made by one worker from (seed, unit) alone: conversations are drawn so that every kind has
its share of the tokens, sorted into buckets by length, and a bucket that is full is a batch. What is left at the end of a
unit is a batch with empty rows if it fills at least half of them, else dropped.
"""

import multiprocessing
import os
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from ..chat.template import ChatTemplate
from ..tokenizer import Tokenizer
from .data import KINDS, conversation, encode
from .recipe import Recipe

PATIENCE = 120  # seconds without a batch after which the run ends


@dataclass(frozen=True)
class HostBatch:
    """ids [rows, length]; targets [rows, length], true where ids is to be predicted from what is before it; lengths [rows], 0
    for an empty row; kinds [rows], places in ``kind_names``."""

    ids: np.ndarray
    targets: np.ndarray
    lengths: np.ndarray
    kinds: np.ndarray


def kind_names(recipe: Recipe) -> tuple[str, ...]:
    return recipe.kinds or tuple(KINDS)


def make_unit(recipe: Recipe, tokenizer: Tokenizer, template: ChatTemplate, seed: int, unit: int) -> Iterator[HostBatch]:
    """The batches of one unit, in the order in which they fill up."""
    rng = Random(f"{seed}/{unit}")
    names = kind_names(recipe)
    whole = sum(KINDS[name] for name in names)
    shares = [KINDS[name] / whole for name in names]
    made = [rng.random() * share * recipe.tokens for share in shares]  # tokens of each kind; a head start breaks the ties
    full: dict[int, list] = {length: [] for length in recipe.buckets}
    count = tried = 0
    while count < recipe.unit_batches:
        kind = min(range(len(names)), key=lambda i: made[i] / shares[i])  # the one furthest behind its share
        ids, targets = encode(conversation(names[kind], rng), tokenizer, template)
        made[kind] += len(ids)
        tried += 1
        length = next((b for b in recipe.buckets if len(ids) <= b), None)
        if length is None:  # longer than every bucket
            if count == 0 and tried > 100 and not any(full.values()):
                most = recipe.buckets[-1]
                raise ValueError(f"batches: buckets: expected conversations of at most {most} tokens, got one of {len(ids)}")
            continue
        full[length].append((ids, targets, kind))
        if len(full[length]) == recipe.tokens // length:
            yield pack(full[length], length, recipe.tokens)
            full[length] = []
            count += 1
    for length, rows in full.items():
        if 2 * len(rows) * length >= recipe.tokens:
            yield pack(rows, length, recipe.tokens)


def pack(rows: list[tuple[list[int], list[bool], int]], length: int, tokens: int) -> HostBatch:
    count = tokens // length
    batch = HostBatch(
        np.zeros((count, length), np.int32), np.zeros((count, length), bool), np.zeros(count, np.int32), np.zeros(count, np.int64)
    )
    for i, (ids, targets, kind) in enumerate(rows):
        batch.ids[i, : len(ids)] = ids
        batch.targets[i, : len(ids)] = targets
        batch.lengths[i], batch.kinds[i] = len(ids), kind
    return batch


def work(recipe: Recipe, folder: str, seed: int, first: int, step: int, out: multiprocessing.Queue) -> None:
    """A worker's whole life: units first, first + step, ... It blocks while ``out`` is full and dies with its parent."""
    os.nice(5)  # the process that feeds the GPU comes first
    tokenizer, template = load_texts(folder)
    unit = first
    while True:
        for batch in make_unit(recipe, tokenizer, template, seed, unit):
            out.put(batch)
        out.put(None)  # the unit's end
        unit += step


def load_texts(folder: str | Path) -> tuple[Tokenizer, ChatTemplate]:
    """Tokenizer and template of a checkpoint folder, both needed."""
    tokenizer, template = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
    for name, found in (("tokenizer.json", tokenizer), ("chat_template.jinja", template)):
        if found is None:
            raise ValueError(f"training: tokenizer folder: expected {name} in {str(folder)!r}, it is not there")
    return tokenizer, template


class Batches:
    """Iterates over all batches without end; ``waited`` is how many seconds the reader has waited. Use as a context manager.

    workers: 0 makes the batches in this process.
    """

    def __init__(self, recipe: Recipe, folder: str | Path, seed: int, workers: int):
        self.recipe, self.folder, self.seed, self.workers = recipe, str(folder), seed, workers
        self.waited = 0.0
        self._queues: list[multiprocessing.Queue] = []
        self._processes: list[multiprocessing.Process] = []
        load_texts(folder)  # refused here, not in a worker

    def __enter__(self) -> "Batches":
        context = multiprocessing.get_context("spawn")  # a fork of a process that holds a GPU cannot use it and may hang
        kept = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES")}
        os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
        try:
            for i in range(self.workers):
                self._queues.append(context.Queue(maxsize=self.recipe.unit_batches + 8))
                arguments = (self.recipe, self.folder, self.seed, i, self.workers, self._queues[-1])
                self._processes.append(context.Process(target=work, args=arguments, daemon=True))
                self._processes[-1].start()
        finally:
            for name, value in kept.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        return self

    def __exit__(self, *_) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=5)
        for q in self._queues:
            q.cancel_join_thread()
            q.close()

    def __iter__(self) -> Iterator[HostBatch]:
        unit = 0
        if not self.workers:
            tokenizer, template = load_texts(self.folder)
            while True:
                yield from make_unit(self.recipe, tokenizer, template, self.seed, unit)
                unit += 1
        while True:
            while (batch := self._next(unit % self.workers)) is not None:
                yield batch
            unit += 1

    def ready(self) -> int:
        """Batches that wait to be read, about."""
        return sum(q.qsize() for q in self._queues)

    def _next(self, worker: int) -> HostBatch | None:
        begin = time.monotonic()
        while True:
            try:
                batch = self._queues[worker].get(timeout=1)
                self.waited += time.monotonic() - begin
                return batch
            except queue.Empty:
                process = self._processes[worker]
                if not process.is_alive():
                    raise ValueError(f"batches: worker {worker}: ended with status {process.exitcode}, see above") from None
                if time.monotonic() - begin > PATIENCE:
                    raise ValueError(f"batches: worker {worker}: expected a batch within {PATIENCE} s, got none") from None
