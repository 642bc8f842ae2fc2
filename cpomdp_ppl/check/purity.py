"""Whether a program is a function of its arguments and sites, which treats each cell of a batch alike."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from torch import Tensor

from cpomdp_ppl.check.call import cell
from cpomdp_ppl.check.faults import Faults, first_line
from cpomdp_ppl.check.results import check_site
from cpomdp_ppl.handlers import Batched, Recorded, base_of
from cpomdp_ppl.rng import drawn_from, generators
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from cpomdp_ppl.check.call import Call, Sites
    from cpomdp_ppl.model import CPOMDP


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
            instead = "it must be a function of its arguments" if call.program == "reward" else sites_instead
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
