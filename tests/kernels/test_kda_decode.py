"""The fused decode step against its torch twin: in the interpreter on a CPU, at the model's size on a GPU.

What no test here can show: two value heads share the conv window of their key head, so a program per value head that shifted
it in place would race, and the interpreter runs programs one after the other. The kernels have no such pair: the first launch
gives every channel to one program, the second one reads finished q and k and no window. Within a program several threads may
hold copies of an element; a barrier stands between the loads and the first store. ``test_repeats_are_bitwise_equal`` runs it
often enough to notice.
"""

import math

import pytest
import torch
from helpers import assert_close, rel_l2

from berrylm_kernels.kda_decode import kda_decode_step
from berrylm_ref.ops.kda_step import kda_decode_step as twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
POOLS = ("conv_pool", "state_pool")
MODEL = dict(H=16, HV=32, K=128, V=128, W=4)
# -8, -235, -563, -2359 and -9210 in log2 decay per 64 tokens
REGIMES = {"mild": (-9, -7), "medium": (-8, -3.5), "sharp": (-7, -2.6), "strong": (-6, -1), "very": (-5, 1)}
SHAPES = [  # H, HV, K, V, W
    (2, 4, 16, 32, 4),
    (2, 2, 16, 16, 2),
    (1, 3, 8, 12, 2),
    (1, 2, 24, 20, 3),
    (1, 1, 16, 16, 5),
    (1, 2, 256, 96, 4),  # two tiles of V, the second one half empty
]


def make(S, H, HV, K, V, W, n_slots=None, dtype=torch.float32, regime="sharp", seed=0, device=DEVICE):
    """Arguments of one step, with pools that are full of numbers everywhere and slots in a random order."""
    g = torch.Generator().manual_seed(seed)
    n_slots = n_slots or S + 3
    C, (lo, hi) = 2 * H * K + HV * V, REGIMES[regime]

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    low = dict(
        qkv=randn(S, C), z=randn(S, HV * V), raw_gate=0.5 * randn(S, HV * K), beta_logit=2 * randn(S, HV),
        conv_weight=0.5 * randn(C, W), norm_weight=1 + 0.2 * randn(V), conv_pool=randn(n_slots, C, W - 1),
    )  # fmt: skip
    x = {n: t.to(device, dtype) for n, t in low.items()}
    x["A_log"] = torch.linspace(0, math.log(72), HV, device=device)
    x["dt_bias"] = (torch.rand(HV * K, generator=g) * (hi - lo) + lo).to(device)
    x["state_pool"] = randn(n_slots, HV, K, V).to(device)
    x["slots"] = (torch.randperm(n_slots - 1, generator=g)[:S] + 1).to(device)
    return x


def next_token(x, seed):
    """The same sequences, other projections."""
    g = torch.Generator().manual_seed(seed)
    new = {n: torch.randn(x[n].shape, generator=g).to(x[n]) for n in ("qkv", "z", "raw_gate", "beta_logit")}
    new["raw_gate"] *= 0.5
    return {**x, **new}


def copy(x, **change):
    return {**x, **{n: x[n].clone() for n in POOLS}, **change}


def in_fp64(x):
    return {n: t.double() if t.is_floating_point() else t for n, t in copy(x).items()}


def run(step, x, H, **kw):
    """Returns the output; the pools of x move on."""
    return step(**x, key_heads=H, eps=EPS, **kw)


def check_fp32(x, H, **kw):
    ref = in_fp64(x)
    want, got = run(twin, ref, H, **kw), run(kda_decode_step, x, H, **kw)
    assert_close("output", got, want, 1e-6)
    assert_close("states", x["state_pool"], ref["state_pool"], 1e-6)
    assert torch.equal(x["conv_pool"], ref["conv_pool"].float()), "windows are moved, not computed"


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("H, HV, K, V, W", SHAPES)
def test_equals_the_twin(H, HV, K, V, W, slot_dtype):
    """GVA ratios 1, 2 and 3, K != V (KRN-3), sizes that are no power of two, conv kernels 2 to 5, permuted slots."""
    x = make(2, H, HV, K, V, W)
    check_fp32({**x, "slots": x["slots"].to(slot_dtype)}, H)


@pytest.mark.parametrize("lower_bound", [None, -2.0])
@pytest.mark.parametrize("regime", REGIMES)
def test_every_gate_regime(regime, lower_bound):
    """KRN-1: exact from nearly no decay to a decay that leaves nothing."""
    check_fp32(make(2, 2, 4, 16, 16, 4, regime=regime), 2, lower_bound=lower_bound)


def test_extreme_gates_and_betas():
    """g = 0 and g = -1e4 in one head, beta exactly 0 and 1: finite, and equal to the twin."""
    x = make(2, 1, 2, 16, 16, 4)
    x["A_log"].zero_(), x["dt_bias"].zero_()
    x["raw_gate"][:, ::2], x["raw_gate"][:, 1::2] = -1e4, 1e4
    x["beta_logit"][:, 0], x["beta_logit"][:, 1] = -math.inf, math.inf
    before = x["state_pool"][x["slots"], 0].clone()
    check_fp32(x, 1)
    after = x["state_pool"][x["slots"], 0]  # beta 0: nothing is written, channels are kept whole or forgotten whole
    assert torch.equal(after[:, ::2], before[:, ::2]) and (after[:, 1::2] == 0).all()


def test_softplus_keeps_its_digits():
    """log(1 + e^x) by a plain log loses e^x itself: at x = -14 a rate of 1e6 would be off by 6 %, here it must not show."""
    x = make(1, 1, 1, 64, 16, 2)
    x["A_log"].fill_(math.log(1e6))
    x["dt_bias"].fill_(-14.0)
    x["raw_gate"] *= 0.2
    check_fp32(x, 1)


def test_130_steps():
    """KRN-3, CACHE-1: 130 steps in a row against 130 of the twin in fp64; a transposed state must not pass."""
    x = make(1, 1, 1, 16, 16, 4, n_slots=2)
    ref = in_fp64(x)
    for t in range(130):
        x = next_token(x, t)
        ref.update({n: x[n].double() for n in ("qkv", "z", "raw_gate", "beta_logit")})
        if t == 129:
            wrong = run(kda_decode_step, copy(x, state_pool=x["state_pool"].transpose(2, 3).contiguous()), 1)
        got, want = run(kda_decode_step, x, 1), run(twin, ref, 1)
    assert_close("the 130th output", got, want, 1e-6)
    assert_close("state", x["state_pool"], ref["state_pool"], 1e-6)
    assert rel_l2(wrong, want) > 1e-2


def test_rounds_where_the_twin_rounds():
    """In fp16: conv output, KDA output, normalised value and its product with the weight are each rounded.

    (The interpreter cuts bf16 instead of rounding it, so bf16 itself is checked on a GPU.) A rounding too many or too few
    shows as 3e-4.
    """
    x = make(3, 2, 4, 16, 16, 4, dtype=torch.float16)
    ref = copy(x)
    want = run(twin, ref, 2)
    assert_close("output", run(kda_decode_step, x, 2), want, 1e-4)
    assert_close("states", x["state_pool"], ref["state_pool"], 1e-5)


def test_head_mapping_at_16_of_32_heads():
    """KRN-6: every value head on its own gives the same as GVA: q and k repeated explicitly, head j from j // 2."""
    H, HV, K, V, W = 16, 32, 4, 8, 2
    x = make(1, H, HV, K, V, W)
    q, k, v = (torch.arange(n, device=DEVICE) + o for n, o in ((H * K, 0), (H * K, H * K), (HV * V, 2 * H * K)))
    channels = torch.cat([c.view(H, K).repeat_interleave(2, 0).flatten() for c in (q, k)] + [v])
    wide = copy(
        x, qkv=x["qkv"][:, channels], conv_weight=x["conv_weight"][channels], conv_pool=x["conv_pool"][:, channels]
    )
    got, want = run(kda_decode_step, x, H), run(kda_decode_step, wide, HV)
    assert torch.equal(got, want) and torch.equal(x["state_pool"], wide["state_pool"])


@pytest.mark.parametrize("sentinel", [0, -1, 99])
def test_padding_is_zero_and_touches_nobody(sentinel):
    """CACHE-2: a bucket of 5 rows with 2 live ones, scratch full of NaN: live slots bit-identical to an unpadded run.

    A slot outside the pool is padding as well: the kernel cannot refuse it, but it must not fault or hit a neighbour.
    """
    x = make(5, 2, 4, 16, 16, 4, n_slots=7)
    for n in POOLS:
        x[n][0] = float("nan")
    x["qkv"][[0, 2, 4]] = float("nan")
    live, dead = [1, 3], [0, 2, 4]
    x["slots"] = torch.tensor([sentinel, 5, sentinel, 2, sentinel], device=DEVICE)
    rows = {n: x[n][live] for n in ("qkv", "z", "raw_gate", "beta_logit", "slots")}
    alone, before = copy(x, **rows), copy(x)
    got, want = run(kda_decode_step, x, 2), run(kda_decode_step, alone, 2)
    assert torch.equal(got[live], want) and (got[dead] == 0).all()
    for n in POOLS:
        assert torch.equal(x[n][1:], alone[n][1:])
        assert torch.equal(x[n][[1, 3, 4, 6]], before[n][[1, 3, 4, 6]]), f"{n}: a slot that no row names has changed"
        assert x[n][0].isnan().all(), f"{n}: scratch was written"


def test_a_row_depends_on_no_other_row():
    x = make(3, 2, 4, 16, 16, 4)
    for i in range(3):
        one = {n: x[n][i : i + 1] for n in ("qkv", "z", "raw_gate", "beta_logit", "slots")}
        alone, all_rows = copy(x, **one), copy(x)
        assert torch.equal(run(kda_decode_step, alone, 2)[0], run(kda_decode_step, all_rows, 2)[i])
        slot = x["slots"][i]
        assert all(torch.equal(alone[n][slot], all_rows[n][slot]) for n in POOLS)


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_views_between_poison(poison):
    """Projections as columns of one wide matrix, pools as one layer of many: the gaps are neither read nor written."""
    x = make(3, 2, 4, 16, 12, 4)
    names = ("qkv", "z", "raw_gate", "beta_logit")
    gap = x["qkv"].new_full((3, 5), poison)
    wide = torch.cat([t for n in names for t in (gap, x[n])] + [gap], 1)
    view, at = {}, 0
    for n in names:
        view[n] = wide[:, at + 5 : at + 5 + x[n].shape[1]]
        at += 5 + x[n].shape[1]
    backing = {n: torch.full((x[n].shape[0], 3, *x[n].shape[1:]), poison, device=DEVICE) for n in POOLS}
    for n in POOLS:
        backing[n][:, 1] = x[n]
        view[n] = backing[n][:, 1]
    got, want = run(kda_decode_step, {**x, **view}, 2), run(kda_decode_step, x, 2)
    assert torch.equal(got, want)
    for n in POOLS:
        assert torch.equal(view[n], x[n])
        around = backing[n][:, [0, 2]]
        assert (around.isnan() if math.isnan(poison) else around == poison).all()


def test_no_rows():
    x = make(1, 1, 1, 16, 16, 2)
    none = {n: x[n][:0] for n in ("qkv", "z", "raw_gate", "beta_logit", "slots")}
    assert run(kda_decode_step, {**x, **none}, 1).shape == (0, 16)


@pytest.mark.parametrize(
    "name, change",
    [
        ("qkv", lambda x: x[:, :-1]),
        ("qkv", lambda x: x.double()),
        ("qkv", lambda x: x.t().contiguous().t()),
        ("z", lambda x: x.bfloat16()),
        ("raw_gate", lambda x: x[:1]),
        ("beta_logit", lambda x: x[:, :-1]),
        ("conv_weight", lambda x: x[:, None]),
        ("conv_weight", lambda x: x.t().contiguous().t()),
        ("A_log", lambda x: x.bfloat16()),
        ("dt_bias", lambda x: x[:-1]),
        ("norm_weight", lambda x: x[:-1]),
        ("conv_pool", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        ("state_pool", lambda x: x.bfloat16()),
        ("state_pool", lambda x: x.transpose(2, 3)),
        ("slots", lambda x: x.float()),
        ("key_heads", lambda x: 3),
    ],
)
def test_refusals_name_the_argument(name, change):
    """CKPT-2: bf16 states and rates are refused. A view that would need a copy is refused: in place means in place."""
    x = {**make(2, 2, 4, 16, 16, 4), "key_heads": 2, "eps": EPS}
    before = {n: x[n].clone() for n in POOLS}
    with pytest.raises(ValueError, match=rf"^kda_decode_step: {name}: expected .*, got "):
        kda_decode_step(**{**x, name: change(x[name])})
    assert all(torch.equal(x[n], before[n]) for n in POOLS)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is there, so the interpreter is off")
def test_the_interpreter_refuses_bf16():
    """KRN-5: the interpreter cuts bf16 casts instead of rounding them, without a word."""
    with pytest.raises(ValueError, match="^kda_decode_step: qkv: expected .*, got torch.bfloat16"):
        run(kda_decode_step, make(1, 1, 1, 16, 16, 2, dtype=torch.bfloat16), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("S", [1, 5, 33])
@pytest.mark.parametrize("regime", REGIMES)
def test_bf16_at_the_models_size(regime, S):
    """The error against fp64 may exceed that of the same maths in torch, in bf16, by a tenth at most."""
    x = make(S, **MODEL, dtype=torch.bfloat16, regime=regime)
    ref, torch_bf16 = in_fp64(x), copy(x)
    want, budget = run(twin, ref, 16), run(twin, torch_bf16, 16)
    got = run(kda_decode_step, x, 16)
    assert_close("output", got, want, 1.1 * rel_l2(budget, want))
    assert_close("states", x["state_pool"], ref["state_pool"], 1.1 * rel_l2(torch_bf16["state_pool"], ref["state_pool"]))
    assert torch.equal(x["conv_pool"], torch_bf16["conv_pool"])


@pytest.mark.gpu
@pytest.mark.parametrize("S", [1, 40])
def test_fp32_at_the_models_size(S):
    check_fp32(make(S, **MODEL), 16)


@pytest.mark.gpu
@pytest.mark.parametrize("S", [1, 16, 64, 65])
def test_repeats_are_bitwise_equal(S):
    """KRN-4: 50 runs from the same pools, one distinct result, with and without overlapping launches (up to 64 rows)."""
    x = make(S, **MODEL, dtype=torch.bfloat16)
    first = copy(x)
    first_out = run(kda_decode_step, first, 16)
    for _ in range(49):
        again = copy(x)
        assert torch.equal(run(kda_decode_step, again, 16), first_out)
        assert all(torch.equal(again[n], first[n]) for n in POOLS)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_batch_size():
    """A request must not read differently because others came in: 70 rows at once, and each of a few alone."""
    x = make(70, **MODEL, dtype=torch.bfloat16)
    together = copy(x)
    out = run(kda_decode_step, together, 16)
    for i in (0, 33, 69):
        alone = copy(x, **{n: x[n][i : i + 1] for n in ("qkv", "z", "raw_gate", "beta_logit", "slots")})
        slot = x["slots"][i]
        assert torch.equal(run(kda_decode_step, alone, 16)[0], out[i])
        assert all(torch.equal(alone[n][slot], together[n][slot]) for n in POOLS)


@pytest.mark.gpu
def test_graph_replays_with_new_rows_and_slots():
    """One captured step, replayed over static buffers while rows come and go: equal to eager calls."""
    x = make(8, **MODEL, dtype=torch.bfloat16, n_slots=20)
    eager = copy(x)
    run(kda_decode_step, copy(x), 16)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    static = copy(x)
    with torch.cuda.graph(graph):
        out = run(kda_decode_step, static, 16)
    for t in range(5):
        fresh = next_token(x, t)
        slots = torch.randperm(19, generator=torch.Generator().manual_seed(t))[:8] + 1
        slots[8 - t :] = 0
        for n in ("qkv", "z", "raw_gate", "beta_logit"):
            static[n].copy_(fresh[n])
            eager[n] = fresh[n]
        static["slots"].copy_(slots)
        eager["slots"] = slots.to(DEVICE)
        graph.replay()
        assert torch.equal(out, run(kda_decode_step, eager, 16))
    assert all(torch.equal(static[n], eager[n]) for n in POOLS)


@pytest.mark.gpu
@pytest.mark.slow
def test_2000_steps_do_not_drift():
    """CKPT-2: 2,000 bf16 steps against fp64 on the same inputs: the error at the end is that of the beginning."""
    x = make(2, **MODEL, dtype=torch.bfloat16)
    ref = in_fp64(x)
    errors = []
    for t in range(2000):
        x = next_token(x, t)
        ref.update({n: x[n].double() for n in ("qkv", "z", "raw_gate", "beta_logit")})
        got, want = run(kda_decode_step, x, 16), run(twin, ref, 16)
        errors.append(rel_l2(got, want) if t < 100 or t >= 1900 else 0.0)
    early, late = sum(errors[:100]) / 100, sum(errors[1900:]) / 100
    print(f"mean error of the first 100 steps {early:.3e}, of the last 100 {late:.3e}")
    assert late <= 1.1 * early
    assert early <= 1e-2
