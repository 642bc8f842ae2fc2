"""A batch of filtered episodes, and means over all of its episodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpomdp_ppl.episodes import discounted
from cpomdp_ppl.state import leaves
from solvers.cids.policy import previous_actions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference import Filtering
    from solvers.cids.belief_policy import Inputs

PRIOR_SHARE = 1e-3
"""How much of the prior is mixed into a posterior: at most this many nats of information are given away."""


class Statistics:
    """Numbers about all episodes of a batch, where this process has all of them.

    Where several processes have a batch between them, `solvers.cids.group` takes the place of this class, and
    everything that is an average over the batch has to go through it.
    """

    def mean(self, values: Tensor) -> Tensor:
        """Mean of all numbers `[B, …]` of all episodes, a scalar."""
        return values.mean()

    def spread(self, values: Tensor, axes: int | None = None) -> tuple[Tensor, Tensor]:
        """Standard deviation (with divisor n) and mean of `[B, …]` over the first so many axes, or all."""
        if axes is None:
            return values.std(correction=0), values.mean()
        spread, mean = torch.std_mean(values, tuple(range(axes)), correction=0)
        return spread, mean

    def average_gradients(self, losses: Tensor, weights: Sequence[nn.Parameter], num_episodes: int) -> Tensor:
        """The losses of the batch, from means `[n]` over this process's episodes; so become the gradients."""
        return losses.detach()

    def own_seed(self, seed: int) -> int:
        """A seed for random numbers that belong to the episodes of this process, such as those of dropout."""
        return seed


OWN = Statistics()
"""Those of a process that has all episodes."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Episodes played by a policy, and what a filter makes of them.

    Attributes:
        episodes: B episodes of T steps.
        filtering: The filter's results for them under all contexts.
        prior: Each episode's prior over contexts, `[B, C]`.
        log_posterior: `log P(c | h_t)`, float64 `[B, T + 1, C]`.
        statistics: Means over all episodes; several processes each hold some episodes of the same batch.
        previous: The action before each decision, `[B, T, …]`; see `previous_actions`.
        since: From which step on the policy acts, `[B]`; what came before was somebody else's.
        told: Which episodes begin told the context, bool `[B]`.
        inputs: What the policy read before each decision, if it reads beliefs.
        lost: Episodes that the filter inside the policy could not follow to the end, bool `[B]`: they are
            measured, but teach nothing.
    """

    episodes: Episodes
    filtering: Filtering
    prior: Tensor
    log_posterior: Tensor
    statistics: Statistics
    previous: Tensor
    since: Tensor
    told: Tensor
    inputs: Inputs | None = None
    lost: Tensor | None = None

    @staticmethod
    def of(episodes: Episodes, filtering: Filtering, prior: Tensor, statistics: Statistics = OWN) -> Batch:
        """Episodes of the problem itself and their filtering; one prior `[C]` may stand for all."""
        prior = prior.expand(len(episodes), -1)
        since = torch.zeros(len(episodes), dtype=torch.long, device=prior.device)
        previous = previous_actions(episodes.actions)
        log_posterior = filtering.log_posterior(prior)
        return Batch(episodes, filtering, prior, log_posterior, statistics, previous, since, since.bool())

    @property
    def own(self) -> Tensor:
        """Which episodes are of the problem itself, from its beginning on, bool `[B]`."""
        return (self.since == 0) & ~self.told

    @cached_property
    def alive(self) -> Tensor:
        """Which steps count, bool `[B, T]`: those of the policy, before the end of their episode."""
        steps = torch.arange(self.episodes.horizon, device=self.prior.device)
        alive = (steps >= self.since[:, None]) & (steps < self.episodes.lengths[:, None])
        return alive if self.lost is None else alive & ~self.lost[:, None]

    @cached_property
    def share_alive(self) -> Tensor:
        """Which share of all steps of the batch count, a float64 scalar."""
        return self.mean(self.alive.double())

    def mean(self, values: Tensor) -> Tensor:
        """Mean of all numbers `[B, …]` over all episodes of the batch."""
        return self.statistics.mean(values)

    def spread(self, values: Tensor, axes: int | None = None) -> tuple[Tensor, Tensor]:
        """Standard deviation and mean over all episodes of the batch; see `Statistics.spread`."""
        return self.statistics.spread(values, axes)

    @property
    def contexts(self) -> Tensor:
        """The true contexts, `[B]`."""
        assert self.episodes.contexts is not None
        return self.episodes.contexts

    @property
    def states(self) -> Tensor:
        """The true states, with all their numbers on one axis, `[B, T + 1, D]`."""
        B, steps = len(self.episodes), self.episodes.horizon + 1
        parts = [leaf.reshape(B, steps, -1).double() for _, leaf in leaves(self.episodes.states)]
        return torch.cat(parts, -1)

    def log_true(self, mixed: float = PRIOR_SHARE) -> Tensor:
        """`log Q(c | h_t)` of the true context, `[B, T + 1]`.

        Q is the filter's posterior with a little of the prior mixed in, so that it is finite where a noisy
        filter holds the true context impossible. Less the prior's, its mean is a lower bound on the
        information, as that of any distribution is.
        """
        c = self.contexts[:, None, None].expand(-1, self.log_posterior.shape[1], 1)
        p = self.log_posterior.gather(2, c).squeeze(2).exp()
        return ((1 - mixed) * p + mixed * self.prior_true()[:, None]).log()

    def prior_true(self) -> Tensor:
        """`P(c)` of the true context, `[B]`."""
        return self.prior.gather(1, self.contexts[:, None]).squeeze(1)

    def rewards(self, belief: bool) -> Tensor:
        """What rewards are worth at the start, `γ^t r_t` `[B, T]`: as they were, or as was to be expected.

        The belief reward `Σ_c P(c|h_t) E[r_c(s_t, a_t) | h_t, c]` has the same mean given the history, and so
        gives the same gradient, but for the filter's error, with less variance.
        """
        if belief:
            rewards = (self.log_posterior[:, :-1].exp() * self.filtering.expected_reward).sum(-1)
        else:
            assert self.episodes.rewards is not None
            rewards = self.episodes.rewards.double()
        return discounted(rewards, self.episodes.discount)
