"""The command: do what is left to do, and write the table and the figures."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cpomdp_ppl.cli.options import count
from cpomdp_ppl.experiments.files import remove_folders, write_text_atomic
from cpomdp_ppl.experiments.store import Store
from examples import paper
from examples.paper.comparison import LEVEL, Comparison, as_csv, as_markdown
from examples.paper.parts import parts
from examples.paper.sizes import FULL, QUICK, Sizes
from examples.paper.tasks import Results, Task, distinct, run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TASKS, TABLE, TIMES = "tasks", "comparison", "times.csv"
INTERRUPTED = 130

NOTE = """\
“±” is the standard error of ours; the paper does not say what its own is. A difference is clear if its 95 %
interval leaves out zero, by Student's t, as few seeds do not know their spread well; two may look alike by
luck, and the interval is then too short. The paper's numbers are taken as exact, since nobody can tell how
far chance has moved them: a clear difference from one is from the number as printed. {judged} differences
are judged here, each by itself: if there were none at all, about {by_chance:.1f} of them would look clear
by chance, and some have fits or episodes in common. Variance ratios are compared seed by seed on the same
episodes, other learners as independent of each other. Entropies are by the most exact filter there is; in
Figure 3, by the learner's own. Figure 3 shows C-IDS as it explores, and RDPG as it would play for good. An
episode is one trajectory: the paper speaks of 10,000 episodes of training and of 200 trajectories in an
iteration, and does not say whether the one counts the other."""

SMALL = (
    "**These sizes are for a quick look: learners stop early, planners think little. They settle nothing.**"
)


def reproduce(
    sizes: Sizes,
    folder: Path,
    *,
    only: Sequence[str] = (),
    workers: int = 2,
    progress: Callable[[str], None] = print,
) -> int:
    """Do what is left to do (`only` some parts, if any are named), and write every part that is complete.

    Returns:
        The exit code: 0, 1 if a task failed, or 130 if Ctrl-C was pressed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(folder / TASKS)
    tasks = wanted(sizes, only)
    progress(f"{done(tasks, results)} of {len(tasks)} tasks are finished; working in {folder}")
    try:
        failures = run(tasks, results, workers, progress)
        progress(conclusion(sizes, results, folder))
    except KeyboardInterrupt:
        progress(
            f"stopped: {done(tasks, results)} of {len(tasks)} tasks are finished and kept in {folder}; "
            "the same command goes on from there"
        )
        return INTERRUPTED
    for reason in dict.fromkeys(failures.values()):  # which may be the same for many
        names = "; ".join(name for name, its in failures.items() if its == reason)
        print(f"\n{names} failed:\n{reason}", file=sys.stderr)
    if failures:
        waiting = len(tasks) - done(tasks, results) - len(failures)
        progress(
            f"{len(failures)} of {len(tasks)} tasks failed, and {waiting} more could not be begun for that; "
            "the same command tries what is not finished, and nothing else"
        )
    if left_over := results.unused(wanted(sizes)):
        progress(
            f"{len(left_over)} folders of {results.folder} are of other code or sizes; --clean deletes them"
        )
    return 1 if failures else 0


def clean(sizes: Sizes, folder: Path) -> str:
    """Delete the folders of tasks that are of other code or sizes; how many these were."""
    results = Results(folder / TASKS)
    left_over = results.unused(wanted(sizes))
    remove_folders(results.folder, left_over)
    return f"deleted {len(left_over)} folders of {results.folder}"


def wanted(sizes: Sizes, only: Sequence[str] = ()) -> list[Task]:
    """The tasks of parts with these names, or of all, and what they need, each once."""
    return distinct([task for part in parts(sizes) if not only or part.name in only for task in part.tasks])


def done(tasks: Sequence[Task], results: Results) -> int:
    """How many are finished."""
    return sum(map(results.finished, tasks))


def conclusion(sizes: Sizes, results: Results, folder: Path) -> str:
    """Write table and figures of all parts that are complete; the table, in words and numbers."""
    rows: list[Comparison] = []
    sentences, missing, judged = [], [], 0
    seconds: dict[str, float] = {}
    for part in parts(sizes):
        tasks = distinct(part.tasks)
        if done(tasks, results) < len(tasks):
            missing.append(part.name)
            continue
        outcome = part.conclude(results.result)
        rows += outcome.rows
        differences = [row.sentence() for row in outcome.rows if row.paper is not None]
        differences += outcome.differences
        judged += len(differences)
        sentences += [*differences, *outcome.sentences]
        for name, figure in outcome.figures:
            Store(folder).write_figure(name, figure, dpi=150)
        seconds |= {task.name: results.seconds(task) for task in tasks}
    lines = [f"- {sentence}" for sentence in sentences]
    if missing:
        lines.append(f"- Not complete, and left out here: {', '.join(missing)}.")
    used = "Sizes: " + ", ".join(f"{name} {size:,}" for name, size in asdict(sizes).items()) + "."
    warning = [] if sizes == FULL else [SMALL]
    head = ["# The paper and ours", *warning, as_markdown(rows)]
    note = NOTE.format(judged=judged, by_chance=(1 - LEVEL) * judged)
    text = "\n\n".join([*head, "\n".join(lines), note, used.replace("_", " ")]) + "\n"
    write_text_atomic(folder / f"{TABLE}.md", text)
    write_text_atomic(folder / f"{TABLE}.csv", as_csv(rows))
    write_text_atomic(
        folder / TIMES, "task,seconds\n" + "".join(f'"{name}",{s:.1f}\n' for name, s in seconds.items())
    )
    return f"\n{text}\nwritten to {folder}: {TABLE}.md, {TABLE}.csv, {TIMES}, and figures as PNG and SVG"


def listing(sizes: Sizes, folder: Path, only: Sequence[str]) -> str:
    """Parts and tasks, which are finished, and about how long the others take."""
    results = Results(folder / TASKS)
    lines = []
    for part in parts(sizes):
        if only and part.name not in only:
            continue
        lines.append(f"{part.name}  {part.title}")
        for task in distinct(part.tasks):
            state = "finished" if results.finished(task) else f"about {max(task.seconds, 1):.0f} s"
            lines.append(f"    {task.name}: {state}")
    tasks = wanted(sizes, only)
    left = sum(task.seconds for task in tasks if not results.finished(task))
    lines.append(
        f"{done(tasks, results)} of {len(tasks)} finished; about {left / 60:.0f} minutes of one core left"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.paper",
        description=paper.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [part.name for part in parts(QUICK)]
    parser.add_argument("--quick", action="store_true", help="smaller sizes, in a folder of their own")
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="where (runs/paper)")
    parser.add_argument("--workers", type=count, default=2, help="processes (2)")
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="NAME", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="say what there is to do, and do nothing")
    clean_help = "delete what other code or sizes left here, and do nothing else"
    parser.add_argument("--clean", action="store_true", help=clean_help)
    options = parser.parse_args(arguments)
    sizes, folder = (QUICK, options.out / "quick") if options.quick else (FULL, options.out / "full")
    if options.list or options.clean:
        print(listing(sizes, folder, options.only) if options.list else clean(sizes, folder))
        return 0
    progress = partial(print, flush=True)
    return reproduce(sizes, folder, only=options.only, workers=options.workers, progress=progress)


if __name__ == "__main__":
    sys.exit(main())
