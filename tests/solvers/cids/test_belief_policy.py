"""What a policy reads of a belief, worked out by hand, and that it decides alike wherever it is asked."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import CPOMDP, Agent, RandomPolicy, simulate
from cpomdp_ppl.inference import ObservableOperator, as_backend, inference_scope
from cpomdp_ppl.inference.knowledge import Knowledge
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.policy import History, Percept
from cpomdp_ppl.state import leaves, map_state
from solvers.cids.batch import OWN
from solvers.cids.belief_policy import IDENTITY, ODDS, BeliefNet, BeliefPolicy, Inputs
from solvers.cids.critic import UNITS_RATE
from solvers.cids.playing import play_out
from solvers.cids.policy import Exploring, unroll
from tests.inference.test_knowledge import followed, uneven
from tests.programs import EyesOpen

SHARP = 0.9


class Lamp(CPOMDP):
    """A lamp that is on or off and stays so; looking tells, right with probability 0.9, in context 0.

    In context 1 what is seen is a coin. Action 0 looks; action 1 bets that it is on: 4 if so, else -8.
    """

    contexts, actions, states, horizon = 2, 2, 2, 4

    def initial(self, context):
        return pyro.sample("lamp", dist.Bernoulli(0.25)).long()

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        p = torch.where(state == 1, SHARP, 1 - SHARP)
        pyro.sample("light", dist.Bernoulli(torch.where(context == 0, p, 0.5)).mask(action == 0))

    def reward(self, state, action, context):
        return torch.where(action == 1, torch.where(state == 1, 4.0, -8.0), 0.0)


def looked(model, *lights, prior=((0.6, 0.4),)):
    """What is known after looking some times."""
    with inference_scope(model, 0):
        known = Knowledge.first(ObservableOperator(), model, torch.tensor(prior, dtype=torch.float64))
        for light in lights:
            seen = {"light": torch.full((len(prior),), float(light))}
            flags = {"light": torch.ones(len(prior), dtype=torch.bool)}
            known = known.after(Percept(torch.zeros(len(prior), dtype=torch.long), seen, flags))
    return known


def test_what_it_reads_of_a_lamp():
    """Bayes' rule, twice, by hand; rewards in units of their median size."""
    model = Lamp()
    encoding = BeliefPolicy(model, likelihood="exact", seed=0).encoding
    unit = float(encoding.reward_scale)
    assert unit in (4.0, 8.0)
    on, off = 0.25 * SHARP**2, 0.75 * (1 - SHARP) ** 2  # two lights were seen, in context 0
    p = 0.6 * (on + off) / (0.6 * (on + off) + 0.4 * 0.5**2)
    lit = torch.tensor([on / (on + off), 0.25])  # by context
    with inference_scope(model, 0):
        inputs = encoding(looked(model, 1, 1))
    posterior = torch.tensor([p, 1 - p])
    torch.testing.assert_close(inputs.posterior, posterior[None])
    odds = math.log(p / (1 - p)) / (ODDS / 2)
    bet = torch.asinh((4 * lit - 8 * (1 - lit)) / unit)
    expected = torch.stack(
        [torch.tensor([odds, -odds]), posterior, 1 - lit, lit, torch.zeros(2), bet], 1
    )  # [C, 6]
    torch.testing.assert_close(inputs.by_context, expected[None])
    torch.testing.assert_close(inputs.odds, expected[None, :, 0])
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    overall = torch.cat([torch.tensor([entropy, 2 / 4]), posterior @ expected[:, 2:]])
    torch.testing.assert_close(inputs.overall, overall[None])


def test_who_is_sure_has_finite_odds():
    with inference_scope(Lamp(), 0):
        inputs = BeliefPolicy(Lamp(), likelihood="exact").encoding(looked(Lamp(), 1, prior=((1.0, 0.0),)))
    assert inputs.by_context[0, :, 0].tolist() == [2.0, -2.0]
    assert float(inputs.overall[0, 0]) == 0.0


def test_states_that_are_numbers_are_read_by_mean_and_spread():
    """In units of their spread along random episodes, from the centre of those."""
    model = LightDark()
    encoding = BeliefPolicy(model, likelihood="ekf", seed=0).encoding
    episodes = simulate(model, RandomPolicy(3), 3, seed=5)
    known = followed(as_backend("ekf"), model, uneven(2, 3), episodes)[6]
    with inference_scope(model, 0):
        inputs = encoding(known)
    mean, variance = (moment.T.reshape(3, 2).float() for moment in known.moments)
    assert inputs.by_context.shape == (3, 2, 2 + 2 + 3)
    torch.testing.assert_close(inputs.by_context[..., 2], (mean - encoding.centre) / encoding.scale)
    torch.testing.assert_close(inputs.by_context[..., 3], variance.sqrt() / encoding.scale)
    many = simulate(model, RandomPolicy(3), 4000, contexts="balanced", seed=9).states
    assert abs(float(encoding.centre - many.mean())) < 0.3 * float(many.std())
    assert float(encoding.scale) == pytest.approx(float(many.std()), rel=0.3)
    torch.testing.assert_close(inputs.overall[:, 1], torch.full((3,), 6 / 20))


def test_a_state_of_several_parts_lies_on_one_axis():
    policy = BeliefPolicy(Beacons(), likelihood="ekf")
    assert policy.encoding.centre.shape == (3,)
    assert policy.encoding.num_states is None
    assert policy.encoding.by_context == 2 + 2 * 3 + Beacons().num_actions


def test_states_that_are_too_many_are_read_by_their_moments():
    few, many = LineGrid(num_cells=20), LineGrid(num_cells=200)
    assert BeliefPolicy(few, likelihood="exact").encoding.num_states == 21
    assert BeliefPolicy(many, likelihood="exact").encoding.num_states is None


def random_inputs(policy, *shape, seed=0):
    """Inputs of the right sizes, `[*shape, …]`."""
    g, C = torch.Generator().manual_seed(seed), policy.model.num_contexts
    dtype = policy.logits.weight.dtype
    odds, posterior = (torch.randn(*shape, C, generator=g, dtype=dtype) for _ in range(2))
    posterior = posterior.softmax(-1)
    others = torch.randn(*shape, C, policy.encoding.by_context - 2, generator=g, dtype=dtype)
    overall = torch.randn(*shape, policy.encoding.overall, generator=g, dtype=dtype)
    return inputs_of(odds, posterior, others, overall)


def inputs_of(odds, posterior, others, overall):
    contexts = torch.arange(odds.shape[-1]).expand(odds.shape)
    by_context = torch.cat([odds[..., None], posterior[..., None], others], -1)
    return Inputs(odds, posterior, contexts, by_context, overall)


def permuted(inputs, order):
    of = inputs.by_context[..., order, 2:]
    return inputs_of(inputs.odds[..., order], inputs.posterior[..., order], of, inputs.overall)


def test_contexts_may_be_numbered_otherwise():
    """With what belongs to them, their order makes no difference."""
    policy = BeliefPolicy(ContextualTiger(), likelihood="exact", seed=0)
    inputs, order, C = random_inputs(policy, 5, 4), torch.tensor([2, 0, 1]), 3
    before = policy.decide(inputs), policy.values(inputs)
    assert not torch.allclose(policy.decide(permuted(inputs, order)), before[0], atol=1e-3)
    for net in (policy.actor, policy.judge):
        _renumber(net, order, C)
    after = policy.decide(permuted(inputs, order)), policy.values(permuted(inputs, order))
    torch.testing.assert_close(after, before)


def _renumber(net: BeliefNet, order: torch.Tensor, C: int) -> None:
    with torch.no_grad():
        net.identity.copy_(net.identity[order])
        first = net.each.weight.shape[0]
        for at in (first, first + C):  # columns that read every context's odds and probability
            net.all.weight[:, at : at + C] = net.all.weight[:, at : at + C][:, order]


def test_contexts_without_an_identity_are_interchangeable():
    policy = BeliefPolicy(ContextualTiger(), likelihood="exact", seed=0)
    inputs, order = random_inputs(policy, 5), torch.tensor([0, 2, 1])
    with torch.no_grad():
        for net in (policy.actor, policy.judge):
            net.identity[2] = net.identity[1]
            first = net.each.weight.shape[0]
            for at in (first, first + 3):
                net.all.weight[:, at + 2] = net.all.weight[:, at + 1]
    torch.testing.assert_close(policy.decide(permuted(inputs, order)), policy.decide(inputs))
    torch.testing.assert_close(policy.values(permuted(inputs, order)), policy.values(inputs))


def test_impossible_contexts_are_not_read():
    """The pooling weighs by the posterior: what is believed under a context of probability 0 is nothing."""
    policy = BeliefPolicy(ContextualTiger(), likelihood="exact", seed=0)
    inputs = random_inputs(policy, 5)
    posterior = inputs.posterior.clone()
    posterior[:, 1] = 0.0
    others = inputs.by_context[..., 2:].clone()
    one = inputs_of(inputs.odds, posterior, others.clone(), inputs.overall)
    others[:, 1] = 100.0
    two = inputs_of(inputs.odds, posterior, others, inputs.overall)
    torch.testing.assert_close(policy.decide(one), policy.decide(two))


@pytest.mark.parametrize(("make", "name"), [(LineGrid, "exact"), (LightDark, "ekf")])
def test_of_contexts_that_are_certain_no_others_need_be_read(make, name):
    """Inputs of that one context alone lead to the same decision."""
    model = make()
    policy = opinionated(model, name)
    episodes = simulate(model, RandomPolicy(3), 6, contexts="balanced", seed=0)
    sure = torch.nn.functional.one_hot(episodes.contexts, 2).double()
    known = followed(as_backend(name), model, sure, episodes)[4]
    with inference_scope(model, 0):
        inputs = policy.encoding(known)
    c = episodes.contexts[:, None]
    alone = Inputs(
        inputs.odds,
        inputs.posterior,
        c,
        inputs.by_context.gather(1, c[..., None].expand(-1, 1, inputs.by_context.shape[2])),
        inputs.overall,
    )
    torch.testing.assert_close(policy.decide(alone), policy.decide(inputs))
    torch.testing.assert_close(policy.values(alone), policy.values(inputs))
    assert bool((inputs.posterior == sure).all())


def opinionated(model, likelihood):
    """A policy that is not indifferent."""
    policy = BeliefPolicy(model, hidden=8, likelihood=likelihood, seed=3)
    with torch.no_grad():
        policy.logits.weight.mul_(20)
    return policy


class Spy:
    """Notes what a policy decides."""

    def __init__(self, policy):
        self.policy, self.start, self.logits = policy, policy.start, []

    def act(self, history, memory):
        decision, memory = self.policy.act(history, memory)
        self.logits.append(decision.logits)
        return decision, memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name"), [(LineGrid, "exact"), (ContextualTiger, "exact"), (LightDark, "ekf")]
)
def test_it_decides_alike_in_play_in_hindsight_and_as_an_agent(make, name):
    """The same history, the same logits."""
    model, B = make(), 6
    policy = opinionated(model, name)
    prior = uneven(model.num_contexts, B)
    played = play_out(model, Exploring(policy), torch.arange(B) % model.num_contexts, prior, None, seed=1)
    episodes = played.episodes
    expected = policy.decide(played.inputs).log_softmax(-1)  # [B, T, A]
    assert bool((expected.diff(dim=1).abs() > 0.1).any())

    hindsight, features = unroll(policy, episodes, prior)
    assert features is None
    torch.testing.assert_close(hindsight, expected, rtol=1e-4, atol=1e-4)

    for b in (0, 3):
        spy = Spy(policy)
        agent = Agent(model, spy, likelihood=policy.backend, prior=prior[b], greedy=True, seed=0)
        for t in range(model.horizon):
            action = agent.act()
            assert action == int(expected[b, t].argmax())
            seen = {s: v[b, t] for s, v in episodes.observations.items() if bool(episodes.observed[s][b, t])}
            agent.observe(seen, action=int(episodes.actions[b, t]))
        torch.testing.assert_close(torch.cat(spy.logits), expected[b], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), [(LineGrid, "exact"), (EyesOpen, "ekf")])
def test_simulated_it_plays_as_it_is_played(make, name):
    """Two engines with random numbers of their own: returns agree within 4.5 standard errors."""
    model, B = make(), 3000
    policy = opinionated(model, name)
    prior = model.prior().double().expand(B, -1)
    contexts = torch.arange(B) % model.num_contexts
    ours = play_out(model, Exploring(policy), contexts, prior, None, seed=1).episodes
    theirs = simulate(model, policy, B, contexts=contexts, seed=2)
    for one, other in (
        (ours.returns, theirs.returns),
        *(
            ((ours.actions == a).double().mean(1), (theirs.actions == a).double().mean(1))
            for a in range(model.num_actions)
        ),
    ):
        error = (one.var() + other.var()).sqrt() / B**0.5
        assert abs(float(one.mean() - other.mean())) < 4.5 * float(error) + 1e-9


def test_with_an_exact_filter_it_draws_nothing():
    """What is asked for exact values of a policy has to be a function of the history."""
    policy = BeliefPolicy(Many(2), likelihood="exact")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    policy.act(_history(Many(2), 3), policy.start(torch.full((3, 2), 0.5)))
    assert torch.equal(before, torch.get_rng_state())


def test_its_agent_takes_its_own_filter():
    policy = BeliefPolicy(LineGrid(), likelihood="smc")
    agent = policy.agent(seed=0, prior=[0.3, 0.7])
    agent.observe({"side": 1.0}, action="sense")
    assert agent.filter.belief.weights.shape == (2, 1, 256)
    assert agent.posterior[0] == pytest.approx(0.3 * 0.85 / (0.3 * 0.85 + 0.7 * 0.15))


def test_gradients_are_finite_differences():
    """Of `log π` of the actions taken, with persistence and chance, along four directions."""
    model = ContextualTiger()
    policy = BeliefPolicy(model, hidden=8, likelihood="exact", seed=0).double()
    acting = Exploring(policy, 0.1, 0.7)
    inputs = random_inputs(policy, 6, 5)
    g = torch.Generator().manual_seed(1)
    actions = torch.randint(3, (6, 5), generator=g)
    previous = torch.cat([torch.full((6, 1), -1), actions[:, :-1]], 1)
    weights = [*policy.actor.parameters(), *policy.logits.parameters()]

    def score():
        return acting.log_probs(policy.decide(inputs), previous).gather(2, actions[..., None]).sum()

    gradients = torch.autograd.grad(score(), weights)
    assert all(float(gradient.abs().max()) > 1e-6 for gradient in gradients)
    for _ in range(4):
        direction = [torch.randn(w.shape, generator=g, dtype=torch.float64) for w in weights]
        step, values = 1e-6, []
        for sign in (1, -1):
            with torch.no_grad():
                for w, d in zip(weights, direction, strict=True):
                    w += sign * step * d
                values.append(float(score()))
                for w, d in zip(weights, direction, strict=True):
                    w -= sign * step * d
        numerical = (values[0] - values[1]) / (2 * step)
        exact = sum(float((w * d).sum()) for w, d in zip(gradients, direction, strict=True))
        assert numerical == pytest.approx(exact, rel=1e-5, abs=1e-6)


def test_the_critic_learns_nothing_from_the_policys_own_layers():
    """Two networks: neither gradient gets into the other."""
    policy = BeliefPolicy(LineGrid(), likelihood="exact")
    inputs = random_inputs(policy, 4)
    policy.decide(inputs).square().sum().backward()
    assert all(w.grad is None for part in (policy.judge, policy.critic) for w in part.parameters())
    policy.zero_grad()
    policy.values(inputs).square().sum().backward()
    touched = [w.grad is not None and bool((w.grad != 0).any()) for w in policy.actor.parameters()]
    assert not any(touched)


class Many(CPOMDP):
    """So many contexts, each with another bias of a coin."""

    actions, states, horizon = 2, 2, 3

    def __init__(self, number):
        super().__init__()
        self.contexts = number

    def initial(self, context):
        return torch.tensor(0)

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        pyro.sample("coin", dist.Bernoulli((context + 0.5) / self.contexts))

    def reward(self, state, action, context):
        return (action == context % 2).float()


def test_64_contexts_take_few_weights_more():
    """Each context adds the same: its identity, and a column for its odds and one for its probability."""
    numbers = {}
    for C in (2, 4, 16, 64):
        policy = BeliefPolicy(Many(C), likelihood="exact")
        numbers[C] = sum(w.numel() for w in policy.parameters())
        assert policy.encoding.by_context == 2 + 2 + 2
    each = 2 * (IDENTITY + 2 * policy.hidden)
    assert [numbers[C] - numbers[2] for C in (4, 16, 64)] == [2 * each, 14 * each, 62 * each]
    assert each < 0.02 * numbers[2]
    prior = torch.full((3, 64), 1 / 64)
    decision, _ = policy.act(_history(Many(64), 3), policy.start(prior))
    assert bool(decision.logits.isfinite().all())


def _history(model, B):
    flags = {"coin": torch.zeros(B, dtype=torch.bool)}
    return History((Percept(None, {"coin": torch.zeros(B)}, flags),))


def test_saved_state_makes_the_same_policy_again():
    """Weights, units of the critic and of what is read."""
    model = LightDark()
    policy, other = (BeliefPolicy(model, hidden=8, likelihood="ekf", seed=seed) for seed in (0, 1))
    with torch.no_grad():
        policy.encoding.scale.mul_(3.0)
        policy.critic.rescale(torch.randn(50, generator=torch.Generator().manual_seed(0)) * 9 + 4)
    episodes = simulate(model, RandomPolicy(3), 4, seed=5)
    known = followed(as_backend("ekf"), model, uneven(2, 4), episodes)[6]

    def says(net):
        with inference_scope(model, 0):
            inputs = net.encoding(known)
            return net.decide(inputs), net.values(inputs)

    assert not torch.equal(says(policy)[0], says(other)[0])
    other.load_state_dict(policy.state_dict())
    torch.testing.assert_close(says(other), says(policy), rtol=0, atol=0)


def test_weights_and_units_come_from_the_seed_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (BeliefPolicy(LineGrid(), likelihood="exact", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, two.state_dict()[name])
    assert not torch.equal(one.actor.last.weight, other.actor.last.weight)
    assert torch.equal(one.encoding.scale, other.encoding.scale)


def test_first_decisions_are_about_even(model):
    policy = BeliefPolicy(model, likelihood="smc", seed=0)
    C = model.num_contexts
    inputs = random_inputs(policy, 50)
    assert inputs.posterior.shape == (50, C)
    probabilities = policy.decide(inputs).softmax(-1)
    assert bool(((probabilities - 1 / model.num_actions).abs() < 0.15).all())


def test_the_models_own_weights_are_not_the_policys():
    model = LineGrid()
    model.register_parameter("friction", torch.nn.Parameter(torch.tensor(1.0)))
    assert not any(
        "friction" in name for name, _ in BeliefPolicy(model, likelihood="exact").named_parameters()
    )


def test_nonsense_is_refused_by_name():
    with pytest.raises(ValueError, match="hidden"):
        BeliefPolicy(LineGrid(), hidden=0)
    with pytest.raises(ValueError, match="likelihood"):
        BeliefPolicy(LineGrid(), likelihood="magic")


@pytest.mark.parametrize("model", [LightDark(horizon=6), Beacons(horizon=6)], ids=["LightDark", "Beacons"])
def test_what_is_decided_stays_as_units_move(model):
    """States are read in units of where the policy gets to; decisions and values do not change by that."""
    policy = BeliefPolicy(model, likelihood="ekf", seed=0)
    episodes = simulate(model, RandomPolicy(model.actions), 20, seed=0)
    states = map_state(lambda leaf: 5.0 + 0.1 * leaf, episodes.states)
    with inference_scope(model, 0):
        known = Knowledge.first(policy.backend, model, uneven(model.num_contexts, 20))
        for t in range(3):
            seen = {site: values[:, t] for site, values in episodes.observations.items()}
            flags = {site: values[:, t] for site, values in episodes.observed.items()}
            known = known.after(Percept(episodes.actions[:, t], seen, flags))

    def found():
        with torch.no_grad():
            inputs = policy.encoding(known)
            return inputs.by_context, policy.decide(inputs), policy.values(inputs)

    before, scale, centre = found(), policy.encoding.scale.clone(), policy.encoding.centre.clone()
    for _ in range(30):
        policy.follow(SimpleNamespace(episodes=replace(episodes, states=states), statistics=OWN))
    after = found()
    assert (after[0] - before[0]).abs().max() > 0.5
    for one, other in zip(before[1:], after[1:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)  # in single precision
    flat = torch.cat([leaf.reshape(20 * 7, -1) for _, leaf in leaves(states)], 1)
    way = 1 - (1 - UNITS_RATE) ** 30
    torch.testing.assert_close(policy.encoding.scale, scale.lerp(flat.std(0, correction=0), way))
    torch.testing.assert_close(policy.encoding.centre, centre.lerp(flat.mean(0), way))
