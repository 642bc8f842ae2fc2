"""Algorithm 1 on the page: what the same unknown context brought, episode after episode."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cpomdp_ppl.evaluation import SAME_POLICY
from cpomdp_ppl.experiments.run_files import ALGORITHM1
from cpomdp_ppl.experiments.run_folder import RunFolderError
from cpomdp_ppl.report.rounding import significant

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cpomdp_ppl.experiments.run_folder import RunFolder

MAX_EPISODES = 20
"""How many rows the table has at most; of more episodes, so many are shown, at equal distances."""

COLUMNS = {
    "Episode": None,
    "Runs": None,
    "Return": 2,
    "Standard error": 2,
    "Regret": 2,
    "H(C|history), bits": 3,
    "P(true context)": 3,
}
"""Columns of the table, with their numbers of decimals."""


def episode_table(folder: RunFolder) -> dict[str, Any] | None:
    """A row for each episode: means over the runs that played it; beliefs are means over all runs."""
    file = f"{ALGORITHM1}.csv"
    if not folder.has(file):
        return None
    columns = folder.read_table(file)
    try:
        episode = _numbers(columns["episode"]).astype(int)
        played = np.array([cell == "True" for cell in columns["played"]])
        returns, nats = _numbers(columns["return"]), _numbers(columns["entropy_nats"])
        true = columns["true_context"]
        believed = _numbers([columns[f"P({name})"][i] if name else "" for i, name in enumerate(true)])
        regret = _numbers(columns["regret"]) if "regret" in columns else np.full(len(episode), np.nan)
        errors = _numbers(columns.get("context_known_standard_error", []))
    except (KeyError, ValueError) as error:
        raise RunFolderError(f"{folder.path / file} is damaged: it is no record of Algorithm 1") from error
    K = int(episode.max(initial=0))
    if not K:
        return None
    rows = []
    for k in np.unique(np.linspace(1, K, min(K, MAX_EPISODES)).round().astype(int)):
        all_runs = episode == k
        playing = all_runs & played
        n = int(playing.sum())
        measured = [
            _mean(returns[playing]),
            returns[playing].std(ddof=1) / n**0.5 if n > 1 else np.nan,
            _mean(regret[playing]),
            _mean(nats[all_runs]) / math.log(2),
            _mean(believed[all_runs]),
        ]
        rows.append([int(k), n, *significant(np.array(measured), 6)])
    # No column for what is nowhere known, such as regret if nobody could be told the context.
    known = [i for i in range(len(COLUMNS)) if any(row[i] is not None for row in rows)]
    titles = list(COLUMNS)
    sentence = _sentence(K, rows)
    if (errors > 0).any():
        sentence = f"Regret is against {SAME_POLICY}. {sentence}"
    return {
        "sentence": sentence,
        "label": "Algorithm 1 by episode",
        "columns": [titles[i] for i in known],
        "decimals": [COLUMNS[titles[i]] for i in known],
        "rows": [[row[i] for i in known] for row in rows],
    }


def _sentence(K: int, rows: list[list[Any]]) -> str:
    bits, believed = rows[-1][-2:]
    sentence = f"After {K:,} {'episode' if K == 1 else 'episodes'}, {bits:.3f} bits are open on average"
    sentence += "." if believed is None else f", and the true context is held {_percent(believed)} likely."
    return sentence if len(rows) == K else f"{sentence} {len(rows)} of the episodes:"


def _numbers(cells: list[str]) -> NDArray[np.float64]:
    """A column as numbers; empty cells are NaN."""
    return np.array([float(cell) if cell else math.nan for cell in cells])


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _percent(p: float) -> str:
    """A probability in per cent, which is 100 % only if nothing is missing."""
    return "more than 99.9 %" if 0.9995 <= p < 1 else f"{100 * p:.1f} %"
