"""A task at every point of a product of axes, in several processes, with outcomes kept in a folder."""

from __future__ import annotations

import hashlib
import inspect
import json
import traceback
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyro
import torch
from tqdm import tqdm

from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.experiments.axes import Product, as_dataset, in_words, misfit
from cpomdp_ppl.experiments.execute import (
    RETRIES,
    WorkerKilledError,
    in_parallel,
    require_retries,
    require_workers,
)
from cpomdp_ppl.experiments.fingerprint import fingerprint, name_of
from cpomdp_ppl.experiments.sweep_folder import SweepFolder
from cpomdp_ppl.rng import isolated

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    import xarray as xr

    from cpomdp_ppl.experiments.axes import Axis
    from cpomdp_ppl.experiments.execute import Results

    Task = Callable[..., Any]

KILLED = "each process that took it up was killed"
SHOWN_FAILURES = 10


class SweepError(RuntimeError):
    """Some points of a sweep have no outcome, or one unlike the others: their task raised, for instance.

    Attributes:
        failures: What went wrong, as the text of a traceback, by the labels of the point, `(label, …)`.
        partial: The outcomes that there are; NaN, or what stands for it, where there is none.
    """

    def __init__(self, message: str, failures: Mapping[tuple[Any, ...], str], partial: xr.Dataset) -> None:
        super().__init__(message)
        self.failures, self.partial = dict(failures), partial

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.failures, self.partial)


def sweep(
    task: Task,
    axes: Mapping[str, Axis],
    *,
    folder: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    retries: int = RETRIES,
    progress: bool = True,
) -> xr.Dataset:
    """Carry out a task at every point of a product of axes.

    The same bits come out whatever the number of processes, and whatever is left over from an earlier sweep:
    inside a task torch has one thread, Pyro's param store is empty, all generators of random numbers start
    from a state that follows from the labels of the point, and values are copies, the task's own to change.
    But on Dask, do not draw from Python's `random`: other threads of Dask's own processes do so, too.

    Args:
        task: Function called with a value of each axis by name. It returns numbers or arrays by name, the
            same names and shapes at every point; or a DataArray with a name, or a Dataset, whose `attrs` are
            not kept.
        axes: Values by the name of the axis: numbers or words, which are their own labels, or anything by
            label, such as `{"model": {"grid": LineGrid(), "tiger": ContextualTiger()}, "seed": range(5)}`.
        folder: Folder in which each outcome is kept as soon as it is there. A sweep that was killed goes on
            from there, and one with more values computes those alone. An outcome is taken from there if the
            task has the same name and code, and the values, as far as `experiments.fingerprint` can see, are
            the same; it is an error if not. Delete the folder if what the task calls has changed. A damaged
            file is computed again, with a warning.
        workers: Number of processes. One is this process itself. None leaves it to the configuration of
            joblib, and without any takes as many as there are cores. All but one need the extra `parallel`.
            Inside `joblib.parallel_config(backend="dask")` the sweep runs on the cluster, however many there
            are, unless it is one.
        retries: How often a point is tried again whose process was killed; on Dask that is for its
            `allowed-failures` to say.
        progress: Whether to show a progress bar.

    Returns:
        All outcomes, with a dimension for each axis whose coordinates are the labels.

    Raises:
        SweepError: If some points have no outcome, as the task raised, or their processes were killed; or one
            that does not fit together with the others. All others are computed before, and kept.
        SweepFolderError: If the folder is that of another sweep.
        ValueError: On axes that make no sense, or values that cannot be told apart.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy, evaluate
        >>> from cpomdp_ppl.models import LineGrid
        >>> def random_return(horizon, seed):
        ...     result = evaluate(LineGrid(horizon=horizon), RandomPolicy(3), 50, seed=seed)
        ...     return {"return": result.returns.mean}
        >>> found = sweep(random_return, {"horizon": [2, 4], "seed": range(3)}, workers=1, progress=False)
        >>> dict(found["return"].mean("seed").sizes), found.horizon.values.tolist()
        ({'horizon': 2}, [2, 4])
    """
    require(callable(task), "task", task, "a function")
    product = Product.of(axes)
    _require_arguments(task, product.names)
    require_retries(retries)
    require_workers(workers)
    found = _Found(task, product, folder)
    rest = found.missing()
    values = product.each(lambda value: value)
    points = [(task, values[k], seed_of(product.points[k])) for k in rest]
    done = len(product.points) - len(rest)
    with (
        tqdm(total=len(product.points), initial=done, disable=not progress, desc="points") as bar,
        closing(_carried_out(points, workers, retries)) as carried_out,
    ):
        for i, outcome in carried_out:
            found.add(rest[i], outcome)
            bar.update()
    return found.assembled()


class _Found:
    """The outcomes of a sweep so far, beginning with those that are kept in its folder."""

    def __init__(self, task: Task, product: Product, folder: str | os.PathLike[str] | None) -> None:
        self.product = product
        self.outcomes: dict[int, xr.Dataset] = {}
        self.failures: dict[int, str] = {}
        self.folder: SweepFolder | None = None
        if folder is None:
            return
        of_all = {
            "task": name_of(task),
            "task_fingerprint": fingerprint(task),
            "dtype": str(torch.get_default_dtype()),
            "device": str(torch.get_default_device()),
        }
        values = product.each(fingerprint)
        self.identities = [
            of_all | {"labels": labels, "values": values[k]} for k, labels in enumerate(product.points)
        ]
        self.folder = SweepFolder(folder, of_all["task"], product.names)
        for k, identity in enumerate(self.identities):
            outcome = self.folder.read_point(identity)
            if outcome is not None:
                self._sort_in(k, outcome)

    def missing(self) -> list[int]:
        """Numbers of the points that are still to be computed."""
        return [
            k for k in range(len(self.product.points)) if k not in self.outcomes and k not in self.failures
        ]

    def add(self, k: int, outcome: xr.Dataset | str) -> None:
        """Keep the outcome of a point, or why it has none."""
        self._sort_in(k, outcome)
        if k in self.outcomes and self.folder is not None:
            self.folder.write_point(self.identities[k], self.outcomes[k])

    def _sort_in(self, k: int, outcome: xr.Dataset | str) -> None:
        first = next(iter(self.outcomes), k)
        if isinstance(outcome, str):
            self.failures[k] = outcome
        elif (unlike := misfit(self.outcomes.get(first, outcome), outcome)) is None:
            self.outcomes[k] = outcome
        else:
            one, other = (in_words(self.product.points[each]) for each in sorted((first, k)))
            self.failures[k] = f"outcomes do not fit together: {unlike} is not the same at {one} and {other}"

    def assembled(self) -> xr.Dataset:
        """All outcomes in one; an error with those that there are, if some are missing."""
        result, points = self.product.assembled(self.outcomes), self.product.points
        if not self.failures:
            return result
        failed = sorted(self.failures)
        shown = "; ".join(in_words(points[k]) for k in failed[:SHOWN_FAILURES])
        more = f" and {len(failed) - SHOWN_FAILURES} more" * (len(failed) > SHOWN_FAILURES)
        where = "the others are in `partial`" if self.folder is None else f"{self.folder.path} has the others"
        raise SweepError(
            f"{len(failed)} of {len(points)} points failed: {shown}{more}; {where}. "
            f"The first failure:\n{self.failures[failed[0]]}",
            {tuple(points[k].values()): self.failures[k] for k in failed},
            result,
        )


def _require_arguments(task: Task, names: Sequence[str]) -> None:
    try:
        signature = inspect.signature(task)
    except ValueError:  # of what is not written in Python there may be none
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        expected = f"a function with arguments {', '.join(names)}"
        raise invalid("task", f"{name_of(task)}{signature}", expected) from error


def seed_of(labels: Mapping[str, Any]) -> int:
    """Where a point's random numbers start: a number that follows from its labels.

    Examples:
        >>> seed_of({"seed": 0}) == seed_of({"seed": 0}), seed_of({"seed": 0}) == seed_of({"seed": 1})
        (True, False)
    """
    words = hashlib.sha256(json.dumps(labels).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(words[:4], "big")


def _carried_out(points: Sequence[Any], workers: int | None, retries: int) -> Results[xr.Dataset | str]:
    """An outcome, or why there is none, for every point; whatever ends all of them is a reason, too."""
    left = dict.fromkeys(range(len(points)))
    reason = KILLED
    try:
        with closing(in_parallel(_carry_out, points, workers=workers, retries=retries)) as outcomes:
            for i, outcome in outcomes:
                del left[i]
                yield i, outcome
    except WorkerKilledError:
        pass
    except Exception as error:  # of joblib, or Dask
        reason = "".join(traceback.format_exception(error))
    for i in left:
        yield i, reason


def _carry_out(point: tuple[Task, Mapping[str, Any], int]) -> xr.Dataset | str:
    task, values, seed = point
    with (
        isolated(seed, validate=True),
        pyro.get_param_store().scope(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        try:
            return as_dataset(task(**values), values)
        except (Exception, SystemExit):
            return traceback.format_exc()
