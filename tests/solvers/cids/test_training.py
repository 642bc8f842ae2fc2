from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from cpomdp_command import main
from cpomdp_ppl import CPOMDP, ModelError, simulate
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.experiments.files import CheckpointError
from cpomdp_ppl.inference import SMC, ParticleFilter
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from solvers import cids
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.estimator import ActorCritic, Reinforce
from solvers.cids.experience import Experience
from solvers.cids.learner import DivergedError, Learner
from solvers.cids.policy import LSTMPolicy
from solvers.cids.schedules import Geometric
from tests.children import environment, start_python, wait_for
from tests.programs import Learnable, Needle
from tests.solvers.cids.knobs import Knob
from tests.solvers.machines import Mortal
from tests.solvers.truth import random_value, solve, tables

SHORT = dict(likelihood="exact", iterations=6, batch_size=20, seed=3, progress=False)


def same_weights(one, other):
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def same_history(one, other):
    """Everything but the time it took."""
    names = [name for name in one.data_vars if not str(name).startswith("seconds")]
    return all(np.array_equal(one[name], other[name], equal_nan=True) for name in names)


@pytest.fixture(scope="module", params=["belief", "lstm"])
def policy(request):
    """Both policies of ours, by their names."""
    return request.param


@pytest.fixture(scope="module")
def kept(policy, tmp_path_factory):
    """The checkpoint of a fit without a break."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def whole(policy, kept):
    """A fit without a break."""
    return cids.fit(LineGrid(), **SHORT, policy=policy, checkpoint=kept)


class Table(nn.Module):
    """A policy of the user's own: a logit for each time and action, and nothing else."""

    def __init__(self, model):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(model.horizon, model.num_actions))

    def start(self, prior):
        return None

    def act(self, history, memory):
        logits = self.table[history.time]
        return dist.Categorical(logits=logits.expand(history.num_episodes, -1)), None


@pytest.mark.slow
def test_the_line_grid_is_solved():
    """At least 97 % of the exact optimum, less three standard errors of the evaluation."""
    model = LineGrid()
    optimum = solve(tables(model), model.horizon).value
    solution = cids.fit(model, likelihood="exact", iterations=250, seed=0, progress=False)
    returns = solution.evaluate(4000).returns
    assert returns.mean > 0.97 * optimum - 3 * returns.standard_error
    assert returns.mean < optimum + 4 * returns.standard_error


@pytest.mark.slow
def test_the_variational_objective_learns_too():
    model = LineGrid()
    settings = dict(likelihood="exact", iterations=100, learning_rate=5e-3, seed=0, progress=False)
    solution = cids.fit(model, objective="variational", **settings)
    assert solution.evaluate(2000).returns.mean > random_value(tables(model), model.horizon) + 3.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "likelihood", "batch_size"), [(LineGrid(horizon=1), "exact", 1), (LightDark(1), "ekf", 20)]
)
def test_one_step_and_payoffs_that_do_not_vary_do_no_harm(model, likelihood, batch_size):
    settings = dict(likelihood=likelihood, iterations=4, batch_size=batch_size, seed=0, progress=False)
    solution = cids.fit(model, **settings)
    assert float(solution.history["gradient_norm"].max()) < 100


@pytest.mark.slow
def test_contexts_that_are_ruled_out_beforehand():
    solution = cids.fit(ContextualTiger(), **SHORT, prior=[0.5, 0.0, 0.5])
    assert len(solution.plot(num_episodes=1).axes) == 3 + 2 * 2
    assert bool(np.isfinite(solution.history["information_lower"]).all())
    assert solution.evaluate(50).returns_by_context.keys() == {"both sharp", "right dull"}


@pytest.mark.slow
def test_every_model_can_be_fitted_with_defaults(model):
    solution = cids.fit(model, iterations=2, batch_size=10, seed=0, progress=False)
    assert solution.finished
    assert solution.history.sizes["iteration"] == 2
    for name in ("return", "entropy", "information_lower", "information_upper", "gradient_norm"):
        assert bool(np.isfinite(solution.history[name]).all())
    for phase in ("rollout", "likelihood", "gradient"):
        assert bool((solution.history[f"seconds_{phase}"] > 0).all())
    figure = solution.plot(num_episodes=2)
    assert len(figure.axes) == 3 + 2 * model.num_contexts


def test_learned_constants_and_dropout_stay_out_of_the_callers_sight():
    class Forgetful(Table):
        def act(self, history, memory):
            logits = nn.functional.dropout(self.table[history.time], training=self.training)
            return dist.Categorical(logits=logits.expand(history.num_episodes, -1)), None

    pyro.get_param_store().clear()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    policies = [Forgetful(Learnable()) for _ in range(2)]
    for policy in policies:
        cids.fit(Learnable(), **{**SHORT, "likelihood": "smc"}, policy=policy)
        assert not policy.training
    assert torch.equal(before, torch.get_rng_state())
    assert not list(pyro.get_param_store())
    assert same_weights(*policies)


class InDouble(LSTMPolicy):
    """In double precision from the hidden units on."""

    def __init__(self, model):
        super().__init__(model, hidden=8)
        self.double()

    def act(self, history, memory):
        percept = self.encoding.step(history.latest, history.time).double()
        hidden, cell = torch.lstm_cell(percept, memory[:2], *self.lstm.all_weights[0])
        return dist.Categorical(logits=self.logits(hidden)), (hidden, cell, memory[2])

    def unroll(self, episodes, prior):
        hidden, _ = self.lstm(self.encoding.sequence(episodes).double())
        return self.logits(hidden), hidden


def test_a_policy_in_double_precision():
    assert cids.fit(LineGrid(), **SHORT, policy=InDouble(LineGrid())).finished


def test_the_temperature_follows_its_schedule():
    solution = cids.fit(LineGrid(), **SHORT, temperature=Geometric(4.0, 1.0))
    expected = 4.0 * (1 / 4) ** (np.arange(6) / 5)
    np.testing.assert_allclose(solution.history["temperature"], expected)
    assert list(solution.history["iteration"].values) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [Reinforce(), Reinforce(baseline=False)])
def test_a_policy_of_the_users_own(estimator):
    model = LineGrid()
    policy = Table(model)
    solution = cids.fit(model, **{**SHORT, "iterations": 30}, policy=policy, estimator=estimator)
    assert solution.policy is policy
    assert float(policy.table.detach().abs().sum()) > 0


@pytest.mark.slow
def test_a_table_learns_not_to_walk_into_detectors():
    """Without memory it is best to stay away from both ends, which is worth 0; at random it is -4.6."""
    model = LineGrid()
    settings = dict(likelihood="exact", iterations=60, learning_rate=0.1, seed=0, progress=False)
    with pytest.warns(cids.NotSolvedWarning, match="'sense' all the time does as well"):
        solution = cids.fit(model, **settings, policy=Table(model))
    assert solution.evaluate(2000).returns.mean > -1.0


def interrupted_fit(after, model, **settings):
    """The best so far of a fit that is stopped by Ctrl-C after some iterations."""

    def press(iteration, measured, policy):
        if iteration == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stop:
        cids.fit(model, **settings, callbacks=[press])
    assert isinstance(stop.value, cids.Interrupted)
    return stop.value.solution


@pytest.mark.slow
def test_an_interrupted_fit_goes_on_to_the_very_same_end(tmp_path, policy, whole):
    settings = {**SHORT, "policy": policy, "checkpoint": tmp_path, "checkpoint_every": 2}
    part = interrupted_fit(5, LineGrid(), **settings)
    assert not part.finished
    assert part.history.sizes["iteration"] == 5
    resumed = []
    rest = cids.fit(LineGrid(), **settings, callbacks=[lambda iteration, *_: resumed.append(iteration)])
    assert resumed == [6]  # Ctrl-C has written a checkpoint
    assert rest.finished
    assert same_weights(whole.policy, rest.policy)
    assert same_history(whole.history, rest.history)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


CONTINUOUS = {**SHORT, "likelihood": ParticleFilter(16)}
OTHERS = {
    "a box, by beliefs": lambda: (Knob(), CONTINUOUS),
    "a box, by histories": lambda: (
        Knob(),
        CONTINUOUS | {"policy": LSTMPolicy(Knob(), 8, distribution="beta")},
    ),
    "an end": lambda: (Mortal(0), {**SHORT, "estimator": ActorCritic(told=0.2)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_what_ends_and_what_is_continuous_can_be_resumed_too(tmp_path, case):
    """To the very same end; and the best so far is loaded in between."""
    model, settings = OTHERS[case]()
    whole = cids.fit(model, **settings)
    interrupted_fit(3, model, **OTHERS[case]()[1], checkpoint=tmp_path, checkpoint_every=2)
    part = cids.load(tmp_path, model)
    assert part.history.sizes["iteration"] == 3
    simulate(model, part.policy, 5, seed=0)
    rest = cids.fit(model, **OTHERS[case]()[1], checkpoint=tmp_path, checkpoint_every=2)
    assert same_weights(whole.policy, rest.policy)
    assert same_history(whole.history, rest.history)


INSIDE = [("belief", Experience, "live"), ("belief", Learner, "_descend")]
INSIDE += [("lstm", Experience, "play"), ("lstm", Experience, "filter"), ("lstm", Learner, "_descend")]


@pytest.mark.parametrize(("policy", "owner", "name"), INSIDE, indirect=["policy"])
def test_ctrl_c_in_the_middle_of_an_iteration_does_not_spoil_the_checkpoint(
    tmp_path, policy, whole, owner, name, monkeypatch
):
    """Wherever it comes: in the middle of a gradient step, the weights are of no iteration."""
    calls = []

    def pressed(real):
        def call(*arguments):
            calls.append(1)
            if len(calls) == 5:  # of the epochs, the second of the second iteration
                raise KeyboardInterrupt
            return real(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, pressed(getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt) as stop:
            cids.fit(LineGrid(), **SHORT, policy=policy, checkpoint=tmp_path)
        assert isinstance(stop.value, cids.Interrupted)
    rest = cids.fit(LineGrid(), **SHORT, policy=policy, checkpoint=tmp_path)
    assert same_weights(whole.policy, rest.policy)
    assert same_history(whole.history, rest.history)


STALLING = """
import os, time
from pathlib import Path
from cpomdp_ppl.models import LineGrid

class Stalling(LineGrid):
    def initial(self, context):
        if "STALL" in os.environ and Path("run/checkpoint/checkpoint.pt").exists():
            time.sleep(60)
        return super().initial(context)
"""


@pytest.mark.slow
def test_a_killed_fit_is_evaluated_as_it_is_and_goes_on_to_the_very_same_end(tmp_path, policy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("stalling.py").write_text(STALLING)
    words = ["fit", "stalling.py:Stalling", "--policy", policy, "--likelihood", "exact", "--seed", "3"]
    words += ["--batch-size", "20"]
    words += ["--iterations", "6", "--checkpoint-every", "2", "--run", "run", "--quiet"]
    with start_python("-m", "cpomdp_ppl", *words, env=environment(STALL="1")) as victim:
        wait_for(Path("run/checkpoint/checkpoint.pt").exists, victim)
        victim.send_signal(signal.SIGKILL)
    model = ModelSpec.of(["stalling.py:Stalling"]).build()
    so_far = cids.load("run", model)
    assert not so_far.finished
    assert so_far.history.sizes["iteration"] == 2
    assert main(["evaluate", "run", "--unfinished", "--num-episodes", "8", "--quiet"]) == 0
    assert main(words) == 0
    whole, rest = cids.fit(model, **SHORT, policy=policy), cids.load("run", model)
    assert same_weights(whole.policy, rest.policy)
    assert same_history(whole.history, rest.history)


def test_ctrl_c_stops_and_carries_the_best_so_far(policy, capsys):
    """A real signal, in the middle of things."""

    def press(iteration, measured, policy):
        if iteration == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt, match="stopped after 3 of 1,000 iterations") as stop:
        cids.fit(LineGrid(), **{**SHORT, "iterations": 1000}, policy=policy, callbacks=[press])
    solution = stop.value.solution
    assert not solution.finished
    assert not solution.policy.training
    assert solution.history.sizes["iteration"] == 3
    assert solution.evaluate(10).returns.num_episodes == 10


def test_a_finished_fit_is_not_done_again(policy, whole, kept):
    settings = {**SHORT, "policy": policy, "checkpoint": kept}
    again = cids.fit(LineGrid(), **settings, callbacks=[lambda *_: pytest.fail("again")])
    assert again.finished
    assert same_weights(whole.policy, again.policy)


def test_a_seed_left_out_is_the_checkpoints(tmp_path):
    settings = {**SHORT, "seed": None}
    interrupted_fit(2, LineGrid(), **settings, checkpoint=tmp_path)
    assert cids.fit(LineGrid(), **settings, checkpoint=tmp_path).finished


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(seed=4), "seed"),
        (dict(batch_size=21), "batch_size"),
        (dict(temperature=2.0), "temperature"),
        (dict(objective="variational"), "estimator|objective"),
        (dict(likelihood="smc"), "likelihood"),
        (dict(model=LineGrid(penalty=30.0)), "penalty"),
        (dict(model=ContextualTiger()), "made with model"),
    ],
)
@pytest.mark.usefixtures("whole")
def test_a_checkpoint_of_another_fit_is_refused(policy, kept, change, named):
    with pytest.raises(CheckpointError, match=named):
        cids.fit(**{"model": LineGrid(), **SHORT, "policy": policy, **change}, checkpoint=kept)


@pytest.mark.usefixtures("whole")
def test_a_checkpoint_of_another_policy_is_refused(policy, kept):
    other = {"belief": "lstm", "lstm": "belief"}[policy]
    with pytest.raises(CheckpointError, match="made with"):
        cids.fit(LineGrid(), **SHORT, policy=other, checkpoint=kept)


def test_a_checkpoint_of_other_code_is_refused(tmp_path):
    def model(reward):
        return type("Mine", (LineGrid,), {"reward": reward})()

    def reward(self, state, action, context):
        return 2.0 * LineGrid.reward(self, state, action, context)

    def changed(self, state, action, context):
        return 3.0 * LineGrid.reward(self, state, action, context)

    changed.__qualname__ = reward.__qualname__
    settings = {**SHORT, "temperature": 1.0, "checkpoint": tmp_path}  # or it would go by the rewards
    done = cids.fit(model(reward), **settings)
    assert same_weights(cids.fit(model(reward), **settings).policy, done.policy)
    with pytest.raises(CheckpointError, match="made with code"):
        cids.fit(model(changed), **settings)


@pytest.mark.slow
def test_numpy_numbers_and_functions_can_be_resumed(tmp_path):
    """Settings that a careless checkpoint could not read back, or would not recognise."""

    def settings():
        return dict(
            **{**SHORT, "likelihood": ParticleFilter(256, guide="ekf")},
            learning_rate=lambda progress: 1e-3 * (1 + np.cos(0.9 * np.pi * progress)),
            estimator=ActorCritic(exploration=lambda progress: 0.1 * (1 - progress)),
        )

    def model():
        result = LightDark()
        result.process_variance = np.float64(0.1)
        return result

    interrupted_fit(2, model(), **settings(), checkpoint=tmp_path)
    assert cids.fit(model(), **settings(), checkpoint=tmp_path).finished


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 but damaged"])
def test_a_damaged_checkpoint_is_told(tmp_path, content):
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt"):
        cids.fit(LineGrid(), **SHORT, checkpoint=tmp_path)


def test_a_checkpoint_is_never_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"learner": Evil()}, tmp_path / "checkpoint.pt")
    with pytest.raises(CheckpointError):
        cids.fit(LineGrid(), **SHORT, checkpoint=tmp_path)
    assert not (tmp_path / "owned").exists()


def test_saved_and_loaded(tmp_path):
    model = LightDark()
    solution = cids.fit(model, **{**SHORT, "likelihood": "ukf"}, policy=LSTMPolicy(model, hidden=16))
    solution.save(tmp_path / "new" / "place")
    weights, settings = sorted(path.name for path in (tmp_path / "new" / "place").iterdir())
    assert re.fullmatch(r"policy-[0-9a-f]{16}\.pt", weights)
    assert settings == "solution.json"
    loaded = cids.load(tmp_path / "new" / "place", LightDark())
    assert same_weights(solution.policy, loaded.policy)
    assert same_history(solution.history, loaded.history)
    assert loaded.settings == json.loads(json.dumps(solution.settings))
    one, two = (simulate(model, each.policy, 5, seed=0).actions for each in (solution, loaded))
    assert torch.equal(one, two)


def test_the_run_folder_of_a_fit_is_loaded(tmp_path, whole, kept):
    """The solution in it, or the best so far of a fit that was stopped."""
    run = tmp_path / "runs" / "fit"
    shutil.copytree(kept, run / "checkpoint")
    early = cids.load(run, LineGrid())
    assert same_weights(whole.policy, early.policy)
    whole.save(run / "solution")
    assert cids.load(run, LineGrid()).settings == cids.load(run / "solution", LineGrid()).settings
    expected = "directory: expected a directory with solution.json, or the run folder of a fit, got .*runs$"
    with pytest.raises(ValueError, match=expected):
        cids.load(tmp_path / "runs", LineGrid())


def test_loading_what_does_not_fit_is_refused(tmp_path, whole):
    whole.save(tmp_path)
    with pytest.raises(CheckpointError, match="accuracy"):
        cids.load(tmp_path, LineGrid(accuracy=0.9))
    with pytest.raises(CheckpointError, match=r"policy-[0-9a-f]+\.pt"):
        cids.load(tmp_path, LineGrid(), policy=LSTMPolicy(LineGrid(), hidden=8))
    with pytest.raises(ValueError, match="directory"):
        cids.load(tmp_path / "elsewhere", LineGrid())
    (weights,) = tmp_path.glob("policy-*.pt")
    content = json.loads((tmp_path / "solution.json").read_text())
    for name in ("../policy-0123456789abcdef.pt", str(weights), "", "solution.json"):
        (tmp_path / "solution.json").write_text(json.dumps(content | {"weights": name}))
        with pytest.raises(CheckpointError, match="weights"):
            cids.load(tmp_path, LineGrid())
    (tmp_path / "solution.json").write_text(json.dumps(content))
    weights.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        cids.load(tmp_path, LineGrid())
    (tmp_path / "solution.json").write_text(json.dumps(content | {"settings": 3}))
    with pytest.raises(CheckpointError, match="settings"):
        cids.load(tmp_path, LineGrid())
    (tmp_path / "solution.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        cids.load(tmp_path, LineGrid())


def test_other_constants_are_told_apart_wherever_they_are(tmp_path):
    def model(of_class=1.0, of_tensor=1.0, of_tuple=1.0):
        class Gained(LineGrid):
            factor = of_class

        result = Gained()
        result.nan, result.tensor, result.tuple = float("nan"), torch.tensor(of_tensor), (of_tuple,)
        return result

    cids.fit(model(), **SHORT).save(tmp_path)
    cids.load(tmp_path, model())
    for changed in ("of_class", "of_tensor", "of_tuple"):
        with pytest.raises(CheckpointError, match="constants"):
            cids.load(tmp_path, model(**{changed: 2.0}))


def test_a_kind_of_lstm_is_not_taken_for_the_plain_one(tmp_path):
    class Cold(LSTMPolicy):
        pass

    model = LineGrid()
    cids.fit(model, **SHORT, policy=Cold(model, hidden=8)).save(tmp_path)
    with pytest.raises(ValueError, match="policy"):
        cids.load(tmp_path, model)


def test_a_policy_that_rules_actions_out_is_left_its_rules():
    class Never(Table):
        """Never senses."""

        def act(self, history, memory):
            logits = self.table[history.time] + torch.tensor([0.0, 0.0, -torch.inf])
            return dist.Categorical(logits=logits.expand(history.num_episodes, -1)), None

    model = LineGrid()
    solution = cids.fit(model, **SHORT, policy=Never(model))
    assert 2 not in simulate(model, solution.policy, 200, seed=0).actions
    assert float(solution.history["entropy"].min()) == pytest.approx(1.0)  # in training, too


class Fragile(Table):
    """Logits that become infinite at the third batch's gradient step."""

    def __init__(self, model):
        super().__init__(model)
        self.register_buffer("calls", torch.zeros(()))

    def act(self, history, memory):
        decision, memory = super().act(history, memory)
        if torch.is_grad_enabled() and history.time == 0:
            self.calls += 1
            if self.calls > 3:  # the first batch is looked at twice
                decision = dist.Categorical(logits=decision.logits * float("nan"), validate_args=False)
        return decision, memory


def test_a_loss_that_is_not_finite_stops_the_fit_and_keeps_the_last_good_checkpoint(tmp_path):
    settings = {**SHORT, "estimator": Reinforce()}
    with pytest.raises(DivergedError, match="iteration 3: the policy loss is nan"):
        cids.fit(LineGrid(), **settings, policy=Fragile(LineGrid()), checkpoint=tmp_path, checkpoint_every=1)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["learner"]["iteration"] == 2
    assert bool(state["learner"]["networks"]["0.table"].isfinite().all())


class Sharp(CPOMDP):
    """A sensor so sharp that a handful of particles is nowhere near what it says."""

    contexts, actions, horizon = 2, 2, 6

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 10.0))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + context, 1.0))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.05))

    def reward(self, state, action, context):
        return (action == context).float()


@pytest.mark.slow
def test_collapsing_particles_are_warned_of_once_with_the_remedy():
    with pytest.warns(UserWarning) as caught:  # noqa: PT030  # what it says is looked at below
        cids.fit(Sharp(), likelihood=ParticleFilter(16), iterations=45, batch_size=20, seed=0, progress=False)
    messages = [str(warning.message) for warning in caught if "iteration" in str(warning.message)]
    assert len(messages) == 1
    assert "more particles" in messages[0]
    assert "guide" in messages[0]


class Dying(ParticleFilter):
    """A filter whose particles all die, now and then or always: in batches, and inside a policy."""

    always = False

    def larger(self):
        return None  # more particles would be of no use

    def run(self, model, episodes, *, seed=None, moments=True):
        if self.always or (seed or 0) % 2:
            raise DegenerateWeightsError("time 1 of episode 0: no context can have produced it")
        return super().run(model, episodes, seed=seed, moments=moments)

    def recursion(self, model):
        return DyingParticles(model, self)


class DyingParticles(SMC):
    """Every other time that it starts, or always, it holds impossible whatever is seen first."""

    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.always, self.dies = settings.always, False

    def start(self, num_episodes):
        self.dies = self.always or bool(torch.rand(()) < 0.5)
        return super().start(num_episodes)

    def step(self, cloud, observed):
        cloud, increment = super().step(cloud, observed)
        return cloud, torch.full_like(increment, -torch.inf) if self.dies else increment


def test_too_few_particles_are_warned_of_where_contexts_do_not_differ():
    class Same(Sharp):
        def transition(self, state, action, context):
            return pyro.sample("x", dist.Normal(state, 1.0))

    with pytest.warns(UserWarning, match="particles count on average"):
        cids.fit(Same(), likelihood=ParticleFilter(16), iterations=3, batch_size=20, seed=0, progress=False)


def test_a_batch_whose_particles_died_is_left_out(policy):
    settings = dict(iterations=8, batch_size=10, seed=0, progress=False, policy=policy)
    with pytest.warns(UserWarning, match="left out") as caught:
        solution = cids.fit(LineGrid(), likelihood=Dying(32), **settings)
    assert len([w for w in caught if "left out" in str(w.message)]) == 1
    lost = np.isnan(solution.history["entropy"])
    assert 0 < int(lost.sum()) < 8
    unknown = np.isnan(solution.history["return"])  # an LSTM plays without a filter
    assert bool((unknown == lost).all()) if policy == "belief" else not bool(unknown.any())


@pytest.mark.slow
@pytest.mark.parametrize("particles", [{"belief": 16, "lstm": 4}])
def test_an_episode_whose_particles_died_does_not_take_its_batch_with_it(policy, particles):
    settings = dict(iterations=5, batch_size=20, seed=0, progress=False, policy=policy)
    with pytest.warns(UserWarning, match="likelihoods are noisy|teach nothing"):  # but no batch is left out
        solution = cids.fit(Needle(), likelihood=ParticleFilter(particles[policy]), **settings)
    assert bool(np.isfinite(solution.history["entropy"]).all())


def test_a_filter_that_always_dies_stops_the_fit(policy):
    class Dead(Dying):
        always = True

    dead = pytest.raises(DegenerateWeightsError, match="20 batches in a row")
    settings = dict(iterations=50, batch_size=4, seed=0, progress=False, policy=policy)
    with pytest.warns(UserWarning, match="left out"), dead:
        cids.fit(LineGrid(), likelihood=Dead(32), **settings)


def test_callbacks_are_told_and_tensorboard_writes(tmp_path):
    seen = []
    cids.fit(LineGrid(), **SHORT, callbacks=[lambda *told: seen.append(told), cids.TensorBoard(tmp_path)])
    assert [iteration for iteration, _, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert {"return", "entropy", "temperature"} <= set(seen[0][1])
    (events,) = tmp_path.iterdir()
    assert events.stat().st_size > 500


@pytest.mark.slow
def test_a_progress_bar_says_how_it_goes_and_how_long_it_takes(capsys):
    cids.fit(LineGrid(), **{**SHORT, "iterations": 30, "progress": True})
    shown = capsys.readouterr().err
    for word in ("C-IDS, 20 episodes an iteration, likelihoods by exact", "return", "H bits", "τ"):
        assert word in shown
    assert re.search(r"\d/30 \[\d\d:\d\d<\d\d:\d\d", shown)  # time taken, time left


@pytest.mark.slow
def test_a_finite_model_is_fitted_exactly_unless_told_otherwise():
    rest = {name: value for name, value in SHORT.items() if name != "likelihood"}
    ours, exact = cids.fit(LineGrid(), **rest), cids.fit(LineGrid(), **rest, likelihood="exact")
    assert same_weights(ours.policy, exact.policy)
    assert ours.settings == exact.settings
    assert cids.fit(LightDark(2), **rest).settings["likelihood"][""] == "ParticleFilter"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("model", LineGrid),
        ("likelihood", "exactly"),
        ("objective", "reward"),
        ("temperature", -1.0),
        ("prior", "beta"),
        ("prior", [0.5, 0.6]),
        ("prior", [[0.5, 0.5]]),
        ("prior", [0.5, 0.2, 0.3]),
        ("prior", lambda n: torch.full((n, 3), 1 / 3)),
        ("policy", nn.Linear(2, 2)),
        ("policy", LineGrid),
        ("iterations", 0),
        ("batch_size", 2.5),
        ("learning_rate", 0.0),
        ("seed", -1),
        ("checkpoint", 3),
        ("checkpoint_every", 0),
        ("callbacks", ["print"]),
        ("callbacks", print),
        ("estimator", "reinforce"),
        ("estimator", Reinforce),
        ("checkpoint", "/dev/null/x"),
        ("checkpoint", __file__),
    ],
)
def test_nonsense_is_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=argument):
        cids.fit(**{"model": LineGrid(), **SHORT, argument: value})


def test_interrupted_at_once_it_can_still_be_drawn(policy, monkeypatch):
    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Experience, "live" if policy == "belief" else "play", pressed)
    with pytest.raises(KeyboardInterrupt) as stop:
        cids.fit(LineGrid(), **SHORT, policy=policy)
    assert isinstance(stop.value, cids.Interrupted)
    solution = stop.value.solution
    assert solution.history.sizes["iteration"] == 0
    assert solution.plot(num_episodes=1) is not None


@pytest.mark.parametrize("where", ["practice", "imitation"])
def test_ctrl_c_before_the_first_iteration_is_an_interruption_too(where, monkeypatch, tmp_path):
    """What a policy learns beforehand takes long enough to be stopped; nothing is lost but that."""

    def pressed(what, *_):
        raise TypeError if isinstance(what, float) else KeyboardInterrupt  # it is no schedule

    model, settings = LightDark(3), {**SHORT, "likelihood": "ekf", "checkpoint": tmp_path}
    if where == "imitation":
        settings["start"] = pressed
    else:
        monkeypatch.setattr("solvers.cids.experts.Practice.iterate", pressed)
    with pytest.raises(KeyboardInterrupt) as stop:
        cids.fit(model, **settings)
    assert isinstance(stop.value, cids.Interrupted)
    assert not stop.value.solution.finished
    assert stop.value.solution.history.sizes["iteration"] == 0


def test_nothing_to_see_is_nothing_to_learn(policy):
    class Blind(LineGrid):
        def observation(self, state, action, context):
            pass

    with pytest.raises(ModelError, match="nothing is seen"):
        cids.fit(Blind(), policy=policy, progress=False)


def test_a_solution_has_agents():
    solution = cids.fit(LineGrid(), **SHORT, prior=[0.25, 0.75])
    agent = solution.agent(seed=0, likelihood="exact")
    assert agent.posterior.tolist() == pytest.approx([0.25, 0.75])
    action = agent.act()
    agent.observe({"side": 1.0} if action == 2 else None)
    assert agent.time == 1


def test_nothing_outside_the_directory_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cids.fit(LineGrid(), **SHORT)
    assert not list(Path(tmp_path).iterdir())


CRITICS = re.compile("judge|critic")


def test_while_the_critic_warms_up_the_policy_stays_as_it_is(policy):
    model = LineGrid()
    make = {"lstm": LSTMPolicy, "belief": BeliefPolicy}[policy]
    first = make(model, hidden=8, seed=1)
    deciding = {name: weight for name, weight in first.state_dict().items() if not CRITICS.match(name)}
    before = {name: weight.clone() for name, weight in deciding.items()}
    still, moved = [], []

    def watch(iteration, measured, policy):
        after = policy.state_dict()
        same = all(torch.equal(after[name], weight) for name, weight in before.items())
        (still if same else moved).append(iteration)

    settings = {"likelihood": "exact", "iterations": 5, "batch_size": 20, "seed": 0, "progress": False}
    cids.fit(model, policy=first, estimator=ActorCritic(warm_up=0.5), callbacks=[watch], **settings)
    assert still == [1, 2]  # progress 0 and 1/4
    assert moved == [3, 4, 5]
    with pytest.raises(ValueError, match="warm_up"):
        ActorCritic(warm_up=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "weights_of"), [(22, 20), (3, 18)])
def test_a_checkpoint_holds_the_best_so_far(tmp_path, policy, every, weights_of):
    """Of the first window of twenty iterations; before its end, the last that was written."""
    settings = {**SHORT, "iterations": 30, "batch_size": 4, "policy": policy}
    weights = {}

    def note(iteration, measured, policy):
        weights[iteration] = {name: weight.clone() for name, weight in policy.state_dict().items()}
        if iteration == (every if every == 22 else 19) + 1:
            raise ZeroDivisionError  # whatever ends it

    with pytest.raises(ZeroDivisionError):
        cids.fit(LineGrid(), **settings, checkpoint=tmp_path, checkpoint_every=every, callbacks=[note])
    found = cids.load(tmp_path, LineGrid())
    assert all(torch.equal(found.policy.state_dict()[name], x) for name, x in weights[weights_of].items())
    assert not found.finished
    assert found.prior.tolist() == [0.5, 0.5]
    assert not found.policy.training
    assert found.history.sizes["iteration"] == (22 if every == 22 else 18)
    with pytest.raises(CheckpointError, match="constants"):
        cids.load(tmp_path, LineGrid(penalty=30.0))


def test_a_checkpoint_of_other_policies(tmp_path):
    settings = {**SHORT, "iterations": 2}
    mine = cids.fit(LineGrid(), **settings, policy=Table(LineGrid()), checkpoint=tmp_path / "mine")
    mine.save(tmp_path / "saved")
    for place in (tmp_path / "mine", tmp_path / "saved"):
        with pytest.raises(ValueError, match="policy: expected a module like the one"):
            cids.load(place, LineGrid())
        again = cids.load(place, LineGrid(), policy=Table(LineGrid()))
        assert again.finished
        assert same_weights(again.policy, mine.policy)
    state = torch.load(tmp_path / "mine" / "checkpoint.pt", weights_only=True)
    del state["version"]  # as they were before
    torch.save(state, tmp_path / "mine" / "checkpoint.pt")
    old = cids.load(tmp_path / "mine", LineGrid(), policy=Table(LineGrid()))
    assert same_weights(old.policy, mine.policy)
    with pytest.raises(CheckpointError, match="written by another version"):
        cids.fit(LineGrid(), **settings, policy=Table(LineGrid()), checkpoint=tmp_path / "mine")
    del state["prior"]  # as they were even earlier
    torch.save(state, tmp_path / "mine" / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="does not say what its policy is"):
        cids.load(tmp_path / "mine", LineGrid())
