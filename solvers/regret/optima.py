"""The most that an agent earns who knows the context: V_c(π*_c)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from cpomdp_ppl.errors import invalid, require, require_model
from solvers import exact as exactly
from solvers.exact.beliefs import MAX_BELIEFS, TooManyBeliefsError
from solvers.regret.values import EPISODES_AT_ONCE, double_returns, in_parts, played, require_episodes

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.evaluation import PolicyLike

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
    if source == "exact" or (source is None and model.states is not None):
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
