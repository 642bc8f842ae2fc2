"""RDPG: recurrent deterministic policy gradient, on any CPOMDP.

Heess, Hunt, Lillicrap and Silver, "Memory-based control with recurrent neural networks" (2015). An actor μ
and a critic Q, each with its recurrent network over the history, learn from replayed episodes,

    Q(h_t, a_t) → r_t + γ Q'(h_{t+1}, μ'(h_{t+1}))    and    ∇_θ Σ_t Q(h_t, μ_θ(h_t)) = Σ_t ∇_a Q ∇_θ μ_θ,

back through time, with target networks Q' and μ' that follow slowly, and nothing to come after the end of an
episode. Continuous actions are as in the paper: μ is the tanh of what the actor says, from one end of the box
to the other, and explores with Gaussian noise. Of finitely many, an action is a one-hot vector. Once learned,
and in targets, μ is the action with the largest logit. While it is improved, it is a straight-through
Gumbel-softmax sample, so that the gradient of Q by the action has a way into the logits.
"""

from __future__ import annotations

import copy
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyro.distributions as dist
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.functional import gumbel_softmax, one_hot

from baselines.learned import Learned, LearningInterrupted
from cpomdp_ppl.encoding import Encoding
from cpomdp_ppl.errors import require, require_count, require_model, require_number
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.prior import weighted_strata
from cpomdp_ppl.progress import bar
from cpomdp_ppl.rng import isolated
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from cpomdp_ppl.actions import Box
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History, Policy
    from cpomdp_ppl.progress import Progress

LOGIT_PENALTY = 1e-3  # on squared logits: an actor that is sure of itself explores nothing
MAX_GRADIENT_NORM = 1.0
NOISE = 0.2  # standard deviation of explored continuous actions, where a box reaches from -1 to 1

Memory: TypeAlias = tuple[Tensor, Tensor]
"""An LSTM's hidden and cell state, both `[B, H]`."""


@dataclass(frozen=True)
class Settings:
    """How RDPG learns. One set of defaults serves all models, as rewards are scaled before they are learned.

    Attributes:
        hidden: How many hidden units H either network has.
        random_episodes: How many episodes are played at random first. The standard deviation of their returns
            is the unit in which rewards are learned. They count, and are learned from.
        round_size: How many episodes are played side by side between gradient steps.
        updates: How many gradient steps follow.
        batch_size: How many episodes of the replay buffer go into a step.
        capacity: How many episodes the replay buffer holds before the oldest have to go.
        discount: γ of the targets. Left out, that of the model; what is evaluated is its return in any case.
        actor_rate: Learning rate of the actor, for Adam.
        critic_rate: Learning rate of the critic, for Adam.
        target_rate: How much of the way the target networks go in a step.
        temperature: Temperature of the Gumbel-softmax whose gradient the actor learns by.
        exploration: How often chance decides when learning starts; otherwise actions are drawn from the
            softmax of the actor's logits, as Gumbel-softmax samples are; continuous ones are the actor's, and
            noise.
        last_exploration: The same from half of the episodes on; until then it falls in a straight line.
        evaluate_every: How many episodes apart the greedy policy is evaluated.
        evaluation_episodes: Number of episodes of an evaluation. They are always the same, and do not count.
    """

    hidden: int = 64
    random_episodes: int = 500
    round_size: int = 25
    updates: int = 20
    batch_size: int = 64
    capacity: int = 10_000
    discount: float | None = None
    actor_rate: float = 5e-4
    critic_rate: float = 1e-3
    target_rate: float = 0.02
    temperature: float = 1.0
    exploration: float = 0.5
    last_exploration: float = 0.05
    evaluate_every: int = 500
    evaluation_episodes: int = 1000

    def __post_init__(self) -> None:
        counts = ("hidden", "random_episodes", "round_size", "updates", "batch_size", "capacity")
        for name in (*counts, "evaluate_every", "evaluation_episodes"):
            object.__setattr__(self, name, require_count(name, getattr(self, name)))
        for name in ("actor_rate", "critic_rate", "temperature"):
            require_number(name, getattr(self, name), "a positive number", above=0.0)
        for name in ("discount", "target_rate", "exploration", "last_exploration"):
            value = getattr(self, name)
            if name == "discount" and value is None:
                continue
            require_number(name, value, "a number from 0 to 1")
            require(value <= 1, name, value, "a number from 0 to 1")


def fit(
    model: CPOMDP,
    num_episodes: int = 10_000,
    *,
    settings: Settings | None = None,
    seed: int | None = 0,
    progress: Progress = True,
) -> Learned:
    """Learn a policy by recurrent deterministic policy gradient.

    In turn, a round of episodes is played with exploration, and actor and critic take gradient steps on
    episodes out of the replay buffer. Every so often the greedy policy is evaluated, and the best of these is
    returned. That favours the baseline, as it should be; and episodes of evaluations do not count, which does
    so as well.

    The policy is learned for the model's prior over contexts, and ignores any other it is started with.

    Args:
        model: The CPOMDP.
        num_episodes: How many episodes to learn from.
        settings: How it learns; `Settings()` if left out.
        seed: The same seed gives the same policy; None takes fresh entropy.
        progress: Whether to show a progress bar, by episodes; or a function that is given a line of text now
            and then, about how far it has got and how long it will take.

    Raises:
        RuntimeError: If a gradient is not finite.
        LearningInterrupted: On Ctrl-C; it carries the best policy so far.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> learned = fit(LineGrid(), 100, settings=Settings(random_episodes=50, updates=2), progress=False)
        >>> simulate(LineGrid(), learned.policy, 20, seed=0).actions.shape
        torch.Size([20, 10])
    """
    require_model(model)
    total = require_count("num_episodes", num_episodes)
    chosen = Settings() if settings is None else settings
    require(isinstance(chosen, Settings), "settings", settings, "`rdpg.Settings`, or None")
    began = time.perf_counter()
    with isolated(seed), torch.enable_grad():
        fitting = Fitting(model, chosen, total)
        finished = False
        with bar(progress, total, "RDPG", "episodes") as shown, suppress(KeyboardInterrupt):
            while fitting.played < total:
                played = fitting.iterate()
                shown.set_postfix_str(f"best return {fitting.best:.2f}", refresh=False)
                shown.update(played)
            finished = True
        fitting.evaluate()
    learned = Learned(fitting.best_policy, fitting.history(), time.perf_counter() - began, finished)
    if not finished:
        raise LearningInterrupted(learned)
    return learned


class Recurrent(nn.Module):
    """A few numbers at every step of a history: an LSTM, and two layers on top.

    Args:
        num_features: Number F of features of a step.
        hidden: Number H of hidden units.
        size: How many numbers A: one for each action, or for each axis of continuous ones.
        extra: How many numbers the layers on top read beside what the LSTM says.
    """

    def __init__(self, num_features: int, hidden: int, size: int, extra: int = 0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_features, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden + extra, hidden), nn.ReLU(), nn.Linear(hidden, size))

    def forward(self, features: Tensor) -> Tensor:
        """Numbers for episodes from their start to their end: `[B, T, F]` to `[B, T, A]`."""
        numbers: Tensor = self.head(self.lstm(features)[0])
        return numbers

    def step(self, features: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """Numbers for one step, `[B, F]` to `[B, A]`, and what is remembered of it."""
        memory = torch.lstm_cell(features, memory, *self.lstm.all_weights[0])
        return self.head(memory[0]), memory


class ContinuousCritic(Recurrent):
    """`Q(h, a)` of continuous actions: the layers on top read the action beside the history."""

    def __init__(self, num_features: int, hidden: int, action_size: int) -> None:
        super().__init__(num_features, hidden, 1, action_size)

    def forward(self, features: Tensor) -> Tensor:
        """What is remembered of episodes, which values are read off: `[B, T, F]` to `[B, T, H]`."""
        remembered: Tensor = self.lstm(features)[0]
        return remembered

    def value(self, remembered: Tensor, action: Tensor) -> Tensor:
        """Values `[B, T]` of actions `[B, T, D]` in units."""
        value: Tensor = self.head(torch.cat([remembered, action], -1))[..., 0]
        return value


class RecurrentPolicy(nn.Module):
    """The deterministic policy μ: the action with the largest logit in every step, or the tanh in its box."""

    def __init__(self, encoding: Encoding, actor: Recurrent) -> None:
        super().__init__()
        self.encoding = encoding
        self.actor = actor

    def start(self, prior: Tensor) -> Memory:
        """Nothing remembered; the prior is ignored."""
        weight = self.actor.lstm.all_weights[0][0]
        zeros = weight.new_zeros(prior.shape[0], self.actor.lstm.hidden_size)
        return zeros, zeros

    def logits(self, history: History, memory: Memory) -> tuple[Tensor, Memory]:
        """Read the latest percept: logits `[B, A]` (before the tanh `[B, D]`), and the new memory."""
        return self.actor.step(self.encoding.step(history.latest, history.time), memory)

    def act(self, history: History, memory: Memory) -> tuple[Decision, Memory]:
        """The action with the largest logit, `[B]`; a continuous one `[B, D]`."""
        logits, memory = self.logits(history, memory)
        box = self.encoding.box
        return logits.argmax(-1) if box is None else box.from_units(logits.tanh()), memory


@dataclass(frozen=True)
class Exploring:
    """The policy as it plays to learn: by the softmax of its logits, or with noise; by `chance`, uniform."""

    policy: RecurrentPolicy
    chance: float

    def start(self, prior: Tensor) -> Memory:
        """The memory of the policy."""
        return self.policy.start(prior)

    def act(self, history: History, memory: Memory) -> tuple[Decision, Memory]:
        """`(1 − ε) softmax(logits) + ε / A`; of continuous actions, a draw `[B, D]`."""
        logits, memory = self.policy.logits(history, memory)
        box = self.policy.encoding.box
        if box is not None:
            noisy = logits.tanh() + NOISE * torch.randn_like(logits)
            by_chance = torch.rand_like(logits[:, :1]) < self.chance
            units = torch.where(by_chance, 2 * torch.rand_like(logits) - 1, noisy)
            return box.from_units(units), memory
        mixture = (1 - self.chance) * logits.softmax(-1) + self.chance / logits.shape[-1]
        return dist.Categorical(probs=mixture), memory


class Replay:
    """The latest N episodes, in a ring of tensors."""

    def __init__(
        self, capacity: int, horizon: int, num_features: int, device: torch.device, box: Box | None = None
    ) -> None:
        shape, of_action = (capacity, horizon), () if box is None else (box.dim,)
        self.features = torch.zeros(*shape, num_features, device=device)
        dtype = torch.long if box is None else None
        self.actions = torch.zeros((*shape, *of_action), dtype=dtype, device=device)
        self.rewards = torch.zeros(shape, device=device)
        self.alive = torch.zeros(shape, dtype=torch.bool, device=device)
        self.added = 0

    def __len__(self) -> int:
        return min(self.added, len(self.rewards))

    def add(self, features: Tensor, actions: Tensor, rewards: Tensor, alive: Tensor) -> None:
        """Put in B episodes, in place of the oldest; `alive` is which steps belong to them, bool `[B, T]`."""
        N, B = len(self.rewards), len(rewards)
        latest = slice(max(0, B - N), B)  # of more than fit, the first would be overwritten at once
        slots = torch.arange(self.added, self.added + B, device=rewards.device)[latest] % N
        rings = (self.features, self.actions, self.rewards, self.alive)
        for ring, values in zip(rings, (features, actions, rewards, alive), strict=True):
            ring[slots] = values[latest].to(ring.dtype)
        self.added += B

    def sample(self, num_episodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features `[B, T, F]`, actions, rewards and `alive`, `[B, T]` each, drawn with replacement."""
        i = torch.randint(len(self), (num_episodes,), device=self.rewards.device)
        return self.features[i], self.actions[i], self.rewards[i], self.alive[i]


def straight_through(logits: Tensor, temperature: float) -> Tensor:
    """Actions drawn from the softmax of logits `[…, A]`, one-hot, with the gradient of a soft sample.

    The soft sample is `softmax((logits + Gumbel noise) / temperature)`, with its largest entry at the 1.
    """
    return gumbel_softmax(logits, tau=temperature, hard=True)


def td_targets(rewards: Tensor, following: Tensor, alive: Tensor, discount: float) -> Tensor:
    """`r_t + γ Q'(h_{t+1}, μ'(h_{t+1}))`, `[B, T]`, and in the last step, with nothing to come, `r_t`.

    `following` is `Q'(h_t, μ'(h_t))`, and `alive` says which steps belong to an episode, `[B, T]` each.
    """
    to_come = torch.where(alive, following, 0.0)[:, 1:]
    return rewards + discount * torch.cat([to_come, torch.zeros_like(following[:, :1])], 1)


class Learner:
    """Actor, critic, and the target networks that follow them.

    Of finitely many actions, the critic is `Q(h, a) = q(h) · a`. Any function of a one-hot action is linear
    in it, so that nothing is lost; and `∂Q/∂a`, which the actor follows, is the values of the actions
    themselves.

    Args:
        num_features: Number F of features of a step.
        num_actions: Number A of actions; of continuous ones, of axes D.
        settings: How it learns.
        device: Where.
        discount: γ of the targets.
        box: The box of continuous actions.
    """

    def __init__(
        self,
        num_features: int,
        num_actions: int,
        settings: Settings,
        device: torch.device,
        discount: float = 1.0,
        box: Box | None = None,
    ) -> None:
        self.settings, self.discount, self.box = settings, discount, box
        self.num_actions = num_actions
        self.actor = Recurrent(num_features, settings.hidden, num_actions).to(device)
        kind = Recurrent if box is None else ContinuousCritic
        self.critic = kind(num_features, settings.hidden, num_actions).to(device)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.actor_steps = torch.optim.Adam(self.actor.parameters(), lr=settings.actor_rate, fused=True)
        self.critic_steps = torch.optim.Adam(self.critic.parameters(), lr=settings.critic_rate, fused=True)

    def update(self, features: Tensor, actions: Tensor, rewards: Tensor, alive: Tensor) -> None:
        """A gradient step of the critic and one of the actor, through episodes from start to end.

        Takes features `[B, T, F]`, actions `[B, T, …]`, scaled rewards `[B, T]`, and which steps belong to
        the episodes, bool `[B, T]`: no others count.
        """
        share = alive / alive.sum()  # of each step in means over all of them
        read = self.critic(features)
        error = self.value(self.critic, read, self.vectors(actions)) - self.targets(features, rewards, alive)
        self._descend(self.critic_steps, self.critic, (share * error.square()).sum())

        logits = self.actor(features)  # [B, T, A]
        mu = straight_through(logits, self.settings.temperature) if self.box is None else logits.tanh()
        penalty = LOGIT_PENALTY * logits.square().mean(-1)
        # By what the critic read a step ago, which saves reading the episodes once more.
        value = self.value(self.critic, read.detach(), mu)
        self._descend(self.actor_steps, self.actor, (share * (penalty - value)).sum())

        self._follow(self.target_critic, self.critic)
        self._follow(self.target_actor, self.actor)

    @torch.no_grad()
    def targets(self, features: Tensor, rewards: Tensor, alive: Tensor) -> Tensor:
        """What the critic should say, by the target networks, `[B, T]`."""
        logits = self.target_actor(features)
        mu = self.vectors(logits.argmax(-1)) if self.box is None else logits.tanh()
        following = self.value(self.target_critic, self.target_critic(features), mu)
        return td_targets(rewards, following, alive, self.discount)

    def vectors(self, actions: Tensor) -> Tensor:
        """Actions `[…]` as one-hot vectors `[…, A]`, or continuous ones `[…, D]` in units."""
        if self.box is not None:
            return self.box.to_units(actions)
        return one_hot(actions, self.num_actions).to(torch.get_default_dtype())

    @staticmethod
    def value(critic: Recurrent, read: Tensor, action: Tensor) -> Tensor:
        """`Q(h, a)`, `[B, T]`, by what a critic has read of the episodes."""
        if isinstance(critic, ContinuousCritic):
            return critic.value(read, action)
        return (read * action).sum(-1)

    def _descend(self, steps: torch.optim.Optimizer, network: Recurrent, loss: Tensor) -> None:
        steps.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT_NORM, error_if_nonfinite=True)
        steps.step()

    @torch.no_grad()
    def _follow(self, target: Recurrent, network: Recurrent) -> None:
        for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
            slow.lerp_(fast, self.settings.target_rate)


class Fitting:
    """A fit at work: a learner, what it learns from, and the best policy it has had."""

    def __init__(self, model: CPOMDP, settings: Settings, num_episodes: int) -> None:
        self.model, self.settings, self.num_episodes = model, settings, num_episodes
        encoding, box = Encoding(model), model.box
        size = model.num_actions if box is None else box.dim
        discount = model.discount if settings.discount is None else settings.discount
        self.learner = Learner(encoding.size, size, settings, model.device, discount, box)
        capacity = min(settings.capacity, num_episodes)
        self.replay = Replay(capacity, model.horizon, encoding.size, model.device, box)
        self.policy = RecurrentPolicy(encoding, self.learner.actor)
        self.played = 0
        self.unit = math.nan  # in which rewards are learned, read off the first episodes
        self.evaluation_seed = _drawn_seed()
        self.returns: list[Tensor] = []  # since the last evaluation
        self.measured: list[tuple[int, float, float]] = []
        self.best = -math.inf
        self.best_policy = self._greedy()

    def iterate(self) -> int:
        """Play a round, take gradient steps, evaluate if it is time; returns the number of episodes."""
        episodes = self._explore() if self.played else self._begin()
        assert episodes.rewards is not None
        assert episodes.returns is not None
        features = self.policy.encoding.sequence(episodes)
        self.replay.add(features, episodes.actions, episodes.rewards / self.unit, episodes.alive)
        for _ in range(self.settings.updates):
            self.learner.update(*self.replay.sample(self.settings.batch_size))
        self.returns.append(episodes.returns)
        self.played += len(episodes)
        every = self.settings.evaluate_every
        if self.played // every > (self.played - len(episodes)) // every:
            self.evaluate()
        return len(episodes)

    def _begin(self) -> Episodes:
        episodes = self._play(RandomPolicy(self.model.actions), self.settings.random_episodes)
        assert episodes.returns is not None
        self.unit = float(episodes.returns.std(correction=0)) or 1.0
        return episodes

    def _explore(self) -> Episodes:
        first, last = self.settings.exploration, self.settings.last_exploration
        chance = first + (last - first) * min(1.0, 2 * self.played / self.num_episodes)
        return self._play(Exploring(self.policy, chance), self.settings.round_size)

    def _play(self, policy: Policy, num_episodes: int) -> Episodes:
        B = min(num_episodes, self.num_episodes - self.played)
        return simulate(self.model, policy, B, seed=_drawn_seed())

    def evaluate(self) -> None:
        """Play the greedy policy, unless nothing is new, and keep it if it is the best so far."""
        if not self.returns:
            return
        number, seed = self.settings.evaluation_episodes, self.evaluation_seed
        contexts, weights = weighted_strata(self.model.prior(), number, seed)
        episodes = simulate(self.model, self.policy, number, contexts=contexts, seed=seed)
        assert episodes.returns is not None
        greedy = float((weights * episodes.returns).sum())
        self.measured.append((self.played, float(torch.cat(self.returns).mean()), greedy))
        self.returns = []
        if greedy > self.best:
            self.best, self.best_policy = greedy, self._greedy()

    def _greedy(self) -> RecurrentPolicy:
        """The policy as it is now, which learns no more."""
        return copy.deepcopy(self.policy).requires_grad_(False)

    def history(self) -> xr.Dataset:
        """What was measured, by the number of episodes."""
        table = np.array(self.measured, dtype=float).reshape(-1, 3)
        variables = {"training_return": ("episodes", table[:, 1]), "greedy_return": ("episodes", table[:, 2])}
        return xr.Dataset(variables, {"episodes": table[:, 0].astype(int)})


def _drawn_seed() -> int:
    return int(torch.randint(2**31, ()))
