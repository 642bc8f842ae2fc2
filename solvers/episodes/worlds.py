"""Where real episodes take place: in a simulator that keeps its contexts, or in whatever a user has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from cpomdp_ppl.agent import Agent
from cpomdp_ppl.arrays import as_indices, as_tensor, without_unit_axes
from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.inference.persistence import filtered
from cpomdp_ppl.rng import seed_for
from cpomdp_ppl.signature import ENDED, signature
from solvers.regret.values import FILTER, POLICY, played

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Policy


@runtime_checkable
class Environment(Protocol):
    """An episode at a time, by Gymnasium's names; nothing else of Gymnasium is needed."""

    def reset(self) -> Any:
        """Begin an episode: an observation, or one and a dict of information."""
        ...

    def step(self, action: Any) -> tuple[Any, ...]:
        """Act: an observation, the reward, whether the episode is over, and anything after that.

        With five things, as in Gymnasium, the third and the fourth both say whether it is over. Actions are
        indices; continuous ones are arrays `[D]`.

        Of a model whose episodes may end, the third says whether this one has; at the horizon, only one of
        five does. An observation that has the site `ended` knows better, and so does a dict of information.
        """
        ...


EnvironmentLike: TypeAlias = "Environment | Callable[[Agent], float | None]"
"""Something with `reset` and `step`, or a function that leads an `Agent` through an episode."""

WorldLike: TypeAlias = "int | str | Sequence[Any] | Tensor | EnvironmentLike | None"
"""A context, one for each run, an environment, one for each run, or None for contexts from the prior."""


class EpisodeOutcome(NamedTuple):
    """One episode of each of R runs."""

    episodes: Episodes  # what was done and seen
    log_likelihood: Tensor  # log p(o | a, c) of it, float64 [R, C]
    returns: Tensor  # what it earned, float64 [R]; NaN where nobody said

    @staticmethod
    def joined(parts: Sequence[EpisodeOutcome]) -> EpisodeOutcome:
        """The runs of several parts, in their order."""
        episodes, log_likelihood, returns = zip(*parts, strict=True)
        return EpisodeOutcome(Episodes.concatenate(episodes), torch.cat(log_likelihood), torch.cat(returns))


class World(Protocol):
    """R runs, each of which meets the same context in all of its episodes."""

    @property
    def num_runs(self) -> int:
        """How many runs R there are."""
        ...

    @property
    def contexts(self) -> Tensor | None:
        """The true contexts `[R]`, if anybody knows them."""
        ...

    def play(
        self, policy: Policy, backend: Backend, rows: Tensor, prior: Tensor, seed: int
    ) -> EpisodeOutcome:
        """Play one more episode of the runs `rows [n]`, of which every one believes its prior, `[R, C]`."""
        ...


@dataclass(frozen=True, eq=False)
class Simulated:
    """The model's own simulator, all runs at once.

    The same seed means the same first states and noise in every run, whoever acts and whoever else plays.
    """

    model: CPOMDP
    contexts: Tensor

    @property
    def num_runs(self) -> int:
        """One for each context given."""
        return len(self.contexts)

    def play(
        self, policy: Policy, backend: Backend, rows: Tensor, prior: Tensor, seed: int
    ) -> EpisodeOutcome:
        """Simulate, then filter."""
        everyone = played(self.model, policy, prior, self.contexts, seed)
        episodes = everyone[rows]
        filtering = filtered(
            backend, self.model, episodes, prior=prior[rows], seed=seed_for(seed, FILTER), moments=False
        )
        assert episodes.returns is not None
        return EpisodeOutcome(episodes, filtering.log_likelihood, episodes.returns.double())


@dataclass(frozen=True, eq=False)
class UserEnvironments:
    """Environments that the user brings, one for each run, played one after the other."""

    model: CPOMDP
    environments: tuple[EnvironmentLike, ...]
    contexts: None = field(default=None, init=False)
    revealed: dict[int, Any] = field(default_factory=dict, init=False)  # contexts that environments named

    @property
    def num_runs(self) -> int:
        """One for each environment."""
        return len(self.environments)

    def play(
        self, policy: Policy, backend: Backend, rows: Tensor, prior: Tensor, seed: int
    ) -> EpisodeOutcome:
        """Lead an agent through each of the environments."""
        outcomes = []
        for row in rows.tolist():
            agent = Agent(
                self.model, policy, likelihood=backend, prior=prior[row], seed=seed_for(seed, POLICY, row)
            )
            environment = self.environments[row]
            if isinstance(environment, Environment):
                earned: Any = self._lead(environment, agent, row)
            else:
                earned = environment(agent)
            require(agent.time > 0, "environment", "an episode without a step", "one with at least one")
            returns = torch.tensor([_number(earned, "a function that returns a number, or None")])
            outcomes.append(EpisodeOutcome(_as_episode(agent), agent.filter.log_likelihood, returns.double()))
        return EpisodeOutcome.joined(outcomes)

    def _lead(self, environment: Environment, agent: Agent, row: int) -> float:
        """Lead an agent through an episode of something with `reset` and `step`."""
        first = environment.reset()
        if isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], Mapping):
            first, info = first  # Gymnasium's pair
            self._require_same_context(info, row)
        if agent.model.initial_observation:
            observations, observed = seen_by(agent.model, first)
            agent.observe(observations, observed=observed)
        earned, worth, over = 0.0, 1.0, False
        while not over:
            outcome = environment.step(agent.act())
            proper = isinstance(outcome, tuple) and len(outcome) >= 3
            require(proper, "environment", outcome, "`step` to return observation, reward, over, …")
            observation, reward, *rest = outcome
            ended, gymnasium = bool(rest[0]), len(rest) == 3
            observations, observed = seen_by(agent.model, observation)
            if agent.model.can_end and not observed.get(ENDED, False):
                info = rest[-1] if isinstance(rest[-1], Mapping) else {}
                last = agent.time + 1 == agent.model.horizon  # where all are over, and few have ended
                observations[ENDED] = bool(info.get(ENDED, ended))
                observed[ENDED] = ENDED in info or gymnasium or not (last and ended)
            agent.observe(observations, observed=observed)
            over = agent.over or ended or (gymnasium and bool(rest[1]))
            earned += worth * _number(reward, "`step` to return a number as the reward, or None")
            worth *= agent.model.discount
        return earned

    def _require_same_context(self, info: Mapping[str, Any], row: int) -> None:
        """An environment that says which context it is in must stay in it."""
        if "context" in info:
            before = self.revealed.setdefault(row, info["context"])
            fixed = "an environment that stays in one context: with a prior that is sure of it, for instance"
            same = bool(before == info["context"])
            require(same, "environment", f"context {before}, then {info['context']}", fixed)


def as_world(model: CPOMDP, environment: WorldLike, num_runs: int | None, contexts: Tensor) -> World:
    """The world that `run` is asked to play in; the contexts `[R]` are for no environment."""
    names = model.context_names
    expected = (
        f"a context out of {list(names)}, an environment with `reset` and `step`, a function of an Agent, "
        "or one of these for each run"
    )
    if environment is None:
        return Simulated(model, contexts.to(model.device))
    several = isinstance(environment, list | tuple)
    given: list[Any] = list(environment) if several else [environment]  # type: ignore[arg-type]
    require(len(given) > 0, "environment", environment, expected)
    foreign = [each for each in given if isinstance(each, type | nn.Module) or hasattr(each, "num_envs")]
    require(not foreign, "environment", foreign[:1], expected)
    brought = [isinstance(each, Environment) or callable(each) for each in given]
    if any(brought):
        require(all(brought), "environment", environment, expected)
        enough = num_runs in (None, len(given))
        require(enough, "num_runs", num_runs, f"{len(given)}, as many as there are environments")
        return UserEnvironments(model, tuple(given))
    c = as_indices("environment", environment, names)
    inside = c.dim() < 2 and c.numel() > 0 and bool(((c >= 0) & (c < len(names))).all())
    require(inside, "environment", environment, expected)
    R = (num_runs or 1) if c.dim() == 0 else len(c)
    require(num_runs in (None, R), "num_runs", num_runs, f"{R}, as many as there are contexts")
    return Simulated(model, c.expand(R).to(model.device))


def _number(value: Any, expected: str) -> float:
    """Any kind of number as a float; NaN for None."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise invalid("environment", value, expected) from error


def seen_by(model: CPOMDP, observation: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an environment shows, by the model's sites, and which of it counts.

    An observation has values by site, as the model's program would sample them; `<site>_seen`, if it is
    there, says which of them count, and whatever else there is is ignored. For a model with one site, besides
    `ended`, it may be the bare value. What is None or NaN was not seen.
    """
    sites = signature(model).observations
    if observation is None:
        return {}, {}
    if not isinstance(observation, Mapping):
        bare = [name for name in sites if name != ENDED]
        require(len(bare) == 1, "environment", observation, f"observations by site, out of {list(sites)}")
        observation = dict.fromkeys(bare, observation)
    foreign = bool(observation) and not any(name in sites for name in observation)
    require(not foreign, "environment", sorted(map(str, observation)), f"observations of {list(sites)}")
    values, observed = {}, {}
    for name, site in sites.items():
        if observation.get(name) is None:
            continue
        what = f"environment: observation['{name}']"
        value = as_tensor(what, _without_none(observation[name]))
        fits = without_unit_axes(value.shape) == without_unit_axes(site.shape)
        require(fits, what, list(value.shape), f"shape {list(site.shape)}")
        value = value.reshape(site.shape)
        flags = as_tensor(f"{what[:-2]}_seen']", observation.get(f"{name}_seen", True)).bool()
        proper = flags.numel() in (1, site.plates.numel())
        require(proper, f"{what[:-2]}_seen']", list(flags.shape), f"shape {list(site.plates)}")
        known = ~value.isnan().reshape(*site.plates, -1).any(-1)
        observed[name] = flags.reshape(-1).expand(site.plates.numel()).reshape(site.plates) & known
        values[name] = value
    return values, observed


def _without_none(value: Any) -> Any:
    """Entries of a list that are None as NaN."""
    if isinstance(value, list | tuple):
        return [math.nan if each is None else _without_none(each) for each in value]
    return value


def _as_episode(agent: Agent) -> Episodes:
    """The agent's history as an episode."""
    history = agent.history
    first = history.percepts[0]
    asked = agent.model.initial_observation
    return Episodes(
        actions=history.actions,
        observations={site: values[:, 1:] for site, values in history.observations.items()},
        observed={site: flags[:, 1:] for site, flags in history.observed.items()},
        initial_observations=first.observations if asked else None,
        initially_observed=first.observed if asked else None,
        discount=agent.model.discount,
    )
