"""Per-context likelihoods, derived from a model's programs: one interface, several backends."""

from __future__ import annotations

from cpomdp_ppl.errors import invalid
from cpomdp_ppl.inference.backend import Backend, Recursion, inference_scope
from cpomdp_ppl.inference.cloud import Cloud
from cpomdp_ppl.inference.extended import ExtendedKalmanFilter
from cpomdp_ppl.inference.filtering import Filtering, Smoothing
from cpomdp_ppl.inference.finite import ObservableOperator
from cpomdp_ppl.inference.grid import GridFilter
from cpomdp_ppl.inference.observed import Observed, PerceptDensity
from cpomdp_ppl.inference.online import OnlineFilter
from cpomdp_ppl.inference.particle_filter import SMC, ParticleFilter
from cpomdp_ppl.inference.reference import reference_backend
from cpomdp_ppl.inference.scan import FilterStep, scan
from cpomdp_ppl.inference.unscented import UnscentedKalmanFilter

__all__ = [
    "BACKENDS",
    "SMC",
    "Backend",
    "Cloud",
    "ExtendedKalmanFilter",
    "FilterStep",
    "Filtering",
    "GridFilter",
    "ObservableOperator",
    "Observed",
    "OnlineFilter",
    "ParticleFilter",
    "PerceptDensity",
    "Recursion",
    "Smoothing",
    "UnscentedKalmanFilter",
    "as_backend",
    "inference_scope",
    "reference_backend",
    "scan",
]

BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend
    for backend in (
        ParticleFilter,
        ExtendedKalmanFilter,
        UnscentedKalmanFilter,
        ObservableOperator,
        GridFilter,
    )
}
"""The backends by the names that are accepted wherever a backend is."""


def as_backend(likelihood: str | Backend) -> Backend:
    """A backend by its name, with default settings, or as it is.

    Examples:
        >>> as_backend("smc")
        ParticleFilter(num_particles=256, resampling='systematic', ess_threshold=0.5, guide=None, \
common_random_numbers=True, chunk=None, engine='auto')
    """
    if isinstance(likelihood, Backend):
        return likelihood
    if not isinstance(likelihood, str) or likelihood not in BACKENDS:
        raise invalid("likelihood", likelihood, f"one of {list(BACKENDS)}, or a backend")
    return BACKENDS[likelihood]()
