"""The random lives of tests/cache/test_machine.py with a step launched before the last one is read, on padded static batches.

Requests end on tokens that nobody foresees, so that one token too many runs for them; steps break off; sequences are retracted
while a token of theirs is on its way. What is filed must be the state of exactly its path all the same.
"""

import hypothesis.strategies as st
import torch
from cache.test_machine import TRUNKS, CacheMachine, examples
from hypothesis.stateful import initialize, rule
from models import VOCAB

from berrylm_ref import SamplingParams


class OverlapMachine(CacheMachine):
    overlap, buckets, prefill_buckets = True, [2, 4], [100, 192]

    @initialize(pages=st.integers(18, 60), snapshots=st.integers(2, 12), budget=st.sampled_from([64, 100, 200]))
    def start(self, pages, snapshots, budget):
        super().start(pages, snapshots, budget)
        self.broken = False
        caches = self.engine.cache.pool.caches
        for pool in (caches.k_pages, caches.v_pages, caches.conv, caches.state, caches.snapshot_conv, caches.snapshot_state):
            pool[:, 0] = torch.nan  # CACHE-2: padded rows must not lead it anywhere
        forward = self.engine._forward

        def breaks(parts):
            logits = forward(parts)
            if self.broken:
                raise KeyboardInterrupt
            return logits

        self.engine._forward = breaks

    @rule(
        trunk=st.integers(0, 1),
        shared=st.integers(0, 200),
        suffix=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
        max_tokens=st.integers(1, 24),
        stops=st.sampled_from([0, 4, 12]),
    )
    def submit(self, trunk, shared, suffix, max_tokens, stops):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=range_of(stops))
        request = self.llm.requests(TRUNKS[trunk][:shared] + suffix, params)[0]
        self.engine.add(request)
        self.live.append(request)

    @rule()
    def interrupt(self):
        """The layers have written, and the step before has not been read: all start over, nobody loses or repeats a token."""
        self.broken = bool(self.engine.scheduler.waiting or self.engine.scheduler.running)
        try:
            self.engine.step()
        except KeyboardInterrupt:
            assert not self.engine.scheduler.running
        self.broken = False


def range_of(stops):
    return list(range(0, VOCAB, VOCAB // stops)) if stops else []


class OverlapNoBufferMachine(OverlapMachine):
    strategy, page_size = "no_buffer", 1


class OverlapOffMachine(OverlapMachine):
    strategy, page_size = "off", 16


TestExtraBuffer = OverlapMachine.TestCase
TestExtraBuffer.settings = examples(60)
TestNoBuffer = OverlapNoBufferMachine.TestCase
TestNoBuffer.settings = examples(30)
TestOff = OverlapOffMachine.TestCase
TestOff.settings = examples(12)
