"""`cpomdp report`: what it takes from the record of a run."""

from __future__ import annotations

import pytest

from cpomdp_command import main
from cpomdp_ppl.cli import Recipe
from cpomdp_ppl.cli.report import likelihood_of
from cpomdp_ppl.experiments.run_folder import RunFolder
from cpomdp_ppl.inference import GridFilter, ObservableOperator, ParticleFilter
from tests.cli.conftest import LINE_GRID, data_of, read


def test_a_report_shows_what_was_in_force(here):
    assert main(["evaluate", "here", "--num-episodes", "4", "--quiet"]) == 0
    assert main(["report", "here", "--num-episodes", "1", "--quiet"]) == 0
    data = data_of("here/report.html")
    rows = {part["title"]: dict(part["rows"]) for part in data["configuration"]}
    found = read("here/solution/solution.json")["settings"]["temperature"]
    expected = f"Geometric(start={found['start']}, end={found['end']}, until=0.7) (default)"
    assert rows["Settings"]["temperature"] == expected
    assert rows["Settings"]["learning_rate"] == "Linear(start=0.006, end=0.0003, until=1.0) (default)"
    assert rows["Settings"]["prior"] == "[0.5, 0.5] (default)"
    assert rows["Added by evaluate"]["likelihood"] == "exact (default)"
    assert rows["Added by evaluate"]["policy"] == "the solution (default)"
    assert "–" not in [*rows["Settings"].values(), *rows["Added by evaluate"].values()]
    assert data["player"]["likelihood"] == "exact"
    assert main(["report", "here", "--num-episodes", "1", "--likelihood", "smc", "--quiet"]) == 0
    assert data_of("here/report.html")["player"]["likelihood"] == "smc, 256 particles"


@pytest.mark.slow
def test_a_report_shows_who_was_judged(capsys, monkeypatch):
    words = ["evaluate", LINE_GRID, "horizon=2", "--policy", "pft", "--simulations", "3", "--seed", "7"]
    assert main([*words, "--num-episodes", "1", "--run", "here"]) == 0
    out = capsys.readouterr().out
    assert "± –" in out  # there is no standard error of one episode
    assert "nan" not in out
    budgets = []
    made = Recipe.made

    def noted(self, name, model, budget):
        budgets.append((name, budget.simulations, budget.training_episodes, budget.seed))
        return made(self, name, model, budget)

    monkeypatch.setattr(Recipe, "made", noted)
    assert main(["report", "here", "--num-episodes", "1", "--seed", "2"]) == 0
    assert data_of("here/report.html")["played_by"] == "pft"
    assert main(["report", "here", "--num-episodes", "1", "--simulations", "2"]) == 0
    assert main(["report", "here", "--num-episodes", "1", "--policy", "random"]) == 0
    assert budgets == [("pft", 3, 10_000, 7), ("pft", 2, 10_000, 7), ("random", 100, 10_000, 0)]


@pytest.mark.parametrize(
    ("found", "backend"),
    [
        ("ParticleFilter(num_particles=9, guide='ekf')", ParticleFilter(9, guide="ekf")),
        ({"": "GridFilter", "num_points": 50}, GridFilter(num_points=50)),
        ("exact", ObservableOperator()),
        ("ParticleFilter(guide=<coin.Guide object>)", None),  # only its author has it
        ({"": "ParticleFilter", "guide": "Guide"}, None),
        ("__import__('os').system('true')", None),
        (None, None),
    ],
)
def test_the_backend_of_a_run_by_its_record(found, backend):
    folder = RunFolder.create("run", "fit", model=LINE_GRID, settings={"likelihood": found}, seed=0)
    assert likelihood_of(folder, {}) == backend
    folder.record["settings"] = {}
    assert likelihood_of(folder, {"likelihood": found}) == backend
