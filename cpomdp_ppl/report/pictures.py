"""Figures of a run on the page: each in its section, with a caption that says what it shows."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.experiments.run_files import ALGORITHM1
from cpomdp_ppl.experiments.run_folder import FIGURES

if TYPE_CHECKING:
    from collections.abc import Collection

    from cpomdp_ppl.experiments.run_folder import RunFolder

SOLUTION = "solution"
"""The figure of a fit: convergence, and a few episodes."""

OTHERS = "others"
"""The section of figures that are not known here."""

KNOWN = {
    "contexts": (
        "diagnostics",
        "What is believed of the context as episodes go on: means over runs of the filter, and bands from "
        "the lowest run to the highest. The thick line is the true context.",
    ),
    "states": (
        "diagnostics",
        "The states of an episode in hindsight: median, 50 % and 90 % intervals, and the truth in black.",
    ),
    "filter": (
        "diagnostics",
        "How the filter did: effective particles and evidence; bands go from its lowest run to its highest.",
    ),
    "calibration": (
        "diagnostics",
        "How often contexts were true, by how likely they were held; and the rank of the truth among draws "
        "from the belief, which is uniform if the filter is right.",
    ),
    ALGORITHM1: (
        "algorithm1",
        "On the left, the mean over runs, with a band of two standard errors either side if there are "
        "several and all played to the end; on the right, single runs (thin) and their mean (thick).",
    ),
    SOLUTION: (
        "convergence",
        "Above, every batch by iteration; below, episodes of the policy in each context, and how likely it "
        "held the true one.",
    ),
}
"""The section and the caption of each figure, by its name."""


def pictures(folder: RunFolder, room: int, without: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Figures by section: those that are shown, and the files of those for which there is no room."""
    found: dict[str, dict[str, Any]] = {}
    for name in folder.figures:
        if name in without:
            continue
        place, note = KNOWN.get(name, (OTHERS, None))
        section = found.setdefault(place, {"shown": [], "left_out": []})
        files = [folder.path / FIGURES / f"{name}.{kind}" for kind in ("svg", "png")]
        smallest = min((file for file in files if file.is_file()), key=lambda file: file.stat().st_size)
        kind = "svg+xml" if smallest.suffix == ".svg" else "png"
        # As an image, never as markup, so that nothing in the file can run.
        encoded = base64.b64encode(smallest.read_bytes()).decode("ascii")
        if len(encoded) > room:
            section["left_out"].append(f"{FIGURES}/{smallest.name}")
            continue
        room -= len(encoded)
        section["shown"].append({"name": name, "note": note, "source": f"data:image/{kind};base64,{encoded}"})
    return found
