"""The baselines by name, for the command line: each made from the model alone, as its author recommends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines import rdpg
from baselines.pft import PFT
from baselines.qmdp import QMDP
from baselines.simple import Always, MostLikelyContext, ThompsonSampling
from cpomdp_ppl.actions import probes
from cpomdp_ppl.cli.policies import Budget, Recipe
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Policy

TRIALS = 500
"""How many episodes are played for each action and context, to find the best action to repeat."""


def best_repeated(model: CPOMDP, seed: int) -> list[Always]:
    """For each context, the action that earns most there if nothing else is ever done.

    Of continuous actions, one of the `probes`.
    """
    always = [Always(model, action) for action in probes(model)]
    best = []
    for c in range(model.num_contexts):
        # The same world for every action.
        played = [simulate(model, each, TRIALS, contexts=c, seed=seed) for each in always]
        returns = [float(episodes.returns.mean()) for episodes in played if episodes.returns is not None]
        best.append(always[max(range(len(returns)), key=returns.__getitem__)])
    return best


def _pouct(model: CPOMDP, budget: Budget) -> Policy:
    from baselines.pomcp import POUCT

    return POUCT(model, budget.simulations, rollout="commitment", seed=budget.seed)


def _pomcp(model: CPOMDP, budget: Budget) -> Policy:
    from baselines.pomcp import POMCP

    return POMCP(model, budget.simulations, seed=budget.seed)


def _recurrent_ppo(model: CPOMDP, budget: Budget) -> Policy:
    from baselines import recurrent_ppo

    learned = recurrent_ppo.fit(model, budget.training_episodes, seed=budget.seed, progress=budget.progress)
    return learned.policy


def _rdpg(model: CPOMDP, budget: Budget) -> Policy:
    return rdpg.fit(model, budget.training_episodes, seed=budget.seed, progress=budget.progress).policy


POLICIES = {
    "likeliest": Recipe(lambda model, budget: MostLikelyContext(model, best_repeated(model, budget.seed))),
    "thompson": Recipe(lambda model, budget: ThompsonSampling(model, best_repeated(model, budget.seed))),
    "qmdp": Recipe(lambda model, budget: QMDP(model, seed=budget.seed)),
    "pft": Recipe(lambda model, budget: PFT(model, budget.simulations, seed=budget.seed), plans=True),
    "ipft": Recipe(
        lambda model, budget: PFT(model, budget.simulations, temperature=1.0, seed=budget.seed), plans=True
    ),
    "pouct": Recipe(_pouct, plans=True, extra="pomcp"),
    "pomcp": Recipe(_pomcp, plans=True, extra="pomcp"),
    "rdpg": Recipe(_rdpg, learns=True),
    "recurrent_ppo": Recipe(_recurrent_ppo, learns=True, extra="rl"),
}
"""Policies for the command line."""
