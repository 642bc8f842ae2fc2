"""Algorithm 1: C-IDS episode after episode in the same unknown context."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from cpomdp_ppl.errors import (
    require,
    require_count,
    require_model,
    require_number,
)
from cpomdp_ppl.experiments.fingerprint import describe_model
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.policy import Policy, as_policy
from cpomdp_ppl.prior import one_prior, stratified
from cpomdp_ppl.progress import bar
from cpomdp_ppl.rng import fresh_seed, seed_for
from solvers.cids.estimator import ActorCritic
from solvers.cids.group import alone
from solvers.cids.priors import DirichletPriors
from solvers.cids.schedules import Geometric
from solvers.cids.solution import Solution
from solvers.episodes.record import Run, RunRecorder
from solvers.episodes.worlds import EpisodeOutcome, as_world

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.progress import Progress
    from solvers.episodes.worlds import World, WorldLike

    Plays = Callable[[Policy, Backend, Tensor, Tensor, int], EpisodeOutcome]


from solvers.cids.training import _require_functions, fit

RESOLVING: dict[str, Any] = {
    "iterations": 100,
    "learning_rate": Geometric(5e-3, 3e-4, until=0.6),  # large only while the critic learns alone
    "temperature": 0.5,
    "estimator": ActorCritic(random_actions=0.0, exploration=0.0, warm_up=0.5),
}
"""How a policy is fitted further to a new posterior, unless the caller knows better."""


def run(
    model: CPOMDP,
    environment: WorldLike = None,
    num_episodes: int = 10,
    *,
    solution: Solution | Policy | None = None,
    prior: Sequence[float] | Tensor | None = None,
    num_runs: int | None = None,
    likelihood: str | Backend | None = None,
    settled: float | None = None,
    resolve: bool | Mapping[str, Any] = False,
    seed: int | None = None,
    progress: Progress = True,
    callbacks: Sequence[Callable[[Run], None]] = (),
) -> Run:
    """Algorithm 1: meet the same unknown context episode after episode, and carry the posterior on.

    Every episode is played with the policy for `P(C | H_{k-1})`, in the true context (Remark 3.3), and
    what was seen turns that into `P(C | H_k)`. Interrupted by Ctrl-C, it returns the episodes so far; before
    the first, while a solution is fitted, it stops. In a process group, every process has a run of its own.

    Args:
        model: The CPOMDP; what the agent believes of the world.
        environment: The world. A context, by index or name, which the model then simulates; or one for each
            run; or None for contexts in proportion to the prior. Or an environment of your own: an object
            with `reset()` and `step(action)` as in Gymnasium, whose observations are those of the model by
            site (or the bare value, if there is one site; None for nothing seen); or a function that
            leads an `Agent` through an episode (`act`, `observe`) and returns what it earned, or None; or
            a list of them, one for each run. It must stay in one context: `CPOMDPEnv` draws a new one at
            each `reset` unless its prior is sure.
        num_episodes: How many episodes K.
        solution: A solution of `fit(model, prior="dirichlet")`, whose policy reads the posterior; or any
            policy. Left out, such a solution is fitted first.
        prior: Over contexts, `[C]`; the model's if left out.
        num_runs: How many runs R, side by side; left out, 1, or as many as `environment` says.
        likelihood: What updates the posterior: a backend or its name; left out, the `default_backend` for the
            model.
        settled: A run stops when it holds a context more likely than this; left out, never.
        resolve: Whether to fit the policy further to every new posterior, run by run, in place of relying
            on what it learned over all priors: True, or settings of `fit` to do it with.
        seed: Of everything random but environments of your own; left out, fresh entropy is taken. With the
            same seed, simulated worlds have the same first states and noise whoever acts.
        progress: Whether to show a progress bar; or a function that is told a line about it now and then.
        callbacks: Called after every episode with the `Run` so far.

    Raises:
        ValueError: On arguments that make no sense, or an environment that does not answer as it should.
        DegenerateWeightsError: If no context can have produced what was seen.

    Example:
        >>> from cpomdp_ppl.models import LineGrid
        >>> settings = {"likelihood": "exact", "seed": 0, "progress": False}
        >>> solution = fit(LineGrid(), prior="dirichlet", iterations=5, **settings)
        >>> done = run(LineGrid(), "detector left", 3, solution=solution, **settings)
        >>> done.posteriors.shape  # of one run, before and after three episodes
        torch.Size([1, 4, 2])
    """
    require_model(model)
    K = require_count("num_episodes", num_episodes)
    number = None if num_runs is None else require_count("num_runs", num_runs)
    p = one_prior(prior, model)
    if settled is not None:
        require_number("settled", settled, "a probability, or None", above=0.0)
        require(settled < 1, "settled", settled, "a probability, or None")
    _require_functions(callbacks, "a sequence of functions of the run so far")
    root = fresh_seed(seed)
    backend = backend_for(model, likelihood)
    world = as_world(model, environment, number, stratified(p, number or 1, offset=seed_for(root, 0) / 2**32))
    if solution is None:
        ready = DirichletPriors(tuple(p.tolist()))
        with alone():
            solution = fit(model, prior=ready, likelihood=backend, seed=root, progress=progress)
        if not solution.finished:
            raise KeyboardInterrupt
    policy = _as_policy(solution, model)
    if K > 1 and not resolve and not getattr(policy, "amortised", True):
        warnings.warn(
            "solution: its policy acts alike whatever the posterior; "
            'fit it with prior="dirichlet", or say resolve=True',
            stacklevel=2,
        )
    plays: Plays = world.play
    if resolve is not False:
        settings = {**RESOLVING, "likelihood": backend, **_settings(resolve)}
        require(isinstance(policy, nn.Module), "resolve", resolve, "False: the policy has nothing to learn")
        plays = Resolving(model, world, policy, settings).play

    diary = RunRecorder(model, world.contexts, p.log().to(model.device).expand(world.num_runs, -1))
    shown = bar(progress, K, "Algorithm 1", "episodes")
    try:
        for k in range(K):
            believed = diary.log_posterior.exp()  # [R, C]
            going = believed.amax(-1) <= (math.inf if settled is None else settled)
            rows = going.nonzero()[:, 0]
            if not len(rows):
                break
            diary.write(rows, plays(policy, backend, rows, believed, seed_for(root, 1, k)))
            for callback in callbacks:
                callback(diary.read())
            shown.update()
    except KeyboardInterrupt:
        shown.write(f"stopped after {len(diary.lived)} of {K} episodes; these are returned")
    finally:
        shown.close()
    return diary.read()


class Resolving:
    """A world in which every run fits its policy further to what it has come to believe, and then plays.

    Args:
        model: The CPOMDP.
        world: Where it plays.
        policy: Where all runs begin.
        settings: Of `fit`.
    """

    def __init__(self, model: CPOMDP, world: World, policy: Policy, settings: Mapping[str, Any]) -> None:
        self.model, self.world, self.settings = model, world, settings
        self.policies = [copy.deepcopy(policy) for _ in range(world.num_runs)]

    def play(
        self, policy: Policy, backend: Backend, rows: Tensor, prior: Tensor, seed: int
    ) -> EpisodeOutcome:
        """One run after the other; each has a policy of its own in place of the one that is given."""
        lived = []
        for row in rows.tolist():
            settings = {"seed": seed_for(seed, row), "progress": False, **self.settings}
            with alone():
                solution = fit(self.model, prior=prior[row], policy=self.policies[row], **settings)
            if not solution.finished:  # it takes Ctrl-C for a wish to see the best so far
                raise KeyboardInterrupt
            lived.append(self.world.play(solution.policy, backend, rows.new_tensor([row]), prior, seed))
        return EpisodeOutcome.joined(lived)


def _as_policy(solution: Solution | Policy, model: CPOMDP) -> Policy:
    """The policy of a solution of a model like this one, or a policy as it is."""
    if not isinstance(solution, Solution):
        proper = isinstance(solution, Policy) and not isinstance(solution, type)
        require(proper or callable(solution), "solution", solution, "a Solution, or a policy")
        return as_policy(solution)
    theirs, ours = describe_model(solution.model), describe_model(model)
    for part in ("contexts", "actions", "observations"):
        require(theirs[part] == ours[part], "solution", f"one for {part} {theirs[part]}", f"{ours[part]}")
    policy: Policy = solution.policy
    return policy


def _settings(resolve: Any) -> dict[str, Any]:
    """Settings of `fit` that a caller may give for fitting further."""
    names = set(inspect.signature(fit).parameters) - {"model", "prior", "policy", "checkpoint"}
    expected = f"True, False, or settings of fit out of {sorted(names)}"
    require(isinstance(resolve, bool | Mapping), "resolve", resolve, expected)
    given = dict(resolve) if isinstance(resolve, Mapping) else {}
    unknown = sorted(map(str, given.keys() - names))
    require(not unknown, "resolve", unknown, expected)
    return given
