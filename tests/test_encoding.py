from __future__ import annotations

import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.encoding import Encoding
from tests.programs import Dice


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
