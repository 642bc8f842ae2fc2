"""Commands, policies and solvers by name.

This package imports neither solvers nor baselines: the script, `cpomdp_command`, adds their commands. Other
packages add theirs by entry points.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Generic, TypeVar

from cpomdp_ppl.cli.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")


class Registry(Generic[T]):
    """Things by name: those that were added, and those of entry points, which cannot replace them.

    Args:
        kind: What each of them is, for messages.
        expected: The type that each must have.
        group: The group of entry points by which other packages add theirs.
    """

    def __init__(self, kind: str, expected: type[T], group: str) -> None:
        self.kind = kind
        self.expected = expected
        self.group = group
        self._added: dict[str, T] = {}

    def add(self, things: Mapping[str, T]) -> None:
        """Add things by name."""
        self._added.update(things)

    def names(self) -> list[str]:
        """All names, those that were added first."""
        return list(dict.fromkeys([*self._added, *self._entry_points()]))

    def find(self, name: str) -> T:
        """What has this name; if it belongs to another package, that is imported.

        Raises:
            CommandError: If nothing has this name, or its package is broken or is not installed.
        """
        if name in self._added:
            return self._added[name]
        found = self._entry_points().get(name)
        if found is None:
            raise CommandError(f"there is no {self.kind} '{name}'; there are {', '.join(self.names())}")
        try:
            thing = found.load()
        except (ImportError, AttributeError) as error:
            raise CommandError(
                f"the {self.kind} '{name}' is not available: {found.module} cannot be imported ({error})"
            ) from error
        if not isinstance(thing, self.expected):
            expected = self.expected.__name__
            raise CommandError(
                f"the {self.kind} '{name}' is a {type(thing).__name__}, but expected a {expected}"
            )
        return thing

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {each.name: each for each in entry_points(group=self.group)}
