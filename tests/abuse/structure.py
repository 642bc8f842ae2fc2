"""Random programs whose observation sites depend on each other, and their likelihood by plain summation.

A `Description` is drawn from a seed. From it come, by different roads, the Pyro program (`Structured`) and
the truth (`truth`): by numpy, scipy and itertools only, a sum over all paths of states and over all values of
what was not seen, with quadrature for real numbers.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from scipy.stats import multivariate_normal

from cpomdp_ppl import CPOMDP, Episodes
from cpomdp_ppl.signature import signature

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Edge:
    """How a site depends on an earlier one.

    Attributes:
        parent: Number of the earlier site.
        where: In which contexts, after which actions (the last stands for none) and in which regions of the
            state it does, 0 or 1, `[C, A + 1, R]`.
        effect: Added to the site's P parameters: for every value of a discrete parent, `[K, P]`; for a normal
            parent `[P]`, times its value (times its tanh, on the logarithm of a scale).
        style: How the program writes it.
    """

    parent: int
    where: np.ndarray
    effect: np.ndarray
    style: str


@dataclass(frozen=True)
class Site:
    """An observation site.

    Attributes:
        name: Of the site.
        values: K of a discrete site; 0 for a normal one.
        size: How many independent cells it has.
        base: Its parameters but for its parents, `[C, A + 1, R, P]`: logits, or mean and logarithm of scale.
        slope: Times a real state, on top, `[C, P]`.
        edges: To its parents.
        shown: After which actions its cells are seen, `[A + 1, size]`.
        gate: Number of an earlier Bernoulli site without whose value 1 it is not seen; None for none.
        style: How the program writes it.
    """

    name: str
    values: int
    size: int
    base: np.ndarray
    slope: np.ndarray
    edges: tuple[Edge, ...]
    shown: np.ndarray
    gate: int | None = None
    style: str = "mask"

    @property
    def parents(self) -> set[int]:
        """Numbers of the sites it depends on, if only for its mask."""
        return {edge.parent for edge in self.edges} | ({self.gate} - {None})


@dataclass(frozen=True)
class Description:
    """A whole program, as numbers.

    Attributes:
        first: `P(s_0 | c)`, `[C, N]`; of a real state mean and scale, `[C, 2]`.
        moves: `P(s' | s, a, c)`, `[C, A, N, N]`; of a real state factor, push and scale, `[C, A, 3]`.
        sites: In order.
        horizon: T.
        vectors: What sites of several cells are: "plate" or "event".
        initial_observation: Whether something is seen before the first action.
        threshold: Of a real state, between its two regions.
    """

    first: np.ndarray
    moves: np.ndarray
    sites: tuple[Site, ...]
    horizon: int
    vectors: str = "event"
    initial_observation: bool = False
    threshold: float = 0.25

    @property
    def finite(self) -> bool:
        """Whether the state is one of N."""
        return self.moves.ndim == 4

    @property
    def contexts(self) -> int:
        """C."""
        return len(self.first)

    @property
    def actions(self) -> int:
        """A."""
        return self.moves.shape[1]


Observed = list[list[Any]]
"""What was seen in a step: by site and cell a value, or None."""


@dataclass(frozen=True)
class Data:
    """What was done and seen.

    Attributes:
        actions: `[B][T]`; an episode of fewer steps has fewer.
        seen: `[B][T + 1]`; the first is before the first action.
    """

    actions: list[list[int]]
    seen: list[list[Observed]]


# ---------------------------------------------------------------------------------------------------------
# The truth


def parameters(d: Description, i: int, j: int, c: int, a: int, s: Any, values: dict) -> list[Any]:
    """The P parameters of cell j of site i, given the values of earlier cells; everything broadcasts."""
    site = d.sites[i]
    region = s if d.finite else (s > d.threshold).astype(int)
    theta = []
    for p in range(site.base.shape[-1]):
        total = site.base[c, a, region, p] + (0.0 if d.finite else site.slope[c, p] * s)
        for edge in site.edges:
            parent = d.sites[edge.parent]
            cells = [j] if parent.size == site.size else range(parent.size)
            for cell in cells:
                value = values[edge.parent, cell]
                if parent.values:
                    effect = edge.effect[:, p][value]
                elif p == 1 and not site.values:
                    effect = edge.effect[p] * np.tanh(value)
                else:
                    effect = edge.effect[p] * value
                total = total + edge.where[c, a, region] * effect
        theta.append(total)
    return theta


def probabilities(theta: list[Any]) -> list[Any]:
    """Of the values of a discrete cell."""
    total = sum(np.exp(each) for each in theta)
    return [np.exp(each) / total for each in theta]


def normal_density(x: Any, mean: Any, scale: Any) -> Any:
    return np.exp(-0.5 * ((x - mean) / scale) ** 2) / (scale * math.sqrt(2 * math.pi))


def hidden_ancestors(d: Description, seen: Observed) -> set[int]:
    """Sites with a cell that was not seen, on which something that was seen depends. Sites alone decide."""
    needed, hidden = set(), set()
    for i in reversed(range(len(d.sites))):
        if i in needed and any(value is None for value in seen[i]):
            hidden.add(i)
        if i in needed or any(value is not None for value in seen[i]):
            needed |= d.sites[i].parents
    return hidden


def likelihood(d: Description, c: int, a: int, s: np.ndarray, seen: Observed) -> np.ndarray:
    """`p(o | s, a, c)` at states `[S]`: the sum over all values of what was not seen, `[S]`.

    Every unseen cell on which a seen one depends has an axis of its own. Other unseen cells sum to one.
    """
    hidden = hidden_ancestors(d, seen)
    cells = [(i, j) for i in sorted(hidden) for j in range(d.sites[i].size) if seen[i][j] is None]
    reals = sum(d.sites[i].values == 0 for i, _ in cells)
    nodes = np.linspace(-9, 9, 601 if reals < 2 else 361)
    weights = np.exp(-0.5 * nodes**2) / np.exp(-0.5 * nodes**2).sum()
    s = s.reshape(-1, *[1] * len(cells))
    total = np.ones(s.shape)
    values: dict = {}
    for i, site in enumerate(d.sites):
        for j in range(site.size):
            if seen[i][j] is None and (i, j) not in cells:
                continue
            theta = parameters(d, i, j, c, a, s, values)
            if seen[i][j] is not None:
                values[i, j] = v = seen[i][j]
                density = (
                    probabilities(theta)[v] if site.values else normal_density(v, theta[0], np.exp(theta[1]))
                )
                total = total * density
                if site.gate is not None:  # it would not have been seen
                    gate = values[site.gate, j if d.sites[site.gate].size == site.size else 0]
                    total = total * (np.asarray(gate) == 1)
                continue
            axis = [1] * s.ndim
            axis[1 + cells.index((i, j))] = -1
            if site.values:
                values[i, j] = np.arange(site.values).reshape(axis)
                total = total * sum((values[i, j] == k) * p for k, p in enumerate(probabilities(theta)))
            else:
                values[i, j] = theta[0] + np.exp(theta[1]) * nodes.reshape(axis)
                total = total * weights.reshape(axis)
    return total.reshape(len(s), -1).sum(-1)


def steps(d: Description, data: Data, b: int) -> list[tuple[int, Observed]]:
    """Actions (A before the first) and what was seen after them."""
    return list(zip([d.actions, *data.actions[b]], data.seen[b], strict=True))


def over_paths(d: Description, data: Data, b: int, c: int) -> tuple[float, float]:
    """Log-likelihood of an episode and mean of its last state, by a sum over all paths of states."""
    N, T = d.first.shape[1], len(data.actions[b])
    seen = [likelihood(d, c, a, np.arange(N), o) for a, o in steps(d, data, b)]  # [T + 1][N]
    total = last = 0.0
    for path in itertools.product(range(N), repeat=T + 1):
        p = d.first[c, path[0]] * seen[0][path[0]]
        for t in range(T):
            p *= d.moves[c, data.actions[b][t], path[t], path[t + 1]] * seen[t + 1][path[t + 1]]
        total, last = total + p, last + p * path[-1]
    return math.log(total), last / total


def over_grid(d: Description, data: Data, b: int, c: int) -> tuple[float, float]:
    """The same for a real state, by the midpoint rule; the threshold is between two points."""
    wide, low = 0.05, -15.0
    x = d.threshold + wide * (np.arange(round(low / wide), round(-low / wide)) + 0.5)
    p = normal_density(x, *d.first[c]) * wide
    for t, (a, seen) in enumerate(steps(d, data, b)):
        if t:
            factor, push, scale = d.moves[c, a]
            p = normal_density(x[:, None], factor * x + push, scale) @ p * wide
        if any(value is not None for cells in seen for value in cells):
            p = p * likelihood(d, c, a, x, seen)
    return math.log(p.sum()), (p @ x) / p.sum()


def of_joint(d: Description, data: Data, b: int, c: int) -> tuple[float, float]:
    """The same for a linear-Gaussian program: everything is a linear function of independent noises."""
    cells = sum(site.size for site in d.sites)
    size = 1 + (1 + cells) * len(data.seen[b])  # the constant 1, and all noises
    unit = iter(np.eye(size)[1:])
    one = np.eye(size)[0]
    x = d.first[c, 0] * one + d.first[c, 1] * next(unit)
    log_factor, rows, found = 0.0, [], []
    for t, (a, seen) in enumerate(steps(d, data, b)):
        if t:
            f, push, scale = d.moves[c, a]
            x = f * x + push * one + scale * next(unit)
        values: dict = {}
        for i, site in enumerate(d.sites):
            for j in range(site.size):
                # Discrete parents are known numbers; at values of 0 the others add nothing to the parameters.
                known = {
                    key: seen[key[0]][key[1]] or 0 if d.sites[key[0]].values else np.zeros(())
                    for key in values
                }
                if site.values:
                    if seen[i][j] is not None:
                        known.update({key: seen[key[0]][key[1]] or 0 for key in values})
                        p = probabilities(parameters(d, i, j, c, a, np.zeros(()), known))[seen[i][j]]
                        log_factor += math.log(p)
                    values[i, j] = None
                    continue
                mean, log_scale = parameters(d, i, j, c, a, np.zeros(()), known)
                row = mean * one + site.slope[c, 0] * x + np.exp(log_scale) * next(unit)
                for edge in site.edges:
                    parent = d.sites[edge.parent]
                    if not parent.values:
                        for cell in [j] if parent.size == site.size else range(parent.size):
                            row = row + edge.where[c, a, 0] * edge.effect[0] * values[edge.parent, cell]
                values[i, j] = row
                if seen[i][j] is not None:
                    rows.append(row)
                    found.append(seen[i][j])
    if not rows:
        return log_factor, x[0]
    W, off = np.stack(rows)[:, 1:], np.array(found) - np.stack(rows)[:, 0]
    S = W @ W.T
    return log_factor + multivariate_normal(cov=S).logpdf(off), x[0] + x[1:] @ W.T @ np.linalg.solve(S, off)


def is_linear(d: Description, data: Data) -> bool:
    """Whether what was seen is linear and Gaussian, once the values of discrete sites are known."""
    if d.finite:
        return False
    for site in d.sites:
        if (site.base[:, :, :1] != site.base).any() or any(
            (e.where[:, :, :1] != e.where).any() for e in site.edges
        ):
            return False
        if (site.slope if site.values else site.slope[:, 1]).any():
            return False
        if not site.values and any(not d.sites[e.parent].values and e.effect[1] for e in site.edges):
            return False
    for seen in itertools.chain(*data.seen):
        hidden = hidden_ancestors(d, seen)
        if any(d.sites[i].values for i in hidden):
            return False
        for site, cells in zip(d.sites, seen, strict=True):
            if site.values and any(value is not None for value in cells) and hidden & site.parents:
                return False
    return True


def truth(d: Description, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """`log p(o | a, c)` and the mean of the last state, both `[B, C]`."""
    way = over_paths if d.finite else of_joint if is_linear(d, data) else over_grid
    found = np.array([[way(d, data, b, c) for c in range(d.contexts)] for b in range(len(data.actions))])
    return found[..., 0], found[..., 1]


def information(d: Description, action: int) -> float:
    """`I(C; Y)` in nats under a uniform prior, of a finite program whose sites are discrete, for one action.

    All values of all cells are listed, and then forgotten where they are masked.
    """

    def outcomes(c: int, a: int, s: int) -> dict:
        table: dict = defaultdict(float)
        cells = [(i, j) for i, site in enumerate(d.sites) for j in range(site.size)]
        for drawn in itertools.product(*[range(d.sites[i].values) for i, _ in cells]):
            values, p = dict(zip(cells, drawn, strict=True)), 1.0
            for i, j in cells:
                p *= probabilities(parameters(d, i, j, c, a, np.asarray(s), values))[values[i, j]]
            table[tuple(values[i, j] if visible(d, i, j, a, values) else None for i, j in cells)] += p
        return table

    N, C = d.first.shape[1], d.contexts
    joint: dict = defaultdict(lambda: np.zeros(C))  # P(y | c)
    for c in range(C):
        after = [outcomes(c, action, s) for s in range(N)]
        before = [outcomes(c, d.actions, s) if d.initial_observation else {(): 1.0} for s in range(N)]
        for path in itertools.product(range(N), repeat=d.horizon + 1):
            p = d.first[c, path[0]] * math.prod(d.moves[c, action, s, z] for s, z in itertools.pairwise(path))
            tables = [before[path[0]], *[after[s] for s in path[1:]]]
            for y in itertools.product(*[table.items() for table in tables]):
                joint[tuple(o for o, _ in y)][c] += p * math.prod(q for _, q in y)
    likelihoods = np.stack(list(joint.values()))  # [Y, C]
    mean = likelihoods.mean(1, keepdims=True)
    return float((likelihoods / C * np.log(likelihoods / mean)).sum())


def visible(d: Description, i: int, j: int, a: int, values: dict) -> bool:
    """Whether the program shows a cell."""
    site = d.sites[i]
    gate = None if site.gate is None else values[site.gate, j if d.sites[site.gate].size == site.size else 0]
    return bool(site.shown[a, j]) and gate in (None, 1)


# ---------------------------------------------------------------------------------------------------------
# The program


class Structured(CPOMDP):
    """A description as a Pyro program."""

    def __init__(self, d: Description) -> None:
        super().__init__()
        self.d = d
        self.contexts, self.actions, self.horizon = d.contexts, d.actions, d.horizon
        self.initial_observation = d.initial_observation
        self.max_plate_nesting = int(d.vectors == "plate")
        if d.finite:
            self.states = d.first.shape[1]
        self.first, self.moves = torch.tensor(d.first), torch.tensor(d.moves)

    def initial(self, context):
        row = self.first[context]
        fn = dist.Categorical(row) if self.d.finite else dist.Normal(row[..., 0], row[..., 1])
        return pyro.sample("s", fn)

    def transition(self, state, action, context):
        if self.d.finite:
            return pyro.sample("s", dist.Categorical(self.moves[context, action, state]))
        factor, push, scale = self.moves[context, action].unbind(-1)
        return pyro.sample("s", dist.Normal(factor * state + push, scale))

    def observation(self, state, action, context):
        a = torch.full_like(context, self.d.actions) if action is None else action
        region = state if self.d.finite else (state > self.d.threshold).long()
        values: list[torch.Tensor] = []
        for site in self.d.sites:
            theta = looked_up(site.base, context, a, region)  # […, P]
            if site.slope.any():
                theta = theta + torch.tensor(site.slope)[context] * state[..., None]
            if site.size > 1 and not self.max_plate_nesting:
                theta = theta[..., None, :]
            for edge in site.edges:
                theta = theta + self.effect(site, edge, values[edge.parent], (context, a, region))
            values.append(self.sample(site, theta, a, values))

    def effect(self, site, edge, value, place):
        """What a parent of some value adds to the parameters of a site, `[…, P]`."""
        parent, event = self.d.sites[edge.parent], not self.max_plate_nesting
        where = looked_up(edge.where[..., None], *place)  # […, 1]
        if (edge.style == "shortcut" and not bool(where.any())) or (
            edge.style == "select" and not len(where[where > 0])
        ):
            return torch.zeros(())
        added = chosen(edge, value) if parent.values else weighted(site, edge, value)
        if event and parent.size > 1:
            where = where[..., None, :]
        added = torch.where(where > 0, added, 0.0) if edge.style in ("where", "shortcut") else where * added
        if parent.size > site.size:
            return added.sum(-2, keepdim=not event)
        return added[..., None, :] if event and site.size > parent.size else added

    def sample(self, site, theta, a, values):
        if not site.values:
            fn = dist.Normal(theta[..., 0], theta[..., 1].exp())
        elif site.values == 2:
            probs = theta.softmax(-1)[..., 1]
            fn = (
                dist.Bernoulli(logits=theta[..., 1] - theta[..., 0])
                if site.style == "outer"
                else dist.Bernoulli(probs)
            )
        else:
            fn = (
                dist.Categorical(logits=theta)
                if site.style == "outer"
                else dist.Categorical(theta.softmax(-1))
            )
        shown = torch.tensor(site.shown)[a]
        if self.max_plate_nesting:
            shown = shown[..., 0, :]
        else:
            shown = shown[..., 0]
            fn = fn.expand((*fn.batch_shape[:-1], site.size)).to_event(1) if site.size > 1 else fn
        mask = bool(site.shown.flat[0]) if (site.shown == site.shown.flat[0]).all() else shown
        if site.gate is not None:
            mask = (values[site.gate] == 1) & mask
        with (
            pyro.plate("cells", site.size)
            if self.max_plate_nesting and site.size > 1
            else poutine.mask(mask=True)
        ):
            if mask is True:
                return pyro.sample(site.name, fn)
            if site.style == "outer":
                with poutine.mask(mask=mask if isinstance(mask, torch.Tensor) else torch.tensor(mask)):
                    return pyro.sample(site.name, fn)
            return pyro.sample(site.name, fn.mask(mask))

    def reward(self, state, action, context):
        return state * (1.0 + action)


def looked_up(table: np.ndarray, *place: torch.Tensor) -> torch.Tensor:
    """The entry at a place, `[…, P]`, without the axes of what makes no difference: as people write it."""
    varies = [bool((table != table.take([0], axis)).any()) for axis in range(len(place))]
    zero = torch.zeros((), dtype=torch.long)
    return torch.tensor(table)[tuple(index if v else zero for index, v in zip(place, varies, strict=True))]


def chosen(edge: Edge, value: torch.Tensor) -> torch.Tensor:
    """The effect of a discrete parent's value, written in one of the ways in which people write it."""
    effect = torch.tensor(edge.effect)  # [K, P]
    K = len(effect)
    if edge.style == "shortcut" and not bool((value > 0).any()):
        return effect[0].expand(*value.shape, -1)
    if edge.style in ("where", "shortcut"):
        result = effect[0]
        for k in range(1, K):
            result = torch.where((value == k)[..., None], effect[k], result)
        return result
    if edge.style == "fill":
        result = effect[0].repeat(*value.shape, 1)
        for k in range(1, K):
            result[value == k] = effect[k]
        return result
    if edge.style == "sum":
        return sum((value == k).to(effect.dtype)[..., None] * effect[k] for k in range(K))
    if edge.style == "numpy":
        return torch.from_numpy(edge.effect[value.detach().numpy().astype(int)])
    return effect[value.long()]


def weighted(site: Site, edge: Edge, value: torch.Tensor) -> torch.Tensor:
    """The effect of a normal parent's value."""
    effect = torch.tensor(edge.effect)  # [P]
    if site.values:
        return value[..., None] * effect
    if edge.style == "fill":
        result = torch.empty(*value.shape, 2, dtype=value.dtype)
        result[..., 0] = value
        result[..., 1] = value.tanh()
        return result.mul_(effect)
    return torch.stack([value, value.tanh()], -1) * effect


def episodes_of(d: Description, data: Data, model: Structured) -> Episodes:
    """The data as the library takes them."""
    sites, B, T = signature(model).observations, len(data.actions), d.horizon
    actions, lengths = np.zeros((B, T), dtype=int), [len(row) for row in data.actions]
    for b, row in enumerate(data.actions):
        actions[b, : len(row)] = row
    values, flags, first, first_flags = {}, {}, {}, {}
    for i, site in enumerate(d.sites):
        spec = sites[site.name]
        array, known = np.zeros((B, T + 1, site.size)), np.zeros((B, T + 1, site.size), dtype=bool)
        for b in range(B):
            for t, seen in enumerate(data.seen[b]):
                for j, value in enumerate(seen[i]):
                    array[b, t, j], known[b, t, j] = (0.0, False) if value is None else (value, True)
        v = torch.tensor(array).to(spec.dtype).reshape(B, T + 1, *spec.shape)
        f = torch.tensor(known if spec.plates else known[..., 0]).reshape(B, T + 1, *spec.plates)
        values[site.name], flags[site.name] = v[:, 1:], f[:, 1:]
        first[site.name], first_flags[site.name] = v[:, 0], f[:, 0]
    return Episodes(
        torch.tensor(actions),
        values,
        flags,
        lengths=torch.tensor(lengths),
        initial_observations=first if d.initial_observation else None,
        initially_observed=first_flags if d.initial_observation else None,
    )


# ---------------------------------------------------------------------------------------------------------
# The generator


STYLES = ("where", "shortcut", "select", "fill", "sum", "lookup", "numpy")


def describe(seed: int) -> Description:
    """A random description: chains, forks and collisions of sites, hidden always, sometimes or by a value."""
    rng = np.random.default_rng(seed)
    while True:
        d = _described(rng, finite=seed % 2 == 0)
        # Quadrature goes over one or two real numbers, and something must depend on something.
        reals = {i for site in d.sites for i in site.parents if not d.sites[i].values}
        most = 2 if d.finite else 99 if linear_program(d) else 1
        if any(site.edges for site in d.sites) and sum(d.sites[i].size for i in reals) <= most:
            return d


def linear_program(d: Description) -> bool:
    """Whether all sites are normal, and the program is linear."""
    return all(not site.values for site in d.sites) and is_linear(d, Data([], []))


def _described(rng: np.random.Generator, finite: bool) -> Description:
    C, A = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    N = int(rng.integers(2, 4))
    R = N if finite else 2
    kinds = [(2, 3), (0,), (0, 2, 3)][rng.choice(3, p=[0.4, 0.1, 0.5] if finite else [0.15, 0.45, 0.4])]
    general = (
        not finite and rng.random() < 0.4
    )  # regions, scales that depend on real numbers, logits on the state
    vectors = "event" if rng.random() < 0.6 else "plate"
    n, sites = int(rng.integers(2, 5)), []
    for i in range(n):
        K = int(rng.choice(kinds))
        size = 2 if rng.random() < 0.2 and i < 3 else 1
        sites.append(
            _site(rng, sites, f"{'abcd'[i]}", K, size, (C, A + 1, R), finite, general, vectors, i == n - 1)
        )
    if finite:
        first, moves = rng.dirichlet(np.ones(N), C), rng.dirichlet(np.ones(N), (C, A, N))
        if rng.random() < 0.4:
            first = np.eye(N)[rng.integers(N, size=C)]  # other states are met later
    else:
        first = np.stack([rng.normal(0, 0.5, C), rng.uniform(0.4, 1, C)], -1)
        moves = np.stack(
            [rng.uniform(-1, 1, (C, A)), rng.normal(0, 0.5, (C, A)), rng.uniform(0.4, 0.8, (C, A))], -1
        )
    return Description(first, moves, tuple(sites), int(rng.integers(1, 4)), vectors, bool(rng.random() < 0.3))


def _site(rng, earlier, name, K, size, shape, finite, general, vectors, last) -> Site:
    C, A1, _ = shape
    P = K or 2
    # What makes a difference, apart from parents: often nothing.
    varies = rng.random(3) < [0.6, 0.4, 0.6 if finite else 0.0]
    base = rng.normal(0, 1, (*np.where(varies, shape, 1), P)) * np.ones((*shape, 1))
    slope = np.zeros((C, P))
    if not K:
        base[..., 1] = np.log(rng.uniform(0.4, 0.8, (C if varies[0] else 1, 1, 1)))
    if not finite and (general or not K):
        slope[:, : K or 1] = rng.normal(0, 1, (C, K or 1)) * (rng.random() < 0.7)
    if K and rng.random() < 0.3:
        base[..., 0] += 6.9  # other values are rare
    edges = []
    for i, parent in enumerate(earlier):
        if rng.random() < 0.55:
            edges.append(_edge(rng, i, parent.values, K, shape, finite or general, general))
    shown = np.ones((A1, size), dtype=bool)
    gate = None
    rule = rng.choice(["on", "off", "by action", "gated", "by cell"], p=[0.35, 0.25, 0.15, 0.2, 0.05])
    if last or (rule == "by cell" and (vectors == "event" or size == 1)):
        rule = "on"
    if rule == "off":
        shown[:] = False
    elif rule == "by action":
        shown[:] = rng.random((A1, 1)) < 0.5
    elif rule == "by cell":
        shown[:, 0] = False
    gates = [
        i
        for i, site in enumerate(earlier)
        if (site.values, site.gate) == (2, None)
        and (site.size == 1 or (site.size, vectors) == (size, "plate"))
    ]
    if rule == "gated" and gates:
        gate = int(rng.choice(gates))  # it is seen whenever what it gates may be
        shown = shown & earlier[gate].shown
    return Site(name, K, size, base, slope, tuple(edges), shown, gate, str(rng.choice(["mask", "outer"])))


def _edge(rng, i, values, K, shape, by_region, general) -> Edge:
    C, A1, R = shape
    where = np.ones(shape)
    if rng.random() < 0.3:
        where *= (np.arange(C) == rng.integers(C))[:, None, None]
    if rng.random() < 0.3:
        where *= (np.arange(A1) == rng.integers(A1))[:, None]
    if by_region and rng.random() < 0.4:
        where *= np.arange(R) == rng.integers(R)
    P = K or 2
    if values:
        effect = rng.normal(0, 2, (values, P))
        if not K:
            effect[:, 1] = rng.uniform(0, 2, values) * (rng.random() < 0.5)  # never narrower than its base
    else:
        effect = rng.uniform(-1.2, 1.2, P)
        if not K:
            effect[1] *= 0.4 * (general and rng.random() < 0.5)
    return Edge(i, where, effect, str(rng.choice(STYLES)))


def draw(d: Description, seed: int, episodes: int) -> Data:
    """Episodes of a description; three in ten discrete values are drawn as if all were as likely.

    Some end early, and some of what could be seen is missing, perhaps a gate whose value can be inferred.
    """
    rng = np.random.default_rng(seed)
    missing = rng.choice([0.0, 0.15])
    ragged = rng.random() < 0.3
    data = Data([], [])
    for _ in range(episodes):
        T = int(rng.integers(1, d.horizon + 1)) if ragged else d.horizon
        actions, c = rng.integers(d.actions, size=T).tolist(), int(rng.integers(d.contexts))
        s = rng.choice(d.first.shape[1], p=d.first[c]) if d.finite else rng.normal(*d.first[c])
        seen = []
        for t, a in enumerate([d.actions, *actions]):
            if t and d.finite:
                s = rng.choice(d.first.shape[1], p=d.moves[c, a, s])
            elif t:
                factor, push, scale = d.moves[c, a]
                s = rng.normal(factor * s + push, scale)
            shown = _drawn(d, rng, c, a, np.asarray(s), missing)
            seen.append(shown if t or d.initial_observation else [[None] * site.size for site in d.sites])
        data.actions.append(actions)
        data.seen.append(seen)
    return data


def _drawn(
    d: Description, rng: np.random.Generator, c: int, a: int, s: np.ndarray, missing: float
) -> Observed:
    values: dict = {}
    seen: Observed = []
    for i, site in enumerate(d.sites):
        for j in range(site.size):
            theta = parameters(d, i, j, c, a, s, values)
            if site.values:
                p = np.array(probabilities(theta))
                values[i, j] = int(
                    rng.integers(site.values) if rng.random() < 0.3 else rng.choice(site.values, p=p)
                )
            else:
                values[i, j] = float(rng.normal(theta[0], np.exp(theta[1])))
        lost = rng.random() < missing
        seen.append(
            [None if lost or not visible(d, i, j, a, values) else values[i, j] for j in range(site.size)]
        )
    return seen


def simpler(d: Description) -> Iterator[Description]:
    """The same with one thing less, to find the least that still fails."""
    if d.horizon > 1:
        yield replace(d, horizon=1)
    if d.initial_observation:
        yield replace(d, initial_observation=False)
    if d.vectors == "plate":
        yield replace(d, vectors="event")
    if d.contexts > 1:
        for c in range(d.contexts):
            yield replace(
                d,
                first=d.first[c : c + 1],
                moves=d.moves[c : c + 1],
                sites=tuple(
                    replace(
                        site,
                        base=site.base[c : c + 1],
                        slope=site.slope[c : c + 1],
                        edges=tuple(replace(e, where=e.where[c : c + 1]) for e in site.edges),
                    )
                    for site in d.sites
                ),
            )
    for i, site in enumerate(d.sites):
        if not any(i in other.parents for other in d.sites) and len(d.sites) > 1:
            yield replace(d, sites=tuple(_without(other, i) for other in d.sites if other is not site))
        for fewer in (
            *[replace(site, edges=tuple(e for e in site.edges if e is not edge)) for edge in site.edges],
            *([replace(site, gate=None)] if site.gate is not None else []),
            *([replace(site, size=1, shown=site.shown[:, :1])] if site.size > 1 else []),
            *([replace(site, style="mask")] if site.style != "mask" else []),
            *[
                replace(site, edges=tuple(replace(e, style="where") if e is edge else e for e in site.edges))
                for edge in site.edges
                if edge.style != "where"
            ],
        ):
            yield replace(d, sites=(*d.sites[:i], fewer, *d.sites[i + 1 :]))


def _without(site: Site, i: int) -> Site:
    edges = tuple(replace(e, parent=e.parent - (e.parent > i)) for e in site.edges)
    return replace(site, edges=edges, gate=site.gate if site.gate is None else site.gate - (site.gate > i))
