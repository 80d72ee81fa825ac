"""The prefix tree on its own: what matches, what a split leaves where, what eviction may take."""

import random
import time

import pytest

from berrylm_ref.cache.radix import RadixTree


def fill(tree, tokens, first_page, depths=()):
    """Insert with pages numbered from first_page and a snapshot (numbered like its depth + first_page) at each depth."""
    count = len(tokens) // tree.page_size
    snapshots = {d: first_page * 1000 + d for d in depths}
    done = tree.insert(tokens, list(range(first_page, first_page + count)), snapshots)
    tree.check()
    return done


def test_a_hit_ends_at_the_deepest_snapshot_not_where_the_rows_agree():
    """PFX-2: A (192 tokens, a state every 64) is shared for 100 tokens by B and C; their hit is 64, and A still hits after."""
    tree = RadixTree(page_size=4)
    a = list(range(192))
    fill(tree, a, 1, (64, 128, 192))
    for other in (1000, 2000):
        b = a[:100] + [other + i for i in range(92)]
        match = tree.match(b)
        assert (match.depth, match.shared) == (64, 100)
        assert match.pages == list(range(1, 17))
        fill(tree, b, other, (128,))
    assert tree.match(a).depth == 128  # 192 would leave no token to run
    assert tree.match([*a, 7]).depth == 192
    freed = tree.evict_pages(10**6)
    tree.check()
    assert not tree.nodes and tree.page_count == 0 and tree.snapshot_count == 0
    assert len(freed.pages) == len(set(freed.pages)) == 48 + 2 * 23 and len(freed.snapshots) == 5


@pytest.mark.parametrize("length", [63, 64, 65])
def test_keys_around_a_page_make_no_empty_node(length):
    """PFX-2: a key of 63 tokens against a page of 64 once made an empty node that crashed eviction much later."""
    tree = RadixTree(page_size=64)
    tokens = list(range(length))
    done = tree.insert(tokens, list(range(1, length // 64 + 1)), {})
    tree.check()
    assert done.node.depth == length // 64 * 64
    assert tree.match(tokens).shared == length // 64 * 64


def test_a_split_leaves_the_snapshot_with_the_lower_part():
    tree = RadixTree(page_size=2)
    fill(tree, [1, 2, 3, 4, 5, 6], 1, (6,))
    fill(tree, [1, 2, 9, 9], 50)
    assert tree.match([1, 2, 3, 4, 5, 6, 7]).depth == 6
    assert tree.match([1, 2, 9, 9, 7]).depth == 0, "the upper part must not inherit a state of another depth"


def test_a_snapshot_inside_an_edge_cuts_it_there():
    """A fork's boundary becomes a snapshot later: the edge that runs over it must be cut, rows and all."""
    tree = RadixTree(page_size=2)
    fill(tree, list(range(10)), 1)
    done = fill(tree, list(range(10)), 1, (4,))
    assert tree.match(list(range(10))).depth == 4 and not done.surplus_pages
    assert tree.match(list(range(10))).pages == [1, 2]


def test_surplus_pages_and_snapshots_come_back():
    tree = RadixTree(page_size=2)
    fill(tree, [1, 2, 3, 4], 1, (4,))
    done = tree.insert([1, 2, 3, 4, 5, 6], [1, 22, 33], {4: 77, 6: 78})
    tree.check()
    assert done.pages == [1, 2, 33] and done.surplus_pages == [22] and done.surplus_snapshots == [77]


def test_locks_hold_the_path_and_survive_a_split():
    tree = RadixTree(page_size=2)
    held = fill(tree, [1, 2, 3, 4], 1, (4,)).node
    tree.lock(held)
    fill(tree, [1, 2, 8, 8], 20)
    freed = tree.evict_pages(100)
    tree.check()
    assert freed.pages == [21], "only the unlocked leaf may go"
    tree.unlock(held)
    assert len(tree.evict_pages(100).pages) == 2 and not tree.nodes
    with pytest.raises(RuntimeError, match="not locked"):
        tree.unlock(held)


def test_eviction_is_least_recently_used_first_and_leaves_before_parents():
    tree = RadixTree(page_size=1)
    fill(tree, [1, 2], 1)
    fill(tree, [1, 3], 10)
    fill(tree, [4, 5], 20)
    tree.match([1, 2, 0])
    assert tree.evict_pages(1).pages == [11]
    assert tree.evict_pages(1).pages == [20, 21]
    assert tree.evict_pages(2).pages == [2, 1]


def test_snapshots_have_their_own_order_of_use():
    tree = RadixTree(page_size=1)
    fill(tree, [1, 2, 3], 1, (1, 2, 3))
    assert tree.match([1, 2, 3]).depth == 2  # uses the one at 2
    assert [s % 1000 for s in tree.evict_snapshots(2).snapshots] == [1, 3]
    assert tree.match([1, 2, 3, 4]).depth == 2 and tree.page_count == 3


def test_limit_keeps_a_match_from_swallowing_tokens_that_need_logits():
    tree = RadixTree(page_size=1)
    fill(tree, list(range(20)), 1, (5, 10))
    assert [tree.match(list(range(20)), limit).depth for limit in (0, 4, 5, 9, 12, None)] == [0, 0, 5, 5, 10, 10]


def test_refusals_name_the_argument():
    tree = RadixTree(page_size=4)
    with pytest.raises(ValueError, match=r"pages: expected 2 or more, got 1"):
        tree.insert(list(range(8)), [1], {})
    with pytest.raises(ValueError, match=r"snapshots: expected whole pages up to 8 tokens, got 6"):
        tree.insert(list(range(8)), [1, 2], {6: 1})


def test_matching_8k_tokens_among_10000_nodes_is_quick_and_grows_with_the_prompt_only():
    """The tree work of a hit: under 2 ms for 8k tokens with 10,000 nodes present (median of several)."""
    rng = random.Random(5)
    tree, page = RadixTree(page_size=16), 1
    trunk = [rng.randrange(1000) for _ in range(8192)]
    tree.insert(trunk, list(range(page, page + 512)), {d: d for d in range(64, 8193, 64)})
    page += 512
    while len(tree.nodes) < 10_000:
        cut = rng.randrange(512) * 16
        tree.insert(trunk[:cut] + [rng.randrange(1000) for _ in range(64)], list(range(page, page + cut // 16 + 4)), {})
        page += cut // 16 + 4

    def median(tokens):
        times = []
        for _ in range(15):
            begin = time.perf_counter()
            match = tree.match(tokens)
            times.append(time.perf_counter() - begin)
        return sorted(times)[7], match

    seconds, match = median([*trunk, 1])
    assert match.depth == 8192
    assert seconds < 2e-3, f"{seconds * 1e3:.2f} ms"
    short, _ = median([*trunk[:1024], 1])
    assert short < seconds / 3, "a short prompt must not pay for the tree's size"
