from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch

from cpomdp_ppl import History, Percept, RandomPolicy, simulate
from cpomdp_ppl.encoding import SPREAD, Encoding
from cpomdp_ppl.rollout import blind
from cpomdp_ppl.signature import signature
from tests.programs import Dice, Reef, Sail


def test_inputs_are_what_they_should_be():
    model = Dice()
    encoding = Encoding(model)
    episodes = simulate(model, RandomPolicy(3), 300, seed=0)
    inputs = encoding.sequence(episodes)
    # 3 actions and none yet, time; a flag and 6 classes; a flag and 2 x 4 classes; a flag and a number
    assert inputs.shape == (300, 4, 4 + 1 + 7 + 9 + 2)
    assert (inputs[:, 0, 0] == 1).all()  # no action yet
    assert torch.equal(inputs[:, 1:, 1:4].argmax(-1), episodes.actions[:, :-1])
    assert torch.equal(inputs[:, :, 4], (torch.arange(4) / 4).expand(300, 4))
    seen = episodes.observed["face"][:, :-1]
    assert torch.equal(inputs[:, 1:, 5].bool(), seen)
    assert torch.equal(inputs[:, 1:, 6:12].sum(-1).bool(), seen)  # a class only where one was seen
    assert torch.equal(inputs[:, 1:, 6:12].argmax(-1)[seen], episodes.observations["face"][:, :-1][seen])
    number = inputs[:, 1:, -1][seen]
    assert abs(number.mean()) < 0.9
    assert 2.1 < number.std() < 4.2
    unseen = ~episodes.observed["warm"][:, :-1]  # which is zero, and does not count for the units
    assert (inputs[:, 1:, -1][unseen] == 0).all()
    assert float(inputs[:, 1:, -1].abs().max()) < 15  # of numbers near 300


def test_inputs_of_continuous_actions_and_of_episodes_that_end():
    """By hand: no action yet, steer from -1 to 1, drive from 0 to 3, time, a flag and a number."""
    model = Sail()
    encoding = Encoding(model)
    episodes = simulate(model, RandomPolicy(model.actions), 200, seed=0)
    inputs = encoding.sequence(episodes)
    assert inputs.shape == (200, 4, 3 + 1 + 2)  # and nothing of the end
    assert (inputs[:, 0, :3] == torch.tensor([1.0, 0.0, 0.0])).all()
    before, alive = inputs[:, 1:, :3], episodes.alive[:, 1:]
    assert (before[..., 0] == 0).all()
    torch.testing.assert_close(before[..., 1][alive], episodes.actions[:, :-1, 0][alive])
    torch.testing.assert_close(before[..., 2][alive], episodes.actions[:, :-1, 1][alive] / 1.5 - 1)
    assert torch.equal(inputs[:, 1:, 4].bool(), episodes.observed["z"][:, :-1])

    history = History((blind(signature(model), 200, episodes.device),))
    assert torch.equal(encoding.step(history.latest, 0), inputs[:, 0])
    latest = Percept(
        episodes.actions[:, 0],
        {site: values[:, 0] for site, values in episodes.observations.items()},
        {site: flags[:, 0] for site, flags in episodes.observed.items()},
    )
    assert torch.equal(encoding.step(latest, 1), inputs[:, 1])


def test_what_was_not_lived_is_not_calibrated_with():
    """Half of all episodes end at every step: zeros after that are no observations."""

    class Short(Reef):
        horizon = 3

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(300.0 + 0.0 * state, 20.0))

        def ends(self, state, action, context):
            return torch.full((), 0.5)

    encoding = Encoding(Short())
    assert abs(float(encoding.shift_0) - 300) < 4.5 * 20 / (256 * 1.75) ** 0.5
    assert abs(float(encoding.scale_0) * SPREAD - 20) < 4
