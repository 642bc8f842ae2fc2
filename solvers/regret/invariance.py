"""Contexts that make no difference to what is best: Assumption 2.1, and leaving out what it allows."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from pyro.nn import PyroModule
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.arrays import as_array, as_indices
from cpomdp_ppl.errors import invalid, require, require_count, require_model, require_number
from cpomdp_ppl.experiments.fingerprint import describe_model
from cpomdp_ppl.model import CPOMDP
from cpomdp_ppl.policy import as_policy
from cpomdp_ppl.rng import fresh_seed, isolated, seed_for
from solvers import exact
from solvers.exact.beliefs import MAX_BELIEFS
from solvers.regret.values import EPISODES_AT_ONCE, double_returns, played, require_episodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpomdp_ppl.evaluation import PolicyLike
    from cpomdp_ppl.policy import Policy
    from cpomdp_ppl.state import State


class Restricted(CPOMDP):
    """A CPOMDP over some of another's contexts, whose programs it runs.

    It has a copy of the other, with the values that its parameters have now.

    Args:
        model: The other CPOMDP.
        kept: Which contexts to keep, by index in the other or by name, in the order they have here.
        prior: Prior over the kept contexts, `[K]`.

    Attributes:
        original: The copy of the other.
        origin: A description of the other, by which saved solutions of different models can be told apart.

    Examples:
        >>> from cpomdp_ppl.models import ContextualTiger
        >>> dull = Restricted(ContextualTiger(), ["left dull", "right dull"], [0.5, 0.5])
        >>> dull.check()
        >>> dull.context_names
        ('left dull', 'right dull')
    """

    original: CPOMDP
    index: Tensor

    def __init__(self, model: CPOMDP, kept: Sequence[int | str] | Tensor, prior: Sequence[float]) -> None:
        super().__init__()
        require_model(model)
        index = _kept(kept, model)
        self.contexts = tuple(model.context_names[c] for c in index.tolist())
        self.actions = model.actions
        self.horizon = model.horizon
        self.discount = model.discount
        self.states = model.states
        self.initial_observation = model.initial_observation
        self.max_plate_nesting = model.max_plate_nesting
        self.context_prior = list(prior)
        self.origin = json.dumps(describe_model(model), sort_keys=True)
        self.original = _copy(model)
        self.register_buffer("index", index.to(model.device))
        self.require_definition()

    def initial(self, context: Tensor) -> State:
        """The first state, as in the original."""
        return self.original.initial(self.index[context])

    def transition(self, state: Any, action: Tensor, context: Tensor) -> State:
        """The next state, as in the original."""
        return self.original.transition(state, action, self.index[context])

    def observation(self, state: Any, action: Any, context: Tensor) -> None:
        """What is observed, as in the original."""
        self.original.observation(state, action, self.index[context])

    def reward(self, state: Any, action: Tensor, context: Tensor, *arrival: Any) -> Tensor:
        """The reward, as in the original."""
        return self.original.reward(state, action, self.index[context], *arrival)

    def ends(self, state: Any, action: Tensor, context: Tensor) -> Tensor:
        """Whether the episode ends, as in the original."""
        return self.original.ends(state, action, self.index[context])

    @property
    def can_end(self) -> bool:
        """Whether episodes of the original may end before the horizon."""
        return self.original.can_end

    @property
    def pays_on_arrival(self) -> bool:
        """Whether rewards of the original depend on the next state."""
        return self.original.pays_on_arrival

    def context_known_return(self) -> Tensor | None:
        """The best returns in the contexts that were kept."""
        best = self.original.context_known_return()
        return None if best is None else best[self.index.to(best.device)]


def _kept(kept: Any, model: CPOMDP) -> Tensor:
    """Indices of contexts, `[K]`, each there once."""
    expected = f"different indices 0 to {model.num_contexts - 1}, or names out of {list(model.context_names)}"
    array = as_array("kept", kept)
    require(array.ndim == 1 and array.dtype.kind in "iuU", "kept", kept, expected)
    index = as_indices("kept", array, model.context_names)
    inside = bool(((index >= 0) & (index < model.num_contexts)).all())
    require(inside and len(index.unique()) == len(index), "kept", kept, expected)
    return index


def _copy(model: CPOMDP) -> CPOMDP:
    """A copy that may become part of another model, with what Pyro's param store knows about it."""
    with isolated(0), model.running():
        for module in model.modules():
            for name in getattr(module, "_pyro_params", ()):
                getattr(module, name)  # reading a parameter brings it up to date
        copy = deepcopy(model)
    for module in copy.modules():
        if isinstance(module, PyroModule):
            module._pyro_context.used = False  # the copy has not run, whatever the original has
    return copy


ROUNDING = 1e-9
"""Exact gaps that exceed ε by less are taken to equal it."""

ERRORS_ADDED = 2.0
"""Standard errors that are added to a gap before it is compared with ε."""


@dataclass(frozen=True, eq=False)
class Gaps:
    """What acting as is best in one context costs in another.

    Attributes:
        contexts: Names of the contexts.
        values: `V_{c_i}(π*_j)`, what the policy for context j earns in context i, float64 `[C, C]`.
        gaps: `V_{c_i}(π*_i) − V_{c_i}(π*_j)`, `[C, C]`; zero on the diagonal.
        standard_errors: Standard errors of the gaps, `[C, C]`; zero if they are exact.
        source: `"exact"`, by dynamic programming, or `"policy"`, of policies that were played.
    """

    contexts: tuple[str, ...]
    values: Tensor
    gaps: Tensor
    standard_errors: Tensor
    source: Literal["exact", "policy"]

    def invariant(self, epsilon: float) -> Tensor:
        """Which pairs of contexts are ε-policy invariant, bool `[C, C]`.

        Both gaps of a pair must be at most ε. Where they were estimated, gap plus two standard errors must
        be: an unsure pair counts as different.
        """
        require_number("epsilon", epsilon, "a number, not negative")
        below = self.gaps + ERRORS_ADDED * self.standard_errors <= epsilon + ROUNDING
        return below & below.T


def policy_gaps(
    model: CPOMDP,
    policy: PolicyLike | Sequence[PolicyLike] | None = None,
    *,
    num_episodes: int = 2000,
    max_beliefs: int = MAX_BELIEFS,
    batch_size: int = EPISODES_AT_ONCE,
    progress: bool = False,
    seed: int | None = 0,
) -> Gaps:
    """What acting as is best in context j costs in context i, for all pairs.

    `π*_j` is any policy that is best in context j. There may be several, which earn the same in context j but
    not elsewhere; dynamic programming always takes the same one, so that contexts that are copies of each
    other have gaps of 0.

    Args:
        model: The CPOMDP.
        policy: Left out, the model must be finite, and gaps are exact. Otherwise a policy that does its best
            when its prior is sure of the context, or one policy for each context, which are played; what they
            lack to the optimum is then in the gaps, which may even be negative.
        num_episodes: How many episodes each policy plays in each context, at least 2. All play the same ones:
            the same first states and noise, as far as programs draw alike.
        max_beliefs: How many beliefs there may be at any one time, if gaps are exact.
        batch_size: How many episodes are played side by side.
        progress: Whether to show a progress bar.
        seed: Seed of all random numbers; None takes fresh entropy.

    Raises:
        ValueError: If the model is not finite and there is no policy.
        TooManyBeliefsError: If it is finite, but has more beliefs than `max_beliefs`.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> policy_gaps(LineGrid()).gaps
        tensor([[ 0., 60.],
                [60.,  0.]], dtype=torch.float64)
    """
    require_model(model)
    C = model.num_contexts
    E = require_episodes(num_episodes)
    require_count("batch_size", batch_size)
    root = fresh_seed(seed)
    eye = torch.eye(C, dtype=torch.float64)
    if policy is None:
        if model.states is None:
            needed = f"one that takes point priors, or one for each of {C} contexts"
            raise invalid("policy", None, f"{needed}, as {type(model).__name__} is not finite")
        columns = [
            exact.plan(model, prior=point, max_beliefs=max_beliefs).returns
            for point in tqdm(eye, disable=not progress, desc="contexts")
        ]
        values = torch.stack(columns, 1)  # [C, C]: in context i, of the policy for j
        gaps = values.diagonal()[:, None] - values
        return Gaps(model.context_names, values, gaps, torch.zeros_like(gaps), "exact")

    shown = tqdm(_policies(policy, C), disable=not progress, desc="contexts")
    earned = [_returns(model, each, eye[j], E, batch_size, root) for j, each in enumerate(shown)]
    returns = torch.stack(earned, 1)  # [C, C, E]
    best = returns.diagonal(dim1=0, dim2=1).T[:, None]  # of the policy for the context, [C, 1, E]
    lost = best - returns
    return Gaps(model.context_names, returns.mean(-1), lost.mean(-1), lost.std(-1) / E**0.5, "policy")


def _policies(policy: Any, C: int) -> list[Policy]:
    if not isinstance(policy, list | tuple):
        return [as_policy(policy)] * C
    require(len(policy) == C, "policy", policy, f"a policy for each of {C} contexts")
    return [as_policy(each) for each in policy]


def _returns(
    model: CPOMDP, policy: Policy, prior: Tensor, num_episodes: int, batch_size: int, seed: int
) -> Tensor:
    """What a policy earns in every context that starts from one prior `[C]`, `[C, E]`."""
    contexts = torch.arange(model.num_contexts).repeat_interleave(num_episodes)
    parts = [
        double_returns(played(model, policy, prior.expand(len(some), -1), some, seed_for(seed, k)))
        for k, some in enumerate(contexts.split(batch_size))
    ]
    return torch.cat(parts).reshape(-1, num_episodes)


@dataclass(frozen=True, eq=False)
class Merge:
    """Which contexts may be left out, because another stands for them.

    Attributes:
        epsilon: What a difference may cost, in units of return.
        gaps: The gaps between all contexts of the model.
        invariant: Which pairs are ε-policy invariant, bool `[C, C]`.
        kept: Indices of the contexts that stay.
        dropped: Names of the contexts that go, each with the name of the one that stands for it.
        prior: Prior over the contexts that stay, float64: each has also the mass of those it stands for.
        model: A CPOMDP over the contexts that stay.
    """

    epsilon: float
    gaps: Gaps
    invariant: Tensor
    kept: tuple[int, ...]
    dropped: Mapping[str, str]
    prior: Tensor
    model: CPOMDP

    def __str__(self) -> str:
        names = self.gaps.contexts
        lines = [
            f"{len(self.kept)} of {len(names)} contexts kept (ε = {self.epsilon:g}, gaps: {self.gaps.source})"
        ]
        for c, p in zip(self.kept, self.prior.tolist(), strict=True):
            away = [name for name, into in self.dropped.items() if into == names[c]]
            stands = f", stands for {', '.join(away)}" if away else ""
            lines.append(f"  {names[c]}: prior {p:.4g}{stands}")
        for name, into in self.dropped.items():
            i, j = names.index(name), names.index(into)
            costs = " and ".join(self._gap(*pair) for pair in ((i, j), (j, i)))
            lines.append(f"  {name} dropped: gaps to {into} {costs}")
        return "\n".join(lines)

    def _gap(self, i: int, j: int) -> str:
        error = f" ± {self.gaps.standard_errors[i, j]:.3g}" if self.gaps.source == "policy" else ""
        return f"{self.gaps.gaps[i, j]:.4g}{error}"


def merge_invariant_contexts(
    model: CPOMDP,
    epsilon: float,
    *,
    policy: PolicyLike | Sequence[PolicyLike] | None = None,
    gaps: Gaps | None = None,
    **settings: Any,
) -> Merge:
    """Leave out contexts that need no policy of their own.

    Two contexts are ε-policy invariant (Assumption 2.1) if acting in either as is best in the other costs at
    most ε. Contexts are gone through in order, and each goes into the first kept one that it is invariant
    with, or is kept. Invariance is not transitive, so another order may keep other contexts, but every
    context that goes is invariant with the very one that it goes into.

    A gap that was estimated counts with two standard errors added: a context is kept when it is not clear.

    Args:
        model: The CPOMDP.
        epsilon: What a difference may cost, in units of return.
        policy: As for `policy_gaps`.
        gaps: Gaps that `policy_gaps` has computed before; there is then no use for a policy and settings.
        settings: Further settings of `policy_gaps`.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> print(merge_invariant_contexts(LineGrid(), 1.0))
        2 of 2 contexts kept (ε = 1, gaps: exact)
          detector right: prior 0.5
          detector left: prior 0.5
    """
    require_model(model)
    if gaps is None:
        gaps = policy_gaps(model, policy, **settings)
    else:
        require(isinstance(gaps, Gaps), "gaps", gaps, "Gaps, from policy_gaps")
        useless = [*(["policy"] if policy is not None else []), *settings]
        require(not useless, "gaps", f"{', '.join(useless)} as well", "either gaps, or how to compute them")
    names = model.context_names
    require(gaps.contexts == names, "gaps", f"of contexts {gaps.contexts}", f"of contexts {names}")
    invariant = gaps.invariant(epsilon)
    into: dict[int, int] = {}  # which context stands for each, itself if it is kept
    for c in range(len(names)):
        into[c] = next((k for k, j in into.items() if k == j and bool(invariant[c, k])), c)
    kept = [c for c, k in into.items() if c == k]
    mass = model.prior().detach().double().cpu().clone()
    for c, k in into.items():
        mass[k] += mass[c] if c != k else 0.0
    prior = mass[kept] / mass[kept].sum()
    return Merge(
        float(epsilon),
        gaps,
        invariant,
        tuple(kept),
        {names[c]: names[k] for c, k in into.items() if c != k},
        prior,
        Restricted(model, kept, prior.tolist()),
    )
