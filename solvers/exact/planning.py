"""The best policy for return and information, by dynamic programming over all beliefs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from cpomdp_ppl.errors import ObservationError, require_count, require_model, require_number
from solvers.exact.beliefs import (
    MAX_BELIEFS,
    Endings,
    endings_of_step,
    information,
    last_contexts,
    parts,
    positive,
    reachable,
    xlogy,
)
from solvers.exact.tables import Finite, finite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import History
    from solvers.exact.beliefs import Layer, Reachable
    from solvers.exact.tables import Flags, Indices, Reals

TIE = 1e-10
"""Actions whose values differ by less (relative to the largest, if that is above γ^t) are tied."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The best policy from a prior, and what it is worth; see `plan`.

    It is a `Policy`, which remembers the number of its belief in the layer, int64 `[B]`, -1 after the end. It
    believes in its own prior, whatever prior it is started with. What it holds impossible may yet be seen, if
    contexts come from elsewhere: it then learns nothing from it, but that it has moved.

    Attributes:
        value: The objective at its maximum, `E[Σ_t γ^t r_t] + τ I(C; Y)`.
        temperature: τ, in units of reward for a nat.
        prior: Prior over contexts, `[C]`.
        returns: Expected return in each context, `V_c(π)`, `[C]`, also in those that the prior excludes.
        information: `I(C; Y)` in nats under the prior; Y has the last observation in it, and when it ended.
        num_beliefs: How many beliefs there are at each time at which an action is chosen, T numbers.
        beliefs: `P(c, s | h)`, T × `[n, C, N]`.
        actions: The best actions, the first of them if there are several, T × int64 `[n]`.
        q_values: The objective from here on, by action, as it is worth at the start (rewards count with γ^t),
            T × `[n, A]`; information is counted as if it were paid at the end, `τ (H(prior) - H(C | y))`.
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
        """Take in what was just done and seen, and do what is best; where an episode is over, anything."""
        t, percept, before = history.time, history.latest, memory.numpy()
        over = (before < 0) | percept.ended.cpu().numpy()
        k = self._tables.numbers(percept, t, over)[~over]
        n = self._first[k] if t == 0 else self._successors[t - 1][before[~over], k]
        if (n < 0).any():
            b = int(np.flatnonzero(~over)[np.flatnonzero(n < 0)[0]])
            raise ObservationError(
                f"what episode {b} saw at time {t} cannot be seen after its history in any context"
            )
        now, action = torch.full_like(memory, -1), torch.zeros_like(memory)
        now[~over] = torch.from_numpy(n)
        action[~over] = self.actions[t][torch.from_numpy(n)]
        return action.to(next(iter(percept.observed.values())).device), now


def plan(
    model: CPOMDP,
    *,
    prior: Sequence[float] | Tensor | None = None,
    temperature: float = 0.0,
    max_beliefs: int = MAX_BELIEFS,
    progress: bool = False,
) -> Plan:
    """The policy that maximises `E[Σ_t γ^t r_t] + τ I(C; Y)`, by dynamic programming over all beliefs.

    The information is a payoff at the end, `H(prior) - H(C | y)`, which the last belief determines; so the
    best action is a function of time and belief, and merging equal beliefs loses nothing. It is not
    discounted: what is found out late is known as well.

    Args:
        model: A CPOMDP with `states = N` whose observations have finitely many values.
        prior: Prior over contexts, `[C]`; the model's if left out.
        temperature: τ ≥ 0, in units of reward for a nat; with 0 the return alone counts.
        max_beliefs: How many beliefs there may be at any one time.
        progress: Whether to show a progress bar.

    Raises:
        UnsupportedModelError: If the model is not finite, naming the program and the site.
        TooManyBeliefsError: If there are more beliefs than `max_beliefs`, with their number and time.

    Examples:
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
    p = tables.prior_or(prior, model)
    tau = float(temperature)

    with tqdm(total=2 * model.horizon, desc="beliefs", disable=not progress) as bar:
        graph = reachable(tables, p, model.horizon, most, bar.update)
        q_values, actions, V = _backward(tables, graph, p, tau, bar.update)
    returns, endings = _forward(tables, graph, actions)
    return Plan(
        value=float(graph.first_probabilities @ V[graph.first]),
        temperature=tau,
        prior=torch.from_numpy(p),
        returns=torch.from_numpy(returns),
        information=information(p, endings.probabilities.numpy()),
        num_beliefs=tuple(len(layer) for layer in graph.layers),
        beliefs=tuple(torch.from_numpy(layer.beliefs) for layer in graph.layers),
        actions=tuple(torch.from_numpy(best) for best in actions),
        q_values=tuple(torch.from_numpy(Q) for Q in q_values),
        _endings=endings,
        _tables=tables,
        _first=graph.first,
        _successors=graph.successors,
    )


def _backward(
    tables: Finite, graph: Reachable, prior: Reals, temperature: float, step: Callable[[], object]
) -> tuple[list[Reals], list[Indices], Reals]:
    """Bellman's recursion: `Q`, T × `[n, A]`, the best actions, T × `[n]`, and the value at time 0, `[n]`."""
    q_values, actions, V = [], [], np.zeros(0)
    T = len(graph.layers)
    for t in reversed(range(T)):
        worth = tables.discount**t
        Q = worth * _expected_rewards(tables, graph.layers[t].beliefs)  # [n, A]
        over = tables.outcomes.ended | (t == T - 1)  # [K]
        if temperature and over.any():
            Q += temperature * _final_information(tables, graph.layers[t], prior, over)
        if t < T - 1:
            later = np.append(V, 0.0)  # nothing follows on the end, which is number -1
            expected = graph.probabilities[t] * later[graph.successors[t]]  # [n, K]
            Q += np.add.reduceat(expected, tables.outcomes.starts, axis=1)
        best = _best(Q, worth)
        V = np.take_along_axis(Q, best[:, None], 1)[:, 0]
        q_values.append(Q)
        actions.append(best)
        step()
    return q_values[::-1], actions[::-1], V


def _expected_rewards(tables: Finite, b: Reals) -> Reals:
    """`Σ_{c,s} P(c, s | h) r_c(s, a)`, `[n, A]`."""
    C, A, N = tables.rewards.shape
    expected: Reals = b.reshape(len(b), C * N) @ tables.rewards.transpose(0, 2, 1).reshape(-1, A)
    return expected


def _final_information(tables: Finite, layer: Layer, prior: Reals, over: Flags) -> Reals:
    """`E[H(prior) - H(C | y)]` by action, `[n, A]`, over those outcomes that are the last, `over [K]`."""
    gains = [np.zeros((0, tables.rewards.shape[1]))]
    for part in layer.parts(tables):
        joint = last_contexts(tables, part.beliefs)  # P(c, o | h, a), [n, K, C]
        evidence = joint.sum(-1, keepdims=True)
        negative_entropy = xlogy(joint, joint / positive(evidence)).sum(-1)
        gain = np.add.reduceat(negative_entropy * over, tables.outcomes.starts, axis=1)
        ends = 1.0 if over.all() else np.add.reduceat(evidence[..., 0] * over, tables.outcomes.starts, axis=1)
        gains.append(gain - ends * xlogy(prior, prior).sum())
    return np.concatenate(gains)


def _best(Q: Reals, worth: float) -> Indices:
    """The first of the best actions, `[n]`, at a time when a unit of reward is `worth` so much."""
    highest = Q.max(1, keepdims=True)
    tied = highest - Q <= TIE * np.maximum(worth, np.abs(highest))
    best: Indices = tied.argmax(1)
    return best


def _forward(tables: Finite, graph: Reachable, actions: Sequence[Indices]) -> tuple[Reals, Endings]:
    """Returns `[C]` and endings, by `P(n, s | c)` of the beliefs n that the agent holds, right or wrong."""
    (C, N), A = tables.initial.shape, tables.rewards.shape[1]
    layers, first = graph.layers, graph.first
    returns, endings, T = np.zeros(C), [], len(layers)
    p = np.zeros((len(layers[0]), C, N))
    np.add.at(p, first[first >= 0], (tables.initial * tables.before.likelihood)[first >= 0])
    for t, chosen in enumerate(actions):
        for a in range(A):
            returns += tables.discount**t * (p[chosen == a].sum(0) * tables.rewards[:, a]).sum(-1)
        last = t == T - 1
        if last or tables.outcomes.ended.any():
            held = p.any((1, 2))  # nobody holds the other beliefs
            taken = np.eye(A)[chosen[held]]
            endings.append(endings_of_step(tables, p[held], layers[t].beliefs[held], taken, last=last))
        if not last:
            p = _arrive(tables, p, chosen, graph.successors[t], len(layers[t + 1]))
    return returns, Endings.of_all(endings)


def _arrive(tables: Finite, p: Reals, chosen: Indices, successors: Indices, number: int) -> Reals:
    """`P(n, s | c)` one step later, `[number, C, N]`, if the actions `chosen [n]` are taken."""
    starts = np.append(tables.outcomes.starts, len(tables.outcomes.action))
    _, C, N = p.shape
    arrived = torch.zeros(number, C * N, dtype=torch.float64)
    for a in range(len(starts) - 1):
        rows, ks = np.flatnonzero((chosen == a) & p.any((1, 2))), slice(starts[a], starts[a + 1])
        for part in parts(tables, len(rows)):
            n = rows[part]
            moved = np.matmul(p[n].transpose(1, 0, 2), tables.transition[:, a]).transpose(1, 0, 2)
            seen = moved[:, None] * tables.outcomes.likelihood[ks]  # [n, K, C, N]
            to = successors[n, ks]
            met = to >= 0
            arrived.index_add_(0, torch.from_numpy(to[met]), torch.from_numpy(seen[met].reshape(-1, C * N)))
    there: Reals = arrived.numpy().reshape(number, C, N)
    return there
