"""Options that several commands share, and what their values must look like."""

from __future__ import annotations

import inspect
import math
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING

from cpomdp_ppl.cli.model import as_arguments
from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.inference import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.progress import Progress

MODEL_HELP = "module:Class or path/to/file.py:Class"


def model_arguments(parser: ArgumentParser, what: str = "model", *, explanation: str = MODEL_HELP) -> None:
    """Add the model (or something else that may be one), and arguments of its constructor."""
    parser.add_argument(what, metavar=what.upper(), help=explanation)
    parser.add_argument(
        "arguments", nargs="*", metavar="key=value", help="arguments of the model's constructor"
    )


def policy_option(parser: ArgumentParser) -> None:
    """Add options on who acts if it is not a solution, and on what learners and planners may spend."""
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="who acts, if MODEL is given: random, qmdp, pft, … (see compare), or path/to/file.py:name",
    )
    budget_options(parser)
    parser.add_argument(
        "--unfinished", action="store_true", help="take the best so far of a fit that was stopped or killed"
    )
    other_model_options(parser)


def other_model_options(parser: ArgumentParser) -> None:
    """Add options on which code to run, if not what the record of a run names."""
    parser.add_argument(
        "--model", dest="other", metavar="MODEL", help="the model of RUN, if its file has moved or changed"
    )
    parser.add_argument(
        "--argument",
        dest="other_arguments",
        action="append",
        default=[],
        metavar="key=value",
        help="an argument of its constructor, if not as in RUN; may be repeated, goes with --model",
    )


def budget_options(parser: ArgumentParser) -> None:
    """Add options on what learners and planners may spend."""
    parser.add_argument(
        "--simulations",
        type=count,
        default=100,
        help="simulations that a planner runs for each decision (default: %(default)s)",
    )
    parser.add_argument(
        "--training-episodes",
        type=count,
        default=10_000,
        help="episodes that a learner plays (default: %(default)s)",
    )


def seed_option(parser: ArgumentParser, default: int | None) -> None:
    """Add the seed of all random numbers."""
    shown = "fresh, and noted in run.json" if default is None else str(default)
    parser.add_argument(
        "--seed", type=seed, default=default, help=f"seed of all random numbers (default: {shown})"
    )


def run_option(parser: ArgumentParser, default: str = "runs/<model>-<command>-<n>") -> None:
    """Add the folder for results."""
    parser.add_argument("--run", metavar="DIR", help=f"folder for results (default: {default})")


BESIDE = "beside the solution of RUN, or for a model runs/<model>-<command>-<n>"
"""Where results about a solution go by default."""


def prior_option(parser: ArgumentParser) -> None:
    """Add a prior over contexts, by one rule for all commands."""
    parser.add_argument(
        "--prior",
        type=probabilities,
        metavar="P,P,…",
        help="prior over contexts, such as 0.5,0.5 (default: that of the solution, or else of the model)",
    )


def likelihood_option(
    parser: ArgumentParser, default: str = "exact for a finite model of moderate size, otherwise smc"
) -> None:
    """Add the inference backend, with its settings."""
    parser.add_argument(
        "--likelihood",
        type=backend,
        metavar="NAME",
        help=f"{', '.join(BACKENDS)}, with settings as in smc,num_particles=1000 (default: {default})",
    )


def episodes_option(parser: ArgumentParser, default: int) -> None:
    """Add the number of episodes."""
    parser.add_argument(
        "--num-episodes", type=count, default=default, help="number of episodes (default: %(default)s)"
    )


def shows_progress(options: Namespace) -> bool:
    """Whether to draw progress bars: on a terminal, unless --quiet is given."""
    return sys.stderr.isatty() and not options.quiet


def progress_of(options: Namespace, about: str = "") -> Progress:
    """Bars on a terminal; elsewhere lines, which begin with what they are about; or False with --quiet."""
    if options.quiet or sys.stderr.isatty():
        return shows_progress(options)
    return lambda line: note(options, f"{about}{line}")


def note(options: Namespace, text: str) -> None:
    """Print a note on stderr, unless --quiet is given."""
    if not options.quiet:
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    print(f"cpomdp: warning: {text}", file=sys.stderr, flush=True)


def many(number: int, what: str) -> str:
    """A number with its noun, in the singular or plural.

    Examples:
        >>> many(1, "episode"), many(2000, "episode")
        ('1 episode', '2,000 episodes')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"


def _checked(
    expected: str, convert: Callable[[str], float], proper: Callable[[float], bool]
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not proper(value):  # NaN is not, either
            raise ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    return parse


count = _checked("a positive integer", int, lambda n: n >= 1)
seed = _checked("an integer from 0 to 2**32 - 1", int, lambda n: 0 <= n < 2**32)
positive = _checked("a positive number", float, lambda x: 0 < x < math.inf)
non_negative = _checked("a number, not negative", float, lambda x: 0 <= x < math.inf)


def probabilities(text: str) -> tuple[float, ...]:
    """Numbers joined by commas, which sum to 1."""
    try:
        values = tuple(float(word) for word in text.split(","))
        proper = all(value >= 0 for value in values) and abs(sum(values) - 1) < 1e-5
    except ValueError:
        proper = False
    if not proper:
        raise ArgumentTypeError(f"expected probabilities that sum to 1, such as 0.5,0.5, got {text}")
    return values


def names(text: str) -> tuple[str, ...]:
    """Names joined by commas, each once; only paths may have spaces in them."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    has_spaces = any(" " in word and ":" not in word for word in found)
    if not found or has_spaces or len(set(found)) < len(found):
        raise ArgumentTypeError(f"expected names joined by commas, as in random,qmdp, each once, got {text}")
    return found


def backend(text: str) -> Backend:
    """A backend by name, with settings: `smc,num_particles=1000,guide=ekf`.

    Examples:
        >>> backend("smc,num_particles=1000").num_particles
        1000
    """
    name, *settings = text.split(",")
    try:
        if name not in BACKENDS:
            raise invalid("likelihood", name, f"one of {', '.join(BACKENDS)}")
        arguments, kind = as_arguments(settings), BACKENDS[name]
        taken = list(inspect.signature(kind).parameters)
        expected = f"settings out of {', '.join(taken)}" if taken else "no settings"
        for each in arguments:
            require(each in taken, name, each, expected)
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(str(error)) from error
