"""How payoffs become a gradient of the policy: as the paper prints it, or with much less variance."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from cpomdp_ppl.errors import require, require_count
from solvers.cids.schedules import Linear, Schedule, as_schedule

if TYPE_CHECKING:
    from solvers.cids.batch import Batch, Statistics
    from solvers.cids.critic import Critic


@dataclass(frozen=True, eq=False)
class Decisions:
    """What a policy decides along a batch of episodes, and what the critic says beside it."""

    batch: Batch
    log_probs: Tensor  # log π(a_t | h_t) of the actions taken, [B, T]
    entropies: Tensor  # of π(· | h_t), [B, T]
    values: Tensor  # the critic's estimate of the payoffs to come, [B, T]
    log_contexts: Tensor | None  # its estimate of log P(c | h_t), [B, T, C], if it reads the history
    states: Tensor | None  # its estimate of E[s_t | h_t], in units of its spread, [B, T, D], likewise

    def detached(self) -> Decisions:
        """The same without gradients."""
        names = ("log_probs", "entropies", "values", "log_contexts", "states")
        found = {name: getattr(self, name) for name in names}
        return replace(self, **{name: x.detach() for name, x in found.items() if x is not None})


@dataclass(frozen=True, eq=False)
class GradientStep:
    """What one gradient step on a batch goes by."""

    advantages: Tensor  # how much better each action did than expected, [B, T]
    size: Tensor  # root mean square of the advantages over all episodes, a scalar
    states: Tensor | None  # the true ones before each decision, in units of their spread, [B, T, D]
    before: Decisions  # of the policy that played, without gradient
    now: Decisions  # of the policy as it is now
    critic: Critic  # knows the units of the values
    progress: float  # how far the fit is, from 0 to 1

    @staticmethod
    def first(advantages: Tensor, now: Decisions, critic: Critic, progress: float) -> GradientStep:
        """The first step on a batch, in which the policy is still the one that played it."""
        batch = now.batch
        size = (batch.mean(advantages.square()) / batch.share_alive).sqrt()
        states = None
        if now.states is not None:
            states = standardised(batch.states[:, :-1], batch, batch.episodes.alive)
        return GradientStep(advantages, size, states, now.detached(), now, critic, progress)

    @property
    def batch(self) -> Batch:
        """The episodes."""
        return self.now.batch


class Estimator(Protocol):
    """A loss whose gradient descends against the objective's."""

    @property
    def epochs(self) -> int:
        """How many gradient steps are taken on a batch."""
        ...

    @property
    def random_actions(self) -> float | Schedule:
        """How often an action is left to chance."""
        ...

    @property
    def persistence(self) -> float | Schedule:
        """What is added to the logit of the previous action."""
        ...

    @property
    def told(self) -> float | Schedule:
        """Which share of the episodes begin told the context, for policies that read beliefs."""
        ...

    @property
    def led(self) -> float | Schedule:
        """Which share is led somewhere before the policy acts, for policies that read beliefs."""
        ...

    @property
    def warm_up(self) -> float:
        """For how much of the fit, from 0 to 1, the critic learns alone."""
        ...

    @property
    def max_gradient_norm(self) -> float | None:
        """Longer gradients are shortened to this; None leaves them."""
        ...

    def advantages(self, payoffs: Tensor, before: Decisions) -> Tensor:
        """How much better each action did than expected, `[B, T]`.

        Args:
            payoffs: `[B, T]`, float64.
            before: Decisions of the policy that played, without gradient. A mean over all episodes, such as
                a baseline, is `before.batch.mean(values)`, as several processes may share a batch.
        """
        ...

    def terms(self, step: GradientStep) -> dict[str, Tensor]:
        """The loss, term by term. Each is a mean over the episodes at hand, which is averaged over processes.

        Any other mean over the batch is `step.batch.mean(values)`.
        """
        ...


@dataclass(frozen=True)
class Reinforce:
    """Algorithm 2 as printed (but downhill): the payoff of an episode times the score of all its actions.

    Args:
        baseline: Whether to subtract the batch's mean payoff, which leaves the gradient's mean as it is, up
            to a factor 1 − 1/B.
        max_gradient_norm: Longer gradients are shortened to this; None leaves them.
    """

    baseline: bool = True
    max_gradient_norm: float | None = None
    epochs: int = field(default=1, init=False)
    random_actions: float = field(default=0.0, init=False)
    persistence: float = field(default=0.0, init=False)
    told: float = field(default=0.0, init=False)
    led: float = field(default=0.0, init=False)
    warm_up: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        _require_norm(self.max_gradient_norm)

    def advantages(self, payoffs: Tensor, before: Decisions) -> Tensor:
        """The same for every step: the episode's payoff, or what it has above the mean."""
        total = payoffs.sum(1)
        if self.baseline and len(total) > 1:
            total = total - before.batch.mean(total)
        return total[:, None].expand_as(payoffs) * before.batch.alive

    def terms(self, step: GradientStep) -> dict[str, Tensor]:
        """`−E[A Σ_t log π(a_t|h_t)]`."""
        log_probs = step.now.log_probs
        return {"policy": -(step.advantages.to(log_probs) * log_probs).sum(1).mean()}


FURTHEST = 20.0
"""Log-ratios above this are all the same: those of densities know no bound."""
RANDOM_ACTIONS = Linear(0.2, 0.0, until=0.5)
"""How often `ActorCritic` leaves an action to chance."""
EXPLORATION = Linear(0.1, 0.0)
"""What a nat of entropy of the actions is worth to `ActorCritic`."""


@dataclass(frozen=True)
class ActorCritic:
    """Payoffs to come, a critic, several small steps on each batch.

    Advantages are generalised ones (GAE), in units of their own size (root mean square). Steps after the
    first on the same batch are kept close to the policy that played it by clipping (PPO). The critic reads
    what the policy's own network makes of the history, if it can be had, and teaches that network three
    things on the way: how much is still to come, which context it is, for which the filter's posterior is
    the answer, and what state, which the simulator knows.

    Args:
        epochs: How many gradient steps are taken on a batch.
        gae_lambda: λ of the generalised advantages: 1 trusts payoffs alone, 0 the critic.
        clip: By how much the probability of an action may change on a batch, as a ratio.
        random_actions: How often an action is left to chance while episodes are played, a number or a
            schedule. What is improved is the policy with its chances, so that the gradient is none the worse
            for it; chance keeps it familiar with situations that it would not get into by itself. Over a
            box, all actions are: decisions are made wider (see `BoxDistribution.wider`).
        persistence: What is added to the logit of the previous action, a number or a schedule. This, too, is
            part of the policy that is improved. Actions that are repeated get further.
        told: Which share of the episodes begin told the context, if the policy reads beliefs: what to do when
            sure is learned sooner, and worth finding out.
        led: Which share is led to some place that chance hardly gets to, before the policy acts, if it reads
            beliefs; see `solvers.cids.lucky`.
        exploration: What a nat of entropy of the actions is worth, in units of the advantages' size: a
            number or a schedule.
        value_weight: Weight of the critic's squared error, in units of the values' spread.
        context_weight: Weight of the critic's cross-entropy on contexts.
        state_weight: Weight of the critic's squared error on states, in units of their spread.
        warm_up: For how much of the fit, from 0 to 1, the critic learns alone. A policy that is good already
            is spoiled by what a critic says that knows nothing yet.
        max_gradient_norm: Longer gradients are shortened to this; None leaves them.
    """

    epochs: int = 3
    gae_lambda: float = 0.95
    clip: float = 0.2
    random_actions: float | Schedule = RANDOM_ACTIONS
    persistence: float | Schedule = 0.0
    told: float | Schedule = 0.0
    led: float | Schedule = 0.0
    exploration: float | Schedule = EXPLORATION
    value_weight: float = 0.5
    context_weight: float = 1.0
    state_weight: float = 1.0
    warm_up: float = 0.0
    max_gradient_norm: float | None = 1.0

    def __post_init__(self) -> None:
        require_count("epochs", self.epochs)
        require(0 <= self.gae_lambda <= 1, "gae_lambda", self.gae_lambda, "between 0 and 1")
        require(0 <= self.warm_up < 1, "warm_up", self.warm_up, "from 0 to less than 1")
        require(self.clip > 0, "clip", self.clip, "a positive number")
        _require_norm(self.max_gradient_norm)
        as_schedule("exploration", self.exploration)
        chance = as_schedule("random_actions", self.random_actions)
        require(chance(0.0) < 1 and chance(1.0) < 1, "random_actions", self.random_actions, "less than 1")
        as_schedule("persistence", self.persistence)
        told, led = as_schedule("told", self.told), as_schedule("led", self.led)
        require(told(0.0) + led(0.0) < 1, "told", self.told, "less than 1, together with led")
        for name in ("value_weight", "context_weight", "state_weight"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "a non-negative number")

    def advantages(self, payoffs: Tensor, before: Decisions) -> Tensor:
        """`Σ_k λ^k δ_{t+k}` with `δ_t = r_t + V(h_{t+1}) − V(h_t)`."""
        values = before.values.double() * before.batch.alive  # [B, T]
        after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
        delta = (payoffs + after - values) * before.batch.alive
        T = payoffs.shape[1]
        steps = torch.arange(T, device=payoffs.device)
        ahead = (steps[:, None] - steps).double()  # [T, T]: how far a later step (row) is from t (column)
        weights = torch.where(ahead >= 0, self.gae_lambda ** ahead.clamp(min=0), 0.0)
        return (delta @ weights) * before.batch.alive

    def terms(self, step: GradientStep) -> dict[str, Tensor]:
        """Clipped policy gradient, the critic's errors, and the entropy of the actions."""
        batch, advantages, before, now = step.batch, step.advantages, step.before, step.now
        dtype = now.log_probs.dtype
        A = (advantages / step.size.clamp(min=1e-8)).to(dtype)
        ratio = (now.log_probs - before.log_probs).clamp(max=FURTHEST).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        targets = (advantages + before.values).to(dtype)
        exploration = as_schedule("exploration", self.exploration)(step.progress)
        each = {
            "policy": -torch.minimum(ratio * A, clipped * A),
            "value": self.value_weight * ((now.values - targets) / step.critic.scale).square(),
            "exploration": -exploration * now.entropies,
        }
        if now.log_contexts is not None:
            posterior = batch.log_posterior[:, :-1].exp().to(dtype)
            each["context"] = -self.context_weight * (posterior * now.log_contexts).sum(-1)
        if now.states is not None and step.states is not None:
            each["state"] = self.state_weight * (now.states - step.states.to(dtype)).square().mean(-1)
        weights = batch.alive.to(dtype) / batch.share_alive.to(dtype)  # of steps, [B, T]
        return {name: (weights * values).mean() for name, values in each.items()}


def _require_norm(norm: float | None) -> None:
    require(norm is None or norm > 0, "max_gradient_norm", norm, "a positive number, or None")


def as_estimator(estimator: Estimator) -> Estimator:
    """Return an estimator as it is, if it is one."""
    proper = callable(getattr(estimator, "advantages", None)) and callable(getattr(estimator, "terms", None))
    proper = proper and not isinstance(estimator, type)
    require(proper, "estimator", estimator, "an Estimator: ActorCritic(), say")
    return estimator


def still_to_come(payoffs: Tensor) -> Tensor:
    """What is paid from each step on, `[B, T]`, given what the steps pay."""
    return payoffs.flip(1).cumsum(1).flip(1)


def standardised(values: Tensor, statistics: Batch | Statistics, taken: Tensor | None = None) -> Tensor:
    """Numbers `[B, T, D]` in units of their spread over all steps; those that do not vary become zero.

    Steps that were not taken, because an episode was over, are not looked at.
    """
    if taken is None or bool(taken.all()):
        sd, mean = statistics.spread(values, axes=2)
    else:
        sd, mean = statistics.spread(values[taken], axes=1)
    return (values - mean) / torch.where(sd > 1e-6, sd, torch.inf)
