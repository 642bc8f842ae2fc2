from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from cpomdp_ppl import FunctionPolicy, ModelError, RandomPolicy, simulate
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.gym import CPOMDPEnv
from cpomdp_ppl.handlers import draw_index
from cpomdp_ppl.inference import inference_scope
from cpomdp_ppl.models import LightDark
from cpomdp_ppl.rng import fresh_seed
from cpomdp_ppl.state import leaves, map_state
from tests.conftest import assert_mean, fixed_actions
from tests.programs import EyesOpen, Learnable, Plates, Sail, Walk


def test_same_seed_same_episodes(model):
    policy = RandomPolicy(model.num_actions)
    one, two, other = (simulate(model, policy, 20, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(one.actions, two.actions)
    assert torch.equal(one.contexts, two.contexts)
    assert torch.equal(one.rewards, two.rewards)
    map_state(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), one.states, two.states)
    assert not torch.equal(one.actions, other.actions)


def test_a_fresh_seed_is_a_seed():
    assert fresh_seed(7) == 7
    assert type(fresh_seed(np.int64(7))) is int
    drawn = {fresh_seed(None) for _ in range(20)}
    assert len(drawn) > 1
    assert all(0 <= seed < 2**32 for seed in drawn)
    for wrong in (-1, 2**32, 0.5, True, "a"):
        with pytest.raises(ValueError, match="seed: expected None or an integer"):
            fresh_seed(wrong)


def test_without_a_seed_episodes_differ(model):
    policy = RandomPolicy(model.num_actions)
    one, two = (simulate(model, policy, 50).actions for _ in range(2))
    assert not torch.equal(one, two)


def test_the_caller_is_left_alone_when_a_policy_fails():
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="lost"):
        simulate(Walk(), lambda history: (_ for _ in ()).throw(RuntimeError("lost")), 5, seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_contexts_come_from_the_prior():
    episodes = simulate(Walk(), RandomPolicy(2), 20_000, prior=[0.2, 0.8], seed=0)
    assert_mean(episodes.contexts.float(), 0.8, "contexts")
    each = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert simulate(Walk(), RandomPolicy(2), 3, prior=each, seed=0).contexts.tolist() == [0, 1, 1]


def test_contexts_can_be_given_or_balanced():
    policy = RandomPolicy(2)
    assert simulate(Walk(), policy, 3, contexts=[1, 0, 1]).contexts.tolist() == [1, 0, 1]
    assert simulate(Walk(), policy, 3, contexts=1).contexts.tolist() == [1, 1, 1]
    assert simulate(Walk(), policy, 5, contexts="balanced").contexts.tolist() == [0, 1, 0, 1, 0]
    by_name = simulate(LightDark(), RandomPolicy(3), 2, contexts=["light left", "light right"])
    assert by_name.contexts.tolist() == [1, 0]
    assert simulate(LightDark(), RandomPolicy(3), 2, contexts="light left").contexts.tolist() == [1, 1]


def test_impossible_contexts_are_never_drawn(monkeypatch):
    for extreme in (0.0, 1.0 - 2.0**-24):
        monkeypatch.setattr(torch, "rand", lambda *shape, extreme=extreme, **_: torch.full(shape, extreme))
        for prior, expected in (([0.0, 1.0], 1), ([1.0 - 5e-6, 0.0], 0)):
            assert simulate(Walk(), RandomPolicy(2), 1, prior=prior, seed=0).contexts.tolist() == [expected]


def test_random_actions_are_uniform():
    episodes = simulate(LightDark(), RandomPolicy(3), 2_000, seed=0)
    for action in range(3):
        assert_mean((episodes.actions == action).float().flatten(), 1 / 3, f"action {action}")


def test_a_categorical_decision_is_drawn_by_its_probabilities():
    logits = torch.tensor([0.7, 0.2, 0.1]).log()
    episodes = simulate(
        LightDark(), lambda history: dist.Categorical(logits=logits.expand(5000, 3)), 5000, seed=0
    )
    for action, probability in enumerate((0.7, 0.2, 0.1)):
        assert_mean((episodes.actions[:, 3] == action).float(), probability, f"action {action}")


@pytest.mark.parametrize("given", ["probs", "logits"])
def test_what_has_no_probability_is_never_drawn(monkeypatch, given):
    almost_one = 1 - 2.0**-24
    for u in (0.0, almost_one):  # the ends of what `rand` can give
        monkeypatch.setattr(torch, "rand", lambda *args, u=u, **kwargs: torch.full(args[0], u))
        for p in ([0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 1.0, 0.0], [0.1] * 10 + [0.0]):
            probs = torch.tensor(p).expand(4, -1)
            fn = dist.Categorical(**{given: probs if given == "probs" else probs.log()})
            possible = [i for i, each in enumerate(p) if each]
            assert draw_index(fn).tolist() == [possible[0 if u == 0.0 else -1]] * 4


def test_categorical_sites_of_a_program_are_drawn_by_their_probabilities():
    p = torch.tensor([[0.2, 0.5, 0.3], [0.0, 0.1, 0.9]])

    class Dice(Walk):
        def transition(self, state, action, context):
            probs = torch.stack([torch.where(context == 0, a, b) for a, b in p.T], -1)
            return pyro.sample("x", dist.Categorical(probs)).float()

    episodes = simulate(Dice(), RandomPolicy(2), 20_000, contexts="balanced", seed=0)
    for c in (0, 1):
        last = episodes.states[episodes.contexts == c, -1]
        for i in range(3):
            assert_mean((last == i).float(), float(p[c, i]), f"face {i} in context {c}", sd=0.5)


def test_rewards_are_those_of_every_step_however_many_are_computed_at_once(model, monkeypatch):
    policy = RandomPolicy(model.num_actions)
    together = simulate(model, policy, 30, seed=0)
    monkeypatch.setattr("cpomdp_ppl.rollout.CELLS_AT_ONCE", 100)  # three steps and a rest
    in_parts = simulate(model, policy, 30, seed=0)
    assert torch.equal(in_parts.rewards, together.rewards)
    own = (1,) * model.max_plate_nesting
    c = together.contexts.reshape(-1, *own)
    for t in range(model.horizon):
        state, a = map_state(lambda leaf, t=t: leaf[:, t], together.states), together.actions[:, t]
        reward = model.reward(state, a.reshape(-1, *own), c)
        assert torch.equal(together.rewards[:, t], reward.expand(30, *own).reshape(30).float())


def test_the_agent_sees_nothing_that_is_masked_nor_any_truth():
    given = []

    def look(history):
        given.append(history)
        return torch.tensor([0, 1, 2, 2])

    episodes = simulate(LightDark(horizon=3), look, 4, seed=0)
    for history in given[1:]:
        z = history.latest.observations["z"]
        assert z[:2].tolist() == [0.0, 0.0]
        assert bool((z[2:] != 0).all())
        assert history.latest.observed["z"].tolist() == [False, False, True, True]
    assert torch.equal(given[2].observations["z"][:, 1:], episodes.observations["z"][:, :2])
    assert torch.equal(given[2].actions, episodes.actions[:, :2])
    assert set(vars(given[2])) == {"percepts"}


BAD_ARGUMENTS = [
    (dict(num_episodes=0), "num_episodes: expected a positive integer, got 0"),
    (dict(num_episodes=2.5), "num_episodes: expected a positive integer, got 2.5"),
    (dict(num_episodes=True), "num_episodes: expected a positive integer, got True"),
    (dict(model=Walk), "model: expected an instance of a CPOMDP, got <class"),
    (dict(model=3), "model: expected an instance of a CPOMDP, got 3"),
    (dict(contexts=2), "contexts: expected indices 0 to 1, got indices from 2 to 2"),
    (dict(contexts=[0, 1]), r"contexts: expected a single index or shape \[4\]"),
    (dict(contexts=[0.5] * 4), "contexts: expected integer indices"),
    (dict(contexts="even"), "contexts: expected .*balanced.* got even"),
    (dict(prior=[0.5, 0.6]), "prior: expected non-negative probabilities that sum to 1"),
    (dict(prior=[-0.5, 1.5]), "prior: expected non-negative"),
    (dict(prior=[1.0]), r"prior: expected shape \[2\] or \[4, 2\], got \[1\]"),
    (dict(prior=[float("nan"), 1.0]), "prior: expected non-negative"),
    (dict(prior="even"), "prior: expected an array of real numbers, got even"),
    (dict(prior=[[0.5, 0.5], [1.0]]), "prior: expected an array, rows all of the same length"),
    (dict(prior={"a": 1.0}), "prior: expected an array of real numbers"),
    (dict(contexts=["0", "2"] * 2), r"contexts: expected names out of \['0', '1'\], got \['2'\]"),
    (dict(seed=-1), "seed: expected None or an integer from 0"),
    (dict(policy=3), "policy: expected an object with `start` and `act`, or a function"),
    (dict(policy=RandomPolicy), "policy: expected an object"),
    (
        dict(policy=lambda h: torch.tensor([0, 1, 2, 0])),
        "policy: expected actions 0 to 1, got actions from 0 to 2",
    ),
    (dict(policy=lambda h: torch.tensor([0, 1, -1, 0])), "policy: expected actions 0 to 1"),
    (
        dict(policy=lambda h: torch.zeros(4)),
        r"policy: expected int64 actions of shape \[4\], got torch.float32",
    ),
    (dict(policy=lambda h: torch.zeros(3).long()), r"policy: expected int64 actions of shape \[4\]"),
    (dict(policy=lambda h: 1), "policy: expected actions"),
    (dict(policy=lambda h: dist.Categorical(logits=torch.zeros(4, 3))), r"policy: expected shape \[4, 2\]"),
    (dict(policy=lambda h: dist.Normal(torch.zeros(4), 1.0)), "policy: expected actions"),
    (
        dict(policy=lambda h: dist.Categorical(logits=torch.full((4, 2), torch.nan))),
        "policy: expected proper probabilities, got logits as low as nan",
    ),
    (
        dict(policy=lambda h: dist.Categorical(probs=torch.tensor([-1.0, 2.0]).expand(4, 2))),
        "policy: expected proper probabilities, got probabilities as low as -1.0",
    ),
    (
        dict(policy=lambda h: dist.Categorical(probs=torch.zeros(4, 2))),
        "policy: expected proper probabilities",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=[m[:40] for _, m in BAD_ARGUMENTS])
def test_bad_arguments_are_named(arguments, message):
    arguments = dict(model=Walk(), policy=RandomPolicy(2), num_episodes=4) | arguments
    with pytest.raises(ValueError, match=message):
        simulate(**arguments)


def test_a_program_that_leaves_the_reals_is_named():
    class Blowing(Walk):
        horizon = 12

        def transition(self, state, action, context):
            return torch.where(context == 1, (state.abs() + 10) ** 4, state)

    with pytest.raises(ModelError, match=r"transition: 'state' is inf at time .* in context '1'"):
        simulate(Blowing(), RandomPolicy(2), 8, contexts="balanced", seed=0)


@pytest.mark.parametrize("chance", [float("nan"), 1.5, -0.25])
def test_a_chance_to_end_that_is_none_is_named(chance):
    """Wherever it is drawn from, with a check and without."""

    class Odd(Sail):
        def ends(self, state, action, context):
            return torch.where(context == 1, chance, 0.0) + 0.0 * state

    model, words = Odd(), f"ends: is {chance:.6g}; return truth values, or probabilities from 0 to 1"
    with pytest.raises(ModelError, match=words):
        simulate(model, RandomPolicy(model.actions), 20, contexts="balanced", seed=0)
    with pytest.raises(ModelError, match=words), pyro.validation_enabled(True):
        pyro.condition(model, {"context": torch.tensor(1)})(RandomPolicy(model.actions))
    env = CPOMDPEnv(model, prior=[0.0, 1.0], seed=0)
    env.reset()
    with pytest.raises(ModelError, match=words):
        env.step([0.0, 1.0])
    with inference_scope(model, 0), pytest.raises(ModelError, match=words):
        Generative(model).move(torch.zeros(2), torch.zeros(2, 2), torch.tensor([0, 1]))


def test_a_first_state_that_is_not_finite_is_blamed_on_initial():
    class Lost(Walk):
        def initial(self, context):
            return pyro.sample("x", dist.Normal(0.0, 1.0)) / 0.0

    with pytest.raises(ModelError, match=r"initial: 'state' is -?inf at time 0") as caught:
        simulate(Lost(), RandomPolicy(2), 8, seed=0)
    assert any("observation: site 'z' is" in fault and "at time 1 " in fault for fault in caught.value.faults)


def test_a_first_observation_that_is_not_finite_is_named():
    class Dazzled(EyesOpen):
        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(torch.inf if action is None else state, 1.0))

    with pytest.raises(ModelError, match="observation: site 'z' is inf at time 0"):
        simulate(Dazzled(), RandomPolicy(2), 8, seed=0)


@pytest.mark.parametrize(
    "state", [{"x": torch.zeros(())}, {"x": torch.zeros(()), "y": torch.zeros(()), "z": torch.zeros(())}, 0.0]
)
def test_a_state_of_other_components_is_named(state):
    class Changing(Walk):
        def initial(self, context):
            return {"x": torch.zeros(()), "y": torch.zeros(())}

        def transition(self, state_before, action, context):
            return state

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(0.0, 1.0))

        def reward(self, state, action, context):
            return torch.zeros(())

    with pytest.raises(ModelError, match=r"Changing has 1 fault:\n.*transition: returns a state of shapes"):
        simulate(Changing(), RandomPolicy(2), 4, seed=0)


def test_rewards_are_real_numbers():
    for reward in (lambda s: s > 0, lambda s: s.long(), lambda s: 1, lambda s: True):
        model = Walk()
        model.reward = lambda state, action, context, reward=reward: reward(state)
        episodes = simulate(model, RandomPolicy(2), 4, seed=0)
        assert episodes.rewards.dtype == torch.float32
        expected = torch.as_tensor(reward(episodes.states[:, :-1])).float().expand(4, 3)
        assert torch.equal(episodes.rewards, expected)


def test_double_precision_gives_double_precision(model):
    make = type(model)
    torch.set_default_dtype(torch.float64)
    try:
        episodes = simulate(make(), RandomPolicy(model.num_actions), 4, seed=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert episodes.rewards.dtype == torch.float64
    values = [*(leaf for _, leaf in leaves(episodes.states)), *episodes.observations.values()]
    assert all(leaf.dtype == torch.float64 for leaf in values if leaf.is_floating_point())


def test_mixtures_are_drawn_as_in_a_plate():
    class Mixture(Walk):
        def observation(self, state, action, context):
            weights = dist.Categorical(torch.tensor([0.25, 0.75]))
            parts = dist.Normal(torch.stack([state - 100.0, state + 100.0], -1), 1.0)
            pyro.sample("z", dist.MixtureSameFamily(weights, parts).mask(action == 1))

    Mixture().check()
    Mixture()(RandomPolicy(2), 4)
    episodes = simulate(Mixture(), fixed_actions(1, 1, 1), 4000, seed=0)
    right = episodes.observations["z"][:, 0] > episodes.states[:, 1]
    assert_mean(right.float(), 0.75, "weight of the right part")


class Dreamer:
    """A policy that runs Pyro programs of its own, with site names that the model has, too."""

    def start(self, prior):
        return pyro.sample("x", dist.Normal(torch.zeros(7), 1.0))

    def act(self, history, memory):
        with pyro.plate("dreams", 7):
            pyro.sample("a_0", dist.Normal(memory, 1.0))
        pyro.sample("z_1", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0))
        pyro.param("bias", torch.tensor(0.0))
        return torch.zeros(history.num_episodes, dtype=torch.long), memory


def test_what_a_policy_samples_is_its_own_business():
    assert simulate(Walk(), Dreamer(), 4, seed=0).actions.shape == (4, 3)
    with pyro.get_param_store().scope():
        trace = pyro.poutine.trace(Walk()).get_trace(Dreamer(), 4)
        assert {"x", "dreams"}.isdisjoint(trace.nodes)
        assert trace.nodes["bias"]["type"] == "param"


def test_handlers_around_simulate_see_nothing():
    with pyro.poutine.trace() as tracer, pyro.plate("outer", 5):
        episodes = simulate(Walk(), RandomPolicy(2), 4, seed=0)
    assert list(tracer.trace.nodes) in ([], ["outer"])
    assert torch.equal(episodes.states, simulate(Walk(), RandomPolicy(2), 4, seed=0).states)


def test_values_of_the_param_store_are_used():
    model = Learnable()
    simulate(model, fixed_actions(1, 1, 1), 4, seed=0)
    assert not list(pyro.get_param_store().keys())
    with pyro.get_param_store().scope():
        pyro.param("drift", torch.tensor(100.0), constraint=constraints.positive)
        episodes = simulate(model, fixed_actions(1, 1, 1), 4, seed=0)
        assert list(pyro.get_param_store().keys()) == ["drift"]
    assert bool((episodes.states.diff(dim=1) > 90).all())


def test_a_categorical_of_torch_will_do():
    def decide(history):
        return torch.distributions.Categorical(probs=torch.tensor([0.0, 1.0]).expand(4, 2))

    assert bool((simulate(Walk(), decide, 4, seed=0).actions == 1).all())
    assert bool((Walk()(decide, 4).actions == 1).all())


@pytest.mark.parametrize("program", [Walk, Plates])
@pytest.mark.parametrize("given", ["probs", "logits"])
def test_what_a_policy_rules_out_is_impossible_at_the_action_site(program, given):
    sure = torch.tensor([[0.0, 1.0]])
    decision = dist.Categorical(**{given: sure if given == "probs" else sure.log()})
    trace = pyro.poutine.trace(program()).get_trace(lambda history: decision)
    assert trace.nodes["a_0"]["fn"].probs.flatten().tolist() == [0.0, 1.0]


def test_a_history_knows_its_size_and_starts_empty():
    lengths = []

    def look(history):
        assert history.num_episodes == 4
        assert history.actions.dtype == torch.long
        lengths.append(history.actions.shape)
        return torch.zeros(4, dtype=torch.long)

    simulate(Walk(), look, 4, seed=0)
    assert lengths == [(4, 0), (4, 1), (4, 2)]


def test_policies_of_nothing_are_refused():
    with pytest.raises(ValueError, match="function: expected a function of a History, got 3"):
        FunctionPolicy(3)
    with pytest.raises(ValueError, match="actions: expected a positive integer, got 0"):
        RandomPolicy(0)


class Mayfly(Walk):
    """Everything is over after a step."""

    horizon = 6

    def ends(self, state, action, context):
        return torch.ones_like(state).bool()


def test_nobody_is_asked_once_all_episodes_are_over():
    asked = []

    def policy(history):
        asked.append(history.time)
        return torch.ones(history.num_episodes, dtype=torch.long)

    episodes = simulate(Mayfly(), policy, 10, seed=0)
    assert asked == [0]
    assert episodes.actions.shape == (10, 6)
    assert (episodes.lengths == 1).all()
    assert episodes.ended.all()
    assert (episodes.states[:, 2:] == 0).all()
    assert not episodes.observed["z"][:, 1:].any()
    trace = pyro.poutine.trace(Mayfly()).get_trace(policy)
    assert "z_6" in trace.nodes  # the same sites in every call
