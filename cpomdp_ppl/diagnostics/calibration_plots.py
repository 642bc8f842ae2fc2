"""Pictures of a calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cpomdp_ppl.diagnostics.style import BLUE, GREY, VERMILLION, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from cpomdp_ppl.diagnostics.calibration import Calibration
    from cpomdp_ppl.diagnostics.context_calibration import ContextCalibration
    from cpomdp_ppl.diagnostics.ranks import Ranks

BAND = 0.99
"""How likely all bars of a uniform histogram are to lie within the band, at least."""

NORMAL_QUANTILE = 2.576
"""99 % of a normal distribution lie within so many standard deviations."""


def plot(calibration: Calibration) -> Figure:
    """The reliability diagram of the contexts, then rank histograms of every state and observation."""
    ranks_by_name = {name: ranks for name, ranks in calibration.quantities.items() if name != "contexts"}
    figure, axes = panels(1 + len(ranks_by_name), 3.4, 3.3)
    failing = calibration.failing
    _plot_reliability(axes[0], calibration.contexts, "contexts" in failing)
    for axis, (name, ranks) in zip(axes[1:], ranks_by_name.items(), strict=False):
        _plot_ranks(axis, name, ranks, name in failing)  # type: ignore[arg-type]
    title = f"{calibration.likelihood} is {calibration.verdict}".replace("; ", ";\n")
    figure.suptitle(title, fontsize=10, color="black" if calibration.calibrated else VERMILLION)
    return figure


def _plot_reliability(axis: Axes, contexts: ContextCalibration, fails: bool) -> None:
    r = contexts.reliability
    some = r.counts > 0
    x, y, error = (values[some].cpu() for values in (r.predicted, r.observed, r.deviation))
    n = r.counts[some].cpu()
    axis.plot([0, 1], [0, 1], color=GREY, lw=1, zorder=1)
    axis.vlines(
        x,
        (x - NORMAL_QUANTILE * error).clamp(0, 1),
        (x + NORMAL_QUANTILE * error).clamp(0, 1),
        color=GREY,
        alpha=0.5,
        lw=5,
        zorder=1,
        label="99 % if right",
    )
    axis.scatter(
        x,
        y,
        s=12 + 60 * n / n.max(),
        color=VERMILLION if fails else BLUE,
        zorder=2,
        label="found; size: number",
    )
    axis.set(
        xlabel="predicted P(context)", ylabel="how often it was true", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03)
    )
    axis.set_aspect("equal")
    axis.legend(frameon=False, fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    _title(axis, "contexts", contexts.num_episodes, contexts.p_value)


def _plot_ranks(axis: Axes, name: str, ranks: Ranks, fails: bool) -> None:
    n, bins = ranks.num_episodes, ranks.bins
    if not n:
        axis.text(0.5, 0.5, "never seen", ha="center", va="center", color=GREY)
        axis.set(xticks=[], yticks=[], title=name)
        return
    low, high = uniform_band(n, bins)
    # Over the bars, for its lower edge to be seen.
    axis.axhspan(low, high, color=GREY, alpha=0.3, lw=0, label="all bars, 99 % if right", zorder=2)
    for edge, style in ((low, "dashed"), (n / bins, "solid"), (high, "dashed")):
        axis.axhline(edge, color="black", lw=0.8, ls=style, zorder=3)
    left = torch.arange(bins) / bins
    axis.bar(
        left,
        ranks.counts.cpu(),
        width=1 / bins,
        align="edge",
        color=VERMILLION if fails else BLUE,
        edgecolor="white",
        lw=0.5,
        zorder=1,
    )
    axis.set(xlabel="normalised rank of the truth", ylabel="episodes", xlim=(0, 1), xticks=[0, 0.5, 1])
    axis.set_ylim(0, 1.25 * max(high, float(ranks.counts.max())))
    axis.legend(frameon=False, fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    _title(axis, name, n, ranks.p_value)


def _title(axis: Axes, name: str, n: int, p: float) -> None:
    found = f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"
    axis.set_title(f"{name}\nn = {n:,}, {found}", fontsize=9)


def uniform_band(n: int, bins: int) -> tuple[float, float]:
    """Between which counts all bars of a uniform histogram lie, with probability `BAND` or more."""
    tail = (1 - BAND) / bins / 2  # on either side of each bar
    k = torch.arange(n + 1, dtype=torch.float64)
    lower = torch.distributions.Binomial(n, torch.tensor(1 / bins, dtype=torch.float64)).log_prob(k).exp()
    low, high = _quantile(lower, tail), n - _quantile(lower.flip(0), tail)
    return float(low), float(high)


def _quantile(probabilities: Tensor, tail: float) -> int:
    """The largest number that is undercut with probability `tail` at most."""
    return int((probabilities.cumsum(0) <= tail).sum())
