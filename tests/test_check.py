"""Broken programs, each with one fault, and the words that must name it."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from cpomdp_ppl import ModelError
from tests.programs import EyesOpen, Learnable, Plates, Walk

BROKEN: dict[str, tuple[type[Walk], list[str]]] = {}


def broken(*words: str):
    """Register a broken model together with the words its fault must contain."""

    def register(model: type[Walk]) -> type[Walk]:
        BROKEN[model.__name__] = (model, list(words))
        return model

    return register


@broken("initial: returns None", "is a return missing?")
class ForgotReturn(Walk):
    def initial(self, context):
        pyro.sample("x", dist.Normal(0.0, 1.0))


@broken("transition: returns None", "action '0'")
class ForgotToMove(Walk):
    def transition(self, state, action, context):
        pyro.sample("x", dist.Normal(state, 1.0))


@broken("initial: 'state' is a float", "a state is a tensor")
class PlainNumber(Walk):
    def initial(self, context):
        return 0.0


@broken("transition: works for a single episode but not in a batch", "do not broadcast")
class WrongShapes(Walk):
    def transition(self, state, action, context):
        return (
            state + torch.zeros(7)[: max(1, state.dim() and state.shape[-1] + 1) if state.numel() > 1 else 1]
        )


@broken("transition: 'state' has shape", "does not broadcast to [2, 2, 3]")
class GrowingState(Walk):
    def transition(self, state, action, context):
        return state[..., None].expand(*state.shape, 5)


@broken("transition: returns a state of ['x', 'y']", "initial returns ['state']")
class ChangingStructure(Walk):
    def transition(self, state, action, context):
        return {"x": state, "y": state}


@broken("transition: 'state' is torch.int64", "initial returns torch.float32")
class ChangingType(Walk):
    def transition(self, state, action, context):
        return state.round().long()


@broken("reward: is not finite", "context '1'", "action '0'")
class InfiniteReward(Walk):
    def reward(self, state, action, context):
        return 1.0 / (1.0 - context) + 0 * state


@broken("reward: has sample sites ['bonus']", "must be a function")
class RandomReward(Walk):
    def reward(self, state, action, context):
        return state + pyro.sample("bonus", dist.Normal(0.0, 1.0))


@broken("reward: returns a float", "not a tensor")
class ConstantReward(Walk):
    def reward(self, state, action, context):
        return 1.0


@broken("reward: has shape", "does not broadcast")
class VectorReward(Walk):
    def reward(self, state, action, context):
        return torch.stack([state, state], -1)


class Liar(dist.Normal):
    """Says its values are positive."""

    support = constraints.positive


@broken("observation: site 'z' samples outside its own support", "context '0'")
class OutsideSupport(Walk):
    def observation(self, state, action, context):
        pyro.sample("z", Liar(state - 100.0, torch.ones(())))


@broken(
    "observation: its sites differ between actions", "['z'] for action '0'", "['w'] for action '1'", "mask"
)
class SitesDiffer(Walk):
    def observation(self, state, action, context):
        if bool((action == 0).all()):
            pyro.sample("z", dist.Normal(state, 1.0))
        else:
            pyro.sample("w", dist.Normal(state, 1.0))


@broken("observation: has no sample sites")
class Blind(Walk):
    def observation(self, state, action, context):
        return None


@broken("transition: works for a single episode but not in a batch", "branches on a tensor")
class PythonBranch(Walk):
    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + 1.0 if action == 0 else state, 1.0))


@broken("transition: what it does for one particle depends on other particles", "engine's axes")
class ReadsParticles(Walk):
    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state.mean(-1, keepdim=True) if state.dim() else state, 1.0))


@broken("reward: what it does for one particle depends on other particles")
class ComparesEpisodes(Walk):
    def reward(self, state, action, context):
        return state - state.max()


@broken("transition: changes the model itself (count)")
class KeepsCount(Walk):
    def __init__(self):
        super().__init__()
        self.count = 0

    def transition(self, state, action, context):
        self.count += 1
        return state + 0.0


@broken("observation: changes the model itself (seen)")
class KeepsTensor(Walk):
    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(())

    def observation(self, state, action, context):
        self.seen += 1
        pyro.sample("z", dist.Normal(state, 1.0))


@broken("observation: the mask of site 'z' depends on the hidden state or context", "site of its own")
class StateMask(Walk):
    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0).mask(state > 0))


@broken("observation: site 'z' is already observed", "leave out `obs`")
class AlreadyObserved(Walk):
    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0), obs=torch.zeros(()))


@broken("observation: shares site names ['x']")
class SharedName(Walk):
    def observation(self, state, action, context):
        pyro.sample("x", dist.Normal(state, 1.0))


@broken("transition: a site may not be called 'a'")
class ReservedName(Walk):
    def transition(self, state, action, context):
        return state + pyro.sample("a", dist.Normal(0.0, 1.0))


@broken("observation: raises", "two sample sites are named 'z'")
class SameNameTwice(Walk):
    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0))
        pyro.sample("z", dist.Normal(state, 2.0))


@broken("transition: raises in context '1'", "ValueError", "scale")
class NegativeScale(Walk):
    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, 1.0 - 2.0 * context))


@broken("initial: raises", "plate 'inner'", "max_plate_nesting = 0")
class UndeclaredPlate(Walk):
    def initial(self, context):
        with pyro.plate("inner", 3):
            return pyro.sample("x", dist.Normal(0.0, 1.0)).sum(-1)


@broken("transition: 'state' is not finite", "at time", "random actions")
class GoesOffLater(Walk):
    horizon = 50

    def transition(self, state, action, context):
        return state * 1e9


@broken("initial: a finite model's state is an integer index")
class FloatIndex(Walk):
    states = 3


@broken("transition: state index", "is not within 0 to 2")
class OffTheBoard(Walk):
    states = 3

    def initial(self, context):
        return torch.tensor(1)

    def transition(self, state, action, context):
        return state + 2


@broken("observation: raises before the first action", "TypeError")
class NoInitialObservation(EyesOpen):
    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0 + action))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_program_is_named(name):
    model, words = BROKEN[name]
    with pytest.raises(ModelError) as caught:
        model().check()
    for word in words:
        assert any(word in fault for fault in caught.value.faults), caught.value
    assert any(all(word in fault for word in words) for fault in caught.value.faults), caught.value
    assert all("\n" not in fault for fault in caught.value.faults)


DEFINITIONS = [
    (dict(horizon=0), "horizon: expected a positive number of steps, got 0"),
    (dict(horizon="long"), "horizon: expected a positive number of steps, got 'long'"),
    (dict(contexts=()), r"contexts: expected a sequence of names or a positive number, got \(\)"),
    (dict(contexts="ab"), "contexts: expected a sequence of names"),
    (dict(contexts=("a", "a")), "contexts: expected different names"),
    (dict(contexts=0), "contexts: expected names or a positive number, got 0"),
    (dict(actions=[0, 1]), "actions: expected a sequence of names"),
    (dict(context_prior=(0.5, 0.6)), "context_prior: expected non-negative probabilities that sum to 1"),
    (dict(context_prior=(1.0,)), r"context_prior: expected shape \[2\]"),
    (dict(context_prior="even"), "context_prior: expected probabilities"),
    (dict(states=0), "states: expected None or a positive number"),
    (dict(max_plate_nesting=-1), "max_plate_nesting: expected a number of axes"),
]


@pytest.mark.parametrize(("attributes", "message"), DEFINITIONS, ids=range(len(DEFINITIONS)))
def test_a_bad_definition_is_named(attributes, message):
    model = type("Odd", (Walk,), attributes)()
    with pytest.raises(ModelError, match=message):
        model.check()


def test_all_faults_are_told_at_once():
    class Worst(Walk):
        def transition(self, state, action, context):
            return pyro.sample("x", dist.Normal(state.mean(), 1.0)).expand_as(state)

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state, 1.0).mask(state > 0))

        def reward(self, state, action, context):
            return state / 0.0

    with pytest.raises(ModelError, match="Worst has 3 faults") as caught:
        Worst().check()
    assert len(caught.value.faults) == 3

    class Missing(Walk):
        horizon = None
        contexts = None

    with pytest.raises(ModelError, match="Missing has 2 faults"):
        Missing().check()


@pytest.mark.parametrize("make", [Walk, Plates, EyesOpen, Learnable])
def test_sound_programs_pass(make):
    make().check()


def test_sound_models_pass_and_nothing_is_left_behind(model):
    torch_state = torch.get_rng_state()
    model.check()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert not list(pyro.get_param_store().keys())


def test_a_mask_may_depend_on_what_is_seen():
    class Detector(Walk):
        def observation(self, state, action, context):
            detected = pyro.sample("detected", dist.Bernoulli(torch.sigmoid(state)))
            pyro.sample("z", dist.Normal(state, 1.0).mask(detected.bool()))

    Detector().check()
