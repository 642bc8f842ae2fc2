"""Search before each decision, against exact values of small finite models."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpomdp_ppl import Agent, RandomPolicy, evaluate, simulate
from cpomdp_ppl.inference import ObservableOperator, inference_scope
from cpomdp_ppl.inference.knowledge import Knowledge
from cpomdp_ppl.models import ContextualTiger, LineGrid
from cpomdp_ppl.policy import History, Percept
from cpomdp_ppl.rng import isolated
from solvers import cids, exact
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.searching import FEWEST, Searching, draw_jointly, halvings, is_better
from tests.inference.test_knowledge import followed, uneven
from tests.solvers.cids.test_belief_policy import SHARP, Lamp
from tests.solvers.machines import Machine


def indifferent(model):
    """A policy that was never fitted, and takes all actions equally often."""
    policy = BeliefPolicy(model, likelihood="exact", seed=0)
    with torch.no_grad():
        policy.logits.weight.zero_()
    return SimpleNamespace(model=model, policy=policy, settings={}, history={})


@pytest.mark.parametrize("simulations", [8, 13, 50, 100, 1000])
@pytest.mark.parametrize("num_actions", [1, 2, 3, 5, 8, 40])
def test_halvings_spend_what_there_is_on_fewer_and_fewer(num_actions, simulations):
    rounds = halvings(num_actions, simulations)
    sizes, each = zip(*rounds, strict=True)
    assert sizes[0] == min(num_actions, simulations // FEWEST)
    assert sum(k * m for k, m in rounds) <= simulations
    assert min(each) >= FEWEST
    for before, after in pairwise(sizes):
        assert after == max(2, -(-before // 2))
    if num_actions > 1 and simulations >= FEWEST * num_actions * num_actions.bit_length():
        assert sizes[-1] == 2  # enough for all rounds
        assert sum(k * m for k, m in rounds) > simulations - sum(sizes)  # and nothing is left over


@pytest.mark.slow
def test_states_and_contexts_are_drawn_from_the_belief():
    """Contexts to the nearest whole number; states of each within 4.5 deviations."""
    model, M = ContextualTiger(), 4000
    listen = lambda history: torch.zeros(history.num_episodes, dtype=torch.long)  # noqa: E731
    episodes = simulate(model, listen, 4, contexts="balanced", seed=0)
    known = followed(ObservableOperator(), model, uneven(3, 4), episodes)[2]
    with inference_scope(model, 1):
        states, contexts = draw_jointly(known, M)
    assert states.shape == contexts.shape == (4 * M,)
    assert states.dtype == torch.long
    p = known.log_posterior.exp()  # [B, C]
    for b in range(4):
        c, s = contexts[b * M : (b + 1) * M], states[b * M : (b + 1) * M]
        counts = c.bincount(minlength=3)
        assert bool(((counts - M * p[b]).abs() < 2).all())
        for context in range(3):
            right = float(known.probabilities[context, b, 1])
            n = int(counts[context])
            sd = (n * right * (1 - right)) ** 0.5
            assert abs(int(s[c == context].sum()) - n * right) < 4.5 * sd + 1


def test_contexts_that_are_impossible_are_not_drawn():
    model = ContextualTiger()
    with inference_scope(model, 0):
        known = Knowledge.first(ObservableOperator(), model, torch.tensor([[0.0, 1.0, 0.0]]).double())
        _, contexts = draw_jointly(known, 50)
    assert contexts.tolist() == [1] * 50


def test_chance_alone_is_no_proof():
    """Of two equal actions, the first seems better beyond three errors as often as a normal number is."""
    g = torch.Generator().manual_seed(0)
    for M in (FEWEST, 10, 50):
        values = torch.randn(20_000, 2, M, generator=g, dtype=torch.float64)
        values = values + 5 * torch.randn(20_000, 1, M, generator=g, dtype=torch.float64)  # what they share
        found = float(is_better(values, 3.0).double().mean())
        assert found < 0.00135 + 4.5 * (0.00135 / 20_000) ** 0.5


def test_what_is_much_better_is_seen():
    g = torch.Generator().manual_seed(0)
    values = torch.randn(1000, 2, 50, generator=g, dtype=torch.float64)
    values[:, 0] += 2.0
    assert bool(is_better(values, 3.0).all())
    assert not bool(is_better(values.flip(1), 3.0).any())
    few = float(is_better(values[:, :, :FEWEST], 3.0).double().mean())
    assert 0.2 < few < 0.8  # of a few, one is less sure


def test_what_the_filter_lost_does_not_count():
    values = torch.zeros(3, 2, 8, dtype=torch.float64)
    values[:, 0] = torch.tensor([1.0, 1.2, 0.8, 1.1, 0.9, 1.0, 1.1, 0.9]).double()
    assert is_better(values, 1.0).tolist() == [True] * 3
    values[1, 0, 3:] = torch.nan  # three are too few
    values[2, 1, :] = torch.nan
    assert is_better(values, 1.0).tolist() == [True, False, False]


def values_by_hand(model, belief, time):
    """The return to come of each action `[A]`, and of taking all equally often from there on; exactly."""
    reward, transition = (model.tables[name] for name in ("reward", "transition"))
    later = np.zeros(reward.shape[::2])  # [C, N]
    for _ in range(model.horizon - time - 1):
        later = (reward + np.einsum("cast,ct->cas", transition, later)).mean(1)
    Q = reward + np.einsum("cast,ct->cas", transition, later)  # [C, A, N]
    return np.einsum("cs,cas->a", belief, Q)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_it_finds_the_action_that_is_best_before_an_indifferent_policy_goes_on(seed):
    """At the last step that is the exact plan's, and before, it is where that has the same ranking."""
    model, T = Machine(seed, C=2, A=3, N=3, K=2, horizon=3), 3
    searching = Searching(indifferent(model), 3000)
    plan = exact.plan(model)
    B = 12
    episodes = simulate(model, RandomPolicy(3), B, seed=seed)
    prior = model.prior().double().expand(B, -1)
    series = followed(ObservableOperator(), model, prior, episodes)
    chosen, planned = (actions_along(each, model, episodes, prior) for each in (searching, plan))
    compared = agreed = 0
    for t in range(T):
        for b in range(B):
            joint = (series[t].log_posterior[b].exp()[:, None] * series[t].probabilities[:, b]).numpy()
            Q = values_by_hand(model, joint, t)
            best, second = np.sort(Q)[::-1][:2]
            if best - second < 0.4:
                continue  # too close to call
            compared += 1
            assert chosen[b, t] == Q.argmax()
            if Q.argmax() == planned[b, t] or t == T - 1:
                agreed += 1
                assert chosen[b, t] == planned[b, t]
    assert compared > 6
    assert agreed > 3


def actions_along(policy, model, episodes, prior):
    """What a policy would do along episodes, `[B, T]`."""
    values = {site: torch.zeros_like(value[:, 0]) for site, value in episodes.observations.items()}
    flags = {site: torch.zeros_like(flag[:, 0]) for site, flag in episodes.observed.items()}
    history, chosen = History((Percept(None, values, flags),)), []
    with isolated(0), torch.no_grad():
        memory = policy.start(prior)
        for t in range(episodes.horizon):
            action, memory = policy.act(history, memory)
            chosen.append(action)
            values = {site: value[:, t] for site, value in episodes.observations.items()}
            flags = {site: flag[:, t] for site, flag in episodes.observed.items()}
            history = history.extended(Percept(episodes.actions[:, t], values, flags))
    return torch.stack(chosen, 1)


def told_by_a_look(known):
    """`I(C; light)` in nats of one more look at a lamp, by hand, `[B]`."""
    lit = known.probabilities[..., 1].T  # [B, C]
    shows = torch.stack(
        [SHARP * lit[:, 0] + (1 - SHARP) * (1 - lit[:, 0]), torch.full_like(lit[:, 0], 0.5)], 1
    )
    prior = known.log_posterior.exp()
    joint = torch.stack([prior * shows, prior * (1 - shows)], 2)  # [B, C, 2]
    independent = prior[..., None] * joint.sum(1, keepdim=True)
    return torch.xlogy(joint, joint / independent).sum((1, 2))


@pytest.mark.slow
def test_what_can_be_found_out_is_worth_its_temperature():
    """Without rewards, to look is best at the end, and nothing is if information is worth nothing."""

    class Dark(Lamp):
        def reward(self, state, action, context):
            return torch.zeros(())

    model, B = Dark(), 60
    solution, prior = indifferent(model), model.prior().double().expand(B, -1)
    episodes = simulate(model, RandomPolicy(2), B, seed=0)
    worth = told_by_a_look(followed(ObservableOperator(), model, prior, episodes)[3])
    curious = actions_along(Searching(solution, 2000, temperature=1.0), model, episodes, prior)[:, 3]
    assert int((worth > 0.012).sum()) > 20
    assert bool((curious[worth > 0.012] == 0).all())
    others = actions_along(Searching(solution, 2000), model, episodes, prior)
    assert abs(float(others.double().mean()) - 0.5) < 4.5 * 0.5 / others.numel() ** 0.5


@pytest.mark.slow
def test_an_indifferent_policy_with_search_earns_much_more():
    """By ten standard errors; and the exact plan is above both."""
    model = ContextualTiger(horizon=4)
    solution = indifferent(model)
    with_search = simulate(model, Searching(solution, 200), 200, seed=0).returns
    without = simulate(model, solution.policy, 2000, seed=0).returns
    error = float(with_search.var() / 200 + without.var() / 2000) ** 0.5
    assert float(with_search.mean() - without.mean()) > 10 * error
    assert float(with_search.mean()) < exact.plan(model).value + 4.5 * error


@pytest.mark.slow
def test_where_the_policy_is_right_already_it_stays():
    """A policy that bets always, where that is right beyond doubt."""

    class Lit(Lamp):
        def reward(self, state, action, context):
            return torch.where(action == 1, 4.0, -1.0)

    model = Lit()
    solution = indifferent(model)
    with torch.no_grad():
        solution.policy.logits.bias.copy_(torch.tensor([-30.0, 30.0]))
    assert bool((simulate(model, Searching(solution, 16), 50, seed=0).actions == 1).all())
    with torch.no_grad():  # and where it is wrong, it does not
        solution.policy.logits.bias.copy_(torch.tensor([30.0, -30.0]))
    assert bool((simulate(model, Searching(solution, 64), 50, seed=0).actions == 1).all())


@pytest.mark.slow
def test_many_actions_are_too_many_for_few_simulations():
    """Only those that the policy holds likeliest take part."""
    model = Machine(0, C=2, A=12, N=2, K=2, horizon=2)
    solution = indifferent(model)
    with torch.no_grad():
        solution.policy.logits.bias.copy_(-torch.arange(12.0))
    chosen = simulate(model, Searching(solution, 16, greedy=True), 100, seed=0).actions
    assert int(chosen.max()) < 16 // 2 // FEWEST


@pytest.fixture(scope="module")
def fitted():
    settings = dict(iterations=3, batch_size=40, seed=0, progress=False)
    return cids.fit(LineGrid(), likelihood="exact", **settings)


@pytest.mark.slow
def test_the_seed_alone_decides(fitted):
    one, same, other = (
        simulate(LineGrid(), Searching(fitted, 40, seed=search), 20, seed=play).actions
        for play, search in ((1, 0), (1, 0), (2, 5))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.slow
def test_episodes_at_once_make_no_difference_to_what_is_legal(fitted, monkeypatch):
    """In however many pieces, every episode gets one of the model's actions."""
    monkeypatch.setattr("solvers.cids.searching.BYTES_AT_ONCE", 2**12)
    actions = simulate(LineGrid(), Searching(fitted, 16), 7, seed=1).actions
    assert actions.shape == (7, 10)
    assert set(actions.unique().tolist()) <= {0, 1, 2}


@pytest.mark.slow
def test_what_was_fitted_is_searched_in_its_own_units(fitted):
    searching = Searching(fitted)
    assert searching.has_critic
    assert searching.tau == float(fitted.history["temperature"][-1])
    assert Searching(fitted, temperature=0.25).tau == 0.25


@pytest.mark.slow
def test_depth_matters_where_a_critic_is_asked(fitted):
    """A critic that is told to see nothing but gold behind a few steps does not change what is best."""
    two = [Searching(fitted, 40, depth=3, seed=0) for _ in range(2)]
    first = simulate(LineGrid(), two[0], 20, seed=1).actions
    with torch.no_grad():
        fitted.policy.critic.mean.add_(1000.0)  # the same for all actions
    shifted = simulate(LineGrid(), two[1], 20, seed=1).actions
    with torch.no_grad():
        fitted.policy.critic.mean.sub_(1000.0)
    assert float((first == shifted).double().mean()) > 0.95  # but for rounding


@pytest.mark.slow
def test_agents_and_evaluations_search(fitted):
    agent = Agent(LineGrid(), Searching(fitted, 16), likelihood="exact", seed=0)
    for _ in range(3):
        action = agent.act()
        agent.observe({"side": 1.0} if action == 2 else None)
    assert agent.time == 3
    result = evaluate(LineGrid(), Searching(fitted, 16), 20, seed=0)
    assert result.returns.num_episodes == 20
    searching = fitted.agent(search=16, seed=0)
    assert 0 <= searching.act() < 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("simulations", 15),
        ("simulations", 2.5),
        ("depth", 0),
        ("errors", -1.0),
        ("temperature", -1.0),
        ("seed", -1),
        ("solution", 3),
    ],
)
def test_nonsense_is_refused_by_name(fitted, argument, value):
    with pytest.raises(ValueError, match=argument):
        Searching(**{"solution": fitted, argument: value})


@pytest.mark.slow
def test_policies_that_read_no_belief_are_refused():
    settings = dict(iterations=1, batch_size=8, seed=0, progress=False, likelihood="exact")
    solution = cids.fit(LineGrid(), policy="lstm", **settings)
    with pytest.raises(
        ValueError, match=r"solution: expected one whose policy reads beliefs, got .*LSTMPolicy"
    ):
        Searching(solution)
