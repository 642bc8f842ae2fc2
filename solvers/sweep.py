"""C-IDS over models, settings and seeds: what comes out, and how much of it is luck."""

from __future__ import annotations

import copy
import inspect
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpomdp_ppl import evaluate
from cpomdp_ppl import sweep as sweeps
from cpomdp_ppl.digest import digest
from cpomdp_ppl.errors import require, require_count, require_model, whole_number
from cpomdp_ppl.isolation import require_seed
from cpomdp_ppl.model import CPOMDP
from cpomdp_ppl.parallel import RETRIES
from solvers import cids

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    import xarray as xr

FITS = "fits"
"""Where checkpoints are, in the folder of a sweep."""

OWN = ("model", "seed", "progress", "checkpoint", "callbacks")
"""Arguments of `cids.fit` that are not for the caller to choose."""


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
        models: One, several, or several by name.
        seeds: Of the fits: how many, or which.
        num_episodes: To evaluate a policy with.
        evaluation_seed: Of those episodes: the same contexts, first states and noise for all.
        folder: Where outcomes are kept, and checkpoints of fits that are not finished: a sweep that was
            killed goes on from there, and so do its fits, if processes elsewhere see the same folder.
        workers: How many processes; see `cpomdp_ppl.sweep.sweep`.
        retries: How often a point is taken up again whose process was killed.
        progress: Whether to show a progress bar.
        settings: Of `cids.fit`. A list of numbers or words, or a mapping from labels to anything, is an axis;
            everything else, a tuple for instance, is one value for all.

    Returns:
        By `model`, axes among the settings, and `seed`: `return` and `return_standard_error`; `entropy` of
        the context at the end, in bits; `identified`, the share of episodes whose likeliest context at the
        end is the true one; and `training_seconds`.

    Raises:
        ValueError: On arguments that make no sense.
        SweepError: If some points failed; all others are computed before, and kept.

    Example:
        >>> from cpomdp_ppl.models import LineGrid
        >>> quick = dict(likelihood="exact", iterations=2, batch_size=20, num_episodes=50)
        >>> found = sweep(LineGrid(), seeds=2, temperature=[0.0, 1.0], workers=1, progress=False, **quick)
        >>> dict(found.sizes)
        {'model': 1, 'temperature': 2, 'seed': 2}
    """
    named = _named(models)
    require_count("num_episodes", num_episodes)
    require(evaluation_seed is not None, "evaluation_seed", evaluation_seed, "one seed for all")
    require_seed(evaluation_seed)
    allowed = [name for name in inspect.signature(cids.fit).parameters if name not in OWN]
    for name in settings:
        require(name in allowed, "settings", name, f"those of cids.fit: {', '.join(allowed)}")
    swept = {name: value for name, value in settings.items() if isinstance(value, list | Mapping)}
    fixed = {name: value for name, value in settings.items() if name not in swept}
    number = whole_number(seeds)
    chosen: Any = seeds if number is None else range(require_count("seeds", number))
    fits = None if folder is None else Path(folder).absolute() / FITS
    task = FitAndEvaluate(num_episodes, evaluation_seed, fixed, fits)
    found = sweeps.sweep(
        task,
        {"model": named, **swept, "seed": chosen},
        folder=folder,
        workers=workers,
        retries=retries,
        progress=progress,
    )
    if fits is not None:
        shutil.rmtree(fits, ignore_errors=True)  # all is done
    return found


@dataclass(frozen=True)
class FitAndEvaluate:
    """A task for `cpomdp_ppl.sweep.sweep`: fit C-IDS, and evaluate its policy.

    Attributes:
        num_episodes: To evaluate with.
        evaluation_seed: Of those episodes.
        settings: Of `cids.fit`, the same at all points.
        fits: Where checkpoints are, by a digest of all that decides a fit; None for nowhere. It makes no
            difference to the outcome.
    """

    num_episodes: int
    evaluation_seed: int
    settings: Mapping[str, Any]
    fits: Path | None = field(default=None, compare=False)

    def __call__(self, model: CPOMDP, seed: int, **settings: Any) -> dict[str, float]:
        """Outcomes of one fit, by name.

        Args:
            model: The CPOMDP.
            seed: Of the fit.
            settings: Further ones of `cids.fit`.
        """
        settings = copy.deepcopy({**self.settings, **settings})  # a policy is learned in place
        place = None if self.fits is None else self.fits / digest([model, seed, settings])
        solution = cids.fit(model, seed=seed, checkpoint=place, progress=False, **settings)
        if not solution.finished:  # it takes Ctrl-C for a wish to see the best so far
            raise KeyboardInterrupt
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
