"""The regret of Algorithm 1 on small models: expectations over all histories, without any sampling.

What regret is made of, and what its parts are called, is said in `solvers.regret.decomposition`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.context import entropy
from cpomdp_ppl.errors import invalid, require, require_count, require_model, require_number
from cpomdp_ppl.prior import one_prior
from solvers import exact as exactly
from solvers.exact import MAX_HISTORIES
from solvers.exact.beliefs import DECIMALS, MAX_BELIEFS
from solvers.exact.tables import distinct_rows, row_keys
from solvers.regret.bound import Bound, estimate_eta, reward_bound
from solvers.regret.decomposition import NEGLIGIBLE_INFORMATION
from solvers.regret.values import context_known_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.evaluation import PolicyLike


class TooManyPosteriorsError(ValueError):
    """The posteriors that Algorithm 1 can reach are too many to solve for each."""


@dataclass(frozen=True, eq=False)
class ExactRegret:
    """Algorithm 1 on a small model: expectations over contexts and histories, by episode, without sampling.

    Attributes:
        temperature: τ.
        prior: Prior over contexts, `[C]`.
        optima: `V_c(π*_c)`, `[C]`.
        delta: `E[Δ_k]`, `[K]`.
        i1: `E[I1_k]`, `[K]`.
        i2: `E[I2_k]`, `[K]`: 0, but for rounding.
        regret: `E[V_{c*}(π*) − V_{c*}(π_k)]`, `[K]`; the sum of the three.
        information: `I(C; Y^k | H_{k-1}) = E[I_k]` in nats, `[K]`.
        entropy: `H(C | H_{k-1})` in nats, `[K]`.
        final_entropy: `H(C | H_K)`, what is left to find out after the last episode.
        ratio: The largest Ψ_k = Δ_k / I_k over histories, `[K]`; NaN if no history has an I_k that is more
            than 1e-6 nats.
        excess: The largest Δ_k − τ I_k over histories, `[K]`: by Lemma 3.3 not above 0 if π_k maximises
            `V̄_k + τ I_k`. Unlike the ratio, it also tells of policies that give up reward for no information.
        num_posteriors: How many posteriors P_k there are, `[K]`.
        dropped: Probability of the histories that are no longer followed in episode k, `[K]`; expectations
            leave them out. They can add at most `2 T R_max` times this to the regret of the episode.
        horizon: T.
        reward_bound: R_max.
        discount: γ.
    """

    temperature: float
    prior: Tensor
    optima: Tensor
    delta: NDArray[np.float64]
    i1: NDArray[np.float64]
    i2: NDArray[np.float64]
    regret: NDArray[np.float64]
    information: NDArray[np.float64]
    entropy: NDArray[np.float64]
    final_entropy: float
    ratio: NDArray[np.float64]
    excess: NDArray[np.float64]
    num_posteriors: NDArray[np.int64]
    dropped: NDArray[np.float64]
    horizon: int
    reward_bound: float
    discount: float

    @property
    def largest_ratio(self) -> float:
        """The largest Ψ_k of all histories of all episodes; NaN if no episode tells anything."""
        known = self.ratio[~np.isnan(self.ratio)]
        return float(known.max()) if len(known) else float("nan")

    @property
    def cumulative_regret(self) -> NDArray[np.float64]:
        """Expected regret summed up to every episode, `[K]`."""
        return self.regret.cumsum()

    @property
    def eta(self) -> float:
        """The largest η with `H(C | H_{k-1}) ≤ I_k / η` for all k; see `estimate_eta`."""
        return estimate_eta(self.entropy, self.information)

    def bound(self, **settings: float) -> Bound:
        """The theorem's bound for this run.

        Args:
            settings: Any fields of `Bound` to have otherwise than they are here.
        """
        names = {"temperature", "horizon", "reward_bound", "eta", "discount"} - settings.keys()
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Bound(**{"num_contexts": len(self.prior), **fields, **settings})

    def __str__(self) -> str:
        names = ["regret", "delta", "i1", "information", "entropy", "ratio", "excess"]
        rows = [f"{'episode':>8}{'posteriors':>12}" + "".join(f"{name:>13}" for name in names)]
        for k, count in enumerate(self.num_posteriors):
            cells = "".join(f"{getattr(self, name)[k]:>13.5g}" for name in names)
            rows.append(f"{k + 1:>8}{count:>12}{cells}")
        return "\n".join([f"Algorithm 1, τ = {self.temperature:g}", *rows])


@dataclass(frozen=True, eq=False)
class _Episode:
    """What happens from one posterior: the best `V̄`, and the policy's returns, information and endings."""

    highest: float
    returns: NDArray[np.float64]  # [C]
    information: float
    posteriors: NDArray[np.float64]  # [M, C]
    probabilities: NDArray[np.float64]  # [M, C], of each ending in each context


def exact_regret(
    model: CPOMDP,
    num_episodes: int,
    *,
    temperature: float,
    prior: Sequence[float] | Tensor | None = None,
    policy: PolicyLike | None = None,
    tolerance: float = 1e-12,
    max_posteriors: int = 2000,
    max_beliefs: int = MAX_BELIEFS,
    max_histories: int = MAX_HISTORIES,
    progress: bool = False,
) -> ExactRegret:
    """Algorithm 1, followed exactly through all histories of K episodes.

    In every episode and from every posterior it can have, the agent plays the exact maximiser of
    `V̄_k + τ I_k`, or a given policy started from the posterior. What is followed is the distribution over
    posteriors in every context; equal posteriors are merged, and solved once.

    Args:
        model: A finite CPOMDP, small enough for `solvers.exact`.
        num_episodes: How many episodes K.
        temperature: τ.
        prior: Prior over contexts, `[C]`; the model's if left out.
        policy: A policy that plays instead, to see how far it is from what the theory asks for; it may not
            draw random numbers itself (see `solvers.exact.evaluate`).
        tolerance: Posteriors with less probability are not followed; how much that is, is reported.
        max_posteriors: How many posteriors one episode may begin with.
        max_beliefs: How many beliefs there may be at any one time of an episode, for dynamic programming.
        max_histories: In how many histories the policy may have to decide at any one time.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If the tolerance leaves no posterior to follow.
        TooManyPosteriorsError: If there are more than `max_posteriors`, with their number and the episode.
        TooManyBeliefsError: If there are more beliefs than `max_beliefs`.
        TooManyHistoriesError: If the policy meets more histories than `max_histories`.
        UnsupportedModelError: If the model is not finite.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> run = exact_regret(LineGrid(horizon=5), 3, temperature=1.0)
        >>> run.largest_ratio <= 1.0, bool((run.cumulative_regret <= run.bound()([1, 2, 3])).all())
        (True, True)
    """
    require_model(model)
    K = require_count("num_episodes", num_episodes)
    most = require_count("max_posteriors", max_posteriors)
    require_number("temperature", temperature, "a number, not negative")
    require_number("tolerance", tolerance, "a probability")
    require(tolerance < 1, "tolerance", tolerance, "a probability")
    start = one_prior(prior, model).detach().cpu()
    optima = context_known_values(model, source="exact", max_beliefs=max_beliefs).values.numpy()

    tau = float(temperature)
    solved: dict[int, _Episode] = {}
    posteriors, weights = start.numpy()[None], start.numpy()[None]  # P_k and P(P_k, C), [M, C]
    series: dict[str, list[float]] = {}
    dropped = 0.0
    with tqdm(total=K, disable=not progress, desc="episodes") as bar:
        for k in range(K):
            if len(posteriors) > most:
                raise TooManyPosteriorsError(
                    f"episode {k + 1} of {K} may begin with {len(posteriors)} posteriors, and max_posteriors "
                    f"= {most}: follow fewer episodes, allow more, or raise the tolerance ({tolerance:g})"
                )
            episodes = []
            for p, key in zip(posteriors, row_keys(posteriors, DECIMALS).tolist(), strict=True):
                if key not in solved:
                    solved[key] = _solve(model, torch.from_numpy(p), tau, policy, max_beliefs, max_histories)
                    bar.set_postfix_str(f"{len(solved)} posteriors solved", refresh=False)
                episodes.append(solved[key])
            measured = _expectations(posteriors, weights, episodes, optima, tau)
            for name, value in {**measured, "posteriors": len(posteriors), "dropped": dropped}.items():
                series.setdefault(name, []).append(value)
            posteriors, weights, lost = _afterwards(weights, episodes, tolerance)
            if not len(posteriors):
                needed = f"a smaller one: no posterior after episode {k + 1} of {K} has so much probability"
                raise invalid("tolerance", tolerance, needed)
            dropped += lost
            bar.update()
    array = {name: np.asarray(values, dtype=np.float64) for name, values in series.items()}
    return ExactRegret(
        temperature=tau,
        prior=start,
        optima=torch.from_numpy(optima),
        num_posteriors=array.pop("posteriors").astype(np.int64),
        final_entropy=float(weights.sum(1) @ _entropies(posteriors)),
        horizon=model.horizon,
        reward_bound=reward_bound(model),
        discount=model.discount,
        **array,
    )


def _solve(
    model: CPOMDP,
    prior: Tensor,
    temperature: float,
    policy: PolicyLike | None,
    max_beliefs: int,
    max_histories: int,
) -> _Episode:
    plan = best = exactly.plan(model, prior=prior, max_beliefs=max_beliefs)
    if policy is not None:
        found = exactly.evaluate(model, policy, prior=prior, max_histories=max_histories)
        returns, information, endings = found.returns, found.information, found.endings
    else:
        if temperature > 0:
            plan = exactly.plan(model, prior=prior, temperature=temperature, max_beliefs=max_beliefs)
        returns, information, endings = plan.returns, plan.information, plan.endings()
    ends = endings.posteriors.numpy(), endings.probabilities.numpy()
    return _Episode(best.value, returns.numpy(), float(information), *ends)


def _expectations(
    posteriors: NDArray[np.float64],
    weights: NDArray[np.float64],
    episodes: list[_Episode],
    optima: NDArray[np.float64],
    temperature: float,
) -> dict[str, float]:
    """Expectations over posteriors and contexts, which have the probabilities `weights` `[M, C]`."""
    highest = np.array([each.highest for each in episodes])  # [M]
    values = np.stack([each.returns for each in episodes])  # [M, C]
    information = np.array([each.information for each in episodes])
    expected = (posteriors * values).sum(1)
    delta = highest - expected
    mass = weights.sum(1)
    telling = information > NEGLIGIBLE_INFORMATION
    return {
        "delta": float(mass @ delta),
        "i1": float((weights * (optima - highest[:, None])).sum()),
        "i2": float((weights * (expected[:, None] - values)).sum()),
        "regret": float((weights * (optima - values)).sum()),
        "information": float(mass @ information),
        "entropy": float(mass @ _entropies(posteriors)),
        "ratio": float((delta[telling] / information[telling]).max()) if telling.any() else float("nan"),
        "excess": float((delta - temperature * information).max()),
    }


def _afterwards(
    weights: NDArray[np.float64], episodes: list[_Episode], tolerance: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """The posteriors after an episode, `P(posterior, C)` `[M, C]`, and the probability that was dropped."""
    posteriors = np.concatenate([each.posteriors for each in episodes])
    reached = [w * each.probabilities for w, each in zip(weights, episodes, strict=True)]
    first, number = distinct_rows(posteriors, DECIMALS)
    total = np.zeros((len(first), posteriors.shape[1]))
    np.add.at(total, number, np.concatenate(reached))
    # An ending without probability under its prior was never reached; tolerance 0 keeps all that were.
    mass = total.sum(1)
    followed = (mass > 0) & (mass >= tolerance)
    return posteriors[first[followed]], total[followed], float(mass[~followed].sum())


def _entropies(posteriors: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(entropy(torch.from_numpy(posteriors)).numpy())
