"""ArviZ's summary, of what `to_inference_data` returns."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from cpomdp_ppl.errors import require

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        import arviz as az

    posterior = data["posterior"]
    known = [str(name) for name in posterior.data_vars]
    names = [var_names] if isinstance(var_names, str) else var_names
    if names is not None:
        parts = {"state": state_variables(posterior)} if "state" not in known else {}
        names = [part for name in names for part in parts.get(name, [name])]
        for name in names:
            require(name in known, "var_names", name, f"variables out of {known}, or 'state'")
    with np.errstate(invalid="ignore", divide="ignore"):
        table = az.summary(data, var_names=names, **options)
    if posterior.sizes["chain"] > 1 and posterior.sizes["draw"] >= MIN_DRAWS:
        for column, value in {"r_hat": 1.0, "mcse_sd": 0.0}.items():
            if column in table:
                table[column] = [value if str(x).lower() == "nan" else x for x in table[column]]
    return table
