"""A training run: start-up, steps until the time is spent, checkpoints on the way, the record."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from ..model import BerryLM
from ..ops.kda import CHUNK
from .batches import Batches, HostBatch, kind_names, load_texts
from .checkpoint import save_checkpoint
from .data import conversation, encode
from .forward import Forward
from .initial import initialise
from .meter import Meter, sharpness
from .optimiser import make_optimiser, rate_factor, set_rate
from .recipe import Recipe
from .record import commit, machine, plot_loss, write_log
from .recurrence import (
    check_recurrence,
    finish_compiling,
    fla_recurrence,
    keep_candidates,
    start_compiling,
    torch_recurrence,
)
from .rehearsal import Rehearsal
from .step import Step, to_device

REPORT_SECONDS = 10
CHECKPOINTS = 4  # a run, the last one included
IN_FLIGHT = 2  # steps that the host may be ahead of the GPU: the schedule goes by the host's clock
END = "<|end|>"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a recipe is run here. ``deadline``: the ``time.monotonic()`` by which the training, but not what follows, has ended."""

    out: Path
    texts: Path  # folder of the tokenizer and the template
    device: str
    seed: int
    workers: int
    seconds: float
    deadline: float
    kernels: str  # "fla" | "torch"
    compiled: bool
    check: bool
    rehearsal: tuple[str, str] | None  # backend and dtype of the evaluation to rehearse


@dataclass
class Timeline:
    """Named moments of the command, in seconds since it began."""

    begin: float = field(default_factory=time.monotonic)
    marks: list[tuple[str, float]] = field(default_factory=list)

    def mark(self, name: str) -> None:
        self.marks.append((name, round(time.monotonic() - self.begin, 1)))
        print(f"[{self.marks[-1][1]:7.1f} s] {name}", flush=True)


def train(recipe: Recipe, options: Options, timeline: Timeline) -> tuple[BerryLM, dict]:
    """Run ``recipe``; the checkpoint and its record lie in ``options.out``. Returns the fp32 model and the log."""
    device, cuda = options.device, options.device == "cuda"
    tokenizer, _ = load_texts(options.texts)
    end, pad = (tokenizer.fast.token_to_id(name) for name in (END, "<|pad|>"))
    config = recipe.config(end, pad)
    if end is None or tokenizer.size > config.vocab_size:
        expected = f"{END} and at most {config.vocab_size} tokens"
        raise ValueError(f"train-nano: tokenizer: expected {expected}, got id {end} and {tokenizer.size} tokens")
    with Batches(recipe, options.texts, options.seed, options.workers) as batches:
        timeline.mark("data workers started")
        shapes = [(recipe.tokens // length, length) for length in recipe.buckets]
        shapes.sort(key=lambda shape: abs(shape[1] - 2 * CHUNK))  # kernels are tuned on the first: an ordinary one
        compiling = start_compiling(config, shapes) if options.kernels == "fla" else []
        torch.manual_seed(options.seed)
        model = BerryLM(config, backend="torch")
        initialise(model, options.seed)
        rehearsal = Rehearsal()
        if options.rehearsal:
            save_checkpoint(model, options.out, options.texts)
            rehearsal.start(options.out, device, *options.rehearsal)
        model.to(device)
        count = sum(p.numel() for p in model.parameters())
        how = f"recurrence {options.kernels}, {'compiled' if options.compiled else 'not compiled'}"
        print(f"{recipe.name}: {count:,} parameters on {device}, {how}", flush=True)
        dtype = torch.bfloat16 if cuda else torch.float32
        forward = Forward(model, stand_in, dtype, options.compiled)
        meter = Meter(kind_names(recipe), config.num_hidden_layers, config.num_experts, device)
        step = Step(forward, make_optimiser(model, recipe, device), recipe, meter)
        if options.compiled:
            warm_up(step, shapes[0], device)
            timeline.mark("regions compiled")
        finish_compiling(compiling)
        errors = None
        if options.kernels == "fla":
            forward.recurrence = fla_recurrence()
            keep_candidates()
            for shape in shapes:
                warm_up(step, shape, device)
            timeline.mark("recurrence kernels compiled and tuned")
            if options.check:
                errors = check_recurrence(forward.recurrence, config, device, dtype)
        else:
            forward.recurrence = torch_recurrence
        log = {
            "recipe": asdict(recipe) | {"parameters": count},
            "seed": options.seed,
            "commit": commit(),
            "machine": machine() | {"kernels": options.kernels, "compiled": options.compiled, "workers": options.workers},
            "recurrence_rel_l2": errors,
            "curve": [],
            "kinds": [],
        }
        timeline.mark("ready")
        try:
            run(recipe, options, step, batches, log, timeline, rehearsal)
        finally:
            rehearsal.end()
    log["timeline"] = timeline.marks
    write_log(options.out, log)
    plot_loss(options.out, log)
    return model, log


def run(
    recipe: Recipe, options: Options, step: Step, batches: Batches, log: dict, timeline: Timeline, rehearsal: Rehearsal
) -> None:
    """Steps until the budget is spent. The schedule follows the clock, so that the rate always reaches zero."""
    begin = time.monotonic()
    budget = min(options.seconds, options.deadline - begin)
    if budget <= 0:
        raise ValueError(f"train-nano: minutes: expected time left to train in, start-up used it all ({budget:.0f} s left)")
    print(f"training for {budget:.0f} s", flush=True)
    sample = ordinary_prompts(options.texts, kind_names(recipe)[0])
    log["sharpness"] = [{"step": 0, "layers": step_sharpness(step, sample, options.device)}]
    pace, losses, done, saved = Pace(options.device), [], 0, 1
    reported = (begin, 0)
    tokens = 0
    for host in batches:
        now = time.monotonic()
        progress = (now - begin) / budget
        if progress >= 1:
            break
        set_rate(step.optimiser, rate_factor(recipe, progress))
        batch = to_device(host, options.device)
        losses.append(step(batch))
        tokens += batch.tokens
        done += 1
        pace.wait()
        if now - reported[0] >= REPORT_SECONDS or done in (1, 10):
            report(step, log, losses, done, progress, time.monotonic() - reported[0], batches)
            reported = (time.monotonic(), done)
        if progress >= saved / CHECKPOINTS:
            rehearsal.end()
            save_checkpoint(step.forward.model, options.out, options.texts)
            write_log(options.out, log)
            print(f"checkpoint at {progress:.0%} in {options.out}", flush=True)
            saved += 1
    elapsed = time.monotonic() - begin
    report(step, log, losses, done, 1.0, time.monotonic() - reported[0], batches)
    save_checkpoint(step.forward.model, options.out, options.texts)
    log["sharpness"].append({"step": done, "layers": step_sharpness(step, sample, options.device)})
    log["steps"], log["seconds"], log["tokens"], log["tokens_per_s"] = done, elapsed, tokens, round(tokens / elapsed)
    log["waited_for_data_s"] = round(batches.waited, 1)
    print(f"{done} steps, {tokens / 1e6:.1f}M tokens in {elapsed:.0f} s: {tokens / elapsed:,.0f} tokens/s", flush=True)
    for entry in log["sharpness"]:
        print(f"most forgotten (log2) at step {entry['step']}: {entry['layers']}", flush=True)
    timeline.mark("trained and saved")


def report(step: Step, log: dict, losses: list[Tensor], done: int, progress: float, seconds: float, batches: Batches) -> None:
    """Read the meter, extend the log, print two lines. A loss that is no number ends the run: the last checkpoint stays."""
    values = step.meter.read()
    first = done - len(losses) + 1
    log["curve"] += [[first + i, round(x, 5)] for i, x in enumerate(torch.stack(losses).tolist() if losses else [])]
    losses.clear()
    if not values["steps"]:
        return
    log["usage"] = values.pop("usage")
    log["kinds"].append({"step": done} | {k: values[k] for k in ("loss", "exact", "grad_norm", "kinds")})
    idle = min(min(layer) for layer in log["usage"]) * len(log["usage"][0])
    print(
        f"step {done:5d} {progress:4.0%} rate x{rate_factor(step.recipe, progress):.2f} loss {values['loss']:.4f} "
        f"exact {values['exact']:.3f} grad {values['grad_norm']:.2f} {values['tokens'] / max(seconds, 1e-9):9,.0f} tokens/s, "
        f"least used expert {idle:.2f}, waited {batches.waited:.1f} s, {batches.ready()} batches ahead",
        flush=True,
    )
    print("   " + " ".join(f"{k} {v['loss']:.3f}/{v['exact']:.2f}" for k, v in values["kinds"].items()), flush=True)
    if not math.isfinite(values["loss"]) or not math.isfinite(values["grad_norm"]):
        got = f"{values['loss']} with gradient {values['grad_norm']}"
        raise ValueError(f"train-nano: loss: expected a number, got {got} at step {done}")


class Pace:
    """Keeps the host at most ``IN_FLIGHT`` steps ahead of a GPU; nothing to do on a CPU."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.events: deque = deque()

    def wait(self) -> None:
        if self.cuda:
            self.events.append(torch.cuda.Event())
            self.events[-1].record()
            if len(self.events) > IN_FLIGHT:
                self.events.popleft().synchronize()


def stand_in(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Not a recurrence, but differentiable in all its inputs: with it the regions can be compiled while the kernels are."""
    mean = sum(x.float().mean() for x in (q, k, g))
    return (v.float() * beta.unsqueeze(-1) + mean).to(v.dtype)


def warm_up(step: Step, shape: tuple[int, int], device: str) -> None:
    """Loss and gradients once for random ids, no update."""
    ids = torch.randint(0, step.forward.config.vocab_size, shape).numpy().astype("int32")
    targets, lengths = ids > 0, (ids[:, 0] * 0 + shape[1]).astype("int32")
    batch = to_device(HostBatch(ids, targets, lengths, lengths.astype("int64") * 0), device)
    step.loss(batch)[0].backward()
    step.optimiser.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()


def ordinary_prompts(texts: Path, kind: str, count: int = 16) -> Tensor:
    """The first 64 tokens of conversations of ``kind``: ids [count, 64]."""
    tokenizer, template = load_texts(texts)
    rng, rows = Random("sharpness"), []
    while len(rows) < count:
        ids, _ = encode(conversation(kind, rng), tokenizer, template)
        if len(ids) >= CHUNK:
            rows.append(ids[:CHUNK])
    return torch.tensor(rows)


def step_sharpness(step: Step, ids: Tensor, device: str) -> list[dict[str, float]]:
    """``sharpness`` through the uncompiled regions: one short row is no shape of the training."""
    plain: Callable = Forward(step.forward.model, torch_recurrence, torch.float32)
    return [{name: round(x, 1) for name, x in layer.items()} for layer in sharpness(plain, ids.to(device))]
