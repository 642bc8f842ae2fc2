"""Pictures of a solution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure
    from torch import Tensor

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.episodes import Episodes


def plot(model: CPOMDP, history: xr.Dataset, episodes: Episodes, posterior: Tensor) -> Figure:
    """Convergence on top; below, for each context, what the policy does and comes to believe.

    Args:
        model: The CPOMDP.
        history: What a fit measured, by iteration.
        episodes: Episodes of its policy, with known states and contexts.
        posterior: Posterior over contexts along them, `[B, T + 1, C]`.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(3.2 * max(model.num_contexts, 3), 8.0), layout="constrained")
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=[1, 2])[:, 0]
    _plot_history(top.subplots(1, 3), history)

    assert episodes.contexts is not None
    shown = episodes.contexts.unique().tolist()
    axes = bottom.subplots(2, len(shown), squeeze=False, sharey="row")
    name, states = _shown(episodes)
    for (above, below), c in zip(axes.T, shown, strict=True):
        mine = (episodes.contexts == c).cpu()
        for path in states[mine].cpu():
            above.plot(*(path.T if path.shape[-1] == 2 else (path[:, 0],)), color=f"C{c}", alpha=0.5, lw=1)
        above.set(title=model.context_names[c], xlabel=f"{name}[0]" if states.shape[-1] == 2 else "time")
        for curve in posterior[mine, :, c].cpu():
            below.plot(curve, color=f"C{c}", alpha=0.5, lw=1)
        below.set(xlabel="time", ylim=(-0.03, 1.03))
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        if states.shape[-1] != 2:
            above.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0, 0].set_ylabel(f"{name}[1]" if states.shape[-1] == 2 else name)
    axes[1, 0].set_ylabel("P(true context | history)")
    return figure


def _shown(episodes: Episodes) -> tuple[str, Tensor]:
    """The part of the state that is drawn, and its values `[B, T + 1, n]`: the first, and a plane as one."""
    name, leaf = next(leaves(episodes.states))
    return name, leaf.reshape(*leaf.shape[:2], -1).double()


def _plot_history(axes: Any, history: xr.Dataset) -> None:
    shown = {"return": "return", "entropy": "H(C|Y) in bits", "temperature": "temperature τ"}
    for axis, (name, label) in zip(axes, shown.items(), strict=True):
        if name in history:  # an interrupted fit may have none
            axis.plot(history["iteration"], history[name], lw=0.8)
        axis.set(title=label, xlabel="iteration")
        axis.grid(alpha=0.3)
    axes[1].set_ylim(bottom=0.0)
