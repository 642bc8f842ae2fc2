"""What a sweep leaves behind: a file for every point that is done, with numbers and text only."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from cpomdp_ppl.experiments.axes import as_dataset
from cpomdp_ppl.experiments.files import CheckpointError, as_directory
from cpomdp_ppl.experiments.fingerprint import require_same
from cpomdp_ppl.experiments.store import Store

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FORMAT = 2
RECORD, POINTS = "sweep.json", "points"


class SweepFolderError(CheckpointError):
    """A folder is that of another sweep, or of none."""


class SweepFolder(Store):
    """A folder with `sweep.json`, which names task and axes, and a file for every point in `points`.

    A point's file holds, beside its outcome, what it is the outcome of: name and fingerprint of the task,
    labels, and fingerprints of the values that they stand for. It answers whoever asks for just that; asked
    for anything else under the same labels, it is an error, and stays where it is.

    Raises:
        SweepFolderError: If it is the folder of something else.
    """

    def __init__(self, path: str | os.PathLike[str], task: str, axes: Sequence[str]) -> None:
        super().__init__(as_directory("folder", path).absolute())  # wherever tasks change to
        record = {"format": FORMAT, "task": task, "axes": list(axes)}
        if self.has(RECORD):
            require_same(self.path, self.read_json(RECORD), record, SweepFolderError)
            return
        others = [p for p in self.path.glob("*") if p.name != POINTS and not p.name.startswith(".")]
        if others:
            raise SweepFolderError(f"{self.path} is not that of a sweep: it has no {RECORD}")
        (self.path / POINTS).mkdir(parents=True, exist_ok=True)
        self.write_json(RECORD, record)

    def file(self, labels: Mapping[str, Any]) -> Path:
        """Path of the outcome of a point, whether it is there or not."""
        text = json.dumps(labels)
        short = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        words = ",".join(f"{axis}={label}" for axis, label in labels.items())
        proper = re.sub(r"[^\w=,.+-]", "_", words, flags=re.ASCII)  # as the name of a file, anywhere
        return self.path / POINTS / f"{proper[:150]}-{short}.npz"

    def write_point(self, identity: Mapping[str, Any], outcome: xr.Dataset) -> None:
        """Keep the outcome of a point; the `labels` of its identity name the file."""
        arrays = outcome.variables
        content = [[str(name), list(array.dims), name in outcome.coords] for name, array in arrays.items()]
        record = json.dumps({"format": FORMAT, "identity": identity, "content": content})
        members = {str(i): array.values for i, array in enumerate(arrays.values())}

        def save(path: Path) -> None:
            with path.open("wb") as file:
                np.savez(file, allow_pickle=False, record=np.array(record), **members)

        self.write(str(self.file(identity["labels"])), save)

    def read_point(self, identity: Mapping[str, Any]) -> xr.Dataset | None:
        """The outcome of a point; None if it is missing, or damaged, for which there is a warning.

        Raises:
            SweepFolderError: If there is an outcome of another task, or for other values of the same labels.
        """
        path = self.file(identity["labels"])
        if not path.is_file():
            return None
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                record = json.loads(str(file["record"][()]))
                found = {**record["identity"], "format": record["format"]}
                variables: dict[bool, dict[str, Any]] = {True: {}, False: {}}
                known = record["format"] == FORMAT  # of another, who knows what is in it
                for i, (name, dims, is_coordinate) in enumerate(record["content"] if known else ()):
                    variables[is_coordinate][name] = (dims, file[str(i)])
            outcome = as_dataset(xr.Dataset(variables[False], variables[True]), identity["labels"])
        except MemoryError:
            raise
        except Exception as error:  # zipfile, NumPy and xarray raise all kinds
            why = f"({type(error).__name__}: {error})"
            warnings.warn(f"{path} is damaged, and is computed again {why}", RuntimeWarning, stacklevel=3)
            return None
        require_same(path, found, {**identity, "format": FORMAT}, SweepFolderError)
        return outcome
