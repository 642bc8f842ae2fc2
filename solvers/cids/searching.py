"""Search on top of a learned policy: before each decision, another action is tried out in the belief."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from cpomdp_ppl.actions import require_finite_actions
from cpomdp_ppl.arrays import how_many_fit, pieces
from cpomdp_ppl.errors import require, require_count, require_number
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.rng import index_at, require_seed, seed_for
from cpomdp_ppl.state import map_state
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.playing import expected_reward

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.knowledge import Knowledge
    from cpomdp_ppl.policy import History
    from solvers.cids.solution import Solution

FEWEST = 4
"""Simulations of an action, at least, before it is compared with others."""
BYTES_AT_ONCE = 2**27
"""Bytes that beliefs simulated together may take."""


@dataclass(frozen=True, eq=False)
class Searching:
    """A learned policy that looks ahead, and does something else only where that is better beyond doubt.

    This is a search by rollouts in the space of beliefs, and no tree: one step is improved, and the learned
    policy goes on from there. At each decision:

    1. The policy proposes an action, drawn as it always is.
    2. Half of the simulations look for a challenger by sequential halving: all actions are simulated equally
       often, the better half of them goes on, until two are left. If actions are too many for four
       simulations each, those that the policy holds likeliest take part.
    3. If the best is not the proposal, the other half compares the two, with random numbers that neither
       was chosen by. The challenger is taken if its mean advantage is above `errors` standard errors.

    A simulation draws context and state from the belief, takes the action, and follows the policy for a few
    steps, with the filter at work. It is worth the rewards that the filter expects on the way, plus τ times
    the fall of the posterior's entropy, plus the critic's value of the belief that it ends in; nothing at
    the horizon, or where the episode has ended. So it is in the critic's own terms, whose values have τ times
    the information to come in them. The actions that are compared share contexts, states and random numbers.

    Args:
        solution: What was fitted; its policy must read beliefs.
        simulations: How many at each decision, at least 16.
        depth: Steps of a simulation; None for all, to the horizon, where no critic is asked. It is always
            to the horizon if the critic does not value return and information, as after a fit with another
            objective, or none.
        errors: How many standard errors of its mean an advantage must have.
        temperature: τ, in units of reward for a nat; left out, that of the last iteration of the fit.
        greedy: Whether the policy proposes its likeliest action instead of drawing one.
        seed: The same seed gives the same decisions; None takes fresh entropy.

    Examples:
        >>> from cpomdp_ppl import simulate
        >>> from cpomdp_ppl.models import LineGrid
        >>> from solvers import cids
        >>> solution = cids.fit(LineGrid(), iterations=5, seed=0, progress=False)
        >>> simulate(LineGrid(), Searching(solution, 50), 10, seed=0).actions.shape
        torch.Size([10, 10])
    """

    solution: Solution
    simulations: int = 200
    depth: int | None = 10
    errors: float = 3.0
    temperature: float | None = None
    greedy: bool = False
    seed: int | None = 0

    def __post_init__(self) -> None:
        policy = getattr(self.solution, "policy", None)
        reads = isinstance(policy, BeliefPolicy)
        require(reads, "solution", f"one with {type(policy).__name__}", "one whose policy reads beliefs")
        require_finite_actions(self.model, "Searching")
        enough = require_count("simulations", self.simulations) >= 4 * FEWEST
        require(enough, "simulations", self.simulations, f"at least {4 * FEWEST}")
        if self.depth is not None:
            require_count("depth", self.depth)
        require_number("errors", self.errors, "a number that is not negative")
        if self.temperature is not None:
            require_number("temperature", self.temperature, "None or a number that is not negative")
        require_seed(self.seed)

    @property
    def model(self) -> CPOMDP:
        """The CPOMDP."""
        return self.solution.model

    @property
    def policy(self) -> BeliefPolicy:
        """The learned policy."""
        policy: BeliefPolicy = self.solution.policy
        return policy

    @cached_property
    def tau(self) -> float:
        """τ: what a nat is worth."""
        if self.temperature is not None:
            return float(self.temperature)
        history = self.solution.history
        fitted = self.has_critic and history.sizes.get("iteration", 0) and "temperature" in history
        return float(history["temperature"][-1]) if fitted else 0.0

    @cached_property
    def has_critic(self) -> bool:
        """Whether the critic values what a search does."""
        objective = self.solution.settings.get("objective")
        return isinstance(objective, dict) and objective.get("") == "Information"

    def start(self, prior: Tensor) -> Knowledge:
        """The policy's own memory, from a prior over contexts `[B, C]`."""
        return self.policy.start(prior)

    def act(self, history: History, memory: Knowledge) -> tuple[Tensor, Knowledge]:
        """Take in the latest percept, ask the policy, and search for something better."""
        decision, known = self.policy.act(history, memory)
        assert isinstance(decision, Categorical)
        proposed = decision.logits.argmax(-1) if self.greedy else decision.sample()  # [B]
        going_on = (~known.ended).nonzero()[:, 0]
        for number, part in enumerate(pieces(len(going_on), self._episodes_at_once(known))):
            rows = going_on[part]
            with inference_scope(self.model, seed_for(self.seed, history.time, number)):
                some, likely = known.rows(rows), decision.logits[rows]
                proposed[rows] = self._improved(some, likely, proposed[rows], history.time)
        return proposed, known

    def _improved(self, known: Knowledge, logits: Tensor, proposed: Tensor, time: int) -> Tensor:
        """What to do in B episodes instead of what was proposed, `[B]`."""
        simulator = _Simulator(self, time)
        challenger = self._challenger(simulator, known, logits)
        rows = (challenger != proposed).nonzero()[:, 0]
        if not len(rows):
            return proposed
        pair = torch.stack([challenger, proposed], 1)[rows]  # [R, 2]
        values = simulator.values(known.rows(rows), pair, self.simulations // 4)  # [R, 2, M]
        better = rows[is_better(values, self.errors)]
        return proposed.index_copy(0, better, challenger[better])

    def _challenger(self, simulator: _Simulator, known: Knowledge, logits: Tensor) -> Tensor:
        """The action that does best in half of the simulations, `[B]`."""
        candidates = logits.argsort(dim=1, descending=True, stable=True)  # [B, A]
        values = logits.new_full((*logits.shape, 0), math.nan, dtype=torch.float64)  # [B, A, M so far]
        for k, m in halvings(logits.shape[1], self.simulations // 2):
            candidates = candidates[:, :k]
            new = values.new_full((*logits.shape, m), math.nan)
            index = candidates[..., None].expand(-1, -1, m)
            values = torch.cat([values, new.scatter(1, index, simulator.values(known, candidates, m))], 2)
            means = values.nanmean(2).gather(1, candidates).nan_to_num(nan=-math.inf)  # [B, k]
            candidates = candidates.gather(1, means.argsort(dim=1, descending=True, stable=True))
        return candidates[:, 0]

    def _episodes_at_once(self, known: Knowledge) -> int:
        """As many as bound the memory that beliefs take."""
        sizes: list[int] = []
        map_belief(lambda leaf: sizes.append(leaf.nbytes), known.track.belief)
        return how_many_fit(BYTES_AT_ONCE, sum(sizes) // len(known.time) * self.simulations // 4)


class _Simulator:
    """Simulations from beliefs held at a time; to be made and used inside `inference_scope`."""

    def __init__(self, settings: Searching, time: int) -> None:
        self.settings, self.policy = settings, settings.policy
        self.programs = Generative(settings.model)
        self.time = time
        left = settings.model.horizon - time
        all_steps = settings.depth is None or not settings.has_critic
        self.depth = left if all_steps else min(left, settings.depth or left)
        self.asks_critic = self.depth < left

    def values(self, known: Knowledge, actions: Tensor, number: int) -> Tensor:
        """What M simulations of each of k actions `[B, k]` are worth, float64 `[B, k, M]`.

        Simulations that the filter could not follow are NaN.
        """
        B, k = actions.shape
        states, contexts = draw_jointly(known, number)  # [B · M]
        rows = known.rows(torch.arange(B, device=actions.device).repeat_interleave(number))
        seed, worth = int(torch.randint(2**31, ())), []
        for i in range(k):  # all with the same random numbers
            with inference_scope(self.settings.model, seed):
                action = actions[:, i].repeat_interleave(number)
                worth.append(self._value(rows, states, contexts, action).view(B, number))
        return torch.stack(worth, 1)

    def _value(self, known: Knowledge, state: Any, contexts: Tensor, action: Tensor) -> Tensor:
        """What simulations from R beliefs and states are worth that begin with actions `[R]`, `[R]`."""
        worth = self.settings.tau * remaining_entropy(known)
        discount, alive = self.settings.model.discount, ~known.ended
        for step in range(1, self.depth + 1):
            rewards = (known.log_posterior.exp() * expected_reward(known, action)).sum(1)
            worth = worth + torch.where(alive, discount ** (self.time + step - 1) * rewards, 0.0)
            happened = self.programs.step(state, action, contexts)
            percept = happened.percept
            if happened.ended is not None:
                percept, alive = percept.only(alive), alive & ~happened.ended
            state, known = happened.state, known.after(percept)
            if step < self.depth:
                probs = self.policy.decide(self.policy.encoding(known)).double().softmax(1)
                levels = torch.rand(len(probs), 1, dtype=torch.float64, device=probs.device)
                action = index_at(probs, levels)
        worth = worth - self.settings.tau * remaining_entropy(known)
        if self.asks_critic:
            worth = worth + torch.where(alive, self.policy.values(self.policy.encoding(known)), 0.0)
        return torch.where(known.lost, math.nan, worth)


def halvings(num_actions: int, simulations: int) -> list[tuple[int, int]]:
    """How many actions there are in each round of sequential halving, and simulations of each.

    Examples:
        >>> halvings(6, 100), halvings(3, 25), halvings(100, 25)
        ([(6, 5), (3, 11), (2, 16)], [(3, 4), (2, 6)], [(6, 4)])
    """
    k = min(num_actions, simulations // FEWEST)
    number = max(1, min((k - 1).bit_length(), simulations // (FEWEST * k)))
    sizes = [k]
    while len(sizes) < number:
        sizes.append(max(2, -(-sizes[-1] // 2)))
    return [(size, simulations // (number * size)) for size in sizes]


def draw_jointly(known: Knowledge, number: int) -> tuple[Any, Tensor]:
    """M states for each of B episodes, leaves `[B · M, …]`, and contexts `[B · M]`, spread evenly."""
    posterior = known.log_posterior.exp()  # [B, C]
    B, device = len(posterior), posterior.device
    offset = torch.rand(B, 1, dtype=torch.float64, device=device)
    levels = (torch.arange(number, device=device) + offset) / number  # [B, M]
    contexts = index_at(posterior[:, None], levels[..., None])  # [B, M]
    b, m = torch.arange(B, device=device)[:, None], torch.arange(number, device=device)
    drawn = known.recursion.draw(known.track.belief, number)  # leaves [C, B, M, …]
    return map_state(lambda leaf: leaf[contexts, b, m].flatten(0, 1), drawn), contexts.flatten()


def remaining_entropy(known: Knowledge) -> Tensor:
    """Entropy of the posterior over contexts in nats, float64 `[B]`."""
    nats: Tensor = torch.special.entr(known.log_posterior.exp()).sum(1)
    return nats


def is_better(values: Tensor, errors: float) -> Tensor:
    """Whether the first of two actions with values `[B, 2, M]` is worth more beyond doubt, bool `[B]`.

    The variance of the differences is estimated as if one more of them had been as far from the mean as the
    values themselves are: a few differences that happen to agree are no proof.
    """
    gain = values[:, 0] - values[:, 1]  # [B, M]
    known = ~gain.isnan()
    n = known.sum(1)
    mean = gain.nanmean(1)
    spread = (values - values.nanmean(2, keepdim=True)).square().nanmean((1, 2))
    squares = torch.where(known, (gain - mean[:, None]).square(), 0.0).sum(1)
    error = ((squares + spread) / n).sqrt() / n.sqrt()
    return (n >= FEWEST) & (mean > errors * error)
