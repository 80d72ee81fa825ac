"""One forward for everything: however a prompt is cut, packed, mixed with others or laid out in memory, the numbers agree."""

import pytest
import torch
from helpers import assert_close, randomise, rel_l2, tiny_config
from kda_cases import SPLITS

from berrylm_ref import BerryLM
from berrylm_ref.cache.batch import Batch, Caches, Sequence

EXACT = 1e-14  # most comparisons run in fp64, where no router choice is near a tie
FP32 = 2e-6


@pytest.fixture(scope="module")
def model():
    return randomise(BerryLM(tiny_config(), dtype="float64"), seed=0)


@pytest.fixture(scope="module")
def model32():
    return randomise(BerryLM(tiny_config()), seed=0)


def prompt(length, seed=0):
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Memory:
    """Caches, and the pages and slot that each sequence owns in them; pages are handed out from the last one down."""

    def __init__(self, model, page_size=16, pages=60, slots=6, poison=False):
        self.model = model
        self.caches = Caches.allocate(
            model.config, pages=pages, page_size=page_size, slots=slots, dtype=model.dtype, device="cpu"
        )
        self.free, self.slots, self.owned = list(range(1, pages + 1)), list(range(slots, 0, -1)), {}
        if poison:
            for x in (self.caches.k_pages, self.caches.v_pages):
                x.fill_(float("nan"))
            for x in (self.caches.conv, self.caches.state):
                x.fill_(float("nan"))

    def part(self, name, tokens, all_logits=True):
        """The next ``tokens`` of sequence ``name``."""
        if name not in self.owned:
            self.owned[name] = {"pages": [], "slot": self.slots.pop(), "context": 0}
            self.caches.clear_slot(self.owned[name]["slot"])
        mine = self.owned[name]
        while len(mine["pages"]) * self.caches.page_size < mine["context"] + len(tokens):
            mine["pages"].append(self.free.pop())
        one = Sequence(list(tokens), mine["context"], list(mine["pages"]), mine["slot"], all_logits)
        mine["context"] += len(tokens)
        return one

    @torch.no_grad()
    def run(self, *parts):
        """One forward; a list of each sequence's rows of logits."""
        logits, _ = self.model.run(Batch.build(list(parts), self.caches))
        rows = [len(p.tokens) if p.all_logits else min(1, len(p.tokens)) for p in parts]
        return list(logits.split(rows))

    def state(self, name):
        slot = self.owned[name]["slot"]
        return self.caches.conv[:, slot], self.caches.state[:, slot]

    def feed(self, name, tokens, split):
        """All of ``tokens``, cut as ``split`` says; logits of every token."""
        rows, begin = [], 0
        for length in split:
            rows += self.run(self.part(name, tokens[begin : begin + length]))
            begin += length
        assert begin == len(tokens)
        return torch.cat(rows)


def assert_same(memory, name, other, other_name, budget):
    for kind, a, b in zip(("conv windows", "states"), memory.state(name), other.state(other_name), strict=True):
        assert_close(kind, a, b, budget)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_cache_1_every_split_of_130_tokens(request, split, dtype):
    """CACHE-1: a continuation of more than one token dropped the state, and a conv window fed one or two tokens at a time is
    a trap of its own. Logits of every token, states and windows agree with one call and with no cache at all."""
    model = request.getfixturevalue("model" if dtype == "float64" else "model32")
    budget = EXACT if dtype == "float64" else FP32
    ids = prompt(130)
    whole, cut = Memory(model), Memory(model, poison=True)
    logits = whole.feed("a", ids, [130])
    assert_close("cached against stateless", logits, model(torch.tensor([ids]))[0], budget)
    assert_close("logits", cut.feed("a", ids, split), logits, budget)
    assert_same(cut, "a", whole, "a", budget)


@torch.no_grad()
def test_cache_1_bf16_agrees_with_itself():
    """CACHE-1: the same top-1, and logits and states no further apart than bf16 is from fp64."""
    half = randomise(BerryLM(tiny_config(), dtype="bfloat16"), seed=0)
    exact = Memory(randomise(BerryLM(tiny_config(), dtype="float64"), seed=0))
    ids = prompt(130)
    truth = exact.feed("a", ids, [130])
    whole = Memory(half)
    logits = whole.feed("a", ids, [130])
    noise = rel_l2(logits, truth)
    state_noise = rel_l2(whole.state("a")[1], exact.state("a")[1])
    for split in ([64, 66], [127, 3], [2] * 65):
        cut = Memory(half)
        other = cut.feed("a", ids, split)
        assert other[-1].argmax() == logits[-1].argmax()
        assert_close("logits", other, logits, noise)
        assert_close("states", cut.state("a")[1], whole.state("a")[1], state_noise)
        assert cut.caches.state.dtype == torch.float32 and cut.caches.conv.dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500])
def test_krn_2_every_length_then_decode(model, length):
    """KRN-2: garbage in the final state shows only in the next call, so three more tokens follow."""
    ids = prompt(length + 3, seed=length)
    reference = model(torch.tensor([ids]))[0]
    memory, loop = Memory(model, poison=True), Memory(model)
    assert_close("logits", memory.feed("a", ids, [length, 1, 1, 1]), reference, EXACT)
    if length <= 129:  # token by token: the linear layers never take the chunk form
        assert_close("loop", loop.feed("a", ids, [1] * len(ids)), reference, EXACT)
        assert_same(memory, "a", loop, "a", EXACT)


def test_cache_1_mixed_batches_equal_each_alone(model):
    """Prefill, a later chunk, decode and an empty part in one forward: each as if it were alone (CACHE-1, KRN-2)."""
    lengths = {"a": 130, "b": 7, "c": 65, "d": 1}
    ids = {name: prompt(n + 80, seed=n) for name, n in lengths.items()}
    together = Memory(model, page_size=7, pages=120, poison=True)
    got = {name: [] for name in ids}
    schedule = [
        {"a": 130, "b": 7},
        {"c": 64, "a": 1, "b": 1},  # a prefill before two decodes
        {"a": 1, "b": 1, "c": 1, "d": 1},  # all decode, one of them from its first token
        {"b": 66, "a": 2, "d": 0, "c": 1},
        {"d": 3, "c": 14, "b": 1, "a": 40},
        {"a": 1, "d": 1},
    ]
    for step in schedule:
        parts = []
        for name, n in step.items():
            begin = sum(map(len, got[name]))
            parts.append(together.part(name, ids[name][begin : begin + n]))
        for name, rows in zip(step, together.run(*parts), strict=True):
            got[name].append(rows)
    for name in ids:
        logits = torch.cat(got[name])
        alone = Memory(model)
        assert_close(f"logits of {name}", logits, alone.feed(name, ids[name][: len(logits)], [len(logits)]), EXACT)
        assert_same(together, name, alone, name, EXACT)


def test_an_empty_part_changes_nothing(model):
    """KRN-2: a sequence that brings no token keeps its memory bit for bit and gets no row."""
    memory = Memory(model)
    memory.feed("a", prompt(70), [70])
    before = [x.clone() for x in memory.state("a")]
    a, b = memory.run(memory.part("a", []), memory.part("b", prompt(5), all_logits=False))
    assert a.shape == (0, 97) and b.shape == (1, 97)
    (a,) = memory.run(memory.part("a", [], all_logits=False))
    assert a.shape == (0, 97)
    assert all(torch.equal(x, y) for x, y in zip(before, memory.state("a"), strict=True))
    assert memory.run() == []


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_page_size_does_not_matter(model, page_size):
    """Pages fill, straddle chunks and are taken in any order."""
    ids = prompt(150)
    reference = model(torch.tensor([ids]))[0].detach()
    memory = Memory(model, page_size=page_size, pages=200, poison=True)
    torch.manual_seed(page_size)
    memory.free = [memory.free[i] for i in torch.randperm(len(memory.free))]
    assert_close("logits", memory.feed("a", ids, [100, 1, 29, 1, 1, 18]), reference, EXACT)


def test_permuted_pages_and_slots_give_the_same_bits(model32):
    """Where a sequence lies must not enter its numbers: same batch, other pages, other slots, identical results."""
    runs = []
    for seed in (0, 1):
        memory = Memory(model32, page_size=7)
        order = torch.Generator().manual_seed(seed)
        memory.free = [memory.free[i] for i in torch.randperm(len(memory.free), generator=order)]
        memory.slots = [memory.slots[i] for i in torch.randperm(len(memory.slots), generator=order)]
        out = memory.run(memory.part("a", prompt(70)), memory.part("b", prompt(9, seed=1)))
        out += memory.run(memory.part("b", prompt(3, seed=2)), memory.part("a", prompt(1, seed=3)))
        out += memory.run(memory.part("b", prompt(1, seed=4)), memory.part("a", prompt(1, seed=5)))
        runs.append((memory, out))
    (first, a), (second, b) = runs
    assert first.owned != second.owned
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    for name in ("a", "b"):
        assert all(torch.equal(x, y) for x, y in zip(first.state(name), second.state(name), strict=True))


def test_rows_of_logits_are_those_asked_for(model):
    """Per sequence: every row or the last one; asking for fewer doesn't change them."""
    a, b, c = prompt(20), prompt(66, seed=1), prompt(1, seed=2)
    memory = Memory(model)
    every = memory.run(*(memory.part(n, ids) for n, ids in (("a", a), ("b", b), ("c", c))))
    assert [len(x) for x in every] == [20, 66, 1]
    memory = Memory(model)
    some = memory.run(memory.part("a", a, False), memory.part("b", b, True), memory.part("c", c, False))
    assert [len(x) for x in some] == [1, 66, 1]
    assert_close("last of a", some[0], every[0][-1:], EXACT)
    assert_close("all of b", some[1], every[1], EXACT)
    assert_close("c", some[2], every[2], EXACT)


def test_a_batch_of_rows_equals_each_row_alone(model):
    ids = torch.tensor([prompt(70), prompt(70, seed=1), prompt(70, seed=2)])
    with torch.no_grad():
        together = model(ids, return_hidden_states=True)
        for b in range(3):
            alone = model(ids[b : b + 1], return_hidden_states=True)
            assert_close(f"logits of {b}", together.logits[b : b + 1], alone.logits, EXACT)
            for x, y in zip(together.hidden_states, alone.hidden_states, strict=True):
                assert_close("stream", x[b : b + 1], y, EXACT)


def test_cache_2_scratch_belongs_to_nobody(model):
    """CACHE-2: slot 0 and page 0 are never written by a sequence, whatever is decoded beside them."""
    memory = Memory(model)
    for x in (memory.caches.conv, memory.caches.state):
        x[:, 0] = 7
    memory.caches.k_pages[:, 0] = memory.caches.v_pages[:, 0] = 7
    memory.run(memory.part("a", prompt(70)), memory.part("b", prompt(9)))
    for _ in range(3):
        memory.run(memory.part("a", [1]), memory.part("b", [2]))
    c = memory.caches
    assert all((x[:, 0] == 7).all() for x in (c.conv, c.state, c.k_pages, c.v_pages))


def test_cache_3_a_slot_taken_over_starts_from_zero(model):
    """CACHE-3: a new sequence in a used slot and used pages must not see the old one."""
    ids, fresh = prompt(40, seed=3), Memory(model)
    expected = fresh.feed("new", ids, [40])
    used = Memory(model)
    used.feed("old", prompt(90), [90])
    old = used.owned.pop("old")
    used.slots.append(old["slot"])
    used.free += old["pages"]
    assert_close("logits", used.feed("new", ids, [40]), expected, EXACT)
    assert used.owned["new"]["slot"] == old["slot"] and set(used.owned["new"]["pages"]) <= set(old["pages"])
    assert_same(used, "new", fresh, "new", EXACT)


@torch.no_grad()
@pytest.mark.parametrize("boundary", [64, 128])
def test_kept_boundaries_are_the_memory_of_a_shorter_prompt(model, boundary):
    """What a forward hands out at a 64-token boundary is what stopping there would have left: state and conv window."""
    ids = prompt(150)
    short = Memory(model)
    short.feed("a", ids[:boundary], [boundary])
    caches = Caches.allocate(model.config, pages=20, page_size=16, slots=2, snapshots=2, dtype=model.dtype, device="cpu")
    other = Sequence(prompt(70, seed=1), 0, [15, 16, 17, 18, 19], 2)
    one = Sequence(ids, 0, list(range(1, 11)), 1, boundaries=[(boundary, 2)])
    model.run(Batch.build([other, one], caches))
    conv, state = short.state("a")
    assert_close("window", caches.snapshot_conv[:, 2], conv, EXACT)
    assert_close("state", caches.snapshot_state[:, 2], state, EXACT)
    assert not caches.snapshot_conv[:, 1].any() and not caches.snapshot_state[:, 1].any()


REFUSED = {
    "too few pages": ([Sequence([1] * 17, 0, [1], 1)], r"sequences\[0\].pages: expected room for 17 tokens, got 1 x 16"),
    "context forgotten": ([Sequence([1], 16, [1], 1)], r"sequences\[0\].pages: expected room for 17 tokens"),
    "the scratch slot": ([Sequence([1], 0, [1], 0)], r"sequences\[0\].slot: expected 1 .. 6, got 0"),
    "a negative slot": ([Sequence([1], 0, [1], -1)], r"sequences\[0\].slot: expected 1 .. 6, got -1"),
    "a slot past the end": ([Sequence([1], 0, [1], 1), Sequence([1], 0, [2], 7)], r"sequences\[1\].slot: expected 1 .. 6, got 7"),
    "one slot twice": ([Sequence([1], 0, [1], 3), Sequence([1], 0, [2], 3)], r"own slot, got slots \[3, 3\]"),
}


@pytest.mark.parametrize("sequences, message", REFUSED.values(), ids=REFUSED)
def test_refused_batches(model, sequences, message):
    memory = Memory(model)
    with pytest.raises(ValueError, match=f"Batch: .*{message}"):
        Batch.build(sequences, memory.caches)
