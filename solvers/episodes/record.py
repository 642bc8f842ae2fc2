"""What came of meeting the same context episode after episode: beliefs, returns, regret."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cpomdp_ppl.context import entropy
from cpomdp_ppl.diagnostics.export import (
    ACTION_AXIS,
    actions_taken,
    axis_names,
    dataset_of,
    further_dims,
    with_nan,
)
from cpomdp_ppl.diagnostics.inference_data import wrapped
from cpomdp_ppl.errors import require, require_count
from cpomdp_ppl.inference.filtering import log_normalised
from cpomdp_ppl.rng import isolated
from solvers.regret.values import Optima, context_known_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr
    from arviz import InferenceData
    from matplotlib.figure import Figure

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.policy import Policy
    from solvers.episodes.worlds import EpisodeOutcome


UNLIKELY = 1e-12
"""No possible context gets less likely than this in a run, so that what a filter got wrong can be mended."""

EPISODES_TOLD = 4000
FEWEST_TOLD = 50
"""Episodes that a policy plays told the context: in all contexts together, and at least in each."""


@dataclass(frozen=True, eq=False)
class Run:
    """R runs of K episodes, each run in a context of its own that it has to find out.

    Attributes:
        model: The CPOMDP.
        contexts: The true contexts, `[R]`, if anybody knows them.
        posteriors: `P(C | H_k)` after k = 0 … K episodes, float64 `[R, K + 1, C]`; the first is the prior.
        returns: What each episode earned, float64 `[R, K]`; NaN where nobody said, and in runs that had
            stopped.
        played: Whether a run played its episode, bool `[R, K]`: those that have stopped do not.
        episodes: What was done and seen, K batches of those runs that played.
        reference: The policy that is told the context, for regret against what it then earns where the model
            does not say what knowing the context is worth: the one that acted, if it reads the prior.
    """

    model: CPOMDP
    contexts: Tensor | None
    posteriors: Tensor
    returns: Tensor
    played: Tensor
    episodes: tuple[Episodes, ...]
    reference: Policy | None = None

    def __repr__(self) -> str:
        R, K = self.returns.shape
        earned, left = float(self.returns.nanmean()), float(self.entropy[:, -1].mean())
        what = f"model={type(self.model).__name__}, R={R}, K={K}"
        return f"Run({what}, mean return={earned:.4g}, H(C|H_K)={left:.3g} nats)"

    @property
    def num_episodes(self) -> int:
        """How many episodes K there were."""
        return self.returns.shape[1]

    @property
    def entropy(self) -> Tensor:
        """`H(C | H_k)` after k = 0 … K episodes, in nats, `[R, K + 1]`."""
        return entropy(self.posteriors)

    @property
    def information(self) -> Tensor:
        """How much each episode revealed about the context, in nats, `[R, K]`.

        Where the true contexts are known, `log P(c | H_k) − log P(c | H_{k-1})`, and 0 if the prior excludes
        them; otherwise the fall of the entropy. Either may be negative.
        """
        if self.contexts is None:
            return -self.entropy.diff(dim=1)
        log_true = self.true_probability.log()
        return torch.where(log_true[:, :-1] == -torch.inf, 0.0, log_true.diff(dim=1))

    @property
    def true_probability(self) -> Tensor:
        """`P(c | H_k)` of the true context, `[R, K + 1]`."""
        require(self.contexts is not None, "contexts", None, "known contexts")
        assert self.contexts is not None
        c = self.contexts[:, None, None].expand(-1, self.posteriors.shape[1], 1)
        return self.posteriors.gather(2, c).squeeze(2)

    @cached_property
    def context_known(self) -> Optima | None:
        """What an agent earns who knows the context, without planning; None if nobody knows.

        In closed form, if the model has one. Else it is what the `reference` earns told the context, with the
        error of a mean over some 4,000 episodes in all contexts together: it was learned, and another agent
        may earn more. These are played when this is first asked for.
        """
        known = self.model.context_known_return()
        if known is not None:
            return Optima.known(known, "closed form")
        if self.reference is None:
            return None
        each = max(FEWEST_TOLD, EPISODES_TOLD // self.model.num_contexts)
        return context_known_values(self.model, self.reference, source="policy", num_episodes=each)

    def regret(self, optima: Sequence[float] | Tensor | Optima | None = None) -> Tensor:
        """How much less each episode earned than an agent who knows the context expects to, `[R, K]`.

        Args:
            optima: That agent's expected return in each context, `[C]`, or what
                `solvers.regret.context_known_values` says of it, which is also what is taken if left out: by
                dynamic programming, in closed form, or of the `reference`.

        Raises:
            ValueError: If contexts are not known, or nobody knows what that agent earns.
        """
        require(self.contexts is not None, "contexts", None, "known contexts, to tell regret from")
        assert self.contexts is not None
        C = self.model.num_contexts
        if optima is None:
            optima = context_known_values(self.model, self.reference)
        best = optima.values if isinstance(optima, Optima) else torch.as_tensor(optima)
        require(best.shape == (C,), "optima", list(best.shape), f"shape [{C}]")
        return best.to(self.returns)[self.contexts][:, None] - self.returns

    def to_dataset(self, optima: Sequence[float] | Tensor | Optima | None = None) -> xr.Dataset:
        """Everything as an xarray dataset.

        `probability` and `entropy` are by `episodes_lived`, from 0; `returns`, `information` and, where
        contexts are known, `regret` by `episode`, from 1, with what it is against by context:
        `context_known_return` and `context_known_error`, its standard error.

        Args:
            optima: As for `regret`; left out, it is `context_known`, and there is no regret if that is None.
        """
        by_episode = ("run", "episode")
        variables: dict[str, Any] = {
            "probability": (("run", "episodes_lived", "context"), self.posteriors.cpu().numpy()),
            "entropy": (("run", "episodes_lived"), self.entropy.cpu().numpy()),
            "returns": (by_episode, self.returns.cpu().numpy()),
            "information": (by_episode, self.information.cpu().numpy()),
            "played": (by_episode, self.played.cpu().numpy()),
        }
        if self.contexts is not None:
            true = np.array(self.model.context_names)[self.contexts.cpu().numpy()]
            variables["true_context"] = (("run",), true)
            best = self.context_known if optima is None else optima
            if best is not None:
                best = best if isinstance(best, Optima) else Optima.known(best, "given")
                variables["regret"] = (by_episode, self.regret(best).cpu().numpy())
                variables["context_known_return"] = (("context",), best.values.numpy())
                variables["context_known_error"] = (("context",), best.standard_errors.numpy())
        names = list(self.model.context_names)
        return dataset_of(variables, {"episode": np.arange(1, self.num_episodes + 1), "context": names})

    def to_inference_data(
        self, *, chains: int = 4, draws: int = 250, seed: int | None = 0
    ) -> InferenceData | xr.DataTree:
        """Export to ArviZ.

        `posterior` has draws of the context, `context_index` `[chain, draw, run, episodes_lived]` and
        `is_context` `[chain, draw, run, episodes_lived, context]`, whose mean over draws is `P(C | H_k)`;
        `observed_data` has actions `[run, episode, time]`, or `[run, episode, time, action_axis]` if
        they are continuous, and observations by site `[run, episode, time, …]`, NaN where nothing was seen;
        `run` has what `to_dataset` gives.

        Args:
            chains: How many chains of draws; they differ in the draws alone.
            draws: How many draws each chain has.
            seed: Seed of the draws.
        """
        M, D = require_count("chains", chains), require_count("draws", draws)
        R, steps, C = self.posteriors.shape
        with isolated(seed):
            flat = self.posteriors.reshape(R * steps, C)
            index = torch.multinomial(flat, M * D, replacement=True)  # [R (K+1), M D]
        index = index.T.reshape(M, D, R, steps).cpu()
        axes = ("chain", "draw", "run", "episodes_lived")
        posterior = dataset_of(
            {
                "context_index": (axes, index.numpy()),
                "is_context": ((*axes, "context"), torch.nn.functional.one_hot(index, C).numpy()),
            },
            {"context": list(self.model.context_names)},
        )
        return wrapped({"posterior": posterior, "observed_data": self._observed(), "run": self.to_dataset()})

    def _observed(self) -> xr.Dataset:
        R, K = self.returns.shape
        T = max((batch.horizon for batch in self.episodes), default=0)
        box = self.model.box
        actions = np.full((R, K, T), -1) if box is None else np.full((R, K, T, box.dim), np.nan)
        sites = {
            name: np.full((R, K, T, *values.shape[2:]), np.nan)
            for name, values in (self.episodes[0].observations.items() if self.episodes else ())
        }
        for k, batch in enumerate(self.episodes):
            rows, steps = self.played[:, k].cpu().numpy(), batch.horizon
            actions[rows, k, :steps] = actions_taken(batch).cpu().numpy()
            for name, values in batch.observations.items():
                sites[name][rows, k, :steps] = with_nan(values, batch.observed[name]).cpu().numpy()
        axes = ("run", "episode", "time")
        own = () if box is None else (ACTION_AXIS,)
        variables: dict[str, Any] = {"action": ((*axes, *own), actions)}
        for name, series in sites.items():
            variables[name] = ((*axes, *further_dims(name, series.ndim - 3)), series)
        coordinates = {"episode": np.arange(1, K + 1), "time": np.arange(1, T + 1)}
        return dataset_of(variables, coordinates | axis_names(self.model))

    def plot(self, optima: Sequence[float] | Tensor | Optima | None = None) -> Figure:
        """A figure of cumulative regret, or of returns where regret is not known, and of the posterior.

        Args:
            optima: As for `regret`.
        """
        from solvers.regret.plots import plot_run

        return plot_run(self, optima)


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C during a run.

    Attributes:
        run: The episodes so far.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.run = run

    def __str__(self) -> str:
        return f"stopped after {self.run.num_episodes:,} episodes"


class RunRecorder:
    """A run as it goes, in true contexts `[R]`, if they are known, from log posteriors `[R, C]` on."""

    def __init__(
        self,
        model: CPOMDP,
        contexts: Tensor | None,
        log_posterior: Tensor,
        reference: Policy | None = None,
    ) -> None:
        self.model, self.contexts, self.reference = model, contexts, reference
        self.log_posterior = log_posterior  # what is believed now, log P(C | H_k)
        self.possible = log_posterior > -torch.inf
        self.outcomes: list[tuple[Tensor, EpisodeOutcome]] = []  # of every episode, with the runs that played
        self._log_posteriors = [log_posterior]

    def update(self, rows: Tensor, outcome: EpisodeOutcome) -> None:
        """Apply Bayes' rule to the runs `rows [n]` that played another episode."""
        joint = self.log_posterior[rows] + outcome.log_likelihood
        updated = log_normalised(joint[:, None]).squeeze(1)
        least = torch.where(self.possible[rows], math.log(UNLIKELY), -torch.inf)
        updated = torch.maximum(updated, least).log_softmax(-1)
        self.log_posterior = self.log_posterior.index_copy(0, rows, updated)
        self._log_posteriors.append(self.log_posterior)
        self.outcomes.append((rows, outcome))

    def run(self) -> Run:
        """The run so far."""
        R, K = len(self.log_posterior), len(self.outcomes)
        returns = self.log_posterior.new_full((R, K), math.nan)
        played = torch.zeros(R, K, dtype=torch.bool, device=returns.device)
        for k, (rows, outcome) in enumerate(self.outcomes):
            returns[rows, k] = outcome.returns.to(returns)
            played[rows, k] = True
        return Run(
            self.model,
            self.contexts,
            torch.stack(self._log_posteriors[: K + 1], 1).exp(),  # Ctrl-C may come between the two
            returns,
            played,
            tuple(outcome.episodes for _, outcome in self.outcomes),
            self.reference,
        )
