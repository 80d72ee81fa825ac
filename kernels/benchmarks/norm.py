"""Norms, q/k norm with rotary embedding, and the short convolution: error, then time as a share of the copy bandwidth.

    python kernels/benchmarks/norm.py [--quick] [--out FOLDER]

Needs berrylm_ref and berrylm_kernels importable and a CUDA GPU. Bytes counted: each input read once, each output written once.
Peers: the torch op, and flash-linear-attention's gated norm and convolution where it is installed.
"""

import importlib.util

import torch
from common import Report, Timer, arguments, ceilings, need_gpu

from berrylm_kernels import attention, conv, norm
from berrylm_ref.ops import attention as ops_attention
from berrylm_ref.ops import conv as ops_conv
from berrylm_ref.ops import norm as ops_norm
from berrylm_ref.ops.rope import rope_angles

D, V, HV, C, W, EPS = 2048, 128, 32, 8192, 4, 1e-6


def randn(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def cases(tokens: int) -> dict:
    """name: (our function, torch op, arguments, bytes). The gate that qk_norm_rope hands on is a view and is not counted."""
    h, y, weight = randn(tokens, D), randn(tokens, D), 0.2 * randn(D)
    o, z, plain = randn(tokens, HV, V), randn(tokens, HV, V), 1 + 0.2 * randn(V)
    q, k, qk_weight = randn(tokens, 16, 512), randn(tokens, 2, 256), 0.2 * randn(256)
    angles = rope_angles(torch.arange(tokens, device="cuda"), 64, 1e7, torch.bfloat16)
    x, taps, window = randn(tokens, C), randn(C, W), randn(1, C, W - 1)
    ends, row = torch.tensor([0, tokens], device="cuda"), tokens * 2
    qk = (q, k, qk_weight, qk_weight, EPS, *angles, True)
    return {
        "rms_norm": (norm.rms_norm, ops_norm.rms_norm, (h, weight, EPS), 2 * row * D),
        "add_rms_norm": (norm.add_rms_norm, ops_norm.add_rms_norm, (h, y, weight, EPS), 4 * row * D),
        "gated_rms_norm": (norm.gated_rms_norm, ops_norm.gated_rms_norm, (o, z, plain, EPS), 3 * row * HV * V),
        "qk_norm_rope": (attention.qk_norm_rope, ops_attention.qk_norm_rope, qk, 2 * row * 18 * 256),
        "causal_conv": (conv.causal_conv, ops_conv.causal_conv, (x, taps, window, ends), 2 * row * C),
    }


def first(result):
    return result[0] if isinstance(result, tuple) else result


def errors() -> dict:
    """rel-L2 of ours and of the bf16 torch op against the torch op in fp64."""
    out = {}
    for name, (ours, theirs, args, _) in cases(512).items():
        wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        exact = first(theirs(*wide))
        out[name] = {}
        for who, fn in (("ours", ours), ("torch", theirs)):
            out[name][who] = ((first(fn(*args)).double() - exact).norm() / exact.norm()).item()
        print(name, out[name], flush=True)
    return out


def times(timer: Timer, copy: float, quick: bool) -> dict:
    out = {}
    for tokens in (8192,) if quick else (1, 64, 1024, 8192):
        for name, (ours, theirs, args, size) in cases(tokens).items():
            floor = size / copy * 1e6
            row = {"floor_us": floor, "ours_us": timer.replay(lambda ours=ours, args=args: ours(*args))}
            row["share_of_copy"] = floor / row["ours_us"]
            if tokens in (64, 8192):
                row["torch_us"] = timer.events(lambda theirs=theirs, args=args: theirs(*args))
            out[f"{name}, {tokens} tokens"] = row
            print(name, tokens, {k: round(v, 2) for k, v in row.items()}, flush=True)
    lengths = [1] * 64 + [2000, 3000, 3128]
    ends, x, taps = torch.tensor([0, *lengths], device="cuda").cumsum(0), randn(sum(lengths), C), randn(C, W)
    windows = randn(len(lengths), C, W - 1)
    mixed = timer.replay(lambda: conv.causal_conv(x, taps, windows, ends))
    out["causal_conv, 64 decode rows and 3 prompts, 8192 tokens"] = {"ours_us": mixed}
    print("causal_conv mixed", round(mixed, 2), flush=True)
    for name, (ours, _, args, _) in cases(64).items():
        out[f"{name}, host_us_per_call"] = timer.host(lambda ours=ours, args=args: ours(*args))
    return out


def peers(timer: Timer) -> dict | None:
    if importlib.util.find_spec("fla") is None:
        print("flash-linear-attention is not installed: its kernels are left out", flush=True)
        return None
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    x, taps, o, z, plain = randn(1, 8192, C), randn(C, W), randn(8192, HV, V), randn(8192, HV, V), randn(V)
    keywords = {"activation": "silu", "output_final_state": True}
    with torch.no_grad():
        out = {
            "fla causal_conv1d, 8192 tokens": timer.replay(lambda: causal_conv1d(x, taps, **keywords)),
            "fla rms_norm_gated, 8192 tokens": timer.replay(lambda: rms_norm_gated(o, z, plain, None)),
        }
    print(out, flush=True)
    return out


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    need_gpu()
    timer, report = Timer(10 if options.quick else 30), Report("norm", "flash-linear-attention")
    report.part("errors", errors)
    top = report.part("ceilings", lambda: ceilings(timer))
    report.part("times", lambda: times(timer, top["copy_bytes_per_s"], options.quick))
    report.part("peers_us", lambda: peers(timer))
    report.finish(options.out)


if __name__ == "__main__":
    main()
