"""Persistence and chance as a part of the policy: by hand, and with gradients that are still exact."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import simulate
from cpomdp_ppl.models import LineGrid
from cpomdp_ppl.policy import History, Percept
from solvers.cids.policy import Exploring, previous_actions

NEVER = -torch.inf


class Fixed:
    """The same logits, whatever was seen."""

    def __init__(self, *logits):
        self.logits = torch.tensor(logits)

    def start(self, prior):
        return None

    def act(self, history, memory):
        logits = self.logits.expand(history.num_episodes, -1)
        return dist.Categorical(logits=logits), memory


def by_hand(logits, previous, chance, persistence):
    """Probabilities of the actions, one after another."""
    weights = [
        0.0 if logit == NEVER else math.exp(logit + persistence * (a == previous))
        for a, logit in enumerate(logits)
    ]
    allowed = sum(weight > 0 for weight in weights)
    return [(1 - chance) * w / sum(weights) + chance * (w > 0) / allowed for w in weights]


LOGITS = [(0.3, -1.0, 2.0), (0.0, 0.0, 0.0), (NEVER, 0.5, -0.5), (1.0, NEVER, NEVER)]
SETTINGS = [(0.0, 0.0), (0.2, 0.0), (0.0, 1.5), (0.2, 1.5)]


@pytest.mark.parametrize(("chance", "persistence"), SETTINGS)
def test_probabilities_by_hand(chance, persistence):
    acting = Exploring(None, chance, persistence)
    logits = torch.tensor([list(row) for row in LOGITS for _ in range(-1, 3)]).reshape(4, 4, 3)
    previous = torch.arange(-1, 3).expand(4, 4)
    found = acting.probs(logits, previous)
    for i, row in enumerate(LOGITS):
        for j, a in enumerate(range(-1, 3)):
            expected = torch.tensor(by_hand(row, a, chance, persistence))
            torch.testing.assert_close(found[i, j], expected)
    torch.testing.assert_close(found.sum(-1), torch.ones(4, 4))


@pytest.mark.parametrize(("chance", "persistence"), SETTINGS)
def test_logarithms_are_those_of_the_probabilities(chance, persistence):
    acting = Exploring(None, chance, persistence)
    logits = 3 * torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    previous = torch.arange(-1, 3).expand(5, 4)
    found = acting.log_probs(logits, previous)
    torch.testing.assert_close(found, acting.probs(logits, previous).log())


@pytest.mark.parametrize(("chance", "persistence"), SETTINGS)
def test_what_is_ruled_out_stays_so(chance, persistence):
    """Even if it was done before; and gradients stay finite."""
    acting = Exploring(None, chance, persistence)
    logits = torch.tensor([[0.0, NEVER, 1.0]], requires_grad=True)
    previous = torch.tensor([1])
    assert float(acting.probs(logits, previous).detach()[0, 1]) == 0.0
    log_probs, entropy = acting.evaluate(logits[None], torch.tensor([[2]]), previous[None])
    p = by_hand((0.0, NEVER, 1.0), 1, chance, persistence)
    assert log_probs.item() == pytest.approx(math.log(p[2]))
    assert entropy.item() == pytest.approx(-p[0] * math.log(p[0]) - p[2] * math.log(p[2]))
    (log_probs + entropy).sum().backward()
    assert bool(logits.grad[:, [0, 2]].isfinite().all())


@pytest.mark.parametrize(("chance", "persistence"), SETTINGS)
def test_the_score_has_mean_zero(chance, persistence):
    """`Σ_a π(a) ∇ log π(a) = 0`, and the gradient of a mean payoff is that of the sum over actions."""
    acting = Exploring(None, chance, persistence)
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(4, 3, generator=g, dtype=torch.float64, requires_grad=True)
    payoffs = torch.randn(3, generator=g, dtype=torch.float64)
    features = torch.randn(7, 4, generator=g, dtype=torch.float64)
    previous = torch.arange(7) % 4 - 1
    probs = acting.probs(features @ weights, previous)
    log_probs = acting.log_probs(features @ weights, previous)
    (score,) = torch.autograd.grad((probs.detach() * log_probs).sum(), weights, retain_graph=True)
    torch.testing.assert_close(score, torch.zeros_like(score))
    (exact,) = torch.autograd.grad((probs * payoffs).sum(), weights, retain_graph=True)
    (by_score,) = torch.autograd.grad((probs.detach() * payoffs * log_probs).sum(), weights)
    torch.testing.assert_close(by_score, exact)


def test_entropies_are_of_the_policy_that_acts():
    acting = Exploring(None, 0.2, 1.5)
    logits = torch.tensor([[[0.3, -1.0, 2.0], [0.3, -1.0, 2.0]]])
    _, entropies = acting.evaluate(logits, torch.tensor([[1, 0]]), torch.tensor([[-1, 1]]))
    for t, previous in enumerate((-1, 1)):
        p = by_hand((0.3, -1.0, 2.0), previous, 0.2, 1.5)
        assert float(entropies[0, t]) == pytest.approx(-sum(x * math.log(x) for x in p))


def test_persistence_makes_runs_of_the_length_that_it_says():
    """Three indifferent actions repeat with probability `e^p / (e^p + 2)`: 4.5 standard errors."""
    persistence = 2.0
    acting = Exploring(Fixed(0.0, 0.0, 0.0), 0.0, persistence)
    actions = simulate(LineGrid(horizon=20), acting, 500, seed=0).actions
    same = (actions[:, 1:] == actions[:, :-1]).double()
    p = math.exp(persistence) / (math.exp(persistence) + 2)
    assert abs(float(same.mean()) - p) < 4.5 * (p * (1 - p) / same.numel()) ** 0.5
    assert abs(float((actions[:, 0] == 0).double().mean()) - 1 / 3) < 4.5 * (2 / 9 / 500) ** 0.5


def test_it_acts_by_the_action_before():
    acting = Exploring(Fixed(0.3, -1.0, 2.0), 0.1, 1.0)
    flags = {"side": torch.zeros(2, dtype=torch.bool)}
    history = History((Percept(None, {"side": torch.zeros(2)}, flags),))
    decision, _ = acting.act(history, None)
    torch.testing.assert_close(decision.probs[0], torch.tensor(by_hand((0.3, -1.0, 2.0), -1, 0.1, 1.0)))
    later = history.extended(Percept(torch.tensor([1, 2]), {"side": torch.zeros(2)}, flags))
    decision, _ = acting.act(later, None)
    for b, previous in enumerate((1, 2)):
        expected = torch.tensor(by_hand((0.3, -1.0, 2.0), previous, 0.1, 1.0))
        torch.testing.assert_close(decision.probs[b], expected)


def test_without_either_it_is_the_policy_itself():
    policy = Fixed(0.3, -1.0, 2.0)
    flags = {"side": torch.zeros(2, dtype=torch.bool)}
    history = History((Percept(None, {"side": torch.zeros(2)}, flags),))
    ours, theirs = (each.act(history, None)[0] for each in (Exploring(policy), policy))
    assert torch.equal(ours.logits, theirs.logits)


def test_the_action_before_each_decision():
    actions = torch.tensor([[2, 0, 1], [1, 1, 0]])
    assert previous_actions(actions).tolist() == [[-1, 2, 0], [-1, 1, 1]]
