"""The command: wrong arguments end it with one line and status 2, a signal ends the server."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from models import checkpoint
from typer.testing import CliRunner

from berrylm_ref.cli import app
from berrylm_ref.shipped import served_name, shipped_checkpoint


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.mark.parametrize(
    "options,message",
    [
        (["--ids", "1 x"], "ids: expected integers separated by spaces or commas, got '1 x'"),
        (["--ids", ""], "expected at least one token"),
        (["--ids", "999"], "expected token ids in 0 .. 96, got 999"),
        (["--prompt", "hi"], "the model folder has no tokenizer.json"),
        (["--ids", "1", "--max-tokens", "0"], "max_tokens: expected an integer, 1 or more, got 0"),
        (["--ids", "1", "--dtype", "int8"], "dtype: expected one of"),
        (["--ids", "1", "--backend", "x"], "get_backend: name: expected"),
        (["--ids", "1", "--device", "x"], "device: expected one that is here, as 'cpu', got 'x'"),
        (["--ids", "1", "--device", "cuda:99"], "device: expected one that is here, as 'cpu', got 'cuda:99'"),
        (["--ids", "1", "--device", "meta"], "device: expected one with memory"),
        (["--ids", "1", "--shadow", "x.csv"], "shadow: backend: expected one with ops of its own"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(options, message):
    """A device that is not there and a file that can't be written ended in tracebacks."""
    done = invoke("generate", "--model", checkpoint(), *options)
    assert done.exit_code == 2 and message in done.stderr
    assert [x for x in done.stderr.splitlines() if "INFO" not in x] == done.stderr.splitlines()[-1:]


@pytest.mark.parametrize("args", [["bogus"], ["serve", "--model", "/", "--port", "65536"], ["serve", "--model", "/nowhere"]])
def test_wrong_commands_ports_and_folders_are_status_2(args):
    assert invoke(*args).exit_code == 2


@pytest.mark.parametrize("row", ["moe,0,x,1,2,float32", "moe,0,1,1,2,int9", "moe,0", "moe,a,1,1,2,float32"])
def test_a_damaged_shadow_report_is_refused_by_its_row(tmp_path, row):
    path = tmp_path / "s.csv"
    path.write_text("op,layer,rel_l2,max_diff,shape,dtype\nmoe,0,0,0,2,float32\n" + row + "\n")
    done = invoke("shadow-report", path)
    assert done.exit_code == 2 and "expected numbers and a known dtype in row 2" in done.stderr
    assert invoke("shadow-report", tmp_path / "missing.csv").exit_code == 2 == invoke("shadow-report", tmp_path).exit_code


def test_without_a_model_the_shipped_one_speaks():
    """A fresh install has something to say; a server calls it by its full name and any other folder by the folder's."""
    done = invoke("generate", "--prompt", "<|user|>Hi<|end|>", "--max-tokens", 3)
    assert done.exit_code == 0 and done.stdout.strip()
    assert served_name(shipped_checkpoint()) == "berrylm-nano" and served_name("/a/nano/../other") == "other"


@pytest.fixture
def server():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "berrylm_ref.cli", "serve", "--model", str(checkpoint()), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
            break
        except httpx.HTTPError:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.2)
    yield process, f"http://127.0.0.1:{port}", command
    process.kill()
    process.wait(10)


def test_a_signal_ends_the_server_in_mid_stream_and_a_taken_port_is_said(server):
    process, url, command = server
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2 and "serve: port: expected a free one" in second.stderr and "Traceback" not in second.stderr
    body, plain = {"prompt": [1, 2], "max_tokens": 15_000, "ignore_eos": True}, []
    waiting = threading.Thread(target=lambda: plain.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30)))
    waiting.start()
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        process.wait(20)
        assert time.monotonic() - begin < 12
    waiting.join(10)
    assert plain[0].status_code == 503 and plain[0].json()["error"]["type"] == "server_error"
    assert "Traceback" not in process.stderr.read()
