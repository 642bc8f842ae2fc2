"""Exports to ArviZ against exact filters and smoothers.

Limits are in standard errors: of independent draws, and of the filter's noise where there is any.
"""

from __future__ import annotations

import math
import warnings

import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr

from cpomdp_ppl import Episodes, RandomPolicy, simulate
from cpomdp_ppl.context import information_gain
from cpomdp_ppl.diagnostics import export, to_inference_data
from cpomdp_ppl.diagnostics.export import DITHER, FILTER, Export
from cpomdp_ppl.diagnostics.inference_data import inference_groups, wrapped
from cpomdp_ppl.errors import DegenerateWeightsError, ObservationError, UnsupportedModelError
from cpomdp_ppl.inference import ExtendedKalmanFilter, GridFilter, ObservableOperator, ParticleFilter
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.rng import seed_for
from tests.conftest import fixed_actions
from tests.programs import Dice, EyesOpen, Plates, Walk

with warnings.catch_warnings():  # once a day, it tells of its next version
    warnings.simplefilter("ignore")
    import arviz as az

matplotlib.use("Agg")

CHAINS, DRAWS = 4, 250
N = CHAINS * DRAWS
BOTH = ("chain", "draw")

# What never varies has no R-hat and no density.
CONSTANTS = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in scalar divide:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Your data appears to have a single value:UserWarning"),
]


def play(model, B, seed=0, **settings):
    return simulate(model, RandomPolicy(model.num_actions), B, seed=seed, **settings)


def worst_z(found, expected, variance, n=N):
    """The largest deviation of means of `n` draws with these variances, in standard errors."""
    error = np.sqrt(np.asarray(variance) / n)
    return float((np.abs(np.asarray(found) - np.asarray(expected)) / np.maximum(error, 1e-6)).max())


@pytest.fixture(scope="module")
def tiger():
    """A finite model's episodes, exported by the exact backend, and the truth about them."""
    model = ContextualTiger(horizon=6)
    episodes = play(model, 12).truncated(torch.tensor([6] * 9 + [2, 3, 5]))
    data = to_inference_data(model, episodes, "exact", chains=CHAINS, draws=DRAWS, seed=0)
    return model, episodes, data


@pytest.fixture(scope="module")
def light_dark():
    """Eight episodes of Light–Dark, exported by particle filters of two sizes."""
    model = LightDark(horizon=10)
    episodes = play(model, 8, seed=1)
    return (
        model,
        episodes,
        {n: to_inference_data(model, episodes, ParticleFilter(n), seed=0) for n in (8, 2000)},
    )


@pytest.mark.parametrize(
    ("make", "other"), [(LightDark, "ekf"), (LineGrid, "exact"), (ContextualTiger, "exact"), (Beacons, "ekf")]
)
class TestArviZ:
    pytestmark = CONSTANTS

    @pytest.mark.slow
    def test_everything_runs_as_it_is(self, make, other):
        model = make(horizon=4)
        episodes = play(model, 3)
        settings = {"draws": 60, "seed": 0}
        data, second = (to_inference_data(model, episodes, name, **settings) for name in ("smc", other))
        summary = az.summary(data)
        assert {"mean", "r_hat", "ess_bulk"} <= set(summary.columns)
        context = model.context_names[0]
        assert summary["mean"][f"is_context[0, {context}]"] == pytest.approx(
            float(data.posterior["is_context"][:, :, 0, 0].mean()), abs=1e-3
        )
        assert az.rhat(data)["is_context"].dims == ("episode", "context")
        assert float(az.ess(data)["is_context"].min()) > 20
        if make in (LightDark, LineGrid):  # of each kind one: drawing takes longest
            az.plot_trace(data)
            az.plot_forest(data)
        if make is LightDark:  # it takes real numbers for a density
            az.plot_ppc(data, num_pp_samples=5)
        matplotlib.pyplot.close("all")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto", UserWarning)
            loo = az.loo(data)
            comparison = az.compare({"smc": data, other: second})
        steps = sum(int(flags.sum()) for flags in episodes.observed.values())
        if make is ContextualTiger:
            steps //= 2  # two ears, always together
        assert loo.n_data_points == steps
        assert np.isfinite([loo.elpd_loo, loo.se, loo.p_loo]).all()
        assert set(comparison.index) == {"smc", other}
        # The same random numbers draw contexts from nearly the same posteriors, so little noise is left; but
        # linearising is biased (by 0.5 nats on Light–Dark, whose noise jumps at the origin).
        assert comparison["elpd_diff"].max() < (0.1 if other == "exact" else 1.0)


class TestContexts:
    @pytest.mark.parametrize("make", [ContextualTiger, LineGrid])
    def test_means_are_the_exact_posterior(self, make):
        model = make(horizon=6)
        episodes = play(model, 15, seed=3)
        exact = ObservableOperator().run(model, episodes).posterior()[:, -1].numpy()  # [B, C]
        data = to_inference_data(model, episodes, "exact", seed=1)
        with np.errstate(invalid="ignore"):
            mean = az.summary(data, var_names="is_context", round_to="none", kind="stats")["mean"]
        assert worst_z(mean.to_numpy().reshape(exact.shape), exact, exact * (1 - exact)) < 4.5

    @pytest.mark.slow
    def test_means_of_particle_filters_are_the_grids_posterior(self, light_dark):
        model, episodes, exports = light_dark
        exact = GridFilter().run(model, episodes, moments=False).posterior()[:, -1].numpy()  # [B, C]
        data = exports[2000]
        mean = az.summary(data, var_names="is_context", round_to="none", kind="stats")["mean"]
        spread = exact * (1 - exact)
        # log-odds are as noisy as both log-likelihoods; every chain has its own noise.
        noise = data.sample_stats["log_likelihood_se"].values ** 2  # [chain, B, C]
        filters = spread**2 * noise.sum(-1, keepdims=True).mean(0) / CHAINS
        assert worst_z(mean.to_numpy().reshape(exact.shape), exact, spread / N + filters, n=1) < 4.5

    def test_a_prior_of_ones_own_counts(self):
        model = LineGrid(horizon=3)
        episodes = play(model, 2)
        prior = torch.tensor([[1.0, 0.0], [0.1, 0.9]])
        data = to_inference_data(model, episodes, "exact", prior=prior, seed=0)
        assert (data.posterior["context_index"][:, :, 0] == 0).all()
        found = data.prior["is_context"].mean(BOTH).values
        assert worst_z(found, prior, prior * (1 - prior), DRAWS) < 4.5
        posterior = ObservableOperator().run(model, episodes).posterior(prior)
        assert np.allclose(data.sample_stats["context_probability"], posterior, atol=1e-12)

    def test_indices_and_indicators_agree(self, tiger):
        posterior = tiger[2].posterior
        assert (posterior["is_context"].argmax("context") == posterior["context_index"]).all()
        assert (posterior["is_context"].sum("context") == 1).all()


class TestStates:
    def test_finite_states_are_those_of_forward_backward(self, tiger):
        model, episodes, data = tiger
        right = ObservableOperator().smooth(model, episodes, 1, seed=0).probabilities[..., 1]  # [B, T+1, C]
        posterior = ObservableOperator().run(model, episodes).posterior()[:, -1]  # [B, C]
        joint = (right * posterior[:, None]).numpy()  # P(s_t = 1, c | y)
        drawn = data.posterior["state"] * data.posterior["is_context"]
        found = drawn.mean(BOTH).transpose("episode", "time", "context")
        assert worst_z(found, joint, joint * (1 - joint)) < 5  # 252 of them
        p = joint.sum(-1)
        assert worst_z(data.posterior["state"].mean(BOTH), p, p * (1 - p)) < 4.5

    @pytest.mark.slow
    @pytest.mark.parametrize(("backend", "share"), [("ekf", 1), (ParticleFilter(2000), 3)])
    def test_continuous_states_are_those_of_rts(self, backend, share):
        model = EyesOpen()
        episodes = play(model, 6).truncated(torch.tensor([3, 3, 3, 2, 1, 3]))
        exact = ExtendedKalmanFilter().smooth(model, episodes, 1, seed=0)
        posterior = ExtendedKalmanFilter().run(model, episodes).posterior()[:, None, -1]  # [B, 1, C]
        mean = (posterior * exact.state_mean).sum(-1)  # [B, T+1]
        square = (posterior * (exact.state_variance + exact.state_mean**2)).sum(-1)
        data = to_inference_data(model, episodes, backend, seed=2)
        # Trajectories share particles, which count for about a third in the worst row.
        variance = (square - mean**2).numpy()
        assert worst_z(data.posterior["state"].mean(BOTH), mean, share * variance) < 4.5
        assert np.abs(data.posterior["state"].var(BOTH) / variance - 1).max() < 0.25

    def test_filter_and_smoother_are_one_run(self, monkeypatch):
        """With a single particle, the only trajectory there can be is that of the filter's own means."""
        monkeypatch.setattr(export, "NUMBERS_AT_ONCE", 500)
        model = LightDark(horizon=6)
        episodes = play(model, 7)
        backend = ParticleFilter(1)
        data = to_inference_data(model, episodes, backend, chains=2, draws=5, seed=0)
        found = data.posterior
        for chain in range(2):
            means = []
            chunk = Export(model, episodes, backend, 2, 5, None, 0).chunk
            assert 1 < chunk < 7
            for start in range(0, 7, chunk):
                seed = seed_for(0, FILTER, chain, start)
                means.append(backend.run(model, episodes[start : start + chunk], seed=seed).state_mean)
            mean = torch.cat(means)  # [B, T+1, C]
            for draw in range(5):
                c = torch.as_tensor(found["context_index"].values[chain, draw])
                path = mean.gather(2, c[:, None, None].expand(-1, mean.shape[1], 1)).squeeze(2)
                assert np.allclose(found["state"][chain, draw], path, atol=1e-6)

    def test_they_stand_still_past_the_end(self, tiger):
        _, episodes, data = tiger
        for group in (data.posterior, data.prior):
            for b, length in enumerate(episodes.lengths.tolist()):
                tail = group["state"].isel(episode=b, time=slice(length, None))
                assert (tail == tail.isel(time=0)).all()


class TestPredictive:
    def test_replicated_growls_are_as_likely_as_the_smoother_says(self, tiger):
        model, episodes, data = tiger
        right = (
            ObservableOperator().smooth(model, episodes, 1, seed=0).probabilities[:, 1:, :, 1]
        )  # [B, T, C]
        posterior = ObservableOperator().run(model, episodes).posterior()[:, -1]  # [B, C]
        sharp = torch.tensor([0.85, 0.55, 0.85])  # of the left ear
        p = (posterior[:, None] * (right * sharp + (1 - right) * (1 - sharp))).sum(-1).numpy()
        found = data.posterior_predictive["left_ear"]
        heard = episodes.observed["left_ear"].numpy()
        assert (np.isnan(found).all(BOTH).values == ~heard).all()
        assert worst_z(found.mean(BOTH).values[heard], p[heard], (p * (1 - p))[heard]) < 4.5

    def test_the_prior_is_a_random_walk(self):
        model = Walk()
        episodes = simulate(model, fixed_actions(1, 0, 1), 8, seed=0).truncated(torch.tensor([3] * 7 + [2]))
        data = to_inference_data(model, episodes, "ekf", chains=1, draws=2000, seed=0)
        position = data.prior["state"].values[0]  # [draw, B, T+1]
        c = data.prior["context_index"].values[0][..., None]  # [draw, B, 1]
        t = np.minimum(np.arange(4), np.where(np.arange(8) == 7, 2, 3)[:, None])  # [B, T+1]
        z = (position - np.array([0, 1, 1, 2])[t]) / np.sqrt(1 + t * (1 + c) ** 2)
        assert np.abs(z.mean(0)).max() < 4.5 / 2000**0.5
        assert np.abs(z.var(0) - 1).max() < 4.5 * (2 / 2000) ** 0.5
        noise = data.prior_predictive["z"].values[0] - position[..., 1:]
        assert np.isnan(noise[:, 7, 2]).all()
        assert np.isfinite(noise[:, :7]).all()
        assert np.abs(noise[:, :7].mean(0)).max() < 4.5 / 2000**0.5
        assert np.abs(noise[:, :7].var(0) - 1).max() < 4.5 * (2 / 2000) ** 0.5

    def test_plates_and_first_looks(self):
        for model, names in ((Plates(), {"z", "battery"}), (Dice(), {"face", "pair", "warm"})):
            episodes = play(model, 3)
            data = to_inference_data(model, episodes, ParticleFilter(20), chains=2, draws=7, seed=0)
            replicas, seen = data.posterior_predictive, data.observed_data
            assert set(replicas.data_vars) == set(seen.data_vars) == names
            for name in names:
                assert replicas[name].dims == ("chain", "draw", *seen[name].dims)
                assert (np.isnan(replicas[name]) == np.isnan(seen[name])).all()
                assert (np.isnan(data.prior_predictive[name]) == np.isnan(seen[name])).all()
        assert seen["time"].values.tolist() == [0, 1, 2, 3, 4]
        assert (seen["pair"].isel(time=0) == episodes.initial_observations["pair"].numpy()).all()
        assert seen["pair"].dims == ("episode", "time", "pair_dim_0")


class TestLikelihoods:
    def test_they_are_the_backends_own(self, tiger):
        model, episodes, data = tiger
        exact = ObservableOperator().run(model, episodes)
        stats = data.sample_stats
        assert "ess" not in stats
        assert (stats["increment"].isel(time=0) == 0).all()
        for chain in range(CHAINS):
            assert np.array_equal(stats["increment"][chain, :, 1:], exact.increments)
            assert np.array_equal(stats["log_likelihood"][chain], exact.log_likelihood)
            assert np.allclose(stats["context_probability"][chain], exact.posterior(), atol=1e-12)
            assert np.allclose(stats["information_gain"][chain, :, 1:], information_gain(exact), atol=1e-12)
        evidence = (exact.log_likelihood.exp() / 3).sum(1).log()
        assert np.allclose(stats["evidence"], evidence, atol=1e-12)

    @pytest.mark.slow
    def test_each_chain_is_a_filter_of_its_own(self, light_dark):
        model, episodes, exports = light_dark
        stats = exports[2000].sample_stats
        for chain in range(CHAINS):
            seed = seed_for(0, FILTER, chain, 0)
            own = ParticleFilter(2000, chunk=len(episodes)).run(model, episodes, seed=seed)
            assert np.array_equal(stats["increment"][chain, :, 1:], own.increments)
            assert np.array_equal(stats["ess"][chain, :, 1:], own.ess)
            assert np.array_equal(stats["resampled"][chain, :, 1:], own.resampled)
            assert np.array_equal(stats["log_likelihood_se"][chain], own.standard_error)
        assert stats["resampled"].dtype == bool
        assert float(stats["log_likelihood"].std("chain").min()) > 0

    def test_the_first_look_counts(self):
        model = EyesOpen()
        episodes = play(model, 4)
        exact = ExtendedKalmanFilter().run(model, episodes)
        stats = to_inference_data(model, episodes, "ekf", draws=5, seed=0).sample_stats
        assert np.array_equal(stats["increment"][0, :, 0], exact.initial_increment)
        assert np.allclose(stats["increment"].sum("time"), stats["log_likelihood"])
        fall = math.log(2) - torch.special.entr(exact.posterior()[:, -1]).sum(-1)
        assert np.allclose(stats["information_gain"].sum("time"), fall)

    def test_points_are_steps_with_something_seen(self, tiger):
        _, episodes, data = tiger
        points = data.log_likelihood["increment"]
        b, t = points["step_episode"].values, points["step_time"].values
        seen = episodes.observed["left_ear"].nonzero().numpy()
        assert np.array_equal(np.stack([b, t - 1], 1), seen)
        c = data.posterior["context_index"].values[:, :, b]
        chain = np.arange(CHAINS)[:, None, None]
        own = data.sample_stats["increment"].values[chain, b, t, c]
        assert np.abs(points - own).max() <= DITHER / 2


class TestLeaveOneOut:
    def test_it_leaves_out_a_factor(self, tiger):
        """For so few contexts it can be computed: `1 / Σ_c P(c | y) / p(o_t | h_t, c)`."""
        model, episodes, data = tiger
        exact = ObservableOperator().run(model, episodes)
        b, t = episodes.observed["left_ear"].nonzero().unbind(1)
        posterior, weights = exact.posterior()[b, -1], (-exact.increments[b, t]).exp()  # [S, C]
        mean = (posterior * weights).sum(-1)
        error = ((posterior * weights**2).sum(-1) - mean**2).sqrt() / mean / N**0.5  # [S]
        loo = az.loo(data, pointwise=True)  # without a warning
        assert not loo.warning
        assert float(loo.pareto_k.max()) < loo.good_k
        # Smoothing of weights that need none moves a step by less than 0.01 here.
        assert (np.abs(loo.loo_i + mean.log().numpy()) < 4.5 * error.numpy() + 0.02).all()
        by_episode = torch.zeros(len(episodes), dtype=torch.float64).index_add_(
            0, b, error
        )  # they share draws
        total = 4.5 * float(by_episode.square().sum().sqrt()) + 0.1
        assert loo.elpd_loo == pytest.approx(-float(mean.log().sum()), abs=total)

    def test_warnings_are_for_contexts_hardly_ever_drawn(self):
        model = LineGrid()
        data = to_inference_data(model, play(model, 20, seed=5), "exact", seed=0)
        points = data.log_likelihood["increment"]
        few = (points < points.min(BOTH) + 2 * DITHER).sum(BOTH) < 5
        assert 0 < int(few.sum()) < len(few)
        with pytest.warns(UserWarning, match="shape parameter of Pareto"):
            loo = az.loo(data, pointwise=True)
        assert ((loo.pareto_k > loo.good_k) == few).all()

    def test_certainty_is_no_failure(self):
        model = LineGrid(accuracy=1.0)
        episodes = simulate(model, fixed_actions(*[2] * 10), 5, seed=0)
        data = to_inference_data(model, episodes, "exact", seed=0)
        assert (data.posterior["context_index"] == xr.DataArray(episodes.contexts, dims="episode")).all()
        assert np.isneginf(data.sample_stats["log_likelihood"]).any()
        assert np.isfinite(data.log_likelihood["increment"]).all()
        loo = az.loo(data)  # without a warning
        assert loo.elpd_loo == pytest.approx(0, abs=50 * DITHER)
        assert not loo.warning

    def test_nothing_seen_at_all(self):
        model = LineGrid()
        episodes = simulate(model, fixed_actions(*[0] * 10), 2, seed=0)
        data = to_inference_data(model, episodes, "exact", draws=5, seed=0)
        assert data.log_likelihood["increment"].shape == (4, 5, 0)
        assert np.isnan(data.observed_data["side"]).all()


def test_r_hat_tells_good_filters_from_bad(light_dark):
    _, _, exports = light_dark
    names = ["is_context", "state"]
    good, bad = (az.rhat(exports[n], var_names=names).to_array().max().item() for n in (2000, 8))
    assert good < 1.05  # 1.01 with this seed
    assert bad > 1.2  # 1.27 with this seed


@pytest.mark.slow
@pytest.mark.parametrize("make", [ContextualTiger, Beacons, Dice, Plates])
def test_files_hold_the_same(make, tmp_path):
    model = make()
    episodes = play(model, 3).truncated(torch.tensor([3, 2, 3]))
    data = to_inference_data(model, episodes, ParticleFilter(20), chains=2, draws=6, seed=0)
    data.to_netcdf(str(tmp_path / "data.nc"))
    again = az.from_netcdf(str(tmp_path / "data.nc"))
    assert again.groups() == data.groups()
    assert again.attrs == data.attrs
    for group in data.groups():
        xr.testing.assert_identical(again[group].load(), data[group])
        for name, values in data[group].data_vars.items():
            assert again[group][name].dtype == values.dtype


def test_what_is_known_is_constant_data(tiger):
    model, episodes, data = tiger
    known = data.constant_data
    assert known["action"].values.tolist() == list(model.action_names)
    assert (known["actions"].isel(time=6) == -1).all()
    assert known["actions"][10].values.tolist() == [*episodes.actions[10, :3].tolist(), -1, -1, -1, -1]
    assert np.array_equal(known["length"], episodes.lengths)
    assert np.array_equal(known["true_context"], episodes.contexts)
    for b, length in enumerate(episodes.lengths.tolist()):  # past the end it stands still, as draws do
        path = episodes.states[b, : length + 1].tolist()
        assert known["true_state"][b].values.tolist() == path + path[-1:] * (model.horizon - length)
    assert np.array_equal(known["observed_left_ear"][:, 1:], episodes.observed["left_ear"])
    assert not known["observed_left_ear"][:, 0].any()
    assert np.array_equal(
        np.isnan(data.observed_data["left_ear"]), ~known["observed_left_ear"].sel(time=slice(1, None))
    )


def test_attributes_say_where_it_comes_from(tiger):
    attributes = tiger[2].attrs
    assert attributes == tiger[2].posterior.attrs
    assert (attributes["model"], attributes["likelihood"], attributes["seed"]) == (
        "ContextualTiger",
        "exact",
        0,
    )
    assert attributes["inference_library_version"]


def test_a_tree_has_the_same_groups():
    model = LineGrid(horizon=3)
    groups = inference_groups(model, play(model, 2), "exact", chains=2, draws=5, seed=0)
    tree = wrapped(groups, datatree=True)
    assert isinstance(tree, xr.DataTree)
    assert set(tree.children) == set(groups)
    for name, group in groups.items():
        xr.testing.assert_identical(tree[name].to_dataset(), group)
    assert tree.attrs == groups["posterior"].attrs


def test_the_seed_that_was_drawn_is_noted():
    model = LightDark(horizon=4)
    episodes = play(model, 3)
    unseeded = inference_groups(model, episodes, ParticleFilter(20), chains=2, draws=5)
    seed = unseeded["posterior"].attrs["seed"]
    again, other = (
        inference_groups(model, episodes, ParticleFilter(20), chains=2, draws=5, seed=s)
        for s in (seed, seed ^ 1)
    )
    xr.testing.assert_identical(unseeded["posterior_predictive"], again["posterior_predictive"])
    assert not again["posterior"].equals(other["posterior"])


def test_it_shows_its_progress(capsys):
    model = LineGrid(horizon=2)
    to_inference_data(model, play(model, 2), "exact", draws=2, seed=0, progress=True)
    assert "8/8" in capsys.readouterr().err


def test_an_impossible_episode_is_named_whatever_the_chunk(monkeypatch):
    monkeypatch.setattr(export, "NUMBERS_AT_ONCE", 1)
    model = LineGrid(horizon=2, accuracy=1.0)
    episodes = Episodes.from_arrays(model, [["sense", "sense"]] * 3, {"side": [[1, 1], [0, 0], [0, 1]]})
    with pytest.raises(DegenerateWeightsError, match="time 2 of episode 0") as caught:
        to_inference_data(model, episodes, "exact", draws=5, seed=0)
    assert caught.value.__notes__ == ["(episodes are counted from 2 on)"]


class Awkward(Walk):
    """Names that are taken, or that files do not allow."""

    def initial(self, context):
        return {"context": pyro.sample("x", dist.Normal(0.0, 1.0)), "a/b": torch.tensor(True)}

    def transition(self, state, action, context):
        return {"context": pyro.sample("x", dist.Normal(state["context"], 1.0)), "a/b": ~state["a/b"]}

    def observation(self, state, action, context):
        pyro.sample("time", dist.Normal(state["context"], 1.0 + context))

    def reward(self, state, action, context):
        return state["context"]


@pytest.mark.slow
def test_names_that_are_taken_get_another(tmp_path):
    data = to_inference_data(Awkward(), play(Awkward(), 2), draws=5, seed=0)
    assert {"state.context", "a.b"} < set(data.posterior.data_vars)
    assert set(data.observed_data.data_vars) == {"observation.time"}
    assert data.posterior["a.b"][0, 0, 0].values.tolist() == [1, 0, 1, 0]
    data.to_netcdf(str(tmp_path / "data.nc"))


def test_bad_arguments_are_named():
    model = LineGrid(horizon=2)
    episodes = play(model, 2)
    for wrong, message in [
        ({"chains": 0}, "chains: expected a positive integer, got 0"),
        ({"draws": 2.5}, "draws: expected a positive integer, got 2.5"),
        ({"seed": -1}, "seed: expected None or an integer"),
        ({"prior": [0.5, 0.6]}, "prior: expected non-negative probabilities"),
        ({"likelihood": "magic"}, "likelihood: expected one of"),
        ({"progress": 3}, "progress: expected True or False, got 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            to_inference_data(model, episodes, **wrong)
    with pytest.raises(ValueError, match="model: expected an instance of a CPOMDP"):
        to_inference_data(LineGrid, episodes)
    with pytest.raises(ValueError, match="episodes: expected Episodes, got None"):
        to_inference_data(model, None)
    with pytest.raises(ObservationError, match="expected the sites"):
        to_inference_data(model, play(LightDark(), 2))
    with pytest.raises(UnsupportedModelError):
        to_inference_data(LightDark(), play(LightDark(), 2), "exact")
