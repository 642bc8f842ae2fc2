"""What a fit comes to: a policy, how it got there, and what it is worth."""

from __future__ import annotations

import hashlib
import io
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from cpomdp_ppl.agent import Agent
from cpomdp_ppl.diagnostics.export import WORLD
from cpomdp_ppl.diagnostics.inference_data import inference_groups, wrapped
from cpomdp_ppl.errors import invalid, require, require_model
from cpomdp_ppl.evaluation import Evaluation, evaluate
from cpomdp_ppl.experiments import run_files
from cpomdp_ppl.experiments.files import (
    CheckpointError,
    as_directory,
    load_json,
    load_tensors,
    made_directory,
    save_json,
    write_atomic,
)
from cpomdp_ppl.experiments.fingerprint import describe_model, require_same
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.inference.persistence import filtered
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rng import fresh_seed, seed_for
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.state import leaves
from solvers.cids.policy import LSTMPolicy, as_learnable

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from arviz import InferenceData
    from matplotlib.figure import Figure

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Policy

SETTINGS = "solution.json"
WEIGHTS = re.compile(r"policy(-[0-9a-f]{16})?\.pt")
"""Files of weights are named after a hash of what is in them."""
EARLIER = "policy.pt"
"""The name of the file of weights in solutions that do not say what it is called: the earliest."""
CHECKPOINT = "checkpoint.pt"
"""The file that a fit keeps what it has learned in."""
CHECKPOINT_VERSION = 2
"""A fit goes on from checkpoints of this version alone; `load` also reads the policies of earlier ones."""


@dataclass(frozen=True, eq=False)
class Solution:
    """A learned policy and how it was learned.

    Attributes:
        model: The CPOMDP.
        policy: The best policy found, a module that is also a `Policy`.
        prior: The prior over contexts that it was learned for, float64 `[C]`; for an amortised policy, which
            serves many, the model's.
        history: What was measured, by `iteration`: `return`, `entropy` (bits), `information_lower` and
            `information_upper` (nats), `objective`, `gradient_norm`, `temperature`, `learning_rate`, `ess`,
            and the seconds that rollout, likelihood and gradient took.
        settings: What the fit was asked for.
        finished: Whether the fit ran to its end.
    """

    model: CPOMDP
    policy: Any
    prior: Tensor
    history: xr.Dataset
    settings: dict[str, Any]
    finished: bool

    def __repr__(self) -> str:
        iterations, shown = self.history.sizes["iteration"], ("return", "entropy")
        known = [name for name in shown if name in self.history and iterations]
        last = {name: round(float(self.history[name][-1]), 4) for name in known}
        what = f"model={type(self.model).__name__}, policy={type(self.policy).__name__}"
        prior = [round(p, 4) for p in self.prior.tolist()]
        return (
            f"Solution({what}, prior={prior}, iterations={iterations}, finished={self.finished}, last={last})"
        )

    def evaluate(
        self,
        num_episodes: int = 4000,
        *,
        likelihood: str | Backend | None = None,
        prior: Sequence[float] | Tensor | None = None,
        seed: int | None = 0,
    ) -> Evaluation:
        """What the policy earns and finds out; see `cpomdp_ppl.evaluation.evaluate`.

        Args:
            num_episodes: How many episodes to play.
            likelihood: How to compute context posteriors; left out, the most exact way that serves the model.
            prior: Prior over contexts; that of the fit if left out.
            seed: Seed of all random numbers.
        """
        prior = self.prior if prior is None else prior
        policy: Policy = self.policy
        return evaluate(self.model, policy, num_episodes, likelihood=likelihood, prior=prior, seed=seed)

    def agent(self, **settings: Any) -> Agent:
        """The policy at work, one episode at a time; see `Agent` for the settings."""
        return Agent(self.model, self.policy, **{"prior": self.prior, **settings})

    def plot(
        self, num_episodes: int = 12, *, likelihood: str | Backend | None = None, seed: int | None = 0
    ) -> Figure:
        """How it was learned, and what it does: a matplotlib figure.

        Args:
            num_episodes: How many trajectories to show for each context.
            likelihood: How to compute the context posteriors along them; left out, by the
                `default_backend` for the model.
            seed: Seed of the trajectories.
        """
        possible = self.prior.nonzero()[:, 0].tolist()
        contexts = [c for c in possible for _ in range(num_episodes)]
        episodes = simulate(
            self.model, self.policy, len(contexts), contexts=contexts, prior=self.prior, seed=seed
        )
        other = None if seed is None else (seed + 1) % 2**32  # or the filter's noise would be the world's
        backend = backend_for(self.model, likelihood)
        filtering = filtered(backend, self.model, episodes, prior=self.prior, seed=other, moments=False)
        return _plot(self.model, self.history, episodes, filtering.posterior(self.prior))

    def to_inference_data(self, num_episodes: int = 200, **settings: Any) -> InferenceData | xr.DataTree:
        """Play episodes, and export what is believed about them to ArviZ.

        The groups are those of `cpomdp_ppl.diagnostics.to_inference_data`, and `fit_history`: what was
        measured during the fit, by `iteration`.

        Args:
            num_episodes: How many episodes to play.
            settings: Those of `cpomdp_ppl.diagnostics.to_inference_data`; the prior is that of the fit unless
                another is given, and the seed is that of the episodes as well.
        """
        settings = {"prior": self.prior, **settings}
        settings["seed"] = fresh_seed(settings.get("seed"))  # one for episodes and filter, and noted
        world = seed_for(settings["seed"], WORLD)  # or the filter's noise would be that of the episodes
        episodes = simulate(self.model, self.policy, num_episodes, prior=settings["prior"], seed=world)
        groups = inference_groups(self.model, episodes, **settings)
        return wrapped({**groups, "fit_history": self.history})

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write weights and settings to a directory, for `cids.load`.

        Whatever happens in the meantime, the directory holds the earlier solution or this one.

        Args:
            directory: Made if it is not there; files of an earlier solution in it are replaced.
        """
        path = made_directory("directory", directory)
        assert isinstance(self.policy, nn.Module)
        written = io.BytesIO()
        torch.save(dict(self.policy.state_dict()), written)
        weights = path / f"policy-{hashlib.sha256(written.getbuffer()).hexdigest()[:16]}.pt"
        history = {str(name): self.history[name].values.tolist() for name in self.history.data_vars}
        content = {
            "weights": weights.name,
            "settings": self.settings,
            "prior": self.prior.tolist(),
            **shape_of(self.policy),
            "finished": self.finished,
            "history": history,
        }
        there = weights.exists()
        try:
            write_atomic(weights, lambda file: file.write_bytes(written.getbuffer()))
            save_json(path / SETTINGS, content)  # from here on, the weights are these
        except BaseException:
            with suppress(OSError, CheckpointError):  # or the error itself would not be seen
                if not there and _named(path) != weights.name:
                    weights.unlink(missing_ok=True)
            raise
        with suppress(OSError, CheckpointError):  # all that matters is done
            _keep_one(path)


def as_history(columns: Mapping[str, Sequence[float]]) -> xr.Dataset:
    """Measurements as a dataset, by iteration from 1."""
    length = len(next(iter(columns.values()))) if columns else 0
    variables = {name: ("iteration", np.asarray(column)) for name, column in columns.items()}
    return xr.Dataset(variables, {"iteration": np.arange(1, length + 1)})


def load(directory: str | os.PathLike[str], model: CPOMDP, *, policy: nn.Module | None = None) -> Solution:
    """Read a solution that `Solution.save` wrote; or the best policy so far, from a checkpoint of `fit`.

    Files hold weights and numbers, never code: the model, and a policy of your own, are yours to give.

    Args:
        directory: Directory of a saved solution, or the `checkpoint` of a fit that was stopped, however; or
            the run folder of a `cpomdp fit`, which has one of them.
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
    state = read_checkpoint(path, model.device)
    assert state is not None
    settings, expected = state["settings"], describe_model(model)
    require_same(file, {name: settings.get(name) for name in expected}, expected)
    if not isinstance(state.get("prior"), list):
        raise CheckpointError(f"{file} was written by an earlier version: it does not say what its policy is")
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
        net = as_learnable(policy)
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
    kinds: dict[str, Any] = {"weights": str, "settings": dict, "prior": list, "history": dict}
    kinds |= {"hidden": int | None, "finished": bool}
    for name, kind in kinds.items():
        if not isinstance(content.get(name, ...), kind):
            raise CheckpointError(f"{path / SETTINGS} is no solution: {name} is {content.get(name)!r}")
    if not WEIGHTS.fullmatch(content["weights"]):  # a file beside this one, and no other
        raise CheckpointError(f"{path / SETTINGS} is no solution: weights is {content['weights']!r}")
    return content


def read_checkpoint(directory: Path, device: torch.device) -> dict[str, Any] | None:
    """What a fit left in its directory; None if there is no checkpoint.

    Raises:
        CheckpointError: If the file is not a checkpoint of a fit.
    """
    path = directory / CHECKPOINT
    if not path.exists():
        return None
    state = load_tensors(path, device)
    missing = {"learner", "measured", "best", "best_weights", "settings", "seed"} - set(state)
    if missing:
        raise CheckpointError(f"{path} is no checkpoint of a fit: it has no {', '.join(sorted(missing))}")
    for name, kind in {"settings": dict, "seed": int}.items():
        if not isinstance(state[name], kind):
            raise CheckpointError(f"{path} is no checkpoint of a fit: {name} is {state[name]!r}")
    return state


def shape_of(policy: Any) -> dict[str, Any]:
    """What `cids.load` makes a policy of ours again with; others are the caller's to make."""
    own = type(policy) is LSTMPolicy
    return {"hidden": policy.hidden if own else None, "amortised": policy.amortised if own else False}


def _named(path: Path) -> Any:
    """The weights of the solution in a directory; None if there is no solution."""
    settings = path / SETTINGS
    return load_json(settings).get("weights", EARLIER) if settings.exists() else None


def _keep_one(path: Path) -> None:
    """Delete weights that are no more those of the solution in a directory."""
    kept = _named(path)
    for file in path.iterdir():
        if WEIGHTS.fullmatch(file.name) and file.name != kept:
            file.unlink(missing_ok=True)


def _plot(model: CPOMDP, history: xr.Dataset, episodes: Episodes, posterior: Tensor) -> Figure:
    """Convergence on top; below, by context, what the policy does and the posterior `[B, T + 1, C]`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(3.2 * max(model.num_contexts, 3), 8.0), layout="constrained")
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=[1, 2])[:, 0]
    _plot_history(top.subplots(1, 3), history)

    assert episodes.contexts is not None
    shown = episodes.contexts.unique().tolist()
    axes = bottom.subplots(2, len(shown), squeeze=False, sharey="row")
    name, leaf = next(leaves(episodes.states))
    states = leaf.reshape(*leaf.shape[:2], -1).double()  # [B, T + 1, n]: the first part, and a plane as one
    for (above, below), c in zip(axes.T, shown, strict=True):
        mine = (episodes.contexts == c).cpu()
        for path in states[mine].cpu():
            above.plot(*(path.T if path.shape[-1] == 2 else (path[:, 0],)), color=f"C{c}", alpha=0.5, lw=1)
        above.set(title=model.context_names[c], xlabel=f"{name}[0]" if states.shape[-1] == 2 else "time")
        for curve in posterior[mine, :, c].cpu():
            below.plot(curve, color=f"C{c}", alpha=0.5, lw=1)
        below.set(xlabel="time", ylim=(-0.03, 1.03))
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        if states.shape[-1] != 2:
            above.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0, 0].set_ylabel(f"{name}[1]" if states.shape[-1] == 2 else name)
    axes[1, 0].set_ylabel("P(true context | history)")
    return figure


def _plot_history(axes: Any, history: xr.Dataset) -> None:
    shown = {"return": "return", "entropy": "H(C|Y) in bits", "temperature": "temperature τ"}
    for axis, (name, label) in zip(axes, shown.items(), strict=True):
        if name in history:  # an interrupted fit may have none
            axis.plot(history["iteration"], history[name], lw=0.8)
        axis.set(title=label, xlabel="iteration")
        axis.grid(alpha=0.3)
    axes[1].set_ylim(bottom=0.0)
