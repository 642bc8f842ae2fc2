"""Figures, where there is something to draw them with."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cpomdp_ppl.cli.options import note
from cpomdp_ppl.experiments.run_folder import FIGURES

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.figure import Figure

    from cpomdp_ppl.experiments.run_folder import RunFolder


def figure_files(names: Sequence[str]) -> tuple[str, ...]:
    """The files of figures, in a run folder.

    Examples:
        >>> figure_files(["curve"])
        ('figures/curve.svg', 'figures/curve.png')
    """
    return tuple(f"{FIGURES}/{name}.{kind}" for name in names for kind in ("svg", "png"))


def write_figures(options: Namespace, folder: RunFolder, figures: Mapping[str, Callable[[], Figure]]) -> None:
    """Draw figures and write them, unless matplotlib is not installed: results do not depend on it."""
    if not is_installed("matplotlib"):
        note(options, "no figures: they need cpomdp-ppl[plot]")
        return
    for name, draw in figures.items():
        folder.write_figure(name, draw())


def is_installed(module: str) -> bool:
    """Whether a module can be imported; one that is there but broken cannot."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
