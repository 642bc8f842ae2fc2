"""Running a model's programs on small batches, for every context and action, to see whether they work."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from torch import Tensor

from cpomdp_ppl.actions import probe_names, probes, random_actions
from cpomdp_ppl.check.call import Call, Faults, Sites, cell, first_line
from cpomdp_ppl.check.results import (
    check_function,
    check_masks,
    check_names,
    check_numbers,
    check_site,
    check_sites_agree,
    checked_state,
)
from cpomdp_ppl.dataflow import dependencies
from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.handlers import Batched, Recorded, base_of
from cpomdp_ppl.rng import drawn_from, generators, isolated
from cpomdp_ppl.signature import read_signature
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from cpomdp_ppl.check.call import Sites
    from cpomdp_ppl.model import CPOMDP

PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
"""Sizes of trial batches, which the axes of a program are unlikely to have, too."""

MAX_STEPS = 200
"""How many steps a trial episode is followed."""


def program_faults(model: CPOMDP) -> list[str]:
    """Run every program on small batches, for every context and action, and say what is wrong."""
    faults = Faults()
    with isolated(0, validate=True), torch.no_grad(), poutine.block(), model.running():
        for name in model._pyro_params:
            getattr(model, name)  # takes its value from the param store now, so as not to change later
        _check_programs(model, faults)
    if not faults.found:
        try:
            with isolated(0):
                dependencies(model, read_signature(model))
        except UnsupportedModelError as error:
            faults.found["observation", "hidden"] = str(error)
        except Exception as error:
            faults.report("observation", "flow", f"cannot be followed: {type(error).__name__}: {error}")
    return list(faults.found.values())


def _check_programs(model: CPOMDP, faults: Faults) -> None:
    C = model.num_contexts
    template = _first_state(model)
    E, N = _trial_sizes(model, template)
    S = (C, E, N)
    plate_axes = (1,) * model.max_plate_nesting
    context = torch.arange(C, device=model.device).reshape(C, 1, 1, *plate_axes)

    call = Call(model, "initial", None, None, context, S)
    initial = try_call(call, faults)
    if initial is None or not _is_state(template, faults):
        return
    state = checked_state(call, initial[0], template, faults)
    if state is None:
        return

    observed: dict[str, tuple[str, ...]] = {}
    for when, action in _trial_actions(model, E).items():
        transition = Call(model, "transition", state, action, context, S, when)
        moved = try_call(transition, faults)
        after = None if moved is None else checked_state(transition, moved[0], template, faults)
        if after is None:  # if there is nowhere to go, look around at the start
            after = state
        for call in _functions(transition, after, when):
            found = try_call(call, faults)
            if found is not None:
                check_function(call, *found, faults)
        call = Call(model, "observation", after, action, context, S, when)
        sites = _check_observation(call, faults)
        if sites is not None:
            observed[when] = tuple(sites)
            latents = set() if moved is None else set(moved[1])
            check_names(model, set(initial[1]), latents, set(sites), faults)
    if model.initial_observation:
        when = " before the first action"
        sites = _check_observation(Call(model, "observation", state, None, context, S, when), faults)
        if sites is not None:
            observed[when] = tuple(sites)
    check_sites_agree(model, observed, faults)
    _check_episodes(model, state, template, context, S, faults)


def _trial_actions(model: CPOMDP, E: int) -> dict[str, Tensor]:
    """Actions, each alone and all in a batch of E episodes, by the words that tell when."""
    tried = probes(model)
    own, plate_axes = tried.shape[1:], (1,) * model.max_plate_nesting
    actions = {
        f" for action '{name}'": action.reshape(1, 1, 1, *plate_axes, *own)
        for name, action in zip(probe_names(model), tried, strict=True)
    }
    mixed = tried[torch.arange(E, device=model.device) % len(tried)]
    return actions | {" for a batch of different actions": mixed.reshape(1, E, 1, *plate_axes, *own)}


def _functions(transition: Call, after: Any, now: str) -> list[Call]:
    """The calls of programs without sites beside that of a transition: the reward, and whether that ends."""
    model = transition.model
    arrival = after if model.pays_on_arrival else None
    calls = [replace(transition, program="reward", when=now, arrival=arrival)]
    if model.can_end:
        calls.append(replace(transition, program="ends", state=after))
    return calls


def _check_observation(call: Call, faults: Faults) -> Sites | None:
    """Run an observation program, and look at its masks; returns its sites, or None if it did not run."""
    seen = try_call(call, faults)
    if seen is None:
        return None
    check_masks(call, seen[1], faults)
    return seen[1]


def _first_state(model: CPOMDP) -> Any:
    """The first state without a batch, so that its axes are known for certain; or the exception raised."""
    zero = torch.zeros((1,) * model.max_plate_nesting, dtype=torch.long, device=model.device)
    try:
        with Batched((), model.max_plate_nesting):
            return model.initial(zero)
    except Exception as error:  # whatever a user's program may raise
        return error


def _is_state(template: Any, faults: Faults) -> bool:
    if isinstance(template, Exception):
        what = f"works in a batch but not for a single episode ({first_line(template)})"
        faults.report("initial", "alone", what)
        return False
    for name, leaf in leaves(template):
        if not isinstance(leaf, Tensor):
            kind = type(leaf).__name__
            faults.report("initial", "type", f"'{name}' is a {kind}; a state is a tensor or a dict of them")
            return False
    return True


def _trial_sizes(model: CPOMDP, template: Any) -> tuple[int, int]:
    """Numbers of episodes and particles that no other axis has, with episodes enough for every action."""
    tried = probes(model)
    lengths = {model.num_contexts, *tried.shape}
    lengths |= {size for _, leaf in leaves(template) for size in getattr(leaf, "shape", ())}
    try:
        sites = read_signature(model).observations.values()
        lengths |= {size for site in sites for size in site.shape}
    except Exception:  # reported when the programs are checked
        pass
    sizes = (prime for prime in PRIMES if prime not in lengths)
    N = next(sizes, 47)
    E = next((prime for prime in sizes if prime > len(tried)), len(tried) + 1)
    return E, N


def _check_episodes(
    model: CPOMDP, state: Any, template: Any, context: Tensor, S: tuple[int, int, int], faults: Faults
) -> None:
    """Follow episodes of random actions, to find what goes wrong only later.

    A program with a known fault is not looked at again.
    """
    plate_axes = (1,) * model.max_plate_nesting
    moves = Faults() if faults.has("transition") else faults
    for t in range(min(model.horizon, MAX_STEPS)):
        action = random_actions(model, (1, S[1], 1, *plate_axes))
        now, later = (f" at time {time} of an episode of random actions" for time in (t, t + 1))
        transition = Call(model, "transition", state, action, context, S, later)
        moved = _run_later(transition, moves)
        after = None if moved is None else checked_state(transition, moved[0], template, moves)
        if after is None:
            return
        for call in _functions(transition, after, now):
            found = None if faults.has(call.program) else _run_later(call, faults)
            if found is not None:
                check_numbers(call, found[0], faults)
        state = after
        if not faults.has("observation"):
            call = Call(model, "observation", state, action, context, S, later)
            seen = _run_later(call, faults)
            if seen is not None:
                check_masks(call, seen[1], faults)


def _run_later(call: Call, faults: Faults) -> tuple[Any, Sites] | None:
    """Run a call in the course of an episode, and look at its sites; None if it raises."""
    try:
        result, sites = call.run()
    except Exception as error:
        faults.report(call.program, "later", f"raises{call.when} {first_line(error)}")
        return None
    for name, site in sites.items():
        check_site(call, name, site, faults)
    return result, sites


def try_call(call: Call, faults: Faults) -> tuple[Any, Sites] | None:
    """Run a call, and report what goes wrong in it; None if it did not run at all."""
    before, arguments = _attributes(call.model), call.arguments()
    versions = _versions(arguments)
    try:
        result, sites = call.run(arguments=arguments)
    except Exception as error:  # whatever a user's program may raise
        _report_exception(call, error, faults)
        return None
    if _versions(arguments) != versions:
        faults.report(call.program, "in place", "changes its arguments in place; it must return new tensors")
    after = _attributes(call.model)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        faults.report(call.program, "self", f"changes the model itself ({', '.join(changed)}) while it runs")
    sound = [check_site(call, name, site, faults) for name, site in sites.items()]
    if call.program != "observation" and result is None:
        faults.report(call.program, "None", f"returns None{call.when}; is a return missing?")
        return None
    if all(sound):
        hidden = " and ".join(_hidden_draws(call, sites))
        if hidden:
            sites_instead = "make each of them a sample site: others can be neither scored nor replayed"
            function = call.program in ("reward", "ends")
            instead = "it must be a function of its arguments" if function else sites_instead
            what = f"draws random numbers outside of `pyro.sample`, from {hidden}{call.when}; {instead}"
            faults.report(call.program, "random", what)
        else:
            _check_cells(call, result, sites, faults)
    return result, sites


def _report_exception(call: Call, error: Exception, faults: Faults) -> None:
    """Say whether it is one context that fails, or only the batch."""
    failing = []
    for c, name in enumerate(call.model.context_names):
        try:
            call.at(c, 0, 0).run()
        except Exception as alone:
            failing.append(name)
            error = alone
    if not failing:
        faults.report(
            call.program,
            "batch",
            f"works for a single episode but not in a batch{call.when}: its shapes do not broadcast "
            f"(is a `.to_event` missing?), or it branches on a tensor ({first_line(error)})",
        )
    else:
        which = "" if len(failing) == call.model.num_contexts else f" in context '{failing[0]}'"
        faults.report(call.program, "raises", f"raises{which}{call.when} {first_line(error)}")


def _hidden_draws(call: Call, sites: Sites) -> list[str]:
    """Generators that a program draws from although all its sites are given."""
    values = {name: site["value"] for name, site in sites.items()}
    before = generators()
    batched = Batched(call.shape, call.model.max_plate_nesting)
    given = poutine.condition(data=values)  # innermost: `Batched` would draw before it gives a value
    with suppress(Exception), batched, Recorded(), given:  # what it raises is reported elsewhere
        getattr(call.model, call.program)(*call.arguments())
    return drawn_from(before, generators())


def _check_cells(call: Call, result: Any, sites: Sites, faults: Faults) -> None:
    """Every cell must come out as if it had been alone."""
    C, E, N = call.shape
    values = {name: site["value"] for name, site in sites.items()}
    for c, e, n in product(range(min(C, 4)), (0, E - 1), (0, N - 1)):
        given = {name: cell(value, c, e, n) for name, value in values.items()}
        try:
            result_alone, sites_alone = call.at(c, e, n).run(given)
        except Exception as error:
            what = f"works in a batch but not for a single episode{call.when} ({first_line(error)})"
            faults.report(call.program, "alone", what)
            return
        pairs = [
            (cell(sites[name]["fn"].log_prob(values[name]), c, e, n), site["fn"].log_prob(site["value"]))
            for name, site in sites_alone.items()
            if name in sites and not isinstance(base_of(site["fn"]), Delta)  # 0 or −∞, as rounding has it
        ]
        if result is not None:
            pairs += [
                (_cell_of_result(x, (c, e, n)), y)
                for (_, x), (_, y) in zip(leaves(result), leaves(result_alone), strict=False)
                if isinstance(x, Tensor) and isinstance(y, Tensor)
            ]
        if not all(_close(in_batch, alone) for in_batch, alone in pairs):
            faults.report(
                call.program,
                "cells",
                f"what it does for one particle depends on other particles, episodes or contexts{call.when}; "
                "it must not read the engine's axes",
            )
            return


def _cell_of_result(tensor: Tensor, where: tuple[int, int, int]) -> Tensor:
    """One cell of a result, whose batch axes may be missing or of size 1."""
    if tensor.dim() < 3:
        return tensor
    c, e, n = (i if size > 1 else 0 for i, size in zip(where, tensor.shape, strict=False))
    return cell(tensor, c, e, n)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.numel() != other.numel():
        return True  # reported as a shape or type elsewhere
    x, y = one.double().flatten(), other.double().flatten()
    return bool(torch.isclose(x, y, rtol=1e-4, atol=1e-5, equal_nan=True).all())


def _versions(arguments: tuple[Any, ...]) -> list[tuple[str, int, int]]:
    """Something that changes when a tensor or a dict among the arguments does."""
    return [
        (name, id(leaf), leaf._version if isinstance(leaf, Tensor) else 0)
        for argument in arguments
        for name, leaf in leaves(argument)
    ]


def _attributes(model: CPOMDP) -> dict[str, Any]:
    """For every attribute, something that changes when it or its content does."""
    found = {name: value for name, value in vars(model).items() if not name.startswith("_pyro")}
    for name in ("_parameters", "_buffers", "_modules"):
        found |= found.pop(name)
    return {name: _content(value) for name, value in found.items()}


def _content(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), repr(value)  # as text: NaN equals NaN
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if isinstance(value, torch.nn.Module):
        return id(value), [_content(tensor) for tensor in (*value.parameters(), *value.buffers())]
    if isinstance(value, Mapping):
        return id(value), [(repr(key), _content(entry)) for key, entry in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return id(value), [_content(entry) for entry in value]
    return id(value)
