"""The same task at every point of a product of axes, in as many processes as there are."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
import traceback
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import torch
import xarray as xr
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.experiments.execute import (
    RETRIES,
    Packed,
    WorkerKilledError,
    filters_kept,
    in_parallel,
    require_retries,
    stays_here,
)
from cpomdp_ppl.experiments.fingerprint import fingerprint, name_of
from cpomdp_ppl.experiments.sweep_axes import Grid, named
from cpomdp_ppl.experiments.sweep_folder import KEPT, SweepFolder
from cpomdp_ppl.rng import isolated

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from cpomdp_ppl.experiments.execute import Results
    from cpomdp_ppl.experiments.sweep_axes import Axis

    Task = Callable[..., Any]

KILLED = "each process that took it up was killed"


class SweepError(RuntimeError):
    """Some points of a sweep have no outcome, or one unlike the others: their task raised, for instance.

    Attributes:
        failures: What went wrong, as a traceback in words, by the labels of the point: `{(label, …): text}`.
        partial: The outcomes that there are; NaN, or what stands for it, where there is none.
    """

    def __init__(
        self, axes: Sequence[str], failures: Mapping[tuple[Any, ...], str], partial: xr.Dataset, kept: str
    ) -> None:
        self.failures = dict(failures)
        self.partial = partial
        some = [named(axes, labels) for labels in itertools.islice(self.failures, 10)]
        more = f" and {len(self.failures) - 10} more" * (len(self.failures) > 10)
        first = next(iter(self.failures.values()))
        count = "1 point" if len(self.failures) == 1 else f"{len(self.failures)} points"
        super().__init__(
            f"{count} of {math.prod(partial.sizes[axis] for axis in axes)} failed: {'; '.join(some)}{more}; "
            f"{kept}. The first failure:\n{first}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.args, self.failures, self.partial)


def _remade(args: tuple[Any, ...], failures: dict[tuple[Any, ...], str], partial: xr.Dataset) -> SweepError:
    error = SweepError.__new__(SweepError)
    RuntimeError.__init__(error, *args)
    error.failures, error.partial = failures, partial
    return error


@filters_kept()
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
        task: Called with a value of each axis by name. Returns numbers or arrays by name, the same names and
            shapes at every point; or a DataArray with a name, or a Dataset, whose `attrs` are not kept.
        axes: Values by the name of the axis: numbers or words, which are their own labels, or anything by
            label, such as `{"model": {"grid": LineGrid(), "tiger": ContextualTiger()}, "seed": range(5)}`.
        folder: Where each outcome is kept as soon as it is there. A sweep that was killed goes on from there,
            and one with more values computes those alone. An outcome is taken from there if the task has the
            same name and code, and the values, as far as `experiments.fingerprint` can see, are the same; it
            is an error if not. Delete the folder if what the task calls has changed. A damaged file is
            computed again, with a warning.
        workers: How many processes. One is this process itself. None leaves it to the configuration of
            joblib, and without any takes as many as there are cores. All but one need the extra `parallel`.
            Inside `joblib.parallel_config(backend="dask")` the sweep runs on the cluster, however many there
            are, unless it is one.
        retries: How often a point is taken up again whose process was killed; on Dask that is for its
            `allowed-failures` to say.
        progress: Whether to show a progress bar.

    Returns:
        All outcomes, with a dimension for each axis whose coordinates are the labels.

    Raises:
        SweepError: If some points have no outcome, as the task raised, or their processes were killed; or one
            that does not fit together with the others. All others are computed before, and kept.
        SweepFolderError: If the folder is that of another sweep.
        ValueError: On axes that make no sense, or values that cannot be sent to other processes.

    Example:
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
    grid = Grid.of(axes)
    name = name_of(task)
    _require_arguments(task, grid.names)
    require_retries(retries)
    here = stays_here(workers)
    labels = [grid.labels_by_axis(k) for k in range(len(grid))]
    outcomes: dict[int, xr.Dataset] = {}
    failures: dict[int, Failure] = {}

    def take(k: int, outcome: xr.Dataset | Failure) -> bool:
        if not isinstance(outcome, Failure):
            misfit = grid.misfit(outcomes, k, outcome)
            if misfit is None:
                outcomes[k] = outcome
                return True
            outcome = Failure(misfit)
        failures[k] = outcome
        return False

    place, identities = None, []
    if folder is not None:  # without one, nobody asks what tells values apart
        of_all = {
            "task": name,
            "task_digest": fingerprint(task),
            "dtype": str(torch.get_default_dtype()),
            "device": str(torch.get_default_device()),
        }
        digests = grid.each(fingerprint)
        identities = [of_all | {"labels": labels[k], "values": digests[k]} for k in range(len(grid))]
        place = SweepFolder(folder, name, grid.names)
        for k, identity in enumerate(identities):
            outcome = place.read(identity)
            if outcome is not None:
                take(k, outcome)
    rest = [k for k in range(len(grid)) if k not in outcomes and k not in failures]
    points: list[Any] = []
    if rest:
        sent = _as_it_is if here else _packed
        function, values = sent(task), grid.each(sent)
        points = [(function, values[k], seed_of(labels[k])) for k in rest]
    bar = tqdm(total=len(grid), initial=len(grid) - len(rest), disable=not progress, desc="points")
    try:
        with closing(_carried_out(points, workers, retries, name)) as carried_out:
            for i, found in carried_out:
                if take(rest[i], found) and place is not None:
                    place.write(identities[rest[i]], outcomes[rest[i]])
                bar.update()
    finally:
        bar.close()
    result = grid.assembled(outcomes)
    if failures:
        kept = f"{place.path} has the others" if place is not None else "the others are in `partial`"
        by_labels = {grid.labels(k): failures[k].text for k in sorted(failures)}
        cause = next((each.cause for each in failures.values() if each.cause is not None), None)
        raise SweepError(grid.names, by_labels, result, kept) from cause
    return result


def _require_arguments(task: Task, axes: Sequence[str]) -> None:
    try:
        signature = inspect.signature(task)
    except (TypeError, ValueError):  # of what is not written in Python there may be none
        return
    try:
        signature.bind(**dict.fromkeys(axes))
    except TypeError as error:
        expected = f"a function with arguments {', '.join(axes)}"
        raise invalid("task", f"{name_of(task)}{signature}", expected) from error


def _as_it_is(value: Any) -> Any:
    return value


def _packed(value: Any) -> Packed:
    try:
        return Packed.of(value)
    except Exception as error:
        raise invalid("workers", value, f"1, for what cannot be pickled ({error})") from error


def seed_of(labels: Mapping[str, Any]) -> int:
    """Where a point's random numbers start: a number that follows from its labels.

    Example:
        >>> seed_of({"seed": 0}) == seed_of({"seed": 0}), seed_of({"seed": 0}) == seed_of({"seed": 1})
        (True, False)
    """
    words = hashlib.sha256(json.dumps(labels).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(words[:4], "big")


@dataclass(frozen=True)
class Failure:
    """Why a point has no outcome.

    Attributes:
        text: In words: what a task raises may not survive the way between processes.
        cause: What was raised, if it was not by the task.
    """

    text: str
    cause: Exception | None = None


def _carried_out(
    points: Sequence[Any], workers: int | None, retries: int, name: str
) -> Results[xr.Dataset | Failure]:
    """An outcome for every point, as soon as it is there; whatever it was that ended all, it is one, too."""
    left = dict.fromkeys(range(len(points)))
    failure = Failure(KILLED)
    try:
        with closing(
            in_parallel(_carry_out, points, workers=workers, retries=retries, name=name)
        ) as outcomes:
            for i, outcome in outcomes:
                del left[i]
                yield i, outcome
    except WorkerKilledError:
        pass
    except Exception as error:  # of joblib, or Dask
        failure = Failure("".join(traceback.format_exception(error)), error)
    for i in left:
        yield i, failure


def _carry_out(point: tuple[Task | Packed, Mapping[str, Any], int]) -> xr.Dataset | Failure:
    task, values, seed = point
    with (
        isolated(seed, validate=True),
        pyro.get_param_store().scope(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        try:
            arguments = {name: _unpacked(each) for name, each in values.items()}
            return as_dataset(_unpacked(task)(**arguments), values)
        except (Exception, SystemExit):
            return Failure(traceback.format_exc())


def _unpacked(value: Any) -> Any:
    return value.unpacked() if isinstance(value, Packed) else value


def as_dataset(outcome: Any, axes: Iterable[str]) -> xr.Dataset:
    """What a task returned, as a Dataset that is wholly in memory.

    Args:
        outcome: Numbers or arrays by name, a DataArray with a name, or a Dataset.
        axes: Names that the outcome cannot use itself.

    Raises:
        ValueError: If it is something else.

    Example:
        >>> as_dataset({"mean": 0.5, "draws": [1, 2, 3]}, ["seed"])["draws"].dims
        ('draws_dim_0',)
    """
    if isinstance(outcome, xr.DataArray) and outcome.name is not None:
        outcome = outcome.to_dataset()
    if not isinstance(outcome, xr.Dataset):
        proper = isinstance(outcome, Mapping) and all(isinstance(name, str) for name in outcome)
        require(proper, "task", outcome, "a function that returns numbers or arrays by name")
        arrays = {name: _as_array(name, value) for name, value in outcome.items()}
        outcome = xr.Dataset(arrays)
    taken = {*map(str, outcome.variables), *map(str, outcome.dims)}
    for name in axes:
        require(name not in taken, "task", name, "outcomes with other names than the axes")
    plain = {name: (v.dims, _in_plain(v.values)) for name, v in outcome.variables.items()}
    for name, (_, array) in plain.items():
        expected = "numbers, truth values, words or times"
        require(array.dtype.kind in KEPT, str(name), f"an array of {array.dtype}", expected)
    coords = {name: plain.pop(name) for name in list(outcome.coords)}
    return xr.Dataset(plain, coords)


def _as_array(name: str, value: Any) -> xr.DataArray | xr.Variable:
    if isinstance(value, xr.DataArray | xr.Variable):
        return value
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    return xr.Variable([f"{name}_dim_{i}" for i in range(array.ndim)], array)


def _in_plain(values: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(values)
    words = array.dtype.kind in "OT" and all(isinstance(each, str) for each in array.flat)
    return array.astype(str) if words and array.size else array
