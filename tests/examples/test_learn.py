"""The example on learning a model, with little of everything."""

import re

import pytest

from examples import learn


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # so few draws that ArviZ has its doubts
def test_it_learns_draws_and_plans(tmp_path, capsys):
    figure = tmp_path / "figures" / "learning.png"
    arguments = (
        "--episodes 30 --draws 6 --warm-up 10 --workers 1 --iterations 2 --evaluation 40 --seed 1 --output"
    )
    learn.main([*arguments.split(), str(figure)])
    printed = capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    for name in learn.GUESSES:
        estimate, error = map(float, re.findall(rf"{name} +(\S+) +(\S+)\n", printed)[0])
        truth, mean, sd = map(float, re.findall(rf"{name} +(\S+) +(\S+) +(\S+) +\d", printed)[0])
        assert abs(estimate - truth) < 4 * error
        assert abs(mean - truth) < 5 * max(error, sd)
    assert "planned on what was learned | 40 |" in printed
    assert "planned on the truth | 40 |" in printed
