"""Adding an objective: pay for the probability of the true context, rather than for nats of information.

python -m examples.extending.objective
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.extending.model import Heater
from solvers import cids

if TYPE_CHECKING:
    from torch import Tensor

    from solvers.cids.batch import Batch


@dataclass(frozen=True)
class Identification:
    """`E[R] + τ E[P(c | y)]`, with τ in units of reward: what it is worth to name the context in the end.

    An objective is a payoff for every step, whose sum over an episode is maximised in the mean. Here the
    step's share is `P(c | h_{t+1}) − P(c | h_t)` of the true context c; these add up to `P(c | y) − P(c)`.
    """

    def payoffs(self, batch: Batch, log_probs: Tensor, temperature: float) -> Tensor:
        """`r_t + τ [P(c | h_{t+1}) − P(c | h_t)]`, float64 `[B, T]`."""
        posterior = batch.log_posterior.exp()  # [B, T + 1, C]
        true = batch.contexts[:, None, None].expand(-1, posterior.shape[1], 1)
        return batch.rewards(belief=True) + temperature * posterior.gather(2, true).squeeze(2).diff(dim=1)


def main() -> None:
    """Learn what to do in a room if it is worth 10 units of reward to find out how strong the heater is."""
    solution = cids.fit(
        Heater(),
        likelihood="ekf",  # exact here, as the model is linear and Gaussian
        objective=Identification(),
        temperature=10.0,
        iterations=100,
        seed=0,
    )
    print(solution.evaluate(1000))


if __name__ == "__main__":
    main()
