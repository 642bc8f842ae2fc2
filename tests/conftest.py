from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tensors are small here; read by torch, also in child processes
# Kernels that tests compile are not the user's; children and later runs find them again.
os.environ["CPOMDP_CACHE"] = str(Path(__file__).parents[1] / ".pytest_cache" / "kernels")

import pytest
import torch

from cpomdp_ppl.models import Beacons, ContextualTiger, Harbour, LightDark, LineGrid, Office

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP

# A shell ignores Ctrl-C in its background jobs, and what they start inherits that. A handler of ours becomes
# the default one in child processes, so that tests of interruption need no precautions.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)

MODELS = {model.__name__: model for model in (LightDark, LineGrid, ContextualTiger, Beacons, Harbour, Office)}


def pytest_configure(config: pytest.Config) -> None:
    """Once a day, ArviZ tells whoever imports it of its next version."""
    config.addinivalue_line("filterwarnings", r"ignore:\s*ArviZ is undergoing:FutureWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what takes long unless abuse is asked for, and begin with the notebook, which takes longest."""
    if int(os.environ.get("CPOMDP_ABUSE", "1")) == 1:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes long: see `make abuse`"))
    items.sort(key=lambda item: item.path.name != "test_tutorial.py")


EAGER = {
    "abuse": ("test_backends", "test_structure", "test_hygiene"),
    "experiments": ("test_execute", "test_sweep"),
    "inference": (
        *(
            "test_bool_states",
            "test_choice",
            "test_discrete_sites",
            "test_finite",
            "test_grid",
            "test_invariances",
        ),
        *("test_kalman", "test_moment_matching", "test_resolution", "test_smoothing"),
    ),
}
"""Tests of what is not compiled: to trace and compile all their models would take as long as they do."""


@pytest.fixture(autouse=True)
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make abuse` compiles everything."""
    path = request.path
    if path.stem.startswith(EAGER.get(path.parent.name, ("-",))) and "CPOMDP_ABUSE" not in os.environ:
        monkeypatch.setenv("CPOMDP_ENGINE", "eager")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> CPOMDP:
    """Each of the six models that come with the package."""
    return MODELS[request.param]()


def fixed_actions(*sequence: int):
    """A policy that plays a fixed sequence of actions, whatever it sees."""

    def play(history):
        B = next(iter(history.latest.observed.values())).shape[0]
        return torch.full((B,), sequence[history.time])

    return play


def assert_mean(
    samples: torch.Tensor, expected: float, what: str, limit: float = 4.5, sd: float | None = None
) -> None:
    """The mean of independent samples `[n]` is `expected`, within `limit` standard errors.

    The standard error is estimated from the samples unless their true standard deviation `sd` is given.
    """
    samples = samples.double()
    error = (samples.std() if sd is None else torch.tensor(sd)) / len(samples) ** 0.5
    z = (samples.mean() - expected) / error.clamp(min=1e-12)
    assert abs(z) < limit, f"{what}: mean {samples.mean():.4f}, expected {expected:.4f}, z = {z:.1f}"


def assert_variance(samples: torch.Tensor, expected: float, what: str, limit: float = 4.5) -> None:
    """The variance of independent samples `[n]` is `expected`, within `limit` standard errors."""
    samples = samples.double()
    deviations = (samples - samples.mean()) ** 2
    assert_mean(deviations, expected, f"{what} (variance)", limit)
