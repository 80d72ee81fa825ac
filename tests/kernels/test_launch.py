"""``launch`` must start exactly what Triton's own way would: the same compiled form with the same arguments.

A form too many costs nothing but time; one too few reads 16 bytes at an address that has no 16, or takes a stride for 1.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import launch_cases
import pytest

import berrylm_kernels

SOURCES = sorted(Path(berrylm_kernels.__file__).parent.glob("*.py"))


def test_what_is_launched_is_what_triton_would_launch():
    """Alignment, strides of 1 and multiples of 16, 64-bit counts, dtypes, None, descriptors, layouts, devices, options, mixed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, launch_cases.__file__], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["problems"] == []
    assert 0 < told["direct"] < told["calls"]
    assert told["refused"] == "launch: constants: expected ['D', 'USE_Y'] in this order, got ['USE_Y', 'D']"


def kernels_and_launches():
    kernels, launches = {}, []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                kernels[node.name] = [a.arg for a in node.args.args if a.annotation and "constexpr" in ast.unparse(a.annotation)]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "launch":
                launches.append((node.args[0].id, [keyword.arg for keyword in node.args[4].keywords]))
    return kernels, launches


KERNELS, LAUNCHES = kernels_and_launches()


@pytest.mark.parametrize("kernel, constants", LAUNCHES, ids=[name for name, _ in LAUNCHES])
def test_every_launch_names_the_constants_in_the_kernels_order(kernel, constants):
    """The interpreter takes any order; a direct start hands them over by place, and a GPU would be the first to tell."""
    assert constants == KERNELS[kernel]
