"""What can go wrong on the command line, and the exit codes that tell."""

from __future__ import annotations

import re

OK, FAILED, USER_ERROR, FAULT, INTERRUPTED = 0, 1, 2, 70, 130
"""Success; a failed check or calibration; what the user can put right; a fault in a program; Ctrl-C."""

OURS = ("cpomdp_ppl", "solvers", "baselines")


class CommandError(ValueError):
    """A command cannot be carried out as it was given; the message says why in one sentence."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with a sentence on what was kept and how to go on."""


def is_user_error(error: Exception) -> bool:
    """Whether the message alone says what is wrong, so that a traceback would only be in its way.

    That is so for exceptions of our packages, and for those of `cpomdp_ppl.errors.invalid`; other errors
    are faults in our code or in the model's programs, and the traceback says where.
    """
    if type(error).__module__.partition(".")[0] in OURS:
        return True
    return (
        type(error) is ValueError and re.match(r"\w+: expected .+, got ", str(error), re.DOTALL) is not None
    )
