"""An upper bound on returns: what an agent earns that knows the context and sees every state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from cpomdp_ppl.errors import DensityError, UnsupportedModelError, require, require_model
from cpomdp_ppl.inference import GridFilter, ObservableOperator
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.inference.discrete import DiscreteRecursion
    from cpomdp_ppl.inference.grid import GridRecursion
    from cpomdp_ppl.model import CPOMDP

TABLE_MEMORY = 2**30
"""Bytes that the table of a finite model's transitions may take."""

GRID_SIZES = (150, 300, 600, 1200)
"""Numbers of points of grids that are tried, each finer than the last, until two agree."""

RELATIVE_DIFFERENCE = 0.01
"""Share of the range from the worst to the best return by which the values of two grids may differ."""

ROUNDING_ERROR = 1e-9
"""Share of the highest reward by which they may differ besides, at every step."""

LARGEST_LOSS = 0.1
"""Share of the range of rewards that may be lost between the points of a grid."""

LEAVING_PROBABILITY = 1e-3
"""Probability with which a state may get to the boundary of a grid."""


def informed_return(model: CPOMDP, *, max_dim: int = 2) -> Tensor | None:
    """The best expected return in every context for an agent that knows context and state, float64 `[C]`.

    No policy earns more, as none knows more. So this is an upper bound on what can be earned, and how much
    less a policy earns is an upper bound on its regret. How loose it is depends on what it takes to find out
    the state; `CPOMDP.context_known_return` and `solvers.exact` assume less of the agent.

    It is found by backward induction, `V_t(s) = max_a r_c(s, a) + γ E[V_{t+1}(s') | s, a, c]`, where nothing
    follows on the end of an episode: exactly on the tables of a finite model, and for one or two real numbers
    on a grid that is refined until it makes no difference. Twice the difference that the last refinement made
    is added, to stay on the safe side. A peak of the reward that is narrower than about a thousandth of the
    states' range may be overlooked.

    Args:
        model: The CPOMDP.
        max_dim: How many real numbers a state may have, 1 or 2; a grid in the plane may take minutes.

    Returns:
        The returns, or None where they cannot be computed: if actions are continuous, or states of another
        kind, too many, or without bounds, if no two grids agree, or if a reward is not finite in a state that
        may be impossible.

    Examples:
        >>> from cpomdp_ppl.models import ContextualTiger
        >>> informed_return(ContextualTiger(horizon=3))  # the treasure every time
        tensor([30., 30., 30.], dtype=torch.float64)
    """
    require_model(model)
    require(max_dim in (1, 2), "max_dim", max_dim, "1 or 2")
    N = model.states
    if model.box is not None:
        return None
    if N is not None and 8 * model.num_contexts * model.num_actions * N**2 > TABLE_MEMORY:
        return None
    if N is None and sum(leaf.shape.numel() for _, leaf in leaves(signature(model).state)) > max_dim:
        return None
    try:
        with inference_scope(model, 0):
            if N is not None:
                exact = ObservableOperator().recursion(model)
                best = best_return(exact, exact.rewards)
                return best if bool(best.isfinite().all()) else None
            return _on_grids(model)
    except (UnsupportedModelError, DensityError):  # the programs cannot be tabulated
        return None


def best_return(recursion: DiscreteRecursion, rewards: Tensor) -> Tensor:
    """The highest expected return of rewards `[C, A, N]` if states are seen, by backward induction, `[C]`."""
    model = recursion.model
    V = torch.zeros_like(rewards[:, 0])  # [C, N]
    for _ in range(model.horizon):
        to_come = _expected(recursion, V)
        V = (rewards + (to_come if model.discount == 1 else model.discount * to_come)).amax(1)
    return (recursion.initial * V).sum(-1)


def _expected(recursion: DiscreteRecursion, values: Tensor) -> Tensor:
    """Expectations `[C, A, N]` of values `[C, N]` in the next state after every action; 0 if it ends."""
    A = recursion.rewards.shape[1]
    later = values[:, None].expand(-1, A, -1)
    if recursion.model.can_end:
        later = later * recursion.goes_on
    least = later.amin()  # the grid takes its values for densities, and cuts what is negative
    return least + recursion.expect(later - least, torch.arange(A, device=values.device))


def _on_grids(model: CPOMDP) -> Tensor | None:
    coarse: Tensor | None = None
    for num_points in GRID_SIZES:
        compared_below = GridFilter(num_points, tolerance=math.inf)
        recursion = compared_below.recursion(model)
        if not _covers(recursion) or not _resolves(recursion):
            coarse = None
            continue
        fine = best_return(recursion, recursion.rewards)
        if coarse is not None:
            error = (fine - coarse).abs()
            worst = -best_return(recursion, -recursion.rewards)
            rounding = ROUNDING_ERROR * model.horizon * recursion.rewards.abs().amax()
            if bool((error <= RELATIVE_DIFFERENCE * (fine - worst) + rounding).all()):
                return fine + 2 * error
        coarse = fine
    return None


def _covers(recursion: GridRecursion) -> bool:
    """Whether no policy gets to the grid's boundary, beyond which nothing is known."""
    C, _, G = recursion.rewards.shape
    reached = torch.zeros(C, G, dtype=torch.float64)  # with what probability, at most
    for _ in range(recursion.model.horizon):
        reached[:, recursion.grid.boundary] = 1.0
        reached = _expected(recursion, reached).amax(1)
    return bool(((recursion.initial * reached).sum(-1) <= LEAVING_PROBABILITY).all())


def _resolves(recursion: GridRecursion) -> bool:
    """Whether the grid sees the highest reward, which may be between its points."""
    G = recursion.grid.size
    x = recursion.grid.subpoints(torch.arange(G), 16 if recursion.dim == 1 else 4).flatten(0, 1)
    everywhere = recursion.rewards_at(x)  # [C, A, 16 G]
    missed = everywhere.amax(-1) - recursion.rewards.amax(-1)  # [C, A]
    return bool((missed <= LARGEST_LOSS * (everywhere.amax(-1) - everywhere.amin(-1))).all())
