"""``berrylm eval``: how good a checkpoint is."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .common import SHIPPED, BackendName, Device, Dtype, KdaIntra, Model, clear_errors, progress_bar

COMPARED = ["problems"]  # asked again with --compare


def evaluate(
    model: Model = SHIPPED,
    url: Annotated[str | None, typer.Option(help="ask the server there; default: one that is started for --model")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="BERRYLM_API_KEY", help="the server's key")] = None,
    in_process: Annotated[bool, typer.Option("--in-process", help="no server: an engine in this process")] = False,
    problems: Annotated[int, typer.Option(help="questions of a whole task", min=1)] = 200,
    tasks: Annotated[str | None, typer.Option(help="names of tasks, separated by semicolons; default: all")] = None,
    batch: Annotated[int, typer.Option(help="questions at a time", min=1)] = 32,
    compare: Annotated[str | None, typer.Option(help="ask the problems again with this --kda-intra, as 'clamped'")] = None,
    kda_intra: KdaIntra = "dyadic",
    out: Annotated[Path | None, typer.Option(help="JSON to write")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: BackendName = "auto",
) -> None:
    """Held-out word problems, tool calls and retrieval, over HTTP with the chat API and its parsers; prints a table."""
    from ..parity.launch import launched
    from ..training.evaluate import count, evaluate, evaluate_served, print_table, weights_hash

    with clear_errors():
        if url is not None and (in_process or compare or kda_intra != "dyadic"):
            raise ValueError("eval: url: expected no --in-process, --compare or --kda-intra with it: that server is as it is")
        named = None if tasks is None else [name.strip() for name in tasks.split(";")]

        def run(only: list[str] | None, intra: str) -> dict:
            with progress_bar(f"{intra}:", count(only, problems)) as bar:
                asked = {"problems": problems, "only": only, "batch": batch, "progress": bar}
                if in_process:
                    return evaluate(model, device=device, backend=backend, dtype=dtype, kda_intra=intra, **asked)
                if url is not None:
                    return evaluate_served(url, api_key=api_key, how=url, **asked)
                options = ("--kda-intra", intra, "--max-running-requests", str(batch))
                known = {
                    "how": "launched", "weights_sha256": weights_hash(model), "device": device, "backend": backend,
                    "dtype": dtype, "kda_intra": intra,
                }  # fmt: skip
                with launched(model, dtype, device, backend, *options) as address:
                    return evaluate_served(address, api_key=api_key, **asked, **known)

        result = run(named, kda_intra)
        print_table(result)
        if compare is not None:
            again = run(COMPARED, compare)
            result["compared"] = {key: again[key] for key in ("tasks", "settings")}
            print_table(again)
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(result, indent=1) + "\n")
