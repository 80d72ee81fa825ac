"""Loading holds the weights and about one tensor more, never a second copy of the checkpoint."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from safetensors.torch import save_file

from berrylm_ref import BerryLM
from berrylm_ref.weights import INDEX, SINGLE

if not Path("/proc/self/status").is_file():
    pytest.skip("needs /proc to see the memory of a process", allow_module_level=True)

# Anonymous memory is what the process allocated; the resident set also counts the pages of mapped files it holds.
# Each load runs in a fork of its own, so that nothing an earlier one freed is reused; a small load first brings in what is
# not the checkpoint's, such as the pages of libraries.
PROBE = """
import json, os, sys, threading, time
import torch
from berrylm_ref import BerryLM

torch.set_num_threads(1)

def memory():
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return [1024 * int(lines[name].split()[0]) for name in ("RssAnon", "VmRSS")]

def load(small, folder, dtype):
    BerryLM.from_pretrained(small, dtype=dtype)
    peak, done = memory(), threading.Event()
    before = list(peak)

    def watch():
        while not done.is_set():
            peak[:] = map(max, peak, memory())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = BerryLM.from_pretrained(folder, dtype=dtype)
    peak[:] = map(max, peak, memory())
    done.set()
    watcher.join()
    weights = sum(p.nbytes for p in model.parameters())
    print(json.dumps({"weights": weights, "allocated": peak[0] - before[0], "resident": peak[1] - before[1]}), flush=True)

BerryLM.from_pretrained(sys.argv[1])  # imports, once for all forks
for folder in sys.argv[2:]:
    for dtype in ("float32", "bfloat16"):
        child = os.fork()
        if child == 0:
            load(sys.argv[1], folder, dtype)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


def write(folder, config, tensors, files):
    """Write ``tensors`` in so many files, largest first, so that a shard holds more than its largest tensor."""
    folder.mkdir()
    config.save_pretrained(folder)
    if files == 1:
        save_file(tensors, folder / SINGLE)
        return
    names = sorted(tensors, key=lambda n: -tensors[n].nbytes)
    weight_map = {name: f"part-{i % files}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_peak_is_the_weights_and_one_tensor(golden):
    """A whole state dict beside the model, or a whole mapped shard, would be 2x the weights: 74 GB for the real model."""
    config = tiny_config(hidden_size=512, vocab_size=40_000, num_experts=24, moe_intermediate_size=256)
    shapes = {n: p.shape for n, p in BerryLM(config, device="meta").named_parameters()}
    tensors = {n: torch.full(shape, 0.01) for n, shape in shapes.items()}
    total, largest = sum(x.nbytes for x in tensors.values()), max(x.nbytes for x in tensors.values())
    assert total > 3e8 and largest < 0.3 * total
    pieces = dict(tensors)
    for name in [n for n in pieces if n.endswith("experts.gate_up_proj")]:
        for e, x in enumerate(pieces.pop(name)):
            prefix = f"{name.removesuffix('.gate_up_proj')}.{e}"
            pieces[f"{prefix}.gate_proj.weight"], pieces[f"{prefix}.up_proj.weight"] = x[:256].clone(), x[256:].clone()
    for name in [n for n in pieces if n.endswith("experts.down_proj")]:
        pieces |= {f"{name.removesuffix('.down_proj')}.{e}.down_proj.weight": x.clone() for e, x in enumerate(pieces.pop(name))}
    with tempfile.TemporaryDirectory() as room:
        room = Path(room)
        folders = [room / "one file", room / "two files, per expert"]
        write(folders[0], config, tensors, files=1)
        write(folders[1], config, pieces, files=2)
        command = [sys.executable, "-c", PROBE, golden / "hf-odd", *folders]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    cases = [(folder.name, dtype) for folder in folders for dtype in ("float32", "bfloat16")]
    for result, case in zip(results, cases, strict=True):
        beyond = {kind: result[kind] - result["weights"] for kind in ("allocated", "resident")}
        print(case, {kind: f"{extra / largest:.2f} of the largest tensor" for kind, extra in beyond.items()})
        assert result["allocated"] > 0.9 * result["weights"]  # the probe sees the weights themselves
        assert max(beyond.values()) <= 1.2 * largest
