"""chunk_kda on a GPU: bf16 at the model's shape, graphs, repeats. Each tier that runs there, against the fp64 token loop."""

import pytest
import torch
from helpers import assert_close, rel_l2
from kda_kernel_cases import REGIMES, bf16_chunk_kda, make_inputs, raw_gate

from berrylm_kernels.kda import chunk_kda_tier, hopper_available
from berrylm_kernels.kda_args import check_call
from berrylm_ref.ops.kda import kda_gate, recurrent_kda

pytestmark = pytest.mark.gpu
H, HV, K = 16, 32, 128
NORM = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}


def real_shape(T, regime="-563", dtype=torch.bfloat16):
    inputs = make_inputs(T, H, HV, K, K, dtype=dtype, device="cuda")
    inputs[3] = kda_gate(*raw_gate(regime, T, HV, K, device="cuda"))
    return inputs


@pytest.fixture(params=["plain", "hopper"])
def tier(request):
    probe = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16, device="cuda")
    if request.param == "hopper" and not hopper_available(check_call("probe", probe, probe, probe, probe, probe[..., 0])):
        pytest.skip("the Hopper tier needs a GPU of compute capability 9.x")
    return request.param


@pytest.mark.parametrize("regime", REGIMES)
def test_bf16_is_as_good_as_its_operands(tier, regime):
    """KRN-1 at H=16, HV=32, K=V=128: the error of the same maths in torch with bf16 operands, and a tenth more."""
    inputs = real_shape(298, regime)
    want, last = recurrent_kda(*(x.double() for x in inputs), **NORM)
    torch_o, torch_last = bf16_chunk_kda(*inputs)
    o, final = chunk_kda_tier(tier, *inputs, **NORM)
    assert torch.isfinite(o).all() and torch.isfinite(final).all()
    assert_close("o", o, want, 1.1 * rel_l2(torch_o, want))
    assert_close("final state", final, last, 1.1 * rel_l2(torch_last, last))


@pytest.mark.parametrize("regime", REGIMES)
def test_fp32_at_the_real_shape(regime):
    """The fp32 mode of the plain tier, single steps of -1e4 included."""
    inputs = real_shape(298, regime, torch.float32)
    inputs[3][0, 100, :, ::2] = -1e4
    inputs[3][0, 230] = -1e4
    want, last = recurrent_kda(*(x.double() for x in inputs), **NORM)
    o, final = chunk_kda_tier("plain", *inputs, **NORM)
    assert_close("o", o, want, 1e-5)
    assert_close("final state", final, last, 1e-5)


@pytest.mark.parametrize("gate", [0.0, -5.0, -1e4])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_extremes_stay_finite(tier, gate, beta):
    inputs = real_shape(130)
    inputs[3].fill_(gate)
    inputs[4].fill_(beta)
    state = torch.randn(1, HV, K, K, device="cuda")
    o, final = chunk_kda_tier(tier, *inputs, initial_state=state, **NORM)
    assert torch.isfinite(o).all() and torch.isfinite(final).all()


def test_50_repeats_are_bitwise_equal(tier):
    """KRN-4: one distinct output, whatever the schedule."""
    inputs = real_shape(4096)
    o, final = chunk_kda_tier(tier, *inputs, **NORM)
    for _ in range(50):
        again = chunk_kda_tier(tier, *inputs, **NORM)
        assert torch.equal(again[0], o) and torch.equal(again[1], final)


def test_neighbours_and_later_chunks_change_no_bit(tier):
    inputs, other = real_shape(300), real_shape(131, "-9210")
    alone = chunk_kda_tier(tier, *inputs, **NORM)
    packed = [torch.cat([a, b], 1) for a, b in zip(other, inputs, strict=True)]
    offsets = torch.tensor([0, 131, 131, 431], device="cuda")
    o, final = chunk_kda_tier(tier, *packed, cu_seqlens=offsets, **NORM)
    assert torch.equal(o[:, 131:], alone[0]) and torch.equal(final[2], alone[1][0])
    inputs[3][:, 128:] *= 100
    o, _ = chunk_kda_tier(tier, *inputs, **NORM)
    assert torch.equal(o[:, :128], alone[0][:, :128])


def test_a_graph_replays_the_whole_op(tier):
    """Nothing synchronises, and nothing is decided on the host from what lies on the GPU: offsets and boundaries may change."""
    inputs = real_shape(400)
    offsets = torch.tensor([0, 100, 400], device="cuda")
    table = torch.tensor([[0, 64], [1, 256]], dtype=torch.int32, device="cuda")
    call = dict(cu_seqlens=offsets, state_boundaries=table, **NORM)
    chunk_kda_tier(tier, *inputs, **call)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chunk_kda_tier(tier, *inputs, **call)
    offsets.copy_(torch.tensor([0, 200, 400], device="cuda"))
    table.copy_(torch.tensor([[0, 192], [1, 128]], dtype=torch.int32, device="cuda"))
    inputs[2].normal_()
    graph.replay()
    want = chunk_kda_tier(tier, *inputs, **call)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.isfinite(got[2]).all()


def test_gate_fused_equals_gate_given(tier):
    """Raw gate, sigmoid of beta and strided views of one projection: as exact as what is computed outside."""
    T = 298
    packed = torch.randn(1, T, 2 * H * K + HV * K, device="cuda").bfloat16()
    q, k, v = (x.unflatten(2, (-1, K)) for x in packed.split([H * K, H * K, HV * K], -1))
    raw, A_log, dt_bias = raw_gate("-563", T, HV, K, device="cuda")
    raw, logit = raw.bfloat16(), torch.randn(1, T, HV, device="cuda").bfloat16()
    o, final = chunk_kda_tier(
        tier, q, k, v, raw, logit, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True, **NORM,
    )  # fmt: skip
    given = [x.contiguous() for x in (q, k, v)] + [kda_gate(raw, A_log, dt_bias), logit.float().sigmoid()]
    want, last = recurrent_kda(*(x.double() for x in given), **NORM)
    torch_o, torch_last = bf16_chunk_kda(*given)
    assert_close("o", o, want, 1.1 * rel_l2(torch_o, want))
    assert_close("final state", final, last, 1.1 * rel_l2(torch_last, last))
