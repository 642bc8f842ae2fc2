"""Simulation-based calibration: whether a filter's posteriors are what they claim to be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.arrays import are_probabilities, as_tensor, on_the_right
from cpomdp_ppl.errors import require, require_count, require_model
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference.backend import inference_scope, require_same_sites
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.inference.filtering import log_normalised
from cpomdp_ppl.inference.persistence import Persistent, Track
from cpomdp_ppl.inference.scan import scan
from cpomdp_ppl.model import CPOMDP
from cpomdp_ppl.prior import one_prior
from cpomdp_ppl.rng import isolated, require_seed, seed_for
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from matplotlib.figure import Figure

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend, Recursion
    from cpomdp_ppl.inference.observed import Observed
    from cpomdp_ppl.policy import Decision, History, Percept, Policy
    from cpomdp_ppl.signature import Signature
    from cpomdp_ppl.state import State

LEVEL = 0.01
"""How likely it may be that a filter without fault is called not calibrated, over all tests together."""

REPLICATES = 9_999
"""How often contexts are drawn anew from their posteriors, to see what chance does."""

NUMBERS_AT_ONCE = 2**22
"""How many random numbers, or components of drawn states, are held in memory together."""

ROUNDING = 64.0
"""Where all draws are the same, those this many units of rounding from the truth are tied with it."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """Where the truth came among draws from what was believed: uniform on [0, 1) if the belief is right.

    Attributes:
        values: `(rank + u) / (draws + 1)` with u uniform, one for each episode, float64 `[n]`.
        bins: Of the histogram.
    """

    values: Tensor
    bins: int

    @property
    def num_episodes(self) -> int:
        """How many episodes there are to go by, n."""
        return len(self.values)

    @cached_property
    def counts(self) -> Tensor:
        """The rank histogram, int64 `[bins]`."""
        return histogram(self.values, self.bins)

    @cached_property
    def p_value(self) -> float:
        """Of Pearson's χ² test against the uniform distribution; NaN without any episode.

        In fewer bins than the histogram's where those would have less than five episodes each, as the
        approximation by χ² is poor there.
        """
        n = self.num_episodes
        if not n:
            return math.nan
        bins = max(2, min(self.bins, n // 5))
        counts = self.counts if bins == self.bins else histogram(self.values, bins)
        chi2 = (counts - n / bins).double().square().sum() / (n / bins)
        # The upper tail of χ² with k degrees of freedom is Q(k/2, χ²/2); SciPy is not needed for that.
        return float(torch.special.gammaincc(torch.tensor((bins - 1) / 2).double(), chi2 / 2))

    @property
    def hint(self) -> str:
        """What is wrong, in words, if anything is."""
        if not self.num_episodes:
            return "never seen"
        if self.p_value >= LEVEL:
            return "uniform"
        deviation = self.values - 0.5
        n = self.num_episodes
        shift = float(deviation.mean()) * (12 * n) ** 0.5  # standard normal, if ranks are uniform
        spread = (float(deviation.square().mean()) - 1 / 12) * (180 * n) ** 0.5  # likewise
        if max(abs(shift), abs(spread)) < 3:
            return "uneven: neither a shift nor a spread"
        if abs(spread) >= abs(shift):
            if spread > 0:
                return "over-confident: ranks pile up at both ends"
            return "under-confident: ranks crowd in the middle"
        return (
            f"too {'low' if shift > 0 else 'high'}: the truth ranks {'above' if shift > 0 else 'below'} draws"
        )


def histogram(values: Tensor, bins: int) -> Tensor:
    """How many of the values in [0, 1) are in each of so many bins of equal width, int64 `[bins]`."""
    return torch.bincount((values * bins).long().clamp(max=bins - 1), minlength=bins)


@dataclass(frozen=True, eq=False)
class Reliability:
    """Predicted probabilities against observed frequencies, over all episodes and contexts, by bin `[bins]`.

    Attributes:
        counts: How many pairs of an episode and a context have a probability in the bin.
        predicted: The mean of those probabilities; NaN in an empty bin.
        observed: In what fraction of the pairs the context was the true one; NaN in an empty bin.
        deviation: Standard deviation of `observed − predicted`, if the posteriors are right.
    """

    counts: Tensor
    predicted: Tensor
    observed: Tensor
    deviation: Tensor


@dataclass(frozen=True, eq=False)
class ContextCalibration:
    """Whether the true contexts may be draws from their posteriors.

    Attributes:
        posterior: `P(c | y)` at the end of every episode, float64 `[B, C]`.
        contexts: The true contexts, int64 `[B]`.
        names: Of the contexts.
        bins: Of the reliability diagram.
        p_value: Of the test; see `calibrate_contexts`.
        scores: What the test goes by, in standard deviations, `[1 + C]`: first the confidence (negative where
            posteriors are surer than they are right), then how much more often each context was the true one
            than its posterior said.
    """

    posterior: Tensor
    contexts: Tensor
    names: tuple[str, ...]
    bins: int
    p_value: float
    scores: Tensor

    @property
    def num_episodes(self) -> int:
        """How many episodes B there are to go by."""
        return len(self.contexts)

    @cached_property
    def brier(self) -> float:
        """The Brier score `Σ_c (p_c − 1[c is true])²`, on average: 0 is best, 2 is worst."""
        truth = torch.nn.functional.one_hot(self.contexts, len(self.names))
        return float((self.posterior - truth).square().sum(1).mean())

    @cached_property
    def expected_brier(self) -> float:
        """What the Brier score would be on average if the posteriors were right, `Σ_c p_c (1 − p_c)`."""
        return float((self.posterior * (1 - self.posterior)).sum(1).mean())

    @cached_property
    def reliability(self) -> Reliability:
        """Predicted probabilities against observed frequencies."""
        p = self.posterior
        which = (p * self.bins).long().clamp(max=self.bins - 1)  # [B, C]

        def total(values: Tensor) -> Tensor:
            """The sum over episodes and contexts in each bin."""
            return p.new_zeros(self.bins).scatter_add_(0, which.flatten(), values.flatten().to(p.dtype))

        n = total(torch.ones_like(p))
        truth = torch.nn.functional.one_hot(self.contexts, len(self.names))
        # The contexts of an episode exclude each other: the variance is that of its bins' probabilities.
        q = p.new_zeros(len(p), self.bins).scatter_add_(1, which, p)  # [B, bins]
        variance = (q * (1 - q)).sum(0).clamp(min=0)
        return Reliability(n.long(), total(p) / n, total(truth) / n, variance.sqrt() / n)

    @cached_property
    def ece(self) -> float:
        """The expected calibration error, `Σ_bins n / N |predicted − observed|`: above 0 by chance alone."""
        r = self.reliability
        return float((r.counts * (r.predicted - r.observed).abs()).nansum() / r.counts.sum())

    @property
    def hint(self) -> str:
        """What is wrong, in words, if anything is."""
        ruled_out = int((_of_truth(self.posterior, self.contexts) == 0).sum())
        if ruled_out:
            return f"the true context was ruled out in {ruled_out:,} episode{'s' * (ruled_out > 1)}"
        if self.p_value >= LEVEL:
            return "as often true as predicted"
        confidence, counts = self.scores[0], self.scores[1:]
        k = int(counts.abs().argmax())
        if confidence.abs() > 0.99 * counts[k].abs():  # with posteriors all alike, they say the same
            low = bool(confidence < 0)
            return "over-confident: surer than right" if low else "under-confident: righter than sure"
        return f"'{self.names[k]}' is true {'less' if counts[k] < 0 else 'more'} often than predicted"


@dataclass(frozen=True, eq=False)
class Calibration:
    """Whether a filter's posteriors are what they claim to be, quantity by quantity.

    Attributes:
        contexts: The posterior over contexts at the end, against the true ones.
        states: Ranks of the true state among draws from `P(s_t | o_{1:t})`, by component.
        observations: Ranks of what was seen among draws from `P(o_{t+1} | h_t, a_t)`, by component.
        likelihood: Name of the backend.

    Example:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import ContextualTiger
        >>> calibration = calibrate(ContextualTiger(), RandomPolicy(3), "exact", 200)
        >>> calibration.calibrated, list(calibration.p_values)
        (True, ['contexts', 'states: state', 'observations: left_ear', 'observations: right_ear'])
    """

    contexts: ContextCalibration
    states: Mapping[str, Ranks]
    observations: Mapping[str, Ranks]
    likelihood: str

    @property
    def quantities(self) -> dict[str, ContextCalibration | Ranks]:
        """All that was tested, by name."""
        found: dict[str, ContextCalibration | Ranks] = {"contexts": self.contexts}
        found |= {f"states: {name}": ranks for name, ranks in self.states.items()}
        return found | {f"observations: {name}": ranks for name, ranks in self.observations.items()}

    @property
    def p_values(self) -> dict[str, float]:
        """Of every test, without correction for there being several; NaN for what was never seen."""
        return {name: quantity.p_value for name, quantity in self.quantities.items()}

    @property
    def failing(self) -> tuple[str, ...]:
        """The quantities that fail, by Holm's method at `LEVEL` in total; worst first."""
        known = {name: p for name, p in self.p_values.items() if not math.isnan(p)}
        failing = []
        for k, name in enumerate(sorted(known, key=known.__getitem__)):
            if known[name] > LEVEL / (len(known) - k):
                break
            failing.append(name)
        return tuple(failing)

    @property
    def calibrated(self) -> bool:
        """Whether nothing fails."""
        return not self.failing

    @property
    def verdict(self) -> str:
        """In one sentence, whether the filter is calibrated, and if not, what fails and how."""
        if self.calibrated:
            tested = sum(not math.isnan(p) for p in self.p_values.values())
            return f"calibrated: none of {tested} tests fails, at {LEVEL} in total"
        quantities = self.quantities
        faults = "; ".join(f"{name} ({quantities[name].hint})" for name in self.failing)
        return f"not calibrated: {faults}"

    def __str__(self) -> str:
        width = max(map(len, self.quantities))
        lines = [f"{'quantity':<{width}}  {'n':>7}  {'p':>7}  hint"]
        for name, quantity in self.quantities.items():
            p = "–" if math.isnan(quantity.p_value) else f"{quantity.p_value:.4f}"
            p = "<0.0001" if p == "0.0000" else p
            lines.append(f"{name:<{width}}  {quantity.num_episodes:>7,}  {p:>7}  {quantity.hint}")
        c = self.contexts
        lines.append(
            f"Brier score {c.brier:.4f}, expected {c.expected_brier:.4f}; calibration error {c.ece:.4f}"
        )
        return "\n".join([*lines, f"{self.likelihood} is {self.verdict}"])

    def plot(self) -> Figure:
        """Reliability diagram and rank histograms, as a matplotlib figure (the extra `plot`)."""
        from cpomdp_ppl.diagnostics.calibration_plots import plot

        return plot(self)


def calibrate(
    model: CPOMDP,
    policy: Policy | Callable[[History], Decision],
    likelihood: str | Backend | None = None,
    num_episodes: int = 2000,
    *,
    believed: CPOMDP | None = None,
    prior: Sequence[float] | Tensor | None = None,
    num_draws: int = 63,
    bins: int = 16,
    seed: int | None = 0,
    progress: bool = False,
) -> Calibration:
    """Simulate episodes, filter them, and ask whether the truth looks like a draw from the posteriors.

    If model and filter are right, the true context is a draw from `P(c | y)`, the true state one from
    `P(s_t | o_{1:t})`, and what is seen next one from `P(o_{t+1} | h_t, a_t)`: its rank among draws of the
    filter's is then uniform (Cook, Gelman and Rubin, 2006; Talts et al., 2018). Each episode gives one rank
    for every component, at a time drawn at random, so that ranks are independent; an episode that sees
    nothing from then on gives none for what is seen. Ties, as between discrete values, are broken at
    random: what is known for sure has uniform ranks.

    Args:
        model: The CPOMDP that the episodes come from.
        policy: Who acts. What it never looks at is not tested.
        likelihood: The filter: a backend or its name; left out, the `default_backend` for the model.
        num_episodes: How many episodes.
        believed: The CPOMDP that the filter goes by, if another: shows what a wrong model does.
        prior: Over contexts, `[C]`: contexts are drawn from it, and the filter goes by it. Left out, that
            of each one's model.
        num_draws: How many draws M the truth is ranked among.
        bins: Of histograms and of the reliability diagram.
        seed: Of everything random; None takes fresh entropy. The caller's random number generators, param
            store and validation flags stay as they were.
        progress: Whether to show a progress bar, by chunks of episodes.

    Raises:
        ValueError: On arguments that make no sense.
        UnsupportedModelError: If the backend cannot serve the model.
        DegenerateWeightsError: If no context can have produced an episode under `believed`, however many
            particles.

    Example:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LightDark
        >>> policy = RandomPolicy(3)
        >>> calibrate(LightDark(), policy, "ekf", 500, believed=LightDark(initial_variance=0.01)).verdict[:14]
        'not calibrated'
    """
    require_model(model)
    believed = model if believed is None else believed
    _require_alike(model, believed)
    B, M, bins = (
        require_count(name, value)
        for name, value in (("num_episodes", num_episodes), ("num_draws", num_draws), ("bins", bins))
    )
    require(bins > 1, "bins", bins, "at least 2")
    require_seed(seed)
    backend = backend_for(believed, likelihood)
    given = None if prior is None else one_prior(prior, model)
    episodes = simulate(model, policy, B, prior=given, seed=seed_for(seed, 0))
    assert episodes.contexts is not None
    with inference_scope(believed, seed_for(seed, 1)):
        recursion = backend.recursion(believed)
        require_same_sites(recursion, episodes)
        programs = Generative(believed)
        times = _times(programs.signature, episodes)
        size = min(backend.episodes_at_once(believed, recursion), _draws_at_once(recursion, M))
        starts = tqdm(range(0, B, size), disable=not progress, desc="episodes")
        parts = [
            _Chunk(
                backend,
                recursion,
                programs,
                episodes if size >= B else episodes[i : i + size],
                {what: at[i : i + size] for what, at in times.items()},
                M,
                one_prior(given, believed).to(believed.device),
                offset=i,
            ).run()
            for i in starts
        ]
    posterior = torch.cat([last for last, _ in parts])
    ranks = {what: torch.cat([part[what] for _, part in parts]) for what in times}  # [B, K] each

    def of(kind: str, shapes: Iterator[tuple[str, Any]]) -> dict[str, Ranks]:
        columns = [
            (name, ranks[kind, leaf][:, k])
            for leaf, spec in shapes
            for k, name in enumerate(_components(leaf, spec.shape))
        ]
        return {name: Ranks(column[~column.isnan()], bins) for name, column in columns}

    return Calibration(
        calibrate_contexts(
            posterior, episodes.contexts, names=model.context_names, bins=bins, seed=seed_for(seed, 2)
        ),
        of("states", leaves(programs.signature.state)),
        of("observations", iter(programs.signature.observations.items())),
        backend.name,
    )


def calibrate_contexts(
    posterior: Tensor | Sequence[Sequence[float]],
    contexts: Tensor | Sequence[int],
    *,
    names: Sequence[str] | None = None,
    bins: int = 16,
    seed: int | None = 0,
) -> ContextCalibration:
    """Test whether true contexts may be draws from posteriors, of whatever origin.

    The test looks at the sum of Brier scores, less what the posteriors expect it to be, and at how often
    each context was true, likewise. It compares both with the same for contexts drawn from the posteriors,
    which makes it exact for any number of episodes and however sure posteriors are; but no p-value is below
    `1 / (REPLICATES + 1)`, unless a true context has probability 0, which fails it outright.

    Args:
        posterior: One distribution over contexts for each episode, `[B, C]`.
        contexts: The true contexts, `[B]`.
        names: Of the contexts; their numbers if left out.
        bins: Of the reliability diagram.
        seed: Of the draws; None takes fresh entropy.

    Example:
        >>> truth = [0, 0, 0, 1] * 50
        >>> fair, sure = calibrate_contexts([[0.75, 0.25]] * 200, truth), calibrate_contexts(
        ...     [[0.95, 0.05]] * 200, truth)
        >>> fair.p_value > 0.5, sure.p_value < 0.001, sure.hint
        (True, True, 'over-confident: surer than right')
    """
    p = as_tensor("posterior", posterior).double()
    proper = p.dim() == 2 and 0 not in p.shape and are_probabilities(p)
    require(proper, "posterior", posterior, "[B, C], non-negative, rows that sum to 1")
    B, C = p.shape
    c = as_tensor("contexts", contexts).to(p.device)
    inside = c.shape == (B,) and not c.is_floating_point() and bool(((c >= 0) & (c < C)).all())
    require(inside, "contexts", sorted(set(c.flatten().tolist())), f"{B} indices from 0 to {C - 1}")
    require(names is None or isinstance(names, list | tuple), "names", names, f"{C} names")
    known = tuple(map(str, range(C))) if names is None else tuple(names)
    require(len(known) == C, "names", known, f"{C} names")
    bins, c = require_count("bins", bins), c.long()
    require(bins > 1, "bins", bins, "at least 2")

    with isolated(seed):
        sums = _scores_of_true_and_drawn(p, c)
    spread = sums[1:].std(0)
    ruled_out = bool((_of_truth(p, c) == 0).any())
    return ContextCalibration(
        p,
        c,
        known,
        bins,
        0.0 if ruled_out else _rarity(sums),
        torch.where(spread > 1e-9, sums[0] / spread, 0.0),
    )


def _scores_of_true_and_drawn(p: Tensor, c: Tensor) -> Tensor:
    """Scores of contexts, summed over episodes: of the true ones, then of draws from posteriors.

    Score 0 is half of what the Brier score falls short of its expectation; the others count how often each
    context comes, less how often it should. All have mean 0 under the posteriors.

    Args:
        p: The posteriors, `[B, C]`.
        c: The true contexts, `[B]`.

    Returns:
        `[1 + REPLICATES, 1 + C]`.
    """
    B, C = p.shape
    brier = p - p.square().sum(1, keepdim=True)  # [B, C]
    counts = torch.eye(C).to(p) - p[:, None]  # [B, C, C]
    scores = torch.cat([brier[..., None], counts], -1)  # [B, C, 1 + C]
    # A score is linear in 1[context ≤ k], so that sums over episodes are products of matrices.
    rises = (scores[:, :-1] - scores[:, 1:]).flatten(0, 1)  # [B (C − 1), 1 + C]

    def summed(at_most: Tensor) -> Tensor:  # [R, B, C − 1] → [R, 1 + C]
        return at_most.flatten(1).to(p.dtype) @ rises + scores[:, -1].sum(0)

    total = p.cumsum(1)
    total = total[:, :-1] / total[:, -1:]  # [B, C − 1]
    at_once = max(1, NUMBERS_AT_ONCE // (B * C))
    drawn = [
        summed(torch.rand(min(at_once, REPLICATES - r), B, 1, dtype=p.dtype, device=p.device) < total)
        for r in range(0, REPLICATES, at_once)
    ]
    return torch.cat([summed(c[None, :, None] <= torch.arange(C - 1, device=c.device)), *drawn])


def _rarity(sums: Tensor) -> float:
    """How rare the first of exchangeable rows `[n, K]` is by its most extreme column (Westfall and Young)."""
    extreme = sums.abs().round(decimals=9).T.contiguous()  # [K, n]; the order of a sum must not break a tie
    below = torch.searchsorted(extreme.sort(-1).values, extreme)  # how many are less extreme
    most = below.amax(0)  # [n]
    return float((most >= most[0]).double().mean())


def _of_truth(posterior: Tensor, contexts: Tensor) -> Tensor:
    """What posteriors `[B, C]` say of the true contexts, `[B]`."""
    return posterior.gather(1, contexts[:, None]).squeeze(1)


def _draw_contexts(posterior: Tensor, num_draws: int) -> Tensor:
    """Contexts `[B, M]` from distributions `[B, C]`; one of probability 0 never comes."""
    total = posterior.cumsum(-1)
    u = torch.rand(len(posterior), num_draws, dtype=posterior.dtype, device=posterior.device)
    found = torch.searchsorted(total / total[:, -1:], u, right=True)
    return found.clamp(max=posterior.shape[1] - 1)


def normalised_ranks(truth: Tensor, draws: Tensor, possible: Tensor | None = None) -> Tensor:
    """Where the truth `[B, K]` comes among draws `[B, M, K]`, as a number in [0, 1), `[B, K]`.

    Args:
        truth: What was so.
        draws: What was believed. Those that equal the truth are tied with it; where all draws are the same
            up to rounding, up to rounding.
        possible: Which of the draws count, bool `[B, M, K]`; all of them, if left out.

    Returns:
        `(rank + u) / (M + 1)` with u uniform: exactly uniform, if the truth is one more such draw. NaN where
        no draw counts.

    Example:
        >>> with isolated(0):
        ...     rank = normalised_ranks(torch.tensor([[2.5]]), torch.arange(4.0).reshape(1, 4, 1))
        >>> 3 / 5 <= rank.item() < 4 / 5
        True
    """
    exact = not (truth.is_floating_point() or draws.is_floating_point())
    unit = 0.0 if exact else max(torch.finfo(x.dtype).eps for x in (truth, draws) if x.is_floating_point())
    y, x = truth.double()[:, None], draws.double()
    # Only where all is known for sure may rounding tell draws from the truth; elsewhere it would hide errors.
    known = x.amax(1, keepdim=True) - x.amin(1, keepdim=True) <= 4 * unit * y.abs()  # [B, 1, K]
    tied = torch.where(known, torch.isclose(x, y, rtol=ROUNDING * unit, atol=0.0), x == y)
    below = (x < y) & ~tied
    if possible is not None:
        tied, below = tied & possible, below & possible
    M = draws.shape[1] if possible is None else possible.sum(1)
    u = torch.rand(truth.shape, dtype=torch.float64, device=truth.device)
    ranks = (below.sum(1) + u * (tied.sum(1) + 1)) / (M + 1)
    return ranks if possible is None else torch.where(possible.any(1), ranks, torch.nan)


Component = tuple[str, str]
"""A kind of quantity, `"states"` or `"observations"`, and the name of a leaf or site."""


Drawn = tuple[Tensor, Tensor, Tensor | None]
"""What `normalised_ranks` takes: the truth `[R, K]`, draws `[R, M, K]`, and which of them count."""


class _Chunk:
    """Some of the episodes, and the filter at work on them.

    Args:
        backend: The filter.
        recursion: It, at work.
        programs: Of the model that it goes by, to draw what is seen next.
        episodes: What was done and seen, and what was true.
        times: When to look at what, `[B, K]`.
        num_draws: How many draws M the truth is ranked among.
        prior: Over contexts, `[C]`.
        offset: Number of the first episode, for messages.
    """

    def __init__(
        self,
        backend: Backend,
        recursion: Recursion,
        programs: Generative,
        episodes: Episodes,
        times: Mapping[Component, Tensor],
        num_draws: int,
        prior: Tensor,
        offset: int,
    ) -> None:
        self.backend = backend
        self.recursion = recursion
        self.programs = programs
        self.episodes = episodes
        self.times = times
        self.M = num_draws
        self.offset = offset
        self.prior = prior  # [C]
        self.ranks = {
            what: torch.full(at.shape, torch.nan, dtype=torch.float64, device=at.device)
            for what, at in times.items()
        }

    def run(self) -> tuple[Tensor, dict[Component, Tensor]]:
        """Filter, and rank what was so among draws where it is time to.

        Returns:
            The posterior at the end, `[B, C]`, and normalised ranks `[B, K]`, NaN where there was no time.
        """
        prior = self.prior.double().expand(len(self.episodes), -1)
        persistent = Persistent(self.backend, self.recursion, prior)
        for step in scan(persistent, self.episodes, self.offset, allow_lost=True):  # it would have raised
            self.compare("observations", self.predicted, step.before, step.observed)
            self.compare("states", self.filtered, step.after, step.observed)
        return self.posterior(step.after.log_likelihood, self.episodes.horizon), self.ranks

    def compare(self, kind: str, drawn: Callable[..., Iterator[Drawn]], track: Track, seen: Observed) -> None:
        """Rank one kind of quantity, in the episodes whose time it is."""
        due = {what: at == seen.time for what, at in self.times.items() if what[0] == kind}
        rows = torch.cat(list(due.values()), 1).any(1).nonzero()[:, 0]
        if not len(rows):
            return
        for what, each in zip(due, drawn(track, seen, rows), strict=True):
            found = normalised_ranks(*each)
            self.ranks[what][rows] = torch.where(due[what][rows], found, self.ranks[what][rows])

    def posterior(self, total: Tensor, time: int) -> Tensor:
        """`P(c | o_{1:t})` from log-likelihoods `[C, B]`, `[B, C]`."""
        return log_normalised((self.prior.log() + total.T)[:, None], time).squeeze(1).exp()

    def draw(self, track: Track, time: int, rows: Tensor) -> tuple[Tensor, State]:
        """Contexts `[R, M]` and states with leaves `[R, M, …]`, jointly, from the belief in R episodes."""
        contexts = _draw_contexts(self.posterior(track.log_likelihood, time)[rows], self.M)
        mine = map_belief(lambda tensor: tensor.index_select(1, rows), track.belief)
        states = self.recursion.draw(mine, self.M)  # [C, R, M, …]
        r = torch.arange(len(rows), device=rows.device)[:, None]
        m = torch.arange(self.M, device=rows.device)
        # Some filters compute in double precision; the programs want states as they make them.
        return contexts, map_state(
            lambda leaf, values: values[contexts, r, m].to(leaf.dtype), self.programs.signature.state, states
        )

    def filtered(self, track: Track, seen: Observed, rows: Tensor) -> Iterator[Drawn]:
        """The true `s_t`, and draws from `P(s_t | o_{1:t})`, by leaf."""
        _, states = self.draw(track, seen.time, rows)
        true = map_state(lambda leaf: leaf[rows, seen.time], self.episodes.states)
        for (_, draws), (_, truth) in zip(leaves(states), leaves(true), strict=True):
            yield truth.reshape(len(rows), -1), draws.reshape(len(rows), self.M, -1), None

    def predicted(self, track: Track, seen: Observed, rows: Tensor) -> Iterator[Drawn]:
        """What was seen at t + 1, and draws from `P(o_{t+1} | h_t, a_t)`, by site."""
        R, M = len(rows), self.M
        contexts, states = self.draw(track, seen.time - 1, rows)
        percept = self.next_percept(
            map_state(lambda leaf: leaf.flatten(0, 1), states),
            None if seen.action is None else seen.action[rows].repeat_interleave(M),
            contexts.flatten(),
        )
        for name, draws in percept.observations.items():
            # A draw in which the site is masked, as it may be by another site, says nothing of its value.
            possible = on_the_right(percept.observed[name], draws).expand_as(draws)
            truth = seen.observations[name][rows].reshape(R, -1)
            yield truth, draws.reshape(R, M, -1), possible.reshape(R, M, -1)

    def next_percept(self, states: State, actions: Tensor | None, contexts: Tensor) -> Percept:
        """What is seen after actions `[N]` in states with leaves `[N, …]`; right there, without any."""
        if actions is None:
            return self.programs.look(states, contexts)
        return self.programs.step(states, actions, contexts).percept


def _times(signature: Signature, episodes: Episodes) -> dict[Component, Tensor]:
    """At which time each component is looked at in each episode, `[B, K]`, by kind and name; -1 for never."""
    B, T = episodes.actions.shape
    t = torch.randint(1, T + 1, (B, 1), device=episodes.device)
    times: dict[Component, Tensor] = {
        ("states", name): t.expand(-1, leaf.shape.numel()) for name, leaf in leaves(signature.state)
    }
    for site, spec in signature.observations.items():
        flags = episodes.observed[site]  # [B, T, *plates]
        first = torch.zeros_like(flags[:, 0])
        if episodes.initially_observed is not None:
            first = episodes.initially_observed[site]
        flags = torch.cat([first[:, None], flags], 1)
        flags = on_the_right(flags, flags.new_empty((B, T + 1, *spec.shape))).expand(B, T + 1, *spec.shape)
        times["observations", site] = observed_times(flags.reshape(B, T + 1, -1))
    return times


def observed_times(observed: Tensor) -> Tensor:
    """For each episode and component, a time at which it was seen, `[B, K]`; -1 if there is none.

    A time drawn from all at which an episode saw something would be biased: an agent that looks until it
    sees what it likes has few looks where the first is to its liking, each of which would be drawn more
    often. Whether to take a look must not depend on what it shows, nor on what comes after. So an episode
    takes its first look at or after a time at which the *next* episode looked; the last takes its first.

    Args:
        observed: When it was seen, bool `[B, T, K]`.
    """
    B, T, K = observed.shape
    lots = torch.rand(B, T, 1, device=observed.device).expand(-1, -1, K)
    wish = torch.where(observed, lots, -1.0).argmax(1)  # [B, K]
    wish = torch.where(observed.any(1), wish, 0)
    earliest = torch.cat([wish[1:], wish.new_zeros(1, K)])
    t = torch.arange(T, device=observed.device)[:, None]
    found = torch.where(observed & (t >= earliest[:, None]), t, T).amin(1)
    return torch.where(found < T, found, -1)


def _draws_at_once(recursion: Recursion, M: int) -> int:
    """In how many episodes M draws fit in memory, for all contexts, if all are due at the same time."""
    sizes = [leaf.shape.numel() for _, leaf in leaves(recursion.signature.state)]
    sizes += [site.shape.numel() for site in recursion.signature.observations.values()]
    return max(1, int(NUMBERS_AT_ONCE // (recursion.model.num_contexts * M * max(sum(sizes), 1))))


def _components(name: str, shape: torch.Size) -> list[str]:
    """Names of a tensor's numbers, in order: `x`, or `x[0]`, `x[1]`."""
    if shape.numel() == 1:
        return [name]
    places = torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist()
    return [f"{name}[{', '.join(map(str, place))}]" for place in places]


def _require_alike(model: CPOMDP, believed: Any) -> None:
    """Raise unless one model can be mistaken for the other."""
    require(isinstance(believed, CPOMDP), "believed", believed, "an instance of a CPOMDP")
    believed.require_definition()
    for what in ("num_contexts", "num_actions"):
        mine, other = getattr(model, what), getattr(believed, what)
        require(mine == other, "believed", f"{what} = {other}", f"{what} = {mine}, as the model has")
    shapes, others = (
        {name: list(leaf.shape) for name, leaf in leaves(signature(each).state)} for each in (model, believed)
    )
    require(shapes == others, "believed", f"a state of shapes {others}", f"shapes {shapes}, as the model has")
