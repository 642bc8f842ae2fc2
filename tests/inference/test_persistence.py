from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baselines.qmdp import QMDP
from baselines.simple import MostLikelyContext
from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.agent import Agent
from cpomdp_ppl.diagnostics import calibrate, to_inference_data
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.evaluation import compare
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter
from cpomdp_ppl.inference.persistence import filtered, smoothed
from cpomdp_ppl.models import LineGrid
from cpomdp_ppl.report.recording import record
from solvers import cids
from solvers.regret.values import policy_values
from tests.programs import Needle, Walk

FEW = ParticleFilter(num_particles=4)


@pytest.fixture(scope="module")
def episodes():
    return simulate(Needle(), RandomPolicy(2), 40, seed=0)


def test_only_lost_episodes_are_filtered_again(episodes):
    first = FEW.attempt(Needle(), episodes, seed=0)
    lost = first.lost()
    assert 0 < int(lost.sum()) < 40
    again = filtered(FEW, Needle(), episodes, seed=0)
    assert not bool(again.lost().any())
    assert torch.equal(again.log_likelihood[~lost], first.log_likelihood[~lost])
    assert torch.equal(again.ess[~lost], first.ess[~lost])
    assert bool(again.posterior().isfinite().all())


def test_nothing_changes_where_none_is_lost():
    episodes = simulate(Walk(), RandomPolicy(2), 20, seed=0)
    one, other = FEW.run(Walk(), episodes, seed=3), filtered(FEW, Walk(), episodes, seed=3)
    assert torch.equal(one.log_likelihood, other.log_likelihood)
    assert torch.equal(one.state_mean, other.state_mean)


def test_they_are_filtered_as_a_larger_filter_would(episodes):
    rows = FEW.attempt(Needle(), episodes, seed=0).lost().nonzero()[:, 0]
    larger = ParticleFilter(num_particles=32).attempt(Needle(), episodes[rows], seed=0)
    kept = ~larger.lost()
    again = filtered(FEW, Needle(), episodes, seed=0)
    assert int(kept.sum()) > 3
    assert torch.equal(again.log_likelihood[rows][kept], larger.log_likelihood[kept])
    assert torch.equal(again.state_mean[rows][kept], larger.state_mean[kept])


def test_a_context_that_the_prior_excludes_saves_no_episode(episodes):
    sure = torch.tensor([1.0, 0.0])
    found = filtered(FEW, Needle(), episodes[:5], prior=sure, seed=0)
    assert torch.equal(found.posterior(sure)[:, -1], sure.double().expand(5, 2))


def test_what_cannot_be_is_an_error_that_names_the_episode(episodes):
    z = episodes.observations["z"].clone()
    z[7, 1] = 0.5  # what is seen is whole numbers
    wrong = replace(episodes, observations={"z": z})
    with pytest.raises(DegenerateWeightsError, match="time 2 of episode 7: no context"):
        filtered(ParticleFilter(2**12), Needle(), wrong, seed=0)


def test_other_backends_have_nothing_to_add():
    episodes = simulate(LineGrid(), lambda history: torch.full((5,), 2), 5, seed=0)
    side = episodes.observations["side"].clone()
    side[3, 4] = 0.5
    with pytest.raises(DegenerateWeightsError, match="time 5 of episode 3"):
        filtered(ObservableOperator(), LineGrid(), replace(episodes, observations={"side": side}))


def test_smoothing(episodes):
    with pytest.raises(DegenerateWeightsError):
        FEW.smooth(Needle(), episodes, 10, seed=0)
    result = smoothed(FEW, Needle(), episodes, 10, seed=0)
    assert result.trajectories.shape == (10, 40, 3, 2)


def test_an_online_filter_goes_back(episodes):
    """It has as many particles as before, all of which might have produced what was seen."""
    online = FEW.online(Needle(), len(episodes), seed=0)
    for t in range(2):
        online.observe(episodes.actions[:, t], {"z": episodes.observations["z"][:, t]})
    assert online.belief.weights.shape == (2, 40, 4)
    assert bool(online.posterior.isfinite().all())
    likely = online.posterior.argmax(1), torch.arange(40)
    seen = (3.0 * online.belief.state[likely]).round()  # [B, N]
    weights = online.belief.weights.values[likely]
    assert bool(((seen == episodes.observations["z"][:, 1:]) | (weights == 0)).all())


def test_an_online_filter_that_finds_nothing_stays_where_it_was():
    online = ParticleFilter(2**12).online(Needle(), seed=0)
    with pytest.raises(DegenerateWeightsError, match="time 1 of episode 0"):
        online.observe(0, {"z": 0.5})
    assert online.time == 0
    online.observe(0, {"z": 0.0})
    assert online.time == 1


def lonely(model, episodes):
    """An agent in each of several episodes."""
    for b in range(5):
        agent = Agent(model, RandomPolicy(2), likelihood=FEW, seed=b)
        for t in range(2):
            agent.observe({"z": episodes.observations["z"][b, t]}, action=int(episodes.actions[b, t]))
        assert agent.posterior.isfinite().all()


def fitted(model):
    return cids.fit(
        model, likelihood=ParticleFilter(2**12), iterations=1, batch_size=8, seed=0, progress=False
    )


EVERYBODY = {
    "agent": lonely,
    "inference data": lambda model, episodes: to_inference_data(model, episodes, FEW, draws=4, seed=0),
    "calibration": lambda model, episodes: calibrate(model, RandomPolicy(2), FEW, 40),
    "report": lambda model, episodes: record(model, RandomPolicy(2), likelihood=FEW, num_outcomes=2),
    "solution.plot": lambda model, episodes: fitted(model).plot(likelihood=FEW),
    "cids.run": lambda model, episodes: cids.run(
        model, num_runs=10, num_episodes=2, solution=RandomPolicy(2), likelihood=FEW, seed=0, progress=False
    ),
    "policy values": lambda model, episodes: policy_values(
        model, RandomPolicy(2), [[0.5, 0.5], [1.0, 0.0]], num_episodes=20, likelihood=FEW
    ),
    "planners": lambda model, episodes: compare(
        model,
        {
            "qmdp": QMDP(model, num_particles=4, states=2),
            "by context": MostLikelyContext(model, [RandomPolicy(2)] * 2, FEW),
        },
        20,
        likelihood=FEW,
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:probabilities of contexts")  # so few particles are not sure of them
@pytest.mark.parametrize("who", EVERYBODY)
def test_whoever_filters_goes_on(who, episodes):
    EVERYBODY[who](Needle(), episodes)
