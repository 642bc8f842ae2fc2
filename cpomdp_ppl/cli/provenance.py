"""The model that the record of a run names, whose code is run only if it is the code that was run before.

A run folder may come from anywhere, and so may what lies around it. Its record is data: because of a record
alone, code is run only if it is installed, or if it is where the record says that it was, and unchanged.
Whatever a user names with `--model` is run.
"""

from __future__ import annotations

import importlib.util
import math
import shlex
import site
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from cpomdp_ppl.cli.command import OURS, CommandError
from cpomdp_ppl.cli.model import ModelSpec, as_words, is_path
from cpomdp_ppl.cli.options import warn
from cpomdp_ppl.experiments.fingerprint import file_hash
from cpomdp_ppl.experiments.run_folder import RunFolderError

if TYPE_CHECKING:
    from argparse import Namespace

    from cpomdp_ppl.experiments.run_folder import RunFolder


def spec_of(folder: RunFolder, options: Namespace) -> ModelSpec:
    """The model of a run; or that of `--model`, with the run's arguments unless `--argument` has others.

    Raises:
        RunFolderError: If the code that the record names may not be run, or is not there.
    """
    given = as_words(options.other_arguments)
    if options.other is None:
        if given:
            raise CommandError("--argument goes with --model; without, a run has the arguments it had")
        return _trusted(folder, ModelSpec(ModelSpec.of([folder.record["model"]]).spec, words_of(folder)))
    spec = ModelSpec(ModelSpec.of([options.other]).spec, given or words_of(folder))
    if _has_changed(spec, folder):
        warn(f"{spec.place} is not the code that {folder.path} was made with")
    return spec


def words_of(folder: RunFolder) -> dict[str, str]:
    """Arguments of the constructor as they were written.

    Raises:
        RunFolderError: If the record does not say what they were.
    """
    found = {}
    for name, value in folder.record["arguments"].items():
        is_number = isinstance(value, bool | int | float) and math.isfinite(value)
        if not isinstance(value, str) and not is_number:
            raise RunFolderError(
                f"{folder.path} does not say what the argument {name} was, only that JSON has {value!r} for "
                f"it: say --model {shlex.quote(folder.record['model'])} --argument {name}=…"
            )
        found[name] = value if isinstance(value, str) else repr(value)
    return found


def _trusted(folder: RunFolder, spec: ModelSpec) -> ModelSpec:
    """The model if its code may be run; a file by its full path, whatever the current directory."""
    say = f"if you trust it, say which it is with --model {shlex.quote(spec.spec)}"
    recorded = _source(folder)
    path = None if recorded is None else Path(recorded["path"])
    if is_path(spec.place):
        places = [Path(spec.place), *([] if path is None else [path])]
    else:
        places = _places(spec.place)
    home = folder.path.resolve()
    if any(place.resolve().is_relative_to(home) for place in places):
        raise RunFolderError(
            f"{folder.path} has its model in itself, {spec.spec}, and no code is run from there: {say}"
        )
    if not is_path(spec.place) and all(map(_is_installed, places)):
        if path is not None and _has_changed(spec, folder):
            warn(f"the code of {spec.spec} has changed since {folder.path} was made")
        return spec
    renamed = is_path(spec.place) and path is not None and path.name != Path(spec.place).name
    if recorded is None or path is None or not path.is_absolute() or renamed:
        raise RunFolderError(f"{folder.path} does not say what the code of {spec.spec} was: {say}")
    if not path.is_file():
        raise RunFolderError(f"there is no file {path} any more: say where it is now with --model")
    if file_hash(path) != recorded["sha256"]:
        raise RunFolderError(f"{path} has changed since {folder.path} was made: {say}")
    if is_path(spec.place):
        return ModelSpec(f"{path}:{spec.spec.rpartition(':')[2]}", spec.words)
    if not any(path.is_relative_to(place.resolve()) for place in places):
        raise RunFolderError(f"{spec.spec} is not at {path}, where it was, but at {places[0]}: {say}")
    return spec


def _source(folder: RunFolder) -> dict[str, str] | None:
    found = folder.record.get("source")
    if not isinstance(found, dict):
        return None
    source = {name: value for name in ("path", "sha256") if isinstance(value := found.get(name), str)}
    return source if len(source) == 2 else None


def _has_changed(spec: ModelSpec, folder: RunFolder) -> bool:
    recorded, now = _source(folder), spec.source()
    return recorded is not None and now is not None and recorded["sha256"] != now["sha256"]


def _places(module: str) -> list[Path]:
    """Where the outermost package of a module is, found without running any of it."""
    top = module.partition(".")[0]
    here = str(Path.cwd())
    sys.path.insert(0, here)  # as when it is imported
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.remove(here)
    if found is None:
        raise CommandError(f"there is no module '{module}'; for a file, say path/to/file.py:Class")
    if found.submodule_search_locations is not None:
        return [Path(each) for each in found.submodule_search_locations]
    return [Path(found.origin)] if found.has_location and found.origin else []


def _is_installed(place: Path) -> bool:
    """Whether this is one of our packages, or in a place where packages are installed."""
    ours = Path(__file__).resolve().parents[2]
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    roots = [Path(sysconfig.get_path(kind)).resolve() for kind in kinds]
    roots += [Path(site.getusersitepackages()).resolve(), *(ours / package for package in OURS)]
    return any(place.resolve().is_relative_to(root) for root in roots)
