"""How figures look: colours, panels, lines with bands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", VERMILLION, "#56B4E9", "#F0E442")
"""Okabe and Ito's, which the colour-blind tell apart; black, the eighth, is for the truth."""

STYLES = ("solid", "dashed", "dotted", "dashdot")
"""Styles of lines, once colours are used up."""

TRUTH, GREY = "black", "#999999"

THIN, THICK = 1.3, 2.6
"""Widths of lines."""

BAND = 0.25
"""Opacity of bands."""

COLUMNS = 4
"""The largest number of panels side by side."""


def panels(
    number: int, width: float, height: float, *, least: float = 0.0, sharey: bool = False
) -> tuple[Figure, np.ndarray[Any, Any]]:
    """A figure with so many panels in rows, and their axes; those left over in the last row are not drawn.

    Lengths are in inches: those of a panel, and the `least` width of the figure.
    """
    from matplotlib.figure import Figure

    columns = min(number, COLUMNS)
    rows = -(-number // columns)
    figure = Figure(figsize=(max(width * columns, least), height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey).flatten()
    for axis in axes[number:]:
        axis.set_axis_off()
    return figure, axes


def line_and_band(
    axis: Axes,
    chains: xr.DataArray,
    k: int,
    label: str | None = None,
    *,
    lw: float,
    colour: str | None = None,
) -> None:
    """The mean over chains, `[chain, time]`, and a band from the lowest to the highest."""
    colour = colour_of(k) if colour is None else colour
    time = chains["time"]
    axis.fill_between(time, chains.min("chain"), chains.max("chain"), color=colour, alpha=BAND, lw=0)
    axis.plot(time, chains.mean("chain"), color=colour, lw=lw, ls=line_style(k), label=label)
    without_box(axis)


def colour_of(k: int) -> str:
    """The colour of line k."""
    return COLOURS[k % len(COLOURS)]


def line_style(k: int) -> str:
    """The style of line k."""
    return STYLES[k // len(COLOURS) % len(STYLES)]


def without_box(axis: Axes) -> None:
    """Leave out the lines above and to the right."""
    axis.spines[["top", "right"]].set_visible(False)


def time_axis(axis: Axes) -> None:
    """Label the horizontal axis as time, in whole steps."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("time (steps)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    without_box(axis)


def legend_below(figure: Figure, axis: Axes) -> None:
    """Put the legend of one panel below all of them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
