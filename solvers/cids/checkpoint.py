"""Keeping what has been learned on disk: weights and plain numbers, never code."""

from __future__ import annotations

import inspect
import json
import os
import zipfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cpomdp_ppl import CPOMDP
from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.experiments.files import write_atomic, write_text_atomic
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from collections.abc import Mapping


class CheckpointError(ValueError):
    """A file or directory does not hold what it should."""


def save_tensors(path: Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain numbers."""
    write_atomic(path, lambda file: torch.save(dict(content), file))


def load_tensors(path: Path, device: torch.device) -> dict[str, Any]:
    """Read what `save_tensors` wrote. Anything but tensors and plain numbers is refused.

    Raises:
        CheckpointError: If the file is something else, or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not look at the checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch, pickle and zipfile raise all kinds
        raise CheckpointError(
            f"{path} holds something else than weights and numbers, or is damaged"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, but expected a dict")
    return content


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain numbers and words."""
    text = json.dumps(content, indent=1, allow_nan=True)
    write_text_atomic(path, text)


def load_json(path: Path) -> dict[str, Any]:
    """Read what `save_json` wrote.

    Raises:
        CheckpointError: If the file is something else, or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, but expected an object")
    return content


def plain(**content: Any) -> dict[str, Any]:
    """Numbers and words as a JSON file would have them: tuples become lists, and NumPy's numbers Python's."""
    result: dict[str, Any] = json.loads(json.dumps(content, default=described))
    return result


def described(part: Any) -> Any:
    """Anything in numbers and words that tell it from others of its kind, the same in every process."""
    if part is None or isinstance(part, bool | int | float | str):
        return part
    if isinstance(part, Tensor | np.ndarray | np.generic):
        return part.tolist()
    if isinstance(part, list | tuple):
        return [described(each) for each in part]
    if isinstance(part, dict):
        return {str(name): described(each) for name, each in part.items()}
    kind = getattr(part, "__qualname__", type(part).__qualname__)
    if is_dataclass(part):
        return {"": kind, **{f.name: described(getattr(part, f.name)) for f in fields(part)}}
    if inspect.isfunction(part):
        try:  # a schedule, perhaps
            return [kind, *[float(part(progress)) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)]]
        except Exception:  # nobody knows what it takes
            return kind
    return kind


def description(model: CPOMDP) -> dict[str, Any]:
    """What tells a model from others: its interface, and those constants that are numbers and words."""
    sites = signature(model)
    kinds = (bool, int, float, str, list, tuple, Tensor, np.ndarray, np.generic)
    classes = [kind for kind in type(model).__mro__ if issubclass(kind, CPOMDP) and kind is not CPOMDP]
    spaces = [*map(vars, reversed(classes)), vars(model)]  # what comes later overrides what comes before
    attributes = {name: value for space in spaces for name, value in space.items()}
    return {
        "model": type(model).__name__,
        "contexts": list(model.context_names),
        "actions": list(model.action_names),
        "horizon": model.horizon,
        "state": {name: list(leaf.shape) for name, leaf in leaves(sites.state)},
        "observations": {name: list(site.shape) for name, site in sites.observations.items()},
        "constants": {
            name: described(value)
            for name, value in sorted(attributes.items())
            if isinstance(value, kinds) and not name.startswith("_") and name != "training"
        },
        "tensors": {name: described(tensor.detach()) for name, tensor in model.state_dict().items()},
    }


def require_equal(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise unless settings from a file are those asked for, naming the first that is not.

    Raises:
        CheckpointError: Naming the setting.
    """
    for name in differing(found, expected):
        raise CheckpointError(
            f"{path} was made with {name} = {found.get(name)!r}, but expected {expected.get(name)!r}; "
            "use another directory, or the same settings"
        )


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Names of the settings in which two fits differ, in alphabetical order.

    Example:
        >>> differing({"seed": 1, "prior": [0.5, 0.5]}, {"seed": 2, "prior": (0.5, 0.5)})
        ['seed']
    """

    def text(settings: Mapping[str, Any], name: str) -> str:
        return json.dumps(plain(value=settings.get(name)), sort_keys=True)  # in which NaN is NaN

    return [name for name in sorted({*found, *expected}) if text(found, name) != text(expected, name)]


def as_directory(argument: str, directory: str | os.PathLike[str]) -> Path:
    """A path that is a directory, or may become one."""
    require(isinstance(directory, str | os.PathLike), argument, directory, "a path")
    path = Path(directory)
    try:
        free = path.is_dir() or not path.exists()
    except OSError:
        free = False
    require(free, argument, str(directory), "a directory, or a name for one")
    return path


def made_directory(argument: str, directory: str | os.PathLike[str]) -> Path:
    """A directory that is there, made if need be."""
    path = as_directory(argument, directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise invalid(argument, str(directory), f"a directory that can be made ({error.strerror})") from error
    return path
