"""``berrylm scale``: replicas of the server on Ray Serve."""

import signal
import threading
from typing import Annotated

import typer

from ..shipped import served_name
from .common import SHIPPED, BackendName, Device, Dtype, Model, clear_errors


def scale(
    model: Model = SHIPPED,
    replicas: Annotated[int, typer.Option(help="whole models, each with a cache of its own", min=1)] = 2,
    host: Annotated[str, typer.Option(help="address to listen on; any but a loopback one lets other machines in")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on", min=1, max=65535)] = 30000,
    served_model_name: Annotated[str | None, typer.Option(help="name in /v1/models; default: the folder's name")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="BERRYLM_API_KEY", help="asked for on every route but /health")] = None,
    max_running_requests: Annotated[int, typer.Option(help="sequences in one forward of a replica")] = 32,
    max_total_tokens: Annotated[int | None, typer.Option(help="KV memory of a replica in tokens; default: by memory")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backend: BackendName = "auto",
    tp: Annotated[int, typer.Option(help="processes that share every layer of a replica, a GPU each")] = 1,
) -> None:
    """Serve the API from several replicas until a signal; prompts that begin alike go to the same one, a dead one is replaced.

    The cluster is the one that RAY_ADDRESS names, or one on this machine for as long as this runs.
    """
    with clear_errors():
        try:
            import ray
            from ray import serve

            from ..server.replicas import deployment
        except ImportError as error:
            raise ValueError(f"scale: expected the extra 'scale' to be installed (berrylm-ref[scale]), got {error}") from error
        from ..config import BerryLMConfig
        from ..model import as_dtype
        from ..sharding import Shard

        as_dtype(dtype), Shard(BerryLMConfig.from_pretrained(model), 0, tp)  # what can be refused here: a replica would try again
        name = served_model_name or served_name(model)
        app = deployment(
            model, replicas, name, api_key=api_key, dtype=dtype, device=device, backend=backend, tp=tp,
            max_running_requests=max_running_requests, max_total_tokens=max_total_tokens,
        )  # fmt: skip
        asked_to_go = threading.Event()
        ray.init(include_dashboard=False, ignore_reinit_error=True)
        try:
            serve.start(http_options={"host": host, "port": port})
            serve.run(app)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: asked_to_go.set())
            print(f"{replicas} replicas of {name} at http://{host}:{port}", flush=True)
            asked_to_go.wait()
        except RuntimeError as error:
            raise ValueError(f"scale: expected {replicas} replicas to start: {error}") from error
        finally:
            serve.shutdown()
            ray.shutdown()
