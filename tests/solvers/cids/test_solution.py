from __future__ import annotations

import dataclasses
import json
import warnings

import numpy as np
import pytest
import torch
import xarray as xr

from cpomdp_ppl import simulate
from cpomdp_ppl.experiments import files
from cpomdp_ppl.experiments.files import CheckpointError
from cpomdp_ppl.experiments.fingerprint import describe_model
from cpomdp_ppl.inference import (
    ExtendedKalmanFilter,
    GridFilter,
    ObservableOperator,
    ParticleFilter,
    UnscentedKalmanFilter,
)
from cpomdp_ppl.models import LightDark, LineGrid
from solvers import cids
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.policy import LSTMPolicy
from solvers.cids.searching import Searching
from solvers.cids.solution import as_history
from solvers.cids.verdict import LEARNED, Verdict, Worth

with warnings.catch_warnings():  # once a day, it tells of its next version
    warnings.simplefilter("ignore")
    import arviz as az


@pytest.fixture(scope="module")
def solution():
    model = LineGrid(horizon=4)
    return cids.fit(
        model, likelihood="exact", iterations=2, batch_size=200, prior=[0.3, 0.7], seed=0, progress=False
    )


@pytest.mark.slow
def test_what_it_exports_are_episodes_of_its_policy(solution, tmp_path):
    data = solution.to_inference_data(30, likelihood="exact", chains=2, draws=50, seed=1)
    assert data.posterior.sizes["episode"] == 30
    assert data.attrs["seed"] == 1
    xr.testing.assert_identical(data["fit_history"], solution.history)
    again = solution.to_inference_data(30, likelihood="exact", chains=2, draws=50, seed=1)
    xr.testing.assert_identical(data.posterior, again.posterior)
    data.to_netcdf(str(tmp_path / "data.nc"))
    xr.testing.assert_equal(az.from_netcdf(str(tmp_path / "data.nc"))["fit_history"].load(), solution.history)

    # With the prior of the fit: what was seen, sensed with an accuracy of 0.85, says the rest.
    side = data.observed_data["side"].values
    ahead = np.nansum(2 * side - 1, 1)  # how much oftener it said right
    odds = 0.3 / 0.7 * (0.85 / 0.15) ** ahead
    found = data.sample_stats["context_probability"][0, :, -1, 0]
    assert np.allclose(found, odds / (1 + odds), atol=1e-6)


def test_its_repr_is_a_line(solution):
    text = repr(solution)
    assert text.startswith("Solution(model=LineGrid, policy=BeliefPolicy, prior=[")
    assert "finished=True, last={'return': " in text
    assert "\n" not in text
    lived = cids.run(LineGrid(), 0, 1, solution=solution, seed=0, progress=False)
    assert str(lived).startswith("Run(model=LineGrid, R=1, K=1, mean return=")
    assert str(solution.evaluate(20).per_episode) == "PerEpisode(B=20, drawn=False)"


def test_another_prior_may_be_given(solution):
    data = solution.to_inference_data(5, likelihood=ObservableOperator(), draws=5, prior=[0.0, 1.0], seed=0)
    assert (data.constant_data["true_context"] == 1).all()
    assert (data.posterior["context_index"] == 1).all()


def test_bad_arguments_are_named(solution):
    with pytest.raises(ValueError, match="num_episodes: expected a positive integer, got 0"):
        solution.to_inference_data(0)
    with pytest.raises(ValueError, match="seed: expected None or an integer"):
        solution.to_inference_data(seed="x")
    with pytest.raises(TypeError, match="colour"):
        solution.to_inference_data(2, colour="red")
    assert torch.is_grad_enabled()


def names(place):
    return sorted(path.name for path in place.iterdir())


def test_a_solution_of_an_earlier_format(solution, tmp_path):
    """There, weights were always called the same, and settings did not name them."""
    solution.save(tmp_path)
    content = json.loads((tmp_path / "solution.json").read_text())
    (tmp_path / content.pop("weights")).rename(tmp_path / "policy.pt")
    (tmp_path / "solution.json").write_text(json.dumps(content))
    loaded = cids.load(tmp_path, solution.model)
    for name, weight in solution.policy.state_dict().items():
        assert torch.equal(weight, loaded.policy.state_dict()[name])
    loaded.save(tmp_path)
    assert names(tmp_path) == [
        json.loads((tmp_path / "solution.json").read_text())["weights"],
        "solution.json",
    ]
    cids.load(tmp_path, solution.model)


def test_a_solution_that_is_saved_while_it_is_read(solution, tmp_path, monkeypatch):
    solution.save(tmp_path)
    real, calls = files.load_json, []

    def load_json(path):
        calls.append(path)
        gone = {"weights": "policy-0123456789abcdef.pt"} if len(calls) == 1 else {}
        return real(path) | gone

    monkeypatch.setattr("solvers.cids.solution.load_json", load_json)
    assert cids.load(tmp_path, solution.model).settings == solution.settings
    assert len(calls) == 2


def test_what_cannot_be_cleaned_up_does_no_harm(solution, tmp_path, monkeypatch):
    (tmp_path / "policy-0123456789abcdef.pt").mkdir()  # which is not deleted like a file
    solution.save(tmp_path)
    cids.load(tmp_path, solution.model)

    def fails(*_):
        raise ZeroDivisionError("the error itself")

    monkeypatch.setattr("solvers.cids.solution.save_json", fails)
    (tmp_path / "solution.json").write_text("{")
    before = names(tmp_path)
    with torch.no_grad():
        next(solution.policy.parameters()).add_(1.0)
    with pytest.raises(ZeroDivisionError, match="the error itself"):
        solution.save(tmp_path)
    assert set(before) < set(names(tmp_path))  # nobody knows which weights are in use


# ---------------------------------------------------------------------------- policies that read beliefs


def solution_of(policy, **further):
    """A solution with a policy that nobody has trained."""
    model = policy.model if isinstance(policy, BeliefPolicy) else policy._model[0]
    settings = {**describe_model(model), "iterations": 60, "batch_size": 200, "likelihood": None}
    history = as_history({"return": [1.0, 3.0], "entropy": [0.5, np.nan], "temperature": [4.0, 1.0]})
    prior = torch.full((model.num_contexts,), 1 / model.num_contexts, dtype=torch.float64)
    return cids.Solution(model, policy, prior, history, {**settings, **further}, True)


class Mine(ParticleFilter):
    """Somebody's own filter."""


FILTERS = {
    "smc": (LightDark(3), ParticleFilter(16, resampling="stratified", ess_threshold=0.7)),
    "guided": (LightDark(3), ParticleFilter(8, guide="ekf", common_random_numbers=False)),
    "ekf": (LightDark(3), ExtendedKalmanFilter(reward_points=16)),
    "ukf": (LightDark(3), UnscentedKalmanFilter(kappa=0.5)),
    "grid": (LightDark(3), GridFilter(200, bounds=(-30.0, 30.0), tolerance=1e9)),
    "exact": (LineGrid(3), ObservableOperator()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS)
def test_a_belief_policy_comes_back_with_its_filter(name, tmp_path):
    model, backend = FILTERS[name]
    solution = solution_of(BeliefPolicy(model, 8, likelihood=backend, seed=3))
    solution.save(tmp_path)
    loaded = cids.load(tmp_path, model)
    assert type(loaded.policy) is BeliefPolicy
    assert dataclasses.asdict(loaded.policy.backend).keys() == dataclasses.asdict(backend).keys()
    assert files.jsonable(loaded.policy.backend) == files.jsonable(backend)
    own, again = solution.policy.state_dict(), loaded.policy.state_dict()
    assert own.keys() == again.keys()
    assert all(torch.equal(own[name], again[name]) for name in own)
    assert not loaded.policy.training
    one, two = (simulate(model, each.policy, 8, seed=0).actions for each in (solution, loaded))
    assert torch.equal(one, two)


@pytest.mark.slow
def test_what_it_makes_of_the_model_is_kept(tmp_path):
    """Scales come from the file, even if today other ones would be found."""
    solution = solution_of(BeliefPolicy(LightDark(3), 8, likelihood=ParticleFilter(8)))
    solution.policy.encoding.centre.add_(1.0)
    solution.save(tmp_path)
    loaded = cids.load(tmp_path, LightDark(3)).policy.encoding
    assert torch.equal(loaded.centre, solution.policy.encoding.centre)
    assert loaded.num_states is None


def test_a_filter_of_ones_own_is_the_callers_to_give(tmp_path):
    class Guide:
        def transition(self, state, action, context, observations, observed):
            raise NotImplementedError

    model = LineGrid(2)
    for k, backend in enumerate((Mine(8), ParticleFilter(8, guide=Guide()))):
        solution = solution_of(BeliefPolicy(model, 8, likelihood=backend))
        solution.save(tmp_path / str(k))
        with pytest.raises(ValueError, match=r"policy: expected BeliefPolicy\(model, likelihood=…\)"):
            cids.load(tmp_path / str(k), model)
        policy = BeliefPolicy(model, 8, likelihood=backend, seed=9)
        loaded = cids.load(tmp_path / str(k), model, policy=policy)
        assert loaded.policy is policy
        assert torch.equal(policy.logits.weight, solution.policy.logits.weight)

    class Kind(BeliefPolicy):
        pass

    solution_of(Kind(model, 8, likelihood=ObservableOperator())).save(tmp_path / "kind")
    with pytest.raises(ValueError, match="policy: expected a module like the one that was learned"):
        cids.load(tmp_path / "kind", model)


def test_an_lstm_of_an_earlier_format(tmp_path):
    """There, nothing said what kind of policy it was, nor was there a verdict."""
    solution = solution_of(LSTMPolicy(LineGrid(2), 8, amortised=True))
    solution.save(tmp_path)
    content = json.loads((tmp_path / "solution.json").read_text())
    del content["policy"], content["verdict"]
    (tmp_path / "solution.json").write_text(json.dumps(content))
    loaded = cids.load(tmp_path, solution.model)
    assert type(loaded.policy) is LSTMPolicy
    assert loaded.policy.amortised
    assert loaded.verdict is None


@pytest.fixture(scope="module")
def belief():
    """A solution with a policy that reads beliefs."""
    return solution_of(BeliefPolicy(LightDark(2), 8, likelihood=ParticleFilter(8)))


def filter_with(**settings):
    return {"likelihood": {"": "ParticleFilter", **settings}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "exec"}, "unknown kind: 'exec'"),
        ({"policy": ["belief"]}, "unknown kind"),
        ({"policy": "lstm"}, "its weights are None"),
        ({"hidden": 9}, r"hidden = 9, but its weights are \(3, 8\)"),
        ({"hidden": 10**9}, "hidden = 1000000000, but"),
        ({"hidden": True}, "hidden = True, but"),
        ({"hidden": "8"}, "hidden is '8'"),
        ({"likelihood": 3}, "unknown filter"),
        ({"likelihood": {"": "os.system", "command": "true"}}, "unknown filter"),
        ({"likelihood": {"": "Backend"}}, "unknown filter"),
        (filter_with(num_particles=10**9), "absurd size"),
        (filter_with(num_particles=-1), "num_particles: expected a positive integer"),
        (filter_with(num_particles="many"), "num_particles: expected a positive integer"),
        (filter_with(guide="os.system"), "guide: expected None"),
        (filter_with(guide={"": "Guide"}), "guide: expected a plain value"),
        (filter_with(command="true"), "expected settings of ParticleFilter"),
        (filter_with(ess_threshold=None), "settings that ParticleFilter takes"),
        (filter_with(common_random_numbers="no"), "expected True or False"),
        ({"likelihood": {"": "ObservableOperator"}}, "cannot serve this model"),
        ({"verdict": 3}, "verdict: expected a dict"),
        ({"verdict": {"solved": True}}, "verdict: expected a dict"),
        ({"history": {"return": 3}}, "is no solution"),
    ],
)
def test_damaged_and_hostile_files(belief, change, words, tmp_path):
    belief.save(tmp_path)
    content = json.loads((tmp_path / "solution.json").read_text())
    (tmp_path / "solution.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(CheckpointError, match=words):
        cids.load(tmp_path, belief.model)


def test_weights_that_look_larger_than_they_are(belief, tmp_path):
    belief.save(tmp_path)
    content = json.loads((tmp_path / "solution.json").read_text())
    weights = torch.load(tmp_path / content["weights"], weights_only=True)
    huge = 10**7
    torch.save({**weights, "logits.weight": torch.zeros(3, 1).expand(3, huge)}, tmp_path / content["weights"])
    (tmp_path / "solution.json").write_text(json.dumps({**content, "hidden": huge}))
    with pytest.raises(CheckpointError, match="its weights are None"):
        cids.load(tmp_path, belief.model)
    for other in ([1], {"logits.weight": 3}, {}):
        torch.save(other, tmp_path / content["weights"])
        with pytest.raises(CheckpointError):
            cids.load(tmp_path, belief.model)


SETTINGS = {"likelihood": "exact", "batch_size": 8, "seed": 0, "progress": False}


@pytest.mark.slow
def test_a_checkpoint_makes_a_belief_policy_again(tmp_path):
    model = LineGrid(2)
    done = cids.fit(model, iterations=3, checkpoint=tmp_path, **SETTINGS)
    found = cids.load(tmp_path, model)
    assert type(found.policy) is BeliefPolicy
    assert found.policy.backend == ObservableOperator()
    assert found.finished
    own, again = done.policy.state_dict(), found.policy.state_dict()
    assert all(torch.equal(own[name], again[name]) for name in own)

    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    damages = [
        {"finished": 3},
        {"policy": "exec"},
        {"hidden": 7},
        {"likelihood": {"": "exec"}},
        {"likelihood": torch.zeros(2)},
        {"best_weights": 3},
        {"best_weights": {"logits.weight": "x"}},
        {"learner": []},
    ]
    for damage in damages:
        torch.save({**state, **damage}, tmp_path / "checkpoint.pt")
        with pytest.raises(CheckpointError):
            cids.load(tmp_path, model)


@pytest.mark.slow
def test_a_fit_that_had_settled_is_finished(tmp_path, monkeypatch):
    from solvers.cids.pace import Pace

    monkeypatch.setattr(Pace, "ended", property(lambda pace: len(pace.recent) >= 2))
    done = cids.fit(LineGrid(2), iterations=50, checkpoint=tmp_path, **SETTINGS)
    assert done.history.sizes["iteration"] == 2
    assert "2 of at most 50: it had settled" in str(done)
    assert cids.load(tmp_path, LineGrid(2)).finished


# ---------------------------------------------------------------------------------------------- what it says


def test_it_prints_as_a_short_table(belief):
    sentence = "Doing 'right' all the time does as well as what was learned: " + 20 * "the fit is stuck, "
    told = Verdict(False, sentence.strip(), 1.0, 10, {LEARNED: Worth(1.0, 0.1)})
    lines = str(dataclasses.replace(belief, verdict=told)).splitlines()
    weights = sum(weight.numel() for weight in belief.policy.parameters())
    assert lines[:8] == [
        "model       LightDark: 2 contexts, 3 actions, 2 steps",
        f"policy      BeliefPolicy, {weights:,} weights",
        "likelihood  smc, 8 particles",
        "iterations  2 of at most 60: it had settled",
        "episodes    400",
        "return      2.000 over the last 2 iterations",
        "H(C|Y)      0.500 bits",  # without those batches that were lost
        "τ           4 → 1",
    ]
    assert lines[8].startswith("verdict     Doing 'right' all the time")
    assert all(line.startswith(" " * 12) for line in lines[9:])
    assert " ".join(line[12:] for line in lines[8:]) == sentence.strip()
    assert max(map(len, lines)) <= 100


def test_it_says_why_it_ended(belief):
    def ended(finished, iterations):
        settings = {**belief.settings, "iterations": iterations}
        return str(dataclasses.replace(belief, finished=finished, settings=settings)).splitlines()

    assert ended(True, 2)[3] == "iterations  2 of at most 2: it ran to the end"
    assert ended(True, 9)[3] == "iterations  2 of at most 9: it had settled"
    assert ended(False, 9)[3] == "iterations  2 of at most 9: it was stopped"
    assert ended(False, 9)[-1] == "verdict     none: the fit is not finished"
    assert ended(True, 9)[-1] == "verdict     none: the fit was too short"


def test_it_prints_whatever_is_known():
    class Own(torch.nn.Module):
        pass

    for described, label in [
        ({"": "ParticleFilter", "num_particles": 12}, "smc, 12 particles"),
        ({"": "Mine", "num_particles": 12}, "Mine"),
        ("Mine", "Mine"),
    ]:
        policy = LSTMPolicy(LineGrid(2), 4)
        assert f"likelihood  {label}\n" in str(solution_of(policy, likelihood=described))
    solution = cids.Solution(LineGrid(2), Own(), torch.ones(2) / 2, as_history({}), {}, False)
    assert str(solution).splitlines() == [
        "model       LineGrid: 2 contexts, 3 actions, 2 steps",
        "policy      Own, 0 weights",
        "likelihood  None",
        "iterations  0: it was stopped",
        "verdict     none: the fit is not finished",
    ]


def test_a_verdict_is_kept(belief, tmp_path):
    told = Verdict(True, "The policy is worth 1.00.", 1.0, 10, {LEARNED: Worth(1.0, 0.1)})
    dataclasses.replace(belief, verdict=told).save(tmp_path)
    assert cids.load(tmp_path, belief.model).verdict == told


# ---------------------------------------------------------------------------------------------- agents


def test_its_agent_has_the_filter_of_the_policy(belief):
    agent = belief.agent(seed=0)
    assert agent.policy is belief.policy
    assert agent.filter._recursion.N == 8
    assert belief.agent(likelihood=ParticleFilter(9)).filter._recursion.N == 9
    history = solution_of(LSTMPolicy(LineGrid(2), 4))
    assert history.agent(seed=0).act() in range(3)
    with pytest.raises(ValueError, match="solution: expected one whose policy reads beliefs"):
        history.agent(search=50)


@pytest.mark.slow
def test_its_agent_searches_if_asked(belief):
    agent = belief.agent(search=20, seed=7, greedy=True)
    assert isinstance(agent.policy, Searching)
    assert (agent.policy.simulations, agent.policy.seed, agent.policy.greedy) == (20, 7, True)
    assert agent.filter._recursion.N == 8
    actions = []
    for _ in range(2):
        actions.append(agent.act())
        agent.observe({"z": 0.5} if actions[-1] == 2 else {})
    again = belief.agent(search=20, seed=7, greedy=True)
    assert again.act() == actions[0]
    with pytest.raises(ValueError, match="search: expected a positive integer, got -1"):
        belief.agent(search=-1)
    with pytest.raises(ValueError, match="simulations: expected at least 16, got 3"):
        belief.agent(search=3)
