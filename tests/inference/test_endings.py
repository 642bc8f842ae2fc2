"""Filters where episodes end, rewards are for arrival and actions are real numbers: against quadrature.

Fixed seeds. A particle filter's likelihoods are unbiased, their logarithms are not: an episode is filtered
many times side by side, and the mean of `p̂ / p` is compared with 1, that of `p̂ / p` times the error of an
estimate with 0, in standard errors. A test has up to a few hundred such numbers: none may be 5 away.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, simulate
from cpomdp_ppl.actions import Box
from cpomdp_ppl.errors import DegenerateWeightsError, UnsupportedModelError
from cpomdp_ppl.inference import (
    ExtendedKalmanFilter,
    Filtering,
    GridFilter,
    Observed,
    ParticleFilter,
    UnscentedKalmanFilter,
    inference_scope,
)
from cpomdp_ppl.inference import trials as trials_module
from cpomdp_ppl.inference.trials import TRIES, are_enough, enough_particles, trials
from cpomdp_ppl.signature import ENDED
from tests.inference.on_a_line import Line, Reals, normal

FAR = 5.0
"""Standard errors."""

KALMAN = [ExtendedKalmanFilter, UnscentedKalmanFilter]


class Cliff(CPOMDP):
    """A walk on a line, which may end the further the likelier; where it lands, pays, and may cost a lot."""

    contexts, actions, horizon, discount = 2, ("left", "right"), 4, 0.9

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.3 * context, 0.5))

    def transition(self, state, action, context):
        push = torch.where(action == 0, -0.6, 0.6) + torch.where(context == 0, -0.25, 0.25)
        return pyro.sample("x", dist.Normal(0.9 * state + push, 0.4))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.7).mask(action == 1))

    def ends(self, state, action, context):
        return torch.sigmoid(3.0 * (state.abs() - 1.25))

    def reward(self, state, action, context, next_state):
        return state * next_state - 3.0 * (next_state.abs() > 1.25) - 0.1 * action


class HardCliff(Cliff):
    """The same with an edge beyond which the episode ends for sure."""

    def ends(self, state, action, context):
        return state.abs() > 1.25


class Push(CPOMDP):
    """A linear model that is pushed with any strength, and never ends."""

    contexts, actions, horizon = 2, Box(-1.0, 1.0), 3

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.3 * context, 0.5))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(0.9 * state + 0.4 * (1 + context) * action[..., 0], 0.4))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state + 0.2 * action[..., 0], 0.7).mask(action[..., 0] > -0.3))

    def reward(self, state, action, context, next_state):
        return state * next_state - action[..., 0].square()


class PushedOff(Push):
    """The same, and whoever is pushed hard may be pushed off."""

    def ends(self, state, action, context):
        return torch.sigmoid(3.0 * (state.abs() - 1.0) + action[..., 0])


class Legs(Push):
    """Two legs, each pushed with a strength of its own; the first may slip, which is the end."""

    actions, max_plate_nesting = Box([-1.0, -0.5], [1.0, 0.5]), 1

    def initial(self, context):
        with pyro.plate("legs", 2):
            return pyro.sample("x", dist.Normal(0.3 * context, 0.5))

    def transition(self, state, action, context):
        with pyro.plate("legs", 2):
            return pyro.sample("x", dist.Normal(0.9 * state + 0.4 * (1 + context) * action[..., 0, :], 0.4))

    def observation(self, state, action, context):
        with pyro.plate("legs", 2):
            pyro.sample("z", dist.Normal(state + 0.2 * action[..., 0, :], 0.7))

    def ends(self, state, action, context):
        return torch.sigmoid(3.0 * (state[..., :1].abs() - 1.0) + action[..., 0])

    def reward(self, state, action, context, next_state):
        return (state * next_state - action[..., 0, :].square()).sum(-1, keepdim=True)


X = (np.arange(384) + 0.5) / 32 - 6
"""Points in the middle of cells, at whose boundaries the edges of cliffs are."""


def sigmoid(x: Reals) -> Reals:
    return 1 / (1 + np.exp(-x))


def of_cliff(model: Cliff, c: int) -> Line:
    """A cliff by hand."""
    over = 1.0 * (np.abs(X) > 1.25)
    ends = over if isinstance(model, HardCliff) else sigmoid(3 * (np.abs(X) - 1.25))

    def sight(a: Reals, seen: dict[str, Reals | None]) -> Reals:
        z = 1.0 if seen["z"] is None else normal(X, seen["z"], 0.7)
        return z * (ends if seen[ENDED] else 1 - ends)

    return Line(
        X,
        normal(X, 0.3 * c, 0.5),
        lambda a: normal(X, 0.9 * X[:, None] + (0.6 if a else -0.6) + (0.25 if c else -0.25), 0.4),
        sight,
        lambda a: X[:, None] * X - 3 * over - 0.1 * a,
    )


def of_push(model: Push, c: int, leg: int = 0) -> Line:
    """What is pushed, or one of two legs that are, by hand."""

    def sight(a: Reals, seen: dict[str, Reals | None]) -> Reals:
        z, end = seen["z"], seen.get(ENDED)
        density = np.ones_like(X) if z is None else normal(X, z.reshape(-1)[leg] - 0.2 * a[leg], 0.7)
        if end is None or leg:
            return density
        ends = sigmoid(3 * (np.abs(X) - 1) + a[0])
        return density * (ends if end else 1 - ends)

    return Line(
        X,
        normal(X, 0.3 * c, 0.5),
        lambda a: normal(X, 0.9 * X[:, None] + 0.4 * (1 + c) * a[leg], 0.4),
        sight,
        lambda a: X[:, None] * X - a[leg] ** 2,
    )


class Truth:
    """Episodes of a model, and what quadrature finds of them: `[B, …, C]`, or `[B, …, C, 2]` of two legs.

    Legs know nothing of each other: increments and rewards are their sums.
    """

    def __init__(self, model: CPOMDP, number: int = 12, seed: int = 3) -> None:
        self.model = model
        self.episodes = simulate(model, RandomPolicy(model.actions), number, contexts="balanced", seed=seed)
        legs = range(2) if isinstance(model, Legs) else range(1)
        for c, leg, b in np.ndindex(2, len(legs), number):
            line = of_cliff(model, c) if isinstance(model, Cliff) else of_push(model, c, leg)
            for field, series in vars(line.filter(self.episodes, b)).items():
                room = self.__dict__.setdefault(field, np.zeros((number, len(series), 2, len(legs))))
                room[b, :, c, leg] = series
        self.increments, self.rewards = self.increments.sum(-1), self.rewards.sum(-1)
        if len(legs) == 1:
            self.mean, self.variance, self.smoothed = (
                series[..., 0] for series in (self.mean, self.variance, self.smoothed)
            )

    increments: Reals
    rewards: Reals
    mean: Reals
    variance: Reals
    smoothed: Reals

    @property
    def beginnings(self) -> Reals:
        """Log-likelihoods of episodes up to every time, `[B, T + 1, C]`."""
        return np.pad(self.increments.cumsum(1), ((0, 0), (1, 0), (0, 0)))


MODELS = [Cliff(), HardCliff(), Push(), PushedOff(), Legs()]
NAMES = [type(model).__name__ for model in MODELS]


@pytest.fixture(scope="module")
def truths() -> dict[str, Truth]:
    """The truth about some episodes of every model."""
    return {name: Truth(model) for name, model in zip(NAMES, MODELS, strict=True)}


def far(samples: Reals) -> float:
    """How far the means of independent samples `[R, …]` are from 0, in standard errors.

    What differs by a rounding of float32 is the same.
    """
    mean, error = samples.mean(0), samples.std(0, ddof=1) / len(samples) ** 0.5
    distances = np.abs(mean) / np.maximum(error, 1e-12)
    return float(np.where(np.abs(mean) < 1e-5, 0, distances).max())


def require_unbiased(truth: Truth, found: Filtering) -> None:
    """Estimates of R runs, `[R · B, …]`, are right on average; nothing is gained or changes after the end."""
    episodes, model = truth.episodes, truth.model

    def by_run(values: torch.Tensor) -> Reals:
        return values.double().unflatten(0, (-1, len(episodes))).numpy()

    increments, rewards, mean = map(by_run, (found.increments, found.expected_reward, found.state_mean))
    log_ratio = np.pad(increments.cumsum(2), ((0, 0), (0, 0), (1, 0), (0, 0))) - truth.beginnings
    ratio = np.exp(log_ratio)  # [R, B, T + 1, C]
    assert far(ratio - 1) < FAR
    after = ~episodes.alive.numpy()
    assert (increments[:, after] == 0).all()
    assert (rewards[:, after] == 0).all()
    off = np.where(after[..., None], 0, rewards - truth.rewards)
    assert far(ratio[:, :, :-1] * off) < FAR
    legs = (1,) * isinstance(model, Legs)
    assert far(ratio.reshape(*ratio.shape, *legs) * (mean - truth.mean)) < FAR
    posterior = by_run(found.posterior())
    for b, length in enumerate(episodes.lengths):
        for series in (posterior, mean):
            assert (series[:, b, length:] == series[:, b, length : length + 1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("tries", [1, 4])
@pytest.mark.parametrize("engine", ["native", "eager"])
@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_particles_are_right_on_average(model, engine, tries, truths):
    truth, runs = truths[type(model).__name__], 200
    backend = ParticleFilter(64, engine=engine, tries=tries)
    many = truth.episodes[torch.arange(len(truth.episodes)).repeat(runs)]
    require_unbiased(truth, backend.attempt(model, many, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("model", [HardCliff(), Legs()], ids=["HardCliff", "Legs"])
def test_particles_that_look_ahead_are_right_on_average(model, truths):
    truth = truths[type(model).__name__]
    many = truth.episodes[torch.arange(len(truth.episodes)).repeat(100)]
    require_unbiased(truth, ParticleFilter(64, guide="ekf").attempt(model, many, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Cliff(), HardCliff()], ids=NAMES[:2])
def test_the_grid_is_as_exact_as_quadrature(model, truths):
    truth, grid = truths[type(model).__name__], GridFilter(240, tolerance=float("inf"))
    found = grid.run(model, truth.episodes)
    np.testing.assert_allclose(found.increments, truth.increments, atol=2e-3)
    np.testing.assert_allclose(found.expected_reward, truth.rewards, atol=5e-3)
    np.testing.assert_allclose(found.state_mean, truth.mean, atol=2e-3)
    np.testing.assert_allclose(found.state_variance, truth.variance, atol=2e-3)
    smoothed = grid.smooth(model, truth.episodes, 2, seed=0).state_mean
    np.testing.assert_allclose(smoothed, truth.smoothed, atol=2e-3)


def test_the_grid_refuses_continuous_actions_by_name():
    episodes = simulate(PushedOff(), RandomPolicy(PushedOff.actions), 1, seed=0)
    with pytest.raises(UnsupportedModelError, match="grid: PushedOff has continuous actions"):
        GridFilter().run(PushedOff(), episodes)


@pytest.mark.slow
@pytest.mark.parametrize("backend", KALMAN)
@pytest.mark.parametrize(
    ("model", "bound"), zip(MODELS, [0.03, 0.45, 1e-6, 0.015, 0.005], strict=True), ids=NAMES
)
def test_kalman_filters_match_moments_at_the_end_site(model, bound, backend, truths):
    """As at any discrete site: exact at first, then as far off as Gaussians with those moments are.

    That is little for soft ends, and up to half a standard deviation for hard ones.
    """
    truth = truths[type(model).__name__]
    found = backend(reward_points=4096).run(model, truth.episodes)
    smoothed = backend().smooth(model, truth.episodes, 2, seed=0).state_mean
    off = {
        "increments": found.increments - truth.increments,
        "rewards": found.expected_reward - truth.rewards,
        "mean": found.state_mean - truth.mean,
        "variance": found.state_variance - truth.variance,
        "smoothed": smoothed - truth.smoothed,
    }
    for name, errors in off.items():
        assert float(errors.abs().max()) < bound, name
    first = slice(0, 1)  # the belief before this step is Gaussian
    assert float(off["increments"][:, first].abs().max()) < 2e-3
    assert float(off["rewards"][:, first].abs().max()) < (0.03 if isinstance(model, Cliff) else 1e-6)
    assert float(off["mean"][:, :2].abs().max()) < 2e-3
    assert float(off["variance"][:, :2].abs().max()) < 2e-3
    after = ~truth.episodes.alive
    assert (found.increments[after] == 0).all()
    assert (found.expected_reward[after] == 0).all()


@pytest.mark.slow
def test_compiled_kalman_filters_take_real_actions_and_refuse_ends(truths):
    for backend in KALMAN:
        found = backend(engine="native").run(Push(), truths["Push"].episodes)
        np.testing.assert_allclose(found.increments, truths["Push"].increments, atol=1e-6)
        np.testing.assert_allclose(found.expected_reward, truths["Push"].rewards, atol=1e-6)
        with pytest.raises(UnsupportedModelError, match=f"site '{ENDED}' is discrete"):
            backend(engine="native").run(PushedOff(), truths["PushedOff"].episodes)


FILTERS = [
    ParticleFilter(128, engine=engine, tries=tries) for engine in ("native", "eager") for tries in (1, 4)
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", [*FILTERS, ExtendedKalmanFilter(), UnscentedKalmanFilter()], ids=str)
@pytest.mark.parametrize("model", [Cliff(), Legs()], ids=["Cliff", "Legs"])
def test_step_by_step_is_the_same(model, backend, truths):
    episodes = truths[type(model).__name__].episodes
    found = backend.attempt(model, episodes, seed=5)
    online = backend.online(model, len(episodes), seed=5)
    for t in range(model.horizon):
        reward = torch.where(episodes.alive[:, t, None], online.expected_reward(episodes.actions[:, t]), 0.0)
        if not isinstance(
            backend, ParticleFilter
        ):  # each time that one is asked, it draws where actions lead
            np.testing.assert_allclose(reward, found.expected_reward[:, t], atol=1e-6)
        seen = {site: values[:, t] for site, values in episodes.observations.items()}
        flags = {site: values[:, t] for site, values in episodes.observed.items()}
        online.observe(episodes.actions[:, t], seen, flags)
        np.testing.assert_allclose(online.posterior, found.posterior()[:, t + 1], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(online.state_mean, found.state_mean[:, t + 1], rtol=1e-4, atol=1e-5)
    assert torch.equal(online.ended, episodes.observations[ENDED].flatten(1).any(1))
    assert (online.expected_reward(episodes.actions[:, 0])[online.ended] == 0).all()
    with pytest.raises(ValueError, match="none after the end"):
        online.observe(episodes.actions[:, 0], {**seen, ENDED: torch.zeros_like(seen[ENDED])})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "engine", "tries"),
    [(Cliff(), "native", 1), (Cliff(), "eager", 4), (Legs(), "native", 4), (Legs(), "eager", 1)],
    ids=str,
)
def test_particles_smooth_from_the_end(model, engine, tries, truths):
    """Means of 12 runs, within 5 standard errors; the bias of 256 particles is far below these."""
    truth, runs = truths[type(model).__name__], 12
    backend = ParticleFilter(256, engine=engine, tries=tries)
    many = truth.episodes[torch.arange(len(truth.episodes)).repeat(runs)]
    smoothing = backend.smooth(model, many, 25, seed=2)
    assert smoothing.method == "backward sampling"
    means = smoothing.state_mean.double().unflatten(0, (runs, -1)).numpy()
    assert far(means - truth.smoothed) < FAR
    for b, length in enumerate(truth.episodes.lengths):
        trajectories = smoothing.trajectories[:, b]
        assert (trajectories[:, length:] == trajectories[:, length : length + 1]).all()


class Ledge(Cliff):
    """Whoever is not within a tenth of the middle falls: some one in eight stays on, every step."""

    def ends(self, state, action, context):
        return state.abs() > 0.125


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "eager"])
def test_where_nearly_all_fall_tries_keep_particles_alive(engine):
    """Likelihoods are unbiased in any case, if those of the dead count as zero; but that is no posterior."""
    model, runs = Ledge(), 400
    episodes = Episodes.from_arrays(
        model, [[0, 1, 0, 1]], {"z": [[np.nan, 0.3, np.nan, -0.2]], ENDED: [[False, False, False, True]]}
    )
    ends = 1.0 * (np.abs(X) > 0.125)
    truth = []
    for c in (0, 1):
        cliff = of_cliff(model, c)

        def sight(a: Reals, seen: dict[str, Reals | None]) -> Reals:
            z = 1.0 if seen["z"] is None else normal(X, seen["z"], 0.7)
            return z * (ends if seen[ENDED] else 1 - ends)

        truth.append(replace(cliff, sight=sight).filter(episodes, 0).increments.sum())
    many = episodes[torch.zeros(runs, dtype=torch.long)]
    lost = []
    for tries in (1, 16):
        backend = ParticleFilter(16, engine=engine, tries=tries)
        found = backend.attempt(model, many, seed=0).log_likelihood.numpy()  # [R, C]
        assert far(np.exp(found - truth) - 1) < FAR
        lost.append(np.isinf(found).mean())
    assert lost[0] > 0.2
    assert lost[1] < 0.01
    with pytest.raises(DegenerateWeightsError, match=r"site .*'ended' = 0.*next states for each \(`tries`"):
        ParticleFilter(16, engine=engine).run(model, many, seed=0)


@pytest.mark.slow
def test_a_filter_that_is_chosen_tries_where_particles_die():
    chosen = enough_particles(Ledge(), trials(Ledge()), widest=0.2, fewest=16)
    assert chosen.tries == TRIES
    assert enough_particles(Cliff(), trials(Cliff()), widest=0.2, fewest=16).tries == 1


class March(Cliff):
    """Everybody goes one step on, and ends by chance."""

    def transition(self, state, action, context):
        return state + 1.0


@pytest.mark.parametrize("tries", [1, 4])
def test_particles_that_have_moved_do_not_move_again_to_be_weighted(tries):
    model, found = March(), {}
    no_end = {"z": torch.zeros(1), ENDED: torch.zeros(1)}
    flags = {"z": torch.ones(1).bool(), ENDED: torch.ones(1).bool()}
    for engine in ("native", "eager"):
        recursion = ParticleFilter(4096, engine=engine, tries=tries).recursion(model)
        with inference_scope(model, 0):
            moved = recursion.move(recursion.start(1), torch.ones(1).long())
            after, increment = recursion.condition(moved, Observed.at(1, torch.ones(1).long(), no_end, flags))
            found[engine] = [increment, *recursion.moments(after)]
    for native, eager in zip(*found.values(), strict=True):
        assert ((native - eager).abs() < 0.1).all()  # 4,096 particles, of which a step further is 1 away


def test_particles_are_not_counted_past_the_end():
    """How far the horizon is past all ends does not matter."""
    episodes = simulate(Doomed(4), RandomPolicy(2), 32, contexts="balanced", seed=0)
    long = simulate(Doomed(40), RandomPolicy(2), 32, contexts="balanced", seed=0)
    assert torch.equal(episodes.lengths, long.lengths)
    verdicts = []
    for wanted in range(2, 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trials_module, "FEWEST_EFFECTIVE", wanted)
            verdicts.append(
                [
                    are_enough(ParticleFilter(64), each, some, 10.0)
                    for each, some in ((Doomed(4), episodes), (Doomed(40), long))
                ]
            )
    assert all(short == longer for short, longer in verdicts)
    assert {short for short, _ in verdicts} == {True, False}


class Doomed(Cliff):
    """Everything is over after three steps, which leave few particles."""

    def __init__(self, horizon):
        super().__init__()
        self.horizon = horizon

    def initial(self, context):
        return {"x": super().initial(context), "age": torch.zeros(())}

    def transition(self, state, action, context):
        return {"x": super().transition(state["x"], action, context), "age": state["age"] + 1}

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state["x"], torch.where(state["age"] < 3, 0.7, 0.02)))

    def ends(self, state, action, context):
        return state["age"] == 3

    def reward(self, state, action, context):
        return state["x"]


def test_who_pays_on_arrival_needs_next_states():
    recursion = ParticleFilter(4).recursion(Cliff())
    with pytest.raises(UnsupportedModelError, match="Cliff pays on arrival"):
        recursion.reward(torch.zeros(2, 1, 4), torch.zeros(1).long(), (2, 1, 4))
