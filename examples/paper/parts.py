"""The parts of the reproduction: which tasks each needs, and what it makes of their outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.paper import figures, work
from examples.paper.comparison import Comparison, Measured, contrast, trend
from examples.paper.published import CONVERGED, PUBLISHED, published
from examples.paper.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.figure import Figure

    from examples.paper.sizes import Sizes

RATIOS = {"4:1": 4.0, "8:1": 8.0, "16:1": 16.0}
PAPER_RATIO = "8:1"
COMMIT = ("right", "left")  # into the light, in either context
LAST = 20  # iterations that count as the end of a fit of C-IDS
HORIZON = 20

INFORMATION, PRINTED, CRITIC = (
    "C-IDS, information",
    "C-IDS, variational, as printed",
    "C-IDS, variational, critic",
)
TOLD = "told the context"
RDPG, RAW, BINNED = "RDPG-RNN", "POMCP, raw observations", "POMCP, 10 bins"
IN_PAPER = {INFORMATION: "C-IDS", PRINTED: "C-IDS", CRITIC: "C-IDS", RDPG: "RDPG-RNN"}
IN_PAPER |= {RAW: "POMCP", BINNED: "POMCP"}


@dataclass(frozen=True)
class Outcome:
    """What a part comes to."""

    rows: tuple[Comparison, ...] = ()  # of the table that sets the paper beside ours
    differences: tuple[str, ...] = ()  # whether other differences are clear, each in a sentence
    sentences: tuple[str, ...] = ()  # what else can be said about what the paper says
    figures: tuple[tuple[str, Figure], ...] = ()  # by the names of their files


@dataclass(frozen=True)
class Part:
    """A table or a figure."""

    name: str  # what it is asked for by
    title: str
    tasks: tuple[Task, ...]  # what must be done for it
    # from the outcomes of tasks to that of the part
    conclude: Callable[[Callable[[Task], dict[str, Any]]], Outcome]


def parts(sizes: Sizes) -> list[Part]:
    """All of them. Tasks that are the same in two parts are done once."""
    fits = light_dark_fits(sizes)
    return [table(sizes, fits), convergence(fits), ratios(sizes), trajectories(sizes, fits), line_grid(sizes)]


def light_dark(ratio: str = PAPER_RATIO) -> dict[str, Any]:
    """The paper's model, with a variance ratio."""
    return {"model": "LightDark", "arguments": {"light_variance": 1.0, "dark_variance": RATIOS[ratio]}}


def cids_fit(name: str, model: Mapping[str, Any], seed: int, seconds: float, **settings: Any) -> Task:
    """A fit of C-IDS."""
    return Task(f"fit {name}, seed {seed}", work.fit_cids, {**model, "seed": seed, **settings}, None, seconds)


def information_fit(sizes: Sizes, ratio: str, seed: int) -> Task:
    """A fit of C-IDS with the information objective, and the paper's policy."""
    return cids_fit(
        f"{INFORMATION}, {ratio}",
        light_dark(ratio),
        seed,
        0.13 * sizes.iterations,
        likelihood="smc",
        objective="information",
        estimator="critic",
        iterations=sizes.iterations,
        batch_size=sizes.batch_size,
    )


def light_dark_fits(sizes: Sizes) -> dict[str, tuple[Task, ...]]:
    """Everybody who learns, with every seed."""
    printed: dict[str, Any] = {
        "likelihood": "ekf",
        "objective": "variational",
        "estimator": "as printed",
        "iterations": sizes.printed_iterations,
        "batch_size": sizes.batch_size,
    }
    critic = printed | {
        "objective": "variational, belief rewards",
        "estimator": "critic",
        "iterations": sizes.iterations,
    }
    rdpg = light_dark() | {"episodes": sizes.rdpg_episodes, "curve_episodes": sizes.curve_episodes}
    seconds = 0.07 * sizes.printed_iterations, 0.1 * sizes.iterations, 0.01 * sizes.rdpg_episodes
    return {
        INFORMATION: tuple(information_fit(sizes, PAPER_RATIO, k) for k in range(sizes.seeds)),
        PRINTED: tuple(
            cids_fit(PRINTED, light_dark(), k, seconds[0], **printed) for k in range(sizes.printed_seeds)
        ),
        CRITIC: tuple(
            cids_fit(CRITIC, light_dark(), k, seconds[1], **critic) for k in range(sizes.critic_seeds)
        ),
        RDPG: tuple(
            Task(f"fit {RDPG}, seed {k}", work.fit_rdpg, rdpg | {"seed": k}, None, seconds[2])
            for k in range(sizes.rdpg_seeds)
        ),
    }


def learned(name: str) -> dict[str, Any]:
    """How a learned policy is asked for."""
    return {"kind": "RDPG" if name == RDPG else "C-IDS"}


def evaluation(
    name: str,
    policy: Mapping[str, Any],
    episodes: int,
    seconds: float,
    *,
    fit: Task | None = None,
    model: Mapping[str, Any] | None = None,
) -> Task:
    """Judging a policy."""
    of = name if fit is None else fit.name.removeprefix("fit ")
    settings = {**(light_dark() if model is None else model), "policy": dict(policy), "episodes": episodes}
    return Task(f"evaluate {of}", work.evaluate_policy, settings, fit, seconds)


def planners(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Those of pomdp-py."""
    n = sizes.simulations
    return {
        RAW: {"kind": "POMCP", "num_simulations": n, "bins": None},
        BINNED: {"kind": "POMCP", "num_simulations": n, "bins": 10},
        "POUCT, rollouts by commitment": {"kind": "POUCT", "num_simulations": n, "rollout": "commitment"},
    }


def planning(sizes: Sizes, episodes: int) -> float:
    """About how many seconds pomdp-py takes."""
    return HORIZON * sizes.simulations * (3e-4 * episodes + 5e-3)


def table(sizes: Sizes, fits: Mapping[str, tuple[Task, ...]]) -> Part:
    """Table 1, with more rows than the paper's."""
    N = sizes.episodes
    rule = {
        "kind": "approach, observe, commit",
        "approach": "right",
        "look": "observe",
        "commit": list(COMMIT),
        "episodes": sizes.tuning_episodes,
    }
    fast: dict[str, tuple[dict[str, Any], float]] = {
        "QMDP": ({"kind": "QMDP"}, 0.014 * N),
        "QMDP, τ = 3": ({"kind": "QMDP", "temperature": 3.0}, 0.02 * N),
        "approach, observe, commit": (rule, 0.003 * N + 0.01 * sizes.tuning_episodes),
        "one way": ({"kind": "always", "action": "right"}, 0.003 * N),
        "random": ({"kind": "random"}, 0.003 * N),
        TOLD: ({"kind": "told", "actions": list(COMMIT)}, 0.003 * N),
    }
    pft = {"kind": "PFT", "num_simulations": sizes.simulations}
    rows: dict[str, tuple[Task, ...]] = {
        name: tuple(evaluation(name, learned(name), N, 0.003 * N, fit=fit) for fit in fits[name])
        for name in fits
    }
    for name, policy in planners(sizes).items():
        seconds = planning(sizes, sizes.planner_episodes)
        rows[name] = (evaluation(name, policy, sizes.planner_episodes, seconds),)
    seconds = sizes.simulations * (1e-3 * sizes.pft_episodes + 0.2)
    rows["PFT-DPW"] = (evaluation("PFT-DPW", pft, sizes.pft_episodes, seconds),)
    rows |= {name: (evaluation(name, policy, N, s),) for name, (policy, s) in fast.items()}

    def conclude(result: Callable[[Task], dict[str, Any]]) -> Outcome:
        compared, notes = [], []
        for name, tasks in rows.items():
            results = [result(task) for task in tasks]
            # Who is told the context has nothing to find out.
            for quantity in ("return",) if name == TOLD else ("return", "entropy"):
                ours = Measured.of_evaluations(results, quantity)
                paper = published(IN_PAPER.get(name), quantity, PUBLISHED)
                compared.append(Comparison(name, quantity, paper, ours, "Table 1"))
            notes += [f"{name}: tuned to {each['note']}." for each in results if each["note"]]
        return Outcome(tuple(compared), sentences=tuple(notes))

    return Part(
        "table1", "Table 1: who earns what", tuple(t for each in rows.values() for t in each), conclude
    )


def convergence(fits: Mapping[str, tuple[Task, ...]]) -> Part:
    """Figure 3, from the fits of Table 1."""

    def conclude(result: Callable[[Task], dict[str, Any]]) -> Outcome:
        curves = {name: [result(task) for task in tasks] for name, tasks in fits.items()}
        rows = []
        for name in (INFORMATION, PRINTED, CRITIC):
            for quantity in ("return", "entropy"):
                ends = [float(np.nanmean(curve[quantity][-LAST:])) for curve in curves[name]]
                ours = Measured.of_seeds(ends, sum(np.diff(curves[name][0]["episodes"], prepend=0)[-LAST:]))
                paper = published("C-IDS", quantity, CONVERGED)
                rows.append(Comparison(name, quantity, paper, ours, "Figure 3, end of learning"))
        figure = figures.convergence(curves)
        return Outcome(tuple(rows), tuple(speeds(curves)), figures=(("figure3", figure),))

    tasks = tuple(task for each in fits.values() for task in each)
    return Part("figure3", "Figure 3: return, entropy and regret while learning", tasks, conclude)


def speeds(curves: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Whether C-IDS learns faster than RDPG: regret when both have had as many episodes."""
    episodes = min(curve["episodes"][-1] for fits in curves.values() for curve in fits)
    regret = {
        name: Measured.of_seeds([regret_at(c, episodes) for c in fits], 1) for name, fits in curves.items()
    }
    return [
        f"After {episodes:,} episodes of learning, and on average over the last {figures.WINDOW:,} of them, "
        f"{contrast('regret', (name, each), (RDPG, regret[RDPG]))}. "
        "The paper has C-IDS converge faster (Figure 3)."
        for name, each in regret.items()
        if name != RDPG
    ]


def regret_at(curve: Mapping[str, Any], episodes: int) -> float:
    """Regret after so many episodes, on average over the last `figures.WINDOW` of them."""
    reached = int(np.searchsorted(curve["episodes"], episodes, side="right")) - 1
    return float(curve["best_return"] - figures.smoothed(curve, "return")[max(reached, 0)])


def ratios(sizes: Sizes) -> Part:
    """Figure 4: C-IDS where light and dark are harder, or easier, to tell apart."""
    tasks = {
        ratio: tuple(
            evaluation(
                INFORMATION,
                learned(INFORMATION),
                sizes.episodes,
                0.003 * sizes.episodes,
                fit=information_fit(sizes, ratio, seed),
                model=light_dark(ratio),
            )
            for seed in range(sizes.seeds)
        )
        for ratio in RATIOS
    }

    def conclude(result: Callable[[Task], dict[str, Any]]) -> Outcome:
        measured = {
            quantity: {
                ratio: Measured.of_evaluations([result(task) for task in tasks[ratio]], quantity)
                for ratio in RATIOS
            }
            for quantity in ("entropy", "return")
        }
        rows = [
            Comparison(f"{INFORMATION}, {ratio}", quantity, None, ours, "Figure 4")
            for quantity, each in measured.items()
            for ratio, ours in each.items()
        ]
        says = {"entropy": "fall", "return": "rise"}
        differences = [
            trend(quantity, before, after) + f" The paper has it {says[quantity]} (Figure 4)."
            for quantity, each in measured.items()
            for before, after in pairwise(each.items())
        ]
        figure = figures.variance_ratios(measured["entropy"], measured["return"])
        return Outcome(tuple(rows), tuple(differences), figures=(("figure4", figure),))

    every = tuple(task for each in tasks.values() for task in each)
    return Part("figure4", "Figure 4: entropy and return by variance ratio", every, conclude)


def trajectories(sizes: Sizes, fits: Mapping[str, tuple[Task, ...]]) -> Part:
    """Figure 5: where they go. Of a learner, the first seed."""
    settings = light_dark() | {"trajectories": sizes.trajectories, "seed": 0}

    def playing(name: str, policy: Mapping[str, Any], seconds: float, fit: Task | None = None) -> Task:
        return Task(f"play {name}", work.play, settings | {"policy": dict(policy)}, fit, seconds)

    searching = planning(sizes, 2 * sizes.trajectories)
    tasks = {name: playing(name, learned(name), 3.0, fits[name][0]) for name in (INFORMATION, PRINTED, RDPG)}
    tasks |= {name: playing(name, planners(sizes)[name], searching) for name in (RAW, BINNED)}

    def conclude(result: Callable[[Task], dict[str, Any]]) -> Outcome:
        played = {name: result(task) for name, task in tasks.items()}
        says = {RAW: "right", BINNED: "right", RDPG: "left"}
        sentences = [
            direction(name, each)
            + (f" The paper's goes {says[name]} in both (appendix)." if name in says else "")
            for name, each in played.items()
        ]
        figure = figures.policies(played, INFORMATION)
        return Outcome(sentences=tuple(sentences), figures=(("figure5", figure),))

    title = "Figure 5: where policies go in either context"
    return Part("figure5", title, tuple(tasks.values()), conclude)


def direction(name: str, played: Mapping[str, Any]) -> str:
    """On which side of the origin episodes end."""
    counts = []
    for c, context in enumerate(played["context_names"]):
        ends = figures.paths_in(played, c)[:, -1]
        counts.append(f"{int((ends > 0).sum())} of {len(ends)} in “{context}”")
    return f"{name}: episodes that end on the right are {', '.join(counts)}."


def line_grid(sizes: Sizes) -> Part:
    """The paper's example in Figure 1, for which it has no numbers."""
    model: dict[str, Any] = {"model": "LineGrid", "arguments": {}}
    settings: dict[str, Any] = {
        "likelihood": "exact",
        "objective": "information",
        "estimator": "critic",
        "iterations": sizes.grid_iterations,
        "batch_size": sizes.batch_size,
    }
    name = "C-IDS, line grid"
    seconds = 0.06 * sizes.grid_iterations
    fits = [cids_fit(name, model, seed, seconds, **settings) for seed in range(sizes.grid_seeds)]
    judged = tuple(
        evaluation(name, {"kind": "C-IDS"}, sizes.episodes, 2.0, fit=fit, model=model) for fit in fits
    )
    shown = Task(
        f"play {name}",
        work.play,
        model | {"policy": {"kind": "C-IDS"}, "trajectories": sizes.trajectories, "seed": 0},
        fits[0],
        1.0,
    )
    planned = Task("plan the line grid exactly", work.plan_exactly, model)

    def conclude(result: Callable[[Task], dict[str, Any]]) -> Outcome:
        results = [result(task) for task in judged]
        measured = {q: Measured.of_evaluations(results, q) for q in ("return", "entropy")}
        rows = [Comparison(name, quantity, None, ours, "Figure 1") for quantity, ours in measured.items()]
        best, told = result(planned), result(fits[0])["best_return"]
        sentence = optimality(name, measured["return"], best, told)
        figure = figures.line_grid(result(shown))
        return Outcome(tuple(rows), sentences=(sentence,), figures=(("line_grid", figure),))

    return Part("line-grid", "Figure 1: the line grid", (*fits, *judged, shown, planned), conclude)


def optimality(name: str, ours: Measured, best: Mapping[str, float], told: float) -> str:
    """How much a policy earns of what can be earned."""
    most = best["return"]
    return (
        f"{name}: the return is {ours.mean:.3f} ± {ours.standard_error:.3f}, and the most that any policy "
        f"can have is {most:.3f}, by exact planning: {ours.mean / most:.1%} ± "
        f"{ours.standard_error / most:.1%} of it. Who earns the most is left with {best['entropy']:.3f} "
        f"bits; told the context, the return is {told:.3f}. The paper prints no numbers."
    )
