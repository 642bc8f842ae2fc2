"""C-IDS over models, settings and seeds: what comes out, and how much of it is luck."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpomdp_ppl import evaluate
from cpomdp_ppl.errors import as_integer, require, require_count, require_model
from cpomdp_ppl.experiments import sweep as sweeps
from cpomdp_ppl.experiments.axes import Product
from cpomdp_ppl.experiments.execute import RETRIES
from cpomdp_ppl.experiments.files import remove_folders
from cpomdp_ppl.experiments.fingerprint import fingerprint
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.model import CPOMDP
from solvers import cids

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import xarray as xr

    from cpomdp_ppl.experiments.axes import Axis

FITS = "fits"
"""Name of the folder of checkpoints in the folder of a sweep."""

SET_HERE = ("model", "seed", "progress", "checkpoint", "callbacks")
"""Arguments of `cids.fit` that the caller of a sweep does not choose."""


def sweep(
    models: CPOMDP | Sequence[CPOMDP] | Mapping[str, CPOMDP],
    *,
    seeds: int | Iterable[int] = 5,
    num_episodes: int = 4000,
    evaluation_seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    retries: int = RETRIES,
    progress: bool = True,
    **settings: Any,
) -> xr.Dataset:
    """Fit C-IDS for every model, setting and seed, and evaluate every policy on the same noise.

    Args:
        models: One model, several, or several by name.
        seeds: Seeds of the fits: how many, or which.
        num_episodes: Number of episodes that each policy is evaluated with.
        evaluation_seed: Seed of those episodes: the same contexts, first states and noise for all.
        folder: Folder for outcomes, and for checkpoints of fits that are not finished: a sweep that was
            killed goes on from there, and so do its fits, if processes elsewhere see the same folder. Sweeps
            can share a folder at the same time if they have no point in common.
        workers: Number of processes; see `cpomdp_ppl.experiments.sweep.sweep`.
        retries: How often a point is tried again whose process was killed.
        progress: Whether to show a progress bar.
        settings: Settings of `cids.fit`. A list of numbers or words, or a mapping from labels to anything, is
            an axis; everything else, a tuple for instance, is one value for all.

    Returns:
        By `model`, axes among the settings, and `seed`: `return` and `return_standard_error`; `entropy` of
        the context at the end, in bits; `identified`, the share of episodes whose likeliest context at the
        end is the true one; and `training_seconds`.

    Raises:
        ValueError: On arguments that make no sense.
        SweepError: If some points failed; all others are computed before, and kept.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> quick = dict(likelihood="exact", iterations=2, batch_size=20, num_episodes=50)
        >>> found = sweep(LineGrid(), seeds=2, temperature=[0.0, 1.0], workers=1, progress=False, **quick)
        >>> dict(found.sizes)
        {'model': 1, 'temperature': 2, 'seed': 2}
    """
    named = _named(models)
    num_episodes = require_count("num_episodes", num_episodes)
    (evaluation_seed,) = _seeds("evaluation_seed", [evaluation_seed])
    require(folder is None or isinstance(folder, str | os.PathLike), "folder", folder, "a path")
    allowed = [name for name in inspect.signature(cids.fit).parameters if name not in SET_HERE]
    for name in settings:
        require(name in allowed, "settings", name, f"those of cids.fit: {', '.join(allowed)}")
    swept = {name: value for name, value in settings.items() if isinstance(value, list | Mapping)}
    fixed = {name: value for name, value in settings.items() if name not in swept}
    number = as_integer(seeds)
    chosen: Any = seeds if number is None else range(require_count("seeds", number))
    axes = {"model": named, **swept, "seed": _seeds("seeds", chosen)}
    fits = None if folder is None else Path(folder).absolute() / FITS
    task = FitAndEvaluate(num_episodes, evaluation_seed, fixed, fits)
    try:
        found = sweeps.sweep(task, axes, folder=folder, workers=workers, retries=retries, progress=progress)
    except sweeps.SweepError as error:
        task.forget(axes, but=error.failures)
        raise
    task.forget(axes)
    return found


@dataclass(frozen=True)
class FitAndEvaluate:
    """A task for `cpomdp_ppl.experiments.sweep.sweep`: fit C-IDS, and evaluate its policy."""

    num_episodes: int  # to evaluate with
    evaluation_seed: int
    settings: Mapping[str, Any]  # of `cids.fit`, the same at all points
    fits: Path | None = field(default=None, compare=False)  # folder of checkpoints; no part of the outcome

    def __call__(self, model: CPOMDP, seed: int, **settings: Any) -> dict[str, float]:
        """Outcomes of one fit, by name."""
        place = None if self.fits is None else self.fits / self.place(model, seed, **settings)
        settings = copy.deepcopy({**self.settings, **settings})  # a policy is learned in place
        # Chosen here, for the fingerprint to tell: outcomes of code that would choose another are refused.
        settings["likelihood"] = backend_for(model, settings.get("likelihood"))
        settings = {"verdict": False, **settings}  # all of them are evaluated, which says more
        solution = cids.fit(model, seed=seed, checkpoint=place, progress=False, **settings)
        # On a fixed prior the policy is played with what it was learned for, as `Solution.evaluate` does.
        found = evaluate(
            model, solution.policy, self.num_episodes, prior=solution.prior, seed=self.evaluation_seed
        )
        phases = [name for name in solution.history if str(name).startswith("seconds_")]
        return {
            "return": found.returns.mean,
            "return_standard_error": found.returns.standard_error,
            "entropy": found.entropy.mean,
            "identified": found.identified,
            "training_seconds": float(sum(solution.history[name].sum() for name in phases)),
        }

    def place(self, model: CPOMDP, seed: int, **settings: Any) -> str:
        """Name of a fit's folder of checkpoints: the fingerprint of all that decides the fit."""
        return fingerprint([model, seed, {**self.settings, **settings}])

    def forget(self, axes: Mapping[str, Axis], but: Collection[tuple[Any, ...]] = ()) -> None:
        """Remove the checkpoints of points whose outcomes are kept, all `but` those with these labels."""
        if self.fits is not None:
            product = Product.of(axes)
            pairs = zip(product.points, product.each(lambda value: value), strict=True)
            done = [self.place(**point) for labels, point in pairs if tuple(labels.values()) not in but]
            remove_folders(self.fits, done)


def _seeds(argument: str, seeds: Any) -> list[int]:
    proper = isinstance(seeds, Iterable) and not isinstance(seeds, str | bytes | Mapping)
    require(proper, argument, seeds, "how many, or which")
    numbers = [(each, as_integer(each)) for each in seeds]
    for each, number in numbers:
        require(number is not None and 0 <= number < 2**32, argument, each, "integers from 0 to 2**32 - 1")
    require(len(numbers) > 0, argument, seeds, "at least one")
    return [number for _, number in numbers if number is not None]


def _named(models: Any) -> Mapping[str, CPOMDP]:
    if isinstance(models, CPOMDP):
        models = [models]
    several = isinstance(models, Mapping | list | tuple) and len(models) > 0
    require(several, "models", models, "a CPOMDP, several, or several by name")
    if not isinstance(models, Mapping):
        names = [type(model).__name__ for model in models]
        require(len(set(names)) == len(names), "models", names, "names for models of the same class")
        models = dict(zip(names, models, strict=True))
    for model in models.values():
        require_model(model)
    return dict(models)
