"""C-IDS: learn a policy that earns reward and finds out the context."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from cpomdp_ppl.errors import (
    invalid,
    require,
    require_count,
    require_model,
)
from cpomdp_ppl.experiments import run_files
from cpomdp_ppl.experiments.files import (
    CheckpointError,
    as_directory,
    load_json,
    load_tensors,
    made_directory,
    save_tensors,
)
from cpomdp_ppl.experiments.fingerprint import describe, describe_model, differences, require_same
from cpomdp_ppl.inference import ParticleFilter, as_backend
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.policy import Policy
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.progress import bar
from cpomdp_ppl.rng import fresh_seed
from solvers.cids import shards
from solvers.cids.batchwide import takes_whole
from solvers.cids.estimator import ActorCritic, Reinforce, as_estimator
from solvers.cids.group import alone, batchwide
from solvers.cids.learner import Learner, policy_weights
from solvers.cids.objective import Variational, as_objective
from solvers.cids.policy import LSTMPolicy
from solvers.cids.priors import OnePrior, as_sampler, described_priors
from solvers.cids.schedules import Constant, Geometric, Linear, Schedule, as_schedule
from solvers.cids.solution import EARLIER, SETTINGS, WEIGHTS, Solution, shape_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.progress import Bar, Progress
    from solvers.cids.batchwide import Batchwide
    from solvers.cids.callbacks import Callback
    from solvers.cids.estimator import Estimator
    from solvers.cids.objective import Objective
    from solvers.cids.priors import PriorLike
    from solvers.episodes.worlds import EpisodeOutcome

    Plays = Callable[[Policy, Backend, Tensor, Tensor, int], EpisodeOutcome]

CHECKPOINT = "checkpoint.pt"
WINDOW = 20  # iterations whose mean decides which policy was the best


def fit(
    model: CPOMDP,
    *,
    likelihood: str | Backend | None = None,
    objective: str | Objective = "information",
    temperature: float | Schedule | None = None,
    prior: PriorLike = None,
    policy: nn.Module | None = None,
    estimator: Estimator | None = None,
    iterations: int | None = None,
    batch_size: int = 200,
    learning_rate: float | Schedule | None = None,
    seed: int | None = None,
    progress: Progress = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 25,
    callbacks: Sequence[Callback] = (),
) -> Solution:
    """Learn a policy for a CPOMDP by policy gradient on an information-directed objective.

    Each iteration plays a batch of episodes, computes their likelihood under every context, and improves the
    policy. Interrupted by Ctrl-C, it returns the best policy so far.

    In a process group of `torch.distributed`, all processes call this with the same arguments. Each plays
    some of a batch's shards (of at most 250 episodes, with random numbers of their own), gradients are
    averaged, and all return the same solution: that of a single process, up to the order in which numbers are
    added. The first process alone reads and writes the checkpoint, shows progress and calls callbacks. What
    fails in one ends the fit in all, and Ctrl-C waits for the next exchange. It is not the same solution if a
    policy draws random numbers while it is improved, as dropout does, or takes means over the batch, as
    BatchNorm does, which are then over this process's episodes; objectives and estimators of your own are
    told how to take theirs over all (`Objective.payoffs`, `GradientStep.whole`). Inside
    `solvers.cids.group.alone()`, a fit is of its process alone: each fits a seed of its own, say, or the first
    fits and the others do not. So are fits in callbacks, and those of `run`.

    Args:
        model: The CPOMDP.
        likelihood: A backend or its name: `"smc"`, `"ekf"`, `"ukf"`, `"exact"`, `"grid"`. Left out, it is
            exact for a finite model of moderate size, and otherwise the particle filter: see
            `cpomdp_ppl.inference.choice.default_backend`.
        objective: `"information"` (equation 5 of the paper: `E[return] + τ I(C; Y)`), `"variational"` (its
            Lemma 2 and Algorithm 2), or any `Objective`.
        temperature: τ, what a nat of information is worth in units of reward: a number, or a function of the
            progress from 0 to 1. Left out, it falls from 3 to 0.5 for the information objective, and is 0.2,
            the paper's, for the variational one.
        prior: Over contexts, `[C]`; the model's if left out. With `"dirichlet"`, or a function that draws
            priors `[B, C]` for B episodes, the policy is amortised: it reads the prior and serves all of
            them, as `run` needs it.
        policy: A module that is a `Policy` whose decisions are distributions; its weights are learned in
            place. Left out, an `LSTMPolicy` with 64 units.
        estimator: How the gradient is estimated. Left out, `ActorCritic()` for the information objective, and
            `Reinforce()`, the paper's, for the variational one.
        iterations: How many batches to play. Left out, 800 for the information objective and 4,000 for the
            variational one; half as many again for an amortised policy.
        batch_size: How many episodes in a batch; N processes need more than 250 (N − 1).
        learning_rate: Of Adam: a number, or a function of the progress. Left out, it falls from 0.006 to
            0.0003 for `ActorCritic`, and is 0.001, the paper's, otherwise.
        seed: The same seed gives the same policy; left out, fresh entropy is taken.
        progress: Whether to show a progress bar, with the time that is left; or a function that is told a
            line about it now and then.
        checkpoint: A directory. What has been learned is written there as it goes, and a fit that finds its
            own checkpoint goes on from there, to exactly where it would have got without a break.
        checkpoint_every: How many iterations apart.
        callbacks: Called after every iteration with `(iteration, measured, policy)`.

    Returns:
        The policy that did best over a window of iterations, judged by return plus information at the last
        temperature, with the history of the fit.

    Raises:
        ValueError: On arguments that make no sense.
        DivergedError: If a loss or gradient is not finite, saying which and when.
        CheckpointError: If the checkpoint is of another fit.
        ProcessFailedError: If another process failed, or is gone.

    Example:
        >>> from cpomdp_ppl.models import LineGrid
        >>> from solvers import cids
        >>> solution = cids.fit(LineGrid(), likelihood="exact", iterations=5, seed=0, progress=False)
        >>> solution.evaluate(100).returns.num_episodes
        100
    """
    device = getattr(model, "device", None)
    whole = batchwide(device if isinstance(device, torch.device) else torch.device("cpu"))
    first = whole.rank == 0
    with whole.together(), alone():  # a fit within this one is nobody else's
        require_model(model)
        goal = as_objective(objective)
        asked_for = None if likelihood is None else as_backend(likelihood)
        variational = isinstance(goal, Variational)
        default: Estimator = Reinforce() if variational else ActorCritic()
        gradient = default if estimator is None else as_estimator(estimator)
        if temperature is None:
            temperature = Constant(0.2) if variational else Geometric(3.0, 0.5, until=0.7)
        if learning_rate is None:
            learning_rate = Linear(6e-3, 3e-4) if isinstance(gradient, ActorCritic) else Constant(1e-3)
        priors = as_sampler(model, prior)
        amortised = not isinstance(priors, OnePrior)
        if iterations is None:
            iterations = (4000 if variational else 800) * (3 if amortised else 2) // 2
        iterations = require_count("iterations", iterations)
        batch_size = require_count("batch_size", batch_size)
        require(
            len(shards.split(batch_size)) >= whole.size,
            "batch_size",
            batch_size,
            f"at least {(whole.size - 1) * shards.SHARD + 1} episodes for a world size of {whole.size}, in "
            f"shards of at most {shards.SHARD}, so that each process has one",
        )
        if whole.size > 1:
            _require_batchwide(gradient)
        checkpoint_every = require_count("checkpoint_every", checkpoint_every)
        tau = as_schedule("temperature", temperature)
        rate = as_schedule("learning_rate", learning_rate, positive=True)
        # What an amortised policy is evaluated with, unless another prior is asked for.
        p = model.prior().detach().double() if amortised else priors(1)[0]
        _require_functions(callbacks, "a sequence of functions of iteration, measurements and policy")
        directory = None if checkpoint is None or not first else made_directory("checkpoint", checkpoint)
        saved = None if directory is None else _saved(directory, model)

        own = fresh_seed(saved["seed"] if seed is None and saved is not None else seed)
        earlier = asked_for is None and saved is not None and _took_particles(saved)
        first_asks = whole.shared({"seed": own, "earlier": earlier})
        backend = ParticleFilter() if first_asks["earlier"] else backend_for(model, asked_for)
        number = int(first_asks["seed"])
        require(seed is None or own == number, "seed", seed, f"that of the first process, {number}")
        net = LSTMPolicy(model, amortised=amortised, seed=number) if policy is None else _as_module(policy)
        if amortised and not getattr(net, "amortised", True):
            raise invalid(
                "policy", "one that does not read the prior", "LSTMPolicy(model, amortised=True), say"
            )
        learner = Learner(
            model, net, backend, goal, gradient, priors, tau, rate, iterations, batch_size, number, whole
        )
        settings = dict(
            **describe_model(model),
            likelihood=describe(backend),
            objective=describe(goal),
            estimator=describe(gradient),
            policy=[[name, list(weight.shape)] for name, weight in net.state_dict().items()],
            prior=described_priors(priors) if amortised else p.tolist(),
            temperature=describe(tau),
            learning_rate=describe(rate),
            iterations=iterations,
            batch_size=batch_size,
            seed=number,
            **({"shard": shards.SHARD} if batch_size > shards.SHARD else {}),
        )
        learned = [name for name, weight in learner.networks.named_parameters() if weight.requires_grad]
        asked = {**settings, "checkpoint": checkpoint is not None, "requires_grad": learned}
        _require_same_fit(asked, whole.shared({"settings": asked})["settings"])
        fitting = Fitting(learner)
        if directory is not None and saved is not None:
            require_same(directory / CHECKPOINT, saved["settings"], settings)
            try:
                fitting.load_state_dict(saved)
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(f"{directory / CHECKPOINT} is damaged: {error}") from error
        fitting.share(whole)  # weights to begin with, or what was saved

        net.train()
        what = f"C-IDS, {batch_size} episodes an iteration, likelihoods by {backend.name}"
        shown = bar(progress if first else False, iterations, what, "iterations", learner.iteration)
        try:
            with whole.together():
                while learner.iteration < iterations:
                    measured = fitting.iterate()
                    if first:
                        for callback in callbacks:
                            callback(learner.iteration, measured, net)
                        _show(shown, measured)
                    due = learner.iteration % checkpoint_every == 0 or learner.iteration == iterations
                    if directory is not None and due:
                        state = {**fitting.state_dict(), "settings": settings, "seed": number}
                        # With these, `load` can make the policy again.
                        save_tensors(directory / CHECKPOINT, {**state, **shape_of(net), "prior": p.tolist()})
                    whole.agree()
        except KeyboardInterrupt:
            if first and learner.iteration < iterations:
                done = f"stopped after {learner.iteration} of {iterations} iterations"
                shown.write(f"{done}; this is the best so far")
        finally:
            shown.close()
        whole.finish()
        fitting.share(whole)
        net.eval()
        finished = learner.iteration == iterations
        prior = p.to(model.device)
        return Solution(model, fitting.best_policy(), prior, fitting.history(), settings, finished)


def _require_functions(callbacks: Any, expected: str) -> None:
    proper = isinstance(callbacks, list | tuple) and all(callable(callback) for callback in callbacks)
    require(proper, "callbacks", callbacks, expected)


def _require_same_fit(settings: Mapping[str, Any], firsts: Mapping[str, Any]) -> None:
    """Raise unless this process was asked for the same fit as the first."""
    for name in differences(settings, firsts):
        raise invalid(name, settings.get(name), f"what the first process has, {firsts.get(name)!r}")


def _require_batchwide(estimator: Estimator) -> None:
    """Raise unless an estimator can tell means of the batch from those of its own episodes."""
    expected = "one whose `advantages` also takes `whole`, as several processes have the batch between them"
    require(takes_whole(estimator.advantages), "estimator", type(estimator).__name__, expected)


class Fitting:
    """A learner, what it has measured, and the best policy it has had.

    Args:
        learner: At its start.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.measured: list[dict[str, float]] = []
        self.best = -math.inf
        self.best_weights: dict[str, Tensor] | None = None

    def iterate(self) -> dict[str, float]:
        """One iteration, and at the end of every window a look at whether the policy is the best so far."""
        measured = self.learner.iterate()
        self.measured.append(measured)
        if len(self.measured) % WINDOW == 0 or self.learner.iteration == self.learner.iterations:
            self._compare()
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
        if self.best_weights is None or worth.mean() >= self.best - error:
            self.best_weights = policy_weights(self.learner.policy)
        self.best = max(self.best, float(worth.mean()))

    def share(self, whole: Batchwide) -> None:
        """Go on from where the first process is, whatever machine each of them runs on."""
        if whole.size > 1:
            self.load_state_dict(dict(whole.shared(self.state_dict())))

    def best_policy(self) -> Any:
        """The policy with its best weights."""
        if self.best_weights is not None:
            self.learner.policy.load_state_dict(self.best_weights)
        return self.learner.policy

    def history(self) -> xr.Dataset:
        """What was measured, by iteration."""
        return as_history(self._columns())

    def _columns(self) -> dict[str, list[float]]:
        names = sorted({name for measured in self.measured for name in measured})
        return {name: [measured.get(name, math.nan) for measured in self.measured] for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as tensors and plain numbers."""
        columns = {name: torch.tensor(c, dtype=torch.float64) for name, c in self._columns().items()}
        return {
            "learner": self.learner.state_dict(),
            "measured": columns,
            "best": self.best,
            "best_weights": self.best_weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
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


def as_history(columns: Mapping[str, Sequence[float]]) -> xr.Dataset:
    """Measurements as a dataset, by iteration from 1."""
    length = len(next(iter(columns.values()))) if columns else 0
    variables = {name: ("iteration", np.asarray(column)) for name, column in columns.items()}
    return xr.Dataset(variables, {"iteration": np.arange(1, length + 1)})


def load(directory: str | os.PathLike[str], model: CPOMDP, *, policy: nn.Module | None = None) -> Solution:
    """Read a solution that `Solution.save` wrote; or the best policy so far, from a checkpoint of `fit`.

    Files hold weights and numbers, never code: the model, and a policy of your own, are yours to give.

    Args:
        directory: Where it was saved, or the `checkpoint` of a fit that was stopped, however; or the run
            folder of a `cpomdp fit`, which has one of them.
        model: The CPOMDP it was learned for; one with other constants is refused.
        policy: A module like the one that was learned, whose weights are overwritten; left out, an
            `LSTMPolicy`.

    Raises:
        CheckpointError: If the files are not of a solution of this model.
    """
    require_model(model)
    folder = as_directory("directory", directory)
    places = (folder, folder / run_files.SOLUTION, folder / run_files.CHECKPOINT)
    solutions = [place for place in places if (place / SETTINGS).is_file()]
    checkpoints = [place for place in places if (place / CHECKPOINT).is_file()]
    if checkpoints and not solutions:
        return _so_far(checkpoints[0], model, policy)
    found = f"a directory with {SETTINGS}, or the run folder of a fit"
    require(bool(solutions), "directory", str(directory), found)
    path = solutions[0]
    content = _solution_content(path)
    if not (path / content["weights"]).exists():  # another process may just have saved another
        content = _solution_content(path)
    settings = content["settings"]
    expected = describe_model(model)
    require_same(path / SETTINGS, {name: settings.get(name) for name in expected}, expected)
    file = path / content["weights"]
    net = _made_again(model, policy, content, load_tensors(file, model.device), file)
    prior = as_prior(content["prior"], model.num_contexts, 1).to(model.device)
    try:
        history = as_history(content["history"])
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path / SETTINGS} is no solution: history: {error}") from error
    return Solution(model, net, prior, history, settings, content["finished"])


def _so_far(path: Path, model: CPOMDP, policy: nn.Module | None) -> Solution:
    """The best policy that a checkpoint holds, or that of its last iteration before there was a best."""
    file = path / CHECKPOINT
    state = _saved(path, model)
    assert state is not None
    settings, expected = state["settings"], describe_model(model)
    require_same(file, {name: settings.get(name) for name in expected}, expected)
    if not isinstance(state.get("prior"), list):
        raise CheckpointError(f"{file} does not say what its policy is: go on with the fit, which does")
    try:
        last = {name[2:]: x for name, x in state["learner"]["networks"].items() if name.startswith("0.")}
        history = as_history({name: column.tolist() for name, column in state["measured"].items()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    best = last if state["best_weights"] is None else state["best_weights"]
    net = _made_again(model, policy, state, best, file)
    prior = as_prior(state["prior"], model.num_contexts, 1).to(model.device)
    finished = history.sizes["iteration"] == settings.get("iterations")
    return Solution(model, net, prior, history, settings, finished)


def _made_again(
    model: CPOMDP, policy: nn.Module | None, shape: Mapping[str, Any], weights: Any, file: Path
) -> Any:
    """A policy with weights that were found in a file: the one given, or an `LSTMPolicy` of that shape."""
    if policy is not None:
        net = _as_module(policy)
    elif not isinstance(hidden := shape.get("hidden"), int):
        raise invalid("policy", None, "a module like the one that was learned, which is not an LSTMPolicy")
    else:
        size = getattr(weights.get("lstm.weight_hh_l0"), "shape", None)
        if size != (4 * hidden, hidden):  # before a network of whatever size is made
            raise CheckpointError(f"{file} is of a policy with hidden = {hidden}, but its weights are {size}")
        net = LSTMPolicy(model, hidden, amortised=bool(shape.get("amortised", False)))
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{file} does not fit the policy: {error}") from error
    net.eval()
    return net


def _solution_content(path: Path) -> dict[str, Any]:
    content = {"weights": EARLIER, **load_json(path / SETTINGS)}
    kinds = {
        "weights": str,
        "settings": dict,
        "prior": list,
        "history": dict,
        "hidden": int | None,
        "finished": bool,
    }
    for name, kind in kinds.items():
        if not isinstance(content.get(name, ...), kind):
            raise CheckpointError(f"{path / SETTINGS} is no solution: {name} is {content.get(name)!r}")
    if not WEIGHTS.fullmatch(content["weights"]):  # a file beside this one, and no other
        raise CheckpointError(f"{path / SETTINGS} is no solution: weights is {content['weights']!r}")
    return content


def _saved(directory: Path, model: CPOMDP) -> dict[str, Any] | None:
    path = directory / CHECKPOINT
    if not path.exists():
        return None
    state = load_tensors(path, model.device)
    missing = {"learner", "measured", "best", "best_weights", "settings", "seed"} - set(state)
    if missing:
        raise CheckpointError(f"{path} is no checkpoint of a fit: it has no {', '.join(sorted(missing))}")
    for name, kind in {"settings": dict, "seed": int}.items():
        if not isinstance(state[name], kind):
            raise CheckpointError(f"{path} is no checkpoint of a fit: {name} is {state[name]!r}")
    return state


def _took_particles(saved: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is of a fit by the particle filter as it is: once the default for every model.

    Whoever left the backend to us then goes on with that one, whatever would be chosen today.
    """
    found = {"likelihood": saved["settings"].get("likelihood")}
    return not differences(found, {"likelihood": describe(ParticleFilter())})


def _as_module(policy: Any) -> Any:
    proper = isinstance(policy, nn.Module) and isinstance(policy, Policy)
    require(proper, "policy", policy, "a torch module with `start` and `act`")
    require(
        any(w.requires_grad for w in policy.parameters()), "policy", policy, "something with weights to learn"
    )
    return policy


def _show(bar: Bar, measured: dict[str, float]) -> None:
    names = {"return": "return", "entropy": "H bits", "temperature": "τ"}
    words = [f"{label} {measured[name]:.2f}" for name, label in names.items() if name in measured]
    bar.set_postfix_str(", ".join(words), refresh=False)
    bar.update()
