"""A run as one page: what came out, how it got there, and episodes to step through."""

from cpomdp_ppl.report.page import write_report
from cpomdp_ppl.report.parts import Part
from cpomdp_ppl.report.recording import Recording, record

__all__ = ["Part", "Recording", "record", "write_report"]
