"""The particle filter against exact filters. Fixed seeds; limits are in standard errors."""

from __future__ import annotations

import sys

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import Episodes, ModelError, RandomPolicy, simulate
from cpomdp_ppl.context import entropy
from cpomdp_ppl.errors import (
    DegenerateWeightsError,
    DensityError,
    ObservationError,
    UnsupportedModelError,
)
from cpomdp_ppl.inference import ExtendedKalmanFilter, ObservableOperator, ParticleFilter, as_backend
from cpomdp_ppl.inference.resampling import SCHEMES
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark
from tests import ROOT
from tests.children import run_python
from tests.programs import EyesOpen, Plates, Walk

REFERENCE = np.load(ROOT / "tests" / "reference" / "light_dark_dev.npz")


def reference_episodes() -> Episodes:
    return Episodes.from_arrays(LightDark(), REFERENCE["action"], {"z": REFERENCE["observation"]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_particles", "bits", "probability", "evidence"),
    [(256, 0.010, 0.005, 0.2), (4096, 0.003, 0.0015, 0.05)],
)
def test_light_dark_reference(num_particles, bits, probability, evidence):
    exact = torch.tensor(REFERENCE["log_likelihood_increment"]).sum(1)
    posterior = exact.softmax(-1)
    filtering = ParticleFilter(num_particles).run(LightDark(), reference_episodes(), seed=0)
    found = filtering.posterior()[:, -1]
    assert (entropy(found, "bits") - entropy(posterior, "bits")).abs().mean() <= bits
    assert (found - posterior)[:, 0].abs().mean() <= probability
    likelier = exact.argmax(1, keepdim=True)
    errors = (filtering.log_likelihood - exact).gather(1, likelier)
    assert errors.square().mean().sqrt() <= evidence
    reward = torch.tensor(REFERENCE["expected_reward"])
    wrong = (filtering.expected_reward - reward).gather(2, likelier[:, None].expand(-1, 20, 1))
    assert wrong.abs().mean() <= 0.3 / num_particles**0.5


class ReluctantWalk:
    """A guide that looks at the coming observation, badly on purpose."""

    def transition(self, state, action, context, observations, observed):
        mean = torch.where(observed["z"], 0.3 * observations["z"] + 0.7 * state, state)
        return pyro.sample("x", dist.Normal(mean, 1.5 + context))


class RandomTiger:
    """A guide that moves the tiger at random; only possible moves carry weight."""

    def transition(self, state, action, context, observations, observed):
        return pyro.sample("door", dist.Bernoulli(torch.full(state.shape, 0.4)))


def replicates(model, seed: int, num: int) -> Episodes:
    """One episode, many times over: each is an independent run of the filter."""
    one = simulate(model, RandomPolicy(model.num_actions), 1, seed=seed)
    return one[[0] * num]


GUIDED = [
    (Walk, ExtendedKalmanFilter(), None),
    (Walk, ExtendedKalmanFilter(), ReluctantWalk()),
    (Walk, ExtendedKalmanFilter(), "ekf"),
    (ContextualTiger, ObservableOperator(), None),
    (ContextualTiger, ObservableOperator(), RandomTiger()),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "truth", "guide"), GUIDED, ids=["walk", "walk guided", "walk ekf", "tiger", "tiger guided"]
)
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("common", [True, False])
def test_the_likelihood_is_unbiased(scheme, threshold, make, truth, guide, common):
    """Over 600 runs with 30 particles, the mean of the estimate over the truth is 1 within 4 s.e."""
    model = make(horizon=4) if make is ContextualTiger else make()
    episodes = replicates(model, seed=2, num=600)
    exact = truth.run(model, episodes[:1]).log_likelihood
    smc = ParticleFilter(
        30, resampling=scheme, ess_threshold=threshold, guide=guide, common_random_numbers=common
    )
    ratio = (smc.run(model, episodes, seed=1, moments=False).log_likelihood - exact).exp()  # [600, C]
    error = ratio.std(0) / len(ratio) ** 0.5
    assert bool(((ratio.mean(0) - 1).abs() <= 4 * error).all()), (ratio.mean(0), error)


@pytest.mark.slow
def test_a_guide_that_looks_ahead_is_less_noisy():
    model, spread = Beacons(), {}
    episodes = simulate(model, RandomPolicy(5), 20, seed=0)
    likelier = ExtendedKalmanFilter().run(model, episodes).log_likelihood.argmax(1, keepdim=True)
    for guide in (None, "ekf"):
        runs = [ParticleFilter(100, guide=guide).run(model, episodes, seed=s) for s in range(12)]
        spread[guide] = torch.stack([run.log_likelihood.gather(1, likelier) for run in runs]).std(0).mean()
    assert spread["ekf"] < spread[None]


@pytest.mark.parametrize("make", [Walk, EyesOpen])
def test_agrees_with_the_kalman_filter_within_its_standard_error(make):
    model = make()
    episodes = simulate(model, RandomPolicy(2), 100, seed=0).truncated(torch.arange(100) % 3 + 1)
    exact = ExtendedKalmanFilter().run(model, episodes)
    smc = ParticleFilter(2000).run(model, episodes, seed=0)
    # A context that explains the data badly has few particles that count, and no error estimate can tell.
    likelier = exact.log_likelihood.argmax(1, keepdim=True)
    z = ((smc.log_likelihood - exact.log_likelihood) / smc.standard_error).gather(1, likelier)
    assert 0.7 < z.square().mean().sqrt() < 1.3, "the standard error is off"
    assert z.abs().max() < 4.5
    shift = (smc.state_mean - exact.state_mean).gather(2, likelier[:, None].expand(-1, 4, 1))
    assert shift.square().mean().sqrt() < 5 / 2000**0.5  # as if one particle in 25 counted
    torch.testing.assert_close(
        smc.expected_reward.mean(), exact.expected_reward.to(torch.float32).mean(), atol=0.02, rtol=0
    )


def test_the_programs_own_plates():
    """Plated sites are summed over; a plain Kalman filter cannot be wrong about that."""
    model = Plates()
    episodes = simulate(model, RandomPolicy(2), 30, seed=0)
    exact = ExtendedKalmanFilter().run(model, episodes).log_likelihood
    smc = ParticleFilter(4000).run(model, episodes, seed=0)
    assert ((smc.log_likelihood - exact) / smc.standard_error).abs().max() < 5


def test_identical_contexts_are_told_apart_by_nothing():
    """With common random numbers two equal contexts get exactly equal likelihoods."""

    class Twins(Walk):
        def transition(self, state, action, context):
            return pyro.sample("x", dist.Normal(state + action + 0 * context, 1.0))

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state + 0 * context, 1.0))

    episodes = simulate(Twins(), RandomPolicy(2), 20, seed=0)
    ll = ParticleFilter(50).run(Twins(), episodes, seed=0).log_likelihood
    assert torch.equal(ll[:, 0], ll[:, 1])


def test_permuting_contexts_permutes_results():
    class Mirrored(LightDark):
        def observation(self, state, action, context):
            super().observation(state, action, 1 - context)

        def reward(self, state, action, context):
            return super().reward(state, action, 1 - context)

    episodes = reference_episodes()
    one = ParticleFilter(100).run(LightDark(), episodes, seed=0)
    two = ParticleFilter(100).run(Mirrored(), episodes, seed=0)
    torch.testing.assert_close(one.increments, two.increments.flip(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.expected_reward, two.expected_reward.flip(-1), rtol=1e-4, atol=1e-4)


def test_permuting_episodes_permutes_results_within_the_noise():
    episodes = simulate(Walk(), RandomPolicy(2), 200, seed=0)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    one = ParticleFilter(1000).run(Walk(), episodes, seed=0)
    two = ParticleFilter(1000).run(Walk(), episodes[order], seed=1)
    likelier = two.log_likelihood.argmax(1, keepdim=True)
    error = (one.standard_error[order].square() + two.standard_error.square()).sqrt()
    z = ((one.log_likelihood[order] - two.log_likelihood) / error).gather(1, likelier)
    assert z.abs().max() < 5
    assert 0.8 < z.square().mean().sqrt() < 1.2


def test_ragged_steps_change_nothing():
    """Cutting some episodes short leaves the others' numbers as they are, and its own up to there."""
    episodes = reference_episodes()[:6]
    lengths = torch.tensor([20, 5, 20, 1, 12, 20])
    whole = ParticleFilter(64).run(LightDark(), episodes, seed=0)
    cut = ParticleFilter(64).run(LightDark(), episodes.truncated(lengths), seed=0)
    for b, n in enumerate(lengths.tolist()):
        assert torch.equal(cut.increments[b, :n], whole.increments[b, :n])
        assert torch.equal(cut.expected_reward[b, :n], whole.expected_reward[b, :n])
        assert torch.equal(cut.state_mean[b, : n + 1], whole.state_mean[b, : n + 1])
        assert bool((cut.increments[b, n:] == 0).all())
        assert bool((cut.expected_reward[b, n:] == 0).all())
        assert bool((cut.state_mean[b, n:] == cut.state_mean[b, n]).all())


def test_what_is_not_observed_changes_nothing():
    episodes = simulate(Beacons(), RandomPolicy(5), 8, seed=0)
    blind = Episodes(
        episodes.actions,
        episodes.observations,
        {site: torch.zeros_like(flags) for site, flags in episodes.observed.items()},
    )
    filtering = ParticleFilter(50).run(Beacons(), blind, seed=0)
    assert bool((filtering.increments == 0).all())
    assert not bool(filtering.resampled.any())
    assert bool((filtering.ess == 50).all())


def test_resampling_happens_where_it_is_needed_and_only_there():
    filtering = ParticleFilter(100, ess_threshold=0.5).run(LightDark(), reference_episodes(), seed=0)
    low = torch.zeros_like(filtering.resampled)
    low[:, 1:] = filtering.ess[:, :-1] < 50 * (1 - 1e-6)
    assert torch.equal(filtering.resampled, low)
    assert not bool(
        ParticleFilter(100, ess_threshold=0).run(LightDark(), reference_episodes()).resampled.any()
    )


def test_same_seed_same_numbers_and_the_caller_is_left_alone():
    episodes, state = reference_episodes(), torch.get_rng_state()
    one, two, other = (ParticleFilter(32).run(LightDark(), episodes, seed=s).increments for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_chunks_give_the_same_answer_within_the_noise():
    episodes = reference_episodes()
    whole = ParticleFilter(2000).run(LightDark(), episodes, seed=0)
    parts = ParticleFilter(2000, chunk=7).run(LightDark(), episodes, seed=1)
    likelier = whole.log_likelihood.argmax(1, keepdim=True)
    gap = (whole.log_likelihood - parts.log_likelihood).gather(1, likelier)
    assert (gap / (2**0.5 * whole.standard_error.gather(1, likelier))).abs().max() < 5


class Coins(Walk):
    """In context 1 heads never come; in either, a red coin never does."""

    def observation(self, state, action, context):
        pyro.sample("heads", dist.Bernoulli(torch.where(context == 1, 0.0, 0.5)))
        pyro.sample("colour", dist.Categorical(torch.tensor([0.5, 0.5, 0.0])))

    def initial(self, context):
        return torch.zeros(())

    def transition(self, state, action, context):
        return state


def flips(heads, colour):
    heads, colour = torch.tensor(heads), torch.tensor(colour)
    seen = torch.ones(heads.shape, dtype=torch.bool)
    return Episodes(
        torch.zeros(heads.shape, dtype=torch.long),
        {"heads": heads, "colour": colour},
        {"heads": seen, "colour": seen},
    )


def test_an_impossible_context_is_minus_infinity_and_hurts_no_other():
    filtering = ParticleFilter(10).run(Coins(), flips([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], [[0, 1, 0]] * 2))
    log_half = float(np.log(0.5))
    assert filtering.log_likelihood[0].tolist() == pytest.approx([6 * log_half, -float("inf")])
    assert filtering.log_likelihood[1].tolist() == pytest.approx([6 * log_half, 3 * log_half])
    assert filtering.posterior()[0, -1].tolist() == [1.0, 0.0]
    assert not bool(filtering.expected_reward.isnan().any())
    assert not bool(filtering.standard_error.isnan().any())


def test_an_impossible_episode_is_an_error_that_names_it():
    with pytest.raises(DegenerateWeightsError, match=r"time 2 of episode 1: no context can.*'colour' = 2"):
        ParticleFilter(10).run(Coins(), flips([[0.0, 0.0], [0.0, 0.0]], [[0, 1], [1, 2]]))


def test_an_observation_outside_its_support_is_impossible():
    with pytest.raises(DegenerateWeightsError, match=r"time 1 of episode 0.*'colour' = 7"):
        ParticleFilter(10).run(Coins(), flips([[0.0]], [[7]]))
    with pytest.raises(DegenerateWeightsError, match=r"'heads' = 0.5"):
        ParticleFilter(10).run(Coins(), flips([[0.5]], [[0]]))


def test_a_density_that_is_no_number_is_named():
    class Broken(Walk):
        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state, torch.where(context == 1, float("nan"), 1.0)))

    episodes = simulate(Walk(), RandomPolicy(2), 3, seed=0)
    with pytest.raises(DensityError, match=r"time 1 of episode 0 in context '1'.*'z' is nan"):
        ParticleFilter(10).run(Broken(), episodes)


def test_a_state_that_leaves_the_reals_is_named():
    class Leaving(Walk):
        def transition(self, state, action, context):
            return torch.where(context == 1, state * 1e30, state)

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(torch.zeros_like(state), 1.0))

    episodes = simulate(Walk(), RandomPolicy(2), 3, seed=0)
    with pytest.raises(DensityError, match=r"'state' is not finite at time \d of episode 0 in context '1'"):
        ParticleFilter(10).run(Leaving(), episodes)


def test_data_that_contradict_the_program_are_named():
    episodes = Episodes.from_arrays(LightDark(), [["observe", "left"]], {"z": [[0.1, 0.2]]})
    with pytest.raises(ObservationError, match="site 'z' at time 2 of episode 0: it was observed, but"):
        ParticleFilter(10).run(LightDark(), episodes)
    other = Episodes(episodes.actions, {"side": torch.zeros(1, 2)}, {"side": torch.ones(1, 2).bool()})
    with pytest.raises(ObservationError, match=r"episodes: expected the sites \['z'\], got \['side'\]"):
        ParticleFilter(10).run(LightDark(), other)
    with pytest.raises(ObservationError, match="episodes: expected actions 0 to 1, got 0 to 2"):
        ParticleFilter(10).run(Walk(), episodes)


def test_a_guide_with_other_sites_is_named():
    class Stranger:
        def transition(self, state, action, context, observations, observed):
            return pyro.sample("y", dist.Normal(state, 1.0))

    with pytest.raises(ModelError, match=r"transition: its sites are \['y'\], but the model's are \['x'\]"):
        ParticleFilter(10, guide=Stranger()).run(Walk(), simulate(Walk(), RandomPolicy(2), 2, seed=0))


def test_parts_of_a_state_may_be_the_same_tensor():
    """Resampling in place must not resample it twice: the likelihood stays unbiased within 4 s.e."""

    class Doubled(Walk):
        contexts = 1

        def initial(self, context):
            x = super().initial(context)
            return {"x": x, "copy": x}

        def transition(self, state, action, context):
            x = super().transition(state["x"], action, context)
            return {"x": x, "copy": x}

        def observation(self, state, action, context):
            super().observation(state["x"], action, context)

        def reward(self, state, action, context):
            return state["copy"]

    class Single(Walk):
        contexts = 1

    episodes = replicates(Single(), seed=2, num=3000)
    exact = ExtendedKalmanFilter().run(Single(), episodes[:1]).log_likelihood
    smc = ParticleFilter(30, ess_threshold=1.0)
    ratio = (smc.run(Doubled(), episodes, seed=1, moments=False).log_likelihood - exact).exp()
    assert abs(ratio.mean() - 1) <= 4 * ratio.std() / len(ratio) ** 0.5


class Chained(Walk):
    """What is seen second depends on what was, or was not, seen first."""

    horizon = 1

    def observation(self, state, action, context):
        first = pyro.sample("first", dist.Normal(state, 1.0).mask(action == 0))
        pyro.sample("second", dist.Normal(first + context, 1.0))


def test_a_hidden_site_that_others_depend_on_is_marginalised_or_refused():
    Chained().check()
    episodes = Episodes.from_arrays(Chained(), [[1]], {"first": [[float("nan")]], "second": [[3.0]]})
    for backend, tolerance in ((ParticleFilter(200_000), 0.02), ("ekf", 1e-5), ("ukf", 1e-5)):
        ll = as_backend(backend).run(Chained(), episodes, seed=0).log_likelihood[0]
        for c in (0, 1):  # x_1 ~ N(1, 1 + (1 + c)²), and two unit noises on top
            variance = 1 + (1 + c) ** 2 + 1 + 1
            exact = dist.Normal(1.0 + c, variance**0.5).log_prob(torch.tensor(3.0))
            assert abs(ll[c] - exact) < tolerance
    with pytest.raises(UnsupportedModelError, match="depend on site 'first'"):
        as_backend("grid").run(Chained(), episodes)


@pytest.mark.parametrize("chunk", [1, 3, None])
def test_a_look_ahead_does_without_what_was_not_seen(chunk):
    class Longer(Chained):
        horizon = 3

    episodes = simulate(Longer(), RandomPolicy(2), 5, seed=0).truncated(torch.tensor([1, 3, 2, 3, 1]))
    guided = ParticleFilter(5_000, guide="ekf", chunk=chunk).run(Longer(), episodes, seed=0)
    exact = as_backend("ekf").run(Longer(), episodes)
    assert (guided.log_likelihood - exact.log_likelihood).abs().max() < 0.1


def test_a_guide_moves_nothing_past_the_end():
    episodes = simulate(Walk(), RandomPolicy(2), 4, seed=0).truncated(torch.tensor([1, 2, 3, 1]))
    filtering = ParticleFilter(50, guide=ReluctantWalk(), ess_threshold=1.0).run(Walk(), episodes, seed=0)
    for b, n in enumerate([1, 2, 3, 1]):
        assert bool((filtering.increments[b, n:] == 0).all())
        assert not bool(filtering.resampled[b, n:].any())


def test_what_one_episode_saw_does_not_change_anothers_random_numbers():
    class Positive(Walk):
        def observation(self, state, action, context):
            pyro.sample("z", dist.LogNormal(state, 1.0))

    episodes = simulate(Positive(), RandomPolicy(2), 2, seed=0)
    changed = episodes.observations["z"].clone()
    changed[1, 0] = -1.0  # outside the support
    other = Episodes(episodes.actions, {"z": changed}, episodes.observed)
    one = ParticleFilter(50).run(Positive(), episodes, seed=0)
    with pytest.raises(DegenerateWeightsError, match="time 1 of episode 1"):
        ParticleFilter(50).run(Positive(), other, seed=0)
    changed[1, 0] = 7.0
    two = ParticleFilter(50).run(
        Positive(), Episodes(episodes.actions, {"z": changed}, episodes.observed), seed=0
    )
    assert torch.equal(one.increments[0], two.increments[0])


def test_deterministic_sites_are_no_observations():
    class Noted(Walk):
        def observation(self, state, action, context):
            doubled = pyro.deterministic("doubled", 2 * state)
            pyro.sample("z", dist.Normal(doubled / 2, 1.0))

    episodes = simulate(Noted(), RandomPolicy(2), 3, seed=0)
    assert list(episodes.observations) == ["z"]
    noted = ParticleFilter(50).run(Noted(), episodes, seed=0).log_likelihood
    torch.testing.assert_close(noted, ParticleFilter(50).run(Walk(), episodes, seed=0).log_likelihood)


def test_double_precision_models_have_double_precision_weights():
    class Precise(Walk):
        def initial(self, context):
            return torch.zeros((), dtype=torch.float64)

        def transition(self, state, action, context):
            return state

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state[..., None].expand(*state.shape, 500), 1e-2).to_event(1))

    z = torch.linspace(-1, 1, 500, dtype=torch.float64).reshape(1, 1, 500)
    episodes = Episodes(torch.zeros(1, 1, dtype=torch.long), {"z": z}, {"z": torch.ones(1, 1).bool()})
    found = ParticleFilter(4).run(Precise(), episodes, seed=0).log_likelihood[0, 0]
    exact = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1e-2).log_prob(z).sum()
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=0)


def test_a_broken_probability_is_named():
    class Broken(Walk):
        def transition(self, state, action, context):
            return state + pyro.sample(
                "jump", dist.Bernoulli(torch.where(context == 1, float("nan"), 0.5) + 0 * state)
            )

    episodes = simulate(Walk(), RandomPolicy(2), 3, seed=0)
    with pytest.raises(DensityError, match="site 'jump' has probability nan"):
        ParticleFilter(10).run(Broken(), episodes)


def test_looking_ahead_copes_with_little_noise_and_refuses_none():
    class Sharp(Walk):
        scale = 1e-4

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state, self.scale))

    episodes = simulate(Sharp(), RandomPolicy(2), 5, seed=0)
    exact = ExtendedKalmanFilter().run(Sharp(), episodes).log_likelihood
    found = ParticleFilter(500, guide="ekf").run(Sharp(), episodes, seed=0).log_likelihood
    assert (found - exact).abs().max() < 0.5

    class Deterministic(Sharp):
        def observation(self, state, action, context):
            pyro.sample("z", dist.Delta(0 * state))

    with pytest.raises(DensityError, match="cannot linearise what is observed"):
        ParticleFilter(10, guide="ekf").run(Deterministic(), episodes)


def test_foreign_episodes_are_named():
    episodes = simulate(Walk(), RandomPolicy(2), 2, seed=0)
    wide = Episodes(episodes.actions, {"z": torch.zeros(2, 3, 4)}, episodes.observed)
    with pytest.raises(ObservationError, match=r"expected site 'z' of shape \[\], got \[4\]"):
        ParticleFilter(10).run(Walk(), wide)
    with pytest.raises(ValueError, match="model: expected an instance of a CPOMDP"):
        ParticleFilter(10).run(Walk, episodes)
    with pytest.raises(ValueError, match="episodes: expected Episodes, got None"):
        ParticleFilter(10).run(Walk(), None)
    with pytest.raises(ValueError, match="guide: expected a program `initial`"):
        ParticleFilter(10, guide=ReluctantWalk()).run(
            EyesOpen(), simulate(EyesOpen(), RandomPolicy(2), 2, seed=0)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_particles=0), "num_particles: expected a positive integer, got 0"),
        (dict(resampling="best"), "resampling: expected one of .*systematic.*got best"),
        (dict(resampling=3), "resampling: expected one of"),
        (dict(ess_threshold=1.5), "ess_threshold: expected a fraction from 0 to 1, got 1.5"),
        (dict(guide="ukf"), "guide: expected None"),
        (dict(chunk=-1), "chunk: expected a positive integer"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ParticleFilter(**arguments)


PEAK_MEMORY = """
import resource, torch
from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.inference import ParticleFilter
from tests.programs import Walk

def peak(horizon):
    model = Walk()
    model.horizon = horizon
    ParticleFilter(250_000).run(model, simulate(model, RandomPolicy(2), 1, seed=0), seed=0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

torch.set_num_threads(1)
short = peak(5)
print(peak(150) - short)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other units")
def test_memory_does_not_grow_with_the_horizon():
    # A tensor of all particles is 2 MB: to lose room for one of them at every step would take 290 MiB.
    assert float(run_python(PEAK_MEMORY)) < 100
