"""The Hopper tier of chunk_kda without a GPU: its Gluon kernels run by the emulator, against the token loop in fp64.

On a GPU the same tier is tested by test_kda_chunk_gpu.py; what it may use of a multiprocessor, by test_compile_sm90.py.
"""

import pytest
import torch
from gluon_emulator import Emulator
from helpers import assert_close, rel_l2
from kda_kernel_cases import REGIMES, bf16_chunk_kda, make_inputs, raw_gate

from berrylm_kernels import kda_front_hopper, kda_state_hopper
from berrylm_kernels.kda_args import KDACall, Scratch
from berrylm_ref.ops import kda as torch_kda

K = 128
MODULES = ("hopper_tiles", "kda_scores_hopper", "kda_front_hopper", "kda_state_hopper")
NORM = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}


@pytest.fixture
def emulator(monkeypatch):
    """The emulator, which the launchers of both kernels use instead of a GPU."""
    emulator = Emulator(*(f"berrylm_kernels.{module}" for module in MODULES))
    for module in (kda_front_hopper, kda_state_hopper):
        kernel = f"{module.__name__.rsplit('.')[-1]}_kernel"
        monkeypatch.setattr(module, kernel, emulator.launcher(kernel))
    return emulator


def hopper(
    inputs, cu_seqlens=None, initial_state=None, boundaries=None, l2norm=True, scale=None, gate=None, logit=False, chunks=None
):
    """The tier's two launches -> o [B, T, HV, V], final state, kept states. Scratch holds NaN before."""
    q, k, v, g, beta = inputs
    B, T = q.shape[:2]
    A_log, dt_bias, lower_bound = gate or (None, None, None)
    lengths = [T] * B if cu_seqlens is None else cu_seqlens.diff().tolist()
    table = None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32)
    x = KDACall(
        *(x.flatten(0, 1) for x in (q, k, v, g, beta)), K**-0.5 if scale is None else scale, l2norm, gate is not None, logit,
        A_log, dt_bias, lower_bound, initial_state, cu_seqlens, len(lengths), T,
        chunks or sum(-(-n // 64) for n in lengths), "dyadic", table, None,
    )  # fmt: skip
    scratch = Scratch(x)
    for name in ("W", "U", "QG", "KG", "AQ", "DD"):
        getattr(scratch, name).fill_(float("nan"))
    kda_front_hopper.front(x, scratch)
    o, final, kept = kda_state_hopper.state(x, scratch, True)
    return o.view(v.shape), final, kept


def make(T, regime="-563", **shape):
    inputs = make_inputs(T, K=K, V=K, dtype=torch.bfloat16, **{"H": 1, "HV": 2, **shape})
    raw, A_log, dt_bias = raw_gate(regime, T, inputs[2].shape[2], K)
    inputs[3] = torch_kda.kda_gate(raw, A_log, dt_bias).expand_as(inputs[3]).contiguous()
    return inputs


def oracle(inputs, **options):
    options = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}
    return torch_kda.chunk_kda(*(x.double() for x in inputs), **{**NORM, **options})


def check(got, want, budgets):
    for part, x, ref, budget in zip(("o", "final state", "kept states"), got, want, budgets, strict=False):
        if x is not None:
            assert torch.isfinite(x).all(), f"{part} is not finite"
            assert_close(part, x, ref, budget)


def bf16_budgets(inputs, want):
    """A tenth more than the same maths in torch with bf16 operands."""
    return [1.1 * rel_l2(x, ref) for x, ref in zip(bf16_chunk_kda(*inputs), want, strict=True)]


@pytest.mark.parametrize("regime", REGIMES)
def test_regimes(emulator, regime):
    """KRN-1 from mild gates, which all take the one-anchor tier, to gates that need the whole ladder."""
    inputs = make(150, regime)
    want = oracle(inputs)
    check(hopper(inputs), want, bf16_budgets(inputs, want))


@pytest.mark.parametrize("limit", [1, 2, 4, 8, 0])
def test_every_tier_and_the_whole_ladder(emulator, limit):
    """log2 decays of just under 100 in each half of a block of 64/limit tokens, and of 300 a token for limit 0."""
    inputs = make(64)
    inputs[3].fill_(-98.0 * limit / 32 * 0.693 if limit else -200.0)
    inputs[3][..., ::3] = 0
    want = oracle(inputs)
    check(hopper(inputs), want, bf16_budgets(inputs, want))


@pytest.mark.parametrize("gate, beta", [(0.0, 1.0), (0.0, 0.0), (-5.0, 1.0), (-1e4, 0.5)])
def test_extremes(emulator, gate, beta):
    inputs = make(70)
    inputs[3].fill_(gate)
    inputs[3][0, 20, :, 5] = -1e4
    inputs[4].fill_(beta)
    state = torch.randn(1, 2, K, K, generator=torch.Generator().manual_seed(1))
    check(hopper(inputs, initial_state=state), oracle(inputs, initial_state=state), (6e-3, 6e-3))


@pytest.mark.parametrize("T", [1, 2, 15, 17, 63, 64, 65, 129])
def test_lengths_off_the_chunk_grid(emulator, T):
    """KRN-2: rows past the end hold 1e30, and the emulator refuses any access beyond the last row of a tensor."""
    inputs = []
    for x in make(T, seed=T):
        big = torch.full((1, T + 70, *x.shape[2:]), 1e30, dtype=x.dtype)
        big[:, 3 : T + 3] = x
        inputs.append(big[:, 3 : T + 3])
    state = torch.randn(1, 2, K, K, generator=torch.Generator().manual_seed(T))
    check(hopper(inputs, initial_state=state), oracle(inputs, initial_state=state), (5e-3, 5e-3))


def test_packed_sequences_states_and_boundaries(emulator):
    """Empty sequences, tails, initial states, boundaries; then with the upper bound of chunks that unread offsets give."""
    inputs = make(230)
    offsets = torch.tensor([0, 0, 5, 5, 69, 70, 230])
    state = torch.randn(6, 2, K, K, generator=torch.Generator().manual_seed(2))
    pairs = [(3, 64), (5, 64), (5, 128)]
    got = hopper(inputs, offsets, state, pairs)
    check(got, oracle(inputs, cu_seqlens=offsets, initial_state=state, state_boundaries=pairs), (5e-3, 2e-3, 4e-3))
    assert torch.equal(got[1][0], state[0]) and torch.equal(got[1][2], state[2])
    again = hopper(inputs, offsets, state, pairs, chunks=230 // 64 + 6)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_a_table_row_that_is_no_boundary_gets_nan(emulator):
    rows = [(0, 64), (0, 100), (0, 128), (0, 64), (0, 192)]
    _, _, kept = hopper(make(130), boundaries=rows)
    _, _, want = hopper(make(130), boundaries=[(0, 64), (0, 128)])
    assert torch.equal(kept[[0, 2]], want) and kept[[1, 3, 4]].isnan().all()


def test_neighbours_and_later_chunks_change_no_bit(emulator):
    inputs, other = make(130), make(70, "-9210")
    alone = hopper(inputs)
    packed = [torch.cat([a, b], 1) for a, b in zip(other, inputs, strict=True)]
    o, final, _ = hopper(packed, torch.tensor([0, 70, 200]))
    assert torch.equal(o[:, 70:], alone[0]) and torch.equal(final[1:], alone[1])
    inputs[3][:, 64:] *= 100
    assert torch.equal(hopper(inputs)[0][:, :64], alone[0][:, :64])


def test_gate_and_sigmoid_fused(emulator):
    inputs = make(70)
    raw, A_log, dt_bias = raw_gate("-563", 70, 2, K)
    for x, bound in ((raw, None), (raw.bfloat16(), -3.0)):
        given = [*inputs[:3], torch_kda.kda_gate(x, A_log, dt_bias, bound), inputs[4].float().sigmoid()]
        want = oracle(given)
        got = hopper([*inputs[:3], x, inputs[4]], gate=(A_log, dt_bias, bound), logit=True)
        check(got, want, bf16_budgets(given, want))


def test_keys_as_they_come(emulator):
    """Keys of unequal norms: the inverse is taken of a similar matrix, and must come back with rows and columns rescaled."""
    inputs = make(70)
    size = torch.rand(1, 70, 1, 1, generator=torch.Generator().manual_seed(3))
    inputs[1] = (torch.nn.functional.normalize(inputs[1].float(), dim=-1) * size).bfloat16()
    got = hopper(inputs, l2norm=False, scale=0.3)
    check(got, oracle(inputs, use_qk_l2norm_in_kernel=False, scale=0.3), (5e-3, 4e-3))


def test_value_heads_read_their_own_key_head(emulator):
    """KRN-6: value head j reads key head j // 2, in a batch of two."""
    inputs = make(70, H=2, HV=4, B=2)
    repeated = [x.repeat_interleave(2, 2) for x in inputs[:2]] + inputs[2:]
    assert torch.equal(hopper(inputs)[0], hopper(repeated)[0])
    check(hopper(inputs), oracle(inputs), (5e-3, 4e-3))


@pytest.mark.parametrize("name, says", [("barrier", "barrier"), ("fence_async_shared", "fence")])
def test_the_emulator_sees_a_missing_barrier(emulator, name, says):
    """A race that a GPU would show once in a thousand runs is an error here, or the emulator is worth nothing."""
    emulator.space[name] = lambda: None
    with pytest.raises(AssertionError, match=says):
        hopper(make(64))


def test_the_emulator_sees_a_missing_wait(emulator):
    emulator.space["mbarrier"].wait = lambda *a, **k: None
    with pytest.raises(AssertionError, match="not waited for|nobody wrote"):
        hopper(make(64))


def test_the_emulator_sees_roles_that_wait_for_each_other(emulator):
    emulator.space["mbarrier"].arrive = lambda *a, **k: None
    with pytest.raises(AssertionError, match="every role waits"):
        hopper(make(300))
