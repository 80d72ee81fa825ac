"""Batches: the same for every number of workers, every target in place, every kind at its share."""

from itertools import islice

import numpy as np
import pytest

from berrylm_ref.training.batches import Batches, load_texts, make_unit
from berrylm_ref.training.data import KINDS
from berrylm_ref.training.recipe import MICRO, NANO, SHIPPED, Recipe
from berrylm_ref.training.step import to_device


@pytest.fixture(scope="module")
def texts():
    return load_texts(SHIPPED)


def same(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "targets", "lengths", "kinds"))


@pytest.mark.slow  # it starts processes
def test_the_number_of_workers_does_not_change_the_data():
    """A run that is repeated on a machine with other cores must see the same data in the same order."""
    small = Recipe(name="small", minutes=1, tokens=480, buckets=(96, 160), unit_batches=3, kinds=("drill", "talk"))
    runs = []
    for workers in (0, 2):
        with Batches(small, SHIPPED, seed=5, workers=workers) as batches:
            runs.append(list(islice(batches, 9)))
    assert all(same(a, b) for a, b in zip(*runs, strict=True))
    with Batches(small, SHIPPED, seed=6, workers=0) as batches:
        assert not same(next(iter(batches)), runs[0][0])


def test_rows_are_conversations_and_targets_are_shifted_by_one(texts):
    tokenizer, _ = texts
    batch = next(make_unit(MICRO, *texts, seed=0, unit=0))
    on_device = to_device(batch, "cpu")
    assert batch.ids.size == MICRO.tokens and on_device.tokens == batch.lengths.sum()
    for row, length in enumerate(batch.lengths):
        assert not batch.targets[row, length:].any() and batch.targets[row, :length].any()
        text = tokenizer.decode(batch.ids[row, :length].tolist(), skip_special=False)
        assert text.startswith(("<|user|>", "<|system|>")) and text.endswith("<|end|>")
    weights = on_device.weights.view(batch.ids.shape).bool().numpy()
    targets = on_device.targets.view(batch.ids.shape).numpy()
    assert np.array_equal(weights[:, :-1], batch.targets[:, 1:]) and not weights[:, -1].any()
    assert np.array_equal(targets[:, :-1], batch.ids[:, 1:])


def test_kinds_have_their_shares_of_the_tokens(texts):
    """Long conversations in small number: shares are of tokens, not of conversations."""
    few = Recipe(name="few", minutes=1, tokens=8192, buckets=(64, 128, 256, 512, 1024), unit_batches=24, kinds=tuple(
        kind for kind in KINDS if kind != "retrieval_4k"
    ))  # fmt: skip
    tokens = dict.fromkeys(few.kinds, 0)
    for batch in make_unit(few, *texts, seed=1, unit=0):
        for kind, length in zip(batch.kinds, batch.lengths, strict=True):
            tokens[few.kinds[kind]] += int(length)
    whole = sum(KINDS[kind] for kind in few.kinds)
    for kind, made in tokens.items():
        assert made / sum(tokens.values()) == pytest.approx(KINDS[kind] / whole, abs=0.03), kind


def test_a_recipe_refuses_buckets_that_do_not_divide_a_step():
    """Compiled regions see one shape only: rows times length must be the same for every bucket."""
    with pytest.raises(ValueError, match="buckets"):
        Recipe(name="odd", minutes=1, tokens=1000, buckets=(64,))
    assert all(NANO.tokens % length == 0 for length in NANO.buckets)


def test_a_folder_without_a_tokenizer_is_refused_before_any_worker_starts(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json"):
        Batches(MICRO, tmp_path, seed=0, workers=2)
