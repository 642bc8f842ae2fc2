"""Every backend on random programs: right shapes, no silent NaN, and errors that say what is wrong."""

from __future__ import annotations

import math
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpomdp_ppl
from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.errors import (
    DegenerateWeightsError,
    DensityError,
    ModelError,
    ObservationError,
    UnsupportedModelError,
)
from cpomdp_ppl.inference import (
    ExtendedKalmanFilter,
    GridFilter,
    ObservableOperator,
    ParticleFilter,
    UnscentedKalmanFilter,
)
from cpomdp_ppl.signature import ENDED, signature
from cpomdp_ppl.state import leaves, map_state
from tests.abuse.effort import TRIED, examples
from tests.abuse.programs import Plan, default_dtype, plans

BACKENDS = {
    "smc": ParticleFilter(32),
    "look-ahead": ParticleFilter(32, guide="ekf"),
    "ekf": ExtendedKalmanFilter(),
    "ukf": UnscentedKalmanFilter(),
    "exact": ObservableOperator(),
    "grid": GridFilter(num_points=64),
}
TYPED = (UnsupportedModelError, DensityError, DegenerateWeightsError, ModelError, ObservationError)
PACKAGE = Path(cpomdp_ppl.__file__).parent
B, M = 3, 4


def is_typed(error: BaseException) -> bool:
    """Whether an error is one of ours, or a ValueError of ours that says what was expected."""
    if isinstance(error, TYPED):
        return True
    where = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return type(error) is ValueError and ": expected " in str(error) and where.is_relative_to(PACKAGE)


def attempt(what, function):
    """The result, or None with a typed error; anything else is the test's failure."""
    try:
        return function(), None
    except Exception as error:
        if not is_typed(error):
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        return None, error


def require_state(state, spec, *axes, what):
    """Leaves of the right shapes, all finite (variances may be too large for their type, never NaN)."""
    for (name, leaf), (_, expected) in zip(leaves(state), leaves(spec), strict=True):
        assert leaf.shape == (*axes, *expected.shape), f"{what} '{name}': {tuple(leaf.shape)}"
        fits = ~torch.isnan(leaf) if "variance" in what else torch.isfinite(leaf)
        assert bool(fits.all()), f"{what} '{name}' is not finite"


def require_filtering(model, filtering, spec, num_particles):
    T, C = model.horizon, model.num_contexts
    assert filtering.increments.shape == (B, T, C)
    assert filtering.initial_increment.shape == filtering.log_likelihood.shape == (B, C)
    for what in (filtering.increments, filtering.initial_increment, filtering.log_likelihood):
        assert what.dtype == torch.float64
        assert not bool((torch.isnan(what) | (what == math.inf)).any()), "a log-density is NaN or +inf"
    assert filtering.expected_reward.shape == (B, T, C)
    assert bool(torch.isfinite(filtering.expected_reward).all())
    require_state(filtering.state_mean, spec, B, T + 1, C, what="state_mean")
    require_state(filtering.state_variance, spec, B, T + 1, C, what="state_variance")
    assert all(bool((leaf >= 0).all()) for _, leaf in leaves(filtering.state_variance))
    if filtering.ess is not None:
        assert filtering.ess.shape == filtering.resampled.shape == (B, T, C)
        assert bool(((filtering.ess > 0.999) & (filtering.ess < 1.001 * num_particles)).all())
        assert bool((filtering.standard_error >= 0).all())  # infinite, if a single family cannot tell
    posterior = filtering.posterior()
    assert posterior.shape == (B, T + 1, C)
    torch.testing.assert_close(posterior.sum(-1), torch.ones(B, T + 1, dtype=torch.float64))


def require_smoothing(model, smoothing, spec):
    T, C = model.horizon, model.num_contexts
    require_state(smoothing.state_mean, spec, B, T + 1, C, what="smoothed mean")
    require_state(smoothing.state_variance, spec, B, T + 1, C, what="smoothed variance")
    require_state(smoothing.trajectories, spec, M, B, T + 1, C, what="trajectories")
    for (_, leaf), (_, expected) in zip(leaves(smoothing.trajectories), leaves(spec), strict=True):
        assert leaf.dtype == expected.dtype
    if smoothing.probabilities is not None:
        total = smoothing.probabilities.double().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-5)


def follow(backend, model, episodes, spec):
    """Feed episodes step by step, and look at everything after each."""
    online = backend.online(model, B, seed=1)
    if model.initial_observation:
        online.observe(None, episodes.initial_observations, episodes.initially_observed)
    for t in range(model.horizon):
        for a in range(model.num_actions):
            reward = online.expected_reward(a)
            assert reward.shape == (B, model.num_contexts)
            assert bool(torch.isfinite(reward).all())
        seen = {site: values[:, t] for site, values in episodes.observations.items()}
        flags = {site: values[:, t] for site, values in episodes.observed.items()}
        online.observe(episodes.actions[:, t], seen, flags)
        require_state(online.state_mean, spec, B, model.num_contexts, what="online mean")
        require_state(online.state_variance, spec, B, model.num_contexts, what="online variance")
        torch.testing.assert_close(online.posterior.sum(-1), torch.ones(B, dtype=torch.float64))
    return online.log_likelihood


def must_serve(plan: Plan, name: str) -> bool:
    """Where there is no excuse for a refusal."""
    gaussian = plan.kind in ("Linear", "Parts", "Plated") or (
        plan.kind == "Scalar" and plan.noise == plan.sensor == "Normal"
    )
    if not plan.tame:
        return False
    if name == "smc":  # sparse tables may kill every particle
        return gaussian or plan.kind == "Hybrid"
    if name in ("ekf", "ukf", "look-ahead"):
        return gaussian
    return name == "exact" and plan.kind in ("Tables", "Mortal") and plan.sensor != "Poisson"


@st.composite
def particle_filters(draw):
    """With few particles, and settings of all kinds."""
    return ParticleFilter(
        num_particles=draw(st.sampled_from([32, 32, 1, 2])),
        resampling=draw(st.sampled_from(["systematic", "stratified", "multinomial", "residual"])),
        ess_threshold=draw(st.sampled_from([0.5, 0.0, 1.0])),
        guide=draw(st.sampled_from([None, "ekf"])),
        common_random_numbers=draw(st.booleans()),
        chunk=draw(st.sampled_from([None, 1, 2])),
    )


@examples(12)
@given(plan=plans(), smc=particle_filters(), ragged=st.booleans())
def test_backends_give_numbers_or_say_why_not(plan, smc, ragged):
    require_numbers_or_reasons(plan, {**BACKENDS, "any smc": smc}, ragged)


@pytest.mark.parametrize("kind", ["Tables", "Linear", "Scalar", "Hybrid"])
@pytest.mark.parametrize(("contexts", "horizon"), [(64, 2), (2, 200)])
def test_many_contexts_and_long_episodes(kind, contexts, horizon):
    plan = Plan(
        kind, contexts, 2, horizon, "by action", False, 1.0, torch.float32, 2, 5, "Laplace", "Binomial"
    )
    require_numbers_or_reasons(plan, {name: BACKENDS[name] for name in ("smc", "ekf", "exact")})


ALIEN = {
    "far": lambda z: z + 1e6,
    "huge": lambda z: torch.full_like(z, 1e30),
    "the largest": lambda z: torch.full_like(z, torch.finfo(z.dtype).max),
    "denormal": lambda z: torch.full_like(z, 1e-40),
}


@examples(8)
@given(plan=plans(kinds=("Linear", "Parts", "Hybrid", "Plated")), alien=st.sampled_from(list(ALIEN)))
def test_data_of_another_world(plan, alien):
    """What the model would never show: it is impossible, or very unlikely, but a number."""
    require_numbers_or_reasons(plan, BACKENDS, alien=ALIEN[alien])


def require_numbers_or_reasons(plan: Plan, backends, ragged=False, alien=None) -> None:
    """Everything that backends do, on one program; ragged episodes are of 1, 2, … steps."""
    with default_dtype(plan.dtype), warnings.catch_warnings():
        warnings.simplefilter("error")
        TRIED["programs"] += 1
        model = plan.model()
        attempt("check", model.check)
        episodes, failed = attempt("simulate", lambda: simulate(model, RandomPolicy(plan.actions), B, seed=0))
        if episodes is None:
            assert not plan.tame, failed
            return
        spec = signature(model).state
        require_state(episodes.states, spec, B, plan.horizon + 1, what="simulated states")
        if ragged:
            episodes = episodes.truncated((torch.arange(B) + 1).clamp(max=plan.horizon))
        if alien is not None:
            episodes = replace(
                episodes,
                observations={
                    site: values if site == ENDED else alien(values)  # the dead see nothing more
                    for site, values in episodes.observations.items()
                },
                initial_observations=map_state(alien, episodes.initial_observations),
            )
        for name, backend in backends.items():
            excused = alien is not None or not must_serve(plan, name)
            TRIED["programs × backends"] += 1
            filtering, failed = attempt(name, lambda b=backend: b.run(model, episodes, seed=1))
            if filtering is None:
                assert excused, f"{name}: {failed}"
                TRIED[f"refused by {name}: {type(failed).__name__}"] += 1
                continue
            TRIED[f"served by {name}"] += 1
            require_filtering(model, filtering, spec, getattr(backend, "num_particles", 0))
            smoothing, failed = attempt(
                f"{name} smooth", lambda b=backend: b.smooth(model, episodes, M, seed=1)
            )
            if smoothing is None:
                assert excused, f"{name} smooth: {failed}"
            else:
                require_smoothing(model, smoothing, spec)
            if plan.horizon > 50 or ragged:  # a long one was filtered already, and step by step is slow
                continue
            total, failed = attempt(f"{name} online", lambda b=backend: follow(b, model, episodes, spec))
            if total is None:
                assert excused, f"{name} online: {failed}"
            elif getattr(backend, "chunk", None) is None:  # chunks have random numbers of their own
                torch.testing.assert_close(total, filtering.log_likelihood, rtol=1e-4, atol=1e-4)


def forward_algorithm(model, episodes) -> np.ndarray:
    """`log p(o | a, c)` of a finite model by plain loops, `[B, C]`."""
    first, moves, symbols = (t.double().numpy() for t in (model.first, model.moves, model.symbols))
    result = np.zeros((len(episodes), model.num_contexts))
    for b in range(len(episodes)):
        for c in range(model.num_contexts):
            alpha, total = first[c].copy(), 0.0
            steps = []
            if model.initial_observation:
                seen = bool(episodes.initially_observed["o"][b])
                steps.append((None, int(episodes.initial_observations["o"][b]) if seen else None))
            for t in range(int(episodes.lengths[b])):
                seen = bool(episodes.observed["o"][b, t])
                o = int(episodes.observations["o"][b, t]) if seen else None
                steps.append((int(episodes.actions[b, t]), o))
            for t, (a, o) in enumerate(steps, start=-model.initial_observation):
                if a is not None:
                    alpha = alpha @ moves[c, a]
                    if model.can_end:
                        dies = model.dying[c, a].double().numpy()
                        alpha = alpha * (dies if episodes.observations[ENDED][b, t] else 1 - dies)
                if o is not None:
                    alpha = alpha * symbols[c, a or 0, :, o]
            total = alpha.sum()
            result[b, c] = math.log(total) if total > 0 else -math.inf
    return result


@examples(8)
@given(plan=plans(kinds=("Tables", "Mortal"), longest=4))
def test_finite_models_agree_with_the_forward_algorithm(plan):
    """Exact to rounding; SMC within five of its own standard errors, and 0.02 for the error's error."""
    with default_dtype(plan.dtype):
        plan = Plan(**{**vars(plan), "sensor": "Categorical", "contexts": min(plan.contexts, 5)})
        model = plan.model()
        episodes = simulate(model, RandomPolicy(plan.actions), B, seed=0)
        truth = torch.from_numpy(forward_algorithm(model, episodes))
        exact = ObservableOperator().run(model, episodes).log_likelihood
        torch.testing.assert_close(exact, truth, rtol=1e-5, atol=1e-5)
        smc = ParticleFilter(4000).run(model, episodes, seed=1)
        likely = truth > truth.amax(1, keepdim=True) - 4  # what few particles can reach is left out
        off = (smc.log_likelihood - truth).abs()[likely]
        assert bool((off <= 5 * smc.standard_error[likely] + 0.02).all()), (off, smc.standard_error)


def joint_gaussian(model, episodes) -> np.ndarray:
    """`log p(o | a, c)` of a linear-Gaussian model from the joint covariance of what was seen, `[B, C]`."""
    D, T = model.plan.dim, model.horizon
    result = np.zeros((len(episodes), model.num_contexts))
    F, push, H, q, r = (t.double().numpy() for t in (model.F, model.push, model.H, model.q, model.r))
    for c in range(model.num_contexts):
        # Every state is a linear function of the noises [first, step 1, …, step T], all of variance q².
        weights = np.zeros((T + 1, D, (T + 1) * D))
        weights[0, :, :D] = np.eye(D)
        for t in range(T):
            weights[t + 1] = F[c] @ weights[t]
            weights[t + 1, :, (t + 1) * D : (t + 2) * D] += np.eye(D)
        for b in range(len(episodes)):
            mean, x = np.zeros(D), [np.zeros(D)]
            for t in range(T):
                mean = F[c] @ mean + push[int(episodes.actions[b, t])]
                x.append(mean)
            seen = [t + 1 for t in range(T) if bool(episodes.observed["z"][b, t])]
            values = [episodes.observations["z"][b, t - 1].double().numpy() for t in seen]
            if model.initial_observation and bool(episodes.initially_observed["z"][b]):
                seen.insert(0, 0)
                values.insert(0, episodes.initial_observations["z"][b].double().numpy())
            if not seen:
                continue
            W = np.concatenate([H[c] @ weights[t] for t in seen])
            off = np.concatenate([v - H[c] @ x[t] for v, t in zip(values, seen, strict=True)])
            S = q[c, 0] ** 2 * W @ W.T + r[c, 0] ** 2 * np.eye(len(W))
            _, log_det = np.linalg.slogdet(S)
            result[b, c] = -0.5 * (off @ np.linalg.solve(S, off) + log_det + len(W) * math.log(2 * math.pi))
    return result


@examples(12)
@given(plan=plans(kinds=("Linear",), longest=6), look_ahead=st.booleans())
def test_linear_gaussian_models_agree_with_the_joint_density(plan, look_ahead):
    """EKF and UKF to rounding at every scale, the grid to 1% in one dimension, SMC within its error."""
    plan = Plan(**{**vars(plan), "dtype": torch.float64, "contexts": min(plan.contexts, 5)})
    with default_dtype(plan.dtype):
        model = plan.model()
        episodes = simulate(model, RandomPolicy(plan.actions), B, seed=0)
        truth = torch.from_numpy(joint_gaussian(model, episodes))
        for backend in (ExtendedKalmanFilter(), UnscentedKalmanFilter()):
            found = backend.run(model, episodes).log_likelihood
            torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-6)
        likely = truth > truth.amax(1, keepdim=True) - 4
        if plan.dim == 1:
            grid = GridFilter(num_points=600).run(model, episodes).log_likelihood
            torch.testing.assert_close(grid[likely], truth[likely], rtol=0.01, atol=0.01)
        if plan.dim <= 2:
            smc = ParticleFilter(4000, guide="ekf" if look_ahead else None).run(model, episodes, seed=1)
            off = (smc.log_likelihood - truth).abs()[likely]
            assert bool((off <= 5 * smc.standard_error[likely] + 0.02).all()), (off, smc.standard_error)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_program_that_leaves_the_reals_is_caught(name, dtype):
    """States that explode unseen: an error that says so, never a NaN or ∞ that passes for a number."""
    with default_dtype(dtype):
        plan = Plan("Linear", 2, 2, 60, "off", False, 1.0, dtype, 2, 0)
        model = plan.model()
        episodes = simulate(model, RandomPolicy(2), B, seed=0)
        model.F = model.F * 1e6
        backend = BACKENDS[name]
        spec = signature(model).state
        for function in (
            lambda: backend.run(model, episodes, seed=0),
            lambda: backend.smooth(model, episodes, M, seed=0),
            lambda: follow(backend, model, episodes, spec),
        ):
            result, error = attempt(name, function)
            assert result is None
            assert isinstance(error, TYPED)


@pytest.mark.parametrize("scale", [1e-12, 1e-8, 1e8, 1e12])
def test_the_grid_has_no_unit_of_measurement(scale):
    """The same model in other units has the same likelihood, but for the density's own unit."""
    with default_dtype(torch.float64):
        found = []
        for unit in (1.0, scale):
            model = Plan("Linear", 2, 2, 3, "on", False, unit, torch.float64, 1, 3).model()
            episodes = simulate(model, RandomPolicy(2), B, seed=0)
            found.append(GridFilter(num_points=200).run(model, episodes).log_likelihood + 3 * math.log(unit))
        # The rounding of cells to round numbers is all that differs.
        torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)
