"""What a fit comes to: a policy, how it got there, and what it is worth."""

from __future__ import annotations

import hashlib
import io
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cpomdp_ppl.agent import Agent
from cpomdp_ppl.diagnostics.export import WORLD
from cpomdp_ppl.diagnostics.inference_data import inference_groups, wrapped
from cpomdp_ppl.evaluation import Evaluation, evaluate
from cpomdp_ppl.experiments.files import CheckpointError, load_json, made_directory, save_json, write_atomic
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.inference.persistence import filtered
from cpomdp_ppl.rng import fresh_seed, seed_for
from cpomdp_ppl.rollout import simulate
from solvers.cids.policy import LSTMPolicy

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

    import xarray as xr
    from arviz import InferenceData
    from matplotlib.figure import Figure

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Policy

SETTINGS = "solution.json"
WEIGHTS = re.compile(r"policy(-[0-9a-f]{16})?\.pt")
"""Files of weights are called after what is in them."""
EARLIER = "policy.pt"
"""But there was a time when they were not, and settings did not name them."""


@dataclass(frozen=True, eq=False)
class Solution:
    """A learned policy and how it was learned.

    Attributes:
        model: The CPOMDP.
        policy: The best policy found, a module that is also a `Policy`.
        prior: Over contexts, float64 `[C]`: what it was learned for, or for an amortised policy, which
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
        measured = {
            name: round(float(self.history[name][-1]), 4)
            for name in ("return", "entropy")
            if name in self.history and self.history.sizes["iteration"]
        }
        return (
            f"Solution(model={type(self.model).__name__}, policy={type(self.policy).__name__}, "
            f"prior={[round(p, 4) for p in self.prior.tolist()]}, "
            f"iterations={self.history.sizes['iteration']}, finished={self.finished}, last={measured})"
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
            prior: Over contexts; that of the fit if left out.
            seed: Of everything random.
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
            seed: Of the trajectories.
        """
        from solvers.cids.plots import plot

        possible = self.prior.nonzero()[:, 0].tolist()
        contexts = [c for c in possible for _ in range(num_episodes)]
        episodes = simulate(
            self.model, self.policy, len(contexts), contexts=contexts, prior=self.prior, seed=seed
        )
        other = None if seed is None else (seed + 1) % 2**32  # or the filter's noise would be the world's
        backend = backend_for(self.model, likelihood)
        filtering = filtered(backend, self.model, episodes, prior=self.prior, seed=other, moments=False)
        return plot(self.model, self.history, episodes, filtering.posterior(self.prior))

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
            write_atomic(weights, lambda file: _write(file, written))
            save_json(path / SETTINGS, content)  # from here on, the weights are these
        except BaseException:
            with suppress(OSError, CheckpointError):  # or the error itself would not be seen
                if not there and _named(path) != weights.name:
                    weights.unlink(missing_ok=True)
            raise
        with suppress(OSError, CheckpointError):  # all that matters is done
            _keep_one(path)


def shape_of(policy: Any) -> dict[str, Any]:
    """What `cids.load` makes a policy of ours again with; others are the caller's to make."""
    own = type(policy) is LSTMPolicy
    return {"hidden": policy.hidden if own else None, "amortised": policy.amortised if own else False}


def _write(file: Path, content: io.BytesIO) -> None:
    file.write_bytes(content.getbuffer())


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
