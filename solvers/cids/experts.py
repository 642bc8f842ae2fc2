"""Practice: a policy that reads beliefs learns to act where it is told context and state.

No filter runs here, so that a step costs next to nothing. What is learned is what to do once everything is
known: how to get to rewards that are far away, and what that is worth.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from cpomdp_ppl.actions import some_action
from cpomdp_ppl.episodes import Episodes, discounted
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import Filtering
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.prior import stratified
from cpomdp_ppl.rng import isolated, seed_for
from cpomdp_ppl.state import leaves, map_state
from solvers.cids.batch import OWN, Batch
from solvers.cids.belief_policy import Inputs
from solvers.cids.estimator import Decisions, GradientStep, still_to_come
from solvers.cids.lucky import best
from solvers.cids.pace import Pace
from solvers.cids.playing import play_out, where
from solvers.cids.policy import Exploring, no_actions, previous_actions
from solvers.cids.schedules import Linear

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.progress import Bar
    from solvers.cids.belief_policy import BeliefPolicy
    from solvers.cids.estimator import ActorCritic
    from solvers.cids.lucky import Findings

ROUNDS = 150
"""How many batches are played, at most."""
AT_ONCE = 512
"""About how many episodes a batch has."""
IMITATED = 64
"""How many lucky episodes are imitated in each step."""
IMITATION = Linear(0.1, 0.0, until=0.8)
"""Weight of imitating them, in units of the advantages' size."""
ARRIVALS = 8
"""How many next states are drawn to tell what an action pays, where that depends on them."""
MOST_LUCKY = 3.0
"""An advantage of a lucky action counts for no more than this, in those units."""
LEARNING_RATE = Linear(3e-3, 3e-4)
"""Step size of Adam."""
RESTARTS = Linear(0.6, 0.0, until=0.8)
"""Share of the episodes that begin in the middle of lucky ones."""


@dataclass(frozen=True, eq=False)
class Sight:
    """What somebody knows who sees context and state; policies read it as they do `Knowledge`.

    To be made and used inside `inference_scope`.
    """

    programs: Generative
    state: Any  # leaves [B, …]
    context: Tensor  # [B]
    time: Tensor  # [B]

    @property
    def contexts(self) -> Tensor:
        """The one context that is possible, `[B, 1]`."""
        return self.context[:, None]

    @property
    def log_posterior(self) -> Tensor:
        """0 for that, -inf for all others, float64 `[B, C]`."""
        return one_hot(self.context, self.programs.model.num_contexts).double().log()

    @property
    def moments(self) -> tuple[Any, Any]:
        """The state and its variance, which is none, leaves `[1, B, …]`."""
        mean = map_state(lambda leaf: leaf[None].double(), self.state)
        return mean, map_state(torch.zeros_like, mean)

    @property
    def probabilities(self) -> Tensor:
        """Probabilities of the states of a finite model, `[1, B, S]`."""
        assert self.programs.model.states is not None
        ((_, leaf),) = leaves(self.state)
        return one_hot(leaf.long(), self.programs.model.states).double()[None]

    @cached_property
    def expected_rewards(self) -> Tensor:
        """`r_c(s, a)` of every action, `[B, 1, A]`."""
        actions = (torch.full_like(self.context, a) for a in range(self.programs.model.num_actions))
        return torch.stack([self.expected_reward(action) for action in actions], -1)

    def expected_reward(self, action: Tensor) -> Tensor:
        """`r_c(s, a)` of one action in each episode, `[B]` or `[B, D]`; `[B, 1]`.

        Where models pay on arrival, it is the mean over a few next states.
        """
        n = ARRIVALS if self.programs.model.pays_on_arrival else 1
        state = map_state(lambda leaf: leaf.repeat_interleave(n, 0), self.state)
        rewards = self.programs.reward(state, *(x.repeat_interleave(n, 0) for x in (action, self.context)))
        return rewards.view(-1, n).mean(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Restarts:
    """Lucky episodes, and how many steps of each are taken over before an episode goes its own way."""

    episodes: Episodes
    steps: Tensor  # [B]


def rehearse(model: CPOMDP, acting: Exploring, contexts: Tensor, restarts: Restarts, seed: int) -> Batch:
    """Play episodes in contexts `[B]`, told everything."""
    policy, given, steps = acting.policy, restarts.episodes, restarts.steps
    assert given.rewards is not None
    states, actions, rewards, inputs = [], [], [], []
    with inference_scope(model, seed):
        programs = Generative(model)
        state = map_state(
            lambda new, old: where(steps > 0, old[:, 0], new), programs.initial(contexts), given.states
        )
        previous = no_actions(some_action(model, contexts.shape))
        alive, lengths = torch.ones_like(steps, dtype=torch.bool), torch.zeros_like(steps)
        for t in range(model.horizon):
            states.append(state)
            inputs.append(policy.encoding(Sight(programs, state, contexts, torch.full_like(contexts, t))))
            action = acting.draw(policy.decide(inputs[-1]), previous)
            action = where(t < steps, given.actions[:, t], action)
            moved = programs.move(state, action, contexts)
            lengths += alive
            if moved.ended is not None:
                alive = alive & ~(moved.ended & (t >= steps))
            told = map_state(lambda leaf: leaf[:, t + 1], given.states)  # noqa: B023
            state = map_state(partial(where, t < steps), told, moved.state)
            previous = action
            actions.append(action)
            rewards.append(where(t < steps, given.rewards[:, t], moved.reward))
    episodes = Episodes(
        actions=torch.stack(actions, 1),
        observations={},
        observed={},
        lengths=lengths,
        contexts=contexts,
        states=map_state(lambda *each: torch.stack(each, 1), *states, state),
        rewards=torch.stack(rewards, 1),
        discount=model.discount,
    )
    return _told(model, episodes, steps, Inputs.stack(inputs))


def _told(model: CPOMDP, episodes: Episodes, since: Tensor, inputs: Inputs) -> Batch:
    """A batch of episodes in which nothing was left to find out."""
    assert episodes.contexts is not None
    assert episodes.rewards is not None
    sure = one_hot(episodes.contexts, model.num_contexts).double()  # [B, C]
    rewards = episodes.rewards.double()[..., None].expand(-1, -1, model.num_contexts)
    filtering = Filtering(torch.zeros_like(rewards), torch.zeros_like(sure), rewards, model.prior())
    log_posterior = sure.log()[:, None].expand(-1, episodes.horizon + 1, -1)
    told = torch.ones_like(since, dtype=torch.bool)
    previous = previous_actions(episodes.actions)
    return Batch(episodes, filtering, sure, log_posterior, OWN, previous, since, told, inputs)


def practise(
    policy: BeliefPolicy, estimator: ActorCritic, found: Findings, rounds: int, seed: int, shown: Bar
) -> bool:
    """Teach a policy what to do where it is told context and state.

    Some episodes begin in the middle of lucky ones, and lucky actions are imitated: those that led to more
    than the critic expects. Both fade. Lucky episodes are those that a search has found, and better ones as
    they come. It ends early when nothing improves any more.

    Where the state stays hidden, what was learned may be of no use: it is forgotten unless the policy, told
    the context alone, does better than by doing the same thing all the time.

    Args:
        policy: The policy, which is changed.
        estimator: How it is improved.
        found: What a search found.
        rounds: How many batches are played, at most.
        seed: Seed of all random numbers.
        shown: A progress bar.

    Returns:
        Whether it was of use.
    """
    assert found.episodes is not None
    before = copy.deepcopy(policy.state_dict())
    practice = Practice(policy, estimator, found.episodes, Pace(rounds, found.constant))
    while not practice.pace.ended:
        earned = practice.iterate(seed_for(seed, practice.iteration))
        shown.set_postfix_str(f"told everything, return {earned:.2f}", refresh=False)
        shown.update()
    returns = _told_context(policy, found.prior, seed_for(seed, rounds))
    of_use = float(returns.mean() - 2 * returns.std() / len(returns) ** 0.5) > found.constant_told
    if not of_use:
        policy.load_state_dict(before)
    return of_use


def _told_context(policy: BeliefPolicy, prior: Tensor, seed: int) -> Tensor:
    """Returns of a policy that is told the context, and sees the rest through its filter."""
    model = policy.model
    contexts = stratified(prior, AT_ONCE, offset=0.5)
    sure = one_hot(contexts, model.num_contexts).double()
    returns = play_out(model, Exploring(policy), contexts, sure, None, seed).episodes.returns
    assert returns is not None
    return returns.double()


class Practice:
    """A policy that practises, and what it needs for it."""

    def __init__(self, policy: BeliefPolicy, estimator: ActorCritic, lucky: Episodes, pace: Pace) -> None:
        self.policy = policy
        self.estimator = estimator
        self.lucky = lucky
        self.pace = pace
        self.iteration = 0
        self.weights = [weight for weight in policy.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.Adam(self.weights, lr=LEARNING_RATE(0.0), fused=True)

    @property
    def acting(self) -> Exploring:
        """The policy with its share of random actions."""
        return Exploring.as_scheduled(self.policy, self.estimator, self.pace.progress)

    def iterate(self, seed: int) -> float:
        """Play, improve, and keep what was lucky; the mean return of those who began at the beginning."""
        model, C = self.policy.model, self.policy.model.num_contexts
        contexts = torch.arange(max(AT_ONCE // C, 8) * C, device=model.device) % C
        with isolated(seed), torch.no_grad():
            restarts = self._restarts(contexts)
            batch = rehearse(model, self.acting, contexts, restarts, seed)
        with isolated(seed), torch.enable_grad():
            self._improve(batch)
        self.lucky = best(Episodes.concatenate([self.lucky, batch.episodes]), C)
        returns = batch.episodes.returns
        assert returns is not None
        earned = float(returns[batch.since == 0].mean())
        self.pace.advance(earned, earned, math.nan)
        self.iteration += 1
        return earned

    def _restarts(self, contexts: Tensor) -> Restarts:
        """Where episodes in contexts `[B]` begin: some of them on the way of lucky ones."""
        assert self.lucky.contexts is not None
        assert self.lucky.rewards is not None
        number = self.lucky.contexts.bincount(minlength=self.policy.model.num_contexts)[contexts]  # [B]
        order = self.lucky.contexts.argsort(stable=True)
        first = torch.searchsorted(self.lucky.contexts[order], contexts)
        u = torch.rand(3, len(contexts), device=contexts.device)
        rows = order[(first + (u[0] * number).long()).clamp(max=len(order) - 1)]
        gains = discounted(self.lucky.rewards.double(), self.lucky.discount).cumsum(1)
        last = (gains >= gains.amax(1, keepdim=True)).double().argmax(1)[rows]  # when all is earned
        again = (u[1] < RESTARTS(self.pace.progress)) & (number > 0)
        return Restarts(self.lucky[rows], torch.where(again, (u[2] * (last + 1)).long(), 0))

    def _improve(self, batch: Batch) -> None:
        """A few gradient steps of policy and critic."""
        payoffs = batch.rewards(belief=False) * batch.alive
        to_come = still_to_come(payoffs)[batch.alive]
        if not self.policy.critic.has_units:
            self.policy.critic.rescale(to_come)
        now = self._decide(batch)
        advantages = self.estimator.advantages(payoffs, now.detached())
        step = GradientStep.first(advantages, now, self.policy.critic, self.pace.progress)
        lucky = self._lucky_actions(float(step.size))
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE(self.pace.progress)
        for epoch in range(self.estimator.epochs):
            step = step if epoch == 0 else replace(step, now=self._decide(batch))
            loss = torch.stack(list(self.estimator.terms(step).values())).sum() + self._imitation(*lucky)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.weights, self.estimator.max_gradient_norm or math.inf)
            self.optimizer.step()
        self.policy.critic.rescale(to_come)

    def _decide(self, batch: Batch) -> Decisions:
        assert batch.inputs is not None
        leaning, values = self.policy.decide(batch.inputs), self.policy.values(batch.inputs)
        log_probs, entropies = self.acting.evaluate(leaning, batch.episodes.actions, batch.previous)
        log_probs = torch.where(batch.alive, log_probs, 0.0)  # others may be ruled out, and 0 · inf is NaN
        return Decisions(batch, log_probs, entropies, values, None, None)

    def _lucky_actions(self, size: float) -> tuple[Inputs, Tensor, Tensor, Tensor]:
        """Inputs `[B T]` along lucky episodes, their actions, those before, and how lucky they were."""
        some = self.lucky[torch.randint(len(self.lucky), (IMITATED,), device=self.lucky.device)]
        assert some.contexts is not None
        assert some.rewards is not None
        B, T = some.actions.shape[:2]
        with inference_scope(self.policy.model, 0):
            state = map_state(lambda leaf: leaf[:, :T].flatten(0, 1), some.states)
            time = torch.arange(T, device=some.device).repeat(B)
            programs = Generative(self.policy.model)
            inputs = self.policy.encoding(Sight(programs, state, some.contexts.repeat_interleave(T), time))
            values = self.policy.values(inputs).double()
        to_come = still_to_come(discounted(some.rewards.double(), some.discount)).flatten()
        luck = ((to_come - values) / max(size, 1e-8)).clamp(0.0, MOST_LUCKY) * some.alive.flatten()
        previous = previous_actions(some.actions).flatten(0, 1)
        return inputs, some.actions.flatten(0, 1), previous, luck.to(values)

    def _imitation(self, inputs: Inputs, actions: Tensor, previous: Tensor, luck: Tensor) -> Tensor:
        """Their negative log-probabilities, weighted by luck."""
        likely, _ = self.acting.evaluate(self.policy.decide(inputs), actions, previous)
        return -IMITATION(self.pace.progress) * (luck.to(likely) * likely).mean()
