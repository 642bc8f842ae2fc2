"""Inference over episodes as an ArviZ object, whose summaries and plots then need no code of ours."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.arrays import on_the_right
from cpomdp_ppl.context import entropy
from cpomdp_ppl.errors import require, require_count, require_model
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.inference.backend import inference_scope, require_same_sites
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.inference.persistence import filtered, smoothed
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rng import fresh_seed, seed_for
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from arviz import InferenceData

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.filtering import Filtering
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.state import State

NUMBERS_AT_ONCE = 2**23
"""Numbers (particles and draws, at all times) that are handled together."""

DITHER = 1e-6
"""Width, in nats, of the noise on the lowest pointwise log-likelihoods; see `to_inference_data`."""

TAKEN = frozenset({"chain", "draw", "episode", "time", "context", "action", "context_index", "is_context"})
"""Names that a state component or an observation site cannot have in a dataset."""

FILTER, AFTER, BEFORE, NOISE, WORLD = range(5)
"""What random numbers are for."""


def to_inference_data(
    model: CPOMDP,
    episodes: Episodes,
    likelihood: str | Backend | None = None,
    *,
    chains: int = 4,
    draws: int = 250,
    prior: Sequence[float] | Tensor | None = None,
    seed: int | None = None,
    progress: bool = False,
) -> InferenceData | xr.DataTree:
    """Contexts and states given what was seen, with all that ArviZ wants to know about them.

    **Chains are independent runs of the filter**, each with random numbers of its own, so R-hat speaks
    about the filter: with too few particles, chains disagree. Within a chain, draws are independent given
    its run: a context from its `P(c | y)`, then a trajectory from its smoother under that context. So
    `az.ess` and `az.mcse` count draws, and know nothing of an error that all draws of a run share; that
    shows in how far the means of chains are apart, `mean("draw").std("chain") / √chains`. To know it well,
    take many chains of few draws. The attribute `smoothing` says how trajectories were found; by
    `genealogy`, SMC's early states have few distinct ancestors. The other backends (exact, Kalman, grid)
    are deterministic: their chains share one filter and differ in the draws alone, so R-hat is 1 but for
    chance and says nothing about their bias. `cpomdp_ppl.diagnostics.summary` is ArviZ's, but knows `"state"`
    for all components of a state, and that of what never varies (a state that is known, a context that is
    sure) chains agree, where `az.summary` shows NaN for R-hat, with warnings.

    Groups (`time` runs 0 … T; past an episode's length states stand still, and nothing is observed):

    - `posterior` and `prior`: `context_index` `[chain, draw, episode]`; `is_context`
      `[chain, draw, episode, context]`, 0 or 1, whose mean is `P(c | y)`; and every component of the state
      under its own name (`state` if it has none), `[chain, draw, episode, time, …]`. The prior has one chain.
    - `posterior_predictive` and `prior_predictive`: observations by site, `[chain, draw, episode, time, …]`,
      drawn from the observation program at the drawn states and contexts, for the episodes' own actions; NaN
      where the program hides them, or the episode has none. Times are 1 … T, or 0 … T if the model observes
      before acting.
    - `log_likelihood`: `increment` `[chain, draw, step]` is `log p(o_{t+1} | h_t, a_t, c)` at the drawn
      context, states integrated out. A step is an episode (`step_episode`) and a time (`step_time`) at
      which anything was seen.
    - `observed_data`: observations by site, `[episode, time, …]`, NaN where there are none.
    - `constant_data`: `actions`, taken at each time (-1 for none), `length`, `observed_<site>`; and where the
      episodes know them `true_context`, `true_<component>` and `returns`.
    - `sample_stats`, of each chain's run and so without draws: `increment` of what was seen at each time
      `[chain, episode, time, context]`; `log_likelihood` `[chain, episode, context]`; `evidence`, that is
      `log Σ_c P(c) p(y | c)`, `[chain, episode]`; `context_probability` `P(c | o_{0:t})`
      `[chain, episode, time, context]`; `information_gain`, the fall of its entropy in nats,
      `[chain, episode, time]`. Of SMC also `ess` and `resampled` `[chain, episode, time, context]`, and
      `log_likelihood_se` `[chain, episode, context]`, infinite where a run cannot tell; `ess` is that after
      a step, and NaN at time 0.

    **What `az.loo` means here.** It leaves out one step's factor `p(o_{t+1} | h_t, a_t, c)` at a time: how
    well does the context, as all other steps show it, predict what was seen in this one, given the history
    before? It compares models, or likelihoods, on the same episodes. It is no forecast, as later steps help
    to find the context; that is `evidence`. ArviZ smooths the largest importance weights, and reports a
    failure (`pareto_k` infinite, and a warning) unless five are distinct. But there are only as many values
    as contexts and chains, so it would do so even where all draws are of one context and nothing can fail.
    Draws at the lowest log-likelihood of a step therefore have noise of 10⁻⁶ nats on it in `log_likelihood`
    (in `sample_stats` there is none). A warning that remains is worth a look: as a rule, fewer than five
    draws have the largest weight at some step.

    Args:
        model: The CPOMDP.
        episodes: What was done and seen.
        likelihood: A backend, or its name; left out, the `default_backend` for the model.
        chains: How many times to run the filter.
        draws: How many contexts and trajectories to draw from each run, for every episode.
        prior: Over contexts, `[C]` or `[B, C]`; the model's if left out.
        seed: Of everything random; left out, one is taken from fresh entropy. The attribute `seed` notes it.
        progress: Whether to show a progress bar.

    Returns:
        An `InferenceData`; a `DataTree` of the same groups if ArviZ is 1.0 or later, which has no other.

    Raises:
        ValueError: On arguments that make no sense.
        UnsupportedModelError: If the backend cannot serve the model.
        ObservationError: If the episodes are not of this model.
        DegenerateWeightsError: If no context can have produced an episode, however many particles.

    Example:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> episodes = simulate(model, RandomPolicy(3), 5, seed=0)
        >>> data = to_inference_data(model, episodes, chains=2, draws=10, seed=0)
        >>> data.posterior["is_context"].mean(("chain", "draw")).dims
        ('episode', 'context')
    """
    return wrapped(
        inference_groups(
            model,
            episodes,
            likelihood,
            chains=chains,
            draws=draws,
            prior=prior,
            seed=seed,
            progress=progress,
        )
    )


def wrapped(groups: Mapping[str, xr.Dataset], datatree: bool | None = None) -> InferenceData | xr.DataTree:
    """Datasets by group as what the installed ArviZ works with.

    Args:
        groups: One of them `posterior`, whose attributes the whole gets.
        datatree: Whether to make a `DataTree`; left out, if ArviZ works with those: from 1.0 on.
    """
    with warnings.catch_warnings():
        # Once a day, ArviZ 0.23 warns whoever imports it that a 1.0 is out; both will do here.
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        import arviz as az

    attributes = groups["posterior"].attrs
    if datatree is None:
        datatree = getattr(az, "InferenceData", xr.DataTree) is xr.DataTree  # 1.x keeps the name for that
    if datatree:
        return xr.DataTree.from_dict({"/": xr.Dataset(attrs=attributes), **groups})
    datasets: dict[str, Any] = dict(groups)
    return az.InferenceData(attrs=attributes, **datasets)


def inference_groups(
    model: CPOMDP,
    episodes: Episodes,
    likelihood: str | Backend | None = None,
    *,
    chains: int = 4,
    draws: int = 250,
    prior: Sequence[float] | Tensor | None = None,
    seed: int | None = None,
    progress: bool = False,
) -> dict[str, xr.Dataset]:
    """The groups of `to_inference_data`, as datasets."""
    require_model(model)
    backend = backend_for(model, likelihood)
    chains, draws = require_count("chains", chains), require_count("draws", draws)
    number = fresh_seed(seed)
    require(isinstance(progress, bool), "progress", progress, "True or False")
    require(hasattr(episodes, "observations"), "episodes", episodes, "Episodes")

    export = _Export(model, episodes, backend, chains, draws, prior, number)
    export.draw(progress)
    groups = export.groups()
    attributes = {
        "model": type(model).__name__,
        "likelihood": backend.name,
        "settings": repr(backend),
        "smoothing": export.smoothing,
        "seed": number,
        "inference_library": "cpomdp-ppl",
        "inference_library_version": _version(),
    }
    if isinstance(backend, ParticleFilter):
        attributes |= {
            "num_particles": int(backend.num_particles),
            "ess_threshold": float(backend.ess_threshold),
        }
    return {name: group.assign_attrs(attributes) for name, group in groups.items()}


class _Table:
    """Arrays of one group that are filled some chains and episodes at a time."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.arrays: dict[str, tuple[tuple[str, ...], np.ndarray[Any, Any]]] = {}

    def put(self, series: Mapping[str, tuple[str, Tensor]], chain: int, start: int) -> None:
        """Write what is known of some episodes in one chain.

        Args:
            series: By name, dims separated by blanks, and values; axes without a name get `<name>_dim_<k>`.
            chain: Which chain it is.
            start: The first of the episodes.
        """
        for name, (dims, values) in series.items():
            named, found = dims.split(), values.cpu().numpy()
            b = named.index("episode")
            if name not in self.arrays:
                shape = list(found.shape)
                shape[b] = self.sizes["episode"]
                every = ("chain", *named, *_further(name, len(shape) - len(named)))
                self.arrays[name] = every, np.empty((self.sizes["chain"], *shape), found.dtype)
            whole = self.arrays[name][1][chain].swapaxes(0, b)  # a view, episodes first
            whole[start : start + found.shape[b]] = found.swapaxes(0, b)

    def dataset(self, coordinates: Mapping[str, Any]) -> xr.Dataset:
        """All of it, with those of the coordinates that apply."""
        return _dataset(self.arrays, coordinates)


@dataclass(frozen=True)
class _Joint:
    """Joint draws of what is hidden in B episodes.

    Attributes:
        context: int64 `[M, B]`.
        state: Leaves `[M, B, T + 1, …]`.
    """

    context: Tensor
    state: State

    def __len__(self) -> int:
        return self.context.shape[1]


@dataclass(frozen=True)
class _Piece:
    """Some of the episodes: where they start, what they are, and their priors `[B, C]`."""

    start: int
    episodes: Episodes
    prior: Tensor


class _Export:
    """An export at work: draws chunk after chunk, writes tables, and makes datasets of them."""

    def __init__(
        self,
        model: CPOMDP,
        episodes: Episodes,
        backend: Backend,
        chains: int,
        draws: int,
        prior: Sequence[float] | Tensor | None,
        seed: int,
    ) -> None:
        self.model, self.episodes, self.seed = model, episodes, seed
        self.chains, self.draws = chains, draws
        B, C = len(episodes), model.num_contexts
        with inference_scope(model, seed):
            p = as_prior(model.prior() if prior is None else prior, C, B)
            recursion = backend.recursion(model)
            require_same_sites(recursion, episodes)
            self.programs = Generative(model)
        self.signature = recursion.signature
        p = p / p.sum(-1, keepdim=True)  # in double precision, thirds do not sum to 1 in single
        self.prior = p.to(episodes.device).expand(B, C)
        self.chunk = self._episodes_at_once(backend)
        if isinstance(backend, ParticleFilter):
            # So that filter and smoother, of the same seed, are one and the same run of particles: left to
            # themselves they split the episodes differently, and random numbers go by the split.
            self.chunk = min(self.chunk, backend.episodes_at_once(model, recursion))
            backend = replace(backend, chunk=self.chunk * (draws + 1))
        self.backend = backend
        self.smoothing = ""
        self.first = 0 if model.initial_observation else 1  # time of the first observation
        sizes = {"chain": chains, "episode": B}
        self.posterior, self.posterior_predictive, self.stats = _Table(sizes), _Table(sizes), _Table(sizes)
        self.prior_draws, self.prior_predictive = (_Table({**sizes, "chain": 1}) for _ in range(2))

    def _episodes_at_once(self, backend: Backend) -> int:
        size: int = sum(leaf.shape.numel() for _, leaf in leaves(self.signature.state))
        kept = self.draws * size
        if isinstance(backend, ParticleFilter):  # with weights, ancestors and families of every particle
            kept += backend.num_particles * (size + 5)
        numbers = kept * self.model.num_contexts * (self.episodes.horizon + 1)
        pieces = math.ceil(len(self.episodes) / max(1, NUMBERS_AT_ONCE // numbers))
        return math.ceil(len(self.episodes) / pieces)

    def draw(self, progress: bool) -> None:
        """Fill the tables."""
        with tqdm(total=len(self.episodes) * self.chains, unit=" episodes", disable=not progress) as bar:
            for start in range(0, len(self.episodes), self.chunk):
                rows = slice(start, start + self.chunk)
                piece = _Piece(start, self.episodes[rows], self.prior[rows])
                try:
                    self._before(piece)
                    for chain in self._after(piece):
                        bar.update(len(chain))
                except (ArithmeticError, ValueError) as error:
                    if start:
                        error.add_note(f"(episodes are counted from {start} on)")
                    raise

    def _after(self, piece: _Piece) -> Iterator[_Joint]:
        """Draws of what is hidden and of what would be seen again, knowing all that was seen."""
        filtering = None
        for chain in range(self.chains):
            seed = seed_for(self.seed, FILTER, chain, piece.start)
            if filtering is None or filtering.standard_error is not None:  # without error, it is no estimate
                filtering = filtered(
                    self.backend, self.model, piece.episodes, prior=piece.prior, seed=seed, moments=False
                )
            smoothing = smoothed(self.backend, self.model, piece.episodes, self.draws, seed=seed)
            self.smoothing = smoothing.method
            log_posterior = filtering.log_posterior(piece.prior)  # [B, T+1, C]
            with inference_scope(self.model, seed_for(self.seed, AFTER, chain, piece.start)):
                context = _indices(log_posterior[:, -1].exp(), self.draws)  # [M, B]
                joint = _Joint(context, _under(context, smoothing.trajectories))
                replicas = self._replicas(joint, piece.episodes)
            self._put_joint(self.posterior, joint, chain, piece)
            self._put_observations(self.posterior_predictive, replicas, chain, piece)
            self._put_stats(filtering, log_posterior, chain, piece)
            yield joint

    def _before(self, piece: _Piece) -> None:
        """Draws of what is hidden and of what would be seen, knowing nothing but the actions."""
        M, B, T = self.draws, len(piece.episodes), piece.episodes.horizon
        actions, lengths = piece.episodes.actions.repeat(M, 1), piece.episodes.lengths.repeat(M)  # of M·B
        with inference_scope(self.model, seed_for(self.seed, BEFORE, piece.start)):
            programs = self.programs
            context = _indices(piece.prior, M)  # [M, B]
            c = context.flatten()
            state = programs.initial(c)
            path, percepts = [state], [programs.look(state, c)] if self.first == 0 else []
            for t in range(T):
                step = programs.step(state, actions[:, t], c)
                state = map_state(partial(_where, t < lengths), step.state, state)
                path.append(state)
                percepts.append(step.percept)
        states = map_state(lambda *x: torch.stack(x, 1).unflatten(0, (M, B)), *path)  # [M, B, T+1, …]
        self._put_joint(self.prior_draws, _Joint(context, states), 0, piece)
        self._put_observations(self.prior_predictive, _in_time(percepts, M, B), 0, piece)

    def _replicas(self, joint: _Joint, some: Episodes) -> dict[str, tuple[Tensor, Tensor]]:
        """Observations drawn anew at states and contexts, by site: values and flags, `[M, B, times, …]`."""
        M, B = joint.context.shape
        percepts = []
        for t in range(self.first, some.horizon + 1):
            state = map_state(lambda leaf, t=t: leaf[:, :, t].flatten(0, 1), joint.state)  # [M·B, …]
            action = some.actions[:, t - 1].repeat(M) if t else None
            percepts.append(self.programs.look(state, joint.context.flatten(), action))
        return _in_time(percepts, M, B)

    def _put_joint(self, table: _Table, joint: _Joint, chain: int, piece: _Piece) -> None:
        contexts = torch.arange(self.model.num_contexts, device=joint.context.device)
        series = {
            "context_index": ("draw episode", joint.context),
            "is_context": ("draw episode context", (joint.context[..., None] == contexts).float()),
        }
        for path, leaf in leaves(joint.state):  # ArviZ has no moments of truth values
            series[component(path)] = "draw episode time", leaf.long() if leaf.dtype == torch.bool else leaf
        table.put(series, chain, piece.start)

    def _put_observations(
        self, table: _Table, replicas: Mapping[str, tuple[Tensor, Tensor]], chain: int, piece: _Piece
    ) -> None:
        series = {}
        for site, (_, known) in _observations(piece.episodes).items():
            values, flags = replicas[site]
            series[variable(site)] = "draw episode time", _blanked(values, flags & known)
        table.put(series, chain, piece.start)

    def _put_stats(self, filtering: Filtering, log_posterior: Tensor, chain: int, piece: _Piece) -> None:
        # What belongs to a step is filed under the time of its observation; time 0 has the initial one.
        increments = torch.cat([filtering.initial_increment[:, None], filtering.increments], 1)  # [B, T+1, C]
        log_likelihood = filtering.log_likelihood
        posterior = log_posterior.exp()
        uncertainty = entropy(torch.cat([piece.prior[:, None], posterior], 1))  # [B, T+2]
        series = {
            "increment": ("episode time context", increments),
            "log_likelihood": ("episode context", log_likelihood),
            "evidence": ("episode", (piece.prior.log() + log_likelihood).logsumexp(1)),
            "context_probability": ("episode time context", posterior),
            "information_gain": ("episode time", -uncertainty.diff(dim=1)),
        }
        if filtering.ess is not None:
            unknown = torch.full_like(filtering.ess[:, :1], torch.nan)
            series["ess"] = "episode time context", torch.cat([unknown, filtering.ess], 1)
        if filtering.resampled is not None:
            never = torch.zeros_like(filtering.resampled[:, :1])
            series["resampled"] = "episode time context", torch.cat([never, filtering.resampled], 1)
        if filtering.standard_error is not None:
            series["log_likelihood_se"] = "episode context", filtering.standard_error
        self.stats.put(series, chain, piece.start)

    def groups(self) -> dict[str, xr.Dataset]:
        """The tables as datasets."""
        T = self.episodes.horizon
        coordinates = {
            "chain": np.arange(self.chains),
            "draw": np.arange(self.draws),
            "episode": np.arange(len(self.episodes)),
            "time": np.arange(T + 1),
            "context": np.array(self.model.context_names),
        }
        alone = {**coordinates, "chain": np.arange(1)}
        seen = np.arange(self.first, T + 1)
        return {
            "posterior": self.posterior.dataset(coordinates),
            "posterior_predictive": self.posterior_predictive.dataset({**coordinates, "time": seen}),
            "log_likelihood": self._log_likelihood(coordinates),
            "sample_stats": self.stats.dataset(coordinates),
            "prior": self.prior_draws.dataset(alone),
            "prior_predictive": self.prior_predictive.dataset({**alone, "time": seen}),
            "observed_data": self._observed_data({**coordinates, "time": seen}),
            "constant_data": self._constant_data(coordinates),
        }

    def _log_likelihood(self, coordinates: Mapping[str, Any]) -> xr.Dataset:
        anything = torch.stack(
            [flags.reshape(*flags.shape[:2], -1).any(2) for _, flags in _observations(self.episodes).values()]
        )
        episode, time = anything.any(0).cpu().numpy().nonzero()  # [S], [S]
        time = time + self.first
        increment = self.stats.arrays["increment"][1][:, episode, time]  # [chain, S, C]
        context = self.posterior.arrays["context_index"][1][:, :, episode]  # [chain, draw, S]
        drawn = np.stack(
            [values[np.arange(len(episode)), c] for values, c in zip(increment, context, strict=True)]
        )
        lowest = drawn == drawn.min((0, 1))
        # Not on the others: distinct values just above the cutoff of the tail would look like a heavy one.
        drawn[lowest] += DITHER * np.random.default_rng([self.seed, NOISE]).uniform(-0.5, 0.5, lowest.sum())
        where = {"step_episode": ("step", episode), "step_time": ("step", time)}
        steps = {**coordinates, "step": np.arange(len(episode))}
        return _dataset({"increment": (("chain", "draw", "step"), drawn)}, steps).assign_coords(where)

    def _observed_data(self, coordinates: Mapping[str, Any]) -> xr.Dataset:
        arrays = {}
        for site, (values, flags) in _observations(self.episodes).items():
            name = variable(site)
            dims = ("episode", "time", *_further(name, values.dim() - 2))
            arrays[name] = dims, _blanked(values, flags).cpu().numpy()
        return _dataset(arrays, coordinates)

    def _constant_data(self, coordinates: Mapping[str, Any]) -> xr.Dataset:
        episodes = self.episodes
        B, T = episodes.actions.shape
        taken = torch.arange(T, device=episodes.device) < episodes.lengths[:, None]
        actions = torch.full((B, T + 1), -1)
        actions[:, :T] = torch.where(taken, episodes.actions, -1)
        arrays: dict[str, tuple[tuple[str, ...], Any]] = {
            "actions": (("episode", "time"), actions),
            "length": (("episode",), episodes.lengths),
        }
        for site, (_, flags) in _observations(episodes).items():
            name = f"observed_{variable(site)}"
            never = torch.zeros_like(flags[:, : self.first])
            dims = ("episode", "time", *_further(name, flags.dim() - 2))
            arrays[name] = dims, torch.cat([never, flags], 1)
        if episodes.contexts is not None:
            arrays["true_context"] = ("episode",), episodes.contexts
        if episodes.states is not None:
            for path, leaf in leaves(episodes.states):
                name = component(path)
                arrays[f"true_{name}"] = ("episode", "time", *_further(name, leaf.dim() - 2)), leaf
        if episodes.returns is not None:
            arrays["returns"] = ("episode",), episodes.returns
        arrays = {name: (dims, values.cpu().numpy()) for name, (dims, values) in arrays.items()}
        return _dataset(arrays, coordinates).assign_coords(action=np.array(self.model.action_names))


def component(path: str) -> str:
    """The variable that holds a component of the state."""
    return variable(path, "state")


def variable(name: str, kind: str = "observation") -> str:
    """A name as datasets and NetCDF allow it: that of no axis, and without slashes."""
    return (f"{kind}.{name}" if name in TAKEN else name).replace("/", ".")


def _further(name: str, number: int) -> tuple[str, ...]:
    """Names of the axes that a variable has beyond the common ones."""
    return tuple(f"{name}_dim_{k}" for k in range(number))


def _dataset(
    arrays: Mapping[str, tuple[tuple[str, ...], np.ndarray[Any, Any]]], coordinates: Mapping[str, Any]
) -> xr.Dataset:
    sizes = {
        dim: size for dims, array in arrays.values() for dim, size in zip(dims, array.shape, strict=True)
    }
    values = {dim: coordinates.get(dim, np.arange(size)) for dim, size in sizes.items()}
    return xr.Dataset(dict(arrays), values)


def _indices(probabilities: Tensor, number: int) -> Tensor:
    """Independent draws from every row of `[B, C]`: int64 `[number, B]`."""
    drawn: Tensor = torch.multinomial(probabilities, number, replacement=True).T
    return drawn


def _under(context: Tensor, trajectories: State) -> State:
    """Of trajectories `[M, B, T + 1, C, …]`, those under contexts `[M, B]`: leaves `[M, B, T + 1, …]`."""

    def chosen(leaf: Tensor) -> Tensor:
        where = on_the_right(context, leaf).expand(*leaf.shape[:3], 1, *leaf.shape[4:])
        return leaf.gather(3, where).squeeze(3)

    state: State = map_state(chosen, trajectories)
    return state


def _where(alive: Tensor, after: Tensor, before: Tensor) -> Tensor:
    """The later states of episodes that go on; the others stand still."""
    return torch.where(on_the_right(alive, after), after, before)


def _observations(episodes: Episodes) -> dict[str, tuple[Tensor, Tensor]]:
    """Observations and flags by site, `[B, times, …]`, from the initial one if there is one."""
    first, known = episodes.initial_observations, episodes.initially_observed
    pairs = {site: (values, episodes.observed[site]) for site, values in episodes.observations.items()}
    if first is None or known is None:
        return pairs
    return {
        site: (torch.cat([first[site][:, None], values], 1), torch.cat([known[site][:, None], flags], 1))
        for site, (values, flags) in pairs.items()
    }


def _in_time(percepts: Sequence[Percept], M: int, B: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Percepts of M · B episodes as values and flags by site, `[M, B, times, …]`."""

    def stacked(name: str, site: str) -> Tensor:
        series: Tensor = torch.stack(
            [getattr(percept, name)[site] for percept in percepts], 1
        )  # [M·B, times]
        return series.reshape(M, B, *series.shape[1:])

    return {
        site: (stacked("observations", site), stacked("observed", site)) for site in percepts[0].observations
    }


def _blanked(values: Tensor, known: Tensor) -> Tensor:
    """Values as real numbers, NaN where they are not known."""
    if not values.is_floating_point():
        values = values.double()
    nan: Tensor = values.new_full((), torch.nan)
    return torch.where(on_the_right(known, values), values, nan)


def _version() -> str:
    try:
        return version("cpomdp-ppl")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
