"""Recurrent policies: networks that read the history step by step, or complete episodes at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from cpomdp_ppl.agent import Agent
from cpomdp_ppl.encoding import Encoding
from cpomdp_ppl.errors import invalid, require, require_count
from cpomdp_ppl.policy import History, Percept, Policy
from cpomdp_ppl.rng import index_at, isolated
from solvers.cids.box_distributions import BoxDistribution, as_family
from solvers.cids.layers import log_softmax, lstm_step
from solvers.cids.priors import log_odds
from solvers.cids.schedules import as_schedule

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.policy import Decision
    from solvers.cids.estimator import Estimator


Leaning: TypeAlias = Tensor | BoxDistribution
"""What a network leans to do: logits `[…, A]` of finitely many actions, or distributions `[…]` over a box."""


@runtime_checkable
class SequencePolicy(Policy, Protocol):
    """A policy that can also read complete episodes at once, which is much faster than step by step."""

    def unroll(self, episodes: Episodes, prior: Tensor) -> tuple[Leaning, Tensor]:
        """What it would decide along episodes with priors `[B, C]`.

        Returns:
            Logits of all actions at times 0 … T - 1, `[B, T, A]`, or distributions `[B, T]` over a box, and
            what they were computed from, `[B, T, H]`, for a critic to read.
        """
        ...


def as_learnable(policy: Any) -> Any:
    """Return a policy as it is, if it is a module with weights to learn."""
    proper = isinstance(policy, nn.Module) and isinstance(policy, Policy)
    require(proper, "policy", policy, "a torch module with `start` and `act`")
    learnable = any(weight.requires_grad for weight in policy.parameters())
    require(learnable, "policy", policy, "something with weights to learn")
    return policy


class ActionLayer(nn.Linear):
    """The last layer of a policy's network: logits of finitely many actions, or a distribution over a box.

    At first, all actions are about as likely.
    """

    def __init__(self, model: CPOMDP, hidden: int, distribution: str | None = None) -> None:
        family, box = as_family(model.box, distribution), model.box
        super().__init__(hidden, model.num_actions if box is None else 2 * box.dim)
        nn.init.orthogonal_(self.weight, gain=0.1)
        nn.init.zeros_(self.bias)
        self.family, self.box = family, box

    def leaning(self, features: Tensor) -> Leaning:
        """What features `[…, H]` lead to."""
        return self.read(self(features))

    def read(self, outputs: Tensor) -> Leaning:
        """What the layer's outputs stand for."""
        return outputs if self.family is None or self.box is None else self.family.of(self.box, outputs)


def as_decision(leaning: Leaning) -> Decision:
    """What a network leans to do at one time, as a decision."""
    return dist.Categorical(logits=leaning) if isinstance(leaning, Tensor) else leaning


LSTMMemory: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Hidden state `[B, H]`, cell `[B, H]`, and what the network reads of the prior."""


class LSTMPolicy(nn.Module):
    """An LSTM over what the agent has done and seen, with a linear layer for the actions.

    Args:
        model: The CPOMDP that it acts in.
        hidden: Number of hidden units H.
        amortised: Whether it also reads the prior, so that one policy serves many priors; otherwise it acts
            alike under all of them.
        distribution: How it decides where actions are continuous: by a "squashed" Gaussian, which is the
            default, or a "beta" distribution.
        seed: Seed of the initial weights.

    Examples:
        >>> from cpomdp_ppl import simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> policy = LSTMPolicy(model, hidden=32, seed=0)
        >>> simulate(model, policy, 10, seed=0).actions.shape
        torch.Size([10, 20])
    """

    def __init__(
        self,
        model: CPOMDP,
        hidden: int = 64,
        *,
        amortised: bool = False,
        distribution: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.hidden = require_count("hidden", hidden)
        self.amortised = amortised
        self.encoding = Encoding(model)
        size = self.encoding.size + (model.num_contexts if amortised else 0)
        with isolated(seed):
            self.lstm = nn.LSTM(size, hidden, batch_first=True)
            self.logits = ActionLayer(model, hidden, distribution)
        self.to(model.device)
        self._model = (model,)  # out of sight of `parameters`: the model is not the policy's to learn

    def start(self, prior: Tensor) -> LSTMMemory:
        """Nothing remembered but the prior: `h_0 = c_0 = 0`."""
        zeros = self.logits.weight.new_zeros(prior.shape[0], self.hidden)
        return zeros, zeros, self._believed(prior)

    def act(self, history: History, memory: LSTMMemory) -> tuple[Decision, LSTMMemory]:
        """Read the latest percept, and choose."""
        hidden, cell, believed = memory
        percept = torch.cat([self.encoding.step(history.latest, history.time), believed], -1)
        hidden, cell = lstm_step(self.lstm, percept, hidden, cell)
        return as_decision(self.logits.leaning(hidden)), (hidden, cell, believed)

    def unroll(self, episodes: Episodes, prior: Tensor) -> tuple[Leaning, Tensor]:
        """Logits `[B, T, A]`, or distributions `[B, T]`, and hidden states `[B, T, H]` along episodes."""
        believed = self._believed(prior)[:, None].expand(-1, episodes.horizon, -1)
        hidden, _ = self.lstm(torch.cat([self.encoding.sequence(episodes), believed], -1))
        # Memory is laid out with time first, and a layer would copy what is not in order.
        outputs = self.logits(hidden.transpose(0, 1)).transpose(0, 1)
        return self.logits.read(outputs), hidden

    def _believed(self, prior: Tensor) -> Tensor:
        """What the network reads of the prior, `[B, C]`, or `[B, 0]` for nothing."""
        weight = self.logits.weight
        if not self.amortised:
            return weight.new_zeros(len(prior), 0)
        return log_odds(prior.to(weight.device), weight.dtype)

    def agent(self, **settings: Any) -> Agent:
        """This policy at work, one episode at a time; see `Agent` for the settings."""
        return Agent(self._model[0], self, **settings)


@dataclass(frozen=True)
class Exploring:
    """A policy that tends to repeat its actions, and leaves some of them to chance.

    This is what plays and what is improved, so that gradients are exact while both fade.

    Attributes:
        policy: Whose decisions must be distributions.
        chance: Probability of a random action, with all actions equally likely; where actions are continuous,
            see `BoxDistribution.wider`.
        persistence: What is added to the logit of the previous action; where actions are continuous, see
            `BoxDistribution.near`.
    """

    policy: Any
    chance: float = 0.0
    persistence: float = 0.0

    @staticmethod
    def as_scheduled(policy: Any, estimator: Estimator, progress: float) -> Exploring:
        """A policy that explores as an estimator says when a fit is so far, from 0 to 1."""
        schedules = ("random_actions", "persistence")
        now = (as_schedule(name, getattr(estimator, name))(progress) for name in schedules)
        return Exploring(policy, *map(float, now))

    def start(self, prior: Tensor) -> Any:
        """The policy's own memory."""
        return self.policy.start(prior)

    def act(self, history: History, memory: Any) -> tuple[Decision, Any]:
        """`(1 − ε) π(· | h_t) + ε / A`, with π's logits shifted."""
        decision, memory = self.policy.act(history, memory)
        if not self.chance and not self.persistence:
            return decision, memory
        leaning, previous = leaning_of(decision), history.latest.action
        if isinstance(leaning, BoxDistribution):
            if previous is None:
                previous = torch.full_like(leaning.first, torch.nan)
            return self.draw(leaning, previous), memory
        return dist.Categorical(probs=self.probs(leaning, previous)), memory

    def draw(self, leaning: Leaning, previous: Tensor) -> Tensor:
        """Actions `[B]`, or `[B, D]`, given the previous ones."""
        if isinstance(leaning, Tensor):
            probs = self.probs(leaning, previous).double()  # [B, A]
            return index_at(probs, torch.rand(len(probs), 1, dtype=torch.float64).to(probs.device))
        return self._explored(leaning, previous).sample()

    def evaluate(self, leaning: Leaning, actions: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in the eyes of a policy that leans to something, with gradients.

        Args:
            leaning: Logits `[…, A]`, or a distribution `[…]` over a box.
            actions: `[…]`, or `[…, D]`.
            previous: Those before them.

        Returns:
            `log π(a_t | h_t)` and the entropy of `π(· | h_t)`, `[…]` each.
        """
        if isinstance(leaning, BoxDistribution):
            explored = self._explored(leaning, previous)
            return explored.log_prob(actions), explored.entropy()
        log_policy = self.log_probs(leaning, previous)  # […, A]
        log_probs = log_policy.gather(-1, actions[..., None]).squeeze(-1)
        possible = log_policy.clamp(min=torch.finfo(log_policy.dtype).min)  # 0 · log 0 is 0
        return log_probs, -(log_policy.exp() * possible).sum(-1)

    def _explored(self, leaning: BoxDistribution, previous: Tensor) -> BoxDistribution:
        return leaning.near(previous, self.persistence).wider(self.chance)

    def probs(self, logits: Tensor, previous: Tensor | None) -> Tensor:
        """Probabilities of all actions, for logits `[…, A]` of the policy and previous actions `[…]`.

        Actions that the policy rules out, with a logit of -inf, stay ruled out. A previous action of -1 is
        none.
        """
        logits = self._shifted(logits, previous).movedim(-1, 0)  # see `log_softmax`
        if not self.chance:
            return logits.softmax(0).movedim(0, -1)
        share: float | Tensor = self.chance / len(logits)
        if not float(logits.detach().min()) > -math.inf:
            allowed = (logits > -torch.inf).to(logits.dtype)
            share = self.chance * allowed / allowed.sum(0)
        return ((1 - self.chance) * logits.softmax(0) + share).movedim(0, -1)

    def log_probs(self, logits: Tensor, previous: Tensor | None) -> Tensor:
        """Their logarithms, with gradients."""
        if not self.chance:
            return log_softmax(self._shifted(logits, previous))
        return self.probs(logits, previous).clamp(min=torch.finfo(logits.dtype).tiny).log()

    def _shifted(self, logits: Tensor, previous: Tensor | None) -> Tensor:
        if not self.persistence or previous is None:
            return logits
        actions = torch.arange(logits.shape[-1], device=logits.device)
        return logits + self.persistence * (previous[..., None] == actions)


def unroll(policy: Policy, episodes: Episodes, prior: Tensor) -> tuple[Leaning, Tensor | None]:
    """What a policy with priors `[B, C]` would decide along episodes, with gradients.

    Returns:
        Logits `[B, T, A]`, or distributions `[B, T]`, and features `[B, T, H]` for a critic if the policy has
        any.
    """
    if isinstance(policy, SequencePolicy):
        return policy.unroll(episodes, prior)
    T = episodes.horizon
    history = History((_initial_percept(episodes),))
    memory = policy.start(prior)
    series: list[Any] = []
    for t in range(T):
        decision, memory = policy.act(history, memory)
        series.append(leaning_of(decision))
        seen = {site: value[:, t] for site, value in episodes.observations.items()}
        flags = {site: flag[:, t] for site, flag in episodes.observed.items()}
        history = history.extended(Percept(episodes.actions[:, t], seen, flags))
    stack = type(series[0]).stack if isinstance(series[0], BoxDistribution) else partial(torch.stack, dim=1)
    return stack(series), None


def previous_actions(actions: Tensor) -> Tensor:
    """The action before each decision of episodes with actions `[B, T, …]`.

    For none it is -1, or NaN of continuous ones.
    """
    return torch.cat([no_actions(actions[:, :1]), actions[:, :-1]], 1)


def no_actions(like: Tensor) -> Tensor:
    """What stands for no actions."""
    return torch.full_like(like, torch.nan if like.is_floating_point() else -1)


def leaning_of(decision: Decision) -> Leaning:
    """What a policy leans to do, given its decision.

    Raises:
        ValueError: If it says only what it does.
    """
    if isinstance(decision, Categorical):
        return decision.logits
    if not isinstance(decision, BoxDistribution):
        expected = "a Categorical over actions, or a SquashedGaussian or ScaledBeta over a box, to learn from"
        raise invalid("policy", type(decision).__name__, expected)
    return decision


def _initial_percept(episodes: Episodes) -> Percept:
    values, flags = episodes.initial_observations, episodes.initially_observed
    if values is None or flags is None:
        values = {site: torch.zeros_like(value[:, 0]) for site, value in episodes.observations.items()}
        flags = {site: torch.zeros_like(seen[:, 0]) for site, seen in episodes.observed.items()}
    return Percept(None, values, flags)
