"""Rules written by hand for the models whose goal is far: what a learner has to beat there.

Both follow context and position with a filter, and decide in at most 20 lines. Told the context, as
`evaluate(…, reveal_context=True)` does, the same rules go to the goal without finding out what it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baselines.simple import Tracking
from cpomdp_ppl.models import harbour, office

if TYPE_CHECKING:
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.online import OnlineFilter
    from cpomdp_ppl.policy import Decision, History


class HarbourRule(Tracking):
    """Sail while a move brings the boat nearer to where it should be, else look or listen.

    In every context it should be behind the passage, and then at the berth. How much nearer a move brings it
    is averaged over the contexts, so that moves that suit most of them need no more looking.

    Args:
        model: The harbour.
        outside: How much nearer a move must bring the boat before it has passed the breakwater.
        inside: How much nearer afterwards.
        caution: What rewards weigh against distance: running aground is in them.
        likelihood: The filter: a backend or its name; left out, the `default_backend` for the model.
        seed: Seed of the filter.
    """

    model: harbour.Harbour

    def __init__(
        self,
        model: harbour.Harbour,
        outside: float = 0.2,
        inside: float = 0.5,
        caution: float = 20.0,
        likelihood: str | Backend | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, likelihood, seed)
        self.outside = outside
        self.inside = inside
        self.caution = caution

    def decide(self, online: OnlineFilter, history: History, memory: None) -> tuple[Decision, None]:
        """By the mean position in each context, and the risk of running aground there."""
        model, posterior, position = self.model, online.posterior.float(), online.state_mean  # [B, C, …]
        contexts = torch.arange(model.num_contexts)
        passed = position[..., 0] > 6.0  # [B, C]
        behind = model.passages[contexts // 4] + torch.tensor([2.0, 0.0])
        target = torch.where(passed[..., None], model.berths[contexts % 4], behind)
        left = (position[:, :, None] + model.moves - target[:, :, None]).norm(dim=-1)  # [B, C, A]
        actions = [torch.full(posterior.shape[:1], a) for a in range(model.num_actions)]
        earned = torch.stack([online.expected_reward(a) for a in actions], -1)
        score = (posterior[..., None] * (self.caution * earned - left)).sum(1)  # [B, A]
        progress, move = (score[:, :8] - score[:, 8:9]).max(-1)
        inside = (posterior * passed).sum(1) > 0.5
        going = progress > torch.where(inside, self.inside, self.outside)
        return torch.where(going, move, torch.where(inside, harbour.LISTEN, harbour.LOOK)), None


class OfficeRule(Tracking):
    """Ask at the desk until sure; then take each step that most of the belief wants, else listen.

    Whoever has come to a room listens there, and goes on if it was the wrong one.

    Args:
        model: The office.
        desk: How likely a room must be before one leaves the desk.
        most: How much of the belief must want the same step.
        likelihood: The filter: a backend or its name; left out, the `default_backend` for the model.
        seed: Seed of the filter.
    """

    model: office.Office

    def __init__(
        self,
        model: office.Office,
        desk: float = 0.85,
        most: float = 0.7,
        likelihood: str | Backend | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, likelihood, seed)
        self.desk = desk
        self.most = most
        self.to_desk = model.steps_from([model.desk])[:, 0]  # [N]

    def decide(self, online: OnlineFilter, history: History, memory: None) -> tuple[Decision, None]:
        """By the cell, which is seen, and the posterior of the room."""
        model, posterior, time = self.model, online.posterior, history.time
        cell = history.latest.observations["cell"].long()  # [B]
        cell = cell if time else torch.full_like(cell, model.entrance)
        neighbours = model.next_cell[cell, :4]  # [B, 4]
        step = model.distance[neighbours].argmin(1)  # [B, C], towards each room
        wanted = torch.where(model.distance[cell] == 0, office.LISTEN, step)
        votes = posterior.new_zeros(len(cell), model.num_actions).scatter_add(1, wanted, posterior)
        share, best = votes.max(-1)
        walk = torch.where(share > self.most, best, office.LISTEN)
        asking = torch.where(self.to_desk[cell] == 0, office.ASK, self.to_desk[neighbours].argmin(-1))
        unsure = (posterior.amax(-1) < self.desk) & (self.to_desk[cell] <= 3)  # too late to go back elsewhere
        return torch.where(unsure, asking, walk), None
