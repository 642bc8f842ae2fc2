"""Whatever is called, the caller's process stays as it was, and the same seed gives the same bits."""

from __future__ import annotations

import dataclasses
import inspect
import os
import random
import re
import warnings
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from functools import cache

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr

import cpomdp_ppl
from baselines import rdpg
from baselines.pft import PFT
from baselines.qmdp import QMDP
from baselines.simple import Always, ContextKnown, MostLikelyContext, PosteriorSampling, ThompsonSampling
from cpomdp_command import main
from cpomdp_ppl import (
    Agent,
    RandomPolicy,
    cli,
    compare,
    diagnostics,
    evaluate,
    inference,
    learning,
    report,
    simulate,
)
from cpomdp_ppl.bounds import informed_return
from cpomdp_ppl.diagnostics import (
    calibrate,
    calibrate_contexts,
    plot_agreement,
    plot_contexts,
    plot_filter,
    plot_states,
    summary,
    to_inference_data,
)
from cpomdp_ppl.experiments.run_folder import RunFolder
from cpomdp_ppl.experiments.sweep import sweep
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import (
    ExtendedKalmanFilter,
    GridFilter,
    ObservableOperator,
    ParticleFilter,
    UnscentedKalmanFilter,
    inference_scope,
    reference_backend,
    scan,
)
from cpomdp_ppl.learning import (
    log_likelihood,
    maximum_likelihood,
    particle_marginal_metropolis_hastings,
    with_parameters,
)
from cpomdp_ppl.models import LightDark, LineGrid
from cpomdp_ppl.report import record, write_report
from cpomdp_ppl.rng import isolated
from solvers import cids, exact, regret
from solvers import sweep as solving
from tests.programs import Learnable

with suppress(ImportError):  # Gymnasium, imported, adds a warnings filter and an environment variable
    import gymnasium  # noqa: F401
with suppress(ImportError):  # and joblib adds another variable
    import joblib.parallel  # noqa: F401

LEARNABLE, FINITE, DARK = Learnable(), LineGrid(horizon=2), LightDark(horizon=3)
EPISODES = simulate(LEARNABLE, RandomPolicy(2), 6, seed=0)
FINITE_EPISODES = simulate(FINITE, RandomPolicy(FINITE.num_actions), 6, seed=0)
QUICK = dict(likelihood="exact", iterations=2, batch_size=8, progress=False)


@cache
def solution():
    return cids.fit(FINITE, seed=0, **QUICK)


@pytest.fixture(scope="module", autouse=True)
def ready():
    """What calls share is there before any of them is watched."""
    solution()


def online(backend):
    filter = backend.online(LEARNABLE, 2, seed=3)
    filter.observe(1, {"z": [0.5, 0.7]})
    return filter.posterior, filter.state_mean, filter.state_variance, filter.expected_reward(0)


def scanned():
    with inference_scope(LEARNABLE, seed=3):
        recursion = ParticleFilter(16).recursion(LEARNABLE)
        return [step.increment for step in scan(recursion, EPISODES)]


def acted(policy=None):
    agent = Agent(FINITE, policy or solution().policy, likelihood=ParticleFilter(16), seed=3)
    first = agent.act()
    agent.observe({})
    return first, agent.act(), agent.posterior


def generated():
    with isolated(3):
        step = Generative(LEARNABLE)
        return step.initial(torch.tensor([0, 1]))


def environment(flat):
    from cpomdp_ppl.gym import CPOMDPEnv

    env = CPOMDPEnv(FINITE, flat=flat, likelihood=ParticleFilter(16))
    return env.reset(seed=3), env.step(0), env.step(1)


def environments():
    from cpomdp_ppl.gym import CPOMDPVectorEnv

    env = CPOMDPVectorEnv(FINITE, 3)
    return env.reset(seed=3), env.step([0, 1, 0]), env.step([0, 1, 0]), env.step([0, 1, 0])


def searched():
    pytest.importorskip("pomdp_py")
    from baselines.pomcp import POMCP

    return simulate(FINITE, POMCP(FINITE, num_simulations=10, num_particles=10), 2, seed=3)


def ppo():
    pytest.importorskip("sb3_contrib")
    from baselines import recurrent_ppo

    learned = recurrent_ppo.fit(FINITE, 16, seed=3, progress=False)
    return simulate(FINITE, learned.policy, 4, seed=3)


def played(policy):
    return lambda: simulate(FINITE, policy(), 4, seed=3)


def saved_and_loaded(tmp_path):
    solution().save(tmp_path)
    FINITE_EPISODES.save(tmp_path / "episodes.npz")
    return cids.load(tmp_path, FINITE), type(FINITE_EPISODES).load(tmp_path / "episodes.npz")


def resumed(tmp_path):
    directory = tmp_path / "checkpoint"
    before = cids.fit(FINITE, seed=3, checkpoint=directory, **QUICK)
    return before.policy, cids.fit(FINITE, seed=3, checkpoint=directory, **QUICK).policy


def returned(seed):
    return {"return": evaluate(FINITE, RandomPolicy(3), 8, seed=seed).returns.mean, "chance": torch.rand(())}


def commanded(tmp_path):
    """The command line, which is a function, too; but for its figures, which take longest, and are below."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cpomdp_ppl.cli.results.is_installed", lambda module: module != "matplotlib")
        return commands(tmp_path)


def commands(tmp_path):
    run = str(tmp_path / "run")
    words = ["cpomdp_ppl.models:LineGrid", "horizon=2"]
    small = ["--likelihood=exact", "--iterations=2", "--batch-size=8"]
    few = ["--num-episodes=4", "--seed=3", "--quiet"]
    assert main(["check", *words]) == 0
    assert main(["fit", *words, *small, f"--run={run}", "--seed=3", "--quiet"]) == 0
    assert main(["simulate", *words, "--policy=random", f"--run={run}-simulate", *few]) == 0
    assert main(["evaluate", run, *few]) == 0
    assert main(["compare", *words, "--policies=random,qmdp", f"--run={run}-compare", *few]) == 0
    assert main(["diagnose", run, "--likelihood=smc", *few]) == 0
    assert main(["report", run, *few]) == 0
    return cids.load(tmp_path / "run" / "solution", FINITE).policy


def reported(tmp_path):
    folder = RunFolder.create(tmp_path / "run", "fit", model="cpomdp_ppl.models:LineGrid")
    write_report(folder.path, model=FINITE, policy=RandomPolicy(3), num_episodes=2, seed=3)


BACKENDS = {
    "smc": ParticleFilter(16),
    "look-ahead": ParticleFilter(16, guide="ekf"),
    "ekf": ExtendedKalmanFilter(),
    "ukf": UnscentedKalmanFilter(),
    "grid": GridFilter(num_points=64),
}

CALLS = {
    "check": LEARNABLE.check,
    "prior": LEARNABLE.prior,
    "simulate": lambda: simulate(LEARNABLE, RandomPolicy(2), 4, seed=3),
    "evaluate": lambda: evaluate(DARK, RandomPolicy(3), 8, likelihood="ekf", seed=3).as_dict(),
    "compare": lambda: compare(FINITE, {"a": Always(FINITE, 0), "b": RandomPolicy(3)}, 8, seed=3).as_dict(),
    **{f"{n}.run": lambda b=b: b.run(LEARNABLE, EPISODES, seed=3) for n, b in BACKENDS.items()},
    **{f"{n}.smooth": lambda b=b: b.smooth(LEARNABLE, EPISODES, 3, seed=3) for n, b in BACKENDS.items()},
    **{f"{n}.online": lambda b=b: online(b) for n, b in BACKENDS.items()},
    "scan, in inference_scope": scanned,
    "exact.run": lambda: ObservableOperator().run(FINITE, FINITE_EPISODES),
    "exact.smooth": lambda: ObservableOperator().smooth(FINITE, FINITE_EPISODES, 3, seed=3),
    "reference_backend": lambda: reference_backend(LightDark(horizon=1)),
    "informed_return": lambda: informed_return(DARK),
    "summary": lambda: summary(inferred(), var_names=["state"]),
    "calibrate": lambda: calibrate(DARK, RandomPolicy(3), ParticleFilter(16), 40, seed=3).p_values,
    "calibrate_contexts": lambda: (
        calibrate_contexts(
            ObservableOperator().run(FINITE, FINITE_EPISODES).posterior()[:, -1], FINITE_EPISODES.contexts
        ).brier
    ),
    "to_inference_data": lambda: to_inference_data(DARK, DARK_EPISODES, "ekf", chains=2, draws=5, seed=3),
    "Agent": acted,
    "Generative": generated,
    "CPOMDPEnv": lambda: environment(False),
    "CPOMDPEnv, flat": lambda: environment(True),
    "CPOMDPVectorEnv": environments,
    "cids.fit": lambda: cids.fit(FINITE, seed=3, **QUICK).policy,
    "cids.fit by smc": lambda: cids.fit(DARK, seed=3, **{**QUICK, "likelihood": ParticleFilter(16)}).policy,
    "cids.fit, variational": lambda: cids.fit(FINITE, seed=3, objective="variational", **QUICK).policy,
    "cids.fit, resumed": resumed,
    "cids.load": saved_and_loaded,
    "cids.run": lambda: cids.run(FINITE, 0, 2, solution=solution(), seed=3, progress=False).posteriors,
    "Solution.evaluate": lambda: solution().evaluate(8, seed=3).as_dict(),
    "Solution.agent": lambda: solution().agent(seed=3).act(),
    "Solution.to_inference_data": lambda: solution().to_inference_data(
        4, likelihood="exact", chains=2, draws=5, seed=3
    ),
    "Solution.plot": lambda: solution().plot(2, likelihood="exact", seed=3) and None,
    "log_likelihood": lambda: log_likelihood(LEARNABLE, EPISODES, "ekf"),
    "maximum_likelihood": lambda: (
        maximum_likelihood(LEARNABLE, EPISODES, "ekf", iterations=3, starts=2, seed=3, progress=False).values
    ),
    "particle_marginal_metropolis_hastings": lambda: particle_marginal_metropolis_hastings(
        LEARNABLE,
        EPISODES,
        {"drift": dist.Gamma(1.0, 1.0)},
        num_particles=16,
        chains=2,
        draws=4,
        warm_up=4,
        seed=3,
        progress=False,
    ),
    "with_parameters": lambda: with_parameters(LEARNABLE, {"drift": 0.7}).drift,
    "sweep": lambda: sweep(returned, {"seed": [0, 1]}, workers=1, progress=False),
    "sweep, in two processes": lambda: sweep(returned, {"seed": [0, 1]}, workers=2, progress=False),
    "solvers.sweep": lambda: solving.sweep(
        FINITE, seeds=2, temperature=[0.0, 1.0], num_episodes=8, workers=1, **QUICK
    ).drop_vars("training_seconds"),
    "evaluate, in two processes": lambda: evaluate(
        FINITE, RandomPolicy(3), 8, batch_size=4, workers=2, seed=3
    ).as_dict(),
    "plot_contexts": lambda: plot_contexts(inferred()) and None,
    "plot_states": lambda: plot_states(inferred()) and None,
    "plot_filter": lambda: plot_filter(inferred()) and None,
    "plot_agreement": lambda: plot_agreement({"ekf": inferred(), "again": inferred()}) and None,
    "record": lambda: record(FINITE, RandomPolicy(3), num_episodes=2, num_particles=8, seed=3).posterior,
    "write_report": reported,
    "main": commanded,
    "exact.plan": lambda: exact.plan(FINITE).value,
    "exact.evaluate": lambda: exact.evaluate(FINITE, RandomPolicy(3)),
    "regret.reward_bound": lambda: regret.reward_bound(FINITE, seed=3),
    "regret.smallest_xi": regret.smallest_xi,
    "regret.estimate_eta": lambda: regret.estimate_eta([1.0, 0.5], [0.5, 0.25]),
    "regret.exact_regret": lambda: regret.exact_regret(FINITE, 1, temperature=0.0) and None,
    "regret.policy_values": lambda: regret.policy_values(
        FINITE, RandomPolicy(3), [[0.5, 0.5]], num_episodes=4, seed=3
    ),
    "regret.context_known_values": lambda: regret.context_known_values(FINITE, seed=3),
    "regret.decompose": lambda: regret.decompose(
        FINITE, RandomPolicy(3), [[[0.5, 0.5], [0.9, 0.1]]], [0], num_episodes=4, seed=3
    ),
    "regret.policy_gaps": lambda: regret.policy_gaps(FINITE, num_episodes=4, seed=3),
    "regret.merge_invariant_contexts": lambda: regret.merge_invariant_contexts(FINITE, 0.1).gaps,
    "Always": played(lambda: Always(FINITE, 0)),
    "MostLikelyContext": played(lambda: MostLikelyContext(FINITE, COMMITTED)),
    "ThompsonSampling": played(lambda: ThompsonSampling(FINITE, COMMITTED)),
    "ContextKnown": lambda: evaluate(
        FINITE, ContextKnown(FINITE, COMMITTED), 8, reveal_context=True
    ).as_dict(),
    "PosteriorSampling": played(lambda: PosteriorSampling(FINITE, COMMITTED)),
    "QMDP": played(lambda: QMDP(FINITE)),
    "PFT": played(lambda: PFT(FINITE, 10, 4)),
    "POMCP": searched,
    "rdpg.fit": lambda: (
        rdpg.fit(
            FINITE, 40, settings=rdpg.Settings(random_episodes=20, updates=2), seed=3, progress=False
        ).policy
    ),
    "recurrent_ppo.fit": ppo,
}
COMMITTED = [Always(FINITE, 0), Always(FINITE, 1)]
DARK_EPISODES = simulate(DARK, RandomPolicy(3), 4, seed=0)


def inferred():
    return to_inference_data(DARK, DARK_EPISODES, ParticleFilter(16), chains=2, draws=5, seed=3)


PUBLIC = [cpomdp_ppl, cli, diagnostics, inference, learning, report, cids, exact, regret, solving]
TRIVIAL = {"as_backend", "as_history", "entry"}  # the last is `main`, at the end of which a process ends


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_function_is_called_here(module):
    own = [name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    functions = {name for name in names if inspect.isfunction(getattr(module, name))}
    called = {word for name in CALLS for word in re.findall(r"\w+", name)}
    assert functions - TRIVIAL <= called


def bits(value):
    """Everything in a result as plain values that can be compared."""
    if isinstance(value, torch.nn.Module):
        return bits(value.state_dict())
    if isinstance(value, torch.Tensor):
        return bits(value.detach().numpy())
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes() if value.dtype != object else value.tolist())
    if isinstance(value, Mapping):
        clocks = ("seconds", "created_at")
        return {str(k): bits(v) for k, v in value.items() if not str(k).startswith(clocks)}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    if isinstance(value, xr.Dataset):
        return bits({name: value[name].values for name in value.variables})
    if hasattr(value, "groups"):  # ArviZ data, old or new
        groups = value.groups() if callable(value.groups) else value.groups
        return {name: bits(xr.Dataset(value[name])) for name in groups if name != "/"}
    if dataclasses.is_dataclass(value):
        return {field.name: bits(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, float | np.generic):
        return repr(value)
    return value if isinstance(value, int | str | None) else type(value).__name__


def surroundings():
    """All that belongs to the caller."""
    store = pyro.get_param_store()
    return {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "NumPy's generator": repr(np.random.get_state()),
        "NumPy's numbers": np.random.get_state()[1].tobytes(),
        "Python's generator": random.getstate(),
        "the param store": {name: value.detach().clone().tolist() for name, value in store.items()},
        "its constraints": {name: str(c) for name, c in store.get_state()["constraints"].items()},
        "validation": [
            pyro.settings.get(name)
            for name in ("validate_distributions_pyro", "validate_distributions_torch", "validate_infer")
        ],
        "torch's flag": torch.distributions.Distribution._validate_args,
        "warnings": list(warnings.filters),
        "gradients": torch.is_grad_enabled(),
        "the default type": torch.get_default_dtype(),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "handlers": len(pyro.poutine.runtime._PYRO_STACK),
        "printing": np.get_printoptions(),
        "floating-point errors": np.geterr(),
        "where": os.getcwd(),
        "names in the environment": sorted(os.environ.items()),
    }


@contextmanager
def lived_in(seed, validates):
    """A process in which somebody is in the middle of something."""
    flags = {name: pyro.settings.get(name) for name in ("validate_distributions_pyro", "validate_infer")}
    torch_flag = pyro.settings.get("validate_distributions_torch")
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    with pyro.get_param_store().scope():
        try:
            pyro.settings.set(validate_distributions_pyro=validates, validate_infer=not validates)
            pyro.settings.set(validate_distributions_torch=not validates)
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            pyro.param("mine", torch.tensor([1.0, 2.0]))
            yield
        finally:
            pyro.settings.set(**flags)
            pyro.settings.set(validate_distributions_torch=torch_flag)
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_the_caller_is_left_alone_and_seeds_decide_everything(name, tmp_path):
    call, results = CALLS[name], []
    takes_path = call in (saved_and_loaded, resumed, commanded, reported)
    for number, validates in ((1, True), (2, False)):
        directory = tmp_path / str(number)
        result, changed = left_alone(lambda d=directory: call(d) if takes_path else call(), number, validates)
        assert not changed, f"{name} changes {', '.join(changed)}"
        results.append(result)
    assert results[0] == results[1], f"{name}: the same seed, but other bits"


def left_alone(call, number, validates):
    """What a call returns, and what of the caller's it changes."""
    with lived_in(number, validates):
        before = surroundings()
        result = bits(call())
        after = surroundings()
        return result, [what for what in before if before[what] != after[what]]


CULPRITS = {
    "torch's generator": lambda: torch.rand(1),
    "NumPy's numbers": lambda: np.random.randn(1000),
    "Python's generator": random.random,
    "the param store": lambda: pyro.param("theirs", torch.zeros(1)),
    "validation": lambda: pyro.enable_validation(True),
    "warnings": lambda: warnings.simplefilter("ignore"),
}


@pytest.mark.parametrize("what", CULPRITS)
def test_the_test_can_tell(what):
    with warnings.catch_warnings():
        _, changed = left_alone(CULPRITS[what], 1, False)
    assert what in changed
