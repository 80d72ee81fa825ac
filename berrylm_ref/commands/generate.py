"""``berrylm generate``: continue one prompt."""

from pathlib import Path
from typing import Annotated

import typer

from .common import SHIPPED, BackendName, Device, Dtype, Model, clear_errors


def generate(
    model: Model = SHIPPED,
    prompt: Annotated[str | None, typer.Option(help="text of the prompt")] = None,
    ids: Annotated[str | None, typer.Option(help="token ids of the prompt, separated by spaces or commas")] = None,
    max_tokens: Annotated[int, typer.Option(help="most new tokens")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="fixes the draws")] = None,
    shadow: Annotated[Path | None, typer.Option(help="CSV: every kernel beside its torch twin, on the same tensors")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: BackendName = "auto",
) -> None:
    """Continue one prompt; prints text, or token ids when the folder has no tokenizer."""
    from contextlib import nullcontext

    from ..backend import TORCH
    from ..engine.llm import LLM
    from ..engine.params import SamplingParams
    from ..shadow import Shadow

    if (prompt is None) == (ids is None):
        raise typer.BadParameter("expected exactly one of --prompt and --ids")
    with clear_errors():
        tokens = None if ids is None else token_ids(ids)
        # what a CUDA graph replays calls no op
        llm = LLM(model, dtype=dtype, device=device, backend=backend, cuda_graphs=None if shadow is None else False)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        request = llm.requests(prompt if tokens is None else tokens, params)[0]
        with nullcontext() if shadow is None else Shadow(llm.model, shadow, TORCH):
            for text in llm.stream(request):
                print(text, end="", flush=True)
        print("" if llm.tokenizer else " ".join(map(str, request.output_ids)))


def token_ids(text: str) -> list[int]:
    try:
        return [int(x) for x in text.replace(",", " ").split()]
    except ValueError as error:
        raise ValueError(f"generate: ids: expected integers separated by spaces or commas, got {text!r}") from error
