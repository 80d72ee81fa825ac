"""``make demo``: the whole chain once, on a checkpoint with recorded official outputs.

Loads the official checkpoint, compares logits with the official ones, starts the server, asks it over HTTP for the official
greedy tokens, and stops it. Every line says what it saw; the first mismatch ends the run with an error.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from safetensors.torch import load_file

from . import BerryLM

LIMIT = 1e-5  # fp32 noise is near 1e-6; any real mistake shows above 4e-5


def main(folder: Path) -> None:
    check((folder / "golden.safetensors").is_file(), f"expected golden.safetensors beside a checkpoint in {folder}")
    golden = load_file(folder / "golden.safetensors")
    model = BerryLM.from_pretrained(folder)
    c = model.config
    parameters = sum(p.numel() for p in model.parameters())
    print(f"loaded {folder}: {c.num_hidden_layers} layers ({len(c.linear_layers)} KDA), {parameters:,} parameters")

    with torch.inference_mode():
        logits = model(golden["input_ids"])
    error = float((logits.double() - golden["logits"].double()).norm() / golden["logits"].double().norm())
    print(f"logits {list(logits.shape)}: relative L2 distance to the official ones {error:.1e} (limit {LIMIT:.0e})")
    check(error <= LIMIT, "logits differ from the official ones")

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "berrylm_ref.cli", "serve", "--model", str(folder), "--port", str(port)]
    server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", server)
        print(f"server is up at {url}; models: {[m['id'] for m in fetch(f'{url}/v1/models')['data']]}")
        prompt, want = golden["greedy_prompt_ids"][0].tolist(), golden["greedy_ids"][0].tolist()
        answer = fetch(f"{url}/v1/completions", {"prompt": prompt, "max_tokens": len(want), "temperature": 0})
        got = answer["choices"][0]["token_ids"]
        print(f"greedy ids over HTTP: {got}")
        check(got == want, f"expected the official greedy ids {want}")
        print(f"equal to the official {len(want)} greedy ids; usage {answer['usage']}")
    finally:
        server.terminate()
        server.wait(timeout=30)
    print("server stopped. All equal.")


def fetch(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def wait_for(url: str, server: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check(server.poll() is None, f"the server ended with status {server.poll()}")
        try:
            fetch(url)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    check(False, f"no answer from {url} within {seconds:.0f} s")


def check(ok: bool, message: str) -> None:
    if not ok:
        sys.exit(f"demo: {message}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m berrylm_ref.demo CHECKPOINT_FOLDER_WITH_GOLDEN_TENSORS")
    main(Path(sys.argv[1]))
