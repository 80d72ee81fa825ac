"""The short convolution against torch's own conv1d over each sequence alone, and what its windows must hold."""

import pytest
import torch
from helpers import assert_close

from berrylm_ref.ops.conv import causal_conv, causal_conv_step


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def plain_conv(x, weight, window):
    """One sequence: x [T, C], window [C, W - 1]."""
    rows = torch.cat([window.T, x])
    if not len(x):
        return x, window
    y = torch.nn.functional.conv1d(rows.T[None], weight[:, None], groups=weight.shape[0])[0].T
    return y * torch.sigmoid(y), rows[len(rows) - window.shape[1] :].T


@pytest.mark.parametrize("W", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("lengths", [[9], [0, 5, 0, 64, 1, 0], [0, 0], [1, 1, 1], [2, 3, 4], []])
def test_packed_sequences_equal_each_one_alone(lengths, W):
    """KRN-2: packed lengths with empty sequences among them. Output *and* window are compared, for a wrong window is seen only
    by the next call."""
    P, C, N = sum(lengths), 6, len(lengths)
    x, weight, windows = randn(P, C), randn(C, W, seed=1), randn(N, C, W - 1, seed=2)
    y, new = causal_conv(x, weight, windows, offsets(lengths))
    assert y.shape == (P, C) and new.shape == windows.shape
    for n, begin in enumerate(offsets(lengths)[:-1].tolist()):
        want, window = plain_conv(x[begin : begin + lengths[n]], weight, windows[n])
        assert_close(f"y[{n}]", y[begin : begin + lengths[n]], want, 1e-14)
        assert torch.equal(new[n], window)


@pytest.mark.parametrize("cuts", [[129, 1], [1, 129], [65, 65], [127, 3], [2] * 65, [1] * 130], ids=str)
def test_a_continuation_of_any_length_carries_the_window(cuts):
    """CACHE-1: fewer new tokens than the window holds (1 or 2 of 3) is the trap: older taps must move up, not vanish."""
    x, weight, window = randn(130, 4), randn(4, 4, seed=1), randn(1, 4, 3, seed=2)
    want, last = causal_conv(x, weight, window, offsets([130]))
    out = []
    for begin, length in zip(offsets(cuts).tolist(), cuts, strict=False):
        y, window = causal_conv(x[begin : begin + length], weight, window, offsets([length]))
        out.append(y)
    assert_close("y", torch.cat(out), want, 1e-14)
    assert torch.equal(window, last)


def test_the_window_holds_raw_inputs_oldest_first():
    """Raw projections before the conv, kernel - 1 of them (the official code keeps one more than needed)."""
    x = randn(5, 2)
    _, window = causal_conv(x, randn(2, 4, seed=1), torch.zeros(1, 2, 3, dtype=x.dtype), offsets([5]))
    assert torch.equal(window[0], x[2:].T)


def test_an_empty_sequence_keeps_its_window_bit_for_bit():
    """Also where the window's dtype is not that of x, and where it holds a NaN payload that arithmetic would change."""
    windows = randn(2, 3, 3, dtype=torch.float32)
    windows[0, 0, 0] = float("nan")
    bits = windows.view(torch.int32).clone()
    _, new = causal_conv(randn(1, 3, dtype=torch.bfloat16), randn(3, 4, dtype=torch.bfloat16), windows, offsets([0, 1]))
    assert new.dtype == torch.float32 and torch.equal(new.view(torch.int32)[0], bits[0])


def test_neighbours_do_not_leak():
    """A sequence's first taps come from its own window, never from the last tokens of the sequence packed before it."""
    x, weight, windows = randn(8, 3), randn(3, 4, seed=1), randn(2, 3, 3, seed=2)
    y, new = causal_conv(x, weight, windows, offsets([4, 4]))
    poisoned = x.clone()
    poisoned[:4] = 1e30
    z, newer = causal_conv(poisoned, weight, windows, offsets([4, 4]))
    assert torch.equal(z[4:], y[4:]) and torch.equal(newer[1], new[1])


@pytest.mark.parametrize("held", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_single_step_is_the_packed_form_bit_for_bit(dtype, held):
    """Prefill and decode share a window: a step that rounds it otherwise is found many tokens later."""
    N, C, W = 3, 7, 4
    x, weight = randn(N, C, dtype=dtype), randn(C, W, dtype=dtype, seed=1)
    windows = randn(N, C, W - 1, dtype=held or dtype, seed=2)
    packed, step = causal_conv(x, weight, windows, offsets([1] * N)), causal_conv_step(x, weight, windows)
    for one, other in zip(packed, step, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_bfloat16_accumulates_and_activates_in_fp32():
    """One cast, after SiLU."""
    x, weight = randn(40, 16, dtype=torch.bfloat16), randn(16, 4, dtype=torch.bfloat16, seed=1)
    window = randn(1, 16, 3, dtype=torch.bfloat16, seed=2)
    y, _ = causal_conv(x, weight, window, offsets([40]))
    want, _ = plain_conv(x.double(), weight.double(), window[0].double())
    assert (y.double() - want.bfloat16().double()).abs().max() <= 2 * (want.abs().max() * 2**-9)
    assert (y == want.bfloat16()).double().mean() > 0.99
    taps = torch.cat([window[0].T, x])
    blunt = sum(taps[w : w + 40] * weight[:, w] for w in range(4))
    blunt = torch.nn.functional.silu(blunt)
    assert (blunt == want.bfloat16()).double().mean() < 0.9, "the test would not see sums in bf16"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.ones(5, 4)}, "causal_conv: weight: expected shape (6, kernel), got (5, 4)"),
        ({"windows": torch.ones(2, 6, 4)}, "causal_conv: windows: expected shape (2, 6, 3), got (2, 6, 4)"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "causal_conv: windows: expected shape (1, 6, 3), got (2, 6, 3)"),
    ],
)
def test_wrong_shapes_are_refused_by_name(change, message):
    call = {"x": torch.ones(8, 6), "weight": torch.ones(6, 4), "windows": torch.ones(2, 6, 3), "cu_seqlens": offsets([4, 4])}
    with pytest.raises(ValueError) as error:
        causal_conv(**call | change)
    assert str(error.value) == message
