"""Recurrent policies: a network that reads the history as it comes, or whole episodes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.distributions.constraints import independent, integer_interval
from torch.nn.functional import embedding, one_hot

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.agent import Agent
from cpomdp_ppl.arrays import on_the_right
from cpomdp_ppl.errors import ModelError, rejected, require_count, require_model
from cpomdp_ppl.isolation import isolated
from cpomdp_ppl.policy import History, Percept, Policy
from cpomdp_ppl.signature import ObservationSite, signature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.policy import Decision

# Standard deviation of a number that was observed, as a network gets it. With 1, observations drown in the
# one-hot actions beside them, and the gradient as printed falls for "always one way" before it hears them.
SPREAD = 3.0
CALIBRATION = 256  # episodes of random actions whose observations set the scale of a network's inputs


@runtime_checkable
class SequencePolicy(Policy, Protocol):
    """A policy that can also read whole episodes at once, which is much faster than step by step."""

    def unroll(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        """What it would decide along episodes.

        Returns:
            Logits of all actions at times 0 … T - 1, `[B, T, A]`, and what they were computed from,
            `[B, T, H]`, for a critic to read.
        """
        ...


class Encoding(nn.Module):
    """What an agent learns in a step, as numbers for a network.

    The previous action (one-hot, with a class of its own before the first), the time, and for every
    observation site whether it was seen and its value: one-hot where the model's program says that it is
    one of a few integers, and standardised otherwise, by what random actions get to see.

    Args:
        model: Whose percepts.
        seed: Of the episodes that set the scale.

    Attributes:
        size: How many numbers F there are.
    """

    identity: Tensor

    def __init__(self, model: CPOMDP, seed: int = 0) -> None:
        super().__init__()
        require_model(model)
        self.num_actions = model.num_actions
        identity = torch.eye(self.num_actions + 1, device=model.device)
        self.register_buffer("identity", identity, persistent=False)
        self.horizon = model.horizon
        self.sites = dict(signature(model).observations)
        if not self.sites:
            raise ModelError(type(model).__name__, ["observation: has no sample site: nothing is seen"])
        episodes = simulate(model, RandomPolicy(model.num_actions), CALIBRATION, seed=seed)
        for i, name in enumerate(self.sites):
            shift, scale = self._units(episodes, name)
            self.register_buffer(f"shift_{i}", shift)
            self.register_buffer(f"scale_{i}", scale)
        self.size = self.sequence(episodes).shape[-1]

    def _units(self, episodes: Episodes, name: str) -> tuple[Tensor, Tensor]:
        """Mean, and standard deviation over `SPREAD`, of a site's numbers where they were seen, `[width]`."""
        site, dtype = self.sites[name], torch.get_default_dtype()
        if _is_index(site):
            return torch.zeros((), device=episodes.device), torch.ones((), device=episodes.device)
        values, flags = episodes.observations[name].flatten(0, 1), episodes.observed[name].flatten(0, 1)
        if episodes.initial_observations is not None and episodes.initially_observed is not None:
            values = torch.cat([values, episodes.initial_observations[name]])
            flags = torch.cat([flags, episodes.initially_observed[name]])
        x = _flat(values, 1).double()  # [n, width]
        seen = _flat(on_the_right(flags, values).expand_as(values), 1).double()
        n = seen.sum(0).clamp(min=1)
        mean = (x * seen).sum(0) / n
        sd = ((x - mean).square() * seen).sum(0).div(n).sqrt()
        return mean.to(dtype), torch.where(sd > 0, sd / SPREAD, 1.0).to(dtype)

    def step(self, percept: Percept, time: int) -> Tensor:
        """Of one percept, `[B, F]`."""
        flags = next(iter(percept.observed.values()))
        B = flags.shape[0]
        action = percept.action if percept.action is not None else flags.new_full((B,), -1, dtype=torch.long)
        at = torch.full((B,), time / self.horizon, device=flags.device)
        return self._numbers(action, at, percept.observations, percept.observed)

    def sequence(self, episodes: Episodes) -> Tensor:
        """Of everything that is known at times 0 … T - 1, `[B, T, F]`."""
        return self._numbers(*self._sequence(episodes))

    def _sequence(self, episodes: Episodes) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Previous actions, times, observations and flags, one step later than episodes have them."""
        B, T = episodes.actions.shape
        before = episodes.actions.new_full((B, 1), -1)
        actions = torch.cat([before, episodes.actions[:, :-1]], 1)
        time = (torch.arange(T, device=actions.device) / self.horizon).expand(B, T)

        def later(values: Mapping[str, Tensor], first: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
            return {
                name: torch.cat(
                    [
                        torch.zeros_like(value[:, :1]) if first is None else first[name][:, None],
                        value[:, :-1],
                    ],
                    1,
                )
                for name, value in values.items()
            }

        observations = later(episodes.observations, episodes.initial_observations)
        return actions, time, observations, later(episodes.observed, episodes.initially_observed)

    def _numbers(
        self, action: Tensor, time: Tensor, observations: Mapping[str, Tensor], observed: Mapping[str, Tensor]
    ) -> Tensor:
        axes = action.dim()
        # One-hot by looking up rows of the identity: `one_hot` goes through integers and is slower.
        parts = [embedding(action + 1, self.identity), time[..., None]]
        for i, (name, site) in enumerate(self.sites.items()):
            flags, values = observed[name], observations[name]
            if _is_index(site):
                base = _base(site.support)
                inside = values.long() - base.lower_bound
                values = one_hot(inside.clamp(min=0), base.upper_bound - base.lower_bound + 1)
            seen = _flat(on_the_right(flags, values).expand_as(values), axes)
            numbers = (_flat(values, axes) - getattr(self, f"shift_{i}")) / getattr(self, f"scale_{i}")
            parts += [_flat(flags, axes), numbers * seen]  # zero where nothing was seen
        return torch.cat([part.to(torch.get_default_dtype()) for part in parts], -1)


def _flat(values: Tensor, axes: int) -> Tensor:
    return values.flatten(axes) if values.dim() > axes else values[..., None]


def _base(support: Any) -> Any:
    while isinstance(support, independent):
        support = support.base_constraint
    return support


def _is_index(site: ObservationSite) -> bool:
    """Whether values are one of a few integers, of more than two: bits are numbers already."""
    base = _base(site.support)
    return isinstance(base, integer_interval) and 2 <= base.upper_bound - base.lower_bound < 64


class LSTMPolicy(nn.Module):
    """An LSTM over what the agent has done and seen, with a linear layer for the actions' logits.

    Args:
        model: Whose actions and observations.
        hidden: How many hidden units H.
        seed: Of the first weights.

    Example:
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> policy = LSTMPolicy(model, hidden=32, seed=0)
        >>> simulate(model, policy, 10, seed=0).actions.shape
        torch.Size([10, 20])
    """

    def __init__(self, model: CPOMDP, hidden: int = 64, *, seed: int = 0) -> None:
        super().__init__()
        self.hidden = require_count("hidden", hidden)
        self.encoding = Encoding(model)
        with isolated(seed):
            self.lstm = nn.LSTM(self.encoding.size, hidden, batch_first=True)
            self.logits = nn.Linear(hidden, model.num_actions)
            nn.init.orthogonal_(self.logits.weight, gain=0.1)  # at first, all actions are about as likely
            nn.init.zeros_(self.logits.bias)
        self.to(model.device)
        self._model = (model,)  # out of sight of `parameters`: the model is not the policy's to learn

    def start(self, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing remembered: `h_0 = c_0 = 0`."""
        zeros = self.logits.weight.new_zeros(prior.shape[0], self.hidden)
        return zeros, zeros

    def act(self, history: History, memory: tuple[Tensor, Tensor]) -> tuple[Decision, tuple[Tensor, Tensor]]:
        """Read the latest percept, and choose."""
        percept = self.encoding.step(history.latest, history.time)
        memory = torch.lstm_cell(percept, memory, *self.lstm.all_weights[0])
        return dist.Categorical(logits=self.logits(memory[0])), memory

    def unroll(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        """Logits `[B, T, A]` and hidden states `[B, T, H]` along episodes."""
        hidden, _ = self.lstm(self.encoding.sequence(episodes))
        hidden = hidden.contiguous()  # once, rather than in every layer on top
        return self.logits(hidden), hidden

    def agent(self, **settings: Any) -> Agent:
        """This policy at work, one episode at a time; see `Agent` for the settings."""
        return Agent(self._model[0], self, **settings)


@dataclass(frozen=True)
class Mixed:
    """A policy that does something random now and then, whatever it knows.

    Args:
        policy: Who decides otherwise; its decisions must be distributions.
        chance: How often it is chance that decides, with all actions equally likely.
    """

    policy: Policy
    chance: float

    def start(self, prior: Tensor) -> Any:
        """The policy's own memory."""
        return self.policy.start(prior)

    def act(self, history: History, memory: Any) -> tuple[Decision, Any]:
        """`(1 − ε) π(· | h_t) + ε / A`."""
        decision, memory = self.policy.act(history, memory)
        if not self.chance:
            return decision, memory
        return dist.Categorical(logits=self.mixed(_logits(decision))), memory

    def mixed(self, logits: Tensor) -> Tensor:
        """The logarithm of the mixture's probabilities, for logits `[…, A]` of the policy.

        Actions that the policy rules out, with a logit of -inf, stay ruled out.
        """
        if not self.chance:
            return logits
        allowed = (logits > -torch.inf).to(logits.dtype)
        uniform = allowed / allowed.sum(-1, keepdim=True)
        mixture = (1 - self.chance) * logits.softmax(-1) + self.chance * uniform
        return mixture.clamp(min=torch.finfo(logits.dtype).tiny).log()


def unroll(policy: Policy, episodes: Episodes, prior: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a policy would decide along episodes, with gradients.

    Args:
        policy: Any policy whose decisions are distributions.
        episodes: What was done and seen.
        prior: What it believed beforehand, `[B, C]`.

    Returns:
        Logits `[B, T, A]`, and features `[B, T, H]` for a critic if the policy has any.

    Raises:
        ValueError: If the policy returns actions and not their probabilities.
    """
    if isinstance(policy, Mixed):
        logits, features = unroll(policy.policy, episodes, prior)
        return policy.mixed(logits), features
    if isinstance(policy, SequencePolicy):
        return policy.unroll(episodes)
    T = episodes.horizon
    history = History((_initial_percept(episodes),))
    memory = policy.start(prior)
    series = []
    for t in range(T):
        decision, memory = policy.act(history, memory)
        series.append(_logits(decision))
        history = history.extended(
            Percept(
                episodes.actions[:, t],
                {site: value[:, t] for site, value in episodes.observations.items()},
                {site: flags[:, t] for site, flags in episodes.observed.items()},
            )
        )
    return torch.stack(series, 1), None


def _logits(decision: Decision) -> Tensor:
    if not isinstance(decision, Categorical):
        raise rejected("policy", type(decision).__name__, "a Categorical over actions, to learn from")
    return decision.logits


def _initial_percept(episodes: Episodes) -> Percept:
    values, flags = episodes.initial_observations, episodes.initially_observed
    if values is None or flags is None:
        values = {site: torch.zeros_like(value[:, 0]) for site, value in episodes.observations.items()}
        flags = {site: torch.zeros_like(seen[:, 0]) for site, seen in episodes.observed.items()}
    return Percept(None, values, flags)
