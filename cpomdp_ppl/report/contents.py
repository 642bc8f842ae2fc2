"""What a run folder has to show, as plain data for the page; None for what it does not have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cpomdp_ppl.experiments.run_files import (
    CALIBRATION,
    COMPARISON,
    EVALUATION,
    GOOD_RHAT,
    HISTORY,
    RHAT,
    SOLUTION,
    SOLUTION_CONTENT,
)
from cpomdp_ppl.experiments.run_folder import RunFolderError
from cpomdp_ppl.inference.choice import backend_from_data
from cpomdp_ppl.report.rounding import significant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.experiments.run_folder import RunFolder

CURVES = {"return": "Return", "entropy": "H(C|Y), bits", "temperature": "Temperature τ"}
"""The columns of a history that are shown, with their labels."""

MAX_POINTS = 500
"""How many points a curve has at most; of longer histories, means of neighbours are shown."""

MAX_RHAT_ROWS = 6
"""How many rows the table of R-hat has at most, the worst first."""

RHAT_COLUMNS = {"mean": None, "sd": None, "ess_bulk": 0, "ess_tail": 0, "r_hat": 3}
"""The columns shown beside the name of a quantity, with their numbers of decimals if fixed."""


def headline(folder: RunFolder) -> dict[str, Any] | None:
    """The results of an evaluation, of a comparison, or of both."""
    found: dict[str, Any] = {"tables": []}
    if folder.has(EVALUATION):
        evaluation = folder.read_json(EVALUATION)
        try:
            found["numbers"] = _numbers(evaluation)
            found["tables"].append(_by_context(evaluation["returns_by_context"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFolderError(f"{folder.path / EVALUATION} is damaged: it is no evaluation") from error
    if folder.has(COMPARISON):
        found["tables"].append({"label": "Comparison of policies", **_table(folder, COMPARISON)})
    return found if found["tables"] else None


def solved(folder: RunFolder) -> dict[str, Any] | None:
    """What a fit says of itself: by which filter it was learned, and the verdict on its policy."""
    file = str(Path(SOLUTION, SOLUTION_CONTENT))
    if not folder.has(file):
        return None
    content = folder.read_json(file)
    try:
        learned_by = content.get("likelihood") or content["settings"].get("likelihood")
        found = {"likelihood": _label(learned_by), "sentence": None, "solved": None}
        if content.get("verdict") is not None:
            found |= {name: content["verdict"][name] for name in ("sentence", "solved")}
        proper = isinstance(found["sentence"], str | None) and isinstance(found["solved"], bool | None)
    except (KeyError, TypeError, AttributeError):
        proper = False
    if not proper:
        raise RunFolderError(f"{folder.path / file} is damaged: it is no solution")
    return found


def _label(likelihood: Any) -> str | None:
    """A backend in a few words, as a solution describes it; None if that does not tell."""
    try:
        return backend_from_data(likelihood).label
    except ValueError:  # of the user's own
        name = likelihood.get("") if isinstance(likelihood, dict) else likelihood
        return name if isinstance(name, str) else None


def convergence(folder: RunFolder, known_return: float | None) -> dict[str, Any] | None:
    """Return, entropy and temperature by iteration."""
    if not folder.has(HISTORY):
        return None
    columns = folder.read_table(HISTORY)
    values = {name: np.array([_number(cell) for cell in cells]) for name, cells in columns.items()}
    if "iteration" not in values or len(values["iteration"]) < 2:
        return None
    size = -(-len(values["iteration"]) // MAX_POINTS)
    series = [
        {
            "name": name,
            "label": label,
            "values": significant(_thinned(values[name], size)),
            "noisy": name != "temperature",
            "reference": known_return if name == "return" else None,
            "reference_label": None if known_return is None else f"context known: {known_return:.2f}",
        }
        for name, label in CURVES.items()
        if name in values and bool(np.isfinite(values[name]).any())
    ]
    if not series:
        return None
    iteration = significant(_thinned(values["iteration"], size), 6)
    return {"iteration": iteration, "batches_per_point": size, "series": series}


def diagnostics(folder: RunFolder) -> dict[str, Any] | None:
    """How well chains agree, and whether the filter is calibrated."""
    rhat = _rhat(folder) if folder.has(RHAT) else None
    calibration = _calibration(folder) if folder.has(CALIBRATION) else None
    return None if rhat is None and calibration is None else {"rhat": rhat, "calibration": calibration}


def configuration(folder: RunFolder, in_force: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """`run.json` as tables."""
    record = folder.record
    came_to = {**(in_force or {}), **_mapping(record.get("in_force"))}
    run = {name: record.get(name) for name in ("command", "model", "seed", "started", "commit", "finished")}
    parts = [
        ("Run", {name: value for name, value in run.items() if value is not None}),
        ("Model", record["arguments"]),
        ("Settings", _with_defaults(record["settings"], came_to)),
    ]
    for command, entry in record["added"].items():
        if isinstance(entry, dict) and isinstance(entry.get("settings"), dict):
            settings = _with_defaults(entry["settings"], _mapping(entry.get("in_force")))
            parts.append((f"Added by {command}", {**settings, "seed": entry.get("seed")}))
    parts.append(("Versions", record["versions"]))
    return [
        {"title": title, "rows": [[str(name), _shown(value)] for name, value in values.items()]}
        for title, values in parts
        if values
    ]


def _numbers(evaluation: Mapping[str, Any]) -> list[dict[str, str]]:
    """The numbers that matter most, with their standard errors."""
    returns, left = evaluation["returns"], evaluation["entropy"]
    numbers = [
        {
            "name": "Return",
            "value": _fixed(returns["mean"], 2),
            "more": f"± {_fixed(returns['standard_error'], 2)} (standard error), {_episodes(returns)}",
        },
        {
            "name": "H(C|Y), what is left to find out",
            "value": _fixed(left["mean"], 3),
            "more": f"± {_fixed(left['standard_error'], 3)} bits (standard error)",
        },
        {
            "name": "Context identified",
            "value": "–" if (share := evaluation["identified"]) is None else f"{100 * share:.1f} %",
            "more": "of episodes"
            if (error := evaluation.get("identified_error")) is None
            else f"± {100 * error:.1f} % (standard error) of episodes",
        },
    ]
    ended, when = evaluation.get("ended"), evaluation.get("end_time")
    if ended is not None:
        error = "–" if ended["standard_error"] is None else f"{100 * ended['standard_error']:.1f}"
        after = "" if when is None else f", after {_fixed(when['mean'], 1)} steps on average"
        more = f"± {error} % (standard error) of episodes{after}"
        numbers.append({"name": "Ended", "value": f"{100 * ended['mean']:.1f} %", "more": more})
    regret = evaluation.get("regret")
    if regret is not None:
        error = _fixed(regret["standard_error"], 2)
        against = evaluation.get("regret_against") or "an agent that is told the context"
        more = f"± {error} (standard error) behind {against}"
        numbers.append({"name": "Regret", "value": _fixed(regret["mean"], 2), "more": more})
    most = evaluation.get("informed_return")
    if most is not None:
        error = _fixed(returns["standard_error"], 2)
        more = (
            f"± {error} (standard error) behind {most:.2f}, the most that knowing all of the state can earn"
        )
        numbers.append({"name": "Regret, at most", "value": _fixed(most - returns["mean"], 2), "more": more})
    seconds = evaluation.get("seconds_per_decision")
    if seconds is not None:
        value = f"{1e3 * seconds:.2g} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.2g} µs"
        numbers.append({"name": "A decision takes", "value": value, "more": "of one episode, in batches"})
    return numbers


def _fixed(value: float | None, places: int) -> str:
    """A number with fixed decimals; a dash for None, such as the standard error of a single episode."""
    return "–" if value is None else f"{value:.{places}f}"


def _episodes(mean: Mapping[str, Any]) -> str:
    n = mean["num_episodes"]
    return f"{n:,} {'episode' if n == 1 else 'episodes'}"


def _by_context(means: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    rows = [
        [name, *(_rounded(mean[key]) for key in ("mean", "standard_error", "deviation", "num_episodes"))]
        for name, mean in means.items()
    ]
    columns = ["Context", "Return", "Standard error", "Standard deviation", "Episodes"]
    return {"label": "Return by context", "columns": columns, "rows": rows}


def _rounded(value: float | int | None) -> float | int | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _table(folder: RunFolder, name: str) -> dict[str, Any]:
    columns = folder.read_table(name)
    cells = [[_cell(cell) for cell in column] for column in columns.values()]
    return {"columns": list(columns), "rows": [list(row) for row in zip(*cells, strict=True)]}


def _rhat(folder: RunFolder) -> dict[str, Any] | None:
    """R-hat as a table, the worst rows first, and in a sentence."""
    table = _table(folder, RHAT)
    titles: list[str] = table["columns"]
    if "r_hat" not in titles:
        return None
    k = titles.index("r_hat")
    known: list[list[Any]] = [row for row in table["rows"] if isinstance(row[k], float | int)]
    if not known:
        return None
    known.sort(key=lambda row: -row[k])
    above = sum(row[k] > GOOD_RHAT for row in known)
    agree = f"all {len(known)} are" if not above else f"{len(known) - above} of {len(known)} are"
    sentence = f"R-hat is {known[0][k]:.3f} at most; {agree} at or below {GOOD_RHAT}, where chains agree."
    if len(known) > MAX_RHAT_ROWS:
        sentence += f" The {MAX_RHAT_ROWS} highest:"
    shown = [0, *(i for i, title in enumerate(titles) if i and title in RHAT_COLUMNS)]
    return {
        "columns": [titles[i] for i in shown],
        "rows": [[row[i] for i in shown] for row in known[:MAX_RHAT_ROWS]],
        "decimals": [RHAT_COLUMNS.get(titles[i]) for i in shown],
        "sentence": sentence,
    }


def _calibration(folder: RunFolder) -> dict[str, Any]:
    """The verdict on a calibration, and a row for each quantity that was tested."""
    found = folder.read_json(CALIBRATION)
    try:
        sentence = f"The filter “{found['likelihood']}” is {found['verdict']}."
        sentence += f" Brier score of contexts {_fixed(found['brier'], 4)}, "
        sentence += (
            f"expected {_fixed(found['expected_brier'], 4)}; calibration error {_fixed(found['ece'], 4)}."
        )
        rows = [
            [name, found["num_episodes"][name], p, found["hints"][name]]
            for name, p in found["p_values"].items()
        ]
        calibrated = bool(found["calibrated"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFolderError(f"{folder.path / CALIBRATION} is damaged: it is no calibration") from error
    return {
        "sentence": sentence,
        "calibrated": calibrated,
        "columns": ["Quantity", "Episodes", "p", "Found"],
        "rows": rows,
        "decimals": [None, None, 4, None],
    }


def _number(text: str) -> float:
    """A cell as a number; NaN if it is not one."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _cell(text: str) -> float | int | str | None:
    """A cell as a number if it looks like one, else as text; None if it is empty or not finite."""
    number = _number(text)
    if math.isfinite(number):
        return int(number) if text.strip().lstrip("+-").isdigit() else number
    return text if text.strip() and not math.isinf(number) and text.strip().lower() != "nan" else None


def _thinned(values: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """Means of `size` neighbours, without values that are not finite."""
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    known = [each[np.isfinite(each)] for each in groups]
    return np.array([each.mean() if len(each) else np.nan for each in known])


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _with_defaults(settings: Mapping[str, Any], in_force: Mapping[str, Any]) -> dict[str, Any]:
    """Settings; those that were left out are shown with what they came to."""
    return {
        name: f"{_shown(in_force[name])} (default)" if value is None and name in in_force else value
        for name, value in settings.items()
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, dict) and isinstance(value.get(""), str):  # an object, by its class and attributes
        parts = [f"{name}={_shown(part)}" for name, part in value.items() if name]
        return f"{value['']}({', '.join(parts)})"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
