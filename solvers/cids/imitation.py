"""Imitation: begin with what the user knows, by learning to do what a rule would do (DAgger)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Categorical

from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.policy import History, action_probabilities, as_policy
from cpomdp_ppl.prior import stratified
from cpomdp_ppl.rng import isolated, seed_for
from cpomdp_ppl.rollout import simulate
from solvers.cids.belief_policy import BeliefPolicy, Inputs
from solvers.cids.box_distributions import BoxDistribution
from solvers.cids.priors import draw_priors

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpomdp_ppl.inference.knowledge import Knowledge
    from cpomdp_ppl.policy import Decision, Policy
    from cpomdp_ppl.progress import Bar
    from solvers.cids.priors import PriorSampler

ROUNDS = 60
"""How many batches are played, at most."""
KEPT = 8
"""How many of the latest batches are learned from."""
STEPS = 8
"""Gradient steps after each batch."""
NEARLY = 0.05
"""Continuous actions that differ by no more than this share of the box are nearly the same."""
INSIDE = 0.01
"""Actions are learned as if they were no nearer to the faces of the box, as a share of its width: to get
there, a squashed Gaussian would have to go to infinity."""
AROUND = 0.02
"""Standard deviation of what is learned around them, in the same units: who does exactly what a rule does
tries nothing else, and learns nothing any more."""
AGREED = 0.98
"""An imitation that does what the rule does this often is as good as the rule."""


@dataclass
class Pupil:
    """A policy that watches a rule: the rule decides in some episodes, the pupil in the others.

    Attributes:
        rule: What is imitated.
        policy: Who imitates.
        chance: Probability that the rule decides in an episode.
        seen: What the pupil read at each time, and what the rule would have done: probabilities `[B, A]`,
            or continuous actions `[B, D]`; of the episodes that were not over.
    """

    rule: Policy
    policy: BeliefPolicy
    chance: float
    seen: list[tuple[Inputs, Tensor]] = field(default_factory=list)

    def start(self, prior: Tensor) -> tuple[Any, Knowledge, Tensor]:
        """Both of their memories, and who decides."""
        led = torch.rand(len(prior), device=prior.device) < self.chance
        return self.rule.start(prior), self.policy.start(prior), led

    def act(self, history: History, memory: Any) -> tuple[Decision, Any]:
        """What the rule says, or the pupil; note both."""
        by_rule, known, led = memory
        model = self.policy.model
        decision, by_rule = self.rule.act(history, by_rule)
        if model.box is None:
            wanted = action_probabilities(decision, model.num_actions)  # [B, A]
        else:
            wanted = decision if isinstance(decision, Tensor) else decision.sample()  # [B, D]
        own, known = self.policy.act(history, known)
        with inference_scope(model, 0):
            inputs, alive = self.policy.encoding(known), history.alive
        self.seen.append((inputs, wanted) if alive is None else (inputs.rows(alive), wanted[alive]))
        if isinstance(own, BoxDistribution):
            return torch.where(led[:, None], wanted, own.sample()), (by_rule, known, led)
        assert isinstance(own, Categorical)
        return dist.Categorical(probs=torch.where(led[:, None], wanted, own.probs)), (by_rule, known, led)


def imitate(
    policy: BeliefPolicy,
    rule: Policy | Callable[[History], Decision],
    priors: PriorSampler,
    batch_size: int,
    seed: int,
    shown: Bar,
) -> float:
    """Teach a policy to do what a rule does where the policy gets to; how often it does so in the end.

    At first the rule leads all episodes, then less and less: the pupil learns what to do where it gets to by
    itself. It ends early when both agree.
    """
    model, optimizer = policy.model, torch.optim.Adam(policy.parameters(), lr=3e-3)
    kept: list[tuple[Inputs, Tensor]] = []
    agreed = 0.0
    for number in range(ROUNDS):
        pupil = Pupil(as_policy(rule, "start"), policy, 0.8**number)
        with isolated(seed_for(seed, number, 0)):
            prior = draw_priors(priors, batch_size, model.num_contexts).to(model.device)
            contexts = stratified(prior, batch_size, offset=float(torch.rand(())))
        simulate(model, pupil, batch_size, contexts=contexts, prior=prior, seed=seed_for(seed, number, 1))
        inputs = Inputs.joined([inputs for inputs, _ in pupil.seen])
        wanted = torch.cat([wanted for _, wanted in pupil.seen])  # [T B, A], or [T B, D]
        agreed = agreement(policy, inputs, wanted)
        shown.set_postfix_str(f"agrees in {100 * agreed:.1f} % of decisions", refresh=False)
        shown.update()
        if agreed >= AGREED and number > 10:
            break
        kept = [*kept[1 - KEPT :], (inputs, wanted)]
        with isolated(seed_for(seed, number, 2)), torch.enable_grad():
            _learn(policy, optimizer, kept)
    return agreed


@torch.no_grad()
def agreement(policy: BeliefPolicy, inputs: Inputs, wanted: Tensor) -> float:
    """How often a policy does what was wanted; of continuous actions, nearly so."""
    leaning = policy.decide(inputs)
    if isinstance(leaning, Tensor):
        return float((leaning.argmax(-1) == wanted.argmax(-1)).double().mean())
    off = (leaning.mode - wanted).abs() / leaning.width
    return float((off <= NEARLY).all(-1).double().mean())


def _learn(policy: BeliefPolicy, optimizer: torch.optim.Optimizer, kept: list[tuple[Inputs, Tensor]]) -> None:
    """A few steps on every batch that is kept."""
    for _ in range(STEPS):
        for inputs, wanted in kept:
            optimizer.zero_grad()
            leaning = policy.decide(inputs)
            if isinstance(leaning, Tensor):
                loss = -(wanted * leaning.log_softmax(-1)).sum(-1).mean()
            else:
                loss = -leaning.log_prob(_around(leaning, wanted)).mean()
            loss.backward()
            optimizer.step()


def _around(leaning: BoxDistribution, wanted: Tensor) -> Tensor:
    """Actions near those that were wanted, inside the box."""
    low, width = leaning.low, leaning.width
    drawn = wanted + AROUND * width * torch.randn_like(wanted)
    return drawn.clamp(low + INSIDE * width, low + (1 - INSIDE) * width)
