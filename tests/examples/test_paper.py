from __future__ import annotations

import csv
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind_from_stats, ttest_rel

from baselines import rdpg
from cpomdp_ppl import RandomPolicy, evaluate
from cpomdp_ppl.experiments.files import load_json
from cpomdp_ppl.models import LightDark, LineGrid
from examples.paper import __main__ as command
from examples.paper import figures, tasks, work
from examples.paper import parts as plan
from examples.paper.__main__ import main, reproduce
from examples.paper.comparison import Comparison, Measured, Played, as_csv, as_markdown, contrast, trend
from examples.paper.published import PUBLISHED, Published
from examples.paper.sizes import FULL, QUICK
from examples.paper.tasks import RESULT, ChangedCodeError, Results, Task, distinct
from tests import ROOT
from tests.children import environment, is_running, start_python, wait_for

TINY = replace(QUICK, grid_seeds=1, grid_iterations=30, batch_size=20, episodes=40, trajectories=2)
TABLES = ("comparison.md", "comparison.csv")


def silent(line):
    pass


# Work for the machinery to do; other processes import it from here.


def add(settings, folder, need):
    """The sum of a number and what is needed; how often this was done is written down."""
    with (Path(settings["log"]) / "log").open("a") as log:
        log.write(f"{settings['number']}\n")
    return {"sum": settings["number"] + (0 if need is None else load_json(need / RESULT)["result"]["sum"])}


def once(function, settings):
    mark = Path(settings["log"]) / "once"
    if not mark.exists():
        mark.touch()
        function()


def fail_once(settings, folder, need):
    once(lambda: [][0], settings)
    return add(settings, folder, need)


def die_once(settings, folder, need):
    once(lambda: os._exit(9), settings)
    return add(settings, folder, need)


def tree(log, first=add):
    """1, which 3 and 5 need, and 4 by itself."""
    one, four = (
        Task(f"task {n}", kind, {"number": n, "log": str(log)}) for n, kind in ((1, first), (4, add))
    )
    three, five = (Task(f"task {n}", add, {"number": n, "log": str(log)}, one, seconds=99) for n in (3, 5))
    return [one, three, five, four]


def logged(log):
    return sorted((log / "log").read_text().split())


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A store whose code is `code`, until somebody writes another there."""
    (tmp_path / "code").write_text("first")
    monkeypatch.setattr(tasks, "source_hash", lambda: (tmp_path / "code").read_text())
    return Results(tmp_path / "tasks", "first")


# Tasks


@pytest.mark.parametrize("sizes", [FULL, QUICK])
def test_every_part_is_there(sizes):
    parts = {part.name: part for part in plan.parts(sizes)}
    assert list(parts) == ["table1", "figure3", "figure4", "figure5", "line-grid"]
    keys = {name: {task.key for task in distinct(part.tasks)} for name, part in parts.items()}
    assert keys["figure3"] < keys["table1"]  # the very same fits
    assert len(keys["figure4"] & keys["table1"]) == 2 * sizes.seeds  # fits and evaluations at 8:1
    assert len(keys["figure4"]) == 3 * 2 * sizes.seeds
    names = " ".join(task.name for task in parts["table1"].tasks)
    rows = "information|as printed|critic|RDPG-RNN|POMCP, raw|POMCP, 10 bins|POUCT|PFT-DPW|QMDP|approach"
    assert all(row in names for row in f"{rows}|one way|random|told".split("|"))
    every = distinct([task for part in parts.values() for task in part.tasks])
    assert len({task.name for task in every}) == len(every)  # or a progress line would be of two


def test_a_folder_is_named_by_everything_that_decides_the_outcome(tmp_path):
    need = Task("need", add, {"number": 1})
    task = Task("task", add, {"number": 2}, need)
    same = Task("task", add, {"number": 2}, Task("another name", add, {"number": 1}), seconds=7)
    others = [
        Task("task", fail_once, {"number": 2}, need),
        Task("task", add, {"number": 3}, need),
        Task("task", add, {"number": 2}, Task("need", add, {"number": 5})),
        Task("task", add, {"number": 2}),
    ]
    one, other = Results(tmp_path, "one"), Results(tmp_path, "other")
    assert one.place(task) == one.place(same)
    assert len({other.place(task), *map(one.place, (task, *others))}) == 6


def test_the_hash_is_of_the_code(tmp_path, monkeypatch):
    files = ("examples/paper/work.py", "solvers/a.py", "cpomdp_ppl/inference/b.py", "cpomdp_ppl/report/c.py")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(tasks, "ROOT", tmp_path)
    first = tasks.source_hash()
    for name in files:
        (tmp_path / name).write_text("x = 1\n")
        assert (tasks.source_hash() != first) == ("report" not in name), name
        (tmp_path / name).write_text("")
    assert tasks.source_hash() == first


def test_finished_tasks_are_not_run_again_unless_damaged(tmp_path, results):
    todo, lines = tree(tmp_path), []
    assert tasks.run(todo, results, 1, lines.append) == {}
    assert [results.result(task)["sum"] for task in todo] == [1, 4, 6, 4]
    assert [line.split("; ")[1] for line in lines] == ["3 left", "2 left", "1 left", "0 left"]
    assert tasks.run(todo, results, 1, lines.append) == {}
    assert logged(tmp_path) == ["1", "3", "4", "5"]
    for content in ('{"sum": ', "[]", "{}"):
        (results.place(todo[1]) / RESULT).write_text(content)
        assert [results.finished(task) for task in todo] == [True, False, True, True]
        assert tasks.run(todo, results, 1, silent) == {}
    assert logged(tmp_path) == ["1", "3", "3", "3", "3", "4", "5"]


def test_outcomes_of_code_that_has_changed_are_not_kept(tmp_path, results):
    def change(settings, folder, need):
        (tmp_path / "code").write_text("second")
        return {}

    changing = Task("changing", change, {})
    with pytest.raises(ChangedCodeError, match="the code has changed since the run began"):
        results.carry_out(changing)  # while it is at work
    with pytest.raises(ChangedCodeError):
        results.carry_out(tree(tmp_path)[0])  # before it begins
    assert not results.finished(changing)
    assert not (tmp_path / "log").exists()


def test_a_failure_stops_only_what_needs_it(tmp_path, results):
    todo = tree(tmp_path, fail_once)
    failures = tasks.run(todo, results, 1, silent)
    assert list(failures) == ["task 1"]
    assert "IndexError" in failures["task 1"]
    assert logged(tmp_path) == ["4"]
    assert tasks.run(todo, results, 1, silent) == {}
    assert logged(tmp_path) == ["1", "3", "4", "5"]


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(tmp_path):
    results = Results(tmp_path / "tasks")
    with pytest.warns(RuntimeWarning, match="a process was killed"):
        assert tasks.run(tree(tmp_path, die_once), results, 2, silent) == {}
    assert set(logged(tmp_path)) == {"1", "3", "4", "5"}


# Stopping, and going on


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert reproduce(TINY, folder, only=["line-grid"], workers=1, progress=silent) == 0
    return {name: (folder / name).read_text() for name in TABLES}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_in_the_middle_it_comes_to_the_same_table(how, tmp_path, uninterrupted):
    code = f"""
from pathlib import Path
from examples.paper.__main__ import reproduce
from tests.examples.test_paper import TINY
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(reproduce(TINY, Path({str(tmp_path)!r}), only=["line-grid"], workers=2))
"""
    process = start_python(code, cwd=ROOT, env=environment(OMP_NUM_THREADS="1"))
    wait_for(lambda: list(tmp_path.glob("tasks/fit*/checkpoint/checkpoint.pt")), process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(how)
    output, _ = process.communicate(timeout=60)
    wait_for(lambda: not any(map(is_running, children)))  # nobody works on with nobody to report to
    assert not (tmp_path / TABLES[0]).exists()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "the same command goes on from there" in output
    assert reproduce(TINY, tmp_path, only=["line-grid"], workers=1, progress=silent) == 0
    assert {name: (tmp_path / name).read_text() for name in TABLES} == uninterrupted
    assert (tmp_path / "line_grid.png").stat().st_size > 10_000
    assert (tmp_path / "line_grid.svg").read_text().startswith("<?xml")


# Comparing


def measured(mean, error, freedom=1000, seeds=1):
    return Measured(mean, error, freedom, None, seeds, 4000)


def verdict(mean, error, quantity="return", spread=1.345, freedom=1000):
    paper = Published("C-IDS", quantity, 10.572, spread, "Table 1")
    return Comparison("ours", quantity, paper, measured(mean, error, freedom), "Table 1").verdict


def test_verdicts():
    within = "within the paper's own ± 1.345"
    assert verdict(11.472, 0.1) == f"higher than the paper by 0.900 ± 0.100 (better), {within}"
    assert verdict(9.572, 0.1) == f"lower than the paper by 1.000 ± 0.100 (worse), {within}"
    assert verdict(13.572, 0.1).endswith("(better), beyond the paper's own ± 1.345")
    assert verdict(12.072, 0.1).endswith("within the paper's own ± 1.345")  # 1.5, and 2 × 0.1 are forgiven
    assert verdict(10.672, 0.1) == "no clear difference (+0.100 ± 0.100)"
    assert verdict(11.472, 0.1, "entropy").startswith("higher than the paper by 0.900 ± 0.100 (worse)")
    assert verdict(11.472, 0.1, spread=None) == "higher than the paper by 0.900 ± 0.100 (better)"
    assert verdict(11.472, 0.1, freedom=1) == "no clear difference (+0.900 ± 0.100)"  # two seeds: 12.7 × 0.1
    assert verdict(11.472, math.nan) == "differs by +0.900, nobody knows how surely"
    assert verdict(11.572, 0.0, spread=0.0).startswith("higher than the paper by 1.000")
    assert verdict(10.572, 0.0, spread=0.0).startswith("no clear difference")


@pytest.mark.parametrize("second", [10.0, 10.6, 11.0, 12.0, 14.0])
def test_clear_is_what_the_t_test_of_welch_finds(second):
    first_seeds, second_seeds = [9.0, 10.0, 11.0], [second + d for d in (-0.6, -0.2, 0.0, 0.3, 0.5)]
    one, other = Measured.of_seeds(first_seeds, 1), Measured.of_seeds(second_seeds, 1)
    test = ttest_ind_from_stats(one.mean, one.over_seeds, 3, other.mean, other.over_seeds, 5, equal_var=False)
    words = {True: "rises", False: "does not clearly change"}
    assert words[bool(test.pvalue < 0.05)] in trend("return", ("4:1", one), ("8:1", other))
    clear = {True: "lower than", False: "not clearly different from"}
    assert clear[bool(test.pvalue < 0.05)] in contrast("return", ("A", one), ("B", other))


def result_of(returns, contexts=None):
    """An evaluation in which these were the returns."""
    contexts = [0] * len(returns) if contexts is None else contexts
    return {"each": {"contexts": list(contexts), "returns": list(returns), "entropy": [0.5] * len(returns)}}


def test_seeds_share_their_episodes():
    luck = np.tile([-6.0, 6.0], 200)  # of the same episodes, for both
    results = [result_of(mean + luck) for mean in (10.0, 12.0)]
    ours = Measured.of_evaluations(results, "return")
    assert (ours.mean, ours.num_seeds, ours.num_episodes) == (11.0, 2, 400)
    assert ours.over_seeds == pytest.approx(2**0.5)
    assert ours.standard_error == pytest.approx((36 / 399 + 2 / 2) ** 0.5)
    single = Measured.of_evaluations(results[:1], "return")
    assert single.standard_error == pytest.approx((36 / 399) ** 0.5)
    assert (single.freedom, single.over_seeds) == (pytest.approx(399), None)


def test_what_contexts_are_worth_is_no_error():
    contexts = np.tile([0, 1], 50)
    values = np.where(contexts == 0, 3.0, 17.0)
    ours = Measured.of_evaluations([result_of(values, contexts)], "return")
    assert (ours.mean, ours.standard_error) == (10.0, 0.0)


@pytest.mark.parametrize("together", [1.0, 100.0])
def test_the_error_of_a_mean_over_seeds_and_episodes(together):
    n, N, repeats = 4, 50, 800
    random = np.random.default_rng(0)
    seeds, episodes, both = (
        random.normal(size=(repeats, *shape)) * variance**0.5
        for shape, variance in (((n, 1), 8.0), ((1, N), 4.0), ((n, N), together))
    )
    contexts = np.tile([0, 1], N // 2)
    found = np.array([Played(x, contexts).mean() for x in 20 * contexts + seeds + episodes + both])
    truth = 8 / n + 4 / N + together / (n * N)
    # The variance of so many means has a relative standard error of 0.05, and so have estimates of three
    # degrees of freedom one of 0.03; they are 1 % too large, as none is below what the episodes make it.
    assert found[:, 0].var() == pytest.approx(truth, rel=0.2)
    assert (found[:, 1] ** 2).mean() == pytest.approx(truth, rel=0.12)


@pytest.mark.parametrize("second", [10.2, 10.6, 11.0, 12.0])
def test_the_same_seeds_on_the_same_episodes_are_compared_one_by_one(second):
    luck = np.random.default_rng(1).normal(size=60) * 8
    first_seeds, second_seeds = [4.0, 10.0, 16.0], [second - 6.3, second + 0.1, second + 6.2]
    one, other = (
        Measured.of_evaluations([result_of(seed + luck) for seed in seeds], "return")
        for seeds in (first_seeds, second_seeds)
    )
    clear = bool(ttest_rel(second_seeds, first_seeds).pvalue < 0.05)
    words = {True: "rises", False: "does not clearly change"}
    assert words[clear] in trend("return", ("4:1", one), ("8:1", other))
    fewer = Measured.of_evaluations([result_of(seed + luck) for seed in second_seeds[:2]], "return")
    assert fewer.minus(one)[1] > 3  # not the same seeds: no luck is known to be shared


def fake(task):
    """Outcomes as tasks have them, of a world in which all is as it is in the paper, or nearly."""
    return {**result_of(10.5 + np.tile([-1.0, 1.0], task.settings["episodes"] // 2)), "note": ""}


def test_the_table_has_all_that_the_paper_prints():
    rows = plan.parts(FULL)[0].conclude(fake).rows
    assert {row.paper for row in rows if row.paper is not None} == set(PUBLISHED)
    assert [row.policy for row in rows].count("told the context") == 1  # who has nothing to find out
    text = as_markdown(rows).splitlines()
    assert len(text) == len(rows) + 2
    ours = "10.500 ± 0.016 | s.d. 0.000 of 5 | -0.072"
    assert f"| C-IDS, information | return | 10.572 ± 1.345 | {ours} |" in text[2]
    table = list(csv.DictReader(as_csv(rows).splitlines()))
    assert [float(row["ours"]) for row in table] == [row.ours.mean for row in rows]
    raw = next(row for row in table if row["policy"] == "POMCP, raw observations")
    assert float(raw["difference"]) == pytest.approx(10.5 + 6.504)
    assert "beyond the paper's own ± 2.023" in raw["verdict"]


def test_figure_3_needs_no_fits_of_its_own():
    part = plan.parts(QUICK)[1]

    def curve(task):
        speed = 0.1 if task.work is work.fit_rdpg else 0.2
        seed = task.settings["seed"]
        returns = [speed * k + 0.01 * seed for k in range(100)]
        return {
            "episodes": list(range(100, 10_100, 100)),
            "return": returns,
            "entropy": [1 - k / 100 for k in range(100)],
            "best_return": 18.0,
        }

    outcome = part.conclude(curve)
    assert len(outcome.differences) == 3
    # The last ten points are 18.9 and 9.45 on average, and half of 0.01 for the seeds.
    assert (
        "After 10,000 episodes of learning, and on average over the last 1,000 of them, the regret of "
        "C-IDS, information is lower than that of RDPG-RNN (-0.905 and 8.545" in outcome.differences[0]
    )
    ends = [row.ours for row in outcome.rows if row.quantity == "return"]
    assert ends[0].mean == pytest.approx(0.2 * 89.5 + 0.005)  # of the last twenty
    assert ends[0].num_episodes == 2000
    assert len(outcome.figures[0][1].axes) == 3


def test_regret_is_over_as_many_episodes_for_everybody():
    def curve(episodes, step):
        after = range(step, episodes + 1, step)
        returns = [(k - 1) // 1000 for k in after]  # one for every thousand episodes
        return {"episodes": list(after), "return": returns, "best_return": 20.0}

    often, seldom, long = curve(10_000, 200), curve(10_000, 500), curve(800_000, 200)
    for at in (1000, 4000, 10_000):
        assert [plan.regret_at(c, at) for c in (often, seldom, long)] == [20 - (at // 1000 - 1)] * 3


def test_curves_leave_out_what_was_not_measured():
    curve = {"episodes": [500, 1000, 1500, 2000, 4000], "entropy": [math.nan, 1.0, 0.5, math.nan, math.nan]}
    np.testing.assert_allclose(figures.smoothed(curve, "entropy"), [math.nan, 1.0, 0.75, 0.5, math.nan])


# Work


def test_every_episode_that_is_averaged_is_kept(tmp_path):
    settings = {"model": "LineGrid", "arguments": {}, "policy": {"kind": "random"}, "episodes": 60}
    result = work.evaluate_policy(settings, tmp_path, None)
    expected = evaluate(LineGrid(), RandomPolicy(3), 60, seed=0)
    assert result["returns"]["mean"] == expected.returns.mean
    assert result["likelihood"] == expected.likelihood
    each = result["each"]
    assert np.mean(each["returns"]) == pytest.approx(expected.returns.mean)
    assert np.mean(each["entropy"]) == pytest.approx(expected.entropy.mean)
    right = [r for c, r in zip(each["contexts"], each["returns"], strict=True) if c == 0]
    assert np.mean(right) == pytest.approx(expected.returns_by_context["detector right"].mean)
    ours = Measured.of_evaluations([result], "return")
    assert ours.standard_error == pytest.approx(expected.returns.standard_error)


def test_the_most_that_the_line_grid_has(tmp_path):
    def worth(ahead, looks):
        """With so many more reports for one side than for the other; an end is three steps away."""
        p = 0.85**ahead / (0.85**ahead + 0.15**ahead)
        commit = max(20 * p - 40 * (1 - p), 20 * (1 - p) - 40 * p, 0.0)
        if looks == 0:
            return commit
        up = 0.85 * p + 0.15 * (1 - p)
        return max(commit, up * worth(ahead + 1, looks - 1) + (1 - up) * worth(ahead - 1, looks - 1))

    best = work.plan_exactly({"model": "LineGrid", "arguments": {}}, tmp_path, None)
    assert best["return"] == pytest.approx(worth(0, 6))
    assert 0 < best["entropy"] < 0.2
    ours = Measured(0.9 * best["return"], 0.01 * best["return"], 10, None, 1, 100)
    assert "by exact planning: 90.0% ± 1.0% of it" in plan.optimality("C-IDS", ours, best, 20.0)


@pytest.mark.slow
def test_rdpg_is_fitted_as_it_always_is(tmp_path):
    settings = plan.light_dark() | {"seed": 3, "episodes": 60, "curve_episodes": 10}
    curve = work.fit_rdpg(settings, tmp_path, None)
    learned = rdpg.fit(LightDark(), 60, seed=3, progress=False)
    expected = learned.policy.actor.state_dict()
    found = work.load_rdpg(LightDark(), tmp_path).actor.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert curve["return"] == learned.history.greedy_return.values.tolist()
    assert len(curve["entropy"]) == len(curve["episodes"]) == 1
    assert curve["best_return"] == pytest.approx(17.96, abs=0.005)


# The command


def test_the_list(tmp_path, capsys):
    assert main(["--quick", "--list", "--only", "figure3", "--out", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "fit RDPG-RNN, seed 1: about" in listed
    assert "table1" not in listed
    assert not list(tmp_path.iterdir())


def one_part(monkeypatch, todo, outcome=None):
    part = plan.Part("all", "All", tuple(todo), lambda result: outcome or plan.Outcome())
    monkeypatch.setattr(command, "parts", lambda sizes: [part])


def test_what_failed_is_counted_and_tried_again(tmp_path, monkeypatch, capsys):
    one_part(monkeypatch, tree(tmp_path, fail_once))
    lines = []
    assert reproduce(QUICK, tmp_path, workers=1, progress=lines.append) == 1
    assert lines[-1].startswith("1 of 4 tasks failed, and 2 more could not be begun for that")
    assert "task 1 failed" in capsys.readouterr().err
    assert reproduce(QUICK, tmp_path, workers=1, progress=lines.append) == 0
    assert logged(tmp_path) == ["1", "3", "4", "5"]


def test_the_note_says_how_many_differences_are_judged(tmp_path, monkeypatch):
    row = Comparison("C-IDS", "return", PUBLISHED[0], measured(10.0, 0.1), "Table 1")
    ours = replace(row, paper=None)
    one_part(monkeypatch, [], plan.Outcome((row, row, ours), ("It rises.",), ("It is so.",)))
    assert reproduce(QUICK, tmp_path, workers=1, progress=silent) == 0
    text = (tmp_path / TABLES[0]).read_text()
    words = " ".join(text.split())
    assert "\n- It rises.\n- It is so.\n" in text
    assert "3 differences are judged here" in words
    assert "about 0.2 of them would look clear by chance" in words  # 5 % of three


def test_what_other_code_left_is_counted_and_cleaned(tmp_path, monkeypatch, capsys):
    todo = tree(tmp_path)
    one_part(monkeypatch, todo)
    folder = tmp_path / "quick"
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "source_hash", lambda: "old code")
        tasks.run(todo, Results(folder / "tasks", "old code"), 1, silent)
    (folder / "tasks" / "my notes").mkdir()
    lines = []
    assert reproduce(QUICK, folder, workers=1, progress=lines.append) == 0
    assert lines[-1].startswith("4 folders of")
    assert "--clean deletes them" in lines[-1]
    assert main(["--quick", "--clean", "--out", str(tmp_path)]) == 0
    assert "deleted 4 folders" in capsys.readouterr().out
    names = sorted(place.name[:6] for place in (folder / "tasks").iterdir())
    assert names == ["my not", "task_1", "task_3", "task_4", "task_5"]
    assert logged(tmp_path) == sorted(["1", "3", "4", "5"] * 2)


@pytest.mark.parametrize("arguments", [["--only", "figure9"], ["--workers", "0"], ["--workers", "two"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err
