"""Every backend on random programs whose sites depend on each other, against plain summation.

A backend gives the right number, or refuses with an error of ours that names the site. Exact filters are
compared to `EXACT`, the grid to `GRID`. Estimates of the particle filter are unbiased as likelihoods, not as
logarithms: an episode is filtered 32 times side by side, and the mean of `p̂ / p` (and of `p̂ / p` times the
error of the state's mean) is compared with 1 (and 0) in standard errors of these. What is 3.5 away (one in
2,000, and a program has some twenty such numbers) is tried anew with 256, and must then be within 4 (one in
16,000).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import (
    Backend,
    ExtendedKalmanFilter,
    GridFilter,
    ObservableOperator,
    ParticleFilter,
    PerceptDensity,
    UnscentedKalmanFilter,
)
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.observed import MOST_VALUES
from cpomdp_ppl.policy import Percept
from cpomdp_ppl.signature import signature
from solvers import exact
from tests.abuse.effort import LARGEST, TRIED, times
from tests.abuse.programs import default_dtype
from tests.abuse.structure import (
    Data,
    Description,
    Structured,
    describe,
    draw,
    episodes_of,
    hidden_ancestors,
    information,
    is_linear,
    likelihood,
    of_joint,
    over_grid,
    simpler,
    steps,
    truth,
)
from tests.abuse.test_backends import is_typed

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpomdp_ppl import Episodes
    from cpomdp_ppl.inference import OnlineFilter
    from tests.abuse.structure import Observed

B = 2
EXACT = 1e-6
GRID = 1e-3  # the thresholds of programs lie inside cells
LIKELY = 4.0  # nats below the likeliest context; what few particles can reach is left out
SCHEMES = ("systematic", "stratified", "multinomial", "residual")


def backends_for(d: Description, seed: int) -> dict[str, Backend]:
    """Those that should serve the state, with settings that change from program to program."""
    scheme, threshold, common = SCHEMES[seed // 2 % 4], (0.5, 1.0, 0.0)[seed % 3], bool(seed // 8 % 2)
    smc = ParticleFilter(128, scheme, threshold, common_random_numbers=common)
    if d.finite:
        return {"exact": ObservableOperator(), "smc": smc}
    return {
        "ekf": ExtendedKalmanFilter(),
        "ukf": UnscentedKalmanFilter(),
        "grid": GridFilter(num_points=100, subpoints=8),
        "smc": smc,
        "look-ahead": ParticleFilter(128, scheme, threshold, guide="ekf", common_random_numbers=common),
    }


def excuses(d: Description, data: Data, name: str) -> set[str]:
    """The sites for whose sake a backend may refuse.

    If the program itself looks at values, every later site may depend on what it looked at, for all we know.
    """
    looks = any(edge.style in ("shortcut", "select", "numpy") for site in d.sites for edge in site.edges)
    hidden = set(range(len(d.sites))) if looks else set()
    hidden |= {i for episode in data.seen for seen in episode for i in hidden_ancestors(d, seen)}
    if name in ("exact", "grid"):
        many = (
            math.prod(d.sites[i].values ** d.sites[i].size for i in hidden if d.sites[i].values) > MOST_VALUES
        )
        return {d.sites[i].name for i in hidden if many or not d.sites[i].values}
    if name in ("ekf", "ukf") and (looks or not is_linear(d, data)):
        return {site.name for i, site in enumerate(d.sites) if site.values or i in hidden}
    if name == "look-ahead":
        return {site.name for site in d.sites if site.values}
    return set()


class WrongError(AssertionError):
    """A number that is not right, or a refusal that is not."""


def refused(d: Description, data: Data, name: str, error: Exception) -> None:
    """Count a refusal, if it is a fair one."""
    allowed = excuses(d, data, name)
    if not is_typed(error):
        raise WrongError(f"{name}: {type(error).__name__}: {error}") from error
    if not any(f"'{site}'" in str(error) for site in allowed):
        raise WrongError(
            f"{name} refuses without need, or without a name: {type(error).__name__}: {error}"
        ) from error
    TRIED[f"structure, refused by {name}"] += 1


def note(what: str, value: float) -> None:
    LARGEST[what] = max(LARGEST.get(what, 0.0), value)


def last_mean(filtering) -> np.ndarray:
    """`[B, C]`."""
    mean = filtering.state_mean[:, -1]
    return mean.reshape(*mean.shape[:2]).double().numpy()


def require_close(name: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    off = float(np.abs(found - expected).max())
    note(f"{name}, absolute error", off)
    if not off <= tolerance:
        raise WrongError(f"{name} is {found.tolist()} for {expected.tolist()}")


def require_unbiased(name: str, draw_terms: Callable[[int], list[np.ndarray]]) -> None:
    """Terms `[R, …]` of mean zero, of which `draw_terms(R)` draws so many."""
    for repeats, most in ((32, 3.5), (256, 4.0)):
        scores = []
        for terms in draw_terms(repeats):
            error = terms.std(0, ddof=1) / math.sqrt(len(terms))
            score = np.abs(terms.mean(0)) / np.maximum(error, 1e-7)  # without chance: right to 4e-7
            # A mean that hangs on a single draw says nothing.
            dominated = np.abs(terms).max(0) > 0.2 * np.abs(terms + 1).sum(0)
            scores.append(np.where(dominated & (repeats > 32), 0.0, score))
            TRIED[f"structure, {name} inconclusive"] += (
                int((dominated & (score > most)).sum()) if repeats > 32 else 0
            )
        largest = max(float(score.max()) for score in scores)
        if largest <= most:
            note(f"{name}, standard errors", largest)
            return
    raise WrongError(f"{name} is off by {largest:.3g} standard errors")


def compare(
    d: Description, data: Data, seed: int, name: str, backend: Backend, found: tuple[np.ndarray, np.ndarray]
) -> None:
    """One backend on one program, all at once and step by step, with what `truth` found."""
    model = Structured(d)
    log_truth, mean_truth = found
    episodes = episodes_of(d, data, model)
    likely = log_truth > log_truth.max(1, keepdims=True) - LIKELY
    TRIED["structure, programs × backends"] += 1
    try:
        filtering = backend.run(model, episodes, seed=seed)
    except Exception as error:
        return refused(d, data, name, error)
    TRIED[f"structure, served by {name}"] += 1
    if isinstance(backend, ParticleFilter):

        def terms(repeats: int) -> list[np.ndarray]:
            many = episodes_of(d, Data(data.actions * repeats, data.seen * repeats), model)
            found = backend.run(model, many, seed=seed + repeats)
            p = np.exp(found.log_likelihood.numpy().reshape(repeats, B, -1) - log_truth)[:, likely]
            off = (last_mean(found).reshape(repeats, B, -1) - mean_truth)[:, likely]
            return [p - 1, p * off]

        require_unbiased(name, terms)
    elif name in ("exact", "grid") or is_linear(d, data):
        tolerance = GRID if name == "grid" else EXACT
        require_close(name, filtering.log_likelihood.numpy()[likely], log_truth[likely], tolerance)
        require_close(f"{name} mean", last_mean(filtering)[likely], mean_truth[likely], tolerance)
    if {len(row) for row in data.actions} == {d.horizon}:
        online = follow(backend.online(model, B, seed=seed), d, episodes)
        require_close(
            f"{name} online", online.log_likelihood.numpy(), filtering.log_likelihood.numpy(), EXACT
        )


def follow(online: OnlineFilter, d: Description, episodes: Episodes) -> OnlineFilter:
    """Feed it episodes, step by step."""
    if d.initial_observation:
        online.observe(None, episodes.initial_observations, episodes.initially_observed)
    for t in range(d.horizon):
        values = {site: v[:, t] for site, v in episodes.observations.items()}
        flags = {site: v[:, t] for site, v in episodes.observed.items()}
        online.observe(episodes.actions[:, t], values, flags)
    return online


def compare_generative(d: Description, data: Data, seed: int) -> None:
    """`Generative.log_density` of the step in which most is hidden: exact, or right on average."""
    model = Structured(d)
    sites, S = signature(model).observations, range(d.first.shape[1]) if d.finite else (-0.7, 0.9)

    def reals(seen: Observed) -> int:
        return sum(d.sites[i].size for i in hidden_ancestors(d, seen) if not d.sites[i].values)

    looks = [look for b in range(B) for look in steps(d, data, b) if reals(look[1]) <= 2]
    a, seen = max(looks, key=lambda look: len(hidden_ancestors(d, look[1])), default=(0, []))
    if all(value is None for cells in seen for value in cells):
        return
    expected = np.stack([likelihood(d, c, a, np.array(S), seen) for c in range(d.contexts)], -1)  # [S, C]
    likely = np.log(expected) > np.log(expected.max()) - LIKELY

    def ratios(repeats: int) -> list[np.ndarray]:
        N = repeats * len(S)
        values, flags = {}, {}
        for site, cells in zip(d.sites, seen, strict=True):
            spec = sites[site.name]
            value = torch.tensor([0 if v is None else v for v in cells]).to(spec.dtype)
            values[site.name] = value.reshape(spec.shape).expand(N, *spec.shape)
            known = torch.tensor([v is not None for v in cells][: max(1, spec.plates.numel())])
            flags[site.name] = known.reshape(spec.plates).expand(N, *spec.plates)
        state = torch.tensor(list(S) * repeats).reshape(N, *signature(model).state.shape)
        percept = Percept(None if a == d.actions else torch.full((N,), a), values, flags)
        with inference_scope(model, seed=seed + repeats):
            density = PerceptDensity(Generative(model))(state, percept).double().exp().numpy()
        return [(density.reshape(repeats, len(S), -1) / expected - 1)[:, likely]]

    TRIED["structure, densities of Generative"] += 1
    require_unbiased("Generative", lambda repeats: ratios(64 * repeats))


def compare_solver(d: Description) -> None:
    """The information of a finite program, by `solvers.exact`."""
    model = Structured(d)

    def always(history):
        return torch.zeros(history.num_episodes, dtype=torch.long)

    TRIED["structure, information by solvers.exact"] += 1
    found = np.array(exact.evaluate(model, always).information)
    require_close("solvers.exact", found, np.array(information(d, 0)), EXACT)


def least(d: Description, seed: int, name: str) -> Description:
    """Take things away from a program on which a backend is wrong, as long as it is."""

    def wrong(each: Description) -> bool:
        try:
            data = draw(each, seed, B)
            compare(each, data, seed, name, backends_for(d, seed)[name], truth(each, data))
        except WrongError:
            return True
        return False

    while True:
        fewer = next((each for each in simpler(d) if wrong(each)), None)
        if fewer is None:
            return d
        d = fewer


def faults(d: Description, seed: int) -> dict[str, WrongError]:
    """What is wrong with a program, by backend."""
    found = {}
    data = draw(d, seed, B)
    known = truth(d, data)
    for name, backend in backends_for(d, seed).items():
        try:
            compare(d, data, seed, name, backend, known)
        except WrongError as error:
            found[name] = error
    return found


@pytest.mark.parametrize("seed", range(times(12)))
def test_backends_agree_with_plain_summation(seed):
    with default_dtype(torch.float64):
        TRIED["structure, programs"] += 1
        d = describe(seed)
        found = faults(d, seed)
        if found:
            name, error = next(iter(found.items()))
            d = least(d, seed, name)
            pytest.fail(f"{error}\nthe least program on which it is wrong: {d}\non {draw(d, seed, B)}")


@pytest.mark.parametrize("seed", range(1000, 1000 + times(12)))
def test_densities_for_planners_agree_with_plain_summation(seed):
    with default_dtype(torch.float64):
        d = describe(seed)
        compare_generative(d, draw(d, seed, B), seed)


@pytest.mark.parametrize("seed", range(2000, 2000 + 2 * times(8), 2))
def test_solvers_agree_with_a_list_of_everything(seed):
    with default_dtype(torch.float64):
        d = describe(seed)
        if (
            d.finite
            and all(site.values for site in d.sites)
            and math.prod(s.values**s.size for s in d.sites) <= 100
        ):
            compare_solver(Description(d.first, d.moves, d.sites, 1, d.vectors, d.initial_observation))


def test_the_two_truths_about_linear_programs_agree():
    """The joint density of everything, and a grid, to 1e-7."""
    tried = 0
    for seed in range(40):
        d = describe(seed)
        data = draw(d, seed, 1)
        hidden = [d.sites[i].size for seen in data.seen[0] for i in hidden_ancestors(d, seen)]
        if is_linear(d, data) and sum(hidden) <= 1:
            tried += 1
            np.testing.assert_allclose(
                of_joint(d, data, 0, 0), over_grid(d, data, 0, 0), rtol=1e-7, atol=1e-9
            )
    assert tried > 4
