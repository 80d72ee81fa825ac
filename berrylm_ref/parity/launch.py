"""Start ``berrylm serve`` for the length of a measurement."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .client import Http, Refused

START_SECONDS, STOP_SECONDS = 600.0, 10.0


@contextmanager
def launched(
    model: str | Path, dtype: str = "float32", device: str = "cpu", backend: str = "auto", *options: str
) -> Iterator[str]:
    """The address of a server of our own on a free port, in a process group of its own that ends with the block.

    options: more of ``berrylm serve``'s.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable, "-m", "berrylm_ref.cli", "serve", "--model", str(model), "--port", str(port),
        "--dtype", dtype, "--device", device, "--backend", backend, *options,
    ]  # fmt: skip
    before = signal.getsignal(signal.SIGTERM)
    # threads that spin while they wait starve each other where cores are shared: a twentieth of the speed was measured
    env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env)
        try:
            signal.signal(signal.SIGTERM, leave)  # the default ends this process without its finally blocks
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(process, url, log)
            yield url
        finally:
            signal.signal(signal.SIGTERM, before)
            end(process)


def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def wait_until_ready(process: subprocess.Popen, url: str, log) -> None:
    """Return when /health answers. ValueError with the end of the server's output if it died or takes too long."""
    deadline, http = time.monotonic() + START_SECONDS, Http(url, timeout=5)
    while True:
        try:
            http.get("/health")
            return
        except Refused:
            raise
        except ValueError as error:  # nobody listens yet
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise ValueError(f"parity: launch: expected a server at {url}, got:\n{log.read()[-2000:]}") from error
        time.sleep(0.2)


def end(process: subprocess.Popen) -> None:
    """Ask the group to stop, then make it; returns when the server is gone."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:  # already gone
            pass
        try:
            process.wait(STOP_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
