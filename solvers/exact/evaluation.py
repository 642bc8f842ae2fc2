"""The exact value of a policy, through all histories that it can meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.errors import invalid, require_count, require_model
from cpomdp_ppl.policy import History, as_policy
from cpomdp_ppl.rng import generators, isolated
from solvers.exact.beliefs import Endings, condition, endings_of_step, information, parts
from solvers.exact.tables import finite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, Policy
    from solvers.exact.tables import Finite, Indices, Reals

MAX_HISTORIES = 200_000
"""How many histories a policy may have to decide in at any one time, unless asked otherwise."""

SAME_CHANCE = 1e-4
"""Probabilities of an action that differ by less may be rounding, of a policy in single precision."""


class TooManyHistoriesError(ValueError):
    """A policy meets more histories than may be gone through."""


@dataclass(frozen=True, eq=False)
class Assessment:
    """What a policy is worth, exactly.

    Attributes:
        prior: Prior over contexts, `[C]`: what the agent believes, and where contexts come from.
        returns: Expected return in each context, `V_c(π) = E[Σ_t γ^t r_t | c]`, `[C]`.
        information: `I(C; Y)` in nats under the prior.
        endings: The posteriors that episodes end with.
        num_histories: How many histories the policy decided in, by time, T numbers.
    """

    prior: Tensor
    returns: Tensor
    information: float
    endings: Endings
    num_histories: tuple[int, ...]

    @property
    def expected_return(self) -> float:
        """`Σ_c P(c) V_c(π)`."""
        return float(self.prior @ self.returns)


@dataclass(frozen=True, eq=False)
class Histories:
    """All histories of one time that a policy meets."""

    numbers: Indices  # the outcomes that were met at times 0 … t, [B, t + 1]
    weights: Reals  # P(h, s | c), [B, C, N]
    beliefs: Reals  # P(c, s | h) as the agent has it, [B, C, N]

    def __len__(self) -> int:
        return len(self.numbers)

    @staticmethod
    def at_first(tables: Finite, prior: Reals) -> Histories:
        """The histories at time 0."""
        likelihood = tables.before.likelihood
        weights = tables.initial * likelihood
        beliefs = condition((prior[:, None] * tables.initial)[None], likelihood)[0]
        met = weights.any((1, 2))
        return Histories(np.flatnonzero(met)[:, None], weights[met], beliefs[met])

    def extended(self, tables: Finite, chances: Reals, most: int) -> Histories:
        """The histories one step later, at most so many, if actions are taken by chance, `[B, A]`."""
        after, likelihood = tables.outcomes.action, tables.outcomes.likelihood
        grown: list[tuple[Indices, Reals, Reals]] = []
        for part in parts(tables, len(self)):
            moved = tables.predict(self.weights[part])[:, after]
            going_on = chances[part][:, after] * ~tables.outcomes.ended
            weights = going_on[..., None, None] * moved * likelihood
            b, k = np.nonzero(weights.any((-2, -1)))
            beliefs, _ = condition(tables.predict(self.beliefs[part])[:, after], likelihood)
            grown.append((np.column_stack([self.numbers[part][b], k]), weights[b, k], beliefs[b, k]))
            count = sum(len(rows) for rows, *_ in grown)
            if count > most:
                least = "" if part.stop == len(self) else "at least "
                time = self.numbers.shape[1]
                raise TooManyHistoriesError(
                    f"the policy meets {least}{count} histories at time {time}, and max_histories = {most}: "
                    "shorten the horizon, or raise max_histories"
                )
        return Histories(*(np.concatenate(arrays) for arrays in zip(*grown, strict=True)))


def evaluate(
    model: CPOMDP,
    policy: Policy | Callable[[History], Decision],
    *,
    prior: Sequence[float] | Tensor | None = None,
    max_histories: int = MAX_HISTORIES,
    progress: bool = False,
) -> Assessment:
    """The exact value of a policy that draws no random numbers itself, through all histories it can meet.

    At every time the policy is called once for all histories of that time, from `start` on: so nothing is
    asked of its memory. What it decides may be random, if it is a `Categorical`, but must be a function of
    the history: a policy that draws random numbers on its way to a decision (a context that it takes for the
    true one, or particles) would be taken at one draw of them, and is refused. It is noticed by the
    generators of torch, NumPy and `random`; or, if its random numbers are hidden from these, by deciding
    differently in the same history, which is asked twice.

    Args:
        model: A CPOMDP with `states = N` whose observations have finitely many values.
        policy: A `Policy`, or a function from a `History` to actions, neither of which may draw random
            numbers; those that do can be played, with `cpomdp_ppl.evaluate`.
        prior: Prior over contexts, `[C]`, which the policy is started with; the model's if left out.
        max_histories: In how many histories it may have to decide at any one time.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If the policy draws random numbers, or decides what is no decision.
        UnsupportedModelError: If the model is not finite, naming the program and the site.
        TooManyHistoriesError: If there are more histories than `max_histories`, with their number and time.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import ContextualTiger
        >>> guess = evaluate(ContextualTiger(horizon=3), RandomPolicy(3))
        >>> round(guess.expected_return, 4), guess.num_histories  # a guess is worth (-1 + 10 - 100) / 3
        (-91.0, (1, 6, 36))
    """
    require_model(model)
    policy = as_policy(policy)
    most = require_count("max_histories", max_histories)
    tables = finite(model)
    p = tables.prior_or(prior, model)
    T = model.horizon
    met = Histories.at_first(tables, p)
    returns, counts, ends = np.zeros(len(p)), [], []
    for t in tqdm(range(T), desc="histories", disable=not progress):
        counts.append(len(met))
        if not len(met):  # all have ended
            continue
        chances = _decide(model, policy, tables, p, met.numbers)  # π(a | h), [B, A]
        earned = np.einsum("ba,bcs,cas->c", chances, met.weights, tables.rewards, optimize=True)
        returns += tables.discount**t * earned
        last = t == T - 1
        if last or tables.outcomes.ended.any():
            ends.append(endings_of_step(tables, met.weights, met.beliefs, chances, last=last))
        if not last:
            met = met.extended(tables, chances, most)

    endings = Endings.of_all(ends)
    return Assessment(
        prior=torch.from_numpy(p),
        returns=torch.from_numpy(returns),
        information=information(p, endings.probabilities.numpy()),
        endings=endings,
        num_histories=tuple(counts),
    )


def _decide(model: CPOMDP, policy: Policy, tables: Finite, prior: Reals, numbers: Indices) -> Reals:
    """What a policy does after the histories that met the outcomes `[B, t + 1]`: `π(a | h)`, `[B, A]`."""
    B, device = len(numbers), model.device
    twice = np.concatenate([numbers, numbers])
    with isolated(0), torch.no_grad(), poutine.block(), model.running():
        untouched = generators()
        memory = policy.start(torch.from_numpy(prior).to(model.prior()).expand(2 * B, -1))
        if generators() != untouched:
            raise _draws(policy, "draws random numbers in `start`")
        history: History | None = None
        for t, k in enumerate(twice.T):
            action = torch.from_numpy(tables.outcomes.action[k]).to(device) if t else None
            percept = tables.percept(k, action, device)
            history = History((percept,)) if history is None else history.extended(percept)
            decision, memory = policy.act(history, memory)
            if generators() != untouched:
                raise _draws(policy, f"draws random numbers in `act`, at time {t}")
    once, again = _chances(decision, 2 * B, model.num_actions).reshape(2, B, -1)
    if (np.abs(once - again) > SAME_CHANCE).any():
        raise _draws(policy, f"decides differently in the same history, at time {t}")
    return once


def _draws(policy: Policy, fault: str) -> ValueError:
    expected = "a function of the history, whose decision is a Categorical if random (or play it instead)"
    return invalid("policy", f"a {type(policy).__name__}, which {fault}", expected)


def _chances(decision: Decision, B: int, A: int) -> Reals:
    """A decision as probabilities, `[B, A]`."""
    if isinstance(decision, torch.distributions.Categorical):
        given = "probs" in vars(decision)  # what is not given would have been computed in single precision
        p = decision.probs.double() if given else decision.logits.double().softmax(-1)
        proper = p.shape == (B, A) and bool((p >= 0).all()) and bool((p.sum(-1) > 0).all())
        if not proper:
            raise invalid("policy", f"a Categorical {list(p.shape)}", f"proper probabilities [{B}, {A}]")
        chances: Reals = (p / p.sum(-1, keepdim=True)).cpu().numpy()
        return chances
    if not isinstance(decision, Tensor) or decision.is_floating_point() or decision.shape != (B,):
        raise invalid("policy", decision, f"int64 actions of shape [{B}], or a Categorical over them")
    a = decision.long().cpu()
    if not bool(((a >= 0) & (a < A)).all()):
        raise invalid("policy", f"actions from {int(a.min())} to {int(a.max())}", f"actions 0 to {A - 1}")
    taken: Reals = np.eye(A)[a.numpy()]
    return taken
