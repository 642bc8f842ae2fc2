"""The verdict on a fit: three right sentences, and numbers that others come to as well."""

from __future__ import annotations

import json
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from cpomdp_ppl import CPOMDP, RandomPolicy, simulate
from cpomdp_ppl.errors import DegenerateWeightsError, ModelError
from cpomdp_ppl.evaluation import TimedPolicy
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter
from cpomdp_ppl.models import LightDark, LineGrid
from cpomdp_ppl.rng import generators
from solvers import cids
from solvers.cids import training, verdict
from solvers.cids.batch import PRIOR_SHARE
from solvers.cids.policy import LSTMPolicy
from solvers.cids.verdict import (
    BEFORE,
    LEARNED,
    RULE,
    FixedPlan,
    NotSolvedWarning,
    Trial,
    Verdict,
    Worth,
    best_plan,
    earnings,
    judge,
    weights_of,
)

PRIOR = torch.tensor([0.3, 0.7], dtype=torch.float64)
LEFT, RIGHT, SENSE = range(3)
ACCURACY = 0.85


class Table(nn.Module):
    """A policy of the user's own: a logit for each time and action, and nothing else."""

    def __init__(self, model, favourite=None):
        super().__init__()
        logits = torch.zeros(model.horizon, model.num_actions)
        if favourite is not None:
            logits[:, favourite] = 100.0
        self.table = nn.Parameter(logits)

    def start(self, prior):
        return None

    def act(self, history, memory):
        return dist.Categorical(logits=self.table[history.time].expand(history.num_episodes, -1)), None


class Vain(CPOMDP):
    """Whatever is done, the same is earned, and nothing that is seen depends on the context."""

    contexts, actions, horizon, states = ("red", "blue"), ("push", "pull"), 2, 1

    def initial(self, context):
        return torch.zeros((), dtype=torch.long)

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        pyro.sample("z", dist.Bernoulli(torch.tensor(0.5)))

    def reward(self, state, action, context):
        return torch.ones(())


class Corner(Vain):
    """Where it begins, a little is earned; ten steps to the right a lot, and nothing on the way."""

    actions, horizon, states = ("stay", "left", "right"), 14, 11

    def transition(self, state, action, context):
        return (state + torch.where(action == 0, 0, 2 * action - 3)).clamp(0, 10)

    def reward(self, state, action, context):
        return torch.where(state == 10, 20.0, torch.where(state == 0, 1.0, 0.0))


class Beaten(LineGrid):
    """A robot that is told at once which side it is."""

    def __init__(self):
        super().__init__(4, num_cells=5, start=2, accuracy=1.0)


QUICK = {"batch_size": 200, "iterations": 20, "likelihood": "exact", "seed": 0, "progress": False}


def trial(model=None, **settings):
    model = LineGrid(horizon=6) if model is None else model
    given = {"backend": ObservableOperator(), "prior": PRIOR, "temperature": 2.0, "seed": 5}
    return Trial(model, **{**given, **settings})


# ------------------------------------------------------------------------------------- three sentences


@pytest.mark.slow
def test_where_nothing_can_be_learned():
    with pytest.warns(NotSolvedWarning) as caught:
        solution = cids.fit(Vain(), policy=Table(Vain()), **QUICK)
    expected = (
        "Nothing was learned: the policy before training does as well as what was learned "
        "(2.00 against 2.00, give or take 0.00), and so does every action done all the time: there may be "
        "nothing to learn."
    )
    assert solution.verdict.sentence == expected
    assert not solution.verdict.solved
    (warning,) = caught
    assert str(warning.message) == expected
    assert warning.filename == __file__  # where `fit` was called
    assert set(solution.verdict.worth) == {
        LEARNED,
        BEFORE,
        *(f"doing '{a}' all the time" for a in Vain.actions),
    }


@pytest.mark.slow
def test_a_corner_to_get_stuck_in():
    """With nothing but random actions, nobody gets as far as the large reward; the search did."""
    with pytest.warns(NotSolvedWarning, match="does better than what was learned .*: the fit is stuck"):
        found = cids.fit(Corner(), policy=Table(Corner()), **{**QUICK, "learning_rate": 0.1}).verdict
    best = max(found.worth, key=lambda name: found.worth[name].mean)
    assert best == "doing 'right' all the time"
    assert found.worth[best].mean == pytest.approx(1 + 4 * 20.0)
    assert found.worth[LEARNED].mean < 30


@pytest.mark.slow
def test_a_model_that_is_solved():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cids.fit(Beaten(), policy="lstm", **{**QUICK, "iterations": 60}).verdict
    assert found.solved
    assert found.sentence.startswith("The policy is worth ")
    assert "and beats every action done all the time (the best, 'sense': " in found.sentence
    assert found.num_episodes == 1000


OWN = Worth(5.0, 0.1)
LOST, SAME, BETTER = Worth(3.0, 0.1, 2.0, 0.1), Worth(4.9, 0.1, 0.1, 0.1), Worth(7.0, 0.1, -2.0, 0.1)
EVERY = {"doing 'a' all the time": "a", "doing 'b' all the time": "b"}
A, B = EVERY
PLAN = "a fixed plan for 'red'"
AS_WELL = "does as well as what was learned (4.90 against 5.00, give or take 0.20)"
MORE = "does better than what was learned (7.00 against 5.00, give or take 0.20)"


@pytest.mark.parametrize(
    ("rivals", "sentence"),
    [
        (
            {BEFORE: LOST, A: LOST, B: Worth(4.0, 0.1, 1.0, 0.1, at_most=True), PLAN: LOST},
            "The policy is worth 5.00 ± 0.10, return and information together, and beats every action done "
            "all the time (the best, 'b': at most 4.00), the policy before training (3.00) and a fixed plan "
            "for 'red' (3.00).",
        ),
        (
            {BEFORE: LOST},  # actions that the model's programs do not survive
            "The policy is worth 5.00 ± 0.10, return and information together, and beats the policy before "
            "training (3.00).",
        ),
        (
            {BEFORE: LOST, A: SAME, B: LOST},
            f"Doing 'a' all the time {AS_WELL}: the fit is stuck, or there is nothing better to find.",
        ),
        ({BEFORE: LOST, A: SAME, PLAN: BETTER}, f"A fixed plan for 'red' {MORE}: the fit is stuck."),
        ({BEFORE: SAME, A: LOST}, f"Nothing was learned: the policy before training {AS_WELL}."),
        (
            {BEFORE: SAME, A: SAME, B: LOST},
            f"Nothing was learned: the policy before training {AS_WELL}, and so does doing 'a' all the time.",
        ),
        (
            {BEFORE: SAME, A: BETTER, B: SAME},
            f"Nothing was learned: the policy before training {AS_WELL}, and doing 'a' all the time does "
            "better (7.00).",
        ),
        (
            {BEFORE: SAME, A: SAME, B: SAME},
            f"Nothing was learned: the policy before training {AS_WELL}, and so does every action done all "
            "the time: there may be nothing to learn.",
        ),
        ({BEFORE: BETTER, A: LOST}, f"Training did harm: the policy before training {MORE}."),
        ({RULE: SAME, A: LOST}, f"Nothing was gained: the rule that it was started from {AS_WELL}."),
    ],
)
def test_sentences(rivals, sentence):
    solved = all(worth.beaten for worth in rivals.values())
    words = verdict._triumph if solved else verdict._failure
    every = {name: action for name, action in EVERY.items() if name in rivals}
    assert words(OWN, rivals, every) == sentence


# ------------------------------------------------------------------------------------- the same numbers


def sensed(played):
    """Each episode's probability of the true context, from what was said: Bayes' rule by hand."""
    side, there = played.episodes.observations["side"], played.episodes.observed["side"]
    ahead = ((2 * side - 1) * there).sum(1).double()  # how much oftener it said right
    odds = PRIOR[0] / PRIOR[1] * (ACCURACY / (1 - ACCURACY)) ** ahead
    return torch.where(played.episodes.contexts == 0, odds / (1 + odds), 1 / (1 + odds))


def by_hand(values, contexts):
    """A mean with contexts weighted by the prior, and its standard error."""
    groups = [values[contexts == c].numpy() for c in (0, 1)]
    mean = sum(p * group.mean() for p, group in zip(PRIOR.tolist(), groups, strict=True))
    squares = [p**2 * group.var(ddof=1) / len(group) for p, group in zip(PRIOR.tolist(), groups, strict=True)]
    return mean, math.sqrt(sum(squares))


def test_a_comparison_by_hand():
    place, tau = trial(), 2.0
    looks = FixedPlan(torch.tensor([SENSE, SENSE, LEFT, LEFT, LEFT, LEFT]))
    learned, rival = place.play(looks), place.play(FixedPlan.always(place.model, SENSE))
    contexts = learned.episodes.contexts
    assert torch.equal(contexts, rival.episodes.contexts)
    assert torch.bincount(contexts).tolist() == [300, 700]

    def worth(played):
        p = sensed(played)
        mixed = (1 - PRIOR_SHARE) * p + PRIOR_SHARE * PRIOR[contexts]
        return played.episodes.rewards.sum(1).double() + tau * (mixed / PRIOR[contexts]).log()

    one, other = worth(learned), worth(rival)
    assert torch.allclose(learned.worth, one, atol=1e-5)
    found = rival.against(learned)
    assert not found.at_most
    assert (found.mean, found.standard_error) == pytest.approx(by_hand(other, contexts), rel=1e-5)
    assert (found.behind, found.behind_error) == pytest.approx(by_hand(one - other, contexts), rel=1e-5)


def test_everybody_meets_the_same_world():
    """First states and noise do not depend on random numbers that a policy draws."""

    class Drawing(RandomPolicy):
        def act(self, history, memory):
            torch.rand(17)
            return torch.full((history.num_episodes,), 1), memory

    place = trial(LightDark(4), num_episodes=300)  # in two pieces
    one = place.play(FixedPlan.always(place.model, 1)).episodes
    other = place.play(Drawing(3)).episodes
    assert torch.equal(one.states, other.states)
    assert torch.equal(one.observations["z"], other.observations["z"])
    assert len(torch.unique(one.states[:, 0])) == 300


@pytest.mark.parametrize("tau", [0.0, 0.5, 1e4])
def test_the_bound_comes_to_the_same_as_the_filter(tau, monkeypatch):
    place = trial(temperature=tau)
    plans = [[LEFT] * 6, [RIGHT] * 6, [SENSE] * 6, [SENSE, SENSE, RIGHT, RIGHT, RIGHT, RIGHT]]
    learned = place.play(FixedPlan(torch.tensor([SENSE, SENSE, SENSE, LEFT, RIGHT, SENSE])))
    assert len(learned.worth) == 1000
    calls, real = [], verdict.filtered
    monkeypatch.setattr(verdict, "filtered", lambda *a, **s: calls.append(1) or real(*a, **s))
    spared = 0
    for plan in plans:
        rival = place.play(FixedPlan(torch.tensor(plan)))
        calls.clear()
        found = rival.against(learned)
        assert bool(calls) == (tau > 0 and not found.at_most)
        spared += not calls
        full = rival._against(learned, rival.worth, at_most=False)
        assert found.beaten == full.beaten
        assert found.behind <= full.behind + 1e-9
        assert bool((rival.most >= rival.worth - 1e-9).all())
    assert spared == {0.0: 4, 0.5: 1, 1e4: 0}[tau]


def test_information_is_weighed_as_in_a_fit():
    """The mean over many episodes of what six looks tell, against the sum over all that they can say."""
    place = trial(num_episodes=4000, temperature=1.0)
    played = place.play(FixedPlan.always(place.model, SENSE))
    k = np.arange(7)
    choose = np.array([math.comb(6, int(each)) for each in k])
    exact = 0.0
    for c, share in enumerate(PRIOR.tolist()):
        says = ACCURACY if c == 0 else 1 - ACCURACY
        chance = choose * says**k * (1 - says) ** (6 - k)
        odds = PRIOR[0].item() / PRIOR[1].item() * (ACCURACY / (1 - ACCURACY)) ** (2.0 * k - 6)
        p = odds / (1 + odds) if c == 0 else 1 / (1 + odds)
        exact += share * (chance * np.log(((1 - PRIOR_SHARE) * p + PRIOR_SHARE * share) / share)).sum()
    found = place.mean(played.worth)
    assert played.returns.abs().max() == 0
    assert abs(found.mean - exact) < 4 * found.standard_error


def test_with_more_contexts_than_episodes_they_are_drawn():
    place = Trial(LineGrid(2), ObservableOperator(), PRIOR, 0.0, 0, num_episodes=1)
    assert math.isnan(place.mean(torch.ones(1)).standard_error)
    assert not Worth(1.0, 0.1, 5.0, math.nan).beaten  # nobody knows


# ------------------------------------------------------------------------------------------- fixed plans


def test_the_plan_for_the_likeliest_context():
    model = LineGrid(horizon=5)
    plans = torch.tensor([[LEFT] * 5, [RIGHT] * 5])
    name, plan = best_plan(trial(model), plans)
    assert name == "a fixed plan for 'detector left'"
    assert plan.actions.tolist() == [RIGHT] * 5
    even = torch.tensor([0.5, 0.5], dtype=torch.float64)
    plans[0] = torch.tensor([SENSE] * 5)  # earns nothing, and so more than to be seen half of the time
    assert best_plan(trial(model, prior=even), plans)[1].actions.tolist() == [SENSE] * 5
    assert earnings(model, plans, even, 0).tolist() == pytest.approx([0.0, (20.0 - 40.0) / 2])
    name, plan = best_plan(trial(model), plans[1])
    assert (name, plan.actions.tolist()) == ("a fixed plan", [RIGHT] * 5)


@pytest.mark.slow
def test_a_plan_is_a_rival_unless_it_is_one_already():
    model = Corner()
    place, policy = trial(model, temperature=0.1), Table(model, favourite=0)
    walks = torch.tensor([2] * 10 + [0] * 4)
    before = {"table": Table(model).table.detach()}
    found = judge(place, policy, before, walks)
    assert found.worth["a fixed plan"].mean == pytest.approx(81.0)
    same = judge(place, policy, before, torch.full((14,), 2))
    assert "a fixed plan" not in same.worth
    assert same.worth["doing 'right' all the time"].mean == pytest.approx(81.0)


# ---------------------------------------------------------------------------------------------- manners


def test_it_leaves_no_trace():
    model = LineGrid(horizon=4)
    policy, other = LSTMPolicy(model, 4, seed=0).eval(), LSTMPolicy(model, 4, seed=1)
    own = {name: weight.clone() for name, weight in policy.state_dict().items()}
    before = generators()
    found = judge(trial(model, num_episodes=60), policy, other.state_dict())
    assert found == judge(trial(model, num_episodes=60), policy, other.state_dict())
    assert generators() == before
    assert all(torch.equal(weight, own[name]) for name, weight in policy.state_dict().items())
    expected = trial(model, num_episodes=60).play(other)
    assert found.worth[BEFORE].mean == pytest.approx(expected.trial.mean(expected.worth).mean, abs=2.0)
    with pytest.raises(ZeroDivisionError), weights_of(policy, other.state_dict()):
        raise ZeroDivisionError
    assert all(torch.equal(weight, own[name]) for name, weight in policy.state_dict().items())


class Mortal(ParticleFilter):
    """A filter whose particles die wherever somebody goes to the left."""

    def larger(self):
        return None

    def attempt(self, model, episodes, **settings):
        return self.run(model, episodes, **settings)

    def run(self, model, episodes, **settings):
        if bool((episodes.actions == LEFT).all()):
            raise DegenerateWeightsError("time 1 of episode 0: no context can have produced it")
        return super().run(model, episodes, **settings)


def test_a_filter_that_fails_a_rival_counts_against_the_policy():
    model = LineGrid(horizon=2)  # nobody gets anywhere
    place = trial(model, backend=Mortal(64), num_episodes=40)
    found = judge(place, Table(model, favourite=SENSE), Table(model, favourite=RIGHT).state_dict())
    assert found.worth["doing 'left' all the time"].at_most
    surprise = -float((PRIOR * PRIOR.log()).sum())
    assert found.worth["doing 'left' all the time"].mean == pytest.approx(2.0 * surprise)
    assert not found.worth["doing 'right' all the time"].at_most
    assert found.sentence.startswith(
        "Doing 'left' all the time does as well as what was learned (at most 1.22 "
    )
    assert judge(place, Table(model, favourite=LEFT), Table(model).state_dict()) is None


def test_a_rival_that_cannot_be_played_is_left_out():
    class Cliff(LineGrid):
        def reward(self, state, action, context):
            return torch.where(action == LEFT, math.nan, super().reward(state, action, context))

    model = Cliff(horizon=2)
    place, looks = trial(model, num_episodes=20), Table(model, favourite=SENSE)
    found = judge(place, looks, Table(model, favourite=LEFT).state_dict())
    assert list(found.worth) == [LEARNED, "doing 'right' all the time", "doing 'sense' all the time"]
    with pytest.raises(ModelError):
        simulate(model, Table(model, favourite=LEFT), 2, seed=0)
    lonely = SimpleNamespace(
        play=lambda policy: trial(model).play(policy), mean=trial(model).mean, model=model
    )
    assert judge(lonely, Table(model, favourite=LEFT), {}) is None


def test_a_rule_in_place_of_weights():
    model = LineGrid(horizon=4)
    rule = FixedPlan.always(model, SENSE)
    found = judge(trial(model, num_episodes=60), Table(model, favourite=SENSE), rule)
    assert found.worth[RULE].behind == 0
    assert found.sentence.startswith("Nothing was gained: the rule that it was started from does as well")
    assert isinstance(rule, verdict.Policy)
    assert isinstance(TimedPolicy(rule, 0), verdict.Policy)


# ------------------------------------------------------------------------------------------------- fits


@pytest.mark.slow
def test_short_fits_are_not_judged(monkeypatch):
    model, monkey = LineGrid(horizon=2), {**QUICK, "batch_size": 10, "iterations": 2}
    assert cids.fit(model, policy=Table(model), **monkey).verdict is None
    monkeypatch.setattr(training, "FEWEST_EPISODES", 20)
    assert cids.fit(model, policy=Table(model), verdict=False, **monkey).verdict is None
    with pytest.warns(NotSolvedWarning):
        found = cids.fit(model, policy=Table(model), **monkey).verdict
    with pytest.warns(NotSolvedWarning):
        assert found == cids.fit(model, policy=Table(model), **monkey).verdict
    assert found.temperature == 0.5  # that of the end


@pytest.mark.slow
def test_a_checkpoint_leads_to_the_same_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "FEWEST_EPISODES", 20)
    model, settings = (
        LineGrid(horizon=2),
        {**QUICK, "batch_size": 10, "iterations": 2, "checkpoint": tmp_path},
    )
    with pytest.warns(NotSolvedWarning):
        found = cids.fit(model, policy=Table(model), **settings).verdict
    with pytest.warns(NotSolvedWarning):
        assert cids.fit(model, policy=Table(model), **settings).verdict == found


def test_ctrl_c_while_it_is_judged_keeps_what_was_learned(monkeypatch):
    monkeypatch.setattr(training, "FEWEST_EPISODES", 20)

    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "judge", pressed)
    model = LineGrid(horizon=2)
    with pytest.raises(cids.Interrupted) as stop:
        cids.fit(model, policy=Table(model), **{**QUICK, "batch_size": 10, "iterations": 2})
    assert stop.value.solution.finished
    assert stop.value.solution.verdict is None


def test_other_processes_are_told(monkeypatch):
    """Those that are not the first play nothing, and come to the same verdict."""
    monkeypatch.setattr(training, "judge", lambda *_: pytest.fail("played"))
    found = Verdict(True, "Well done.", 0.5, 10, {LEARNED: OWN, A: LOST})
    group = SimpleNamespace(rank=1, broadcast=lambda content: {"verdict": found.as_dict()})
    many = SimpleNamespace(measured=[{}] * 20, solution=lambda: None, learner=None)
    assert training._judged(many, SimpleNamespace(batch_size=200), {}, group) == found
    assert training._judged(many, SimpleNamespace(batch_size=199), {}, group) is None


def test_it_is_kept_as_plain_data():
    found = Verdict(False, "No.", 0.5, 10, {LEARNED: OWN, A: Worth(1.0, math.inf, -2.0, 0.0, at_most=True)})
    assert str(found) == "No."
    content = json.loads(json.dumps(found.as_dict()))
    assert Verdict.from_dict(content) == found
    wrong = [
        None,
        3,
        [],
        {},
        {**content, "solved": 1},
        {**content, "worth": {"a": {}}},
        {**content, "more": 1},
    ]
    wrong += [
        {**content, "worth": {"a": {**content["worth"][A], "mean": "1"}}},
        {**content, "sentence": None},
    ]
    for each in wrong:
        with pytest.raises(ValueError, match=r"(verdict|worth).*: expected"):
            Verdict.from_dict(each)
