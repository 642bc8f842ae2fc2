"""Which observation sites depend on which, in programs where that is plain to see."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl.dataflow import dependencies
from cpomdp_ppl.errors import ModelError, UnsupportedModelError
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.signature import signature
from tests.programs import Walk


def found(observation, **attributes):
    """The parents of every site of an observation program that has any."""
    model = type("Watched", (Walk,), {"observation": observation, **attributes})()
    with inference_scope(model, 0):
        return dependencies(model, signature(model))


def hidden(name, fn=None):
    return pyro.sample(name, (fn or dist.Normal(0.0, 1.0)).mask(torch.tensor(False)))


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_only_direct_parents_count():
    def observation(self, state, action, context):
        a = hidden("a")
        b = pyro.sample("b", dist.Normal(a, 1.0))
        pyro.sample("c", dist.Normal(b, 1.0))
        pyro.sample("d", dist.Normal(state, 1.0))

    assert found(observation).parents == {"b": {"a"}, "c": {"b"}}


def test_dependence_that_hardly_ever_shows():
    def observation(self, state, action, context):
        a = hidden("a", dist.Bernoulli(1e-9))
        far = (state > 1e6) & (action == 1) & (context == 1)
        pyro.sample("b", dist.Normal(torch.where(far, a, 0.0), 1.0))

    assert found(observation).parents == {"b": {"a"}}
    assert found(observation).combinations == 2


@pytest.mark.parametrize(
    "used",
    [
        lambda a: torch.zeros_like(a).view(-1).add_(a.reshape(-1)).view(a.shape),
        lambda a: torch.stack([a, a])[0],
        lambda a: torch.zeros(2, *a.shape).copy_(a).select(0, 1),
        lambda a: torch.as_tensor(a.numpy() + 1),
        lambda a: torch.as_tensor(np.exp(a)),
        lambda a: torch.tensor(a.tolist()),
        lambda a: float(a.mean()),
        lambda a: torch.tensor(1.0 if bool((a > 0).any()) else 0.0),
        lambda a: float(len(a[a > 0])),
        lambda a: float(a.nonzero().shape[0]),
        lambda a: torch.jit.script(torch.nn.ReLU())(a),
        lambda a: torch.tensor([a.mean(), a.max()])[0],
        lambda a: torch.zeros(()).new_tensor([a.mean()])[0],
        lambda a: torch.Tensor([a.mean()])[0],
        lambda a: float(str(a.mean())[7:13]),
        lambda a: pickle.loads(pickle.dumps(a)),
        lambda a: in_a_thread(lambda: a + 1),
    ],
)
def test_there_is_no_way_round(used):
    def observation(self, state, action, context):
        a = hidden("a")
        pyro.sample("b", dist.Normal(used(a), 1.0))

    assert found(observation).parents == {"b": {"a"}}


def test_parameters_in_any_corner_of_a_distribution():
    def observation(self, state, action, context):
        a = hidden("a")
        weights = dist.Categorical(logits=torch.stack([a, -a], -1))
        pyro.sample("mixture", dist.MixtureSameFamily(weights, dist.Normal(torch.zeros(2), 1.0)))
        shifted = [torch.distributions.AffineTransform(a, 1.0)]
        pyro.sample("moved", dist.TransformedDistribution(dist.Normal(0.0, 1.0), shifted))
        pyro.sample("gate", dist.Normal(0.0, 1.0).mask(torch.as_tensor(action == 0) | (a > 9e9) & (a < -9e9)))

    parents = found(observation)
    assert parents.parents == {"mixture": {"a"}, "moved": {"a"}, "gate": {"a"}}
    assert parents.mask_parents == {"gate": {"a"}}


def test_a_program_that_looks_at_its_arguments_may_do_anything_next_time():
    def observation(self, state, action, context):
        hidden("a")
        if bool((action == 0).all()):
            pass
        pyro.sample("b", dist.Normal(state, 1.0))

    assert found(observation).parents == {"b": {"a"}}


def test_to_look_something_up_in_a_table_is_not_to_look_at_it():
    def observation(self, state, action, context):
        hidden("a")
        pyro.sample("b", dist.Normal(torch.arange(2.0)[context], 1.0))

    assert found(observation).parents == {}


def test_what_a_distribution_looks_at_concerns_nobody_else():
    def observation(self, state, action, context):
        hidden("a")
        covariance = torch.eye(2) * (1.0 + context)[..., None, None]
        pyro.sample("b", dist.MultivariateNormal(torch.zeros(2), covariance))
        pyro.sample(
            "c",
            dist.LowRankMultivariateNormal(
                state[..., None] + torch.zeros(2), torch.ones(2, 1), torch.ones(2)
            ),
        )
        pyro.sample("d", dist.Normal(0.0, 1.0))

    assert found(observation).parents == {}


def test_both_kinds_of_observation_are_looked_at():
    def observation(self, state, action, context):
        a = hidden("a")
        pyro.sample("b", dist.Normal(a if action is None else state, 1.0))

    assert found(observation).parents == {}
    assert found(observation, initial_observation=True).parents == {"b": {"a"}}


def test_what_is_seen_must_not_depend_on_what_is_not():
    def observation(self, state, action, context):
        detected = pyro.sample("detected", dist.Bernoulli(0.01).mask(action == 0))
        pyro.sample("z", dist.Normal(state, 1.0).mask(detected == 1))

    with pytest.raises(UnsupportedModelError, match="whether site 'z' is seen depends on site 'detected'"):
        found(observation)
    with pytest.raises(ModelError, match="site 'z'"):
        type("Watched", (Walk,), {"observation": observation})().check()


@pytest.mark.parametrize(
    ("fn", "opens"),
    [
        (dist.Categorical(torch.ones(100)), lambda k: k == 80),
        (dist.Binomial(100, 0.1), lambda k: k > 80),
        (dist.Poisson(1.0), lambda k: k > 1000),
        (dist.Normal(0.0, 1.0), lambda z: z > 5),
        (dist.Normal(0.0, 1.0), lambda z: (z < -20) & (z > -30)),
        (dist.OneHotCategorical(torch.ones(3)), lambda x: x[..., 2] == 1),
    ],
)
def test_a_hidden_gate_that_hardly_ever_opens(fn, opens):
    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0).mask(opens(hidden("gate", fn))))

    with pytest.raises(UnsupportedModelError, match="whether site 'z' is seen depends on site 'gate'"):
        found(observation)


def test_a_gate_that_is_seen_wherever_it_matters_is_fine():
    def observation(self, state, action, context):
        detected = pyro.sample("detected", dist.Bernoulli(0.01).mask(action == 0))
        pyro.sample("z", dist.Normal(state, 1.0).mask((detected == 1) & (action == 0)))

    assert found(observation).mask_parents == {"z": {"detected"}}
    type("Watched", (Walk,), {"observation": observation})().check()


def test_the_end_is_a_site_like_others():
    """It depends on no site that is seen; a program that branches on the context may do anything."""

    def observation(self, state, action, context):
        pyro.sample("b", dist.Normal(hidden("a"), 1.0))

    def ends(self, state, action, context):
        return state > 1

    def branching(self, state, action, context):
        return state > 1 if bool((context == 0).any()) else state > 2

    assert found(observation, ends=ends).parents == {"b": {"a"}}
    assert found(observation, ends=branching).parents == {"b": {"a"}, "ended": {"a", "b"}}
