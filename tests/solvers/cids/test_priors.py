from __future__ import annotations

import json

import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.experiments.files import CheckpointError
from cpomdp_ppl.inference import ExtendedKalmanFilter
from cpomdp_ppl.models import ContextualTiger, LightDark
from cpomdp_ppl.prior import stratified
from solvers import cids
from solvers.cids.batch import Batch
from solvers.cids.critic import Trunk
from solvers.cids.priors import DirichletPriors, OnePrior, as_sampler, draw_priors, log_odds


def test_dirichlet_priors_have_the_distributions_moments():
    """Mean 1/C and variance (C - 1) / (C² (C α + 1)); limits are 4.5 standard errors."""
    torch.manual_seed(0)
    C, alpha, B = 3, 0.5, 40_000
    p = DirichletPriors((1 / 3, 1 / 3, 1 / 3), alpha, share=0.0)(B)
    torch.testing.assert_close(p.sum(-1), torch.ones(B, dtype=torch.float64))
    variance = (C - 1) / (C**2 * (C * alpha + 1))
    assert float((p.mean(0) - 1 / C).abs().max()) < 4.5 * (variance / B) ** 0.5
    squares = (p - 1 / C) ** 2
    assert bool(((squares.mean(0) - variance).abs() < 4.5 * squares.std(0) / B**0.5).all())


def test_the_first_are_the_models_own_and_what_that_excludes_stays_excluded():
    own = (0.2, 0.0, 0.8)
    p = DirichletPriors(own, 0.01, share=0.25)(400)
    torch.testing.assert_close(p[:100], torch.tensor(own, dtype=torch.float64).expand(100, -1))
    assert bool((p[:, 1] == 0).all())
    assert bool(p.isfinite().all())
    assert not bool((p[100:] == p[0]).all(-1).any())


def test_contexts_follow_the_prior_of_their_own_episode():
    """However the rows are ordered; limits are 4.5 standard errors of independent draws."""
    torch.manual_seed(1)
    n = 20_000
    rows = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    prior = rows.repeat_interleave(n, 0)
    c = stratified(prior, 2 * n, offset=0.3)
    for i, row in enumerate(rows):
        share = torch.bincount(c[i * n : (i + 1) * n], minlength=3) / n
        assert bool(((share - row).abs() <= 4.5 * (row * (1 - row) / n).sqrt()).all())


def test_equal_rows_are_as_one():
    one = torch.tensor([0.5, 0.25, 0.25])
    assert torch.equal(stratified(one.expand(8, -1), 8), stratified(one, 8))


def test_samplers_by_name_by_value_and_as_they_are():
    model = LightDark()
    assert as_sampler(model, None) == OnePrior((0.5, 0.5))
    assert as_sampler(model, [0.25, 0.75]) == OnePrior((0.25, 0.75))
    assert as_sampler(model, "dirichlet") == DirichletPriors((0.5, 0.5))
    own = DirichletPriors((0.5, 0.5), 2.0)
    assert as_sampler(model, own) is own


def test_a_sampler_that_draws_nonsense_is_refused():
    with pytest.raises(ValueError, match="sampler of shape"):
        draw_priors(lambda n: torch.tensor([0.5, 0.5]), 4, 2)


@pytest.mark.slow
def test_an_amortised_fit_is_kept_and_read_again(tmp_path):
    model = ContextualTiger()
    settings = {"likelihood": "exact", "iterations": 2, "batch_size": 16, "progress": False}
    solution = cids.fit(model, prior="dirichlet", seed=0, checkpoint=tmp_path / "checkpoint", **settings)
    assert cids.load(tmp_path / "checkpoint", model).policy.amortised
    assert solution.policy.amortised
    assert solution.settings["prior"]["concentration"] == 0.5
    torch.testing.assert_close(solution.prior, torch.full((3,), 1 / 3).double())
    solution.save(tmp_path / "saved")
    again = cids.load(tmp_path / "saved", model)
    assert again.policy.amortised
    one, two = (each.evaluate(50, prior=[0.0, 0.1, 0.9]).returns.mean for each in (solution, again))
    assert one == two


@pytest.mark.slow
def test_another_sampler_does_not_find_the_checkpoint_of_this_one(tmp_path):
    model = LightDark(horizon=3)

    def sampler(low):
        return lambda n: torch.tensor([[low, 1 - low]]).expand(n, -1)

    settings = {"likelihood": "ekf", "iterations": 2, "batch_size": 8, "seed": 0, "progress": False}
    cids.fit(model, prior=sampler(0.5), checkpoint=tmp_path, **settings)
    with pytest.raises(CheckpointError, match="prior"):
        cids.fit(model, prior=sampler(0.9), checkpoint=tmp_path, **settings)


def test_a_solution_from_before_policies_read_priors_is_still_read(tmp_path):
    model = LightDark(horizon=3)
    settings = {"likelihood": "ekf", "iterations": 1, "batch_size": 8, "seed": 0, "progress": False}
    cids.fit(model, policy="lstm", **settings).save(tmp_path)
    path = tmp_path / "solution.json"
    content = json.loads(path.read_text())
    del content["amortised"]
    path.write_text(json.dumps(content))
    assert not cids.load(tmp_path, model).policy.amortised


def test_many_contexts_are_told_apart():
    """A flat prior over half of very many contexts is not taken for one over all of them."""
    prior = torch.zeros(1, 2000)
    prior[0, :1000] = 1 / 1000
    numbers = log_odds(prior, torch.float32)
    assert float(numbers[0, 0] - numbers[0, -1]) > 1
    torch.testing.assert_close(log_odds(torch.full((1, 2000), 1 / 2000), torch.float32), torch.zeros(1, 2000))


def test_the_critic_of_a_policy_without_features_reads_the_prior():
    model = LightDark(horizon=3)
    episodes = simulate(model, RandomPolicy(3), 2, seed=0)
    filtering = ExtendedKalmanFilter().run(model, episodes)
    trunk = Trunk(model, 8, amortised=True)
    one, other = (Batch.of(episodes, filtering, torch.tensor(p).double()) for p in ([0.5, 0.5], [0.9, 0.1]))
    assert not torch.allclose(trunk(one), trunk(other))


@pytest.mark.slow
def test_an_amortised_policy_learns_to_go_by_the_prior():
    """Told where the light is, it walks there: a short fit is enough for that."""
    model = LightDark(horizon=6)
    solution = cids.fit(model, prior="dirichlet", likelihood="ekf", iterations=60, seed=0, progress=False)
    told = model.context_known_return()
    for c, sure in enumerate(torch.eye(2)):
        result = solution.evaluate(400, prior=sure, likelihood="ekf")
        assert result.returns.mean > float(told[c]) - 0.5
