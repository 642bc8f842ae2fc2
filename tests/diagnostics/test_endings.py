"""Exports, calibration and figures of episodes that end, and of actions that are real numbers.

The truth is a sum over all paths of a small model, written as loops; limits are in standard errors.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.actions import Box
from cpomdp_ppl.diagnostics import calibrate, plot_contexts, plot_filter, plot_states, to_inference_data
from cpomdp_ppl.inference import ParticleFilter
from tests.programs import Reef, Sail

DRAWS, FAR = 1500, 4.5
BOTH = ("chain", "draw")


class Rocky(Reef):
    rocks = 0.3


class Rockier(Reef):
    rocks = 0.45


class Lever(Sail):
    """May be thrown by a force that is never nought, and by which a chance is divided."""

    actions = Box(0.5, 2.0)

    def transition(self, state, action, context):
        thrown = pyro.sample("thrown", dist.Bernoulli(0.5 * action[..., 0] / action[..., 0]))
        return pyro.sample("x", dist.Normal(state + thrown, 0.3))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state + context, action[..., 0]))


@pytest.fixture(scope="module")
def rocky():
    """Episodes of a finite model and their export."""
    model = Rocky()
    episodes = simulate(model, RandomPolicy(2), 6, seed=3)
    assert len(set(episodes.lengths.tolist())) > 2
    return episodes, to_inference_data(model, episodes, "exact", chains=2, draws=DRAWS, seed=0)


def all_paths(actions):
    """Contexts, states `s_0 … s_n` and their probability before anything is seen, for given actions."""
    for c, *slips in product((0, 1), *[(False, True)] * len(actions)):
        path, p = [3], 0.5
        for action, slipped in zip(actions, slips, strict=True):
            path.append(path[-1] if slipped else min(max(path[-1] + 2 * action - 1, 0), 6))
            p *= 0.2 if slipped else 0.8
        yield c, path, p


def ends(c, state, rocks=0.3):
    return 1.0 if state == (1 if c == 0 else 5) else rocks


def loud(c, state):
    return 0.7 if (state < 3 if c == 0 else state > 3) else 0.4


def test_hindsight_of_episodes_that_ended(rocky):
    """Contexts, states, and what would be seen again, given when it ended and that it did not before."""
    episodes, data = rocky
    n = 2 * DRAWS
    for b, length in enumerate(episodes.lengths.tolist()):
        surf = episodes.observations["surf"][b, :length].tolist()
        over = episodes.observations["ended"][b, :length].tolist()
        weights = []
        for c, path, p in all_paths(episodes.actions[b, :length].tolist()):
            for s, heard, ended in zip(path[1:], surf, over, strict=True):
                p *= loud(c, s) if heard else 1 - loud(c, s)
                p *= ends(c, s) if ended else 1 - ends(c, s)
            weights.append((c, path, p))
        total = sum(p for *_, p in weights)

        def mean(of, weights=weights, total=total):
            return sum(p * of(c, path) for c, path, p in weights) / total

        found = data.posterior["is_context"].isel(episode=b, context=1).mean(BOTH)
        p = mean(lambda c, path: c)
        assert abs(float(found) - p) <= FAR * (p * (1 - p) / n) ** 0.5 + 1e-9
        states = data.posterior["state"].isel(episode=b)
        assert (states.isel(time=slice(length, None)) == states.isel(time=length)).all()
        for t in range(length + 1):
            mu = mean(lambda c, path, t=t: path[t])
            variance = mean(lambda c, path, t=t, mu=mu: (path[t] - mu) ** 2)
            assert abs(float(states.isel(time=t).mean(BOTH)) - mu) <= FAR * (variance / n) ** 0.5 + 1e-6
        for site, chance in (("surf", loud), ("ended", ends)):
            again = data.posterior_predictive[site].isel(episode=b)
            assert np.isnan(again.sel(time=slice(length + 1, None))).all()
            for t in range(1, length + 1):
                p = mean(lambda c, path, t=t, chance=chance: chance(c, path[t]))
                error = (p * (1 - p) / n) ** 0.5
                assert abs(float(again.sel(time=t).mean()) - p) <= FAR * error + 1e-9


def test_episodes_that_are_drawn_end_too(rocky):
    """Before anything is seen, for the actions that were taken: at every time, how many end just there."""
    episodes, data = rocky
    for b, length in enumerate(episodes.lengths.tolist()):
        drawn = data.prior_predictive["ended"].isel(episode=b)
        for t in range(1, length + 1):
            going, now = 0.0, 0.0
            for c, path, p in all_paths(episodes.actions[b, :length].tolist()):
                alive = np.prod([1 - ends(c, s) for s in path[1:t]])
                going += p * alive
                now += p * alive * ends(c, path[t])
            known = drawn.sel(time=t).notnull()
            error = max(going * (1 - going) / DRAWS, 0.0) ** 0.5
            assert abs(float(known.mean()) - going) <= FAR * error + 1e-9
            error = max(now * (1 - now) / DRAWS, 0.0) ** 0.5
            assert abs(float((drawn.sel(time=t) == 1).mean()) - now) <= FAR * error + 1e-9
        assert drawn.sel(time=slice(length + 1, None)).isnull().all()


def test_ends_and_actions_are_on_record(rocky):
    episodes, data = rocky
    known, seen = data.constant_data, data.observed_data
    for b, length in enumerate(episodes.lengths.tolist()):
        taken = episodes.actions[b, :length].tolist()
        assert known["actions"][b].values.tolist() == taken + [-1] * (5 - length)
        assert known["length"][b] == length
        path = episodes.states[b, : length + 1].tolist()
        assert known["true_state"][b].values.tolist() == path + path[-1:] * (4 - length)
        over = seen["ended"][b].values
        assert over[: length - 1].tolist() == [0.0] * (length - 1)
        assert np.isnan(over[length:]).all()
    # Only what was seen is a point of the log-likelihood.
    assert data.log_likelihood.sizes["step"] == int(episodes.lengths.sum())


@pytest.mark.slow
def test_axes_of_a_box_have_names(tmp_path):
    model = Sail()
    episodes = simulate(model, RandomPolicy(model.actions), 8, seed=1)
    data = to_inference_data(model, episodes, ParticleFilter(64), chains=2, draws=20, seed=0)
    known = data.constant_data["actions"]
    assert known.dims == ("episode", "time", "action_axis")
    assert known["action_axis"].values.tolist() == ["steer", "drive"]
    assert "action" not in data.constant_data.coords
    for b, length in enumerate(episodes.lengths.tolist()):
        assert np.array_equal(known[b, :length], episodes.actions[b, :length])
        assert np.isnan(known[b, length:]).all()
    assert np.isfinite(data.posterior["state"]).all()
    data.to_netcdf(str(tmp_path / "sail.nc"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "likelihood"), [(Rocky(), "exact"), (Sail(), ParticleFilter(256))], ids=["finite", "box"]
)
def test_ranks_are_uniform_where_episodes_end(model, likelihood):
    found = calibrate(model, RandomPolicy(model.actions), likelihood, 1500, seed=1)
    assert found.calibrated, str(found)
    assert min(found.p_values.values()) > 0.01, str(found)
    assert "ended" in found.observations


@pytest.mark.slow
def test_a_wrong_chance_of_an_end_is_caught():
    """Who believes that episodes end more often than they do has ranks of `ended` that are not uniform."""
    found = calibrate(Rocky(), RandomPolicy(2), "exact", 1500, believed=Rockier())
    assert found.failing == ("observations: ended",), str(found)
    with pytest.raises(ValueError, match="believed: expected"):
        calibrate(Rocky(), RandomPolicy(2), "exact", 10, believed=Sail())


def test_figures_mark_the_end_and_know_nothing_after_it(rocky):
    episodes, data = rocky
    lengths = episodes.lengths.tolist()
    longest = max(range(6), key=lengths.__getitem__)
    shortest = min(range(6), key=lengths.__getitem__)
    over = episodes.ended.tolist()
    assert lengths[shortest] < lengths[longest]
    assert over[shortest]
    for plot in (plot_contexts, plot_filter):
        figure = plot(data, [longest, shortest])
        for axis, b in zip(figure.axes[:2], (longest, shortest), strict=True):
            times = [list(line.get_xdata()) for line in axis.lines if len(line.get_xdata()) > 0]
            marks = [x for x in times if x == [lengths[b]] * 2]
            assert len(marks) == over[b]
            assert {tuple(x) for x in times if x not in marks} == {tuple(range(lengths[b] + 1))}
            assert axis.get_xlim()[1] == pytest.approx(1.04 * lengths[longest])
        assert "the end" in [text.get_text() for text in figure.legends[0].get_texts()]
    (axis,) = plot_states(data, shortest).axes
    drawn = {tuple(line.get_xdata()) for line in axis.lines if len(line.get_xdata()) > 0}
    assert drawn == {tuple(range(lengths[shortest] + 1)), (lengths[shortest],) * 2}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_programs_never_get_an_action_out_of_the_box(engine):
    """Past the end there is no action, and nought is none: of this box, it would be a chance of 0 / 0."""
    model = Lever()
    episodes = simulate(model, RandomPolicy(model.actions), 12, seed=0)
    for b, length in enumerate(episodes.lengths.tolist()):
        taken = episodes.actions[b, :length].tolist()
        assert episodes.lasting_actions[b].tolist() == taken + taken[-1:] * (model.horizon - length)
    smc = ParticleFilter(32, engine=engine)
    data = to_inference_data(model, episodes, smc, chains=1, draws=10, seed=0)
    assert np.isfinite(data.posterior["state"]).all()
    assert np.isfinite(data.prior["state"]).all()
    assert np.isfinite(data.sample_stats["evidence"]).all()


def test_what_was_seen_is_set_beside_the_state_though_the_end_is_seen_too():
    model = Sail()
    episodes = simulate(model, lambda history: torch.tensor([[0.5, 1.0]]).repeat(2, 1), 2, seed=1)
    data = to_inference_data(model, episodes, "ekf", chains=2, draws=5, seed=0)
    labels = [text.get_text() for text in plot_states(data).legends[0].get_texts()]
    assert "z, seen" in labels
