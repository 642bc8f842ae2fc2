"""What a policy is to maximise: a payoff for every step of an episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from cpomdp_ppl.errors import invalid, require
from solvers.cids.batch import PRIOR_SHARE

if TYPE_CHECKING:
    from solvers.cids.batch import Batch


class Objective(Protocol):
    """A payoff for every step; its expected sum over an episode is what is maximised."""

    def payoffs(self, batch: Batch, log_probs: Tensor, temperature: float) -> Tensor:
        """What each step pays, float64 `[B, T]`.

        Several processes may each have some episodes of a batch. A mean over all episodes is therefore
        `batch.mean(values)`, not `values.mean()`.

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
    mixed: float = PRIOR_SHARE

    def __post_init__(self) -> None:
        require(0 < self.mixed < 1, "mixed", self.mixed, "between 0 and 1")

    def payoffs(self, batch: Batch, log_probs: Tensor, temperature: float) -> Tensor:
        """`γ^t r_t + τ [log Q(c|h_{t+1}) − log Q(c|h_t)]`."""
        return batch.rewards(self.belief_rewards) + temperature * self.information(batch)

    def information(self, batch: Batch) -> Tensor:
        """Information of each step about the true context, in nats, `[B, T]`."""
        return batch.log_true(self.mixed).diff(dim=1)


@dataclass(frozen=True)
class Variational:
    """Lemma 2: `−τ KL(P_θ ‖ Q*) = E[R − τ log P_θ(y)]`, up to a constant.

    This is `E[R] + τ H(Y)`, and `H(Y) = I(C; Y) + H(Y|C)`: it pays for noise in sensors and actions as well
    as for information. Of densities, these are differential entropies: other units of what is seen, or done
    over a box, add a constant to every step that has them, which matters where episodes may end.

    Args:
        belief_rewards: Whether to use the rewards that the filter expects in place of those that were drawn.
    """

    belief_rewards: bool = False

    def payoffs(self, batch: Batch, log_probs: Tensor, temperature: float) -> Tensor:
        """`γ^t r_t − τ [log π(a_t|h_t) + log p(o_{t+1}|h_t, a_t)]`."""
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
