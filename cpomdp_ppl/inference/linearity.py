"""Whether a model is linear and Gaussian, as far as simulated episodes tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.extended import ExtendedKalmanFilter
from cpomdp_ppl.inference.gaussian import Reparameterised
from cpomdp_ppl.inference.grid_checks import NATS_BEHIND
from cpomdp_ppl.inference.observed import log_density_of_seen
from cpomdp_ppl.inference.scan import observed_in_time
from cpomdp_ppl.inference.trials import REFUSALS, result_or_none
from cpomdp_ppl.inference.unscented import UnscentedKalmanFilter

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.kalman import KalmanRecursion
    from cpomdp_ppl.model import CPOMDP

ROUNDING_ERROR = 1e-2
"""Nats by which an extended and an unscented filter may differ, in single precision, on a linear model."""

STRAIGHTNESS = 1e-4
"""How far a function may be from a straight line, as a share of its change, to count as one."""


def is_linear_gaussian(model: CPOMDP, episodes: Episodes) -> bool:
    """Whether Kalman filters are exact, as far as simulated episodes tell."""
    extended = result_or_none(ExtendedKalmanFilter(), model, episodes)
    unscented = result_or_none(UnscentedKalmanFilter(), model, episodes)
    if extended is None or unscented is None:
        return False
    log_likelihood = extended.log_likelihood
    likely = log_likelihood >= log_likelihood.amax(1, keepdim=True) - NATS_BEHIND  # [B, C]
    differences = (extended.increments - unscented.increments).abs().sum(1)
    differences += (extended.initial_increment - unscented.initial_increment).abs()
    if not bool((differences[likely] <= ROUNDING_ERROR).all()):
        return False
    # Both may be wrong in the same way: neither sees how noise depends on the state.
    with inference_scope(model, 0):
        recursion = ExtendedKalmanFilter().recursion(model)
        if not recursion.in_double:  # two filters may lose the same digits
            return False
        try:
            return _starts_straight(recursion) and _goes_straight(recursion, episodes)
        except REFUSALS:  # a Gaussian nuisance, say, over which densities cannot be summed
            return False


def _starts_straight(recursion: KalmanRecursion) -> bool:
    """Whether the first state is a linear function of noise."""
    C, E = recursion.model.num_contexts, recursion.initial_noise
    noise = _lines(torch.randn(2, C, 1, 64, E, dtype=recursion.coordinates.dtype))
    with Reparameterised("initial", recursion.plate_axes, noise):
        state = recursion.model.initial(recursion.context)
    return _straight(recursion.coordinates.vector(state, noise.shape[:-1]))


def _goes_straight(recursion: KalmanRecursion, episodes: Episodes) -> bool:
    """Whether motion is linear in state and noise, and the log-density of what is seen quadratic."""
    model, C, B = recursion.model, recursion.model.num_contexts, len(episodes)
    shape = torch.Size((B, episodes.horizon + 1))
    x = recursion.coordinates.vector(episodes.states, shape)  # [B, T + 1, D]
    K, E = x.shape[1], recursion.transition_noise
    for seen in observed_in_time(episodes):
        if not seen.observations:
            continue
        # Lines through any two states of the simulation, and on beyond one of them.
        pairs = x[torch.randint(B, (2, B, K)), torch.randint(K, (2, B, K))]  # [2, B, K, D]
        if seen.action is not None:
            points = _lines(pairs[:, None].expand(2, C, B, K, -1))  # [C, B, 3 K, D]
            noise = _lines(torch.randn(2, C, B, K, E, dtype=x.dtype)) if E else None
            if not _straight(recursion.moved(points, noise, seen.action)):
                return False
        if seen.rows is not None and not len(seen.rows):
            continue
        some = seen if seen.rows is None else seen.select(seen.rows)
        rows = slice(None) if seen.rows is None else seen.rows
        states = recursion.coordinates.state(_parabolas(pairs[:, None].expand(2, C, B, K, -1)[:, :, rows]))
        density = log_density_of_seen(model, recursion.signature, states, recursion.context, some)
        if not _parabolic(density.expand(C, -1, 5 * K)):
            return False
    return True


def _lines(ends: Tensor) -> Tensor:
    """Three points in a row for each pair `[2, C, B, K, D]`, on the particle axis: `[C, B, 3 K, D]`."""
    a, b = ends
    return torch.cat([a, b, 2 * b - a], -2)


def _straight(values: Tensor) -> bool:
    """Whether values `[C, B, 3 K, m]` at points in a row are in a row themselves."""
    a, b, c = values.chunk(3, -2)
    rounding = 1e-6 * values.abs().amax(-2, keepdim=True)
    return bool(
        ((a + c - 2 * b).abs() <= STRAIGHTNESS * (c - a).abs().amax(-2, keepdim=True) + rounding).all()
    )


def _parabolas(ends: Tensor) -> Tensor:
    """Five points in a row for each pair `[2, C, B, K, D]`: `[C, B, 5 K, D]`."""
    a, b = ends
    return torch.cat([a + 0.5 * k * (b - a) for k in range(5)], -2)


def _parabolic(values: Tensor) -> bool:
    """Whether values `[C, B, 5 K]` at points in a row are quadratic: without third differences."""
    third = torch.stack(values.double().chunk(5, -1)).diff(n=3, dim=0).abs().amax(0)  # [C, B, K]
    size = values.double().abs().amax(-1, keepdim=True)
    return bool((third <= STRAIGHTNESS * size + 1e-6).all())
