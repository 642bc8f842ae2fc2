"""A compiled program is never stale: whatever it depends on may change between two runs."""

import copy
import sys
import types
from dataclasses import dataclass, replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam
from torch import nn
from torch.distributions import constraints

from cpomdp_ppl import CPOMDP, Episodes
from cpomdp_ppl.errors import ObservationError, UnsupportedModelError
from cpomdp_ppl.inference import ExtendedKalmanFilter, ParticleFilter

BEFORE, AFTER = 0.25, 1.5
SHIFT = BEFORE
TABLE = torch.tensor([BEFORE])
constants = types.ModuleType("constants_of_the_staleness_test")
sys.modules[constants.__name__] = constants


@dataclass
class Settings:
    shift: float = BEFORE


class Drift(CPOMDP):
    """A walk with a shift, which subclasses keep somewhere else."""

    contexts, actions, horizon = 2, 1, 3

    def __init__(self):
        super().__init__()
        self.prepare()

    def prepare(self):
        self.amount = BEFORE

    def shift(self):
        return self.amount

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 1.0))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + self.shift() * (1 + context), 1.0))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.5))

    def reward(self, state, action, context):
        return state

    def change(self):
        self.amount = AFTER


def made_of(name, prepare=None, shift=None, change=None, **others):
    """A kind of `Drift`."""
    given = {"prepare": prepare, "shift": shift, "change": change, **others}
    return type(name, (Drift,), {key: value for key, value in given.items() if value is not None})


def attribute(value):
    return lambda self: setattr(self, "amount", value)


def replaced(**names):
    return lambda self: [setattr(self, name, value) for name, value in names.items()]


def helper(by=BEFORE):
    return by


def global_shift(self):
    return SHIFT


def changed_global(self):
    globals()["SHIFT"] = AFTER


def in_closure():
    amount = BEFORE

    def shift(self):
        return amount

    def set_to(value):
        nonlocal amount
        amount = value

    return shift, set_to


CLOSURE, set_closure = in_closure()


def changed_through_numpy(self):
    self.array[0] = AFTER


def prepare_shared(self):
    self.array = np.array([BEFORE], np.float32)
    self.tensor = torch.from_numpy(self.array)


KINDS = {
    "an attribute": Drift,
    "an attribute that is deleted, and found in the class": made_of(
        "Deleted", prepare=attribute(BEFORE), amount=AFTER, change=lambda self: delattr(self, "amount")
    ),
    "a class attribute": made_of(
        "OfClass",
        prepare=lambda self: setattr(type(self), "amount", BEFORE),
        change=lambda self: setattr(type(self), "amount", AFTER),
    ),
    "an object's attribute": made_of(
        "Inside",
        prepare=lambda self: setattr(self, "settings", Settings()),
        shift=lambda self: self.settings.shift,
        change=lambda self: setattr(self.settings, "shift", AFTER),
    ),
    "a list": made_of(
        "Listed",
        prepare=lambda self: setattr(self, "several", [0, {"shift": BEFORE}]),
        shift=lambda self: self.several[1]["shift"],
        change=lambda self: self.several[1].update(shift=AFTER),
    ),
    "an array": made_of(
        "Array",
        prepare=lambda self: setattr(self, "array", np.array([BEFORE])),
        shift=lambda self: float(self.array[0]),
        change=changed_through_numpy,
    ),
    "a tensor that is replaced": made_of(
        "Replaced",
        prepare=replaced(tensor=torch.tensor(BEFORE)),
        shift=lambda self: self.tensor,
        change=replaced(tensor=torch.tensor(AFTER)),
    ),
    "a tensor in place": made_of(
        "InPlace",
        prepare=lambda self: setattr(self, "tensor", torch.tensor([BEFORE])),
        shift=lambda self: self.tensor[0],
        change=lambda self: self.tensor.fill_(AFTER),
    ),
    "a tensor behind autograd's back": made_of(
        "Data",
        prepare=lambda self: setattr(self, "tensor", torch.tensor([BEFORE])),
        shift=lambda self: self.tensor[0],
        change=lambda self: self.tensor.data.fill_(AFTER),
    ),
    "a tensor that shares its memory with NumPy": made_of(
        "Shared", prepare=prepare_shared, shift=lambda self: self.tensor[0], change=changed_through_numpy
    ),
    "a buffer": made_of(
        "Buffer",
        prepare=lambda self: self.register_buffer("kept", torch.tensor(BEFORE)),
        shift=lambda self: self.kept,
        change=lambda self: self.kept.fill_(AFTER),
    ),
    "a parameter": made_of(
        "Weight",
        prepare=lambda self: setattr(self, "weight", nn.Parameter(torch.tensor(BEFORE))),
        shift=lambda self: self.weight,
        change=lambda self: self.weight.data.fill_(AFTER),
    ),
    "a layer": made_of(
        "Layer",
        prepare=lambda self: [
            setattr(self, "layer", nn.Linear(1, 1)),
            nn.init.constant_(self.layer.bias, BEFORE),
        ],
        shift=lambda self: self.layer(torch.zeros(1))[0],
        change=lambda self: nn.init.constant_(self.layer.bias, AFTER),
    ),
    "a PyroParam": made_of(
        "Learned",
        prepare=lambda self: setattr(self, "learned", PyroParam(torch.tensor(BEFORE), constraints.positive)),
        shift=lambda self: self.learned,
        change=lambda self: setattr(self, "learned", torch.tensor(AFTER)),
    ),
    "a PyroParam in the param store": made_of(
        "Stored",
        prepare=lambda self: setattr(self, "learned", PyroParam(torch.tensor(BEFORE))),
        shift=lambda self: self.learned,
        change=lambda self: pyro.get_param_store().__setitem__("learned", torch.tensor(AFTER)),
    ),
    "pyro.param": made_of(
        "Asked",
        prepare=lambda self: pyro.get_param_store().__setitem__("asked", torch.tensor(BEFORE)),
        shift=lambda self: pyro.param("asked"),
        change=lambda self: pyro.get_param_store().__setitem__("asked", torch.tensor(AFTER)),
    ),
    "a global": made_of(
        "Global",
        prepare=lambda self: globals().update(SHIFT=BEFORE),
        shift=global_shift,
        change=changed_global,
    ),
    "a global tensor in place": made_of(
        "GlobalTensor",
        prepare=lambda self: TABLE.fill_(BEFORE),
        shift=lambda self: TABLE[0],
        change=lambda self: TABLE.fill_(AFTER),
    ),
    "another module's": made_of(
        "OfModule",
        prepare=lambda self: setattr(constants, "shift", BEFORE),
        shift=lambda self: constants.shift,
        change=lambda self: setattr(constants, "shift", AFTER),
    ),
    "a closure": made_of(
        "Closure",
        prepare=lambda self: set_closure(BEFORE),
        shift=CLOSURE,
        change=lambda self: set_closure(AFTER),
    ),
    "a default argument": made_of(
        "Default",
        prepare=lambda self: setattr(helper, "__defaults__", (BEFORE,)),
        shift=lambda self: helper(),
        change=lambda self: setattr(helper, "__defaults__", (AFTER,)),
    ),
    "a method of the class": made_of(
        "Patched",
        prepare=lambda self: setattr(type(self), "shift", lambda self: BEFORE),
        change=lambda self: setattr(type(self), "shift", lambda self: AFTER),
    ),
    "a method of the instance": made_of(
        "Own", change=lambda self: setattr(self, "shift", types.MethodType(lambda self: AFTER, self))
    ),
    "the class": made_of(
        "Turned",
        change=lambda self: setattr(self, "__class__", made_of("Other", shift=lambda self: AFTER)),
    ),
}


@pytest.fixture(autouse=True)
def _clean_store():
    with pyro.get_param_store().scope():
        yield


def some_episodes(model):
    actions = torch.zeros(4, 3, dtype=torch.long)
    z = torch.linspace(-2, 4, 12).reshape(4, 3)
    return Episodes.from_arrays(model, actions.numpy(), {"z": z.numpy()})


BACKENDS = {
    "smc": ParticleFilter(64, engine="native"),
    "ekf": ExtendedKalmanFilter(engine="native"),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_change_takes_effect(kind, backend):
    model = kind()
    episodes = some_episodes(model)
    before = backend.run(model, episodes, seed=0).log_likelihood
    torch.testing.assert_close(backend.run(model, episodes, seed=0).log_likelihood, before, rtol=0, atol=0)
    model.change()
    after = backend.run(model, episodes, seed=0).log_likelihood
    plain = Drift()
    plain.change()
    expected = backend.run(plain, episodes, seed=0).log_likelihood
    assert (before - expected).abs().max() > 0.1
    torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-6)


def test_what_is_put_back_is_as_it_was():
    model, backend = Drift(), BACKENDS["smc"]
    episodes = some_episodes(model)
    before = backend.run(model, episodes, seed=0).log_likelihood
    model.change()
    backend.run(model, episodes, seed=0)
    model.amount = BEFORE
    assert torch.equal(backend.run(model, episodes, seed=0).log_likelihood, before)


def test_ends_that_come_and_go():
    """By patching, as in notebooks: a kernel of the model as it was is not used."""
    native, eager = (ParticleFilter(4000, engine=engine) for engine in ("native", "eager"))
    model = Drift()
    without = some_episodes(model)
    before = native.run(model, without, seed=0).log_likelihood
    ends = {"ended": torch.zeros_like(without.observations["z"])}
    flags = {"ended": torch.ones_like(without.observed["z"])}
    episodes = replace(
        without, observations={**without.observations, **ends}, observed={**without.observed, **flags}
    )
    for slope in (1.0, 3.0):
        model.ends = types.MethodType(lambda self, s, a, c, slope=slope: torch.sigmoid(slope * s), model)
        with pytest.raises(ObservationError, match="ended"):
            native.run(model, without, seed=0)
        ours, theirs = (each.run(model, episodes, seed=0).log_likelihood for each in (native, eager))
        torch.testing.assert_close(ours, theirs, atol=0.3, rtol=0)
        assert (ours - before).abs().amax() > 2.0  # the test can tell
    del model.ends
    assert torch.equal(native.run(model, without, seed=0).log_likelihood, before)


def test_a_copy_has_constants_of_its_own():
    model, backend = Drift(), BACKENDS["smc"]
    episodes = some_episodes(model)
    before = backend.run(model, episodes, seed=0).log_likelihood
    other = copy.deepcopy(model)
    other.change()
    assert not torch.equal(backend.run(other, episodes, seed=0).log_likelihood, before)
    assert torch.equal(backend.run(model, episodes, seed=0).log_likelihood, before)


def test_more_contexts_are_noticed():
    model, backend = Drift(), BACKENDS["smc"]
    episodes = some_episodes(model)
    backend.run(model, episodes, seed=0)
    model.contexts = 3
    assert backend.run(model, episodes, seed=0).log_likelihood.shape == (4, 3)


def test_another_prior_counts():
    model, backend = Drift(), BACKENDS["smc"]
    episodes = some_episodes(model)
    backend.run(model, episodes, seed=0)
    model.context_prior = [1.0, 0.0]
    assert float(backend.run(model, episodes, seed=0).posterior()[:, -1, 0].min()) == 1.0


def test_another_precision_counts():
    model, backend = Drift(), BACKENDS["smc"]
    episodes = some_episodes(model)
    assert backend.run(model, episodes, seed=0).expected_reward.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert backend.run(model, episodes, seed=0).expected_reward.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class Counting(Drift):
    """A program with a state of its own."""

    calls = 0

    def shift(self):
        self.calls += 1
        return 0.1 * self.calls


class Reading(Drift):
    """A program that draws where nobody looks."""

    def shift(self):
        return float(np.random.rand())


@pytest.mark.parametrize("kind", [Counting, Reading])
def test_what_cannot_be_watched_is_refused(kind):
    model = kind()
    with pytest.raises(UnsupportedModelError, match="cannot be compiled"):
        BACKENDS["smc"].run(model, some_episodes(model), seed=0)
