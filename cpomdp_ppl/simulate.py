"""Drawing episodes in batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.arrays import as_indices
from cpomdp_ppl.context import as_prior
from cpomdp_ppl.errors import ModelError, require, require_count, require_model
from cpomdp_ppl.handlers import Batched
from cpomdp_ppl.isolation import isolated
from cpomdp_ppl.rollout import rollout
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History, Policy


def simulate(
    model: CPOMDP,
    policy: Policy | Callable[[History], Decision],
    num_episodes: int,
    *,
    contexts: int | str | Sequence[int | str] | Tensor | None = None,
    prior: Sequence[float] | Tensor | None = None,
    seed: int | None = None,
) -> Episodes:
    """Draw episodes, all at once; the only loop is over time.

    Args:
        model: The CPOMDP.
        policy: Who acts: a `Policy`, or a function from a `History` to actions.
        num_episodes: How many episodes B.
        contexts: The true contexts, by index or name: one for all, one for each episode `[B]`, or
            `"balanced"` for each context equally often (as far as B allows). Left out, they are drawn from
            the prior.
        prior: Prior over contexts, `[C]`, or one for each episode `[B, C]`; the model's if left out.
        seed: The same seed gives the same episodes; left out, fresh entropy is taken. The caller's
            random number generators, param store and validation flags stay as they were, and handlers
            around this call see nothing of it.

    Returns:
        The episodes, with everything about them known.

    Raises:
        ValueError: On arguments that make no sense, or a policy that returns impossible actions.
        ModelError: If the model is incomplete, or produced something that is not finite.

    Example:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> simulate(model, RandomPolicy(model.num_actions), 1000, contexts="balanced", seed=0)
        Episodes(B=1000, T=20, sites=['z'], known=['contexts', 'states', 'rewards', 'returns'], device='cpu')
    """
    require_model(model)
    B = require_count("num_episodes", num_episodes)
    with (
        isolated(seed),
        torch.no_grad(),
        poutine.block(),
        model.running(),
        Batched((B,), model.max_plate_nesting),
    ):
        p = model.prior()
        if prior is not None:
            p = as_prior(prior, model.num_contexts, B).to(p)
        c = _contexts(contexts, p, model, B)
        episodes = rollout(model, policy, c, p)
    _require_finite(model, episodes)
    return episodes


def _contexts(contexts: Any, prior: Tensor, model: CPOMDP, B: int) -> Tensor:
    C = model.num_contexts
    if contexts is None:
        # By inverting the distribution function; `multinomial` is many times slower.
        # Divided by its last value, it is exactly 1 from the last possible context on.
        u = torch.rand(B, *[1] * (prior.dim() - 1), dtype=prior.dtype, device=model.device)
        total = prior.cumsum(-1)
        return torch.searchsorted(total / total[..., -1:], u, right=True).clamp(max=C - 1).reshape(B)
    if isinstance(contexts, str) and contexts == "balanced":
        return torch.arange(B, device=model.device) % C
    if isinstance(contexts, str):
        known = contexts in model.context_names
        require(known, "contexts", contexts, f'"balanced" or a name out of {list(model.context_names)}')
    c = as_indices("contexts", contexts, model.context_names).to(model.device)
    require(c.shape in ((), (B,)), "contexts", list(c.shape), f"a single index or shape [{B}]")
    low, high = (int(extreme) for extreme in c.aminmax())
    require(low >= 0 and high < C, "contexts", f"indices from {low} to {high}", f"indices 0 to {C - 1}")
    return c.expand(B)


def _require_finite(model: CPOMDP, episodes: Episodes) -> None:
    """A program that left the reals must not pass for data."""
    produced: list[tuple[str, str, Any, int]] = [("reward", "the reward", episodes.rewards, 0)]
    produced += [("transition", f"'{name}'", leaf, 0) for name, leaf in leaves(episodes.states)]
    for site, values in (episodes.initial_observations or {}).items():
        produced.append(("observation", f"site '{site}'", values[:, None], 0))
    produced += [("observation", f"site '{site}'", seen, 1) for site, seen in episodes.observations.items()]
    faults = []
    for method, what, values, first in produced:
        if values.is_floating_point() and not bool(torch.isfinite(values.sum())):
            if bool(torch.isfinite(values).all()):  # the sum itself overflowed
                continue
            b, t = (~torch.isfinite(values)).nonzero()[0, :2].tolist()
            context = model.context_names[int(episodes.contexts[b])]  # type: ignore[index]
            wrong = values[b, t][~torch.isfinite(values[b, t])][0]
            program = "initial" if method == "transition" and t == 0 else method
            faults.append(
                f"{program}: {what} is {wrong} at time {t + first} of episode {b} "
                f"in context '{context}'; it must be finite"
            )
    if faults:
        raise ModelError(type(model).__name__, faults)
