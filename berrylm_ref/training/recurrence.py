"""The recurrence of training: the torch chunk form, or flash-linear-attention's kernels with few tuning candidates.

flash-linear-attention tunes every kernel over 6 to 36 configurations, which costs minutes on a fresh machine. Here each keeps two
or three that suit heads of 64, and separate processes compile them side by side into Triton's cache before the first step. Its
non-safe gate is used: the safe one clamps, and clamping is the failure that the checkpoint has to show.
"""

import importlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..config import BerryLMConfig
from ..ops.kda import chunk_kda

# kernel -> the configurations kept: (keyword arguments, warps, stages; None is any)
CANDIDATES = {
    "fla.ops.utils.cumsum.chunk_local_cumsum_vector_kernel": [({"BS": 64}, 4, None)],
    "fla.ops.kda.chunk_intra_token_parallel.chunk_kda_fwd_kernel_intra_token_parallel": [
        ({"BH": 4}, 1, None), ({"BH": 4}, 2, None), ({"BH": 2}, 1, None),
    ],
    "fla.ops.kda.chunk_intra.chunk_kda_fwd_kernel_inter_solve_fused": [
        ({"BK": 64}, 2, None), ({"BK": 64}, 4, None), ({"BK": 32}, 2, None),
    ],
    "fla.ops.kda.wy_fast.recompute_w_u_fwd_kda_kernel": [({}, 4, 2), ({}, 2, 2), ({}, 4, 3)],
    "fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64": [
        ({"BV": 32}, 4, 2), ({"BV": 32}, 2, 2), ({"BV": 64}, 4, 2),
    ],
    "fla.ops.gla.chunk.chunk_gla_fwd_kernel_o": [
        ({"BK": 64, "BV": 64}, 4, 2), ({"BK": 64, "BV": 64}, 2, 2), ({"BK": 64, "BV": 64}, 4, 3),
    ],
    "fla.ops.kda.chunk_bwd.chunk_kda_bwd_kernel_dAv": [({}, 4, 2), ({}, 2, 2), ({}, 4, 3)],
    "fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": [
        ({"BV": 32}, 4, 2), ({"BV": 32}, 2, 2), ({"BV": 64}, 4, 2),
    ],
    "fla.ops.kda.chunk_bwd.chunk_kda_bwd_kernel_wy_dqkg_fused": [
        ({"BK": 64, "BV": 64}, 4, 2), ({"BK": 32, "BV": 64}, 2, 2), ({"BK": 64, "BV": 64}, 2, 2),
    ],
    "fla.ops.kda.chunk_intra.chunk_kda_bwd_kernel_intra": [({}, 2, 2), ({}, 1, 2), ({}, 4, 2)],
}  # fmt: skip
SHARDS = 3  # processes that compile; no kernel keeps more configurations
COMPILE_SECONDS = 90  # after which whatever is missing is compiled in the main process
# rel-L2 of bf16 kernels against fp32: outputs are at 5e-3; the decay's gradient is a difference of large terms. A wrong or
# missing term is above 0.3.
BUDGET = {"o": 0.03, "q": 0.05, "k": 0.05, "v": 0.05, "beta": 0.08, "g": 0.2}


def torch_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The chunk form of ``ops.kda``, differentiated by autograd."""
    return chunk_kda(q, k, v, g, beta)[0]


def fla_recurrence() -> Callable[..., Tensor]:
    """``fla.ops.kda.chunk_kda`` on [B, T, ...]: q, k, v in bf16, g and beta in fp32, value heads read their key head natively."""
    try:
        from fla.ops.kda import chunk_kda as kernel
    except ImportError as error:
        raise ValueError(f"train-nano: kernels: expected flash-linear-attention to be importable, got {error}") from error

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        # nothing is recomputed in the backward pass: at this size the memory is small
        return kernel(q, k, v, g, beta, scale=q.shape[-1] ** -0.5, disable_recompute=True)[0]

    return run


def keep_candidates(only: int | None = None) -> None:
    """Cut the tuners' lists down to ``CANDIDATES``, or to the ``only``-th of each (the last one where there are fewer)."""
    from triton.runtime.autotuner import Autotuner

    for path, wanted in CANDIDATES.items():
        module, _, name = path.rpartition(".")
        tuner = getattr(importlib.import_module(module), name)
        while not isinstance(tuner, Autotuner):  # heuristics stand around it
            tuner = tuner.fn
        kept = [c for want in wanted if (c := find_config(tuner.configs, *want)) is not None]
        if not kept:  # another GPU's list
            kept = tuner.configs[:SHARDS]
            print(f"{name}: none of the candidates is in its list here; its first {len(kept)} are tried", flush=True)
        tuner.configs = kept if only is None else [kept[min(only, len(kept) - 1)]]


def find_config(configs: list, kwargs: dict, warps: int, stages: int | None):
    """The first configuration with these values, or None."""
    for c in configs:
        if c.kwargs == kwargs and c.num_warps == warps and stages in (None, c.num_stages):
            return c
    return None


def start_compiling(config: BerryLMConfig, shapes: list[tuple[int, int]]) -> list[subprocess.Popen]:
    """A process for each shard of the candidates, running the kernels once, forward and backward, in every shape."""
    c = config
    heads = (c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    numbers = [str(n) for n in (*heads, *(n for shape in shapes for n in shape))]
    command = [sys.executable, "-m", "berrylm_ref.training.recurrence"]
    return [subprocess.Popen([*command, str(i), *numbers], env={**os.environ, "OMP_NUM_THREADS": "1"}) for i in range(SHARDS)]


def finish_compiling(processes: list[subprocess.Popen]) -> None:
    """Wait for ``start_compiling``. A shard that failed costs time, not the run: the main process compiles what it lacks."""
    end = time.monotonic() + COMPILE_SECONDS
    for i, process in enumerate(processes):
        try:
            status = process.wait(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = f"nothing after {COMPILE_SECONDS} s"
        if status:
            print(f"compiling shard {i} ended with {status}; its kernels will be compiled on first use", flush=True)


def sample(shape: tuple[int, int], heads: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs as sharp as those of the checkpoint: rates up to 72, dt_bias from -7 to 0."""
    (B, T), (H, HV, K, V) = shape, heads
    r = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=r)

    rate = torch.linspace(0, math.log(72), HV, device=device).exp()[:, None]
    bias = -7 + 7 * torch.rand(HV, K, device=device, generator=r)
    q, k = (torch.nn.functional.normalize(normal(B, T, H, K), dim=-1).to(dtype) for _ in "qk")
    g = -rate * torch.nn.functional.softplus(0.5 * normal(B, T, HV, K) + bias)
    beta = normal(B, T, HV).sigmoid()
    return {"q": q, "k": k, "v": normal(B, T, HV, V).to(dtype), "g": g, "beta": beta}


def run_both_ways(recurrence: Callable[..., Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output and the gradient of every input, for a fixed direction."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    o = recurrence(**leaves)
    direction = torch.sin(torch.arange(o.numel(), device=o.device, dtype=torch.float32) * 0.7).view_as(o)
    o.backward(direction.to(o.dtype))
    return {"o": o.detach(), **{name: x.grad for name, x in leaves.items()}}


def check_recurrence(
    recurrence: Callable[..., Tensor], config: BerryLMConfig, device: str, dtype: torch.dtype
) -> dict[str, float]:
    """rel-L2 of output and gradients against the torch form in fp32 on the same inputs. ValueError if one leaves its budget."""
    c = config
    heads = (c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    inputs = sample((2, 256), heads, device, dtype)
    got = run_both_ways(recurrence, inputs)
    want = run_both_ways(torch_recurrence, {name: x.float() for name, x in inputs.items()})
    errors = {}
    for name, ref in want.items():
        error = float((got[name].double() - ref.double()).norm() / ref.double().norm())
        errors[name] = error if math.isfinite(error) else math.inf
    print("recurrence against the torch form, rel-L2: " + ", ".join(f"{n} {e:.1e}" for n, e in errors.items()), flush=True)
    bad = [n for n, e in errors.items() if e > BUDGET[n]]
    if bad:
        raise ValueError(f"train-nano: recurrence: expected rel-L2 within {BUDGET}, got {errors}: {', '.join(bad)} out of it")
    return errors


def compile_shard(arguments: list[int]) -> None:
    """The main program of a compiling process: shard, H, HV, K, V, then pairs of B and T."""
    only, *rest = arguments
    heads, sizes = tuple(rest[:4]), rest[4:]
    recurrence = fla_recurrence()
    keep_candidates(only)
    for shape in zip(sizes[::2], sizes[1::2], strict=True):
        run_both_ways(recurrence, sample(shape, heads, "cuda", torch.bfloat16))
    torch.cuda.synchronize()


if __name__ == "__main__":
    compile_shard([int(x) for x in sys.argv[1:]])
