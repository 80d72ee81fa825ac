"""``berrylm bench model``: the whole model, at full size or tiny, measured part by part."""

from pathlib import Path
from typing import Annotated

import typer

from .common import BackendName, clear_errors


def model(
    config: Annotated[str, typer.Option(help="berrylm-os, tiny, or a folder with config.json")] = "berrylm-os",
    random_weights: Annotated[bool, typer.Option("--random-weights", help="draw them; else they are the folder's")] = False,
    layers: Annotated[int | None, typer.Option(help="only so many layers, for trials; with --random-weights", min=1)] = None,
    workloads: Annotated[str | None, typer.Option(help="as 1k/512@64,...; '' for none; default: the published five")] = None,
    seconds_per_workload: Annotated[float, typer.Option(help="whole waves are repeated while they fit; one always runs")] = 30,
    time_limit: Annotated[float, typer.Option(help="seconds in all; what does not fit is skipped, the JSON says what")] = 540,
    http: Annotated[bool, typer.Option("--http", help="the workloads once more through the server")] = False,
    http_workloads: Annotated[str | None, typer.Option(help="those of --http; default: all of --workloads")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="decode steps and a prefill, kernel by kernel")] = False,
    check: Annotated[bool, typer.Option("--check", help="against higher precision; cached against uncached")] = False,
    long: Annotated[bool, typer.Option("--long", help="one prompt of the whole context")] = False,
    traffic: Annotated[bool, typer.Option("--traffic", help="requests of all lengths that come and go")] = False,
    prefill_tokens: Annotated[int, typer.Option(help="length of the prompt whose prefill is timed; 0: none", min=0)] = 8192,
    profile_batches: Annotated[str, typer.Option(help="batch sizes of the profiled decode steps")] = "1,16,64",
    profile_context: Annotated[int, typer.Option(help="tokens before a profiled decode step", min=1)] = 1024,
    check_tokens: Annotated[int, typer.Option(help="length of the three prompts of --check", min=1)] = 2048,
    twice_tokens: Annotated[int, typer.Option(help="length of the prompt that --check sends twice", min=1)] = 8050,
    long_tokens: Annotated[int | None, typer.Option(help="length of the long prompt; default: the context", min=1)] = None,
    prefix_cache: Annotated[str, typer.Option(help="auto, extra_buffer, no_buffer or off")] = "auto",
    page_size: Annotated[int, typer.Option(help="tokens of a KV page")] = 16,
    chunk: Annotated[int | None, typer.Option(help="tokens of a forward; default: the engine's")] = None,
    max_total_tokens: Annotated[int | None, typer.Option(help="KV memory in tokens; default: from free memory")] = None,
    cuda_graphs: Annotated[bool | None, typer.Option(help="replay CUDA graphs; default: the engine's choice")] = None,
    rooms: Annotated[bool, typer.Option(help="run short prompts in rooms, where the engine does")] = True,
    overlap: Annotated[bool | None, typer.Option(help="schedule beside the forward; default: the engine's choice")] = None,
    tp: Annotated[int, typer.Option(help="processes that share every layer, a GPU each", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="of the weights")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON; default: kernels/benchmarks/results/<gpu>/model[_tpN].json")] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    backend: BackendName = "auto",
) -> None:
    """Workloads of the published figures beside them and the roofline; prefill rate; on request HTTP, profile, checks, 256k.

    Every part is written as soon as it is done. Status 1 if a part failed or was skipped, or a check did not hold.
    """
    from ..bench.configs import config_named
    from ..bench.full_size import Settings, measure_model
    from ..bench.targets import TARGETS
    from ..bench.workload import parse_workloads
    from ..model import as_device, as_dtype
    from ..sharding import Shard

    with clear_errors():
        if not random_weights and (config in ("berrylm-os", "tiny") or layers):
            raise ValueError("bench model: random_weights: expected --random-weights, or --config with a checkpoint's folder")
        if http_workloads is not None and not http:
            raise ValueError(f"bench model: http_workloads: expected --http with it, got {http_workloads!r} alone")
        as_dtype(dtype), as_device(device)
        Shard(config_named(config, layers), 0, tp)  # refused before weights are drawn
        specs = tuple(TARGETS) if workloads is None else parse_workloads(workloads)
        settings = Settings(
            config=config_named(config, layers),
            name=config if config in ("berrylm-os", "tiny") else Path(config).name,
            folder=None if random_weights else Path(config),
            dtype=dtype,
            device=device,
            backend=backend,
            seed=seed,
            tp=tp,
            workloads=specs,
            seconds_per_workload=seconds_per_workload,
            time_limit=time_limit,
            http=http,
            http_workloads=None if http_workloads is None else parse_workloads(http_workloads),
            profile=profile,
            check=check,
            long=long,
            traffic=traffic,
            prefill_tokens=prefill_tokens,
            profile_batches=batch_sizes(profile_batches),
            profile_context=profile_context,
            check_tokens=check_tokens,
            check_twice_tokens=twice_tokens,
            long_tokens=long_tokens,
            engine={
                "prefix_cache": prefix_cache,
                "page_size": page_size,
                "chunked_prefill_size": chunk,
                "max_total_tokens": max_total_tokens,
                "cuda_graphs": cuda_graphs,
                "prefill_buckets": None if rooms else [],
                "overlap": overlap,
            },
        )
        report = measure_model(settings, out)
    wrong = report.verdict()
    print(f"wrote {report.path}")
    for line in wrong:
        print(f"FAILED {line}")
    if wrong:
        raise typer.Exit(1)


def batch_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(x) for x in text.split(","))
        if min(sizes) >= 1:
            return sizes
    except ValueError:
        pass  # said below
    raise ValueError(f"bench model: profile_batches: expected sizes as 1,16,64, got {text!r}")
