"""A state, or a part of one, may be a boolean: moments are those of 0 and 1, draws are booleans."""

import itertools

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from baselines.pft import PFT
from baselines.pomcp import POMCP
from baselines.qmdp import QMDP
from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, evaluate, simulate
from cpomdp_ppl.diagnostics import calibrate, to_inference_data
from cpomdp_ppl.gym import CPOMDPEnv
from cpomdp_ppl.inference import as_backend
from cpomdp_ppl.report.recording import record
from solvers import cids, exact

STARTS, STAYS, OPENS = 0.3, 0.8, (0.1, 0.4)  # P(open) at first, P(open → open), P(shut → open) by context
SEEN = (0.3, 0.8)  # P(z = 1), shut and open


class Valve(CPOMDP):
    """Open or shut, seen through noise; it opens by itself more often in the second context."""

    contexts, actions, horizon = 2, ("wait", "look"), 4

    def initial(self, context):
        return pyro.sample("open", dist.Bernoulli(STARTS)).bool()

    def transition(self, state, action, context):
        opens = torch.where(context == 0, *OPENS)
        return pyro.sample("open", dist.Bernoulli(torch.where(state, STAYS, opens))).bool()

    def observation(self, state, action, context):
        seen = torch.where(state, SEEN[1], SEEN[0])
        pyro.sample("z", dist.Bernoulli(seen).mask(action == 1))

    def reward(self, state, action, context):
        return state


class FiniteValve(Valve):
    states = 2


class Tank(Valve):
    """The same valve beside a level, and two lamps: a dict with booleans in it."""

    def initial(self, context):
        lamps = pyro.sample("lamps", dist.Bernoulli(torch.tensor([0.2, 0.7])).to_event(1))
        return {"open": super().initial(context), "level": torch.zeros(()), "lamps": lamps.bool()}

    def transition(self, state, action, context):
        level = pyro.sample("level", dist.Normal(state["level"] + state["open"], 0.1))
        return {"open": super().transition(state["open"], action, context), "level": level} | {
            "lamps": state["lamps"]
        }

    def observation(self, state, action, context):
        super().observation(state["open"], action, context)

    def reward(self, state, action, context):
        return state["open"] & state["lamps"].all(-1)


def filtered(episodes, b, c):
    """`P(open at T)` and the log-likelihood of an episode, by the sum over all 2^(T + 1) paths."""
    T, joint = episodes.horizon, np.zeros(2)
    for path in itertools.product((0, 1), repeat=T + 1):
        p = STARTS if path[0] else 1 - STARTS
        for t in range(T):
            to_open = STAYS if path[t] else OPENS[c]
            p *= to_open if path[t + 1] else 1 - to_open
            if episodes.observed["z"][b, t]:
                heads = SEEN[path[t + 1]]
                p *= heads if episodes.observations["z"][b, t] else 1 - heads
        joint[path[-1]] += p
    return joint[1] / joint.sum(), np.log(joint.sum())


@pytest.mark.parametrize("model", [Valve(), FiniteValve(), Tank()], ids=lambda model: type(model).__name__)
def test_check_finds_nothing_wrong(model):
    model.check()


@pytest.mark.parametrize(("model", "name"), [(FiniteValve(), "exact"), (Valve(), "smc"), (Tank(), "smc")])
def test_moments_are_those_of_zero_and_one(model, name):
    episodes = simulate(model, RandomPolicy(2), 6, seed=0)
    backend = as_backend(name)
    found, online = backend.run(model, episodes, seed=0), backend.online(model, 6, seed=0)
    for t in range(4):
        z, seen = episodes.observations["z"][:, t], episodes.observed["z"][:, t]
        online.observe(episodes.actions[:, t], {"z": z}, {"z": seen})
    mean, variance = found.state_mean, found.state_variance
    step = online.state_mean
    if isinstance(mean, dict):
        mean, variance, step = mean["open"], variance["open"], step["open"]
    assert torch.allclose(variance, mean * (1 - mean), atol=1e-5)  # of a boolean, whatever its mean
    assert torch.allclose(step.double(), mean[:, -1].double(), atol=1e-6)
    # A frequency among 256 particles has a standard error of 0.031 at most: five of them.
    tolerance = 1e-9 if name == "exact" else 5 * 0.5 / 256**0.5
    for b, c in itertools.product(range(6), range(2)):
        p, log_likelihood = filtered(episodes, b, c)
        assert abs(float(mean[b, -1, c]) - p) < tolerance
        assert abs(float(found.log_likelihood[b, c]) - log_likelihood) < tolerance


@pytest.mark.parametrize(("model", "name"), [(FiniteValve(), "exact"), (Valve(), "smc"), (Tank(), "smc")])
def test_draws_are_booleans(model, name, tmp_path):
    episodes = simulate(model, RandomPolicy(2), 3, seed=0)
    episodes.save(tmp_path / "episodes.npz")
    states = [
        episodes.states,
        Episodes.load(tmp_path / "episodes.npz").states,
        as_backend(name).smooth(model, episodes, 5, seed=0).trajectories,
    ]
    for state in states:
        assert (state["open"] if isinstance(state, dict) else state).dtype == torch.bool
    data = to_inference_data(model, episodes, name, chains=2, draws=5, seed=0).posterior
    assert set(np.unique(data["open" if isinstance(model, Tank) else "state"])) <= {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("model", [FiniteValve(), Tank()], ids=lambda model: type(model).__name__)
def test_everything_else_serves_them(model):
    finite = model.states is not None
    name = "exact" if finite else "smc"
    random = RandomPolicy(2)
    calibrate(model, random, name, 10, seed=0)
    solution = cids.fit(model, likelihood=name, iterations=1, batch_size=4, seed=0, progress=False)
    evaluate(model, solution.policy, 4, seed=0)
    record(model, solution.policy, num_episodes=2, likelihood=name).as_dict()
    environment = CPOMDPEnv(model)
    environment.reset(seed=0)
    environment.step(1)
    for planner in (PFT(model, 5, seed=0), POMCP(model, 5, seed=0), QMDP(model, seed=0)):
        simulate(model, planner, 1, seed=0)
    if finite:
        # Nothing that is done matters: the prior and the recursion p ← p stays + (1 - p) opens, by hand.
        value = 0.0
        for c in range(2):
            p = STARTS
            for _ in range(4):
                value += p / 2
                p = p * STAYS + (1 - p) * OPENS[c]
        assert exact.plan(model).value == pytest.approx(value, abs=1e-7)
