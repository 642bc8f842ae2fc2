"""Pictures of regret: how it grows, how the context becomes known, and what information costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cpomdp_ppl.diagnostics.style import BAND, GREY, TRUTH, colour_of, line_style, without_box
from cpomdp_ppl.errors import require, require_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor

    from solvers.episodes.record import Run
    from solvers.regret.bound import Bound
    from solvers.regret.values import Optima

SIZE = (6.2, 4.2)


def plot_regret(curves: Mapping[str, ArrayLike], bound: Bound | None = None) -> Figure:
    """Cumulative regret as episodes go by: a line for each name, the mean over runs.

    Bands are two standard errors of the mean to either side, if there are several runs. Where the largest
    is far above the smallest, the axis is logarithmic (but linear around zero, as regret may be negative).

    Args:
        curves: Cumulative regret by name, `[R, K]`, or `[K]` for an expectation.
        bound: The theorem's, drawn as a dashed line.

    Examples:
        >>> figure = plot_regret({"C-IDS": [[1.0, 1.5, 1.6], [2.0, 2.2, 2.2]]})
        >>> figure.axes[0].get_ylabel()
        'cumulative regret'
    """
    figure, axis = _figure()
    longest, heights = _lines(axis, "curves", curves)
    smallest = max(min(heights), 1e-9)
    if bound is not None:
        k = np.arange(1, longest + 1)
        limit = bound(k)
        axis.plot(k, limit, color=TRUTH, ls="dashed", lw=1.4, label=f"bound (τ = {bound.temperature:g})")
        heights.append(limit[np.isfinite(limit)].max(initial=0.0))
    if max(heights) > 10 * smallest:
        axis.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(smallest)))
    if axis.get_yscale() == "linear":
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    axis.set(xlabel="episode k", ylabel="cumulative regret")
    _finish(figure, axis)
    return figure


def plot_entropy(curves: Mapping[str, ArrayLike], num_contexts: int | None = None) -> Figure:
    """What is left to find out about the context: the posterior's entropy in nats, after 0, 1, 2, … episodes.

    Args:
        curves: Entropies by name, `[R, K]`, or `[K]` for an expectation; the first of each is the prior's.
        num_contexts: Draws a line at `log|C|`, where nothing is known.

    Examples:
        >>> plot_entropy({"C-IDS": [0.69, 0.2, 0.05]}, 2).axes[0].get_xlabel()
        'episodes played'
    """
    figure, axis = _figure()
    _lines(axis, "curves", curves, first=0)
    if num_contexts is not None:
        axis.axhline(np.log(num_contexts), color=GREY, lw=1.2, ls="dashed", label=f"log {num_contexts}")
    axis.set(xlabel="episodes played", ylabel="entropy of the context (nats)")
    axis.set_ylim(bottom=0.0)
    _finish(figure, axis)
    return figure


def plot_ratio(curves: Mapping[str, ArrayLike], temperature: float) -> Figure:
    """The information ratio Ψ_k = Δ_k / I_k: what a nat about the context cost in each episode.

    By Lemma 3.3 it is at most τ if the policy maximises `V̄_k + τ I_k`. Every run is a dot, and the line is
    their mean; episodes that revealed nothing (NaN) are left out.

    Args:
        curves: Ratios by name, `[R, K]`, or `[K]`.
        temperature: τ, drawn as a dashed line.

    Examples:
        >>> plot_ratio({"C-IDS": [0.2, float("nan"), 0.4]}, 0.5).axes[0].get_xlabel()
        'episode k'
    """
    require_number("temperature", temperature, "a number, not negative")
    figure, axis = _figure()
    for i, (name, ratios) in enumerate(_named("curves", curves).items()):
        k = np.broadcast_to(np.arange(1, ratios.shape[1] + 1), ratios.shape)
        if len(ratios) > 1:
            axis.plot(k.ravel(), ratios.ravel(), "o", ms=3, mew=0, alpha=0.35, color=colour_of(i))
        known = ~np.isnan(ratios).all(0)
        mean = np.nanmean(ratios[:, known], axis=0)
        axis.plot(
            k[0, known], mean, marker="o", ms=4, color=colour_of(i), ls=line_style(i), lw=1.6, label=name
        )
    axis.axhline(temperature, color=TRUTH, ls="dashed", lw=1.4, label=f"τ = {temperature:g}")
    axis.set(xlabel="episode k", ylabel="information ratio Δ / I (reward per nat)")
    _finish(figure, axis)
    return figure


def plot_run(run: Run, optima: Sequence[float] | Tensor | Optima | None = None) -> Figure:
    """What a run earned and found out: regret, or returns where regret is not known, and the posterior.

    Args:
        run: From `cids.run`.
        optima: What an agent earns who knows the context, `[C]`; as for `Run.regret`.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LineGrid
        >>> from solvers import cids
        >>> done = cids.run(LineGrid(), 0, 2, solution=RandomPolicy(3), likelihood="exact", progress=False)
        >>> len(plot_run(done).axes)
        2
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(2 * SIZE[0], SIZE[1]), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    try:
        series, label = run.regret(optima).cpu().numpy(), "cumulative regret"
    except ValueError:  # nobody knows the contexts, or what there is to be had in them
        if optima is not None:
            raise
        series, label = run.returns.cpu().numpy(), "return"
    going = run.played.cpu().numpy()
    if run.num_episodes:
        name = "mean" if going.all() else "mean of those still playing"
        curve = series if going.all() else np.nanmean(series, 0, keepdims=True)
        _lines(left, "run", {name: curve.cumsum(1) if label == "cumulative regret" else curve})
    left.set(xlabel="episode k", ylabel=label)
    if run.contexts is not None:
        curves = {"belief in the true context": run.true_probability.cpu().numpy()}
    else:
        names = run.model.context_names
        curves = {name: run.posteriors[..., c].cpu().numpy() for c, name in enumerate(names)}
    after = np.arange(run.num_episodes + 1)
    for i, (name, probability) in enumerate(curves.items()):
        right.plot(after, probability.T, color=colour_of(i), lw=0.7, alpha=min(1.0, 20 / len(probability)))
        right.plot(after, probability.mean(0), color=colour_of(i), lw=2.0, label=name)
    right.set(xlabel="episodes played", ylabel="posterior probability", ylim=(-0.03, 1.03))
    for axis in (left, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(frameon=False)
    return figure


def _figure() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained", facecolor="white")
    return figure, figure.subplots()


def _named(argument: str, curves: Any) -> dict[str, NDArray[np.float64]]:
    """Curves `[R, K]` by name."""
    require(isinstance(curves, Mapping) and len(curves) > 0, argument, curves, "curves by name")
    named = {str(name): np.asarray(curve, dtype=np.float64) for name, curve in curves.items()}
    for name, curve in named.items():
        proper = curve.ndim in (1, 2) and curve.size > 0
        require(proper, f"{argument}[{name!r}]", list(curve.shape), "shape [R, K] or [K]")
    return {name: np.atleast_2d(curve) for name, curve in named.items()}


def _lines(axis: Axes, argument: str, curves: Any, first: int = 1) -> tuple[int, list[float]]:
    """Means and bands; returns the largest number of episodes, and how far from zero each mean gets."""
    longest, heights = 0, []
    for i, (name, curve) in enumerate(_named(argument, curves).items()):
        R, K = curve.shape
        k = np.arange(first, first + K)
        mean = curve.mean(0)
        if R > 1:
            error = curve.std(0, ddof=1) / R**0.5
            axis.fill_between(k, mean - 2 * error, mean + 2 * error, color=colour_of(i), alpha=BAND, lw=0)
        axis.plot(k, mean, color=colour_of(i), ls=line_style(i), lw=1.6, label=name)
        longest = max(longest, K)
        heights.append(float(np.abs(mean).max()))
    return longest, heights


def _finish(figure: Figure, axis: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    without_box(axis)
    axis.grid(alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    columns = max(1, min(4, 90 // (7 + longest)))  # as many as the figure is wide for
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
