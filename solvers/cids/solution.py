"""What a fit comes to: a policy, how it got there, and what it is worth."""

from __future__ import annotations

import hashlib
import io
import re
import textwrap
from collections.abc import Mapping
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
from cpomdp_ppl.errors import CompilerError, invalid, require, require_count, require_model
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
from cpomdp_ppl.inference.choice import backend_as_data, backend_for, backend_from_data
from cpomdp_ppl.inference.persistence import filtered
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rng import fresh_seed, seed_for
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.state import leaves
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.box_distributions import FAMILIES
from solvers.cids.policy import LSTMPolicy, as_learnable
from solvers.cids.searching import Searching
from solvers.cids.verdict import FAILURES, Verdict

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

    from arviz import InferenceData
    from matplotlib.figure import Figure

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Policy

SETTINGS = run_files.SOLUTION_CONTENT
WEIGHTS = re.compile(r"policy(-[0-9a-f]{16})?\.pt")
"""Files of weights are named after a hash of what is in them."""
EARLIER = "policy.pt"
"""The name of the file of weights in solutions that do not say what it is called: the earliest."""
CHECKPOINT = "checkpoint.pt"
"""The file that a fit keeps what it has learned in."""
CHECKPOINT_VERSION = 2
"""A fit goes on from checkpoints of this version alone; `load` also reads the policies of earlier ones."""
LARGEST_SETTING = 2**17
"""No filter of a policy that was learned has more particles or points; a damaged file may say so."""
LAST = 20
"""Over how many iterations, the last ones, a solution is summed up."""
WIDTH = 100
"""Letters in a line of a solution that is printed."""


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
        verdict: Whether the policy beats what takes no learning; None if nobody has looked, as after a fit
            that was stopped, or was too short.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> from solvers import cids
        >>> print(cids.fit(LineGrid(), iterations=5, seed=0, progress=False))  # doctest: +ELLIPSIS
        model       LineGrid: 2 contexts, 3 actions, 10 steps
        policy      BeliefPolicy, ... weights
        likelihood  exact
        iterations  5 of at most 5: it ran to the end
        episodes    1,000
        return      ... over the last 5 iterations
        H(C|Y)      ... bits
        τ           ...
        verdict     none: the fit was too short
    """

    model: CPOMDP
    policy: Any
    prior: Tensor
    history: xr.Dataset
    settings: dict[str, Any]
    finished: bool
    verdict: Verdict | None = None

    def __str__(self) -> str:
        """A short table."""
        return "\n".join(
            textwrap.fill(text, WIDTH, initial_indent=f"{name:<12}", subsequent_indent=" " * 12)
            for name, text in _summary(self).items()
        )

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

    def agent(self, *, search: int = 0, **settings: Any) -> Agent:
        """The policy at work, one episode at a time.

        Args:
            search: How many simulations look ahead before each decision, for policies that read beliefs; 0
                for none. See `Searching`.
            settings: Those of `Agent`. The filter is that of the policy, if it has one.
        """
        policy = self.policy
        own = {"likelihood": policy.backend} if isinstance(policy, BeliefPolicy) else {}
        if search:
            greedy, seed = bool(settings.get("greedy", False)), settings.get("seed")
            policy = Searching(self, require_count("search", search), greedy=greedy, seed=seed)
        return Agent(self.model, policy, **{"prior": self.prior, **own, **settings})

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
            "verdict": None if self.verdict is None else self.verdict.as_dict(),
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
        policy: A module like the one that was learned, whose weights are overwritten; left out, a
            `BeliefPolicy` or an `LSTMPolicy`, whichever it was. It must be given for policies and filters of
            your own.

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
        verdict = None if content.get("verdict") is None else Verdict.from_dict(content["verdict"])
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path / SETTINGS} is no solution: {error}") from error
    return Solution(model, net, prior, history, settings, content["finished"], verdict)


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
    finished = state.get("finished", history.sizes["iteration"] == settings.get("iterations"))
    if not isinstance(finished, bool):
        raise CheckpointError(f"{file} is damaged: finished is {finished!r}")
    return Solution(model, net, prior, history, settings, finished)


def _made_again(
    model: CPOMDP, policy: nn.Module | None, shape: Mapping[str, Any], weights: Any, file: Path
) -> Any:
    """A policy with weights that were found in a file: the one given, or one of ours of that shape."""
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{file} is damaged: it holds a {type(weights).__name__} for weights")
    net = _ours(model, shape, weights, file) if policy is None else as_learnable(policy)
    try:
        net.load_state_dict(weights)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{file} does not fit the policy: {error}") from error
    net.eval()
    return net


def _ours(model: CPOMDP, shape: Mapping[str, Any], weights: Mapping[str, Any], file: Path) -> nn.Module:
    """A policy of ours, as a file says how it was made; not before it is certain that its size is real."""
    kind, hidden = shape.get("policy", "lstm"), shape.get("hidden")  # once, there were only LSTMs
    if not isinstance(hidden, int):
        raise invalid("policy", None, "a module like the one that was learned, which is none of ours")
    if kind not in ("lstm", "belief"):
        raise CheckpointError(f"{file} is of a policy of an unknown kind: {kind!r}")
    name, expected = ("lstm.weight_hh_l0", (4 * hidden, hidden))
    if kind == "belief":
        outputs = model.num_actions if model.box is None else 2 * model.box.dim
        name, expected = "logits.weight", (outputs, hidden)
    found = weights.get(name)
    size = tuple(found.shape) if isinstance(found, Tensor) and found.is_contiguous() else None
    if size != expected:  # what is not contiguous may be smaller than it looks
        raise CheckpointError(f"{file} is of a policy with hidden = {hidden}, but its weights are {size}")
    family = shape.get("distribution")
    if family not in (None, *FAMILIES):
        raise CheckpointError(f"{file} is of a policy with an unknown distribution: {family!r}")
    if kind == "lstm":
        amortised = bool(shape.get("amortised", False))
        return LSTMPolicy(model, hidden, amortised=amortised, distribution=family)
    try:
        likelihood = _filter_of(shape.get("likelihood"), file)
        return BeliefPolicy(model, hidden, likelihood=likelihood, distribution=family)
    except (*FAILURES, CompilerError) as error:
        raise CheckpointError(f"{file}: the filter of its policy cannot serve this model: {error}") from error


def _filter_of(data: Any, file: Path) -> Backend:
    """The filter of a policy, as a file describes it."""
    if data is None:
        expected = "BeliefPolicy(model, likelihood=…) with the filter it had, which is none of ours"
        raise invalid("policy", None, expected)
    try:
        found = backend_from_data(data)
    except ValueError as error:
        raise CheckpointError(f"{file} is of a policy with an unknown filter: {error}") from error
    sizes = [value for value in data.values() if isinstance(value, int)]
    if max(sizes, default=0) > LARGEST_SETTING:  # no memory would do
        raise CheckpointError(f"{file} is of a policy with a filter of an absurd size: {data}")
    return found


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
    kinds: dict[type, str] = {LSTMPolicy: "lstm", BeliefPolicy: "belief"}
    kind = kinds.get(type(policy))
    if kind is None:
        return {"policy": None, "hidden": None, "amortised": False}
    shape = {"policy": kind, "hidden": policy.hidden, "amortised": policy.amortised}
    names = [name for name, family in FAMILIES.items() if family is policy.logits.family]
    shape |= {"distribution": names[0]} if names else {}
    return shape | ({"likelihood": backend_as_data(policy.backend)} if kind == "belief" else {})


def _summary(solution: Solution) -> dict[str, str]:
    """What there is to say about a solution, in a few words each."""
    model, policy, history, settings = solution.model, solution.policy, solution.history, solution.settings
    played, ceiling, size = history.sizes["iteration"], settings.get("iterations"), settings.get("batch_size")
    end = history.isel(iteration=slice(-LAST, None))
    actions = f"{model.num_actions} actions" if model.box is None else f"actions of {model.box.dim} numbers"
    counts = f"{model.num_contexts} contexts, {actions}, {model.horizon} steps"
    told = {"model": f"{type(model).__name__}: {counts}", "policy": type(policy).__name__}
    if isinstance(policy, nn.Module):
        told["policy"] += f", {sum(weight.numel() for weight in policy.parameters()):,} weights"
    told["likelihood"] = _likelihood_label(solution)
    how = "it was stopped"
    if solution.finished:
        how = "it had settled" if isinstance(ceiling, int) and played < ceiling else "it ran to the end"
    most = f" of at most {ceiling:,}" if isinstance(ceiling, int) else ""
    told["iterations"] = f"{played:,}{most}: {how}"
    if isinstance(size, int):
        told["episodes"] = f"{played * size:,}"
    if "return" in end and played:
        told["return"] = (
            f"{float(end['return'].mean()):.3f} over the last {end.sizes['iteration']} iterations"
        )
    if "entropy" in end and played:
        told["H(C|Y)"] = f"{float(end['entropy'].mean()):.3f} bits"
    if "temperature" in history and played:
        first, last = (float(history["temperature"][k]) for k in (0, -1))
        told["τ"] = f"{first:.3g} → {last:.3g}" if first != last else f"{first:.3g}"
    why = "the fit was too short" if solution.finished else "the fit is not finished"
    told["verdict"] = f"none: {why}" if solution.verdict is None else solution.verdict.sentence
    return told


def _likelihood_label(solution: Solution) -> str:
    """The backend behind the likelihoods, in a few words."""
    if isinstance(solution.policy, BeliefPolicy):
        return solution.policy.backend.label
    described = solution.settings.get("likelihood")
    try:
        return backend_from_data(described).label
    except ValueError:  # of the user's own
        return str(described.get("", "unknown") if isinstance(described, Mapping) else described)


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
    over = torch.arange(leaf.shape[1], device=leaf.device) > episodes.lengths[:, None]  # [B, T + 1]
    states = states.masked_fill(over[..., None], torch.nan)  # which is not drawn
    posterior = posterior.masked_fill(over.to(posterior.device)[..., None], torch.nan)
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
