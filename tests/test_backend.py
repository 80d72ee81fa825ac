"""The backend switch: what was asked for runs, or an error says why not."""

import logging

import pytest
import torch
from helpers import randomise, rel_l2, tiny_config
from models import checkpoint

from berrylm_ref import LLM, BerryLM, SamplingParams
from berrylm_ref.backend import TORCH, get_backend, register_backend
from berrylm_ref.cache.batch import Batch, Caches, Sequence


def logits_of(model, splits, ids):
    """Logits of every token, the prompt cut into ``splits``, through caches."""
    caches = Caches.allocate(model.config, pages=3, page_size=16, slots=1, dtype=model.dtype, device=model.device)
    out, start = [], 0
    for length in splits:
        part = Sequence(ids[start : start + length], start, [1, 2, 3], slot=1, all_logits=True)
        out.append(model.run(Batch.build([part], caches))[0])
        start += length
    return torch.cat(out)


@torch.inference_mode()
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full-size comparison runs instead")
def test_the_whole_model_on_kernels_in_the_interpreter():
    """Every kernel in its place in the model: prefill, a chunk that continues it, decode steps; fp32 against fp64 torch."""
    config = tiny_config(linear_key_head_dim=16, linear_value_head_dim=32)
    model = randomise(BerryLM(config, backend="triton"), seed=5)
    oracle = randomise(BerryLM(config, dtype="float64", backend="torch"), seed=5)
    ids = torch.randint(config.vocab_size, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    want = logits_of(oracle, [30], ids)
    assert rel_l2(logits_of(model, [17, 11, 1, 1], ids), want) < 5e-6


def test_auto_is_logged_once_and_is_torch_on_a_cpu(caplog):
    folder = checkpoint()
    with caplog.at_level(logging.INFO, logger="berrylm_ref"):
        model = BerryLM.from_pretrained(folder)
    assert model.backend is TORCH and caplog.text.count("backend auto: torch on cpu") == 1


@pytest.mark.parametrize(
    "name,dtype,reason",
    [
        ("triton", torch.bfloat16, "expected float32 under TRITON_INTERPRET=1"),
        ("triton", torch.float64, "expected float32"),
        ("cuda", torch.float32, r"expected 'auto' or one of \[.*'torch', 'triton'.*\], got 'cuda'"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="these refusals are the interpreter's")
def test_what_cannot_run_is_refused(name, dtype, reason):
    with pytest.raises(ValueError, match=reason):
        get_backend(name, "cpu", dtype)


def test_a_registered_backend_is_used_and_its_refusal_is_heard():
    calls = []

    def make(device, dtype):
        if dtype == torch.float64:
            raise ValueError("backend 'counted': expected float32, got float64")
        calls.append((device.type, dtype))
        return TORCH

    register_backend("counted", make)
    llm = LLM(checkpoint(), backend="counted", max_total_tokens=64)
    assert calls == [("cpu", torch.float32)]
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=2))[0].token_ids) == 2
    with pytest.raises(ValueError, match="backend 'counted': expected float32"):
        LLM(checkpoint(), backend="counted", dtype="float64")
    with pytest.raises(ValueError, match="expected a new one, got 'counted'"):
        register_backend("counted", make)
