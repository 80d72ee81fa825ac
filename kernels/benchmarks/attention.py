"""Paged attention: error, then decode as a share of the copy bandwidth on the KV read, and prefill as a share of the matmul rate.

    python kernels/benchmarks/attention.py [--quick] [--out FOLDER]

Needs berrylm_ref and berrylm_kernels importable and a CUDA GPU. 16 query heads, 2 KV heads of 256. Decode moves about 2 KiB a
token of context; the peer is torch's fused attention on the same keys and values laid out densely, one query a sequence.
Prefill is torch's fused attention on gathered pages, so its peers are torch's backends without pages.
"""

import torch
from common import Report, Timer, arguments, ceilings, need_gpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from berrylm_kernels.attention import paged_attention
from berrylm_ref.ops import attention as ops

HQ, HK, D, SCALE = 16, 2, 256, 256**-0.5
KV_BYTES = 2 * HK * D * 2  # a token


def randn(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def batch(contexts: list[int], lengths: list[int], page: int = 16) -> tuple:
    """The arguments of paged_attention: pages in random order, the gate the second half of the q projection."""
    counts = [-(-(c + n) // page) for c, n in zip(contexts, lengths, strict=True)]
    order = torch.randperm(sum(counts), device="cuda").int() + 1  # page 0 belongs to nobody
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
    for n, (count, pages) in enumerate(zip(counts, order.split(counts), strict=True)):
        table[n, :count] = pages
    both, ends = randn(sum(lengths), HQ, 2 * D), torch.tensor([0, *lengths], device="cuda").cumsum(0)
    pools = randn(sum(counts) + 1, page, HK, D), randn(sum(counts) + 1, page, HK, D)
    return both[..., :D], *pools, table, ends, torch.tensor(contexts, device="cuda"), SCALE, both[..., D:]


def dense(q, k, v):
    """One query a sequence on dense keys [N, S, HK, D]."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return scaled_dot_product_attention(q[:, :, None], k, v, scale=SCALE, enable_gqa=True)[:, :, 0]


def rel(x, ref) -> float:
    return ((x.double() - ref).norm() / ref.norm()).item()


def in_fp64(call):
    return ops.paged_attention(*(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in call))


def errors() -> dict:
    """rel-L2 against the torch op in fp64, beside the bf16 torch op (fp32 inside) and torch's fused attention."""
    out = {}
    call = batch([8191, 99, 4999, 0], [1] * 4)
    exact, ours = in_fp64(call), paged_attention(*call, max_query_len=1)
    out["decode"] = {"ours": rel(ours, exact), "torch op": rel(ops.paged_attention(*call), exact)}
    q, k, v = randn(4, HQ, D), randn(4, 4096, HK, D), randn(4, 4096, HK, D)
    wide = torch.stack([ops.attend(*(x.double() for x in (q[n][None], k[n], v[n])), SCALE)[0] for n in range(4)])
    pages = [x.reshape(-1, 16, HK, D) for x in (k, v)]
    table, ends = torch.arange(1024, device="cuda").view(4, 256), torch.arange(5, device="cuda")
    ours = paged_attention(q, *pages, table, ends, torch.full((4,), 4095, device="cuda"), SCALE, max_query_len=1)
    out["decode, no gate"] = {"ours": rel(ours, wide), "torch fused": rel(dense(q, k, v), wide)}
    call = batch([0, 1000], [1024, 512])
    exact = in_fp64(call)
    out["prefill"] = {"ours": rel(paged_attention(*call), exact), "torch op": rel(ops.paged_attention(*call), exact)}
    print(out, flush=True)
    return out


def decode_times(timer: Timer, copy: float, quick: bool) -> dict:
    varied = torch.randint(100, 8191, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [("64 x 8192", [8191] * 64, 16)]
    if not quick:
        rows += [("64 x 8192", [8191] * 64, page) for page in (1, 64)] + [("64 x 100 to 8191", varied, 16)]
        rows += [("1 x 1024", [1023], 16), ("1 x 8192", [8191], 16), ("1 x 262144", [262143], 16), ("16 x 1024", [1023] * 16, 16)]
        rows += [("256 x 2048", [2047] * 256, 16)]
    out = {}
    for name, contexts, page in rows:
        call = batch(contexts, [1] * len(contexts), page)
        floor = (sum(contexts) + len(contexts)) * KV_BYTES / copy * 1e6
        row = {"floor_us": floor, "ours_us": timer.replay(lambda call=call: paged_attention(*call, max_query_len=1))}
        row["share_of_copy"] = floor / row["ours_us"]
        if len(set(contexts)) == 1 and page == 16:
            q, k, v = call[0].contiguous(), *(randn(len(contexts), contexts[0] + 1, HK, D) for _ in "kv")
            row["torch_fused_dense_us"] = timer.replay(lambda q=q, k=k, v=v: dense(q, k, v))
        out[f"{name}, pages of {page}"] = row
        print(name, page, {k: round(v, 2) for k, v in row.items()}, flush=True)
    call = batch([1023] * 16, [1] * 16)
    out["host_us_per_call"] = timer.host(lambda: paged_attention(*call, max_query_len=1))
    return out


def prefill_times(timer: Timer, rate: float, quick: bool) -> dict:
    out = {}
    for T, S in ((8192, 8192),) if quick else ((1024, 1024), (8192, 8192), (2048, 10240), (2048, 65536)):
        call = batch([S - T], [T])
        flops = 4 * HQ * D * (T * S - T * (T - 1) / 2)
        row = {"floor_us": flops / rate * 1e6, "ours_us": timer.events(lambda call=call: paged_attention(*call))}
        row["share_of_matmul"] = row["floor_us"] / row["ours_us"]
        q, k, v = randn(1, HQ, T, D), randn(1, HK, S, D), randn(1, HK, S, D)
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            if T != S and name == "cudnn":
                continue  # torch hands it no lower-right mask, only one written out
            with sdpa_kernel(backend):
                row[f"torch_{name}_us"] = timer.events(
                    lambda q=q, k=k, v=v, T=T, S=S: scaled_dot_product_attention(
                        q, k, v, causal_lower_right(T, S), scale=SCALE, enable_gqa=True
                    )
                )
        out[f"{T} queries, {S} keys"] = row
        print("prefill", T, S, {k: round(v, 2) for k, v in row.items()}, flush=True)
    return out


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    need_gpu()
    timer, report = Timer(10 if options.quick else 20), Report("attention")
    report.part("errors", errors)
    top = report.part("ceilings", lambda: ceilings(timer))
    result = report.part("decode", lambda: decode_times(timer, top["copy_bytes_per_s"], options.quick))
    report.part("prefill", lambda: prefill_times(timer, top["bf16_flops_per_s"], options.quick))
    share = result["64 x 8192, pages of 16"]["share_of_copy"]
    if share < 0.7:
        report.fail("goal", f"decode of 64 x 8192: {share:.2f} of the copy bandwidth, the goal is 0.70")
    report.finish(options.out)


if __name__ == "__main__":
    main()
