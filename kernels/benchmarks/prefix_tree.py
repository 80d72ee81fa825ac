"""The CPU work of a prefix hit: match in a tree of many nodes, and the copy of the snapshot into a slot.

    python kernels/benchmarks/prefix_tree.py [--out FOLDER]

Times are medians in microseconds. The match should grow with the prompt and not with the tree; 8k tokens among 10,000 nodes must
take less than 2 ms, or the exit status says so. The restore is that of a small model: at full size it is a copy on the device.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from berrylm_ref import BerryLMConfig
from berrylm_ref.cache.pool import Pool, PoolSizes
from berrylm_ref.cache.radix import RadixTree

PAGE, GRID, LIMIT_US = 16, 64, 2000
RESULTS = Path(__file__).parent / "results" / "cpu"


def grown_tree(nodes: int, trunk: list[int]) -> RadixTree:
    """``trunk`` with a snapshot at every boundary, and branches at random pages until there are ``nodes`` nodes."""
    rng, tree, page = random.Random(5), RadixTree(PAGE), 1
    tree.insert(trunk, list(range(page, page + len(trunk) // PAGE)), {d: d for d in range(GRID, len(trunk) + 1, GRID)})
    page += len(trunk) // PAGE
    while len(tree.nodes) < nodes:
        cut = rng.randrange(len(trunk) // PAGE) * PAGE
        count = cut // PAGE + GRID // PAGE
        tree.insert(trunk[:cut] + [rng.randrange(1000) for _ in range(GRID)], list(range(page, page + count)), {})
        page += count
    return tree


def median_us(fn, repeats: int = 51) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        fn()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    out = parser.parse_args().out
    rng = random.Random(1)
    trunk = [rng.randrange(1000) for _ in range(8192)]
    matches = {}
    for nodes in (200, 1000, 10_000):
        tree = grown_tree(nodes, trunk)
        for tokens in (1024, 2048, 4096, 8192):
            matches[f"{tokens} tokens, {nodes} nodes"] = median_us(lambda t=tree, n=tokens: t.match([*trunk[:n], 1]))
    config = BerryLMConfig(num_hidden_layers=4, hidden_size=64, vocab_size=128, num_experts=8, num_experts_per_tok=2)
    pool = Pool(config, PoolSizes(1, PAGE, 1, 1), dtype=torch.float32, device="cpu")
    restore = median_us(lambda: pool.restore(1, 1))
    data = {
        "script": "kernels/benchmarks/prefix_tree.py",
        "machine": {"cpu": platform.machine(), "python": platform.python_version(), "torch": torch.__version__},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "match_us": matches,
        "restore_us": {f"{pool.snapshot_bytes} bytes": restore},
    }
    for name, us in (*matches.items(), *data["restore_us"].items()):
        print(f"{name}: {us:.0f} us")
    out.mkdir(parents=True, exist_ok=True)
    (out / "prefix_tree.json").write_text(json.dumps(data, indent=1) + "\n")
    if matches["8192 tokens, 10000 nodes"] > LIMIT_US:
        sys.exit(f"8192 tokens among 10,000 nodes took more than {LIMIT_US} us")


if __name__ == "__main__":
    main()
