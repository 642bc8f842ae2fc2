"""Critics: what is still to come; with policies that read histories, also which context it is, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from cpomdp_ppl.encoding import Encoding
from solvers.cids.batch import OWN
from solvers.cids.layers import log_softmax
from solvers.cids.priors import log_odds

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from solvers.cids.batch import Batch, Statistics

UNITS_RATE = 0.02
"""How far the units of the values move towards those of each new batch."""


class Critic(nn.Module):
    """Reads features of what is known and predicts payoffs to come.

    Values are kept in units of their own spread, which is followed as it changes; the values themselves do
    not change when their units do.
    """

    mean: Tensor
    scale: Tensor
    has_units: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.value = nn.Linear(size, 1)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("has_units", torch.tensor(False))

    def values(self, features: Tensor) -> Tensor:
        """Values `[…]` from features `[…, H]`."""
        value: Tensor = self.mean + self.scale * self.value(features).squeeze(-1)
        return value

    @torch.no_grad()
    def rescale(self, targets: Tensor, statistics: Statistics = OWN) -> None:
        """Move the units towards mean and spread of new targets, and keep all values as they are.

        The first targets that have any spread set the units; later ones move them a little.
        """
        mean, scale = self.mean.clone(), self.scale.clone()
        weight = UNITS_RATE if self.has_units else 1.0
        spread, centre = (moment.to(scale) for moment in statistics.spread(targets))
        self.mean.lerp_(centre, weight)
        if spread > 1e-6 * (1 + self.mean.abs()):
            self.scale.lerp_(spread, weight)
            self.has_units.fill_(True)
        self.value.weight.mul_(scale / self.scale)
        self.value.bias.mul_(scale).add_(mean - self.mean).div_(self.scale)


class HistoryCritic(Critic):
    """A critic that reads features of the history, and also predicts the context and the state."""

    def __init__(self, size: int, num_contexts: int, num_states: int) -> None:
        super().__init__(size)
        self.context = nn.Linear(size, num_contexts)
        self.state = nn.Linear(size, num_states)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values `[B, T]`, `log P(c|h_t)` `[B, T, C]` and states `[B, T, D]` from features `[B, T, H]`."""
        layers = self.value, self.context, self.state
        weight, bias = torch.cat([f.weight for f in layers]), torch.cat([f.bias for f in layers])
        # One product for all, with time first, as a recurrent network lays out its memory.
        outputs = linear(features.transpose(0, 1), weight, bias).transpose(0, 1)
        value, context, state = outputs.split([f.out_features for f in layers], -1)
        return self.mean + self.scale * value.squeeze(-1), log_softmax(context), state


class Trunk(nn.Module):
    """A network that reads the history for the critic, for policies that do not let it read theirs."""

    def __init__(self, model: CPOMDP, hidden: int, amortised: bool) -> None:
        super().__init__()
        self.encoding = Encoding(model)
        self.amortised = amortised
        size = self.encoding.size + (model.num_contexts if amortised else 0)
        self.lstm = nn.LSTM(size, hidden, batch_first=True)

    def forward(self, batch: Batch) -> Tensor:
        """Features `[B, T, H]` of the history at times 0 … T - 1."""
        percepts = self.encoding.sequence(batch.episodes)
        if self.amortised:
            believed = log_odds(batch.prior, percepts.dtype)[:, None].expand(-1, percepts.shape[1], -1)
            percepts = torch.cat([percepts, believed], -1)
        features: Tensor = self.lstm(percepts)[0]
        return features
