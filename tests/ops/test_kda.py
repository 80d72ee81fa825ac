"""The numbers of KDA: the loop against the recorded recurrence, every chunk form against the loop."""

import math

import pytest
import torch
from helpers import assert_close, rel_l2
from kda_cases import kda_inputs, loop64, tokens
from safetensors.torch import load_file
from torch.nn.functional import pad, softplus

from berrylm_ref.ops.kda import chunk_kda, kda_gate, recurrent_kda
from berrylm_ref.ops.kda_chunk import invert_unit_lower

EXACT = ["dyadic", "difference"]
FP32 = 1e-6  # four times what the plain fp32 loop itself is off


@pytest.fixture(scope="module", params=["mild", "strong"])
def recorded(request, golden):
    return {"name": request.param, **load_file(golden / "kda" / f"{request.param}.safetensors")}


def arguments(recorded, dtype):
    case = {name: recorded[name].to(dtype) for name in ("q", "k", "v", "g", "beta", "initial_state")}
    return {**case, "use_qk_l2norm_in_kernel": True, "output_final_state": True}


def log2_decay(g, window):
    """The hardest cumulative log2 decay of any channel over an aligned window of tokens."""
    T = g.shape[1]
    windows = pad(g, (0, 0, 0, 0, 0, -T % window)).unflatten(1, (-1, window))
    return windows.sum(2).min().item() / math.log(2)


def test_the_loop_is_the_recorded_recurrence(recorded):
    o, state = recurrent_kda(**arguments(recorded, torch.float64))
    assert o.dtype == state.dtype == torch.float64
    assert_close("o", o, recorded["o"], 1e-13)
    assert_close("final_state", state, recorded["final_state"], 1e-13)


def test_the_loop_stopped_at_64_128_192_has_the_recorded_states(recorded):
    """CACHE-1: continuing from a state equals not having stopped."""
    case = arguments(recorded, torch.float64)
    state, options = case.pop("initial_state"), {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    inputs = {name: case[name] for name in ("q", "k", "v", "g", "beta")}
    for end in (64, 128, 192):
        o, state = recurrent_kda(**tokens(inputs, end - 64, end), initial_state=state, **options)
        assert_close(f"o before {end}", o, recorded["o"][:, end - 64 : end], 1e-13)
        assert_close(f"state after {end}", state, recorded[f"state_after_{end}"], 1e-13)


@pytest.mark.parametrize("intra", EXACT)
@pytest.mark.parametrize("dtype, budget", [(torch.float64, 1e-13), (torch.float32, FP32)], ids=["fp64", "fp32"])
def test_chunks_equal_the_recorded_recurrence(recorded, intra, dtype, budget):
    """KRN-1: finite and right at a cumulative log2 decay of -485 in a chunk, which exp(-cumsum) can't represent."""
    boundaries = [(0, 192), (0, 64), (0, 128)]  # the order asked for is the order returned
    o, state, kept = chunk_kda(**arguments(recorded, dtype), intra=intra, state_boundaries=boundaries)
    assert_close("o", o, recorded["o"], budget)
    assert_close("final_state", state, recorded["final_state"], budget)
    for (_, end), one in zip(boundaries, kept, strict=True):
        assert_close(f"state after {end}", one[None], recorded[f"state_after_{end}"], budget)


@pytest.mark.parametrize("intra", EXACT)
def test_one_huge_step_does_not_spoil_its_neighbours(recorded, intra):
    """After a step of -1e4 a difference of two long cumulative sums has lost its last digits: 2e-4 on the outputs.

    The exact forms sum inside their own blocks. What a key still weighs at the chunk's end is a suffix sum for the same
    reason, so the states are checked as well.
    """
    case = arguments(recorded, torch.float32)
    case["g"] = case["g"].clone()
    case["g"][:, 10] = case["g"][:, 77, :, ::2] = case["g"][:, 150, 1] = -1e4
    o, state = chunk_kda(**case, intra=intra)
    case.pop("output_final_state")
    ref_o, ref_state = loop64({n: x for n, x in case.items() if torch.is_tensor(x)}, use_qk_l2norm_in_kernel=True)
    assert_close("o", o, ref_o, FP32)
    assert_close("state", state, ref_state, FP32)


@pytest.mark.parametrize("regime", ["none", "slow", "mild", "sharp", "hard"])
@pytest.mark.parametrize("intra", EXACT)
def test_exact_forms_in_every_regime(regime, intra):
    case = kda_inputs(200, regime=regime)
    o, state = chunk_kda(**case, output_final_state=True, intra=intra)
    ref_o, ref_state = loop64(case)
    assert_close("o", o, ref_o, FP32)
    assert_close("state", state, ref_state, FP32)


KRN_1 = ["all -5", "all -1.5", "-5 on even channels", "one -20"]


@pytest.mark.parametrize("intra", EXACT)
@pytest.mark.parametrize("decay", KRN_1)
def test_krn_1_strong_decay_at_full_head_size(decay, intra):
    """KRN-1: factored as exp(+cumsum) exp(-cumsum) these are NaN, or finite and wrong."""
    heads = {"H": 16, "HV": 32} if intra == "dyadic" else {}
    case = kda_inputs(64, **heads, K=128, V=128, regime="none")
    case["beta"] = torch.full_like(case["beta"], 0.5)
    g = case["g"]
    if decay == "all -5":
        g -= 5
    elif decay == "all -1.5":
        g -= 1.5
    elif decay == "-5 on even channels":
        g[..., ::2] = -5
    else:
        g -= 0.01
        g[:, 20, :, 3] = -20
    o, state = chunk_kda(**case, output_final_state=True, intra=intra)
    ref_o, ref_state = loop64(case)
    assert_close("o", o, ref_o, FP32)
    assert_close("state", state, ref_state, FP32)


def test_clamped_is_equal_while_no_channel_loses_126_octaves_in_16_tokens():
    """The failure hides at ordinary decays: that is why it was shipped."""
    case = kda_inputs(200, regime="sharp")
    case["g"] *= 126 / -log2_decay(case["g"], 16) * (1 - 1e-6)
    assert -126 <= log2_decay(case["g"], 16) < -125.9
    ref_o, ref_state = loop64(case)
    for dtype, budget in ((torch.float64, 1e-13), (torch.float32, 5e-6)):  # its one long sum costs digits in fp32
        o, state = chunk_kda(**{n: x.to(dtype) for n, x in case.items()}, output_final_state=True, intra="clamped")
        assert_close("o", o, ref_o, budget)
        assert_close("state", state, ref_state, budget)


def test_clamped_on_the_recorded_vectors(recorded):
    """mild never reaches the clamp; in strong the hardest 16-token block is at -149: little, but above every rounding."""
    o, state = chunk_kda(**arguments(recorded, torch.float32), intra="clamped")
    if recorded["name"] == "mild":
        assert_close("o", o, recorded["o"], FP32)
        assert_close("state", state, recorded["final_state"], FP32)
    else:
        assert log2_decay(recorded["g"], 16) < -126
        error = rel_l2(o, recorded["o"])
        print(f"clamped on strong: rel-L2 {error:.3e}")
        assert 1e-4 <= error <= 1e-3


def test_clamped_is_far_off_below_2000_octaves_in_16_tokens():
    """sglang#39971: both exponents stop at 126, their product is 1, and what was forgotten comes back at full weight.

    fp64 does not help: it is the clamp, not the precision.
    """
    case = kda_inputs(200, regime="hard", K=32, V=32)
    assert log2_decay(case["g"][:, :192], 16) < -2000
    ref, _ = loop64(case)
    for dtype in (torch.float32, torch.float64):
        o, _ = chunk_kda(**{n: x.to(dtype) for n, x in case.items()}, intra="clamped")
        error = rel_l2(o, ref)
        print(f"clamped in {dtype}: rel-L2 {error:.3e}")
        assert error >= 0.1
    assert_close("dyadic", chunk_kda(**case)[0], ref, FP32)


@pytest.mark.parametrize(
    "lengths, heads, choice",
    [
        ([512], 32, "clamped"),  # 8 chunks x 32 heads = 256
        ([513], 32, "difference"),
        ([1] * 8, 32, "clamped"),  # a short sequence costs a whole chunk
        ([1] * 9, 32, "difference"),
        ([0] * 9 + [512], 32, "clamped"),  # an empty one costs none
        ([64 * 64], 4, "clamped"),
        ([64 * 64 + 1], 4, "difference"),
    ],
)
def test_sglang_takes_the_clamped_form_for_a_small_grid(lengths, heads, choice):
    """chunks * value heads <= 256, that is every short prefill at 32 heads up to 512 tokens."""
    case = kda_inputs(sum(lengths), H=heads // 2, HV=heads, K=4, V=4, regime="hard", sequences=len(lengths))
    packed = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0), "output_final_state": True}
    o, state = chunk_kda(**case, **packed, intra="sglang")
    for name in ("clamped", "difference"):
        ref_o, ref_state = chunk_kda(**case, **packed, intra=name)
        same = torch.equal(o, ref_o) and torch.equal(state, ref_state)
        if name == choice:
            assert same
        elif max(lengths) > 2:  # two tokens are too few to reach the clamp
            assert not same


def test_sglang_counts_the_chunks_of_a_whole_batch():
    case = kda_inputs(65, B=4, H=16, HV=32, K=4, V=4, regime="hard")  # 4 x 2 chunks x 32 heads
    assert torch.equal(chunk_kda(**case, intra="sglang")[0], chunk_kda(**case, intra="clamped")[0])
    case = kda_inputs(65, B=5, H=16, HV=32, K=4, V=4, regime="hard")
    assert torch.equal(chunk_kda(**case, intra="sglang")[0], chunk_kda(**case, intra="difference")[0])


KEYS = ["identical", "correlated", "two alternating"]


@pytest.mark.parametrize("intra", EXACT)
@pytest.mark.parametrize("beta", [1.0, 0.5])
@pytest.mark.parametrize("regime", ["none", "slow"])
@pytest.mark.parametrize("keys", KEYS)
def test_dependent_keys_without_forgetting(keys, regime, beta, intra):
    """The chunk inverse is worst where keys repeat: Neumann doubling is off by 6e8 with equal keys and beta = 1."""
    case = kda_inputs(130, K=16, regime=regime, seed=3)
    k = case["k"]
    if keys == "identical":
        k[:] = k[:, :1]
    elif keys == "correlated":
        k[:] = torch.nn.functional.normalize(k[:, :1] + 0.05 * k, dim=-1)
    else:
        k[:, ::2], k[:, 1::2] = k[:, :1], k[:, 1:2]
    case["beta"].fill_(beta)
    o, state = chunk_kda(**case, output_final_state=True, intra=intra)
    ref_o, ref_state = loop64(case)
    assert_close("o", o, ref_o, FP32)
    assert_close("state", state, ref_state, FP32)


def test_inverse_of_a_unit_lower_matrix():
    """Equal keys and beta = 1 give L = ones below the diagonal, whose inverse has only 1 and -1 beside the zeros."""
    L = torch.ones(64, 64).tril(-1)
    assert torch.equal(invert_unit_lower(L), torch.eye(64).diagonal_scatter(-torch.ones(63), -1))
    L = torch.empty(3, 2, 64, 64, dtype=torch.float64).normal_(std=0.3, generator=torch.Generator().manual_seed(0)).tril(-1)
    assert_close("random", invert_unit_lower(L), torch.linalg.inv(L + torch.eye(64, dtype=L.dtype)), 1e-13)


@pytest.mark.parametrize("intra", ["dyadic", "difference", "clamped"])
@pytest.mark.parametrize("cut", [1, 17, 63, 64, 100])
def test_the_future_never_reaches_an_earlier_output(cut, intra):
    """A middle anchor reads gates that come later, and their rounding with it. Bit for bit, nothing may move."""
    case, other = kda_inputs(130, seed=1), kda_inputs(130, seed=2)
    mixed = {n: torch.cat([case[n][:, :cut], other[n][:, cut:]], 1) for n in ("q", "k", "v", "g", "beta")}
    mixed["initial_state"] = case["initial_state"]
    a, b = (chunk_kda(**x, intra=intra)[0] for x in (case, mixed))
    assert torch.equal(a[:, :cut], b[:, :cut])
    assert not torch.equal(a[:, cut:], b[:, cut:])


def test_gate_formula_and_layout():
    """Natural log, one rate a head, dt_bias flat and head-major; the safe gate is a hard maximum."""
    rng = torch.Generator().manual_seed(0)
    raw, A_log = torch.randn(2, 5, 3, 4, generator=rng), torch.randn(3, generator=rng)
    dt_bias = torch.randn(12, generator=rng)
    g = kda_gate(raw, A_log, dt_bias)
    for h in range(3):
        for k in range(4):
            x = raw[..., h, k].double() + dt_bias[4 * h + k].double()
            assert_close(f"head {h} channel {k}", g[..., h, k], -A_log[h].double().exp() * softplus(x), 3e-7)
    assert (g < 0).all() and (g < -1.5).any() and (g > -1.5).any()
    assert torch.equal(kda_gate(raw, A_log, dt_bias, lower_bound=-1.5), torch.maximum(g, torch.tensor(-1.5)))


def test_gate_is_fp32_for_bf16_activations():
    """CKPT-2: the gate's arithmetic stays fp32, whatever the activations are."""
    raw, A_log, dt_bias = torch.randn(7, 3, 4).bfloat16(), torch.tensor([0.1, 2.5, 4.2]), torch.linspace(-6, 1, 12)
    g = kda_gate(raw, A_log, dt_bias)
    assert g.dtype == torch.float32
    assert_close("g", g, kda_gate(raw.double(), A_log.double(), dt_bias.double()), 3e-7)


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
@pytest.mark.parametrize("lower_bound", [None, -2.0])
def test_fused_options_equal_doing_it_outside(op, lower_bound):
    """The three switches and the scale are the plain formulas of the model, each eps included."""
    case = kda_inputs(70, dtype=torch.float64)
    rng = torch.Generator().manual_seed(5)
    raw, logit = torch.randn(case["g"].shape, generator=rng).double(), torch.randn(case["beta"].shape, generator=rng).double()
    A_log, dt_bias = torch.tensor([0.2, 1.0, 3.0, 4.27]).double(), torch.linspace(-6, 1, 32).double()
    q, k = 1e-3 * case["q"], 1e-2 * case["k"]  # small enough that eps = 1e-6 shows: 0.3 of q's squared norm
    options = {"initial_state": case["initial_state"], "output_final_state": True}
    o, state = op(
        q, k, case["v"], raw, logit, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, **options,
    )  # fmt: skip
    unit_q, unit_k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = kda_gate(raw, A_log, dt_bias, lower_bound)
    for scale in (None, 8**-0.5):
        ref_o, ref_state = recurrent_kda(unit_q, unit_k, case["v"], g, torch.sigmoid(logit), scale=scale, **options)
        assert_close("o", o, ref_o, 1e-13)
        assert_close("state", state, ref_state, 1e-13)
    tripled, _ = op(unit_q, unit_k, case["v"], g, torch.sigmoid(logit), scale=3.0, **options)
    assert_close("scale 3", tripled, o * 3 * 8**0.5, 1e-13)


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
def test_dtypes_out(op):
    """o leaves in v's dtype, the state in fp32 however small the activations are; no state unless asked."""
    for dtype, state_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        case = kda_inputs(70, dtype=dtype)
        case["initial_state"] = case["initial_state"].to(state_dtype)
        o, state = op(**case, output_final_state=True)
        assert o.dtype == dtype and state.dtype == state_dtype
        assert op(**case)[1] is None
        ref_o, ref_state = loop64(case)
        budget = 1e-13 if dtype == torch.float64 else FP32
        assert_close(f"o {dtype}", o, ref_o, 1.1 * rel_l2(ref_o.bfloat16(), ref_o) if dtype == torch.bfloat16 else budget)
        assert_close(f"state {dtype}", state, ref_state, budget)


def test_2000_decode_steps_do_not_drift():
    """CKPT-2: with bf16 activations the error does not grow with length, because the state is fp32 and written back."""
    case = kda_inputs(2000, regime="mild", dtype=torch.bfloat16)
    state = case.pop("initial_state").float()
    ref, ref_state = loop64({**case, "initial_state": state})
    out = []
    for t in range(2000):
        o, state = recurrent_kda(**tokens(case, t, t + 1), initial_state=state, output_final_state=True)
        out.append(o)
    out, bf16 = torch.cat(out, 1), rel_l2(ref.bfloat16(), ref)
    assert_close("state", state, ref_state, FP32)
    for begin in (0, 1000, 1900):
        assert_close(f"o after {begin}", out[:, begin : begin + 100], ref[:, begin : begin + 100], 1.2 * bf16)
