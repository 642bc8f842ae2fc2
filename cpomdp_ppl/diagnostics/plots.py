"""Pictures of inference over episodes: what was believed, how well the filter did, who agrees with whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from cpomdp_ppl.diagnostics.inference_data import state_variables
from cpomdp_ppl.diagnostics.style import (
    BLUE,
    COLUMNS,
    GREY,
    THICK,
    THIN,
    TRUTH,
    VERMILLION,
    colour_of,
    legend_below,
    line_and_band,
    line_style,
    panels,
    time_axis,
    without_box,
)
from cpomdp_ppl.errors import as_integer, invalid, require
from cpomdp_ppl.signature import ENDED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from arviz import InferenceData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAN = {"90 %": (0.05, 0.95, "#CCE3F0"), "50 %": (0.25, 0.75, "#80B8D8")}
"""The intervals of a fan: between which quantiles, and in which tint of blue."""

MOST_EXACT = ("exact", "grid")
"""Backends that others are compared with, best first."""


def plot_contexts(data: InferenceData | xr.DataTree, episodes: Iterable[int] | None = None) -> Figure:
    """The posterior over contexts as an episode goes on: a panel for each episode, a line for each context.

    Lines are means over chains, and bands go from the lowest chain to the highest: a band that can be seen
    means that the filter needs more particles. Where the true context is known, the title names it, and its
    line is the thick one.

    Args:
        data: From `to_inference_data`.
        episodes: Which to show; the first three if left out.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.diagnostics import to_inference_data
        >>> from cpomdp_ppl.models import LightDark
        >>> episodes = simulate(LightDark(), RandomPolicy(3), 5, seed=0)
        >>> data = to_inference_data(LightDark(), episodes, chains=2, draws=10, seed=0)
        >>> [axes.get_title() for axes in plot_contexts(data, [0, 4]).axes]
        ['episode 0: light right', 'episode 4: light right']
    """
    stats = _group(data, "sample_stats", "context_probability")
    shown = _episodes(stats, episodes)
    names = _contexts(stats)
    figure, axes = panels(len(shown), 3.2, 2.5, least=4.2, sharey=True)
    for axis, b in zip(axes, shown, strict=False):
        true = _true_context(data, b)
        for k in range(len(names)):
            lines = _until_its_end(data, stats["context_probability"], b).isel(context=k)
            line_and_band(axis, lines, k, lw=THICK if k == true else THIN)
        axis.set_title(f"episode {b}" + ("" if true is None else f": {names[true]}"), fontsize=10)
        axis.set(ylim=(-0.03, 1.03))
        time_axis(axis)
    for axis in axes[::COLUMNS]:
        axis.set_ylabel("P(context | seen so far)")
    for k, name in enumerate(names):
        axes[0].plot([], [], color=colour_of(k), ls=line_style(k), lw=THIN, label=name)
    if true is not None:
        axes[0].plot([], [], color=GREY, lw=THICK, label="true context")
    _mark_ends(data, axes, shown)
    legend_below(figure, axes[0])
    return figure


def plot_states(data: InferenceData | xr.DataTree, episode: int = 0) -> Figure:
    """The states of an episode in hindsight: median, 50 % and 90 % intervals, a panel for each component.

    The truth is a black line, where it is known. What was seen is drawn as dots if it can be set beside the
    state: if the model has one component of the state and one site, of the same shape, and both are real
    numbers rather than classes.

    Args:
        data: From `to_inference_data`.
        episode: Which to show.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.diagnostics import to_inference_data
        >>> from cpomdp_ppl.models import Beacons
        >>> episodes = simulate(Beacons(), RandomPolicy(5), 2, seed=0)
        >>> data = to_inference_data(Beacons(), episodes, chains=2, draws=10, seed=0)
        >>> [axes.get_ylabel() for axes in plot_states(data).axes]
        ['position[0]', 'position[1]', 'heading']
    """
    posterior = _group(data, "posterior", "is_context")
    (b,) = _episodes(posterior, [episode], "episode")
    names = state_variables(posterior)
    shown = [(name, where) for name in names for where in np.ndindex(*posterior[name].shape[4:])]
    site = _seen_as_a_state(data, [posterior[name] for name in names])
    figure, axes = panels(len(shown), 3.6, 2.8, least=5.4)
    constant = _group(data, "constant_data")
    for axis, (name, where) in zip(axes, shown, strict=False):
        _fan(axis, _component(_until_its_end(data, posterior[name], b), where))
        if f"true_{name}" in constant:
            true = _component(_until_its_end(data, constant[f"true_{name}"], b), where)
            axis.plot(true["time"], true, color=TRUTH, lw=1.2, label="truth")
        if site is not None:
            seen = _component(_until_its_end(data, _group(data, "observed_data")[site], b), where)
            axis.plot(
                seen["time"], seen, "o", color=VERMILLION, ms=4, mec="white", mew=0.5, label=f"{site}, seen"
            )
        axis.set_ylabel(name + (f"[{', '.join(map(str, where))}]" if where else ""))
        time_axis(axis)
    _mark_ends(data, axes, [b] * len(shown))
    figure.suptitle(f"episode {b}, given all that was seen", fontsize=10)
    legend_below(figure, axes[0])
    return figure


def plot_filter(data: InferenceData | xr.DataTree, episodes: Iterable[int] | None = None) -> Figure:
    """How the filter did: effective particles and evidence as an episode goes on, a column for each episode.

    - Effective particles, as a fraction of all, by context: means over chains, and bands from the lowest to
      the highest. Where a chain resampled, it has a dot; it does so below the dashed line.
    - The evidence `log p(o_{0:t})` so far, contexts summed out: mean over chains and band.
    - How much each chain's evidence differs from their mean.

    Deterministic backends have evidence only.

    Args:
        data: From `to_inference_data`.
        episodes: Which to show; the first three if left out.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.diagnostics import to_inference_data
        >>> from cpomdp_ppl.models import LightDark
        >>> episodes = simulate(LightDark(), RandomPolicy(3), 5, seed=0)
        >>> data = to_inference_data(LightDark(), episodes, "ekf", draws=10, seed=0)
        >>> [axes.get_ylabel() for axes in plot_filter(data, [3]).axes]
        ['evidence log p(o) (nats)']
    """
    from matplotlib.figure import Figure

    stats = _group(data, "sample_stats", "increment")
    shown = _episodes(stats, episodes)
    evidence = evidence_so_far(stats)
    rows = ["evidence"]
    if "ess" in stats:  # a particle filter's
        rows = ["ess", "evidence", "spread"] if stats.sizes["chain"] > 1 else ["ess", "evidence"]
    columns = len(shown)
    figure = Figure(figsize=(max(3.2 * columns, 4.2), 2.1 * len(rows) + 0.6), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False, sharex="col", sharey="row")
    for column, b in zip(axes.T, shown, strict=True):
        mine = _until_its_end(data, evidence, b)
        for axis, row in zip(column, rows, strict=True):
            if row == "ess":
                _plot_ess(axis, data, b)
            elif row == "evidence":
                line_and_band(axis, mine, 0, colour=TRUTH, lw=1.4)
            else:
                difference = mine - mine.mean("chain")
                axis.plot(difference["time"], difference.transpose("time", "chain"), color=TRUTH, lw=0.8)
                axis.axhline(0.0, color=GREY, lw=0.8, zorder=0)
        column[0].set_title(f"episode {b}", fontsize=10)
        time_axis(column[-1])
    for row_of_axes in axes:
        _mark_ends(data, row_of_axes, shown)
    labels = {
        "ess": "effective particles (fraction)",
        "evidence": "evidence log p(o) (nats)",
        "spread": "chains − mean (nats)",
    }
    for axis, row in zip(axes[:, 0], rows, strict=True):
        axis.set_ylabel(labels[row], fontsize=9)
    if axes[0, 0].get_legend_handles_labels()[0]:
        legend_below(figure, axes[0, 0])
    return figure


def plot_agreement(
    results: Mapping[str, InferenceData | xr.DataTree], reference: str | None = None
) -> Figure:
    """Whether backends agree about the same episodes: on the left contexts, on the right evidence.

    On the left, the final `P(context)` of each against that of the reference, one point for each episode (and
    context, if there are more than two); bars go from the lowest chain to the highest. On the right, how much
    evidence differs from the reference's, one point for each episode, means over chains.

    Args:
        results: From `to_inference_data`, of the same episodes, by name.
        reference: Name of the one that others are compared with. Left out, it is an exact one, else one by a
            grid, else the first.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.diagnostics import to_inference_data
        >>> from cpomdp_ppl.models import ContextualTiger
        >>> model = ContextualTiger()
        >>> episodes = simulate(model, RandomPolicy(3), 20, seed=0)
        >>> names = ("smc", "exact")
        >>> results = {name: to_inference_data(model, episodes, name, draws=10, seed=0) for name in names}
        >>> plot_agreement(results).axes[0].get_xlabel()
        'P(context) by exact'
    """
    from matplotlib.figure import Figure

    base = _reference(results, reference)
    stats = {name: _group(data, "sample_stats", "evidence") for name, data in results.items()}
    _require_same_episodes(results, base)
    others = [name for name in results if name != base]
    names = _contexts(stats[base])
    shown = names[:1] if len(names) == 2 else names  # of two, the other mirrors it

    figure = Figure(figsize=(4.4 + max(3.2, 1.3 * len(others)), 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3.6, max(2.6, 1.1 * len(others))])
    left.plot([0, 1], [0, 1], color=GREY, lw=1, zorder=0)
    right.axhline(0.0, color=GREY, lw=1, zorder=0)
    labels = []
    for k, name in enumerate(others):
        colour = colour_of(k)
        x = _final(stats[base], len(shown)).mean("chain").values.ravel()
        y = _final(stats[name], len(shown))
        left.vlines(
            x, y.min("chain").values.ravel(), y.max("chain").values.ravel(), color=colour, alpha=0.5, lw=1
        )
        left.plot(x, y.mean("chain").values.ravel(), "o", color=colour, ms=4, mew=0, alpha=0.8, label=name)
        difference = stats[name]["evidence"].mean("chain") - stats[base]["evidence"].mean("chain")
        # Spread evenly, for points not to hide each other; the order of episodes means nothing.
        spread = k + np.linspace(-0.3, 0.3, difference.size) if difference.size > 1 else [k]
        right.plot(spread, difference, "o", color=colour, ms=4, mew=0, alpha=0.8)
        labels.append(f"{name}\n{float(np.abs(difference).mean()):.2g}")
    what = f"P({shown[0]})" if len(shown) == 1 else "P(context)"
    left.set(xlabel=f"{what} by {base}", ylabel=f"{what} by others", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    left.set_aspect("equal")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    right.set_xticks(range(len(others)), labels, fontsize=8)
    right.set(xlim=(-0.6, len(others) - 0.4), xlabel="below names: mean |difference| (nats)")
    right.set_ylabel(f"evidence − that of {base} (nats)")
    for axis in (left, right):
        without_box(axis)
    return figure


def evidence_so_far(stats: xr.Dataset) -> xr.DataArray:
    """`log p(o_{0:t})` from the group `sample_stats`, contexts summed out, `[chain, episode, time]`."""
    dims = ("chain", "episode", "time", "context")
    increments = stats["increment"].transpose(*dims).values
    with np.errstate(divide="ignore"):  # a context may have no probability at all
        start = np.log(stats["context_probability"].transpose(*dims).values[:, :, :1])
    # Relative to what is known at time 0: priors need not be known, because the sum at the end is.
    joint = np.concatenate([start, start + increments[:, :, 1:].cumsum(2)], 2)
    relative = np.logaddexp.reduce(joint, axis=3)
    total = stats["evidence"].transpose("chain", "episode").values[:, :, None]
    coordinates = {dim: stats[dim] for dim in dims[:3]}
    return xr.DataArray(total + relative - relative[:, :, -1:], coordinates, dims[:3])


def _plot_ess(axis: Axes, data: InferenceData | xr.DataTree, episode: int) -> None:
    stats = _group(data, "sample_stats")
    total, threshold = (stats.attrs.get(name) for name in ("num_particles", "ess_threshold"))
    if total is None or threshold is None:
        raise invalid("data", stats.attrs, "attributes num_particles and ess_threshold of sample_stats")
    fraction = _until_its_end(data, stats["ess"], episode) / total
    # Resampling is filed under the step that it comes before, and was decided by what the last one left.
    after = _until_its_end(data, stats["resampled"], episode).shift(time=-1, fill_value=False)
    for k, name in enumerate(_contexts(stats)):
        line, there = fraction.isel(context=k), after.isel(context=k)
        line_and_band(axis, line, k, name, lw=1.4)
        c, t = there.transpose("chain", "time").values.nonzero()
        dots = line.transpose("chain", "time").values[c, t]
        axis.plot(line["time"].values[t], dots, "o", ms=3, color=colour_of(k), mec="white", mew=0.4)
    axis.axhline(threshold, color=GREY, lw=1, ls="dashed", label="threshold; dots: resampled")
    axis.set_ylim(-0.03, 1.06)
    without_box(axis)


def _fan(axis: Axes, draws: xr.DataArray) -> None:
    for width, (low, high, tint) in FAN.items():
        lower, upper = draws.quantile([low, high], ("chain", "draw"))
        axis.fill_between(draws["time"], lower, upper, color=tint, lw=0, label=width)
    axis.plot(draws["time"], draws.median(("chain", "draw")), color=BLUE, lw=1.4, label="median")


def _group(data: Any, group: str, variable: str | None = None) -> xr.Dataset:
    """A group of an `InferenceData` or of a `DataTree`."""
    try:
        node = data[group]
        found: xr.Dataset = node.to_dataset() if hasattr(node, "to_dataset") else node
        known = variable is None or variable in found.data_vars
    except (KeyError, TypeError, IndexError, AttributeError):
        known = False
    if not known:
        needed = f"the group '{group}'" + ("" if variable is None else f" and its '{variable}'")
        raise invalid("data", data, f"what `to_inference_data` returns, with {needed}")
    return found


def _episodes(group: xr.Dataset, episodes: Any, argument: str = "episodes") -> list[int]:
    """The episodes to show, all of which are there."""
    there: list[int] = group["episode"].values.tolist()
    if episodes is None:
        return there[:3]
    proper = isinstance(episodes, Iterable) and not isinstance(episodes, str)
    require(proper, argument, episodes, "a sequence of numbers of episodes")
    episodes = list(episodes)
    numbers = [as_integer(b) for b in episodes]
    require(len(numbers) > 0, argument, episodes, "at least one episode")
    for b, given in zip(numbers, episodes, strict=True):
        require(b in there, argument, given, f"numbers of episodes, from {min(there)} to {max(there)}")
    return [b for b in numbers if b is not None]


def _contexts(group: xr.Dataset) -> list[str]:
    return [str(name) for name in group["context"].values]


def _true_context(data: InferenceData | xr.DataTree, episode: int) -> int | None:
    constant = _group(data, "constant_data")
    return int(constant["true_context"].sel(episode=episode)) if "true_context" in constant else None


def _until_its_end(data: InferenceData | xr.DataTree, values: xr.DataArray, episode: int) -> xr.DataArray:
    """Those of one episode, without the times past its length."""
    length = int(_group(data, "constant_data")["length"].sel(episode=episode))
    return values.sel(episode=episode, time=slice(None, length))


def _mark_ends(data: InferenceData | xr.DataTree, axes: Any, shown: Sequence[int]) -> None:
    """Draw a line where an episode has ended; time axes are then as long as the longest episode shown."""
    observed = _group(data, "observed_data")
    if ENDED not in observed.data_vars:
        return
    lengths = _group(data, "constant_data")["length"].sel(episode=shown).values.tolist()
    over = [
        bool((observed[ENDED].sel(episode=b, time=n) == 1).any()) for b, n in zip(shown, lengths, strict=True)
    ]
    style = {"color": GREY, "lw": 1.2, "ls": "dotted"}
    for axis, length, ended in zip(axes, lengths, over, strict=False):
        axis.set_xlim(-0.04 * max(lengths), 1.04 * max(lengths))
        if ended:
            axis.axvline(length, zorder=0, **style)
    if any(over):
        axes[0].plot([], [], label="the end", **style)


def _component(values: xr.DataArray, where: tuple[int, ...]) -> xr.DataArray:
    """One of the numbers of a state or an observation, whose axes come after time."""
    axes = values.dims[values.dims.index("time") + 1 :]
    return values.isel(dict(zip(axes, where, strict=True)))


def _seen_as_a_state(data: InferenceData | xr.DataTree, states: Sequence[xr.DataArray]) -> str | None:
    """The site whose values can be set beside the state, if that is beyond doubt."""
    observed = _group(data, "observed_data")
    sites = {name: values for name, values in observed.data_vars.items() if name != ENDED}
    if len(states) != 1 or len(sites) != 1:
        return None
    ((name, values),) = sites.items()
    alike = values.shape[2:] == states[0].shape[4:]
    known = values.values[np.isfinite(values.values)]
    classes = bool((known == known.round()).all())  # all of them integers
    return str(name) if alike and states[0].dtype.kind == "f" and not classes else None


def _final(stats: xr.Dataset, contexts: int) -> xr.DataArray:
    """`P(context)` at the end, `[chain, episode, context]`, of the first so many contexts."""
    last = stats["context_probability"].isel(time=-1, context=slice(contexts))
    return last.transpose("chain", "episode", "context")


def _reference(results: Mapping[str, Any], reference: str | None) -> str:
    """Who the others are compared with."""
    proper = isinstance(results, Mapping) and len(results) > 1
    require(proper, "results", results, "two or more results of `to_inference_data`, by name")
    if reference is not None:
        require(reference in results, "reference", reference, f"one of {', '.join(map(repr, results))}")
        return reference
    backends = {name: _group(data, "sample_stats").attrs.get("likelihood") for name, data in results.items()}
    for exact in MOST_EXACT:
        for name, backend in backends.items():
            if backend == exact:
                return name
    return next(iter(backends))


def _require_same_episodes(results: Mapping[str, Any], base: str) -> None:
    mine = _group(results[base], "constant_data")["actions"]
    seen = _group(results[base], "observed_data")
    contexts = _contexts(_group(results[base], "sample_stats"))
    for name, data in results.items():
        same = (
            _group(data, "constant_data")["actions"].equals(mine)
            and _group(data, "observed_data").equals(seen)
            and _contexts(_group(data, "sample_stats")) == contexts
        )
        require(same, "results", name, f"the same episodes and contexts as in '{base}'")
