"""Whether the sites, states, rewards and masks that a program produced make sense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pyro.poutine.util import site_is_factor
from torch import Tensor

from cpomdp_ppl.check.call import Faults, first_line
from cpomdp_ppl.handlers import mask_of
from cpomdp_ppl.signature import ENDED
from cpomdp_ppl.state import leaves, map_state, structure

if TYPE_CHECKING:
    from cpomdp_ppl.check.call import Call, Sites
    from cpomdp_ppl.model import CPOMDP


def check_site(call: Call, name: str, site: Any, faults: Faults) -> bool:
    """Whether a site's value, shape and density make sense."""
    model, program, value, fn = call.model, call.program, site["value"], site["fn"]
    if site_is_factor(site) or site["is_observed"]:
        what = f"site '{name}' is already observed; leave out `obs` and `factor`"
        faults.report(program, f"obs {name}", what)
        return False
    plates = {frame.dim: frame.size for frame in site["cond_indep_stack"]}
    expected = [*call.shape, *(plates.get(dim, 1) for dim in range(-model.max_plate_nesting, 0))]
    found = list(value.shape[: value.dim() - fn.event_dim])
    if found != expected:
        faults.report(
            program,
            f"shape {name}",
            f"site '{name}' has batch shape {found}{call.when}, but expected {expected} (context, episode, "
            "particle, then its own plates); is a `.to_event` or a plate missing?",
        )
        return False
    try:
        where = first_context(model, ~fn.support.check(value))
        if where is not None:
            what = f"site '{name}' samples outside its own support{where}{call.when}"
            faults.report(program, f"support {name}", what)
            return False
        where = first_context(model, fn.log_prob(value).isnan())
    except Exception as error:
        faults.report(program, f"density {name}", f"the density of site '{name}' raises {first_line(error)}")
        return False
    if where is not None:
        faults.report(program, f"density {name}", f"the density of site '{name}' is NaN{where}{call.when}")
    return where is None


def checked_state(call: Call, state: Any, template: Any, faults: Faults) -> Any:
    """The state that a call returned, broadcast to the batch, or None if it is not one.

    `template` is a state of a single episode, as `initial` returns it.
    """
    if structure(state) != structure(template):
        names, expected = [name for name, _ in leaves(state)], [name for name, _ in leaves(template)]
        what = f"returns a state of {names}{call.when}, but initial returns {expected}"
        faults.report(call.program, "structure", what)
        return None
    found = dict(leaves(state))
    for name, leaf in leaves(template):
        fault = _leaf_fault(call, name, found[name], leaf)
        if fault is not None:
            faults.report(call.program, *fault)
            return None
    return map_state(lambda leaf, tensor: tensor.expand(call.shape + leaf.shape), template, state)


def _leaf_fault(call: Call, name: str, tensor: Any, leaf: Tensor) -> tuple[str, str] | None:
    """What is wrong with one tensor of a state, as the fault's kind and a sentence; None if nothing is."""
    model, when = call.model, call.when
    if not isinstance(tensor, Tensor):
        return "type", f"'{name}' is a {type(tensor).__name__}{when}, not a tensor"
    if tensor.dtype != leaf.dtype:
        return "dtype", f"'{name}' is {tensor.dtype}{when}, but initial returns {leaf.dtype}"
    full = call.shape + leaf.shape
    try:
        tensor = tensor.expand(full)
    except RuntimeError:
        return "shape", (
            f"'{name}' has shape {list(tensor.shape)}{when}, which does not broadcast to {list(full)} "
            "(context, episode, particle, then the state's own axes)"
        )
    where = first_context(model, ~torch.isfinite(tensor))
    if where is not None:
        return "finite", f"'{name}' is not finite{where}{when}"
    if model.states is None:
        return None
    if tensor.is_floating_point() or leaf.numel() != 1:
        found = f"{tensor.dtype} {list(leaf.shape)}"
        return "index", f"a finite model's state is an integer index or a boolean, got {found}{when}"
    where = first_context(model, (tensor < 0) | (tensor >= model.states))
    if where is None:
        return None
    extremes = f"{int(tensor.min())} to {int(tensor.max())}"
    return "range", f"state index {extremes}{where}{when} is not within 0 to {model.states - 1}"


def check_function(call: Call, result: Any, sites: Sites, faults: Faults) -> None:
    """A reward, or a chance to end, is a tensor that broadcasts to the batch, and comes without sites."""
    if sites:
        what = f"has sample sites {sorted(sites)}; it must be a function of its arguments"
        faults.report(call.program, "sites", what)
    if not isinstance(result, Tensor):
        faults.report(call.program, "type", f"returns a {type(result).__name__}{call.when}, not a tensor")
        return
    full = call.full_shape()
    try:
        result = result.expand(full)
    except RuntimeError:
        what = f"has shape {list(result.shape)}{call.when}, which does not broadcast to {list(full)}"
        faults.report(call.program, "shape", what)
        return
    check_numbers(call, result, faults)


def check_numbers(call: Call, result: Any, faults: Faults) -> None:
    """A reward is finite, and a chance to end is a probability."""
    numbers = torch.as_tensor(result)
    where = first_context(call.model, ~torch.isfinite(numbers))
    if where is not None:
        faults.report(call.program, "finite", f"is not finite{where}{call.when}")
    elif call.program == "ends":
        bad = (numbers < 0) | (numbers > 1)
        where = first_context(call.model, bad)
        if where is not None:
            found = f"{numbers[bad][0].item():.6g}"
            what = f"is {found}{where}{call.when}; return truth values, or probabilities from 0 to 1"
            faults.report("ends", "range", what)


def check_masks(call: Call, sites: Sites, faults: Faults) -> None:
    """With the same things seen, the same must count as seen, whatever is hidden."""
    values = {
        name: site["value"][:1, :, :1].expand(site["value"].shape)
        for name, site in sites.items()
        if site["value"].shape[:3] == call.shape
    }
    try:
        _, again = call.run(values)
    except Exception as error:
        faults.report("observation", "raises", f"raises{call.when} {first_line(error)}")
        return
    for name, site in again.items():
        mask = mask_of(site)
        if isinstance(mask, Tensor):
            mask = mask.expand(torch.broadcast_shapes(mask.shape, call.full_shape()))
            if not bool((mask == mask[:1, :, :1]).all()):
                faults.report(
                    "observation",
                    f"mask {name}",
                    f"the mask of site '{name}' depends on the hidden state or context{call.when}; "
                    "sample whether it is seen as a site of its own, and mask by that",
                )


def check_names(
    model: CPOMDP, initial: set[str], transition: set[str], observation: set[str], faults: Faults
) -> None:
    """No two programs of one time step share the name of a site, and none takes those of the engine."""
    latent = transition | (initial if model.initial_observation else set())
    if latent & observation:
        what = f"shares site names {sorted(latent & observation)} with the state's programs"
        faults.report("observation", "names", what)
    for program, names in (("initial", initial), ("transition", transition), ("observation", observation)):
        for name, whose in (("a", "the action's"), (ENDED, "that of the end, which `ends` tells of")):
            if name in names:
                what = f"a site may not be called '{name}'; that name is {whose}"
                faults.report(program, f"reserved {name}", what)


def check_sites_agree(model: CPOMDP, observed: dict[str, tuple[str, ...]], faults: Faults) -> None:
    """An observation program has the same sites on every occasion, given by the words for it."""
    if observed and not any(observed.values()) and not model.can_end:
        faults.report("observation", "none", "has no sample sites; there is nothing to observe")
    first, *others = observed or [""]
    for when in others:
        if set(observed[when]) != set(observed[first]):
            faults.report(
                "observation",
                "sites",
                f"its sites differ between actions: {list(observed[first])}{first}, "
                f"but {list(observed[when])}{when}; sample every site always, and mask what is not seen",
            )
            return


def first_context(model: CPOMDP, bad: Tensor) -> str | None:
    """The first context in which something is wrong, in words; None if nothing is."""
    if not bool(bad.any()):
        return None
    if bad.dim() >= 3 and bad.shape[0] == model.num_contexts:
        c = int(bad.reshape(model.num_contexts, -1).any(1).nonzero()[0])
        return f" in context '{model.context_names[c]}'"
    return ""
