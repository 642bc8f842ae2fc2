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

from cpomdp_ppl.diagnostics.style import COLOURS
from cpomdp_ppl.errors import require_model
from cpomdp_ppl.experiments.files import write_text_atomic
from cpomdp_ppl.experiments.run_folder import RunFolder, versions
from cpomdp_ppl.prior import one_prior
from cpomdp_ppl.report.algorithm1 import episode_table
from cpomdp_ppl.report.contents import configuration, convergence, diagnostics, headline, solved
from cpomdp_ppl.report.pictures import SOLUTION, pictures
from cpomdp_ppl.report.recording import record

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from cpomdp_ppl.actions import Box
    from cpomdp_ppl.evaluation import PolicyLike
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.report.recording import Recording

REPORT = "report.html"

MAX_CHARACTERS = 4_800_000
"""How many characters a page may have. Some take two bytes, and the page should stay below 5 MB.

If there is too much to show, episodes are left out first, then figures.
"""

FIGURE_CHARACTERS = 2_000_000
"""How many of them are reserved for figures, if there are any, however much room the episodes would take."""

MAX_RANGES = 3
"""How many axes of a box of actions have their ranges at the top of the page; of more, their number is."""

CAPTION_CHARACTERS = 10_000
"""How many of them are reserved for captions of figures."""


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
        folder: The run folder.
        model: The CPOMDP that the run was about.
        policy: Who acts in the episodes to step through.
        policy_name: What to call the policy on the page.
        output: Where to write the page; `report.html` in the folder if left out.
        likelihood: The filter whose beliefs are shown: a backend or its name; left out or
            `"auto"`, the `default_backend` for the model.
        num_episodes: How many episodes to play, contexts balanced; fewer are kept if the page gets too large.
        num_particles: How many particles to show, at most.
        prior: Prior over contexts, `[C]`; the model's if left out.
        seed: Seed of all random numbers; None takes fresh entropy.
        progress: Whether to show a progress bar.
        in_force: What settings came to that were left at their defaults, as far as the record of the run does
            not say so; after a fit, `Solution.settings`.

    Returns:
        Where the page is.

    Raises:
        RunFolderError: If the folder is not that of a run, or damaged, or cannot be written to.
        ValueError: On arguments that make no sense.

    Examples:
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
    data["solved"] = solved(opened)
    data["headline"] = headline(opened)
    data["convergence"] = convergence(opened, _known_return(model, prior))
    data["algorithm1"] = episode_table(opened)
    data["diagnostics"] = diagnostics(opened)
    data["configuration"] = configuration(opened, in_force or {})
    room = MAX_CHARACTERS - len(page(data))
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
        data["played_by"] = policy_name
        data["player"], taken = _fitted(recording, room - (FIGURE_CHARACTERS if opened.figures else 0))
        room -= taken
    # With convergence and episodes, the page already shows what the figure of a solution does.
    redundant = {SOLUTION} if data["convergence"] is not None and policy is not None else set()
    data["pictures"] = pictures(opened, room - CAPTION_CHARACTERS, redundant)
    text = page(data)
    path = opened.path / REPORT if output is None else Path(output)
    write_text_atomic(path, text)
    return path


def page(data: dict[str, Any]) -> str:
    """The page with data in it; entries that are None are left out.

    Names in a model, settings and files may hold anything. Data are JSON in a block that no script reads as
    code, without `<`, so that nothing in them can end it; the script shows them as text; and the page's
    content security policy lets no other script run, by its hash, and nothing be loaded.
    """
    folder = files("cpomdp_ppl.report")
    template, style, script = (
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("template.html", "report.css", "report.js")
    )
    script = f"\n{script}"  # as it stands between its tags
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    values = {
        "TITLE": html.escape(str(data["title"])),
        "STYLE": style,
        "SCRIPT_HASH": f"sha256-{digest}",
        "SCRIPT": script,
        "DATA": _json({name: value for name, value in data.items() if value is not None}),
    }
    # In one pass: what is put in is not searched for further places.
    return re.sub("@@([A-Z_]+)@@", lambda place: values[place[1]], template)


def _fitted(recording: Recording, room: int) -> tuple[dict[str, Any], int]:
    """As many of the recorded episodes as fit (one at least), and how many characters they take."""
    while True:
        data = recording.as_dict()
        taken = len(_json(data))
        if taken <= room or len(recording.episodes) == 1:
            return data, taken
        recording = recording.first(len(recording.episodes) // 2)


def _frame(folder: RunFolder, model: CPOMDP) -> dict[str, Any]:
    """The top and the bottom of the page."""
    described = (type(model).__doc__ or "").strip().split("\n\n")[0]
    record = folder.record
    unfinished = None if folder.finished else f"not finished: its “{record['command']}” was broken off"
    facts = {
        "command": record["command"],
        "contexts": str(model.num_contexts),
        "actions": str(model.num_actions) if model.box is None else _ranges(model.box),
        "horizon": f"{'at most ' if model.can_end else ''}{model.horizon}",
        **({} if model.discount == 1 else {"discount": f"{model.discount:g}"}),
        "seed": str(record.get("seed")),
        "started": record["started"].replace("T", " ").replace("+00:00", " UTC"),
    }
    return {
        "title": type(model).__name__,
        "lead": " ".join(described.split()),
        "facts": list(facts.items()),
        "unfinished": unfinished,
        "foot": f"Made by cpomdp-ppl {versions()['cpomdp-ppl']}.",
        "colours": list(COLOURS),
    }


def _ranges(box: Box) -> str:
    """What continuous actions may be, in a few words."""
    if box.dim > MAX_RANGES:
        return f"{box.dim} numbers"
    axes = zip(box.names, box.low, box.high, strict=True)
    return ", ".join(f"{name} {_signed(low)} to {_signed(high)}" for name, low, high in axes)


def _signed(number: float) -> str:
    return f"{number:g}".replace("-", "−", 1) if number < 0 else f"{number:g}"


def _known_return(model: CPOMDP, prior: Sequence[float] | Tensor | None) -> float | None:
    """The expected return of an agent that knows the context, if the model has it in closed form."""
    by_context = model.context_known_return()
    if by_context is None:
        return None
    p = one_prior(prior, model)
    return float((p.cpu() * by_context.detach().cpu().double()).sum())


def _json(data: Any) -> str:
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")
