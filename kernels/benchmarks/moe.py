"""Mixture of experts on one GPU: `python kernels/benchmarks/moe.py`, correctness first, then times.

Shape of the model: D 2048, expert width 512, 128 experts, top-8, one shared expert, bfloat16. A graph holds one call for each
of eight layers, whose weights are 6.5 GB together, so that no cache keeps them; times are a replay's by eight.

What is counted. Bytes: the weights of the routed experts that the batch hits, read once (not the shared expert's, the router's
or any activation's), against the measured copy bandwidth. Operations: two a multiply-add, of the routed and the shared
experts' products and the router's, against the measured rate of an 8192 x 8192 x 8192 product; beside it the rate of as many
such products in one graph as take the time of the eight layers, to see what a longer load does to the clocks.

Peers, in the same run: torch's grouped product (``torch.nn.functional.grouped_mm``) with everything else on the device, in
the same graphs; the plain loop over experts, which must ask the device for its counts and so runs eagerly.
"""

import torch
from common import Report, Timer, arguments, ceilings, need_gpu
from torch.nn.functional import grouped_mm, linear, silu

from berrylm_kernels.moe import DECODE, moe
from berrylm_kernels.moe_router import project_logits
from berrylm_ref.ops import moe as ops

D, F, E, TOP_K, LAYERS = 2048, 512, 128, 8, 8
SIDE = 8192
TARGETS = {1: ("bytes", 0.45), 16: ("bytes", 0.70), 64: ("bytes", 0.75), 4096: ("flops", 0.50), 16384: ("flops", 0.50)}
CHECKED = (1, 4, 5, 16, 64, 100, 200, 300, 4096)  # every path and every tile
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def layer(device: torch.device) -> tuple:
    """router, gate_up_proj, down_proj, shared_gate_up, shared_down, shared_gate."""

    def normal(*shape):
        return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, shape[-1] ** -0.5)

    return normal(E, D), normal(E, 2 * F, D), normal(E, D, F), (normal(F, D), normal(F, D)), normal(D, F), normal(1, D)


def kernels(x, w):
    return moe(x, *w, top_k=TOP_K, normalise=True)


def loop(x, w):
    return ops.moe(x, *w, top_k=TOP_K, normalise=True)


def grouped(x, w):
    router, gate_up, down, (gate, up), shared_down, shared_gate = w
    p, experts = linear(x, router).float().softmax(-1).topk(TOP_K)
    p = (p / p.sum(-1, keepdim=True)).to(x.dtype)
    order = experts.flatten().argsort()
    ends = torch.histc(experts.flatten().float(), E, 0, E - 1).cumsum(0).to(torch.int32)
    y = ops.swiglu(grouped_mm(x[order // TOP_K], gate_up.mT, offs=ends))
    rows = torch.empty((len(order), D), dtype=x.dtype, device=x.device)
    rows[order] = grouped_mm(y, down.mT, offs=ends)
    routed = (rows.view(-1, TOP_K, D) * p.unsqueeze(-1)).sum(1)
    shared = linear(silu(linear(x, gate)) * linear(x, up), shared_down)
    return routed + torch.sigmoid(linear(x, shared_gate)) * shared


def exact(x, w, logits):
    """fp64, with the experts that rounded logits choose: the choice is discrete, and here the arithmetic is measured."""
    router, gate_up, down, (gate, up), shared_down, shared_gate = w
    p, experts = ops.route(logits, TOP_K, True)
    x = x.double()
    shared = linear(silu(linear(x, gate.double())) * linear(x, up.double()), shared_down.double())
    out = torch.sigmoid(linear(x, shared_gate.double())) * shared
    for e in experts.unique().tolist():
        token, slot = (experts == e).nonzero(as_tuple=True)
        y = linear(ops.swiglu(linear(x[token], gate_up[e].double())), down[e].double())
        out.index_add_(0, token, p[token, slot, None].double() * y)
    return out


def rel_l2(x, ref) -> float:
    return (torch.linalg.vector_norm(x.double() - ref) / torch.linalg.vector_norm(ref)).item()


def check(report: Report, w: tuple) -> list[dict]:
    """Errors against fp64; each implementation against the routing of its own logits."""
    out = []
    for P in CHECKED:
        x = torch.randn(P, D, device=w[0].device, dtype=torch.bfloat16)
        library = linear(x, w[0])
        own = project_logits(x, w[0], w[5])[:, :E] if P <= DECODE else library
        want, first = exact(x, w, library), kernels(x, w)
        row = {"tokens": P, "kernels": rel_l2(first, exact(x, w, own))}
        row |= {"loop": rel_l2(loop(x, w), want), "grouped": rel_l2(grouped(x, w), want)}
        row["repeats_equal"] = all(torch.equal(kernels(x, w), first) for _ in range(50))
        print("rel-L2", row, flush=True)
        if not (row["kernels"] <= 1.1 * row["loop"] and row["repeats_equal"]):
            report.fail(f"check {P}", f"{row}")
        out.append(row)
    return out


def matmul_rate(timer: Timer, operands: tuple, us: float) -> float:
    """Operations a second of square products that take about ``us`` microseconds together."""
    a, b = operands
    count = max(1, round(us / timer.replay(lambda: a @ b)))
    return 2 * SIDE**3 * count / timer.replay(lambda: [a @ b for _ in range(count)]) * 1e6


def times(report: Report, timer: Timer, layers: list[tuple], tokens: tuple[int, ...], ceiling: dict) -> list[dict]:
    few = Timer(reps=3)  # for the loop, which is slow and steady
    square = tuple(torch.randn(SIDE, SIDE, device=layers[0][0].device).bfloat16() for _ in range(2))
    out = []
    for P in tokens:
        x = torch.randn(P, D, device=layers[0][0].device, dtype=torch.bfloat16)
        hits = sum(ops.route(linear(x, w[0]), TOP_K, True)[1].unique().numel() for w in layers) / len(layers)

        def every_layer(fn, x=x):
            return lambda: [fn(x, w) for w in layers]

        row = {"tokens": P, "experts_hit": hits, "kernels_us": timer.replay(every_layer(kernels)) / len(layers)}
        row["grouped_us"] = timer.replay(every_layer(grouped)) / len(layers)
        row["loop_us"] = few.events(every_layer(loop)) / len(layers)
        seconds = row["kernels_us"] * 1e-6
        row["bytes"] = hits * 3 * F * D * 2 / seconds / ceiling["copy_bytes_per_s"]
        row["flops"] = P * (6 * D * F * (TOP_K + 1) + 2 * D * (E + 1)) / seconds / ceiling["bf16_flops_per_s"]
        row["long_matmul_flops_per_s"] = matmul_rate(timer, square, row["kernels_us"] * len(layers))
        print({k: round(v, 3) for k, v in row.items()}, flush=True)
        what, least = TARGETS.get(P, ("bytes", 0.0))
        if row[what] < least or row["kernels_us"] > min(row["grouped_us"], row["loop_us"]):
            report.fail(f"times {P}", f"at least {least} of the ceiling in {what}, and no slower than a peer: {row}")
        out.append(row)
    return out


@torch.no_grad()
def main() -> None:
    args = arguments(__doc__.partition(":")[0])
    device = need_gpu()
    torch.manual_seed(0)
    report, timer = Report("moe"), Timer(reps=10 if args.quick else 20)
    report.data["shape"] = {"D": D, "F": F, "E": E, "top_k": TOP_K, "layers": LAYERS, "dtype": "bfloat16"}
    ceiling = report.part("ceilings", lambda: ceilings(timer))
    layers = [layer(device) for _ in range(LAYERS)]
    tokens = tuple(TARGETS) if args.quick else TOKENS
    report.part("errors", lambda: check(report, layers[0]))
    report.part("times", lambda: times(report, timer, layers, tokens, ceiling))
    report.finish(args.out)


if __name__ == "__main__":
    main()
