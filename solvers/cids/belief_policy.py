"""A policy that reads the filter's belief: the filter runs inside it, once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cpomdp_ppl.actions import probes
from cpomdp_ppl.agent import Agent
from cpomdp_ppl.errors import require_count
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.inference.knowledge import Knowledge
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.rng import isolated
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.state import leaves
from solvers.cids.critic import UNITS_RATE, Critic
from solvers.cids.policy import ActionLayer, as_decision

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Decision, History
    from solvers.cids.batch import Batch
    from solvers.cids.experts import Sight

MOST_STATES = 128
"""Of no more states than this, the policy reads the probability of each."""
ODDS = 8.0
"""Log-odds beyond this are as good as certain."""
IDENTITY = 16
"""How many numbers tell a context from the others."""
SMALLEST_SPREAD = 1e-6
"""Numbers of the state that vary less have no unit of their own."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the networks read of a belief, with any leading axes `[…]`.

    Of K contexts they read what is believed under each: of all of them, or of the one that is certain.
    """

    odds: Tensor  # log-odds of the contexts, […, C]
    posterior: Tensor  # P(c | h), […, C]
    contexts: Tensor  # which K contexts are read, […, K]
    by_context: Tensor  # what is believed under each of them, […, K, F]
    overall: Tensor  # what is believed over all, […, G]

    def rows(self, index: Tensor) -> Inputs:
        """Those of some episodes."""
        return Inputs(*(getattr(self, name)[index] for name in Inputs.__annotations__))

    @staticmethod
    def stack(series: list[Inputs]) -> Inputs:
        """Inputs `[B, T, …]` from those of T times, `[B, …]`."""
        return Inputs(*(torch.stack([getattr(i, n) for i in series], 1) for n in Inputs.__annotations__))

    @staticmethod
    def joined(parts: list[Inputs]) -> Inputs:
        """Those of several batches."""
        return Inputs(*(torch.cat([getattr(i, n) for i in parts]) for n in Inputs.__annotations__))


class BeliefEncoding(nn.Module):
    """A belief as numbers of about the same size.

    Under every context: its log-odds and probability, the mean and spread of every number of the state (or
    the probabilities of the states, where they are few), and the expected reward of every action (of
    continuous ones, of the `probes`). Over all contexts: the same, weighted by the posterior, the entropy of
    the posterior, and the time.
    """

    centre: Tensor
    scale: Tensor
    reward_scale: Tensor
    probes: Tensor | None

    def __init__(self, model: CPOMDP, backend: Backend) -> None:
        super().__init__()
        with inference_scope(model, 0):
            probabilities = Knowledge.first(backend, model, model.prior()[None]).probabilities
        few = probabilities is not None and probabilities.shape[2] <= MOST_STATES
        self.num_states = probabilities.shape[2] if few and probabilities is not None else None
        self.horizon = model.horizon
        episodes = simulate(model, RandomPolicy(model.actions), 256, contexts="balanced", seed=0)
        flat = _reached(episodes)
        spread = flat.std(0, correction=0)
        dtype = torch.get_default_dtype()
        self.register_buffer("centre", flat.mean(0).to(dtype))
        self.register_buffer("scale", torch.where(spread > SMALLEST_SPREAD, spread, 1.0).to(dtype))
        assert episodes.rewards is not None
        sizes = episodes.rewards[episodes.rewards != 0].abs().to(dtype)
        self.register_buffer("reward_scale", sizes.median() if len(sizes) else torch.ones((), dtype=dtype))
        tried = probes(model)
        self.register_buffer("probes", None if model.box is None else tried, persistent=False)
        believed = (self.num_states or 2 * len(self.centre)) + len(tried)
        self.by_context = self.overall = 2 + believed

    def forward(self, known: Knowledge | Sight) -> Inputs:
        """Read what is known about B episodes."""
        dtype = self.centre.dtype
        log_posterior = known.log_posterior  # [B, C]
        p = log_posterior.exp()
        others = torch.log1p(-p.clamp(max=1 - 1e-15))
        odds = ((log_posterior - others).clamp(-ODDS, ODDS) / (ODDS / 2)).to(dtype)
        posterior = p.to(dtype)
        contexts = known.contexts
        told = [each.gather(1, contexts)[..., None] for each in (odds, posterior)]
        believed = torch.cat([self._states(known), self._rewards(known)], -1)  # [B, K, …]
        overall = (told[1].mT @ believed).squeeze(1)
        entropy = -torch.special.xlogy(posterior, posterior).sum(1, keepdim=True)
        time = (known.time / self.horizon).to(dtype)[:, None]
        overall = torch.cat([entropy, time, overall], -1)
        return Inputs(odds, posterior, contexts, torch.cat([*told, believed], -1), overall)

    def follow(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Move the units of states towards those of a batch.

        They begin as those of random actions; a good policy may stay in a small part of where these lead.

        Returns:
            What is believed under a context reads from now on as `factor` times what it read plus `offset`,
            `[F]` each.
        """
        factor, offset = self.scale.new_ones(self.by_context), self.scale.new_zeros(self.by_context)
        if self.num_states is None:
            spread, mean = batch.statistics.spread(_reached(batch.episodes), axes=1)
            moves, D = spread > SMALLEST_SPREAD, len(mean)
            centre = self.centre.lerp(mean.to(self.centre), UNITS_RATE)
            scale = torch.where(moves, self.scale.lerp(spread.to(self.scale), UNITS_RATE), self.scale)
            factor[2 : 2 + 2 * D] = (self.scale / scale).repeat(2)
            offset[2 : 2 + D] = (self.centre - centre) / scale
            self.centre.copy_(centre)
            self.scale.copy_(scale)
        return factor, offset

    def _states(self, known: Knowledge | Sight) -> Tensor:
        """`[B, K, …]`."""
        if self.num_states is not None:
            assert known.probabilities is not None
            return known.probabilities.movedim(1, 0).to(self.centre.dtype)
        mean, variance = (
            torch.cat([leaf.reshape(*leaf.shape[:2], -1) for _, leaf in leaves(moment)], 2)
            .movedim(1, 0)
            .to(self.centre.dtype)
            for moment in known.moments
        )  # [B, K, D]
        sd = variance.clamp(min=0).sqrt()
        return torch.cat([(mean - self.centre) / self.scale, sd / self.scale], -1)

    def _rewards(self, known: Knowledge | Sight) -> Tensor:
        if self.probes is None:
            rewards = known.expected_rewards
        else:
            actions = self.probes[:, None].expand(-1, len(known.time), -1)  # [2 D + 1, B, D]
            rewards = torch.stack([known.expected_reward(action) for action in actions], -1)
        return (rewards.to(self.centre.dtype) / self.reward_scale).asinh()


def _reached(episodes: Episodes) -> Tensor:
    """All states that episodes got to, as numbers, float64 `[n, D]`."""
    reached = torch.arange(episodes.horizon + 1, device=episodes.device) <= episodes.lengths[:, None]
    parts = [leaf[reached] for _, leaf in leaves(episodes.states)]
    return torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in parts], 1)


class BeliefNet(nn.Module):
    """A set encoder: contexts are read one by one by the same layer, and pooled by their probabilities."""

    def __init__(self, encoding: BeliefEncoding, num_contexts: int, hidden: int) -> None:
        super().__init__()
        self.identity = nn.Parameter(torch.randn(num_contexts, IDENTITY) / 2)
        pooled = (hidden + 1) // 2
        self.each = nn.Linear(encoding.by_context + IDENTITY, pooled)
        self.all = nn.Linear(pooled + 2 * num_contexts + encoding.overall, hidden)
        self.last = nn.Linear(hidden, hidden)
        for layer in (self.each, self.all, self.last):
            nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))
            nn.init.zeros_(layer.bias)

    def forward(self, inputs: Inputs) -> Tensor:
        """`[…, H]`."""
        of, at = inputs.by_context, self.each.weight.shape[1] - IDENTITY
        # One product for what is read, one for who it is: the same as of both, side by side.
        who = self.identity @ self.each.weight[:, at:].T  # [C, H]
        if of.shape[-2] < len(who):
            who = who[inputs.contexts]  # […, K, H]
        each = (nn.functional.linear(of, self.each.weight[:, :at], self.each.bias) + who).relu()
        pooled = (of[..., 1:2] * each).sum(-2)  # […, H], by probabilities; `bmm` is slower
        x = torch.cat([pooled, inputs.odds, inputs.posterior, inputs.overall], -1)
        features: Tensor = self.last(self.all(x).relu()).relu()
        return features

    @torch.no_grad()
    def reread(self, factor: Tensor, offset: Tensor) -> None:
        """Keep all outputs as they are, though what is believed comes in other units, `[F]` each."""
        for layer, first in ((self.each, 0), (self.all, self.all.weight.shape[1] - len(factor))):
            weight = layer.weight[:, first : first + len(factor)]
            weight.div_(factor)
            layer.bias.sub_(weight @ offset)


class BeliefPolicy(nn.Module):
    """A small network over the filter's belief, with a second one for a critic.

    The posterior is among its inputs: it serves every prior.

    Args:
        model: The CPOMDP that it acts in.
        hidden: Number of hidden units H.
        likelihood: The filter: a backend, its name, or None for the one that suits the model.
        distribution: How it decides where actions are continuous: by a "squashed" Gaussian, which is the
            default, or a "beta" distribution.
        seed: Seed of the initial weights.

    Examples:
        >>> from cpomdp_ppl import simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> policy = BeliefPolicy(model, seed=0)
        >>> simulate(model, policy, 10, seed=0).actions.shape
        torch.Size([10, 20])
    """

    amortised = True

    def __init__(
        self,
        model: CPOMDP,
        hidden: int = 64,
        *,
        likelihood: str | Backend | None = None,
        distribution: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.hidden = require_count("hidden", hidden)
        self.backend = backend_for(model, likelihood)
        self.encoding = BeliefEncoding(model, self.backend)
        with isolated(seed):
            self.actor = BeliefNet(self.encoding, model.num_contexts, hidden)
            self.judge = BeliefNet(self.encoding, model.num_contexts, hidden)
            self.logits = ActionLayer(model, hidden, distribution)
            self.critic = Critic(hidden)
        self.to(model.device)
        self._model = (model,)  # out of sight of `parameters`: the model is not the policy's to learn

    @property
    def model(self) -> CPOMDP:
        """The CPOMDP that it acts in."""
        return self._model[0]

    def start(self, prior: Tensor) -> Knowledge:
        """Nothing known but the prior."""
        with inference_scope(self.model, self._seed()):
            return Knowledge.first(self.backend, self.model, prior, persistent=True)

    def act(self, history: History, memory: Knowledge) -> tuple[Decision, Knowledge]:
        """Take in the latest percept, and choose."""
        with inference_scope(self.model, self._seed()):
            known = memory
            if history.time or self.model.initial_observation:
                known = memory.after(history.latest)
            inputs = self.encoding(known)
        return as_decision(self.decide(inputs)), known

    def decide(self, inputs: Inputs) -> Any:
        """Logits of all actions, `[…, A]`, or a distribution `[…]` over a box of them."""
        return self.logits.leaning(self.actor(inputs))

    def values(self, inputs: Inputs) -> Tensor:
        """Payoffs still to come, in the critic's eyes, `[…]`."""
        return self.critic.values(self.judge(inputs))

    def follow(self, batch: Batch) -> None:
        """Read states in units of those that the policy gets to; what it decides stays as it is."""
        factor, offset = self.encoding.follow(batch)
        for network in (self.actor, self.judge):
            network.reread(factor, offset)

    def agent(self, **settings: Any) -> Agent:
        """This policy at work, one episode at a time; see `Agent` for the settings."""
        return Agent(self.model, self, **{"likelihood": self.backend, **settings})

    def _seed(self) -> int:
        draws = vars(type(self.backend)).get("draws", True)
        return int(torch.randint(2**31, ())) if draws else 0
