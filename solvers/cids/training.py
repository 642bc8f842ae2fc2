"""Training: the loop around the learner, with progress, interruption and checkpoints."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from cpomdp_ppl.errors import invalid, require, require_count, require_model
from cpomdp_ppl.experiments.files import CheckpointError, made_directory, save_tensors
from cpomdp_ppl.experiments.fingerprint import FingerprintError, differences, fingerprint, require_same
from cpomdp_ppl.policy import as_policy
from cpomdp_ppl.progress import bar
from cpomdp_ppl.rng import fresh_seed, seed_for
from solvers.cids import experience
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.experts import ROUNDS as PRACTICE
from solvers.cids.experts import practise
from solvers.cids.group import process_group, single_process
from solvers.cids.imitation import ROUNDS, imitate
from solvers.cids.lucky import search
from solvers.cids.objective import Variational
from solvers.cids.policy import LSTMPolicy, as_learnable
from solvers.cids.settings import FitSettings
from solvers.cids.solution import (
    CHECKPOINT,
    CHECKPOINT_VERSION,
    Solution,
    as_history,
    read_checkpoint,
    shape_of,
)
from solvers.cids.verdict import FEWEST_EPISODES, SEED, NotSolvedWarning, Trial, Verdict, judge

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Decision, History, Policy
    from cpomdp_ppl.progress import Bar, Progress
    from solvers.cids.estimator import Estimator
    from solvers.cids.group import SingleProcess
    from solvers.cids.learner import Learner
    from solvers.cids.objective import Objective
    from solvers.cids.priors import PriorLike
    from solvers.cids.schedules import Schedule

POORLY_IMITATED = 0.8
"""Who does what a rule does less often than this, of all decisions, does not do it."""

WINDOW = 20
"""How many iterations are averaged to decide which policy was the best."""


class Callback(Protocol):
    """Called after every iteration."""

    def __call__(self, iteration: int, measured: Mapping[str, float], policy: Any) -> None:
        """Take note.

        Args:
            iteration: How many are over, from 1.
            measured: What was measured on the batch, by the names of `Solution.history`.
            policy: As it is now; not to be changed.
        """
        ...


class TensorBoard:
    """Write every measurement to TensorBoard; needs the extra `tensorboard`.

    Args:
        directory: Directory of the event files.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> from solvers import cids
        >>> cids.fit(LineGrid(), callbacks=[TensorBoard("runs/line_grid")])  # doctest: +SKIP
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory))

    def __call__(self, iteration: int, measured: Mapping[str, float], policy: Any) -> None:
        """Write one iteration."""
        for name, value in measured.items():
            self.writer.add_scalar(name, value, iteration)
        self.writer.flush()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a fit.

    Attributes:
        solution: The best policy so far, and the history up to here.

    Examples:
        >>> def work():
        ...     try:
        ...         return cids.fit(model)
        ...     except cids.Interrupted as stop:
        ...         return stop.solution
    """

    def __init__(self, solution: Solution) -> None:
        super().__init__(solution)
        self.solution = solution

    def __str__(self) -> str:
        done, asked = self.solution.history.sizes["iteration"], self.solution.settings["iterations"]
        return f"stopped after {done:,} of {asked:,} iterations"


def fit(
    model: CPOMDP,
    *,
    likelihood: str | Backend | None = None,
    objective: str | Objective = "information",
    temperature: float | Schedule | None = None,
    prior: PriorLike = None,
    policy: nn.Module | str | None = None,
    start: Policy | Callable[[History], Decision] | None = None,
    estimator: Estimator | None = None,
    iterations: int | None = None,
    batch_size: int = 200,
    learning_rate: float | Schedule | None = None,
    seed: int | None = None,
    progress: Progress = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 25,
    callbacks: Sequence[Callback] = (),
    verdict: bool = True,
) -> Solution:
    """Learn a policy for a CPOMDP by policy gradient on an information-directed objective.

    Each iteration plays a batch of episodes, computes their likelihood under every context, and improves the
    policy. Ctrl-C raises `Interrupted`, a `KeyboardInterrupt` that carries the best policy so far.

    In a process group of `torch.distributed`, all processes call this with the same arguments. Each plays
    some of a batch's shards (of at most 250 episodes, with random numbers of their own), gradients are
    averaged, and all return the same solution: that of a single process, up to the order in which numbers are
    added. The first process alone reads and writes the checkpoint, shows progress, warns and calls callbacks.
    An error or Ctrl-C in one process ends the fit in all. It is not the same solution if a policy draws
    random numbers while it is improved, as dropout does, or takes means over the batch, as BatchNorm does,
    which are then over this process's episodes; in objectives and estimators of your own, `batch.mean` and
    `batch.spread` are over all. Inside `solvers.cids.group.single_process()`, a fit belongs to its process
    alone: each fits another seed, say, or the first fits and the others do not. So do fits in callbacks, and
    those of `run`.

    Args:
        model: The CPOMDP.
        likelihood: A backend or its name: `"smc"`, `"ekf"`, `"ukf"`, `"exact"`, `"grid"`. Left out or
            `"auto"`, it is exact for a finite model of moderate size, a Kalman filter where that is exact,
            and otherwise a particle filter with enough particles: see
            `cpomdp_ppl.inference.choice.default_backend`.
        objective: `"information"` (equation 5 of the paper: `E[return] + τ I(C; Y)`), `"variational"` (its
            Lemma 2 and Algorithm 2), or any `Objective`.
        temperature: τ, what a nat of information is worth in units of reward: a number, or a function of the
            progress from 0 to 1. Left out, it is found from the model for policies that read beliefs, and
            falls; for others it falls from 3 to 0.5 for the information objective, and is 0.2, the paper's,
            for the variational one.
        prior: Prior over contexts, `[C]`; the model's if left out. With `"dirichlet"`, or a function that
            draws priors `[B, C]` for B episodes, the policy is amortised: it reads the prior and serves all
            of them, as `run` needs it.
        policy: `"belief"`: a `BeliefPolicy`, which reads what the filter makes of the history, and serves
            every prior; `"lstm"`: an `LSTMPolicy`, the paper's, which reads the history itself; or a module
            that is a `Policy` whose decisions are distributions, and whose weights are learned in place.
            Left out, `"belief"` for the information objective and `"lstm"` for the variational one.
        start: A rule to start from: any policy, or a function of the history. A policy that reads beliefs
            first learns to do what the rule does, and goes on from there.
        estimator: How the gradient is estimated. Left out, an `ActorCritic` for the information objective,
            and `Reinforce()`, the paper's, for the variational one; where a search finds that rewards are far
            away, its exploration is found from the model, too.
        iterations: How many batches to play, at most: with a policy that reads beliefs, the fit ends when it
            has settled. Left out, 600 for such a policy; for others, 800 for the information objective and
            4,000 for the variational one. It is half as many again if priors are drawn.
        batch_size: Number of episodes in a batch; N processes need more than 250 (N − 1).
        learning_rate: Step size of Adam: a number, or a function of the progress. Left out, it falls from
            0.006 to 0.0003 for `ActorCritic`, and is 0.001, the paper's, otherwise.
        seed: The same seed gives the same policy; left out, fresh entropy is taken.
        progress: Whether to show a progress bar, with the time that is left; or a function that gets
            a line about it now and then.
        checkpoint: A directory. What has been learned is written there as it goes, and a fit that finds its
            own checkpoint goes on from there, to exactly the result it would have had without a break.
        checkpoint_every: How many iterations lie between two checkpoints.
        callbacks: Called after every iteration with `(iteration, measured, policy)`.
        verdict: Whether to play, at the end, every action all the time, a fixed plan, and the policy before
            training (or `start`), and to warn if one of them does as well; see `Verdict`. A fit of fewer than
            4,000 episodes is not judged.

    Returns:
        The policy that did best over a window of iterations, judged by return plus information at the last
        temperature, with the history of the fit and the verdict on it.

    Raises:
        ValueError: On arguments that make no sense.
        DivergedError: If a loss or gradient is not finite, saying which and when.
        CheckpointError: If the checkpoint is of another fit.
        Interrupted: On Ctrl-C, after the checkpoint has been written, if there is one.
        ProcessFailedError: If another process failed, or is gone.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> from solvers import cids
        >>> solution = cids.fit(LineGrid(), likelihood="exact", iterations=5, seed=0, progress=False)
        >>> solution.evaluate(100).returns.num_episodes
        100
    """
    device = getattr(model, "device", None)
    device = device if isinstance(device, torch.device) else torch.device("cpu")
    with process_group(device) as group, single_process():  # fits inside this one are not shared
        require_model(model)
        choices = (objective, estimator, prior, temperature, learning_rate, iterations, batch_size)
        settings = FitSettings.of(model, likelihood, policy, *choices, start=start)
        checkpoint_every = require_count("checkpoint_every", checkpoint_every)
        proper = isinstance(callbacks, list | tuple) and all(callable(callback) for callback in callbacks)
        expected = "a sequence of functions of iteration, measurements and policy"
        require(proper, "callbacks", callbacks, expected)
        _require_a_shard_each(settings.batch_size, group.size)
        first = group.rank == 0
        directory = made_directory("checkpoint", checkpoint) if checkpoint is not None and first else None
        saved = None if directory is None else read_checkpoint(directory, model.device)

        number = fresh_seed(saved["seed"] if seed is None and saved is not None else seed)
        of_first = int(group.broadcast({"seed": number})["seed"])
        number = of_first if seed is None else number
        net = _policy(policy, settings, number)
        before = copy.deepcopy(net.state_dict())
        learner = settings.learner(net, number, group)
        fitting = Fitting(learner, settings.describe(net, number), settings.prior, directory)
        _require_same_fit(group, fitting, checkpoint is not None)
        resumed = group.broadcast({"resumed": saved is not None})["resumed"]
        if saved is not None:
            fitting.restore(saved)
        elif not resumed:
            _prepare(fitting, settings, policy in (None, "belief"), progress if first else False)
        fitting.share(group)  # the weights to begin with, or what was saved

        what = f"C-IDS, {batch_size} episodes an iteration, likelihoods by {settings.backend.label}"
        shown = bar(progress if first else False, learner.iterations, what, "iterations", learner.iteration)
        with nullcontext() if first else warnings.catch_warnings(action="ignore"):
            _train(fitting, checkpoint_every, callbacks if first else (), shown)
        fitting.share(group)
        found = _judged(fitting, settings, before, group) if verdict else None
        if found is not None and not found.solved and first:
            warnings.warn(found.sentence, NotSolvedWarning, stacklevel=2)
        return replace(fitting.solution(), verdict=found)


def _prepare(fitting: Fitting, settings: FitSettings, fresh: bool, progress: Progress) -> None:
    """Let a policy that reads beliefs imitate a rule, or else practise, before it learns by itself."""
    policy, seed = fitting.learner.policy, fitting.learner.seed
    try:
        if settings.start is not None:
            _imitate(policy, settings.start, settings, seed, progress)
        elif settings.far is not None and settings.found is not None and fresh:
            rounds = min(PRACTICE, settings.iterations)
            with bar(progress, rounds, "Practice, told context and state", "batches") as shown:
                of_use = practise(policy, settings.far.practice, settings.found, rounds, seed, shown)
            if of_use:
                fitting.learner.set_out_far()
    except KeyboardInterrupt:
        raise Interrupted(fitting.solution()) from None


def _judged(
    fitting: Fitting, settings: FitSettings, before: Mapping[str, Tensor], group: SingleProcess
) -> Verdict | None:
    """The verdict on a fit that ran to its end; None if it was short. The first process finds it."""
    if len(fitting.measured) * settings.batch_size < FEWEST_EPISODES:
        return None
    found, solution, learner = None, fitting.solution(), fitting.learner
    if group.rank == 0:
        tau = float(learner.temperature(1.0))
        backend = learner.experience.backend
        trial = Trial(learner.model, backend, solution.prior, tau, seed_for(learner.seed, SEED))
        lucky = search(learner.model, solution.prior) if settings.found is None else settings.found
        rival = before if settings.start is None else as_policy(settings.start)
        try:
            found = judge(trial, solution.policy, rival, lucky.plans)
        except KeyboardInterrupt:
            raise Interrupted(solution) from None
    shared = group.broadcast({"verdict": None if found is None else found.as_dict()})["verdict"]
    return None if shared is None else Verdict.from_dict(shared)


def _imitate(
    net: Any,
    rule: Policy | Callable[[History], Decision],
    settings: FitSettings,
    seed: int,
    progress: Progress,
) -> None:
    """Teach the policy what a rule does, before it goes on by itself."""
    with bar(progress, ROUNDS, "Imitating the rule to start from", "rounds") as shown:
        agreed = imitate(net, rule, settings.priors, settings.batch_size, seed, shown)
    if agreed < POORLY_IMITATED:
        warnings.warn(
            f"start: the policy does what the rule does in {100 * agreed:.0f} % of its decisions only",
            stacklevel=4,
        )


def _train(fitting: Fitting, every: int, callbacks: Sequence[Callback], shown: Bar) -> None:
    """Iterate to the end, and keep what has been learned every so many iterations."""
    learner = fitting.learner
    learner.policy.train()
    try:
        while not learner.done:
            measured = fitting.iterate()
            for callback in callbacks:
                callback(learner.iteration, measured, learner.policy)
            _show(shown, measured)
            if learner.iteration % every == 0 or learner.done:
                fitting.save()
    except KeyboardInterrupt:
        fitting.save()
        raise Interrupted(fitting.solution()) from None
    finally:
        shown.close()


class Fitting:
    """A learner, what it has measured, and the best policy it has had, which checkpoints keep."""

    def __init__(
        self, learner: Learner, description: dict[str, Any], prior: Tensor, directory: Path | None
    ) -> None:
        self.learner = learner
        self.description = description
        self.prior = prior
        self.directory = directory
        self.measured: list[dict[str, float]] = []
        self.best = -math.inf
        self.best_weights: dict[str, Tensor] | None = None
        self.complete = self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        """The learner's state between two iterations, to be written even if Ctrl-C comes in the next one."""
        self.finished = self.learner.done
        state = self.learner.state_dict()
        return state if self.directory is None else copy.deepcopy(state)

    def iterate(self) -> dict[str, float]:
        """One iteration, and at the end of every window a look at whether the policy is the best so far."""
        measured = self.learner.iterate()
        self.measured.append(measured)
        if len(self.measured) % WINDOW == 0 or self.learner.done:
            self._compare()
        self.complete = self._snapshot()
        return measured

    def _compare(self) -> None:
        """Keep the policy unless an earlier one was better beyond doubt: steps get smaller.

        The measure is return plus information at the last temperature, which stays while τ falls.
        """
        tau = self.learner.temperature(1.0)
        window = [each for each in self.measured[-WINDOW:] if "entropy" in each]
        worth = np.array([each["return"] + tau * each["information_lower"] for each in window])
        if not len(worth):
            return
        error = worth.std() / len(worth) ** 0.5
        if self.best_weights is None or worth.mean() >= self.best - 2 * error:
            weights = self.learner.policy.state_dict()
            self.best_weights = {name: weight.detach().clone() for name, weight in weights.items()}
        self.best = max(self.best, float(worth.mean()))

    def solution(self) -> Solution:
        """The policy with its best weights, and the history."""
        policy, model = self.learner.policy, self.learner.model
        if self.best_weights is not None:
            policy.load_state_dict(self.best_weights)
        policy.eval()
        finished = self.learner.done
        history = as_history(self._columns(len(self.measured)))
        return Solution(model, policy, self.prior.to(model.device), history, self.description, finished)

    def _columns(self, iterations: int) -> dict[str, list[float]]:
        names = sorted({name for measured in self.measured for name in measured})
        return {name: [each.get(name, math.nan) for each in self.measured[:iterations]] for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as of the last complete iteration: tensors and plain numbers."""
        columns = self._columns(self.complete["iteration"])
        return {
            "learner": self.complete,
            "measured": {name: torch.tensor(c, dtype=torch.float64) for name, c in columns.items()},
            "best": self.best,
            "best_weights": self.best_weights,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        if state["best_weights"] is not None:  # that they fit must be known now, not at the end
            self.learner.policy.load_state_dict(state["best_weights"])
        self.learner.load_state_dict(state["learner"])
        columns = {name: column.tolist() for name, column in state["measured"].items()}
        self.measured = [
            {name: column[k] for name, column in columns.items() if not math.isnan(column[k])}
            for k in range(self.learner.iteration)
        ]
        self.best, self.best_weights = state["best"], state["best_weights"]
        self.complete = self._snapshot()

    def save(self) -> None:
        """Write a checkpoint, if there is a place for it, with what `load` needs to make the policy again."""
        if self.directory is None:
            return
        content = {
            "version": CHECKPOINT_VERSION,
            **self.state_dict(),
            "settings": self.description,
            "code": self._code,
            "seed": self.learner.seed,
            "prior": self.prior.tolist(),
            "finished": self.finished,
            **shape_of(self.learner.policy),
        }
        save_tensors(self.directory / CHECKPOINT, content)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from the checkpoint in the directory.

        Raises:
            CheckpointError: If it is of another fit, or damaged.
        """
        assert self.directory is not None
        path = self.directory / CHECKPOINT
        version = saved.get("version")
        if not isinstance(version, int) or version != CHECKPOINT_VERSION:  # a tensor has no one answer
            raise CheckpointError(f"{path} was written by another version; use another directory")
        require_same(path, saved["settings"], self.description)
        require_same(path, {"code": saved.get("code")}, {"code": self._code})
        try:
            self.load_state_dict(saved)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    @cached_property
    def _code(self) -> str | None:
        """A fingerprint of the classes that take part: their methods and constants; None if there is none."""
        parts = (self.learner.model, self.learner.objective, self.learner.estimator, self.learner.policy)
        try:
            return fingerprint([type(part) for part in parts])
        except FingerprintError:
            return None

    def share(self, group: SingleProcess) -> None:
        """Go on from where the first process is, on whatever machine each of them runs."""
        if group.size > 1:
            self.load_state_dict(group.broadcast(self.state_dict()))


def _policy(policy: nn.Module | str | None, settings: FitSettings, seed: int) -> Any:
    """The policy to be learned."""
    if policy is None:
        policy = "lstm" if isinstance(settings.objective, Variational) else "belief"
    if policy == "lstm":
        return LSTMPolicy(settings.model, amortised=settings.amortised, seed=seed)
    if policy == "belief":
        return BeliefPolicy(settings.model, likelihood=settings.backend, seed=seed)
    net = as_learnable(policy)
    if isinstance(net, BeliefPolicy):
        net.backend = settings.backend
    if settings.amortised and not getattr(net, "amortised", True):
        raise invalid("policy", "one that does not read the prior", "LSTMPolicy(model, amortised=True), say")
    return net


def _require_a_shard_each(batch_size: int, size: int) -> None:
    """Raise unless there are as many shards as processes."""
    fewest = (size - 1) * experience.SHARD + 1
    shards = f"shards of at most {experience.SHARD}, so that each process has one"
    expected = f"at least {fewest} episodes for a world size of {size}, in {shards}"
    require(len(experience.split(batch_size)) >= size, "batch_size", batch_size, expected)


def _require_same_fit(group: SingleProcess, fitting: Fitting, checkpoint: bool) -> None:
    """Raise unless this process was asked for the same fit as the first."""
    learned = [name for name, w in fitting.learner.networks.named_parameters() if w.requires_grad]
    asked = {**fitting.description, "checkpoint": checkpoint, "requires_grad": learned}
    of_first = group.broadcast(asked)
    for name in differences(asked, of_first):
        raise invalid(name, asked.get(name), f"what the first process has, {of_first.get(name)!r}")


def _show(bar: Bar, measured: dict[str, float]) -> None:
    names = {"return": "return", "entropy": "H bits", "temperature": "τ"}
    words = [f"{label} {measured[name]:.2f}" for name, label in names.items() if name in measured]
    bar.set_postfix_str(", ".join(words), refresh=False)
    bar.update()
