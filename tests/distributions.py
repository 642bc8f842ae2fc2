"""Every distribution that Pyro exports, with parameters, and an oracle that owes nothing to Pyro or torch.

A case has one set of parameters for each of three contexts; in the last, something is impossible that is not
in the first, wherever the family allows that.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro.distributions as dist
import torch
import torch.distributions as td
from scipy import integrate, special, stats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DRAWS = 30_000
"""Of oracles that draw."""

LEVELS = (np.arange(2000) + 0.5) / 2000
EVEN = np.full(2000, 1 / 2000)


def exported() -> set[str]:
    """Names of all distributions that torch or Pyro export."""
    return {
        name
        for module in (dist, td)
        for name, member in vars(module).items()
        if inspect.isclass(member) and issubclass(member, (td.Distribution, dist.Distribution))
    }


@dataclass(frozen=True)
class Oracle:
    """A distribution.

    Attributes:
        log_density: Of a value `[*event]`.
        nodes: What stands for the distribution in expectations: points `[K, *event]` and weights `[K]`. All
            its values, or the nodes of a quadrature rule, or draws.
        drawn: Whether they are draws.
    """

    log_density: Callable[[np.ndarray], float]
    nodes: Callable[[], tuple[np.ndarray, np.ndarray]]
    drawn: bool = False

    @cached_property
    def points(self) -> np.ndarray:
        return self.nodes()[0]

    @cached_property
    def weights(self) -> np.ndarray:
        return self.nodes()[1]


def continuous(frozen: Any) -> Oracle:
    """One of scipy's, by its quantiles."""
    return Oracle(frozen.logpdf, lambda: (frozen.ppf(LEVELS), EVEN))


def counts(frozen: Any, top: int) -> Oracle:
    """One of scipy's, on 0 … top."""
    k = np.arange(top + 1)
    return Oracle(frozen.logpmf, lambda: (k.astype(float), frozen.pmf(k)))


def density(pdf: Callable[[Any], Any], low: float, high: float) -> Oracle:
    """By its density on an interval, and the midpoint rule."""
    x = low + (high - low) * LEVELS
    return Oracle(
        lambda v: np.log(pdf(v)) if low <= v <= high else -np.inf, lambda: (x, pdf(x) * (high - low) * EVEN)
    )


def finite(values: Sequence[Any], probs: Any) -> Oracle:
    """By all its values."""
    points, p = np.array(values, dtype=float), np.array(probs, dtype=float) / np.sum(probs)

    def log_density(value):
        at = [np.allclose(value, point, rtol=1e-6, atol=0) for point in points]
        with np.errstate(divide="ignore"):
            return np.log(p[at].sum())

    return Oracle(log_density, lambda: (points, p))


def drawn(
    log_density: Callable[[Any], Any], draw: Callable[[np.random.Generator, int], np.ndarray]
) -> Oracle:
    """By its density, and draws from it."""
    return Oracle(
        log_density,
        lambda: (draw(np.random.default_rng(0), DRAWS), np.full(DRAWS, 1 / DRAWS)),
        drawn=True,
    )


def by_scipy(frozen: Any) -> Oracle:
    """One of scipy's, by its draws."""
    return drawn(frozen.logpdf, lambda rng, n: frozen.rvs(n, random_state=rng))


def mixture(weights: Sequence[float], parts: Sequence[Oracle]) -> Oracle:
    def log_density(value):
        with np.errstate(divide="ignore"):
            return special.logsumexp(
                np.log(weights) + np.array([float(part.log_density(value)) for part in parts])
            )

    return Oracle(
        log_density,
        lambda: (
            np.concatenate([part.points for part in parts]),
            np.concatenate([w * part.weights for w, part in zip(weights, parts, strict=True)]),
        ),
        drawn=any(part.drawn for part in parts),
    )


@dataclass(frozen=True, eq=False)
class Case:
    """How a distribution is made, and what is true of it.

    Attributes:
        make: From parameters (tensors).
        parameters: By name, one value for each context.
        oracle: From the parameters of one context (NumPy); None where every backend has to refuse.
        values: To score.
        outside: Values that are impossible whatever the parameters.
        gaussian: Whether Kalman filters may take it.
        batched: Whether Pyro allows parameters that differ between contexts; else all have the first.
        rough: Error of Pyro's own approximation to the density.
    """

    make: Callable[..., Any]
    parameters: dict[str, list[Any]]
    oracle: Callable[..., Oracle] | None
    values: Sequence[Any]
    outside: Sequence[Any] = ()
    gaussian: bool = False
    batched: bool = True
    rough: float = 0.0
    dtype: torch.dtype | None = field(default=None)

    def of(self, c: int) -> dict[str, Any]:
        """The parameters in a context."""
        return {name: table[c if self.batched else 0] for name, table in self.parameters.items()}

    @cache  # noqa: B019
    def truth(self, c: int) -> Oracle:
        """What is true in a context."""
        return self.oracle(**{name: np.array(value, dtype=float) for name, value in self.of(c).items()})

    def at(self, context: torch.Tensor) -> Any:
        """The distribution in contexts `[C, 1, 1]`."""
        if not self.batched:
            return self.make(**{name: torch.tensor(value) for name, value in self.of(0).items()})
        return self.make(**{name: torch.tensor(table)[context] for name, table in self.parameters.items()})

    def recorded(self, dtype: torch.dtype) -> torch.Tensor:
        """The values to score, as a record holds them."""
        return torch.tensor(np.array(self.values)).to(self.dtype or dtype)


def one_hot(K: int) -> list[list[float]]:
    return np.eye(K).tolist()


LOC, SCALE = [0.3, -0.5, 1.0], [1.0, 0.7, 0.4]
POINTS = [-1.1, 0.2, 0.9]
POSITIVE = [0.1, 0.7, 2.5]
UNIT = [0.1, 0.5, 0.95]


def location_scale(name: str, frozen: Callable[..., Any], **more: Any) -> Case:
    return Case(
        getattr(dist, name),
        {"loc": LOC, "scale": SCALE},
        lambda loc, scale: continuous(frozen(loc, scale)),
        POINTS,
        **more,
    )


def positive(name: str, parameters: dict[str, list[float]], frozen: Callable[..., Any], **more: Any) -> Case:
    more.setdefault("outside", [-0.5])
    return Case(getattr(dist, name), parameters, lambda **p: continuous(frozen(**p)), POSITIVE, **more)


MEAN = [[0.3, -0.4], [0.0, 0.5], [1.0, 1.0]]
TRIL = [[[1.0, 0.0], [0.3, 0.6]], [[0.5, 0.0], [-0.2, 0.4]], [[1.0, 0.0], [0.0, 1.0]]]
VECTORS = [[0.1, -0.2], [0.8, 0.5]]


def gaussian(mean: Any, covariance: Any) -> Oracle:
    return drawn(
        stats.multivariate_normal(mean, covariance).logpdf,
        lambda rng, n: rng.multivariate_normal(mean, covariance, n),
    )


def simplex(log_density: Callable[[float], Any], first: Callable[[np.random.Generator, int], Any]) -> Oracle:
    """On the simplex of two, by the density and draws of the first component."""

    def draw(rng, n):
        x = first(rng, n)
        return np.stack([x, 1 - x], -1)

    return drawn(lambda value: log_density(float(value[0])), draw)


def concrete(temperature: float, logit: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Density and draws of `sigmoid((logit + logistic) / temperature)`."""

    def log_density(x):
        if np.isinf(logit):
            return -np.inf
        return stats.logistic(logit / temperature, 1 / temperature).logpdf(special.logit(x)) - np.log(
            x * (1 - x)
        )

    return log_density, lambda rng, n: special.expit((logit + rng.logistic(size=n)) / temperature)


def log_odds(p: float) -> float:
    return float(special.logit(p))


def negative_binomial(total_count: float, probs: float) -> Any:
    return stats.nbinom(total_count, 1 - probs)


def certain(point: Any, log_density: float = 0.0) -> Oracle:
    """One value, and no other."""
    return Oracle(
        lambda value: log_density if np.allclose(value, point, rtol=1e-6, atol=0) else -np.inf,
        lambda: (np.array([point], dtype=float), np.ones(1)),
    )


def continuous_bernoulli(probs: float) -> Oracle:
    rate = log_odds(probs)
    mass = integrate.quad(lambda x: np.exp(rate * x), 0, 1)[0]
    return density(lambda x: np.exp(rate * x) / mass, 0.0, 1.0)


def soft_asymmetric(loc: float, scale: float, asymmetry: float, softness: float) -> Oracle:
    sharp, noise = stats.laplace_asymmetric(asymmetry, loc, scale), stats.norm(0, softness * scale)

    def pdf(x):
        return integrate.quad(
            lambda e: sharp.pdf(x - e) * noise.pdf(e), -8 * scale, 8 * scale, points=[x - loc]
        )[0]

    return drawn(
        lambda x: np.log(pdf(x)),
        lambda rng, n: sharp.rvs(n, random_state=rng) + noise.rvs(n, random_state=rng),
    )


def projected_normal(concentration: np.ndarray) -> Oracle:
    def log_density(value):
        ray = lambda r: r * np.exp(-0.5 * np.sum((r * value - concentration) ** 2)) / (2 * np.pi)  # noqa: E731
        return np.log(integrate.quad(ray, 0, 20)[0])

    def draw(rng, n):
        x = concentration + rng.normal(size=(n, 2))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    return drawn(log_density, draw)


def torus(phi_loc, psi_loc, phi_concentration, psi_concentration, correlation) -> Oracle:
    """The sine bivariate von Mises distribution, on a fine grid."""

    def log_unnormalised(phi, psi):
        a, b = phi - phi_loc, psi - psi_loc
        around = phi_concentration * np.cos(a) + psi_concentration * np.cos(b)
        return around + correlation * np.sin(a) * np.sin(b)

    x = -np.pi + 2 * np.pi * (np.arange(200) + 0.5) / 200
    phi, psi = (axis.ravel() for axis in np.meshgrid(x, x))
    p = np.exp(log_unnormalised(phi, psi))
    log_mass = np.log(p.sum() * (2 * np.pi / 200) ** 2)
    return Oracle(lambda v: log_unnormalised(*v) - log_mass, lambda: (np.stack([phi, psi], -1), p / p.sum()))


def correlation(concentration: float, whole: bool) -> Oracle:
    """Two variables' correlation r: `(1 + r) / 2` is beta distributed; as the matrix, or its root."""

    def matrix(r):
        lower = [[np.ones_like(r), r], [r, np.ones_like(r)]]
        if not whole:
            lower = [[np.ones_like(r), np.zeros_like(r)], [r, np.sqrt(1 - r**2)]]
        return np.moveaxis(np.array(lower), (0, 1), (-2, -1))

    frozen = stats.beta(concentration, concentration, loc=-1, scale=2)
    return Oracle(lambda v: frozen.logpdf(v[1, 0]), lambda: (matrix(frozen.ppf(LEVELS)), EVEN))


def hidden_markov(initial, transition, probs) -> Oracle:
    """A hidden Markov model with two states seen twice, through Bernoullis: by enumeration."""
    paths = [(a, b) for a in range(2) for b in range(2)]

    def probability(value):
        def seen(state, bit):
            return probs[state] if bit else 1 - probs[state]

        # Pyro moves before it looks.
        start = initial @ transition
        return sum(start[a] * seen(a, value[0]) * transition[a, b] * seen(b, value[1]) for a, b in paths)

    values = [[x, y] for x in (0.0, 1.0) for y in (0.0, 1.0)]
    return finite(values, [probability(value) for value in values])


def gaussian_chain(loc) -> Oracle:
    """`x_0 ~ N(loc, 1)`, then twice `x' = x / 2 + N(0, 1)`, `z = x' + N(0, 1)`."""
    step, look = np.array([[0.5, 1.0, 0.0], [0.25, 0.5, 1.0]]), np.eye(2)
    return gaussian(np.array([0.5, 0.25]) * loc, step @ step.T + look)


def trees(edge_logits) -> Oracle:
    """Over three vertices: two of the edges (0, 1), (0, 2), (1, 2)."""
    edges = [(0, 1), (0, 2), (1, 2)]
    pairs = [(0, 1), (0, 2), (1, 2)]
    weights = [np.exp(edge_logits[i] + edge_logits[j]) for i, j in pairs]
    return finite([[edges[i], edges[j]] for i, j in pairs], weights)


def matchings(logits, assignments) -> Oracle:
    with np.errstate(over="ignore"):
        return finite(
            assignments, [np.exp(sum(logits[s, d] for s, d in enumerate(each))) for each in assignments]
        )


def zero_inflated(gate: float, base: Oracle, atom: bool = False) -> Oracle:
    """With probability `gate` zero; the base is continuous if zero is an `atom` of nobody else's."""

    def log_density(value):
        with np.errstate(divide="ignore"):
            if value == 0:
                return np.log(gate + (0.0 if atom else (1 - gate) * np.exp(base.log_density(value))))
            return np.log1p(-gate) + base.log_density(value)

    return Oracle(
        log_density, lambda: (np.append(base.points, 0.0), np.append((1 - gate) * base.weights, gate))
    )


def skewed(loc, concentration, skewness) -> Oracle:
    base = stats.vonmises(concentration)
    oracle = density(lambda x: base.pdf(x - loc) * (1 + skewness * np.sin(x - loc)), -np.pi, np.pi)
    return Oracle(lambda v: oracle.log_density(v[0]), lambda: (oracle.points[:, None], oracle.weights))


def ordered(predictor, cutpoints) -> Oracle:
    below = np.concatenate([[0.0], special.expit(cutpoints - predictor), [1.0]])
    return finite(range(len(below) - 1), np.diff(below))


def bernoulli(probs) -> Oracle:
    return finite([0.0, 1.0], [1 - probs, probs])


NO_SITES = {
    "Distribution": "abstract",
    "ExponentialFamily": "abstract",
    "LKJCorrCholesky": "an old name of `LKJCholesky`",
    "TorchDistribution": "abstract",
    "Unit": "has no value: what `pyro.factor` is made of",
}
"""What is exported, but makes no sense as a site."""


PROBS = [0.3, 0.6, 0.0]
TRIPLES = [[0.2, 0.3, 0.5], [0.6, 0.2, 0.2], [0.5, 0.5, 0.0]]
SHAPES = {"concentration1": [2.0, 0.7, 1.0], "concentration0": [3.0, 1.2, 1.0]}
RATES = {"concentration": [2.0, 0.7, 1.0], "rate": [1.0, 0.5, 2.0]}
CONCENTRATIONS = [[1.0, 2.0, 3.0], [0.7, 0.7, 0.7], [5.0, 1.0, 1.0]]
ASYMMETRIC = {"loc": LOC, "scale": SCALE, "asymmetry": [0.5, 2.0, 1.0]}
UP_TO_FOUR = {"values": [0.0, 2.0, 4.0], "outside": [-1.0, 1.5, 5.0]}
MIXED = {
    "locs": [[[0.0, 0.0], [1.0, -1.0]], [[0.5, 0.5], [-1.0, 1.0]], [[0.0, 0.0], [2.0, 2.0]]],
    "component_logits": [[0.0, 0.5], [1.0, 0.0], [0.0, -1.0]],
}


def counted(
    make: Callable[..., Any], parameters: dict[str, list[Any]], frozen: Any, top: int, **more: Any
) -> Case:
    """On 0 … top, by one of scipy's."""
    more = {"values": [0.0, 1.0, 7.0], "outside": [-1.0, 0.5]} | more
    return Case(make, parameters, lambda **p: counts(frozen(**p), top), **more)


def chain_of_pyro(make: Callable[..., Any], loc: torch.Tensor, batch: tuple[int, ...] = ()) -> Any:
    one = dist.Normal(torch.zeros(*batch, 1), 1.0).to_event(1)
    start = dist.Normal(loc.reshape(*loc.shape, *batch, 1), 1.0).to_event(1)
    half, unit = torch.full((*batch, 1, 1), 0.5), torch.ones(*batch, 1, 1)
    return make(start, half, one, unit, one, duration=2)


def refused(make: Callable[..., Any], values: Sequence[Any], **parameters: list[Any]) -> Case:
    """What every backend has to refuse."""
    return Case(make, parameters, None, values, batched=bool(parameters))


def standard(dim: int) -> Any:
    return dist.MultivariateNormal(torch.zeros(dim), torch.eye(dim))


CASES: dict[str, Case] = {
    "AVFMultivariateNormal": Case(
        lambda: dist.AVFMultivariateNormal(
            torch.tensor(MEAN[0]), torch.tensor(TRIL[0]), torch.zeros(2, 1, 2)
        ),
        {},
        lambda: gaussian(MEAN[0], np.array(TRIL[0]) @ np.array(TRIL[0]).T),
        VECTORS,
        gaussian=True,
        batched=False,
    ),
    "AffineBeta": Case(
        dist.AffineBeta,
        {
            "concentration1": [2.0, 3.0, 1.5],
            "concentration0": [3.0, 1.2, 2.0],
            "loc": [-1.0, 0.0, 0.5],
            "scale": [3.0, 1.5, 1.0],
        },
        lambda concentration1, concentration0, loc, scale: continuous(
            stats.beta(concentration1, concentration0, loc, scale)
        ),
        [0.3, 0.7, 1.2],
        outside=[-1.5, 2.5],
    ),
    "AsymmetricLaplace": Case(
        dist.AsymmetricLaplace,
        ASYMMETRIC,
        lambda loc, scale, asymmetry: continuous(stats.laplace_asymmetric(asymmetry, loc, scale)),
        POINTS,
    ),
    "Bernoulli": Case(dist.Bernoulli, {"probs": PROBS}, bernoulli, [0.0, 1.0], outside=[0.5, 2.0]),
    "Beta": Case(
        dist.Beta,
        SHAPES,
        lambda concentration1, concentration0: continuous(stats.beta(concentration1, concentration0)),
        UNIT,
        outside=[-0.1, 1.1],
    ),
    "BetaBinomial": counted(
        dist.BetaBinomial,
        {**SHAPES, "total_count": [4, 4, 2]},
        lambda concentration1, concentration0, total_count: stats.betabinom(
            total_count, concentration1, concentration0
        ),
        4,
        **UP_TO_FOUR,
    ),
    "Binomial": counted(
        dist.Binomial,
        {"total_count": [4, 4, 4], "probs": PROBS},
        lambda total_count, probs: stats.binom(total_count, probs),
        4,
        **UP_TO_FOUR,
    ),
    "Categorical": Case(
        dist.Categorical,
        {"probs": TRIPLES},
        lambda probs: finite(range(3), probs),
        [0, 1, 2],
        outside=[3, -1],
        dtype=torch.long,
    ),
    "Cauchy": location_scale("Cauchy", stats.cauchy),
    "Chi2": positive("Chi2", {"df": [2.0, 3.5, 5.0]}, stats.chi2),
    "CoalescentTimes": refused(
        lambda rate: dist.CoalescentTimes(torch.zeros(2), rate), [[-0.5]], rate=[1.0, 2.0, 0.5]
    ),
    "CoalescentTimesWithRate": refused(
        lambda: dist.CoalescentTimesWithRate(torch.zeros(2), torch.ones(2)), [[-0.5]]
    ),
    "ContinuousBernoulli": Case(
        dist.ContinuousBernoulli, {"probs": [0.2, 0.9, 0.5]}, continuous_bernoulli, UNIT, outside=[-0.1, 1.1]
    ),
    "Delta": Case(
        dist.Delta,
        {"v": [0.1, 0.1, 0.7], "log_density": [0.0, 0.5, 0.0]},
        lambda v, log_density: certain(v, float(log_density)),
        [0.1],
        outside=[0.2],
        gaussian=True,
    ),
    "Dirichlet": Case(
        dist.Dirichlet,
        {"concentration": CONCENTRATIONS},
        lambda concentration: drawn(
            lambda v: stats.dirichlet(concentration).logpdf(v / v.sum()),
            lambda rng, n: rng.dirichlet(concentration, n),
        ),
        [[0.2, 0.3, 0.5], [0.8, 0.1, 0.1]],
        outside=[[0.2, 0.3, 0.6], [-0.1, 0.6, 0.5]],
    ),
    "DirichletMultinomial": Case(
        lambda concentration: dist.DirichletMultinomial(concentration, 4),
        {"concentration": CONCENTRATIONS},
        lambda concentration: drawn(
            stats.dirichlet_multinomial(concentration, 4).logpmf,
            lambda rng, n: rng.multinomial(4, rng.dirichlet(concentration, n)).astype(float),
        ),
        [[1.0, 3.0, 0.0], [2.0, 1.0, 1.0]],
        outside=[[1.0, 1.0, 1.0], [0.5, 0.5, 3.0], [-1.0, 3.0, 2.0]],
    ),
    "DiscreteHMM": Case(
        lambda initial, transition, probs: dist.DiscreteHMM(
            initial.log(),
            transition[..., None, :, :].expand(*transition.shape[:-2], 2, 2, 2).log(),
            dist.Bernoulli(probs[..., None, :]),
            duration=2,
        ),
        {
            "initial": [[0.5, 0.5], [0.1, 0.9], [1.0, 0.0]],
            "transition": [[[0.7, 0.3], [0.2, 0.8]], [[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]],
            "probs": [[0.2, 0.7], [0.3, 0.5], [0.0, 0.5]],
        },
        hidden_markov,
        [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]],
    ),
    "Empirical": Case(
        dist.Empirical,
        {
            "samples": [[0.1, 0.2, 0.1], [0.1, 0.2, 0.3], [0.2, 0.3, 0.4]],
            "log_weights": [[0.0, 1.0, -1.0]] * 3,
        },
        lambda samples, log_weights: finite(samples, np.exp(log_weights)),
        [0.1, 0.2],
        outside=[0.15],
    ),
    "Exponential": positive(
        "Exponential", {"rate": [0.5, 1.0, 3.0]}, lambda rate: stats.expon(scale=1 / rate)
    ),
    "FisherSnedecor": positive(
        "FisherSnedecor", {"df1": [3.0, 5.0, 4.0], "df2": [4.0, 6.0, 8.0]}, lambda df1, df2: stats.f(df1, df2)
    ),
    "FoldedDistribution": Case(
        lambda loc, scale: dist.FoldedDistribution(dist.Normal(loc, scale)),
        {"loc": LOC, "scale": SCALE},
        lambda loc, scale: Oracle(
            stats.foldnorm(abs(loc) / scale, scale=scale).logpdf,
            lambda: (np.abs(stats.norm(loc, scale).ppf(LEVELS)), EVEN),
        ),
        [0.0, 0.4, 1.5],
        outside=[-0.4],
    ),
    "Gamma": positive("Gamma", RATES, lambda concentration, rate: stats.gamma(concentration, scale=1 / rate)),
    "GammaGaussianHMM": refused(
        lambda: dist.GammaGaussianHMM(
            dist.Gamma(2.0, 1.0), *[standard(1), torch.eye(1)] * 2, standard(1), duration=2
        ),
        [[[0.1], [0.4]]],
    ),
    "GammaPoisson": counted(
        dist.GammaPoisson,
        RATES,
        lambda concentration, rate: stats.nbinom(concentration, rate / (1 + rate)),
        200,
    ),
    "GaussianHMM": Case(
        lambda loc: chain_of_pyro(dist.GaussianHMM, loc),
        {"loc": LOC},
        lambda loc: drawn(
            lambda v: gaussian_chain(loc).log_density(v[..., 0]),
            lambda rng, n: gaussian_chain(loc).points[:n, :, None],
        ),
        [[[0.1], [0.4]], [[1.0], [-1.0]]],
    ),
    "GaussianMRF": refused(
        lambda: dist.GaussianMRF(standard(1), standard(2).expand([2]), standard(2).expand([2])),
        [[[0.1], [0.4]]],
    ),
    "GaussianScaleMixture": Case(
        dist.GaussianScaleMixture,
        {"coord_scale": [[1.0, 0.5]], "component_logits": [[0.0, 0.5]], "component_scale": [[0.5, 2.0]]},
        lambda coord_scale, component_logits, component_scale: mixture(
            special.softmax(component_logits),
            [gaussian(np.zeros(2), np.diag((coord_scale * s) ** 2)) for s in component_scale],
        ),
        VECTORS,
        batched=False,
    ),
    "GeneralizedPareto": Case(
        dist.GeneralizedPareto,
        {"loc": [0.0, -0.5, 1.0], "scale": [1.0, 0.7, 0.4], "concentration": [0.2, -0.3, 0.5]},
        lambda loc, scale, concentration: continuous(stats.genpareto(concentration, loc, scale)),
        [0.2, 0.9, 1.5],
        outside=[-1.0],
    ),
    "Geometric": counted(
        dist.Geometric,
        {"probs": [0.3, 0.6, 1.0]},
        lambda probs: stats.geom(probs, loc=-1),
        200,
        values=[0.0, 1.0, 5.0],
    ),
    "GroupedNormalNormal": refused(
        lambda: dist.GroupedNormalNormal(
            torch.zeros(1), torch.ones(1), torch.ones(2), torch.zeros(2, dtype=torch.long)
        ),
        [0.5],
    ),
    "Gumbel": location_scale("Gumbel", stats.gumbel_r),
    "HalfCauchy": positive("HalfCauchy", {"scale": SCALE}, stats.halfcauchy),
    "HalfNormal": positive("HalfNormal", {"scale": SCALE}, stats.halfnorm),
    "ImproperUniform": refused(lambda: dist.ImproperUniform(td.constraints.positive, (), ()), POSITIVE),
    "Independent": Case(
        lambda probs: dist.Bernoulli(probs).to_event(1),
        {"probs": [[0.2, 0.7], [0.5, 0.5], [0.0, 1.0]]},
        lambda probs: finite(
            [[0, 0], [0, 1], [1, 0], [1, 1]],
            np.outer([1 - probs[0], probs[0]], [1 - probs[1], probs[1]]).ravel(),
        ),
        [[0.0, 1.0], [1.0, 1.0]],
        outside=[[0.5, 0.0]],
    ),
    "InverseGamma": positive(
        "InverseGamma",
        {"concentration": [2.0, 3.0, 1.0], "rate": [1.0, 0.5, 2.0]},
        lambda concentration, rate: stats.invgamma(concentration, scale=rate),
    ),
    "Kumaraswamy": Case(
        dist.Kumaraswamy,
        SHAPES,
        lambda concentration1, concentration0: Oracle(
            lambda x: (
                np.log(concentration1 * concentration0 * x ** (concentration1 - 1))
                + (concentration0 - 1) * np.log1p(-(x**concentration1))
            ),
            lambda: ((1 - (1 - LEVELS) ** (1 / concentration0)) ** (1 / concentration1), EVEN),
        ),
        UNIT,
        outside=[-0.1, 1.1],
    ),
    "LKJ": Case(
        lambda concentration: dist.LKJ(2, concentration),
        {"concentration": [1.0, 2.0, 0.5]},
        lambda concentration: correlation(concentration, whole=True),
        [[[1.0, 0.3], [0.3, 1.0]], [[1.0, -0.8], [-0.8, 1.0]]],
        outside=[[[1.0, 1.5], [1.5, 1.0]], [[2.0, 0.3], [0.3, 2.0]]],
    ),
    "LKJCholesky": Case(
        lambda concentration: dist.LKJCholesky(2, concentration),
        {"concentration": [1.0, 2.0, 0.5]},
        lambda concentration: correlation(concentration, whole=False),
        [[[1.0, 0.0], [0.6, 0.8]], [[1.0, 0.0], [-0.8, 0.6]]],
        outside=[[[1.0, 0.0], [0.6, 0.9]], [[1.0, 0.1], [0.6, 0.8]]],
    ),
    "Laplace": location_scale("Laplace", stats.laplace),
    "LogNormal": Case(
        dist.LogNormal,
        {"loc": LOC, "scale": SCALE},
        lambda loc, scale: continuous(stats.lognorm(scale, scale=np.exp(loc))),
        POSITIVE,
        outside=[-0.5, 0.0],
    ),
    "LogNormalNegativeBinomial": refused(
        lambda logits: dist.LogNormalNegativeBinomial(torch.tensor(2.0), logits, torch.tensor(0.5)),
        [0.0, 1.0],
        logits=LOC,
    ),
    "Logistic": location_scale("Logistic", stats.logistic),
    "LogisticNormal": Case(
        lambda loc, scale: dist.LogisticNormal(loc[..., None], scale[..., None]),
        {"loc": LOC, "scale": SCALE},
        lambda loc, scale: simplex(
            lambda x: stats.norm(loc, scale).logpdf(special.logit(x)) - np.log(x * (1 - x)),
            lambda rng, n: special.expit(rng.normal(loc, scale, n)),
        ),
        [[0.25, 0.75], [0.5, 0.5]],
        outside=[[0.5, 0.6], [-0.5, 1.5]],
    ),
    "LowRankMultivariateNormal": Case(
        dist.LowRankMultivariateNormal,
        {"loc": MEAN, "cov_factor": [[[1.0], [0.5]]] * 3, "cov_diag": [[0.5, 0.2], [1.0, 1.0], [0.3, 0.3]]},
        lambda loc, cov_factor, cov_diag: gaussian(loc, cov_factor @ cov_factor.T + np.diag(cov_diag)),
        VECTORS,
    ),
    "MaskedMixture": Case(
        lambda mask, rate, probs: dist.MaskedMixture(mask, dist.Poisson(rate), dist.Bernoulli(probs)),
        {"mask": [False, True, True], "rate": [1.5, 1.0, 1.0], "probs": [0.5, 0.3, 0.0]},
        lambda mask, rate, probs: bernoulli(probs) if mask else counts(stats.poisson(rate), 60),
        [0.0, 1.0, 3.0],
        outside=[-1.0, 0.5],
    ),
    "MixtureOfDiagNormals": Case(
        dist.MixtureOfDiagNormals,
        {**MIXED, "coord_scale": [[[1.0, 0.5], [0.5, 1.0]]] * 3},
        lambda locs, coord_scale, component_logits: mixture(
            special.softmax(component_logits),
            [gaussian(m, np.diag(s**2)) for m, s in zip(locs, coord_scale, strict=True)],
        ),
        VECTORS,
    ),
    "MixtureOfDiagNormalsSharedCovariance": Case(
        dist.MixtureOfDiagNormalsSharedCovariance,
        {**MIXED, "coord_scale": [[1.0, 0.5], [0.5, 1.0], [1.0, 1.0]]},
        lambda locs, coord_scale, component_logits: mixture(
            special.softmax(component_logits), [gaussian(m, np.diag(coord_scale**2)) for m in locs]
        ),
        VECTORS,
    ),
    "MixtureSameFamily": Case(
        lambda weights, probs: dist.MixtureSameFamily(dist.Categorical(weights), dist.Bernoulli(probs)),
        {"weights": [[0.3, 0.7], [0.5, 0.5], [1.0, 0.0]], "probs": [[0.2, 0.9], [0.0, 0.5], [0.0, 0.5]]},
        lambda weights, probs: bernoulli(float(weights @ probs)),
        [0.0, 1.0],
        outside=[0.5],
    ),
    "Multinomial": Case(
        lambda probs: dist.Multinomial(4, probs),
        {"probs": TRIPLES},
        lambda probs: drawn(
            stats.multinomial(4, probs).logpmf, lambda rng, n: rng.multinomial(4, probs, n).astype(float)
        ),
        [[1.0, 3.0, 0.0], [2.0, 1.0, 1.0]],
        outside=[[1.0, 1.0, 1.0], [0.5, 0.5, 3.0], [3.0, 3.0, -2.0]],
    ),
    "MultivariateNormal": Case(
        lambda loc, scale_tril: dist.MultivariateNormal(loc, scale_tril=scale_tril),
        {"loc": MEAN, "scale_tril": TRIL},
        lambda loc, scale_tril: gaussian(loc, scale_tril @ scale_tril.T),
        VECTORS,
        gaussian=True,
    ),
    "MultivariateStudentT": Case(
        dist.MultivariateStudentT,
        {"df": [3.0, 5.0, 4.0], "loc": MEAN, "scale_tril": TRIL},
        lambda df, loc, scale_tril: by_scipy(
            stats.multivariate_t(loc, scale_tril @ scale_tril.T, df=float(df))
        ),
        VECTORS,
    ),
    "NanMaskedNormal": location_scale("NanMaskedNormal", stats.norm, gaussian=True),
    "NegativeBinomial": counted(
        dist.NegativeBinomial, {"total_count": [3.0, 0.5, 2.0], "probs": PROBS}, negative_binomial, 200
    ),
    "Normal": location_scale("Normal", stats.norm, gaussian=True),
    "OneHotCategorical": Case(
        dist.OneHotCategorical,
        {"probs": TRIPLES},
        lambda probs: finite(one_hot(3), probs),
        one_hot(3),
        outside=[[1.0, 1.0, 0.0], [0.5, 0.5, 0.0]],
    ),
    "OneOneMatching": Case(
        dist.OneOneMatching,
        {"logits": [[[0.1, 0.5, -0.3], [0.0, 0.2, 0.9], [-1.0, 0.3, 0.4]]]},
        lambda logits: matchings(logits, list(permutations(range(3)))),
        [[0, 1, 2], [2, 0, 1]],
        outside=[[0, 0, 1]],
        batched=False,
        dtype=torch.long,
    ),
    "OneTwoMatching": Case(
        dist.OneTwoMatching,
        {"logits": [[[0.1, 0.5], [0.0, 0.2], [-1.0, 0.3], [0.4, 0.4]]]},
        lambda logits: matchings(logits, sorted(set(permutations([0, 0, 1, 1])))),
        [[0, 0, 1, 1], [1, 0, 0, 1]],
        outside=[[0, 0, 0, 1]],
        batched=False,
        dtype=torch.long,
    ),
    "OrderedLogistic": Case(
        dist.OrderedLogistic,
        {"predictor": [0.3, -0.5, 2.0], "cutpoints": [[-1.0, 0.5], [0.0, 1.0], [-2.0, 2.0]]},
        ordered,
        [0, 1, 2],
        outside=[3],
        dtype=torch.long,
    ),
    "Pareto": Case(
        dist.Pareto,
        {"scale": [0.5, 0.2, 1.0], "alpha": [2.0, 3.0, 1.5]},
        lambda scale, alpha: continuous(stats.pareto(alpha, scale=scale)),
        [0.6, 0.9, 2.5],
        outside=[-1.0, 0.1],
    ),
    "Poisson": counted(dist.Poisson, {"rate": [1.5, 4.0, 0.0]}, lambda rate: stats.poisson(rate), 60),
    "ProjectedNormal": Case(
        dist.ProjectedNormal,
        {"concentration": [[0.5, 0.3], [1.0, -2.0], [0.0, 0.0]]},
        projected_normal,
        [[0.6, 0.8], [-1.0, 0.0]],
        outside=[[0.6, 0.9]],
    ),
    "Rejector": Case(
        lambda: dist.Rejector(dist.Exponential(torch.tensor(1.0)), lambda x: -x, torch.tensor(0.5).log()),
        {},
        lambda: continuous(stats.expon(scale=0.5)),
        POSITIVE,
        batched=False,
    ),
    "RelaxedBernoulli": Case(
        dist.RelaxedBernoulli,
        {"temperature": [0.7, 1.0, 0.5], "probs": PROBS},
        lambda temperature, probs: drawn(*concrete(temperature, log_odds(probs))),
        UNIT,
        outside=[-0.1, 1.1],
    ),
    "RelaxedBernoulliStraightThrough": Case(
        dist.RelaxedBernoulliStraightThrough,
        {"temperature": [0.7, 1.0, 0.5], "probs": [0.3, 0.6, 0.9]},
        lambda temperature, probs: bernoulli(probs),
        [0.0, 1.0],
    ),
    "RelaxedOneHotCategorical": Case(
        lambda probs: dist.RelaxedOneHotCategorical(torch.tensor(0.7), probs),
        {"probs": [[0.3, 0.7], [0.6, 0.4], [0.0, 1.0]]},
        lambda probs: simplex(*concrete(0.7, log_odds(probs[0]))),
        [[0.25, 0.75], [0.5, 0.5]],
        outside=[[0.5, 0.6], [-0.5, 1.5]],
    ),
    "RelaxedOneHotCategoricalStraightThrough": Case(
        lambda probs: dist.RelaxedOneHotCategoricalStraightThrough(torch.tensor(0.7), probs),
        {"probs": [[0.3, 0.7], [0.6, 0.4], [0.9, 0.1]]},
        lambda probs: finite(one_hot(2), probs),
        one_hot(2),
    ),
    "SineBivariateVonMises": Case(
        lambda **p: dist.SineBivariateVonMises(**p),
        {
            "phi_loc": [0.0, 0.5, 1.0],
            "psi_loc": [0.3, -0.5, 0.0],
            "phi_concentration": [2.0, 3.0, 4.0],
            "psi_concentration": [3.0, 2.0, 4.0],
            "correlation": [0.5, -1.0, 0.0],
        },
        torus,
        VECTORS,
    ),
    "SineSkewed": Case(
        lambda loc, concentration, skewness: dist.SineSkewed(
            dist.VonMises(loc[..., None], concentration[..., None]).to_event(1), skewness[..., None]
        ),
        {"loc": LOC, "concentration": [1.0, 2.0, 0.5], "skewness": [0.5, -0.3, 0.9]},
        skewed,
        [[-1.1], [0.2], [2.9]],
        rough=1e-6,  # torch's von Mises
    ),
    "SkewLogistic": Case(
        dist.SkewLogistic,
        ASYMMETRIC,
        lambda loc, scale, asymmetry: continuous(stats.genlogistic(asymmetry, loc, scale)),
        POINTS,
    ),
    "SoftAsymmetricLaplace": Case(
        dist.SoftAsymmetricLaplace, {**ASYMMETRIC, "softness": [0.5, 1.0, 0.3]}, soft_asymmetric, POINTS
    ),
    "SoftLaplace": location_scale("SoftLaplace", stats.hypsecant),
    "SpanningTree": Case(
        dist.SpanningTree,
        {"edge_logits": [[0.1, 0.5, -0.3]]},
        trees,
        [[[0, 1], [0, 2]], [[0, 1], [1, 2]]],
        batched=False,
        dtype=torch.long,
    ),
    "Stable": Case(
        dist.Stable,
        {"stability": [1.5, 1.2, 1.8], "skew": [0.0, 0.0, 0.0], "scale": SCALE, "loc": LOC},
        lambda stability, skew, scale, loc: by_scipy(stats.levy_stable(stability, 0.0, loc, scale)),
        POINTS,
    ),
    "StudentT": Case(
        dist.StudentT,
        {"df": [3.0, 5.0, 1.0], "loc": LOC, "scale": SCALE},
        lambda df, loc, scale: continuous(stats.t(df, loc, scale)),
        POINTS,
    ),
    "TransformedDistribution": Case(
        lambda rate: dist.TransformedDistribution(
            dist.Poisson(rate), [td.transforms.AffineTransform(1.0, 0.1)]
        ),
        {"rate": [1.5, 4.0, 0.0]},
        lambda rate: Oracle(
            lambda v: stats.poisson(rate).logpmf(np.round((v - 1) / 0.1)),
            lambda: (1 + 0.1 * np.arange(60), stats.poisson(rate).pmf(np.arange(60))),
        ),
        [1.0, 1.3, 1.7],
        outside=[1.25, 0.9],
    ),
    "TruncatedPolyaGamma": refused(lambda: dist.TruncatedPolyaGamma(torch.ones(())), POSITIVE),
    "Uniform": Case(
        dist.Uniform,
        {"low": [0.0, -1.0, 0.5], "high": [1.0, 1.0, 2.0]},
        lambda low, high: continuous(stats.uniform(low, high - low)),
        [0.2, 0.9],
        outside=[-1.5, 2.5],
    ),
    "VonMises": Case(
        dist.VonMises,
        {"loc": LOC, "concentration": [1.0, 2.0, 0.5]},
        lambda loc, concentration: density(
            lambda x: stats.vonmises(concentration).pdf(x - loc), -np.pi, np.pi
        ),
        POINTS,
    ),
    "VonMises3D": refused(dist.VonMises3D, [[0.0, 0.6, 0.8]], concentration=[[0.5, 0.3, 0.1]] * 3),
    "Weibull": positive(
        "Weibull",
        {"scale": SCALE, "concentration": [0.7, 1.5, 3.0]},
        lambda scale, concentration: stats.weibull_min(concentration, scale=scale),
    ),
    "Wishart": Case(
        lambda df: dist.Wishart(df, torch.tensor([[1.0, 0.3], [0.3, 0.5]])),
        {"df": [3.0, 4.0, 5.0]},
        lambda df: by_scipy(stats.wishart(float(df), [[1.0, 0.3], [0.3, 0.5]])),
        [[[1.0, 0.2], [0.2, 0.8]], [[2.0, -0.5], [-0.5, 1.0]]],
        outside=[[[1.0, 2.0], [2.0, 1.0]]],
    ),
    "ZeroInflatedDistribution": Case(
        lambda loc, gate: dist.ZeroInflatedDistribution(dist.LogNormal(loc, 1.0), gate=gate),
        {"loc": LOC, "gate": PROBS},
        lambda loc, gate: zero_inflated(gate, continuous(stats.lognorm(1.0, scale=np.exp(loc))), atom=True),
        [0.0, 0.5, 2.0],
        outside=[-1.0],
    ),
    "ZeroInflatedNegativeBinomial": Case(
        lambda total_count, probs, gate: dist.ZeroInflatedNegativeBinomial(
            total_count, probs=probs, gate=gate
        ),
        {"total_count": [3.0, 0.5, 2.0], "probs": PROBS, "gate": [0.3, 0.6, 0.5]},
        lambda total_count, probs, gate: zero_inflated(
            gate, counts(negative_binomial(total_count, probs), 200)
        ),
        [0.0, 1.0, 7.0],
        outside=[-1.0, 0.5],
    ),
    "ZeroInflatedPoisson": Case(
        lambda rate, gate: dist.ZeroInflatedPoisson(rate, gate=gate),
        {"rate": [1.5, 4.0, 1.0], "gate": [0.3, 0.6, 1.0]},
        lambda rate, gate: zero_inflated(gate, counts(stats.poisson(rate), 60)),
        [0.0, 1.0, 7.0],
        outside=[-1.0, 0.5],
    ),
}


def like(name: str, make: Callable[..., Any], **changes: Any) -> Case:
    """The same distribution, made otherwise."""
    return replace(CASES[name], make=make, **changes)


CASES |= {
    "ExpandedDistribution": like(
        "Binomial",
        lambda total_count, probs: dist.ExpandedDistribution(dist.Binomial(total_count, probs), probs.shape),
    ),
    "ExtendedBetaBinomial": like("BetaBinomial", dist.ExtendedBetaBinomial),
    "ExtendedBinomial": like(
        "Binomial",
        dist.ExtendedBinomial,
        parameters={"total_count": [4, 4, 2], "probs": [0.3, 0.6, 1.0]},
    ),
    "IndependentHMM": like(
        "GaussianHMM", lambda loc: dist.IndependentHMM(chain_of_pyro(dist.GaussianHMM, loc, (1,)))
    ),
    "LinearHMM": like("GaussianHMM", lambda loc: chain_of_pyro(dist.LinearHMM, loc)),
    "MaskedDistribution": like(
        "Binomial", lambda total_count, probs: dist.Binomial(total_count, probs).mask(torch.tensor(True))
    ),
    "NanMaskedMultivariateNormal": like(
        "MultivariateNormal",
        lambda loc, scale_tril: dist.NanMaskedMultivariateNormal(loc, scale_tril=scale_tril),
    ),
    "OMTMultivariateNormal": like("MultivariateNormal", dist.OMTMultivariateNormal, batched=False),
    "OneHotCategoricalStraightThrough": like("OneHotCategorical", dist.OneHotCategoricalStraightThrough),
    "StableWithLogProb": like("Stable", dist.StableWithLogProb, rough=1e-3),
}
