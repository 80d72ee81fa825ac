"""The decode step in plain torch: it must continue what the layer computes over whole sequences, and own its slots alone."""

import pytest
import torch
from helpers import assert_close, rel_l2
from torch.nn.functional import conv1d, pad, silu

from berrylm_ref.ops.conv import causal_conv
from berrylm_ref.ops.kda import chunk_kda, recurrent_kda
from berrylm_ref.ops.kda_step import kda_decode_step
from berrylm_ref.ops.norm import gated_rms_norm

EPS = 1e-6
SHAPES = [  # H, HV, K, V, W
    (2, 2, 8, 12, 2),
    (2, 4, 16, 16, 4),
    (1, 3, 12, 8, 3),
]


def make(S, T, H, HV, K, V, W, n_slots, dtype=torch.float64, seed=0):
    """Weights, S x T tokens of projections, and pools full of other requests' numbers."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape, to=dtype):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(to)

    C = 2 * H * K + HV * V
    weights = dict(
        conv_weight=randn(C, W),
        A_log=torch.linspace(0, 4.28, HV, dtype=wide),
        dt_bias=(torch.rand(HV * K, generator=g, dtype=torch.float64) * 6 - 6).to(wide),
        norm_weight=1 + 0.2 * randn(V),
    )
    tokens = dict(
        qkv=randn(S, T, C), z=randn(S, T, HV * V), raw_gate=randn(S, T, HV * K), beta_logit=2 * randn(S, T, HV)
    )
    pools = dict(conv_pool=randn(n_slots, C, W - 1), state_pool=randn(n_slots, HV, K, V, to=wide))
    return weights, tokens, pools


def steps(weights, tokens, pools, slots, H, **kw):
    """Feed every token by single steps: [S, T, HV * V]."""
    out = [
        kda_decode_step(**{n: x[:, t] for n, x in tokens.items()}, **weights, **pools, slots=slots, key_heads=H, eps=EPS, **kw)
        for t in range(tokens["z"].shape[1])
    ]  # fmt: skip
    return torch.stack(out, 1)


def heads_of(mixed, tokens, H, HV, K, V):
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    return (
        q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)),
        tokens["raw_gate"].unflatten(-1, (HV, K)), tokens["beta_logit"],
    )  # fmt: skip


def fused(weights, **kw):
    return dict(
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True,
        A_log=weights["A_log"], dt_bias=weights["dt_bias"], **kw,
    )  # fmt: skip


@pytest.mark.parametrize("lower_bound", [None, -0.5])
@pytest.mark.parametrize("H, HV, K, V, W", SHAPES)
def test_steps_equal_the_whole_sequence(H, HV, K, V, W, lower_bound):
    """CACHE-1: 20 tokens one at a time against one conv, one token loop and one norm over all of them, in fp64."""
    S, T = 3, 20
    weights, tokens, pools = make(S, T, H, HV, K, V, W, n_slots=6)
    slots = torch.tensor([4, 1, 5])
    before = {n: x[slots].clone() for n, x in pools.items()}

    x = torch.cat([before["conv_pool"], tokens["qkv"].transpose(1, 2)], -1)  # [S, C, W - 1 + T]
    mixed = silu(conv1d(x, weights["conv_weight"][:, None], groups=x.shape[1])).transpose(1, 2)
    q, k, v, raw, beta = heads_of(mixed, tokens, H, HV, K, V)
    o, state = recurrent_kda(
        q, k, v, raw, beta, initial_state=before["state_pool"], **fused(weights, lower_bound=lower_bound)
    )
    want = gated_rms_norm(o, tokens["z"].unflatten(-1, (HV, V)), weights["norm_weight"], EPS).flatten(-2)

    got = steps(weights, tokens, pools, slots, H, lower_bound=lower_bound)
    assert_close("outputs", got, want, 1e-15)
    assert_close("states", pools["state_pool"][slots], state, 1e-15)
    assert torch.equal(pools["conv_pool"][slots], x[..., T:]), "the window must hold the last W - 1 raw inputs"


def test_130_steps_equal_the_chunk_form():
    """KRN-3, CACHE-1: 130 single steps in fp32 from an empty slot against chunk_kda, two chunk boundaries inside."""
    H, HV, K, V, W = 2, 4, 16, 8, 4
    weights, tokens, pools = make(1, 130, H, HV, K, V, W, n_slots=2, dtype=torch.float32)
    slots = torch.tensor([1])
    pools["conv_pool"].zero_(), pools["state_pool"].zero_()
    mixed, windows = causal_conv(tokens["qkv"][0], weights["conv_weight"], pools["conv_pool"][1:], torch.tensor([0, 130]))
    q, k, v, raw, beta = heads_of(mixed[None], tokens, H, HV, K, V)
    o, state = chunk_kda(q, k, v, raw, beta, **fused(weights))
    want = gated_rms_norm(o, tokens["z"].unflatten(-1, (HV, V)), weights["norm_weight"], EPS).flatten(-2)
    got = steps(weights, tokens, pools, slots, H)
    assert_close("outputs", got, want, 1e-6)
    assert_close("state", pools["state_pool"][slots], state, 1e-6)
    assert torch.equal(pools["conv_pool"][slots], windows)


def test_decode_continues_a_prefill():
    """KRN-3 (d): 65 tokens by the chunk form, 10 by steps, against a token loop of 75; a transposed state must show."""
    H, HV, K, V, W = 1, 2, 16, 16, 4
    weights, tokens, pools = make(1, 75, H, HV, K, V, W, n_slots=2)
    pools["conv_pool"].zero_(), pools["state_pool"].zero_()
    slots = torch.tensor([1])
    loop = steps(weights, tokens, {n: x.clone() for n, x in pools.items()}, slots, H)

    head, tail = ({n: x[:, s] for n, x in tokens.items()} for s in (slice(0, 65), slice(65, 75)))
    mixed, windows = causal_conv(head["qkv"][0], weights["conv_weight"], pools["conv_pool"][1:], torch.tensor([0, 65]))
    _, state = chunk_kda(*heads_of(mixed[None], head, H, HV, K, V), **fused(weights))
    pools["conv_pool"][1], pools["state_pool"][1] = windows[0], state[0]
    wrong = {"conv_pool": pools["conv_pool"].clone(), "state_pool": pools["state_pool"].transpose(-1, -2).clone()}
    assert_close("the last 10 tokens", steps(weights, tail, pools, slots, H), loop[:, 65:], 2e-15)
    assert rel_l2(steps(weights, tail, wrong, slots, H), loop[:, 65:]) > 1e-2


def test_padding_is_zero_and_touches_nobody():
    """CACHE-2: rows that point at a NaN-poisoned scratch slot leave live slots bit-identical to an unpadded run."""
    H, HV, K, V, W = 2, 4, 8, 8, 4
    weights, tokens, pools = make(5, 1, H, HV, K, V, W, n_slots=6, dtype=torch.float32)
    for x in pools.values():
        x[0] = float("nan")
    alone = {n: x.clone() for n, x in pools.items()}
    before = {n: x.clone() for n, x in pools.items()}
    live = torch.tensor([1, 3])
    padded = torch.tensor([0, 5, 0, 2, 0])
    tokens["qkv"][[0, 2, 4]] = float("nan")  # what a captured batch left behind
    got = steps(weights, tokens, pools, padded, H)
    want = steps(weights, {n: x[live] for n, x in tokens.items()}, alone, padded[live], H)
    assert torch.equal(got[live], want)
    assert (got[[0, 2, 4]] == 0).all()
    for name, pool in pools.items():
        assert torch.equal(pool[1:], alone[name][1:])
        assert torch.equal(pool[[1, 3, 4]], before[name][[1, 3, 4]]), f"{name}: a slot that no row names has changed"
        assert pool[0].isnan().all(), f"{name}: scratch was written"


def test_only_padding():
    weights, tokens, pools = make(2, 1, 1, 1, 4, 4, 2, n_slots=2)
    before = {n: x.clone() for n, x in pools.items()}
    assert (steps(weights, tokens, pools, torch.tensor([0, 0]), 1) == 0).all()
    assert all(torch.equal(pools[n], before[n]) for n in pools)
    empty = {n: x[:0] for n, x in tokens.items()}
    assert steps(weights, empty, pools, torch.tensor([], dtype=torch.int64), 1).shape == (0, 1, 4)


def test_head_mapping():
    """KRN-6: value head j writes under the key of head j // (HV / H); a tiled mapping (j % H) swaps heads 1 and 2."""
    H, HV, K, V = 2, 4, 4, 3
    C = 2 * H * K + HV * V
    qkv = torch.zeros(1, C, dtype=torch.float64)
    k, v = qkv[0, H * K : 2 * H * K].view(H, K), qkv[0, 2 * H * K :]
    k[0, 0], k[1, 1] = 40.0, 40.0  # key head 0 is e0, key head 1 is e1, once they are normalised
    v.fill_(40.0)
    conv_weight = pad(torch.ones(C, 1), (1, 0)).double()  # the newest tap alone
    pools = dict(conv_pool=torch.zeros(2, C, 1).double(), state_pool=torch.zeros(2, HV, K, V).double())
    kda_decode_step(
        qkv, torch.ones(1, HV * V).double(), torch.zeros(1, HV * K).double(), torch.zeros(1, HV).double(), conv_weight,
        torch.zeros(HV).double(), torch.zeros(HV * K).double(), torch.ones(V).double(),
        **pools, slots=torch.tensor([1]), key_heads=H, eps=EPS,
    )  # fmt: skip
    written = pools["state_pool"][1].abs().sum(-1) > 1  # [HV, K]
    assert written.int().tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]


def fp32_case():
    weights, tokens, pools = make(2, 1, 2, 4, 8, 4, 4, n_slots=3, dtype=torch.float32)
    return {**{n: x[:, 0] for n, x in tokens.items()}, **weights, **pools, "slots": torch.tensor([1, 2])}


@pytest.mark.parametrize(
    "name, change",
    [
        ("qkv", lambda x: x[:, :-1]),
        ("z", lambda x: x[:1]),
        ("raw_gate", lambda x: x.bfloat16()),
        ("beta_logit", lambda x: x[:, :-1]),
        ("conv_weight", lambda x: x[:, :1]),
        ("A_log", lambda x: x.bfloat16()),
        ("dt_bias", lambda x: x.view(4, 8)),
        ("norm_weight", lambda x: x[:-1]),
        ("conv_pool", lambda x: x[..., :-1]),
        ("state_pool", lambda x: x.bfloat16()),
        ("state_pool", lambda x: x[0]),
        ("slots", lambda x: x.float()),
        ("slots", lambda x: torch.tensor([1, 1])),
        ("slots", lambda x: torch.tensor([1, 3])),
        ("slots", lambda x: torch.tensor([-1, 1])),
        ("key_heads", lambda x: 3),
    ],
)
def test_refusals_name_the_argument(name, change):
    """CKPT-2 among them: a bf16 state pool or A_log is refused, not rounded along."""
    case = {**fp32_case(), "key_heads": 2, "eps": EPS}
    before = {n: case[n].clone() for n in ("conv_pool", "state_pool")}
    with pytest.raises(ValueError, match=rf"^kda_decode_step: {name}: expected .*, got "):
        kda_decode_step(**{**case, name: change(case[name])})
    assert all(torch.equal(case[n], x) for n, x in before.items()), "a refusal must come before anything is written"
