"""The second grouped product for many tokens. A tile of it has few rounds (F / BK), so that starting and storing one would cost
as much as its arithmetic: a fixed number of programs takes tile after tile, and the loads of the next are under way while one
is stored. Operands come through tensor descriptors (the copy engine of Hopper), which need no registers for addresses.

Symbols as in ``moe_gemm``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import launch
from .moe_tiles import Tile


@triton.jit
def _tiles(
    d_hidden, d_down, block_list, out, first, last, base_expert,
    D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Tiles first, first + PROGRAMS, .. before last. ``base_expert`` is the expert whose rows stand first in d_down.

    A block's last rows may belong to the next expert, or lie behind the end, where a descriptor reads zeros: they are
    multiplied and not stored.
    """
    NN: tl.constexpr = D // BN
    for i in tl.range(first, last, PROGRAMS, flatten=True):
        i_b, i_n = i // NN, i % NN
        expert, row = tl.load(block_list + i_b * 3), tl.load(block_list + i_b * 3 + 1)
        end = tl.load(block_list + i_b * 3 + 2)
        b_acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, F, BK):
            b_w = d_down.load([(expert - base_expert) * D + i_n * BN, k])
            b_acc = tl.dot(d_hidden.load([row, k]), b_w.T, b_acc, input_precision="ieee")
        o_m, o_n = row + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
        p_out = out + o_m.to(tl.int64)[:, None] * D + o_n[None, :]
        tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=(o_m < end)[:, None])


@triton.jit(do_not_specialize=["shared_blocks", "blocks"])
def _down_persistent_kernel(
    d_hidden, d_down, d_shared, block_list, out, shared_blocks, blocks,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out[row] = down hidden[row]: the tiles of the shared expert, which lead the list, and on from there those of the others.
    The entry behind the list is the number of blocks in use."""
    NN: tl.constexpr = D // BN
    i_p, shared = tl.program_id(0), shared_blocks * NN
    used = tl.load(block_list + blocks * 3)
    _tiles(d_hidden, d_shared, block_list, out, i_p, shared, E, D, F, BM, BN, BK, PROGRAMS)
    first = shared + (i_p + PROGRAMS - shared % PROGRAMS) % PROGRAMS
    _tiles(d_hidden, d_down, block_list, out, first, used * NN, 0, D, F, BM, BN, BK, PROGRAMS)


def launch_down_persistent(
    hidden: Tensor, down_proj: Tensor, shared_down: Tensor, blocks: Tensor, shared_blocks: int, tile: Tile
) -> Tensor:
    """[rows, D]; D and F are multiples of the tile's sides. Without blocks of its own shared_down may be of any shape."""
    E, D, F = down_proj.shape
    BM, BN, BK = tile.BM, tile.BN, tile.BK
    y = hidden.new_empty((hidden.shape[0], D))
    multiprocessors = torch.cuda.get_device_properties(hidden.device).multi_processor_count if hidden.is_cuda else 3
    programs = multiprocessors * tile.per_multiprocessor
    routed = TensorDescriptor.from_tensor(down_proj.view(E * D, F), [BN, BK])
    shared = TensorDescriptor.from_tensor(shared_down, [BN, BK]) if shared_blocks else routed
    launch(
        _down_persistent_kernel, (programs,),
        (TensorDescriptor.from_tensor(hidden, [BM, BK]), routed, shared, blocks, y), (shared_blocks, blocks.shape[0] - 1),
        dict(E=E, D=D, F=F, BM=BM, BN=BN, BK=BK, PROGRAMS=programs), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y
