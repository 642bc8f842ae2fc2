"""Which engine runs a model, what it says of that, and what happens without a compiler."""

import logging

import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.errors import CompilerError, UnsupportedModelError
from cpomdp_ppl.inference import ExtendedKalmanFilter, ParticleFilter, UnscentedKalmanFilter, engine
from cpomdp_ppl.inference.resampling import Stratified
from cpomdp_ppl.models import LightDark
from cpomdp_ppl.native import compiler
from tests.programs import Walk


class Branching(Walk):
    """A program that looks at a value."""

    def transition(self, state, action, context):
        if (action == 1).any():
            return pyro.sample("x", dist.Normal(state + 1, 1.0))
        return pyro.sample("x", dist.Normal(state, 1.0))


class ByNumpy(Walk):
    def reward(self, state, action, context):
        return torch.from_numpy(state.numpy() * 2)


class Odd(Walk):
    """A program with an operation that kernels do not know."""

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(torch.special.i0e(state), 1.0))


def played(model, number=3):
    return simulate(model, RandomPolicy(model.num_actions), number, seed=0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Branching,
            r"Branching cannot be compiled: transition \(transition, line \d+: if \(action == 1\)\.any",
        ),
        (ByNumpy, r"reward \(reward, line \d+: .*\): .*leaves torch \('numpy'\)"),
        (Odd, r"observation \(observation, line \d+: .*\): operation 'special_i0e' is not known"),
    ],
)
def test_native_refuses_and_says_where(model, message):
    made = model()
    with pytest.raises(UnsupportedModelError, match=message):
        ParticleFilter(engine="native").run(made, played(made), seed=0)


@pytest.mark.parametrize("backend", [ParticleFilter(16), ExtendedKalmanFilter(), UnscentedKalmanFilter()])
def test_auto_falls_back_and_says_so_once(backend, caplog, monkeypatch):
    monkeypatch.setattr(engine, "_said", set())
    model = Branching()
    episodes = played(model)
    with caplog.at_level(logging.INFO, "cpomdp_ppl.native"):
        found = [backend.run(model, episodes, seed=0) for _ in range(2)]
        backend.run(Branching(), episodes, seed=0)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "Branching cannot be compiled: transition" in caplog.text
    assert "the eager engine runs it" in caplog.text
    eager = type(backend)(engine="eager") if backend.name != "smc" else ParticleFilter(16, engine="eager")
    for each in found:
        assert torch.equal(each.log_likelihood, eager.run(model, episodes, seed=0).log_likelihood)


def test_what_kernels_do_not_do():
    model = LightDark(3)
    episodes = played(model)

    class Mine(Stratified):
        """A scheme of one's own."""

    for settings in ({"guide": "ekf"}, {"resampling": Mine()}):
        with pytest.raises(UnsupportedModelError, match="the native engine does not know a"):
            ParticleFilter(engine="native", **settings).run(model, episodes, seed=0)
        auto, eager = (
            ParticleFilter(engine=engine, **settings).run(model, episodes, seed=0).log_likelihood
            for engine in ("auto", "eager")
        )
        assert torch.equal(auto, eager)
    ParticleFilter(engine="native", resampling=Stratified()).run(model, episodes, seed=0)


@pytest.mark.parametrize("make", [ParticleFilter, ExtendedKalmanFilter, UnscentedKalmanFilter])
def test_an_engine_that_there_is_not(make):
    with pytest.raises(ValueError, match=r"engine: expected one of \['auto', 'native', 'eager'\], got fast"):
        make(engine="fast")


def test_the_environment_says_what_auto_means(monkeypatch):
    model = LightDark(3)
    monkeypatch.setenv("CPOMDP_ENGINE", "eager")
    assert ParticleFilter().kernel(model) is None
    assert ParticleFilter(engine="native").kernel(model) is not None
    monkeypatch.setenv("CPOMDP_ENGINE", "native")
    with pytest.raises(UnsupportedModelError, match="Branching cannot be compiled"):
        ParticleFilter().kernel(Branching())
    monkeypatch.setenv("CPOMDP_ENGINE", "quick")
    with pytest.raises(ValueError, match="CPOMDP_ENGINE: expected one of"):
        ParticleFilter().kernel(model)


class Unheard(Walk):
    """A program whose text no cache holds."""

    def reward(self, state, action, context):
        return (state.sin() * 3.0 - context).cos() * state.exp()


@pytest.mark.parametrize("command", ["no-such-compiler", "false"], ids=["missing", "failing"])
def test_without_a_compiler(command, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CC", command)
    monkeypatch.setenv("CPOMDP_CACHE", str(tmp_path))
    monkeypatch.setattr(engine, "_said", set())
    monkeypatch.setattr(compiler, "_loaded", {})
    model = Unheard()
    episodes = played(model)
    with pytest.raises(CompilerError):
        ParticleFilter(16, engine="native").run(model, episodes, seed=0)
    with caplog.at_level(logging.INFO, "cpomdp_ppl.native"):
        found = ParticleFilter(16).run(model, episodes, seed=0)
        ParticleFilter(32).run(model, episodes, seed=0)
    assert sum("the eager engine" in record.message for record in caplog.records) == 1
    expected = ParticleFilter(16, engine="eager").run(model, episodes, seed=0)
    assert torch.equal(found.log_likelihood, expected.log_likelihood)
