"""What an action would tell about the context, tried out one step ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.observed import Observed
from cpomdp_ppl.rng import inverse_cdf
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from cpomdp_ppl.inference.backend import Backend, Recursion


def expected_information(
    backend: Backend, recursion: Recursion, belief: Any, log_posterior: Tensor, num_outcomes: int
) -> Tensor:
    """`I(C; o_{t+1} | h_t, a)` for every action, in nats, `[B, A]`: by how much entropy is expected to fall.

    Outcomes are drawn from the belief, the filter takes each of them in, and the falls of the posterior's
    entropy are averaged. Actions after which nothing is seen get zero. Noise of the filter passes for
    information, as it does everywhere: with few particles the estimate is too high.

    To be called inside `inference_scope`, with a belief of first axes `[C, B]` and a log-posterior `[B, C]`.
    """
    model, B, K = recursion.model, len(log_posterior), num_outcomes
    A, device = model.num_actions, log_posterior.device
    programs = Generative(model)

    # Contexts in proportion to the posterior, spread evenly over the K outcomes of each action.
    offset = torch.rand(B, A, 1, dtype=torch.float64, device=device)
    levels = (torch.arange(K, device=device) + offset) / K  # [B, A, K]
    context = inverse_cdf(log_posterior.exp(), levels.reshape(B, -1)).flatten()  # [B·A·K]
    episode = torch.arange(B, device=device).repeat_interleave(A * K)
    action = torch.arange(A, device=device).repeat_interleave(K).repeat(B)

    number = torch.arange(A * K, device=device).repeat(B)
    drawn = recursion.draw(belief, A * K)  # leaves [C, B, A·K, …]
    state = map_state(lambda leaf: leaf[context, episode, number], drawn)
    percept = programs.step(state, action, context).percept

    after = torch.empty(B * A * K, dtype=torch.float64, device=device)
    for some in torch.arange(B * A * K, device=device).split(backend.episodes_at_once(model, recursion)):
        flags = {site: seen[some] for site, seen in percept.observed.items()}
        values = {site: value[some] for site, value in percept.observations.items()}
        seen = Observed.at(1, action[some], values, flags)
        copies = map_belief(lambda leaf, some=some: leaf[:, episode[some]], belief)
        _, increment = recursion.step(copies, seen)  # [C, some]
        joint = log_posterior[episode[some]] + increment.T
        after[some] = _entropy(joint.log_softmax(-1))
    before = _entropy(log_posterior)  # [B]
    # An outcome that no particle of any context explains says nothing either way.
    left = torch.where(after.isnan(), before[episode], after).reshape(B, A, K).mean(-1)
    return before[:, None] - left


def _entropy(log_p: Tensor) -> Tensor:
    """Entropy of distributions `[…, C]`, in nats, `[…]`; NaN if the weights are."""
    nats: Tensor = torch.special.entr(log_p.exp()).sum(-1)
    return nats
