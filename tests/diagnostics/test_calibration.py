from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import RandomPolicy
from cpomdp_ppl.diagnostics import Calibration, calibrate, calibrate_contexts, ranks
from cpomdp_ppl.diagnostics.calibration_plots import uniform_band
from cpomdp_ppl.diagnostics.ranks import Ranks, normalised_ranks, observed_times
from cpomdp_ppl.errors import ObservationError
from cpomdp_ppl.inference import ExtendedKalmanFilter, ParticleFilter
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.rng import isolated
from tests.programs import EyesOpen, Plates, Walk

HALF_THE_NOISE = LightDark(light_variance=0.5, dark_variance=4.0)


def looks_every_second_step(history):
    """Observe at odd times, and go either way in between."""
    B = history.num_episodes
    return torch.full((B,), 2) if history.time % 2 else torch.randint(2, (B,))


def assert_calibrated(calibration: Calibration, level: float = 0.01) -> None:
    assert calibration.calibrated, calibration.verdict
    for name, p in calibration.p_values.items():
        assert p > level, f"{name}: {calibration}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "likelihood"),
    [(LightDark(horizon=8), "grid"), (LineGrid(), "exact"), (ContextualTiger(), "exact")],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_exact_filters_are_calibrated(model, likelihood):
    calibration = calibrate(model, RandomPolicy(model.num_actions), likelihood, 1000)
    assert_calibrated(calibration)
    assert calibration.verdict.startswith("calibrated")
    assert calibration.contexts.brier == pytest.approx(calibration.contexts.expected_brier, abs=0.03)


@pytest.mark.slow
def test_a_prior_of_ones_own_is_drawn_from_and_believed():
    given = calibrate(LineGrid(), RandomPolicy(3), "exact", 1000, prior=(0.95, 0.05))
    assert_calibrated(given)
    often = float((given.contexts.contexts == 0).double().mean())
    assert abs(often - 0.95) < 4 * (0.95 * 0.05 / 1000) ** 0.5  # four standard errors
    # What was believed of contexts before anything is seen decides: with the model's it is another.
    models = calibrate(LineGrid(), RandomPolicy(3), "exact", 1000)
    assert given.contexts.brier < models.contexts.brier / 2
    with pytest.raises(ValueError, match="prior: expected"):
        calibrate(LineGrid(), RandomPolicy(3), "exact", 10, prior=(0.5, 0.25, 0.25))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "likelihood"),
    [
        (Beacons(horizon=6), ParticleFilter(512)),  # a dict for a state, a vector that is seen
        (EyesOpen(), "ekf"),  # linear, so exact; sees something before it acts
        (Plates(), "ekf"),  # plates of its own, one sensor of three broken
    ],
    ids=lambda part: type(part).__name__,
)
def test_states_and_sites_of_any_shape(model, likelihood):
    calibration = calibrate(model, RandomPolicy(model.num_actions), likelihood, 800, seed=1)
    tested = {name: p for name, p in calibration.p_values.items() if not math.isnan(p)}
    assert min(tested.values()) > 0.01, str(calibration)
    names = {
        Beacons: ["position[0]", "position[1]", "heading", "range", "bearing[0]", "bearing[1]"],
        EyesOpen: ["state", "z", "w"],
        Plates: ["state[0]", "state[1]", "z[0]", "z[1]", "z[2]", "battery"],
    }[type(model)]
    assert [*calibration.states, *calibration.observations] == names
    if isinstance(model, Plates):
        assert calibration.observations["z[1]"].hint == "never seen"
        assert calibration.calibrated
    if isinstance(model, EyesOpen):  # z is seen at all times, and in all episodes
        assert calibration.observations["z"].num_episodes == 800


class Detector(Walk):
    """Whether the walker is seen depends on where it is: on the right, mostly."""

    def observation(self, state, action, context):
        detected = pyro.sample("detected", dist.Bernoulli(torch.sigmoid(3.0 * state)))
        pyro.sample("z", dist.Normal(state, 0.5).mask(detected.bool()))


@pytest.mark.slow
def test_a_site_that_another_hides_is_ranked_among_draws_in_which_it_shows():
    calibration = calibrate(Detector(), RandomPolicy(2), ParticleFilter(1000), 1500)
    assert_calibrated(calibration)
    assert 500 < calibration.observations["z"].num_episodes < 1500


@pytest.mark.slow
def test_particles_of_few_are_caught_on_beacons():
    calibration = calibrate(Beacons(), RandomPolicy(5), ParticleFilter(8), 400)
    assert not calibration.calibrated
    assert "over-confident" in calibration.verdict


def test_noise_that_is_not_the_models_is_caught():
    calibration = calibrate(LightDark(), looks_every_second_step, "ekf", 1000, believed=HALF_THE_NOISE)
    assert calibration.verdict.startswith("not calibrated")
    assert "observations: z (over-confident: ranks pile up at both ends)" in calibration.verdict
    assert calibration.contexts.brier > calibration.contexts.expected_brier + 0.03
    twice = LightDark(light_variance=3.0, dark_variance=24.0)
    calibration = calibrate(LightDark(), looks_every_second_step, "ekf", 1000, believed=twice)
    assert "observations: z (under-confident: ranks crowd in the middle)" in calibration.verdict


class Drifting(Walk):
    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + action + 0.5, 1.0 + context))


@pytest.mark.slow
def test_a_drift_that_nobody_told_is_caught_with_its_sign():
    """Walk is linear and Gaussian in each context, so that the Kalman filter is exact."""
    assert_calibrated(calibrate(Walk(), RandomPolicy(2), "ekf", 1000))
    calibration = calibrate(Drifting(), RandomPolicy(2), "ekf", 1000, believed=Walk())
    assert calibration.states["state"].hint.startswith("too low")
    calibration = calibrate(Walk(), RandomPolicy(2), "ekf", 1000, believed=Drifting())
    assert calibration.states["state"].hint.startswith("too high")


@pytest.mark.slow
def test_p_values_of_a_right_filter_are_uniform():
    """Over 40 runs, each test rejects at 5 % as often as it should; P(Binomial(40, 0.05) > 7) < 0.001."""
    model = ContextualTiger(horizon=5)
    runs = [
        calibrate(model, RandomPolicy(3), "exact", 100, bins=8, seed=seed).p_values for seed in range(40, 80)
    ]
    for name in runs[0]:
        p = torch.tensor([run[name] for run in runs])
        assert int((p < 0.05).sum()) <= 7, name
        # Kolmogorov and Smirnov's distance: 1.63 / √n is its 99 % quantile.
        n = len(p)
        steps = torch.arange(n + 1) / n
        p = p.sort().values
        distance = torch.maximum((steps[1:] - p).abs(), (p - steps[:-1]).abs()).max()
        assert distance < 1.63 / n**0.5, name


@pytest.mark.slow
@pytest.mark.parametrize("concentration", [0.05, 1.0])  # nearly sure of themselves, and not
def test_size_and_power_of_the_context_test(concentration):
    invalid, caught = 0, 0
    for seed in range(40):
        with isolated(seed):
            p = dist.Dirichlet(torch.full((3,), concentration, dtype=torch.float64)).sample((80,))
            truth = dist.Categorical(p).sample()
        sharpened = p.clamp(min=1e-4) ** 2.5
        invalid += calibrate_contexts(p, truth, seed=seed).p_value <= 0.05
        caught += (
            calibrate_contexts(sharpened / sharpened.sum(1, keepdim=True), truth, seed=seed).p_value <= 0.05
        )
    assert invalid <= 7
    assert caught >= (36 if concentration == 1.0 else 10)  # of those that are nearly sure, few can be wrong


def drawn_posteriors(B: int = 2000) -> tuple[torch.Tensor, torch.Tensor]:
    """Posteriors `[B, 2]`, and contexts that are draws from them."""
    with isolated(3):
        p = torch.rand(B, dtype=torch.float64)
        return torch.stack([p, 1 - p], 1), (torch.rand(B, dtype=torch.float64) >= p).long()


@pytest.mark.slow
def test_what_is_wrong_with_contexts_is_named():
    p, truth = drawn_posteriors(600)

    def judged(q):
        return calibrate_contexts(q / q.sum(1, keepdim=True), truth, names=("calm", "windy"))

    fair, biased = judged(p), judged(p * torch.tensor([1.0, 2.0]))
    assert fair.p_value > 0.01
    assert fair.hint == "as often true as predicted"
    assert judged(p**2).hint.startswith("over-confident")
    assert judged(p**0.5).hint.startswith("under-confident")
    assert biased.p_value < 0.001
    assert biased.hint == "'calm' is true more often than predicted"
    p[7] = torch.eye(2)[1 - truth[7]]
    impossible = judged(p)
    assert impossible.p_value == 0
    assert impossible.hint == "the true context was ruled out in 1 episode"


def test_reliability_against_a_count_by_hand():
    p = [[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.1, 0.9]]
    found = calibrate_contexts(p, [0, 1, 0, 1], bins=2)
    r = found.reliability
    assert r.counts.tolist() == [4, 4]
    assert r.predicted.tolist() == pytest.approx([0.2, 0.8])
    assert r.observed.tolist() == pytest.approx([0.25, 0.75])
    assert found.ece == pytest.approx(0.05)
    assert found.brier == pytest.approx(2 * (0.01 + 0.64 + 0.16 + 0.01) / 4)
    assert found.expected_brier == pytest.approx(2 * (0.09 + 0.16 + 0.24 + 0.09) / 4)
    # One context of each episode is in either bin: the variance is that of four biased coins.
    assert r.deviation.tolist() == pytest.approx([(0.09 + 0.16 + 0.24 + 0.09) ** 0.5 / 4] * 2)


def test_chi_squared_against_a_table():
    sixty_of_a_hundred = Ranks(torch.tensor([0.2] * 60 + [0.7] * 40, dtype=torch.float64), 2)
    assert sixty_of_a_hundred.counts.tolist() == [60, 40]
    assert sixty_of_a_hundred.p_value == pytest.approx(math.erfc(2**0.5), abs=1e-6)  # χ² = 2² on 1
    assert math.isnan(Ranks(torch.zeros(0, dtype=torch.float64), 2).p_value)


def test_ranks_are_uniform_whatever_the_draws_are():
    with isolated(0):
        coins = torch.randint(2, (4000, 32, 1))  # discrete, so that most are tied
        sure = torch.full((4000, 32, 1), 0.3)  # known, but for rounding
        for draws in (coins, sure, torch.randn(4000, 32, 1)):
            truth, draws = draws[:, 0], draws[:, 1:]
            if draws.is_floating_point():
                truth = (truth.double() * (1 + 1e-7)).float()
            assert Ranks(normalised_ranks(truth, draws)[:, 0], 16).p_value > 0.01
        half = torch.rand(4000, 31, 1) < 0.5
        draws = torch.where(half, torch.randn(4000, 31, 1), 100.0)  # what does not count may be anything
        assert Ranks(normalised_ranks(torch.randn(4000, 1), draws, half)[:, 0], 16).p_value > 0.01


class Blinking(Walk):
    """Linear and Gaussian in each context; seen only if it looks."""

    horizon = 8

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0).mask(action == 1))


def looks_until_it_likes(history):
    """Look until something positive was seen, and never again."""
    liked = (history.observed["z"] & (history.observations["z"] > 0)).any(1)
    return torch.where(liked, 0, 1)


@pytest.mark.slow
def test_when_to_look_does_not_depend_on_what_is_seen(monkeypatch):
    """An agent that looks until it likes what it sees biases whoever picks one of its looks at random."""
    calibration = calibrate(Blinking(), looks_until_it_likes, "ekf", 1500)
    assert_calibrated(calibration)

    def any_look(observed):
        lots = torch.rand(observed.shape[:2])[..., None]
        return torch.where(observed, lots, -1.0).argmax(1)

    monkeypatch.setattr(ranks, "observed_times", any_look)
    biased = calibrate(Blinking(), looks_until_it_likes, "ekf", 1500).observations["z"]
    assert biased.p_value < 1e-6
    assert biased.hint.startswith("too low")


def test_times_are_times_at_which_it_was_seen():
    with isolated(0):
        observed = torch.rand(500, 10, 2) < 0.2
        observed[3] = False
        times = observed_times(observed)
    known = times >= 0
    assert not bool(known[3].any())
    b, k = known.nonzero().T
    assert bool(observed[b, times[b, k], k].all())
    assert float(known.double().mean()) > 0.5
    assert times[-1].tolist() == observed[-1].int().argmax(0).tolist()  # the last takes its first


def test_nothing_seen_is_nothing_tested():
    calibration = calibrate(LightDark(), lambda h: torch.zeros(h.num_episodes).long(), "ekf", 100)
    z = calibration.observations["z"]
    assert (z.num_episodes, z.hint) == (0, "never seen")
    assert "none of 2 tests" in calibration.verdict
    assert "–" in str(calibration)
    calibration.plot()


@pytest.mark.slow
def test_in_chunks(capsys):
    calibration = calibrate(LightDark(), RandomPolicy(3), ParticleFilter(64, chunk=30), 100, progress=True)
    assert "episodes: 100%" in capsys.readouterr().err
    assert calibration.contexts.num_episodes == calibration.states["state"].num_episodes == 100
    whole, parts = (
        calibrate(LightDark(), RandomPolicy(3), backend, 100)
        for backend in (ExtendedKalmanFilter(), ExtendedKalmanFilterInParts())
    )
    # The episodes are the same, and this filter draws nothing.
    torch.testing.assert_close(whole.contexts.posterior, parts.contexts.posterior)
    assert whole.observations["z"].num_episodes == parts.observations["z"].num_episodes


class ExtendedKalmanFilterInParts(ExtendedKalmanFilter):
    def episodes_at_once(self, model, recursion):
        return 7


def test_holm():
    def ranks(p: float) -> Ranks:
        found = Ranks(torch.full((100,), 0.5, dtype=torch.float64), 16)
        found.__dict__["p_value"] = p  # as `cached_property` would
        return found

    p, truth = drawn_posteriors(200)
    fine = calibrate_contexts(p, truth)
    states, seen = {"x": ranks(0.004), "y": ranks(0.0024)}, {"z": ranks(0.9)}
    assert Calibration(fine, states, seen, "smc").failing == ("states: y",)  # 0.004 > 0.01 / 3
    states["x"] = ranks(0.0033)
    assert Calibration(fine, states, seen, "smc").failing == ("states: y", "states: x")
    states["y"] = ranks(0.0026)  # above 0.01 / 4: no further
    assert Calibration(fine, states, seen, "smc").calibrated


@pytest.mark.slow
def test_table_and_figure(tmp_path):
    calibration = calibrate(LightDark(), RandomPolicy(3), "ekf", 300, believed=HALF_THE_NOISE)
    head, *rows, scores, verdict = str(calibration).splitlines()
    assert head.split() == ["quantity", "n", "p", "hint"]
    assert [row.split("  ")[0] for row in rows] == ["contexts", "states: state", "observations: z"]
    assert scores.startswith("Brier score")
    assert verdict == f"ekf is {calibration.verdict}"
    figure = calibration.plot()
    assert len(figure.axes) == 3
    for axis in figure.axes:
        assert axis.get_xlabel()
        assert axis.get_ylabel()
    figure.savefig(tmp_path / "calibration.png")


def test_band_holds_histograms_that_are_uniform():
    low, high = uniform_band(320, 16)
    with isolated(0):
        counts = torch.stack(
            [torch.bincount(row, minlength=16) for row in torch.randint(16, (2000, 320)).unbind()]
        )
    outside = ((counts < low) | (counts > high)).any(1)
    assert 0.0005 < float(outside.double().mean()) < 0.015


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model=LightDark), "model: expected an instance of a CPOMDP"),
        (dict(num_episodes=0), "num_episodes: expected a positive integer, got 0"),
        (dict(num_draws=2.5), "num_draws: expected a positive integer, got 2.5"),
        (dict(bins=1), "bins: expected at least 2, got 1"),
        (dict(seed=-1), "seed: expected None or an integer"),
        (dict(likelihood="kalman"), "likelihood"),
        (dict(policy=3), "policy: expected an object with"),
        (dict(believed=LightDark), "believed: expected an instance of a CPOMDP"),
        (dict(believed=ContextualTiger()), "believed: expected num_contexts = 2"),
        (dict(believed=Walk()), "believed: expected num_actions = 3"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = dict(model=LightDark(), policy=RandomPolicy(3), likelihood="ekf", num_episodes=10) | change
    with pytest.raises(ValueError, match=message):
        calibrate(**arguments)


def test_models_that_cannot_be_mistaken_for_each_other():
    with pytest.raises(ValueError, match="believed: expected shapes"):
        calibrate(Walk(), RandomPolicy(2), "ekf", 10, believed=Plates())

    class Elsewhere(Walk):
        def observation(self, state, action, context):
            pyro.sample("y", dist.Normal(state, 1.0))

    with pytest.raises(ObservationError, match="the sites"):
        calibrate(Walk(), RandomPolicy(2), "ekf", 10, believed=Elsewhere())


@pytest.mark.parametrize(
    ("posterior", "contexts", "settings", "message"),
    [
        ([0.5, 0.5], [0], {}, "posterior"),
        ([[0.5, 0.6]], [0], {}, "posterior"),
        ([[0.5, 0.5]], [2], {}, "contexts: expected 1 indices from 0 to 1"),
        ([[0.5, 0.5]], [0, 1], {}, "contexts"),
        ([[0.5, 0.5]], [0], dict(names=["one"]), "names: expected 2 names"),
        ([[0.5, 0.5]], [0], dict(bins=0), "bins: expected a positive integer"),
    ],
)
def test_bad_posteriors_are_named(posterior, contexts, settings, message):
    with pytest.raises(ValueError, match=message):
        calibrate_contexts(posterior, contexts, **settings)


class FarOut(Walk):
    """A random walk a long way from 0, where single precision is coarse."""

    horizon = 6

    def __init__(self, noise=1.0):
        super().__init__()
        self.noise = noise

    def initial(self, context):
        return pyro.sample("x", dist.Normal(1e6, 1.0))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, self.noise))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, self.noise))


def test_far_from_zero_a_wrong_filter_is_caught_all_the_same():
    """What is a tie must not depend on how large the numbers are."""
    found = calibrate(FarOut(), RandomPolicy(2), ParticleFilter(200), 300, believed=FarOut(noise=0.2))
    assert max(found.states["state"].p_value, found.observations["z"].p_value) < 1e-6


def test_where_no_draw_counts_there_is_no_rank():
    truth, draws = torch.tensor([[1.0], [1.0]]), torch.tensor([[[0.0], [2.0]], [[0.0], [2.0]]])
    with isolated(0):
        ranks = normalised_ranks(truth, draws, torch.tensor([[[True], [True]], [[False], [False]]]))
    assert 1 / 3 <= ranks[0, 0] < 2 / 3
    assert ranks[1].isnan().all()


def test_with_few_episodes_chi_square_has_fewer_bins():
    few = Ranks(torch.tensor([0.01] * 6 + [0.9] * 5, dtype=torch.float64), bins=16)
    assert few.p_value == pytest.approx(math.erfc((1 / 11 / 2) ** 0.5), abs=1e-6)  # two bins: 6 and 5
    assert few.counts.tolist()[0] == 6
