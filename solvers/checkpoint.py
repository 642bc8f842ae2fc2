"""Keeping what has been learned on disk: weights and plain numbers, never code."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.errors import require
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cpomdp_ppl import CPOMDP


class CheckpointError(ValueError):
    """A file or directory does not hold what it should."""


def write(path: Path, save: Callable[[Path], None]) -> None:
    """Write a file at once or not at all: whoever reads it meanwhile, or after a crash, finds a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        save(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def save_tensors(path: Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain numbers."""
    write(path, lambda file: torch.save(dict(content), file))


def load_tensors(path: Path, device: torch.device) -> dict[str, Any]:
    """Read what `save_tensors` wrote. Anything but tensors and plain numbers is refused.

    Raises:
        CheckpointError: If the file is something else, or damaged.
    """
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch, pickle and zipfile raise all kinds
        raise CheckpointError(f"{path} cannot be read as weights: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, but expected a dict")
    return content


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain numbers and words."""
    text = json.dumps(content, indent=1, allow_nan=True)
    write(path, lambda file: _write_text(file, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


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


def description(model: CPOMDP) -> dict[str, Any]:
    """What tells a model from others, as plain numbers and words: its interface and its constants."""
    sites = signature(model)
    constants = {
        name: value
        for name, value in sorted(vars(model).items())
        if isinstance(value, bool | int | float | str) and not name.startswith("_") and name != "training"
    }
    with torch.no_grad():
        tensors = {name: tensor.double().flatten().tolist() for name, tensor in model.state_dict().items()}
    return {
        "model": type(model).__name__,
        "contexts": list(model.context_names),
        "actions": list(model.action_names),
        "horizon": model.horizon,
        "state": {name: list(leaf.shape) for name, leaf in leaves(sites.state)},
        "observations": {name: list(site.shape) for name, site in sites.observations.items()},
        "constants": constants,
        "tensors": tensors,
    }


def require_equal(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise unless settings from a file are those asked for, naming the first that is not.

    Raises:
        CheckpointError: Naming the setting.
    """
    expected = json.loads(json.dumps(expected))  # tuples become lists, as in the file
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{path} was made with {name} = {found.get(name)!r}, but expected {expected.get(name)!r}; "
                "use another directory, or the same settings"
            )


def as_directory(argument: str, directory: str | os.PathLike[str]) -> Path:
    """A path that is a directory, or may become one."""
    require(isinstance(directory, str | os.PathLike), argument, directory, "a path")
    path = Path(directory)
    require(path.is_dir() or not path.exists(), argument, str(directory), "a directory, or a name for one")
    return path
