"""What a policy is to maximise: a payoff for every step of an episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference import Filtering


MIXED = 1e-3  # of the prior in a posterior; no more than this many nats of information are given away


@dataclass(frozen=True, eq=False)
class Batch:
    """Episodes played by a policy, and what a filter makes of them.

    Attributes:
        episodes: B episodes of T steps.
        filtering: Of them, under all contexts.
        prior: Over contexts, of each episode, `[B, C]`.
        log_posterior: `log P(c | h_t)`, float64 `[B, T + 1, C]`.
    """

    episodes: Episodes
    filtering: Filtering
    prior: Tensor
    log_posterior: Tensor

    @staticmethod
    def of(episodes: Episodes, filtering: Filtering, prior: Tensor) -> Batch:
        """Put together what belongs together; one prior `[C]` may stand for all."""
        prior = prior.expand(len(episodes), -1)
        return Batch(episodes, filtering, prior, filtering.log_posterior(prior))

    @property
    def contexts(self) -> Tensor:
        """The true contexts, `[B]`."""
        assert self.episodes.contexts is not None
        return self.episodes.contexts

    @property
    def states(self) -> Tensor:
        """Every number of the true states, `[B, T + 1, D]`."""
        B, steps = len(self.episodes), self.episodes.horizon + 1
        parts = [leaf.reshape(B, steps, -1).double() for _, leaf in leaves(self.episodes.states)]
        return torch.cat(parts, -1)

    def log_true(self, mixed: float = MIXED) -> Tensor:
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
        """Rewards `[B, T]`: as they were, or as the agent could expect them to be.

        The belief reward `Σ_c P(c|h_t) E[r_c(s_t, a_t) | h_t, c]` has the same mean given the history, and so
        gives the same gradient, but for the filter's error, with less variance.
        """
        if belief:
            return (self.log_posterior[:, :-1].exp() * self.filtering.expected_reward).sum(-1)
        assert self.episodes.rewards is not None
        return self.episodes.rewards.double()


class Objective(Protocol):
    """A payoff for every step; its expected sum over an episode is what is maximised."""

    def payoffs(self, batch: Batch, log_probs: Tensor, temperature: float) -> Tensor:
        """What each step pays, float64 `[B, T]`.

        What an episode pays depends on that episode alone: several processes each have some episodes of a
        batch. An objective for which it does not has a further parameter `whole`, a `Batchwide` that is given
        by its name, and that knows means over all episodes.

        Args:
            batch: The episodes.
            log_probs: `log π(a_t | h_t)` of the actions taken, `[B, T]`, without gradient.
            temperature: τ, in units of reward for a nat.
        """
        ...


@dataclass(frozen=True)
class Information:
    """Equation 5: `E[R] + τ I(C; Y)`, with the information as a reward for every step.

    The step's information is `log Q(c|h_{t+1}) − log Q(c|h_t)` of the true context, which sums to
    `log Q(c|y) − log Q(c|h_0)`, a lower bound on the information in the mean. Q is the filter's posterior
    with a little of the prior mixed in.

    Args:
        belief_rewards: Whether to use the rewards that the filter expects in place of those that were drawn.
        mixed: How much of the prior is mixed in; at most this much information is given away.
    """

    belief_rewards: bool = True
    mixed: float = MIXED

    def __post_init__(self) -> None:
        require(0 < self.mixed < 1, "mixed", self.mixed, "between 0 and 1")

    def payoffs(self, batch: Batch, log_probs: Tensor, temperature: float) -> Tensor:
        """`r_t + τ [log Q(c|h_{t+1}) − log Q(c|h_t)]`."""
        return batch.rewards(self.belief_rewards) + temperature * self.information(batch)

    def information(self, batch: Batch) -> Tensor:
        """What each step told about the true context, in nats, `[B, T]`."""
        return batch.log_true(self.mixed).diff(dim=1)


@dataclass(frozen=True)
class Variational:
    """Lemma 2: `−τ KL(P_θ ‖ Q*) = E[R − τ log P_θ(y)]`, up to a constant.

    This is `E[R] + τ H(Y)`, and `H(Y) = I(C; Y) + H(Y|C)`: it pays for noise in sensors and actions as well
    as for information.

    Args:
        belief_rewards: Whether to use the rewards that the filter expects in place of those that were drawn.
    """

    belief_rewards: bool = False

    def payoffs(self, batch: Batch, log_probs: Tensor, temperature: float) -> Tensor:
        """`r_t − τ [log π(a_t|h_t) + log p(o_{t+1}|h_t, a_t)]`."""
        # p(o_{t+1}|h_t, a_t) = Σ_c P(c|h_t) p(o_{t+1}|h_t, a_t, c)
        evidence = torch.logsumexp(batch.log_posterior[:, :-1] + batch.filtering.increments, -1)  # [B, T]
        return batch.rewards(self.belief_rewards) - temperature * (log_probs.double() + evidence)


OBJECTIVES: dict[str, type[Information | Variational]] = {
    "information": Information,
    "variational": Variational,
}


def as_objective(objective: str | Objective) -> Objective:
    """An objective as it is, or by its name."""
    if isinstance(objective, str):
        if objective not in OBJECTIVES:
            raise invalid("objective", objective, f"an Objective, or a name out of {sorted(OBJECTIVES)}")
        return OBJECTIVES[objective]()
    proper = callable(getattr(objective, "payoffs", None)) and not isinstance(objective, type)
    require(proper, "objective", objective, f"an Objective, or a name out of {sorted(OBJECTIVES)}")
    return objective
