"""Registers, spills and shared memory of the kernels on Hopper, from the compiler alone: no GPU is needed."""

import json
import os
import subprocess
import sys

import pytest
import sm90_cases
import torch

from berrylm_kernels import kda_front, kda_state


@pytest.fixture(scope="module")
def compiled():
    """Resources of every case, compiled in one process of its own (the interpreter is on in this one)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, sm90_cases.__file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", sm90_cases.CASES)
def test_resources(compiled, name):
    """A spill or a second copy of a tile in shared memory is a slow kernel, or one that does not launch."""
    case, used = sm90_cases.CASES[name], compiled[name]
    print(f"{name}: {used}")
    assert used["registers"] <= case.registers
    assert used["stack"] <= case.stack
    assert used["shared"] <= case.shared
    assert case.waits is None or used["waits"] <= case.waits


@pytest.mark.parametrize("name", [name for name in sm90_cases.CASES if name.startswith(("kda front", "kda state"))])
def test_kda_cases_are_what_is_launched(name):
    """A table that drifts from the launchers' choice of tiles proves nothing."""
    case = sm90_cases.CASES[name]
    c, dtype = case.constants, torch.float32 if "fp32" in name else torch.bfloat16
    if case.fn is kda_front.kda_front_kernel:
        intra = next(form for form, number in kda_front.FORMS.items() if number == c["FORM"])
        assert kda_front.tiling(c["PK"], c["PV"], dtype, intra) == (c["BK"], c["BV"])
    else:
        assert kda_state.tiling(c["BK"], c["PV"], dtype) == (c["BV"], c["STAGES"], case.num_warps)
