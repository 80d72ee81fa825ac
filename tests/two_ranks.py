"""Engines and servers of two ranks, and what becomes of their processes."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
from served import free_port

from berrylm_ref import LLM

SECONDS = 10  # in which everything has ended after a death
LINES = 20  # of a server's output until it says how to ask it; NCCL's version is among them where NCCL_DEBUG is set


@contextmanager
def opened(path, **options):
    llm = LLM(path, **{"max_total_tokens": 4096, "snapshot_bytes": 2**21, **options})
    try:
        yield llm
    finally:
        llm.close()


def recorded(llm):
    """The logits of every forward from here on."""
    forward, out = llm.engine.runner.forward, []
    llm.engine.runner.forward = lambda parts: out.append(forward(parts).clone()) or out[-1]
    return out


def ended(pid):
    """Whether the process is gone, or only waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


def children(pid):
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def started(code, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *code], env=environment, text=True, stdout=subprocess.PIPE, **options)


@contextmanager
def serving(folder, *options):
    """``berrylm serve --tp 2``: the process, its other rank's pid, and a client."""
    port = free_port()
    command = ["-m", "berrylm_ref.cli", "serve", "--model", str(folder), "--tp", "2", "--port", str(port), *options]
    server = started(command, stderr=subprocess.PIPE)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            said = []
            while not any("curl" in line for line in said):
                said.append(server.stdout.readline())
                assert said[-1] and len(said) < LINES, said

            def up():
                try:
                    return client.get("/health").status_code == 200
                except httpx.HTTPError:
                    return False

            wait_for(up, 30)
            commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children(server.pid)}
            (pid,) = [child for child, command in commands.items() if b"berrylm_ref.engine.follower" in command]
            yield server, pid, client
    finally:
        server.kill()
        server.wait()


def outcome(client, body):
    try:
        return client.post("/v1/completions", json=body).status_code
    except httpx.HTTPError as error:
        return type(error).__name__
