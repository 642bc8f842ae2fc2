"""What the regret of episodes that were played is made of.

In episode k the agent has the posterior P_k over contexts and plays the policy π_k. Its regret, against an
agent who knows the true context c*, has three parts:

    V_{c*}(π*) − V_{c*}(π_k) = Δ_k + I1_k + I2_k,
    Δ_k  = max_π V̄_k(π) − V̄_k(π_k),        what it gives up, in its own eyes, to learn (or out of ineptitude),
    I1_k = V_{c*}(π*) − max_π V̄_k(π),        what not knowing the context costs,
    I2_k = V̄_k(π_k) − V_{c*}(π_k),           how far the true context is from the posterior's mean,

with `V̄_k(π) = Σ_c P_k(c) V_c(π)`. `decompose` estimates them for episodes that were played;
`solvers.regret.exact` computes their expectations for small models; `Bound` is the theorem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.arrays import as_indices, as_tensor
from cpomdp_ppl.context import entropy
from cpomdp_ppl.errors import invalid, require, require_model
from cpomdp_ppl.inference.choice import follow_by
from solvers import exact as exactly
from solvers.exact import MAX_HISTORIES
from solvers.exact.beliefs import DECIMALS as EXACT_DECIMALS
from solvers.exact.beliefs import MAX_BELIEFS
from solvers.regret.bound import estimate_eta
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

NEGLIGIBLE_INFORMATION = 1e-6
"""Information, in nats, that is too little to divide by."""


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Regret and its parts in R runs of K episodes.

    Attributes:
        data: A dataset with dimensions `run` and `episode` (from 1), and the true context's name as a
            coordinate of runs. It has `regret`, `delta`, `i1`, `i2`, `information` (I_k in nats) and `ratio`
            (Ψ_k = Δ_k / I_k, NaN where I_k is zero but for noise), each with its standard error,
            `regret_error` and so on; and `entropy`, of the posterior, in nats.
        optima: `V_c(π*_c)`, from which regret is reckoned.
        best: What stands for `max_π V̄_k(π)`: `"exact"`, or `"policy"`.
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
        policy: The policy that is played in every episode, started from its posterior.
        posteriors: P_k, the posteriors over contexts before each of K episodes, `[R, K, C]`: of posteriors
            `[R, K + 1, C]` that begin with the prior, all but the last.
        contexts: The true context of each run, `[R]`.
        best: A policy for `max_π V̄_k(π)`, which must take the prior into account: one that was learned with
            temperature 0. Left out, the model must be finite.
        optima: `V_c(π*_c)`, `[C]`, taken to be without error; or what `context_known_values` found, which is
            called with `best` if this is left out.
        num_episodes: How many episodes to play for each posterior and context, at least 2.
        likelihood: The backend, or its name, by which information is measured. Left out, it is the most
            exact, which for continuous states takes its time; `"smc"` is several times as fast, and noisier.
        exact: Whether to value policies by going through all their histories, instead of playing; they may
            then not draw random numbers themselves (see `solvers.exact.evaluate`).
        max_beliefs: How many beliefs there may be at any one time, where the best is found by dynamic
            programming.
        max_histories: In how many histories a policy may have to decide at any one time, with `exact=True`.
        batch_size: How many episodes are played side by side.
        progress: Whether to show a progress bar.
        seed: Seed of all random numbers; None takes fresh entropy.

    Raises:
        ValueError: On arguments that make no sense, or if nothing stands for the maximum.
        TooManyBeliefsError: If the model is finite but too large, and there is no `best`.
        TooManyHistoriesError: If a policy meets too many histories, with `exact=True`.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LineGrid
        >>> parts = decompose(LineGrid(), RandomPolicy(3), [[[0.5, 0.5], [0.9, 0.1]]], [0]).data
        >>> bool(abs(parts["regret"] - parts["delta"] - parts["i1"] - parts["i2"]).max() < 1e-9)
        True
    """
    require_model(model)
    p, c = _checked(posteriors, contexts, model)
    E = require_episodes(num_episodes)
    if best is None and model.states is None:
        needed = f"a policy that stands for the best, as {type(model).__name__} is not finite"
        raise invalid("best", None, needed)
    if optima is None:
        optima = context_known_values(model, best, max_beliefs=max_beliefs, progress=progress, seed=seed)
    optima = _as_optima(optima, model.num_contexts)

    R, K, C = p.shape
    p = as_priors("posteriors", p.reshape(-1, C), C)  # [R K, C]
    distinct, number = merged(p, EXACT_DECIMALS if exact else DECIMALS)
    if exact:
        valued = _through_histories(model, policy, best, distinct, max_beliefs, max_histories, progress)
    else:
        parts = in_parts(distinct, E, batch_size, seed, progress)
        follow = follow_by(model, likelihood)
        played = [
            _by_playing(model, policy, best, some, E, follow, max_beliefs, each) for some, each in parts
        ]
        valued = _Valued(*(torch.cat(series) for series in zip(*played, strict=True)))
    valued = _Valued(*(series[number] for series in valued))  # of all posteriors again
    columns = _parts(valued, distinct[number], c.repeat_interleave(K), optima)

    columns["entropy"] = entropy(p)
    variables = {name: (("run", "episode"), x.reshape(R, K).numpy()) for name, x in columns.items()}
    names = np.array(model.context_names)[c.numpy()]
    coordinates = {"run": np.arange(R), "episode": np.arange(1, K + 1), "context": ("run", names)}
    data = xr.Dataset(variables, coordinates)
    return Decomposition(data, optima, "exact" if best is None else "policy")


def _checked(posteriors: Any, contexts: Any, model: CPOMDP) -> tuple[Tensor, Tensor]:
    """Posteriors, float64 `[R, K, C]`, and the true contexts, `[R]`."""
    C = model.num_contexts
    p = as_tensor("posteriors", posteriors).double().cpu()
    proper = p.dim() == 3 and min(p.shape) > 0 and p.shape[-1] == C
    require(proper, "posteriors", list(p.shape), f"shape [R, K, {C}]")
    c = as_indices("contexts", contexts, model.context_names).cpu()
    require(c.shape == p.shape[:1], "contexts", list(c.shape), f"shape [{len(p)}]")
    require(bool(((c >= 0) & (c < C)).all()), "contexts", c.tolist(), f"indices 0 to {C - 1}")
    return p, c


def _as_optima(optima: Optima | Sequence[float] | Tensor, num_contexts: int) -> Optima:
    if not isinstance(optima, Optima):
        optima = Optima.known(as_tensor("optima", optima), "given")
    proper = optima.values.shape == (num_contexts,) and bool(optima.values.isfinite().all())
    require(proper, "optima", optima.values.tolist(), f"finite numbers, of shape [{num_contexts}]")
    return optima


class _Valued(NamedTuple):
    """What a policy, and the best one, are worth from each of N priors; the first four as `PolicyValues`."""

    values: Tensor
    errors: Tensor
    information: Tensor
    information_error: Tensor
    highest: Tensor  # max_π V̄(π), [N]
    highest_error: Tensor  # its standard error, [N]
    delta_error: Tensor  # standard error of max_π V̄(π) less the policy's V̄, [N]


def _through_histories(
    model: CPOMDP,
    policy: PolicyLike,
    best: PolicyLike | None,
    priors: Tensor,
    max_beliefs: int,
    max_histories: int,
    progress: bool,
) -> _Valued:
    """Exact values, from priors `[N, C]`."""

    def valued(who: PolicyLike) -> PolicyValues:
        return policy_values(model, who, priors, exact=True, max_histories=max_histories, progress=progress)

    mine = valued(policy)
    if best is None:
        highest = _highest(model, priors, max_beliefs, progress)
    else:
        highest = (priors * valued(best).values).sum(-1)
    exactly_known = torch.zeros_like(highest)
    return _Valued(*mine, highest, exactly_known, exactly_known)


def _by_playing(
    model: CPOMDP,
    policy: PolicyLike,
    best: PolicyLike | None,
    priors: Tensor,
    num_episodes: int,
    follow: Follow,
    max_beliefs: int,
    seed: int,
) -> _Valued:
    """Values that were played, from priors `[N, C]`; `best` meets the same world as the policy."""
    returns, gained = sampled(model, policy, priors, num_episodes, follow, seed)  # [N, C, E]
    mine = summarised(returns, gained, priors)
    if best is None:
        highest = _highest(model, priors, max_beliefs, progress=False)
        return _Valued(*mine, highest, torch.zeros_like(highest), _weighted_error(priors, returns))
    of_best, _ = sampled(model, best, priors, num_episodes, None, seed)
    errors = _weighted_error(priors, of_best), _weighted_error(priors, of_best - returns)
    return _Valued(*mine, (priors * of_best.mean(-1)).sum(-1), *errors)


def _highest(model: CPOMDP, priors: Tensor, max_beliefs: int, progress: bool) -> Tensor:
    """`max_π V̄(π)` by dynamic programming, `[N]`."""
    bar = tqdm(priors, disable=not progress, desc="best")
    plans = (exactly.plan(model, prior=p, max_beliefs=max_beliefs) for p in bar)
    return torch.tensor([plan.value for plan in plans], dtype=torch.float64)


def _weighted_error(priors: Tensor, numbers: Tensor) -> Tensor:
    """Standard error of `Σ_c P(c) mean_e x_ce` for numbers `[N, C, E]`, `[N]`."""
    return (priors**2 * numbers.var(-1) / numbers.shape[-1]).sum(-1).sqrt()


def _parts(valued: _Valued, posteriors: Tensor, contexts: Tensor, optima: Optima) -> dict[str, Tensor]:
    """Regret, its parts and their errors, `[N]`, of posteriors P_k `[N, C]` and true contexts c* `[N]`."""
    values, errors, information, information_error, highest, highest_error, delta_error = valued
    at = contexts[:, None]
    known, known_error = optima.values[contexts], optima.standard_errors[contexts]
    earned, earned_error = values.gather(1, at).squeeze(1), errors.gather(1, at).squeeze(1)
    expected = (posteriors * values).sum(-1)  # V̄_k(π_k)
    delta = highest - expected
    telling = information > NEGLIGIBLE_INFORMATION + 2 * information_error
    ratio = torch.where(telling, delta / information, torch.nan)
    off = posteriors - torch.nn.functional.one_hot(contexts, posteriors.shape[1])
    parts = {
        "regret": (known - earned, torch.hypot(known_error, earned_error)),
        "delta": (delta, delta_error),
        "i1": (known - highest, torch.hypot(known_error, highest_error)),
        "i2": (expected - earned, ((off * errors) ** 2).sum(-1).sqrt()),
        "information": (information, information_error),
        # to first order, as if the two were independent
        "ratio": (ratio, torch.hypot(delta_error, ratio * information_error) / information),
    }
    columns = {}
    for name, (value, error) in parts.items():
        columns[name] = value
        columns[f"{name}_error"] = torch.where(value.isnan(), torch.nan, error)
    return columns
