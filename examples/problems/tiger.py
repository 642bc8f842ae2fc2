"""The tiger problem of the literature: listen, and open a door once it is worth the risk. A finite model.

cpomdp check examples/problems/tiger.py:Tiger
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl import CPOMDP, History

if TYPE_CHECKING:
    from collections.abc import Sequence

LISTEN, OPEN_LEFT, OPEN_RIGHT = range(3)


class Tiger(CPOMDP):
    """A tiger behind one of two doors, which one hears on the right side more often than not.

    The state is the tiger's door (0 left, 1 right). Listening costs 1, opening the tiger's door 100, and the
    other one pays 10; then there is a new tiger behind a random door, or the episode is over. The context is
    how well one hears. There is one, 85 %, as in Cassandra, Kaelbling and Littman (1994), unless more are
    given. Without an end, the optimum at first is worth 19.37 in the long run.

    Args:
        horizon: Number of steps T.
        accuracies: How often a growl is heard on the right side, in each context.
        ends_on_opening: Whether the episode is over when a door is opened.
    """

    actions = ("listen", "open left", "open right")
    states = 2
    discount = 0.95

    def __init__(
        self, horizon: int = 40, accuracies: Sequence[float] = (0.85,), *, ends_on_opening: bool = False
    ) -> None:
        super().__init__()
        self.horizon = horizon
        self.accuracies = tuple(accuracies)
        self.ends_on_opening = ends_on_opening
        self.contexts = tuple(f"hears {accuracy:.3g}" for accuracy in accuracies)

    @property
    def can_end(self) -> bool:
        """Whether episodes may end before the horizon."""
        return self.ends_on_opening

    def initial(self, context: Tensor) -> Tensor:
        """Behind either door."""
        return pyro.sample("door", dist.Bernoulli(0.5)).long()

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """The tiger stays until a door is opened."""
        return pyro.sample("door", dist.Bernoulli(torch.where(action == LISTEN, state, 0.5))).long()

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """The door that the growl seemed to come from."""
        accuracy = torch.tensor(self.accuracies, device=context.device)[context]
        says_right = torch.where(state == 1, accuracy, 1 - accuracy)
        pyro.sample("growl", dist.Bernoulli(says_right).mask(action == LISTEN))

    def ends(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """With a door open."""
        return action != LISTEN

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """Treasure or tiger; listening costs a little."""
        opened = torch.where(action - OPEN_LEFT == state, -100.0, 10.0)
        return torch.where(action == LISTEN, -1.0, opened)


def rule(history: History) -> Tensor:
    """Listen until the last growls say one door twice more often than the other, and open that other."""
    growl, heard = history.observations["growl"], history.observed["growl"]  # [B, t + 1]
    right = torch.where(heard, 2 * growl - 1, 0.0)
    more = torch.zeros(history.num_episodes)
    for t in range(history.time + 1):  # an opened door, like time 0, is heard as nothing
        more = torch.where(heard[:, t], more + right[:, t], 0.0)
    door = torch.where(more > 0, OPEN_LEFT, OPEN_RIGHT)
    return torch.where(more.abs() >= 2, door, LISTEN)
