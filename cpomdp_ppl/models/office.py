"""A meeting in one of eight rooms of an office, and nobody said which; a finite model."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl.model import CPOMDP

NORTH, EAST, SOUTH, WEST, ASK, LISTEN = range(6)
STEPS = ((-1, 0), (0, 1), (1, 0), (0, -1), (0, 0), (0, 0))  # of rows and columns, by action
PLAN = (
    "A...B##?##C...D",
    "##.####.####.##",
    "##.####.####.##",
    "##.....*.....##",
    "##.#########.##",
    "##.#########.##",
    "E...F#####G...H",
)
"""Walls `#`, the entrance `*`, the desk `?`, and the rooms A to H, each ten steps from the entrance."""


class Office(CPOMDP):
    """Somebody who comes to a meeting that is in one of eight rooms: ask at the desk, or listen on the way?

    The state is the cell of `PLAN`, numbered in reading order without the walls, and always seen. A step may
    fail, and leave one where one is; against a wall it always does. To `ask` has an answer at the desk that
    is mostly right, and elsewhere no better than a guess. To `listen` names a room, and the right one the
    more often the nearer it is. Each step in the room of the meeting earns 1, and in any other costs 1.

    Args:
        horizon: Number of steps T.
        slip: Probability that a step fails.
        accuracy: How much better than a guess the answer at the desk is, from 0 to 1.
        fading: What remains of a sound after each step of its way: to listen at distance d is better than
            a guess by `fading ** d`.
    """

    contexts = tuple("ABCDEFGH")
    actions = ("north", "east", "south", "west", "ask", "listen")
    next_cell: Tensor
    identity: Tensor
    room: Tensor
    distance: Tensor

    def __init__(
        self, horizon: int = 40, *, slip: float = 0.1, accuracy: float = 0.5, fading: float = 0.85
    ) -> None:
        super().__init__()
        self.horizon = horizon
        self.slip = slip
        self.accuracy = accuracy
        self.fading = fading
        cells = {(i, j): mark for i, row in enumerate(PLAN) for j, mark in enumerate(row) if mark != "#"}
        number = {place: n for n, place in enumerate(cells)}
        marks = "".join(cells.values())
        self.states = len(cells)
        self.entrance, self.desk = marks.index("*"), marks.index("?")
        following = [[number.get((i + di, j + dj), n) for di, dj in STEPS] for (i, j), n in number.items()]
        self.register_buffer("next_cell", torch.tensor(following))  # [N, A], if the step does not fail
        self.register_buffer("identity", torch.eye(len(cells)))
        self.register_buffer("room", torch.tensor(["ABCDEFGH".find(mark) for mark in marks]))  # [N], −1: none
        rooms = [marks.index(room) for room in "ABCDEFGH"]
        self.register_buffer("distance", self.steps_from(rooms))  # [N, C]

    def initial(self, context: Tensor) -> Tensor:
        """At the entrance."""
        return torch.tensor(self.entrance)

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """A step, unless it fails."""
        slipped = pyro.sample("slipped", dist.Bernoulli(self.slip))
        return torch.where(slipped == 1, state, self.next_cell[state, action])

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """Where one is; and a room, from whoever was asked or from what was heard."""
        pyro.sample("cell", dist.Categorical(self.identity[state]))
        asked = torch.where(state == self.desk, self.accuracy, 0.0)
        heard = self.fading ** self.distance[state, context]
        right = self.identity[context, :8]
        for site, better, sensor in (("answer", asked, ASK), ("sound", heard, LISTEN)):
            probabilities = better[..., None] * right + (1 - better[..., None]) / 8
            pyro.sample(site, dist.Categorical(probabilities).mask(action == sensor))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """+1 in the room of the meeting, −1 in another."""
        room = self.room[state]
        return torch.where(room < 0, 0.0, torch.where(room == context, 1.0, -1.0))

    def steps_from(self, cells: list[int]) -> Tensor:
        """How many steps it takes from any cell to each of some, if none fails, `[N, len(cells)]`."""
        N = len(self.next_cell)
        steps = torch.full((N, len(cells)), N)
        steps[cells, torch.arange(len(cells))] = 0
        for _ in range(N):  # a way is never longer than that
            steps = torch.minimum(steps, 1 + steps[self.next_cell].amin(1))
        return steps
