"""Rotary embedding against complex rotation, channel by channel, and the ways it is usually got wrong."""

import math

import pytest
import torch
from helpers import assert_close, rel_l2

from berrylm_ref.ops.rope import apply_rope, rope_angles

THETA = 1e7


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain_rope(x, positions, rotary_dim, theta):
    """Channel c and its partner c + rotary_dim / 2 are one complex number, turned by position * theta ** (-2c / rotary_dim)."""
    y, half = x.clone(), rotary_dim // 2
    for n, position in enumerate(positions):
        for c in range(half):
            angle = position * theta ** (-2 * c / rotary_dim)
            for head in range(x.shape[1]):
                a, b = x[n, head, c].item(), x[n, head, c + half].item()
                y[n, head, c] = a * math.cos(angle) - b * math.sin(angle)
                y[n, head, c + half] = b * math.cos(angle) + a * math.sin(angle)
    return y


@pytest.mark.parametrize("rotary_dim", [2, 4, 8, 16])
def test_rope_is_a_rotation_of_channel_pairs(rotary_dim):
    """rotate-half form: partners stand half a rotary width apart, not side by side; the channels past it pass untouched."""
    positions = [0, 1, 7, 100]
    x = randn(4, 2, 16)
    y = apply_rope(x, *rope_angles(torch.tensor(positions), rotary_dim, THETA, torch.float64))
    assert_close("rope", y, plain_rope(x, positions, rotary_dim, THETA), 1e-14)
    assert torch.equal(y[..., rotary_dim:], x[..., rotary_dim:])


def test_frequencies_divide_by_the_rotary_width_not_the_heads():
    """With a quarter of a head of 256 rotated, dividing by 256 would turn the last pair 1e4 times too fast."""
    cos, _ = rope_angles(torch.tensor([1]), 64, THETA, torch.float64)
    last = math.acos(cos[0, 31].item())
    assert last == pytest.approx(THETA ** (-62 / 64), rel=1e-2)
    assert last < THETA ** (-62 / 256) / 1e4


def test_position_zero_is_the_identity():
    x = randn(1, 3, 8)
    assert torch.equal(apply_rope(x, *rope_angles(torch.zeros(1, dtype=torch.long), 8, THETA, torch.float64)), x)


def test_rope_keeps_lengths():
    x = randn(5, 2, 8)
    y = apply_rope(x, *rope_angles(torch.arange(5) * 50_000, 8, THETA, torch.float64))
    assert_close("norms", y.norm(dim=-1), x.norm(dim=-1), 1e-14)


def test_a_constant_offset_of_all_positions_is_invisible_in_the_scores():
    """This is why only a *change* of offset between prefill and decode can be seen (0.044), and must be tested."""
    q, k = randn(6, 1, 16), randn(6, 1, 16, seed=1)

    def scores(q_positions, k_positions):
        turn = [apply_rope(x, *rope_angles(p, 16, 100.0, torch.float64)) for x, p in ((q, q_positions), (k, k_positions))]
        return turn[0][:, 0] @ turn[1][:, 0].T

    here = torch.arange(6)
    assert_close("shifted", scores(here + 1000, here + 1000), scores(here, here), 1e-12)
    assert rel_l2(scores(here + 1, here), scores(here, here)) > 0.1


def test_positions_continue_in_decode():
    """One call over 0 .. 9, and the same tokens one by one at their own positions: equal bit for bit."""
    x = randn(10, 2, 8)
    whole = apply_rope(x, *rope_angles(torch.arange(10), 8, THETA, torch.float64))
    steps = [apply_rope(x[n : n + 1], *rope_angles(torch.tensor([n]), 8, THETA, torch.float64)) for n in range(10)]
    assert torch.equal(torch.cat(steps), whole)


def test_angles_are_fp32_in_a_bfloat16_model():
    """bf16 has 8 bits: at position 100 its angles are off by up to 2 %, at 262143 by whole turns. Only cos and sin are cast."""
    positions, dtype = torch.tensor([100, 1001, 262143]), torch.bfloat16
    for low, full in zip(rope_angles(positions, 64, THETA, dtype), rope_angles(positions, 64, THETA, torch.float32), strict=True):
        assert low.dtype == dtype
        assert torch.equal(low, full.to(dtype))
    frequency = THETA ** -(torch.arange(0, 64, 2) / 64)
    blunt = (positions.to(dtype)[:, None] * frequency.to(dtype)).cos().to(dtype)
    assert rel_l2(blunt, rope_angles(positions, 64, THETA, dtype)[0][:, :32]) > 0.1, "the test would not see low-precision angles"


def test_fp32_angles_hold_up_to_256k_positions():
    """Between 2^17 and 2^18 fp32 numbers stand 2^-6 apart, so an angle there is off by half of that and no more."""
    positions = torch.tensor([0, 1, 65_535, 262_143])
    for low, full in zip(
        rope_angles(positions, 64, THETA, torch.float32), rope_angles(positions, 64, THETA, torch.float64), strict=True
    ):
        assert (low.double() - full).abs().max() < 2**-7


def test_an_odd_rotary_width_is_refused_by_name():
    with pytest.raises(ValueError, match="^rope_angles: rotary_dim: expected an even number, got 7$"):
        rope_angles(torch.arange(3), 7, THETA, torch.float32)
