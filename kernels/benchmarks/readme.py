"""The README's tables of numbers, generated from the JSON results, so that no figure in them is typed by hand.

python kernels/benchmarks/readme.py            # rewrites the parts of README.md between their marks
"""

import json
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
CHECKPOINT = REPO / "berrylm_ref" / "checkpoints" / "nano"


def load(name: str, machine: str = "h200") -> dict:
    return json.loads((RESULTS / machine / f"{name}.json").read_text())


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
    step = load("kda_step")
    steps = [
        (name, *(us(t[what]) for what in ("ours_us", "fla_recurrence_only_us", "state_copy_us", "state_traffic_us")))
        for name, t in step["decode_us"].items()
    ]
    host = step["eager_host_us"]
    return f"""**KDA prefill**, H = 16, HV = 32, K = V = 128, bf16, one sequence. rel-L2 of the output against fp64 at T = 298, by
log2 decay of 64 tokens ("Hopper": the Gluon kernels; "plain": the portable Triton kernels; fp32: the plain kernels in fp32):

{table(("decay", "Hopper", "plain", peer, "fp32"), errors)}

Microseconds, graph replay, L2 flushed:

{table(("", "Hopper", "plain", peer, "Hopper / fla", "plain / fla"), times)}

Host time of an eager call at T = 298: {us(host["hopper"])} (Hopper), {us(host["plain"])} (plain) us.

**KDA decode step**, microseconds a layer in a graph of 30 layers with a pool each; convolution, gate and norms included, while
fla's is the recurrence alone. Beside it torch's in-place update of the same states, and their traffic at copy bandwidth:

{table(("", "ours", "fla", "states updated in place", "traffic"), steps)}"""


def moe() -> str:
    d = load("moe")
    rows = [
        (t["tokens"], us(t["kernels_us"]), f"{t['bytes']:.0%}", f"{t['flops']:.0%}", us(t["grouped_us"]), us(t["loop_us"]))
        for t in d["times"]
        if t["tokens"] in (1, 4, 16, 64, 256, 1024, 4096, 16384)
    ]
    return f"""**Mixture of experts**, the whole layer (router, 8 of 128 experts, shared expert), bf16, microseconds a layer in a
graph of eight; bytes: weights of the experts hit over copy bandwidth; operations: over the rate of the 8192-cubed product:

{table(("tokens", "us", "bytes", "operations", "torch grouped_mm", "loop"), rows)}"""


def against_published(workloads: dict) -> str:
    """A table of what was measured beside what is published."""
    rows = []
    for name, w in workloads.items():
        a = w["against_published"]
        if a and "cut_by_time_limit" not in w["summary"]:
            unit, decimals = ("ms a token", 2) if a["figure"] == "tpot_ms" else ("tokens/s", 0)
            limit = w.get("limit", {}).get("step_ms" if decimals else "tokens_per_s")
            ours, theirs, limit = (x if x is None else f"{x:.{decimals}f}" for x in (a["ours"], a["published"], limit))
            rows.append((name, unit, theirs, ours, f"{a['times_better']:.2f}", limit or ""))
    names = ("", "unit", "published", "ours", "times better", "limit")
    count = len(names) if any(row[-1] for row in rows) else len(names) - 1
    return table(names[:count], [row[:count] for row in rows])


def model() -> str:
    d = load("model")
    steps = ", ".join(
        f"{p['wall_ms']:.2f} at {p['batch']} (floor {p['floor_ms']:.2f})" for p in d["profile"].values() if "batch" in p
    )
    p = d["prefill"]
    count = d["weights"]["parameters"] / 1e9
    return f"""**The whole model**, {count:.1f} B random weights in bf16 on one card, through the engine, by `berrylm bench model
--random-weights --profile --http --check --long --traffic`: prompt/output tokens @ requests at once. Published: SGLang on the
same card. The limit is the roofline of `berrylm_ref/bench/roofline.py` at the bandwidth measured in the same run.

{against_published(d["workloads"])}

A decode step takes {steps} ms. A prompt of {p["tokens"]} tokens is read in {p["median_seconds"] * 1e3:.0f} ms,
{p["share_of_matmul_rate"]:.0%} of the rate of the 8192-cubed product.

{prompts()}

{checks()}

{two()}"""


def prompts() -> str:
    d, packed = load("model"), load("model_no_rooms")
    rows = [(tokens, f"{ms:.1f}", f"{packed['first_token_ms'][tokens]:.1f}") for tokens, ms in d["first_token_ms"].items()]
    (low, high), (least, most) = d["traffic"]["prompts"], d["traffic"]["answers"]
    lines = [
        (f"{x['output_tokens_per_s']:.0f}", f"{x['ttft_ms']['median']:.0f}", f"{x['tpot_ms']['median']:.1f}")
        for x in (d["traffic"], packed["traffic"])
    ]
    names = ("rooms", "packed as they are")
    together, count = d["traffic"]["together"], d["traffic"]["requests"]
    most_tokens = d["memory"]["prefill_buckets"][-1]
    return f"""Milliseconds from a prompt alone to its first token. A few prompts of {most_tokens} tokens at most are padded to a
"room", whose forward is one CUDA graph; beside it a run with all prompts packed as they are (`--no-rooms`), whose time is set by
the host:

{table(("tokens", *names), rows)}

{count} requests that come and go, {together} at once, {low} to {high} tokens in, {least} to {most} out (`--traffic`):

{table(("", "tokens/s", "first token, ms", "ms a token"), [(name, *line) for name, line in zip(names, lines, strict=True)])}"""


def checks() -> str:
    d = load("model")
    layers, long, twice = d["layer_profile"], d["long_context"], d["sent_twice"]
    worst = max(a / b for prompt in layers["rel_l2"] for a, b in zip(prompt["ours"], prompt["torch"], strict=True))
    reused = (twice, d["cached_answers"])
    if not all(part["identical"] and part["cached_tokens"] == part["expected_cached_tokens"] for part in reused):
        raise ValueError("model.json: a cached pass gave other ids or hit other depths: this section would be wrong")
    return f"""The same over HTTP, the client a process of its own:

{against_published(d["http"])}

{layers["prompts"]} prompts of {layers["tokens"]} tokens, layer by layer against {layers["reference"]}: at most {worst:.2f} times
the distance of torch in bf16. Greedy answers after a prefix from the cache have the same ids; of a prompt sent twice
{twice["cached_tokens"][0]} tokens were hit. {long["prompt_tokens"]} tokens are read in {long["prefill_seconds"]:.1f} s; a decode
step then takes {long["decode_ms"]:.2f} ms, {long["short_decode_ms"]:.2f} after {long["short_prompt_tokens"]}."""


def two() -> str:
    d = load("model_tp2")
    if not all(part["identical"] for part in (d["sent_twice"], d["cached_answers"])):
        raise ValueError("model_tp2.json: a cached pass gave other ids: this section would be wrong")
    return f"""**Two cards**, by `berrylm bench model --random-weights --tp 2 --check --traffic`; the sums between them:
{d["memory"]["all_reduce"]}. Greedy answers after a prefix from the cache have the same ids.
A prompt of 1024 tokens alone has its first token after {d["first_token_ms"]["1024"]:.1f} ms; the requests that come and go get
{d["traffic"]["output_tokens_per_s"]:.0f} tokens/s.

{against_published(d["workloads"])}"""


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

{model()}

{kda()}

{moe()}

{others()}
"""


def nano() -> str:
    d, log = load("nano_eval", "cpu"), json.loads((CHECKPOINT / "training_log.json").read_text())
    m, how, other = d["machine"], d["settings"], d["compared"]
    intra, speed, gpu = other["settings"]["kda_intra"], d["speed"], log["machine"]["gpu"]
    rows = [(name, *shares(row)) for name, row in d["tasks"].items()]
    rows += [(f"{name}, {intra} scores", *shares(row)) for name, row in other["tasks"].items()]
    versions = ", ".join(f"{name} {m['versions'][name]}" for name in ("python", "torch"))
    fewer = "" if how["problems"] == 200 else f" --problems {how['problems']}"
    return f"""{log["recipe"]["parameters"] / 1e6:.1f} M parameters, trained in {log["seconds"] / 60:.1f} minutes on one {gpu}
({log["tokens"] / 1e6:.0f} M tokens; `training_log.json` beside the weights has recipe, seed, versions and the loss curve).
Asked greedily over HTTP through the chat API and its parsers, {how["dtype"]} torch, with

```
berrylm eval{fewer} --compare {intra} --out kernels/benchmarks/results/cpu/nano_eval.json
```

on {m["cpu"]}, {m["threads"]} of {m["cores"]} cores, {versions}, {m["date"]}. Operands and arguments are held out from
the training; "new wording" also asks in sentences that it never saw. An answer of {how["max_new_tokens"]} tokens was cut
off there and is wrong.

{table(("task", "asked", "right", "at the cap", "tokens", "by number of steps"), rows)}

{speed["single_stream_tokens_per_s"]:.0f} tokens/s in one stream, {speed["batched_tokens_per_s"]:.0f} with {how["batch"]}
questions at a time, {speed["seconds"] / 60:.1f} minutes for all.
"""


def parity() -> str:
    rows = []
    for name in ("fp32", "bf16"):
        line = next(x for x in load(f"parity_{name}", "cpu")["lines"] if x["kind"] == "all")
        greedy = f"{line['greedy']:.1%} ({line['floor_greedy']:.1%})"
        same = f"{line['same_ids']} of {line['prompts'] // 3}"  # every prompt goes cold, again and on
        rows.append((name, f"{line['mean']:.1e}", f"{line['floor_mean']:.1e}", f"{line['ratio']:.1e}", greedy, same))
    about = load("parity_fp32", "cpu")["about"]
    where = f"torch {about['torch']}, {about['date'][:10]}"
    return f"""Our own server with the shipped checkpoint on a CPU ({where}), by `berrylm parity --launch --quick --documents 1
--short 6 --dtype float32`, and `bfloat16`:

{table(("server", "mean abs. delta logprob", "floor", "x floor", "greedy = argmax (floor)", "cached passes, same ids"), rows)}
"""


def shares(row: dict) -> tuple:
    by = ", ".join(f"{n}: {part['accuracy']:.0%}" for n, part in row.get("by_steps", {}).items())
    return row["asked"], f"{row['accuracy']:.1%}", f"{row['at_cap']:.1%}", f"{row['tokens']:.0f}", by


SECTIONS = {"numbers": numbers, "nano": nano, "parity": parity}


def rewritten(readme: str) -> str:
    """README text with the sections between their marks."""
    for name, made in SECTIONS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = readme.split(begin)
        readme = f"{before}{begin}\n{made()}{end}{rest.split(end)[1]}"
    return readme


if __name__ == "__main__":
    path = REPO / "README.md"
    path.write_text(rewritten(path.read_text()))
