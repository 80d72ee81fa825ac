"""`make demo`: it runs as it is, and whatever is not as it should be ends it with status 1."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from berrylm_ref import demo

REPO = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_demo_of_the_makefile_runs_and_shows_every_part():
    (line,) = re.findall(r"\$\(BIN\)/python -m berrylm_ref\.demo (.*)", (REPO / "Makefile").read_text())
    (model,) = re.findall(r"^MODEL +\?= (\S+)", (REPO / "Makefile").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "berrylm_ref.demo", *line.replace("$(MODEL)", model).split()]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("exact ") and "berrylm-nano at http://127.0.0.1:" in lines[1]
    labels = [line[:10].strip() for line in lines if line[:1].strip()]
    turn = ["question", "thinking", "answer", "right"]
    assert labels == ["exact", "server", *turn, *turn, "question", "call", "result", "answer", "right", "done"]
    assert [int(n) > 0 for n in re.findall(r"(\d+) of them cached", done.stdout)] == [False, True]


def test_other_logits_than_the_official_ones_end_it(golden, tmp_path, capsys):
    """4e-5 is the smallest error that a real mistake makes."""
    source = golden / "hf-odd"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "golden.safetensors")
    save_file(tensors, tmp_path / "golden.safetensors")
    demo.exact(tmp_path)
    assert "rel-L2 to the official ones" in capsys.readouterr().out
    noise = torch.randn(tensors["logits"].shape, generator=torch.Generator().manual_seed(0)) * tensors["logits"].std()
    save_file(tensors | {"logits": tensors["logits"] + 4e-5 * noise}, tmp_path / "golden.safetensors")
    with pytest.raises(SystemExit, match="demo: expected the official logits within 1e-05"):
        demo.exact(tmp_path)
    (tmp_path / "golden.safetensors").unlink()
    with pytest.raises(SystemExit, match="golden.safetensors"):
        demo.exact(tmp_path)


class Answers:
    """In place of a server: says what it was given, one answer a request."""

    def __init__(self, *turns):
        self.turns = list(turns)

    def post(self, path, body):
        assert path == "/v1/chat/completions" and body["temperature"] == 0
        return self.turns.pop(0)


def turn(content, reasoning="so", cached=0, calls=None):
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    if calls is not None:
        function = {"name": "calculator", "arguments": json.dumps(calls)}
        message["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
    usage = {"prompt_tokens": 34, "total_tokens": 163, "prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [{"message": message}], "usage": usage}


FIRST, SECOND = turn("The answer is 3386."), turn("The answer is 3199.", cached=128)


def test_right_answers_are_taken(capsys):
    demo.thinking(Answers(FIRST, SECOND))
    demo.tool(Answers(turn(None, calls={"expression": "734*12"}), turn("The answer is 8808.")))
    assert "128 of them cached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "turns", "words"),
    [
        ("thinking", [turn("The answer is 3385.")], "expected 36.11.2990 = 3386, got 'The answer is 3385.'"),
        ("thinking", [turn("The answer is 3386.", reasoning=None)], "expected reasoning"),
        ("thinking", [FIRST, turn("The answer is 3386.", cached=128)], "187 = 3199"),
        ("thinking", [FIRST, turn("The answer is 3199.", cached=64)], "at least 128 cached tokens, got 64"),
        ("thinking", [turn("The answer is 3386.", cached=64)], "at least 0 cached tokens, got 64"),
        ("tool", [turn("The answer is 8808.")], "expected one call"),
        ("tool", [turn(None, calls={"expression": "734+12"})], "expected calculator with expression"),
        ("tool", [turn(None, calls={"expression": "734*12"}), turn("8808")], "expected 734.12 = 8808, got '8808'"),
    ],
)
def test_what_is_not_as_it_should_be_ends_it(part, turns, words):
    """A demo that prints a wrong answer and ends with status 0 proves nothing."""
    with pytest.raises(SystemExit, match=words):
        getattr(demo, part)(Answers(*turns))
