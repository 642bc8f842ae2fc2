"""What a report shows of the solution in a run folder: the filter it was learned by, and the verdict."""

from __future__ import annotations

import pytest

from cpomdp_ppl.experiments.files import CheckpointError
from cpomdp_ppl.report.contents import solved
from tests.report.test_page import EVIL, new_run, written

SMC = {"": "ParticleFilter", "num_particles": 64}


@pytest.fixture
def folder(tmp_path):
    """A run folder with a folder for a solution."""
    run = new_run(tmp_path / "run")
    (run.path / "solution").mkdir()
    run.finish()
    return run


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"settings": {"likelihood": SMC}}, ("smc, 64 particles", None, None)),
        ({"settings": {"likelihood": SMC}, "likelihood": {"": "ObservableOperator"}}, ("exact", None, None)),
        ({"settings": {"likelihood": {"": "Mine"}}, "verdict": None}, ("Mine", None, None)),
        ({"settings": {"likelihood": "Mine"}}, ("Mine", None, None)),
        ({"settings": {"likelihood": 3}}, (None, None, None)),
        ({"settings": {}, "verdict": {"solved": True, "sentence": EVIL, "worth": {}}}, (None, EVIL, True)),
    ],
)
def test_what_a_solution_says(folder, content, expected):
    folder.write_json("solution/solution.json", content)
    assert solved(folder) == dict(zip(("likelihood", "sentence", "solved"), expected, strict=True))
    assert written(folder.path).data["solved"] == solved(folder)


def test_a_run_without_a_solution(tmp_path):
    run = new_run(tmp_path / "run")
    assert solved(run) is None
    assert "solved" not in written(run.path).data


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"settings": 3},
        {"settings": {}, "verdict": 3},
        {"settings": {}, "verdict": {"solved": True}},
        {"settings": {}, "verdict": {"solved": 1.0, "sentence": "No."}},
        {"settings": {}, "verdict": {"solved": True, "sentence": ["No."]}},
    ],
)
def test_a_solution_that_is_damaged(folder, content):
    folder.write_json("solution/solution.json", content)
    with pytest.raises(CheckpointError, match="it is no solution"):
        solved(folder)
