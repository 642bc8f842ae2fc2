from __future__ import annotations

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.context import entropy, information_gain, mutual_information
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference import Filtering, ObservableOperator, ParticleFilter
from cpomdp_ppl.models import ContextualTiger, LineGrid
from cpomdp_ppl.prior import one_prior
from tests.conftest import fixed_actions
from tests.programs import Reef, Walk

NAN, INF = float("nan"), float("inf")


class Twins(Walk):
    """Two contexts that do not differ."""

    horizon = 6

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, 1.0))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.3))


def test_entropy():
    p = torch.tensor([[0.25, 0.25, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert entropy(p, "bits").tolist() == [1.5, 0.0]
    assert entropy(p).tolist() == pytest.approx([1.5 * math.log(2), 0.0])
    with pytest.raises(ValueError, match="unit: expected"):
        entropy(p, "bytes")
    assert entropy([0.5, 0.5], "bits") == 1.0
    q = torch.tensor([0.3, 0.7], requires_grad=True)
    entropy(q).backward()
    assert q.grad.tolist() == pytest.approx([-math.log(0.3) - 1, -math.log(0.7) - 1])


@pytest.mark.parametrize("p", [[-0.5, 1.5], [0.5, NAN], [0.5, 0.4], [[0.5, 0.5], [1.0, 1.0]], 1.0, [], "a"])
def test_entropy_is_of_distributions(p):
    with pytest.raises(ValueError, match="probabilities: expected"):
        entropy(p if isinstance(p, str) else torch.tensor(p))


def test_information_of_ends_against_a_loop():
    """That episodes go on, and end, is evidence; past the end there is none, and nothing is lost."""
    model = Reef()
    episodes = simulate(model, RandomPolicy(2), 40, seed=0)
    filtering = ObservableOperator().run(model, episodes)
    gain = information_gain(filtering, episodes.contexts)
    drop = information_gain(filtering)
    for b, length in enumerate(episodes.lengths.tolist()):
        surf, ended = (episodes.observations[site][b].tolist() for site in ("surf", "ended"))
        actions = episodes.actions[b].tolist()
        beliefs = []  # P(context, and what was seen until every time), by a loop over positions
        for c in (0, 1):
            belief = [0.5 * (s == 3) for s in range(7)]
            beliefs.append([sum(belief)])
            for t in range(length):
                move = 2 * actions[t] - 1
                after = [0.0] * 7
                for s, p in enumerate(belief):
                    after[min(max(s + move, 0), 6)] += 0.8 * p
                    after[s] += 0.2 * p
                for s in range(7):
                    louder = 0.7 if (s < 3 if c == 0 else s > 3) else 0.4
                    after[s] *= louder if surf[t] else 1 - louder
                    wrecked = s == (1 if c == 0 else 5)
                    after[s] *= wrecked == bool(ended[t])
                belief = after
                beliefs[-1].append(sum(belief))
        p = torch.tensor(beliefs, dtype=torch.float64)
        p = p / p.sum(0)  # [C, length + 1]
        assert gain[b, :length].tolist() == pytest.approx(
            p[episodes.contexts[b]].log().diff().tolist(), abs=1e-9
        )
        assert drop[b, :length].tolist() == pytest.approx((-entropy(p.T).diff()).tolist(), abs=1e-9)
        assert gain[b, length:].tolist() == drop[b, length:].tolist() == [0.0] * (4 - length)
    bracket = mutual_information(filtering, episodes.contexts)
    assert bracket.upper == pytest.approx(float(drop.sum(1).mean()))
    assert bracket.lower == pytest.approx(float(gain.sum(1).mean()))


def test_information_adds_up():
    model = LineGrid()
    episodes = simulate(model, RandomPolicy(3), 50, contexts="balanced", seed=0)
    filtering = ObservableOperator().run(model, episodes)
    posterior = filtering.posterior()
    gain = information_gain(filtering, episodes.contexts)
    assert gain.shape == (50, 10)
    true = posterior[torch.arange(50), -1, episodes.contexts]
    torch.testing.assert_close(gain.sum(1), true.log() - math.log(0.5))
    torch.testing.assert_close(information_gain(filtering).sum(1), math.log(2) - entropy(posterior[:, -1]))
    assert bool((gain[~episodes.observed["side"]] == 0).all())


def test_the_bracket_of_an_exact_filter_is_the_closed_form():
    """n reports of accuracy p: I = log 2 − E H(posterior), by the binomial distribution."""
    n, p = 4, 0.85
    model = LineGrid(horizon=n)
    episodes = simulate(model, fixed_actions(*[2] * n), 4000, contexts="balanced", seed=0)
    bracket = mutual_information(ObservableOperator().run(model, episodes), episodes.contexts)
    exact = math.log(2)
    for k in range(n + 1):
        right = p**k * (1 - p) ** (n - k)
        wrong = (1 - p) ** k * p ** (n - k)
        q = right / (right + wrong)
        probability = math.comb(n, k) * 0.5 * (right + wrong)
        exact -= probability * float(entropy(torch.tensor([q, 1 - q], dtype=torch.float64)))
    assert abs(bracket.upper - exact) < 4 * bracket.upper_error
    assert abs(bracket.lower - exact) < 4 * bracket.lower_error
    assert abs(bracket.gap) < 4 * bracket.gap_error


def test_the_bracket_covers_zero_for_identical_contexts_and_tightens():
    episodes = simulate(Twins(), RandomPolicy(2), 400, contexts="balanced", seed=0)
    gaps = []
    for num_particles in (16, 128, 1024):
        smc = ParticleFilter(num_particles, common_random_numbers=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bracket = mutual_information(smc.run(Twins(), episodes, seed=0), episodes.contexts)
        assert bracket.lower - 4 * bracket.lower_error <= 0 <= bracket.upper + 4 * bracket.upper_error
        gaps.append(bracket.gap)
    assert gaps[0] > 3 * gaps[1] > 9 * gaps[2] > 0


def test_a_wide_bracket_warns():
    episodes = simulate(Twins(), RandomPolicy(2), 200, contexts="balanced", seed=0)
    noisy = ParticleFilter(8, common_random_numbers=False).run(Twins(), episodes, seed=0)
    with pytest.warns(UserWarning, match="only known to lie between .* more particles"):
        mutual_information(noisy, episodes.contexts)


def filtering_of(*increments, initial=None):
    """The given increments `[B, T, C]`."""
    x = torch.tensor(increments, dtype=torch.float64)
    B, _, C = x.shape
    first = torch.zeros(B, C) if initial is None else torch.tensor(initial)
    return Filtering(x, first.double(), torch.zeros_like(x), torch.full((C,), 1 / C))


@pytest.mark.parametrize(
    ("use", "episodes", "contexts", "words"),
    [
        (mutual_information, 3, [0, 1], r"contexts: expected shape \[3\]"),
        (information_gain, 3, [0, 1, 2], "contexts: expected indices 0 to 1"),
        (mutual_information, 1, [0], "filtering: expected at least two"),
    ],
)
def test_bad_arguments_are_named(use, episodes, contexts, words):
    with pytest.raises(ValueError, match=words):
        use(filtering_of(*[[[0.0, 0.0]]] * episodes), contexts)


PRIORS = [
    ([0.5, 0.6], "non-negative probabilities that sum to 1, got"),
    ([-0.5, 1.5], "non-negative probabilities"),
    ([NAN, 1.0], "non-negative probabilities"),
    ([INF, 0.0], "non-negative probabilities"),
    ([[0.5, 0.5], [1.0, 1.0]], "non-negative probabilities"),
    ([1.0], r"shape \[2\] or \[2, 2\], got \[1\]"),
    ([0.2, 0.3, 0.5], r"shape \[2\] or \[2, 2\]"),
    ([[0.5, 0.5]], r"shape \[2\] or \[2, 2\]"),
    (1.0, r"shape \[2\] or \[2, 2\]"),
    (["a", "b"], "an array of real numbers"),
    ([[0.5, 0.5], [1.0]], "an array, rows all of the same length"),
    (torch.tensor([0.5, 0.5j]), "real numbers"),
]


@pytest.mark.parametrize(("prior", "message"), PRIORS, ids=range(len(PRIORS)))
def test_bad_priors_are_named(prior, message):
    filtering = filtering_of([[0.0, -1.0]], [[-1.0, 0.0]])
    uses = [
        filtering.posterior,
        filtering.log_posterior,
        lambda prior: information_gain(filtering, prior=prior),
        lambda prior: information_gain(filtering, [0, 1], prior),
        lambda prior: mutual_information(filtering, [0, 1], prior),
        lambda prior: ParticleFilter(8).online(Twins(), 2, prior=prior),
        lambda prior: simulate(Twins(), RandomPolicy(2), 2, prior=prior),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=f"prior: expected {message}"):
            use(prior)


@pytest.mark.parametrize("prior", [p for p, _ in PRIORS[:4] + PRIORS[5:]])
def test_a_single_prior_has_no_other_shape(prior):
    with pytest.raises(ValueError, match="prior: expected") as caught:
        one_prior(prior, Twins())
    assert " or [" not in str(caught.value)


def test_a_single_prior_sums_to_one():
    own = one_prior(None, ContextualTiger())
    assert own.dtype == torch.float64
    assert own.tolist() == [1 / 3] * 3
    given = torch.tensor([0.1, 0.2, 0.7])  # in single precision they sum to 1 + 1e-8
    p = one_prior(given, ContextualTiger())
    assert abs(float(p.sum()) - 1) < 1e-15
    torch.testing.assert_close(p, given.double(), rtol=1e-7, atol=0)
    p[0] = 0.5
    assert given[0] == torch.tensor(0.1)  # it is a copy


def test_a_prior_for_each_episode():
    filtering = filtering_of([[math.log(0.5), 0.0]], [[0.0, 0.0]])
    prior = torch.tensor([[0.5, 0.5], [0.2, 0.8]], requires_grad=True)
    posterior = filtering.posterior(prior)
    assert posterior[:, 0].tolist() == [pytest.approx(row) for row in prior.tolist()]
    assert posterior[:, 1].tolist() == [pytest.approx([1 / 3, 2 / 3]), pytest.approx([0.2, 0.8])]
    assert posterior.requires_grad


def test_a_prior_that_excludes_what_is_possible_is_an_error():
    filtering = filtering_of([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [-INF, 0.0]])
    assert filtering.posterior()[1].tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 1.0]]
    for use in (filtering.posterior, filtering.log_posterior):
        with pytest.raises(DegenerateWeightsError, match="time 2 of episode 1: the prior excludes"):
            use([1.0, 0.0])
    assert filtering.posterior([[1.0, 0.0], [0.0, 1.0]])[:, -1].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    with pytest.raises(DegenerateWeightsError, match="time 0 of episode 0"):
        filtering_of([[0.0, 0.0]], initial=[[-INF, 0.0]]).posterior([1.0, 0.0])


def test_an_impossible_true_context_is_lost_once():
    filtering = filtering_of([[0.0, 0.0], [-INF, 0.0], [-INF, -1.0], [0.0, -1.0]])
    assert information_gain(filtering, [0]).tolist() == [[0.0, -INF, 0.0, 0.0]]
    assert information_gain(filtering, [1]).tolist() == [[0.0, pytest.approx(math.log(2)), 0.0, 0.0]]
    assert information_gain(filtering, [0], prior=[0.0, 1.0]).tolist() == [[0.0] * 4]


def test_an_impossible_true_context_makes_the_bracket_infinite():
    filtering = filtering_of([[0.0, 0.0]], [[0.0, -INF]], [[0.0, 0.0]])
    with pytest.warns(UserWarning, match=r"between -inf and .*the true context of episode 1 came out imp"):
        bracket = mutual_information(filtering, [0, 1, 1])
    assert bracket.upper == pytest.approx(math.log(2) / 3)
    assert (bracket.lower, bracket.gap) == (-INF, INF)
    assert (bracket.lower_error, bracket.gap_error) == (INF, INF)
    assert bracket.upper_error == pytest.approx(math.log(2) / 3)
    with pytest.raises(ValueError, match="contexts: expected contexts that the prior holds possible"):
        mutual_information(filtering, [0, 1, 0], prior=[1.0, 0.0])
