"""A folder of results, every file of which is written completely or not at all.

Run folders and those of sweeps are stores that also say what they are the results of: the same run goes on in
its folder, and another one is refused.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.experiments.files import CheckpointError, jsonable, load_json, write_atomic, write_text_atomic

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    import xarray as xr
    from arviz import InferenceData
    from matplotlib.figure import Figure


class Store:
    """A folder, and ways to write files in it completely or not at all.

    Attributes:
        path: Path of the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of this name."""
        return (self.path / name).exists()

    def write(self, name: str, save: Callable[[Path], None]) -> None:
        """Write any file by a function that writes to the path it is given; see `files.write_atomic`."""
        write_atomic(self.path / name, save)

    def write_json(self, name: str, content: Any) -> None:
        """Write numbers and text; dataclasses, arrays and tensors become such, and NaN becomes null."""
        write_text_atomic(self.path / name, json.dumps(jsonable(content), indent=1, allow_nan=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read what `write_json` wrote.

        Raises:
            CheckpointError: If it is missing or damaged.
        """
        return load_json(self.path / name)

    def write_table(self, name: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write a CSV file of columns, all of one length; None and NaN become empty cells."""
        rows = [["" if cell != cell else cell for cell in row] for row in zip(*columns.values(), strict=True)]

        def save(file: Path) -> None:
            with file.open("w", newline="", encoding="utf-8") as lines:
                csv.writer(lines, lineterminator="\n").writerows([list(columns), *rows])

        self.write(name, save)

    def read_table(self, name: str) -> dict[str, list[str]]:
        """Columns of a CSV file, as text.

        Raises:
            CheckpointError: If it is missing or damaged.
        """
        try:
            with (self.path / name).open(newline="", encoding="utf-8") as lines:
                header, *rows = csv.reader(lines)
            return {title: [row[k] for row in rows] for k, title in enumerate(header)}
        except (OSError, UnicodeDecodeError, csv.Error, ValueError, IndexError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read as a table: {error}") from error

    def write_figure(self, name: str, figure: Figure, *, dpi: int = 120) -> None:
        """Write a figure as PNG and SVG; the same figure gives the same files."""
        import matplotlib

        # Without a date, and with names that do not depend on chance.
        with matplotlib.rc_context({"svg.hashsalt": "cpomdp-ppl"}):
            self.write(f"{name}.svg", lambda f: figure.savefig(f, format="svg", metadata={"Date": None}))
        self.write(f"{name}.png", lambda file: figure.savefig(file, format="png", dpi=dpi))

    def write_data(self, name: str, data: xr.Dataset | xr.DataTree | InferenceData) -> None:
        """Write a dataset, or ArviZ data with all their groups, as NetCDF."""

        def save(file: Path) -> None:
            data.to_netcdf(str(file), engine="h5netcdf")

        self.write(name, save)
