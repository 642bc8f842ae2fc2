"""Diagnostics: whether inference can be believed."""

from cpomdp_ppl.diagnostics.calibration import Calibration, calibrate
from cpomdp_ppl.diagnostics.context_calibration import calibrate_contexts
from cpomdp_ppl.diagnostics.inference_data import summary, to_inference_data
from cpomdp_ppl.diagnostics.plots import plot_agreement, plot_contexts, plot_filter, plot_states

__all__ = [
    "Calibration",
    "calibrate",
    "calibrate_contexts",
    "plot_agreement",
    "plot_contexts",
    "plot_filter",
    "plot_states",
    "summary",
    "to_inference_data",
]
