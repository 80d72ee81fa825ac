"""The engine: one thread owns the model and the caches and calls ``step()``; every step is schedule, launch, publish.

    plain     schedule 1 | launch 1 | publish 1    schedule 2 | launch 2 | publish 2    ...
    overlap   schedule 1 | launch 1    schedule 2 | launch 2 | publish 1    schedule 3 | launch 3 | publish 2    ...

With overlap the device has the next step before the host asks for the last one's tokens: it never waits for Python. The tokens
drawn go into the next step on the device, and come out one step later.
"""

import threading
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..cache.packing import ints, upload
from ..cache.prefix import PrefixCache
from ..model import BerryLM
from .request import Request
from .runner import Runner
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


class Readback:
    """Token ids on their way to the host, behind what the device had to do before."""

    def __init__(self, tokens: torch.Tensor):
        self._host, self._event = tokens, None
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[int]:
        if self._event:
            self._event.synchronize()
        return self._host.tolist()


@dataclass
class Flight:
    """A forward under way. ``due``: whose next tokens it draws; ``logits``: their rows, where someone wants probabilities."""

    due: list[Running]
    tokens: torch.Tensor
    readback: Readback
    logits: torch.Tensor | None
    prompts: list[tuple[Part, torch.Tensor]]  # parts whose prompt is scored, and their logits
    known_first: bool  # the host must have these tokens before it can go on


class Engine:
    """Continuous batching: each request gets the answer it would get alone.

    Threads may share it: one step runs at a time, whoever calls it. overlap: launch a step before the last one is read;
    runner: None runs every batch as it is packed.
    """

    def __init__(
        self,
        model: BerryLM,
        cache: PrefixCache,
        *,
        max_running: int,
        token_budget: int,
        known: int | None = None,
        overlap: bool = False,
        runner: Runner | None = None,
    ):
        self.model, self.cache, self.known, self.overlap = model, cache, known, overlap
        self.runner = runner or Runner(model, cache.pool.caches, [])
        self.scheduler = Scheduler(cache, max_running=max_running, token_budget=token_budget)
        self._flight: Flight | None = None
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
                return self._step()
            except BaseException:
                self._flight = None
                self.scheduler.restart_all()
                raise

    def _step(self) -> list[Event]:
        events, parts = [], self.scheduler.schedule()
        if parts is None:  # someone must be retracted
            events += self._land()
            parts = self.scheduler.schedule()
        flight = self._launch(parts) if parts else None
        events += self._land()
        for part in parts:
            self.scheduler.keep(part)
        self._flight = flight
        if flight and (not self.overlap or flight.known_first):
            events += self._land()
        if self.idle:
            self._flight = None  # who was in it has ended
        return events

    def check(self) -> None:
        """Conservation of pages, slots and snapshots; AssertionError says what does not add up."""
        self.cache.check([running.lease for running in self.scheduler.running])

    def _forward(self, parts: list[Part]) -> torch.Tensor:
        return self.runner.forward(parts)

    def _launch(self, parts: list[Part]) -> Flight:
        """Forward, and sample where a next token is due; nothing of it is read."""
        logits = self._forward(parts)
        counts = [part.end - part.start if part.scored else 1 for part in parts]
        ends = list(accumulate(counts))
        prompts = [(p, logits[end - n : end]) for p, n, end in zip(parts, counts, ends, strict=True) if p.scored]
        at = [i for i, part in enumerate(parts) if part.samples]
        due, places, rows = [parts[i].running for i in at], None, logits
        if len(due) < len(logits):
            picked, places = upload([ints(ends[i] - 1 for i in at), ints(at)], logits.device)
            rows = logits[picked]
        tokens = sample(rows, [running.row for running in due], self.known)
        if self.overlap and due:
            self.runner.remember(places, tokens)
        for part in parts:
            self.scheduler.launched(part)
        scored = any(running.request.params.logprobs is not None for running in due)
        known_first = scored or bool(prompts) or any(running.request.steered for running in due)
        return Flight(due, tokens, Readback(tokens), rows if scored else None, prompts, known_first)

    def _land(self) -> list[Event]:
        """Publish the forward under way: hand out its tokens, release who has finished. Who is gone gets nothing."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        for part, logits in flight.prompts:
            add_prompt_logprobs(part, logits)
        if flight.logits is not None:
            asked = [running.request.params.logprobs for running in flight.due]
            found = token_logprobs(flight.logits, flight.tokens, [a or 0 for a in asked])
            for running, one, a in zip(flight.due, found, asked, strict=True):
                if a is not None:
                    running.request.logprobs.append(one)
        events = []
        for running, token in zip(flight.due, flight.readback.read(), strict=True):
            if running.live:
                running.ahead -= 1
                events.append(self._append(running, token))
        return events

    def _append(self, running: Running, token: int) -> Event:
        text = running.request.append(token)
        if running.request.finished:
            self.scheduler.release(running)
        return Event(running.request, text, len(running.request.output_ids), running.request.finish_reason)


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
