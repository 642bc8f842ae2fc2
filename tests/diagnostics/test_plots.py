from __future__ import annotations

import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.colors import to_hex

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.diagnostics import (
    plot_agreement,
    plot_contexts,
    plot_filter,
    plot_states,
    to_inference_data,
)
from cpomdp_ppl.diagnostics.inference_data import inference_groups, wrapped
from cpomdp_ppl.diagnostics.plots import evidence_so_far
from cpomdp_ppl.diagnostics.style import COLOURS, TRUTH
from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.inference import ParticleFilter, as_backend
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark
from tests.programs import EyesOpen, Walk

PLOTS = [plot_contexts, plot_states, plot_filter]


@pytest.fixture(scope="module")
def light_dark():
    model = LightDark(horizon=8)
    return model, simulate(model, RandomPolicy(3), 6, seed=0)


@pytest.fixture(scope="module")
def smc(light_dark):
    """Of so few particles that chains differ."""
    return to_inference_data(*light_dark, ParticleFilter(12), chains=3, draws=40, seed=0)


@pytest.fixture(scope="module")
def grid(light_dark):
    return to_inference_data(*light_dark, "grid", chains=2, draws=5, seed=0)


def drawn_lines(axis):
    """Lines with points, `[n, 2]`, in order; legends have lines without."""
    return [line for line in axis.lines if len(line.get_xdata())]


def edges(band, times):
    """Lower and upper edge of what `fill_between` filled, at the given times."""
    x, y = band.get_paths()[0].vertices.T
    return tuple(np.array([pick(y[x == t]) for t in times]) for pick in (np.min, np.max))


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def recorded(model, episodes):
    """The same episodes as data from the field: no contexts, no states."""
    return Episodes.from_arrays(
        model, episodes.actions, episodes.observations, observed=episodes.observed, lengths=episodes.lengths
    )


def test_contexts_are_means_over_chains_with_bands_from_the_lowest_to_the_highest(smc):
    figure = plot_contexts(smc, [4, 1])
    p = smc.sample_stats["context_probability"]
    for axis, b in zip(figure.axes, (4, 1), strict=True):
        lines = drawn_lines(axis)
        assert len(lines) == len(axis.collections) == 2
        for k, (line, band) in enumerate(zip(lines, axis.collections, strict=True)):
            mine = p.sel(episode=b).isel(context=k)
            np.testing.assert_allclose(line.get_xdata(), np.arange(9))
            np.testing.assert_allclose(line.get_ydata(), mine.mean("chain"))
            low, high = edges(band, range(9))
            np.testing.assert_allclose(low, mine.min("chain"))
            np.testing.assert_allclose(high, mine.max("chain"))
        assert axis.get_xlabel() == "time (steps)"
    assert float((p.max("chain") - p.min("chain")).max()) > 0.01  # or the bands would show nothing


def test_the_true_context_is_the_thick_line_and_in_the_title(smc):
    figure = plot_contexts(smc)
    truth = smc.constant_data["true_context"].values
    assert len(figure.axes) == 3
    for b, axis in enumerate(figure.axes):
        widths = [line.get_linewidth() for line in drawn_lines(axis)]
        assert np.argmax(widths) == truth[b]
        assert len(set(widths)) == 2
        assert axis.get_title() == f"episode {b}: {LightDark.contexts[truth[b]]}"
    assert legend(figure) == ["light right", "light left", "true context"]


def test_truth_is_drawn_only_if_known(light_dark):
    model, episodes = light_dark
    data = to_inference_data(model, recorded(model, episodes), "ekf", chains=2, draws=10, seed=0)
    figure = plot_contexts(data, [0])
    assert figure.axes[0].get_title() == "episode 0"
    assert len({line.get_linewidth() for line in drawn_lines(figure.axes[0])}) == 1
    assert legend(figure) == ["light right", "light left"]
    figure = plot_states(data)
    assert TRUTH not in [line.get_color() for line in figure.axes[0].lines]
    assert legend(figure) == ["90 %", "50 %", "median", "z, seen"]


def test_fan_truth_and_observations(smc, light_dark):
    figure = plot_states(smc, 2)
    (axis,) = figure.axes
    draws = smc.posterior["state"].sel(episode=2).stack(sample=("chain", "draw")).transpose("sample", "time")
    for band, (low, high) in zip(axis.collections, ((5, 95), (25, 75)), strict=True):
        for found, q in zip(edges(band, range(9)), (low, high), strict=True):
            np.testing.assert_allclose(found, np.percentile(draws, q, axis=0), rtol=1e-5, atol=1e-6)
    median, truth, seen = axis.lines
    np.testing.assert_allclose(median.get_ydata(), np.median(draws, axis=0), rtol=1e-5, atol=1e-6)
    episodes = light_dark[1]
    np.testing.assert_array_equal(truth.get_ydata(), episodes.states[2])
    np.testing.assert_array_equal(seen.get_xdata(), np.arange(1, 9))  # what follows action t is seen at t + 1
    z, known = episodes.observations["z"][2].numpy(), episodes.observed["z"][2].numpy()
    assert known.any()
    np.testing.assert_array_equal(seen.get_ydata(), np.where(known, z, np.nan))
    assert legend(figure) == ["90 %", "50 %", "median", "truth", "z, seen"]


def test_a_panel_for_every_component_and_no_dots_where_sites_are_something_else():
    model = Beacons(horizon=4)
    data = to_inference_data(
        model, simulate(model, RandomPolicy(5), 2, seed=0), ParticleFilter(50), chains=2, draws=10, seed=0
    )
    figure = plot_states(data, 1)
    assert [axis.get_ylabel() for axis in figure.axes] == ["position[0]", "position[1]", "heading"]
    truth = data.constant_data["true_position"].sel(episode=1).values
    for k in range(2):
        np.testing.assert_array_equal(figure.axes[k].lines[1].get_ydata(), truth[:, k])
    assert legend(figure) == ["90 %", "50 %", "median", "truth"]


class Side(Walk):
    """Sees only on which side of the origin it is: a number of the state's shape, but no place."""

    def observation(self, state, action, context):
        pyro.sample("right", dist.Bernoulli(torch.sigmoid(state)))


@pytest.mark.parametrize(
    ("model", "likelihood"), [(ContextualTiger(horizon=4), "exact"), (Side(), "smc")], ids=["state", "site"]
)
def test_classes_are_not_set_beside_states(model, likelihood):
    episodes = simulate(model, RandomPolicy(model.num_actions), 2, seed=0)
    data = to_inference_data(model, episodes, likelihood, draws=5, seed=0)
    assert legend(plot_states(data)) == ["90 %", "50 %", "median", "truth"]


@pytest.mark.parametrize("model", [LightDark(horizon=6), EyesOpen()], ids=lambda model: type(model).__name__)
def test_evidence_so_far_is_that_of_the_filter(model):
    """Against the definition, `log Σ_c P(c) p(o_{0:t} | c)`; EyesOpen sees something at time 0."""
    episodes = simulate(model, RandomPolicy(model.num_actions), 5, seed=1)
    prior = torch.tensor([0.2, 0.8], dtype=torch.float64)
    data = to_inference_data(model, episodes, "ekf", prior=prior, chains=2, draws=2, seed=0)
    filtering = as_backend("ekf").run(model, episodes)
    terms = torch.cat([filtering.initial_increment[:, None], filtering.increments], 1).cumsum(1)
    expected = (prior.log() + terms).logsumexp(-1)
    for chain in evidence_so_far(data.sample_stats).values:
        np.testing.assert_allclose(chain, expected, rtol=1e-9, atol=1e-9)


def test_evidence_survives_a_context_without_probability(light_dark):
    data = to_inference_data(*light_dark, "ekf", prior=[1.0, 0.0], chains=1, draws=2, seed=0)
    found = evidence_so_far(data.sample_stats)
    np.testing.assert_allclose(
        found, data.sample_stats["increment"].isel(context=0).cumsum("time"), atol=1e-9
    )


def test_effective_particles_resampling_and_the_spread_of_chains(smc):
    figure = plot_filter(smc, [3, 5])
    axes = np.array(figure.axes).reshape(3, 2)
    stats = smc.sample_stats
    evidence = evidence_so_far(stats)
    marked = 0
    for (ess, total, spread), b in zip(axes.T, (3, 5), strict=True):
        for k in range(2):
            fraction = stats["ess"].sel(episode=b).isel(context=k).transpose("chain", "time").values / 12
            line, dots = ess.lines[2 * k : 2 * k + 2]
            np.testing.assert_allclose(line.get_ydata()[1:], fraction[:, 1:].mean(0))
            # It is below the threshold that a chain resamples: those are the dots, but for the last time.
            chain, t = np.nonzero(fraction[:, :-1] < 0.5)
            np.testing.assert_array_equal(dots.get_xdata(), t)
            np.testing.assert_allclose(dots.get_ydata(), fraction[chain, t])
            marked += len(t)
        assert ess.lines[-1].get_ydata()[0] == 0.5
        mine = evidence.sel(episode=b)
        np.testing.assert_allclose(total.lines[0].get_ydata(), mine.mean("chain"))
        np.testing.assert_allclose(total.lines[0].get_ydata()[-1], stats["evidence"].sel(episode=b).mean())
        for chain, line in enumerate(spread.lines[:3]):
            np.testing.assert_allclose(line.get_ydata(), mine[chain] - mine.mean("chain"), atol=1e-12)
    assert marked  # or nothing was compared


@pytest.mark.slow
def test_one_chain_has_no_spread_and_deterministic_backends_only_evidence(light_dark, grid):
    data = to_inference_data(*light_dark, chains=1, draws=2, seed=0)
    assert len(plot_filter(data, [0]).axes) == 2
    figure = plot_filter(grid)
    assert [axis.get_ylabel() for axis in figure.axes] == ["evidence log p(o) (nats)", "", ""]
    np.testing.assert_allclose(
        figure.axes[2].lines[0].get_ydata()[-1], grid.sample_stats["evidence"].sel(episode=2)[0]
    )


@pytest.mark.slow
def test_agreement_is_with_the_most_exact_one(smc, grid, light_dark):
    ekf = to_inference_data(*light_dark, "ekf", chains=2, draws=2, seed=0)
    figure = plot_agreement({"particles": smc, "linear": ekf, "cells": grid})
    left, right = figure.axes
    assert left.get_xlabel() == "P(light right) by cells"
    assert right.get_ylabel() == "evidence − that of cells (nats)"
    exact = grid.sample_stats
    x = exact["context_probability"].isel(time=-1, context=0).mean("chain")
    points = [line for line in left.lines if line.get_marker() == "o"]
    differences = [line for line in right.lines if line.get_marker() == "o"]
    for data, point, bars, difference in zip((smc, ekf), points, left.collections, differences, strict=True):
        p = data.sample_stats["context_probability"].isel(time=-1, context=0)
        np.testing.assert_allclose(point.get_xdata(), x)
        np.testing.assert_allclose(point.get_ydata(), p.mean("chain"))
        ends = np.array(bars.get_segments())  # [B, 2, 2]
        np.testing.assert_allclose(ends[:, 0, 1], p.min("chain"))
        np.testing.assert_allclose(ends[:, 1, 1], p.max("chain"))
        gap = data.sample_stats["evidence"].mean("chain") - exact["evidence"].mean("chain")
        np.testing.assert_allclose(difference.get_ydata(), gap)
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["particles", "linear"]
    assert plot_agreement({"a": smc, "b": ekf}).axes[0].get_xlabel().endswith("by a")
    assert plot_agreement({"a": smc, "b": ekf}, "b").axes[0].get_xlabel().endswith("by b")


def test_episodes_are_drawn_to_their_end(light_dark):
    model, episodes = light_dark
    lengths = torch.tensor([3, 8, 8, 5, 8, 8])
    known = {site: flags & (torch.arange(8) < lengths[:, None]) for site, flags in episodes.observed.items()}
    short = Episodes.from_arrays(
        model, episodes.actions, episodes.observations, observed=known, lengths=lengths
    )
    data = to_inference_data(model, short, chains=2, draws=5, seed=0)
    figures = (plot_contexts(data, [3]), plot_states(data, 3), plot_filter(data, [3]))
    assert [figure.axes[0].lines[0].get_xdata()[-1] for figure in figures] == [5, 5, 5]


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["smc", "ekf"])
def test_a_data_tree_gives_the_same_pictures(light_dark, likelihood):
    groups = inference_groups(*light_dark, likelihood, chains=2, draws=5, seed=0)
    tree, classic = wrapped(groups, datatree=True), wrapped(groups, datatree=False)
    assert type(tree) is not type(classic)
    other = to_inference_data(*light_dark, "ukf", chains=1, draws=2, seed=0)
    pairs = [(plot(tree), plot(classic)) for plot in PLOTS]
    pairs.append((plot_agreement({"a": tree, "b": other}), plot_agreement({"a": classic, "b": other})))
    for found, expected in pairs:
        for one, another in zip(found.axes, expected.axes, strict=True):
            for line, same in zip(one.lines, another.lines, strict=True):
                np.testing.assert_array_equal(line.get_ydata(), same.get_ydata())


@pytest.mark.slow
def test_pictures_leave_pyplot_alone_and_can_be_written(smc, grid, tmp_path):
    import matplotlib.pyplot as plt

    before, settings = plt.get_fignums(), dict(matplotlib.rcParams)
    figures = [plot(smc) for plot in PLOTS] + [plot_agreement({"smc": smc, "grid": grid})]
    for k, figure in enumerate(figures):
        figure.savefig(tmp_path / f"{k}.png")
    assert plt.get_fignums() == before
    assert dict(matplotlib.rcParams) == settings


def test_contexts_have_colours_of_their_own():
    model = Beacons(horizon=3)
    data = to_inference_data(model, simulate(model, RandomPolicy(5), 1, seed=0), chains=1, draws=2, seed=0)
    lines = drawn_lines(plot_contexts(data).axes[0])
    assert [to_hex(line.get_color(), keep_alpha=False).upper() for line in lines] == list(COLOURS[:4])


@pytest.mark.parametrize("plot", PLOTS)
@pytest.mark.parametrize("data", [None, 3, {}, {"posterior": None}, [1, 2]], ids=repr)
def test_what_is_no_inference_data_is_refused(plot, data):
    with pytest.raises(ValueError, match=r"data: expected what `to_inference_data` returns, with the group"):
        plot(data)


@pytest.mark.parametrize("plot", [plot_contexts, plot_filter])
@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ([6], r"episodes: expected numbers of episodes, from 0 to 5, got 6"),
        ([0, -1], r"episodes: expected numbers of episodes, from 0 to 5, got -1"),
        ([1.0], r"episodes: expected numbers of episodes"),
        ([], r"episodes: expected at least one episode"),
        (2, r"episodes: expected a sequence of numbers of episodes, got 2"),
        ("01", r"episodes: expected a sequence"),
    ],
)
def test_episodes_that_are_not_there_are_refused(smc, plot, episodes, message):
    with pytest.raises(ValueError, match=message):
        plot(smc, episodes)


@pytest.mark.parametrize("episode", [6, -1, None, [0], "first", True], ids=repr)
def test_an_episode_that_is_not_there_is_refused(smc, episode):
    with pytest.raises(ValueError, match=r"episode: expected numbers of episodes, from 0 to 5"):
        plot_states(smc, episode)


@pytest.mark.slow
def test_only_the_same_episodes_can_be_compared(smc, grid, light_dark):
    model, episodes = light_dark
    with pytest.raises(ValueError, match=r"results: expected two or more results"):
        plot_agreement({"smc": smc})
    with pytest.raises(ValueError, match=r"results: expected two or more results"):
        plot_agreement([smc, grid])
    with pytest.raises(ValueError, match=r"reference: expected one of 'smc', 'grid', got exact"):
        plot_agreement({"smc": smc, "grid": grid}, "exact")
    fewer = to_inference_data(model, episodes[:4], "ekf", chains=1, draws=2, seed=0)
    with pytest.raises(
        ValueError, match=r"results: expected the same episodes and contexts as in 'grid', got x"
    ):
        plot_agreement({"x": fewer, "grid": grid})
    others = simulate(model, RandomPolicy(3), 6, seed=1)
    other = to_inference_data(model, others, "ekf", chains=1, draws=2, seed=0)
    with pytest.raises(ValueError, match=r"results: expected the same episodes"):
        plot_agreement({"x": other, "grid": grid})


def test_particles_that_nobody_counted_are_refused(smc):
    data = smc.copy()
    del data.sample_stats.attrs["num_particles"]
    with pytest.raises(ValueError, match=r"data: expected attributes num_particles"):
        plot_filter(data)
