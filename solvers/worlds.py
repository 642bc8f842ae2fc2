"""Where real episodes are lived through: a simulator that keeps its contexts, or whatever a user has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from cpomdp_ppl import simulate
from cpomdp_ppl.agent import Agent
from cpomdp_ppl.arrays import as_indices
from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.errors import require
from cpomdp_ppl.evaluation import Watched
from cpomdp_ppl.isolation import seed_for
from cpomdp_ppl.signature import signature

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Policy

PLAY, DECIDE, FILTER = range(3)
"""What random numbers are for."""


@runtime_checkable
class Environment(Protocol):
    """An episode at a time, by Gymnasium's names; nothing else of Gymnasium is needed."""

    def reset(self) -> Any:
        """Begin an episode: an observation, or one and a dict of information."""
        ...

    def step(self, action: int) -> tuple[Any, ...]:
        """Act: an observation, the reward, whether the episode is over, and anything after that.

        With five things, as in Gymnasium, the third and the fourth both say whether it is over.
        """
        ...


EnvironmentLike: TypeAlias = "Environment | Callable[[Agent], float | None]"
"""Something with `reset` and `step`, or a function that leads an `Agent` through an episode."""

WorldLike: TypeAlias = "int | str | Sequence[Any] | Tensor | EnvironmentLike | None"
"""A context, one for each run, an environment, one for each run, or None for contexts from the prior."""


class Lived(NamedTuple):
    """One episode of each of R runs.

    Attributes:
        episodes: What was done and seen.
        log_likelihood: `log p(o | a, c)` of it, float64 `[R, C]`.
        returns: What it earned, float64 `[R]`; NaN where nobody said.
    """

    episodes: Episodes
    log_likelihood: Tensor
    returns: Tensor

    @staticmethod
    def joined(parts: Sequence[Lived]) -> Lived:
        """The runs of several parts, in their order."""
        episodes, log_likelihood, returns = zip(*parts, strict=True)
        return Lived(Episodes.concatenate(episodes), torch.cat(log_likelihood), torch.cat(returns))


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

    def play(self, policy: Policy, backend: Backend, rows: Tensor, prior: Tensor, seed: int) -> Lived:
        """Live through one more episode.

        Args:
            policy: Who acts.
            backend: What tells the contexts' likelihoods.
            rows: Which of the runs, `[n]`.
            prior: What each believes beforehand, `[n, C]`.
            seed: Of this episode.
        """
        ...


@dataclass(frozen=True, eq=False)
class Simulated:
    """The model's own simulator, all runs at once.

    The same seed means the same first states and noise, whoever acts.

    Args:
        model: The CPOMDP.
        contexts: The true ones, `[R]`.
    """

    model: CPOMDP
    contexts: Tensor

    @property
    def num_runs(self) -> int:
        """One for each context given."""
        return len(self.contexts)

    def play(self, policy: Policy, backend: Backend, rows: Tensor, prior: Tensor, seed: int) -> Lived:
        """Simulate, then filter."""
        watched = Watched(policy, seed_for(seed, DECIDE))
        episodes = simulate(
            self.model,
            watched,
            len(rows),
            contexts=self.contexts[rows],
            prior=prior,
            seed=seed_for(seed, PLAY),
        )
        filtering = backend.run(self.model, episodes, seed=seed_for(seed, FILTER), moments=False)
        assert episodes.returns is not None
        return Lived(episodes, filtering.log_likelihood, episodes.returns.double())


@dataclass(frozen=True, eq=False)
class Lent:
    """Environments of the user's own, one for each run, played one after the other.

    Args:
        model: What the agent believes of them.
        environments: One for each run.
    """

    model: CPOMDP
    environments: tuple[EnvironmentLike, ...]
    contexts: None = None

    @property
    def num_runs(self) -> int:
        """One for each environment."""
        return len(self.environments)

    def play(self, policy: Policy, backend: Backend, rows: Tensor, prior: Tensor, seed: int) -> Lived:
        """Lead an agent through each of the environments."""
        lived = []
        for believed, row in zip(prior, rows.tolist(), strict=True):
            agent = Agent(
                self.model, policy, likelihood=backend, prior=believed, seed=seed_for(seed, DECIDE, row)
            )
            environment = self.environments[row]
            lead = environment if not isinstance(environment, Environment) else _follow(environment)
            earned = lead(agent)
            proper = earned is None or isinstance(earned, int | float)
            require(proper, "environment", earned, "a function that returns what the episode earned, or None")
            require(agent.time > 0, "environment", "an episode without a step", "one with at least one")
            returns = torch.tensor([math.nan if earned is None else float(earned)], dtype=torch.float64)
            lived.append(Lived(_lived(agent), agent.filter.log_likelihood, returns))
        return Lived.joined(lived)


def as_world(model: CPOMDP, environment: WorldLike, num_runs: int | None, contexts: Tensor) -> World:
    """Who plays the world.

    Args:
        model: The CPOMDP.
        environment: As for `cids.run`.
        num_runs: How many runs; None leaves it to `environment`.
        contexts: What to take if `environment` is None, `[R]`.
    """
    names = model.context_names
    if environment is None:
        return Simulated(model, contexts)
    several = isinstance(environment, list | tuple) and len(environment) > 0
    lent: list[Any] = list(environment) if several else [environment]  # type: ignore[arg-type]
    if all(_is_environment(each) for each in lent):
        number = len(lent) if num_runs is None or several else num_runs
        require(number == len(lent), "num_runs", num_runs, "one environment for each run")
        return Lent(model, tuple(lent))
    c = as_indices("environment", environment, names)
    inside = c.dim() < 2 and bool(((c >= 0) & (c < len(names))).all())
    expected = (
        f"a context out of {list(names)}, an environment with `reset` and `step`, a function of an Agent"
    )
    require(inside, "environment", environment, f"{expected}, or one of these for each run")
    R = (num_runs or 1) if c.dim() == 0 else len(c)
    require(num_runs in (None, R), "num_runs", num_runs, f"{R}, as many as there are contexts")
    return Simulated(model, c.expand(R).to(model.device))


def _is_environment(candidate: Any) -> bool:
    return not isinstance(candidate, type) and (isinstance(candidate, Environment) or callable(candidate))


def _follow(environment: Environment) -> Callable[[Agent], float]:
    """How an agent gets through an episode of something with `reset` and `step`."""

    def lead(agent: Agent) -> float:
        first = environment.reset()
        if isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], Mapping):
            first = first[0]  # Gymnasium's pair
        if agent.model.initial_observation:
            observations, observed = seen_by(agent.model, first)
            agent.observe(observations, observed=observed)
        earned, over = 0.0, False
        while not over and agent.time < agent.model.horizon:
            outcome = environment.step(agent.act())
            proper = isinstance(outcome, tuple) and len(outcome) >= 3
            require(proper, "environment", outcome, "`step` to return observation, reward, over, …")
            observation, reward, *rest = outcome
            over = bool(rest[0]) or (len(rest) == 3 and bool(rest[1]))
            observations, observed = seen_by(agent.model, observation)
            agent.observe(observations, observed=observed)
            earned += float(reward)
        return earned

    return lead


def seen_by(model: CPOMDP, observation: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an environment shows, by the model's sites, and whether it counts.

    Args:
        model: Whose sites.
        observation: By site, as the model's program would sample it, with `<site>_seen` if that is there to
            say what counts; whatever else is in it is ignored. Of a model with one site it may be the bare
            value. What is None or NaN was not seen.
    """
    sites = signature(model).observations
    if observation is None:
        return {}, {}
    if not isinstance(observation, Mapping):
        require(len(sites) == 1, "environment", observation, f"observations by site, out of {list(sites)}")
        observation = dict.fromkeys(sites, observation)
    given = {name: value for name, value in observation.items() if name in sites and value is not None}
    foreign = bool(observation) and not any(name in sites for name in observation)
    require(not foreign, "environment", sorted(observation), f"observations of {list(sites)}")
    observed = {}
    for name, value in given.items():
        said = observation.get(f"{name}_seen", True)
        flags = torch.as_tensor(said).bool().reshape(-1)
        known = not bool(torch.as_tensor(value).isnan().all())
        plates = sites[name].plates
        observed[name] = (flags & known).expand(plates.numel()).reshape(plates)
    return given, observed


def _lived(agent: Agent) -> Episodes:
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
    )
