"""The README's table of numbers, generated from the JSON results, so that no figure in it is typed by hand.

python kernels/benchmarks/readme.py            # rewrites the part of README.md between its two marks
"""

import json
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "h200"
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: tuple[str, ...], rows: list[tuple]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def us(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}"


def kda() -> str:
    d = load("kda")
    versions = d["machine"]["versions"]
    peer = f"flash-linear-attention {versions['flash-linear-attention']}"
    errors = [
        (regime, *(f"{row[n]['o']:.2e}" for n in ("hopper", "plain", "fla")), f"{d['errors_fp32'][regime]['o']:.1e}")
        for regime, row in d["errors_bf16"].items()
    ]
    times = [
        (name, us(t["hopper"]), us(t["plain"]), us(t["fla"]), f"{t['hopper_over_fla']:.2f}", f"{t['plain_over_fla']:.2f}")
        for name, t in d["times_us"].items()
    ]
    steps = [
        (name, us(t["ours_us"]), us(t["fla_recurrence_only_us"]), us(t["state_traffic_us"])) for name, t in d["decode_us"].items()
    ]
    host = d["eager_host_us"]
    return f"""**KDA prefill**, H = 16, HV = 32, K = V = 128, bf16, one sequence. rel-L2 of the output against fp64 at T = 298, by
log2 decay of 64 tokens ("Hopper": the Gluon kernels; "plain": the portable Triton kernels; fp32: the plain kernels in fp32):

{table(("decay", "Hopper", "plain", peer, "fp32"), errors)}

Microseconds, graph replay, L2 flushed:

{table(("", "Hopper", "plain", peer, "Hopper / fla", "plain / fla"), times)}

Host time of an eager call at T = 298: {us(host["hopper"])} (Hopper), {us(host["plain"])} (plain), {us(host["fla"])} (fla) us.

**KDA decode step**, convolution, gate and norms included; fla's is the recurrence alone; the floor is the traffic of the states:

{table(("", "ours", "fla", "floor"), steps)}"""


def others() -> str:
    mixer, paged, norms = load("attnres")["times"], load("attention"), load("norm")["times"]
    rows = []
    for name, t in mixer.items():
        if name.startswith("8192"):
            row = (
                "AttnRes mixer + norm, " + name,
                us(t["ours_us"]),
                f"{t['share_of_copy']:.0%}",
                f"three-pass {us(t['three_pass_us'])}",
            )
            rows.append(row)
    for name, t in paged["decode"].items():
        if not isinstance(t, dict):
            continue
        peer = t.get("torch_fused_dense_us")
        peer = f"torch fused, dense {us(peer)}" if peer else ""
        rows.append((f"paged decode attention, {name}", us(t["ours_us"]), f"{t['share_of_copy']:.0%}", peer))
    for name, t in norms.items():
        if "8192 tokens" in name and "share_of_copy" in t:
            rows.append((name, us(t["ours_us"]), f"{t['share_of_copy']:.0%}", f"torch {us(t['torch_us'])}"))
    return f"""**The other memory-bound kernels**, bf16, D = 2048; the share is of the copy bandwidth measured in the same run:

{table(("", "us", "share", "beside it, us"), rows)}"""


def numbers() -> str:
    d = load("kda")
    m, rates = d["machine"], d["ceilings"]
    v, copy, product = m["versions"], rates["copy_bytes_per_s"] / 1e12, rates["bf16_flops_per_s"] / 1e12
    return f"""Measured on one {m["gpu"]} (driver {m["driver"]}, torch {v["torch"]}, triton {v["triton"]}, {m["date"]};
copy {copy:.2f} TB/s, 8192-cubed bf16 product {product:.0f} TFLOP/s). The scripts are `kernels/benchmarks/*.py`, their results
`kernels/benchmarks/results/h200/*.json`; this section is written by `kernels/benchmarks/readme.py`.

{kda()}

{others()}
"""


def rewritten(readme: str) -> str:
    """README text with the numbers between its marks."""
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{numbers()}{END}{after}"


if __name__ == "__main__":
    path = REPO / "README.md"
    path.write_text(rewritten(path.read_text()))
