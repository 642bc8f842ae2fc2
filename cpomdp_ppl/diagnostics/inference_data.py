"""Inference over episodes as an ArviZ object, whose summaries and plots then need no code of ours."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from cpomdp_ppl.diagnostics.export import Export
from cpomdp_ppl.errors import require, require_count, require_model
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.rng import fresh_seed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from arviz import InferenceData
    from torch import Tensor

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.model import CPOMDP


def to_inference_data(
    model: CPOMDP,
    episodes: Episodes,
    likelihood: str | Backend | None = None,
    *,
    chains: int = 4,
    draws: int = 250,
    prior: Sequence[float] | Tensor | None = None,
    seed: int | None = None,
    progress: bool = False,
) -> InferenceData | xr.DataTree:
    """Contexts and states given what was seen, with all that ArviZ wants to know about them.

    **Chains are independent runs of the filter**, each with different random numbers, so R-hat speaks
    about the filter: with too few particles, chains disagree. Within a chain, draws are independent given
    its run: a context from its `P(c | y)`, then a trajectory from its smoother under that context. So
    `az.ess` and `az.mcse` count draws, and know nothing of an error that all draws of a run share; that
    shows in how far the means of chains are apart, `mean("draw").std("chain") / √chains`. To know it well,
    take many chains of few draws. The attribute `smoothing` says how trajectories were found; by
    `genealogy`, SMC's early states have few distinct ancestors. The other backends (exact, Kalman, grid)
    are deterministic: their chains share one filter and differ in the draws alone, so R-hat is 1 but for
    chance and says nothing about their bias. `cpomdp_ppl.diagnostics.summary` is ArviZ's, but knows `"state"`
    for all components of a state, and that of what never varies (a state that is known, a context that is
    sure) chains agree, where `az.summary` shows NaN for R-hat, with warnings.

    Groups (`time` runs 0 … T; past an episode's length states stand still, and nothing is observed):

    - `posterior` and `prior`: `context_index` `[chain, draw, episode]`; `is_context`
      `[chain, draw, episode, context]`, 0 or 1, whose mean is `P(c | y)`; and every component of the state
      under its name (`state` if it has none), `[chain, draw, episode, time, …]`. The prior has one chain.
    - `posterior_predictive` and `prior_predictive`: observations by site, `[chain, draw, episode, time, …]`,
      drawn from the observation program at the drawn states and contexts, for the actions of the episodes;
      NaN where the program hides them, or the episode has none; in the prior, also after the end that a draw
      has of its own. Times are 1 … T, or 0 … T if the model observes before acting.
    - `log_likelihood`: `increment` `[chain, draw, step]` is `log p(o_{t+1} | h_t, a_t, c)` at the drawn
      context, states integrated out. A step is an episode (`step_episode`) and a time (`step_time`) at
      which anything was seen.
    - `observed_data`: observations by site, `[episode, time, …]`, NaN where there are none. If episodes may
      end, `ended` is one of the sites, there and in the predictive groups.
    - `constant_data`: `actions`, taken at each time (-1 for none), or if they are continuous `[episode, time,
      action_axis]`, NaN for none; `length`, `observed_<site>`; and where the episodes know them
      `true_context`, `true_<component>` and `returns`.
    - `sample_stats`, of each chain's run and so without draws: `increment` of what was seen at each time
      `[chain, episode, time, context]`; `log_likelihood` `[chain, episode, context]`; `evidence`, that is
      `log Σ_c P(c) p(y | c)`, `[chain, episode]`; `context_probability` `P(c | o_{0:t})`
      `[chain, episode, time, context]`; `information_gain`, the fall of its entropy in nats,
      `[chain, episode, time]`. Of SMC also `ess` and `resampled` `[chain, episode, time, context]`, and
      `log_likelihood_se` `[chain, episode, context]`, infinite where a run cannot tell; `ess` is that after
      a step, and NaN at time 0.

    **What `az.loo` means here.** It leaves out one step's factor `p(o_{t+1} | h_t, a_t, c)` at a time: how
    well does the context, as all other steps show it, predict what was seen in this one, given the history
    before? It compares models, or likelihoods, on the same episodes. It is no forecast, as later steps help
    to find the context; that is `evidence`. ArviZ smooths the largest importance weights, and reports a
    failure (`pareto_k` infinite, and a warning) unless five are distinct. But there are only as many values
    as contexts and chains, so it would do so even where all draws are of one context and nothing can fail.
    Draws at the lowest log-likelihood of a step therefore have noise of 10⁻⁶ nats on it in `log_likelihood`
    (in `sample_stats` there is none). A warning that remains is worth a look: as a rule, fewer than five
    draws have the largest weight at some step.

    Args:
        model: The CPOMDP.
        episodes: What was done and seen.
        likelihood: A backend, or its name; left out, the `default_backend` for the model.
        chains: How many times to run the filter.
        draws: How many contexts and trajectories to draw from each run, for every episode.
        prior: Prior over contexts, `[C]` or `[B, C]`; the model's if left out.
        seed: Seed of all random numbers; left out, one is taken from fresh entropy. The attribute `seed` says
            which.
        progress: Whether to show a progress bar.

    Returns:
        An `InferenceData`; a `DataTree` of the same groups if ArviZ is 1.0 or later, which has no other.

    Raises:
        UnsupportedModelError: If the backend cannot serve the model.
        ObservationError: If the episodes are not of this model.
        DegenerateWeightsError: If no context can have produced an episode, however many particles.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> episodes = simulate(model, RandomPolicy(3), 5, seed=0)
        >>> data = to_inference_data(model, episodes, chains=2, draws=10, seed=0)
        >>> data.posterior["is_context"].mean(("chain", "draw")).dims
        ('episode', 'context')
    """
    groups = inference_groups(
        model, episodes, likelihood, chains=chains, draws=draws, prior=prior, seed=seed, progress=progress
    )
    return wrapped(groups)


def wrapped(groups: Mapping[str, xr.Dataset], datatree: bool | None = None) -> InferenceData | xr.DataTree:
    """Datasets by group as what the installed ArviZ works with: a `DataTree`, from 1.0 on."""
    az = _arviz()
    attributes = groups["posterior"].attrs
    if datatree is None:
        datatree = getattr(az, "InferenceData", xr.DataTree) is xr.DataTree  # 1.x keeps the name for that
    if datatree:
        return xr.DataTree.from_dict({"/": xr.Dataset(attrs=attributes), **groups})
    data: InferenceData = az.InferenceData(attrs=attributes, **groups)
    return data


def _arviz() -> Any:
    """ArviZ; once a day, 0.23 warns whoever imports it that a 1.0 is out, but both will do here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        import arviz
    return arviz


def inference_groups(
    model: CPOMDP,
    episodes: Episodes,
    likelihood: str | Backend | None = None,
    *,
    chains: int = 4,
    draws: int = 250,
    prior: Sequence[float] | Tensor | None = None,
    seed: int | None = None,
    progress: bool = False,
) -> dict[str, xr.Dataset]:
    """The groups of `to_inference_data`, as datasets."""
    require_model(model)
    backend = backend_for(model, likelihood)
    chains, draws = require_count("chains", chains), require_count("draws", draws)
    number = fresh_seed(seed)
    require(isinstance(progress, bool), "progress", progress, "True or False")
    require(hasattr(episodes, "observations"), "episodes", episodes, "Episodes")

    export = Export(model, episodes, backend, chains, draws, prior, number)
    export.draw(progress)
    groups = export.groups()
    attributes = {
        "model": type(model).__name__,
        "likelihood": backend.name,
        "settings": repr(backend),
        "smoothing": export.smoothing,
        "seed": number,
        "inference_library": "cpomdp-ppl",
        "inference_library_version": _version(),
    }
    if isinstance(backend, ParticleFilter):
        attributes |= {
            "num_particles": int(backend.num_particles),
            "ess_threshold": float(backend.ess_threshold),
        }
    return {name: group.assign_attrs(attributes) for name, group in groups.items()}


def _version() -> str:
    try:
        return version("cpomdp-ppl")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


CONTEXT = ("context_index", "is_context")
"""The variables of a posterior that are not components of the state."""

MIN_DRAWS = 4
"""Draws below which ArviZ has no R-hat of anything."""


def state_variables(posterior: Any) -> list[str]:
    """The variables that hold the state: `state`, or the components of a dict."""
    return [str(name) for name in posterior.data_vars if name not in CONTEXT]


def summary(data: Any, var_names: str | Sequence[str] | None = None, **options: Any) -> Any:
    """`az.summary`, which knows what a state is, and that chains which all say the same agree.

    The name `"state"` stands for all components of a state that is a dict. Of what never varies (a context
    that is sure, a state that is known) ArviZ has neither R-hat nor an error of the standard deviation, and
    says so with NaN and numerical warnings. Draws are independent here, and ArviZ counts them as such; so
    R-hat is given as 1, its value however little they vary, and that error as 0. With one chain there is no
    R-hat.

    Args:
        data: What `to_inference_data` returned.
        var_names: Variables of the posterior; all, if left out.
        **options: Others of `az.summary`: `coords={"time": [12]}`, `round_to=3`, `kind="diagnostics"`.

    Returns:
        A pandas `DataFrame`, as ArviZ makes it.

    Raises:
        ValueError: If a variable is not in the posterior, saying what is.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.diagnostics import to_inference_data
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark(horizon=2)
        >>> episodes = simulate(model, RandomPolicy(3), 1, seed=0)
        >>> data = to_inference_data(model, episodes, chains=2, draws=10, seed=0)
        >>> list(summary(data, "state", coords={"time": [2]}, kind="diagnostics").index)
        ['state[0, 2]']
    """
    posterior = data["posterior"]
    known = [str(name) for name in posterior.data_vars]
    names = [var_names] if isinstance(var_names, str) else var_names
    if names is not None:
        parts = {"state": state_variables(posterior)} if "state" not in known else {}
        names = [part for name in names for part in parts.get(name, [name])]
        for name in names:
            require(name in known, "var_names", name, f"variables out of {known}, or 'state'")
    with np.errstate(invalid="ignore", divide="ignore"):
        table = _arviz().summary(data, var_names=names, **options)
    if posterior.sizes["chain"] > 1 and posterior.sizes["draw"] >= MIN_DRAWS:
        for column, value in {"r_hat": 1.0, "mcse_sd": 0.0}.items():
            if column in table:
                table[column] = [value if str(x).lower() == "nan" else x for x in table[column]]
    return table
