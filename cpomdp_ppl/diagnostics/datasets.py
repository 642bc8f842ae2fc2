"""Arrays with named axes: the tables that inference data are collected in, and names that NetCDF allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from cpomdp_ppl.arrays import on_the_right
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.model import CPOMDP

TAKEN = frozenset({"chain", "draw", "episode", "time", "context", "action", "context_index", "is_context"})
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
    B, T = episodes.actions.shape
    taken = torch.arange(T, device=episodes.device) < episodes.lengths[:, None]
    actions = torch.full((B, T + 1), -1)
    actions[:, :T] = torch.where(taken, episodes.actions, -1)
    arrays: dict[str, tuple[tuple[str, ...], Any]] = {
        "actions": (("episode", "time"), actions),
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
        for path, leaf in leaves(episodes.states):
            name = component(path)
            arrays[f"true_{name}"] = ("episode", "time", *further_dims(name, leaf.dim() - 2)), leaf
    if episodes.returns is not None:
        arrays["returns"] = ("episode",), episodes.returns
    arrays = {name: (dims, values.cpu().numpy()) for name, (dims, values) in arrays.items()}
    return dataset_of(arrays, coordinates).assign_coords(action=np.array(model.action_names))


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
