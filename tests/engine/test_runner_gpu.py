"""On a GPU: graphs, overlap and reuse change no token, and nothing that launches a step waits for the device.

Rows of a batch of another size may round differently, so bit-for-bit claims compare runs with the same sizes.
"""

import functools
from contextlib import contextmanager

import pytest
import torch
from helpers import randomise, rel_l2, tiny_config
from models import arrive

from berrylm_ref import LLM, BerryLM, SamplingParams

pytestmark = pytest.mark.gpu
VOCAB, MOST = 97, 9
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@functools.cache
def model(dtype):
    """Two layers, one of each kind, with the head sizes that the Hopper kernels take."""
    config = tiny_config(
        num_hidden_layers=2, hidden_size=256, vocab_size=VOCAB, attn_res_block_size=1, head_dim=64, linear_key_head_dim=128,
        linear_value_head_dim=128, kda_gate_bottleneck=64, num_experts=8, moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )  # fmt: skip
    return randomise(BerryLM(config, dtype=dtype, device="cuda", backend="triton"), seed=11).eval()


def llm(dtype, **options):
    defaults = {"max_running_requests": MOST, "max_total_tokens": 8192, "snapshot_bytes": 2**24}
    return LLM.from_model(model(dtype), **defaults | options)


def prompt(seed, length):
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts(count):
    return [prompt(seed, 5 + 23 * seed) for seed in range(count)]


def run(engine, asked, params=GREEDY):
    outs = engine.generate(asked, params)
    engine.engine.check()
    return [o.token_ids for o in outs]


@DTYPES
def test_graphs_change_no_token_and_no_probability(dtype):
    """Every batch size up to a bucket of its own: the captured step, replayed, is the step."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    graphs, eager = (llm(dtype, prefix_cache="off", cuda_graphs=on) for on in (True, False))
    assert all(static.graph is not None for static in graphs.engine.runner._static.values())
    for count in range(1, MOST + 1):
        got, want = (
            [(o.token_ids, [x.logprob for x in o.logprobs]) for o in one.generate(prompts(count), params)]
            for one in (graphs, eager)
        )
        assert got == want, f"batch of {count}"


@DTYPES
def test_overlap_changes_no_token(dtype):
    """Greedy and sampled, over graphs: tokens that the host has not seen feed the next step."""
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40, ignore_eos=True) for i in range(MOST)]
    overlap, plain = (llm(dtype, prefix_cache="off", overlap=on) for on in (True, False))
    for count in range(1, MOST + 1):
        assert run(overlap, prompts(count), params[:count]) == run(plain, prompts(count), params[:count]), f"batch of {count}"


def test_padding_and_packing_are_the_same_step():
    """fp32: a bucket with padded rows over scratch full of NaN (CACHE-2) against batches packed anew, at every size."""
    padded, packed = llm("float32", prefix_cache="off"), llm("float32", prefix_cache="off", decode_buckets=[], cuda_graphs=False)
    caches = padded.engine.cache.pool.caches
    for scratch in (caches.k_pages[:, 0], caches.v_pages[:, 0], caches.conv[:, 0], caches.state[:, 0]):
        scratch.fill_(torch.nan)
    for count in range(1, MOST + 1):
        assert run(padded, prompts(count)) == run(packed, prompts(count)), f"batch of {count}"
    assert caches.conv[:, 0].isnan().all() and caches.state[:, 0].isnan().all(), "padding wrote into the scratch slot"


@pytest.mark.parametrize("strategy,page_size", [("extra_buffer", 16), ("no_buffer", 1)])
def test_cached_and_uncached_are_equal(strategy, page_size):
    """fp32, with ends that nobody foresees: what a step too many left behind is the state of its tokens."""
    params = [SamplingParams(temperature=0, max_tokens=70, stop_token_ids=[s, s + 30, s + 60]) for s in range(MOST)]
    cold = llm("float32", prefix_cache="off", overlap=False)
    warm = llm("float32", prefix_cache=strategy, page_size=page_size)
    asked = prompts(MOST)
    for _ in range(3):
        outs, want = warm.generate(asked, params), run(cold, asked, params)
        warm.engine.check()
        assert [o.token_ids for o in outs] == want
        asked = [a + b for a, b in zip(asked, want, strict=True)]
    assert sum(o.cached_tokens > 0 for o in outs) >= MOST // 2


def test_bfloat16_hits_go_on_like_misses():
    """Attention over a continued prompt is another kernel and may round otherwise: up to a near-tie the tokens are equal."""
    asked = [prompt(7, 200)]
    (want,) = llm("bfloat16", prefix_cache="off").generate(
        asked, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
    )
    warm = llm("bfloat16")
    for cached in (0, 192):
        (out,) = warm.generate(asked, GREEDY)
        assert out.cached_tokens == cached
        at = next((i for i, (a, b) in enumerate(zip(out.token_ids, want.token_ids, strict=True)) if a != b), None)
        if at is not None:
            (_, first), (second, other) = want.logprobs[at].top
            assert out.token_ids[at] == second and first - other < 0.2, f"token {at} differs without a near-tie"


def test_prompts_in_a_room_are_as_near_as_others():
    """bf16, graphs of rooms over scratch full of NaN: as far from fp32 as prompts packed as they are; and on the same grid."""
    asked = [[prompt(30 + 10 * n + i, 40 + 61 * i) for i in range(n)] for n in (1, 2, 3, 4)]
    asked += [[prompt(5, 1000)], [prompt(6, 3000)]]
    one = SamplingParams(temperature=0, max_tokens=1)
    logits = {}
    for name, dtype, buckets in (("rooms", "bfloat16", None), ("packed", "bfloat16", []), ("fp32", "float32", None)):
        engine, found = llm(dtype, max_total_tokens=2**15, prefill_buckets=buckets), []
        runner = engine.engine.runner
        assert len(runner._rooms) == (10 if name == "rooms" else 0)
        assert all(static.graph is not None for static in runner._rooms.values())
        for pool in vars(runner.caches).values():
            pool[:, 0] = torch.nan
        forward = runner.forward
        runner.forward = lambda parts, forward=forward, found=found: found.append(forward(parts).clone()) or found[-1]
        for prompts_ in asked:
            engine.generate(prompts_, one)
            again = engine.generate(prompts_, one)
            assert all(o.cached_tokens == (len(p) - 1) // 64 * 64 for o, p in zip(again, prompts_, strict=True))
        engine.engine.check()
        logits[name] = torch.cat(found).float()
    found, floor = (rel_l2(logits[name], logits["fp32"]) for name in ("rooms", "packed"))
    print(f"from fp32: rooms {found:.2e}, packed as they are {floor:.2e}")
    assert found < 1.3 * floor


def test_prompts_that_arrive_beside_decodes_change_no_token():
    """bf16, greedy and sampled: both graphs of a step lie in one pool of memory, and the second must leave the first's logits."""
    asked = [prompt(60 + i, 20 + 97 * (i % 5)) for i in range(24)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=20 + 3 * (i % 7), ignore_eos=True) for i in range(24)]
    made = []
    for graphs in (True, False):
        engine = llm("bfloat16", cuda_graphs=graphs, overlap=graphs)
        requests = [r for p, how in zip(asked, params, strict=True) for r in engine.requests(p, how)]
        arrive(engine.engine, requests, steps=4)
        engine.engine.check()
        made.append([r.output_ids for r in requests])
    assert made[0] == made[1]


def test_rooms_in_graphs_are_refused_where_they_cannot_be():
    with pytest.raises(ValueError, match="prefill_buckets: expected none in CUDA graphs unless bfloat16, .*got torch.float32"):
        llm("float32", prefill_buckets=[256])


@contextmanager
def waits_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("temperature", [0, 1])
def test_launching_a_step_waits_for_nothing(kind, graphs, temperature):
    """One read of a length, one list made a tensor, and the host trails the device by a whole step."""
    one = llm("bfloat16", cuda_graphs=graphs)
    params = SamplingParams(temperature=temperature, seed=1, top_k=20, top_p=0.9, max_tokens=30, ignore_eos=True)
    run(one, prompts(5), params)  # kernels compile
    launch, checked = one.engine._launch, []

    def watched(parts):
        if all(part.end - part.start == 1 for part in parts) != (kind == "decode"):
            return launch(parts)
        checked.append(len(parts))
        with waits_are_errors():
            return launch(parts)

    one.engine._launch = watched
    run(one, [prompt(50 + i, 70 + 20 * i) for i in range(5)], params)
    assert checked
