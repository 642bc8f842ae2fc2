from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cpomdp_ppl import FunctionPolicy, RandomPolicy
from cpomdp_ppl.gym import CPOMDPEnv
from cpomdp_ppl.inference import ExtendedKalmanFilter, ObservableOperator
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.signature import signature
from solvers import cids
from solvers.cids import training
from solvers.cids.estimator import ActorCritic
from solvers.cids.policy import LSTMPolicy
from solvers.cids.priors import DirichletPriors
from solvers.episodes.worlds import seen_by
from tests.programs import EyesOpen, Plates

QUICK = {"likelihood": "exact", "progress": False, "seed": 0}
GAUSSIAN = {**QUICK, "likelihood": "ekf"}


def always(action):
    return FunctionPolicy(lambda history: torch.full((history.num_episodes,), action))


SENSES = always(2)


class Corridor:
    """Light–Dark as somebody would write it who has never heard of this toolkit."""

    def __init__(self, light_is_right: bool, seed: int, steps: int = 20) -> None:
        self.side = 1 if light_is_right else -1
        self.random = random.Random(seed)
        self.steps = steps

    def reset(self):
        self.x, self.t = self.random.gauss(0, 0.3), 0
        return None

    def step(self, action):
        depth = self.side * self.x
        reward = 1.0 if depth > 1 else -1.0 if depth < 0 else 0.0
        seen = None
        if action == 2:
            seen = self.random.gauss(self.x, 1.0 if depth > 0 else 8**0.5)
        else:
            self.x += (1 if action == 1 else -1) * (1 + self.random.gauss(0, 0.1**0.5))
        self.t += 1
        return seen, reward, self.t == self.steps, {"position": self.x}


def look_around(history):
    """A step to the right, then eyes open: what is seen scatters much less where it is light."""
    return torch.full((history.num_episodes,), 1 if history.time < 2 else 2)


def test_posteriors_are_bayes_rule_over_all_episodes_together():
    model = ContextualTiger(horizon=5)
    prior = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    run = cids.run(model, [0, 1, 2, 1], 3, solution=RandomPolicy(3), prior=prior, **QUICK)
    assert run.posteriors.shape == (4, 4, 3)
    log_joint = prior.log().expand(4, -1)
    torch.testing.assert_close(run.posteriors[:, 0], prior.expand(4, -1))
    for k, episodes in enumerate(run.episodes):
        assert torch.equal(episodes.contexts, torch.tensor([0, 1, 2, 1]))
        log_joint = log_joint + ObservableOperator().run(model, episodes).log_likelihood
        torch.testing.assert_close(run.posteriors[:, k + 1], log_joint.softmax(-1))
        torch.testing.assert_close(run.returns[:, k], episodes.returns.double())
    torch.testing.assert_close(
        run.information.sum(1), run.true_probability[:, -1].log() - run.true_probability[:, 0].log()
    )


def test_the_policy_of_an_episode_starts_from_the_posterior_before_it():
    model = LineGrid()
    starts = []

    class Watching(RandomPolicy):
        def start(self, prior):
            starts.append(prior.double())
            return super().start(prior)

    run = cids.run(model, [0, 1], 3, solution=Watching(3), **QUICK)
    torch.testing.assert_close(torch.stack(starts, 1), run.posteriors[:, :-1], rtol=1e-5, atol=1e-6)


def test_contexts_by_name_or_from_the_prior_if_nobody_says():
    run = cids.run(LineGrid(), None, 1, solution=RandomPolicy(3), prior=[0.25, 0.75], num_runs=40, **QUICK)
    assert torch.bincount(run.contexts).tolist() == [10, 30]
    run = cids.run(LineGrid(), "detector left", 2, solution=RandomPolicy(3), num_runs=3, **QUICK)
    assert run.contexts.tolist() == [1, 1, 1]
    assert run.returns.shape == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("light_is_right", [True, False])
def test_a_world_written_without_this_toolkit(light_is_right):
    model = LightDark()
    settings = {"solution": FunctionPolicy(look_around), **QUICK, "likelihood": "smc"}
    run = cids.run(model, Corridor(light_is_right, 7), 6, **settings)
    assert run.contexts is None
    assert run.posteriors.shape == (1, 7, 2)
    assert float(run.posteriors[0, -1, 0 if light_is_right else 1]) > 0.9
    assert bool(run.returns.isfinite().all())
    assert run.episodes[0].observed["z"].sum() == 18
    with pytest.raises(ValueError, match="known contexts"):
        run.regret()


def test_an_environment_and_a_function_that_leads_the_agent_come_to_the_same():
    model = LightDark()
    corridor = Corridor(True, 3)

    def lead(agent):
        total = 0.0
        corridor.reset()
        for _ in range(model.horizon):
            seen, reward, *_ = corridor.step(agent.act())
            agent.observe({} if seen is None else {"z": seen})
            total += reward
        return total

    settings = {"solution": FunctionPolicy(look_around), **GAUSSIAN}
    by_function = cids.run(model, lead, 2, **settings)
    by_environment = cids.run(model, Corridor(True, 3), 2, **settings)
    assert torch.equal(by_function.posteriors, by_environment.posteriors)
    assert torch.equal(by_function.returns, by_environment.returns)


def test_many_environments_and_episodes_that_end_early():
    model = LightDark()
    worlds = [Corridor(True, 1, steps=5), Corridor(False, 2, steps=20)]
    run = cids.run(model, worlds, 2, solution=FunctionPolicy(look_around), **GAUSSIAN)
    assert run.episodes[0].lengths.tolist() == [5, 20]
    data = run.to_inference_data(draws=5)
    assert int((data.observed_data["action"][0, 0] >= 0).sum()) == 5
    assert int(data.observed_data["z"][0, 0].notnull().sum()) == 3


class Pinned:
    """One context in all episodes of a Gymnasium environment."""

    def __init__(self, env, context, seed):
        self.env, self.context, self.seed = env, context, seed

    def reset(self):
        seed, self.seed = self.seed, None
        return self.env.reset(seed=seed, options={"context": self.context})

    def step(self, action):
        return self.env.step(action)


@pytest.mark.parametrize(
    ("program", "backend"),
    [
        (LineGrid, ObservableOperator()),
        (ContextualTiger, ObservableOperator()),
        (EyesOpen, ExtendedKalmanFilter()),
        (Plates, ExtendedKalmanFilter()),
    ],
)
def test_a_gymnasium_environment(program, backend):
    """Its posteriors are those of the episodes that it showed."""
    model = program()
    settings = {"solution": RandomPolicy(model.num_actions), **QUICK, "likelihood": backend}
    run = cids.run(model, Pinned(CPOMDPEnv(model), 1, 5), 3, **settings)
    log_joint = model.prior().double().log()
    for k, episodes in enumerate(run.episodes):
        log_joint = log_joint + backend.run(model, episodes).log_likelihood[0]
        torch.testing.assert_close(run.posteriors[0, k + 1], log_joint.softmax(-1))
        assert (episodes.initial_observations is not None) == model.initial_observation
    assert any(bool(flags.any()) for episodes in run.episodes for flags in episodes.observed.values())


def test_an_environment_may_not_change_its_context():
    model = LineGrid()
    with pytest.raises(ValueError, match="stays in one context"):
        cids.run(model, CPOMDPEnv(model), 20, solution=RandomPolicy(3), **QUICK)
    run = cids.run(model, CPOMDPEnv(model, prior=[0.0, 1.0]), 5, solution=RandomPolicy(3), **QUICK)
    assert run.num_episodes == 5


def test_a_run_stops_when_it_has_settled():
    model = LineGrid(accuracy=0.95)
    run = cids.run(model, [0, 1] * 10, 8, solution=SENSES, stop_at=0.99, **QUICK)
    assert run.num_episodes < 8  # all of them
    settled = run.posteriors.amax(-1) > 0.99  # [R, K + 1]
    assert torch.equal(run.played, ~settled[:, :-1])
    assert torch.equal(run.returns.isnan(), ~run.played)
    for k in range(run.num_episodes):
        assert len(run.episodes[k]) == int(run.played[:, k].sum())
    data = run.to_inference_data(draws=3)
    assert np.array_equal((data.observed_data["action"] >= 0).any("time"), run.played)


def test_no_context_is_lost_for_good_but_what_the_prior_excludes_is():
    model = LineGrid(accuracy=1.0)
    run = cids.run(model, 0, 2, solution=SENSES, **QUICK)
    assert 0 < float(run.posteriors[0, -1, 1]) < 1e-11
    with pytest.raises(ArithmeticError, match="excludes every context"):
        cids.run(model, 0, 2, solution=SENSES, prior=[0.0, 1.0], **QUICK)


@pytest.mark.slow
def test_resolving_fits_each_run_further_and_leaves_the_solution_alone():
    model = LineGrid()
    policy = LSTMPolicy(model, hidden=8, amortised=True, seed=1)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    settings = {"iterations": 2, "batch_size": 20}
    run = cids.run(model, [0, 1], 2, solution=policy, resolve=settings, **QUICK)
    assert run.posteriors.shape == (2, 3, 2)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
    again = cids.run(model, [0, 1], 2, solution=policy, resolve=settings, **QUICK)
    assert torch.equal(run.returns, again.returns)
    with pytest.raises(ValueError, match="nothing to learn"):
        cids.run(model, 0, 2, solution=RandomPolicy(3), resolve=True, **QUICK)


@pytest.mark.slow
def test_resolving_plays_the_policy_that_was_fitted_in_the_same_world():
    """With steps of no size it is the given policy's run; with large ones it is not."""
    model = LineGrid()
    policy = LSTMPolicy(model, hidden=8, amortised=True, seed=1)
    given = cids.run(model, [0, 1, 0], 2, solution=policy, **QUICK)
    tiny = {"iterations": 1, "batch_size": 40, "learning_rate": 1e-12}
    same = cids.run(model, [0, 1, 0], 2, solution=policy, resolve=tiny, **QUICK)
    assert torch.equal(same.returns, given.returns)
    assert torch.equal(same.posteriors, given.posteriors)
    large = {"iterations": 5, "batch_size": 40, "learning_rate": 0.05, "estimator": ActorCritic()}
    moved = cids.run(model, [0, 1, 0], 2, solution=policy, resolve=large, **QUICK)
    assert not torch.equal(moved.episodes[0].actions, given.episodes[0].actions)


def test_a_runs_world_does_not_depend_on_who_else_still_plays():
    model = LightDark(horizon=6)
    settings = {"solution": SENSES, **GAUSSIAN, "seed": 3}
    all_of_them = cids.run(model, [0, 1] * 3, 4, **settings)
    some = cids.run(model, [0, 1] * 3, 4, stop_at=0.6, **settings)
    assert not bool(some.played.all())
    for k in range(some.num_episodes):
        rows = some.played[:, k]
        seen = all_of_them.episodes[k].observations["z"][rows]
        assert torch.equal(some.episodes[k].observations["z"], seen)


def test_different_agents_meet_the_same_world():
    model = LightDark(horizon=6)
    one = cids.run(model, [0, 1], 2, solution=RandomPolicy(3), **GAUSSIAN)
    other = cids.run(model, [0, 1], 2, solution=FunctionPolicy(look_around), **GAUSSIAN)
    for mine, theirs in zip(one.episodes, other.episodes, strict=True):
        assert torch.equal(mine.states[:, 0], theirs.states[:, 0])
        assert not torch.equal(mine.actions, theirs.actions)


def test_without_a_solution_one_is_fitted_first(monkeypatch):
    model = LineGrid()
    asked = {}
    short = cids.fit

    def fit(model, **settings):
        asked.update(settings)
        return short(model, iterations=2, batch_size=20, **settings)

    monkeypatch.setattr(training, "fit", fit)
    run = cids.run(model, 0, 2, prior=[0.9, 0.1], **QUICK)
    assert asked["prior"] == DirichletPriors((0.9, 0.1))
    assert run.returns.shape == (1, 2)


def test_ctrl_c_while_fitting_stops_the_run():
    model = LineGrid()
    policy = LSTMPolicy(model, hidden=8, amortised=True, seed=1)
    begun = []

    def stop(iteration, measured, policy):
        begun.append(iteration == 1)
        if sum(begun) == 3:  # in the third fit
            raise KeyboardInterrupt

    settings = {"iterations": 2, "batch_size": 20, "callbacks": [stop]}
    with pytest.raises(cids.RunInterrupted) as stopped:
        cids.run(model, 0, 5, solution=policy, resolve=settings, **QUICK)
    assert stopped.value.run.num_episodes == 2


def test_a_policy_that_cannot_read_the_posterior_is_pointed_out():
    model = LineGrid()
    deaf = LSTMPolicy(model, hidden=8)
    with pytest.warns(UserWarning, match="acts alike whatever the posterior"):
        cids.run(model, 0, 2, solution=deaf, **QUICK)
    with pytest.raises(ValueError, match="amortised=True"):
        cids.fit(model, prior="dirichlet", policy=deaf, iterations=1, progress=False)


@pytest.mark.parametrize(
    ("earned", "expected"),
    [(np.float32(1.5), 1.5), (torch.tensor(2), 2.0), (np.int64(3), 3.0), (None, np.nan)],
)
def test_returns_of_any_make(earned, expected):
    def lead(agent):
        for _ in range(2):
            agent.act()
            agent.observe(observed={})
        return earned

    run = cids.run(LineGrid(), lead, 1, solution=RandomPolicy(3), **QUICK)
    np.testing.assert_array_equal(run.returns, [[expected]])


def test_what_an_environment_shows_of_plates():
    """None and NaN were not seen, entry by entry."""
    model = Plates()
    (name, site), *_ = signature(model).observations.items()
    n = site.plates.numel()
    whole = [0.1 * i for i in range(n)]
    broken = [None, float("nan"), *whole[2:]]
    values, observed = seen_by(model, {name: broken})
    assert observed[name].reshape(-1).tolist() == [False, False] + [True] * (n - 2)
    values, observed = seen_by(model, {name: whole, f"{name}_seen": [False] + [True] * (n - 1)})
    assert observed[name].reshape(-1).tolist() == [False] + [True] * (n - 1)
    torch.testing.assert_close(values[name].reshape(-1).double(), torch.tensor(whole).double())
    for odd in ([*whole, 1.0], "left", [whole, whole]):
        with pytest.raises(ValueError, match=f"observation..{name}"):
            seen_by(model, {name: odd})
    with pytest.raises(ValueError, match=f"{name}_seen"):
        seen_by(model, {name: whole, f"{name}_seen": [True] * (n + 1)})


def test_information_of_a_context_that_the_prior_excludes_is_none():
    run = cids.run(LineGrid(), 1, 2, solution=RandomPolicy(3), prior=[1.0, 0.0], **QUICK)
    assert torch.equal(run.information, torch.zeros(1, 2).double())


def test_a_prior_that_sums_to_one_but_for_rounding_plays_all_episodes():
    prior = torch.tensor([1.0000005, 0.0])
    assert cids.run(LineGrid(), 0, 2, solution=RandomPolicy(3), prior=prior, **QUICK).num_episodes == 2


def test_regret_is_what_the_told_agent_expects_less_what_was_earned():
    model = LightDark(horizon=4)
    run = cids.run(model, [0, 1], 2, solution=RandomPolicy(3), **GAUSSIAN)
    torch.testing.assert_close(run.regret([5.0, 3.0]), torch.tensor([[5.0], [3.0]]).double() - run.returns)
    torch.testing.assert_close(run.regret(), model.context_known_return()[0] - run.returns)
    np.testing.assert_allclose(run.to_dataset()["regret"], run.regret())
    with pytest.raises(ValueError, match="optima"):
        run.regret([1.0])


class Unsaid(LightDark):
    """Light–Dark, as if nobody knew what knowing the context earns."""

    def context_known_return(self):
        return None


class LikelierSide:
    """Walks to the side that was likelier from the start, which is the best to do if told."""

    amortised = True

    def start(self, prior):
        return (prior[:, 0] >= 0.5).long()

    def act(self, history, memory):
        return memory, memory


def test_regret_is_against_the_policy_told_the_context():
    """Where the model has no closed form, which here is the truth."""
    run = cids.run(Unsaid(horizon=4), [0, 1], 2, solution=LikelierSide(), **GAUSSIAN)
    told = run.context_known
    assert told.source == "policy"
    off = (told.values - LightDark(horizon=4).context_known_return()).abs()
    assert off.le(3.5 * told.standard_errors).all()
    expected = told.values[[0, 1]][:, None] - run.returns
    torch.testing.assert_close(run.regret(told), expected)
    data = run.to_dataset()
    np.testing.assert_allclose(data["regret"], expected)
    np.testing.assert_allclose(data["context_known_return"], told.values)
    np.testing.assert_allclose(data["context_known_error"], told.standard_errors)
    assert run.plot().axes[0].get_ylabel() == "cumulative regret"


@pytest.mark.slow
def test_export_to_arviz_and_back(tmp_path):
    """Means of draws agree with the posterior within 4.5 standard errors."""
    model = LineGrid()
    run = cids.run(model, [0, 1, 0], 2, solution=RandomPolicy(3), **QUICK)
    data = run.to_inference_data(chains=2, draws=500)
    mean = data.posterior["is_context"].mean(("chain", "draw")).values
    p = run.posteriors.numpy()
    assert (np.abs(mean - p) <= 4.5 * np.sqrt(p * (1 - p) / 1000) + 1e-9).all()
    data.to_netcdf(str(tmp_path / "run.nc"))
    import arviz as az

    again = az.from_netcdf(str(tmp_path / "run.nc"))
    np.testing.assert_array_equal(again.posterior["context_index"], data.posterior["context_index"])
    np.testing.assert_array_equal(again.observed_data["side"], data.observed_data["side"])
    assert again.run["true_context"].values.tolist() == ["detector right", "detector left", "detector right"]


def test_ctrl_c_stops_who_does_not_ask_and_keeps_what_there_is_and_callbacks_see_it():
    seen = []

    def stop(run):
        seen.append(run.num_episodes)
        if run.num_episodes == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="stopped after 2 episodes") as stopped:
        cids.run(LineGrid(), 0, 5, solution=RandomPolicy(3), callbacks=[stop], **QUICK)
    assert seen == [1, 2]
    assert stopped.value.run.returns.shape == (1, 2)

    def at_once(agent):
        raise KeyboardInterrupt

    with pytest.raises(cids.RunInterrupted) as stopped:
        cids.run(LineGrid(), at_once, 5, solution=RandomPolicy(3), **QUICK)
    nothing = stopped.value.run
    assert nothing.returns.shape == (1, 0)
    assert nothing.to_inference_data(draws=2).posterior["context_index"].shape == (4, 2, 1, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_episodes": 0}, "num_episodes: expected a positive integer, got 0"),
        ({"environment": "detector up"}, "environment"),
        ({"environment": 2}, "environment: expected a context out of"),
        ({"environment": [0, 5]}, "environment: expected a context out of"),
        ({"environment": [0, 1], "num_runs": 3}, "num_runs: expected 2"),
        ({"stop_at": 1.5}, "stop_at: expected a probability"),
        ({"stop_at": "0.9"}, "stop_at: expected a probability"),
        ({"callbacks": 3}, "callbacks"),
        ({"callbacks": [3]}, "callbacks"),
        ({"environment": []}, "environment: expected a context out of"),
        ({"environment": Corridor}, "environment: expected a context out of"),
        ({"environment": LightDark()}, "environment: expected a context out of"),
        ({"environment": [0, lambda agent: None]}, "environment: expected a context out of"),
        ({"resolve": {"iteratons": 3}}, "resolve: expected .*iterations.*iteratons"),
        ({"resolve": {"prior": [0.5, 0.5]}}, "resolve"),
        ({"prior": [[0.5, 0.5], [0.5, 0.5]]}, r"prior: expected shape \[2\]"),
        ({"prior": [0.5, 0.6]}, "sum to 1"),
        ({"resolve": 3}, "resolve"),
        ({"seed": -1}, "seed"),
        ({"solution": 3}, "solution"),
        ({"environment": lambda agent: "much"}, "environment"),
        ({"environment": lambda agent: 1.0}, "without a step"),
    ],
)
def test_bad_input_is_named(changes, words):
    settings = {"environment": 0, "num_episodes": 2, "solution": RandomPolicy(3), **QUICK, **changes}
    with pytest.raises((ValueError, TypeError), match=words):
        cids.run(LineGrid(), settings.pop("environment"), settings.pop("num_episodes"), **settings)


def test_an_environment_that_answers_oddly_is_named():
    class Odd:
        def __init__(self, outcome):
            self.outcome = outcome

        def reset(self):
            return None

        def step(self, action):
            return self.outcome

    for outcome, words in [
        ((None, "much", False), "a number as the reward"),
        (({1: 0, "b": 1}, 1.0, False), "observations of"),
        (3.0, "observation, reward, over"),
        ((None, 1.0), "observation, reward, over"),
        (({"sied": 1}, 1.0, False), "observations of"),
    ]:
        with pytest.raises(ValueError, match=words):
            cids.run(LineGrid(), Odd(outcome), 1, solution=RandomPolicy(3), **QUICK)
    with pytest.raises(ValueError, match="by site"):
        cids.run(ContextualTiger(), Odd((1.0, 1.0, False)), 1, solution=RandomPolicy(3), **QUICK)


def test_a_solution_of_another_model_is_refused():
    settings = {"likelihood": "ekf", "iterations": 1, "batch_size": 4, "progress": False}
    solution = cids.fit(LightDark(horizon=3), prior="dirichlet", **settings)
    with pytest.raises(ValueError, match=r"solution: expected .*detector"):
        cids.run(LineGrid(), 0, 1, solution=solution, **QUICK)


def test_runs_that_have_settled_are_not_drawn_as_if_they_had_no_regret():
    model = LineGrid(horizon=4, accuracy=0.7)
    run = cids.run(model, [0, 1] * 10, 6, solution=SENSES, stop_at=0.9, **QUICK)
    left, _ = run.plot().axes
    regret = run.regret()
    assert bool(regret.isnan().any())
    k = np.arange(1, run.num_episodes + 1)
    np.testing.assert_allclose(left.lines[0].get_ydata(), k * float(regret[0, 0]))  # sensing earns nothing


def test_pictures_of_a_run():
    """Regret and belief in the truth where contexts are known; returns and all beliefs where they are not."""
    model = LightDark(horizon=4)
    settings = {"solution": RandomPolicy(3), **GAUSSIAN}
    known = cids.run(model, [0, 1, 0], 3, **settings).plot()
    left, right = known.axes
    assert left.get_ylabel() == "cumulative regret"
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["belief in the true context"]
    run = cids.run(model, Corridor(True, 7, steps=4), 3, **settings)
    left, right = run.plot().axes
    assert left.get_ylabel() == "return"
    np.testing.assert_allclose(left.lines[0].get_ydata(), run.returns[0])
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["light right", "light left"]

    class NoOptimum(LightDark):
        def context_known_return(self):
            return None

    run = cids.run(NoOptimum(horizon=3), [0, 1], 2, **settings)
    assert run.context_known is None
    assert "regret" not in run.to_dataset()
    assert run.plot().axes[0].get_ylabel() == "return"  # nobody knows what there is to be had
    assert run.plot([1.0, 2.0]).axes[0].get_ylabel() == "cumulative regret"
