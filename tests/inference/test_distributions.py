"""Every distribution of torch and Pyro under every backend: right, `-inf` if impossible, or refused by name.

`python -m tests.inference.test_distributions` prints the table of docs/inference.md.
"""

from __future__ import annotations

import re
import warnings
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

from cpomdp_ppl import CPOMDP, Episodes
from cpomdp_ppl.errors import DensityError, UnsupportedModelError
from cpomdp_ppl.inference import (
    BACKENDS,
    ExtendedKalmanFilter,
    GridFilter,
    ParticleFilter,
    UnscentedKalmanFilter,
)
from tests.distributions import CASES, DRAWS, NO_SITES, Case, exported

PAGE = Path(__file__).parents[2] / "docs" / "inference.md"
SETTINGS = {
    "smc": ParticleFilter(num_particles=2000),
    "grid": GridFilter(num_points=128),
    # Which sites they serve does not depend on the engine; `test_native_kalman` compares the two.
    "ekf": ExtendedKalmanFilter(engine="eager"),
    "ukf": UnscentedKalmanFilter(engine="eager"),
}
SENSOR = 1.0
THRESHOLD = 0.55
ACCURACY = {"smc": 1e-4, "ekf": 1e-4, "ukf": 1e-4, "exact": 1e-3, "grid": 3e-3}
"""Besides standard errors: of float32; of the oracle's quadrature at a threshold; of the grid."""

SEEN = (-0.3, 0.4, 1.2)
"""Observations of what a transition has drawn."""


class Site(CPOMDP):
    """Three contexts, one action, one step; whatever is drawn first, and a reward of nothing."""

    contexts, actions, horizon = 3, 1, 1

    def __init__(self, case: Case, finite: bool):
        super().__init__()
        self.case, self.states = case, 2 if finite else None

    def initial(self, context):
        return torch.tensor(0) if self.states else pyro.sample("x", dist.Normal(0.0, 0.3))

    def transition(self, state, action, context):
        return state

    def reward(self, state, action, context):
        return 0.0 * state


class Observed(Site):
    """The distribution is that of the observation, whatever the state: so all evidence is exact.

    A second site makes no difference, as it is not seen; but with two, one may depend on the other.
    """

    def observation(self, state, action, context):
        pyro.sample("site", self.case.at(context))
        pyro.sample("after", dist.Normal(0.0, 1.0).mask(torch.tensor(False)))


class Latent(Site):
    """The distribution is that of a transition's noise, which decides where the state comes to be."""

    def transition(self, state, action, context):
        value = pyro.sample("site", self.case.at(context))
        summary = weighted(value, len(self.case.at(context).event_shape))
        if self.states:
            return (summary > THRESHOLD).long()
        return summary if self.case.gaussian else torch.tanh(summary)

    def observation(self, state, action, context):
        if self.states:
            pyro.sample("z", dist.Bernoulli(0.2 + 0.6 * state))
        else:
            pyro.sample("z", dist.Normal(state, SENSOR))


def weighted(value, event_dim):
    """A number made of a value: its components, of which the first counts least."""
    if not event_dim:
        return value
    flat = value.flatten(-event_dim) if isinstance(value, torch.Tensor) else value.reshape(len(value), -1)
    weights = torch.arange(1, flat.shape[-1] + 1) / flat.shape[-1]
    return (flat * weights).sum(-1) if isinstance(value, torch.Tensor) else flat @ weights.numpy()


def episodes(values: torch.Tensor, site: str) -> Episodes:
    """One step in which this was seen, an episode for each value."""
    B = len(values)
    seen, others = torch.ones(B, 1, dtype=torch.bool), ("after",) if site == "site" else ()
    return Episodes(
        torch.zeros(B, 1, dtype=torch.long),
        {site: values[:, None], **{name: torch.zeros(B, 1) for name in others}},
        {site: seen, **dict.fromkeys(others, ~seen)},
    )


def log_likelihood(model: Site, backend: str, values: torch.Tensor, site: str) -> np.ndarray | None:
    """`[B, C]`; None if the backend refuses the model, in which case it has to name the site."""
    try:
        found = SETTINGS.get(backend, BACKENDS[backend]()).run(model, episodes(values, site), seed=0)
    except (UnsupportedModelError, DensityError) as error:
        if "'site'" in str(error):
            return None
        raise
    return found.log_likelihood.numpy()


def observed(case: Case, backend: str) -> bool:
    """Whether a backend serves the distribution as an observation; then it has to be right."""
    values = case.recorded(torch.float32)
    found = log_likelihood(Observed(case, backend == "exact"), backend, values, "site")
    if found is None:
        return False
    assert case.oracle is not None
    with np.errstate(divide="ignore"):
        truth = np.array(
            [[float(case.truth(c).log_density(v.double().numpy())) for c in range(3)] for v in values]
        )
    tolerance = case.rough + (1e-6 if backend in ("exact", "grid") else 3e-5)  # recorded in float32
    np.testing.assert_allclose(found, truth, rtol=tolerance, atol=tolerance, err_msg=backend)
    return True


def latent(case: Case, backend: str) -> bool:
    """Whether a backend serves the distribution as a transition's noise; then it has to be right."""
    finite = backend == "exact"
    values = torch.tensor([0.0, 1.0] if finite else SEEN)
    found = log_likelihood(Latent(case, finite), backend, values, "z")
    if found is None:
        return False
    assert case.oracle is not None
    for c in range(3):
        oracle = case.truth(c)
        x = weighted(oracle.points, oracle.points.ndim - 1)
        for b, z in enumerate(values.tolist()):
            if finite:
                one = 0.2 + 0.6 * (x > THRESHOLD)
                f = one if z else 1 - one
            else:
                f = stats.norm(x if case.gaussian else np.tanh(x), SENSOR).pdf(z)
            mean = oracle.weights @ f
            error = np.sqrt(max(0.0, oracle.weights @ f**2 - mean**2)) / mean  # of one draw
            noise = np.sqrt((backend == "smc") / 2000 + oracle.drawn / DRAWS)
            tolerance = 5 * error * noise + ACCURACY[backend]
            assert abs(found[b, c] - np.log(mean)) <= tolerance, (backend, c, z, found[b, c], np.log(mean))
    return True


@cache
def served(name: str) -> tuple[str, str]:
    """The backends that serve a distribution: as an observation, and as the noise of a transition."""
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pyro's, on matchings and old names
        return tuple(
            ", ".join(f"`{backend}`" for backend in BACKENDS if serves(case, backend)) or "none"
            for serves in (observed, latent)
        )


def table(rows: dict[str, tuple[str, str]]) -> str:
    """Distributions that are served alike share a row."""
    lines = ["| distributions | as an observation | as the noise of a transition |", "|---|---|---|"]
    for (seen, noise), names in groupby(sorted(rows, key=lambda name: (rows[name], name)), lambda n: rows[n]):
        lines.append(f"| {', '.join(names)} | {seen} | {noise} |")
    return "\n".join([lines[0], lines[1], *sorted(lines[2:], key=len, reverse=True)])


def documented() -> dict[str, tuple[str, str]]:
    """The rows of the page's table, by distribution."""
    found = re.findall(r"^\| ([A-Z][\w, ]+) \| (.+) \| (.+) \|$", PAGE.read_text(), re.M)
    return {name: (seen, noise) for names, seen, noise in found for name in names.split(", ")}


def test_every_distribution_that_is_exported_is_here():
    assert exported() == set(CASES) | set(NO_SITES)
    assert not set(CASES) & set(NO_SITES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_is_right_or_refused_as_documented(name):
    assert served(name) == documented()[name]


def test_the_page_has_the_table():
    rows = documented()
    assert set(rows) == set(CASES)
    assert table(rows) in PAGE.read_text()
    for name, reason in NO_SITES.items():
        assert f"`{name}`: {reason}" in PAGE.read_text()


if __name__ == "__main__":
    print(table({name: served(name) for name in CASES}))
