"""Episodes as a file: a plain `.npz` archive with one array for each tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, unquote

import numpy as np
import torch

from cpomdp_ppl.episodes import ARRAYS, Episodes
from cpomdp_ppl.errors import EpisodesFileError, require
from cpomdp_ppl.experiments.files import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "cpomdp_ppl.Episodes 1"
"""The entry `format` of every file, by which files of other programs are recognised."""


def save_episodes(episodes: Episodes, path: str | os.PathLike[str]) -> None:
    """Write a file, all of it or nothing."""
    arrays: dict[str, Any] = {"format": np.array(FORMAT), "discount": np.array(episodes.discount)}
    for name in ARRAYS:
        arrays |= _entries(name, getattr(episodes, name))

    def save(place: Path) -> None:
        with place.open("xb") as file:  # given a name alone, NumPy would add a suffix to it
            np.savez_compressed(file, **arrays)

    write_atomic(path, save)


def load_episodes(path: str | os.PathLike[str]) -> Episodes:
    """Read a file that `save_episodes` wrote; see `Episodes.load`."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
            _require_complete(file, len(arrays))
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:  # NumPy and zipfile raise a dozen kinds on a damaged file
        raise EpisodesFileError(f"{path}: expected an .npz file of episodes, but {error}") from error
    found = arrays.pop("format", None)
    if found is None or str(found) != FORMAT:
        raise EpisodesFileError(f"{path}: expected format '{FORMAT}', found '{found}'")
    try:
        discount = arrays.pop("discount", None)  # files from before there was any have none
        parts = _from_entries(arrays)
        return Episodes(**parts, discount=1.0 if discount is None else float(discount))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise EpisodesFileError(f"{path}: {error}") from error


def _require_complete(file: BinaryIO, number: int) -> None:
    """Raise unless an archive ends with the number of its entries.

    Entries have checksums, but their directory has none, and `zipfile` does not notice when a damaged one
    lists fewer.
    """
    file.seek(-22, os.SEEK_END)
    end = file.read()
    complete = end[:4] == b"PK\5\6" and int.from_bytes(end[10:12], "little") == number
    require(complete, "directory", f"{number} entries", "as many entries as the end of the file tells")


def _entries(name: str, value: Any) -> dict[str, Any]:
    """A tensor, or a tree of them, as arrays named `name/part/…`; a `/` in a part is written as in a URL."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        parts = (_entries(f"{name}/{quote(key, safe=' ')}", part) for key, part in value.items())
        return {key: array for part in parts for key, array in part.items()}
    return {name: value.detach().cpu().numpy()}


def _from_entries(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `_entries` for the fields of `Episodes`."""
    values: dict[str, Any] = {"observations": {}, "observed": {}}
    for name, array in arrays.items():
        *branches, leaf = map(unquote, name.split("/"))
        require((branches or [leaf])[0] in ARRAYS, "entry", name, f"one of {sorted(ARRAYS)}")
        target = values
        for branch in branches:
            target = target.setdefault(branch, {})
        target[leaf] = torch.from_numpy(array)
    return values
