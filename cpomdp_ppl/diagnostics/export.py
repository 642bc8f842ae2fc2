"""Drawing what is hidden in episodes, and what would be seen, into arrays with named axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.arrays import how_many_fit, on_the_right, pieces
from cpomdp_ppl.context import entropy
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.inference.backend import inference_scope, require_same_sites
from cpomdp_ppl.inference.persistence import filtered, smoothed
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rng import seed_for
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.filtering import Filtering
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.state import State

ACTION_AXIS = "action_axis"
"""The axis of datasets along which continuous actions have their numbers."""

AXES = ("chain", "draw", "episode", "time", "context", "action", ACTION_AXIS)
TAKEN = frozenset({*AXES, "context_index", "is_context"})
"""Names that a state component or an observation site cannot have in a dataset."""


class Table:
    """Arrays of one group that are filled some chains and episodes at a time."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.arrays: dict[str, tuple[tuple[str, ...], np.ndarray[Any, Any]]] = {}

    def put(self, series: Mapping[str, tuple[str, Tensor]], chain: int, start: int) -> None:
        """Write some episodes, from `start` on, of one chain.

        `series` has dims, separated by blanks, and values by name; further axes get `<name>_dim_<k>`.
        """
        for name, (dims, values) in series.items():
            named, found = dims.split(), values.cpu().numpy()
            b = named.index("episode")
            if name not in self.arrays:
                shape = list(found.shape)
                shape[b] = self.sizes["episode"]
                all_dims = ("chain", *named, *further_dims(name, len(shape) - len(named)))
                self.arrays[name] = all_dims, np.empty((self.sizes["chain"], *shape), found.dtype)
            by_episode = self.arrays[name][1][chain].swapaxes(0, b)  # a view
            by_episode[start : start + found.shape[b]] = found.swapaxes(0, b)

    def dataset(self, coordinates: Mapping[str, Any]) -> xr.Dataset:
        """The arrays as a dataset, with those of the coordinates that apply."""
        return dataset_of(self.arrays, coordinates)


def observed_data(episodes: Episodes, coordinates: Mapping[str, Any]) -> xr.Dataset:
    """What was observed, NaN where nothing was."""
    arrays = {}
    for site, (values, flags) in observations_in_time(episodes).items():
        name = variable(site)
        dims = ("episode", "time", *further_dims(name, values.dim() - 2))
        arrays[name] = dims, with_nan(values, flags).cpu().numpy()
    return dataset_of(arrays, coordinates)


def constant_data(model: CPOMDP, episodes: Episodes, coordinates: Mapping[str, Any]) -> xr.Dataset:
    """What else is known about episodes: actions, lengths, what was observed when, and the hidden truth."""
    T, taken = episodes.horizon, actions_taken(episodes)
    none = torch.full_like(taken[:, :1], torch.nan if taken.is_floating_point() else -1)
    names = axis_names(model)
    arrays: dict[str, tuple[tuple[str, ...], Any]] = {
        "actions": (("episode", "time", *names), torch.cat([taken, none], 1)),
        "length": (("episode",), episodes.lengths),
    }
    for site, (_, flags) in observations_in_time(episodes).items():
        name = f"observed_{variable(site)}"
        before = torch.zeros_like(flags[:, : T + 1 - flags.shape[1]])  # time 0, unless it has observations
        dims = ("episode", "time", *further_dims(name, flags.dim() - 2))
        arrays[name] = dims, torch.cat([before, flags], 1)
    if episodes.contexts is not None:
        arrays["true_context"] = ("episode",), episodes.contexts
    if episodes.states is not None:
        for path, leaf in leaves(episodes.lasting_states):
            name = component(path)
            dims = ("episode", "time", *further_dims(name, leaf.dim() - 2))
            arrays[f"true_{name}"] = dims, leaf
    if episodes.returns is not None:
        arrays["returns"] = ("episode",), episodes.returns
    arrays = {name: (dims, values.cpu().numpy()) for name, (dims, values) in arrays.items()}
    dataset = dataset_of(arrays, {**coordinates, **names})
    return dataset if names else dataset.assign_coords(action=np.array(model.action_names))


def actions_taken(episodes: Episodes) -> Tensor:
    """Actions `[B, T]`, -1 past the end of an episode; or `[B, T, D]`, NaN there."""
    if episodes.actions.is_floating_point():
        return with_nan(episodes.actions, episodes.alive)
    return torch.where(episodes.alive, episodes.actions, -1)


def axis_names(model: CPOMDP) -> dict[str, Any]:
    """What the axes of continuous actions are called, as a coordinate; none, if actions are finitely many."""
    return {} if model.box is None else {ACTION_AXIS: np.array(model.box.names)}


def component(path: str) -> str:
    """The variable that holds a component of the state."""
    return variable(path, "state")


def variable(name: str, kind: str = "observation") -> str:
    """A name as datasets and NetCDF allow it: that of no axis, and without slashes."""
    return (f"{kind}.{name}" if name in TAKEN else name).replace("/", ".")


def further_dims(name: str, number: int) -> tuple[str, ...]:
    """Names of the axes that a variable has beyond the common ones."""
    return tuple(f"{name}_dim_{k}" for k in range(number))


def dataset_of(
    arrays: Mapping[str, tuple[tuple[str, ...], np.ndarray[Any, Any]]], coordinates: Mapping[str, Any]
) -> xr.Dataset:
    """Arrays, given with the names of their axes, with those of the coordinates that apply."""
    sizes = {
        dim: size for dims, array in arrays.values() for dim, size in zip(dims, array.shape, strict=True)
    }
    values = {dim: coordinates.get(dim, np.arange(size)) for dim, size in sizes.items()}
    return xr.Dataset(dict(arrays), values)


def observations_in_time(episodes: Episodes) -> dict[str, tuple[Tensor, Tensor]]:
    """Observations and flags by site, `[B, times, …]`, from the initial one if there is one."""
    first, known = episodes.initial_observations, episodes.initially_observed
    pairs = {site: (values, episodes.observed[site]) for site, values in episodes.observations.items()}
    if first is None or known is None:
        return pairs
    return {
        site: (torch.cat([first[site][:, None], values], 1), torch.cat([known[site][:, None], flags], 1))
        for site, (values, flags) in pairs.items()
    }


def with_nan(values: Tensor, known: Tensor) -> Tensor:
    """Values as real numbers, NaN where they are not known."""
    if not values.is_floating_point():
        values = values.double()
    nan: Tensor = values.new_full((), torch.nan)
    return torch.where(on_the_right(known, values), values, nan)


NUMBERS_AT_ONCE = 2**23
"""Numbers (particles and draws, at all times) that are handled together."""

DITHER = 1e-6
"""Width, in nats, of the noise on the lowest pointwise log-likelihoods; see `to_inference_data`."""

FILTER, AFTER, BEFORE, NOISE, WORLD = range(5)
"""Purposes of random numbers: filters, draws of posterior and prior, noise on likelihoods, simulation."""


@dataclass(frozen=True)
class _Joint:
    """Joint draws of what is hidden in B episodes."""

    context: Tensor  # int64 [M, B]
    state: State  # leaves [M, B, T + 1, …]

    def __len__(self) -> int:
        return self.context.shape[1]


@dataclass(frozen=True)
class _Piece:
    """Some of the episodes: where they start, what they are, and their priors `[B, C]`."""

    start: int
    episodes: Episodes
    prior: Tensor


class Export:
    """Draws contexts, states and observations, some episodes at a time, and makes datasets of them."""

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
            require_same_sites(recursion.model, recursion.signature, episodes)
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
        self.posterior, self.posterior_predictive, self.stats = Table(sizes), Table(sizes), Table(sizes)
        self.prior_draws, self.prior_predictive = (Table({**sizes, "chain": 1}) for _ in range(2))

    def _episodes_at_once(self, backend: Backend) -> int:
        size: int = sum(leaf.shape.numel() for _, leaf in leaves(self.signature.state))
        kept = self.draws * size
        if isinstance(backend, ParticleFilter):  # with weights, ancestors and families of every particle
            kept += backend.num_particles * (size + 5)
        numbers = kept * self.model.num_contexts * (self.episodes.horizon + 1)
        parts = math.ceil(len(self.episodes) / how_many_fit(NUMBERS_AT_ONCE, numbers))
        return math.ceil(len(self.episodes) / parts)  # all of about the same size

    def draw(self, progress: bool) -> None:
        """Fill the tables."""
        with tqdm(total=len(self.episodes) * self.chains, unit=" episodes", disable=not progress) as bar:
            for rows in pieces(len(self.episodes), self.chunk):
                piece = _Piece(rows.start, self.episodes[rows], self.prior[rows])
                try:
                    self._before(piece)
                    for chain in self._after(piece):
                        bar.update(len(chain))
                except (ArithmeticError, ValueError) as error:
                    if rows.start:
                        error.add_note(f"(episodes are counted from {rows.start} on)")
                    raise

    def _after(self, piece: _Piece) -> Iterator[_Joint]:
        """Draw what is hidden, and what would be seen again, given all that was seen."""
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
        """Draw what is hidden, and what would be seen, given nothing but the actions."""
        M, B, T = self.draws, len(piece.episodes), piece.episodes.horizon
        actions = torch.cat([piece.episodes.lasting_actions] * M)  # of M·B
        alive = torch.cat([piece.episodes.alive] * M)
        going_on = torch.ones_like(alive[:, 0])  # whether the drawn episode is, however long the true one was
        with inference_scope(self.model, seed_for(self.seed, BEFORE, piece.start)):
            programs = self.programs
            context = _indices(piece.prior, M)  # [M, B]
            c = context.flatten()
            state = programs.initial(c)
            path, percepts = [state], [programs.observe(state, c)] if self.first == 0 else []
            for t in range(T):
                step = programs.step(state, actions[:, t], c)
                state = map_state(partial(_where, alive[:, t] & going_on), step.state, state)
                path.append(state)
                percepts.append(step.percept if step.ended is None else step.percept.only(going_on))
                going_on = going_on if step.ended is None else going_on & ~step.ended
        states = map_state(lambda *x: torch.stack(x, 1).unflatten(0, (M, B)), *path)  # [M, B, T+1, …]
        self._put_joint(self.prior_draws, _Joint(context, states), 0, piece)
        self._put_observations(self.prior_predictive, _in_time(percepts, M, B), 0, piece)

    def _replicas(self, joint: _Joint, some: Episodes) -> dict[str, tuple[Tensor, Tensor]]:
        """Observations drawn anew at states and contexts, by site: values and flags, `[M, B, times, …]`."""
        M, B = joint.context.shape
        percepts = []
        for t in range(self.first, some.horizon + 1):
            state = map_state(lambda leaf, t=t: leaf[:, :, t].flatten(0, 1), joint.state)  # [M·B, …]
            action = torch.cat([some.lasting_actions[:, t - 1]] * M) if t else None
            percepts.append(self.programs.observe(state, joint.context.flatten(), action))
        return _in_time(percepts, M, B)

    def _put_joint(self, table: Table, joint: _Joint, chain: int, piece: _Piece) -> None:
        contexts = torch.arange(self.model.num_contexts, device=joint.context.device)
        series = {
            "context_index": ("draw episode", joint.context),
            "is_context": ("draw episode context", (joint.context[..., None] == contexts).float()),
        }
        for path, leaf in leaves(joint.state):  # ArviZ has no moments of truth values
            series[component(path)] = "draw episode time", leaf.long() if leaf.dtype == torch.bool else leaf
        table.put(series, chain, piece.start)

    def _put_observations(
        self, table: Table, replicas: Mapping[str, tuple[Tensor, Tensor]], chain: int, piece: _Piece
    ) -> None:
        series = {}
        for site, (_, known) in observations_in_time(piece.episodes).items():
            values, flags = replicas[site]
            series[variable(site)] = "draw episode time", with_nan(values, flags & known)
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
            "observed_data": observed_data(self.episodes, {**coordinates, "time": seen}),
            "constant_data": constant_data(self.model, self.episodes, coordinates),
        }

    def _log_likelihood(self, coordinates: Mapping[str, Any]) -> xr.Dataset:
        anything = torch.stack(
            [
                flags.reshape(*flags.shape[:2], -1).any(2)
                for _, flags in observations_in_time(self.episodes).values()
            ]
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
        return dataset_of({"increment": (("chain", "draw", "step"), drawn)}, steps).assign_coords(where)


def _indices(probabilities: Tensor, number: int) -> Tensor:
    """Independent draws from every row of `[B, C]`: int64 `[number, B]`."""
    drawn: Tensor = torch.multinomial(probabilities, number, replacement=True).T
    return drawn


def _under(context: Tensor, trajectories: State) -> State:
    """The trajectories `[M, B, T + 1, C, …]` under contexts `[M, B]`: leaves `[M, B, T + 1, …]`."""

    def chosen(leaf: Tensor) -> Tensor:
        where = on_the_right(context, leaf).expand(*leaf.shape[:3], 1, *leaf.shape[4:])
        return leaf.gather(3, where).squeeze(3)

    state: State = map_state(chosen, trajectories)
    return state


def _where(alive: Tensor, after: Tensor, before: Tensor) -> Tensor:
    """The later states of episodes that go on; the others stand still."""
    return torch.where(on_the_right(alive, after), after, before)


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
