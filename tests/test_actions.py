"""Boxes of actions: what they are, what is refused, and decisions that are none."""

from __future__ import annotations

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import ModelError, RandomPolicy, simulate
from cpomdp_ppl.actions import Box, Reshaped, as_actions, random_actions
from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.gym import CPOMDPEnv
from cpomdp_ppl.models import LightDark
from tests.conftest import assert_mean
from tests.programs import Sail, Walk

NAN, INF = float("nan"), float("inf")

BAD_BOXES = [
    ((1.0, 1.0), r"high: expected numbers above low = \(1.0,\), .*got \(1.0,\)"),
    (([0.0, 1.0], [1.0, 0.0]), "high: expected numbers above low"),
    ((0.0, 1e-50), "high: .* also in single precision"),
    ((1e9, 1e9 + 1), "high: .* also in single precision"),
    ((-3e38, 3e38), "high: .* also in single precision"),
    ((NAN, 1.0), "low: expected finite numbers"),
    ((0.0, INF), "high: expected finite numbers"),
    (([0.0, 0.0], [1.0, 1.0, 1.0]), "low: expected 1 number or 3"),
    (([], 1.0), "low: expected finite numbers"),
    (("low", 1.0), "low: expected a number, or a number for every axis"),
    ((None, 1.0), "low: expected"),
    ((0.0, [[1.0, 2.0], [3.0]]), "high: expected a number, or a number for every axis"),
    ((0.0, 1.0, ("steer", "drive")), "names: expected 1 different names"),
    (([0.0, 0.0], 1.0, ("steer", "steer")), "names: expected 2 different names"),
    (([0.0, 0.0], 1.0, "ab"), "names: expected 2 different names"),
    ((0.0, 1.0, (1,)), "names: expected 1 different names"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_BOXES, ids=range(len(BAD_BOXES)))
def test_bad_boxes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Box(*arguments)


def test_boxes_are_made_of_numbers_of_any_kind_and_compared_by_them():
    box = Box(np.float32([-1, 0]), torch.tensor([1.0, 1.0]), names=["a", "b"])
    assert box == Box((-1, 0), 1.0, names=("a", "b")) != Box((-1, 0), 1.0)
    assert hash(box) == hash(Box((-1, 0), 1.0, names=("a", "b")))
    assert box.probe_names == ("middle", "a lowest", "a highest", "b lowest", "b highest")
    expected = [[0.0, 0.5], [-1.0, 0.5], [1.0, 0.5], [0.0, 0.0], [0.0, 1.0]]
    assert box.probes(torch.zeros(())).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_faces_belong_to_the_box_in_any_precision(dtype):
    box = Box([0.1, -0.3], [0.7, 0.9])
    corners = torch.tensor([[0.1, -0.3], [0.7, 0.9], [0.1, 0.9]], dtype=dtype)
    assert box.contains(corners).all()
    beyond = torch.nextafter(corners[:1], torch.tensor(-1.0, dtype=dtype))
    assert not box.contains(beyond).any()
    assert not box.contains(torch.tensor([[0.3, NAN], [INF, 0.0]])).any()


def test_random_actions_fill_the_box():
    model = Sail()
    drawn = random_actions(model, (20_000,)), simulate(model, RandomPolicy(model.actions), 5_000, seed=0)
    for actions in (drawn[0], drawn[1].actions[:, 0]):
        assert model.actions.contains(actions).all()
        for axis, (low, high) in enumerate([(-1.0, 1.0), (0.0, 3.0)]):
            sd = (high - low) / 12**0.5
            assert_mean(actions[:, axis], (low + high) / 2, "uniform", sd=sd)
            squares = (actions[:, axis] - (low + high) / 2) ** 2
            assert_mean(squares, sd**2, "uniform²")


def test_a_distribution_keeps_its_density_in_other_axes():
    means = torch.tensor([[0.0], [10.0], [20.0]]).expand(3, 2)
    base = dist.Normal(means, torch.tensor([1.0, 2.0])).to_event(1)
    reshaped = Reshaped(base, (3, 1, 1))
    value = torch.randn(3, 1, 1, 2)
    torch.testing.assert_close(reshaped.log_prob(value), base.log_prob(value[:, 0, 0])[:, None, None])
    drawn = reshaped.sample((5,))
    assert drawn.shape == (5, 3, 1, 1, 2)
    assert ((drawn[:, :, 0, 0] - means).abs() < 9).all()  # 4.5 standard deviations


ONE = torch.tensor([[0.5, 1.0]])
DECISIONS = [
    (torch.tensor([[0.5, NAN]]), r"policy: expected within Box.*, got \[0.5, nan\] at episode 0"),
    (torch.tensor([[-1.5, 1.0]]), r"policy: expected within Box.*, got \[-1.5, 1.0\] at episode 0"),
    (torch.tensor([[0, 1]]), r"policy: expected real actions of shape \[1, 2\], got torch.int64"),
    (torch.tensor([0]), r"policy: expected real actions of shape \[1, 2\], got torch.int64 of shape \[1\]"),
    (torch.tensor([0.5]), r"policy: expected real actions of shape \[1, 2\], got torch.float32"),
    (ONE.expand(2, 2), r"policy: expected real actions of shape \[1, 2\], got .* of shape \[2, 2\]"),
    ([[0.5, 1.0]], r"policy: expected actions \[B, 2\], or a distribution over them"),
    (
        dist.Normal(ONE, 0.1),
        r"batch shape \[1\] and event shape \[2\], got .* \[1, 2\] and event shape \[\]",
    ),
    (dist.Categorical(torch.ones(1, 2)), r"policy: expected batch shape \[1\] and event shape \[2\]"),
    (dist.Delta(torch.tensor([[9.0, 1.0]]), event_dim=1), r"policy: expected within Box"),
]


@pytest.mark.parametrize(("decision", "message"), DECISIONS, ids=range(len(DECISIONS)))
def test_decisions_that_are_no_action_of_a_box_are_named(decision, message):
    with pytest.raises(ValueError, match=message):
        simulate(Sail(), lambda history: decision, 1, seed=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_programs_get_actions_in_their_own_precision(dtype):
    face = torch.tensor([-1.0, 3.0], dtype=dtype)
    for policy in (
        lambda history: face.expand(history.num_episodes, 2),
        lambda history: dist.Delta(face.expand(history.num_episodes, 2), event_dim=1),
    ):
        episodes = simulate(Sail(), policy, 3, seed=0)
        assert episodes.actions.dtype == episodes.states.dtype == episodes.rewards.dtype == torch.float32
        assert episodes.actions[:, 0].tolist() == [[-1.0, 3.0]] * 3


def test_who_asks_for_a_list_of_actions_is_told_what_to_do():
    model = Sail()
    for name in ("num_actions", "action_names"):
        with pytest.raises(UnsupportedModelError, match=r"continuous actions.*`model.actions`, the Box"):
            getattr(model, name)
    assert RandomPolicy(LightDark().num_actions) == RandomPolicy(LightDark().actions) == RandomPolicy(3)
    with pytest.raises(ValueError, match=r"policy: expected batch shape \[2\] and event shape \[2\]"):
        simulate(model, RandomPolicy(2), 2, seed=0)
    with pytest.raises(ValueError, match=r"policy: expected actions \[B\] or a Categorical"):
        simulate(Walk(), RandomPolicy(Box(0.0, 1.0)), 2, seed=0)


def test_actions_come_in_many_forms():
    model = Sail()
    for given in (
        [[1, 0], [0.5, 3]],
        np.array([[1, 0], [0.5, 3]]),
        torch.tensor([[1, 0], [0.5, 3]]).double(),
    ):
        found = as_actions("actions", given, model)
        assert found.dtype == torch.float32
        assert found.tolist() == [[1.0, 0.0], [0.5, 3.0]]
    with pytest.raises(ValueError, match="actions: expected 2 numbers on the last axis"):
        as_actions("actions", [1.0, 2.0, 3.0], model)
    with pytest.raises(ValueError, match="actions: expected an array of real numbers"):
        as_actions("actions", ["steer", "drive"], model)
    line = type("Line", (Sail,), {"actions": Box(0.0, 1.0)})()
    assert as_actions("action", 0.5, line).tolist() == [0.5]


def test_an_environment_refuses_what_is_outside_the_box():
    env = CPOMDPEnv(Sail(), seed=0)
    env.reset()
    for action in ([0.5, 4.0], [NAN, 1.0], [0.5], 0, "steer", [[0.5, 1.0]], None):
        with pytest.raises(ValueError, match="action: expected"):
            env.step(action)
    env.step([0.5, 1.0])
    env.step(np.array([-1.0, 3.0]))


class Indexing(Sail):
    """Its table is for indices."""

    def transition(self, state, action, context):
        return state + torch.tensor([1.0, 2.0])[action]


def test_a_program_that_looks_actions_up_is_named():
    with pytest.raises(ModelError, match="transition: raises for action 'middle' IndexError"):
        Indexing().check()
