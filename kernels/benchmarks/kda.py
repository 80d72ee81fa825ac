"""KDA: error first, then times beside flash-linear-attention, in one run.

    python kernels/benchmarks/kda.py [--quick] [--out FOLDER]

Needs berrylm_ref, berrylm_kernels and a Hopper GPU; flash-linear-attention for the peer. H = 16, HV = 32, K = V = 128, bf16, one
sequence, g given in fp32, l2norm inside, final state written. Regimes are named by the log2 decay of 64 tokens. What fails its
error budget is recorded as a failure and the exit status says so.
"""

import gc
import math
import os
import subprocess
import sys

import torch
from common import Report, Timer, arguments, ceilings, need_gpu

from berrylm_kernels import kda_front, kda_front_hopper, kda_state, kda_state_hopper
from berrylm_kernels.kda import chunk_kda, chunk_kda_tier
from berrylm_kernels.kda_args import Scratch, check_call
from berrylm_ref.ops import kda as ops

H, HV, K = 16, 32, 128
REGIMES = {"-8": (-9, -7), "-235": (-8, -3.5), "-563": (-7, -2.6), "-2359": (-6, -1), "-9210": (-5, 1)}
LENGTHS = (298, 1024, 8192, 32768)
FP32_BUDGET = 1e-5
MOST_OF_FLA = {"hopper": 0.5, "plain": 1.0}  # share of fla's time, in the regime of the shipped model
SHARDS = 10  # processes that compile fla's autotuning candidates side by side


def inputs(T, regime, dtype=torch.bfloat16, seed=0):
    """q, k, v, g, beta of one sequence: exp(A_log) geometric from 1 to 72, raw gate N(0, 0.5^2), dt_bias uniform."""
    low, high = REGIMES[regime]
    r = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=r)

    q, k, v = normal(1, T, H, K).to(dtype), normal(1, T, H, K).to(dtype), normal(1, T, HV, K).to(dtype)
    rate = torch.linspace(0, math.log(72), HV, device="cuda").exp()[:, None]
    bias = low + (high - low) * torch.rand(HV, K, device="cuda", generator=r)
    g = -rate * torch.nn.functional.softplus(0.5 * normal(1, T, HV, K) + bias)
    return [q, k, v, g, torch.rand(1, T, HV, device="cuda", generator=r).to(dtype)]


def rel_l2(x, ref):
    return ((x.double() - ref).norm() / ref.norm()).item() if bool(x.isfinite().all()) else math.inf


def tier(name):
    return lambda x, **options: chunk_kda_tier(name, *x, use_qk_l2norm_in_kernel=True, output_final_state=True, **options)


def fla():
    from fla.ops.kda import chunk_kda as peer

    return lambda x: peer(*x, scale=K**-0.5, use_qk_l2norm_in_kernel=True, output_final_state=True)


def oracle(x, **options):
    """The recurrence in fp64 on the rounded inputs."""
    return ops.recurrent_kda(*[t.double() for t in x], use_qk_l2norm_in_kernel=True, output_final_state=True, **options)


def compile_in_parallel():
    """Fill Triton's cache: our variants and shards of fla's candidates, a process each. The measured process then finds all of
    them compiled and tunes fla over its full list."""
    jobs = ["hopper", "plain", "fp32", *(f"fla {i}" for i in range(SHARDS))]
    running = [subprocess.Popen([sys.executable, __file__, "--out", "."], env={**os.environ, "KDA_WARM": j}) for j in jobs]
    return {job: process.wait() for job, process in zip(jobs, running, strict=True)}


def warm(job):
    x = inputs(298, "-563", torch.float32 if job == "fp32" else torch.bfloat16)
    if job.startswith("fla"):
        from triton.runtime.autotuner import Autotuner

        run, i = fla(), int(job.split()[1])
        for tuner in gc.get_objects():
            if issubclass(type(tuner), Autotuner):
                tuner.configs = tuner.configs[i::SHARDS] or tuner.configs[:1]
        run(x)
    else:
        run = tier("plain" if job == "fp32" else job)
        run(x)
        run(x, cu_seqlens=torch.tensor([0, 100, 298], device="cuda"))
    torch.cuda.synchronize()


def errors(report, runs):
    out = {}
    for regime in REGIMES:
        x = inputs(298, regime)
        o, S = oracle(x)
        row = {}
        for name, run in runs.items():
            got, state = run(x)
            row[name] = {"o": rel_l2(got, o), "state": rel_l2(state, S)}
        out[regime] = row
        print(regime, {n: f"{e['o']:.2e} {e['state']:.2e}" for n, e in row.items()}, flush=True)
        for name in ("hopper", "plain"):
            if "fla" in row and name in row and row[name]["o"] > 1.1 * row["fla"]["o"]:
                report.fail(f"error {name} {regime}", f"{row[name]['o']:.2e} against fla's {row['fla']['o']:.2e}")
    return out


def errors_fp32(report):
    out = {}
    for regime in (*REGIMES, "steps of -1e4", "g = 0, beta 0 or 1"):
        x = inputs(298, regime if regime in REGIMES else "-8", torch.float32)
        if regime == "steps of -1e4":
            x[3][:, 40::97] = -1e4
        if regime == "g = 0, beta 0 or 1":
            x[3].zero_()
            x[4].round_()
        o, S = oracle(x)
        got, state = chunk_kda(*x, use_qk_l2norm_in_kernel=True, output_final_state=True)
        out[regime] = {"o": rel_l2(got, o), "state": rel_l2(state, S)}
        if max(out[regime].values()) > FP32_BUDGET:
            report.fail(f"fp32 {regime}", str(out[regime]))
    print("fp32", out, flush=True)
    return out


def hard_inputs(report, runs):
    """bf16 with g = 0, steps of -1e4 and beta 0 or 1: finite everywhere, and how far from fp64."""
    out = {}
    x = inputs(298, "-563")
    x[3][:, 40::97] = -1e4
    x[3][:, :, ::5] = 0
    x[4].round_()
    o, _ = oracle(x)
    for name, run in runs.items():
        out[name] = rel_l2(run(x)[0], o)
        if name != "fla" and out[name] == math.inf:
            report.fail(f"hard inputs {name}", "NaN or infinity")
    print("hard", out, flush=True)
    return out


def promises(report, runs):
    """Bitwise: 50 repeats; a sequence beside others; earlier chunks under other later tokens."""
    out = {}
    for name, run in runs.items():
        x = inputs(1000, "-563")
        o, S = run(x)
        repeats = all(torch.equal(o, a) and torch.equal(S, b) for a, b in (run(x) for _ in range(50)))
        y = [t.clone() for t in x]
        for t, other in zip(y, inputs(1000, "-9210", seed=1), strict=True):
            t[:, 640:] = other[:, 640:]
        later = torch.equal(run(y)[0][:, :640], o[:, :640])
        cu = torch.tensor([0, 300, 300, 1000], device="cuda")
        packed, states = run(x, cu_seqlens=cu)
        parts = [run([t[:, a:b].contiguous() for t in x]) for a, b in ((0, 300), (300, 1000))]
        alone = torch.equal(packed, torch.cat([p[0] for p in parts], 1)) and torch.equal(
            states[[0, 2]], torch.cat([p[1] for p in parts])
        )
        empty = not states[1].any()
        out[name] = {"repeats": repeats, "later_chunks": later, "neighbours": alone, "empty_sequence": empty}
        if not all(out[name].values()):
            report.fail(f"promises {name}", str(out[name]))
    print("promises", out, flush=True)
    return out


def long_error(report, runs):
    """T = 8192 against the chunk form in fp64."""
    x = inputs(8192, "-563")
    o, S = ops.chunk_kda(*[t.double() for t in x], use_qk_l2norm_in_kernel=True, output_final_state=True)
    out = {}
    for name, run in runs.items():
        got, state = run(x)
        out[name] = {"o": rel_l2(got, o), "state": rel_l2(state, S)}
    print("8192", out, flush=True)
    return out


def times(report, timer, runs, lengths):
    out = {}
    for T in lengths:
        for regime in ("-563", "-9210"):
            x = inputs(T, regime)
            row = {}
            for _ in range(2):
                for name, run in runs.items():
                    row.setdefault(name, []).append(timer.replay(lambda run=run, x=x: run(x)))
            row = {name: min(pair) for name, pair in row.items()}
            for name, most in MOST_OF_FLA.items() if "fla" in row else ():
                row[f"{name}_over_fla"] = row[name] / row["fla"]
                if regime == "-563" and row[f"{name}_over_fla"] > most:
                    report.fail(f"time {name} T={T}", f"{row[name]:.1f} us against fla's {row['fla']:.1f}")
            out[f"T={T}, {regime}"] = row
            print(T, regime, {n: round(t, 2) for n, t in row.items()}, flush=True)
            del x
            torch.cuda.empty_cache()
    return out


def launches(timer, lengths):
    """The two launches of each tier on their own. In the whole op the second one finds part of its input in L2."""
    out = {}
    tiers = {"hopper": (kda_front_hopper.front, kda_state_hopper.state), "plain": (kda_front.front, kda_state.state)}
    for T in lengths:
        for regime in ("-8", "-563", "-9210"):
            x = check_call("chunk_kda", *inputs(T, regime), use_qk_l2norm_in_kernel=True)
            row = {}
            for name, (front, state) in tiers.items():
                scratch = Scratch(x)
                front(x, scratch)
                row[f"{name}_front"] = timer.replay(lambda f=front, x=x, s=scratch: f(x, s))
                row[f"{name}_state"] = timer.replay(lambda f=state, x=x, s=scratch: f(x, s, True))
            out[f"T={T}, {regime}"] = row
            print(T, regime, {n: round(t, 2) for n, t in row.items()}, flush=True)
    return out


def floors(T, rates):
    """What one call must move and multiply at least, in us: inputs and outputs once; the products of the chunk form."""
    moved = T * (2 * H * K * 2 + 2 * HV * K * 2 + HV * K * 4 + HV * 2)
    chunks = T / 64 * HV
    flops = chunks * 2 * (2 * 64 * 64 * K + 10 * 64**3 / 4 + 2 * 64 * 64 * K + 3 * 64 * K * K + 64 * 64 * K)
    return {"bytes_us": moved / rates["copy_bytes_per_s"] * 1e6, "flops_us": flops / rates["bf16_flops_per_s"] * 1e6}


def main():
    args = arguments(__doc__.splitlines()[0])
    need_gpu()
    if "KDA_WARM" in os.environ:
        return warm(os.environ["KDA_WARM"])
    print("compiled", compile_in_parallel(), flush=True)
    report = Report("kda", "flash-linear-attention", "fla-core")
    timer = Timer(reps=10 if args.quick else 30)
    runs = {"hopper": tier("hopper"), "plain": tier("plain")}
    peer = report.part("peer_importable", lambda: fla() and True)
    peers = {**runs, "fla": fla()} if peer else runs
    report.part("errors_bf16", lambda: errors(report, peers))
    report.part("errors_fp32", lambda: errors_fp32(report))
    report.part("errors_hard_inputs", lambda: hard_inputs(report, peers))
    report.part("promises", lambda: promises(report, runs))
    report.part("errors_8192", lambda: long_error(report, peers))
    rates = report.part("ceilings", lambda: ceilings(timer))
    report.part("times_us", lambda: times(report, timer, peers, LENGTHS[:2] if args.quick else LENGTHS))
    report.part("launches_us", lambda: launches(timer, LENGTHS[:2] if args.quick else LENGTHS[:3]))
    if rates:
        report.part("floors_us", lambda: {f"T={T}": floors(T, rates) for T in LENGTHS})
    report.finish(args.out)


if __name__ == "__main__":
    main()
