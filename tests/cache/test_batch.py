"""A batch is packed on the host into one tensor of numbers: what another process makes of them is the same batch."""

import time

import pytest
import torch

from berrylm_ref.cache.batch import Batch, Caches, Sequence
from berrylm_ref.cache.packing import ints, joined


def caches(pages=100, slots=9, taps=3):
    kv, state = torch.zeros(1, pages + 1, 16, 1, 1), torch.zeros(1, slots + 1, 1, 1, 1)
    conv = torch.zeros(1, slots + 1, 4, taps)
    return Caches(kv, kv.clone(), conv, state, conv.clone(), state.clone())


MIXED = [
    Sequence([5], 17, [9, 3], 4),
    Sequence([-1], 40, [1, 2, 7], 2),
    Sequence(list(range(30, 50)), 13, [10, 11, 12], 1, boundaries=[(16, 2), (3, 6)]),
    Sequence([7, 8, 9], 0, [20], 3, all_logits=True),
]


def test_a_mixed_batch_by_hand():
    """A decode, one whose token only the device knows, a later chunk that keeps two states, and a prompt that is scored. The
    states asked for in any order are kept in ascending order, windows and snapshots with them."""
    batch = Batch.build(MIXED, caches(), last=torch.arange(100, 110))
    assert batch.input_ids.tolist() == [5, 102, *range(30, 50), 7, 8, 9]
    assert batch.positions.tolist() == [17, 40, *range(13, 33), 0, 1, 2]
    assert batch.kv_rows.tolist() == [49, 120, 173, 174, 175, *range(176, 192), 192, 320, 321, 322]
    assert batch.page_table.tolist() == [[9, 3, 0], [1, 2, 7], [10, 11, 12], [20, 0, 0]]
    assert batch.cu_seqlens.tolist() == batch.lengths[0] == [0, 1, 2, 22, 25]
    assert batch.context_lens.tolist() == batch.lengths[1] == [17, 40, 13, 0] and batch.max_query_len == 20
    assert batch.logit_rows.tolist() == [0, 1, 21, 22, 23, 24] and batch.slots.tolist() == [4, 2, 1, 3]
    assert batch.boundaries.tolist() == [[2, 3], [2, 16]] and batch.snapshots.tolist() == [6, 2]  # as the kernels need it
    assert batch.window_rows.tolist() == [[2, 3, 4], [15, 16, 17]]


@pytest.mark.parametrize("sequences", [MIXED, MIXED[:2], MIXED[3:], []])
def test_numbers_that_were_sent_are_the_same_batch(sequences):
    """Rank 0 of tensor parallel packs, and the others have nothing but the bytes."""
    here, there, last = caches(), caches(), torch.arange(100, 110)
    sent = torch.frombuffer(bytearray(Batch.pack(sequences, here).numpy().tobytes()), dtype=torch.long)
    found, wanted = vars(Batch.unpack(sent, there, last)), vars(Batch.build(sequences, here, last))
    assert found.pop("caches") is there and wanted.pop("caches") is here
    for name, value in wanted.items():
        if torch.is_tensor(value):
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
            assert value.dtype == (torch.int32 if name == "boundaries" else torch.long), name
            assert not value.numel() or (found[name].data_ptr() - sent.data_ptr()) % 16 == 0, (
                f"{name}: Triton would compile once more"
            )
        else:
            assert found[name] == value, name


def test_many_numbers_are_joined_faster_than_torch_reads_lists():
    """64 page lists of 544 took 2 ms of each step with a prompt in it, before its first launch."""

    def best(call):
        def once():
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin

        return min(once() for _ in range(20))

    rows = [list(range(544))] * 64
    assert joined(rows).tolist() == rows[0] * 64 and len(joined([])) == len(joined([[]])) == 0
    assert best(lambda: joined(rows)) < best(lambda: ints(i for row in rows for i in row))
