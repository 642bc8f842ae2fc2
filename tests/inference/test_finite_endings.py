"""The exact backend where episodes end and rewards are for arrival, discounted: against all paths."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, simulate
from cpomdp_ppl.actions import Box
from cpomdp_ppl.errors import DegenerateWeightsError, ObservationError, UnsupportedModelError
from cpomdp_ppl.inference import Filtering, ObservableOperator, ParticleFilter
from cpomdp_ppl.signature import ENDED
from tests.conftest import fixed_actions
from tests.programs import Still
from tests.solvers.machines import Mortal

MORTALS = [
    Mortal(0),
    Mortal(1, certain=True),
    Mortal(2, C=3, awake=True),
    Mortal(3, A=3, N=3, certain=True, awake=True),
]


def name(model: Mortal) -> str:
    return "bools" if model.tensors["end"].dtype == torch.bool else "probabilities"


def some_episodes(model: CPOMDP) -> Episodes:
    """Episodes that end at once, later, with the last step, and never."""
    episodes = simulate(model, RandomPolicy(model.actions), 40, seed=0)
    ended = (episodes.observations[ENDED] == 1).any(1)
    kinds = set(zip(episodes.lengths.tolist(), ended.tolist(), strict=True))
    assert {(1, True), (2, True), (3, True), (3, False)} <= kinds
    return episodes


def seen_of(episodes: Episodes, b: int, t: int, site: str) -> int | None:
    """What an episode saw at time t, None if nothing."""
    values, flags = episodes.observations, episodes.observed
    if t == 0:
        values, flags = episodes.initial_observations, episodes.initially_observed
        return int(values[site][b]) if values is not None and flags[site][b] else None
    return int(values[site][b, t - 1]) if flags[site][b, t - 1] else None


def chance(model: Mortal, c: int, a: int | None, s: int, o: int | None, ended: int | None) -> float:
    """How likely it is to see that in a state."""
    p = 1.0 if o is None else model.tables["first"][c, s, o] if a is None else model.chances(a)[c, s, o]
    end = 0.0 if a is None else model.tables["end"][c, a, s]
    return p * {None: 1.0, 0: 1 - end, 1: end}[ended]


def paths(model: Mortal, episodes: Episodes, b: int, c: int, steps: int) -> dict[tuple[int, ...], float]:
    """`p(s_{0:t}, o_{1:t} | a, c)` of every path of states with t steps."""
    weights = {}
    for path in product(range(model.states), repeat=steps + 1):
        weight = model.tables["initial"][c, path[0]]
        weight *= chance(model, c, None, path[0], seen_of(episodes, b, 0, "o"), None)
        for t in range(steps):
            a, s = int(episodes.actions[b, t]), path[t + 1]
            seen = (seen_of(episodes, b, t + 1, site) for site in ("o", ENDED))
            weight *= model.tables["transition"][c, a, path[t], s] * chance(model, c, a, s, *seen)
        weights[path] = weight
    return weights


@pytest.mark.parametrize("model", MORTALS, ids=name)
def test_likelihoods_rewards_and_states_are_those_of_all_paths(model):
    episodes = some_episodes(model)
    found = ObservableOperator().run(model, episodes)
    smoothing = ObservableOperator().smooth(model, episodes, 3, seed=0)
    T, N, possible = model.horizon, model.states, 0
    for b, c in product(range(len(episodes)), range(model.num_contexts)):
        length = int(episodes.lengths[b])
        totals = [sum(paths(model, episodes, b, c, t).values()) for t in range(length + 1)]
        assert float(found.log_likelihood[b, c].exp()) == pytest.approx(totals[-1], rel=1e-10, abs=1e-14)
        assert (found.increments[b, length:, c] == 0).all()
        assert (found.expected_reward[b, length:, c] == 0).all()
        for t in range(length):
            if totals[t] == 0:
                continue
            a, expected = int(episodes.actions[b, t]), 0.0
            for path, weight in paths(model, episodes, b, c, t).items():
                moves, pays = (model.tables[key][c, a, path[-1]] for key in ("transition", "reward"))
                expected += weight / totals[t] * (moves @ pays)
            assert float(found.expected_reward[b, t, c]) == pytest.approx(expected, abs=1e-10)
        if totals[-1] == 0:
            continue
        possible += 1
        smoothed = np.zeros((T + 1, N))
        for path, weight in paths(model, episodes, b, c, length).items():
            for t in range(T + 1):
                smoothed[t, path[min(t, length)]] += weight / totals[-1]
        np.testing.assert_allclose(smoothing.probabilities[b, :, c], smoothed, atol=1e-10)
    assert possible > len(episodes)  # most episodes are possible in several contexts


@pytest.mark.parametrize("model", MORTALS, ids=name)
def test_posteriors_stay_after_the_end(model):
    episodes = some_episodes(model)
    posterior = ObservableOperator().run(model, episodes).posterior()  # [B, T + 1, C]
    for b, length in enumerate(episodes.lengths.tolist()):
        assert torch.equal(posterior[b, length:], posterior[b, length].expand_as(posterior[b, length:]))


@pytest.mark.parametrize("model", MORTALS, ids=name)
def test_step_by_step_is_the_same(model):
    episodes = some_episodes(model)[:20]
    found = ObservableOperator().run(model, episodes)
    online = ObservableOperator().online(model, len(episodes))
    if model.initial_observation:
        online.observe(None, episodes.initial_observations, episodes.initially_observed)
    for t in range(model.horizon):
        seen = {site: values[:, t] for site, values in episodes.observations.items()}
        flags = {site: values[:, t] for site, values in episodes.observed.items()}
        online.observe(episodes.actions[:, t], seen, flags)
        np.testing.assert_allclose(online.posterior, found.posterior()[:, t + 1], atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "eager"])
@pytest.mark.parametrize("model", MORTALS, ids=name)
def test_particles_are_right_on_average(model, engine):
    """Of 400 runs, `p̂ / p` is 1 on average, and `p̂ / p` times errors 0, within 5 standard errors."""
    episodes, runs = some_episodes(model)[:10], 400
    exact = ObservableOperator().run(model, episodes)
    backend = ParticleFilter(24, engine=engine, tries=2)
    found = backend.attempt(model, episodes[torch.arange(10).repeat(runs)], seed=0)

    def beginnings(one: Filtering) -> torch.Tensor:
        """Log-likelihoods until every time, `[…, T + 1, C]`."""
        return torch.cat([one.initial_increment[:, None], one.increments], 1).cumsum(1)

    def by_run(values: torch.Tensor) -> torch.Tensor:
        return values.double().unflatten(0, (runs, 10))

    possible = beginnings(exact) > -torch.inf  # [B, T + 1, C]
    truth = beginnings(exact).where(possible, torch.zeros(()))
    ratio = (by_run(beginnings(found)) - truth).exp()
    assert (ratio[:, ~possible] == 0).all()
    off = {
        "likelihood": (ratio - 1, possible),
        "reward": (
            ratio[:, :, :-1] * (by_run(found.expected_reward) - exact.expected_reward),
            possible[:, :-1],
        ),
        "state": (ratio * (by_run(found.state_mean) - exact.state_mean), possible),
    }
    for what, (errors, where) in off.items():
        mean, error = errors.mean(0)[where], errors.std(0)[where] / runs**0.5
        distance = mean.abs().where(mean.abs() > 1e-5, torch.zeros(())) / error.clamp(min=1e-12)
        assert float(distance.max()) < 5, what
    after = ~episodes.alive.repeat(runs, 1)
    assert (found.increments[after] == 0).all()
    assert (found.expected_reward[after] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "eager"])
@pytest.mark.parametrize("model", MORTALS, ids=name)
def test_particles_step_by_step_are_the_same(model, engine):
    episodes, backend = some_episodes(model)[:10], ParticleFilter(512, engine=engine)
    found = backend.run(model, episodes, seed=0)
    online = backend.online(model, len(episodes), seed=0)
    if model.initial_observation:
        online.observe(None, episodes.initial_observations, episodes.initially_observed)
    for t in range(model.horizon):
        seen = {site: values[:, t] for site, values in episodes.observations.items()}
        flags = {site: values[:, t] for site, values in episodes.observed.items()}
        online.observe(episodes.actions[:, t], seen, flags)
        np.testing.assert_allclose(online.posterior, found.posterior()[:, t + 1], atol=1e-6)
    assert torch.equal(online.ended, (episodes.observations[ENDED] == 1).any(1))


def test_episodes_that_no_context_can_have_ended():
    model = Mortal(1, certain=True)
    model.tensors["end"][:] = False
    episodes = Episodes.from_arrays(model, [[0]], {"o": [[0]], ENDED: [[True]]})
    with pytest.raises(DegenerateWeightsError, match=ENDED):
        ObservableOperator().run(model, episodes)


class Reef(CPOMDP):
    """A boat on a line, with a reef from the fifth cell on its right or on its left, by context.

    Among rocks it runs aground every second time. The echo sounder is louder, a little, if the reef is on the
    right.
    """

    contexts, actions, horizon, states = ("reef right", "reef left"), ("left", "right"), 8, 17

    def initial(self, context):
        return torch.full_like(context, 8)

    def transition(self, state, action, context):
        return (state + 2 * action - 1).clamp(0, self.states - 1)

    def observation(self, state, action, context):
        pyro.sample("echo", dist.Bernoulli(torch.where(context == 0, 0.2735, 0.1142)))

    def ends(self, state, action, context):
        return 0.5 * torch.where(context == 0, state >= 13, state <= 3)

    def reward(self, state, action, context):
        return torch.ones(())


def right(reef: Reef, echoes: list[int], ended: bool) -> Episodes:
    """An episode of going right only."""
    ends = [False] * len(echoes)
    ends[-1] = ended
    return Episodes.from_arrays(reef, [[1] * len(echoes)], {"echo": [echoes], ENDED: [ends]})


def posterior(reef: Reef, episodes: Episodes) -> float:
    """P(reef right | all)."""
    return float(ObservableOperator().run(reef, episodes).posterior()[0, -1, 0])


def test_to_leave_out_the_end_or_survival_is_wrong():
    """A reef: 0.52 for 1.00 without the end, 0.17 for 0.012 without survival."""
    reef = Reef()
    aground, afloat = right(reef, [0, 1, 0, 0, 0], ended=True), right(reef, [0] * 8, ended=False)

    def without(episodes: Episodes, where) -> Episodes:
        seen = episodes.observed[ENDED] & ~where
        return replace(episodes, observed={**episodes.observed, ENDED: seen})

    everywhere = torch.tensor(True)
    assert posterior(reef, aground) == 1
    assert posterior(reef, without(aground, everywhere)) == pytest.approx(0.52, abs=0.002)
    assert posterior(reef, afloat) == pytest.approx(0.012, abs=0.001)
    assert posterior(reef, without(afloat, afloat.observations[ENDED] == 0)) == pytest.approx(0.17, abs=0.002)
    odds = ((1 - 0.2735) / (1 - 0.1142)) ** 8 * 0.5**4  # four times it was lucky
    assert posterior(reef, afloat) == pytest.approx(odds / (1 + odds), abs=1e-6)


def test_the_reef_is_found_by_those_who_play():
    """Posteriors are calibrated: of episodes with P(reef right) near p, a share p has it on the right."""
    reef, B = Reef(), 4000
    episodes = simulate(reef, fixed_actions(*[1] * 8), B, seed=0)
    p = ObservableOperator().run(reef, episodes).posterior()[:, -1, 0]
    is_right = (episodes.contexts == 0).double()
    ended = (episodes.observations[ENDED] == 1).any(1)
    assert (p[ended] == 1).all()
    assert (is_right[ended] == 1).all()
    for some in (p <= 0.02, (p > 0.02) & (p < 0.5)):
        error = (p[some] * (1 - p[some])).sum().sqrt() / some.sum()
        assert some.sum() > 100
        assert abs(float((is_right[some] - p[some]).mean())) < 4 * float(error)


def test_a_step_that_does_not_say_whether_it_was_the_end():
    """Left out by mistake, survival would be no evidence; who does not know has to say so."""
    online = ObservableOperator().online(Reef())
    with pytest.raises(ObservationError, match=r"expected site 'ended'.*got \['echo'\].*'ended': False"):
        online.observe("right", {"echo": 0})
    with pytest.raises(ObservationError, match="expected site 'ended'"):
        online.observe("right", {"echo": 0}, {"echo": True})
    assert online.time == 0
    online.observe("right", {"echo": 0}, {"echo": True, ENDED: False})
    online.observe("right", {"echo": 0, ENDED: False})
    assert online.time == 2


class Steered(Still):
    """Finitely many states, and any action between -1 and 1."""

    actions, states = Box(-1.0, 1.0), 2

    def observation(self, state, action, context):
        pyro.sample("z", dist.Bernoulli(torch.where(context == 0, 0.3, 0.6)))


def test_continuous_actions_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"exact: Steered has continuous actions"):
        ObservableOperator().run(Steered(), simulate(Steered(), RandomPolicy(Steered.actions), 2, seed=0))
