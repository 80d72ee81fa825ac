"""What the Gluon kernels for sm_90 share: layouts of 64-token tiles, and the few instructions Gluon has no word for.

Gluon (``triton.experimental.gluon``, part of Triton since 3.6) leaves layouts, shared memory and the order of asynchronous
matrix products to the author. It has no interpreter: ``tests/gluon_emulator.py`` runs these kernels on a CPU.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# names that changed between Triton 3.6 and 3.9
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared



class fixed(gl.constexpr):
    """A constant of a module. Triton compares every global that a kernel uses at every launch; a layout, field by field, costs
    the host about 2 us, and there are sixteen."""

    def __init__(self, value):
        super().__init__(value)
        self.key = repr(value)

    def __ne__(self, other):
        return self.key != getattr(other, "key", None)


LOG2E = fixed(1.4426950408889634)

# Registers, always four warps. A [64, 128] tile is two panels of 64 channels, so that one panel's product runs while the next
# panel's factors are computed, and a panel's numbers need half the registers.
PANEL = fixed(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))  # a thread: 16 tokens of 2 channels; a warp: a band
BANDS = fixed(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))  # the same as [band, token, channel]
ROWS = fixed(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes of a row: global memory
LANES = fixed(gl.BlockedLayout([1], [32], [4], [0]))
ACC = fixed(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # wgmma results, 64 and 128 columns wide
WIDE = fixed(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
LEFT = fixed(gl.DotOperandLayout(0, ACC.value, 2))  # left operands held in registers
LEFT_WIDE = fixed(gl.DotOperandLayout(0, WIDE.value, 2))
ACC_16 = fixed(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))  # mma, a 16 x 16 block a warp
LEFT_16 = fixed(gl.DotOperandLayout(0, ACC_16.value, 2))
RIGHT_16 = fixed(gl.DotOperandLayout(1, ACC_16.value, 2))
# Shared memory
TILE = fixed(gl.NVMMASharedLayout(128, 16, 2))  # operands of wgmma
FLAT = fixed(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = fixed(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def exp2(x):
    """One instruction; results below 2^-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def scaled(x, f):
    """x * f in bf16, two numbers an instruction; f is rounded first."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, f.to(gl.bfloat16)], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def scaled_once(x, f):
    """x * f in bf16, rounded once."""
    return (x.to(gl.float32) * f).to(gl.bfloat16)


@gluon.jit
def banded(x):
    """[64, 64] in PANEL -> [4, 16, 64]; nothing moves."""
    return gl.convert_layout(gl.reshape(x, [4, 16, 64]), BANDS, assert_trivial=True)


@gluon.jit
def flat(x):
    """[4, 16, 64] -> [64, 64] in PANEL; nothing moves."""
    return gl.convert_layout(gl.reshape(x, [64, 64]), PANEL, assert_trivial=True)


@gluon.jit
def band_index():
    return gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BANDS))), 1), 2)


@gluon.jit
def token_index():
    return gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BANDS))), 0), 2)


@gluon.jit
def band_row(x, ROW: gl.constexpr):
    """[4, 16, 64] -> [4, 1, 64], row ROW of each band. It is in the thread's registers already: the reduction folds away."""
    bits = gl.where(token_index() == ROW, x.to(gl.int32, bitcast=True), 0)
    return gl.expand_dims(gl.reduce(bits, 1, either).to(gl.float32, bitcast=True), 1)


@gluon.jit
def locate(i_c, cu, T, N, BN: gl.constexpr, PACKED: gl.constexpr):
    """Chunk i_c of all chunks -> (first row of its sequence, length of its sequence, its first token in the sequence)."""
    if PACKED:
        LN: gl.constexpr = gl.BlockedLayout([BN // 128], [32], [4], [0])
        begin, length = clamped_offsets(gl.arange(0, BN, layout=LN), cu, T, N)
        count = (length + 63) // 64
        upto = gl.associative_scan(count, 0, plus)
        here = (i_c < upto) & (i_c >= upto - count)  # no sequence at all past the last chunk
        bos = gl.sum(gl.where(here, begin, 0), 0)
        first = gl.sum(gl.where(here, upto - count, 0), 0)
        return bos, gl.sum(gl.where(here, length, 0), 0), (i_c - first) * 64
    else:
        count = (T + 63) // 64
        return (i_c // count) * T, T, (i_c % count) * 64


@gluon.jit
def clamped_offsets(n, cu, T, N):
    """(first row, length) of sequences n; the host never read these offsets, so they are clamped to [0, T]."""
    begin = gl.load(cu + n, mask=n < N, other=0).to(gl.int32)
    end = gl.load(cu + n + 1, mask=n < N, other=0).to(gl.int32)
    begin = gl.minimum(gl.maximum(begin, 0), T)
    return begin, gl.maximum(gl.minimum(end, T) - begin, 0)
