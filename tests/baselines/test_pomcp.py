"""POMCP and POUCT: the adapter is the model, and the search gets somewhere."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from baselines.binning import UNSEEN, Binning
from baselines.pomcp import POMCP, POUCT
from baselines.pomdp_py_adapter import (
    Augmented,
    Choice,
    Choices,
    LockStep,
    PlannerPOUCT,
    Rows,
    SuccessorModel,
    Symbol,
    agent,
    ask_rollout,
    ask_step,
    particles,
)
from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.policy import History, Percept
from cpomdp_ppl.rollout import blind
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves
from tests.baselines.upfront import Regretful
from tests.conftest import assert_mean, fixed_actions
from tests.programs import EyesOpen, Plates, Still
from tests.solvers import truth


def binned(model, **settings):
    episodes = simulate(model, RandomPolicy(model.num_actions), 300, seed=0)
    return Binning.of(signature(model).observations, episodes, **settings)


def played(model, tasks, binning=None, rollout="blind"):
    with inference_scope(model, 0):
        return LockStep(Generative(model), binning or binned(model), rollout).run(tasks)


def first_states(model, contexts):
    with inference_scope(model, 1):
        rows = Rows(signature(model), model.device).of(Generative(model).initial(contexts))
    even = torch.zeros(len(contexts), model.num_contexts)
    return particles(rows, contexts, 0, even).particles


# --- binning ---


def percept(**sites):
    """Values by site, `[N]`; None where nothing was seen."""
    observed = {name: torch.tensor([v is not None for v in values]) for name, values in sites.items()}
    values = {name: torch.tensor([v or 0.0 for v in values]) for name, values in sites.items()}
    return Percept(None, values, observed)


def values(symbols):
    return [symbol.value for symbol in symbols]


def test_uniform_bins_lie_between_the_limits_and_are_open_outwards():
    binning = binned(LightDark(), bins=4, limits=(-2.0, 2.0))
    seen = binning.symbols(percept(z=[-100.0, -1.01, -0.99, 0.5, 1.01, 100.0]))
    assert values(seen) == [(0,), (0,), (1,), (2,), (3,), (3,)]
    assert values(binned(LightDark(), bins=4, limits={"z": (-2.0, 2.0)}).symbols(percept(z=[0.5]))) == [(2,)]


def test_an_edge_belongs_to_the_bin_above_it():
    assert values(binned(LightDark(), bins=2, limits=(-1.0, 1.0)).symbols(percept(z=[0.0]))) == [(1,)]


def test_quantile_bins_are_seen_equally_often():
    model = LightDark()
    episodes = simulate(model, RandomPolicy(3), 300, seed=0)
    binning = binned(model, bins=5, scheme="quantile")
    z = episodes.observations["z"][episodes.observed["z"]]
    seen = binning.symbols(Percept(None, {"z": z}, {"z": torch.ones_like(z, dtype=torch.bool)}))
    counts = np.unique([symbol.value for symbol in seen], return_counts=True)[1]
    assert len(counts) == 5
    assert counts.max() - counts.min() <= 2


def test_without_bins_values_stay_as_they_are():
    z = torch.tensor([0.1, -3.3])
    seen = binned(LightDark(), bins=None).symbols(Percept(None, {"z": z}, {"z": torch.tensor([True, True])}))
    assert values(seen) == [(z[0].item(),), (z[1].item(),)]


def test_a_discrete_site_is_never_binned():
    seen = binned(LineGrid(), bins=1).symbols(percept(side=[0.0, 1.0]))
    assert values(seen) == [(0.0,), (1.0,)]


def test_to_see_nothing_is_a_symbol_of_its_own():
    for bins in (None, 3):
        nothing, something = binned(LightDark(), bins=bins).symbols(percept(z=[None, 0.0]))
        assert nothing.value == (UNSEEN,)
        assert nothing != something


def test_several_sites_make_one_symbol():
    model = ContextualTiger()
    seen = binned(model).symbols(percept(left_ear=[1.0, None], right_ear=[0.0, None]))
    assert values(seen) == [(1.0, 0.0), (UNSEEN, UNSEEN)]
    assert seen[0] == Symbol((1.0, 0.0))
    assert hash(seen[0]) == hash(Symbol((1.0, 0.0)))


def test_every_number_of_a_vector_has_bins_of_its_own():
    binning = binned(Beacons(), bins=4)
    assert binning.edges["range"].shape == (1, 3)
    assert binning.edges["bearing"].shape == (2, 3)


def test_masks_of_plates_are_respected():
    model = Plates()  # the second of three sensors is broken
    with inference_scope(model, 0):
        programs = Generative(model)
        c = torch.tensor([0, 1])
        step = programs.step(programs.initial(c), c, c)
    for symbol in binned(model).symbols(step.percept):
        assert len(symbol.value) == 4
        assert [v == UNSEEN for v in symbol.value] == [False, True, False, False]


# --- the model, as pomdp-py sees it ---


def test_rows_hold_a_whole_state(model):
    with inference_scope(model, 0):
        state = Generative(model).initial(torch.zeros(5, dtype=torch.long))
        rows = Rows(signature(model), model.device)
        again = rows.state(rows.of(state))
    assert rows.of(state).dim() == 2
    for (_, leaf), (_, same) in zip(leaves(state), leaves(again), strict=True):
        assert leaf.dtype == same.dtype
        assert torch.equal(leaf, same)


@pytest.mark.slow
@pytest.mark.parametrize("model", [LightDark(horizon=4), LineGrid(horizon=5), ContextualTiger(horizon=3)])
def test_the_adapter_agrees_with_simulate(model):
    """Episodes played through pomdp-py's models have the rewards and observations of `simulate`."""
    B, T = 2000, model.horizon
    sequence = [t % model.num_actions for t in range(2, T + 2)]
    contexts = torch.arange(B) % model.num_contexts
    binning = binned(model, bins=4)
    mine = agent(
        particles(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long), 0, torch.zeros(1, 2)), T, None
    )

    def episode(state):
        def task():
            now, rewards, seen = state, [], []
            for index in sequence:
                action = Choice(index)
                after = mine.transition_model.sample(now, action)
                rewards.append(mine.reward_model.sample(now, action, after))
                seen.append(mine.observation_model.sample(after, action))
                now = after
            assert now.time == T
            return rewards, seen

        return task

    results = played(model, [episode(state) for state in first_states(model, contexts)], binning)
    rewards = torch.tensor([r for r, _ in results])
    truth = simulate(model, fixed_actions(*sequence), B, contexts=contexts, seed=2)
    for t in range(T):
        difference = rewards[:, t] - truth.rewards[:, t]
        assert_mean(difference, 0.0, f"reward at time {t}")
        real = Percept(
            None,
            {k: v[:, t] for k, v in truth.observations.items()},
            {k: v[:, t] for k, v in truth.observed.items()},
        )
        expected = torch.tensor(values(binning.symbols(real))).clamp(min=-1)
        found = torch.tensor(values(seen[t] for _, seen in results)).clamp(min=-1)
        for c in range(model.num_contexts):
            for k in range(found.shape[1]):
                gap = (found - expected)[contexts == c, k]
                assert_mean(gap, 0.0, f"observation {k} at time {t} in context {c}")


def test_after_the_horizon_nothing_happens():
    transition = SuccessorModel(3)
    state = Augmented([1.0], 0, 3, reward=5.0)
    after = transition.sample(state, Choice(0))
    assert (after.reward, after.time) == (0.0, 3)
    assert transition.sample(after, Choice(0)) is after


def rests(model, states, rollout):
    return torch.tensor(played(model, [lambda s=state: ask_rollout(s) for state in states], rollout=rollout))


@pytest.mark.slow
def test_a_blind_rollout_keeps_to_its_action():
    model, B = LightDark(), 1500
    contexts = torch.arange(B) % 2
    found = rests(model, first_states(model, contexts), "blind")
    assert found.shape == (B, 1)
    one_way = [
        simulate(
            model, fixed_actions(*[a] * model.horizon), B // 3, contexts=contexts[: B // 3], seed=2
        ).returns
        for a in range(3)
    ]
    truth = torch.cat(one_way)
    assert abs(found.mean() - truth.mean()) < 4 * (2 / B) ** 0.5 * truth.std()
    assert abs(found.std() / truth.std() - 1) < 0.15


def test_a_random_rollout_draws_every_action_anew():
    model, B = LightDark(), 1000
    contexts = torch.arange(B) % 2
    found = rests(model, first_states(model, contexts), "random")[:, 0]
    truth = simulate(model, RandomPolicy(3), B, contexts=contexts, seed=2).returns
    assert_mean(found - truth, 0.0, "return of a rollout")
    assert abs(found.std() / truth.std() - 1) < 0.15


def test_commitments_are_weighed_by_what_was_seen():
    """The line grid moves without noise: the values have a closed form."""
    model = LineGrid()
    for p in (0.5, 0.85, 0.99):
        known = [math.log(p) + 3.0, math.log(1 - p) + 3.0]  # up to a constant
        states = [Augmented([3.0], c, time, log_posterior=known) for c in (0, 1) for time in (2, 8)]
        in_time, too_late = [20 * p - 40 * (1 - p), 20 * (1 - p) - 40 * p, 0.0], [0.0] * 3
        expected = torch.tensor([in_time, too_late] * 2)
        torch.testing.assert_close(rests(model, states, "commitment"), expected, rtol=0, atol=1e-4)


def test_what_a_simulation_has_seen_is_weighed_by_bayes_rule():
    """On the line the robot knows where it is, so that n reports of either side are all there is to weigh."""
    model, B = LineGrid(), 60
    sense, q = 2, model.accuracy

    def task(b):
        def look():
            state, reports = Augmented([3.0], b % 2, 0, log_posterior=[math.log(0.3), math.log(0.7)]), []
            for _ in range(3):
                state = ask_step(state, sense)
                reports.append(state.seen.value[0])
            return reports, state.log_posterior

        return look

    results = played(model, [task(b) for b in range(B)], rollout="commitment")
    assert len({tuple(reports) for reports, _ in results}) > 4
    for reports, known in results:
        right = sum(reports)
        weights = [0.3 * q**right * (1 - q) ** (3 - right), 0.7 * (1 - q) ** right * q ** (3 - right)]
        assert known == pytest.approx(np.log(weights).tolist(), abs=1e-5)


def test_a_new_node_starts_from_the_values_of_commitments():
    class Node:
        def __init__(self):
            self.num_visits, self.value, self.children = 0, 0.0, {}

    root, choices = Node(), Choices(3).choices
    root.children = {choice: Node() for choice in choices}
    planning = PlannerPOUCT.__new__(PlannerPOUCT)
    planning._horizon = 10
    state = Augmented([3.0], 0, 0, log_posterior=[math.log(0.9), math.log(0.1)])
    (value,) = played(LineGrid(), [lambda: planning._rollout(state, (), root, 0)], rollout="commitment")
    assert value == pytest.approx(14.0, abs=1e-4)
    assert [root.children[choice].value for choice in choices] == pytest.approx([14.0, -34.0, 0.0], abs=1e-4)
    assert [root.children[choice].num_visits for choice in choices] == [1, 1, 1]
    assert root.num_visits == 3


def test_tasks_of_different_lengths_get_what_they_asked_for():
    model = LineGrid()

    def walk(steps):
        def task():
            state = Augmented([3.0], 0, 0)
            for _ in range(steps):
                state = ask_step(state, 0)
            return state.row, state.time

        return task

    assert played(model, [walk(n) for n in (2, 0, 1, 3)]) == [([1.0], 2), ([3.0], 0), ([2.0], 1), ([0.0], 3)]


def test_an_error_of_a_program_comes_through_and_puts_the_others_to_rest():
    class Broken(LineGrid):
        def reward(self, state, action, context):
            raise RuntimeError("no reward today")

    with pytest.raises(RuntimeError, match="no reward today"):
        played(Broken(), [lambda: ask_step(Augmented([3.0], 0, 0), 0)] * 3, binned(LineGrid()))


# --- the policies ---


def small(kind, model, **settings):
    return kind(model, **{"num_simulations": 20, "num_particles": 30, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [POUCT, POMCP])
@pytest.mark.parametrize("make", [LightDark, LineGrid, ContextualTiger, Beacons, EyesOpen, Plates])
def test_they_play_every_model(kind, make):
    model = make()
    model.horizon = 3  # after a few steps there is nothing new
    for rollout in ("blind", "random", "commitment") if make is Beacons else ("blind",):
        episodes = simulate(model, small(kind, model, rollout=rollout), 3, seed=0)
        assert episodes.actions.shape == (3, model.horizon)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [POUCT, POMCP])
def test_the_same_seed_gives_the_same_actions(kind):
    model = LightDark(horizon=5)
    first, again, other = (
        simulate(model, small(kind, model, seed=seed), 8, seed=0).actions for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", [POUCT, POMCP])
def test_nothing_is_printed(kind, capfd):
    model = LightDark(horizon=4)
    policy = small(kind, model)
    prior = model.prior().expand(4, -1)
    memory = policy.start(prior)
    history = _history(model, 4)
    for _ in range(3):
        action, memory = policy.act(history, memory)
        assert action.dtype == torch.int64
        history = history.extended(
            Percept(action, {"z": torch.full((4,), 0.1)}, {"z": action == 2}),
        )
    assert capfd.readouterr() == ("", "")


def _history(model, B):
    return History((blind(signature(model), B, model.device),))


def test_pouct_can_go_on_from_the_same_memory_twice():
    model = LightDark(horizon=4)
    policy = small(POUCT, model)
    memory = policy.start(model.prior().expand(3, -1))
    history = _history(model, 3)
    _, memory = policy.act(history, memory)
    look = Percept(torch.full((3,), 2), {"z": torch.ones(3)}, {"z": torch.ones(3, dtype=torch.bool)})
    history = history.extended(look)
    first, _ = policy.act(history, memory)
    again, _ = policy.act(history, memory)
    assert torch.equal(first, again)


def test_a_policy_can_be_sent_to_another_process():
    model = LineGrid(horizon=5)
    policy = small(POUCT, model)
    expected = simulate(model, policy, 4, seed=0).actions
    assert torch.equal(simulate(model, pickle.loads(pickle.dumps(policy)), 4, seed=0).actions, expected)


@pytest.mark.slow
def test_the_prior_counts():
    """Told the context, there is nothing to find out: the robot goes where the reward is."""
    model = LineGrid(horizon=4)  # just enough to get there
    for prior, action in (([1.0, 0.0], 0), ([0.0, 1.0], 1)):
        for kind in (POUCT, POMCP):
            policy = kind(model, num_simulations=100, num_particles=50)
            actions = simulate(model, policy, 5, contexts=action, prior=prior, seed=0).actions
            assert (actions[:, :3] == action).all()


def test_raw_observations_deprive_pomcp_of_its_particles():
    model = LightDark(horizon=6)
    policy = small(POMCP, model, bins=None)

    def act(history, memory):
        action, memory = policy.act(history, memory)
        return torch.full_like(action, 2), memory  # looks every time

    simulate(model, _Acting(policy.start, act), 5, seed=0)
    count = policy.deprivation
    assert (count.updates, count.looks, count.deprived) == (25, 25, 25)
    assert (count.rate, count.episode_rate) == (1.0, 1.0)


class _Acting:
    def __init__(self, start, act):
        self.start, self.act = start, act


@pytest.mark.slow
def test_bins_and_finite_observations_hardly_deprive_it():
    model = LineGrid(horizon=6)
    policy = POMCP(model, num_simulations=200, num_particles=100)
    simulate(model, policy, 10, seed=0)
    assert policy.deprivation.updates == 50
    assert policy.deprivation.rate < 0.1


def test_a_lost_belief_is_pushed_through_the_action():
    model = LineGrid()
    policy = small(POMCP, model)
    with inference_scope(model, 0):
        belief = particles(torch.tensor([[3.0], [2.0]]), torch.tensor([0, 1]), 1, torch.zeros(2, 2))
        (moved,) = policy._pushed(Generative(model), [belief], torch.tensor([0]), 2)
    assert [(s.row, s.context, s.time) for s in moved.particles] == [([2.0], 0, 2), ([1.0], 1, 2)]


class Trapdoor(Still):
    """Half of all steps lead through it, and that is the end."""

    contexts, horizon, states = 1, 3, 2

    def transition(self, state, action, context):
        return pyro.sample("fell", dist.Bernoulli(0.5).expand(state.shape)).long()

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(0.0, 1.0).expand(state.shape))

    def ends(self, state, action, context):
        return state == 1


def test_a_belief_that_is_pushed_keeps_to_what_goes_on():
    """Whoever still acts has not fallen, whatever else was seen."""
    planner, N = POMCP(Trapdoor(), 5, num_particles=40), 40
    before = particles(torch.zeros(N, 1), torch.zeros(N, dtype=torch.long), 0, torch.zeros(N, 1))
    with inference_scope(planner.model, 0):
        (after,) = planner._pushed(Generative(planner.model), [before], torch.tensor([0]), 1)
    assert [state.row for state in after.particles] == [[0.0]] * N
    assert {state.time for state in after.particles} == {1}


@pytest.mark.slow
def test_roots_are_drawn_from_the_filter():
    model = LightDark()
    policy = POUCT(model, num_simulations=1, num_particles=4000)
    online = policy.start(model.prior().expand(2, -1))
    online.observe(torch.tensor([1, 0]))
    online.observe(2, {"z": torch.tensor([1.5, 1.5])})
    with inference_scope(model, 0):
        roots = list(policy._roots(online.belief, online.posterior, 2))
    for b, root in enumerate(roots):
        states = root.particles
        assert len(states) == 4000
        assert all(state.time == 2 for state in states)
        c = torch.tensor([state.context for state in states])
        assert_mean((c == 1).double(), float(online.posterior[b, 1]), "context")
        for i in (0, 1):
            x = torch.tensor([state.row[0] for state, k in zip(states, c.tolist(), strict=True) if k == i])
            assert_mean(x, float(online.state_mean[b, i]), f"state in context {i}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("horizon", "num_simulations", "settings", "share"),
    [
        (10, 200, {"rollout": "random", "exploration": 20.0}, 0.65),  # UCT written independently, with these
        (7, 100, {"rollout": "commitment"}, 0.75),  # settings and exact beliefs: 77 ± 2.5 and 86.8 ± 1.3 %
    ],
)
def test_pouct_gets_most_of_what_can_be_had_on_the_line(horizon, num_simulations, settings, share):
    model = LineGrid(horizon=horizon)
    watched = Regretful(POUCT(model, num_simulations, num_particles=100, **settings), model)
    simulate(model, watched, 40, contexts="balanced", seed=0)
    assert watched.value > share * watched.plan.value


@pytest.mark.slow
def test_pouct_hears_better_than_who_believes_in_one_context():
    model = ContextualTiger(horizon=4)
    tables = truth.tables(model)
    watched = Regretful(POUCT(model, num_simulations=300, num_particles=100, rollout="random"), model)
    simulate(model, watched, 60, contexts="balanced", seed=0)
    value = watched.value
    assert truth.random_value(tables, 4) < value <= watched.plan.value
    assert value > truth.fixed_context_values(tables, 4).max()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_simulations": 0}, "num_simulations"),
        ({"num_particles": 1.5}, "num_particles"),
        ({"bins": 0}, "bins"),
        ({"scheme": "log"}, "scheme"),
        ({"limits": (1.0, -1.0)}, "limits"),
        ({"limits": {"nose": (0.0, 1.0)}}, "limits"),
        ({"limits": 3}, "limits"),
        ({"limits": {"z": ("a", "b")}}, "limits"),
        ({"limits": (0.0, 1.0), "bins": None}, "limits"),
        ({"limits": (0.0, 1.0), "scheme": "quantile"}, "limits"),
        ({"rollout": "clairvoyant"}, "rollout"),
        ({"rollout": ["blind"]}, "rollout"),
        ({"exploration": -1.0}, "exploration"),
        ({"exploration": "much"}, "exploration"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_arguments_are_named(settings, name):
    with pytest.raises(ValueError, match=name):
        POUCT(LightDark(), **settings)


@pytest.mark.parametrize("kind", [POUCT, POMCP])
def test_something_else_than_a_model_is_refused(kind):
    with pytest.raises(ValueError, match="model"):
        kind(LightDark)


class Glimpse(LineGrid):
    """The line grid, with a report on the detector's side before the first action."""

    initial_observation = True

    def observation(self, state, action, context):
        right = torch.where(context == 0, self.accuracy, 1 - self.accuracy)
        looks = torch.tensor(True) if action is None else action == 2
        pyro.sample("side", dist.Bernoulli(right).mask(looks))


def planted(model, symbols, prior, num_particles):
    policy = small(POMCP, model, num_particles=num_particles, rollout="commitment")
    with inference_scope(model, 0):
        trees, lost = policy._plant(Generative(model), policy.start(prior), symbols)
    return [each.belief.particles for each in trees.agents], lost


@pytest.mark.slow
def test_an_initial_observation_conditions_the_first_belief():
    model, prior, N = Glimpse(), torch.tensor([[0.3, 0.7]] * 2), 20_000
    beliefs, lost = planted(model, [Symbol((1.0,)), Symbol((0.0,))], prior, N)
    assert not lost
    for particles_, likelihood in zip(beliefs, ([0.85, 0.15], [0.15, 0.85]), strict=True):
        joint = np.array([0.3, 0.7]) * likelihood
        truth = joint[0] / joint.sum()
        share = np.mean([state.context == 0 for state in particles_])
        assert abs(share - truth) < 4 * (truth * (1 - truth) / (N * joint.sum())) ** 0.5  # those that agree
        assert particles_[0].log_posterior == pytest.approx(np.log(joint).tolist(), abs=1e-5)


def test_where_nobody_foresaw_the_initial_observation_it_is_ignored():
    prior = torch.tensor([[0.3, 0.7]])
    (belief,), lost = planted(Glimpse(), [Symbol((5.0,))], prior, 50)
    assert lost == [0]
    for state in belief:
        assert state.log_posterior == pytest.approx(np.log([0.3, 0.7]).tolist(), abs=1e-5)


def test_bins_of_a_site_that_is_seen_only_at_first():
    class Once(EyesOpen):
        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state, 1.0).mask(torch.tensor(action is None)))

    edges = binned(Once(), bins=10).edges["z"][0]
    assert (edges.diff() > 0).all()
