from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam
from torch.distributions import constraints

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.errors import DegenerateWeightsError, ObservationError
from cpomdp_ppl.inference import ParticleFilter, inference_scope
from cpomdp_ppl.inference.backend import fold
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.kernel_cloud import KernelCloud
from cpomdp_ppl.inference.native_filter import FilterKernel
from cpomdp_ppl.inference.particle_filter import SMC
from cpomdp_ppl.inference.step_arguments import StepArguments
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.rng import generators
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves, map_state
from tests.programs import Dice, EyesOpen, Needle, Plates, Still

NATIVE = ParticleFilter(64, engine="native")
LIGHT_DARK, NEEDLE = LightDark(), Needle()  # to trace programs takes longer than to run them


def ferry():
    """README's first model, as a reader would paste it."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    names: dict[str, object] = {"__name__": "ferry"}
    exec(re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)[0], names)
    return names["Ferry"]()


def at(values, t):
    return {site: value[:, t] for site, value in values.items()}


def steps(episodes):
    for t in range(episodes.horizon):
        yield episodes.actions[:, t], at(episodes.observations, t), at(episodes.observed, t)


def followed(episodes, model, seed=0):
    online = NATIVE.online(model, len(episodes), seed=seed)
    if model.initial_observation:
        online.observe(None, episodes.initial_observations, episodes.initially_observed)
    for step in steps(episodes):
        online.observe(*step)
    return online


@pytest.mark.slow
@pytest.mark.parametrize("num_episodes", [1, 5])
@pytest.mark.parametrize("make", [LightDark, ContextualTiger, LineGrid, Beacons, EyesOpen, ferry])
def test_step_by_step_gives_the_very_numbers_of_the_batch(make, num_episodes):
    model = make()
    episodes = simulate(model, RandomPolicy(model.num_actions), num_episodes, seed=0)
    batch = NATIVE.run(model, episodes, seed=7)
    online = NATIVE.online(model, num_episodes, seed=7)
    assert not bool(online.belief.resampled.any())
    total = torch.zeros(num_episodes, model.num_contexts, dtype=torch.float64)
    if model.initial_observation:
        online.observe(None, episodes.initial_observations, episodes.initially_observed)
        total = total + batch.initial_increment
    for t, step in enumerate(steps(episodes)):
        assert torch.equal(online.log_likelihood, total)
        assert torch.equal(online.expected_reward(step[0]), batch.expected_reward[:, t])
        online.observe(*step)
        total = total + batch.increments[:, t]
        assert torch.equal(online.belief.weights.ess.T, batch.ess[:, t])
        assert torch.equal(online.belief.resampled.T, batch.resampled[:, t])
    assert torch.equal(online.log_likelihood, total)


@pytest.mark.slow
def test_episodes_of_several_lengths_step_by_step():
    model = LightDark()
    episodes = simulate(model, RandomPolicy(3), 6, seed=0)
    lengths = torch.tensor([20, 3, 7, 1, 20, 12])
    going = torch.arange(20) < lengths[:, None]
    episodes = replace(
        episodes, lengths=lengths, observed={"z": episodes.observed["z"] & going}, rewards=None, states=None
    )
    batch = NATIVE.run(model, episodes, seed=3)
    with inference_scope(model, 3):
        folded = fold(NATIVE.recursion(model), episodes, moments=True, offset=0)
    assert torch.equal(folded.increments, batch.increments)
    assert torch.equal(folded.expected_reward, batch.expected_reward)
    assert torch.equal(folded.resampled, batch.resampled)


def test_the_same_seed_gives_the_same_numbers():
    episodes = simulate(LIGHT_DARK, RandomPolicy(3), 1, seed=0)
    first, again, other = (followed(episodes, LIGHT_DARK, seed) for seed in (1, 1, 2))
    assert torch.equal(first.log_likelihood, again.log_likelihood)
    assert torch.equal(first.belief.state, again.belief.state)
    assert not torch.equal(first.log_likelihood, other.log_likelihood)


@pytest.mark.parametrize("refuses", [False, True])
def test_generators_of_the_caller_stay_where_they_are(refuses, monkeypatch):
    NATIVE.kernel(LIGHT_DARK)
    if refuses:
        monkeypatch.setattr(FilterKernel, "execute", lambda *_: 1)
    before, store = generators(), set(pyro.get_param_store())
    online = NATIVE.online(LIGHT_DARK, seed=0)
    online.observe("observe", {"z": 0.3})
    assert bool(online.posterior.isfinite().all())
    assert generators() == before
    assert set(pyro.get_param_store()) == store


def test_what_the_kernel_refuses_runs_eagerly(monkeypatch):
    """Within five standard errors of the difference of two estimates."""
    model, backend = LIGHT_DARK, ParticleFilter(4000, engine="native")
    episodes = simulate(model, RandomPolicy(3), 1, seed=0)
    native = backend.run(model, episodes, seed=0)
    error = float(native.standard_error.amax())
    monkeypatch.setattr(FilterKernel, "execute", lambda *_: 1)
    results = []
    for _ in range(2):
        online = backend.online(model, seed=0)
        for step in steps(episodes):
            online.observe(*step)
        results.append(online.log_likelihood)
    assert torch.equal(*results)
    assert float((results[0] - native.log_likelihood).abs().max()) < 5 * 2**0.5 * error


def test_beliefs_stay_what_they_were():
    online = NATIVE.online(LIGHT_DARK, seed=0)
    looked_at, copies, untouched = [], [], []
    again = NATIVE.online(LIGHT_DARK, seed=0)
    for z in (3.0, -2.0, 0.5):
        online.observe("observe", {"z": z})
        again.observe("observe", {"z": z})
        looked_at.append(online.belief)
        copies.append(map_belief(torch.clone, online.belief))
        untouched.append(again.belief)
    for belief, copied, late in zip(looked_at, copies, untouched, strict=True):
        for other in (copied, late):
            assert torch.equal(belief.state, other.state)
            assert torch.equal(belief.weights.values, other.weights.values)
            assert torch.equal(belief.weights.ess, other.weights.ess)
            assert torch.equal(belief.families.founders, other.families.founders)
            assert torch.equal(belief.resampled, other.resampled)


@pytest.mark.slow
def test_a_cloud_goes_on_as_any_other():
    """Whether the kernel knows its own block again, or reads tensors, also of another layout."""
    model = Beacons()
    episodes = simulate(model, RandomPolicy(model.num_actions), 3, seed=0)
    online = followed(episodes, model)
    cloud = online.belief
    assert isinstance(cloud, KernelCloud)
    plain = replace(cloud)
    assert "block" not in vars(plain)
    strided = map_belief(lambda leaf: leaf.transpose(0, 1).contiguous().transpose(0, 1), plain)
    assert not strided.weights.values.is_contiguous()
    with inference_scope(model, 0):
        recursion, found = NATIVE.recursion(model), []
        for each in (cloud, plain, strided):
            torch.manual_seed(0)
            found.append(recursion.step(each, online._track.path[-1]))
    for after, increment in found[1:]:
        assert torch.equal(increment, found[0][1])
        map_state(
            lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), after.state, found[0][0].state
        )


def test_a_cloud_of_other_types_is_not_taken_for_what_it_is_not():
    model = LIGHT_DARK
    with inference_scope(model, 0):
        recursion = NATIVE.recursion(model)
        cloud = recursion.start(2)
        weights = map_belief(torch.Tensor.double, cloud.weights)
        wide = replace(cloud, weights=weights)
        expected = SMC(model, NATIVE).expected_reward(wide, torch.tensor([0, 1]))
        assert torch.equal(recursion.expected_reward(wide, torch.tensor([0, 1])), expected)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda online: pickle.loads(pickle.dumps(online))]
)
def test_copies_go_on_alike_and_apart(copied):
    online = NATIVE.online(LIGHT_DARK, seed=0)
    online.observe("right")
    online.observe("observe", {"z": 0.3})
    twin = copied(online)
    online.observe("observe", {"z": 0.1})
    online.observe("left")
    assert twin.time == 2
    twin.observe("observe", {"z": 0.1})
    twin.observe("left")
    assert torch.equal(online.log_likelihood, twin.log_likelihood)
    assert torch.equal(online.belief.state, twin.belief.state)


class Shown(Still):
    """Shows a number around one that may be changed, or learned."""

    horizon = 5

    def __init__(self):
        super().__init__()
        self.mean = 1.0
        self.learned = PyroParam(torch.tensor(1.0), constraints.positive)

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state + self.mean * self.learned, 1.0))


def test_a_constant_that_changes_takes_effect():
    """Nothing is unknown in this model, so that every increment is a density."""
    model, total = Shown(), 0.0
    online = NATIVE.online(model, seed=0)

    def add(mean):
        nonlocal total
        online.observe(0, {"z": 0.5})
        total += float(dist.Normal(mean, 1.0).log_prob(torch.tensor(0.5)))
        assert online.log_likelihood.tolist()[0] == pytest.approx([total, total], rel=1e-5)

    add(1.0)
    model.mean = 3.0
    add(3.0)
    model.learned = torch.tensor(2.0)
    add(6.0)
    model.mean = 1.0
    add(2.0)


BAD = [
    ("up",),
    (["up"],),
    (True,),
    (0.5,),
    (5,),
    (-1,),
    (torch.tensor([7]),),
    (None,),
    ([0, 1],),
    (torch.zeros(2, dtype=torch.long),),
    ("observe", {"y": 1.0}),
    ("observe", {"z": [1.0, 2.0]}),
    ("observe", {"z": torch.zeros(2)}),
    ("observe", {"z": float("nan")}),
    ("observe", {"z": torch.tensor([torch.inf])}),
    ("observe", {"z": 1e300}),
    ("observe", {"z": 2**70}),
    ("observe", {"z": "a"}),
    ("observe", {"z": None}),
    ("observe", 1.0),
    ("observe", {"z": 1.0}, True),
    ("observe", {"z": 1.0}, {"y": True}),
    ("observe", {"z": 1.0}, {"z": "yes"}),
    ("observe", {"z": 1.0}, {"z": 1}),
    ("observe", {"z": 1.0}, {"z": None}),
    ("observe", {"z": 1.0}, {"z": [True, True]}),
    ("observe", {}, {"z": True}),
    ("left", {"z": 1.0}),
]


@pytest.mark.parametrize("step", BAD)
def test_bad_steps_are_the_same_errors_and_leave_no_trace(step):
    said = []
    for engine in ("native", "eager"):
        online = replace(NATIVE, engine=engine).online(LIGHT_DARK, seed=0)
        with pytest.raises(ValueError, match=r"expected|observed") as error:
            online.observe(*step)
        said.append((type(error.value), str(error.value)))
        assert online.time == 0
        online.observe("observe", {"z": 0.3})
        untroubled = replace(NATIVE, engine=engine).online(LIGHT_DARK, seed=0)
        untroubled.observe("observe", {"z": 0.3})
        assert torch.equal(online.log_likelihood, untroubled.log_likelihood)
    assert said[0] == said[1]


def test_an_impossible_step_is_the_same_error_and_leaves_no_trace():
    said = []
    for engine in ("native", "eager"):
        online = ParticleFilter(512, engine=engine).online(NEEDLE, seed=0)
        with pytest.raises(DegenerateWeightsError) as error:
            online.observe(0, {"z": 0.5})
        said.append(str(error.value))
        assert online.time == 0
        online.observe(0, {"z": 0.0})
        untroubled = ParticleFilter(512, engine=engine).online(NEEDLE, seed=0)
        untroubled.observe(0, {"z": 0.0})
        assert torch.equal(online.belief.state, untroubled.belief.state)
    assert said[0] == said[1]


def test_a_lost_episode_begins_again_with_more_particles():
    episodes = simulate(NEEDLE, RandomPolicy(2), 40, seed=0)
    few, before = ParticleFilter(4, engine="native"), generators()
    found = []
    for _ in range(2):
        online = few.online(NEEDLE, 40, seed=0)
        for t in range(2):
            online.observe(episodes.actions[:, t], {"z": episodes.observations["z"][:, t]})
        found.append(online)
    assert bool(few.attempt(NEEDLE, episodes, seed=0).lost().any())
    assert generators() == before
    assert torch.equal(found[0].log_likelihood, found[1].log_likelihood)
    assert online.belief.weights.shape == (2, 40, 4)
    assert bool(online.posterior.isfinite().all())


class Moody(Still):
    """Shows something after one of its actions, which may be another one some day."""

    actions, horizon = 2, 5

    def __init__(self):
        super().__init__()
        self.shows = 1

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0).mask(action == self.shows))


def test_a_step_that_is_not_complete_is_refused_each_time_and_by_the_model_as_it_is():
    model = Moody()
    online = NATIVE.online(model, seed=0)
    for _ in range(2):
        online.observe(0, complete=True)
        with pytest.raises(ObservationError, match="expected site 'z', which is always seen after '1'"):
            online.observe(1, complete=True)
    model.shows = 0
    for _ in range(2):
        online.observe(1, complete=True)
        with pytest.raises(ObservationError, match="expected site 'z', which is always seen after '0'"):
            online.observe(0, complete=True)


class Asked(Still):
    """Shows a second thing only if the first says so."""

    def observation(self, state, action, context):
        more = pyro.sample("more", dist.Bernoulli(torch.full_like(state, 0.5)))
        pyro.sample("z", dist.Normal(state, 1.0).mask(more == 1.0))


def test_what_is_complete_may_depend_on_what_was_seen():
    online = NATIVE.online(Asked(), seed=0)
    for _ in range(2):
        online.observe(0, {"more": 0.0}, complete=True)
        with pytest.raises(ObservationError, match="expected site 'z'"):
            online.observe(0, {"more": 1.0}, complete=True)


# -------------------------------------------------------------------------------------------- arguments

PLAIN = {
    LightDark: [
        (0, {}, None),
        ("observe", {"z": 0.3}, None),
        (np.int64(2), {"z": np.float32(0.1)}, {"z": True}),
        (torch.tensor(1), {"z": torch.tensor(2.5)}, {"z": torch.tensor(True)}),
        (torch.tensor([1]), {"z": torch.tensor([2.5], requires_grad=True)}, {"z": torch.tensor([False])}),
        (2, {"z": 3}, {}),
        (2, {"z": 2**53 - 1}, None),
        (2, {"z": True}, None),
        (2, {"z": float("nan")}, {"z": False}),
        (2, {"z": np.float64(0.1)}, None),
    ],
    Beacons: [
        (1, {"bearing": torch.tensor([0.6, 0.8])}, None),
        (1, {"bearing": torch.tensor([[0.6, 0.8]]), "range": 2.0}, {"bearing": True}),
        (1, {"range": torch.tensor([2.0])}, {"range": torch.tensor([True])}),
    ],
    Dice: [
        (None, {"face": 1}, None),
        (2, {"face": torch.tensor([5]), "pair": torch.tensor([3, 0]), "warm": 300.5}, None),
        (2, {"face": np.int32(3)}, None),
    ],
    Plates: [(0, {"z": torch.ones(3), "battery": 1.0}, None), (0, {"battery": 1.0}, {"battery": True})],
}
ODD = {
    LightDark: [
        ([2], {"z": [0.3]}, None),
        (np.array([2]), {"z": np.array(0.3)}, {"z": np.array([True])}),
        (2, {"z": torch.tensor([0.3], dtype=torch.float64)}, None),
        (2, {"z": torch.tensor([[0.3]])}, None),
        (2, {"z": 2**53 + 1}, None),
        (torch.tensor([2], dtype=torch.int32), {}, None),
    ],
}


def same(one, other):
    assert (one.time, one.complete) == (other.time, other.complete)
    for mine, its in [(one.action, other.action), (one.rows, other.rows)]:
        assert (mine is None) == (its is None)
        assert mine is None or (mine.dtype == its.dtype and torch.equal(mine, its))
    for mine, its in [(one.observations, other.observations), (one.observed, other.observed)]:
        assert list(mine) == list(its)
        for site, value in mine.items():
            assert (value.dtype, value.shape) == (its[site].dtype, its[site].shape)
            assert torch.equal(value, its[site])
            assert not value.requires_grad


@pytest.mark.parametrize(
    ("make", "step", "short"),
    [(make, step, True) for make, every in PLAIN.items() for step in every]
    + [(make, step, False) for make, every in ODD.items() for step in every],
)
def test_the_short_way_through_arguments_comes_to_the_same(make, step, short):
    model = make()
    arguments = StepArguments(model, signature(model), 1)
    action, observations, observed = step
    expected = arguments._any(1, action, observations, observed)
    same(arguments.read(1, action, observations, observed), expected)
    assert (arguments._plain(1, action, observations, observed) is not None) == short


def test_what_was_read_is_the_callers_no_more():
    online = NATIVE.online(LIGHT_DARK, seed=0)
    action, z, flag = torch.tensor([2]), torch.tensor([0.3]), torch.tensor([True])
    online.observe(action, {"z": z}, {"z": flag})
    for tensor in (action, z, flag):
        tensor.zero_()
    latest = online.latest
    assert [latest.action.item(), latest.observed["z"].item()] == [2, True]
    assert latest.observations["z"].item() == pytest.approx(0.3)
    assert [leaf.shape for _, leaf in leaves(online.belief.state)] == [(2, 1, 64)]
