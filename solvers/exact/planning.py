"""Finite models solved exactly: the best policy for return and information, and the value of any policy.

A finite model with a horizon has finitely many histories, and far fewer beliefs: histories in another order,
or with as much evidence for as against, lead to the same one. `plan` goes through all beliefs `P(c, s | h)`
that can be reached from a prior, and finds the best action in each by dynamic programming; `evaluate` goes
through all histories that a given policy can meet, if it draws no random numbers itself. Both are for small
models, and say so of larger ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.errors import ObservationError, invalid, require_count, require_model, require_number
from cpomdp_ppl.policy import Decision, History, Policy, as_policy
from cpomdp_ppl.prior import one_prior
from cpomdp_ppl.rng import generators, isolated
from solvers.exact.beliefs import (
    DECIMALS,
    MAX_BELIEFS,
    Layer,
    condition,
    first_layer,
    next_layer,
    parts,
)
from solvers.exact.tables import Finite, Indices, Reals, distinct_rows, finite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpomdp_ppl.model import CPOMDP

TIE = 1e-10
"""Actions whose values differ by less (relative to the largest, if that is above 1) are tied."""


MAX_HISTORIES = 200_000
"""How many histories a policy may have to decide in at any one time, unless asked otherwise."""

ALIKE = 1e-4
"""Probabilities of an action that differ by less may be rounding, of a policy in single precision."""


class TooManyHistoriesError(ValueError):
    """A policy meets more histories than may be gone through."""


@dataclass(frozen=True, eq=False)
class Endings:
    """How episodes may end, as far as the context is concerned.

    Attributes:
        posteriors: The posteriors over contexts that the agent may end with, all different, `[M, C]`.
        probabilities: `P(m | c)`, how likely each is in each context, `[M, C]`; every column sums to 1.
    """

    posteriors: Tensor
    probabilities: Tensor

    @staticmethod
    def of(posteriors: Reals, probabilities: Reals) -> Endings:
        """Merge equal posteriors, and leave out what has no probability in any context."""
        met = probabilities.any(1)
        posteriors, probabilities = posteriors[met], probabilities[met]
        first, number = distinct_rows(posteriors, DECIMALS)
        merged = np.zeros((len(first), posteriors.shape[1]))
        np.add.at(merged, number, probabilities)
        return Endings(torch.from_numpy(posteriors[first]), torch.from_numpy(merged))


@dataclass(frozen=True, eq=False)
class Assessment:
    """What a policy is worth, exactly.

    Attributes:
        prior: Over contexts, `[C]`: what the agent was told, and where contexts come from.
        returns: Expected return in each context, `V_c(π)`, `[C]`.
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
class Plan:
    """The best policy from a prior, and what it is worth; see `plan`.

    It is a `Policy`, which remembers the number of its belief in the layer, int64 `[B]`. It believes in its
    own prior, whatever prior it is started with. What it holds impossible may yet be seen, if contexts come
    from elsewhere: it then learns nothing from it, but that it has moved.

    Attributes:
        value: The objective at its maximum, `E[return] + τ I(C; Y)`.
        temperature: τ, in units of reward for a nat.
        prior: Over contexts, `[C]`.
        returns: Expected return in each context, `V_c(π)`, `[C]`, also in those that the prior excludes.
        information: `I(C; Y)` in nats under the prior; Y has the last observation in it.
        num_beliefs: How many beliefs there are at each time at which an action is chosen, T numbers.
        beliefs: `P(c, s | h)`, T × `[n, C, N]`.
        actions: The best, the first of them if there are several, T × int64 `[n]`.
        qualities: The objective from here on, by action, T × `[n, A]`; information is counted as if it were
            paid at the end, `τ (H(prior) - H(C | y))`.
    """

    value: float
    temperature: float
    prior: Tensor
    returns: Tensor
    information: float
    num_beliefs: tuple[int, ...]
    beliefs: tuple[Tensor, ...] = field(repr=False)
    actions: tuple[Tensor, ...] = field(repr=False)
    q_values: tuple[Tensor, ...] = field(repr=False)
    _endings: Endings = field(repr=False)
    _tables: Finite = field(repr=False)
    _first: Indices = field(repr=False)  # the belief after each outcome at time 0
    _successors: tuple[Indices, ...] = field(repr=False)  # and after each later one, (T - 1) × [n, K]

    @property
    def expected_return(self) -> float:
        """`Σ_c P(c) V_c(π)`."""
        return float(self.prior @ self.returns)

    def endings(self) -> Endings:
        """The posteriors over contexts that episodes end with, and how likely each is in each context."""
        return self._endings

    def start(self, prior: Tensor) -> Tensor:
        """No belief has been looked up yet."""
        return torch.zeros(len(prior), dtype=torch.long)

    def act(self, history: History, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Take in what was just done and seen, and do what is best."""
        t, percept = history.time, history.latest
        k = self._tables.numbers(percept, t)
        n = self._first[k] if t == 0 else self._successors[t - 1][memory.numpy(), k]
        if (n < 0).any():
            b = int(np.flatnonzero(n < 0)[0])
            raise ObservationError(
                f"what episode {b} saw at time {t} cannot be seen after its history in any context"
            )
        now = torch.from_numpy(n)
        device = next(iter(percept.observed.values())).device
        return self.actions[t][now].to(device), now


def plan(
    model: CPOMDP,
    *,
    prior: Sequence[float] | Tensor | None = None,
    temperature: float = 0.0,
    max_beliefs: int = MAX_BELIEFS,
    progress: bool = False,
) -> Plan:
    """The policy that maximises `E[return] + τ I(C; Y)`, by dynamic programming over all beliefs.

    The information is a payoff at the end, `H(prior) - H(C | y)`, which the last belief determines; so the
    best action is a function of time and belief, and merging equal beliefs loses nothing.

    Args:
        model: A CPOMDP with `states = N` whose observations have finitely many values.
        prior: Over contexts, `[C]`; the model's if left out.
        temperature: τ ≥ 0, in units of reward for a nat; with 0 the return alone counts.
        max_beliefs: How many there may be at any one time.
        progress: Whether to show a bar.

    Raises:
        UnsupportedModelError: If the model is not finite, naming the program and the site.
        TooManyBeliefsError: If there are more beliefs than `max_beliefs`, with their number and time.

    Example:
        >>> from cpomdp_ppl.models import LineGrid
        >>> best = plan(LineGrid())
        >>> round(best.value, 4), [round(float(v), 4) for v in best.returns]
        (18.8178, [18.8178, 18.8178])
        >>> curious = plan(LineGrid(), temperature=0.1)  # goes on sensing with nothing left to gain
        >>> round(best.information, 4), round(curious.information, 4)
        (0.6333, 0.6671)
    """
    require_model(model)
    require_number("temperature", temperature, "a number that is not negative")
    most = require_count("max_beliefs", max_beliefs)
    tables = finite(model)
    p = _prior(prior, model, tables)
    T, tau = model.horizon, float(temperature)

    with tqdm(total=2 * T, desc="beliefs", disable=not progress) as bar:
        layer, first, of_first = first_layer(tables, p, most)
        layers, successors, evidence = [layer], [], []
        bar.update()
        for t in range(1, T):
            layer, following, probability = next_layer(tables, layers[-1], t, most)
            layers.append(layer)
            successors.append(following)
            evidence.append(probability)
            bar.update()

        q_values, actions, V = [], [], np.zeros(0)
        for t in reversed(range(T)):
            Q = _expected_rewards(tables, layers[t].beliefs)  # [n, A]
            if t == T - 1:
                Q += tau * _final_information(tables, layers[t], p) if tau else 0.0
            else:
                following, P = successors[t], evidence.pop()
                Q += np.add.reduceat(P * V[following], tables.outcomes.starts, axis=1)
            best = _best(Q)
            V = np.take_along_axis(Q, best[:, None], 1)[:, 0]
            q_values.append(Q)
            actions.append(best)
            bar.update()
    q_values.reverse()
    actions.reverse()

    returns, endings = _follow(tables, layers, first, successors, actions)
    return Plan(
        value=float(of_first @ V[first]),
        temperature=tau,
        prior=torch.from_numpy(p),
        returns=torch.from_numpy(returns),
        information=_information(p, endings.probabilities.numpy()),
        num_beliefs=tuple(len(layer) for layer in layers),
        beliefs=tuple(torch.from_numpy(layer.beliefs) for layer in layers),
        actions=tuple(torch.from_numpy(best) for best in actions),
        q_values=tuple(torch.from_numpy(Q) for Q in q_values),
        _endings=endings,
        _tables=tables,
        _first=first,
        _successors=tuple(successors),
    )


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
        policy: Who acts: a `Policy`, or a function from a `History` to actions, neither of which may draw
            random numbers; those that do can be played, with `cpomdp_ppl.evaluate`.
        prior: Over contexts, `[C]`, which the policy is started with; the model's if left out.
        max_histories: How many it may have to decide in at any one time.
        progress: Whether to show a bar.

    Raises:
        ValueError: If the policy draws random numbers, or decides what is no decision.
        UnsupportedModelError: If the model is not finite, naming the program and the site.
        TooManyHistoriesError: If there are more histories than `max_histories`, with their number and time.

    Example:
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
    p = _prior(prior, model, tables)
    after, likelihood = tables.outcomes.action, tables.outcomes.likelihood
    C, T = len(p), model.horizon

    numbers = np.arange(len(tables.before.action))[:, None]  # the outcomes met at times 0 … t, [B, t + 1]
    weights = tables.initial * tables.before.likelihood  # P(h, s | c), [B, C, N]
    beliefs = condition((p[:, None] * tables.initial)[None], tables.before.likelihood)[0]
    met = weights.any((1, 2))
    numbers, weights, beliefs = numbers[met], weights[met], beliefs[met]
    returns, counts = np.zeros(C), []
    for t in tqdm(range(T), desc="histories", disable=not progress):
        counts.append(len(numbers))
        chances = _decide(model, policy, tables, p, numbers)  # π(a | h), [B, A]
        returns += np.einsum("ba,bcs,cas->c", chances, weights, tables.rewards, optimize=True)
        if t == T - 1:
            break
        grown = []
        for i, part in parts(tables, len(numbers)):
            seen = chances[part][:, after, None, None] * tables.predict(weights[part])[:, after] * likelihood
            b, k = np.nonzero(seen.any((-2, -1)))
            believed, _ = condition(tables.predict(beliefs[part])[:, after], likelihood)
            grown.append((np.column_stack([numbers[i + b], k]), seen[b, k], believed[b, k]))
            count = sum(len(rows) for rows, *_ in grown)
            if count > most:
                least = "" if i + len(seen) == len(numbers) else "at least "
                raise TooManyHistoriesError(
                    f"the policy meets {least}{count} histories at time {t + 1}, and max_histories = {most}: "
                    "shorten the horizon, or raise max_histories"
                )
        numbers, weights, beliefs = (np.concatenate(arrays) for arrays in zip(*grown, strict=True))

    endings = _last_step(tables, weights, beliefs, chances)
    return Assessment(
        prior=torch.from_numpy(p),
        returns=torch.from_numpy(returns),
        information=_information(p, endings.probabilities.numpy()),
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
    if (np.abs(once - again) > ALIKE).any():
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


def _prior(prior: Sequence[float] | Tensor | None, model: CPOMDP, tables: Finite) -> Reals:
    if prior is None:
        return tables.prior
    given: Reals = one_prior(prior, model).detach().cpu().numpy()
    return given


def _expected_rewards(tables: Finite, b: Reals) -> Reals:
    """`Σ_{c,s} P(c, s | h) r_c(s, a)`, `[n, A]`."""
    _, A, _ = tables.rewards.shape
    expected: Reals = b.reshape(len(b), -1) @ tables.rewards.transpose(0, 2, 1).reshape(-1, A)
    return expected


def _last_contexts(tables: Finite, p: Reals) -> Reals:
    """Measures `[n, C, N]` over context and state as such over context and the last outcome, `[n, K, C]`."""
    after, likelihood = tables.outcomes.action, tables.outcomes.likelihood
    starts = [*tables.outcomes.starts, len(after)]
    moved = tables.predict(p)  # [n, A, C, N]
    last = [
        np.einsum("ncs,kcs->nkc", moved[:, a], likelihood[i:j]) for a, (i, j) in enumerate(pairwise(starts))
    ]
    return np.concatenate(last, 1)


def _last_step(tables: Finite, weights: Reals, beliefs: Reals, chances: Reals) -> Endings:
    """The endings of those who hold beliefs `[n, C, N]` before the last step.

    Args:
        tables: Of the model.
        weights: How likely they are to be there, and in which state, in each context, `[n, C, N]`.
        beliefs: What they hold for true, `[n, C, N]`.
        chances: Which action they take, `[n, A]`.
    """
    C, after = len(tables.prior), tables.outcomes.action
    posteriors, probabilities = [], []
    for _, part in parts(tables, len(weights)):
        seen = chances[part][:, after, None] * _last_contexts(tables, weights[part])  # [n, K, C]
        joint = _last_contexts(tables, beliefs[part])
        evidence = joint.sum(-1, keepdims=True)
        unmoved = beliefs[part].sum(-1)[:, None]  # as `condition` has it
        posteriors.append(np.where(evidence > 0, joint / _positive(evidence), unmoved).reshape(-1, C))
        probabilities.append(seen.reshape(-1, C))
    return Endings.of(np.concatenate(posteriors), np.concatenate(probabilities))


def _final_information(tables: Finite, layer: Layer, prior: Reals) -> Reals:
    """`H(prior) - E[H(C | y)]` at the last belief before the end, by action, `[n, A]`."""
    gains = []
    for part in layer.parts(tables):
        joint = _last_contexts(tables, part.beliefs)  # P(c, o | h, a), [n, K, C]
        negative_entropy = _xlogy(joint, joint / _positive(joint.sum(-1, keepdims=True))).sum(-1)
        gains.append(np.add.reduceat(negative_entropy, tables.outcomes.starts, axis=1))
    information: Reals = np.concatenate(gains) - _xlogy(prior, prior).sum()
    return information


def _best(Q: Reals) -> Indices:
    """The first of the best actions, `[n]`."""
    highest = Q.max(1, keepdims=True)
    tied = highest - Q <= TIE * np.maximum(1.0, np.abs(highest))
    best: Indices = tied.argmax(1)
    return best


def _follow(
    tables: Finite, layers: list[Layer], first: Indices, successors: list[Indices], actions: list[Indices]
) -> tuple[Reals, Endings]:
    """Returns `[C]` and endings, by `P(n, s | c)` of the beliefs n that the agent holds, right or wrong."""
    (C, N), A = tables.initial.shape, tables.rewards.shape[1]
    returns = np.zeros(C)
    p = np.zeros((len(layers[0]), C, N))
    np.add.at(p, first[first >= 0], (tables.initial * tables.before.likelihood)[first >= 0])
    for t, chosen in enumerate(actions):
        for a in range(A):
            returns += (p[chosen == a].sum(0) * tables.rewards[:, a]).sum(-1)
        if t < len(actions) - 1:
            p = _arrive(tables, p, chosen, successors[t], len(layers[t + 1]))
    held = p.any((1, 2))  # nobody holds the other beliefs
    return returns, _last_step(tables, p[held], layers[-1].beliefs[held], np.eye(A)[actions[-1][held]])


def _arrive(tables: Finite, p: Reals, chosen: Indices, successors: Indices, number: int) -> Reals:
    """`P(n, s | c)` one step later, `[number, C, N]`, if the actions `chosen [n]` are taken."""
    starts = np.append(tables.outcomes.starts, len(tables.outcomes.action))
    _, C, N = p.shape
    arrived = torch.zeros(number, C * N, dtype=torch.float64)
    for a in range(len(starts) - 1):
        rows, ks = np.flatnonzero((chosen == a) & p.any((1, 2))), slice(starts[a], starts[a + 1])
        for _, part in parts(tables, len(rows)):
            n = rows[part]
            moved = np.matmul(p[n].transpose(1, 0, 2), tables.transition[:, a]).transpose(1, 0, 2)
            seen = moved[:, None] * tables.outcomes.likelihood[ks]  # [n, K, C, N]
            to = successors[n, ks]
            met = to >= 0
            arrived.index_add_(0, torch.from_numpy(to[met]), torch.from_numpy(seen[met].reshape(-1, C * N)))
    there: Reals = arrived.numpy().reshape(number, C, N)
    return there


def _information(prior: Reals, probabilities: Reals) -> float:
    """`I(C; M)` of an ending M with probabilities `P(m | c)`, `[M, C]`, in nats."""
    evidence = _positive(probabilities @ prior)[:, None]
    return max(0.0, float((prior * _xlogy(probabilities, probabilities / evidence)).sum()))


def _xlogy(x: Reals, y: Reals) -> Reals:
    """`x log y`, and 0 where x is."""
    product: Reals = x * np.log(np.where(x > 0, y, 1.0))
    return product


def _positive(x: Reals) -> Reals:
    positive: Reals = np.where(x > 0, x, 1.0)
    return positive
