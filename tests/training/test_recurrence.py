"""The check that stands before every run on a GPU, and the tuner lists it runs with."""

import importlib

import pytest
import torch

from berrylm_ref import BerryLMConfig
from berrylm_ref.training import recurrence
from berrylm_ref.training.recipe import MICRO

CONFIG = BerryLMConfig(**MICRO.model)


def test_the_check_passes_the_torch_form_and_prints_every_gradient(capsys):
    errors = recurrence.check_recurrence(recurrence.torch_recurrence, CONFIG, "cpu", torch.float32)
    assert set(errors) == {"o", "q", "k", "v", "g", "beta"} and max(errors.values()) < 1e-6
    assert "rel-L2" in capsys.readouterr().out


def test_the_check_refuses_a_clamped_gate():
    """Kernels with a bounded gate are the failure this checkpoint has to show: they must not train it."""

    def bounded(q, k, v, g, beta):
        return recurrence.torch_recurrence(q, k, v, g.clamp_min(-5 / 16), beta)

    with pytest.raises(ValueError, match="recurrence"):
        recurrence.check_recurrence(bounded, CONFIG, "cpu", torch.float32)


def test_the_check_refuses_a_lost_gradient():
    """A kernel whose backward forgets the gate trains, and its decays never move."""

    def detached(q, k, v, g, beta):
        return recurrence.torch_recurrence(q, k, v, g.detach() + 0 * g, beta)

    with pytest.raises(ValueError, match="g out of it"):
        recurrence.check_recurrence(detached, CONFIG, "cpu", torch.float32)


@pytest.mark.slow  # importing all of fla
def test_every_kernel_of_the_lists_exists():
    """A renamed kernel would tune over its full list: minutes on a fresh machine."""
    pytest.importorskip("fla.ops.kda")
    from triton.runtime.autotuner import Autotuner

    for path, wanted in recurrence.CANDIDATES.items():
        module, _, name = path.rpartition(".")
        tuner = getattr(importlib.import_module(module), name)
        while not isinstance(tuner, Autotuner):
            tuner = tuner.fn
        assert len(wanted) <= recurrence.SHARDS
        assert {key for kwargs, *_ in wanted for key in kwargs} <= set(tuner.configs[0].kwargs), name
