"""chunk_kda in Triton against the token loop in fp64: fp32, small shapes, in the interpreter or on a GPU."""

import inspect

import pytest
import torch
from helpers import assert_close, rel_l2
from kda_kernel_cases import REGIMES, make_inputs, raw_gate

from berrylm_kernels import kda_args
from berrylm_kernels.kda import chunk_kda, chunk_kda_tier
from berrylm_ref.ops import kda as torch_kda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = 2e-6 if DEVICE == "cuda" else 6e-7  # rel-L2 of the exact forms in fp32; a GPU's exp2 is good to 2 ulp
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)


def make(T, **shape):
    return make_inputs(T, **shape, device=DEVICE)


def random_state(N, HV, K, V, seed=2):
    return torch.randn(N, HV, K, V, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def widened(options):
    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}


def check(inputs, budget=EXACT, name="kda", oracle=torch_kda.recurrent_kda, **options):
    """o and final state against the fp64 oracle; returns them."""
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, **options}
    got = chunk_kda(*inputs, **options)
    of_chunk = ("intra", "state_boundaries")
    options = {n: x for n, x in options.items() if oracle is torch_kda.chunk_kda or n not in of_chunk}
    want = oracle(*(x.double() for x in inputs), **widened(options))
    for part, x, ref in zip(("o", "final state", "kept states"), got, want, strict=False):
        assert torch.isfinite(x).all(), f"{name}: {part} is not finite"
        assert_close(f"{name}: {part}", x, ref, budget)
    return got


def poisoned(x, value):
    """x as a view into a larger buffer that holds `value` everywhere around it."""
    big = torch.full((x.shape[0], x.shape[1] + 130, *x.shape[2:]), value, dtype=x.dtype, device=x.device)
    view = big[:, 65 : 65 + x.shape[1]]
    view.copy_(x)
    return view


@pytest.mark.parametrize("T", LENGTHS)
def test_lengths_off_the_chunk_grid_with_poison_around(T):
    """KRN-2: a tail row taken for real reads 1e30 here, and spoils the final state before any output of the same call."""
    inputs = [poisoned(x, 1e30) for x in make(T, seed=T)]
    clean = [x.contiguous() for x in inputs]
    state = random_state(1, 2, 16, 32)
    o, final = check(inputs, name=f"T={T}", initial_state=state)
    again = chunk_kda(*clean, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert torch.equal(o, again[0]) and torch.equal(final, again[1])


@pytest.mark.parametrize("with_state", [True, False])
def test_empty_sequences_in_a_packed_batch(with_state):
    """KRN-2: an empty sequence has no output row and returns its initial state bit for bit, zeros if it had none."""
    offsets = torch.tensor([0, 0, 5, 5, 69, 70, 70])
    state = random_state(6, 2, 16, 32) if with_state else None
    _, final = check([poisoned(x, float("nan")) for x in make(70)], initial_state=state, cu_seqlens=offsets)
    for n in (0, 2, 5):
        assert torch.equal(final[n], state[n] if with_state else torch.zeros_like(final[n]))


def test_nothing_but_empty_sequences():
    """KRN-2: no token at all: empty output, untouched states; nor does a call without any sequence fail."""
    state = random_state(2, 2, 16, 32)
    o, final = chunk_kda(*make(0), initial_state=state, output_final_state=True, cu_seqlens=torch.tensor([0, 0, 0]))
    assert o.shape == (1, 0, 2, 32) and torch.equal(final, state)
    o, final = chunk_kda(*make(0), output_final_state=True, cu_seqlens=torch.tensor([0]))
    assert o.shape == (1, 0, 2, 32) and final.shape == (0, 2, 16, 32)


@pytest.mark.parametrize("regime", REGIMES)
def test_regimes_with_the_gate_fused(regime):
    """KRN-1: from mild gates to ones that forget everything in a token, the gate computed inside and outside the kernel."""
    T, HV, K = 130, 4, 16
    inputs = make(T, H=2, HV=HV, K=K)
    raw, A_log, dt_bias = raw_gate(regime, T, HV, K, device=DEVICE)
    check([*inputs[:3], raw, inputs[4]], name="fused", use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
    check([*inputs[:3], torch_kda.kda_gate(raw, A_log, dt_bias), inputs[4]], name="given")


KRN_1 = {
    "-5 everywhere": lambda g: g.fill_(-5.0),
    "-1.5 everywhere": lambda g: g.fill_(-1.5),
    "-5 on even channels, 0 on odd": lambda g: g.zero_()[..., ::2].fill_(-5.0),
    "one channel forgets once": lambda g: g.fill_(-0.01)[:, 30, 0, 3].fill_(-20.0),
    "no decay": lambda g: g.zero_(),
    "all forgotten always": lambda g: g.fill_(-1e4),
}


@pytest.mark.parametrize("gate", KRN_1)
def test_gates_that_overflow_a_factored_form(gate):
    """KRN-1: exp(-cumsum) leaves fp32 at -88.7; only products of factors <= 1 may be formed."""
    inputs = make(64)
    KRN_1[gate](inputs[3])
    inputs[4].fill_(0.5)
    check(inputs, name=gate)


def test_one_huge_step_costs_its_neighbours_no_precision():
    """A difference of long cumulative sums loses 1e-3 of the mild decays that follow a step of -1e4; products do not."""
    inputs = make(130)
    inputs[3][:] *= 0.02
    inputs[3][0, 10, :, ::2] = -1e4
    inputs[3][0, 40] = -1e4
    inputs[3][0, 70:74, 0] = -1e4
    check(inputs, budget=2e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_beta_at_its_ends(beta):
    """beta = 0 writes nothing, beta = 1 replaces: with equal keys the inverse's powers cancel, unless it is built from blocks."""
    inputs = make(130)
    inputs[1][:] = inputs[1][:, :1]
    inputs[3].zero_()
    inputs[4].fill_(beta)
    state = random_state(1, 2, 16, 32)
    _, final = check(inputs, initial_state=state)
    assert beta or torch.equal(final, state)


@pytest.mark.parametrize(("K", "V"), [(16, 16), (32, 16), (16, 64), (24, 40), (100, 20), (144, 17)])
def test_head_sizes(K, V):
    """KRN-3: K and V differ, and neither needs to be a power of two; padding channels neither decay nor store anything."""
    HV = 2 if max(K, V) <= 64 else 1
    inputs = [poisoned(x, float("nan")) for x in make(67, HV=HV, K=K, V=V)]
    check(inputs, initial_state=random_state(1, HV, K, V))


def test_batch_and_scale():
    check(make(66, B=2, H=2, HV=4), initial_state=random_state(2, 4, 16, 32), scale=0.3)


def test_all_options_against_the_torch_twin():
    """Gate with a lower bound, sigmoid, norms, half-precision gate inputs, one call."""
    inputs = make(70, H=2, HV=4)
    raw, A_log, dt_bias = raw_gate("-9210", 70, 4, 16, device=DEVICE)
    inputs[3] = raw.to(torch.bfloat16)
    inputs[4] = (4 * inputs[4] - 2).half()
    check(inputs, name="bounded", use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-1.5,
          A_log=A_log, dt_bias=dt_bias, initial_state=random_state(1, 4, 16, 32).bfloat16())  # fmt: skip
    inputs = make(70)
    inputs[0], inputs[1] = 0.1 * inputs[0], 0.1 * inputs[1]
    check(inputs, name="keys as they come", use_qk_l2norm_in_kernel=False)


def test_state_is_not_transposed():
    """KRN-3: with K = V a transposed state has the right shape, and is wrong only from the second chunk on."""
    inputs, state = make(130, K=16, V=16), random_state(1, 2, 16, 16)
    o, _ = check(inputs, initial_state=state)
    other = chunk_kda(*inputs, initial_state=state.mT.contiguous(), use_qk_l2norm_in_kernel=True)[0]
    assert rel_l2(other, o) > 1e-2
    check(make(1, K=16, V=16), initial_state=state)


def test_prefill_then_single_steps():
    """KRN-3: 65 tokens, then ten calls of one token, against one loop over 75."""
    inputs = make(75, K=16, V=16)
    want, last = torch_kda.recurrent_kda(
        *(x.double() for x in inputs), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    state, outputs = None, []
    for a, b in [(0, 65), *((t, t + 1) for t in range(65, 75))]:
        part = [x[:, a:b] for x in inputs]
        o, state = chunk_kda(*part, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        outputs.append(o)
    assert_close("o", torch.cat(outputs, 1), want, EXACT)
    assert_close("state", state, last, EXACT)


def test_value_heads_read_their_key_head():
    """KRN-6: value head j reads key head j // (HV / H); tiled instead of repeated heads pass when the counts are equal."""
    unit = torch.eye(16, device=DEVICE)
    q = torch.stack([unit[0], unit[1]]).view(1, 1, 2, 16)
    v = torch.arange(1.0, 5.0, device=DEVICE).view(1, 1, 4, 1).expand(1, 1, 4, 16)
    g, beta = torch.zeros(1, 1, 4, 16, device=DEVICE), torch.ones(1, 1, 4, device=DEVICE)
    o, _ = chunk_kda(q, q, v, g, beta, scale=1.0)
    assert torch.equal(o, v)
    both = torch.stack([unit[0], unit[0]]).view(1, 1, 2, 16)
    o, _ = chunk_kda(both, q, v, g, beta, scale=1.0)
    assert torch.equal(o, v * torch.tensor([1, 1, 0, 0], device=DEVICE).view(1, 1, 4, 1))


def test_views_are_read_in_place_or_copied():
    """Slices of one fused projection keep their token stride; views of any other kind give the same bits through a copy."""
    inputs = make(70, H=2, HV=4, V=16)
    want = chunk_kda(*inputs, use_qk_l2norm_in_kernel=True)[0]
    packed = torch.cat([x.flatten(2) for x in inputs[:3]], -1)  # [1, T, 32 + 32 + 64]
    fused = [x.unflatten(2, (-1, 16)) for x in packed.split([32, 32, 64], -1)]
    assert kda_args._by_token(fused[2]).data_ptr() == fused[2].data_ptr()
    assert torch.equal(chunk_kda(*fused, *inputs[3:], use_qk_l2norm_in_kernel=True)[0], want)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert torch.equal(chunk_kda(*heads_first, use_qk_l2norm_in_kernel=True)[0], want)
    state = random_state(1, 4, 16, 16)
    turned = chunk_kda(*inputs, initial_state=state.mT.contiguous().mT)[0]
    assert torch.equal(turned, chunk_kda(*inputs, initial_state=state)[0])


def test_a_sequence_does_not_see_its_neighbours():
    """Bit for bit: alone, packed at another place, beside gates that would have changed a shared branch."""
    inputs, state = make(70), random_state(1, 2, 16, 32)
    alone = chunk_kda(*inputs, initial_state=state, output_final_state=True)
    before = make(67, seed=5)
    before[3][:] *= 1e3
    packed = [torch.cat([a, x], 1) for a, x in zip(before, inputs, strict=True)]
    o, final = chunk_kda(
        *packed, initial_state=torch.cat([random_state(1, 2, 16, 32, seed=9), state]), output_final_state=True,
        cu_seqlens=torch.tensor([0, 67, 137]),
    )  # fmt: skip
    assert torch.equal(o[:, 67:], alone[0]) and torch.equal(final[1], alone[1][0])


def test_a_chunk_does_not_see_later_chunks():
    """Bit for bit: outputs up to a chunk's end are those of a call that stops there, whatever comes later."""
    inputs = make(130)
    first = chunk_kda(*(x[:, :64] for x in inputs), output_final_state=True)
    inputs[3][:, 64:] *= 1e3
    o, _, kept = chunk_kda(*inputs, output_final_state=True, state_boundaries=[(0, 64)])
    assert torch.equal(o[:, :64], first[0]) and torch.equal(kept, first[1])


def test_states_at_boundaries():
    """In the order asked for, twice if asked twice, of several sequences; the final state is a boundary when T is one."""
    inputs, offsets = make(200), torch.tensor([0, 128, 128, 200])
    wanted = [(2, 64), (0, 128), (0, 64), (0, 128)]
    state = random_state(3, 2, 16, 32)
    o, final, kept = check(
        inputs, oracle=torch_kda.chunk_kda, initial_state=state, cu_seqlens=offsets, state_boundaries=wanted
    )
    assert torch.equal(kept[1], kept[3]) and torch.equal(kept[1], final[0])
    plain = chunk_kda(*inputs, initial_state=state, output_final_state=True, cu_seqlens=offsets, use_qk_l2norm_in_kernel=True)
    assert torch.equal(o, plain[0]) and torch.equal(final, plain[1])
    table = torch.tensor(sorted(wanted), dtype=torch.int32, device=DEVICE)
    ascending = chunk_kda(
        *inputs, initial_state=state, cu_seqlens=offsets, state_boundaries=table, use_qk_l2norm_in_kernel=True
    )[2]
    assert torch.equal(ascending, kept[[2, 1, 3, 0]])
    assert chunk_kda(*inputs, cu_seqlens=offsets, state_boundaries=[])[2].shape == (0, 2, 16, 32)


def test_a_table_row_that_is_no_boundary_gets_nan():
    """The host does not read the table: past the end, off the grid or out of order must not pass for a state."""
    table = [[0, 64], [0, 100], [0, 128], [0, 64], [0, 192], [1, 64]]
    table = torch.tensor(table, dtype=torch.int32, device=DEVICE)
    o, final, kept = check(make(130), oracle=torch_kda.chunk_kda, state_boundaries=[(0, 64), (0, 128)])
    other = chunk_kda(*make(130), output_final_state=True, use_qk_l2norm_in_kernel=True, state_boundaries=table)
    assert torch.equal(other[0], o) and torch.equal(other[1], final)
    assert torch.equal(other[2][[0, 2]], kept) and other[2][[1, 3, 4]].isnan().all()


def test_offsets_that_the_host_does_not_read(monkeypatch):
    """As with cu_seqlens on a GPU: a grid of at most T // 64 + N chunks, the same bits; offsets out of range touch nothing."""
    inputs, offsets = make(200), torch.tensor([0, 1, 1, 129, 200])
    want = chunk_kda(*inputs, output_final_state=True, cu_seqlens=offsets)
    monkeypatch.setattr(kda_args, "_check_offsets", lambda *_: None)
    got = chunk_kda(*inputs, output_final_state=True, cu_seqlens=offsets.to(DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    wild = torch.tensor([-70, 300, 0, 200, 10**6], device=DEVICE)
    # they clamp to 0:200, 200:0, 0:200 and 200:200, 8 chunks where the grid has 7: the third sequence loses its last chunk
    _, final = chunk_kda(*inputs, output_final_state=True, cu_seqlens=wild)
    _, whole, kept = chunk_kda(*inputs, output_final_state=True, state_boundaries=[(0, 192)])
    assert torch.equal(final, torch.stack([whole[0], torch.zeros_like(whole[0]), kept[0], torch.zeros_like(whole[0])]))


def test_difference_form_is_exact():
    inputs = make(66)
    inputs[3][:] *= 20
    inputs[3][0, 10] = -1e4
    check(inputs, intra="difference")


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # 2^126 overflows where a mask then drops it
def test_clamped_form_is_a_faithful_failure():
    """The exhibit (sglang#39971): equal to the torch twin's clamped form, far from the truth, right while decays stay small."""
    inputs = make(66)
    check(inputs, name="mild", intra="clamped", budget=2e-6)
    inputs[3][:] *= 20
    o, _ = check(inputs, name="twin", intra="clamped", oracle=torch_kda.chunk_kda, budget=4e-6)
    right, _ = chunk_kda(*inputs, use_qk_l2norm_in_kernel=True)
    assert rel_l2(o, right) > 5e-2
    inputs[1][:] *= 30  # a trained model's keys before their norm: 2^126 times one is no number
    check(inputs, name="twin, long keys", intra="clamped", oracle=torch_kda.chunk_kda, budget=4e-6)


@pytest.mark.parametrize(
    ("T", "HV", "form"), [(64 * 128, 2, "clamped"), (64 * 128 + 1, 2, "difference"), (64, 258, "difference")]
)
def test_sglang_heuristic_counts_chunks_times_heads(T, HV, form):
    """Clamped up to 256 of them, difference beyond; packed sequences count each its own chunks."""
    q, v = torch.zeros(1, T, 1, 16, device=DEVICE), torch.zeros(1, T, HV, 16, device=DEVICE)
    call = kda_args.check_call("op", q, q, v, v, v[..., 0], intra="sglang")
    assert call.intra == form
    if form == "clamped":
        offsets = torch.tensor([0, 1, T])
        call = kda_args.check_call("op", q, q, v, v, v[..., 0], cu_seqlens=offsets, intra="sglang")
        assert call.intra == "difference"


def test_repeats_are_bitwise_equal():
    """KRN-4."""
    inputs = make(130)
    o, final = chunk_kda(*inputs, output_final_state=True)
    for _ in range(2):
        again = chunk_kda(*inputs, output_final_state=True)
        assert torch.equal(again[0], o) and torch.equal(again[1], final)


@pytest.mark.skipif(DEVICE == "cuda", reason="about the interpreter, and this machine has a GPU")
def test_bf16_is_refused_under_the_interpreter():
    """KRN-5: its dot multiplies the bit patterns of bf16 tiles, values near 1e10 without a word."""
    with pytest.raises(ValueError, match="q: expected float32 under TRITON_INTERPRET"):
        chunk_kda(*make(16, dtype=torch.bfloat16))


def test_signature_is_the_twins():
    ours, theirs = (inspect.signature(f).parameters for f in (chunk_kda, torch_kda.chunk_kda))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in theirs.values()]


WRONG = {
    "k: expected shape": lambda a, o: a.__setitem__(1, a[1][..., :8]),
    "g: expected 4 dimensions": lambda a, o: a.__setitem__(3, a[3][0]),
    "g: expected shape": lambda a, o: a.__setitem__(3, a[3][..., :8]),
    "beta: expected shape": lambda a, o: a.__setitem__(4, a[4][..., None]),
    "v: expected value heads": lambda a, o: [a.__setitem__(i, a[i].repeat(1, 1, 3, 1)) for i in (0, 1)],
    "q: expected a head size of 16 to 256, got 8": lambda a, o: [a.__setitem__(i, a[i][..., :8]) for i in (0, 1, 3)],
    "v: expected a head size of 16 to 256, got 8": lambda a, o: a.__setitem__(2, a[2][..., :8]),
    "q: expected float32 or bfloat16": lambda a, o: a.__setitem__(0, a[0].double()),
    "v: expected q's dtype": lambda a, o: a.__setitem__(2, a[2].half()),
    "beta: expected float32, bfloat16 or float16": lambda a, o: a.__setitem__(4, a[4].double()),
    "v: expected no gradient": lambda a, o: a[2].requires_grad_(),
    "A_log: expected shape": lambda a, o: o.update(use_gate_in_kernel=True),
    "A_log, dt_bias, lower_bound: expected only with": lambda a, o: o.update(lower_bound=-1.0),
    "initial_state: expected shape": lambda a, o: o.update(initial_state=random_state(2, 2, 16, 32)),
    "intra: expected one of": lambda a, o: o.update(intra="exact"),
    "cu_seqlens: expected an int32 or int64": lambda a, o: o.update(cu_seqlens=torch.tensor([0.0, 70.0])),
    "cu_seqlens: expected 0 <= ... <= T = 70": lambda a, o: o.update(cu_seqlens=torch.tensor([0, 40, 30, 70])),
    "T = 70 without a decrease, got [0, 69]": lambda a, o: o.update(cu_seqlens=torch.tensor([0, 69])),
    "state_boundaries: expected (sequence < 1": lambda a, o: o.update(state_boundaries=[(1, 64)]),
    "within its length), got (0, 128)": lambda a, o: o.update(state_boundaries=[(0, 128)]),
    "got (0, 32)": lambda a, o: o.update(state_boundaries=[(0, 32)]),
    "state_boundaries: expected pairs, or an int32": lambda a, o: o.update(state_boundaries=torch.tensor([[0, 64]])),
}


@pytest.mark.parametrize("message", WRONG)
def test_refusals_name_argument_expected_and_got(message):
    inputs, options = make(70), {}
    WRONG[message](inputs, options)
    with pytest.raises(ValueError) as error:
        chunk_kda(*inputs, **options)
    assert str(error.value).startswith("chunk_kda: ") and message in str(error.value) and "got" in str(error.value)


def test_a_tier_asked_for_runs_or_says_why_not():
    with pytest.raises(ValueError, match="tier: expected None or one of"):
        chunk_kda_tier("fast", *make(16))
    with pytest.raises(ValueError, match="tier: expected bf16, K = V = 128"):
        chunk_kda_tier("hopper", *make(16))
    inputs = make(66)
    assert torch.equal(chunk_kda_tier("plain", *inputs)[0], chunk_kda(*inputs)[0])
