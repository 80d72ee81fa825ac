"""The depth-mixer kernel against the torch op in fp64: in the interpreter in fp32, on a GPU in bfloat16 as well."""

import pytest
import torch
from helpers import assert_close, rel_l2

from berrylm_kernels.attnres import attn_res, attn_res_norm
from berrylm_ref.ops import attnres as ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
FP32 = 3e-7
EPS, NORM_EPS = 1e-6, 1e-5


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def inputs(P, D, blocks, dtype=torch.float32, gate=0.6):
    """h, committed, pseudo_query, gate and a norm weight; logits of about +-2, so that the softmax is neither flat nor sharp."""
    query = 2 * D**-0.5 * randn(D, dtype=dtype, seed=2)
    gate = torch.tensor(gate, dtype=dtype, device=DEVICE)
    return randn(P, D, dtype=dtype), randn(blocks, P, D, dtype=dtype, seed=1), query, gate, 0.2 * randn(D, dtype=dtype, seed=3)


def double(*tensors):
    return [None if x is None else x.double() for x in tensors]


@pytest.mark.parametrize("blocks", range(9))
@pytest.mark.parametrize("D", [64, 1000, 2048])
def test_mixer_and_norm_equal_the_torch_ops_in_fp64(D, blocks):
    """0 to 8 committed streams; with none, the mix is the stream itself."""
    h, committed, query, gate, weight = inputs(3, D, blocks)
    got = attn_res_norm(h, committed, query, gate, EPS, True, weight, NORM_EPS)
    h64, committed64, query64, gate64, weight64 = double(h, committed, query, gate, weight)
    want = ops.attn_res_norm(h64, committed64, query64, gate64, EPS, True, weight64, NORM_EPS)
    assert_close("mixed", got[0], want[0], FP32)
    assert_close("normed", got[1], want[1], FP32)
    assert torch.equal(attn_res(h, committed, query, gate, EPS), got[0])
    mix = attn_res(h, committed, query, None, EPS, gated=False)
    assert_close("not gated", mix, ops.attn_res(h64, committed64, query64, None, EPS, gated=False), FP32)
    assert torch.equal(attn_res_norm(h, committed, query, None, EPS, False, weight, NORM_EPS)[0], mix)


@pytest.mark.parametrize("P, D", [(1, 8192), (0, 64), (2, 96), (1, 65)])
def test_widths_that_are_no_power_of_two_and_no_tokens(P, D):
    h, committed, query, gate, weight = inputs(P, D, 2)
    got = attn_res_norm(h, committed, query, gate, EPS, True, weight, NORM_EPS)
    want = ops.attn_res_norm(*double(h, committed, query, gate), EPS, True, weight.double(), NORM_EPS)
    assert_close("mixed", got[0], want[0], FP32)
    assert_close("normed", got[1], want[1], FP32)


@pytest.mark.parametrize("gate", [1e-6, 1e-3, 0.1, 0.2499, 0.2501, -0.5, 3.0, -20.0, 90.0])
def test_tanh_of_the_gate_keeps_its_relative_precision(gate):
    """1 - 2 / (exp(2x) + 1) would lose a gate of 1e-6 to a twentieth, and training starts there; exp must not overflow either.
    The step from h is looked at alone: h = 0."""
    h, committed, query, gate, _ = inputs(2, 64, 2, gate=gate)
    h = torch.zeros_like(h)
    assert_close("step", attn_res(h, committed, query, gate, EPS), ops.attn_res(*double(h, committed, query, gate), EPS), FP32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_zero_returns_the_stream_bit_for_bit(dtype):
    h, committed, query, gate, weight = inputs(5, 96, 4, dtype, gate=0.0)
    mixed, _ = attn_res_norm(h, committed, query, gate, EPS, True, weight, NORM_EPS)
    assert torch.equal(mixed, h) and torch.equal(attn_res(h, committed, query, gate, EPS), h)


def test_pseudo_query_zero_is_the_uniform_mean():
    h, committed, query, _, _ = inputs(5, 96, 4)
    mix = attn_res(h, committed, torch.zeros_like(query), None, EPS, gated=False)
    assert_close("mean", mix, torch.cat([committed, h[None]]).double().mean(0), FP32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_committed_is_a_view_of_a_larger_buffer(dtype):
    """Streams lie in one buffer [blocks, tokens, D], larger both ways; what lies beside the view is NaN and stays unread."""
    P, D, blocks = 5, 96, 3
    h, committed, query, gate, _ = inputs(P, D, blocks, dtype)
    buffer = torch.full((blocks + 2, P + 4, D), float("nan"), dtype=dtype, device=DEVICE)
    buffer[:blocks, :P] = committed
    rows = torch.full((P, 3 * D), float("nan"), dtype=dtype, device=DEVICE)
    rows[:, D : 2 * D] = h
    got = attn_res(rows[:, D : 2 * D], buffer[:blocks, :P], query, gate, EPS)
    assert torch.equal(got, attn_res(h, committed, query, gate, EPS))


def test_logits_that_differ_by_thousands_and_zero_streams_stay_finite():
    """The online softmax starts from h: a later source may outweigh it by any factor, or the other way round."""
    h, committed, query, gate, _ = inputs(4, 64, 4)
    committed[1], h[2] = 0.0, 0.0
    for scale in (1e4, -1e4):
        got = attn_res(h, committed, scale * query, gate, EPS)
        assert_close("sharp", got, ops.attn_res(*double(h, committed, scale * query, gate), EPS), FP32)


def test_the_mixer_is_token_local():
    h, committed, query, gate, _ = inputs(5, 64, 3)
    poisoned = committed.clone()
    poisoned[:, 2] = float("nan")
    kept = [0, 1, 3, 4]
    assert torch.equal(attn_res(h, poisoned, query, gate, EPS)[kept], attn_res(h, committed, query, gate, EPS)[kept])


def bf16_steps(got, want, *scales):
    """The difference in steps of bf16 at the largest of the values that the chain went through."""
    size = torch.stack([x.float().abs() for x in scales]).amax(0).clamp_min(1e-30)
    step = torch.exp2(torch.floor(torch.log2(size)) - 7)
    return (got.float() - want.float()).abs() / step


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [0, 1, 4, 8])
@pytest.mark.parametrize("D", [64, 1000, 2048, 8192])
def test_bfloat16_is_within_one_step_of_the_torch_chain(D, blocks):
    """The roundings of the model, bit for bit, on all but one value in a thousand, and there within one step of bf16.

    What is left is the order of fp32 sums: it flips a mix that lies between two bf16 numbers, or one whose sources cancel. One
    value in a million then moves by two steps (mix - h lies a binade above h and mix where their signs differ); two orders of
    the sums in torch differ in the same way. The compiler must not merge the product and the sum of the blend into one
    bf16 fma: seen on an H200 as 30 % of the values off by a step.
    """
    h, committed, query, gate, weight = inputs(257, D, blocks, torch.bfloat16)
    want, _ = ops.attn_res_norm(h, committed, query, gate, EPS, True, weight, NORM_EPS)
    mix = ops.attn_res(h, committed, query, None, EPS, gated=False)
    mixed, normed = attn_res_norm(h, committed, query, gate, EPS, True, weight, NORM_EPS)
    steps = bf16_steps(mixed, want, h, mix, want)
    off, far, most = (steps > 0).double().mean().item(), (steps > 1).sum().item(), steps.max().item()
    print(f"D {D}, {blocks} blocks: {off:.1e} of the values off, {far} of {steps.numel()} by more than a step, {most} at most")
    assert off < 1e-3 and far <= 5 and most <= 2
    exact = ops.rms_norm(mixed.double(), weight.double(), NORM_EPS)  # of our own mixed stream
    assert_close("normed", normed, exact, 1.1 * rel_l2(ops.rms_norm(mixed, weight, NORM_EPS), exact))


def test_the_norm_is_of_the_mixed_stream_as_it_goes_on():
    """A mistake that costs 0.29 on the logits: not of h, and not of the unrounded mix."""
    h, committed, query, gate, weight = inputs(5, 96, 4)
    mixed, normed = attn_res_norm(h, committed, query, gate, EPS, True, weight, NORM_EPS)
    assert_close("normed", normed, ops.rms_norm(mixed.double(), weight.double(), NORM_EPS), FP32)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [0, 4])
def test_fifty_calls_give_one_result(blocks):
    """KRN-4: a race shows as another result on the same inputs."""
    h, committed, query, gate, weight = inputs(512, 2048, blocks, torch.bfloat16)
    first = attn_res_norm(h, committed, query, gate, EPS, True, weight, NORM_EPS)
    for _ in range(50):
        again = attn_res_norm(h, committed, query, gate, EPS, True, weight, NORM_EPS)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"h": torch.ones(2, 2, 8)}, "attn_res: h: expected [P, D], got (2, 2, 8)"),
        ({"committed": torch.ones(2, 3, 8)}, "attn_res: committed: expected [blocks, 4, 8], got (2, 3, 8)"),
        ({"committed": torch.ones(4, 8)}, "attn_res: committed: expected [blocks, 4, 8], got (4, 8)"),
        ({"committed": torch.ones(2, 4, 8, dtype=torch.float64)}, "attn_res: committed: expected torch.float32"),
        ({"pseudo_query": torch.ones(1, 8)}, "attn_res: pseudo_query: expected shape (8,), got (1, 8)"),
        ({"gate": None}, "attn_res: gate: expected one number, got None"),
        ({"gate": torch.ones(2)}, "attn_res: gate: expected one number, got (2,)"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, message):
    call = {"h": torch.ones(4, 8), "committed": torch.ones(2, 4, 8), "pseudo_query": torch.ones(8), "gate": torch.ones(())}
    with pytest.raises(ValueError) as error:
        attn_res(**{name: None if x is None else x.to(DEVICE) for name, x in (call | change).items()}, eps=EPS)
    assert str(error.value).startswith(message)
