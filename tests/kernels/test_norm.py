"""The norm kernels against the torch ops in fp64: in the interpreter in fp32, on a GPU in bfloat16 as well."""

import pytest
import torch
from helpers import assert_close, rel_l2

from berrylm_kernels import norm as kernels
from berrylm_ref.ops import norm as ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
FP32 = 1.5e-7  # a few fp32 roundings an element
EPS = 1e-6


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check(name, got, call, *args):
    """Within 1.1x the torch op's own error at this dtype, or a few fp32 roundings."""
    want = call(*(x.double() if isinstance(x, torch.Tensor) else x for x in args))
    same = call(*args)
    for part, exact, torch_part in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want, same)), strict=True):
        assert part.dtype == torch_part.dtype and part.shape == torch_part.shape
        assert_close(name, part, exact, max(FP32, 1.1 * rel_l2(torch_part, exact)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 2048), (3, 5, 48), (2, 1000), (1, 8192), (70, 128), (17, 1), (0, 64)], ids=str)
def test_norms_equal_the_torch_ops(shape, dtype):
    x, y, z = (randn(*shape, dtype=dtype, seed=seed) for seed in range(3))
    w = 0.2 * randn(shape[-1], dtype=dtype, seed=3)
    check("rms_norm", kernels.rms_norm(x, w, EPS), ops.rms_norm, x, w, EPS)
    check("add_rms_norm", kernels.add_rms_norm(x, y, w, EPS), ops.add_rms_norm, x, y, w, EPS)
    check("gated_rms_norm", kernels.gated_rms_norm(x, z, 1 + w, EPS), ops.gated_rms_norm, x, z, 1 + w, EPS)
    check("l2norm", kernels.l2norm(x), ops.l2norm, x)
    assert torch.equal(kernels.add_rms_norm(x, y, w, EPS)[0], x + y)


@pytest.mark.gpu
def test_bfloat16_rounds_where_the_torch_ops_round():
    """One cast after (1 + w); the gated norm casts before its weight. A cast at another place moves about every
    third value by one step of bf16, fp32 sums in another order one in a thousand."""
    x, z = randn(256, 2048, dtype=torch.bfloat16), randn(256, 2048, dtype=torch.bfloat16, seed=1)
    w = 0.2 * randn(2048, dtype=torch.bfloat16, seed=2)
    for name, args in (("rms_norm", (x, w)), ("gated_rms_norm", (x, z, 1 + w))):
        same = getattr(kernels, name)(*args, EPS) == getattr(ops, name)(*args, EPS)
        print(f"{name}: {same.double().mean().item():.5f} bit-equal")
        assert same.double().mean() > 0.995


@pytest.mark.gpu
def test_a_weight_in_fp32_is_not_rounded_to_the_streams_dtype():
    x, z = randn(64, 128, dtype=torch.bfloat16), randn(64, 128, dtype=torch.bfloat16, seed=1)
    w = 1 + 0.2 * randn(128, seed=2)
    check("rms_norm", kernels.rms_norm(x, w, EPS), ops.rms_norm, x, w, EPS)
    check("gated_rms_norm", kernels.gated_rms_norm(x, z, w, EPS), ops.gated_rms_norm, x, z, w, EPS)


def test_rows_of_a_wider_buffer_are_read_in_place_and_nothing_beside_them():
    """Poison around the inputs (KRN-2): rows of a fused projection have a stride; their neighbours are NaN."""
    wide = torch.full((9, 3, 48), float("nan"), device=DEVICE)
    wide[:, 1] = randn(9, 48)
    w = randn(48, seed=1)
    assert torch.equal(kernels.rms_norm(wide[:, 1], w, EPS), kernels.rms_norm(wide[:, 1].contiguous(), w, EPS))
    got = kernels.gated_rms_norm(wide[:, 1], wide[:, 1], w, EPS)
    check("gated_rms_norm", got, ops.gated_rms_norm, wide[:, 1].contiguous(), wide[:, 1].contiguous(), w, EPS)


def test_heads_of_a_wider_projection_are_read_in_place():
    """The gate is a column block of one product of all projections: a copy of it would be a launch and twice its bytes."""
    x, z, w = randn(6, 4, 48), randn(6, 4, 48, seed=1), 1 + 0.2 * randn(48, seed=2)
    wide = torch.full((6, 300), float("nan"), device=DEVICE)
    wide[:, 20 : 20 + 192] = z.flatten(1)
    column = wide[:, 20 : 20 + 192].unflatten(-1, (4, 48))
    assert column.stride() == (300, 48, 1)
    want = kernels.gated_rms_norm(x, z, w, EPS)
    assert torch.equal(kernels.gated_rms_norm(x, column, w, EPS), want)
    by_head = x.transpose(0, 1).contiguous().transpose(0, 1)  # heads apart, too
    assert torch.equal(kernels.gated_rms_norm(by_head, column, w, EPS), want)
    check("gated_rms_norm", want, ops.gated_rms_norm, x, z, w, EPS)


def test_a_transposed_view_is_handled():
    x, w = randn(48, 6).T, randn(48, seed=1)
    check("rms_norm", kernels.rms_norm(x, w, EPS), ops.rms_norm, x, w, EPS)
    check("add_rms_norm", kernels.add_rms_norm(x, x, w, EPS), ops.add_rms_norm, x, x, w, EPS)


def test_zero_rows_stay_zero_and_large_rows_finite():
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e15), torch.full((64,), -1e-30)]).to(DEVICE)
    check("rms_norm", kernels.rms_norm(x, torch.zeros(64, device=DEVICE), EPS), ops.rms_norm, x, torch.zeros_like(x[0]), EPS)
    assert torch.equal(kernels.rms_norm(x, torch.zeros(64, device=DEVICE), EPS)[0], x[0])


def test_the_inputs_are_not_written():
    x, y, w = randn(4, 64), randn(4, 64, seed=1), randn(64, seed=2)
    before = [t.clone() for t in (x, y, w)]
    kernels.add_rms_norm(x, y, w, EPS), kernels.gated_rms_norm(x, y, w, EPS), kernels.l2norm(x)
    assert all(torch.equal(a, b) for a, b in zip((x, y, w), before, strict=True))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, w: kernels.rms_norm(x, w[:4], EPS), "rms_norm: weight: expected shape (8,), got (4,)"),
        (lambda x, w: kernels.rms_norm(x.double(), w, EPS), "rms_norm: x: expected torch.float32"),
        (lambda x, w: kernels.rms_norm(x, w.long(), EPS), "rms_norm: weight: expected torch.float32"),
        (lambda x, w: kernels.add_rms_norm(x, x[:1], w, EPS), "add_rms_norm: y: expected shape (2, 8), got (1, 8)"),
        (lambda x, w: kernels.gated_rms_norm(x, x[:1], w, EPS), "gated_rms_norm: z: expected shape (2, 8), got (1, 8)"),
        (lambda x, w: kernels.gated_rms_norm(x, x, w[:4], EPS), "gated_rms_norm: weight: expected shape (8,), got (4,)"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError) as error:
        call(torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE))
    assert str(error.value).startswith(message)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is only in use on a machine without a GPU")
def test_the_interpreter_refuses_bfloat16():
    """KRN-5: under TRITON_INTERPRET casts to bf16 truncate; the result would be wrong in its last bit and say nothing."""
    with pytest.raises(ValueError, match="^rms_norm: x: expected torch.float32 under TRITON_INTERPRET=1, got torch.bfloat16$"):
        kernels.rms_norm(torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8), EPS)
