"""The prefix tree: which token prefixes have keys and values in pages, and at which depths a snapshot of the states exists.

    root ──[0:64) pages 3,9,1,4──► node, depth 64, snapshot 7 ──[64:160) ...──► node, depth 160, no snapshot
                                                             └─[64:128) ...──► node, depth 128, snapshot 2

Keys and values are rows: an edge can be cut at any page. A snapshot is a point value at its node's depth and can't be cut: a
match ends at the deepest *node* with a snapshot, and a split leaves the snapshot with the lower part.
The tree owns the pages and snapshots filed in it. A lock on a node holds all of the path above it. Nothing here touches
tensors; what eviction frees is returned to the caller.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


class Node:
    """An edge and where it ends: ``key`` tokens (whole pages) in ``pages``, ``depth`` tokens from the root."""

    __slots__ = ("children", "depth", "key", "locks", "pages", "parent", "snapshot")

    def __init__(self, key: list[int], pages: list[int], parent: "Node | None", depth: int):
        self.key, self.pages, self.parent, self.depth = key, pages, parent, depth
        self.children: dict[tuple[int, ...], Node] = {}  # by the first page of the child's key
        self.locks = 0
        self.snapshot: int | None = None

    def path(self) -> Iterator["Node"]:
        """This node, its parent, ... without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass
class Match:
    """``depth`` tokens can be reused: ``pages`` hold their keys and values, ``node.snapshot`` their states.

    ``shared`` >= depth tokens agree with keys and values in the tree, without a snapshot so deep.
    """

    node: Node
    depth: int
    pages: list[int]
    shared: int


@dataclass
class Inserted:
    """``node`` ends the path with ``pages``. ``surplus_*``: what the caller handed in and the tree had already."""

    node: Node
    pages: list[int]
    surplus_pages: list[int] = field(default_factory=list)
    surplus_snapshots: list[int] = field(default_factory=list)


@dataclass
class Freed:
    pages: list[int] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)


class RadixTree:
    def __init__(self, page_size: int):
        self.page_size = page_size
        self.root = Node([], [], None, 0)
        # Least recently used first. A path is touched leaf first, so a child is always older than its parent and the oldest
        # unlocked node is a leaf: eviction just walks from the front.
        self._used: dict[Node, None] = {}
        self._snapshot_used: dict[Node, None] = {}
        self.page_count = 0
        self.locked_page_count = 0  # of them; the others can all be evicted, since a lock holds the whole path above it

    @property
    def snapshot_count(self) -> int:
        return len(self._snapshot_used)

    @property
    def nodes(self) -> list[Node]:
        return list(self._used)

    def match(self, tokens: list[int], limit: int | None = None) -> Match:
        """The longest reusable prefix of ``tokens``, never all of them: the last token must run to give logits.

        ``limit``: reuse at most so many, for a caller who needs logits from there on.
        """
        node, at, best = self.root, 0, self.root
        last = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        while True:
            child = node.children.get(tuple(tokens[at : at + self.page_size]))
            if child is None:
                break
            same = self._agree(child.key, tokens, at)
            at += same
            if same < len(child.key):
                break
            node = child
            if node.snapshot is not None and node.depth <= last:
                best = node
        self._touch(node)
        if best is not self.root:
            self._snapshot_used[best] = self._snapshot_used.pop(best)
        return Match(best, best.depth, self.pages_of(best), at)

    def insert(self, tokens: list[int], pages: list[int], snapshots: dict[int, int]) -> Inserted:
        """File whole pages of ``tokens`` and the snapshots {depth: id} on their path; ownership passes to the tree.

        ``pages`` may contain, at their own places, pages that the tree has on this path already.
        """
        count = len(tokens) // self.page_size * self.page_size
        if len(pages) * self.page_size < count:
            raise ValueError(f"RadixTree.insert: pages: expected {count // self.page_size} or more, got {len(pages)}")
        for depth in snapshots:
            if depth % self.page_size or not 0 < depth <= count:
                raise ValueError(f"RadixTree.insert: snapshots: expected whole pages up to {count} tokens, got {depth}")
        out = Inserted(self.root, [])
        node, at = self.root, 0
        while at < count:
            child = node.children.get(tuple(tokens[at : at + self.page_size]))
            if child is None:
                child = self._attach(node, tokens[at:count], pages[at // self.page_size : count // self.page_size])
            else:
                same = self._agree(child.key, tokens[:count], at)
                if same < len(child.key):
                    child = self._split(child, same)
                given = pages[at // self.page_size : (at + same) // self.page_size]
                out.surplus_pages += [g for g, mine in zip(given, child.pages, strict=True) if g != mine]
            node, at = child, child.depth
        out.node = node
        for depth, snapshot in sorted(snapshots.items()):
            place = self._node_at(node, depth)
            if place.snapshot is None:
                place.snapshot = snapshot
                self._snapshot_used[place] = None
            else:
                self._snapshot_used[place] = self._snapshot_used.pop(place)
                if place.snapshot != snapshot:
                    out.surplus_snapshots.append(snapshot)
        self._touch(node)
        out.pages = self.pages_of(node)
        return out

    def lock(self, node: Node) -> None:
        for n in node.path():
            self.locked_page_count += len(n.pages) if n.locks == 0 else 0
            n.locks += 1

    def unlock(self, node: Node) -> None:
        for n in node.path():
            if n.locks == 0:
                raise RuntimeError(f"RadixTree.unlock: the node at depth {n.depth} is not locked")
            n.locks -= 1
            self.locked_page_count -= len(n.pages) if n.locks == 0 else 0

    def evict_pages(self, count: int) -> Freed:
        """Free at least ``count`` pages if unlocked leaves hold so many, least recently used first."""
        freed = Freed()
        for node in list(self._used):
            if len(freed.pages) >= count:
                break
            if not node.locks and not node.children:
                freed.pages += node.pages
                if node.snapshot is not None:
                    freed.snapshots.append(self._drop_snapshot(node))
                self._detach(node)
        return freed

    def evict_snapshots(self, count: int) -> Freed:
        """Free up to ``count`` snapshots, least recently used first; their keys and values stay."""
        freed = Freed()
        for node in list(self._snapshot_used)[:count]:
            freed.snapshots.append(self._drop_snapshot(node))
        return freed

    def pages_of(self, node: Node) -> list[int]:
        return [page for n in reversed(list(node.path())) for page in n.pages]

    def check(self) -> None:
        """Every invariant of the tree; raises AssertionError that says which one broke."""
        seen, pages, snapshots, stack = set(), [], [], [self.root]
        while stack:
            node = stack.pop()
            seen.add(node)
            for first, child in node.children.items():
                assert child.parent is node, "a child's parent is another node"
                assert child.key and len(child.key) == len(child.pages) * self.page_size, "an empty or ragged edge"
                assert first == tuple(child.key[: self.page_size]), "a child is filed under another page than its first"
                assert child.depth == node.depth + len(child.key), "a depth does not add up"
                assert node is self.root or child.locks <= node.locks, "a locked node under a path less locked"
                pages += child.pages
                if child.snapshot is not None:
                    snapshots.append(child.snapshot)
                    assert child in self._snapshot_used, "a snapshot outside the order of use"
                stack.append(child)
        assert self.root.snapshot is None and not self.root.key, "the root holds something"
        assert seen - {self.root} == set(self._used), "the order of use and the tree hold different nodes"
        assert len(snapshots) == len(self._snapshot_used), "the order of use holds a node without a snapshot"
        assert len(pages) == len(set(pages)) == self.page_count, "a page is filed twice or miscounted"
        locked = sum(len(n.pages) for n in self._used if n.locks)
        assert locked == self.locked_page_count, "locked pages are miscounted"
        assert len(snapshots) == len(set(snapshots)), "a snapshot is filed twice"

    def _agree(self, key: list[int], tokens: list[int], at: int) -> int:
        """Leading tokens, in whole pages, that ``key`` and ``tokens[at:]`` share."""
        if tokens[at : at + len(key)] == key:
            return len(key)
        size, same = self.page_size, 0
        while tokens[at + same : at + same + size] == key[same : same + size]:
            same += size
        return same

    def _attach(self, parent: Node, key: list[int], pages: list[int]) -> Node:
        node = Node(list(key), list(pages), parent, parent.depth + len(key))
        parent.children[tuple(key[: self.page_size])] = node
        self._used[node] = None
        self.page_count += len(pages)
        return node

    def _detach(self, node: Node) -> None:
        del node.parent.children[tuple(node.key[: self.page_size])]
        del self._used[node]
        self.page_count -= len(node.pages)

    def _split(self, node: Node, tokens: int) -> Node:
        """Cut an edge after ``tokens``; ``node`` stays the lower part, with its snapshot. Returns the upper part."""
        pages, parent = tokens // self.page_size, node.parent
        upper = Node(node.key[:tokens], node.pages[:pages], parent, parent.depth + tokens)
        upper.locks = node.locks  # whoever holds the lower part holds the upper
        parent.children[tuple(upper.key[: self.page_size])] = upper
        node.key, node.pages, node.parent = node.key[tokens:], node.pages[pages:], upper
        upper.children[tuple(node.key[: self.page_size])] = node
        self._used[upper] = None
        return upper

    def _node_at(self, node: Node, depth: int) -> Node:
        """The node that ends at ``depth`` on the path of ``node``, cut out if need be."""
        for n in node.path():
            start = n.depth - len(n.key)
            if start < depth <= n.depth:
                return n if depth == n.depth else self._split(n, depth - start)
        raise RuntimeError(f"RadixTree: no node at depth {depth}")

    def _drop_snapshot(self, node: Node) -> int:
        snapshot, node.snapshot = node.snapshot, None
        del self._snapshot_used[node]
        return snapshot

    def _touch(self, node: Node) -> None:
        for n in node.path():
            self._used[n] = self._used.pop(n)
