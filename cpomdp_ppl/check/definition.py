"""Whether a model has all its attributes and methods, and whether they make sense. Runs no program."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import lru_cache
from inspect import Parameter
from numbers import Real
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.actions import Box
from cpomdp_ppl.arrays import are_probabilities
from cpomdp_ppl.check.call import first_line
from cpomdp_ppl.errors import as_integer

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpomdp_ppl.model import CPOMDP

BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
"""Kinds of arguments that are given by their place."""


def definition_faults(model: CPOMDP) -> list[str]:
    """One sentence for whatever is missing or makes no sense among a model's attributes and methods."""
    faults = []
    for program in ("initial", "transition", "observation", "reward"):
        if getattr(getattr(model, program), "__isabstractmethod__", False):
            faults.append(f"{program}: this method is missing")
    for name in ("contexts", "actions"):
        value = getattr(model, name, None)
        number = as_integer(value)
        if name == "actions" and isinstance(value, Box):
            continue
        if value is None:
            faults.append(f"{name}: this attribute is missing; give names, or how many there are")
        elif number is not None:
            if number < 1:
                faults.append(f"{name}: expected names or a positive number, got {value!r}")
        elif not _are_names(value):
            faults.append(f"{name}: expected a sequence of names or a positive number, got {value!r}")
        elif len(set(value)) < len(value):
            faults.append(f"{name}: expected different names, got {tuple(value)!r}")
    horizon = getattr(model, "horizon", None)
    if (as_integer(horizon) or 0) < 1:
        faults.append(f"horizon: expected a positive number of steps, got {horizon!r}")
    discount = model.discount
    if not (isinstance(discount, Real) and not isinstance(discount, bool) and 0 < discount <= 1):
        faults.append(f"discount: expected a number above 0 and at most 1, got {discount!r}")
    faults += _argument_faults(model)
    if model.states is not None and (as_integer(model.states) or 0) < 1:
        faults.append(f"states: expected None or a positive number of states, got {model.states!r}")
    nesting = as_integer(model.max_plate_nesting)
    if nesting is None or nesting < 0:
        faults.append(f"max_plate_nesting: expected a number of axes, got {model.max_plate_nesting!r}")
    for name in model._pyro_samples:  # it would be drawn anew for every program, and not by episode
        faults.append(f"{name}: a PyroSample is not a constant; sample it in a program, as part of the state")
    return faults or list(_prior_faults(model))


def reward_arguments(model: CPOMDP) -> tuple[Parameter, ...]:
    """The arguments that `reward` is given, without the model itself: those that have a default keep it."""
    return _given(_arguments(model.reward))


def _given(arguments: Sequence[Parameter]) -> tuple[Parameter, ...]:
    by_place = [each for each in arguments if each.kind in BY_PLACE]
    return tuple(each for i, each in enumerate(by_place) if i < 3 or each.default is Parameter.empty)


def _arguments(program: Callable[..., Any]) -> tuple[Parameter, ...]:
    """All that a program can be given, however it came to be a method."""
    found = _parameters(getattr(program, "__func__", program))
    takes_model = inspect.ismethod(program) and found[:1] and found[0].kind in BY_PLACE
    return found[1:] if takes_model else found


@lru_cache(maxsize=256)  # functions are kept alive: not those of all models ever made
def _parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


def _argument_faults(model: CPOMDP) -> Iterator[str]:
    """Whether `reward` and `ends` take what they are given; and whether it is plain if arrival pays."""
    three = "(state, action, context)"
    expected = {"reward": f"{three}, or (state, action, context, next_state) without a default"}
    numbers = {"reward": (3, 4), "ends": (3,)}
    for name in ("reward", "ends") if model.can_end else ("reward",):
        try:
            arguments = _arguments(getattr(model, name))
        except (TypeError, ValueError) as error:
            yield f"{name}: expected a function of known arguments, got {first_line(error)}"
            continue
        needed = [each for each in arguments if each.kind is Parameter.KEYWORD_ONLY]
        unclear = any(each.default is Parameter.empty for each in needed) or any(
            each.name == "next_state" and each.default is not Parameter.empty for each in arguments
        )
        if unclear or len(_given(arguments)) not in numbers[name]:
            shown = inspect.Signature([each.replace(annotation=Parameter.empty) for each in arguments])
            yield f"{name}: expected the arguments {expected.get(name, three)}, got {shown}"


def _are_names(value: Any) -> bool:
    proper = isinstance(value, Sequence) and not isinstance(value, str)
    return proper and len(value) > 0 and all(isinstance(entry, str) for entry in value)


def _prior_faults(model: CPOMDP) -> Iterator[str]:
    try:
        prior = model.prior()
    except (TypeError, ValueError, RuntimeError) as error:
        given = getattr(model, "context_prior", None)
        yield f"context_prior: expected probabilities, got {given!r} ({first_line(error)})"
        return
    if prior.shape != (model.num_contexts,):
        expected = f"shape [{model.num_contexts}], one for each context"
        yield f"context_prior: expected {expected}, got {list(prior.shape)}"
    elif not are_probabilities(prior):
        yield f"context_prior: expected non-negative probabilities that sum to 1, got {prior.tolist()}"
