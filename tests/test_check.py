"""Broken programs, each with one fault, and the words that must name it."""

from __future__ import annotations

import functools
import random
from fractions import Fraction

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample
from torch.distributions import constraints

from cpomdp_ppl import ModelError, RandomPolicy, simulate
from cpomdp_ppl.actions import Box
from cpomdp_ppl.signature import signature
from tests.programs import EyesOpen, Learnable, Plates, Reef, Sail, Walk

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


@broken("transition: 'state' has shape", "does not broadcast to [2, 13, 11]")
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


@broken("transition: draws random numbers outside of `pyro.sample`, from torch", "sample site")
class TorchNoise(Walk):
    def transition(self, state, action, context):
        return state + 0.1 * torch.randn_like(state)


@broken("observation: draws random numbers outside of `pyro.sample`, from torch", "action '1'")
class NoiseInASite(Walk):
    def observation(self, state, action, context):
        noise = torch.rand(()) if bool((action == 1).all()) else 0.5
        pyro.sample("z", dist.Normal(state, 1.0 + noise))


@broken("initial: draws random numbers outside of `pyro.sample`, from numpy.random and random")
class OtherNoise(Walk):
    def initial(self, context):
        return pyro.sample("x", dist.Normal(np.random.randn() + random.random(), 1.0))


@broken("reward: draws random numbers outside of `pyro.sample`, from torch", "must be a function")
class NoisyReward(Walk):
    def reward(self, state, action, context):
        return state + torch.randn(state.shape)


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


@broken("transition: changes its arguments in place", "return new tensors")
class InPlace(Walk):
    def transition(self, state, action, context):
        state += action
        return state


@broken("transition: changes its arguments in place")
class InPlaceDict(Walk):
    def initial(self, context):
        return {"x": torch.zeros(())}

    def transition(self, state, action, context):
        state["x"] = state["x"] + 1.0
        return state

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state["x"], 1.0))

    def reward(self, state, action, context):
        return state["x"] * context


@broken("observation: works for a single episode but not in a batch", "`.to_event` missing")
class ForgotToEvent(Walk):
    actions = 3

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(torch.zeros(3), 1.0))


@broken("observation: works for a single episode but not in a batch", "`.to_event` missing")
class ForgotToEventOfElevenNumbers(Walk):
    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(torch.zeros(11), 1.0))


@broken("observation: site 'w' has batch shape [2, 13, 11, 4]", "expected [2, 13, 11, 1]", "plate missing")
class ForgotPlate(Plates):
    def observation(self, state, action, context):
        pyro.sample("w", dist.Normal(torch.zeros(4), 1.0))


@broken("observation: its sites differ between actions", "['z'] before the first action")
class SitesDifferAtFirst(EyesOpen):
    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0))
        if action is not None:
            pyro.sample("w", dist.Normal(state, 1.0))


@broken("observation: the mask of site 'z' depends on the hidden state", "before the first action")
class InitialStateMask(EyesOpen):
    def observation(self, state, action, context):
        mask = state > 0 if action is None else torch.tensor(True)
        pyro.sample("z", dist.Normal(state, 1.0).mask(mask))


@broken("observation: the mask of site 'z' depends on the hidden state", "at time", "random actions")
class LaterStateMask(Walk):
    horizon = 20

    def initial(self, context):
        return torch.zeros(())

    def transition(self, state, action, context):
        return state + pyro.sample("up", dist.Bernoulli(0.5))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0).mask(state < 3))


@broken("observation: changes the model itself (log)")
class KeepsLog(Walk):
    def __init__(self):
        super().__init__()
        self.log = {"seen": [0.0]}

    def observation(self, state, action, context):
        self.log["seen"][0] += 1.0
        pyro.sample("z", dist.Normal(state, 1.0))


@broken("observation: raises at time 3 of an episode of random actions", "ValueError: too far")
class ObservationFailsLater(Walk):
    def initial(self, context):
        return torch.zeros(())

    def transition(self, state, action, context):
        return state + 1.0

    def observation(self, state, action, context):
        if bool((state >= 3).any()):
            raise ValueError("too far\nto see")
        pyro.sample("z", dist.Normal(state, 1.0))


@broken("initial: works in a batch but not for a single episode", "IndexError")
class BatchOnly(Walk):
    def initial(self, context):
        return context.float() * context.shape[0]


@broken("transition: returns a state of ['state']", "initial returns ['state']")
class WrapsItsState(Walk):
    def transition(self, state, action, context):
        return {"state": state}


@broken("ends: has sample sites ['over']", "must be a function")
class EndsBySite(Reef):
    def ends(self, state, action, context):
        return pyro.sample("over", dist.Bernoulli(torch.full(state.shape, 0.5)))


@broken("ends: draws random numbers outside of `pyro.sample`, from torch", "must be a function", "'left'")
class EndsByChance(Reef):
    def ends(self, state, action, context):
        return torch.rand(state.shape) < 0.5


@broken("ends: is 1.5 in context 'reef left' for action 'left'", "truth values, or probabilities from 0 to 1")
class MoreThanCertain(Reef):
    def ends(self, state, action, context):
        return torch.where((context == 0) & (action == 0), 1.5, 0.0).expand(state.shape)


@broken("ends: is 2 in context 'reef right'", "truth values, or probabilities from 0 to 1")
class CountsItsEnds(Reef):
    def ends(self, state, action, context):
        return (state > -1).long() + (context == 1)


@broken("ends: is -", "at time", "random actions", "from 0 to 1")
class LessThanNeverLater(Reef):
    def ends(self, state, action, context):
        return torch.where(state < 2, -0.25, 0.0)


@broken("ends: is not finite", "context 'reef right'")
class EndsUndefined(Reef):
    def ends(self, state, action, context):
        return torch.where(context == 0, 0.5, float("nan"))


@broken("ends: returns a bool", "not a tensor")
class EndsByPython(Reef):
    def ends(self, state, action, context):
        return False


@broken("ends: returns None", "is a return missing?")
class EndsForgotReturn(Reef):
    def ends(self, state, action, context):
        state > 5  # noqa: B015


@broken("ends: has shape [3]", "does not broadcast")
class EndsOfThree(Reef):
    def ends(self, state, action, context):
        return torch.zeros(3)


@broken("ends: expected the arguments (state, action, context), got (state, action)")
class EndsOfTwo(Reef):
    def ends(self, state, action):
        return state > 5

    def reward(self, state, action, context):
        return torch.zeros(())


@broken("ends: what it does for one particle depends on other particles")
class EndsTogether(Reef):
    def ends(self, state, action, context):
        return (state - state.amin()).sign().float()


@broken("observation: a site may not be called 'ended'", "`ends`")
class TakesTheNameOfTheEnd(Reef):
    def observation(self, state, action, context):
        pyro.sample("ended", dist.Bernoulli(0.5))


@broken("observation: a site may not be called 'ended'", "`ends`")
class TellsOfNoEnd(Walk):
    def observation(self, state, action, context):
        pyro.sample("ended", dist.Normal(state, 0.5))


@broken("transition: a site may not be called 'ended'")
class HidesAnEnd(Walk):
    def transition(self, state, action, context):
        return state + pyro.sample("ended", dist.Normal(0.0, 1.0))


@broken("reward: is not finite in context 'reef left'", "at time 2", "random actions")
class InfiniteOnArrival(Reef):
    def reward(self, state, action, context, next_state):
        return torch.where((context == 0) & (state == 1) & (next_state == 0), float("inf"), 0.0)


@broken("reward: raises", "KeyError")
class ArrivesNowhere(Reef):
    def reward(self, state, action, context, next_state):
        return {}["next"] + state


@broken("transition: raises for action 'steer lowest'", "ValueError")
class CannotSteerLeft(Sail):
    def transition(self, state, action, context):
        if bool((action[..., 0] < -0.99).all()):
            raise ValueError("stuck")
        return super().transition(state, action, context)


@broken("reward: is not finite", "for action 'drive lowest'")
class DividesByDrive(Sail):
    def reward(self, state, action, context):
        return state / action[..., 1]


@broken("transition: 'state' has shape", "for action 'middle'", "does not broadcast to [2, 13, 11]")
class ForgetsTheAxis(Sail):
    actions = Box(-1.0, 1.0)

    def transition(self, state, action, context):
        return state[..., None] + action

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.5))

    def reward(self, state, action, context):
        return state


@broken("observation: the mask of site 'z' depends on the hidden state", "at time", "random actions")
class LooksInTheMiddle(Sail):
    def observation(self, state, action, context):
        steering = action[..., 0].abs() > 0.2
        among_probes = (action[..., 0].abs() == 1.0) | (action[..., 0] == 0.0)
        pyro.sample("z", dist.Normal(state, 0.5).mask(among_probes | ~steering | (state > 0)))


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
    (dict(contexts=2.0), "contexts: expected a sequence of names or a positive number, got 2.0"),
    (dict(actions={"a", "b"}), "actions: expected a sequence of names or a positive number"),
    (dict(actions=[0, 1]), "actions: expected a sequence of names"),
    (dict(context_prior=(0.5, 0.6)), "context_prior: expected non-negative probabilities that sum to 1"),
    (dict(context_prior=(1.0,)), r"context_prior: expected shape \[2\]"),
    (dict(context_prior="even"), "context_prior: expected probabilities"),
    (dict(states=0), "states: expected None or a positive number"),
    (dict(discount=1.5), "discount: expected a number above 0 and at most 1, got 1.5"),
    *(
        (dict(discount=wrong), "discount: expected a number above 0 and at most 1, got")
        for wrong in (0, -0.5, float("nan"), True, "0.9", None, torch.tensor(0.9))
    ),
    (dict(reward=lambda self, state: state), r"reward: expected the arguments .*, got \(state\)"),
    (dict(reward=lambda self, s, a, c, n, m: s), r"reward: expected the arguments .*, got \(s, a, c, n, m\)"),
    (dict(reward=lambda self, s, a, c, next_state=0: s), r"without a default, got \(s, a, c, next_state=0\)"),
    (dict(reward=lambda self, s, a, c, *, next_state: s), r"got \(s, a, c, \*, next_state\)"),
    (dict(reward=lambda self, *rest: 0.0), r"reward: expected the arguments .*, got \(\*rest\)"),
    (dict(reward=lambda *rest: 0.0), r"reward: expected the arguments .*, got \(\*rest\)"),
    (dict(reward=staticmethod(lambda s, a: s)), r"reward: expected the arguments .*, got \(s, a\)"),
    (dict(reward=3.0), "reward: expected a function of known arguments, got TypeError"),
    (dict(max_plate_nesting=-1), "max_plate_nesting: expected a number of axes"),
]


@pytest.mark.parametrize(("attributes", "message"), DEFINITIONS, ids=range(len(DEFINITIONS)))
def test_a_bad_definition_is_named(attributes, message):
    model = type("Odd", (Walk,), attributes)()
    with pytest.raises(ModelError, match=message):
        model.check()


def noted(function):
    @functools.wraps(function)
    def note(*arguments):
        return function(*arguments)

    return note


def on_arrival(state, action, context, next_state, scale=1.0):
    return scale * (10.0 * state + next_state)


REWARDS = [
    (False, lambda self, state, action, context: 10.0 * state),
    (False, lambda self, state, action, context, *rest: 10.0 * state + sum(rest)),
    (False, lambda self, state, action, context, *, scale=10.0: scale * state),
    (False, lambda self, state, action, context, scale=10.0: scale * state),
    (False, noted(lambda self, state, action, context: 10.0 * state)),
    (False, staticmethod(lambda state, action, context: 10.0 * state)),
    (True, lambda self, state, action, context, next_state: 10.0 * state + next_state),
    (True, lambda self, state, action, context, next_state, *, scale=10.0: scale * state + next_state),
    (True, lambda self, state, action, context, next_state, scale=10.0: scale * state + next_state),
    (True, noted(lambda self, state, action, context, next_state: 10.0 * state + next_state)),
    (True, staticmethod(lambda state, action, context, next_state: 10.0 * state + next_state)),
    (True, staticmethod(functools.partial(on_arrival, scale=1.0))),
    (True, functools.partialmethod(lambda self, ten, s, a, c, after: ten * s + after, 10.0)),
    (True, classmethod(lambda cls, state, action, context, next_state: 10.0 * state + next_state)),
]


@pytest.mark.parametrize(("arrival", "reward"), REWARDS, ids=range(len(REWARDS)))
def test_whether_arrival_pays_is_read_off_the_arguments(arrival, reward):
    model = type("Paid", (Reef,), {"reward": reward, "discount": Fraction(1, 2)})()
    model.check()
    assert model.pays_on_arrival == arrival
    episodes = simulate(model, RandomPolicy(2), 50, seed=0)
    s = episodes.states.float()
    by_hand = torch.where(episodes.alive, 10 * s[:, :-1] + (s[:, 1:] if arrival else 0), 0.0)
    torch.testing.assert_close(episodes.rewards, by_hand)
    torch.testing.assert_close(episodes.returns, by_hand @ torch.tensor([1, 0.5, 0.25, 0.125]))


def test_programs_may_be_set_on_an_instance():
    model = Walk()
    assert not model.can_end
    model.reward = lambda state, action, context, next_state: next_state
    model.ends = lambda state, action, context: torch.ones(())
    model.check()
    assert model.can_end
    episodes = simulate(model, RandomPolicy(2), 10, seed=0)
    assert episodes.lengths.tolist() == [1] * 10
    assert torch.equal(episodes.returns, episodes.states[:, 1])


def test_continuous_actions_are_no_indices():
    class Looks(Sail):
        def reward(self, state, action, context):
            return torch.tensor([1.0, 2.0])[action]

    with pytest.raises(ModelError, match="Looks has 1 fault") as caught:
        Looks().check()
    assert "reward: raises for action 'middle' IndexError: tensors used as indices" in str(caught.value)


def test_random_constants_are_refused():
    class Vague(Walk):
        def __init__(self):
            super().__init__()
            self.drift = PyroSample(dist.Normal(0.0, 1.0))

    with pytest.raises(ModelError, match="drift: a PyroSample is not a constant"):
        Vague().check()


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


class Detector(Walk):
    """A mask may depend on what is seen."""

    def observation(self, state, action, context):
        detected = pyro.sample("detected", dist.Bernoulli(torch.sigmoid(state)))
        pyro.sample("z", dist.Normal(state, 1.0).mask(detected.bool()))


class Last(Walk):
    """A reward need only be defined before the move."""

    def initial(self, context):
        return torch.zeros(())

    def transition(self, state, action, context):
        return state + 1.0

    def reward(self, state, action, context):
        return 1.0 / (3.0 - state)


class Certain(Walk):
    """Densities of deltas, which are subject to rounding, are not compared."""

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Delta((state * torch.tensor([0.1, 0.2]).sum()).sin()))


class Always(Reef):
    """An end that is certain, told as an index."""

    def ends(self, state, action, context):
        return torch.ones((), dtype=torch.long)


class Never(Plates):
    """An end that is impossible, in a program with plates."""

    def ends(self, state, action, context):
        return torch.zeros(1, dtype=torch.bool)


class OnlyEnds(Reef):
    """Nothing is seen but whether it goes on."""

    def observation(self, state, action, context):
        pass


class Steered(Plates):
    """Continuous actions, and plates."""

    actions = Box(-1.0, 1.0)

    def transition(self, state, action, context):
        with pyro.plate("legs", 2):
            return pyro.sample("x", dist.Normal(state + action[..., 0], 1.0))


SOUND = [
    Walk,
    Plates,
    EyesOpen,
    Learnable,
    Detector,
    Last,
    Certain,
    Reef,
    Sail,
    Always,
    Never,
    OnlyEnds,
    Steered,
]


@pytest.mark.parametrize("make", SOUND)
def test_sound_programs_pass(make):
    make().check()


def test_sound_models_pass_and_nothing_is_left_behind(model):
    torch_state = torch.get_rng_state()
    model.check()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert not list(pyro.get_param_store().keys())


def test_the_observation_is_checked_even_if_nothing_moves():
    class Both(Walk):
        def transition(self, state, action, context):
            raise RuntimeError("stuck")

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state, 1.0).mask(state > 0))

    with pytest.raises(ModelError, match="Both has 2 faults") as caught:
        Both().check()
    assert "transition: raises for action '0' RuntimeError: stuck" in caught.value.faults
    assert "observation: the mask of site 'z'" in caught.value.faults[1]


def test_a_fault_is_told_once():
    class Once(Walk):
        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state, 1.0 if action == 0 else 2.0))

    with pytest.raises(ModelError, match="Once has 1 fault"):
        Once().check()


def test_deterministic_sites_are_none_at_all():
    class Noted(Walk):
        def transition(self, state, action, context):
            return pyro.deterministic("next", state + action)

        def observation(self, state, action, context):
            pyro.deterministic("twice", 2 * state)
            pyro.sample("z", dist.Normal(state, 1.0))

    Noted().check()
    assert list(signature(Noted()).observations) == ["z"]
    trace = pyro.poutine.trace(Noted()).get_trace(RandomPolicy(2), 3)
    assert {"next_1", "twice_3"} <= set(trace.nodes)
    simulate(Noted(), RandomPolicy(2), 3, seed=0)


def test_numpy_numbers_define_a_model():
    model = Walk()
    model.contexts, model.actions, model.horizon = np.int64(2), np.int32(2), np.int64(3)
    model.check()
    episodes = simulate(model, RandomPolicy(np.int64(2)), np.int64(4), seed=np.int64(1))
    assert episodes.actions.shape == (4, 3)


def test_values_of_the_param_store_are_checked():
    with pyro.get_param_store().scope():
        pyro.param("drift", torch.tensor(3.0), constraint=constraints.positive)
        Learnable().check()
        pyro.get_param_store()["drift"] = torch.tensor(float("inf"))
        with pytest.raises(ModelError, match="transition"):
            Learnable().check()


def test_a_site_of_the_name_of_the_end_is_refused_without_a_check_too():
    with pytest.raises(ModelError, match="observation: a site may not be called 'ended'"):
        simulate(TellsOfNoEnd(), RandomPolicy(2), 3, seed=0)
