"""Section 3 of the paper as something to run: what regret is made of, and how large it is.

In episode k the agent has the posterior P_k over contexts and plays the policy π_k. Its regret, against an
agent that is told the true context c*, has three parts:

    V_{c*}(π*) − V_{c*}(π_k) = Δ_k + I1_k + I2_k,
    Δ_k  = max_π V̄_k(π) − V̄_k(π_k),        what it gives up, in its own eyes, to learn (or out of ineptitude),
    I1_k = V_{c*}(π*) − max_π V̄_k(π),        what not knowing the context costs,
    I2_k = V̄_k(π_k) − V_{c*}(π_k),           how far the true context is from the posterior's mean,

with `V̄_k(π) = Σ_c P_k(c) V_c(π)`. `decompose` tells them for episodes that were played; `exact_regret` for
Algorithm 1 on small models, in expectation and without any sampling; `Bound` is the theorem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.arrays import as_indices, as_tensor
from cpomdp_ppl.context import entropy
from cpomdp_ppl.errors import invalid, require, require_count, require_model, require_number
from cpomdp_ppl.inference.choice import follow_by
from cpomdp_ppl.prior import one_prior
from solvers import exact as exactly
from solvers.exact import MAX_HISTORIES
from solvers.exact.beliefs import DECIMALS as EXACT_DECIMALS
from solvers.exact.beliefs import MAX_BELIEFS
from solvers.exact.tables import distinct_rows, row_keys
from solvers.regret.bound import Bound, estimate_eta, reward_bound
from solvers.regret.values import (
    DECIMALS,
    EPISODES_AT_ONCE,
    Optima,
    PolicyValues,
    as_priors,
    context_known_values,
    in_parts,
    merged,
    policy_values,
    require_episodes,
    sampled,
    summarised,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.evaluation import PolicyLike
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.choice import Follow

NEGLIGIBLE = 1e-6
"""Information, in nats, that is too little to divide by."""


class TooManyPosteriorsError(ValueError):
    """The posteriors that Algorithm 1 may come to are too many to solve for each."""


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Regret and its parts in R runs of K episodes.

    Attributes:
        data: With dimensions `run` and `episode` (from 1), and the true context's name as a coordinate of
            runs: `regret`, `delta`, `i1`, `i2`, `information` (I_k in nats), `ratio` (Ψ_k = Δ_k / I_k, NaN
            where I_k is zero but for noise), each with its standard error, `regret_error` and so on; and
            `entropy`, of the posterior, in nats.
        optima: `V_c(π*_c)`, from which regret is reckoned.
        best: Whose value stands for `max_π V̄_k(π)`: `"exact"`, or `"policy"`.
    """

    data: xr.Dataset
    optima: Optima
    best: str

    @property
    def cumulative_regret(self) -> NDArray[np.float64]:
        """Regret summed up to every episode, `[R, K]`."""
        return np.asarray(self.data["regret"].cumsum("episode").values)

    @property
    def eta(self) -> float:
        """The largest η with `H(C | H_{k-1}) ≤ I_k / η` for all k, both taken as means over runs.

        Episodes whose mean entropy is within four standard errors of zero do not count, nor do those with a
        negligible one; see `estimate_eta`. The standard error is that of a single run's information, on
        average: runs may share it.
        """
        means = self.data[["entropy", "information", "information_error"]].mean("run")
        entropies, gained, errors = (means[name].values for name in means.data_vars)
        return estimate_eta(entropies, gained, information_errors=errors)

    def __str__(self) -> str:
        names = ["regret", "delta", "i1", "i2", "information", "entropy"]
        means = self.data[names].mean("run")
        rows = [f"{'episode':>8}" + "".join(f"{name:>13}" for name in names)]
        for k in self.data["episode"].values:
            here = means.sel(episode=k)
            rows.append(f"{k:>8}" + "".join(f"{float(here[name]):>13.4f}" for name in names))
        runs = self.data.sizes["run"]
        return "\n".join([f"means over {runs} runs (π*: {self.optima.source}, best: {self.best})", *rows])


def decompose(
    model: CPOMDP,
    policy: PolicyLike,
    posteriors: Tensor | NDArray[np.float64],
    contexts: Tensor | Sequence[int],
    *,
    best: PolicyLike | None = None,
    optima: Optima | Sequence[float] | Tensor | None = None,
    num_episodes: int = 200,
    likelihood: str | Backend | None = None,
    exact: bool = False,
    max_beliefs: int = MAX_BELIEFS,
    max_histories: int = MAX_HISTORIES,
    batch_size: int = EPISODES_AT_ONCE,
    progress: bool = False,
    seed: int | None = 0,
) -> Decomposition:
    """Regret and its parts, for every episode of every run.

    Values are those of the policy when it starts from the episode's posterior, by playing it from every
    posterior in every context, or exactly (`exact=True`). The maximum of `V̄_k` is exact for finite models;
    otherwise `best` stands for it, which then meets the same random numbers as the policy, so that their
    difference Δ_k is better known than either. If `best` is not quite the best, Δ_k is too small by as much
    (and may be negative), and I1_k too large.

    Standard errors are those of playing: they do not tell how runs differ. Runs with the same posterior share
    its errors, so the error of a mean over runs is more than independence would make it.

    Args:
        model: The CPOMDP.
        policy: What is played in every episode, started from its posterior.
        posteriors: Over contexts before each of K episodes, P_k, `[R, K, C]`: of posteriors `[R, K + 1, C]`
            that begin with the prior, all but the last.
        contexts: The true context of each run, `[R]`.
        best: A policy for `max_π V̄_k(π)`, which must take the prior into account: one that was learned with
            temperature 0. Left out, the model must be finite.
        optima: From `context_known_values`, which is called with `best` if left out; or `V_c(π*_c)` itself,
            `[C]`, taken to be without error.
        num_episodes: How many to play for each posterior and context, at least 2.
        likelihood: For information: a backend or its name. Left out, it is the most exact, which for
            continuous states takes its time; `"smc"` is several times as fast, and noisier.
        exact: Whether to value policies by going through all their histories, instead of playing; they may
            then not draw random numbers themselves (see `solvers.exact.evaluate`).
        max_beliefs: How many there may be at any one time, where the best is found by dynamic programming.
        max_histories: How many a policy may have to decide in at any one time, with `exact=True`.
        batch_size: How many episodes are played side by side.
        progress: Whether to show a progress bar.
        seed: Of everything random.

    Raises:
        ValueError: On arguments that make no sense, or if nothing stands for the maximum.
        TooManyBeliefsError: If the model is finite but too large, and there is no `best`.
        TooManyHistoriesError: If a policy meets too many, with `exact=True`.

    Example:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LineGrid
        >>> parts = decompose(LineGrid(), RandomPolicy(3), [[[0.5, 0.5], [0.9, 0.1]]], [0]).data
        >>> bool(abs(parts["regret"] - parts["delta"] - parts["i1"] - parts["i2"]).max() < 1e-9)
        True
    """
    require_model(model)
    C = model.num_contexts
    p = as_tensor("posteriors", posteriors).double().cpu()
    proper = p.dim() == 3 and min(p.shape) > 0 and p.shape[-1] == C
    require(proper, "posteriors", list(p.shape), f"shape [R, K, {C}]")
    R, K, _ = p.shape
    c = as_indices("contexts", contexts, model.context_names).cpu()
    require(c.shape == (R,), "contexts", list(c.shape), f"shape [{R}]")
    require(bool(((c >= 0) & (c < C)).all()), "contexts", c.tolist(), f"indices 0 to {C - 1}")
    E = require_episodes(num_episodes)
    if best is None and model.states is None:
        needed = f"a policy that stands for the best, as {type(model).__name__} is not finite"
        raise invalid("best", None, needed)
    if optima is None:
        optima = context_known_values(model, best, max_beliefs=max_beliefs, progress=progress, seed=seed)
    optima = _as_optima(optima, C)

    decimals = EXACT_DECIMALS if exact else DECIMALS
    p = as_priors("posteriors", p.reshape(-1, C), C)  # [R K, C]
    distinct, number = merged(p, decimals)
    if exact:
        by_histories: dict[str, Any] = {"exact": True, "max_histories": max_histories, "progress": progress}
        mine = policy_values(model, policy, distinct, **by_histories)
        if best is None:
            highest = _highest(model, distinct, max_beliefs, progress)
        else:
            highest = (distinct * policy_values(model, best, distinct, **by_histories).values).sum(-1)
        highest_error = delta_error = torch.zeros_like(highest)
    else:
        follow = follow_by(model, likelihood)
        mine, highest, highest_error, delta_error = _by_playing(
            model, policy, best, distinct, E, follow, max_beliefs, batch_size, seed, progress
        )

    true = c[:, None].expand(R, K).reshape(-1)  # [R K]
    values, errors = mine.values[number], mine.standard_errors[number]  # [R K, C]
    believed = distinct[number]
    expected = (believed * values).sum(-1)
    at = true[:, None]
    told, told_error = optima.values[true], optima.standard_errors[true]
    earned, earned_error = values.gather(1, at).squeeze(1), errors.gather(1, at).squeeze(1)
    information, information_error = mine.information[number], mine.information_errors[number]
    delta, error = highest[number] - expected, delta_error[number]
    known = information > NEGLIGIBLE + 2 * information_error
    ratio = torch.where(known, delta / information, torch.nan)
    off = believed - torch.nn.functional.one_hot(true, C)
    columns = {
        "regret": (told - earned, torch.hypot(told_error, earned_error)),
        "delta": (delta, error),
        "i1": (told - highest[number], torch.hypot(told_error, highest_error[number])),
        "i2": (expected - earned, ((off * errors) ** 2).sum(-1).sqrt()),
        "information": (information, information_error),
        # to first order, as if the two were independent
        "ratio": (ratio, torch.hypot(error, ratio * information_error) / information),
    }
    dims = ("run", "episode")
    variables: dict[str, Any] = {}
    for name, (value, value_error) in columns.items():
        variables[name] = (dims, value.reshape(R, K).numpy())
        value_error = torch.where(value.isnan(), torch.nan, value_error)
        variables[f"{name}_error"] = (dims, value_error.reshape(R, K).numpy())
    variables["entropy"] = (dims, entropy(p).reshape(R, K).numpy())
    names = np.array(model.context_names)[c.numpy()]
    coordinates = {"run": np.arange(R), "episode": np.arange(1, K + 1), "context": ("run", names)}
    data = xr.Dataset(variables, coordinates)
    return Decomposition(data, optima, "exact" if best is None else "policy")


def _as_optima(optima: Optima | Sequence[float] | Tensor, num_contexts: int) -> Optima:
    if not isinstance(optima, Optima):
        optima = Optima.known(as_tensor("optima", optima), "given")
    proper = optima.values.shape == (num_contexts,) and bool(optima.values.isfinite().all())
    require(proper, "optima", optima.values.tolist(), f"finite numbers, of shape [{num_contexts}]")
    return optima


def _highest(model: CPOMDP, priors: Tensor, max_beliefs: int, progress: bool) -> Tensor:
    """`max_π V̄(π)` by dynamic programming, `[N]`."""
    bar = tqdm(priors, disable=not progress, desc="best")
    plans = (exactly.plan(model, prior=p, max_beliefs=max_beliefs) for p in bar)
    return torch.tensor([plan.value for plan in plans], dtype=torch.float64)


def _by_playing(
    model: CPOMDP,
    policy: PolicyLike,
    best: PolicyLike | None,
    priors: Tensor,
    num_episodes: int,
    follow: Follow,
    max_beliefs: int,
    batch_size: int,
    seed: int | None,
    progress: bool,
) -> tuple[PolicyValues, Tensor, Tensor, Tensor]:
    """Values of a policy from every prior, the maximum of `V̄` `[N]`, and the errors of it and of Δ."""
    mine, highest, highest_error, delta_error = [], [], [], []
    for some, part_seed in in_parts(priors, num_episodes, batch_size, seed, progress):
        returns, gained = sampled(model, policy, some, num_episodes, follow, part_seed)
        mine.append(summarised(returns, gained, some))
        if best is None:
            highest.append(_highest(model, some, max_beliefs, progress=False))
            highest_error.append(torch.zeros(len(some), dtype=torch.float64))
            delta_error.append(_weighted_error(some, returns))
        else:
            of_best, _ = sampled(model, best, some, num_episodes, None, part_seed)  # the same world
            highest.append((some * of_best.mean(-1)).sum(-1))
            highest_error.append(_weighted_error(some, of_best))
            delta_error.append(_weighted_error(some, of_best - returns))
    values = PolicyValues(*(torch.cat(series) for series in zip(*mine, strict=True)))
    return values, torch.cat(highest), torch.cat(highest_error), torch.cat(delta_error)


def _weighted_error(priors: Tensor, numbers: Tensor) -> Tensor:
    """Standard error of `Σ_c P(c) mean_e x_ce` for numbers `[N, C, E]`, `[N]`."""
    return (priors**2 * numbers.var(-1) / numbers.shape[-1]).sum(-1).sqrt()


@dataclass(frozen=True, eq=False)
class ExactRegret:
    """Algorithm 1 on a small model: expectations over contexts and histories, by episode, without sampling.

    Attributes:
        temperature: τ.
        prior: Over contexts, `[C]`.
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
        own: dict[str, Any] = {
            "temperature": self.temperature,
            "num_contexts": len(self.prior),
            "horizon": self.horizon,
            "reward_bound": self.reward_bound,
        }
        if "eta" not in settings:
            own["eta"] = self.eta
        return Bound(**{**own, **settings})

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
        prior: Over contexts, `[C]`; the model's if left out.
        policy: Who plays instead, to see how far it is from what the theory asks for; it may not draw random
            numbers itself (see `solvers.exact.evaluate`).
        tolerance: Posteriors with less probability are not followed; how much that is, is reported.
        max_posteriors: How many posteriors one episode may begin with.
        max_beliefs: How many there may be at any one time of an episode, for dynamic programming.
        max_histories: How many the policy may have to decide in at any one time.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If the tolerance leaves no posterior to follow.
        TooManyPosteriorsError: If there are more than `max_posteriors`, with their number and the episode.
        TooManyBeliefsError: If there are more beliefs than `max_beliefs`.
        TooManyHistoriesError: If the policy meets more histories than `max_histories`.
        UnsupportedModelError: If the model is not finite.

    Example:
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
            for p, key in zip(posteriors, row_keys(posteriors, EXACT_DECIMALS).tolist(), strict=True):
                if key not in solved:
                    solved[key] = _solve(
                        model, torch.from_numpy(p), float(temperature), policy, max_beliefs, max_histories
                    )
                episodes.append(solved[key])
                bar.set_postfix_str(f"{len(solved)} posteriors solved", refresh=False)
            measured = _expectations(posteriors, weights, episodes, optima, float(temperature))
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
        temperature=float(temperature),
        prior=start,
        optima=torch.from_numpy(optima),
        num_posteriors=array.pop("posteriors").astype(np.int64),
        final_entropy=float(weights.sum(1) @ _entropies(posteriors)),
        horizon=model.horizon,
        reward_bound=reward_bound(model),
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
    return _Episode(
        best.value,
        returns.numpy(),
        float(information),
        endings.posteriors.numpy(),
        endings.probabilities.numpy(),
    )


def _expectations(
    posteriors: NDArray[np.float64],
    weights: NDArray[np.float64],
    episodes: list[_Episode],
    optima: NDArray[np.float64],
    temperature: float,
) -> dict[str, float]:
    """Of everything that is told of an episode, over posteriors and contexts with probabilities `[M, C]`."""
    highest = np.array([each.highest for each in episodes])  # [M]
    values = np.stack([each.returns for each in episodes])  # [M, C]
    information = np.array([each.information for each in episodes])
    expected = (posteriors * values).sum(1)
    delta = highest - expected
    mass = weights.sum(1)
    telling = information > NEGLIGIBLE
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
    first, number = distinct_rows(posteriors, EXACT_DECIMALS)
    total = np.zeros((len(first), posteriors.shape[1]))
    np.add.at(total, number, np.concatenate(reached))
    # What has no probability under its own prior was never come to; tolerance 0 keeps all that was.
    mass = total.sum(1)
    followed = (mass > 0) & (mass >= tolerance)
    return posteriors[first[followed]], total[followed], float(mass[~followed].sum())


def _entropies(posteriors: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(entropy(torch.from_numpy(posteriors)).numpy())
