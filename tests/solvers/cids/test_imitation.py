"""Policies that begin by doing what a rule does: how often they do, and that the rule is what they learn."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import simulate
from cpomdp_ppl.models import ContextualTiger, LineGrid
from cpomdp_ppl.models.line_grid import LEFT, RIGHT, SENSE
from cpomdp_ppl.policy import as_policy
from cpomdp_ppl.progress import bar
from solvers import cids, exact
from solvers.cids import imitation
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.imitation import Pupil, imitate
from solvers.cids.policy import unroll
from solvers.cids.priors import DirichletPriors, OnePrior
from tests.conftest import assert_mean

HALVES = OnePrior((0.5, 0.5))


def majority(history):
    """Sense three times, then go where most of the reports say that the high-value target is."""
    right = (history.observations["side"] * history.observed["side"]).sum(1)
    go = torch.where(right >= 2, LEFT, RIGHT)
    return go if history.time >= 3 else torch.full_like(go, SENSE)


def taught(policy, rule, priors=HALVES, batch_size=100, seed=0):
    return imitate(policy, rule, priors, batch_size, seed, bar(False, imitation.ROUNDS, "", ""))


def agreement(policy, rule, num_episodes=400):
    """How often the likeliest action is the rule's, of decisions where the policy itself gets to."""
    model = policy.model
    episodes = simulate(model, policy, num_episodes, contexts="balanced", seed=99)
    prior = model.prior().double().expand(num_episodes, -1)
    logits, _ = unroll(policy, episodes, prior)
    wanted, _ = unroll(Noting(rule, model.num_actions), episodes, prior)
    return float((logits.argmax(-1) == wanted.argmax(-1)).double().mean())


class Noting:
    """A rule whose actions are logits, so that it can be asked in hindsight."""

    def __init__(self, rule, num_actions):
        self.rule, self.num_actions = as_policy(rule), num_actions
        self.start = self.rule.start

    def act(self, history, memory):
        action, memory = self.rule.act(history, memory)
        return dist.Categorical(
            logits=torch.nn.functional.one_hot(action, self.num_actions).double().log()
        ), memory


@pytest.mark.slow
def test_a_rule_is_learned():
    model = LineGrid()
    policy = BeliefPolicy(model, likelihood="exact", seed=0)
    assert agreement(policy, majority) < 0.8
    agreed = taught(policy, majority)
    assert agreed >= 0.95
    assert agreement(policy, majority) >= 0.95
    ours, theirs = (
        simulate(model, each, 2000, contexts="balanced", seed=1).returns for each in (policy, majority)
    )
    error = float((ours.var() + theirs.var()).sqrt()) / 2000**0.5
    assert float(ours.mean()) > float(theirs.mean()) - 0.05 * 20 - 3 * error


@pytest.mark.slow
def test_a_plan_that_keeps_a_memory_is_learned():
    """The best policy of the tiger, which looks its beliefs up, is as good a teacher as a function."""
    model = ContextualTiger(horizon=5)
    plan = exact.plan(model)
    policy = BeliefPolicy(model, likelihood="exact", seed=0)
    taught(policy, plan, OnePrior((1 / 3,) * 3))
    assert agreement(policy, plan) >= 0.95


@pytest.mark.slow
def test_probabilities_of_a_rule_are_learned():
    """On average, those of each action are 0.05 off at most."""
    by_parity = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])

    def rule(history):
        return dist.Categorical(probs=by_parity[history.time % 2].expand(history.num_episodes, -1))

    model = LineGrid(horizon=4)
    policy = BeliefPolicy(model, likelihood="exact", seed=0)
    taught(policy, rule)
    episodes = simulate(model, policy, 300, seed=1)
    probs = unroll(policy, episodes, model.prior().expand(300, -1))[0].softmax(-1)  # [B, T, A]
    assert float((probs - by_parity[torch.arange(4) % 2]).detach().abs().mean()) < 0.05


@pytest.mark.slow
def test_the_seed_alone_decides(monkeypatch):
    monkeypatch.setattr(imitation, "ROUNDS", 3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    policies = [BeliefPolicy(LineGrid(), likelihood="exact", seed=0) for _ in range(3)]
    agreed = [taught(policy, majority, seed=seed) for policy, seed in zip(policies, (1, 1, 2), strict=True)]
    assert torch.equal(before, torch.get_rng_state())
    one, same, other = (torch.cat([w.flatten() for w in p.parameters()]) for p in policies)
    assert torch.equal(one, same)
    assert agreed[0] == agreed[1]
    assert not torch.equal(one, other)


@pytest.mark.slow
def test_every_prior_that_is_drawn_is_learned_from(monkeypatch):
    """The rule goes to the likelier side at once: under priors from all over, a pupil has to read them."""
    monkeypatch.setattr(imitation, "ROUNDS", 30)

    class Trusting:
        def start(self, prior):
            return torch.where(prior[:, 0] > 0.5, LEFT, RIGHT)

        def act(self, history, memory):
            return memory, memory

    policy = BeliefPolicy(LineGrid(), likelihood="exact", seed=0)
    taught(policy, Trusting(), DirichletPriors((0.5, 0.5), share=0.0))
    prior = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).double().repeat(50, 1)
    first = simulate(LineGrid(), policy, 100, prior=prior, seed=0).actions[:, 0]
    expected = torch.where(prior[:, 0] > 0.5, LEFT, RIGHT)
    assert float((first == expected).double().mean()) > 0.9


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_who_leads_decides_and_both_are_noted(chance):
    model = LineGrid(horizon=5)
    policy = BeliefPolicy(model, likelihood="exact", seed=0)
    pupil = Pupil(as_policy(majority), policy, chance)
    episodes = simulate(model, pupil, 200, contexts="balanced", seed=0)
    wanted = torch.stack([rule for _, rule in pupil.seen], 1)  # [B, T, A]
    assert wanted.shape == (200, 5, 3)
    hindsight, _ = unroll(Noting(majority, 3), episodes, model.prior().expand(200, -1))
    torch.testing.assert_close(wanted.double(), hindsight.exp())
    as_wanted = (episodes.actions == wanted.argmax(-1)).double()
    if chance == 1.0:
        assert bool((as_wanted == 1).all())
    else:
        logits, _ = unroll(policy, episodes, model.prior().expand(200, -1))
        expected = logits.exp().gather(2, wanted.argmax(-1, keepdim=True)).mean()
        assert_mean(as_wanted.mean(1), float(expected.detach()), "who does what the rule does by chance")


def test_some_are_led_and_others_not():
    """Half of them: 4.5 standard errors."""
    policy = BeliefPolicy(LineGrid(), likelihood="exact", seed=0)
    torch.manual_seed(0)
    _, _, led = Pupil(as_policy(majority), policy, 0.5).start(torch.full((400, 2), 0.5).double())
    assert abs(float(led.double().mean()) - 0.5) < 4.5 * 0.5 / 20


@pytest.mark.slow
def test_a_fit_starts_from_the_rule():
    """At first, while its critic learns alone, it plays as well as the rule."""
    model = LineGrid()
    seen = []
    solution = cids.fit(
        model,
        start=majority,
        iterations=12,
        batch_size=100,
        seed=0,
        progress=False,
        callbacks=[lambda iteration, measured, policy: seen.append(agreement(policy, majority))],
    )
    assert len(set(seen[:3])) == 1  # of a quarter of the iterations
    assert len(set(seen)) > 1
    assert seen[0] >= 0.95
    ours = solution.evaluate(2000).returns
    theirs = simulate(model, majority, 2000, contexts="balanced", seed=1).returns
    error = (ours.standard_error**2 + float(theirs.var()) / 2000) ** 0.5
    assert ours.mean > float(theirs.mean()) - 0.05 * 20 - 3 * error


@pytest.mark.slow
def test_a_poor_imitation_is_warned_of(monkeypatch):
    monkeypatch.setattr(imitation, "ROUNDS", 1)
    with pytest.warns(
        UserWarning, match="start: the policy does what the rule does in .* % of its decisions"
    ):
        cids.fit(LineGrid(), start=majority, iterations=1, batch_size=20, seed=0, progress=False)


@pytest.mark.parametrize(
    "settings",
    [
        dict(start=3),
        dict(start="majority"),
        dict(start=LineGrid),
        dict(start=majority, policy="lstm"),
        dict(start=majority, objective="variational"),
    ],
)
def test_what_cannot_be_imitated_is_refused_by_name(settings):
    with pytest.raises(ValueError, match=r"start: expected"):
        cids.fit(LineGrid(), **settings, iterations=1, batch_size=4, progress=False)
