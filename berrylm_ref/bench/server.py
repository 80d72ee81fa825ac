"""A server to measure: ``berrylm serve`` in a process of its own, or an engine of this process behind a socket."""

import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..engine.llm import LLM

START_SECONDS = 600  # loading 37 GB takes its time


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def launched(model: Path, *options: str) -> Iterator[str]:
    """``berrylm serve --model`` with ``options`` on a free port; its URL once it is healthy. Ended on leaving."""
    port = free_port()
    command = [sys.executable, "-m", "berrylm_ref.cli", "serve", "--model", str(model), "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", lambda: process.poll() is None)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def served(llm: LLM, name: str = "bench") -> Iterator[str]:
    """``llm`` behind a socket of this process, for weights that lie in no folder; its URL. ``llm`` is free again on leaving."""
    try:
        import uvicorn

        from ..server.app import create_app
    except ImportError as error:
        raise ValueError(f"bench: http: expected the extra 'server' (berrylm-ref[server]), got {error}") from error
    port, app = free_port(), create_app(llm, name)
    # the loop that gives up the interpreter's lock whenever it writes to a socket: the engine's thread waits for it
    config = uvicorn.Config(app, host="127.0.0.1", port=port, http="h11", loop="asyncio", ws="none", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", thread.is_alive)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        scheduler = llm.engine.scheduler
        for request in [*scheduler.waiting, *(running.request for running in scheduler.running)]:  # a client that was killed
            llm.engine.cancel(request)


def wait_until_healthy(url: str, alive) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and alive():
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ValueError(f"bench: {url}: expected a server that starts, it ended or was not healthy after {START_SECONDS} s")
