"""``berrylm train-nano``: make the shipped checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from .common import Device, clear_errors


def train_nano(
    out: Annotated[Path, typer.Option(help="folder for the checkpoint, its log and the loss plot")],
    config: Annotated[str, typer.Option(help="nano, or micro: the same path on a CPU in a minute")] = "nano",
    device: Device = "cuda",
    minutes: Annotated[float | None, typer.Option(help="time for the training alone; default: the recipe's", min=0.01)] = None,
    limit_minutes: Annotated[float, typer.Option(help="the whole command; the training is shortened to fit", min=0.1)] = 8.7,
    eval_minutes: Annotated[float, typer.Option(help="kept for the evaluation, which stops by then", min=0.0)] = 1.0,
    evaluation: Annotated[bool, typer.Option("--eval/--no-eval", help="evaluate the saved checkpoint")] = True,
    problems: Annotated[int, typer.Option(help="problems of each evaluated task", min=1)] = 200,
    eval_backend: Annotated[str, typer.Option(help="backend of the evaluation")] = "auto",
    eval_dtype: Annotated[str, typer.Option(help="dtype of the evaluation")] = "float32",
    rehearse: Annotated[bool, typer.Option(help="run the evaluation once while the training starts up, on a GPU")] = True,
    rate: Annotated[float | None, typer.Option(help="peak learning rate; default: the recipe's", min=0.0)] = None,
    seed: Annotated[int, typer.Option(help="of the weights and the data")] = 0,
    workers: Annotated[int | None, typer.Option(help="processes that make data; default: the cores less two", min=0)] = None,
    texts: Annotated[Path | None, typer.Option(help="folder of tokenizer.json and chat_template.jinja; default: shipped")] = None,
    compiled: Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile; default: on a GPU")] = None,
    kernels: Annotated[str | None, typer.Option(help="recurrence: fla or torch; default: fla on a GPU")] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="compare the kernels with the torch form first")] = True,
) -> None:
    """Train a checkpoint within a time budget, save it in the official format, evaluate it."""
    import os
    from dataclasses import replace

    import torch

    from ..training.recipe import RECIPES, SHIPPED
    from ..training.record import write_log
    from ..training.train import Options, Timeline, train

    with clear_errors():
        timeline = Timeline()
        if config not in RECIPES:
            raise ValueError(f"train-nano: config: expected one of {sorted(RECIPES)}, got {config!r}")
        if device not in ("cpu", "cuda") or device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"train-nano: device: expected cpu, or cuda where torch finds a GPU, got {device!r}")
        kernels = kernels or ("fla" if device == "cuda" else "torch")
        if kernels not in ("fla", "torch") or kernels == "fla" and device == "cpu":
            raise ValueError(f"train-nano: kernels: expected torch, or fla on a GPU, got {kernels!r}")
        recipe = RECIPES[config] if rate is None else replace(RECIPES[config], rate=rate)
        end = timeline.begin + 60 * limit_minutes
        reserve = 15 + 60 * (eval_minutes if evaluation else 0)  # saving, plotting, the end of the processes
        options = Options(
            out=out,
            texts=texts or SHIPPED,
            device=device,
            seed=seed,
            workers=max(0, (os.cpu_count() or 1) - 2) if workers is None else workers,
            seconds=60 * (recipe.minutes if minutes is None else minutes),
            deadline=end - reserve,
            kernels=kernels,
            compiled=device == "cuda" if compiled is None else compiled,
            check=check,
            rehearsal=(eval_backend, eval_dtype) if evaluation and rehearse and device == "cuda" else None,
        )
        model, log = train(recipe, options, timeline)
        if evaluation:
            from ..training.evaluate import evaluate, print_table

            del model
            if device == "cuda":
                torch.cuda.empty_cache()
            log["evaluation"] = evaluate(
                out, problems=problems, device=device, backend=eval_backend, dtype=eval_dtype, deadline=end - 5
            )
            print_table(log["evaluation"])
            timeline.mark("evaluated")
        log["timeline"] = timeline.marks
        write_log(out, log)
        print("timeline: " + ", ".join(f"{name} {at:.0f} s" for name, at in timeline.marks), flush=True)
