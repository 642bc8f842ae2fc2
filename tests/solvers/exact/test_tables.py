"""The tables of finite models against those that were written by hand, and against the simulator."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import CPOMDP, RandomPolicy, simulate
from cpomdp_ppl.errors import ModelError, ObservationError, UnsupportedModelError
from cpomdp_ppl.models import ContextualTiger, LineGrid
from cpomdp_ppl.policy import Percept
from solvers.exact.tables import finite, row_keys
from tests.solvers import truth
from tests.solvers.machines import Awake, Machine

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes

LOOK, WAIT = range(2)


class Sensors(CPOMDP):
    """A finite model without dynamics; subclasses say what is seen."""

    contexts, actions, states, horizon = 2, ("look", "wait"), 3, 3

    def initial(self, context):
        return pyro.sample("s", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        pyro.sample("z", dist.Bernoulli((1 + state + context) / 5).mask(action == LOOK))

    def reward(self, state, action, context):
        return state * 1.0


class Radar(Sensors):
    """What is detected decides whether a direction is seen; a hidden fault spoils the direction."""

    def observation(self, state, action, context):
        fault = pyro.sample("fault", dist.Bernoulli(0.1 + 0.2 * context).mask(torch.tensor(False)))
        detected = pyro.sample("detected", dist.Bernoulli((1 + state) / 4).mask(action == LOOK))
        right = torch.nn.functional.one_hot(state, 3).double()
        direction = torch.where(fault[..., None] > 0, torch.full_like(right, 1 / 3), right)
        seen = (action == LOOK) & (detected > 0)
        pyro.sample("direction", dist.Categorical(direction).mask(seen))

    def chance(self, c, s, detected, direction):
        p_fault = 0.1 + 0.2 * c
        if not detected:
            return 1 - (1 + s) / 4
        return (1 + s) / 4 * (p_fault / 3 + (1 - p_fault) * (direction == s))


class Array(Sensors):
    """Three sensors in a plate of the program's own, of which the second never works, and a pair."""

    max_plate_nesting = 1

    def observation(self, state, action, context):
        with pyro.plate("sensors", 3):
            p = (1 + state + torch.arange(3)) / 6
            pyro.sample("on", dist.Bernoulli(p).mask(torch.tensor([True, False, True])))
        probs = torch.stack([1.0 + context, torch.ones_like(context)], -1)[..., None, :].expand(
            *context.shape, 2, 2
        )
        pyro.sample("pair", dist.Categorical(probs).to_event(1).mask(action == LOOK))


class Gauge(Sensors):
    """A reading without noise, and of numbers that are no integers."""

    initial_observation = True

    def observation(self, state, action, context):
        looks = torch.tensor(True) if action is None else action == LOOK
        pyro.sample("reading", dist.Delta((state + context) / 3.0).mask(looks))


@pytest.mark.parametrize("model", [LineGrid(), ContextualTiger(), LineGrid(5, accuracy=1.0)])
def test_tables_are_those_that_were_written_by_hand(model):
    ours, true = finite(model), truth.tables(model)
    np.testing.assert_allclose(ours.prior, true.prior, atol=1e-15)
    np.testing.assert_allclose(ours.initial, true.initial, atol=1e-15)
    np.testing.assert_allclose(ours.transition, true.transition, atol=1e-15)
    np.testing.assert_allclose(ours.rewards, true.reward, atol=1e-12)
    values = ours.outcomes.symbols[:, ::2].astype(int)  # a value and a flag for every site
    seen = ours.outcomes.symbols[:, 1] > 0
    for k, a in enumerate(ours.outcomes.action):
        column = 1 + int("".join(map(str, values[k])), 2) if seen[k] else 0
        np.testing.assert_allclose(ours.outcomes.likelihood[k], true.observation[:, a, :, column], atol=1e-15)
    for a in range(model.num_actions):
        of_action = ours.outcomes.likelihood[ours.outcomes.action == a]
        np.testing.assert_allclose(of_action.sum(0), 1, atol=1e-15)
        assert (of_action.sum((1, 2)) > 0).all()


@pytest.mark.parametrize("model", [Machine(0, C=3, A=3, N=4, K=3), Awake(1, N=3, K=4)])
def test_random_tables_come_back(model):
    ours = finite(model)
    np.testing.assert_allclose(ours.transition, model.tables["transition"], atol=1e-15)
    np.testing.assert_allclose(ours.rewards, model.tables["reward"], atol=1e-15)
    for a in (None, *range(model.num_actions)):
        known = ours.before if a is None else ours.outcomes
        expected = np.moveaxis(model.chances(a), -1, 0)
        possible = expected.any((1, 2))
        np.testing.assert_allclose(known.likelihood[known.action == (a or 0)], expected[possible], atol=1e-15)


def test_what_is_not_seen_is_summed_over():
    model = Radar()
    ours = finite(model)
    looks = ours.outcomes.action == LOOK
    found = {
        (int(detected), int(direction)): table
        for (_, _, detected, _, direction, _), table in zip(
            ours.outcomes.symbols[looks], ours.outcomes.likelihood[looks], strict=True
        )
    }
    assert found.keys() == {(0, 0), (1, 0), (1, 1), (1, 2)}
    for (detected, direction), c, s in product(found, range(2), range(3)):
        expected = model.chance(c, s, detected, direction)
        assert found[detected, direction][c, s] == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(ours.outcomes.likelihood[~looks], 1)  # to wait shows nothing: one outcome
    assert (~looks).sum() == 1


def test_sites_in_plates_are_products():
    ours = finite(Array())
    looks = ours.outcomes.action == LOOK
    assert looks.sum() == 4 * 4  # two sensors that work, and a pair
    assert (~looks).sum() == 4
    for symbol, table in zip(ours.outcomes.symbols[looks], ours.outcomes.likelihood[looks], strict=True):
        on, working, pair, seen = symbol[:3], symbol[3:6], symbol[6:8], symbol[8]
        assert working.tolist() == [1, 0, 1]
        assert seen == 1
        for c, s in product(range(2), range(3)):
            p = [(1 + s + i) / 6 for i in (0, 2)]
            first = (1 + c) / (2 + c)
            expected = np.prod([q if x else 1 - q for q, x in zip(p, on[[0, 2]], strict=True)])
            expected *= np.prod([1 - first if x else first for x in pair])
            assert table[c, s] == pytest.approx(expected, abs=1e-12)


def percepts(episodes: Episodes) -> list[Percept]:
    initial = []
    if episodes.initial_observations is not None:
        assert episodes.initially_observed is not None
        initial = [Percept(None, episodes.initial_observations, episodes.initially_observed)]
    return initial + [
        Percept(
            episodes.actions[:, t],
            {site: values[:, t] for site, values in episodes.observations.items()},
            {site: flags[:, t] for site, flags in episodes.observed.items()},
        )
        for t in range(episodes.horizon)
    ]


@pytest.mark.parametrize("model", [ContextualTiger(), Radar(), Array(), Gauge(), Awake(1, N=3, K=4)])
def test_outcomes_are_recognised_and_made_again(model):
    """What episodes show is one of the outcomes, is possible there, and comes back as it was."""
    ours = finite(model)
    episodes = simulate(model, RandomPolicy(model.num_actions), 300, seed=0)
    states = episodes.states.reshape(300, model.horizon + 1).long()
    first = model.horizon + 1 - len(percepts(episodes))
    for t, percept in enumerate(percepts(episodes), first):
        numbers = ours.numbers(percept, t)
        known = ours.before if percept.action is None else ours.outcomes
        if percept.action is not None:
            np.testing.assert_array_equal(known.action[numbers], percept.action)
        assert (known.likelihood[numbers, episodes.contexts, states[:, t]] > 0).all()
        again = ours.percept(numbers, percept.action, torch.device("cpu"))
        for site, values in percept.observations.items():
            assert again.observations[site].dtype == values.dtype
            torch.testing.assert_close(again.observations[site], values)
            assert torch.equal(again.observed[site], percept.observed[site])


def test_frequencies_are_the_likelihoods():
    """Of every outcome of looking, over 6,000 episodes, within 4.5 standard errors."""
    model = Radar()
    ours = finite(model)
    episodes = simulate(
        model, lambda history: torch.zeros(history.num_episodes, dtype=torch.long), 6000, seed=0
    )
    numbers, states = ours.numbers(percepts(episodes)[0], 1), episodes.states[:, 1]
    for k, c, s in product(np.flatnonzero(ours.outcomes.action == LOOK), range(2), range(3)):
        there = ((episodes.contexts == c) & (states == s)).numpy()
        p, n = ours.outcomes.likelihood[k, c, s], there.sum()
        assert abs((numbers[there] == k).mean() - p) <= 4.5 * (p * (1 - p) / n) ** 0.5 + 1e-12


def test_what_the_model_never_shows_is_refused():
    ours = finite(ContextualTiger())
    one, seen = torch.ones(2), torch.tensor([True, True])
    both = {"left_ear": one, "right_ear": one}
    ours.numbers(Percept(torch.tensor([0, 0]), both, dict.fromkeys(both, seen)), 1)
    with pytest.raises(ObservationError, match=r"episode 1 saw .* at time 4 after action 2"):
        ours.numbers(Percept(torch.tensor([0, 2]), both, dict.fromkeys(both, seen)), 4)


def test_precision_is_not_lost_to_a_models_own():
    """Python's numbers in a program are float64 here: 0.85 is not what single precision makes of it."""
    assert finite(LineGrid()).outcomes.likelihood.max() == 1
    assert set(np.unique(finite(LineGrid()).outcomes.likelihood)) == {1 - 0.85, 0.85, 1.0}
    assert torch.get_default_dtype() == torch.float32


class Wide(Sensors):
    max_plate_nesting = 1

    def observation(self, state, action, context):
        with pyro.plate("pixels", 30):
            pyro.sample("picture", dist.Bernoulli(0.5))


class Counting(Sensors):
    def observation(self, state, action, context):
        pyro.sample("clicks", dist.Poisson(1.0 + state))


class Shifty(Sensors):
    initial_observation = True

    def observation(self, state, action, context):
        pyro.sample("z" if action is not None else "other", dist.Bernoulli(0.5))


def test_refusals_name_the_site():
    with pytest.raises(UnsupportedModelError, match=r"observation: site 'picture' .* 1073741824 values"):
        finite(Wide())
    with pytest.raises(UnsupportedModelError, match=r"site 'clicks' .Poisson. has no finite support"):
        finite(Counting())
    with pytest.raises(ModelError, match=r"\['other'\] before the first action"):
        finite(Shifty())


def test_keys_tell_rows_apart():
    rows = np.random.default_rng(0).dirichlet(np.ones(4), 5000)
    assert len(np.unique(row_keys(rows, 11))) == 5000
    np.testing.assert_array_equal(row_keys(rows + 1e-15, 6), row_keys(rows, 6))
    columns = np.array([[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5], [1e-20, 0.5, 0.5]])
    assert len(np.unique(row_keys(columns, 11))) == 4  # order counts, and so does what is possible
