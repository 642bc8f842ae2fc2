"""Everybody on the same episodes: rules, planners at equal budgets, learners, C-IDS.

    python benchmarks/baselines.py                                     # LightDark, few episodes: minutes
    python benchmarks/baselines.py --full                              # all rows, both models: hours
    python benchmarks/baselines.py --full --model LineGrid --jobs 2
    python benchmarks/baselines.py --full --only "POUCT" "C-IDS"       # rows whose names begin so
    python benchmarks/baselines.py --full --table                      # of what has been measured

With `--full`, a row that has been measured is kept in runs/baselines, and is not measured again: after an
interruption it goes on from there. Needs the extras `pomcp`, `parallel` and `plot`, and `rl` for recurrent
PPO.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

# This file has the name of the package that it measures, and would be found first.
if (HERE := str(Path(__file__).resolve().parent)) in sys.path:
    sys.path.remove(HERE)

import matplotlib.pyplot as plt
import torch
from joblib import Parallel, delayed

from baselines.pft import PFT
from baselines.pomcp import POMCP, POUCT
from baselines.qmdp import QMDP
from baselines.simple import (
    Always,
    ApproachObserveCommit,
    ContextKnown,
    MostLikelyContext,
    ThompsonSampling,
)
from cpomdp_ppl import CPOMDP, RandomPolicy, evaluate, models
from cpomdp_ppl.evaluation import Comparison, Evaluation

if TYPE_CHECKING:
    from collections.abc import Callable

RUNS = Path("runs/baselines")
PLANNED, LEARNED = 500, 4000  # episodes
SHORT = {  # rows of the short table, and their episodes: as many as take a minute at most
    "told the context": 2000,
    "random": 2000,
    "one way": 2000,
    "likeliest context": 2000,
    "Thompson sampling": 2000,
    "QMDP, τ = 3": 500,
    "POMCP, raw, 500": 16,
    "POMCP, 10 bins, 500": 16,
    "POUCT, commitment, 500": 16,
    "PFT-DPW, 500": 60,
    "IPFT, τ = 1, 500": 60,
    "RDPG-RNN, 10,000 episodes": 2000,
    "C-IDS": 2000,
}
TUNING = 1  # the seed of episodes that rules are tuned on


@dataclass(frozen=True)
class Told:
    """What the rules must be told about a model, by action: what to do in each context, and how to look."""

    known: tuple[str, ...]
    approach: str
    look: str


TOLD = {
    "LightDark": Told(("right", "left"), "right", "observe"),
    "LineGrid": Told(("left", "right"), "sense", "sense"),
}


@dataclass(frozen=True)
class Made:
    """A policy, and what is known of how it came about."""

    policy: Any
    training_seconds: float | None = None
    curve: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""


def rows(model: CPOMDP) -> dict[str, tuple[int, Callable[[], Made]]]:
    """How many episodes each row of the table gets, and how its policy is made."""
    told = TOLD[type(model).__name__]
    always = [Always(model, action) for action in told.known]
    exact = "exact" if model.states is not None else "ekf"

    def planner(kind: Any, *arguments: Any, **settings: Any) -> tuple[int, Callable[[], Made]]:
        return PLANNED, lambda: Made(kind(model, *arguments, **settings))

    def rule(kind: Any, *arguments: Any, **settings: Any) -> tuple[int, Callable[[], Made]]:
        return LEARNED, lambda: Made(kind(*arguments, **settings))

    return {
        "told the context": rule(ContextKnown, model, always),
        "random": rule(RandomPolicy, model.num_actions),
        "one way": rule(Always, model, told.known[0]),
        "likeliest context": rule(MostLikelyContext, model, always, exact),
        "Thompson sampling": rule(ThompsonSampling, model, always, exact),
        "QMDP": rule(QMDP, model),
        "QMDP, τ = 3": rule(QMDP, model, temperature=3.0),
        "approach, observe, commit": (LEARNED, lambda: tuned_rule(model, told, exact)),
        "POMCP, raw, 500": planner(POMCP, 500, bins=None),
        "POMCP, 10 bins, 500": planner(POMCP, 500),
        "POMCP, 10 bins, 2000": planner(POMCP, 2000),
        "POUCT, blind, 500": planner(POUCT, 500, rollout="blind"),
        "POUCT, blind, 2000": planner(POUCT, 2000, rollout="blind"),
        "POUCT, commitment, 500": planner(POUCT, 500, rollout="commitment"),
        "POUCT, commitment, 2000": planner(POUCT, 2000, rollout="commitment"),
        "PFT-DPW, 500": planner(PFT, 500),
        "IPFT, τ = 1, 500": planner(PFT, 500, temperature=1.0),
        "PFT-DPW, 2000": planner(PFT, 2000),
        "RDPG-RNN, 10,000 episodes": (LEARNED, lambda: rdpg(model, 10_000)),
        "RDPG-RNN, 50,000 episodes": (LEARNED, lambda: rdpg(model, 50_000)),
        "RecurrentPPO, 10,000 episodes": (LEARNED, lambda: recurrent_ppo(model, 10_000)),
        "RecurrentPPO, 50,000 episodes": (LEARNED, lambda: recurrent_ppo(model, 50_000)),
        "C-IDS": (LEARNED, lambda: cids(model)),
    }


def tuned_rule(model: CPOMDP, told: Told, likelihood: str) -> Made:
    """The best of its two numbers, by episodes that nobody is compared on."""

    def rule(steps: int, confidence: float) -> ApproachObserveCommit:
        return ApproachObserveCommit(
            model, told.approach, steps, told.look, told.known, confidence, likelihood
        )

    grid = [(steps, p) for steps in range(4) for p in (0.8, 0.85, 0.9, 0.95, 0.98)]
    scores = {pair: evaluate(model, rule(*pair), 2000, seed=TUNING).returns.mean for pair in grid}
    best = max(grid, key=scores.__getitem__)
    return Made(rule(*best), note=f"{best[0]} steps, confidence {best[1]}")


def rdpg(model: CPOMDP, num_episodes: int) -> Made:
    from baselines import rdpg

    learned = rdpg.fit(model, num_episodes, seed=0, progress=False)
    return Made(learned.policy, learned.seconds, as_curve(learned.history))


def recurrent_ppo(model: CPOMDP, num_episodes: int) -> Made:
    from baselines import recurrent_ppo

    learned = recurrent_ppo.fit(model, num_episodes, seed=0, progress=False)
    return Made(learned.policy, learned.seconds, as_curve(learned.history))


def cids(model: CPOMDP) -> Made:
    from solvers import cids

    began = time.perf_counter()
    solution = cids.fit(model, seed=0, progress=False)
    seconds = time.perf_counter() - began
    history = solution.history
    episodes = (1 + history.iteration.values) * solution.settings["batch_size"]
    curve = {"episodes": episodes.tolist(), "return": history["return"].values.tolist()}
    return Made(solution.policy, seconds, curve)


def as_curve(history: Any) -> dict[str, list[float]]:
    return {"episodes": history.episodes.values.tolist(), "return": history.training_return.values.tolist()}


def place(folder: Path, model_name: str, row: str) -> Path:
    return folder / model_name / (re.sub(r"[^\w]+", "_", row) + ".json")


def measure(folder: Path, model_name: str, row: str, few: int | None = None) -> None:
    """Measure one row, on few episodes if it says how many, and keep it."""
    torch.set_num_threads(1)  # the other rows have the other cores
    model: CPOMDP = getattr(models, model_name)()
    num_episodes, make = rows(model)[row]
    num_episodes = num_episodes if few is None else few
    made = make()
    began = time.perf_counter()
    result = evaluate(
        model,
        made.policy,
        num_episodes,
        reveal_context=isinstance(made.policy, ContextKnown),
        batch_size=num_episodes,
    )
    record = {
        "evaluation": result.as_dict(),
        "training_seconds": made.training_seconds,
        "curve": made.curve,
        "note": made.note,
        "seconds": time.perf_counter() - began,
    }
    if isinstance(made.policy, POMCP):
        record["deprivation"] = vars(made.policy.deprivation)
    path = place(folder, model_name, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(record))
    unfinished.replace(path)
    print(f"{model_name}: {row}: {result.returns}, {record['seconds']:.0f} s", file=sys.stderr, flush=True)


def measured(folder: Path, model_name: str) -> dict[str, dict[str, Any]]:
    """All rows there are, in order."""
    names = rows(getattr(models, model_name)())
    paths = {name: place(folder, model_name, name) for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def report(folder: Path, model_name: str) -> None:
    """The table, who lost beliefs, and what the rules were tuned to."""
    records = measured(folder, model_name)
    table = Comparison(
        {name: Evaluation.from_dict(record["evaluation"]) for name, record in records.items()},
        {name: r["training_seconds"] for name, r in records.items() if r["training_seconds"] is not None},
    )
    print(f"\n### {model_name}\n\n{table}\n")
    for name, record in records.items():
        if record["note"]:
            print(f"- {name}: {record['note']}")
        if lost := record.get("deprivation"):
            print(
                f"- {name}: particles ran out in {lost['episodes_deprived']} of {lost['episodes']} episodes, "
                f"{lost['deprived']} of {lost['looks']} looks"
            )


def draw_curves(folder: Path, model_name: str, path: Path) -> None:
    """Return against episodes, of all that learn."""
    records = {name: r["curve"] for name, r in measured(folder, model_name).items() if r["curve"]}
    if not records:
        return
    with plt.style.context("tableau-colorblind10"):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for name, curve in records.items():
            axes.plot(curve["episodes"], smoothed(curve["return"]), label=name, linewidth=1.5)
    axes.set(xscale="log", xlabel="episodes learned from", ylabel="return while learning", title=model_name)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    print(f"learning curves: {path}", file=sys.stderr)


def smoothed(values: list[float], points: int = 60) -> Any:
    """Means over the neighbourhood of each value, as wide as leaves so many different ones."""
    width = max(1, len(values) // points)
    x = torch.tensor(values, dtype=torch.float64)
    cumulative = torch.cat([x.new_zeros(1), x.cumsum(0)])
    first = (torch.arange(len(x)) - width + 1).clamp(min=0)
    last = torch.arange(len(x)) + 1
    return ((cumulative[last] - cumulative[first]) / (last - first)).numpy()


def main() -> None:
    """Measure what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all rows, on hundreds or thousands of episodes")
    parser.add_argument("--model", choices=list(TOLD), nargs="*", help="LightDark, and both with --full")
    parser.add_argument("--only", nargs="*", default=[""], help="names of rows, or how they begin")
    parser.add_argument("--jobs", type=int, default=1, help="rows measured at once")
    parser.add_argument("--table", action="store_true", help="measure nothing; of what --full has measured")
    options = parser.parse_args()
    if options.full or options.table:
        full(options.model or list(TOLD), tuple(options.only), options.jobs, options.table)
    else:
        short(options.model or ["LightDark"], tuple(options.only), options.jobs)


def full(model_names: list[str], only: tuple[str, ...], jobs: int, table: bool) -> None:
    """Measure what is missing among all rows, and print the tables."""
    missing = [
        (RUNS, model_name, row)
        for model_name in model_names
        for row in rows(getattr(models, model_name)())
        if row.startswith(only) and not place(RUNS, model_name, row).exists()
    ]
    if not table:
        Parallel(n_jobs=jobs)(delayed(measure)(*each) for each in missing)
    for model_name in model_names:
        report(RUNS, model_name)
        draw_curves(RUNS, model_name, RUNS / f"{model_name}_curves.png")


def short(model_names: list[str], only: tuple[str, ...], jobs: int) -> None:
    """Measure the rows of the short table, all of them anew, and print it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        chosen = [
            (folder, model_name, row, few)
            for model_name in model_names
            for row, few in SHORT.items()
            if row.startswith(only)
        ]
        Parallel(n_jobs=jobs)(delayed(measure)(*each) for each in chosen)
        for model_name in model_names:
            report(folder, model_name)


if __name__ == "__main__":
    main()
