"""The three norms against plain formulas, and the rounding steps that a bfloat16 model depends on."""

import pytest
import torch
from helpers import assert_close, rel_l2

from berrylm_ref.ops.norm import add_rms_norm, gated_rms_norm, l2norm, rms_norm

EPS = 1e-6


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_rms(row):
    return row / (sum(v * v for v in row) / len(row) + EPS) ** 0.5


@pytest.mark.parametrize("width", [1, 7, 64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_rms_norm_is_the_formula(shape, width):
    x, w = randn(*shape, width), randn(width, seed=1)
    y = rms_norm(x, w, EPS)
    rows = [plain_rms(row) * (1 + w) for row in x.reshape(-1, width)]
    assert_close("rms_norm", y, torch.stack(rows).view(x.shape), 1e-15)


def test_rms_norm_weight_is_stored_around_zero():
    """The factor is 1 + w. Read as a plain weight, a fresh layer (w = 0) would return zeros."""
    x = randn(4, 32)
    assert_close("w = 0", rms_norm(x, torch.zeros(32, dtype=x.dtype), EPS), torch.stack([plain_rms(row) for row in x]), 1e-15)


def test_rms_norm_casts_once_after_the_weight():
    """bf16 in, everything in fp32, one cast after (1 + w). A cast before the weight shows as another bf16 value."""
    x, w = randn(64, 128, dtype=torch.bfloat16), randn(128, dtype=torch.bfloat16, seed=1)
    normed = x.float() * (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt()
    assert torch.equal(rms_norm(x, w, EPS), (normed * (1 + w.float())).bfloat16())
    early = (normed.bfloat16() * (1 + w)).bfloat16()
    assert not torch.equal(rms_norm(x, w, EPS), early), "the test would not see an early cast"


def test_an_eps_of_1e_5_for_1e_6_is_seen_at_1e_5():
    """That mistake moves logits by 4e-5 only, so fp32 bounds stay at 1e-5 or below."""
    x, w = 0.2 * randn(8, 64, dtype=torch.float32), torch.zeros(64)
    right = rms_norm(x.double(), w.double(), EPS)
    assert_close("fp32", rms_norm(x, w, EPS), right, 1e-7)
    assert 4e-5 < rel_l2(rms_norm(x, w, 1e-5), right) < 1e-3


def test_rms_norm_of_a_zero_row_is_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), EPS), torch.zeros(2, 8))


def test_rms_norm_of_large_bfloat16_values_is_finite():
    """x^2 is taken in fp32: 1e15 squared is far outside bf16's precision but inside fp32's range."""
    y = rms_norm(torch.full((1, 64), 1e15, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16), EPS)
    assert_close("all equal", y, torch.ones(1, 64), 0.0)


def test_add_rms_norm_rounds_the_sum_first():
    """The stream that goes on is bf16, and the norm sees what goes on: a norm of the unrounded sum would drift from it."""
    h, y = randn(64, 96, dtype=torch.bfloat16), randn(64, 96, dtype=torch.bfloat16, seed=1)
    w = randn(96, dtype=torch.bfloat16, seed=2)
    total, normed = add_rms_norm(h, y, w, EPS)
    assert torch.equal(total, (h.float() + y.float()).bfloat16())
    assert torch.equal(normed, rms_norm(total, w, EPS))
    unrounded = h.float() + y.float()
    unrounded = unrounded * (unrounded.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1 + w.float())
    assert not torch.equal(normed, unrounded.bfloat16()), "the test would not see an unrounded sum"


@pytest.mark.parametrize("width", [1, 7, 64])
def test_gated_rms_norm_is_the_formula(width):
    """The weight is plain, not 1 + w, and the norm comes before the gate."""
    x, z, w = randn(3, 2, width), randn(3, 2, width, seed=1), 1 + 0.1 * randn(width, seed=2)
    rows = [
        plain_rms(a) * w * b / (1 + torch.exp(-b)) for a, b in zip(x.view(-1, width), z.view(-1, width), strict=True)
    ]  # fmt: skip
    assert_close("gated_rms_norm", gated_rms_norm(x, z, w, EPS), torch.stack(rows).view(x.shape), 1e-15)


def test_gated_rms_norm_does_not_norm_the_gated_value():
    """Gate first, norm after is the other order in use: it would forget the gate's size altogether."""
    x, z, w = randn(5, 32), randn(5, 32, seed=1), torch.ones(32, dtype=torch.float64)
    far, near = gated_rms_norm(x, z + 30, w, EPS), gated_rms_norm(x, z + 3, w, EPS)
    assert far.norm() > 5 * near.norm()


def test_gated_rms_norm_casts_before_its_weight():
    """Normalise in fp32, cast, times w in the model dtype, times silu(z) in fp32, cast."""
    x, z = randn(64, 128, dtype=torch.bfloat16), randn(64, 128, dtype=torch.bfloat16, seed=1)
    w = (1 + 0.1 * randn(128, seed=2)).bfloat16()
    normed = x.float() * (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt()
    silu = torch.nn.functional.silu(z.float())
    weighted = (w.float() * normed.bfloat16().float()).bfloat16().float()
    assert torch.equal(gated_rms_norm(x, z, w, EPS), (weighted * silu).bfloat16())
    late = (w.float() * normed * silu).bfloat16()
    assert not torch.equal(gated_rms_norm(x, z, w, EPS), late), "the test would not see a late cast"


def test_l2norm_is_the_formula():
    x = randn(3, 4, 16)
    assert_close("l2norm", l2norm(x), x / (x.square().sum(-1, keepdim=True) + EPS).sqrt(), 1e-15)


def test_l2norm_eps_bites_on_short_vectors():
    """A scale of q before the norm does not cancel, for eps stands beside the sum of squares (0.11 on logits)."""
    x = 1e-3 * randn(4, 16)
    assert rel_l2(l2norm(x / 11.3), l2norm(x)) > 0.1


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(4), EPS), "rms_norm: weight: expected shape (8,), got (4,)"),
        (lambda: gated_rms_norm(torch.ones(2, 8), torch.ones(2, 8), torch.ones(1, 8), EPS), "gated_rms_norm: weight: expected"),
        (lambda: gated_rms_norm(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), EPS), "gated_rms_norm: z: expected"),
    ],
)
def test_wrong_shapes_are_refused_by_name(call, name):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(name)
