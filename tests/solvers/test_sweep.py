"""Fits over models, settings and seeds: what each would be by itself, and nothing lost when one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cpomdp_ppl import evaluate
from cpomdp_ppl.experiments.files import load_tensors
from cpomdp_ppl.experiments.sweep import SweepError
from cpomdp_ppl.models import ContextualTiger, LineGrid
from solvers import cids
from solvers.cids import training
from solvers.cids.policy import LSTMPolicy
from solvers.cids.training import CHECKPOINT
from solvers.sweep import FITS, FitAndEvaluate, sweep

ROOT = Path(__file__).parent.parent.parent
QUICK = dict(likelihood="exact", iterations=3, batch_size=20)
HERE = dict(num_episodes=60, workers=1, progress=False)


def timeless(found):
    return found.drop_vars("training_seconds")


@pytest.mark.slow
def test_each_point_is_a_fit_and_its_evaluation():
    models = {"grid": LineGrid(horizon=3), "tiger": ContextualTiger(horizon=3)}
    found = sweep(models, seeds=2, temperature=[0.0, 2.0], evaluation_seed=5, **QUICK, **HERE)
    assert dict(found.sizes) == {"model": 2, "temperature": 2, "seed": 2}
    assert (found["training_seconds"] > 0).all()
    for name, temperature, seed in (("grid", 2.0, 1), ("tiger", 0.0, 0)):
        model = models[name]
        alone = cids.fit(model, temperature=temperature, seed=seed, progress=False, **QUICK)
        expected = evaluate(model, alone.policy, 60, prior=alone.prior, seed=5)
        one = found.sel(model=name, temperature=temperature, seed=seed)
        assert one["return"].item() == expected.returns.mean
        assert one["return_standard_error"].item() == expected.returns.standard_error
        assert one["entropy"].item() == expected.entropy.mean
        assert one["identified"].item() == expected.identified
    assert len(set(found["return"].values.flat)) > 1


def test_settings_by_label_and_for_all():
    model = LineGrid(horizon=3)
    objectives = {"eq. 5": "information", "Lemma 2": "variational"}
    found = sweep(model, seeds=[7], objective=objectives, prior=(0.8, 0.2), **QUICK, **HERE)
    assert found["return"].dims == ("model", "objective", "seed")
    assert found["model"].values.tolist() == ["LineGrid"]
    alone = cids.fit(model, objective="variational", prior=(0.8, 0.2), seed=7, progress=False, **QUICK)
    expected = alone.evaluate(60).returns.mean
    assert found["return"].sel(model="LineGrid", objective="Lemma 2", seed=7).item() == expected


def test_a_policy_that_is_given_is_learned_anew_at_each_point():
    model = LineGrid(horizon=3)
    policy = LSTMPolicy(model, hidden=8, seed=0)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    both = sweep(model, seeds=2, policy=policy, **QUICK, **HERE)
    assert all(bool((before[name] == weight).all()) for name, weight in policy.state_dict().items())
    assert timeless(sweep(model, seeds=[1], policy=policy, **QUICK, **HERE)).identical(
        timeless(both.sel(seed=[1]))
    )


@pytest.mark.parametrize(
    ("models", "settings", "message"),
    [
        (LineGrid, {}, "models: expected"),
        ([], {}, "models: expected"),
        ([LineGrid(), LineGrid(horizon=3)], {}, "models: expected names"),
        ({"a": 3}, {}, "model: expected an instance"),
        (LineGrid(), {"seeds": 0}, "^seeds: expected a positive integer, got 0"),
        (LineGrid(), {"seeds": 1.5}, "^seeds: expected how many, or which, got 1.5"),
        (LineGrid(), {"seeds": True}, "^seeds: expected how many, or which, got True"),
        (LineGrid(), {"seeds": "12"}, "^seeds: expected how many, or which, got 12"),
        (LineGrid(), {"seeds": []}, "^seeds: expected at least one"),
        (LineGrid(), {"seeds": [0, -1]}, "^seeds: expected integers from 0 to 2\\*\\*32 - 1, got -1"),
        (LineGrid(), {"seeds": [0, 2**32]}, "^seeds: expected integers from 0"),
        (LineGrid(), {"seeds": [None]}, "^seeds: expected integers from 0"),
        (LineGrid(), {"folder": 3}, "^folder: expected a path, got 3"),
        (LineGrid(), {"num_episodes": 0}, "num_episodes: expected"),
        (LineGrid(), {"evaluation_seed": None}, "^evaluation_seed: expected"),
        (LineGrid(), {"evaluation_seed": -1}, "^evaluation_seed: expected"),
        (LineGrid(), {"temprature": 3}, "settings: expected those of cids.fit"),
        (LineGrid(), {"checkpoint": "here"}, "settings: expected those of cids.fit"),
    ],
)
def test_arguments_that_make_no_sense(models, settings, message):
    with pytest.raises(ValueError, match=message):
        sweep(models, **{**HERE, **settings})


@pytest.mark.slow
def test_a_killed_fit_goes_on_where_it_was(tmp_path, monkeypatch):
    """In the middle of a fit; what it had learned is there, and it ends where it would have ended."""
    folder, settings = tmp_path / "sweep", dict(likelihood="exact", iterations=40, batch_size=20)
    script = f"""
    from cpomdp_ppl.models import LineGrid
    from solvers.sweep import sweep

    settings = dict({settings!r}, checkpoint_every=2)
    sweep(LineGrid(horizon=3), seeds=1, folder={str(folder)!r}, **settings, **{HERE!r})
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environment)
    try:
        end = time.monotonic() + 60
        while not list(folder.glob(f"{FITS}/*/{CHECKPOINT}")):
            assert time.monotonic() < end
            assert killed.poll() is None
            time.sleep(0.02)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    (checkpoint,) = folder.glob(f"{FITS}/*/{CHECKPOINT}")
    model = LineGrid(horizon=3)
    learned = int(load_tensors(checkpoint, model.device)["learner"]["iteration"])
    assert 0 < learned < 40
    iterations, iterate = [], training.Fitting.iterate
    monkeypatch.setattr(training.Fitting, "iterate", lambda fitting: iterations.append(1) or iterate(fitting))
    resumed = sweep(model, seeds=1, folder=folder, checkpoint_every=2, **settings, **HERE)
    assert len(iterations) == 40 - learned
    assert not (folder / FITS).exists()
    whole = sweep(model, seeds=1, checkpoint_every=2, **settings, **HERE)
    assert timeless(resumed).identical(timeless(whole))


@pytest.mark.slow
def test_checkpoints_of_others_are_left_alone(tmp_path, monkeypatch):
    """Those of other sweeps in the same folder, and of points of this one that failed."""
    model, folder = LineGrid(horizon=3), tmp_path / "sweep"
    sweep(model, seeds=[5], folder=folder, **QUICK, **HERE)
    assert not (folder / FITS).exists()
    task = FitAndEvaluate(60, 0, QUICK)
    other, broken = (folder / FITS / task.place(model, seed) for seed in (9, 1))
    cids.fit(model, seed=9, checkpoint=other, progress=False, **QUICK)  # of a sweep that is not finished
    evaluated = []

    def once(*arguments, **settings):
        evaluated.append(1)
        if len(evaluated) == 2:
            raise MemoryError
        return evaluate(*arguments, **settings)

    monkeypatch.setattr("solvers.sweep.evaluate", once)
    with pytest.raises(SweepError, match="1 of 2 points failed: model=LineGrid, seed=1"):
        sweep(model, seeds=2, folder=folder, **QUICK, **HERE)
    assert set((folder / FITS).iterdir()) == {other, broken}
    sweep(model, seeds=2, folder=folder, **QUICK, **HERE)
    assert set((folder / FITS).iterdir()) == {other}
    assert (other / CHECKPOINT).is_file()
    sweep(model, seeds=[9], folder=folder, **QUICK, **HERE)
    assert not (folder / FITS).exists()


@pytest.mark.slow
def test_checkpoints_of_other_processes_are_found(tmp_path):
    """For a model that is sent whole, as those of scripts are; there, `__main__` is a file of joblib's."""
    pytest.importorskip("joblib")

    class Shifted(LineGrid):
        def reward(self, state, action, context):
            return super().reward(state, action, context) + 1

    Shifted.__module__ = "__main__"
    sweep(Shifted(horizon=3), seeds=2, folder=tmp_path, **QUICK, **{**HERE, "workers": 2})
    assert len(list((tmp_path / "points").iterdir())) == 2
    assert not (tmp_path / FITS).exists()
