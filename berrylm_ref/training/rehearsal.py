"""The evaluation rehearsed in a process of its own while the training starts up: on a fresh machine its kernels take long to
compile, and what it leaves in Triton's cache spares the minute after the training. It also shows early whether it runs."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROBLEMS = 30  # of a task: together enough to fill a forward of the real evaluation


class Rehearsal:
    """``start`` it on a saved checkpoint, ``end`` it before it is in the way."""

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._output = None

    def start(self, folder: Path, device: str, backend: str, dtype: str) -> None:
        command = [sys.executable, "-m", "berrylm_ref.cli", "eval", "--model", str(folder), "--problems", str(PROBLEMS)]
        command += ["--device", device, "--backend", backend, "--dtype", dtype]
        self._output = tempfile.TemporaryFile("w+")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, env=environment)

    def end(self) -> None:
        """Stop it if it still runs; say so if it failed."""
        if self._process is None:
            return
        status = self._process.poll()
        if status is None:
            self._process.kill()
            self._process.wait()
            print("the rehearsed evaluation was still running and was stopped", flush=True)
        elif status:
            self._output.seek(0)
            print(f"the rehearsed evaluation ended with status {status}:\n{self._output.read()[-3000:]}", flush=True)
        else:
            print("the rehearsed evaluation ran to its end", flush=True)
        self._output.close()
        self._process = None
