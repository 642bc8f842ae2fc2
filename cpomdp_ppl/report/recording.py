"""Episodes played to be looked at: what happened, what was believed, and why the agent did what it did."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.context import entropy
from cpomdp_ppl.errors import require, require_count, require_model
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.inference.discrete import DiscreteBelief
from cpomdp_ppl.inference.filtering import log_normalised
from cpomdp_ppl.inference.persistence import Persistent
from cpomdp_ppl.inference.scan import scan
from cpomdp_ppl.policy import as_policy
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.report.lookahead import expected_information
from cpomdp_ppl.report.rounding import packed, significant
from cpomdp_ppl.rng import RandomStream, fresh_seed
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.evaluation import PolicyLike
    from cpomdp_ppl.inference.backend import Backend, Recursion
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History, Policy

MOST_NUMBERS = 400_000
"""In all clouds together; of larger recordings fewer particles are kept."""

MOST_STATES = 64
"""Finite states that are shown one by one; more of them are shown as numbers on a line."""

MOST_COMPONENTS = 6
"""Of a state with more than two numbers, each of which is shown on its own."""

MOST_SEEN = 24
"""Numbers that are shown of what was seen at a site."""

FREQUENCIES = 1000
"""Draws whose frequencies stand for the probabilities of finite states, where a filter does not tell them."""


@dataclass(frozen=True)
class Part:
    """A part of the state that can be drawn: a number, a point on a plane, or one of finitely many states.

    Attributes:
        name: `state`; or `position`, `pose.heading` and so on; with an index for one number out of many.
        kind: `"line"`, `"plane"` or `"finite"`.
        true: Where the agent is, `[B, T + 1, D]`; D is 2 on a plane, else 1.
        mean: Where the filter has it under every context, `[B, T + 1, C, D]`.
        deviation: How sure of that it is, `[B, T + 1, C, D]`.
        cloud: Draws from the filter under every context, `[B, T + 1, C, M, D]`; None for finite states.
        probabilities: Of finite states, under every context, `[B, T + 1, C, states]`; else None.
        site: The observation site whose values can be set beside this part, if that is beyond doubt.
    """

    name: str
    kind: str
    true: Tensor
    mean: Tensor
    deviation: Tensor
    cloud: Tensor | None
    probabilities: Tensor | None
    site: str | None = None

    def first(self, number: int) -> Part:
        """The same of the first so many episodes."""
        return replace(
            self,
            true=self.true[:number],
            mean=self.mean[:number],
            deviation=self.deviation[:number],
            cloud=None if self.cloud is None else self.cloud[:number],
            probabilities=None if self.probabilities is None else self.probabilities[:number],
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, to be written as JSON; the cloud is packed into a string."""
        return {
            "name": self.name,
            "kind": self.kind,
            "site": self.site,
            "true": significant(self.true),
            "mean": significant(self.mean),
            "deviation": significant(self.deviation, 3),
            "cloud": None if self.cloud is None else packed(self.cloud),
            "probabilities": None if self.probabilities is None else significant(self.probabilities, 3),
        }


@dataclass(frozen=True)
class Recording:
    """B episodes of T steps under a policy, with everything that a viewer may want to know about them.

    Attributes:
        model: Name of the model.
        context_names: Of the C contexts.
        action_names: Of the A actions.
        likelihood: Name of the backend behind beliefs.
        episodes: What happened, contexts and states known.
        posterior: `P(c | h_t)`, float64 `[B, T + 1, C]`.
        action_probabilities: `π(a | h_t)`, `[B, T, A]`; NaN where the policy gave an action, not a
            distribution.
        expected_reward: `E[r_C(s_t, a) | h_t]` of every action, contexts summed out, `[B, T, A]`.
        expected_information: How much every action is expected to tell about the context in this step alone,
            in bits, `[B, T, A]`: an estimate.
        parts: Of the state.
    """

    model: str
    context_names: tuple[str, ...]
    action_names: tuple[str, ...]
    likelihood: str
    episodes: Episodes
    posterior: Tensor
    action_probabilities: Tensor
    expected_reward: Tensor
    expected_information: Tensor
    parts: tuple[Part, ...]

    def first(self, number: int) -> Recording:
        """The first so many of its episodes."""
        return replace(
            self,
            episodes=self.episodes[:number],
            posterior=self.posterior[:number],
            action_probabilities=self.action_probabilities[:number],
            expected_reward=self.expected_reward[:number],
            expected_information=self.expected_information[:number],
            parts=tuple(part.first(number) for part in self.parts),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings, to be written as JSON; None for what is not known."""
        episodes = self.episodes
        assert episodes.contexts is not None
        assert episodes.rewards is not None
        return {
            "model": self.model,
            "contexts": list(self.context_names),
            "actions": list(self.action_names),
            "likelihood": self.likelihood,
            "horizon": episodes.horizon,
            "true_context": episodes.contexts.tolist(),
            "action": episodes.actions.tolist(),
            "reward": significant(episodes.rewards),
            "seen": _seen(episodes),
            "posterior": significant(self.posterior),
            "entropy": significant(entropy(self.posterior, "bits")),
            "action_probabilities": significant(self.action_probabilities),
            "expected_reward": significant(self.expected_reward),
            "expected_information": significant(self.expected_information, 3),
            "parts": [part.as_dict() for part in self.parts],
        }


def record(
    model: CPOMDP,
    policy: PolicyLike,
    *,
    num_episodes: int = 12,
    likelihood: str | Backend | None = None,
    num_particles: int = 200,
    num_outcomes: int = 32,
    prior: Sequence[float] | Tensor | None = None,
    seed: int | None = 0,
    progress: bool = False,
) -> Recording:
    """Play episodes and follow them with a filter, noting everything that explains what the agent does.

    Args:
        model: The CPOMDP.
        policy: Who acts.
        num_episodes: How many episodes B, contexts that the prior holds possible equally often.
        likelihood: The filter behind beliefs: a backend or its name; left out, the `default_backend` for the
            model.
        num_particles: How many draws M from the belief under each context to keep, at most.
        num_outcomes: How many outcomes of each action are tried to see what it would tell.
        prior: Over contexts, `[C]`; the model's if left out. The policy and the filter both start from it.
        seed: Of everything random; None takes fresh entropy.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: On arguments that make no sense.
        UnsupportedModelError: If the backend cannot serve the model.

    Example:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LightDark
        >>> recording = record(LightDark(), RandomPolicy(3), num_episodes=2)
        >>> recording.posterior.shape, recording.parts[0].cloud.shape
        (torch.Size([2, 21, 2]), torch.Size([2, 21, 2, 200, 1]))
    """
    require_model(model)
    B = require_count("num_episodes", num_episodes)
    num_particles = require_count("num_particles", num_particles)
    num_outcomes = require_count("num_outcomes", num_outcomes)
    number = fresh_seed(seed)
    seeds = [int(n) for n in np.random.SeedSequence(number).generate_state(3)]
    backend = backend_for(model, likelihood)
    C = model.num_contexts
    p = as_prior(model.prior().detach() if prior is None else prior, C, B).to(model.device)
    require(p.dim() == 1, "prior", list(p.shape), f"shape [{C}]")
    possible = p.nonzero().squeeze(1)
    contexts = possible[torch.arange(B, device=model.device) % len(possible)]
    watched = Watched(as_policy(policy), model.num_actions)
    episodes = simulate(model, watched, B, contexts=contexts, prior=p, seed=seeds[0])
    sketch = _Sketch(model, episodes, num_particles)
    rewards, told, log_posterior = [], [], []
    with inference_scope(model, seeds[1]):
        recursion = backend.recursion(model)
        persistent = Persistent(backend, recursion, p.expand(B, C))
        # What is drawn for show has a stream of its own: the filter does what it would do without.
        show = RandomStream(seeds[2])
        every = torch.arange(model.num_actions, device=model.device)
        steps = tqdm(
            scan(persistent, episodes, allow_lost=True),  # the filter would have raised
            total=episodes.horizon + 1,
            disable=not progress,
            desc="recording",
        )
        for step in steps:
            belief, total, time = step.after.belief, step.after.log_likelihood, step.observed.time
            now = log_normalised((p.log() + total.T)[:, None], time).squeeze(1)  # [B, C]
            log_posterior.append(now)
            with show:
                sketch.add(recursion, belief)
            if time == episodes.horizon:
                continue
            by_context = torch.stack(
                [recursion.expected_reward(belief, a.expand(B)).T for a in every], 1
            )  # [B, A, C]
            # A context that is impossible may have no sensible belief behind it, and counts for nothing.
            weight = now.exp()[:, None]
            rewards.append(torch.where(weight > 0, weight * by_context, 0.0).sum(-1))
            with show:
                told.append(expected_information(backend, recursion, belief, now, num_outcomes))
    return Recording(
        type(model).__name__,
        model.context_names,
        model.action_names,
        backend.name,
        episodes,
        torch.stack(log_posterior, 1).exp(),
        torch.stack(watched.probabilities, 1),
        torch.stack(rewards, 1),
        torch.stack(told, 1) / math.log(2),
        sketch.parts(),
    )


class Watched:
    """A policy whose probabilities are noted as it acts.

    Args:
        policy: Who decides.
        num_actions: How many actions A there are.

    Attributes:
        probabilities: Of the actions, `[B, A]` at every time; NaN where the policy told none.
    """

    def __init__(self, policy: Policy, num_actions: int) -> None:
        self.policy = policy
        self.num_actions = num_actions
        self.probabilities: list[Tensor] = []

    def start(self, prior: Tensor) -> Any:
        """The policy's own memory."""
        return self.policy.start(prior)

    def act(self, history: History, memory: Any) -> tuple[Decision, Any]:
        """The policy's decision."""
        decision, memory = self.policy.act(history, memory)
        if isinstance(decision, torch.distributions.Categorical):
            self.probabilities.append(decision.probs)
        else:
            self.probabilities.append(torch.full((history.num_episodes, self.num_actions), math.nan))
        return decision, memory


class _Sketch:
    """The parts of the state, as a belief changes in time.

    Args:
        model: Of what.
        episodes: The truth.
        num_particles: How many draws to keep, at most.
    """

    def __init__(self, model: CPOMDP, episodes: Episodes, num_particles: int) -> None:
        self.episodes = episodes
        self.states = model.states if model.states is not None and model.states <= MOST_STATES else None
        sig = signature(model)
        self.sites = sig.observations
        self.shapes = {name: leaf.shape for name, leaf in leaves(sig.state)}
        self.reals = {name: leaf.dtype.is_floating_point for name, leaf in leaves(sig.state)}
        numbers = sum(min(shape.numel(), MOST_COMPONENTS) for shape in self.shapes.values())
        each = len(episodes) * (episodes.horizon + 1) * model.num_contexts * numbers
        self.num_draws = max(1, min(num_particles, MOST_NUMBERS // max(each, 1)))
        self._moments: list[tuple[Any, Any]] = []
        self._draws: list[Any] = []  # leaves [C, B, M, …], or probabilities [C, B, states]

    def add(self, recursion: Recursion, belief: Any) -> None:
        """The belief at the next time."""
        self._moments.append(recursion.moments(belief))
        if self.states is None:
            self._draws.append(recursion.draw(belief, self.num_draws))
        elif isinstance(belief, DiscreteBelief) and belief.probabilities.shape[-1] == self.states:
            self._draws.append(belief.probabilities)
        else:
            drawn: Any = recursion.draw(belief, FREQUENCIES)
            counts = torch.zeros(*drawn.shape[:2], self.states, dtype=torch.float64, device=drawn.device)
            ones = torch.ones_like(drawn, dtype=torch.float64)
            self._draws.append(counts.scatter_add(2, drawn.long(), ones) / FREQUENCIES)

    def parts(self) -> tuple[Part, ...]:
        """All of them, in the order of the state."""

        def in_time(series: Sequence[Any]) -> Any:  # T + 1 times [C, B, …] → [B, T+1, C, …]
            return map_state(lambda *x: torch.stack(x).movedim(2, 0), *series)

        mean = in_time([mean for mean, _ in self._moments])
        deviation = map_state(
            lambda x: x.clamp(min=0).sqrt(), in_time([variance for _, variance in self._moments])
        )
        drawn = in_time(self._draws)
        found = []
        for (name, true), (_, mu), (_, sd) in zip(
            *(leaves(x) for x in (self.episodes.states, mean, deviation)), strict=True
        ):
            n = self.shapes[name].numel()
            true, mu, sd = true.reshape(*true.shape[:2], n), *(x.reshape(*x.shape[:3], n) for x in (mu, sd))
            if self.states is not None:
                return (Part(name, "finite", true, mu, sd, cloud=None, probabilities=drawn),)
            cloud = dict(leaves(drawn))[name]
            cloud = cloud.reshape(*cloud.shape[:4], n)
            if n in (1, 2):
                kind = "line" if n == 1 else "plane"
                found.append(Part(name, kind, true, mu, sd, cloud, None, self._site(name)))
            for i in range(min(n, MOST_COMPONENTS) if n > 2 else 0):
                true_i, mu_i, sd_i, cloud_i = (x[..., i : i + 1] for x in (true, mu, sd, cloud))
                found.append(Part(f"{name}[{i}]", "line", true_i, mu_i, sd_i, cloud_i, None))
        return tuple(found)

    def _site(self, name: str) -> str | None:
        """The site whose values are in the units of this part, if there is but one of each."""
        if len(self.shapes) != 1 or len(self.sites) != 1 or not self.reals[name]:
            return None
        ((site, spec),) = self.sites.items()
        return site if spec.shape == self.shapes[name] and not spec.is_discrete else None


def _seen(episodes: Episodes) -> dict[str, Any]:
    """What was seen by site: at every time None or a list of numbers, None for those that were not seen."""
    shown = {}
    for site, values in episodes.observations.items():
        flags = episodes.observed[site]
        first, known = torch.zeros_like(values[:, :1]), torch.zeros_like(flags[:, :1])
        if episodes.initial_observations is not None and episodes.initially_observed is not None:
            first = episodes.initial_observations[site][:, None]
            known = episodes.initially_observed[site][:, None]
        v = torch.cat([first, values], 1)  # [B, T+1, …]
        f = torch.cat([known, flags], 1)
        f = f.reshape(f.shape + (1,) * (v.dim() - f.dim())).expand(v.shape)
        v, f = (x.reshape(*x.shape[:2], -1)[..., :MOST_SEEN] for x in (v.double(), f))
        rows = significant(torch.where(f, v, math.nan))
        shown[site] = [[None if all(x is None for x in row) else row for row in each] for each in rows]
    return shown
