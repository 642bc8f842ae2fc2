"""The report: one HTML file with everything in it, that asks nothing of the network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.diagnostics.plots import COLOURS
from cpomdp_ppl.errors import require_model
from cpomdp_ppl.experiments.run_folder import RunFolder, versions
from cpomdp_ppl.prior import one_prior
from cpomdp_ppl.report.algorithm1 import lived
from cpomdp_ppl.report.contents import configuration, convergence, diagnostics, headline
from cpomdp_ppl.report.pictures import SOLUTION, pictures
from cpomdp_ppl.report.recording import record

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from cpomdp_ppl.evaluation import PolicyLike
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.model import CPOMDP

REPORT = "report.html"

LARGEST = 4_800_000
"""How many characters a page may have, some of which take two bytes of the 5 MB that it should stay below.

Episodes, then figures, are left out to keep to it.
"""

FIGURES_SHARE = 2_000_000
"""How many of them figures may count on, however much room the episodes would take."""


def write_report(
    folder: str | os.PathLike[str],
    *,
    model: CPOMDP,
    policy: PolicyLike | None = None,
    policy_name: str | None = None,
    output: str | os.PathLike[str] | None = None,
    likelihood: str | Backend | None = None,
    num_episodes: int = 12,
    num_particles: int = 200,
    prior: Sequence[float] | Tensor | None = None,
    seed: int | None = 0,
    progress: bool = False,
    in_force: Mapping[str, Any] | None = None,
) -> Path:
    """Write a page about a run: results, episodes to step through, convergence, diagnostics, configuration.

    What the folder does not have is left out of the page; so are the episodes, without a policy. A run that
    was not finished gets a page that says so.

    Args:
        folder: Of the run.
        model: The CPOMDP that the run was about.
        policy: Who acts in the episodes to step through.
        policy_name: What to call it on the page.
        output: Where to write the page; `report.html` in the folder if left out.
        likelihood: The filter whose beliefs are shown: a backend or its name; left out, the
            `default_backend` for the model.
        num_episodes: How many episodes to play, contexts balanced; fewer are kept if the page gets too large.
        num_particles: How many particles to show, at most.
        prior: Over contexts, `[C]`; the model's if left out.
        seed: Of everything random; None takes fresh entropy.
        progress: Whether to show a progress bar.
        in_force: What settings of the run came to that were left at their defaults, as far as its record does
            not tell: `Solution.settings`, of a fit.

    Returns:
        Where the page is.

    Raises:
        RunFolderError: If the folder is not that of a run, or damaged, or cannot be written to.
        ValueError: On arguments that make no sense.

    Example:
        >>> import tempfile
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LineGrid
        >>> place = Path(tempfile.mkdtemp()) / "run"
        >>> RunFolder.create(place, "simulate", model="cpomdp_ppl.models:LineGrid", seed=0).finish()
        >>> page = write_report(place, model=LineGrid(), policy=RandomPolicy(3), num_episodes=2)
        >>> page.name
        'report.html'
    """
    require_model(model)
    opened = RunFolder.open(folder, unfinished=True)
    data = _frame(opened, model)
    data["headline"] = headline(opened)
    data["convergence"] = convergence(opened, _known_return(model, prior))
    data["lived"] = lived(opened)
    data["diagnostics"] = diagnostics(opened)
    data["configuration"] = configuration(opened, in_force or {})
    room = LARGEST - len(page(data))
    if policy is not None:
        recording = record(
            model,
            policy,
            num_episodes=num_episodes,
            likelihood=likelihood,
            num_particles=num_particles,
            prior=prior,
            seed=seed,
            progress=progress,
        )
        data["player"] = recording.as_dict()
        data["played_by"] = policy_name
        share = FIGURES_SHARE if opened.figures else 0
        while len(_json(data["player"])) > room - share and len(recording.episodes) > 1:
            recording = recording.first(len(recording.episodes) // 2)
            data["player"] = recording.as_dict()
        room -= len(_json(data["player"]))
    # What a solution's figure shows is on the page already, where there are both.
    shown = data["convergence"] is not None and policy is not None
    data["pictures"] = pictures(
        opened, room - 10_000, {SOLUTION} if shown else ()
    )  # the rest is for captions
    text = page(data)
    path = opened.path / REPORT if output is None else Path(output)
    opened.write(str(path.absolute()), lambda file: _write(file, text))
    return path


def page(data: dict[str, Any]) -> str:
    """The template with data in it; entries that are None are left out.

    Names in a model, settings and files may hold anything. Data are JSON in a block that no script reads as
    code, without `<`, so that nothing in them can end it; the page puts them in as text; and its policy for
    content lets no script run but its own, whose hash it names, and nothing be loaded.
    """
    template = files("cpomdp_ppl.report").joinpath("template.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", template, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    values = {
        "TITLE": html.escape(str(data["title"])),
        "SCRIPT_HASH": f"sha256-{digest}",
        "DATA": _json({name: value for name, value in data.items() if value is not None}),
    }
    # In one pass: what is put in is not looked through for further places.
    return re.sub("@@([A-Z_]+)@@", lambda place: values[place[1]], template)


def _frame(folder: RunFolder, model: CPOMDP) -> dict[str, Any]:
    """What is at the top and at the bottom."""
    described = (type(model).__doc__ or "").strip().split("\n\n")[0]
    record = folder.record
    finished = None if folder.finished else f"not finished: its “{record['command']}” was broken off"
    facts = {
        "command": record["command"],
        "contexts": str(model.num_contexts),
        "actions": str(model.num_actions),
        "horizon": str(model.horizon),
        "seed": str(record.get("seed")),
        "started": record["started"].replace("T", " ").replace("+00:00", " UTC"),
    }
    return {
        "title": type(model).__name__,
        "lead": " ".join(described.split()),
        "facts": list(facts.items()),
        "unfinished": finished,
        "foot": f"Made by cpomdp-ppl {versions()['cpomdp-ppl']}.",
        "colours": list(COLOURS),
    }


def _known_return(model: CPOMDP, prior: Sequence[float] | Tensor | None) -> float | None:
    """What an agent that is told the context earns, if the model knows."""
    by_context = model.context_known_return()
    if by_context is None:
        return None
    p = one_prior(prior, model)
    return float((p.cpu() * by_context.detach().cpu().double()).sum())


def _json(data: Any) -> str:
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
