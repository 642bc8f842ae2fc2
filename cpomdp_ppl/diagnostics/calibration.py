"""Simulation-based calibration: whether a filter's posteriors are what they claim to be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.diagnostics.context_calibration import ContextCalibration, calibrate_contexts
from cpomdp_ppl.diagnostics.ranks import LEVEL, Ranks, rank_episodes
from cpomdp_ppl.errors import require, require_count, require_model
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.model import CPOMDP
from cpomdp_ppl.prior import one_prior
from cpomdp_ppl.rng import require_seed, seed_for
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from matplotlib.figure import Figure
    from torch import Tensor

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Decision, History, Policy


@dataclass(frozen=True, eq=False)
class Calibration:
    """Whether a filter's posteriors are what they claim to be, quantity by quantity.

    Attributes:
        contexts: The posterior over contexts at the end, against the true ones.
        states: Ranks of the true state among draws from `P(s_t | o_{1:t})`, by component.
        observations: Ranks of what was seen among draws from `P(o_{t+1} | h_t, a_t)`, by component.
        likelihood: Name of the backend.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import ContextualTiger
        >>> calibration = calibrate(ContextualTiger(), RandomPolicy(3), "exact", 200)
        >>> calibration.calibrated, list(calibration.p_values)
        (True, ['contexts', 'states: state', 'observations: left_ear', 'observations: right_ear'])
    """

    contexts: ContextCalibration
    states: Mapping[str, Ranks]
    observations: Mapping[str, Ranks]
    likelihood: str

    @property
    def quantities(self) -> dict[str, ContextCalibration | Ranks]:
        """Everything that was tested, by name."""
        found: dict[str, ContextCalibration | Ranks] = {"contexts": self.contexts}
        found |= {f"states: {name}": ranks for name, ranks in self.states.items()}
        return found | {f"observations: {name}": ranks for name, ranks in self.observations.items()}

    @property
    def p_values(self) -> dict[str, float]:
        """The p-value of every test, not corrected for there being several; NaN for what was never seen."""
        return {name: quantity.p_value for name, quantity in self.quantities.items()}

    @property
    def failing(self) -> tuple[str, ...]:
        """The quantities that fail, by Holm's method at `LEVEL` in total; worst first."""
        known = {name: p for name, p in self.p_values.items() if not math.isnan(p)}
        failing = []
        for k, name in enumerate(sorted(known, key=known.__getitem__)):
            if known[name] > LEVEL / (len(known) - k):
                break
            failing.append(name)
        return tuple(failing)

    @property
    def calibrated(self) -> bool:
        """Whether nothing fails."""
        return not self.failing

    @property
    def verdict(self) -> str:
        """In one sentence, whether the filter is calibrated, and if not, what fails and how."""
        if self.calibrated:
            tested = sum(not math.isnan(p) for p in self.p_values.values())
            return f"calibrated: none of {tested} tests fails, at {LEVEL} in total"
        quantities = self.quantities
        faults = "; ".join(f"{name} ({quantities[name].hint})" for name in self.failing)
        return f"not calibrated: {faults}"

    def __str__(self) -> str:
        width = max(map(len, self.quantities))
        lines = [f"{'quantity':<{width}}  {'n':>7}  {'p':>7}  hint"]
        for name, quantity in self.quantities.items():
            p = "–" if math.isnan(quantity.p_value) else f"{quantity.p_value:.4f}"
            p = "<0.0001" if p == "0.0000" else p
            lines.append(f"{name:<{width}}  {quantity.num_episodes:>7,}  {p:>7}  {quantity.hint}")
        c = self.contexts
        lines.append(
            f"Brier score {c.brier:.4f}, expected {c.expected_brier:.4f}; calibration error {c.ece:.4f}"
        )
        return "\n".join([*lines, f"{self.likelihood} is {self.verdict}"])

    def plot(self) -> Figure:
        """Reliability diagram and rank histograms, as a matplotlib figure (the extra `plot`)."""
        from cpomdp_ppl.diagnostics.calibration_plots import plot

        return plot(self)


def calibrate(
    model: CPOMDP,
    policy: Policy | Callable[[History], Decision],
    likelihood: str | Backend | None = None,
    num_episodes: int = 2000,
    *,
    believed: CPOMDP | None = None,
    prior: Sequence[float] | Tensor | None = None,
    num_draws: int = 63,
    bins: int = 16,
    seed: int | None = 0,
    progress: bool = False,
) -> Calibration:
    """Simulate episodes, filter them, and ask whether the truth looks like a draw from the posteriors.

    If model and filter are right, the true context is a draw from `P(c | y)`, the true state one from
    `P(s_t | o_{1:t})`, and what is seen next one from `P(o_{t+1} | h_t, a_t)`: its rank among draws of the
    filter's is then uniform (Cook, Gelman and Rubin, 2006; Talts et al., 2018). Each episode gives one rank
    for every component, at a time drawn at random, so that ranks are independent; an episode that sees
    nothing from then on gives none for what is seen. Ties, as between discrete values, are broken at
    random: what is known for sure has uniform ranks.

    Args:
        model: The CPOMDP that the episodes come from.
        policy: The policy that acts. What it never observes is not tested.
        likelihood: The filter: a backend or its name; left out, the `default_backend` for the model.
        num_episodes: How many episodes.
        believed: The CPOMDP that the filter goes by, if another: shows what a wrong model does.
        prior: Prior over contexts, `[C]`, which contexts are drawn from, and which the filter goes by. Left
            out, each takes that of its model.
        num_draws: How many draws M the truth is ranked among.
        bins: Number of bins of histograms and of the reliability diagram.
        seed: Seed of all random numbers; None takes fresh entropy. The caller's random number generators,
            param store and validation flags stay as they were.
        progress: Whether to show a progress bar, by chunks of episodes.

    Raises:
        UnsupportedModelError: If the backend cannot serve the model.
        DegenerateWeightsError: If no context can have produced an episode under `believed`, however many
            particles.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LightDark
        >>> policy = RandomPolicy(3)
        >>> calibrate(LightDark(), policy, "ekf", 500, believed=LightDark(initial_variance=0.01)).verdict[:14]
        'not calibrated'
    """
    require_model(model)
    believed = model if believed is None else believed
    _require_alike(model, believed)
    B, M = require_count("num_episodes", num_episodes), require_count("num_draws", num_draws)
    bins = require_count("bins", bins)
    require(bins > 1, "bins", bins, "at least 2")
    require_seed(seed)
    backend = backend_for(believed, likelihood)
    given = None if prior is None else one_prior(prior, model)
    episodes = simulate(model, policy, B, prior=given, seed=seed_for(seed, 0))
    assert episodes.contexts is not None
    with inference_scope(believed, seed_for(seed, 1)):
        p = one_prior(given, believed).to(believed.device)
        posterior, ranks = rank_episodes(backend, believed, episodes, p, M, progress)
    sig = signature(believed)

    def by_component(kind: str, shapes: Iterable[tuple[str, Any]]) -> dict[str, Ranks]:
        columns = {
            name: ranks[kind, leaf][:, k]
            for leaf, spec in shapes
            for k, name in enumerate(_components(leaf, spec.shape))
        }
        return {name: Ranks(column[~column.isnan()], bins) for name, column in columns.items()}

    return Calibration(
        calibrate_contexts(
            posterior, episodes.contexts, names=model.context_names, bins=bins, seed=seed_for(seed, 2)
        ),
        by_component("states", leaves(sig.state)),
        by_component("observations", sig.observations.items()),
        backend.name,
    )


def _components(name: str, shape: torch.Size) -> list[str]:
    """Names of a tensor's numbers, in order: `x`, or `x[0]`, `x[1]`."""
    if shape.numel() == 1:
        return [name]
    places = torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist()
    return [f"{name}[{', '.join(map(str, place))}]" for place in places]


def _require_alike(model: CPOMDP, believed: Any) -> None:
    """Raise unless one model can be mistaken for the other."""
    require(isinstance(believed, CPOMDP), "believed", believed, "an instance of a CPOMDP")
    believed.require_definition()
    kind = "num_actions" if model.box is None and believed.box is None else "box"
    for what in ("num_contexts", kind, "can_end"):
        mine, other = getattr(model, what), getattr(believed, what)
        require(mine == other, "believed", f"{what} = {other}", f"{what} = {mine}, as the model has")
    shapes, others = (
        {name: list(leaf.shape) for name, leaf in leaves(signature(each).state)} for each in (model, believed)
    )
    require(shapes == others, "believed", f"a state of shapes {others}", f"shapes {shapes}, as the model has")
