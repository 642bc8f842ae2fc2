from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
import xarray as xr

from cpomdp_ppl.experiments import files
from cpomdp_ppl.inference import ObservableOperator
from cpomdp_ppl.models import LineGrid
from solvers import cids

with warnings.catch_warnings():  # once a day, it tells of its next version
    warnings.simplefilter("ignore")
    import arviz as az


@pytest.fixture(scope="module")
def solution():
    model = LineGrid(horizon=4)
    return cids.fit(
        model, likelihood="exact", iterations=2, batch_size=200, prior=[0.3, 0.7], seed=0, progress=False
    )


@pytest.mark.slow
def test_what_it_exports_are_episodes_of_its_policy(solution, tmp_path):
    data = solution.to_inference_data(30, likelihood="exact", chains=2, draws=50, seed=1)
    assert data.posterior.sizes["episode"] == 30
    assert data.attrs["seed"] == 1
    xr.testing.assert_identical(data["fit_history"], solution.history)
    again = solution.to_inference_data(30, likelihood="exact", chains=2, draws=50, seed=1)
    xr.testing.assert_identical(data.posterior, again.posterior)
    data.to_netcdf(str(tmp_path / "data.nc"))
    xr.testing.assert_equal(az.from_netcdf(str(tmp_path / "data.nc"))["fit_history"].load(), solution.history)

    # With the prior of the fit: what was seen, sensed with an accuracy of 0.85, says the rest.
    side = data.observed_data["side"].values
    ahead = np.nansum(2 * side - 1, 1)  # how much oftener it said right
    odds = 0.3 / 0.7 * (0.85 / 0.15) ** ahead
    found = data.sample_stats["context_probability"][0, :, -1, 0]
    assert np.allclose(found, odds / (1 + odds), atol=1e-6)


def test_it_prints_as_a_line(solution):
    text = str(solution)
    assert text.startswith("Solution(model=LineGrid, policy=LSTMPolicy, prior=[")
    assert "finished=True, last={'return': " in text
    assert "\n" not in text
    lived = cids.run(LineGrid(), 0, 1, solution=solution, seed=0, progress=False)
    assert str(lived).startswith("Run(model=LineGrid, R=1, K=1, mean return=")
    assert str(solution.evaluate(20).per_episode) == "PerEpisode(B=20, drawn=False)"


def test_another_prior_may_be_given(solution):
    data = solution.to_inference_data(5, likelihood=ObservableOperator(), draws=5, prior=[0.0, 1.0], seed=0)
    assert (data.constant_data["true_context"] == 1).all()
    assert (data.posterior["context_index"] == 1).all()


def test_bad_arguments_are_named(solution):
    with pytest.raises(ValueError, match="num_episodes: expected a positive integer, got 0"):
        solution.to_inference_data(0)
    with pytest.raises(ValueError, match="seed: expected None or an integer"):
        solution.to_inference_data(seed="x")
    with pytest.raises(TypeError, match="colour"):
        solution.to_inference_data(2, colour="red")
    assert torch.is_grad_enabled()


def names(place):
    return sorted(path.name for path in place.iterdir())


def test_a_solution_of_an_earlier_format(solution, tmp_path):
    """There, weights were always called the same, and settings did not name them."""
    solution.save(tmp_path)
    content = json.loads((tmp_path / "solution.json").read_text())
    (tmp_path / content.pop("weights")).rename(tmp_path / "policy.pt")
    (tmp_path / "solution.json").write_text(json.dumps(content))
    loaded = cids.load(tmp_path, solution.model)
    for name, weight in solution.policy.state_dict().items():
        assert torch.equal(weight, loaded.policy.state_dict()[name])
    loaded.save(tmp_path)
    assert names(tmp_path) == [
        json.loads((tmp_path / "solution.json").read_text())["weights"],
        "solution.json",
    ]
    cids.load(tmp_path, solution.model)


def test_a_solution_that_is_saved_while_it_is_read(solution, tmp_path, monkeypatch):
    solution.save(tmp_path)
    real, calls = files.load_json, []

    def load_json(path):
        calls.append(path)
        gone = {"weights": "policy-0123456789abcdef.pt"} if len(calls) == 1 else {}
        return real(path) | gone

    monkeypatch.setattr("solvers.cids.solution.load_json", load_json)
    assert cids.load(tmp_path, solution.model).settings == solution.settings
    assert len(calls) == 2


def test_what_cannot_be_cleaned_up_does_no_harm(solution, tmp_path, monkeypatch):
    (tmp_path / "policy-0123456789abcdef.pt").mkdir()  # which is not deleted like a file
    solution.save(tmp_path)
    cids.load(tmp_path, solution.model)

    def fails(*_):
        raise ZeroDivisionError("the error itself")

    monkeypatch.setattr("solvers.cids.solution.save_json", fails)
    (tmp_path / "solution.json").write_text("{")
    before = names(tmp_path)
    with torch.no_grad():
        next(solution.policy.parameters()).add_(1.0)
    with pytest.raises(ZeroDivisionError, match="the error itself"):
        solution.save(tmp_path)
    assert set(before) < set(names(tmp_path))  # nobody knows which weights are in use
