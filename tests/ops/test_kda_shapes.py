"""KDA over every layout: lengths off the chunk grid, packed and empty sequences, splits, head counts, and what it refuses."""

import pytest
import torch
from helpers import assert_close, rel_l2
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_cases import SPLITS, kda_inputs, loop64, tokens

from berrylm_ref.ops.kda import chunk_kda, recurrent_kda

OPS = [recurrent_kda, chunk_kda]
FP32 = 1e-6
LENGTHS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500]


def poisoned(x, value=1e30):
    """The same tensor in the middle of memory full of ``value``: reading past an end shows at once."""
    room = torch.full((x.shape[0], x.shape[1] + 128, *x.shape[2:]), value, dtype=x.dtype)
    room[:, 64 : 64 + x.shape[1]] = x
    return room[:, 64 : 64 + x.shape[1]]


def packed(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", LENGTHS)
def test_krn_2_lengths_off_the_chunk_grid(T, op):
    """KRN-2: outputs were right and the final state garbage (1e27), because the tail's padding was treated as tokens."""
    for initial in (True, False):
        case = kda_inputs(T, seed=T)
        case["initial_state"] = case["initial_state"] if initial else None
        inputs = {n: x if n == "initial_state" else poisoned(x) for n, x in case.items()}
        o, state = op(**inputs, output_final_state=True)
        ref_o, ref_state = loop64(case)
        assert_close(f"o of {T}", o, ref_o, FP32)
        assert_close(f"state of {T}", state, ref_state, FP32)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [[0, 5, 0, 64, 1, 0], [0, 0], [], [130], [1] * 7, [64, 64, 2], [3, 200, 63, 65]])
def test_krn_2_packed_sequences_equal_each_alone(lengths, op):
    """KRN-2: a zero-length sequence aborted or hung; it returns its initial state bit for bit and has no rows."""
    case = kda_inputs(sum(lengths), sequences=len(lengths))
    o, state = op(**{n: x if n == "initial_state" else poisoned(x) for n, x in case.items()},
                  cu_seqlens=packed(lengths), output_final_state=True)  # fmt: skip
    assert o.shape == case["v"].shape and state.shape == case["initial_state"].shape
    begin = 0
    for n, length in enumerate(lengths):
        alone, first = tokens(case, begin, begin + length), case["initial_state"][n : n + 1]
        if length == 0:
            assert torch.equal(state[n : n + 1], first)
        else:
            ref_o, ref_state = loop64({**alone, "initial_state": first})
            assert_close(f"o of sequence {n}", o[:, begin : begin + length], ref_o, FP32)
            assert_close(f"state of sequence {n}", state[n : n + 1], ref_state, FP32)
        begin += length
    case["initial_state"] = None
    _, state = op(**case, cu_seqlens=packed(lengths), output_final_state=True)
    for n, length in enumerate(lengths):
        assert length > 0 or not state[n].any()


@settings(max_examples=25)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 16, 63, 64, 65, 100, 129]), min_size=1, max_size=5),
    ratio=st.sampled_from([1, 2, 3]),
    sizes=st.sampled_from([(8, 8), (4, 6), (16, 5), (1, 1)]),
    regime=st.sampled_from(["slow", "mild", "sharp", "hard"]),
    seed=st.integers(0, 1000),
)
def test_any_packing_equals_the_loop_in_fp64(lengths, ratio, sizes, regime, seed):
    (K, V), options = sizes, {"cu_seqlens": packed(lengths)}
    case = kda_inputs(sum(lengths), H=2, HV=2 * ratio, K=K, V=V, regime=regime, seed=seed, dtype=torch.float64,
                      sequences=len(lengths))  # fmt: skip
    wanted = [(n, end) for n, length in enumerate(lengths) for end in range(64, length + 1, 64)]
    ref_o, ref_state = loop64(case, **options)
    for intra in ("dyadic", "difference"):
        o, state, kept = chunk_kda(**case, **options, output_final_state=True, intra=intra, state_boundaries=wanted)
        assert_close("o", o, ref_o, 1e-13)
        assert_close("state", state, ref_state, 1e-13)
        assert kept.shape == (len(wanted), *state.shape[1:])
        for (n, end), one in zip(wanted, kept, strict=True):
            begin = options["cu_seqlens"][n].item()
            _, ref = loop64({**tokens(case, begin, begin + end), "initial_state": case["initial_state"][n : n + 1]})
            assert_close(f"state of {n} after {end}", one[None], ref, 1e-13)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_cache_1_every_split_continues_the_state(split, op):
    """CACHE-1: a continuation of more than one token silently started from zero; here each part starts from the last state."""
    case = kda_inputs(130, K=16, V=20)
    ref_o, ref_state = loop64(case)
    state, begin, out = case["initial_state"], 0, []
    for length in split:
        o, state = op(**tokens(case, begin, begin + length), initial_state=state, output_final_state=True)
        out.append(o)
        begin += length
    assert_close("o", torch.cat(out, 1), ref_o, FP32)
    assert_close("state", state, ref_state, FP32)


@pytest.mark.parametrize("op", OPS)
def test_a_batch_equals_its_sequences_alone(op):
    case = kda_inputs(70, B=3)
    o, state = op(**case, output_final_state=True)
    for b in range(3):
        alone, final = op(**{n: x[b : b + 1] for n, x in case.items()}, output_final_state=True)
        assert_close(f"o of {b}", o[b : b + 1], alone, FP32)
        assert_close(f"state of {b}", state[b : b + 1], final, FP32)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 70, "K": 16, "V": 32},
        {"T": 130, "K": 128, "V": 128, "HV": 2, "zero": True},
        {"T": 1, "K": 16, "V": 16},
    ],
    ids=["K != V", "K = V from zero", "one token, K = V"],
)
def test_krn_3_state_is_key_by_value(sizes, op):
    """KRN-3: a transposed state has the right shape when K = V, and everything after the first chunk is wrong.

    The last line tests the test: the transposed state must matter.
    """
    sizes = dict(sizes)
    zero = sizes.pop("zero", False)
    case = kda_inputs(**sizes)
    if zero:
        case["initial_state"].zero_()
    ref_o, ref_state = loop64(case)
    o, state = op(**case, output_final_state=True)
    assert_close("o", o, ref_o, FP32)
    assert_close("state", state, ref_state, FP32)
    if sizes["K"] == sizes["V"]:
        assert rel_l2(state.transpose(-1, -2), ref_state) > 0.1
        first = ref_state.float()
        a, b = (op(**tokens(case, 0, 1), initial_state=S)[0] for S in (first, first.transpose(-1, -2)))
        assert rel_l2(b, a) > 0.1


def test_krn_3_prefill_then_single_steps():
    """KRN-3: 65 tokens in chunks, then 10 single steps by the loop, is 75 tokens of the loop: both share one layout."""
    case = kda_inputs(75, K=16, V=16, regime="mild")
    ref_o, ref_state = loop64(case)
    o, state = chunk_kda(**tokens(case, 0, 65), initial_state=case["initial_state"], output_final_state=True)
    out = [o]
    for t in range(65, 75):
        o, state = recurrent_kda(**tokens(case, t, t + 1), initial_state=state, output_final_state=True)
        out.append(o)
    assert_close("o", torch.cat(out, 1), ref_o, FP32)
    assert_close("state", state, ref_state, FP32)


@pytest.mark.parametrize("op", OPS)
def test_krn_6_value_head_reads_key_head_j_over_ratio(op):
    """KRN-6: head j % H is right only when the head counts are equal."""
    eye = torch.eye(4)
    k = eye[:2].view(1, 1, 2, 4)  # key head 0 is e0, key head 1 is e1
    v = torch.arange(1.0, 5).view(1, 1, 4, 1).expand(1, 1, 4, 3)
    g, beta = torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4)
    o, _ = op(k, k, v, g, beta, scale=1.0)
    assert torch.equal(o, v)
    q = torch.stack([eye[0], eye[0]]).view(1, 1, 2, 4)
    o, _ = op(q, k, v, g, beta, scale=1.0)
    assert torch.equal(o[0, 0, :, 0], torch.tensor([1.0, 2.0, 0.0, 0.0]))


@pytest.mark.parametrize("op", OPS)
def test_krn_6_grouped_heads_equal_repeated_ones(op):
    case = kda_inputs(66, H=16, HV=32, K=8, V=8)
    o, state = op(**case, output_final_state=True)
    wide = {**case, **{n: case[n].repeat_interleave(2, dim=2) for n in ("q", "k")}}
    ref_o, ref_state = op(**wide, output_final_state=True)
    assert torch.equal(o, ref_o) and torch.equal(state, ref_state)
    tiled = {**case, **{n: case[n].repeat(1, 1, 2, 1) for n in ("q", "k")}}
    assert rel_l2(op(**tiled)[0], o) > 0.1  # the other mapping is visible


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_left_alone(op):
    case = kda_inputs(70)
    before = {n: x.clone() for n, x in case.items()}
    _, state = op(**case, output_final_state=True)
    state.zero_()
    _, kept = op(**{n: x[:, :0] if n != "initial_state" else x for n, x in case.items()}, output_final_state=True)
    kept.zero_()  # not even an empty call hands out the caller's memory
    assert all(torch.equal(before[n], x) for n, x in case.items())


@pytest.mark.parametrize("op", [recurrent_kda, *(pytest.param(intra, id=intra) for intra in ("dyadic", "difference"))])
def test_gradients(op):
    """Autograd through the op against finite differences, for every input and both results; two chunks for the chunk forms."""

    def run(q, k, v, g, beta, initial_state):
        case = dict(zip(names, (q, k, v, g, beta, initial_state), strict=True))
        if op is recurrent_kda:
            return recurrent_kda(**case, output_final_state=True)
        return chunk_kda(**case, output_final_state=True, intra=op)

    T = 3 if op is recurrent_kda else 66
    case = kda_inputs(T, H=1, HV=2, K=2, V=3, regime="mild", dtype=torch.float64)
    names = list(case)
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in case.values()], fast_mode=T > 3)


@pytest.mark.parametrize("regime", ["slow", "mild", "sharp", "hard"])
@pytest.mark.parametrize("intra", ["dyadic", "difference"])
def test_gradients_of_chunks_equal_those_of_the_loop(intra, regime):
    """In fp64, packed with an empty sequence, through the fused gate as the model calls it, at every decay."""
    lengths = [65, 0, 130]
    case = kda_inputs(sum(lengths), regime=regime, dtype=torch.float64, sequences=3)
    other = kda_inputs(sum(lengths), dtype=torch.float64, sequences=3, seed=1)
    weight_o, weight_S = other["v"], other["initial_state"]
    grads = []
    for op, options in ((recurrent_kda, {}), (chunk_kda, {"intra": intra})):
        leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
        o, state = op(**leaves, cu_seqlens=packed(lengths), output_final_state=True, **options)
        ((o * weight_o).sum() + (state * weight_S).sum()).backward()
        grads.append({n: x.grad for n, x in leaves.items()})
    for name in case:
        assert_close(f"d {name}", grads[1][name], grads[0][name], 1e-13)


@pytest.mark.parametrize("op", OPS)
def test_gradients_reach_the_gate_parameters(op):
    """A_log and dt_bias are trained through the fused gate; so are the raw gate and the logit of beta."""
    case = kda_inputs(5, H=1, HV=2, K=2, V=2, dtype=torch.float64)
    A_log, dt_bias = torch.tensor([0.1, 1.0]).double(), torch.linspace(-2, 1, 4).double()

    def run(raw, logit, A_log, dt_bias):
        return op(
            case["q"], case["k"], case["v"], raw, logit, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
        )[0]  # fmt: skip

    rng = torch.Generator().manual_seed(0)
    raw, logit = torch.randn(1, 5, 2, 2, generator=rng).double(), torch.randn(1, 5, 2, generator=rng).double()
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in (raw, logit, A_log, dt_bias)])


REFUSED = {
    "q of 3 dimensions": ({"q": torch.zeros(1, 5, 8)}, r"q: expected 4 dimensions .*got shape \(1, 5, 8\)"),
    "integer v": ({"v": torch.zeros(1, 5, 4, 12, dtype=torch.long)}, "v: expected a floating dtype, got torch.int64"),
    "k of another length": ({"k": torch.zeros(1, 4, 2, 8)}, r"k: expected shape \(1, 5, 2, 8\), got shape \(1, 4, 2, 8\)"),
    "v of another length": ({"v": torch.zeros(1, 4, 4, 12)}, r"v: expected shape \(1, 5, 4, 12\)"),
    "g per key head": ({"g": torch.zeros(1, 5, 2, 8)}, r"g: expected shape \(1, 5, 4, 8\)"),
    "g per head only": ({"g": torch.zeros(1, 5, 4)}, "g: expected 4 dimensions"),
    "beta per key head": ({"beta": torch.zeros(1, 5, 2)}, r"beta: expected shape \(1, 5, 4\)"),
    "heads that do not divide": (
        {"q": torch.zeros(1, 5, 3, 8), "k": torch.zeros(1, 5, 3, 8)},
        "v: expected value heads to be a multiple of the 3 key heads, got 4",
    ),
    "transposed state": ({"initial_state": torch.zeros(1, 4, 12, 8)}, r"initial_state: expected shape \(1, 4, 8, 12\)"),
    "states of another batch": ({"initial_state": torch.zeros(2, 4, 8, 12)}, r"initial_state: expected shape \(1, 4, 8, 12\)"),
    "offsets past the end": ({"cu_seqlens": torch.tensor([0, 6])}, r"cu_seqlens: expected 0 <= .* T = 5 .*got \[0, 6\]"),
    "offsets short of it": ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens: expected 0 <= .* T = 5"),
    "offsets not from 0": ({"cu_seqlens": torch.tensor([1, 5])}, "cu_seqlens: expected 0 <= "),
    "offsets that decrease": ({"cu_seqlens": torch.tensor([0, 4, 2, 5])}, "without a decrease"),
    "float offsets": ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens: expected an integer tensor"),
    "no offsets": ({"cu_seqlens": torch.zeros(0, dtype=torch.long)}, "cu_seqlens: expected an integer tensor"),
    "gate without its rates": ({"use_gate_in_kernel": True}, r"A_log: expected shape \(4,\), got None"),
    "flat rates": ({"use_gate_in_kernel": True, "A_log": torch.zeros(32)}, r"A_log: expected shape \(4,\)"),
    "bias by head": (
        {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(4, 8)},
        r"dt_bias: expected shape \(32,\), got shape \(4, 8\)",
    ),
    "rates without the gate": ({"A_log": torch.zeros(4)}, "expected only with use_gate_in_kernel=True"),
    "bound without the gate": ({"lower_bound": -5.0}, "expected only with use_gate_in_kernel=True"),
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_refused(change, message, op):
    """An error names the op, the argument, what was expected and what came."""
    case = kda_inputs(5)
    if "initial_state" not in change:
        case.pop("initial_state")
    with pytest.raises(ValueError, match=f"^{op.__name__}: .*{message}"):
        op(**{**case, **change})


def test_refused_batch_with_offsets():
    case = kda_inputs(5, B=2)
    with pytest.raises(ValueError, match="q: expected batch size 1 with cu_seqlens, got 2"):
        chunk_kda(**case, cu_seqlens=torch.tensor([0, 5]))


def test_boundaries_as_a_tensor_are_those_pairs():
    """A batch makes the table once for all layers, on the device."""
    case, pairs = kda_inputs(200), [(0, 128), (0, 64)]
    want = chunk_kda(**case, state_boundaries=pairs)[2]
    assert torch.equal(chunk_kda(**case, state_boundaries=torch.tensor(pairs, dtype=torch.int32))[2], want)
    assert chunk_kda(**case, state_boundaries=torch.empty(0, 2, dtype=torch.int32))[2].shape == (0, *want.shape[1:])
    message = r"chunk_kda: state_boundaries: expected pairs, or an int32 tensor \[M, 2\], got \(2, 2\) torch.int64"
    with pytest.raises(ValueError, match=message):
        chunk_kda(**case, state_boundaries=torch.tensor(pairs))


@pytest.mark.parametrize("boundary", [(0, 0), (0, 63), (0, 128), (1, 64), (-1, 64), (0, -64)])
def test_refused_boundaries(boundary):
    """A state between chunks, past the sequence, or of a sequence that isn't there."""
    with pytest.raises(ValueError, match=r"chunk_kda: state_boundaries: expected .*got \(-?\d+, -?\d+\) with lengths \[100\]"):
        chunk_kda(**kda_inputs(100), state_boundaries=[(0, 64), boundary])


def test_refused_intra():
    with pytest.raises(ValueError, match="chunk_kda: intra: expected one of .*'dyadic'.*got 'fused'"):
        chunk_kda(**kda_inputs(5), intra="fused")
