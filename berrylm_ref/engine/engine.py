"""The engine: one thread owns the model and the caches and calls ``step()``; every step is schedule, forward, publish."""

import threading
from dataclasses import dataclass

import torch

from ..cache.batch import Batch, Sequence
from ..cache.prefix import PrefixCache
from ..model import BerryLM
from .request import Request
from .sampler import sample, token_logprobs
from .scheduler import Part, Running, Scheduler


@dataclass(frozen=True)
class Event:
    """What one step did for one request: the text that became certain, its tokens so far, and the reason if it has ended.

    The request runs on while an event waits to be read, so what held at this step stands here.
    """

    request: Request
    text: str
    made: int
    finish_reason: str | None


class Engine:
    """Continuous batching: each request gets the answer it would get alone.

    Threads may share it: one step runs at a time, whoever calls it.
    """

    def __init__(self, model: BerryLM, cache: PrefixCache, *, max_running: int, token_budget: int, known: int | None = None):
        self.model, self.cache, self.known = model, cache, known
        self.scheduler = Scheduler(cache, max_running=max_running, token_budget=token_budget)
        self._lock = threading.Lock()

    @property
    def idle(self) -> bool:
        return not self.scheduler.waiting and not self.scheduler.running

    def add(self, request: Request) -> None:
        """Queue a request; ValueError if it can never fit, or is here already: two of one would share its tokens."""
        self.scheduler.check_fits(request)
        with self._lock:
            if request in self.scheduler.waiting or any(r.request is request for r in self.scheduler.running):
                raise ValueError("Engine.add: request: expected one that does not run yet, got one that waits or runs already")
            self.scheduler.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request and free what it holds; one that has ended already is left alone."""
        with self._lock:
            for running in self.scheduler.running:
                if running.request is request:
                    self.scheduler.release(running)
                    return
            if request in self.scheduler.waiting:
                self.scheduler.waiting.remove(request)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One forward for everyone who has something to run. If it fails, all who ran start over with the next step."""
        with self._lock:
            try:
                parts = self.scheduler.schedule()
                return self._publish(parts, self._forward(parts)) if parts else []
            except BaseException:
                self.scheduler.restart_all()
                raise

    def check(self) -> None:
        """Conservation of pages, slots and snapshots; AssertionError says what does not add up."""
        self.cache.check([running.lease for running in self.scheduler.running])

    def _forward(self, parts: list[Part]) -> torch.Tensor:
        sequences = [
            Sequence(
                part.running.tokens[part.start : part.end],
                part.start,
                part.running.lease.pages,
                part.running.lease.slot,
                all_logits=wants_prompt_logprobs(part),
                boundaries=part.boundaries,
            )
            for part in parts
        ]
        logits, _ = self.model.run(Batch.build(sequences, self.cache.pool.caches))
        return logits

    def _publish(self, parts: list[Part], logits: torch.Tensor) -> list[Event]:
        """Book the forward, sample where a next token is due, hand out text, release who has finished."""
        last, row = [], 0
        for part in parts:
            count = part.end - part.start if wants_prompt_logprobs(part) else 1
            if count > 1 or wants_prompt_logprobs(part):
                add_prompt_logprobs(part, logits[row : row + count])
            row += count
            last.append(row - 1)
            self.scheduler.consumed(part)
        due = [(part.running, at) for part, at in zip(parts, last, strict=True) if part.samples]
        if not due:
            return []
        rows = logits[[at for _, at in due]]
        tokens = sample(rows, [running.request.row for running, _ in due], self.known)
        asked = [running.request.params.logprobs for running, _ in due]
        if any(a is not None for a in asked):
            for (running, _), found, a in zip(due, token_logprobs(rows, tokens, [a or 0 for a in asked]), asked, strict=True):
                if a is not None:
                    running.request.logprobs.append(found)
        return [self._append(running, token) for (running, _), token in zip(due, tokens.tolist(), strict=True)]

    def _append(self, running: Running, token: int) -> Event:
        text = running.request.append(token)
        if running.request.finished:
            self.scheduler.release(running)
        return Event(running.request, text, len(running.request.output_ids), running.request.finish_reason)


def wants_prompt_logprobs(part: Part) -> bool:
    request = part.running.request
    wanted = request.params.prompt_logprobs is not None and part.end >= request.score_from
    return wanted and part.start < len(request.prompt_ids) and not request.output_ids


def add_prompt_logprobs(part: Part, logits: torch.Tensor) -> None:
    """Row i of the part scores token start + i + 1; after a retraction only what is not there yet is added."""
    request = part.running.request
    found = request.prompt_logprobs = request.prompt_logprobs or [None] * max(1, request.score_from)
    first = len(found)  # the next prompt token without a score
    targets = request.prompt_ids[max(first, part.start + 1) : part.end + 1]
    if targets:
        rows = logits[max(first, part.start + 1) - part.start - 1 :][: len(targets)]
        ids = torch.tensor(targets, device=logits.device)
        found += token_logprobs(rows, ids, [request.params.prompt_logprobs] * len(targets))
