"""Fixtures and rules that every test shares."""

from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # pytest-xdist already runs a process per core

# No deadline: the machine may be busy. Derandomised: a run that passed here passes there.
hypothesis.settings.register_profile("berrylm", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("berrylm")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch.cuda.is_available() is False"))


@pytest.fixture(scope="session")
def golden():
    """The folder of tensors that the official code computed."""
    folder = Path(__file__).parent / "golden"
    assert folder.is_dir(), f"the golden tensors are missing: {folder}"
    return folder
