"""KDA between the long kernels: one decode step, and what an eager call costs the host.

    python kernels/benchmarks/kda_step.py [--quick] [--out FOLDER]

Needs berrylm_ref, berrylm_kernels and a Hopper GPU; flash-linear-attention for the peer. H = 16, HV = 32, K = V = 128, bf16. The
step is checked against its torch twin first. What misses its limit is recorded as a failure and the exit status says so.
"""

import math

import torch
from common import Report, Timer, arguments, ceilings, need_gpu
from kda import HV, H, K, inputs, rel_l2, tier

from berrylm_kernels.kda import kda_decode_step
from berrylm_ref.ops.kda_step import kda_decode_step as twin

LINEAR_LAYERS = 30
MOST_DECODE_US = {1: None, 16: 25, 64: 75, 256: 285}
MOST_HOST_US = 250  # of one eager prefill call at T = 298
RUNS = {name: tier(name) for name in ("hopper", "plain")}


def host(report, timer):
    x = inputs(298, "-563")
    out = {name: timer.host(lambda run=run: run(x)) for name, run in RUNS.items()}
    print("eager host us", out, flush=True)
    if out["hopper"] > MOST_HOST_US:
        report.fail("host hopper", f"{out['hopper']:.0f} us, at most {MOST_HOST_US}")
    return out


def decode_layer(S, seed):
    """Arguments of one layer's step for S sequences, state pool next to last."""
    r = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", generator=r).to(dtype)

    C = 2 * H * K + HV * K
    A_log, bias = torch.linspace(0, math.log(72), HV, device="cuda"), torch.full((HV * K,), -4.8, device="cuda")
    return (
        normal(S, C), normal(S, HV * K), normal(S, HV * K), normal(S, HV), normal(C, 4), A_log, bias, 1 + 0.1 * normal(K),
        normal(S + 1, C, 3), 0.1 * normal(S + 1, HV, K, K, dtype=torch.float32), torch.arange(1, S + 1, device="cuda"),
    )  # fmt: skip


def peer_inputs(args):
    """The same step for fla's recurrence: it has no conv, gate or norm, and takes them as done."""
    qkv, _, gate, beta, *_, state, _ = args
    q, k, v = (x.unsqueeze(1).unflatten(-1, (-1, K)).contiguous() for x in qkv.split([H * K, H * K, HV * K], -1))
    g = -gate.float().abs().view(-1, 1, HV, K)
    options = {"initial_state": state[1:], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return (q, k, v, g, beta.sigmoid().unsqueeze(1)), options


def decode(report, timer, copy):
    """A graph holds one step of each of the model's 30 linear layers, every one on its own pools, so that no cache keeps a
    state from replay to replay; a time is a replay's by 30."""
    out = {}
    for S, most in MOST_DECODE_US.items():
        layers = [decode_layer(S, seed) for seed in range(LINEAR_LAYERS)]

        def every_layer(fn, layers=layers):
            return lambda: [fn(args) for args in layers]

        row = out[f"batch {S}"] = {
            "ours_us": timer.replay(every_layer(lambda args: kda_decode_step(*args, key_heads=H, eps=1e-6))) / LINEAR_LAYERS,
            "state_copy_us": timer.replay(every_layer(lambda args: args[9].add_(1))) / LINEAR_LAYERS,
            "state_traffic_us": 2 * S * HV * K * K * 4 / copy * 1e6,
        }
        if most and row["ours_us"] > most:
            report.fail(f"decode {S}", f"{row['ours_us']:.1f} us, at most {most}")
        try:
            from fla.ops.kda import fused_recurrent_kda
        except ImportError:
            print("fla is not importable: the decode step has no peer", flush=True)
        else:
            prepared = [peer_inputs(args) for args in layers]
            row["fla_recurrence_only_us"] = (
                timer.replay(lambda x=prepared: [fused_recurrent_kda(*a, **o) for a, o in x]) / LINEAR_LAYERS
            )
        print("decode", S, row, flush=True)
        del layers
        torch.cuda.empty_cache()
    return out


def errors(report):
    """One step against the torch twin in fp64: output and states, for both in bf16."""
    args = decode_layer(64, 0)
    exact, ours, plain = (
        [x.double() if kind == "fp64" and x.is_floating_point() else x.clone() for x in args] for kind in ("fp64", "", "")
    )
    o = twin(*exact, key_heads=H, eps=1e-6)
    out = {}
    for name, run, x in (("ours", kda_decode_step, ours), ("torch", twin, plain)):
        out[name] = {"o": rel_l2(run(*x, key_heads=H, eps=1e-6), o), "state": rel_l2(x[9], exact[9])}
    if out["ours"]["o"] > 1.1 * out["torch"]["o"]:
        report.fail("error of a step", str(out))
    print("errors", out, flush=True)
    return out


def main():
    args = arguments(__doc__.splitlines()[0])
    need_gpu()
    report, timer = Report("kda_step", "flash-linear-attention", "fla-core"), Timer(reps=10 if args.quick else 30)
    report.part("errors", lambda: errors(report))
    report.part("eager_host_us", lambda: host(report, timer))
    rates = report.part("ceilings", lambda: ceilings(timer))
    if rates:
        report.part("decode_us", lambda: decode(report, timer, rates["copy_bytes_per_s"]))
    report.finish(args.out)


if __name__ == "__main__":
    main()
