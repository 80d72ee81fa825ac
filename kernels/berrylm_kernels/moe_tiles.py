"""Tiles of the two grouped products of the mixture of experts."""

from functools import lru_cache
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    BM: int  # rows
    BN: int  # columns of the result
    BK: int
    warps: int
    stages: int
    halves: bool = False  # a block of at most half the rows gets half a tile
    per_multiprocessor: int = 0  # programs that take tile after tile; 0: one program a tile


# Rows an expert has on average, up to which these tiles of the two products are the fastest measured (H200, bfloat16, D 2048,
# expert width 512). A few rows: the weights' bytes set the time. Many: the arithmetic.
TILES = (
    (8, Tile(16, 32, 256, 4, 3), Tile(16, 128, 64, 4, 5)),
    (48, Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4)),
    (float("inf"), Tile(128, 128, 64, 8, 4, halves=True), Tile(128, 128, 64, 4, 3, per_multiprocessor=2)),
)


@lru_cache(maxsize=1024)
def tiles(rows: float, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """For so many rows an expert on average. float32 multiplies on the plain units, which hold less at once."""
    first, second = next(pair for limit, *pair in TILES if rows <= limit)
    if dtype == torch.float32:
        first, second = (Tile(min(t.BM, 32), min(t.BN, 32), 32, t.warps, 2, t.halves) for t in (first, second))
    return first, second
