"""What policies earn in every context, V_c(π), what they find out, I(C; Y), and the most there is to earn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.arrays import are_probabilities, as_tensor, how_many_fit
from cpomdp_ppl.errors import invalid, require, require_count, require_model
from cpomdp_ppl.evaluation import TimedPolicy
from cpomdp_ppl.inference.choice import follow_by
from cpomdp_ppl.policy import as_policy
from cpomdp_ppl.rng import fresh_seed, seed_for
from cpomdp_ppl.rollout import simulate
from solvers import exact as exactly
from solvers.cids.batch import PRIOR_SHARE
from solvers.exact import MAX_HISTORIES
from solvers.exact.beliefs import DECIMALS as EXACT_DECIMALS
from solvers.exact.beliefs import MAX_BELIEFS, TooManyBeliefsError
from solvers.exact.tables import distinct_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.evaluation import PolicyLike
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.choice import Follow

EPISODES_AT_ONCE = 20_000
"""How many episodes are played side by side, unless asked otherwise."""

DECIMALS = 6
"""Priors that agree so far are one, for policies that are played."""

NOISELESS = ("exact", "grid")
"""Names of backends whose posteriors are the true ones, but for rounding."""

WORLD, POLICY, FILTER = range(3)
"""What the random numbers of a batch of episodes are for."""


class PolicyValues(NamedTuple):
    """What a policy earns and finds out that starts from each of N priors.

    Attributes:
        values: `V_c(π)`, the expected return in every context, float64 `[N, C]`.
        standard_errors: Standard errors of the values, `[N, C]`.
        information: `I(C; Y)` in nats if the prior is right, `[N]`.
        information_errors: Standard errors of the information, `[N]`.
    """

    values: Tensor
    standard_errors: Tensor
    information: Tensor
    information_errors: Tensor


def policy_values(
    model: CPOMDP,
    policy: PolicyLike,
    priors: Tensor | Sequence[Sequence[float]],
    *,
    num_episodes: int = 200,
    likelihood: str | Backend | None = None,
    exact: bool = False,
    max_histories: int = MAX_HISTORIES,
    batch_size: int = EPISODES_AT_ONCE,
    progress: bool = False,
    seed: int | None = 0,
) -> PolicyValues:
    """What a policy earns in every context, and finds out, when it starts from each of several priors.

    A policy that is amortised over priors does different things under different ones: "the policy of
    episode k" is such a policy together with the posterior of that episode.

    Episodes are played, or all histories gone through (`exact=True`, for finite models with few of them).
    Information is `Σ_c P(c) E[g | c]`. With a noisy likelihood `g = log P̂(c|y) − log P(c)`, which makes it a
    lower bound in expectation. With the exact operators or a grid it is `g = KL(P(·|y) ‖ P)`, which then has
    the same mean and less variance. Priors that are equal to six decimals are played once.

    Args:
        model: The CPOMDP.
        policy: The policy that acts.
        priors: The priors from which it starts, `[N, C]`.
        num_episodes: How many episodes to play for each prior and context, at least 2.
        likelihood: How to compute context posteriors: a backend or its name. Left out, it is the most exact,
            which for continuous states takes its time; `"smc"` is several times as fast, and noisier.
        exact: Whether to go through all histories instead; see `solvers.exact.evaluate`, which refuses
            policies that draw random numbers themselves.
        max_histories: In how many histories it may then have to decide at any one time.
        batch_size: How many episodes are played side by side.
        progress: Whether to show a progress bar.
        seed: Seed of all random numbers; None takes fresh entropy.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LineGrid
        >>> values, errors, *_ = policy_values(LineGrid(), RandomPolicy(3), [[0.5, 0.5], [1.0, 0.0]])
        >>> values.shape
        torch.Size([2, 2])
    """
    require_model(model)
    p = as_priors("priors", priors, model.num_contexts)
    E = require_episodes(num_episodes)
    if exact:
        return _exact_values(model, policy, p, max_histories, progress)
    follow = follow_by(model, likelihood)
    distinct, number = merged(p, DECIMALS)
    parts = [
        summarised(*sampled(model, policy, some, E, follow, part_seed), some)
        for some, part_seed in in_parts(distinct, E, batch_size, seed, progress)
    ]
    return PolicyValues(*(torch.cat(series)[number] for series in zip(*parts, strict=True)))


def _exact_values(
    model: CPOMDP, policy: PolicyLike, priors: Tensor, max_histories: int, progress: bool
) -> PolicyValues:
    distinct, number = merged(priors, EXACT_DECIMALS)
    found = [
        exactly.evaluate(model, policy, prior=prior, max_histories=max_histories)
        for prior in tqdm(distinct, disable=not progress, desc="priors")
    ]
    values = torch.stack([torch.as_tensor(each.returns, dtype=torch.float64) for each in found])
    information = torch.tensor([float(each.information) for each in found], dtype=torch.float64)
    each = (values, torch.zeros_like(values), information, torch.zeros_like(information))
    return PolicyValues(*(series[number] for series in each))


def in_parts(
    priors: Tensor, num_episodes: int, batch_size: int, seed: int | None, progress: bool
) -> Iterator[tuple[Tensor, int]]:
    """Priors `[N, C]` in parts that can be played side by side, each with a seed of its own."""
    size = how_many_fit(require_count("batch_size", batch_size), num_episodes * priors.shape[1])
    root = fresh_seed(seed)
    for k, some in enumerate(tqdm(priors.split(size), disable=not progress, desc="priors")):
        yield some, seed_for(root, k)


def played(model: CPOMDP, policy: PolicyLike, believed: Tensor, contexts: Tensor, seed: int) -> Episodes:
    """Episodes in contexts `[B]` of a policy that starts from the priors `believed [B, C]`.

    With the same seed and contexts, any two policies meet the same world, as far as programs draw alike.
    """
    timed = TimedPolicy(as_policy(policy), seed_for(seed, POLICY))
    world = seed_for(seed, WORLD)
    return simulate(model, timed, len(contexts), contexts=contexts, prior=believed, seed=world)


def double_returns(episodes: Episodes) -> Tensor:
    """Returns of episodes, float64 `[B]`."""
    assert episodes.returns is not None
    return episodes.returns.double().cpu()


def sampled(
    model: CPOMDP, policy: PolicyLike, priors: Tensor, num_episodes: int, follow: Follow | None, seed: int
) -> tuple[Tensor, Tensor | None]:
    """Play E episodes of a policy from every prior `[N, C]` in every context.

    What two policies earn here in the same place may be compared: contexts and the world's random numbers are
    the same for both.

    Returns:
        Returns `[N, C, E]`, and what the episodes revealed about the context in nats, likewise, or None if
        there is nothing to compute posteriors by.
    """
    N, C = priors.shape
    shape = (N, C, num_episodes)
    believed = priors[:, None, None].expand(*shape, C).reshape(-1, C)  # [B, C], B = N C E
    contexts = torch.arange(C)[None, :, None].expand(shape).reshape(-1)
    episodes = played(model, policy, believed, contexts, seed)
    returns = double_returns(episodes).reshape(shape)
    if follow is None:
        return returns, None
    # A context that the prior excludes has no weight, but its episodes may be impossible under the prior.
    true = believed.gather(1, contexts[:, None])  # [B, 1]
    before = torch.where(true > 0, believed, 1 / C)
    filtering, backend = follow(model, episodes, prior=before, seed=seed_for(seed, FILTER))
    after = filtering.log_posterior(before)[:, -1].cpu()  # [B, C]
    gained = _kl(after, before) if backend.name in NOISELESS else _log_ratio(after, before, contexts)
    return returns, gained.reshape(shape)


def _kl(log_posterior: Tensor, prior: Tensor) -> Tensor:
    """`KL(P(·|y) ‖ P)`, `[B]`."""
    possible = log_posterior > -torch.inf
    ratio = torch.where(possible, log_posterior - prior.log(), 0.0)
    return (log_posterior.exp() * ratio).sum(-1)


def _log_ratio(log_posterior: Tensor, prior: Tensor, contexts: Tensor) -> Tensor:
    """`log Q(c|y) − log P(c)` of the true context, `[B]`.

    Q is the posterior, with some of the prior mixed in where a noisy filter holds a context impossible that
    was not so before. With any such Q the mean is a lower bound on the information, and with this one finite.
    """
    posterior = log_posterior.exp()
    lost = ((posterior == 0) & (prior > 0)).any(-1, keepdim=True)
    q = torch.where(lost, (1 - PRIOR_SHARE) * posterior + PRIOR_SHARE * prior, posterior)
    ratio = q.gather(1, contexts[:, None]) / prior.gather(1, contexts[:, None])
    return ratio.squeeze(1).log()


def summarised(returns: Tensor, gained: Tensor | None, priors: Tensor) -> PolicyValues:
    """Means and standard errors of what was played from priors `[N, C]`, of numbers `[N, C, E]`."""
    assert gained is not None
    E = returns.shape[-1]
    return PolicyValues(
        returns.mean(-1),
        returns.std(-1) / E**0.5,
        (priors * gained.mean(-1)).sum(-1),
        (priors**2 * gained.var(-1) / E).sum(-1).sqrt(),
    )


def merged(priors: Tensor, decimals: int) -> tuple[Tensor, Tensor]:
    """Those of priors `[N, C]` that differ, `[U, C]`, and which of them each is, `[N]`."""
    first, number = distinct_rows(priors.numpy(), decimals)
    return priors[torch.from_numpy(first)], torch.from_numpy(number)


def as_priors(argument: str, priors: Any, num_contexts: int) -> Tensor:
    """Check distributions over contexts, `[N, C]`; float64."""
    p = as_tensor(argument, priors).double().cpu()
    proper = p.dim() == 2 and p.shape[0] > 0 and p.shape[1] == num_contexts
    require(proper, argument, list(p.shape), f"shape [N, {num_contexts}]")
    if not are_probabilities(p):
        raise invalid(argument, p.tolist(), "non-negative probabilities that sum to 1 over the last axis")
    return p / p.sum(-1, keepdim=True)


def require_episodes(num_episodes: Any) -> int:
    """Raise unless there are enough episodes to tell a standard error."""
    E = require_count("num_episodes", num_episodes)
    require(E > 1, "num_episodes", num_episodes, "at least 2, to estimate the standard error")
    return E


Source = Literal["exact", "closed form", "policy"]


@dataclass(frozen=True, eq=False)
class Optima:
    """The most that an agent earns who knows the context.

    Attributes:
        values: `V_c(π*_c)`, float64 `[C]`.
        standard_errors: Standard errors of the values, `[C]`; zero unless a policy was played.
        source: `"exact"`, by dynamic programming; `"closed form"`, by the model's own
            `context_known_return`; `"policy"`, of a policy that knew the context; `"given"`, by you.
    """

    values: Tensor
    standard_errors: Tensor
    source: Source | Literal["given"]

    @staticmethod
    def known(values: Any, source: Source | Literal["given"]) -> Optima:
        """Values without error."""
        v = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
        return Optima(v, torch.zeros_like(v), source)


def context_known_values(
    model: CPOMDP,
    policy: PolicyLike | None = None,
    *,
    source: Source | None = None,
    num_episodes: int = 2000,
    max_beliefs: int = MAX_BELIEFS,
    batch_size: int = EPISODES_AT_ONCE,
    progress: bool = False,
    seed: int | None = 0,
) -> Optima:
    """`V_c(π*_c)`: the most that an agent earns in every context if it knows the context.

    Args:
        model: The CPOMDP.
        policy: A policy that does its best when its prior is sure of the context; its return is then at most
            the optimum.
        source: Where the values come from. Left out, it is dynamic programming if the model is finite and
            small enough, else the model's own `context_known_return`, else the policy.
        num_episodes: How many episodes the policy plays in each context, at least 2.
        max_beliefs: How many beliefs there may be at any one time for dynamic programming.
        batch_size: How many episodes are played side by side.
        progress: Whether to show a progress bar.
        seed: Seed of all random numbers; None takes fresh entropy.

    Raises:
        ValueError: If there is no such source.

    Examples:
        >>> from cpomdp_ppl.models import LightDark
        >>> optima = context_known_values(LightDark())
        >>> optima.source, optima.values.numpy().round(2)
        ('closed form', array([17.96, 17.96]))
    """
    require_model(model)
    sources = ("exact", "closed form", "policy")
    require(source is None or source in sources, "source", source, f"None or one of {list(sources)}")
    E = require_episodes(num_episodes)
    eye = torch.eye(model.num_contexts, dtype=torch.float64)
    if source == "exact" or (source is None and model.states is not None and model.box is None):
        try:
            best = [exactly.plan(model, prior=point, max_beliefs=max_beliefs).value for point in eye]
            return Optima.known(best, "exact")
        except TooManyBeliefsError:
            if source == "exact" or (policy is None and model.context_known_return() is None):
                raise
    name = type(model).__name__
    known = None if source == "policy" else model.context_known_return()
    if known is not None:
        return Optima.known(known, "closed form")
    if source == "closed form":
        raise invalid("source", source, f"another, as {name} has no context_known_return")
    if policy is None:
        needed = f"a policy, as {name} is not finite and has no context_known_return"
        raise invalid("policy", None, needed if source is None else 'a policy, for source="policy"')
    returns = []
    for some, part_seed in in_parts(eye, E, batch_size, seed, progress):
        believed = some.repeat_interleave(E, 0)
        returns.append(double_returns(played(model, policy, believed, believed.argmax(-1), part_seed)))
    earned = torch.cat(returns).reshape(-1, E)  # [C, E]
    return Optima(earned.mean(-1), earned.std(-1) / E**0.5, "policy")
