"""The README says what is there: its numbers come from the results, its commands and its tree exist."""

import importlib.util
import json
import re
from pathlib import Path

from berrylm_ref.shipped import shipped_checkpoint
from berrylm_ref.training.evaluate import weights_hash
from berrylm_ref.training.tasks import TASKS

REPO = Path(__file__).parents[1]
README = (REPO / "README.md").read_text()


def test_the_numbers_are_those_of_the_results():
    """No hand-typed figure: run kernels/benchmarks/readme.py after a benchmark."""
    spec = importlib.util.spec_from_file_location("readme", REPO / "kernels" / "benchmarks" / "readme.py")
    readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
    assert readme.rewritten(README) == README


def test_the_evaluation_is_of_the_weights_that_ship():
    """New weights, old figures: run the command that the README names, then kernels/benchmarks/readme.py."""
    found = json.loads((REPO / "kernels" / "benchmarks" / "results" / "cpu" / "nano_eval.json").read_text())
    hashes = [part["settings"]["weights_sha256"] for part in (found, found["compared"])]
    assert hashes == [weights_hash(shipped_checkpoint())] * 2
    assert {task.name for task in TASKS} == set(found["tasks"]) and found["settings"]["how"] == "launched"
    assert all(row["answered"] == row["asked"] for row in found["tasks"].values())


def test_every_make_target_named_exists():
    targets = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([\w-]+)", README, re.MULTILINE))
    assert {"demo", "test", "lab", "serve"} <= named <= targets


def test_every_notebook_is_named_and_every_named_one_exists():
    there = {p.stem for p in (REPO / "notebooks").glob("*.ipynb")}
    assert set(re.findall(r"`(\d\d_\w+)`", README)) == there


def test_the_tree_exists():
    tree = README.split("## The tree")[1].split("```")[1]
    top = re.findall(r"^(\w[\w./]*)", tree, re.MULTILINE)
    inner = re.findall(r"^  (\w[\w./]*)", tree, re.MULTILINE)
    assert len(top) == 4 and len(inner) >= 10
    for name in top:
        assert (REPO / name).exists(), name
    for name in inner:
        places = (REPO / "berrylm_ref" / name, REPO / "kernels" / name)
        assert any(p.exists() for p in places), name
