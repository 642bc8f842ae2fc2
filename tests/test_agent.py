from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.agent import Agent
from cpomdp_ppl.errors import ObservationError
from cpomdp_ppl.inference import ExtendedKalmanFilter
from cpomdp_ppl.inference.choice import default_backend
from cpomdp_ppl.models import LightDark
from solvers.cids.policy import LSTMPolicy
from tests.programs import EyesOpen, Plates, Reef, Sail, Walk
from tests.solvers.machines import Mortal


def play(agent, episodes):
    """Feed an agent the observations of an episode, and what was done in it."""
    actions = []
    for t in range(episodes.horizon):
        actions.append(agent.act())
        seen = {
            site: values[0, t]
            for site, values in episodes.observations.items()
            if bool(episodes.observed[site][0, t])
        }
        agent.observe(seen, action=int(episodes.actions[0, t]))
    return actions


def test_its_posterior_is_the_filters(model):
    policy = LSTMPolicy(model, hidden=8)
    episodes = simulate(model, policy, 1, seed=4)
    agent = policy.agent(seed=1)
    play(agent, episodes)
    filtering = default_backend(model).run(model, episodes, seed=1)
    torch.testing.assert_close(agent.posterior, filtering.posterior()[0, -1], rtol=1e-5, atol=1e-7)
    assert agent.time == model.horizon


def test_it_decides_as_the_policy_does(model):
    """With the likeliest actions, which need no draws."""
    policy = LSTMPolicy(model, hidden=8)
    episodes = simulate(model, policy, 1, seed=4)
    actions = play(policy.agent(seed=1, greedy=True), episodes)
    prior = model.prior()[None]
    assert actions == policy.unroll(episodes, prior)[0][0].argmax(-1).tolist()


@pytest.mark.slow
def test_its_choices_follow_the_policys_probabilities():
    model = LightDark()

    class Biased(RandomPolicy):
        def act(self, history, memory):
            return dist.Categorical(torch.tensor([[0.1, 0.6, 0.3]])), memory

    first = torch.tensor([Agent(model, Biased(3), seed=seed, likelihood="ekf").act() for seed in range(400)])
    counts = torch.bincount(first, minlength=3) / 400
    expected = torch.tensor([0.1, 0.6, 0.3])
    assert ((counts - expected).abs() < 4 * (expected * (1 - expected) / 400).sqrt()).all()


def test_a_seed_decides_and_neighbouring_seeds_have_nothing_in_common():
    """Were a step's numbers those of seed + time, agent 1 would do what agent 0 does a step later."""

    def actions(seed):
        agent, taken = Agent(LightDark(), RandomPolicy(3), seed=seed, likelihood="ekf"), []
        for _ in range(20):
            taken.append(agent.act())
            agent.observe(observed={})
        return taken

    assert actions(0) == actions(0) != actions(1)
    same = sum(one == other for one, other in zip(actions(0)[1:], actions(1), strict=False))
    assert same < 15  # 6.3 of 19 expected, with a standard deviation of 2.1


def test_steps_that_nobody_asked_for_reach_the_policys_memory():
    model = LightDark()
    policy = LSTMPolicy(model, hidden=8, seed=1)
    episodes = simulate(model, policy, 1, seed=4)
    told, asked = policy.agent(seed=1, greedy=True), policy.agent(seed=1, greedy=True)
    for t in range(10):
        seen = {"z": episodes.observations["z"][0, t]} if bool(episodes.observed["z"][0, t]) else None
        told.observe(seen, action=int(episodes.actions[0, t]))
        asked.act()
        asked.observe(seen, action=int(episodes.actions[0, t]))
    assert torch.equal(told._memory[0], asked._memory[0])


def test_an_initial_observation_comes_first():
    model = EyesOpen()
    agent = Agent(model, RandomPolicy(model.num_actions), seed=0)
    with pytest.raises(RuntimeError, match="initial observation"):
        agent.act()
    site = next(iter(agent.filter.latest.observations))
    agent.observe({site: torch.zeros(agent.filter.latest.observations[site].shape[1:])})
    assert agent.time == 0
    assert agent.act() in range(model.num_actions)


def test_the_prior_reaches_filter_and_policy():
    model = LightDark()
    given = []

    class Curious(RandomPolicy):
        def start(self, prior):
            given.append(prior)
            return super().start(prior)

    agent = Agent(model, Curious(3), prior=[0.8, 0.2], likelihood=ExtendedKalmanFilter())
    assert agent.posterior.tolist() == pytest.approx([0.8, 0.2])
    assert given[0].tolist()[0] == pytest.approx([0.8, 0.2])


def test_out_of_turn():
    agent = Agent(LightDark(1), RandomPolicy(3), seed=0, likelihood="ekf")
    with pytest.raises(RuntimeError, match="act"):
        agent.observe()
    agent.act()
    with pytest.raises(RuntimeError, match="observe"):
        agent.act()
    agent.observe(observed={})
    with pytest.raises(RuntimeError, match="over"):
        agent.act()
    with pytest.raises(ValueError, match="1 steps"):
        agent.observe(action="left")


def test_what_cannot_have_been_seen_is_refused_and_changes_nothing():
    agent = Agent(LightDark(), RandomPolicy(3), seed=0, likelihood="ekf")
    agent.act()
    with pytest.raises(ValueError, match="y"):
        agent.observe({"y": 1.0})
    assert agent.time == 0
    agent.observe(observed={})
    assert agent.time == 1


def test_what_is_always_seen_must_not_be_forgotten():
    agent = Agent(LightDark(), RandomPolicy(3), seed=0, likelihood="ekf")
    expected = r"site 'z', which is always seen after 'observe', got nothing;.* observed={'z': False}"
    for nothing in ({}, None):
        with pytest.raises(ObservationError, match=expected):
            agent.observe(nothing, action="observe")
    assert agent.time == 0
    agent.observe({}, action="left")
    agent.observe({"z": 0.3}, action="observe")
    agent.observe({}, observed={"z": False}, action="observe")  # a sensor that failed
    assert agent.time == 3
    with pytest.raises(ObservationError, match="which is always seen before the first action, got nothing"):
        Agent(EyesOpen(), RandomPolicy(2), seed=0).observe({})


class Detector(Walk):
    """Whether anything is detected is seen by whoever looks, and where it is if it was."""

    def observation(self, state, action, context):
        looked = action == 1
        detected = pyro.sample("detected", dist.Bernoulli(logits=2.0 - 0.5 * state.abs()).mask(looked))
        pyro.sample("z", dist.Normal(state, 0.5).mask(looked & (detected == 1)))


def test_what_must_be_seen_may_depend_on_what_was_seen():
    agent = Agent(Detector(), RandomPolicy(2), seed=0)
    with pytest.raises(ObservationError, match="'detected', which is always seen after '1', got nothing"):
        agent.observe({}, action=1)
    with pytest.raises(
        ObservationError, match=r"'z', .* got \['detected'\];.*{'detected': True, 'z': False}"
    ):
        agent.observe({"detected": 1.0}, action=1)
    agent.observe({"detected": 1.0, "z": 0.2}, action=1)
    agent.observe({"detected": 0.0}, action=1)
    agent.observe({}, action=0)
    assert agent.time == 3


def test_sites_in_plates_must_not_be_forgotten():
    agent = Agent(Plates(), RandomPolicy(2), seed=0)
    with pytest.raises(ObservationError, match=r"'z', which is always seen after '0', got .'battery'"):
        agent.observe({"battery": 1.0}, action=0)
    working = [True, False, True]
    agent.observe({"z": [0.0] * 3, "battery": 1.0}, observed={"z": working, "battery": True}, action=0)
    assert agent.time == 1


def test_it_acts_with_real_numbers_and_takes_in_the_end():
    """Its posterior is the filter's on the same episode, which is filtered as a batch."""
    model = Sail()
    policy = LSTMPolicy(model, hidden=8, seed=1)
    episodes = simulate(model, policy, 200, seed=4)
    short = int((episodes.lengths == 2).nonzero()[0])
    episode = episodes[short]
    agent = Agent(model, policy, likelihood="ekf", seed=1)
    for t in range(2):
        assert not agent.over
        action = agent.act()
        assert isinstance(action, np.ndarray)
        assert action.shape == (2,)
        assert bool(model.actions.contains(torch.from_numpy(action)))
        shown = bool(episode.observed["z"][0, t])
        seen = {"z": episode.observations["z"][0, t]} if shown else {}
        agent.observe({**seen, "ended": t == 1}, action=episode.actions[0, t].tolist())
    assert agent.ended
    assert agent.over
    assert agent.time == 2
    filtering = ExtendedKalmanFilter().run(model, episode)
    torch.testing.assert_close(agent.posterior, filtering.posterior()[0, -1], rtol=1e-5, atol=1e-7)
    with pytest.raises(RuntimeError, match="has ended after 2 steps"):
        agent.act()
    with pytest.raises(ValueError, match="nothing more: the episode has ended after 2 steps"):
        agent.observe({"ended": False}, action=[0.0, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize("model", [Reef(), Mortal(2, awake=True)], ids=["Reef", "Mortal"])
def test_its_posterior_is_the_filters_on_episodes_that_end(model):
    """At every time; where nothing has ended, that is evidence. Once it has, nothing changes any more."""
    episodes = simulate(model, RandomPolicy(2), 8, seed=0)
    assert len(set(episodes.lengths.tolist())) > 1
    posteriors = default_backend(model).run(model, episodes, seed=1).posterior()
    for b, n in enumerate(episodes.lengths.tolist()):
        agent = Agent(model, RandomPolicy(2), seed=b)
        if model.initial_observation:
            agent.observe({"o": episodes.initial_observations["o"][b]})
        for t in range(n):
            torch.testing.assert_close(agent.posterior, posteriors[b, t], rtol=1e-5, atol=1e-7)
            assert not agent.over
            agent.act()
            seen = {site: values[b, t] for site, values in episodes.observations.items()}
            flags = {site: bool(flags[b, t]) for site, flags in episodes.observed.items()}
            agent.observe(seen, observed=flags, action=int(episodes.actions[b, t]))
        torch.testing.assert_close(agent.posterior, posteriors[b, n], rtol=1e-5, atol=1e-7)
        assert agent.over
        assert agent.ended == bool(episodes.observations["ended"][b, n - 1])
        how = f"has ended after {n} steps" if agent.ended else f"is over after {n} steps"
        with pytest.raises(RuntimeError, match=how):
            agent.act()
        with pytest.raises(ValueError, match=how):
            agent.observe({"ended": True}, action=0)
        torch.testing.assert_close(agent.posterior, posteriors[b, n], rtol=1e-5, atol=1e-7)


def test_what_the_caller_does_with_an_action_is_not_what_was_chosen():
    model, chosen = Sail(), torch.tensor([[0.5, 1.0]])
    agents = [Agent(model, lambda history: chosen, seed=0, likelihood="ekf") for _ in range(2)]
    for agent in agents:
        action = agent.act()
        if agent is agents[1]:
            action *= 0.0
        agent.observe({"z": 0.7, "ended": False})
        assert agent.history.latest.action.tolist() == [[0.5, 1.0]]
    assert torch.equal(agents[0].posterior, agents[1].posterior)
    assert chosen.tolist() == [[0.5, 1.0]]


def test_actions_that_were_really_taken_must_be_in_the_box():
    agent = Agent(Sail(), RandomPolicy(Sail.actions), seed=0, likelihood="ekf")
    for action in ([0.5, 4.0], [0.5], "steer", [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="action: expected"):
            agent.observe({"z": 0.0, "ended": False}, action=action)
    assert agent.time == 0
    agent.observe({"z": 0.0, "ended": False}, action=np.array([0.5, 1.0]))
    agent.observe({"ended": False}, action=(1, 3))
    assert agent.history.latest.action.tolist() == [[1.0, 3.0]]


def test_whether_an_episode_ends_must_not_be_forgotten():
    agent = Agent(Reef(), RandomPolicy(2), seed=0)
    with pytest.raises(ObservationError, match="expected site 'ended', which is always seen after 'left'"):
        agent.observe({"surf": 0.0}, action="left")
    agent.observe({"surf": 0.0, "ended": False}, action="left")
    agent.observe({"surf": 1.0, "ended": True}, action="left")
    assert agent.posterior.tolist() == [1.0, 0.0]  # only one reef is on the left
    assert agent.ended


@pytest.mark.parametrize("distribution", ["squashed", "beta"])
def test_greedily_it_takes_the_mode(distribution):
    model = Sail()
    policy = LSTMPolicy(model, hidden=8, distribution=distribution, seed=1)
    agent = policy.agent(seed=1, greedy=True)
    decision, _ = policy.act(agent.history, policy.start(model.prior()[None]))
    low, high = model.actions.bounds(torch.zeros(()))
    grid = low + (high - low) * torch.linspace(0.001, 0.999, 2001)[:, None]  # [2001, D]
    if distribution == "beta":  # axes are independent
        highest = grid[decision.log_density(torch.linspace(0.001, 0.999, 2001)[:, None]).argmax(0), [0, 1]]
    else:  # of a squashed Gaussian, the mode before squashing is the median after it
        highest = decision.sample((20_001,)).squeeze(1).median(0).values
    torch.testing.assert_close(torch.from_numpy(agent.act()), highest, rtol=0.0, atol=0.03)
    with pytest.raises(ValueError, match="a decision of kind Independent has no mode"):
        Agent(model, RandomPolicy(model.actions), greedy=True).act()


def test_impossible_decisions_are_refused():
    def deciding(decision):
        return Agent(Sail(), lambda history: decision, seed=0, likelihood="ekf").act()

    assert deciding(torch.tensor([[0.5, 1.0]])).tolist() == [0.5, 1.0]
    with pytest.raises(ValueError, match=r"policy.* within Box"):
        deciding(torch.tensor([[0.5, 4.0]]))
    with pytest.raises(ValueError, match=r"policy.* within Box"):
        deciding(torch.tensor([[torch.nan, 1.0]]))
    with pytest.raises(ValueError, match=r"real actions of shape \[1, 2\]"):
        deciding(torch.tensor([1]))
    with pytest.raises(ValueError, match=r"policy.* 0 to 2"):
        Agent(LightDark(), lambda history: torch.tensor([3]), seed=0).act()


@pytest.mark.parametrize(
    ("model", "decision"),
    [
        (Reef(), torch.tensor([0.7])),
        (Reef(), torch.distributions.Normal(torch.ones(1), 0.1)),
        (Sail(), torch.zeros(1, 2, dtype=torch.long)),
    ],
    ids=["half an action", "real numbers", "indices"],
)
def test_an_agent_refuses_what_play_refuses(model, decision):
    with pytest.raises(ValueError, match=r"^policy: expected"):
        Agent(model, lambda history: decision).act()
    with pytest.raises(ValueError, match=r"^policy: expected"):
        simulate(model, lambda history: decision, 1)
