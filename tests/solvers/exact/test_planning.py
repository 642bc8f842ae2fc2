"""Exact planning against hand-written tables, all deterministic policies, all histories and the simulator."""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from baselines.simple import MostLikelyContext, PosteriorSampling, ThompsonSampling
from cpomdp_ppl import CPOMDP, RandomPolicy, simulate
from cpomdp_ppl.errors import ObservationError, UnsupportedModelError
from cpomdp_ppl.inference import ObservableOperator
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.policy import FunctionPolicy, History, Percept
from cpomdp_ppl.rng import RandomStream
from solvers.exact import TooManyBeliefsError, TooManyHistoriesError, evaluate, plan
from solvers.exact import beliefs as reachable
from tests.conftest import assert_mean, fixed_actions
from tests.programs import Still, Walk
from tests.solvers import truth
from tests.solvers.machines import Awake, Machine
from tests.solvers.truth import DEAF, LOPSIDED, Wanderer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.solvers.truth import Reals

Tree: TypeAlias = tuple[int, tuple["Tree", ...]]  # an action, and what to do after each outcome of it
Path: TypeAlias = tuple[int, ...]  # the outcome at time 0, then actions and outcomes in turn

TEMPERATURES = (0.0, 0.1, 0.5, 2.0, 10.0, 50.0)
SKEWED = {2: [0.2, 0.8], 3: [0.6, 0.1, 0.3]}
EXCLUDING = {2: [1.0, 0.0], 3: [0.3, 0.0, 0.7]}

TABLED = [
    LineGrid(),
    LineGrid(6),
    LineGrid(7, **LOPSIDED),
    LineGrid(6, accuracy=1.0),
    ContextualTiger(),
    ContextualTiger(1),
    ContextualTiger(6, **DEAF),
    ContextualTiger(4, dull=0.5, sharp=1.0),
]
MACHINES = [
    Machine(0),
    Machine(1, C=3, N=3),
    Machine(2, A=3, horizon=2),
    Awake(3),
    Awake(4, C=3, N=3, horizon=2),
    Awake(5, K=3, horizon=2),
    Awake(38, C=3, horizon=2),  # the last observation may contradict a belief that excludes a context
]


def name(model: CPOMDP) -> str:
    return f"{type(model).__name__}-{model.horizon}"


def priors(C: int) -> list[list[float]]:
    return [[1 / C] * C, SKEWED[C], EXCLUDING[C], [0.0] * (C - 1) + [1.0]]


# Against tables that were written by hand, and a solver that shares nothing with ours.


@pytest.mark.parametrize("model", TABLED, ids=name)
def test_values_and_returns_are_those_of_the_truth(model: CPOMDP) -> None:
    t, T = truth.tables(model), model.horizon
    for prior in priors(model.num_contexts):
        true, ours = truth.solve(t, T, prior), plan(model, prior=prior)
        assert ours.value == pytest.approx(true.value, abs=1e-9)
        assert ours.expected_return == pytest.approx(true.value, abs=1e-9)
        by_context = [truth.evaluate(t, true, certain) for certain in np.eye(len(prior))]
        np.testing.assert_allclose(ours.returns, by_context, atol=1e-9)


@pytest.mark.parametrize("model", [LineGrid(), ContextualTiger()], ids=name)
def test_equal_beliefs_are_merged(model: CPOMDP) -> None:
    expected = [len(b) for b in truth.solve(truth.tables(model), model.horizon).beliefs]
    ours = plan(model)
    assert list(ours.num_beliefs) == expected
    assert [len(b) for b in ours.beliefs] == expected


def test_it_makes_no_difference_how_many_beliefs_are_computed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, prior = ContextualTiger(6), [0.5, 0.0, 0.5]
    whole, policy = plan(model, prior=prior, temperature=5.0), RandomPolicy(3)
    short = ContextualTiger(4)
    assessed = evaluate(short, policy, prior=prior)
    monkeypatch.setattr(reachable, "NUMBERS_AT_ONCE", 200)
    parts = plan(model, prior=prior, temperature=5.0)
    assert parts.num_beliefs == whole.num_beliefs
    assert parts.value == pytest.approx(whole.value, abs=1e-12)
    np.testing.assert_allclose(parts.returns, whole.returns, atol=1e-12)
    np.testing.assert_allclose(parts.endings().probabilities, whole.endings().probabilities, atol=1e-12)
    again = evaluate(short, policy, prior=prior)
    np.testing.assert_allclose(again.returns, assessed.returns, atol=1e-10)
    assert again.information == pytest.approx(assessed.information, abs=1e-12)


# Against all deterministic policies.


def trees(model: Machine, steps: int) -> Iterator[Tree]:
    """Every deterministic policy for so many steps, as a tree over histories."""
    for a in range(model.num_actions):
        K = model.chances(a).shape[-1] if steps > 1 else 0
        for subtrees in product(list(trees(model, steps - 1)) if K else [], repeat=K):
            yield a, subtrees


def histories(model: Machine, act: Callable[[Path], list[float]]) -> tuple[Reals, dict[Path, Reals]]:
    """Returns `[C]` and `P(y | c)` `[C]` by path of a random policy, by recursion over histories."""
    ends: dict[Path, Reals] = {}

    def follow(p: Reals, path: Path, steps: int) -> Reals:
        if not steps:
            ends[path] = p.sum(1)
            return np.zeros(len(p))
        returns = np.zeros(len(p))
        for a, chance in enumerate(act(path)):
            if not chance:
                continue
            returns += chance * (p * model.tables["reward"][:, a]).sum(1)
            moved = chance * np.einsum("cs,cst->ct", p, model.tables["transition"][:, a])
            chances = model.chances(a)
            for o in range(chances.shape[-1]):
                returns += follow(moved * chances[:, :, o], (*path, a, o), steps - 1)
        return returns

    first = model.chances(None)
    start = [model.tables["initial"] * first[:, :, o] for o in range(first.shape[-1])]
    returns = sum(follow(p, (o,), model.horizon) for o, p in enumerate(start))
    return np.asarray(returns), ends


def decided(choice: tuple[Tree, ...], A: int, path: Path) -> list[float]:
    """What trees do, one for each outcome at time 0, as probabilities `[A]`."""
    a, then = choice[path[0]]
    for o in path[2::2]:
        a, then = then[o]
    return np.eye(A)[a].tolist()


def policies(model: Machine) -> Iterator[tuple[Reals, Reals]]:
    """Of every deterministic policy: returns `[C]`, and `P(y | c)` `[Y, C]`."""
    for choice in product(list(trees(model, model.horizon)), repeat=model.chances(None).shape[-1]):
        returns, found = histories(model, partial(decided, choice, model.num_actions))
        yield returns, np.stack(list(found.values()))


def information(prior: Reals, likelihood: Reals) -> float:
    """`H(C) - E[H(C | Y)]` from `P(y | c)` `[Y, C]`, by its definition."""

    def entropy(p: Reals) -> float:
        return -sum(x * np.log(x) for x in p.tolist() if x > 0)

    remaining = 0.0
    for row in likelihood * prior:
        if row.sum() > 0:
            remaining += row.sum() * entropy(row / row.sum())
    return entropy(prior) - remaining


@pytest.mark.parametrize(
    "model",
    [
        Machine(0),
        Machine(1, C=3, N=3),
        Machine(2, A=3, horizon=2),
        Awake(4, C=3, N=3, horizon=2),
        Awake(6, horizon=2),
    ],
    ids=name,
)
def test_no_deterministic_policy_is_better_and_one_is_as_good(model: Machine) -> None:
    prior = np.array(model.context_prior)
    everyone = [(float(prior @ returns), information(prior, y)) for returns, y in policies(model)]
    earned, told = (np.array(column) for column in zip(*everyone, strict=True))
    assert np.ptp(told) > 1e-3, "all policies learn the same: this tests nothing"
    for temperature in TEMPERATURES:
        best = plan(model, temperature=temperature)
        assert best.value == pytest.approx((earned + temperature * told).max(), abs=1e-9)


# What holds whatever the model.


@pytest.mark.parametrize(
    "model", [LineGrid(), ContextualTiger(8), ContextualTiger(6, **DEAF), *MACHINES], ids=name
)
def test_the_value_is_return_and_information_and_the_price_decides_between_them(model: CPOMDP) -> None:
    for prior in priors(model.num_contexts):
        plans = [plan(model, prior=prior, temperature=temperature) for temperature in TEMPERATURES]
        for temperature, best in zip(TEMPERATURES, plans, strict=True):
            parts = best.expected_return + temperature * best.information
            assert best.value == pytest.approx(parts, abs=1e-9)
            expected = torch.tensor(prior, dtype=torch.float64) @ best.returns
            assert best.expected_return == pytest.approx(float(expected))
        assert (np.diff([best.information for best in plans]) >= -1e-9).all()
        assert (np.diff([best.expected_return for best in plans]) <= 1e-9).all()


def test_curiosity_changes_what_is_done() -> None:
    calm, curious = plan(ContextualTiger(8)), plan(ContextualTiger(8), temperature=100.0)
    assert curious.information > calm.information + 0.01
    assert curious.expected_return < calm.expected_return - 0.1


@pytest.mark.parametrize("model", [LineGrid(), ContextualTiger(6), *MACHINES], ids=name)
def test_endings_obey_bayes_rule(model: CPOMDP) -> None:
    for prior in (priors(model.num_contexts)[i] for i in (0, 1)):
        best = plan(model, prior=prior, temperature=1.0)
        p, ends = torch.tensor(prior, dtype=torch.float64), best.endings()
        joint = ends.probabilities * p  # [M, C]
        np.testing.assert_allclose(ends.probabilities.sum(0), 1, atol=1e-12)
        np.testing.assert_allclose(ends.posteriors, joint / joint.sum(1, keepdim=True), atol=1e-9)
        np.testing.assert_allclose((joint.sum(1)[:, None] * ends.posteriors).sum(0), p, atol=1e-9)
        assert len(np.unique(ends.posteriors.numpy().round(10), axis=0)) == len(ends.posteriors)
        assert best.information == pytest.approx(information(p.numpy(), ends.probabilities.numpy()), abs=1e-9)


def test_identical_contexts_teach_nothing() -> None:
    model = ContextualTiger(4, dull=0.85)
    best = plan(model, temperature=10.0)
    assert best.information == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(best.endings().posteriors, [[1 / 3] * 3])
    assert best.value == pytest.approx(plan(model).value)


# Against the simulator, and a filter of another make.


@pytest.mark.parametrize(
    "model",
    [LineGrid(), ContextualTiger(), Machine(7, C=3, N=4, K=3, horizon=5), Awake(8, C=3, N=3, horizon=4)],
    ids=name,
)
def test_simulated_episodes(model: CPOMDP) -> None:
    """Returns by context and information within 4 standard errors."""
    C = model.num_contexts
    prior = torch.tensor(SKEWED[C], dtype=torch.float64)
    best = plan(model, prior=prior, temperature=1.0)
    for c in range(C):
        returns = simulate(model, best, 3000, contexts=c, prior=prior, seed=c).returns
        assert returns is not None
        assert_mean(returns, float(best.returns[c]), f"context {c}", limit=4)
    episodes = simulate(model, best, 6000, prior=prior, seed=C)
    posterior = ObservableOperator().run(model, episodes).posterior(prior)[:, -1]
    assert episodes.contexts is not None
    told = posterior.gather(1, episodes.contexts[:, None])[:, 0].log() - prior.log()[episodes.contexts]
    assert_mean(told, best.information, "information", limit=4)
    known = best.endings().posteriors
    assert float(torch.cdist(posterior, known).min(1).values.max()) < 1e-6, (
        "an ending that is not in the list"
    )


@pytest.mark.parametrize("model", [LineGrid(), ContextualTiger(), Awake(8, C=3, N=3, horizon=4)], ids=name)
def test_remembered_beliefs_are_the_filters_whatever_is_done(model: CPOMDP) -> None:
    wanderer = Wanderer(plan(model))
    episodes = simulate(model, wanderer, 200, seed=0)
    posterior = ObservableOperator().run(model, episodes).posterior()[:, :-1]
    np.testing.assert_allclose(torch.stack(wanderer.beliefs, 1).sum(-1), posterior, atol=1e-6)


# Priors that exclude a context.


def test_what_it_holds_impossible_teaches_it_nothing() -> None:
    """A perfect sensor, and an agent that is certain of the wrong context."""
    model = LineGrid(accuracy=1.0)
    certain = plan(model, prior=[1, 0], temperature=1.0)
    np.testing.assert_allclose(certain.returns, [20, -40], atol=1e-9)
    assert certain.information == 0
    np.testing.assert_allclose(certain.endings().posteriors, [[1, 0]])
    np.testing.assert_allclose(certain.endings().probabilities, [[1, 1]])
    for c, expected in enumerate([20.0, -40.0]):
        returns = simulate(model, certain, 50, contexts=c, seed=0).returns
        assert returns is not None
        np.testing.assert_allclose(returns, expected)


def believed(model: Machine, prior: Reals, path: Path) -> Reals:
    """`P(c, s | h)` `[C, N]` by Bayes' rule, which learns nothing from what it holds impossible."""
    b, a = prior[:, None] * model.tables["initial"], None
    for i, symbol in enumerate(path):
        if i % 2:
            a = symbol
            b = np.einsum("cs,cst->ct", b, model.tables["transition"][:, a])
            continue
        joint = b * model.chances(a)[:, :, symbol]
        b = joint / joint.sum() if joint.sum() > 0 else b
    return b


@pytest.mark.parametrize("model", MACHINES, ids=name)
def test_wrong_beliefs_are_kept_when_they_are_contradicted(model: Machine) -> None:
    """The machines' tables have zeros, so that a wrong belief is contradicted all the time."""
    for prior in (np.array(p) for p in (EXCLUDING[model.num_contexts], *np.eye(model.num_contexts))):
        for c in range(model.num_contexts):
            wanderer = Wanderer(plan(model, prior=prior))
            episodes = simulate(model, wanderer, 30, contexts=c, seed=c)
            first = episodes.initial_observations
            for i, t in product(range(30), range(model.horizon)):
                path = [0 if first is None else int(first["o"][i])]
                for before in range(t):
                    path += [int(episodes.actions[i, before]), int(episodes.observations["o"][i, before])]
                expected = believed(model, prior, tuple(path))
                np.testing.assert_allclose(wanderer.beliefs[t][i], expected, atol=1e-9)


class Doubt(Still):
    """To see nothing excludes context 1 after the first action, and all but excludes it after the second."""

    actions, states, horizon = ("exclude", "doubt", "look"), 1, 3
    reports = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1 - 1e-13, 1.0]], dtype=torch.float64)  # [C, A]

    def observation(self, state, action, context):  # type: ignore[no-untyped-def]
        pyro.sample("z", dist.Bernoulli(self.reports[context, action]))


def test_what_is_nearly_impossible_is_not_merged_with_what_is() -> None:
    """Rounded, the two beliefs are the same; but only one of them can change its mind."""
    best = plan(Doubt())

    def percept(action: int | None, z: float) -> Percept:
        seen = torch.tensor([action is not None])
        return Percept(
            None if action is None else torch.tensor([action]), {"z": torch.tensor([z])}, {"z": seen}
        )

    def follow(*percepts: Percept) -> torch.Tensor:
        history, memory = History((percept(None, 0.0),)), best.start(torch.ones(1, 2) / 2)
        _, memory = best.act(history, memory)
        for latest in percepts:
            history = history.extended(latest)
            _, memory = best.act(history, memory)
        return best.beliefs[history.time][int(memory)].sum(-1)

    np.testing.assert_allclose(follow(percept(1, 0.0), percept(2, 1.0)), [0, 1])
    with pytest.raises(ObservationError, match="episode 0 saw at time 2 cannot be seen"):
        follow(percept(0, 0.0), percept(2, 1.0))


# Any policy.


def moody(path: Path) -> list[float]:
    """Likes action 0 the more, the more has been seen, and what has been seen last."""
    weight = 1.0 + sum(path) + 2 * path[-1]
    return [weight / (weight + 2), 2 / (weight + 2)]


class Moody:
    """The same as a policy; its memory is not a tensor, but a list of them."""

    def start(self, prior: torch.Tensor) -> list[torch.Tensor]:
        return [torch.zeros(len(prior), dtype=torch.float64)]

    def act(
        self, history: History, memory: list[torch.Tensor]
    ) -> tuple[dist.Categorical, list[torch.Tensor]]:
        o = history.latest.observations["o"].double()
        a = 0 if history.latest.action is None else history.latest.action
        memory = [*memory, memory[-1] + a + o]
        weight = 1 + memory[-1] + 2 * o
        return dist.Categorical(torch.stack([weight / (weight + 2), 2 / (weight + 2)], -1)), memory


@pytest.mark.parametrize("model", [m for m in MACHINES if m.num_actions == 2], ids=name)
def test_any_policy_is_evaluated_exactly(model: Machine) -> None:
    returns, likelihood = histories(model, moody)
    for prior in (np.array(p) for p in (model.context_prior, EXCLUDING[model.num_contexts])):
        ours = evaluate(model, Moody(), prior=prior)
        np.testing.assert_allclose(ours.returns, returns, atol=1e-12)
        told = information(prior, np.stack(list(likelihood.values())))
        assert ours.information == pytest.approx(told, abs=1e-9)
        assert ours.expected_return == pytest.approx(float(prior @ returns))
        left = ours.endings.probabilities.clone()
        for path, p in likelihood.items():
            if p.any():
                posterior = torch.as_tensor(believed(model, prior, path).sum(1))
                m = int((ours.endings.posteriors - posterior).abs().amax(1).argmin())
                np.testing.assert_allclose(ours.endings.posteriors[m], posterior, atol=1e-9)
                left[m] -= torch.as_tensor(p)
        np.testing.assert_allclose(left, 0, atol=1e-12)


@pytest.mark.parametrize("model", [LineGrid(6), LineGrid(5, **LOPSIDED), ContextualTiger(4)], ids=name)
def test_random_policies(model: CPOMDP) -> None:
    found = evaluate(model, RandomPolicy(model.num_actions))
    assert found.expected_return == pytest.approx(truth.random_value(truth.tables(model), model.horizon))
    episodes = simulate(model, RandomPolicy(model.num_actions), 6000, seed=0)
    posterior = ObservableOperator().run(model, episodes).posterior()[:, -1]
    assert episodes.contexts is not None
    told = posterior.gather(1, episodes.contexts[:, None])[:, 0].log() - np.log(1 / model.num_contexts)
    assert_mean(told, found.information, "information", limit=4)


@pytest.mark.parametrize(
    "model", [LineGrid(), ContextualTiger(6), ContextualTiger(4, **DEAF), *MACHINES], ids=name
)
def test_plans_are_worth_what_they_say(model: CPOMDP) -> None:
    for prior in priors(model.num_contexts):
        best = plan(model, prior=prior, temperature=2.0)
        found = evaluate(model, best, prior=prior)
        np.testing.assert_allclose(found.returns, best.returns, atol=1e-9)
        assert found.information == pytest.approx(best.information, abs=1e-9)
        assert found.expected_return == pytest.approx(best.expected_return, abs=1e-9)
        np.testing.assert_allclose(found.endings.posteriors, best.endings().posteriors, atol=1e-9)
        np.testing.assert_allclose(found.endings.probabilities, best.endings().probabilities, atol=1e-9)


def test_a_policy_is_started_with_the_prior() -> None:
    """One that is amortised over priors, in short: it opens the door if it is sure of the first context."""

    class Sure:
        def start(self, prior: torch.Tensor) -> torch.Tensor:
            return (prior[:, 0] > 0.5).long()

        def act(self, history: History, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return memory, memory

    model = ContextualTiger(3)
    assert evaluate(model, Sure(), prior=[0.6, 0.4, 0.0]).expected_return == pytest.approx(3 * -45)
    assert evaluate(model, Sure(), prior=[0.4, 0.6, 0.0]).expected_return == pytest.approx(3 * -1)


def test_functions_are_policies() -> None:
    found = evaluate(ContextualTiger(4), fixed_actions(0, 0, 0, 1))
    assert found.expected_return == pytest.approx(-3 - 45)
    assert found.num_histories == (1, 4, 16, 64)


# Refusals.


def test_models_that_are_not_finite_are_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match="LightDark does not say that it has finitely many states"
    ):
        plan(LightDark())
    with pytest.raises(UnsupportedModelError, match="Walk"):
        evaluate(Walk(), RandomPolicy(2))


def test_too_many_beliefs_are_refused_with_their_number() -> None:
    said = r"1344 beliefs .* time 7.* max_beliefs = 1000.*horizon.* cpomdp_ppl\.bounds\.informed_return"
    with pytest.raises(TooManyBeliefsError, match=said):
        plan(ContextualTiger(), max_beliefs=1000)
    assert plan(ContextualTiger(8), max_beliefs=1344).num_beliefs[-1] == 1344


def test_too_many_beliefs_are_noticed_before_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "NUMBERS_AT_ONCE", 2000)
    with pytest.raises(TooManyBeliefsError, match=r"at least \d+ beliefs .* time 8, and max_beliefs = 1400"):
        plan(ContextualTiger(), max_beliefs=1400)


def test_too_many_histories_are_refused_with_their_number() -> None:
    with pytest.raises(TooManyHistoriesError, match=r"1296 histories at time 4, and max_histories = 1000"):
        evaluate(ContextualTiger(6), RandomPolicy(3), max_histories=1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(prior=[0.5, 0.6]), "prior: expected"),
        (dict(prior=[1.0, 0.0, 0.0]), "prior: expected"),
        (dict(prior=[[0.5, 0.5]]), "prior: expected"),
        (dict(temperature=-1.0), "temperature: expected"),
        (dict(temperature=float("nan")), "temperature: expected"),
        (dict(max_beliefs=0), "max_beliefs: expected"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(LineGrid(4), **arguments)


@pytest.mark.parametrize(
    "decision", [torch.tensor([3]), torch.tensor([-1]), torch.tensor([0.5]), torch.tensor([0, 1]), "left"]
)
def test_policies_that_make_no_sense(decision: Any) -> None:
    with pytest.raises(ValueError, match="policy: expected"):
        evaluate(LineGrid(2), FunctionPolicy(lambda history: decision))
    with pytest.raises(ValueError, match="policy: expected proper probabilities"):
        evaluate(LineGrid(2), FunctionPolicy(lambda history: dist.Categorical(logits=torch.zeros(1, 2))))


def test_policies_that_draw_random_numbers_are_refused() -> None:
    model = LineGrid(4)
    told = [plan(model, prior=[1.0, 0.0]), plan(model, prior=[0.0, 1.0])]
    with pytest.raises(ValueError, match=r"Categorical .*, got a PosteriorSampling, .* in `start`"):
        evaluate(model, PosteriorSampling(model, told))
    with pytest.raises(ValueError, match=r"got a ThompsonSampling, which draws .* in `act`, at time 0"):
        evaluate(model, ThompsonSampling(model, told, "exact"))


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: np.random.normal(), random.random])
def test_a_draw_from_any_generator_is_noticed(draw: Callable[[], Any]) -> None:
    def act(history: History) -> torch.Tensor:
        if history.time == 1:
            draw()
        return torch.zeros(history.num_episodes, dtype=torch.long)

    with pytest.raises(ValueError, match=r"draws random numbers in `act`, at time 1"):
        evaluate(LineGrid(3), act)
    assert evaluate(LineGrid(1), act).num_histories == (1,)


def test_random_numbers_of_its_own_are_noticed_by_what_they_do() -> None:
    model = ContextualTiger(5)
    told = [plan(model, prior=point) for point in torch.eye(3)]
    with pytest.raises(ValueError, match=r"MostLikelyContext, which decides differently in the same history"):
        evaluate(model, MostLikelyContext(model, told, "smc"))
    exactly = evaluate(model, MostLikelyContext(model, told, "exact"))  # whose filter draws nothing
    episodes = simulate(model, MostLikelyContext(model, told, "exact"), 6000, contexts="balanced", seed=0)
    assert episodes.returns is not None
    assert_mean(episodes.returns, exactly.expected_return, "return", limit=4)

    stream = RandomStream(0)

    def hidden(history: History) -> dist.Categorical:
        with stream:
            return dist.Categorical(logits=torch.rand(history.num_episodes, 3))

    with pytest.raises(ValueError, match=r"decides differently in the same history, at time 0"):
        evaluate(model, hidden)
