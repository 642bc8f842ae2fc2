"""Exact planning where episodes end, rewards are for arrival and discounted: against all histories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.actions import Box
from cpomdp_ppl.errors import ModelError, ObservationError, UnsupportedModelError
from cpomdp_ppl.policy import History, Percept
from cpomdp_ppl.signature import ENDED
from examples.problems.tiger import Tiger, rule
from solvers.exact import evaluate, plan
from tests.conftest import assert_mean
from tests.programs import Reef, Still
from tests.solvers.machines import Mortal

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from tests.solvers.truth import Reals

MODELS = [
    Mortal(0, horizon=4),
    Mortal(1, certain=True),
    Mortal(2, C=3, N=3, awake=True),
    Mortal(9, A=3, certain=True, awake=True),
    Mortal(4, horizon=1),
    Mortal(5, awake=True, horizon=2),
]
TEMPERATURES = (0.0, 0.3, 5.0)


def name(model: Mortal) -> str:
    kind = "bools" if model.tensors["end"].dtype == torch.bool else "probabilities"
    return f"{kind}-{model.horizon}"


def priors(C: int) -> list[list[float]]:
    return [[1 / C] * C, [0.7, *[0.3 / (C - 1)] * (C - 1)], [0.0] * (C - 1) + [1.0], [0.5, 0.5, 0.0][:C]]


def steps(model: Mortal, p: Reals, a: int) -> list[tuple[Reals, bool]]:
    """What follows on measures `[C, N]` and an action: such measures, and whether that is the end."""
    moved = np.einsum("cs,cst->ct", p, model.tables["transition"][:, a])
    seen = model.chances(a)
    end = model.tables["end"][:, a]
    shown = [moved * seen[..., o] for o in range(seen.shape[-1])]
    return [(q * chance, over) for q in shown for over, chance in ((True, end), (False, 1 - end))]


def earned(model: Mortal, p: Reals, a: int, t: int) -> Reals:
    """`γ^t r` by context, `[C]`, times the measures' weight."""
    moves, pays = model.tables["transition"][:, a], model.tables["reward"][:, a]
    found: Reals = model.discount**t * np.einsum("cs,cst,cst->c", p, moves, pays)
    return found


def told(p: Reals, prior: Reals) -> float:
    """`Σ_c P(c, y) log P(c | y) / P(c)` of a history y with measures `[C, N]`."""
    joint = p.sum(1)
    sure = joint > 0
    return float((joint[sure] * np.log(joint[sure] / joint.sum() / prior[sure])).sum())


def firsts(model: Mortal, prior: Reals) -> list[Reals]:
    """The measures at time 0, for everything that may be seen then."""
    seen = model.chances(None)
    return [prior[:, None] * model.tables["initial"] * seen[..., o] for o in range(seen.shape[-1])]


def best(model: Mortal, p: Reals, t: int, prior: Reals, temperature: float) -> float:
    """The highest objective from measures `[C, N]` on, by recursion over histories."""
    values = []
    for a in range(model.num_actions if p.any() else 0):
        value = earned(model, p, a, t).sum()
        for q, over in steps(model, p, a):
            if over or t == model.horizon - 1:
                value += temperature * told(q, prior)
            else:
                value += best(model, q, t + 1, prior, temperature)
        values.append(value)
    return max(values, default=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=name)
def test_the_value_is_that_of_the_best_in_all_histories(model: Mortal) -> None:
    for prior in map(np.asarray, priors(model.num_contexts)):
        for temperature in TEMPERATURES if model.horizon < 4 else TEMPERATURES[1:2]:
            truth = sum(best(model, p, 0, prior, temperature) for p in firsts(model, prior))
            ours = plan(model, prior=prior, temperature=temperature)
            assert ours.value == pytest.approx(truth, abs=1e-10)
            total = ours.expected_return + temperature * ours.information
            assert total == pytest.approx(truth, abs=1e-10)


@pytest.mark.parametrize("model", MODELS, ids=name)
def test_a_plan_is_worth_what_it_says(model: Mortal) -> None:
    for prior in priors(model.num_contexts):
        ours = plan(model, prior=prior, temperature=0.3)
        found = evaluate(model, ours, prior=prior)
        np.testing.assert_allclose(found.returns, ours.returns, atol=1e-10)
        assert found.information == pytest.approx(ours.information, abs=1e-10)
        np.testing.assert_allclose(found.endings.posteriors, ours.endings().posteriors, atol=1e-10)
        np.testing.assert_allclose(found.endings.probabilities, ours.endings().probabilities, atol=1e-10)
        np.testing.assert_allclose(found.endings.probabilities.sum(0), 1, atol=1e-12)


def at_random(model: Mortal, p: Reals, t: int) -> tuple[Reals, float]:
    """Returns `[C]`, weighted by the prior, and information of random actions, over all histories."""
    prior = model.prior().double().numpy()
    returns, information = np.zeros(len(p)), 0.0
    for a in range(model.num_actions if p.any() else 0):
        share = p / model.num_actions
        returns += earned(model, share, a, t)
        for q, over in steps(model, share, a):
            if over or t == model.horizon - 1:
                information += told(q, prior)
            else:
                more, further = at_random(model, q, t + 1)
                returns, information = returns + more, information + further
    return returns, information


@pytest.mark.parametrize("model", MODELS, ids=name)
def test_random_actions_earn_and_tell_what_all_histories_do(model: Mortal) -> None:
    prior = model.prior().double().numpy()
    parts = [at_random(model, p, 0) for p in firsts(model, prior)]
    found = evaluate(model, RandomPolicy(model.actions))
    np.testing.assert_allclose(found.returns * prior, sum(returns for returns, _ in parts), atol=1e-6)
    assert found.information == pytest.approx(sum(information for _, information in parts), abs=1e-6)


@pytest.mark.parametrize("model", MODELS[:4], ids=name)
def test_who_plays_the_plan_earns_its_value(model: Mortal) -> None:
    ours = plan(model)
    episodes = simulate(model, ours, 20_000, seed=0)
    assert (episodes.lengths < model.horizon).any()
    assert_mean(episodes.returns, ours.value, "the return")
    followed = [layer.numpy() for layer in ours.actions]
    assert all(set(actions) <= set(range(model.num_actions)) for actions in followed)


def by_heart(history: History) -> torch.distributions.Categorical:
    """A random policy that depends on all that was done and seen."""
    seen = history.observations["o"].sum(1) + 2 * history.actions.sum(1)  # [B]
    chances = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])[(seen + history.time) % 3]
    return torch.distributions.Categorical(chances)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_models_earn_in_play_what_they_earn_over_all_histories(seed: int) -> None:
    model = Mortal(20 + seed, C=3, K=3, horizon=4, certain=seed % 2 == 1, awake=seed > 1)
    exactly = evaluate(model, by_heart)
    episodes = simulate(model, by_heart, 30_000, contexts="balanced", seed=0)
    assert episodes.returns is not None
    assert len(set(episodes.lengths.tolist())) > 1
    for c in range(3):
        assert_mean(episodes.returns[c::3], float(exactly.returns[c]), f"the return in context {c}")


def test_a_plan_refuses_what_cannot_be_seen_but_not_what_is_over() -> None:
    model = Mortal(1, certain=True)
    model.tensors["end"][:] = False  # it cannot end, so to see it end is impossible
    ours = plan(model)
    memory = ours.start(torch.ones(2, 2) / 2)
    nothing = {"o": torch.zeros(2, dtype=torch.long), ENDED: torch.zeros(2)}
    history = History((Percept(None, nothing, {site: torch.zeros(2).bool() for site in nothing}),))
    action, memory = ours.act(history, memory)
    sees = {site: torch.ones(2).bool() for site in nothing}
    ended = {"o": nothing["o"], ENDED: torch.tensor([0.0, 1.0])}
    _, memory = ours.act(history.extended(Percept(torch.zeros(2).long(), nothing, sees)), memory)
    assert (memory >= 0).all()
    _, memory = ours.act(history.extended(Percept(action * 0, ended, sees)), memory * 0)
    assert memory.tolist()[1] == -1
    strange = {**nothing, "o": torch.tensor([7, 7])}
    longer = history.extended(Percept(action * 0, ended, sees)).extended(Percept(action * 0, strange, sees))
    with pytest.raises(ObservationError, match="episode 0 saw"):
        ours.act(longer, memory)
    _, memory = ours.act(longer, torch.tensor([-1, -1]))
    assert memory.tolist() == [-1, -1]


class Mayfly(Mortal):
    """Everything ends with the first step."""

    def ends(self, state: Any, action: Any, context: Any) -> torch.Tensor:
        return torch.ones_like(state).bool()


@pytest.mark.parametrize("prior", [None, [1.0, 0.0]])
def test_when_all_has_ended_there_is_nothing_to_plan(prior: list[float] | None) -> None:
    short, long = Mayfly(0, horizon=1), Mayfly(0, horizon=4)
    for temperature in (0.0, 1.0):
        one, four = (plan(each, prior=prior, temperature=temperature) for each in (short, long))
        assert four.value == one.value
        assert four.num_beliefs == (1, 0, 0, 0)
        torch.testing.assert_close(four.returns, one.returns)
        torch.testing.assert_close(four.endings().probabilities, one.endings().probabilities)
    assert evaluate(long, RandomPolicy(2)).num_histories == (1, 0, 0, 0)
    assert simulate(long, four, 10, seed=0).lengths.tolist() == [1] * 10


class Fork(Still):
    """A look that tells much, and ends it all; another goes on, telling less; the last is worth something."""

    contexts, actions, states, horizon, discount = 2, ("tell", "wait", "take"), 1, 3, 0.5

    def observation(self, state: Any, action: Any, context: Any) -> None:
        heads = torch.where(context == 0, 0.1, 0.9)
        pyro.sample("heads", dist.Bernoulli(heads).mask(action == 0))

    def ends(self, state: Any, action: Any, context: Any) -> torch.Tensor:
        return (action == 0) & (state == 0)

    def reward(self, state: Any, action: Any, context: Any) -> torch.Tensor:
        return (action == 2).float() + 0.0 * context


def test_information_is_not_discounted_and_rewards_are() -> None:
    bits = np.log(2) + 0.1 * np.log(0.1) + 0.9 * np.log(0.9)  # of one look, in nats
    assert plan(Fork()).value == pytest.approx(1 + 0.5 + 0.25)
    for temperature, looks in ((0.1, False), (0.6, False), (0.75, True), (50.0, True)):
        truth = 1.5 + (temperature * bits if looks else 0.25)  # two takes, then a look
        found = plan(Fork(), temperature=temperature)
        assert found.value == pytest.approx(max(truth, 1.75), abs=1e-7)
        assert found.information == pytest.approx(bits if looks else 0.0, abs=1e-7)


def test_equal_beliefs_of_the_living_and_the_dead_are_not_one() -> None:
    """To wait and to look lead to different futures, though a dull look leaves the belief as it was."""

    class Dull(Fork):
        def observation(self, state: Any, action: Any, context: Any) -> None:
            pyro.sample("heads", dist.Bernoulli(0.5 + 0.0 * context).mask(action == 0))

    ours = plan(Dull())
    assert ours.num_beliefs == (1, 1, 1)
    np.testing.assert_allclose(ours.q_values[0], [[0.0, 0.75, 1.75]])


class Abyss(Reef):
    """Nobody says what is to be earned where all is over."""

    deepest = 1.0

    def reward(self, state: Any, action: Any, context: Any) -> torch.Tensor:
        over = state == torch.where(context == 0, 1, 5)
        return torch.where(over, torch.nan, state.float()) / torch.where(state == 3, self.deepest, 1.0)


def test_rewards_must_be_numbers_wherever_episodes_get_to() -> None:
    model = Abyss()
    simulated = simulate(model, RandomPolicy(2), 20_000, contexts="balanced", seed=0)
    exactly = evaluate(model, RandomPolicy(2)).returns
    assert simulated.returns is not None
    for c in range(2):
        assert_mean(simulated.returns[c::2], float(exactly[c]), "the return")
    assert np.isfinite(plan(model, temperature=1.0).value)
    model.deepest = 0.0
    words = "reward: is inf in state 3 for action 'left' in context 'reef left'; it must be finite"
    for solve in (plan, lambda model: evaluate(model, RandomPolicy(2))):
        with pytest.raises(ModelError, match=words):
            solve(model)


class Steered(Still):
    """Finitely many states, and any action between -1 and 1."""

    actions, states = Box(-1.0, 1.0), 2

    def observation(self, state: Any, action: Any, context: Any) -> None:
        pyro.sample("z", dist.Bernoulli(torch.where(context == 0, 0.3, 0.6)))


def test_continuous_actions_are_refused_by_name() -> None:
    model: CPOMDP = Steered()
    for solve in (plan, lambda model: evaluate(model, RandomPolicy(model.actions))):
        with pytest.raises(UnsupportedModelError, match=r"solvers\.exact: Steered has continuous actions"):
            solve(model)


# ---- the tiger of the literature, whose beliefs are differences of counts ---------------------------------


def tiger(horizon: int, *, ends: bool) -> float:
    """The value at the uniform belief, by value iteration over how many more growls were on the right, k."""
    odds = (0.85 / 0.15) ** np.arange(-horizon, horizon + 1.0)
    right = odds / (1 + odds)  # P(the tiger is on the right | k), [2 T + 1]
    heard = right * 0.85 + (1 - right) * 0.15  # P(a growl on the right | k)
    V = np.zeros(2 * horizon + 1)
    for _ in range(horizon):
        up, down = np.append(V[1:], V[-1]), np.append(V[0], V[:-1])  # the last are too far to matter
        listen = -1 + 0.95 * (heard * up + (1 - heard) * down)
        afterwards = 0.0 if ends else 0.95 * V[horizon]
        opened = np.maximum(10 - 110 * right, 10 - 110 * (1 - right)) + afterwards
        V = np.maximum(listen, opened)
    return float(V[horizon])


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_the_tiger_by_value_iteration_over_counts(ends: bool) -> None:
    for horizon in (1, 2, 3, 4, 7, 12, 40):
        ours = plan(Tiger(horizon, ends_on_opening=ends))
        assert ours.value == pytest.approx(tiger(horizon, ends=ends), abs=1e-5)  # 0.85 is in single precision
        assert max(ours.num_beliefs) <= 40
    rule_of_two = evaluate(Tiger(7, ends_on_opening=ends), rule)
    assert rule_of_two.expected_return <= plan(Tiger(7, ends_on_opening=ends)).value + 1e-9


@pytest.mark.slow
def test_the_tiger_of_the_literature() -> None:
    """19.37, as of Cassandra, Kaelbling and Littman, is come to from below as the horizon grows."""
    values = [plan(Tiger(horizon)).value for horizon in (20, 40, 80, 160, 320)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(19.371, abs=1e-3)
    gaps = 19.3714 - np.array(values[:3])
    assert (gaps > 0).all()
    assert (gaps <= 110 * 0.95 ** np.array([20, 40, 80]) / 0.05).all()


def test_the_first_thing_to_do_with_a_tiger_is_to_listen() -> None:
    """And to open a door after two growls on the other side, while there is time."""
    ours = plan(Tiger(60))
    for t in (0, 5, 20):
        for belief, action in zip(ours.beliefs[t][:, 0], ours.actions[t], strict=True):
            sure = float(belief.max())
            expected = 0 if sure < 0.95 else 1 + int(belief.argmin())
            assert int(action) == expected
