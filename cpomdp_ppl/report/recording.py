"""Episodes played to be looked at: what happened, what was believed, and why the agent did what it did."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.actions import Box, probe_names, probes
from cpomdp_ppl.context import entropy
from cpomdp_ppl.errors import require, require_count, require_model
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import inference_scope, scan
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.inference.filtering import log_normalised
from cpomdp_ppl.inference.observed import Observed
from cpomdp_ppl.inference.persistence import Persistent
from cpomdp_ppl.policy import as_policy
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.report.parts import Part, Sketch
from cpomdp_ppl.report.rounding import significant
from cpomdp_ppl.rng import RandomStream, fresh_seed, inverse_cdf, seeds_for
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.signature import ENDED
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.evaluation import PolicyLike
    from cpomdp_ppl.inference.backend import Backend, Recursion
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History, Policy

MAX_SEEN = 24
"""How many numbers are shown of what was seen at a site."""

TAKEN = "as chosen"
"""The action that was taken, among those whose promises are shown if actions are continuous."""

SPREAD, SPREAD_DRAWS = (0.05, 0.95), 200
"""Between which quantiles a policy's continuous actions are shown to be, and how many draws tell."""


@dataclass(frozen=True)
class Recording:
    """B episodes of T steps under a policy, with everything that a viewer may want to know about them.

    What is said of times after the end of an episode means nothing.

    Attributes:
        model: Name of the model.
        context_names: Names of the C contexts.
        action_names: Names of the A actions whose promises are known: all. Of continuous ones, that which was
            taken, and the `probes`.
        box: The box of continuous actions; None if they are finitely many.
        likelihood: The backend behind beliefs, in a few words.
        episodes: What happened, contexts and states known.
        posterior: `P(c | h_t)`, float64 `[B, T + 1, C]`.
        action_probabilities: `π(a | h_t)`, `[B, T, A]`; NaN where the policy gave an action, not a
            distribution, and of continuous actions.
        action_spread: Of continuous actions, the lower and the upper end of what the policy does in 9 out of
            10 cases, `[B, T, 2, D]`, from draws; NaN where it gave an action. None if they are finitely many.
        expected_reward: `E[r_C(s_t, a) | h_t]` of every action, contexts summed out, `[B, T, A]`.
        expected_information: How much every action is expected to tell about the context in this step alone,
            in bits, `[B, T, A]`: an estimate.
        parts: The parts of the state.
    """

    model: str
    context_names: tuple[str, ...]
    action_names: tuple[str, ...]
    box: Box | None
    likelihood: str
    episodes: Episodes
    posterior: Tensor
    action_probabilities: Tensor
    action_spread: Tensor | None
    expected_reward: Tensor
    expected_information: Tensor
    parts: tuple[Part, ...]

    def first(self, number: int) -> Recording:
        """The recording of the first few episodes."""
        return replace(
            self,
            episodes=self.episodes[:number],
            posterior=self.posterior[:number],
            action_probabilities=self.action_probabilities[:number],
            action_spread=None if self.action_spread is None else self.action_spread[:number],
            expected_reward=self.expected_reward[:number],
            expected_information=self.expected_information[:number],
            parts=tuple(part.first(number) for part in self.parts),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings, to be written as JSON; None for what is not known.

        Series of an episode go to its end and no further.
        """
        episodes, lengths = self.episodes, self.episodes.lengths.tolist()
        assert episodes.contexts is not None
        assert episodes.rewards is not None
        assert episodes.returns is not None

        def steps(values: Tensor, digits: int = 4, more: int = 0) -> list[Any]:
            """A series `[B, T, …]` of each episode, as long as it lasted; with one more, of the times."""
            return until_the_end(significant(values, digits), lengths, more)

        axes = None
        if self.box is not None:
            bounds = zip(self.box.names, self.box.low, self.box.high, strict=True)
            axes = [{"name": name, "low": low, "high": high} for name, low, high in bounds]
        return {
            "model": self.model,
            "contexts": list(self.context_names),
            "actions": list(self.action_names),
            "axes": axes,
            "likelihood": self.likelihood,
            "horizon": episodes.horizon,
            "discount": episodes.discount,
            "length": lengths,
            "can_end": ENDED in episodes.observations,
            "ended": episodes.ended.tolist(),
            "return": significant(episodes.returns, 6),
            "true_context": episodes.contexts.tolist(),
            "action": steps(episodes.actions) if axes else until_the_end(episodes.actions.tolist(), lengths),
            "reward": steps(episodes.rewards),
            "seen": {site: until_the_end(rows, lengths, 1) for site, rows in _seen(episodes).items()},
            "posterior": steps(self.posterior, more=1),
            "entropy": steps(entropy(self.posterior, "bits"), more=1),
            "action_probabilities": steps(self.action_probabilities),
            "action_spread": None if self.action_spread is None else steps(self.action_spread),
            "expected_reward": steps(self.expected_reward),
            "expected_information": steps(self.expected_information, 3),
            "parts": [part.as_dict(lengths) for part in self.parts],
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
        policy: The policy that acts.
        num_episodes: How many episodes B; contexts that the prior holds possible come equally often.
        likelihood: The filter behind beliefs: a backend or its name; left out, the `default_backend` for the
            model.
        num_particles: How many draws M from the belief under each context to keep, at most.
        num_outcomes: How many outcomes of each action are tried to see what it would tell; of continuous
            actions, of those that are taken, and of the `probes`.
        prior: Prior over contexts, `[C]`; the model's if left out. Policy and filter start from it.
        seed: Seed of all random numbers; None takes fresh entropy.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: On arguments that make no sense.
        UnsupportedModelError: If the backend cannot serve the model.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LightDark
        >>> recording = record(LightDark(), RandomPolicy(3), num_episodes=2)
        >>> recording.posterior.shape, recording.parts[0].cloud.shape
        (torch.Size([2, 21, 2]), torch.Size([2, 21, 2, 200, 1]))
    """
    require_model(model)
    B, num_particles, num_outcomes = (
        require_count(name, value)
        for name, value in (
            ("num_episodes", num_episodes),
            ("num_particles", num_particles),
            ("num_outcomes", num_outcomes),
        )
    )
    to_play, to_filter, to_show, to_spread = seeds_for(fresh_seed(seed), 4)
    backend = backend_for(model, likelihood)
    p = as_prior(model.prior().detach() if prior is None else prior, model.num_contexts, B).to(model.device)
    require(p.dim() == 1, "prior", list(p.shape), f"shape [{model.num_contexts}]")
    possible = p.nonzero().squeeze(1)
    contexts = possible[torch.arange(B, device=model.device) % len(possible)]
    watched = Watched(as_policy(policy), model, to_spread)
    episodes = simulate(model, watched, B, contexts=contexts, prior=p, seed=to_play)
    names = model.action_names if model.box is None else (TAKEN, *probe_names(model))
    sketch = Sketch(model, episodes, num_particles)
    log_posterior, rewards, information = [], [], []
    with inference_scope(model, to_filter):
        recursion = backend.recursion(model)
        # What is drawn for show has a stream of its own: the filter does what it would do without.
        show = RandomStream(to_show)
        for time, belief, now in _beliefs(backend, recursion, episodes, p, progress):
            log_posterior.append(now)
            with show:
                sketch.add(recursion, belief)
            if time < episodes.horizon:
                tried = _tried(model, episodes, time)
                rewards.append(_expected_rewards(recursion, belief, now, tried))
                with show:
                    information.append(
                        expected_information(backend, recursion, belief, now, tried, num_outcomes)
                    )
    return Recording(
        type(model).__name__,
        model.context_names,
        names,
        model.box,
        backend.label,
        episodes,
        torch.stack(log_posterior, 1).exp(),
        torch.stack(watched.probabilities, 1),
        None if model.box is None else torch.stack(watched.spread, 1),
        torch.stack(rewards, 1),
        torch.stack(information, 1) / math.log(2),
        sketch.parts(),
    )


def _beliefs(
    backend: Backend, recursion: Recursion, episodes: Episodes, prior: Tensor, progress: bool
) -> Iterator[tuple[int, Any, Tensor]]:
    """Times 0 … T, with the belief about the state and `log P(c | h_t)`, `[B, C]`."""
    persistent = Persistent(backend, recursion, prior.expand(len(episodes), -1))
    steps = scan(persistent, episodes, allow_lost=True)  # it raises by itself
    for step in tqdm(steps, total=episodes.horizon + 1, disable=not progress, desc="recording"):
        time, track = step.observed.time, step.after
        joint = prior.log() + track.log_likelihood.T
        yield time, track.belief, log_normalised(joint[:, None], time).squeeze(1)


def _tried(model: CPOMDP, episodes: Episodes, time: int) -> Tensor:
    """The actions whose promises are shown: all, `[B, A]`; or what is taken, and the probes, `[B, A, D]`."""
    every = probes(model).expand(len(episodes), *probes(model).shape)
    if model.box is None:
        return every
    return torch.cat([episodes.lasting_actions[:, time, None], every], 1)


def _expected_rewards(recursion: Recursion, belief: Any, log_posterior: Tensor, tried: Tensor) -> Tensor:
    """What each action `[B, A]` earns in the next step, on average over contexts, `[B, A]`."""
    by_context = torch.stack(
        [recursion.expected_reward(belief, action).T for action in tried.unbind(1)], 1
    )  # [B, A, C]
    # A context that is impossible may have no sensible belief behind it, and counts for nothing.
    weight = log_posterior.exp()[:, None]
    return torch.where(weight > 0, weight * by_context, 0.0).sum(-1)


def expected_information(
    backend: Backend,
    recursion: Recursion,
    belief: Any,
    log_posterior: Tensor,
    tried: Tensor,
    num_outcomes: int,
) -> Tensor:
    """`I(C; o_{t+1} | h_t, a)` for actions `[B, A]`, or `[B, A, D]`, in nats, `[B, A]`.

    That is by how much entropy is expected to fall.

    Outcomes are drawn from the belief, the filter takes each of them in, and the falls of the posterior's
    entropy are averaged. Actions after which nothing is seen get zero. Noise of the filter passes for
    information, as it does everywhere: with few particles the estimate is too high.

    To be called inside `inference_scope`, with a belief of first axes `[C, B]` and a log-posterior `[B, C]`.
    """
    model, K, device = recursion.model, num_outcomes, log_posterior.device
    B, A = tried.shape[:2]
    programs = Generative(model)

    # Contexts in proportion to the posterior, spread evenly over the K outcomes of each action.
    offset = torch.rand(B, A, 1, dtype=torch.float64, device=device)
    levels = (torch.arange(K, device=device) + offset) / K  # [B, A, K]
    context = inverse_cdf(log_posterior.exp(), levels.reshape(B, -1)).flatten()  # [B·A·K]
    episode = torch.arange(B, device=device).repeat_interleave(A * K)
    action = tried.flatten(0, 1).repeat_interleave(K, 0)

    number = torch.arange(A * K, device=device).repeat(B)
    drawn = recursion.draw(belief, A * K)  # leaves [C, B, A·K, …]
    state = map_state(lambda leaf: leaf[context, episode, number], drawn)
    percept = programs.step(state, action, context).percept

    after = torch.empty(B * A * K, dtype=torch.float64, device=device)
    for some in torch.arange(B * A * K, device=device).split(backend.episodes_at_once(model, recursion)):
        flags = {site: seen[some] for site, seen in percept.observed.items()}
        values = {site: value[some] for site, value in percept.observations.items()}
        seen = Observed.at(1, action[some], values, flags)
        copies = map_belief(lambda leaf, some=some: leaf[:, episode[some]], belief)
        _, increment = recursion.step(copies, seen)  # [C, some]
        joint = log_posterior[episode[some]] + increment.T
        after[some] = _nats(joint.log_softmax(-1))
    before = _nats(log_posterior)  # [B]
    # An outcome that no particle of any context explains says nothing either way.
    left = torch.where(after.isnan(), before[episode], after).reshape(B, A, K).mean(-1)
    return before[:, None] - left


def _nats(log_p: Tensor) -> Tensor:
    """Entropy of distributions `[…, C]`, in nats, `[…]`; NaN if the weights are."""
    nats: Tensor = torch.special.entr(log_p.exp()).sum(-1)
    return nats


class Watched:
    """A policy whose probabilities are noted as it acts.

    Args:
        policy: The policy.
        model: The CPOMDP that it acts in.
        seed: Seed of the draws that tell how far continuous actions are spread.

    Attributes:
        probabilities: Probabilities of the actions, `[B, A]` at every time; NaN where the policy gave none.
        spread: Quantiles of its continuous actions, `[B, 2, D]` at every time; NaN where it gave one.
    """

    def __init__(self, policy: Policy, model: CPOMDP, seed: int) -> None:
        self.policy = policy
        self.box = model.box
        self.num_actions = len(probes(model)) + (model.box is not None)
        self.stream = RandomStream(seed)
        self.probabilities: list[Tensor] = []
        self.spread: list[Tensor] = []

    def start(self, prior: Tensor) -> Any:
        """The policy's own memory."""
        return self.policy.start(prior)

    def act(self, history: History, memory: Any) -> tuple[Decision, Any]:
        """The policy's decision."""
        decision, memory = self.policy.act(history, memory)
        B = history.num_episodes
        if isinstance(decision, torch.distributions.Categorical) and self.box is None:
            self.probabilities.append(decision.probs)
        else:
            self.probabilities.append(torch.full((B, self.num_actions), math.nan))
        if self.box is not None:
            self.spread.append(self._spread(decision, B, self.box.dim))
        return decision, memory

    def _spread(self, decision: Decision, B: int, D: int) -> Tensor:
        unknown = torch.full((B, 2, D), math.nan)
        if not isinstance(decision, torch.distributions.Distribution):
            return unknown
        if (decision.batch_shape, decision.event_shape) != ((B,), (D,)):
            return unknown  # and play will refuse it
        with self.stream:
            actions = decision.sample(torch.Size([SPREAD_DRAWS]))  # [draws, B, D]
        return actions.quantile(actions.new_tensor(SPREAD), 0).movedim(0, 1)


def until_the_end(series: Sequence[Any], lengths: Sequence[int], more: int = 0) -> list[Any]:
    """A list for each episode, as long as it lasted."""
    return [each[: length + more] for each, length in zip(series, lengths, strict=True)]


def _seen(episodes: Episodes) -> dict[str, Any]:
    """What was seen by site: at every time None or a list of numbers, None for those that were not seen.

    Without the end, of which the lengths of episodes tell.
    """
    shown = {}
    for site, values in episodes.observations.items():
        if site == ENDED:
            continue
        flags = episodes.observed[site]
        first, known = torch.zeros_like(values[:, :1]), torch.zeros_like(flags[:, :1])
        if episodes.initial_observations is not None and episodes.initially_observed is not None:
            first = episodes.initial_observations[site][:, None]
            known = episodes.initially_observed[site][:, None]
        v = torch.cat([first, values], 1)  # [B, T+1, …]
        f = torch.cat([known, flags], 1)
        f = f.reshape(f.shape + (1,) * (v.dim() - f.dim())).expand(v.shape)
        v, f = (x.reshape(*x.shape[:2], -1)[..., :MAX_SEEN] for x in (v.double(), f))
        rows = significant(torch.where(f, v, math.nan))
        shown[site] = [[None if all(x is None for x in row) else row for row in each] for each in rows]
    return shown
