from __future__ import annotations

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.inspect import get_model_relations
from pyro.nn import PyroParam
from torch.distributions import constraints

from cpomdp_ppl import CPOMDP, ModelError, RandomPolicy, simulate
from cpomdp_ppl.models import LightDark
from cpomdp_ppl.state import leaves, map_state
from tests.conftest import fixed_actions
from tests.programs import EyesOpen, Learnable, Plates, Walk


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


@pytest.mark.parametrize("make", [Walk, Plates, EyesOpen])
def test_a_batch_is_the_same_episodes_one_by_one(make):
    assert_batch_is_one_by_one(make())


def test_a_batch_of_any_model_is_the_same_episodes_one_by_one(model):
    assert_batch_is_one_by_one(model)


def assert_batch_is_one_by_one(model):
    """Under the same noise: every site of the batch, cut out, gives the single episode."""
    policy, B = RandomPolicy(model.num_actions), 4
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
