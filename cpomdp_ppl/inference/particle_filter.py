"""Sequential Monte Carlo: resample, move, reweight, for all contexts and episodes at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from cpomdp_ppl.errors import invalid, require, require_count
from cpomdp_ppl.inference.backend import Backend, Recursion
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.observed import Observed, hidden_parents, log_density_of_seen
from cpomdp_ppl.inference.particle_smoother import as_real, pick, smooth
from cpomdp_ppl.inference.proposals import Bootstrap, Guide, Guided, LookAhead
from cpomdp_ppl.inference.resampling import Adaptive, Resampling, as_scheme, choose
from cpomdp_ppl.inference.sampling import draw
from cpomdp_ppl.rng import RandomStream, seed_for
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.smoothing import Smoothing
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.state import State

CELLS_AT_ONCE = 2**18
"""Particles handled together: few enough to stay in a processor's cache, many enough to drown overhead."""

MOST_PARTICLES = 2**15
"""From so many on, a filter that has lost an episode is not given more."""

SUMMED = 16
"""A hidden site with more values, others counted in, is drawn by every particle rather than summed over."""


@dataclass(frozen=True)
class ParticleFilter(Backend):
    """A particle filter for every context and episode.

    Bootstrap unless a guide is given: particles move by the model's own `transition` and are weighted by the
    density of what was observed. The likelihood estimate is unbiased for any number of particles.

    Args:
        num_particles: Particles N for every episode and context.
        resampling: `"systematic"`, `"stratified"`, `"multinomial"`, `"residual"`, or a scheme.
        ess_threshold: A row (one episode under one context) is resampled when its effective sample size is
            below this fraction of N.
        guide: Proposals that see the coming observation: an object with programs `initial` and
            `transition`, or `"ekf"` to derive them by linearising the model; None for the bootstrap filter.
        common_random_numbers: Whether the contexts of an episode share their noise, which makes their
            likelihood ratio less noisy.
        chunk: How many episodes to handle at once; chosen to bound memory if left out.

    Example:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> episodes = simulate(model, RandomPolicy(3), 10, seed=0)
        >>> ParticleFilter(num_particles=500).run(model, episodes, seed=0).posterior().shape
        torch.Size([10, 21, 2])
    """

    num_particles: int = 256
    resampling: str | Resampling = "systematic"
    ess_threshold: float = 0.5
    guide: Guide | str | None = None
    common_random_numbers: bool = True
    chunk: int | None = None
    name: ClassVar[str] = "smc"

    def __post_init__(self) -> None:
        require_count("num_particles", self.num_particles)
        as_scheme(self.resampling)
        require(0 <= self.ess_threshold <= 1, "ess_threshold", self.ess_threshold, "a fraction from 0 to 1")
        if self.chunk is not None:
            require_count("chunk", self.chunk)
        proposes = callable(getattr(self.guide, "transition", None))
        require(
            self.guide is None or self.guide == "ekf" or proposes,
            "guide",
            self.guide,
            'None, "ekf", or an object with programs `initial` and `transition`',
        )

    def recursion(self, model: CPOMDP) -> SMC:
        """The filter at work on a model; any model will do."""
        return SMC(model, self)

    def larger(self) -> ParticleFilter | None:
        """The same with eight times as many particles, up to where that takes too long."""
        if self.num_particles >= MOST_PARTICLES:
            return None
        return replace(self, num_particles=8 * self.num_particles)

    def episodes_at_once(self, model: CPOMDP, recursion: Recursion) -> int:
        """As many as keep the particles in cache, if that is any; a chunk that was asked for otherwise."""
        if self.chunk is not None:
            return self.chunk
        sites = recursion.signature.observations.values()
        seen = sum(site.shape.numel() for site in sites)
        size: int = max(sum(leaf.shape.numel() for _, leaf in leaves(recursion.signature.state)), seen)
        if self.guide == "ekf":
            size *= seen**2  # every particle holds Jacobian and covariance of what it expects to see
        return max(1, CELLS_AT_ONCE // (model.num_contexts * self.num_particles * max(size, 1)))


@dataclass(frozen=True)
class Cloud:
    """Weighted particles, for every context and episode.

    A step takes a cloud over: it writes into its tensors, because copies would be a good part of the work.

    Attributes:
        state: Leaves `[C, B, N, …]`.
        weights: Normalised, `[C, B, N]`.
        founders: Which particle of time 0 each one descends from, `[C, B, N]`.
        ess: Effective sample size `1 / Σ W²`, `[C, B]`.
        resampled: Which rows were resampled before the last move, bool `[C, B]`.
        resampling_noise: The squared changes of the founders' shares by resampling, summed, `[C, B]`.
    """

    state: Any
    weights: Tensor
    founders: Tensor
    ess: Tensor
    resampled: Tensor
    resampling_noise: Tensor


@dataclass(frozen=True)
class Offspring:
    """The outcome of resampling some rows.

    Attributes:
        rows: Which rows of the C·B, `[R]`.
        ancestors: Of every particle in them, `[R, N]`.
    """

    rows: Tensor
    ancestors: Tensor

    @cached_property
    def flat(self) -> Tensor:
        """Ancestors among all C·B·N particles, `[R·N]`."""
        return (self.rows[:, None] * self.ancestors.shape[1] + self.ancestors).view(-1)

    def everywhere(self, shape: torch.Size) -> Tensor:
        """Ancestors of every particle `[C, B, N]`: its own number where there was no resampling."""
        C, B, N = shape
        ancestors = torch.arange(N, device=self.rows.device).repeat(C * B, 1)
        return ancestors.index_copy_(0, self.rows, self.ancestors).reshape(shape)

    def inherit_(self, leaf: Tensor) -> Tensor:
        """Replace every particle of those rows by its ancestor, in place, in a tensor `[C, B, N, …]`."""
        C, B, N, *event = leaf.shape
        picked = leaf.view(C * B * N, *event).index_select(0, self.flat)
        leaf.view(C * B, N, *event).index_copy_(0, self.rows, picked.view(-1, N, *event))
        return leaf


class SMC(Recursion):
    """The particle filter's recursion over time."""

    def __init__(self, model: CPOMDP, settings: ParticleFilter) -> None:
        super().__init__(model)
        self.N = settings.num_particles
        self.common = settings.common_random_numbers
        self.resampling = Adaptive(as_scheme(settings.resampling), settings.ess_threshold)
        self.dtype = torch.get_default_dtype()
        for _, leaf in leaves(self.signature.state):
            if leaf.dtype.is_floating_point:
                self.dtype = torch.promote_types(self.dtype, leaf.dtype)
        self.proposal: Bootstrap = Bootstrap(self, self.common)
        if settings.guide == "ekf":
            self.proposal = LookAhead(self, self.common)
        elif settings.guide is not None:
            if model.initial_observation and not callable(getattr(settings.guide, "initial", None)):
                raise invalid("guide", settings.guide, "a program `initial`, as the model observes at time 0")
            self.proposal = Guided(self, self.common, cast("Guide", settings.guide))

    def start(self, num_episodes: int) -> Cloud:
        """Particles from the model's `initial`, all of the same weight."""
        shape = torch.Size((self.model.num_contexts, num_episodes, self.N))
        return self.cloud(self.proposal.initial(shape)[0], shape)

    def cloud(self, state: Any, shape: torch.Size) -> Cloud:
        """States, leaves `[C, B, N, …]`, as particles of the same weight, each the founder of a family."""
        (C, B, N), device = shape, self.context.device
        return Cloud(
            self.own_copy(state, shape),
            torch.full(shape, 1.0 / N, device=device, dtype=self.dtype),
            torch.arange(N, device=device, dtype=torch.int32).repeat(C, B, 1),
            torch.full((C, B), float(N), device=device, dtype=self.dtype),
            torch.zeros((C, B), dtype=torch.bool, device=device),
            torch.zeros((C, B), dtype=self.dtype, device=device),
        )

    def with_rows(self, cloud: Cloud, rows: Tensor, states: State) -> Cloud:
        """The same, with other particles of equal weight, leaves `[C, R, N, …]`, in the episodes `rows`."""
        others = self.cloud(states, torch.Size((self.model.num_contexts, len(rows), self.N)))
        return map_belief(lambda mine, theirs: mine.index_copy(1, rows, theirs), cloud, others)

    def own_copy(self, state: Any, S: torch.Size) -> Any:
        """A state that a program returned, with memory of its own for every particle to resample in."""
        taken: set[int] = set()

        def own(leaf: Tensor) -> Tensor:
            leaf = leaf.contiguous()
            if leaf.untyped_storage().data_ptr() in taken:  # two parts of a state may be the same tensor
                leaf = leaf.clone()
            taken.add(leaf.untyped_storage().data_ptr())
            return leaf

        return map_state(own, self.signature.broadcast(state, S))

    def condition(self, cloud: Cloud, seen: Observed) -> tuple[Cloud, Tensor]:
        """Weight the particles by what was seen; a guide may draw them anew, knowing it."""
        log_ratio = None
        if isinstance(self.proposal, Guided):
            state, log_ratio = self.proposal.initial(cloud.weights.shape, seen)
            cloud = replace(cloud, state=self.own_copy(state, cloud.weights.shape))
        return self.reweight(cloud, seen, log_ratio)

    def step(self, cloud: Cloud, seen: Observed) -> tuple[Cloud, Tensor]:
        """Resample, move, reweight."""
        cloud, _ = self.resample(cloud, seen.alive)
        cloud, log_ratio = self.move(cloud, seen)
        return self.reweight(cloud, seen, log_ratio)

    def resample(self, cloud: Cloud, alive: Tensor | None = None) -> tuple[Cloud, Offspring | None]:
        """Resample the rows that need it, in place. Says who descends from whom; None if no row did."""
        C, B, N = cloud.weights.shape
        needed = self.resampling.needed(cloud.ess, N)  # [C, B]
        if alive is not None:
            needed = needed & alive
        scheme = self.resampling.scheme
        # Drawn in any case: what one episode needs must not change the random numbers of another.
        uniforms = torch.rand(1 if self.common else C, B, scheme.num_uniforms(N), device=needed.device)
        if not bool(needed.any()):
            return replace(cloud, resampled=needed), None
        rows = needed.flatten().nonzero()[:, 0]  # [R] of C·B
        uniforms = uniforms.reshape(-1, uniforms.shape[-1])[rows % B if self.common else rows]
        weights, founders = cloud.weights.view(C * B, N), cloud.founders.view(C * B, N)
        before = weights.index_select(0, rows)  # [R, N]
        offspring = Offspring(rows, scheme(before, uniforms))
        map_state(offspring.inherit_, cloud.state)
        was = founders.index_select(0, rows).long()
        now = was.gather(1, offspring.ancestors.long())
        founders.index_copy_(0, rows, now.to(founders.dtype))
        change = torch.zeros_like(before).scatter_add_(1, was, before)  # of the founders' shares, [R, N]
        change.scatter_add_(1, now, torch.full_like(before, -1.0 / N))
        noise = cloud.resampling_noise.flatten().index_add(0, rows, change.square_().sum(1)).view(C, B)
        weights.index_fill_(0, rows, 1.0 / N)
        ess = torch.where(needed, float(N), cloud.ess)
        return replace(cloud, ess=ess, resampled=needed, resampling_noise=noise), offspring

    def move(self, cloud: Cloud, seen: Observed) -> tuple[Cloud, Tensor | None]:
        """Move by the proposal. Returns its log-ratio `p / q`, `[C, B, N]`, too; None for 1."""
        S = cloud.weights.shape
        state, log_ratio = self.proposal.transition(cloud.state, S, seen)
        return replace(cloud, state=self.own_copy(state, S)), log_ratio

    def reweight(self, cloud: Cloud, seen: Observed, log_ratio: Tensor | None) -> tuple[Cloud, Tensor]:
        """Multiply the weights by the density of what was seen. Returns the evidence increment `[C, B]`."""
        C, B, _ = cloud.weights.shape
        rows = None if log_ratio is not None else seen.rows
        density = self.log_density(cloud, seen, rows)
        if density is None:
            return cloud, torch.zeros(C, B, dtype=torch.float64, device=cloud.weights.device)
        # Where nothing was seen, nothing changes.
        weights = cloud.weights if rows is None else cloud.weights.index_select(1, rows)
        log_weights = weights.log() + density
        if log_ratio is not None:
            log_weights += log_ratio
        highest = log_weights.amax(-1, keepdim=True)  # [C, B', 1]
        normalised = log_weights.sub_(highest).exp_()
        mass = normalised.sum(-1, keepdim=True)
        normalised = (normalised / mass).to(weights.dtype)
        increment = (highest.double() + mass.double().log_()).squeeze(-1)  # [C, B']
        impossible = highest == -torch.inf
        if bool(impossible.any()):  # such a context keeps the weights it had
            normalised = torch.where(impossible, weights, normalised)
            increment = torch.where(impossible.squeeze(-1), -torch.inf, increment)
        ess = 1.0 / torch.linalg.vector_norm(normalised, dim=-1).square_()
        if rows is None:
            if seen.alive is not None:  # a guide's draws have weights even after the end
                increment = torch.where(seen.alive, increment, 0.0)
            return replace(cloud, weights=normalised, ess=ess), increment
        cloud.weights.index_copy_(1, rows, normalised)
        return (
            replace(cloud, ess=cloud.ess.index_copy(1, rows, ess)),
            torch.zeros(C, B, dtype=torch.float64, device=ess.device).index_copy_(1, rows, increment),
        )

    def log_density(self, cloud: Cloud, seen: Observed, rows: Tensor | None) -> Tensor | None:
        """`log p(o | s, a, c)` in some of the episodes (None: all), `[C, B', N]`; None if those are none."""
        # Drawn in any case: what one episode saw must not change the random numbers of another.
        seed = int(torch.randint(2**31, ())) if self.signature.dependencies.parents else 0
        S, state = cloud.weights.shape, cloud.state
        if rows is not None:
            if len(rows) == 0:
                return None
            some = seen.select(rows)
            if not hidden_parents(self.signature, some):  # which might be drawn, for all episodes alike
                seen, state = some, map_state(lambda leaf: leaf.index_select(1, rows), state)
                rows = None

        def draw_hidden(name: str, fn: Any) -> tuple[Tensor, Tensor]:
            site = list(self.signature.observations).index(name)
            with RandomStream(seed_for(seed, site)):
                return self.hidden(name, fn, torch.Size((*S, *[1] * self.plate_axes)))

        density = log_density_of_seen(
            self.model, self.signature, state, self.context, seen, draw=draw_hidden, most=SUMMED
        )
        return density if rows is None else density.expand(S).index_select(1, rows)

    def hidden(self, name: str, fn: Any, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Draw a site that was not seen, for every particle; that, and `log p / q` of the draws."""
        return draw(fn, shape, self.common), torch.zeros((), device=self.context.device)

    def ess(self, cloud: Cloud) -> Tensor:
        """Of the weights."""
        return cloud.ess

    def resampled(self, cloud: Cloud, seen: Observed) -> Tensor:
        """Which rows were, in this step."""
        return cloud.resampled if seen.alive is None else cloud.resampled & seen.alive

    def expected_reward(self, cloud: Cloud, action: Tensor) -> Tensor:
        """The particles' weighted mean reward."""
        C, B, N = cloud.weights.shape
        return weighted_sum(cloud.weights, self.reward(cloud.state, action, (C, B, N)))

    def moments(self, cloud: Cloud) -> tuple[Any, Any]:
        """Weighted means and variances of the particles; of booleans, as of 0 and 1."""

        def mean(leaf: Tensor) -> Tensor:
            return weighted_sum(cloud.weights, leaf)

        def variance(leaf: Tensor, m: Tensor) -> Tensor:
            return weighted_sum(cloud.weights, (as_real(leaf) - m.unsqueeze(2)) ** 2)

        means = map_state(mean, cloud.state)
        return means, map_state(variance, cloud.state, means)

    def draw(self, cloud: Cloud, num_draws: int) -> State:
        """Particles by their weights."""
        drawn: State = pick(cloud.state, choose(cloud.weights, num_draws))
        return drawn

    def smooth(self, episodes: Episodes, num_trajectories: int, offset: int) -> Smoothing:
        """Draw whole trajectories, backwards through the particles, and take their moments.

        By backward sampling where the program tells the transition density, that is, where the next state
        consists of the sample sites of `transition`; else from the genealogy of the particles, which has few
        distinct ancestors far back. `Smoothing.method` says which.
        """
        return smooth(self, episodes, num_trajectories, offset)

    def standard_error(self, cloud: Cloud) -> Tensor:
        """Estimated standard error of the log-likelihood, `[C, B]`; see `Filtering.standard_error`.

        Families of particles that descend from the same founder are what is independent in a particle filter
        (Chan and Lai, 2013). This is the jackknife over them: how much the log-likelihood changes if one
        family, with its share S of the weights, is left out, which is `log(1 - S)` but for a constant. To
        take S itself, as is usual, falls short where few families hold most of the weight; the jackknife's
        variance is on average too large rather than too small (Efron and Stein, 1981).

        Resampling makes shares more unequal even where all particles weigh the same and the likelihood stays
        as it is. What it added to the squares is taken off, which for the multinomial scheme is to first
        order the correction of Lee and Whiteley (2018). As a sum of N squares it is known to a relative error
        of √(2/N), and below that error nothing is known of the variance either.
        """
        N = self.N
        weights, noise = cloud.weights.double(), cloud.resampling_noise
        shares = torch.zeros_like(weights).scatter_add_(2, cloud.founders.long(), weights)  # [C, B, N]
        left_out = (-shares / shares.sum(-1, keepdim=True)).log1p_()
        variance = left_out.var(-1, unbiased=False) * (N - 1)  # NaN if a single family has all the weight
        error = torch.maximum(variance - noise, (2 / N) ** 0.5 * noise).sqrt()
        return torch.where(error.isnan(), torch.inf, error).to(cloud.weights.dtype)


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """`Σ_i W_i v_i` over the particle axis: weights `[C, B, N]`, values `[C, B, N, …]`."""
    values = values.to(weights.dtype)
    if values.dim() == 3:
        total: Tensor = torch.linalg.vecdot(weights, values)
        return total
    return torch.einsum("cbn,cbn...->cb...", weights, values)
