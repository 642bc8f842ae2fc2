"""Algorithm 1: C-IDS episode after episode in the same unknown context."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from cpomdp_ppl.errors import require, require_count, require_model, require_number
from cpomdp_ppl.experiments.fingerprint import describe_model
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.policy import Policy, as_policy
from cpomdp_ppl.prior import one_prior, stratified
from cpomdp_ppl.progress import bar
from cpomdp_ppl.rng import fresh_seed, seed_for
from solvers.cids import training
from solvers.cids.estimator import ActorCritic
from solvers.cids.group import single_process
from solvers.cids.priors import DirichletPriors
from solvers.cids.schedules import Geometric
from solvers.cids.solution import Solution
from solvers.episodes.record import Run, RunInterrupted, RunRecorder
from solvers.episodes.worlds import EpisodeOutcome, as_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.progress import Progress
    from solvers.episodes.worlds import World, WorldLike

RESOLVING: dict[str, Any] = {
    "iterations": 100,
    "learning_rate": Geometric(5e-3, 3e-4, until=0.6),  # large only while the critic learns alone
    "temperature": 0.5,
    "estimator": ActorCritic(random_actions=0.0, exploration=0.0, warm_up=0.5),
    "verdict": False,
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


def algorithm1(
    world: World,
    policy: Policy,
    backend: Backend,
    recorder: RunRecorder,
    num_episodes: int,
    stop_at: float,
    seed: int,
) -> Iterator[Run]:
    """Play the policy for the posterior, update the posterior by what was seen, and begin again.

    Yields:
        The run so far, after every episode; it is over when all runs hold a context likelier than `stop_at`.
    """
    for k in range(num_episodes):
        believed = recorder.log_posterior.exp()  # [R, C]
        rows = (believed.amax(-1) <= stop_at).nonzero()[:, 0]  # the runs that go on
        if not len(rows):
            return
        recorder.update(rows, world.play(policy, backend, rows, believed, seed_for(seed, 1, k)))
        yield recorder.run()


def run(
    model: CPOMDP,
    environment: WorldLike = None,
    num_episodes: int = 10,
    *,
    solution: Solution | Policy | None = None,
    prior: Sequence[float] | Tensor | None = None,
    num_runs: int | None = None,
    likelihood: str | Backend | None = None,
    stop_at: float | None = None,
    resolve: bool | Mapping[str, Any] = False,
    seed: int | None = None,
    progress: Progress = True,
    callbacks: Sequence[Callable[[Run], None]] = (),
) -> Run:
    """Algorithm 1: meet the same unknown context episode after episode, and carry the posterior on.

    Every episode is played with the policy for `P(C | H_{k-1})`, in the true context (Remark 3.3), and
    what was seen turns that into `P(C | H_k)`. Ctrl-C raises `RunInterrupted`, a `KeyboardInterrupt` that
    carries the episodes so far. In a process group, every process has a run of its own.

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
        prior: Prior over contexts, `[C]`; the model's if left out.
        num_runs: How many runs R, side by side; left out, 1, or as many as `environment` says.
        likelihood: What updates the posterior: a backend or its name; left out, the `default_backend` for the
            model.
        stop_at: A run stops when it holds a context more likely than this; left out, never.
        resolve: Whether to fit the policy further to every new posterior, run by run, in place of relying
            on what it learned over all priors: True, or settings of `fit` to do it with.
        seed: Seed of all random numbers, except in environments of your own; left out, fresh entropy is
            taken. With the same seed, simulated worlds have the same first states and noise whoever acts.
        progress: Whether to show a progress bar; or a function that is given a line about it now and then.
        callbacks: Functions that are called after every episode with the `Run` so far.

    Raises:
        ValueError: On arguments that make no sense, or an environment that does not answer as it should.
        DegenerateWeightsError: If no context can have produced what was seen.
        RunInterrupted: On Ctrl-C; while a solution is fitted first, it is `Interrupted`, as of `fit`.

    Examples:
        >>> from solvers import cids
        >>> from cpomdp_ppl.models import LineGrid
        >>> settings = {"likelihood": "exact", "seed": 0, "progress": False}
        >>> solution = cids.fit(LineGrid(), prior="dirichlet", iterations=5, **settings)
        >>> done = run(LineGrid(), "detector left", 3, solution=solution, **settings)
        >>> done.posteriors.shape  # of one run, before and after three episodes
        torch.Size([1, 4, 2])
    """
    require_model(model)
    K = require_count("num_episodes", num_episodes)
    number = None if num_runs is None else require_count("num_runs", num_runs)
    p = one_prior(prior, model)
    if stop_at is not None:
        require_number("stop_at", stop_at, "a probability, or None", above=0.0)
        require(stop_at < 1, "stop_at", stop_at, "a probability, or None")
    proper = isinstance(callbacks, list | tuple) and all(callable(callback) for callback in callbacks)
    require(proper, "callbacks", callbacks, "a sequence of functions of the run so far")
    root = fresh_seed(seed)
    backend = backend_for(model, likelihood)
    contexts = stratified(p, number or 1, offset=seed_for(root, 0) / 2**32)
    world = as_world(model, environment, number, contexts)
    if solution is None:
        ready = DirichletPriors(tuple(p.tolist()))
        with single_process():
            solution = training.fit(model, prior=ready, likelihood=backend, seed=root, progress=progress)
    policy = _as_policy(solution, model)
    if resolve is not False:
        world = ResolvingWorld.around(world, model, policy, backend, resolve)
    elif K > 1 and not getattr(policy, "amortised", True):
        warnings.warn(
            "solution: its policy acts alike whatever the posterior; "
            'fit it with prior="dirichlet", or say resolve=True',
            stacklevel=2,
        )

    log_prior = p.log().to(model.device).expand(world.num_runs, -1)
    reference = policy if getattr(policy, "amortised", False) else None
    recorder = RunRecorder(model, world.contexts, log_prior, reference)
    try:
        with bar(progress, K, "Algorithm 1", "episodes") as shown:
            for so_far in algorithm1(world, policy, backend, recorder, K, stop_at or math.inf, root):
                for callback in callbacks:
                    callback(so_far)
                shown.update()
    except KeyboardInterrupt:
        raise RunInterrupted(recorder.run()) from None
    return recorder.run()


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
