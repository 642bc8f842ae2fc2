"""Algorithm 1 to the letter: every run solves for its posterior before it plays."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from cpomdp_ppl.errors import require
from cpomdp_ppl.rng import seed_for
from solvers.cids import training
from solvers.cids.estimator import ActorCritic
from solvers.cids.group import single_process
from solvers.cids.schedules import Geometric
from solvers.episodes.worlds import EpisodeOutcome

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Policy
    from solvers.episodes.worlds import World

RESOLVING: dict[str, Any] = {
    "iterations": 100,
    "learning_rate": Geometric(5e-3, 3e-4, until=0.6),  # large only while the critic learns alone
    "temperature": 0.5,
    "estimator": ActorCritic(random_actions=0.0, exploration=0.0, warm_up=0.5),
}
"""How a policy is fitted further to a new posterior, unless the caller knows better."""


@dataclass(frozen=True, eq=False)
class ResolvingWorld:
    """A world in which every run fits its policy further to what it has come to believe, and then plays."""

    world: World
    model: CPOMDP
    policies: list[Any]  # one for each run, fitted further in place
    settings: Mapping[str, Any]  # of `fit`

    @staticmethod
    def around(
        world: World, model: CPOMDP, policy: Policy, backend: Backend, resolve: bool | Mapping[str, Any]
    ) -> ResolvingWorld:
        """All runs begin with the same policy, and fit it as `resolve` says; see `run`."""
        settings = {**RESOLVING, "likelihood": backend, **_settings(resolve)}
        require(isinstance(policy, nn.Module), "resolve", resolve, "False: the policy has nothing to learn")
        return ResolvingWorld(world, model, [copy.deepcopy(policy) for _ in range(world.num_runs)], settings)

    @property
    def num_runs(self) -> int:
        """How many runs R there are."""
        return self.world.num_runs

    @property
    def contexts(self) -> Tensor | None:
        """The true contexts `[R]`, if anybody knows them."""
        return self.world.contexts

    def play(
        self, policy: Policy, backend: Backend, rows: Tensor, prior: Tensor, seed: int
    ) -> EpisodeOutcome:
        """One run after the other plays a policy of its own in place of the one that is given."""
        outcomes = []
        for row in rows.tolist():
            settings = {"seed": seed_for(seed, row), "progress": False, **self.settings}
            with single_process():
                solution = training.fit(self.model, prior=prior[row], policy=self.policies[row], **settings)
            outcomes.append(self.world.play(solution.policy, backend, rows.new_tensor([row]), prior, seed))
        return EpisodeOutcome.joined(outcomes)


def _settings(resolve: Any) -> dict[str, Any]:
    """Settings of `fit` that a caller may give for fitting further."""
    names = set(inspect.signature(training.fit).parameters) - {"model", "prior", "policy", "checkpoint"}
    expected = f"True, False, or settings of fit out of {sorted(names)}"
    require(isinstance(resolve, bool | Mapping), "resolve", resolve, expected)
    given = dict(resolve) if isinstance(resolve, Mapping) else {}
    unknown = sorted(map(str, given.keys() - names))
    require(not unknown, "resolve", unknown, expected)
    return given
