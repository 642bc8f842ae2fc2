import numpy as np
import pytest
import xarray as xr

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.diagnostics import summary, to_inference_data
from cpomdp_ppl.diagnostics.inference_data import wrapped
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark


def export(model, **options):
    episodes = simulate(model, RandomPolicy(model.num_actions), 2, seed=0)
    return to_inference_data(model, episodes, **{"chains": 2, "draws": 20, "seed": 0, **options})


def posterior(**variables):
    """A posterior as `to_inference_data` makes it, of draws `[chain, draw]`."""
    group = xr.Dataset({name: (("chain", "draw"), values) for name, values in variables.items()})
    return wrapped({"posterior": group})


def test_chains_that_all_say_the_same_agree():
    """The suite makes errors of warnings: there are none."""
    drawn = np.random.default_rng(0).normal(size=(4, 50))
    sure, apart = np.ones((4, 50)), np.repeat([[1.0], [1.0], [0.0], [0.0]], 50, 1)
    table = summary(posterior(is_context=sure, apart=apart, drawn=drawn), round_to="none")
    assert table["r_hat"]["is_context"] == 1.0
    assert table["mcse_sd"]["is_context"] == 0.0
    assert table["r_hat"]["apart"] > 1e6  # each is sure of something else
    # R-hat of four chains by its formula, on normal scores of ranks, is close to that of the values.
    between, within = 50 * drawn.mean(1).var(ddof=1), drawn.var(1, ddof=1).mean()
    assert table["r_hat"]["drawn"] == pytest.approx(((between / within + 49) / 50) ** 0.5, abs=0.05)


def test_a_sure_context_in_an_export():
    data = export(LightDark(horizon=2), prior=[1.0, 0.0])
    table = summary(data, "is_context")
    assert table["r_hat"].tolist() == [1.0] * 4
    assert table["mean"].tolist() == [1.0, 0.0] * 2
    assert summary(export(LightDark(horizon=2), chains=1))["r_hat"].isna().all()  # of one chain there is none


@pytest.mark.parametrize("make", [Beacons, LightDark, ContextualTiger])
def test_state_stands_for_its_components(make):
    data = export(make(horizon=2))
    rows = summary(data, ["state"], coords={"time": [2]}, kind="diagnostics").index
    names = {str(row).partition("[")[0] for row in rows}
    assert names == ({"position", "heading"} if make is Beacons else {"state"})


def test_unknown_variables_are_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"var_names: expected variables out of .*'heading'.*, got x"):
        summary(export(Beacons(horizon=1)), ["x"])


def test_with_an_arviz_that_works_with_trees(monkeypatch):
    """ArviZ 1.x takes a `DataTree`, and gives numbers as text."""
    import arviz as az
    import pandas as pd

    asked = {}

    def of_tree(data, var_names=None, **options):
        asked.update(var_names=var_names, **options)
        return pd.DataFrame({"r_hat": ["nan", "1.01"]}, index=["position[0]", "heading[0]"])

    monkeypatch.setattr(az, "summary", of_tree)
    group = xr.Dataset(
        {name: (("chain", "draw"), np.zeros((2, 9))) for name in ("is_context", "position", "heading")}
    )
    table = summary(wrapped({"posterior": group}, datatree=True), "state", round_to="auto")
    assert asked == {"var_names": ["position", "heading"], "round_to": "auto"}
    assert [float(value) for value in table["r_hat"]] == [1.0, 1.01]
