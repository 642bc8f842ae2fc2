"""The figures, from what tasks have found out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cpomdp_ppl.diagnostics.style import BAND, COLOURS, GREY, TRUTH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from examples.paper.comparison import Measured

COLOUR = {
    "C-IDS, information": COLOURS[0],
    "C-IDS, variational, as printed": COLOURS[4],
    "C-IDS, variational, critic": COLOURS[1],
    "RDPG-RNN": COLOURS[2],
    "POMCP, raw observations": COLOURS[3],
    "POMCP, 10 bins": COLOURS[5],
}
"""The same for everybody everywhere."""

WINDOW = 1000
"""Episodes of learning that a point of a curve is the mean over, whoever learns, and for however long."""


def convergence(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Figure 3: return, entropy and regret of each learner's fits by episodes; mean and s.d. over seeds."""
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    axes = figure.subplots(1, 3)
    for name, fits in curves.items():
        best = fits[0]["best_return"]
        episodes = np.array(fits[0]["episodes"], dtype=float)
        returns = np.array([smoothed(fit, "return") for fit in fits])  # [seeds, points]
        entropies = np.array([smoothed(fit, "entropy") for fit in fits])
        for axis, values in zip(axes, (returns, entropies, best - returns), strict=True):
            mean, sd = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else 0 * values[0]
            axis.plot(episodes, mean, color=COLOUR[name], lw=1.6, label=f"{name}, {len(fits)} seeds")
            axis.fill_between(episodes, mean - sd, mean + sd, color=COLOUR[name], alpha=BAND, lw=0)
    axes[0].axhline(best, color=TRUTH, lw=1, ls="dashed", label="told the context")
    labels = ("return", "H(C|Y) in bits", "regret")
    for axis, label in zip(axes, labels, strict=True):
        axis.set(title=label, xlabel="episodes learned from", xscale="log")
        plain(axis)
    axes[1].set_xlabel(f"episodes learned from; means over the last {WINDOW:,}; bands: s.d. over seeds")
    axes[1].set_ylim(bottom=0.0)
    axes[2].set_ylim(bottom=0.0)
    legend = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    legend.set_frame_on(False)
    return figure


def smoothed(curve: Mapping[str, Any], quantity: str) -> Any:
    """At every point of a curve, the mean over the last `WINDOW` episodes, of what was measured."""
    episodes, values = (np.array(curve[name], dtype=float) for name in ("episodes", quantity))
    known = np.isfinite(values)
    sums, counts = (np.append(0.0, np.cumsum(x)) for x in (np.where(known, values, 0.0), known))
    first = np.searchsorted(episodes, episodes - WINDOW, side="right")
    count = counts[1:] - counts[first]
    return np.where(count > 0, sums[1:] - sums[first], np.nan) / np.maximum(count, 1)


def variance_ratios(entropy: Mapping[str, Measured], returns: Mapping[str, Measured]) -> Figure:
    """Figure 4: entropy and return by variance ratio; bars are the s.d. over seeds."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    shown = {"H(C|Y) in bits": entropy, "return": returns}
    for axis, (label, measured) in zip(axes, shown.items(), strict=True):
        means = [each.mean for each in measured.values()]
        bars = [each.over_seeds or 0.0 for each in measured.values()]
        colour = COLOUR["C-IDS, information"]
        axis.errorbar(list(measured), means, bars, color=colour, marker="o", lw=1.6, capsize=5)
        axis.set(title=label, xlabel="dark : light variance; bars are the s.d. over seeds")
        axis.margins(x=0.15)
        plain(axis)
    axes[0].set_ylim(bottom=0.0)
    return figure


def policies(played: Mapping[str, Mapping[str, Any]], first: str) -> Figure:
    """Figure 5: the first policy in either context above, all below, with their means as thick lines."""
    names = played[first]["context_names"]
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False, sharex=True, sharey="row")
    for c, context in enumerate(names):
        above, below = axes[:, c]
        for path in paths_in(played[first], c):
            above.plot(path, color=COLOUR[first], alpha=0.7, lw=1.2)
        above.set_title(f"{first}; {context}", fontsize=11)
        for name, episodes in played.items():
            paths = paths_in(episodes, c)
            below.plot(paths.T, color=COLOUR[name], alpha=0.25, lw=0.9)
            below.plot(paths.mean(0), color=COLOUR[name], lw=2.6, label=name)
        below.set_title(f"everybody, and their means; {context}", fontsize=11)
        below.set_xlabel("time")
        for axis in (above, below):
            axis.axhspan(*((1, 25) if c == 0 else (-25, -1)), color=COLOURS[6], alpha=0.22, lw=0)
            axis.axhline(0, color=GREY, lw=0.8)
            axis.set_ylim(-23, 23)
            plain(axis, steps=True, grid=False)
    for axis in axes[:, 0]:
        axis.set_ylabel("position; yellow is rewarded")
    legend = figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    legend.set_frame_on(False)
    return figure


def line_grid(played: Mapping[str, Any]) -> Figure:
    """The line grid: where C-IDS goes in either context, and what it comes to believe."""
    names = played["context_names"]
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False, sharex=True, sharey="row")
    truth = np.array(played["truth"])  # [B, T + 1]
    for c, context in enumerate(names):
        above, below = axes[:, c]
        paths = paths_in(played, c)
        apart = np.linspace(-0.18, 0.18, len(paths))[:, None]  # or equal paths would be one line
        for path in np.where(paths == played["done"], np.nan, paths) + apart:
            above.plot(path, color=COLOURS[c], alpha=0.8, lw=1.2, marker="o", ms=3)
        for curve in truth[np.array(played["contexts"]) == c]:
            below.plot(curve, color=COLOURS[c], alpha=0.6, lw=1.2)
        above.set_title(context, fontsize=11)
        below.set(xlabel="time", ylim=(-0.03, 1.03))
        for axis in (above, below):
            plain(axis, steps=True)
    axes[0, 0].set_ylabel("cell, until a target is collected")
    axes[1, 0].set_ylabel("P(true context | history)")
    return figure


def paths_in(played: Mapping[str, Any], context: int) -> Any:
    """States of the episodes in a context, `[n, T + 1]`."""
    states = np.array(played["states"], dtype=float)
    return states[np.array(played["contexts"]) == context]


def plain(axis: Any, *, steps: bool = False, grid: bool = True) -> None:
    """Axes without a frame; with whole numbers below if they are steps."""
    axis.spines[["top", "right"]].set_visible(False)
    if steps:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if grid:
        axis.grid(alpha=0.3)
