"""``berrylm parity``: how far a server, or another implementation of the model's parts, is from the reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from .common import SHIPPED, BackendName, Device, Dtype, Model, clear_errors
from .generate import token_ids

parity = typer.Typer(add_completion=False)

Json = Annotated[Path | None, typer.Option("--json", help="write every number here")]
Plot = Annotated[Path | None, typer.Option(help="write a picture (PNG) here")]
Prompts = Annotated[Path | None, typer.Option(help="own prompts: a JSON list of ids, or a JSON string, in each line")]
Seed = Annotated[int, typer.Option(help="of the built-in prompts")]
SIDES = "torch-fp64|fp32|bf16, triton-fp32|bf16, both also with +clamped, +difference or +sglang; fla-bf16; transformers"
ReferenceDevice = Annotated[str, typer.Option(help="where the reference runs: cpu or cuda")]


@parity.callback(invoke_without_command=True)
def served(
    context: typer.Context,
    model: Model = SHIPPED,
    url: Annotated[str | None, typer.Option(help="server to compare, as http://127.0.0.1:30000")] = None,
    launch: Annotated[bool, typer.Option(help="start our own server for the run")] = False,
    api_key: Annotated[str | None, typer.Option(help="sent as a bearer token")] = None,
    protocol: Annotated[str, typer.Option(help="auto, generate (SGLang) or completions (OpenAI, vLLM)")] = "auto",
    prompts: Prompts = None,
    short: Annotated[int, typer.Option(help="built-in prompts of 20 to 400 ids", min=0)] = 8,
    documents: Annotated[int, typer.Option(help="built-in documents of 6000 to 8000 ids", min=0)] = 2,
    document_length: Annotated[int | None, typer.Option(help="ids of each document instead", min=20)] = None,
    new_tokens: Annotated[int, typer.Option(help="tokens to decode after each prompt", min=1)] = 16,
    window: Annotated[int, typer.Option(help="documents: means over so many tokens", min=1)] = 8192,
    quick: Annotated[bool, typer.Option(help="prompts up to 120 ids, documents of 600: for a CPU")] = False,
    seed: Seed = 0,
    reference_dtype: Annotated[str, typer.Option(help="float32 or float64")] = "float32",
    reference_device: ReferenceDevice = "cpu",
    budget: Annotated[float, typer.Option(help="largest mean |delta logprob|, as a multiple of the floor")] = 1.2,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: BackendName = "auto",
    tp: Annotated[int, typer.Option(help="processes that share every layer of that server, a GPU each")] = 1,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Score fixed ids and decode greedily over HTTP, and compare with the teacher-forced torch reference.

    --dtype, --device, --backend and --tp are those of the server that --launch starts. The floor, bf16 torch on the same ids, is
    measured in the same run. What it is at goes to stderr. The exit status is 1 when something is out of budget.
    """
    if context.invoked_subcommand is not None:
        return
    from contextlib import nullcontext

    from rich.console import Console

    from ..model import as_device
    from ..parity.client import Http
    from ..parity.connect import connect
    from ..parity.launch import launched
    from ..parity.measure import measure
    from ..parity.progress import Progress
    from ..parity.report import draw, print_result, write_json

    if (url is None) == (not launch):
        raise typer.BadParameter("expected exactly one of --url and --launch")
    console, on_step = Console(), Progress()
    with clear_errors():
        as_device(reference_device)  # refused before a server starts
        own = texts(
            model, prompts, on_step, new_tokens=new_tokens, short=short, documents=documents, document_length=document_length,
            quick=quick, seed=seed,
        )  # fmt: skip
        on_step("starting a server" if launch else f"connecting to {url}")
        with launched(model, dtype, device, backend, "--tp", str(tp)) if launch else nullcontext(url) as address:
            api = connect(Http(address, api_key), protocol, own[0].ids[:4])
            result = measure(
                model, api, own, new_tokens=new_tokens, reference_dtype=reference_dtype, device=reference_device,
                budget=budget, window=window, on_step=on_step,
            )  # fmt: skip
        print_result(result, console)
        if json is not None:
            write_json(result, json)
        if plot is not None:
            draw(result, plot)
    if result.findings:
        raise typer.Exit(1)


def texts(model: Path, prompts: Path | None, on_step: Callable[[str], None], **options):
    """The prompts of the options: a file's, or the built-in ones cut to the model's context, which is said."""
    from ..config import BerryLMConfig
    from ..parity.prompts import read_prompts, seeded_prompts
    from ..tokenizer import Tokenizer

    config, tokenizer = BerryLMConfig.from_pretrained(model), Tokenizer.from_folder(model)
    if prompts is not None:
        return read_prompts(prompts, tokenizer, options["seed"])
    own = seeded_prompts(vocab_size=config.vocab_size, context=config.max_position_embeddings, tokenizer=tokenizer, **options)
    if not own:
        raise ValueError("parity: prompts: expected at least one, got --short 0 --documents 0")
    lengths, asked = [len(prompt.ids) for prompt in own if prompt.kind == "document"], options["document_length"] or 0
    if lengths and max(lengths) < asked:
        context = config.max_position_embeddings
        on_step(f"documents have {max(lengths)} ids, not {asked}: the context of the model holds {context}")
    return own


@parity.command()
def layers(
    a: Annotated[str, typer.Option(help=f"trusted side: {SIDES}")],
    b: Annotated[str, typer.Option(help="side to judge, one of the same")],
    model: Model = SHIPPED,
    ids: Annotated[str | None, typer.Option(help="token ids of one prompt, separated by spaces or commas")] = None,
    prompts: Prompts = None,
    length: Annotated[int, typer.Option(help="ids of the longer of the two built-in prompts", min=10)] = 200,
    factor: Annotated[float, typer.Option(help="budget of a tensor in lockstep, as a multiple of the floor there")] = 3.0,
    layer_factor: Annotated[float, typer.Option(help="budget of a layer running free, as a multiple of the floor there")] = 2.0,
    seed: Seed = 0,
    load: Annotated[Path | None, typer.Option(help="Python file that registers backends of your own (register_backend)")] = None,
    device: Device = "cpu",
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Where side b leaves side a: error layer by layer, then every op on the same inputs. Exit status 1 when out of budget."""
    import runpy

    from rich.console import Console

    from ..parity.layers import compare_layers
    from ..parity.layers_report import draw_layers, print_layers, write_layers
    from ..parity.progress import Progress
    from ..parity.sides import Sides

    if ids is not None and prompts is not None:
        raise typer.BadParameter("expected at most one of --ids and --prompts")
    console, on_step = Console(), Progress()
    with clear_errors():
        if ids is not None:
            own = [token_ids(ids)]
        elif prompts is not None:
            own = [prompt.ids for prompt in texts(model, prompts, on_step, seed=seed)]
        else:
            built = texts(model, None, on_step, new_tokens=1, short=0, documents=1, document_length=length, seed=seed)[0].ids
            own = [built, built[: len(built) * 3 // 5]]
        if load is not None:
            runpy.run_path(str(load))
        sides = Sides(model, device)
        on_step(f"loading {a} and {b}")
        one, other = sides.side(a), sides.side(b)
        report = compare_layers(sides, one, other, own, factor=factor, hidden_factor=layer_factor, on_step=on_step)
        print_layers(report, console)
        if json is not None:
            write_layers(report, json)
        if plot is not None:
            draw_layers(report, plot)
    if not report.ok:
        raise typer.Exit(1)
