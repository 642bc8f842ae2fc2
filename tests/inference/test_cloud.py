from __future__ import annotations

import numpy as np
import torch

from cpomdp_ppl.inference import Cloud, ParticleFilter, inference_scope
from cpomdp_ppl.inference.cloud import Families, Weights
from cpomdp_ppl.models import LineGrid
from cpomdp_ppl.rng import inverse_cdf
from cpomdp_ppl.state import map_state
from tests.conftest import assert_mean

LEFT, RIGHT, STAY = range(3)


def cloud_of(state, values: torch.Tensor) -> Cloud:
    """Particles, leaves `[C, B, N, …]`, of weights `[C, B, N]`."""
    rows = values[..., 0]
    return Cloud(
        state,
        Weights(values, 1 / values.square().sum(-1)),
        Families(torch.zeros_like(values).int(), rows),
        rows > 2,
    )


def test_levels_fall_where_the_distribution_function_says():
    torch.manual_seed(0)
    weights, levels = torch.rand(5, 7).double(), torch.rand(5, 20).double()
    found = inverse_cdf(weights, levels)
    for w, u, k in zip(weights.numpy(), levels.numpy(), found.numpy(), strict=True):
        below = np.array([[w[:j].sum() / w.sum() <= x for j in range(7)] for x in u])
        np.testing.assert_array_equal(k, below.sum(1) - 1)
    assert inverse_cdf(torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 0.999999])).tolist() == [1, 1]


def test_spreading_keeps_weights_to_within_one_state():
    """Systematic: of M states, each particle gives `⌊M w⌋` or one more, and M w on average."""
    torch.manual_seed(0)
    N, M, B = 6, 10, 3000
    weights = torch.rand(2, 1, N).softmax(-1)
    state = {"number": torch.arange(N).expand(2, B, N), "twice": 2 * torch.arange(N).expand(2, B, N)}
    states = cloud_of(state, weights.expand(2, B, N)).spread(M)
    assert torch.equal(states["twice"], 2 * states["number"])
    counts = torch.nn.functional.one_hot(states["number"], N).sum(2)  # [2, B, N]
    assert bool(((counts - M * weights).abs() < 1).all())
    for c in range(2):
        for n in range(N):
            assert_mean(counts[c, :, n].double(), float(M * weights[c, 0, n]), "count")


def test_joint_draws_are_of_the_context_that_comes_with_them():
    """Each context and particle as often as its probability says, in the episodes asked for."""
    torch.manual_seed(0)
    (C, B, N), J = (3, 4, 5), 4000
    weights = torch.rand(C, B, N).softmax(-1)
    posterior = torch.rand(B, C).softmax(-1).double()
    name = torch.arange(C * B * N).reshape(C, B, N)  # of every particle
    episodes = torch.tensor([2, 0])
    states, contexts = cloud_of(name, weights).draw_jointly(posterior[episodes].log(), episodes, J)
    states, contexts = states.view(2, J), contexts.view(2, J)
    assert torch.equal(states // (B * N), contexts)
    assert torch.equal(states // N % B, episodes[:, None].expand(2, J))
    for r, b in enumerate(episodes.tolist()):
        for c in range(C):
            for n in range(N):
                expected = float(posterior[b, c] * weights[c, b, n])
                assert_mean((states[r] == name[c, b, n]).double(), expected, "frequency")


def test_moves_are_the_models_own_and_the_belief_before_stays_as_it_was():
    model = LineGrid()
    actions = torch.tensor([LEFT, RIGHT, STAY])
    with inference_scope(model, 0):
        recursion = ParticleFilter(4).recursion(model)
        states = torch.full((2, 3, 4), 3)
        before = recursion.of_states(states)
        kept = map_state(torch.clone, before.state)
        after = recursion.move(before, actions)
    assert torch.equal(after.state, torch.tensor([2, 4, 3])[:, None].expand(2, 3, 4))
    assert torch.equal(before.state, kept)
    assert torch.equal(after.weights.values, before.weights.values)
