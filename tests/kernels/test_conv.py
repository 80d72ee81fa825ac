"""The convolution kernel against the torch op in fp64: in the interpreter in fp32, on a GPU in bfloat16 as well."""

import pytest
import torch
from helpers import assert_close, rel_l2

from berrylm_kernels import conv as kernels
from berrylm_kernels.conv import causal_conv
from berrylm_ref.ops import conv as ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
FP32 = 2e-7


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def offsets(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, dtype)


def check(x, weight, windows, cu_seqlens):
    y, new = causal_conv(x, weight, windows, cu_seqlens)
    same, same_windows = ops.causal_conv(x, weight, windows, cu_seqlens)
    exact, _ = ops.causal_conv(x.double(), weight.double(), windows.double(), cu_seqlens)
    assert y.dtype == x.dtype and new.dtype == windows.dtype
    assert_close("y", y, exact, max(FP32, 1.1 * rel_l2(same, exact)))
    assert torch.equal(new, same_windows)
    return y, new


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("W", [1, 2, 4, 5])
@pytest.mark.parametrize("lengths", [[9], [0, 5, 0, 64, 1, 0], [0, 0], [1, 1, 1], [15, 16, 17, 2, 3], []], ids=str)
def test_packed_sequences_equal_the_torch_op(lengths, W, dtype):
    """KRN-2: lengths off the tile grid, sequences shorter than the window, empty ones, and none at all. Outputs *and* windows."""
    P, C, N = sum(lengths), 20, len(lengths)
    check(randn(P, C, dtype=dtype), randn(C, W, dtype=dtype, seed=1), randn(N, C, W - 1, dtype=dtype, seed=2), offsets(lengths))


@pytest.mark.parametrize("C", [1, 255, 257, 600])
def test_channels_off_the_tile_grid(C):
    check(randn(19, C), randn(C, 4, seed=1), randn(2, C, 3, seed=2), offsets([18, 1], torch.int32))


def test_more_sequences_than_one_look_at_cu_seqlens_takes():
    """A row finds its sequence by counting the ends before it, 128 sequences at a time: 150 of them are two looks."""
    lengths = [n % 3 for n in range(150)]
    check(randn(150, 8), randn(8, 4, seed=1), randn(150, 8, 3, seed=2), offsets(lengths))


@pytest.mark.parametrize("cuts", [[20, 1], [1, 20], [2] * 10 + [1], [1] * 21], ids=lambda cuts: f"{cuts[0]}x{len(cuts)}")
def test_a_continuation_of_any_length_carries_the_window(cuts):
    """CACHE-1: one or two tokens at a time, fewer than the window holds."""
    x, weight, window = randn(21, 8), randn(8, 4, seed=1), randn(1, 8, 3, seed=2)
    want, last = causal_conv(x, weight, window, offsets([21]))
    out, begin = [], 0
    for length in cuts:
        y, window = causal_conv(x[begin : begin + length], weight, window, offsets([length]))
        out.append(y)
        begin += length
    assert torch.equal(torch.cat(out), want) and torch.equal(window, last)


def test_neighbours_do_not_leak_and_nothing_outside_is_read():
    """x is a column range of a wider buffer full of NaN, the sequence before it 1e30."""
    wide = torch.full((24, 3, 16), float("nan"), device=DEVICE)
    wide[:, 1] = randn(24, 16)
    weight, windows = randn(16, 4, seed=1), randn(2, 16, 3, seed=2)
    y, new = check(wide[:, 1], weight, windows, offsets([17, 7]))
    wide[:17, 1] = 1e30
    z, newer = causal_conv(wide[:, 1], weight, windows, offsets([17, 7]))
    assert torch.equal(z[17:], y[17:]) and torch.equal(newer[1], new[1])


def test_an_empty_sequence_keeps_its_window_bit_for_bit():
    windows = randn(2, 8, 3)
    windows[0, 0, 0] = float("nan")
    bits = windows.view(torch.int32).clone()
    _, new = causal_conv(randn(1, 8), randn(8, 4, seed=1), windows, offsets([0, 1]))
    assert torch.equal(new.view(torch.int32)[0], bits[0]) and torch.equal(windows.view(torch.int32), bits)


def test_silu_of_large_values_is_finite():
    x, weight, window = torch.full((4, 8), -500.0), torch.ones(8, 4), torch.zeros(1, 8, 3)
    x, weight, window = x.to(DEVICE), weight.to(DEVICE), window.to(DEVICE)
    y, _ = causal_conv(x, weight, window, offsets([4]))
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.gpu
def test_windows_in_another_dtype_than_x():
    x, weight = randn(5, 8, dtype=torch.bfloat16), randn(8, 4, dtype=torch.bfloat16, seed=1)
    check(x, weight, randn(2, 8, 3, seed=2), offsets([1, 4]))


@pytest.mark.gpu
def test_the_models_shape_in_a_mixed_batch():
    lengths = [1] * 60 + [2000, 0, 3, 300]
    x, weight = randn(sum(lengths), 8192, dtype=torch.bfloat16), randn(8192, 4, dtype=torch.bfloat16, seed=1)
    check(x, weight, randn(len(lengths), 8192, 3, dtype=torch.bfloat16, seed=2), offsets(lengths))


def test_programs_of_four_tiles(monkeypatch):
    """Long batches: programs inside one sequence, programs across two, and a last one that the batch ends in."""
    monkeypatch.setattr(kernels, "MANY", 0)
    check(randn(300, 8), randn(8, 4, seed=1), randn(4, 8, 3, seed=2), offsets([130, 1, 0, 169]))
    check(randn(67, 8), randn(8, 4, seed=1), randn(1, 8, 3, seed=2), offsets([67]))


def test_the_tile_is_one_that_the_shapes_here_cross():
    """The cases above rely on it: several rows of tiles, channels past one tile, and sequences that hold four tiles."""
    assert kernels.BT < 64 and kernels.BC < 600 and 4 * kernels.BT <= 64


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.ones(8)}, "causal_conv: x: expected [P, C], got (8,)"),
        ({"weight": torch.ones(5, 4)}, "causal_conv: weight: expected shape (6, kernel), got (5, 4)"),
        ({"windows": torch.ones(2, 6, 4)}, "causal_conv: windows: expected shape (2, 6, 3), got (2, 6, 4)"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "causal_conv: windows: expected shape (1, 6, 3), got (2, 6, 3)"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0, 8.0])}, "causal_conv: cu_seqlens: expected int32 or int64, got torch.float32"),
        ({"x": torch.ones(8, 6, dtype=torch.float64)}, "causal_conv: x: expected torch.float32"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, message):
    call = {"x": torch.ones(8, 6), "weight": torch.ones(6, 4), "windows": torch.ones(2, 6, 3), "cu_seqlens": offsets([4, 4])}
    with pytest.raises(ValueError) as error:
        causal_conv(**{name: x.to(DEVICE) for name, x in (call | change).items()})
    assert str(error.value).startswith(message)
