"""What PFT and QMDP have in common: seeds, memories, models of every kind, arguments that make no sense."""

from __future__ import annotations

import math

import pytest
import torch

from baselines.pft import PFT
from baselines.qmdp import QMDP
from cpomdp_ppl import simulate
from cpomdp_ppl.models import Beacons, LightDark, LineGrid
from cpomdp_ppl.policy import History, Percept
from tests.baselines.upfront import first_decision
from tests.programs import EyesOpen, Plates


def pft(model, **settings):
    return PFT(model, 20, 8, root_particles=50, temperature=0.5, **settings)


def qmdp(model, **settings):
    return QMDP(model, temperature=5.0, num_particles=50, outcomes=4, states=8, **settings)


BOTH = pytest.mark.parametrize("make", [pft, qmdp])


@BOTH
def test_a_seed_decides_everything_and_the_caller_notices_nothing(make):
    model = LightDark(horizon=5)
    once, again = (
        simulate(model, make(model, seed=1), 8, contexts="balanced", seed=5).actions for _ in range(2)
    )
    assert torch.equal(once, again)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first_decision(make(model, seed=None), torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    assert torch.equal(before, torch.get_rng_state())


@BOTH
def test_acting_leaves_the_memory_as_it_was(make):
    model = LightDark(horizon=6)
    policy = make(model)
    nothing = Percept(None, {"z": torch.zeros(4)}, {"z": torch.zeros(4).bool()})
    seen = Percept(torch.full((4,), 2), {"z": torch.full((4,), 1.5)}, {"z": torch.ones(4).bool()})
    memory, history = policy.start(model.prior().expand(4, -1)), History((nothing, seen))
    state = memory.belief.state.clone()
    once, after = policy.act(history, memory)
    again, same = policy.act(history, memory)
    assert torch.equal(once, again)
    assert torch.equal(after.log_posterior, same.log_posterior)
    assert torch.equal(memory.belief.state, state)
    assert bool((memory.log_posterior.exp() == 0.5).all())
    assert not bool((after.log_posterior.exp() == 0.5).any())


@BOTH
@pytest.mark.parametrize("program", [EyesOpen, Plates, Beacons])
def test_they_decide_in_models_of_every_kind(make, program):
    model = program()
    model.horizon = 3
    assert simulate(model, make(model), 6, seed=0).actions.shape == (6, 3)


@pytest.mark.parametrize("kind", [PFT, QMDP])
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("model", LineGrid),
        ("commitments", "left"),  # more of them with `plans`
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("num_particles", 0),
        ("chunk", 0),
        ("seed", 0.5),
    ],
)
def test_bad_arguments_are_named(kind, argument, value):
    with pytest.raises(ValueError, match=f"^{argument}: expected .*, got "):
        kind(**{"model": LineGrid(), argument: value})
