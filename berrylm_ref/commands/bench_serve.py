"""``berrylm bench serve``: an engine of this process, or a server, under load."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from .common import SHIPPED, BackendName, Device, Dtype, clear_errors, progress_bar


def serve(
    model: Annotated[Path | None, typer.Option(help="checkpoint folder; default: the shipped one, with --url none")] = None,
    url: Annotated[str | None, typer.Option(help="measure the server at http://HOST:PORT in place of an engine here")] = None,
    launch: Annotated[bool, typer.Option("--launch", help="start berrylm serve for --model and measure it")] = False,
    vocab_size: Annotated[int | None, typer.Option(help="with --url and no --model: prompt ids are below this", min=1)] = None,
    name: Annotated[str | None, typer.Option(help="with --url: the model's name there, for servers that ask for it")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="BERRYLM_API_KEY", help="what the server asks for")] = None,
    workload: Annotated[str, typer.Option(help="random or shared-prefix")] = "random",
    input_len: Annotated[int, typer.Option(help="tokens of a prompt")] = 1024,
    output_len: Annotated[int, typer.Option(help="tokens of an answer")] = 128,
    prefix_len: Annotated[int, typer.Option(help="shared-prefix: tokens that a group has in common")] = 0,
    groups: Annotated[int, typer.Option(help="shared-prefix: how many prefixes there are")] = 1,
    concurrency: Annotated[int, typer.Option(help="requests in flight")] = 8,
    requests: Annotated[int, typer.Option(help="requests in all")] = 32,
    warmup: Annotated[int, typer.Option(help="requests before the clock starts, with prompts of their own", min=0)] = 4,
    seed: Annotated[int, typer.Option(help="fixes the prompts")] = 0,
    prefix_cache: Annotated[str, typer.Option(help="of an engine here: auto, extra_buffer, no_buffer or off")] = "auto",
    out: Annotated[Path | None, typer.Option(help="write the JSON there as well")] = None,
    plot: Annotated[Path | None, typer.Option(help="write a PNG there")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: BackendName = "auto",
) -> None:
    """Requests/s, tokens/s, TTFT, TPOT and cache hits of greedy answers of full length, as JSON; progress on stderr."""
    from dataclasses import asdict, replace

    from ..bench.client import parse_url, run_over_http
    from ..bench.drive import run_in_process
    from ..bench.plot import plot as draw
    from ..bench.server import launched
    from ..bench.workload import Workload
    from ..config import BerryLMConfig
    from ..engine.llm import LLM

    if launch and url:
        raise typer.BadParameter("expected --launch (a server of --model) or --url (a running one), got both")
    if url and model is None and vocab_size is None:
        raise typer.BadParameter("with --url expected --vocab-size, or --model to read it from")
    if (url or launch) and prefix_cache != "auto":
        raise typer.BadParameter("--prefix-cache is for an engine here; a server has its own setting")
    model = model if url else model or SHIPPED
    with clear_errors():
        load = Workload(input_len, output_len, concurrency, requests, workload, prefix_len, groups, seed)
        first = replace(load, requests=max(1, warmup), seed=seed + 1)
        if url:
            parse_url(url)
        if url or launch:
            vocab = vocab_size or BerryLMConfig.from_pretrained(model).vocab_size
            options = ("--dtype", dtype, "--device", device, "--backend", backend, "--max-running-requests", str(concurrency))
            client = {"model": name, "api_key": api_key}
            with launched(model, *options) if launch else nullcontext(url) as where:
                if warmup:
                    run_over_http(where, first, vocab, **client)
                with progress_bar("requests", requests) as bar:
                    run = run_over_http(where, load, vocab, progress=bar, **client)
        else:
            llm = LLM(
                model, dtype=dtype, device=device, backend=backend, max_running_requests=concurrency, prefix_cache=prefix_cache
            )
            if warmup:
                run_in_process(llm, first)
            with progress_bar("requests", requests) as bar:
                run = run_in_process(llm, load, progress=bar)
        how = "launched" if launch else url or "in process"
        result = {"workload": asdict(load), "how": how, **run.summary()}
        text = json.dumps(result, indent=1)
        if out:
            out.write_text(text + "\n")
        if plot:
            draw(run, f"{load.name}, {how}: {run.output_tokens_per_s:.0f} output tokens/s", plot)
        print(text)
