"""The scripts that the documents name, with little of everything: what they promise is printed and drawn."""

from __future__ import annotations

from functools import partial

import pytest

from baselines import rdpg
from cpomdp_ppl import simulate
from cpomdp_ppl.diagnostics import calibrate
from examples import compare, diagnose, light_dark, likelihoods, regret, simulate_light_dark
from solvers import cids

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # so little that many have their doubts


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script where nothing is in the way; returns what it printed, and the names of its figures."""
    monkeypatch.chdir(tmp_path)

    def main(script, *words):
        monkeypatch.setattr("sys.argv", [script.__name__, *words])
        script.main()
        return capsys.readouterr().out, {path.name for path in tmp_path.rglob("*.png")}

    return main


def test_simulate_light_dark(run):
    printed, figures = run(simulate_light_dark)
    assert "right way" in printed
    assert figures == {"simulate_light_dark.png"}


def test_light_dark(run, monkeypatch):
    evaluate = cids.Solution.evaluate
    monkeypatch.setattr(cids.Solution, "evaluate", lambda solution: evaluate(solution, 40))
    printed, figures = run(light_dark, "--iterations=1")
    assert "the paper's C-IDS" in printed
    assert figures == {"light_dark.png"}
    assert cids.load("runs/light_dark", light_dark.LightDark()).finished


def test_likelihoods(run, monkeypatch):
    monkeypatch.setattr(likelihoods, "compare", partial(likelihoods.compare, num_episodes=4))
    printed, _ = run(likelihoods)
    assert all(f"\n{name} " in printed for name in likelihoods.BACKENDS)


def test_diagnose(run, monkeypatch):
    monkeypatch.setattr(diagnose, "calibrate", lambda *given: calibrate(*given[:3], 50))
    monkeypatch.setattr(diagnose, "to_inference_data", partial(diagnose.to_inference_data, draws=20))
    monkeypatch.setattr(
        diagnose, "simulate", lambda model, policy, _, seed: simulate(model, policy, 3, seed=seed)
    )
    printed, figures = run(diagnose)
    assert "exact_loo" in printed
    assert printed.count("Whether the truth looks like a draw") == 2
    assert {"contexts.png", "states.png", "filter.png", "agreement.png", "calibration_ekf.png"} <= figures


def test_compare(run, monkeypatch):
    monkeypatch.setattr(cids, "fit", partial(cids.fit, iterations=1, batch_size=20))
    monkeypatch.setattr(rdpg, "fit", partial(rdpg.fit, num_episodes=40))
    printed, _ = run(compare, "--model=LineGrid", "--simulations=2", "--planned=2", "--learned=20")
    for name in ("C-IDS", "RDPG", "POMCP", "POUCT", "PFT-DPW", "IPFT", "QMDP", "likeliest context"):
        assert f"| {name} |" in printed


def test_regret(run, monkeypatch):
    monkeypatch.setattr(regret, "TEMPERATURES", (1.0,))
    printed, figures = run(regret, "--runs=2", "--episodes=5", "--iterations=1")
    assert "the exact maximiser" in printed
    assert {"ratio.png", "entropy.png"} <= figures
