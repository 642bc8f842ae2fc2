"""Programs and data at the edges of what kernels serve: each is right, or left to the programs themselves."""

import gc
import weakref

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.nn import Parameter

from cpomdp_ppl import Episodes, RandomPolicy, simulate
from cpomdp_ppl.errors import DegenerateWeightsError, UnsupportedModelError
from cpomdp_ppl.inference import ParticleFilter
from tests.programs import Still, Walk

NATIVE, EAGER = ParticleFilter(2000, engine="native"), ParticleFilter(2000, engine="eager")


def played(model, number=4):
    return simulate(model, RandomPolicy(model.num_actions), number, seed=0)


class NoisyReward(Walk):
    def reward(self, state, action, context):
        return state + torch.randn(state.shape)


class Nowhere(Walk):
    def initial(self, context):
        return torch.zeros(0)

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(context.float(), 1.0))

    def reward(self, state, action, context):
        return torch.zeros(())


class Widening(Walk):
    def initial(self, context):
        return torch.zeros((), dtype=torch.long)

    def transition(self, state, action, context):
        return state + 0.5

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(context.float(), 1.0))


class Bits(Walk):
    def transition(self, state, action, context):
        bits = state.clone().view(torch.int32)
        return pyro.sample("x", dist.Normal(bits.float(), 1.0))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoisyReward, "reward: random numbers are drawn that are no sample site"),
        (Nowhere, "its state has no numbers"),
        (Widening, "in the state is torch.float32, but torch.int64 at first"),
        (Bits, "the bits of a number are taken for another number"),
    ],
)
def test_refused(kind, message):
    model = kind()
    episodes = Episodes.from_arrays(model, np.zeros((2, 3), int), {"z": np.zeros((2, 3))})
    with pytest.raises(UnsupportedModelError, match=message):
        NATIVE.run(model, episodes, seed=0, moments=False)


class Tied(Walk):
    """Two names of one parameter, and a view of it."""

    def __init__(self):
        super().__init__()
        self.a = self.b = Parameter(torch.zeros(1))
        self.view = self.a.detach()[0]

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + self.a[0] + self.b[0] + self.view, 1.0))


@pytest.mark.slow
def test_a_parameter_that_shares_its_memory_is_replaced():
    """Of the three, only one follows."""
    model, expected = Tied(), Walk()
    episodes = played(expected)
    NATIVE.run(model, episodes, seed=0)
    model.a = Parameter(torch.full((1,), 0.5))
    found, eager = (backend.run(model, episodes, seed=0) for backend in (NATIVE, EAGER))
    difference = (found.log_likelihood - eager.log_likelihood).abs()
    assert bool((difference < 5 * (found.standard_error + eager.standard_error)).all())


class Counted(Still):
    horizon, states = 2, 1

    def observation(self, state, action, context):
        pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))


def test_fractions_at_a_site_of_whole_numbers_are_impossible():
    model = Counted()
    good = Episodes.from_arrays(model, np.zeros((1, 2), int), {"z": np.ones((1, 2), int)})
    values = {"z": torch.full((1, 2), 1.5)}
    bad = Episodes(good.actions, values, good.observed, lengths=good.lengths)
    for backend in (NATIVE, EAGER):
        with pytest.raises(DegenerateWeightsError):
            backend.run(model, bad, seed=0)
    assert NATIVE.run(model, good, seed=0).log_likelihood[0, 0] == pytest.approx(2 * np.log(0.3))


class Faint(Still):
    horizon = 1

    def observation(self, state, action, context):
        pyro.sample("z", dist.Bernoulli(torch.exp(state - 92.0)))


def test_a_probability_below_the_normal_numbers_is_not_zero():
    model = Faint()
    episodes = Episodes.from_arrays(model, np.zeros((1, 1), int), {"z": np.ones((1, 1))})
    assert NATIVE.run(model, episodes, seed=0).log_likelihood[0, 0] == pytest.approx(-92.0, abs=0.01)


class Precise(Still):
    """A density of float64 beside a state of float32."""

    horizon = 1

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state.double(), 1e-3))


@pytest.mark.slow
def test_densities_keep_their_precision():
    model = Precise()
    episodes = Episodes.from_arrays(model, np.zeros((1, 1), int), {"z": np.full((1, 1), 14.2)})
    found, eager = (each.run(model, episodes, seed=0).log_likelihood[0, 0] for each in (NATIVE, EAGER))
    assert float(found) == pytest.approx(float(eager), abs=1e-3)
    assert float(eager) < -1e8


class Equal(Walk):
    """Models that are equal, and differ."""

    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + self.shift, 1.0))


@pytest.mark.slow
def test_equal_models_have_kernels_of_their_own():
    episodes = played(Equal(0.0))
    near, far = (NATIVE.run(Equal(shift), episodes, seed=0).log_likelihood for shift in (0.0, 5.0))
    assert bool((near > far + 5).all())


class Looks(Walk):
    looking = True

    def transition(self, state, action, context):
        if self.looking and bool((state > 0).any()):
            state = state + 0.0
        return pyro.sample("x", dist.Normal(state, 1.0))


@pytest.mark.slow
def test_a_refusal_keeps_nothing_alive_and_may_be_lifted():
    model = Looks()
    episodes = played(model)
    with pytest.raises(UnsupportedModelError):
        NATIVE.run(model, episodes, seed=0)
    model.looking = False
    NATIVE.run(model, episodes, seed=0)
    model.looking = True
    ParticleFilter(8).run(model, episodes, seed=0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_params_of_others_do_not_matter():
    model = Walk()
    episodes = played(model)
    with pyro.get_param_store().scope():
        pyro.param("foreign", torch.zeros(2, dtype=torch.bfloat16))
        kernel = NATIVE.kernel(model)
        pyro.get_param_store()["foreign"] = torch.zeros(3)
        NATIVE.run(model, episodes, seed=0)
        assert NATIVE.kernel(model) is kernel
