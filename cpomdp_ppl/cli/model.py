"""Models by name: `module:Class` or `file.py:Class`, with arguments of the constructor."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.command import CommandError
from cpomdp_ppl.experiments.fingerprint import file_hash
from cpomdp_ppl.model import CPOMDP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import CodeType, ModuleType


@dataclass(frozen=True)
class ModelSpec:
    """Names a model, and the arguments of its constructor.

    Attributes:
        spec: `module:Class`, or `file.py:Class`.
        words: Arguments of the constructor by name, as they were written: JSON would have lists for tuples,
            text for numbers that are keys, and nothing for infinity.

    Examples:
        >>> spec = ModelSpec.of(["cpomdp_ppl.models:LightDark", "dark_variance=16"])
        >>> spec.build().dark_variance
        16
    """

    spec: str
    words: Mapping[str, str]

    @staticmethod
    def of(words: Sequence[str]) -> ModelSpec:
        """The model that words of a command line name: its place, and `key=value` as often as needed.

        Raises:
            CommandError: If they have another form.
        """
        spec, *rest = words
        place, colon, name = spec.rpartition(":")
        if not colon or not place or not name.isidentifier():
            raise CommandError(f"model: expected module:Class or file.py:Class, got {spec}")
        return ModelSpec(spec, as_words(rest))

    @property
    def place(self) -> str:
        """The file or module of the model."""
        return self.spec.rpartition(":")[0]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructor, by name."""
        return {name: as_value(text) for name, text in self.words.items()}

    def source(self) -> dict[str, str] | None:
        """The `path` of the model's code, and its `sha256`; None if it has no file."""
        try:
            path = Path(self.place if is_path(self.place) else inspect.getfile(self._class())).resolve()
            return {"path": str(path), "sha256": file_hash(path)}
        except (OSError, TypeError):  # perhaps a class that was typed in
            return None

    def build(self, *, check: bool = True) -> CPOMDP:
        """Make the model, and look for faults in its programs unless told not to.

        Raises:
            CommandError: If it cannot be found, is not a CPOMDP, or does not take the arguments.
            ModelError: If its programs have faults.
        """
        kind = self._class()
        self._require_arguments(kind)
        try:
            model = kind(**self.arguments)
        except (Exception, SystemExit) as error:  # the user's program may raise anything
            raise CommandError(
                f"{self.spec} cannot be made: {type(error).__name__}: {error} (--traceback says where)"
            ) from error
        if check:
            model.check()
        return model

    def _class(self) -> type[CPOMDP]:
        place, name = self.place, self.spec.rpartition(":")[2]
        module = import_code(place)
        found = getattr(module, name, None)
        there = [
            each for each, value in vars(module).items() if _is_model(value) and not each.startswith("_")
        ]
        if found is None:
            known = f"it has {', '.join(there)}" if there else "it has no CPOMDP at all"
            raise CommandError(f"{place} has no class '{name}'; {known}")
        if not _is_model(found):
            what = f"the class {name}" if isinstance(found, type) else f"a {type(found).__name__}"
            raise CommandError(f"{self.spec} is {what}, but expected a subclass of cpomdp_ppl.CPOMDP")
        result: type[CPOMDP] = found
        return result

    def _require_arguments(self, kind: type[CPOMDP]) -> None:
        parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        if kind.__init__ is CPOMDP.__init__:
            parameters = []
        taken = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        for name in self.words:
            if name not in taken:
                known = f"it takes {', '.join(taken)}" if taken else "it takes none"
                raise CommandError(f"{kind.__name__} takes no argument '{name}'; {known}")
        for name, parameter in taken.items():
            if parameter.default is parameter.empty and name not in self.words:
                raise CommandError(
                    f"{kind.__name__} needs the argument '{name}': add {name}=… after the model"
                )


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, CPOMDP) and value is not CPOMDP


def as_words(words: Sequence[str]) -> dict[str, str]:
    """`key=value` words by key, values as they were written.

    Raises:
        CommandError: If a word has another form.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise CommandError(f"arguments: expected key=value after the model, got {word}")
        if name in found:
            raise CommandError(f"arguments: expected each once, got {name} twice")
        found[name] = text
    return found


def as_value(text: str) -> Any:
    """The value of a Python literal, or else the text itself. No code is run.

    Examples:
        >>> [as_value(text) for text in ("(1, 2.5)", "None", "north", "__import__('os').getcwd()", "")]
        [(1, 2.5), None, 'north', "__import__('os').getcwd()", '']
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def is_path(place: str) -> bool:
    """Whether this names a file rather than a module."""
    return place.endswith(".py") or "/" in place or "\\" in place


def import_code(place: str) -> ModuleType:
    """Run a file, which may import what lies beside it, or import a module, also of the current directory."""
    path = Path(place)
    beside = str(path.resolve().parent if is_path(place) else Path.cwd())
    sys.path.insert(0, beside)  # an installed script does not have it there, as `python -m` does
    try:
        return _run_file(path) if is_path(place) else importlib.import_module(place)
    except CommandError:
        raise
    except (Exception, SystemExit) as error:  # anything may be in a file
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{place}.".startswith(f"{missing}."):
            message = f"there is no module '{place}'; for a file, say path/to/file.py:Class"
            raise CommandError(message) from error
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CommandError(f"{place} cannot be imported: {what} (--traceback says where)") from error
    finally:
        if beside in sys.path:
            sys.path.remove(beside)


class _FromSource(SourceFileLoader):
    """Compiles what the file says now: kept bytecode counts as fresh if a file changes within a second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _run_file(path: Path) -> ModuleType:
    """Run a file as a module."""
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    if path.suffix != ".py":
        raise CommandError(f"{path} is no Python file")
    name = f"cpomdp_file_{path.stem}"
    loader = _FromSource(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
