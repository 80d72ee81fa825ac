"""Who runs in the next forward: admission, prefill chunks within a token budget, retraction when pages run out.

    tokens of a running sequence   [0 ...... consumed) [consumed ...... end) [...... len(tokens))
                                    in the caches       in this forward       later

Decodes come first, then prefill chunks in the order of arrival. A chunk that does not finish its prompt ends on the state
grid, so that states can be kept there; one step of the grid fits whatever the decodes took. When pages run out the youngest
sequence is retracted: what it computed stays in the tree as long as there is room, and it goes back to the head of the queue.
The oldest is never retracted for others, so everyone gets through.

A step may be scheduled while the one before still runs. Every decode is then taken to go on, although the token drawn last is
not known here yet (`ahead`); an end by length is foreseen, one by a token or a string is not. Such a sequence runs one token
more: its last one, which would not have run otherwise. It is a token of the sequence, so all that `release` files, to the end of
`consumed`, is true: pages, and with no_buffer the slot's state. Only a state kept on the grid is not moved on to that token,
since what continues the answer may leave the end token out: `keep` is called when it is known who goes on.
"""

from collections import deque
from dataclasses import dataclass

from ..cache.prefix import Lease, PrefixCache
from .request import Request
from .sampler import Row


@dataclass(eq=False)
class Running:
    """A request that holds a lease. ``consumed`` of its ``tokens`` are in the caches, or will be after the step that runs now."""

    request: Request
    lease: Lease
    consumed: int
    ahead: int = 0  # tokens drawn that are still on their way to the host
    sent: int = 0  # leading pages of the lease that the device's table has
    live: bool = True  # until it is released

    @property
    def tokens(self) -> list[int]:
        return self.request.tokens

    @property
    def length(self) -> int:
        return len(self.request.tokens) + self.ahead

    @property
    def row(self) -> Row:
        row = self.request.row
        row.ahead = self.ahead
        return row

    @property
    def ends(self) -> bool:
        """The token on its way is the last one it may have."""
        return self.ahead > 0 and len(self.request.output_ids) + self.ahead >= self.request.max_new


@dataclass
class Part:
    """A sequence's share of one forward: tokens[start:end], and the (tokens, snapshot) boundaries it must keep."""

    running: Running
    start: int
    end: int
    boundaries: list[tuple[int, int]]

    def __post_init__(self):
        # the last token there is runs, so its logits choose the next one; settled here, since the sequence grows meanwhile
        self.samples = self.end == self.running.length

    @property
    def scored(self) -> bool:
        """Its logits give log-probabilities of prompt tokens."""
        request = self.running.request
        wanted = request.params.prompt_logprobs is not None and self.end >= request.score_from
        return wanted and self.start < len(request.prompt_ids) and not request.output_ids


class Scheduler:
    def __init__(self, cache: PrefixCache, *, max_running: int, token_budget: int):
        if token_budget < cache.grid:
            raise ValueError(f"chunked_prefill_size: expected {cache.grid} tokens or more, the state grid, got {token_budget}")
        self.cache, self.max_running, self.token_budget = cache, max_running, token_budget
        self.waiting: deque[Request] = deque()
        self.running: list[Running] = []  # in order of admission
        self.retractions = 0

    def check_fits(self, request: Request) -> None:
        """Refuse what could never run, even alone."""
        sizes = self.cache.pool.sizes
        total, room = len(request.prompt_ids) + request.max_new, sizes.pages * sizes.page_size
        if total > room:
            raise ValueError(
                f"generate: max_tokens: expected prompt and new tokens to fit the {room} tokens of KV memory, "
                f"got {len(request.prompt_ids)} + {request.max_new} = {total}"
            )

    def schedule(self) -> list[Part] | None:
        """The parts of the next forward; empty when there is nothing to run.

        None, with pages reserved and nothing else done, if someone must be retracted while tokens are on their way: they would be
        thrown away, and a sequence that has room only without its own would be admitted again at once to make it again.
        """
        parts: list[Part] = []
        budget = self.token_budget
        for running in list(self.running):
            length = running.length
            decodes = running.consumed == length - 1 and running.live and not running.ends  # not retracted just now
            if not decodes or not budget:
                continue
            if not self.cache.reserve(running.lease, length):
                if any(r.ahead for r in self.running):
                    return None
                if not self._make_room(running, length):
                    continue
            parts.append(Part(running, running.consumed, length, []))
            budget -= 1
        budget = max(budget, self.cache.grid)  # one grid step of prefill at least, or decodes keep everyone else out
        for running in self.running:
            if running.consumed < running.length - 1:
                budget = self._add_chunk(parts, running, budget)
        while self.waiting and len(self.running) < self.max_running and budget >= self.cache.grid:
            running = self._admit(self.waiting[0])
            if running is None:
                break
            self.waiting.popleft()
            budget = self._add_chunk(parts, running, budget)
        return parts

    def launched(self, part: Part) -> None:
        """The forward is under way: book it."""
        part.running.consumed = part.end
        part.running.ahead += part.samples

    def keep(self, part: Part) -> None:
        """Before the next forward, once everything before ``part`` is known: keep a state on the grid, file a finished prompt."""
        running = part.running
        if not running.live:
            return
        if part.end - part.start == 1 and part.samples and running.request.output_ids:
            self.cache.decoded(running.lease, running.consumed)
        elif part.samples:
            self.cache.file(running.lease, running.tokens[: running.consumed])
            running.sent = 0  # its pages may be the tree's now

    def release(self, running: Running) -> None:
        """The sequence stops, finished or cancelled: what it computed goes to the tree, what it held is free."""
        self.running.remove(running)
        running.live = False
        self.cache.end(running.lease, running.tokens[: running.consumed])

    def restart_all(self) -> None:
        """A forward broke off: how far each layer's state got is unknown, so nothing of it is kept or filed."""
        for running in reversed(self.running):
            self.cache.drop(running.lease)
            running.live = False
            request = running.request
            del request.logprobs[len(request.output_ids) :]  # of a token that was not taken
            if not request.finished:
                self.waiting.appendleft(request)
        self.running.clear()

    def _admit(self, request: Request) -> Running | None:
        tokens = request.tokens
        scored = request.params.prompt_logprobs is not None and not request.output_ids
        lease = self.cache.begin(tokens, limit=max(0, request.score_from - 1) if scored else None)
        if lease is None:
            return None
        running = Running(request, lease, lease.depth)
        if request.cached_tokens is None:  # what a retracted one finds again is its own work
            request.cached_tokens = lease.depth
        self.running.append(running)
        return running

    def _add_chunk(self, parts: list[Part], running: Running, budget: int) -> int:
        """Append the next prefill chunk of ``running`` if the budget allows one; returns the budget left."""
        start, total, grid = running.consumed, running.length, self.cache.grid
        end = min(total, start + budget)
        if end < total:
            end = end // grid * grid
        if end <= start:
            return budget
        parts.append(Part(running, start, end, self.cache.boundaries(running.lease, start, end)))
        return budget - (end - start)

    def _make_room(self, running: Running, tokens: int) -> bool:
        """Reserve for ``running``, retracting younger sequences, itself at last; False if it was retracted."""
        while not self.cache.reserve(running.lease, tokens):
            youngest = self.running[-1]
            self.retractions += 1
            self.release(youngest)
            self.waiting.appendleft(youngest.request)
            if youngest is running:
                return False
        return True
