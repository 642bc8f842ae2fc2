"""The folder that a command writes its results to."""

from __future__ import annotations

import importlib
import shlex
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.command import Stopped
from cpomdp_ppl.cli.options import note
from cpomdp_ppl.experiments.files import DiskFullError, is_disk_full
from cpomdp_ppl.experiments.run_folder import FIGURES, RunFolder, RunFolderError, next_folder

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from matplotlib.figure import Figure

    from cpomdp_ppl.cli.model import ModelSpec


@dataclass
class Results:
    """A run folder, and what a command does there."""

    folder: RunFolder
    command: str
    settings: Mapping[str, Any]
    seed: int  # seed of all random numbers: as it was given, or noted in the folder, or fresh
    options: Namespace
    # files that the command writes anew every time; none if it goes on where it was stopped
    outputs: Sequence[str] = ()
    beside: bool = False  # whether they are added to the results of another command
    replaced: bool = False  # whether former results have been removed, so that all that is there is new

    @staticmethod
    def at(
        options: Namespace,
        command: str,
        spec: ModelSpec,
        settings: Mapping[str, Any],
        outputs: Sequence[str] = (),
        seed: int | None = None,
        **further: Any,
    ) -> Results:
        """Results in a folder for this command alone: that of `--run`, or the next that is free."""
        place = next_folder(spec.spec, command) if options.run is None else options.run
        folder = RunFolder.create(
            place,
            command,
            model=spec.spec,
            arguments=spec.words,
            settings=settings,
            seed=options.seed if seed is None else seed,
            source=spec.source(),
            **further,
        )
        folder.require_writable()
        return Results(folder, command, settings, folder.seed, options, outputs)

    def replace(self) -> RunFolder:
        """Remove what the command wrote here before: results of two runs must not lie side by side.

        To be called when the new results are at hand, so that a run that fails leaves the former ones.

        Returns:
            The folder, to write to.
        """
        self.replaced = True
        if self.beside:
            self.folder.withdraw(self.command)
        self.folder.remove(self.outputs)
        return self.folder

    def finish(self, **in_force: Any) -> None:
        """Note that the results are complete, and what settings came to that were left out."""
        if self.beside:
            self.folder.add(self.command, settings=self.settings, seed=self.seed, in_force=in_force)
        else:
            self.folder.finish(in_force)

    def draw(self, figures: Mapping[str, Callable[[], Figure]]) -> None:
        """Draw figures and write them, unless matplotlib is not installed: results do not depend on it."""
        if not is_installed("matplotlib"):
            note(self.options, "no figures: they need cpomdp-ppl[plot]")
            return
        for name, draw in figures.items():
            self.folder.write_figure(name, draw())

    def again(self, *program: str, folder: str = "--run") -> str:
        """The command line that goes on with this, or begins it again."""
        words = [*(program or ("cpomdp",)), self.command, *self.options.command_line]
        if self.options.run is None and not self.beside:
            words += [folder, str(self.folder.path)]
        return shlex.join(words)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block where Ctrl-C leads to a sentence on what was kept, and an error leaves no empty folder."""
        try:
            yield
        except Stopped:
            raise
        except KeyboardInterrupt:
            raise Stopped(self._after_interruption()) from None
        except Exception as error:
            self.folder.discard()
            if is_disk_full(error) and not isinstance(error, RunFolderError | DiskFullError):
                raise DiskFullError(self.folder.path) from error
            raise

    def _after_interruption(self) -> str:
        if not self.outputs:
            there = ", ".join(self.folder.contents) or "nothing yet"
            return f"stopped; {self.folder.path} has {there}; to go on: {self.again()}"
        there = ", ".join(name for name in self.outputs if self.folder.has(name)) if self.replaced else ""
        what = f"stopped; {self.folder.path} has {there}" if there else "stopped, before anything was written"
        return f"{what}; to begin again: {self.again()}"


def figure_files(names: Sequence[str]) -> tuple[str, ...]:
    """The files of figures, in a run folder.

    Examples:
        >>> figure_files(["curve"])
        ('figures/curve.svg', 'figures/curve.png')
    """
    return tuple(f"{FIGURES}/{name}.{kind}" for name in names for kind in ("svg", "png"))


def is_installed(module: str) -> bool:
    """Whether a module can be imported; one that is there but broken cannot."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
