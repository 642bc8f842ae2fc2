"""The tiger problem for a listener who does not know how well either ear hears; a finite model."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl.model import CPOMDP

LISTEN, OPEN_LEFT, OPEN_RIGHT = range(3)


class ContextualTiger(CPOMDP):
    """A tiger behind one of two doors, and two ears of which one may be dull.

    The state is the tiger's door (0 left, 1 right). To `listen` gives one report from each ear on which
    door the growl came from: right with probability `sharp`, or `dull` for a dull ear. Opening the tiger's
    door hurts, opening the other one pays, and either puts a new tiger behind a random door. The context
    (both ears sharp, the left dull, the right dull) never shows in rewards: only observations reveal it.

    Args:
        horizon: Number of steps T.
        sharp: Accuracy of a sharp ear.
        dull: Accuracy of a dull ear.
        treasure: Reward for opening the door without the tiger.
        mauling: What opening the tiger's door costs.
        listening: What listening costs.
    """

    contexts = ("both sharp", "left dull", "right dull")
    actions = ("listen", "open left", "open right")
    states = 2

    def __init__(
        self,
        horizon: int = 10,
        *,
        sharp: float = 0.85,
        dull: float = 0.55,
        treasure: float = 10.0,
        mauling: float = 100.0,
        listening: float = 1.0,
    ) -> None:
        super().__init__()
        self.horizon = horizon
        self.sharp = sharp
        self.dull = dull
        self.treasure = treasure
        self.mauling = mauling
        self.listening = listening

    def initial(self, context: Tensor) -> Tensor:
        """Behind either door."""
        return pyro.sample("door", dist.Bernoulli(0.5)).long()

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """The tiger stays until a door is opened."""
        return pyro.sample("door", dist.Bernoulli(torch.where(action == LISTEN, state, 0.5))).long()

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """From each ear, the door that the growl seemed to come from."""
        for ear, dull_context in (("left_ear", 1), ("right_ear", 2)):
            accuracy = torch.where(context == dull_context, self.dull, self.sharp)
            says_right = torch.where(state == 1, accuracy, 1 - accuracy)
            pyro.sample(ear, dist.Bernoulli(says_right).mask(action == LISTEN))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """Treasure or tiger; listening costs a little."""
        opened = torch.where(action - OPEN_LEFT == state, -self.mauling, self.treasure)
        return torch.where(action == LISTEN, -self.listening, opened)
