"""The theorem of the paper's Section 3: how much regret Algorithm 1 can have at most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cpomdp_ppl.arrays import as_tensor
from cpomdp_ppl.errors import require, require_count, require_model, require_number
from cpomdp_ppl.inference import ObservableOperator
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.rng import require_seed, seed_for
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.evaluation import PolicyLike
    from cpomdp_ppl.inference.finite import FiniteRecursion

ERRORS_ABOVE_ZERO = 4.0
"""Standard errors by which an entropy must exceed zero to tell anything about η."""

ZERO_ENTROPY = 1e-12
"""Entropies that are not larger, in nats, are zero but for rounding."""


def smallest_xi() -> float:
    """The smallest ξ that is known to serve `2 E[1 − P_k(c*)] ≤ ξ √H(C | H_{k-1})`, about 1.276.

    The paper calls ξ a universal constant and bounds `1 − P_k(c*)` for every history. That cannot be: a
    posterior may be sure, with entropy 0, and wrong. In expectation it holds, and that is all the theorem
    needs. Given a history, c* is distributed like the posterior p, so

        E[1 − p(c*)] = 1 − Σ_c p(c)² = 1 − exp(−H₂(p)) ≤ 1 − exp(−H(p)),

    because Rényi's entropy H₂ is at most Shannon's H. And `1 − exp(−x) ≤ m √x` with

        m = max_x (1 − exp(−x)) / √x,  attained where exp(x) = 1 + 2 x,

    for any number of contexts. By Jensen's inequality `E √H(p) ≤ √H(C | H_{k-1})`, so ξ = 2 m.

    Examples:
        >>> round(smallest_xi(), 4)
        1.2763
    """
    x = 2.0  # right of the root other than 0, where exp(x) − 1 − 2x is convex: Newton's steps stay there
    for _ in range(50):
        x -= (math.exp(x) - 1 - 2 * x) / (math.exp(x) - 2)
    return 2 * (1 - math.exp(-x)) / math.sqrt(x)


XI = smallest_xi()


@dataclass(frozen=True)
class Bound:
    """An upper bound on the expected Bayesian regret `E[BR(K, T)]` of Algorithm 1 after K episodes.

    It has three terms, one for each part of the regret (see `solvers.regret.decompose`):

        τ log|C|  +  ξ T R_max √(K log|C| / η)  +  2 T R_max √(2K).

    The last is that of the paper's lemma; its theorem has √(KT) there, which no proof supports. `log|C|`
    stands for the prior's entropy, which it is never less than.

    T R_max is there as the most that an episode can bring, or cost. So with a discount γ, T is
    `1 + γ + … + γ^{T-1}`; and where episodes may end before the horizon, the bound holds all the more.

    Args:
        temperature: τ.
        num_contexts: |C|.
        horizon: T.
        reward_bound: R_max, such that no reward is larger in absolute value; see `reward_bound`.
        eta: η, such that every episode reveals at least this fraction of what is yet unknown about the
            context, 0 to 1; see `estimate_eta`. With 0 there is no bound.
        xi: ξ; see `smallest_xi`.
        discount: γ, what a reward is worth a step later.

    Examples:
        >>> bound = Bound(temperature=1.0, num_contexts=2, horizon=10, reward_bound=1.0, eta=0.5)
        >>> bound([1, 100]).round(1)
        array([ 44. , 433.8])
    """

    temperature: float
    num_contexts: int
    horizon: int
    reward_bound: float
    eta: float
    xi: float = XI
    discount: float = 1.0

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, "a number, not negative")
        require_count("num_contexts", self.num_contexts)
        require_count("horizon", self.horizon)
        require_number("reward_bound", self.reward_bound, "a number, not negative")
        require_number("eta", self.eta, "a number from 0 to 1")
        require(self.eta <= 1, "eta", self.eta, "a number from 0 to 1")
        require_number("xi", self.xi, "a positive number", above=0)
        require_number("discount", self.discount, "a number above 0 and at most 1", above=0)
        require(self.discount <= 1, "discount", self.discount, "a number above 0 and at most 1")

    def terms(self, K: ArrayLike) -> NDArray[np.float64]:
        """The three terms after K episodes, `[3, …]` for K of shape `[…]`."""
        k = as_tensor("K", K).double().cpu().numpy()
        require(bool((k >= 0).all()), "K", K, "numbers of episodes, not negative")
        steps = sum(self.discount**t for t in range(self.horizon))
        most, log_c = steps * self.reward_bound, math.log(self.num_contexts)
        with np.errstate(divide="ignore", invalid="ignore"):
            unknown = np.nan_to_num(np.sqrt(k * log_c / self.eta), nan=0.0, posinf=np.inf)
        delta = np.full_like(k, self.temperature * log_c)
        i1 = np.where(unknown > 0, self.xi * most * unknown, 0.0) if most > 0 else np.zeros_like(k)
        return np.stack([delta, i1, 2 * most * np.sqrt(2 * k)])

    def __call__(self, K: ArrayLike) -> NDArray[np.float64]:
        """The bound after K episodes, of K's shape."""
        return np.asarray(self.terms(K).sum(0))


def estimate_eta(
    entropies: ArrayLike,
    information: ArrayLike,
    *,
    information_errors: ArrayLike | None = None,
    negligible: float = 1e-6,
) -> float:
    """The largest η with `H(C | H_{k-1}) ≤ I_k / η` for all k: the smallest `I_k / H(C | H_{k-1})`.

    Where hardly anything is left to find out, the quotient is one of two errors. So episode k counts only if
    its entropy is more than `negligible` times the largest entropy, and more than four standard errors of its
    information. What is left out can, in the second term of the bound, cost at most
    `ξ T R_max Σ_k √H(C | H_{k-1})` over those k. With `negligible=0` and no errors nothing is left out but
    entropies of 0, for which any η will do: if they are all 0, as with one context, or a prior that is sure,
    it is 1.

    Args:
        entropies: `H(C | H_{k-1})`, expectations over histories, in nats, `[K]`.
        information: `I_k`, likewise, `[K]`; below zero, which is an estimate's noise, it counts as zero.
        information_errors: Standard errors of the information, `[K]`, if it is an estimate.
        negligible: Entropies below this fraction of the largest are left out.

    Returns:
        A number from 0 to 1: no episode can reveal more than there is left to find out.

    Raises:
        ValueError: If there is something to find out, but no entropy that exceeds the noise.

    Examples:
        >>> round(estimate_eta([0.69, 0.4, 0.2], [0.29, 0.2, 0.05]), 6)
        0.25
    """
    H, gained = _series("entropies", entropies), _series("information", information)
    given = np.zeros_like(H) if information_errors is None else information_errors
    errors = _series("information_errors", given)
    require(len(H) > 0, "entropies", entropies, "one for each of at least one episode")
    for name, values in (("information", gained), ("information_errors", errors)):
        require(values.shape == H.shape, name, list(values.shape), f"shape {list(H.shape)}, as of entropies")
    require_number("negligible", negligible, "a number, not negative")
    if H.max() <= ZERO_ENTROPY:
        return 1.0
    counts = (negligible * H.max() < H) & (ERRORS_ABOVE_ZERO * errors < H)
    what = "at least one that is larger than the noise of the information"
    require(bool(counts.any()), "entropies", H.tolist(), what)
    return float(np.clip(gained[counts] / H[counts], 0.0, 1.0).min())


def _series(argument: str, values: ArrayLike) -> NDArray[np.float64]:
    series: NDArray[np.float64] = as_tensor(argument, values).double().cpu().numpy()
    proper = series.ndim == 1 and bool(np.isfinite(series).all())
    require(proper, argument, values, "finite numbers, one for each episode")
    return series


def reward_bound(
    model: CPOMDP, policies: Sequence[PolicyLike] = (), *, num_episodes: int = 1000, seed: int | None = 0
) -> float:
    """R_max, the largest absolute reward.

    Of a finite model it is read off the reward of every context, state and action, and next state if that
    pays. Of any other it is **an estimate from below**: the largest seen in episodes of random actions, and
    of the policies given, in all contexts equally often. If you know the true one, give that to `Bound`.

    Args:
        model: The CPOMDP.
        policies: Policies that play as well; they go where random actions may not.
        num_episodes: How many episodes each plays.
        seed: Seed of all random numbers; None takes fresh entropy.

    Examples:
        >>> from cpomdp_ppl.models import LightDark, LineGrid
        >>> reward_bound(LineGrid()), reward_bound(LightDark())
        (40.0, 1.0)
    """
    require_model(model)
    require_count("num_episodes", num_episodes)
    require_seed(seed)
    if model.states is not None and model.box is None:
        with inference_scope(model, 0):
            recursion: FiniteRecursion = ObservableOperator().recursion(model)
            rewards = recursion.rewards_on_arrival() if model.pays_on_arrival else recursion.rewards
        return float(rewards.abs().max())
    players: list[Any] = [RandomPolicy(model.actions), *policies]
    seen = [
        simulate(model, player, num_episodes, contexts="balanced", seed=seed_for(seed, k)).rewards
        for k, player in enumerate(players)
    ]
    return max(float(rewards.abs().max()) for rewards in seen if rewards is not None)
