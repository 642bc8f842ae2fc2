"""Sequential Monte Carlo: resample, move, reweight, for all contexts and episodes at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from cpomdp_ppl.arrays import how_many_fit
from cpomdp_ppl.errors import UnsupportedModelError, invalid, require, require_count, require_model
from cpomdp_ppl.inference.backend import Backend, Recursion, require_finite_result, require_same_sites
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.cloud import Ancestors, Cloud, Families, Weights, pick
from cpomdp_ppl.inference.engine import native_or_none, require_engine, say_once
from cpomdp_ppl.inference.native_filter import NOT_COMPILED, FilterKernel, scheme_name
from cpomdp_ppl.inference.observed import Observed, hidden_parents, log_density_of_seen
from cpomdp_ppl.inference.particle_smoother import smooth
from cpomdp_ppl.inference.proposals import Bootstrap, Guide, Guided, LookAhead
from cpomdp_ppl.inference.resampling import Resampling, as_scheme
from cpomdp_ppl.inference.sampling import draw
from cpomdp_ppl.inference.scan import observed_in_time, require_possible
from cpomdp_ppl.rng import RandomStream, inverse_cdf, seed_for
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.filtering import Filtering, Smoothing
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Signature
    from cpomdp_ppl.state import State

PARTICLES_AT_ONCE = 2**18
"""Numbers in particles handled together: few enough to stay in cache, many enough to drown overhead."""

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
        chunk: How many episodes the eager engine handles at once; chosen to bound memory if left out.
        engine: `"native"` compiles the model's programs, and refuses those that cannot be compiled; `"eager"`
            runs them as they are; `"auto"` compiles what it can. The two have random numbers of their own.
        tries: How many next states K each particle tries out in a step. It takes one of them, in proportion
            to the density of what was observed there, and their mean density is its weight: likelihoods stay
            unbiased. With 1, a particle sees the observation only when it has moved. More help where few of
            the places that a particle may move to agree with what was seen: above all where `ends` says for
            sure whether an episode ends in a state, so that all particles may die. K tries cost what K times
            the particles do in programs, but particles themselves stay as few. Not with a guide.

    Examples:
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
    engine: str = "auto"
    tries: int = 1
    name: ClassVar[str] = "smc"

    def __post_init__(self) -> None:
        require_count("num_particles", self.num_particles)
        as_scheme(self.resampling)
        require_engine(self.engine)
        require(0 <= self.ess_threshold <= 1, "ess_threshold", self.ess_threshold, "a fraction from 0 to 1")
        require_count("tries", self.tries)
        require(
            self.tries == 1 or self.guide is None, "tries", self.tries, "1, as a guide looks ahead itself"
        )
        if self.chunk is not None:
            require_count("chunk", self.chunk)
        proposes = callable(getattr(self.guide, "transition", None))
        require(
            self.guide is None or self.guide == "ekf" or proposes,
            "guide",
            self.guide,
            'None, "ekf", or an object with programs `initial` and `transition`',
        )

    @property
    def label(self) -> str:
        """Its name, and how many particles it has."""
        return f"{self.name}, {self.num_particles:,} particles"

    def recursion(self, model: CPOMDP) -> SMC:
        """The filter at work on a model; any model will do."""
        from cpomdp_ppl.inference.native_recursion import NativeSMC

        kernel = self.kernel(model)
        return SMC(model, self) if kernel is None else NativeSMC(model, self, kernel.signature)

    def kernel(self, model: CPOMDP) -> FilterKernel | None:
        """The compiled filter of a model as it is now; None if the eager engine serves it.

        Raises:
            UnsupportedModelError: If only the native engine will do, and it cannot serve this.
            CompilerError: Likewise, if the compiler is missing or fails.
        """
        if self.engine == "eager":
            return None
        if self.guide is not None or scheme_name(self.resampling) is None:
            if self.engine == "native":
                what = "a guide" if self.guide is not None else "a resampling scheme of one's own"
                raise UnsupportedModelError(f"the native engine does not know {what}")
            return None
        return native_or_none(self.engine, model, "filter", FilterKernel)

    def _run(
        self, model: CPOMDP, episodes: Episodes, seed: int | None, moments: bool, allow_lost: bool
    ) -> Filtering:
        require_model(model)
        kernel = self.kernel(model)
        if kernel is not None:
            require_same_sites(model, kernel.signature, episodes)
            found = kernel.run(self, model, episodes, seed, moments)
            if not isinstance(found, int):
                return checked(model, episodes, found, allow_lost)
            if found & NOT_COMPILED:
                self._explain(model)
        return super()._run(model, episodes, seed, moments, allow_lost)

    def _explain(self, model: CPOMDP) -> None:
        """Say, or raise if only the native engine will do, that episodes lack what others depend on."""
        why = "a site was not observed that others depend on, and kernels cannot sum over it"
        if self.engine == "native":
            raise UnsupportedModelError(f"{type(model).__name__}: {why}")
        say_once(type(model).__name__, why)

    def larger(self) -> ParticleFilter | None:
        """The same with eight times as many particles, up to where that takes too long."""
        if self.num_particles >= MOST_PARTICLES:
            return None
        return replace(self, num_particles=8 * self.num_particles)

    def episodes_at_once(self, model: CPOMDP, recursion: Recursion) -> int:
        """As many as keep the particles in cache, unless a chunk was asked for."""
        if self.chunk is not None:
            return self.chunk
        sites = recursion.signature.observations.values()
        seen = sum(site.shape.numel() for site in sites)
        size: int = max(sum(leaf.shape.numel() for _, leaf in leaves(recursion.signature.state)), seen)
        if self.guide == "ekf":
            size *= seen**2  # every particle holds Jacobian and covariance of what it expects to see
        particles = model.num_contexts * self.num_particles * self.tries
        return how_many_fit(PARTICLES_AT_ONCE, particles * max(size, 1))


def checked(model: CPOMDP, episodes: Episodes, found: Filtering, allow_lost: bool) -> Filtering:
    """What a kernel found, unless it is impossible or no number; then the error that says so."""
    highest = found.log_likelihood.amax(1)  # [B]
    if not bool((torch.isfinite(highest) | (allow_lost & (highest == -torch.inf))).all()):
        increments = torch.cat([found.initial_increment[:, None], found.increments], 1)  # [B, T + 1, C]
        times = list(observed_in_time(episodes))
        require_possible(model, times, increments.permute(1, 2, 0), allow_lost=allow_lost)
    require_finite_result(model, found)
    return found


class SMC(Recursion):
    """The particle filter's recursion over time: resample, move, reweight."""

    def __init__(self, model: CPOMDP, settings: ParticleFilter, signature: Signature | None = None) -> None:
        super().__init__(model, signature=signature)
        self.N, self.tries = settings.num_particles, settings.tries
        self.common = settings.common_random_numbers
        self.scheme, self.threshold = as_scheme(settings.resampling), settings.ess_threshold
        self.dtype = torch.get_default_dtype()
        for _, leaf in leaves(self.signature.state):
            if leaf.dtype.is_floating_point:
                self.dtype = torch.promote_types(self.dtype, leaf.dtype)
        self.program = self.proposal = Bootstrap(self, self.common)
        if settings.guide == "ekf":
            self.proposal = LookAhead(self, self.common)
        elif settings.guide is not None:
            if model.initial_observation and not callable(getattr(settings.guide, "initial", None)):
                raise invalid("guide", settings.guide, "a program `initial`, as the model observes at time 0")
            self.proposal = Guided(self, self.common, cast("Guide", settings.guide))

    def start(self, num_episodes: int) -> Cloud:
        """Particles from the model's `initial`, all of the same weight."""
        shape = torch.Size((self.model.num_contexts, num_episodes, self.N))
        return self.of_states(self._broadcast(self.proposal.initial(shape)[0], shape))

    def condition(self, cloud: Cloud, observed: Observed) -> tuple[Cloud, Tensor]:
        """Weight the particles by what was observed; a guide may draw them anew, knowing it."""
        log_ratio = None
        if isinstance(self.proposal, Guided):
            state, log_ratio = self.proposal.initial(cloud.shape, observed)
            cloud = replace(cloud, state=self._broadcast(state, cloud.shape))
        return self.reweight(cloud, observed, log_ratio)

    def step(self, cloud: Cloud, observed: Observed) -> tuple[Cloud, Tensor]:
        """Resample, move, reweight."""
        cloud, increment, _ = self.step_with_parents(cloud, observed)
        return cloud, increment

    def step_with_parents(self, cloud: Cloud, observed: Observed) -> tuple[Cloud, Tensor, Tensor | None]:
        """As `step`, with the parent of every particle, `[C, B, N]`; None if all are their own."""
        cloud, ancestors = self.resample(cloud, observed.alive)
        if self.tries > 1:
            cloud, increment = self.try_out(cloud, observed)
        else:
            cloud, log_ratio = self.propose(cloud, observed)
            cloud, increment = self.reweight(cloud, observed, log_ratio)
        return cloud, increment, None if ancestors is None else ancestors.everywhere(cloud.shape)

    def resample(self, cloud: Cloud, alive: Tensor | None = None) -> tuple[Cloud, Ancestors | None]:
        """Resample the rows that need it. Says who descends from whom; None if no row did."""
        (C, B, N), scheme = cloud.shape, self.scheme
        needed = cloud.weights.ess < self.threshold * N * (1 - 1e-6)  # [C, B]; 1: if weights differ at all
        if alive is not None:
            needed = needed & alive
        # Drawn in any case: what one episode needs must not change the random numbers of another.
        uniforms = torch.rand(1 if self.common else C, B, scheme.num_uniforms(N), device=needed.device)
        if not bool(needed.any()):
            return replace(cloud, resampled=needed), None
        rows = needed.flatten().nonzero()[:, 0]  # [R] of C·B
        uniforms = uniforms.flatten(0, 1)[rows % B if self.common else rows]
        weights = cloud.weights.values.view(C * B, N).index_select(0, rows)
        ancestors = Ancestors(rows, scheme(weights, uniforms))
        resampled = replace(
            cloud,
            state=map_state(ancestors.inherit, cloud.state),
            weights=cloud.weights.evened(rows),
            families=cloud.families.after(ancestors, cloud.weights),
            resampled=needed,
        )
        return resampled, ancestors

    def propose(self, cloud: Cloud, observed: Observed) -> tuple[Cloud, Tensor | None]:
        """Move by the proposal. Returns its log-ratio `p / q`, `[C, B, N]`, too; None for 1."""
        state, log_ratio = self.proposal.transition(cloud.state, cloud.shape, observed)
        return replace(cloud, state=self._broadcast(state, cloud.shape)), log_ratio

    def try_out(self, cloud: Cloud, observed: Observed) -> tuple[Cloud, Tensor]:
        """Move each particle to one of K next states, knowing what is observed, and weight it.

        The mean of the density `g` over K draws from the transition `f` is on average `∫ f g`, and so is a
        pick in proportion to `g`, weighted by that mean, a draw from `f g`.
        """
        (C, B, N), K = cloud.shape, self.tries
        states = map_state(lambda leaf: leaf.repeat_interleave(K, 2), cloud.state)  # [C, B, N K, …]
        tried = replace(
            self.of_states(states), state=self.move_states(states, cast("Tensor", observed.action))
        )
        # Drawn in any case: what one episode saw must not change the random numbers of another.
        levels = torch.rand(1 if self.common else C, B, N, 1, dtype=torch.float64, device=self.context.device)
        taken, rows = torch.zeros((C, B, N, 1), dtype=torch.long, device=levels.device), observed.rows
        density = self.log_density(tried, observed, rows)
        increment = torch.zeros_like(cloud.weights.ess, dtype=torch.float64)
        weights = cloud.weights
        if density is not None:
            density = density.expand(C, -1, N * K).reshape(C, -1, N, K)
            weights, increment = weights.times(density.logsumexp(-1) - math.log(K), episodes=rows)
            possible = density.amax(-1, keepdim=True) > -torch.inf
            shares = torch.where(possible, density, 0.0).double().softmax(-1)
            some = levels if rows is None else levels.index_select(1, rows)
            best = inverse_cdf(shares, some.expand(*shares.shape[:-1], 1).contiguous())
            taken = best if rows is None else taken.index_copy(1, rows, best)
        first = K * torch.arange(N, device=taken.device)
        state = pick(tried.state, first + taken[..., 0])
        return replace(cloud, state=state, weights=weights), increment

    def reweight(self, cloud: Cloud, observed: Observed, log_ratio: Tensor | None) -> tuple[Cloud, Tensor]:
        """Multiply weights by the density of what was observed. Returns the evidence increment `[C, B]`."""
        rows = observed.rows if log_ratio is None else None  # a ratio counts where nothing was observed, too
        log_density = self.log_density(cloud, observed, rows)
        if log_density is None:
            return cloud, torch.zeros_like(cloud.weights.ess, dtype=torch.float64)
        factors = [log_density] if log_ratio is None else [log_density, log_ratio]
        weights, increment = cloud.weights.times(*factors, episodes=rows)
        if rows is None and observed.alive is not None:  # a guide's draws have weights even after the end
            increment = torch.where(observed.alive, increment, 0.0)
        return replace(cloud, weights=weights), increment

    def log_density(self, cloud: Cloud, observed: Observed, rows: Tensor | None) -> Tensor | None:
        """`log p(o | s, a, c)` in some of the episodes (None: all), `[C, B', N]`; None if those are none."""
        # Drawn in any case: what one episode saw must not change the random numbers of another.
        seed = int(torch.randint(2**31, ())) if self.signature.dependencies.parents else 0
        state, shape = cloud.state, cloud.shape
        if rows is not None:
            if len(rows) == 0:
                return None
            some = observed.select(rows)
            if not hidden_parents(self.signature, some):  # which might be drawn, for all episodes alike
                observed, state = some, map_state(lambda leaf: leaf.index_select(1, rows), state)
                rows = None

        def draw_hidden(name: str, fn: Any) -> tuple[Tensor, Tensor]:
            site = list(self.signature.observations).index(name)
            with RandomStream(seed_for(seed, site)):
                return self.hidden(name, fn, torch.Size((*shape, *[1] * self.plate_axes)))

        density = log_density_of_seen(
            self.model, self.signature, state, self.context, observed, draw=draw_hidden, most=SUMMED
        )
        return density if rows is None else density.expand(shape).index_select(1, rows)

    def hidden(self, name: str, fn: Any, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Draw a site that was not observed, for every particle; that, and `log p / q` of the draws."""
        return draw(fn, shape, self.common), torch.zeros((), device=self.context.device)

    def move(self, cloud: Cloud, action: Tensor) -> Cloud:
        """Move the particles by the model's `transition`, without an observation."""
        return replace(cloud, state=self.move_states(cloud.state, action))

    def move_states(self, states: State, action: Tensor) -> State:
        """Draw where actions `[B]` lead from states, leaves `[C, B, N, …]`."""
        shape = next(leaf for _, leaf in leaves(states)).shape[:3]
        moved, _ = self.program.transition(states, shape, Observed(0, action, {}, {}))
        return self.signature.broadcast(moved, shape)

    def of_states(self, states: State) -> Cloud:
        """States, leaves `[C, B, N, …]`, as particles of the same weight, each the founder of a family."""
        shape = next(leaf for _, leaf in leaves(states)).shape[:3]
        settings = shape, self.dtype, self.context.device
        nowhere = torch.zeros(shape[:2], dtype=torch.bool, device=self.context.device)
        return Cloud(states, Weights.even(*settings), Families.new(*settings), nowhere)

    def with_episodes(self, cloud: Cloud, episodes: Tensor, states: State) -> Cloud:
        """The same, but particles of equal weight, leaves `[C, R, N, …]`, in some of the episodes, `[R]`."""
        return map_belief(
            lambda mine, theirs: mine.index_copy(1, episodes, theirs), cloud, self.of_states(states)
        )

    def _broadcast(self, state: Any, shape: torch.Size) -> State:
        """A state that a program returned, for every particle."""
        whole: State = map_state(Tensor.contiguous, self.signature.broadcast(state, shape))
        return whole

    def ess(self, cloud: Cloud) -> Tensor:
        """The effective sample size of the weights, `[C, B]`."""
        return cloud.weights.ess

    def resampled(self, cloud: Cloud, observed: Observed) -> Tensor:
        """Which rows were resampled in this step, bool `[C, B]`."""
        return cloud.resampled if observed.alive is None else cloud.resampled & observed.alive

    def standard_error(self, cloud: Cloud) -> Tensor:
        """Estimated standard error of the log-likelihood, `[C, B]`, from families of particles."""
        return cloud.families.standard_error(cloud.weights)

    def expected_reward(self, cloud: Cloud, action: Tensor) -> Tensor:
        """The particles' weighted mean reward.

        Of models that pay on arrival, each particle draws where it goes; random numbers of the filter's own
        steps stay what they are.
        """
        after = None
        if self.model.pays_on_arrival:
            with RandomStream(self._seed_aside()):
                after = self.move_states(cloud.state, action)
        return cloud.weights.mean(self.reward(cloud.state, action, cloud.shape, after))

    def _seed_aside(self) -> int:
        """A seed for random numbers beside those of the filter, whose stream does not move."""
        before = torch.get_rng_state()
        seed = int(torch.randint(2**31, ()))
        torch.set_rng_state(before)
        return seed_for(seed, 1)

    def moments(self, cloud: Cloud) -> tuple[Any, Any]:
        """Weighted means and variances of the particles; of booleans, as of 0 and 1."""
        return cloud.moments()

    def draw(self, cloud: Cloud, num_draws: int) -> State:
        """Particles by their weights."""
        return cloud.draw(num_draws)

    def smooth(self, episodes: Episodes, num_trajectories: int, offset: int) -> Smoothing:
        """Draw whole trajectories, backwards through the particles, and take their moments.

        By backward sampling where the program tells the transition density, that is, where the next state
        consists of the sample sites of `transition`; else from the genealogy of the particles, which has few
        distinct ancestors far back. `Smoothing.method` says which.
        """
        return smooth(self, episodes, num_trajectories, offset)
