"""What a sweep keeps: a file for every point that is done, written whole, numbers and words only."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from cpomdp_ppl.errors import require
from cpomdp_ppl.experiments.files import write_atomic, write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

FORMAT = 1
RECORD = "sweep.json"
POINTS = "points"
KEPT = "biufcUSmM"  # kinds of NumPy's dtypes that are written without pickle


class SweepFolderError(ValueError):
    """A folder is that of another sweep, or of none; in one sentence."""


class SweepFolder:
    """A folder with `sweep.json`, which names task and axes, and a file for every point in `points`.

    A point's file holds, beside its outcome, what it is the outcome of: the task's name and digest, labels,
    and digests of the values that they stand for. It is an outcome for whoever asks for just that. For
    another task or value under the same labels it is an error, not an answer, and is left where it is.

    Args:
        path: Made if it is not there.
        task: The task's name.
        axes: Their names.

    Raises:
        SweepFolderError: If it is the folder of something else.
    """

    def __init__(self, path: str | os.PathLike[str], task: str, axes: Sequence[str]) -> None:
        require(isinstance(path, str | os.PathLike), "folder", path, "a path")
        self.path = Path(path).absolute()  # wherever tasks change to
        record = {"format": FORMAT, "task": task, "axes": list(axes)}
        there = self._has_own(record)
        (self.path / POINTS).mkdir(parents=True, exist_ok=True)
        if not there:  # what is done can be read where nothing can be written
            write_text_atomic(self.path / RECORD, json.dumps(record, indent=1))

    def _has_own(self, record: Mapping[str, Any]) -> bool:
        if not self.path.is_dir():
            require(not self.path.exists(), "folder", str(self.path), "a folder, or a name for one")
            return False
        there = self.path / RECORD
        if not there.is_file():
            if any(each.name != POINTS and not each.name.startswith(".") for each in self.path.iterdir()):
                raise SweepFolderError(f"{self.path} is not that of a sweep: it has no {RECORD}")
            return False
        try:
            found = dict(json.loads(there.read_text(encoding="utf-8")))
        except (TypeError, ValueError):
            warnings.warn(f"{there} was damaged, and is written anew", RuntimeWarning, stacklevel=4)
            return False
        _require_same(self.path, found, record)
        return True

    def file(self, labels: Mapping[str, Any]) -> Path:
        """Where the outcome of a point is, or will be."""
        text = json.dumps(labels)
        short = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        words = ",".join(f"{axis}={label}" for axis, label in labels.items())
        proper = re.sub(r"[^\w=,.+-]", "_", words, flags=re.ASCII)  # as the name of a file, anywhere
        return self.path / POINTS / f"{proper[:150]}-{short}.npz"

    def write(self, identity: Mapping[str, Any], outcome: xr.Dataset) -> None:
        """Keep the outcome of a point.

        Args:
            identity: What it is the outcome of; its `labels` name the file.
            outcome: Of the task.
        """
        arrays = {str(name): array for name, array in outcome.variables.items()}
        content = [
            {"name": name, "dims": [str(dim) for dim in array.dims], "coordinate": name in outcome.coords}
            for name, array in arrays.items()
        ]
        text = json.dumps({"format": FORMAT, "identity": identity, "content": content})
        members = {str(i): array.values for i, array in enumerate(arrays.values())}

        def save(path: Path) -> None:
            with path.open("wb") as file:
                np.savez(file, allow_pickle=False, record=np.array(text), **members)

        write_atomic(self.file(identity["labels"]), save)

    def read(self, identity: Mapping[str, Any]) -> xr.Dataset | None:
        """The outcome of a point; None if it is not there, or damaged, of which there is a warning.

        Raises:
            SweepFolderError: If there is an outcome of another task, or for other values of the same labels.
        """
        path = self.file(identity["labels"])
        if not path.is_file():
            return None
        try:
            record, outcome = _read(path, axes=identity["labels"])
        except MemoryError:
            raise
        except Exception as error:  # zipfile, NumPy and xarray raise all kinds
            warnings.warn(
                f"{path} is damaged, and is computed again ({type(error).__name__}: {error})",
                RuntimeWarning,
                stacklevel=3,
            )
            return None
        _require_same(
            path, {**record["identity"], "format": record["format"]}, {"format": FORMAT, **identity}
        )
        return outcome


def _read(path: Path, axes: Collection[str]) -> tuple[dict[str, Any], xr.Dataset]:
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        record = json.loads(str(file["record"][()]))
        for name, kind in (("format", int), ("identity", dict), ("content", list)):
            require(isinstance(record[name], kind), name, record[name], f"a JSON {kind.__name__}")
        if record["format"] != FORMAT:  # who knows what is in it
            return record, xr.Dataset()
        arrays = [file[str(i)] for i in range(len(record["content"]))]
    variables: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    names = [each["name"] for each in record["content"]]
    require(len(set(names)) == len(names), "content", names, "names that differ")
    for each, array in zip(record["content"], arrays, strict=True):
        for name in (each["name"], *each["dims"]):
            proper = isinstance(name, str) and name not in axes
            require(proper, "content", name, "words that are not names of axes")
        require(array.dtype.kind in KEPT, each["name"], f"an array of {array.dtype}", "numbers or words")
        variables[bool(each["coordinate"])][each["name"]] = (each["dims"], array)
    return record, xr.Dataset(variables[False], variables[True])


def _require_same(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, wanted in expected.items():
        if _text(found.get(name)) != _text(wanted):
            raise SweepFolderError(
                f"{path} is that of another sweep: its {name} is {_shown(found.get(name), wanted)}, but "
                f"expected {_shown(wanted, found.get(name))}; use another folder, or remove what is there"
            )


def _shown(value: Any, other: Any) -> str:
    """A value, or of a mapping only what is not in the other."""
    if isinstance(value, dict) and isinstance(other, dict):
        return repr({name: each for name, each in value.items() if _text(other.get(name)) != _text(each)})
    return repr(value)


def _text(value: Any) -> str:
    """To compare: as it is written, NaN equals itself, and 1 is neither True nor 1.0."""
    return json.dumps(value, sort_keys=True)
