"""Options that several commands share, and what their values must look like."""

from __future__ import annotations

import inspect
import math
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.model import as_value, as_words
from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.inference.choice import AUTO, BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.progress import Progress

FRESH = "fresh, and noted in run.json"
NEW_FOLDER = "runs/<model>-<command>-<n>"
BESIDE = f"beside the solution of RUN, or for a model {NEW_FOLDER}"
SUITABLE = "auto: exact, ekf, or smc with enough particles, whichever suits the model"
MOST_EXACT = "auto: the most exact that serves the model"
BUDGET = {"simulations": 100, "training_episodes": 10_000}
"""Defaults of options that several commands have: values, or what they come to in words."""


def model_arguments(parser: ArgumentParser) -> None:
    """Add the model, and arguments of its constructor."""
    parser.add_argument("model", metavar="MODEL", help="module:Class or path/to/file.py:Class")
    _constructor_arguments(parser)


def target_options(parser: ArgumentParser, **defaults: Any) -> None:
    """Add the target of a command, who acts there, and further options as by `shared_options`."""
    parser.add_argument("target", metavar="TARGET", help="the run folder of a fit, or a model")
    _constructor_arguments(parser)
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="who acts, if MODEL is given: random, qmdp, pft, … (see compare), or path/to/file.py:name",
    )
    parser.add_argument(
        "--unfinished", action="store_true", help="take the best so far of a fit that was stopped or killed"
    )
    other_model_options(parser)
    of_solution = "that of the solution, or else of the model"
    shared_options(parser, **BUDGET, **defaults, prior=of_solution, run=BESIDE)


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


def _constructor_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "arguments", nargs="*", metavar="key=value", help="arguments of the model's constructor"
    )


def shared_options(parser: ArgumentParser, **defaults: Any) -> None:
    """Add options that several commands share: `num_episodes=30` is `--num-episodes`, and 30 its default.

    A default that is a text says in words what it comes to if the option is left out.
    """
    for name, default in defaults.items():
        kind, metavar, explanation = SHARED[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar=metavar,
            default=None if isinstance(default, str) else default,
            help=f"{explanation} (default: {default})",
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


def backend(text: str) -> Backend | None:
    """A backend by name, with settings: `smc,num_particles=1000,guide=ekf`; None for `auto`, as if left out.

    Examples:
        >>> backend("smc,num_particles=1000").num_particles
        1000
    """
    if text == AUTO:
        return None
    name, *settings = text.split(",")
    try:
        if name not in BACKENDS:
            raise invalid("likelihood", name, f"one of {', '.join([AUTO, *BACKENDS])}")
        kind = BACKENDS[name]
        arguments = {key: as_value(word) for key, word in as_words(settings).items()}
        taken = list(inspect.signature(kind).parameters)
        expected = f"settings out of {', '.join(taken)}" if taken else "no settings"
        for each in arguments:
            require(each in taken, name, each, expected)
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(str(error)) from error


SHARED: dict[str, tuple[Callable[[str], Any], str | None, str]] = {
    "num_episodes": (count, None, "number of episodes"),
    "simulations": (count, None, "simulations that a planner runs for each decision"),
    "training_episodes": (count, None, "episodes that a learner plays"),
    "likelihood": (
        backend,
        "NAME",
        f"{', '.join([AUTO, *BACKENDS])}, with settings as in smc,num_particles=1000",
    ),
    "prior": (probabilities, "P,P,…", "prior over contexts, such as 0.5,0.5"),
    "seed": (seed, None, "seed of all random numbers"),
    "run": (str, "DIR", "folder for results"),
}
"""Options of several commands: type, placeholder and explanation."""
