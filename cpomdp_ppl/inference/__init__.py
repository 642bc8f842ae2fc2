"""Per-context likelihoods, derived from a model's programs: one interface, several backends."""

from __future__ import annotations

from cpomdp_ppl.inference.backend import Backend, Recursion, inference_scope
from cpomdp_ppl.inference.choice import BACKENDS, as_backend, reference_backend
from cpomdp_ppl.inference.cloud import Cloud
from cpomdp_ppl.inference.extended import ExtendedKalmanFilter
from cpomdp_ppl.inference.filtering import Filtering, Smoothing
from cpomdp_ppl.inference.finite import ObservableOperator
from cpomdp_ppl.inference.grid import GridFilter
from cpomdp_ppl.inference.observed import Observed, PerceptDensity
from cpomdp_ppl.inference.online import OnlineFilter
from cpomdp_ppl.inference.particle_filter import SMC, ParticleFilter
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
