"""Continuous observations as symbols that a tree search can meet again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from baselines.pomdp_py_adapter import Symbol
from cpomdp_ppl.errors import require, require_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.signature import ObservationSite

Scheme = Literal["uniform", "quantile"]
Limits: TypeAlias = "tuple[float, float] | Mapping[str, tuple[float, float]]"

UNSEEN = -math.inf
"""Stands in a symbol for what was not seen; whatever was seen is finite."""

TAIL = 0.005
"""Share of the observations beyond either end of limits that are read off episodes."""


@dataclass(frozen=True)
class Binning:
    """How observations become symbols that can be met again.

    A symbol has one number for every number of every site, in order: the bin it is in, the value itself if
    the site is discrete or not binned, or `UNSEEN`. The first and the last bin are open outwards.

    Attributes:
        sites: The observation sites.
        edges: Between the bins of a site, `[k, bins - 1]` for its k numbers; None for one not binned.
    """

    sites: Mapping[str, ObservationSite]
    edges: Mapping[str, Tensor | None]

    @staticmethod
    def of(
        sites: Mapping[str, ObservationSite],
        episodes: Episodes,
        bins: int | None = 10,
        limits: Limits | None = None,
        scheme: Scheme = "uniform",
    ) -> Binning:
        """Bin every number of all continuous sites; None for `bins` leaves observations as they are.

        Limits are for all sites, or by site; left out, or for sites left out, bins hold all that episodes
        saw but a percent. They are of equal width (`"uniform"`), or seen equally often (`"quantile"`).
        """
        if bins is not None:
            bins = require_count("bins", bins)
        require(scheme in get_args(Scheme), "scheme", scheme, f"one of {get_args(Scheme)}")
        require(limits is None or bins is not None, "limits", limits, "None, as nothing is binned")
        require(limits is None or scheme == "uniform", "limits", limits, 'None, as scheme is not "uniform"')
        by_site = _limits_by_site(limits, sites)
        edges = {}
        for name, spec in sites.items():
            seen = _seen_numbers(spec, episodes, name)
            edges[name] = (
                None if bins is None or spec.is_discrete else _edges(seen, bins, by_site.get(name), scheme)
            )
        return Binning(sites, edges)

    def symbols(self, percept: Percept, rows: Tensor | None = None) -> list[Symbol]:
        """What was seen in each of the N steps of a percept, or in those of its `rows`."""
        columns = []
        for name, spec in self.sites.items():
            values, flags = percept.observations[name], percept.observed[name]
            if rows is not None:
                values, flags = values[rows], flags[rows]
            numbers = values.reshape(len(values), math.prod(spec.shape))  # of no rows, torch knows no -1
            columns.append(self._numbers(name, numbers, _flags(spec, flags)))
        return [Symbol(tuple(row)) for row in torch.cat(columns, 1).tolist()]

    def _numbers(self, name: str, values: Tensor, flags: Tensor) -> Tensor:
        """Values and flags `[N, k]` as numbers that can be met again, float64 `[N, k]`."""
        edges = self.edges[name]
        if edges is not None:
            values = torch.searchsorted(edges, values.T.to(edges).contiguous(), right=True).T
        return torch.where(flags, values.double(), UNSEEN)


def _flags(spec: ObservationSite, flags: Tensor) -> Tensor:
    """Flags `[N, *plates]` for every number of a site, `[N, k]`."""
    event = (1,) * (len(spec.shape) - len(spec.plates))
    return (
        flags.reshape(flags.shape + event)
        .expand(len(flags), *spec.shape)
        .reshape(len(flags), math.prod(spec.shape))
    )


def _seen_numbers(spec: ObservationSite, episodes: Episodes, name: str) -> list[Tensor]:
    """What episodes saw, for each of the k numbers of a site."""
    values, flags = episodes.observations[name].flatten(0, 1), episodes.observed[name].flatten(0, 1)
    if episodes.initial_observations is not None and episodes.initially_observed is not None:
        values = torch.cat([values, episodes.initial_observations[name]])
        flags = torch.cat([flags, episodes.initially_observed[name]])
    v = values.reshape(-1, math.prod(spec.shape))  # [n, k]
    f = _flags(spec, flags)
    return [v[f[:, i], i].double() for i in range(v.shape[1])]


def _limits_by_site(limits: Any, sites: Mapping[str, ObservationSite]) -> dict[str, tuple[float, float]]:
    if limits is None:
        return {}
    continuous = sorted(name for name, spec in sites.items() if not spec.is_discrete)
    given = limits if hasattr(limits, "items") else dict.fromkeys(continuous, limits)
    unknown = sorted(set(given) - set(continuous))
    require(not unknown, "limits", unknown, f"sites out of {continuous}, which are continuous")
    for ends in given.values():
        pair = isinstance(ends, tuple | list) and len(ends) == 2
        proper = pair and all(isinstance(end, int | float) and math.isfinite(end) for end in ends)
        proper = proper and ends[0] < ends[1]
        require(proper, "limits", limits, "two numbers, the lower first, or such a pair for every site")
    return dict(given)


def _edges(seen: list[Tensor], bins: int, ends: tuple[float, float] | None, scheme: Scheme) -> Tensor:
    """The inner edges of the bins, `[k, bins - 1]`."""
    inner = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    rows = []
    for values in seen:
        v = values if len(values) else torch.zeros(1, dtype=torch.float64)  # a number that was never seen
        if scheme == "quantile":
            rows.append(v.quantile(inner))
            continue
        low, high = ends or (float(v.quantile(TAIL)), float(v.quantile(1 - TAIL)))
        rows.append(low + (high - low) * inner)
    return torch.stack(rows)
