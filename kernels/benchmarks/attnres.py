"""The depth mixer with its input norm: error, then time beside the three-pass form and torch, as a share of the copy bandwidth.

    python kernels/benchmarks/attnres.py [--quick] [--out FOLDER]

Needs berrylm_ref and berrylm_kernels importable and a CUDA GPU. Bytes counted: each source read once, mixed and normed written
once. The three-pass form is the plain way to write this kernel (sizes, then logits, then the mix, each over all sources) with
the same launch; where the rows of a program fit the first-level cache, its second and third pass are cheap.
"""

import torch
import triton
import triton.language as tl
from common import Report, Timer, arguments, ceilings, need_gpu

from berrylm_kernels.attnres import attn_res_norm
from berrylm_ref.ops import attnres as ops

D, EPS = 2048, 1e-6


@triton.jit(do_not_specialize=["blocks"])
def _three_pass_kernel(
    h, committed, pseudo_query, gate, norm_weight, mixed, normed, stride_block, blocks, eps,
    D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i_p = tl.program_id(0).to(tl.int64)
    o_d, o_n = tl.arange(0, D), tl.arange(0, BN)
    dtype = mixed.dtype.element_ty
    p_row = committed + i_p * D + o_d
    b_h = tl.load(h + i_p * D + o_d).to(tl.float32)
    b_q = tl.load(pseudo_query + o_d).to(tl.float32)
    b_scale = tl.where(o_n == blocks, tl.rsqrt(tl.sum(b_h * b_h, 0) / D + eps), 0.0)
    for n in range(blocks):
        b_s = tl.load(p_row + n * stride_block).to(tl.float32)
        b_scale = tl.where(o_n == n, tl.rsqrt(tl.sum(b_s * b_s, 0) / D + eps), b_scale)
    b_dot = tl.where(o_n == blocks, tl.sum(b_h * b_q, 0), 0.0)
    for n in range(blocks):
        b_s = tl.load(p_row + n * stride_block).to(tl.float32)
        b_dot = tl.where(o_n == n, tl.sum(b_s * b_q, 0), b_dot)
    b_p = tl.where(o_n <= blocks, b_dot * b_scale, float("-inf"))
    b_p = tl.exp(b_p - tl.max(b_p, 0))
    b_p = b_p / tl.sum(b_p, 0)
    b_mix = b_h * tl.sum(tl.where(o_n == blocks, b_p, 0.0), 0)
    for n in range(blocks):
        b_s = tl.load(p_row + n * stride_block).to(tl.float32)
        b_mix += b_s * tl.sum(tl.where(o_n == n, b_p, 0.0), 0)
    b_t = 2.0 * tl.sigmoid(2.0 * tl.load(gate).to(tl.float32)) - 1.0
    b_out = (b_h + b_t * (b_mix - b_h)).to(dtype)
    tl.store(mixed + i_p * D + o_d, b_out)
    b_x = b_out.to(tl.float32)
    b_w = tl.load(norm_weight + o_d).to(tl.float32)
    tl.store(normed + i_p * D + o_d, (b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps) * (1.0 + b_w)).to(dtype))


def three_pass(h, committed, query, gate, weight):
    mixed, normed = torch.empty_like(h), torch.empty_like(h)
    _three_pass_kernel[(h.shape[0],)](
        h, committed, query, gate, weight, mixed, normed, committed.stride(0), committed.shape[0], EPS, D, 16, num_warps=4
    )
    return mixed, normed


def inputs(tokens: int, blocks: int):
    buffer = torch.randn(max(blocks, 8), tokens, D, dtype=torch.bfloat16, device="cuda")  # committed is a view of it
    h, query, weight = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((tokens, D), (D,), (D,)))
    gate = torch.tensor(0.6, dtype=torch.bfloat16, device="cuda")
    return h, buffer[:blocks], 2 * D**-0.5 * query, gate, 0.2 * weight


def ours(h, committed, query, gate, weight):
    return attn_res_norm(h, committed, query, gate, EPS, True, weight, EPS)


def torch_chain(h, committed, query, gate, weight):
    return ops.attn_res_norm(h, committed, query, gate, EPS, True, weight, EPS)


def errors() -> dict:
    """rel-L2 against fp64, and how many values of the bf16 torch chain are met bit for bit."""
    x = inputs(1024, 4)
    exact = torch_chain(*(t.double() for t in x))
    chain = torch_chain(*x)
    out = {}
    for name, fn in (("ours", ours), ("torch", torch_chain), ("three_pass", three_pass)):
        got = fn(*x)
        out[name] = {
            part: ((a.double() - b).norm() / b.norm()).item() for part, a, b in zip(("mixed", "normed"), got, exact, strict=True)
        }
        out[name]["bit_equal_to_torch"] = (got[0] == chain[0]).double().mean().item()
    print(out, flush=True)
    return out


def times(timer: Timer, copy: float, quick: bool) -> dict:
    out = {}
    for tokens, blocks in ((8192, 4),) if quick else ((1, 4), (64, 4), (1024, 4), (8192, 1), (8192, 4), (8192, 8), (32768, 4)):
        x = inputs(tokens, blocks)
        floor = (blocks + 3) * tokens * D * 2 / copy * 1e6
        row = {"floor_us": floor, "ours_us": timer.replay(lambda x=x: ours(*x))}
        row["share_of_copy"] = floor / row["ours_us"]
        row["three_pass_us"] = timer.replay(lambda x=x: three_pass(*x))
        if tokens <= 8192:
            row["torch_us"] = timer.replay(lambda x=x: torch_chain(*x))
        out[f"{tokens} tokens, {blocks + 1} sources"] = row
        print(tokens, blocks + 1, {k: round(v, 2) for k, v in row.items()}, flush=True)
    x = inputs(64, 4)
    out["host_us_per_call"] = timer.host(lambda: ours(*x))
    return out


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    need_gpu()
    timer, report = Timer(10 if options.quick else 30), Report("attnres")
    report.part("errors", errors)
    top = report.part("ceilings", lambda: ceilings(timer))
    result = report.part("times", lambda: times(timer, top["copy_bytes_per_s"], options.quick))
    share = result["8192 tokens, 5 sources"]["share_of_copy"]
    if share < 0.7:
        report.fail("goal", f"8192 tokens, 5 sources: {share:.2f} of the copy bandwidth, the goal is 0.70")
    report.finish(options.out)


if __name__ == "__main__":
    main()
