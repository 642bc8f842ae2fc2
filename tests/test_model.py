from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.inspect import get_model_relations
from pyro.nn import PyroParam
from torch.distributions import Normal, constraints

from cpomdp_ppl import CPOMDP, ModelError, RandomPolicy, simulate
from cpomdp_ppl.models import LightDark
from cpomdp_ppl.state import leaves, map_state
from tests.conftest import fixed_actions
from tests.programs import EyesOpen, Learnable, Plates, Reef, Sail, Walk
from tests.solvers.machines import Mortal


def sample_sites(trace):
    return {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}


def test_an_episode_is_a_traceable_program(model):
    trace = poutine.trace(model).get_trace(RandomPolicy(model.num_actions))
    sites = sample_sites(trace)
    assert "context" in sites
    for t in range(model.horizon):
        assert sites[f"a_{t}"]["value"].shape == ()
        assert 0 <= int(sites[f"a_{t}"]["value"]) < model.num_actions
    assert torch.isfinite(trace.log_prob_sum())
    episode = trace.nodes["_RETURN"]["value"]
    assert len(episode) == 1
    assert episode.horizon == model.horizon
    assert episode.actions[0].tolist() == [int(sites[f"a_{t}"]["value"]) for t in range(model.horizon)]


def test_sites_are_named_after_their_time():
    trace = poutine.trace(LightDark(horizon=2)).get_trace(RandomPolicy(3))
    assert list(sample_sites(trace)) == ["context", "x_0", "a_0", "noise_1", "z_1", "a_1", "noise_2", "z_2"]


def test_a_program_can_be_conditioned(model):
    for c in range(model.num_contexts):
        conditioned = pyro.condition(model, {"context": torch.tensor(c), "a_0": torch.tensor(1)})
        episode = conditioned(RandomPolicy(model.num_actions))
        assert episode.contexts.tolist() == [c]
        assert int(episode.actions[0, 0]) == 1


def test_a_conditioned_observation_is_what_the_agent_sees():
    seen = []

    def look(history):
        seen.append(history.latest.observations["z"].clone())
        return torch.tensor([2])

    pyro.condition(LightDark(horizon=2), {"z_1": torch.tensor(1.25)})(look)
    assert seen[1].tolist() == [1.25]


def test_a_program_can_be_rendered(model):
    graph = pyro.render_model(model, model_args=(RandomPolicy(model.num_actions),))
    for name in ("context", "a_0", "a_1"):
        assert name in graph.source


def test_dependencies_are_those_of_the_mathematics():
    relations = get_model_relations(LightDark(horizon=2), (RandomPolicy(3),))["sample_sample"]
    assert set(relations["z_1"]) == {"x_0", "noise_1", "a_0", "context"}
    assert set(relations["z_2"]) == {"x_0", "noise_1", "noise_2", "a_0", "a_1", "context"}
    assert set(relations["a_1"]) == set()


class Stumbles(Plates):
    """Falls over, the sooner the further apart its legs are."""

    horizon, discount = 5, 0.7

    def ends(self, state, action, context):
        return torch.sigmoid((state[..., 0] - state[..., 1]).abs() - 1 + context.squeeze(-1))[..., None]

    def reward(self, state, action, context, next_state):
        return next_state.sum(-1, keepdim=True) - state[..., :1]


class Awake(Mortal):
    """Sees something before it acts."""

    def __init__(self):
        super().__init__(2, awake=True)


@pytest.mark.parametrize("make", [Walk, Plates, EyesOpen, Reef, Sail, Stumbles, Awake])
def test_a_batch_is_the_same_episodes_one_by_one(make):
    assert_batch_is_one_by_one(make())


def test_a_batch_of_any_model_is_the_same_episodes_one_by_one(model):
    assert_batch_is_one_by_one(model)


def assert_batch_is_one_by_one(model):
    """Under the same noise: every site of the batch, cut out, gives the single episode."""
    policy, B = RandomPolicy(model.actions), 4
    batch = poutine.trace(model).get_trace(policy, B)
    episodes = batch.nodes["_RETURN"]["value"]
    batch.compute_log_prob()
    sites = {
        name: site
        for name, site in sample_sites(batch).items()
        if not poutine.util.site_is_subsample(site) and name != "episodes"
    }
    for b in range(B):
        data = {name: site["value"][b] for name, site in sites.items()}
        alone = poutine.trace(pyro.condition(model, data)).get_trace(policy)
        one = alone.nodes["_RETURN"]["value"]
        together = sum(site["log_prob"][b].sum() for site in sites.values())
        torch.testing.assert_close(alone.log_prob_sum(), together, rtol=1e-4, atol=1e-4)
        assert torch.equal(one.actions, episodes[b].actions)
        torch.testing.assert_close(one.rewards, episodes[b].rewards)
        map_state(torch.testing.assert_close, one.states, episodes[b].states)
        map_state(torch.testing.assert_close, one.observations, episodes[b].observations)
        map_state(torch.testing.assert_close, one.observed, episodes[b].observed)


def test_the_programs_own_plates_stay_on_the_right():
    model = Plates()
    model.check()
    episodes = simulate(model, RandomPolicy(2), 5, seed=0)
    assert episodes.states.shape == (5, 4, 2)
    assert episodes.observations["z"].shape == (5, 3, 3)
    assert episodes.observations["battery"].shape == (5, 3, 1)
    assert bool((episodes.observed["z"] == torch.tensor([True, False, True])).all())
    assert bool((episodes.observations["z"][..., 1] == 0).all())
    torch.testing.assert_close(episodes.rewards, episodes.states[:, :-1].sum(-1))


def test_an_initial_observation_comes_before_the_first_action():
    model = EyesOpen()
    model.check()
    first = []

    def peek(history):
        if history.time == 0:
            first.append(history.latest)
        return torch.ones(6, dtype=torch.long)

    episodes = simulate(model, peek, 6, seed=0)
    assert first[0].action is None
    assert torch.equal(first[0].observations["z"], episodes.initial_observations["z"])
    assert bool(episodes.initially_observed["z"].all())
    assert not bool(episodes.initially_observed["w"].any())
    assert bool(episodes.observed["w"].all())
    trace = poutine.trace(model).get_trace(RandomPolicy(2))
    assert "z_0" in trace.nodes


@pytest.mark.slow
def test_learnable_constants_learn():
    """With everything but the drift given, gradient steps raise the likelihood of what was drawn."""
    model = Learnable()
    simulate(model, fixed_actions(1, 1, 1), 50, seed=0)
    assert not list(pyro.get_param_store().keys()), "simulate must not touch the param store"
    data = {f"x_{t}": torch.full((50,), 2.0 * t) for t in range(4)}
    data |= {f"z_{t}": torch.full((50,), 2.0 * t) for t in range(1, 4)}
    data |= {f"a_{t}": torch.ones(50).long() for t in range(3)} | {"context": torch.zeros(50).long()}
    with pyro.get_param_store().scope():
        svi = SVI(
            pyro.condition(model, data),
            lambda *_: None,
            pyro.optim.Adam({"lr": 0.1}),
            Trace_ELBO(),
        )
        for _ in range(200):
            svi.step(fixed_actions(1, 1, 1), 50)
    assert abs(float(model.drift.detach()) - 2.0) < 0.05


def test_prior_and_names():
    model = Walk()
    assert model.context_names == ("0", "1")
    assert model.prior().tolist() == [0.5, 0.5]
    model.context_prior = (0.25, 0.75)
    assert model.prior().tolist() == [0.25, 0.75]
    assert LightDark().action_names == ("left", "right", "observe")


@pytest.mark.parametrize("missing", ["initial", "transition", "observation", "reward"])
def test_a_missing_method_is_named(missing):
    programs = {name: getattr(Walk, name) for name in ("initial", "transition", "observation", "reward")}
    del programs[missing]
    Incomplete = type("Incomplete", (CPOMDP,), programs | {"contexts": 1, "actions": 1, "horizon": 1})
    for use in (CPOMDP.check, lambda m: simulate(m, RandomPolicy(1), 1), lambda m: m(RandomPolicy(1))):
        with pytest.raises(ModelError, match=f"{missing}: this method is missing"):
            use(Incomplete())


def test_states_name_their_leaves(model):
    episodes = simulate(model, RandomPolicy(model.num_actions), 2, seed=0)
    names = [name for name, _ in leaves(episodes.states)]
    assert names == (["position", "heading"] if type(model).__name__ == "Beacons" else ["state"])


def test_a_scalar_condition_holds_for_every_episode():
    data = {"z_1": torch.tensor(1.25), "x_2": torch.tensor(0.5), "a_1": torch.tensor(1)}
    episodes = pyro.condition(Walk(), data)(RandomPolicy(2), 3)
    assert episodes.observations["z"][:, 0].tolist() == [1.25] * 3
    assert episodes.states[:, 2].tolist() == [0.5] * 3
    assert episodes.actions[:, 1].tolist() == [1] * 3


def test_what_the_documentation_promises_of_a_program():
    model, policy = Walk(), RandomPolicy(2)
    trace = poutine.trace(model).get_trace(policy, 3)
    again = poutine.replay(model, trace)(policy, 3)
    assert torch.equal(again.states, trace.nodes["_RETURN"]["value"].states)
    pinned = poutine.do(model, {"a_0": torch.tensor(1)})(policy, 3)
    assert pinned.actions[:, 0].tolist() == [1] * 3
    samples = Predictive(model, num_samples=5)(policy)
    assert samples["z_1"].reshape(-1).shape == (5,)


@pytest.mark.parametrize("kind", ["PyroParam", "Parameter", "buffer", "class"])
def test_a_prior_may_be_learned(kind):
    p = torch.tensor([0.25, 0.75])
    model = Walk()
    if kind == "PyroParam":
        model.context_prior = PyroParam(p, constraints.simplex)
    elif kind == "Parameter":
        model.context_prior = torch.nn.Parameter(p)
    elif kind == "buffer":
        model.register_buffer("context_prior", p)
    else:
        model = type("Classy", (Walk,), {"context_prior": p})()
    torch.testing.assert_close(model.prior().detach(), p)
    model.check()
    with pyro.get_param_store().scope():
        trace = poutine.trace(model).get_trace(RandomPolicy(2))
    torch.testing.assert_close(trace.nodes["context"]["fn"].probs.detach(), p)
    assert trace.nodes["context"]["fn"].probs.requires_grad == (kind in ("PyroParam", "Parameter"))
    if kind == "PyroParam":
        with pyro.get_param_store().scope():
            pyro.param("context_prior", torch.tensor([1.0, 1e-9]), constraint=constraints.simplex)
            assert not simulate(model, RandomPolicy(2), 50, seed=0).contexts.any()


def test_what_may_be_set_on_an_instance():
    class Free(Walk):
        def __init__(self):
            super().__init__()
            self.states, self.initial_observation, self.max_plate_nesting = 5, True, 1

        def initial(self, context):
            return torch.zeros_like(context)

        def transition(self, state, action, context):
            return (state + action) % 5

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state.float(), 1.0))

    Free().check()
    assert simulate(Free(), RandomPolicy(2), 3, seed=0).initial_observations["z"].shape == (3, 1)


def test_programs_may_share_the_names_of_plates():
    class Shared(Plates):
        def observation(self, state, action, context):
            with pyro.plate("legs", 2):
                pyro.sample("z", dist.Normal(state, 1.0))
            with pyro.plate("a", 3):
                pyro.sample("w", dist.Normal(0.0, 1.0))

    Shared().check()
    assert_batch_is_one_by_one(Shared())
    trace = poutine.trace(Shared()).get_trace(RandomPolicy(2), 3)
    assert trace.nodes["a_0"]["value"].shape == (3, 1)
    assert simulate(Shared(), RandomPolicy(2), 3, seed=0).observations["w"].shape == (3, 3, 3)


def test_no_key_of_a_state_is_special():
    state = {"state": {"x": 1, "state": 2}, "y": 3}
    assert dict(leaves(state)) == {"state.x": 1, "state.state": 2, "y": 3}
    assert dict(leaves(5)) == {"state": 5}


# ---- episodes that end -------------------------------------------------------------------------------------


class Rocks(Reef):
    """An episode may end anywhere."""

    rocks = 0.3


def density_of_rocks(episodes, b, trace):
    """`log p` of an episode's sites, one after the other, up to its end."""
    c, n = int(episodes.contexts[b]), int(episodes.lengths[b])
    total = math.log(0.5)
    for t in range(n):
        after = int(episodes.states[b, t + 1])
        slips = trace.nodes[f"slips_{t + 1}"]["value"].reshape(-1)[b]
        towards = after < 3 if c == 0 else after > 3
        surf = 0.7 if towards else 0.4
        end = 1.0 if after == (1 if c == 0 else 5) else 0.3
        total += math.log(0.5) + math.log(0.2 if slips else 0.8)
        total += math.log(surf if episodes.observations["surf"][b, t] else 1 - surf)
        total += math.log(end if episodes.observations["ended"][b, t] else 1 - end)
    return total


def density_of_sail(episodes, b, trace):
    """The same of a model whose states and actions are real numbers."""
    c, n = int(episodes.contexts[b]), int(episodes.lengths[b])
    x, a = episodes.states[b], episodes.actions[b]
    total = math.log(0.5) + Normal(0.0, 0.5).log_prob(x[0])
    for t in range(n):
        total += math.log(1 / 6) + Normal(x[t] + a[t, 0] * a[t, 1] + c - 0.5, 0.3).log_prob(x[t + 1])
        if a[t, 1] < 2:
            total += Normal(x[t + 1], 0.5).log_prob(episodes.observations["z"][b, t])
        end = torch.sigmoid(2 * (x[t + 1].abs() - 2))
        total += (end if episodes.observations["ended"][b, t] else 1 - end).log()
    return float(total)


@pytest.mark.parametrize(("make", "density"), [(Rocks, density_of_rocks), (Sail, density_of_sail)])
def test_nothing_after_the_end_is_in_the_density(make, density):
    model = make()
    policy = RandomPolicy(model.actions)
    with pyro.poutine.trace() as batch:
        pyro.set_rng_seed(0)
        episodes = model(policy, 40)
    assert len(set(episodes.lengths.tolist())) == 4
    by_hand = [density(episodes, b, batch.trace) for b in range(40)]
    assert float(batch.trace.log_prob_sum()) == pytest.approx(sum(by_hand), abs=1e-3)
    batch.trace.compute_log_prob()
    for site in sample_sites(batch.trace).values():
        name, _, time = site["name"].rpartition("_")
        if name in ("a", "surf", "z", "x", "slips", "ended"):
            begun = int(time) if name == "a" else int(time) - 1  # how many steps must not have ended it
            over = episodes.lengths <= begun
            assert (site["log_prob"][over] == 0).all()
    lengths = set()
    for seed in range(8):
        pyro.set_rng_seed(seed)
        alone = poutine.trace(model).get_trace(policy)
        one = alone.nodes["_RETURN"]["value"]
        lengths.add(int(one.lengths))
        assert float(alone.log_prob_sum()) == pytest.approx(density(one, 0, alone), abs=1e-4)
    assert len(lengths) > 1


def test_an_end_can_be_conditioned_on():
    model = Rocks()
    held = {"ended_1": torch.tensor(0.0), "ended_2": torch.tensor(1.0)}
    episodes = pyro.condition(model, held)(RandomPolicy(2), 30)
    assert episodes.lengths.tolist() == [2] * 30
    assert not episodes.rewards[:, 2:].any()
    never = pyro.condition(model, {f"ended_{t}": torch.tensor(0.0) for t in range(1, 5)})
    assert never(RandomPolicy(2)).lengths.tolist() == [4]
    pyro.set_rng_seed(0)
    trace = poutine.trace(model).get_trace(RandomPolicy(2), 9)
    again = poutine.replay(model, trace)(RandomPolicy(2), 9)
    assert torch.equal(again.lengths, trace.nodes["_RETURN"]["value"].lengths)
    assert torch.equal(again.returns, trace.nodes["_RETURN"]["value"].returns)


def test_nobody_acts_on_what_is_shown_after_the_end():
    """The agent sees nothing of it, and what the policy makes of it is not in the episode."""
    seen = []

    def look(history):
        seen.append((history.alive, history.latest.observed["surf"]))
        return torch.ones(history.num_episodes, dtype=torch.long)

    pyro.set_rng_seed(1)
    episodes = Rocks()(look, 50)
    over = episodes.lengths < 4
    assert over.any()
    for t, (alive, _) in enumerate(seen):
        expected = episodes.lengths > t
        assert alive is None if bool(expected.all()) else torch.equal(alive, expected)
    assert (episodes.actions.sum(1) == episodes.lengths).all()


class Drifts(Sail):
    """A constant that can be learned; the transition after the end counts for nothing."""

    def __init__(self):
        super().__init__()
        self.drift = PyroParam(torch.tensor(0.3))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + self.drift * action[..., 1], 0.3))


def test_gradients_come_from_what_was_lived():
    """Of the ELBO of episodes that are given whole, against the derivative by hand."""
    model, policy, B = Drifts(), RandomPolicy(Sail.actions), 30
    with pyro.get_param_store().scope():
        pyro.set_rng_seed(0)
        trace = poutine.trace(model).get_trace(policy, B)
        episodes = trace.nodes["_RETURN"]["value"]
        data = {
            name: site["value"].detach()
            for name, site in sample_sites(trace).items()
            if not poutine.util.site_is_subsample(site)
        }
        elbo = Trace_ELBO()
        loss = elbo.differentiable_loss(pyro.condition(model, data), lambda *_: None, policy, B)
        loss.backward()
        found = float(pyro.get_param_store()._params["drift"].grad)
    assert loss.item() == pytest.approx(-trace.log_prob_sum().item(), rel=1e-5)
    x, drive = episodes.states.detach(), episodes.actions[..., 1]
    off = (x[:, 1:] - x[:, :-1] - 0.3 * drive) / 0.3**2 * drive
    assert found == pytest.approx(-float(off[episodes.alive].sum()), rel=1e-4)
    assert (episodes.lengths < 4).any()


def test_ends_are_drawn_in_the_picture():
    graph = pyro.render_model(Rocks(), model_args=(RandomPolicy(2),))
    assert "ended_1" in graph.source
    relations = get_model_relations(Sail(), (RandomPolicy(Sail.actions),))["sample_sample"]
    assert {"x_1"} <= set(relations["ended_1"])
    samples = Predictive(Rocks(), num_samples=6)(RandomPolicy(2))
    assert samples["ended_4"].reshape(-1).shape == (6,)
