"""Finding what is wrong with a model before anything long runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from pyro.poutine.util import site_is_factor
from torch import Tensor

from cpomdp_ppl.arrays import are_probabilities
from cpomdp_ppl.dataflow import dependencies
from cpomdp_ppl.errors import UnsupportedModelError, as_integer
from cpomdp_ppl.handlers import Batched, Recorded, base_of, mask_of
from cpomdp_ppl.rng import drawn_from, generators, isolated
from cpomdp_ppl.signature import read_signature
from cpomdp_ppl.state import leaves, map_state, structure

if TYPE_CHECKING:
    from cpomdp_ppl.model import CPOMDP

PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
"""Sizes of trial batches: such that no axis of a program's own is likely to be as long."""

MAX_STEPS = 200
"""How far a trial episode is followed."""


@dataclass
class Faults:
    """The faults found so far, at most one of a kind for each program."""

    found: dict[tuple[str, str], str] = field(default_factory=dict)

    def report(self, program: str, kind: str, sentence: str) -> None:
        """Add a fault, unless one of this kind is known already."""
        self.found.setdefault((program, kind), f"{program}: {sentence}")

    def has(self, program: str) -> bool:
        """Whether anything is wrong with a program."""
        return any(name == program for name, _ in self.found)


def definition_faults(model: CPOMDP) -> list[str]:
    """What is missing or makes no sense among a model's attributes and methods. Runs no program."""
    faults = []
    for program in ("initial", "transition", "observation", "reward"):
        if getattr(getattr(model, program), "__isabstractmethod__", False):
            faults.append(f"{program}: this method is missing")
    for name in ("contexts", "actions"):
        value = getattr(model, name, None)
        number = as_integer(value)
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
    if model.states is not None and (as_integer(model.states) or 0) < 1:
        faults.append(f"states: expected None or a positive number of states, got {model.states!r}")
    nesting = as_integer(model.max_plate_nesting)
    if nesting is None or nesting < 0:
        faults.append(f"max_plate_nesting: expected a number of axes, got {model.max_plate_nesting!r}")
    for name in model._pyro_samples:  # it would be drawn anew for every program, and not by episode
        faults.append(f"{name}: a PyroSample is not a constant; sample it in a program, as part of the state")
    return faults or list(_prior_faults(model))


def _are_names(value: Any) -> bool:
    proper = isinstance(value, Sequence) and not isinstance(value, str)
    return proper and len(value) > 0 and all(isinstance(entry, str) for entry in value)


def _prior_faults(model: CPOMDP) -> Iterator[str]:
    try:
        prior = model.prior()
    except (TypeError, ValueError, RuntimeError) as error:
        given = getattr(model, "context_prior", None)
        yield f"context_prior: expected probabilities, got {given!r} ({_first_line(error)})"
        return
    if prior.shape != (model.num_contexts,):
        expected = f"shape [{model.num_contexts}], one for each context"
        yield f"context_prior: expected {expected}, got {list(prior.shape)}"
    elif not are_probabilities(prior):
        yield f"context_prior: expected non-negative probabilities that sum to 1, got {prior.tolist()}"


@dataclass(frozen=True)
class Call:
    """One call of one program on a batch `[context, episode, particle]`.

    Attributes:
        program: Name of the method.
        state: Its first argument, or None for `initial`.
        action: `[1, episode or 1, 1]`, or None.
        context: `[C, 1, 1]`.
        shape: The batch, S.
    """

    program: str
    state: Any
    action: Tensor | None
    context: Tensor
    shape: tuple[int, int, int]

    def arguments(self) -> tuple[Any, ...]:
        """Copies of the arguments, which a program may spoil."""
        context = self.context.clone()
        if self.program == "initial":
            return (context,)
        return (
            map_state(torch.clone, self.state),
            None if self.action is None else self.action.clone(),
            context,
        )

    def run(
        self,
        model: CPOMDP,
        values: dict[str, Tensor] | None = None,
        arguments: tuple[Any, ...] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Result and sites; with `values`, sites take these instead of being drawn."""
        with (
            poutine.condition(data=values or {}),
            Batched(self.shape, model.max_plate_nesting),
            Recorded() as seen,
        ):
            return getattr(model, self.program)(*(arguments or self.arguments())), seen.sites

    def at(self, c: int, e: int, n: int) -> Call:
        """The same call for one cell of the batch."""
        action = self.action
        if action is not None and action.shape[1] > 1:
            action = action[:, e : e + 1]
        return Call(
            self.program,
            None if self.state is None else map_state(lambda leaf: cell(leaf, c, e, n), self.state),
            action,
            self.context[c : c + 1],
            (1, 1, 1),
        )


def cell(tensor: Tensor, c: int, e: int, n: int) -> Tensor:
    """One cell of `[C, E, N, …]`, with its axes kept."""
    return tensor[c : c + 1, e : e + 1, n : n + 1]


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
    C, A = model.num_contexts, model.num_actions
    template = _state_alone(model)
    E, N = _trial_sizes(model, template)
    S = (C, E, N)
    plate_axes = (1,) * model.max_plate_nesting
    context = torch.arange(C, device=model.device).reshape(C, 1, 1, *plate_axes)
    mixed = (torch.arange(E, device=model.device) % A).reshape(1, E, 1, *plate_axes)

    initial = _try(model, Call("initial", None, None, context, S), "", faults)
    if initial is None or not _is_state(template, faults):
        return
    state = _checked_state(model, "initial", initial[0], template, S, "", faults)
    if state is None:
        return

    actions = {
        f" for action '{name}'": torch.full((1, 1, 1, *plate_axes), a, device=model.device)
        for a, name in enumerate(model.action_names)
    }
    actions[" for a batch of different actions"] = mixed
    observed: dict[str, tuple[str, ...]] = {}
    for words, action in actions.items():
        _check_reward(model, Call("reward", state, action, context, S), words, faults)
        moved = _try(model, Call("transition", state, action, context, S), words, faults)
        result, latents = moved or (None, {})
        after = None
        if moved is not None:
            after = _checked_state(model, "transition", result, template, S, words, faults)
        # If there is nowhere to go, look around at the start.
        call = Call("observation", state if after is None else after, action, context, S)
        seen = _try(model, call, words, faults)
        if seen is not None:
            observed[words] = tuple(seen[1])
            _check_masks(model, call, seen[1], words, faults)
            _check_names(model, set(initial[1]), set(latents), set(seen[1]), faults)
    if model.initial_observation:
        words, call = " before the first action", Call("observation", state, None, context, S)
        seen = _try(model, call, words, faults)
        if seen is not None:
            observed[words] = tuple(seen[1])
            _check_masks(model, call, seen[1], words, faults)
    _check_sites_agree(observed, faults)
    _walk(model, state, template, context, S, faults)


def _state_alone(model: CPOMDP) -> Any:
    """The first state with no batch: which axes are its own is then certain. Or what was raised."""
    zero = torch.zeros((1,) * model.max_plate_nesting, dtype=torch.long, device=model.device)
    try:
        with Batched((), model.max_plate_nesting):
            return model.initial(zero)
    except Exception as error:  # whatever a user's program may raise
        return error


def _is_state(template: Any, faults: Faults) -> bool:
    if isinstance(template, Exception):
        faults.report(
            "initial", "alone", f"works in a batch but not for a single episode ({_first_line(template)})"
        )
        return False
    for name, leaf in leaves(template):
        if not isinstance(leaf, Tensor):
            kind = type(leaf).__name__
            faults.report("initial", "type", f"'{name}' is a {kind}; a state is a tensor or a dict of them")
            return False
    return True


def _trial_sizes(model: CPOMDP, template: Any) -> tuple[int, int]:
    """How many episodes and particles: as no other axis is long, and enough for every action."""
    lengths = {model.num_contexts, model.num_actions}
    lengths |= {size for _, leaf in leaves(template) for size in getattr(leaf, "shape", ())}
    try:
        sites = read_signature(model).observations.values()
        lengths |= {size for site in sites for size in site.shape}
    except Exception:  # reported when the programs are checked
        pass
    sizes = (prime for prime in PRIMES if prime not in lengths)
    N = next(sizes, 47)
    E = next((prime for prime in sizes if prime > model.num_actions), model.num_actions + 1)
    return E, N


def _try(model: CPOMDP, call: Call, words: str, faults: Faults) -> tuple[Any, dict[str, Any]] | None:
    """Run a call, and report what goes wrong in it; None if it did not run at all."""
    before, arguments = _attributes(model), call.arguments()
    versions = _versions(arguments)
    try:
        result, sites = call.run(model, arguments=arguments)
    except Exception as error:  # whatever a user's program may raise
        _report_exception(model, call, error, words, faults)
        return None
    if _versions(arguments) != versions:
        faults.report(call.program, "in place", "changes its arguments in place; it must return new tensors")
    after = _attributes(model)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        faults.report(call.program, "self", f"changes the model itself ({', '.join(changed)}) while it runs")
    sound = [_check_site(model, call, name, site, words, faults) for name, site in sites.items()]
    if call.program != "observation" and result is None:
        faults.report(call.program, "None", f"returns None{words}; is a return missing?")
        return None
    if all(sound):
        hidden = " and ".join(_hidden_draws(model, call, sites))
        if hidden:
            sites_instead = "make each of them a sample site: others can be neither scored nor replayed"
            instead = "it must be a function of its arguments" if call.program == "reward" else sites_instead
            what = f"draws random numbers outside of `pyro.sample`, from {hidden}{words}; {instead}"
            faults.report(call.program, "random", what)
        else:
            _check_cells(model, call, result, sites, words, faults)
    return result, sites


def _hidden_draws(model: CPOMDP, call: Call, sites: dict[str, Any]) -> list[str]:
    """Generators that a program draws from although all its sites are given."""
    values = {name: site["value"] for name, site in sites.items()}
    before = generators()
    batched, given = Batched(call.shape, model.max_plate_nesting), poutine.condition(data=values)
    with suppress(Exception), batched, Recorded(), given:  # what it raises is reported elsewhere
        getattr(model, call.program)(*call.arguments())
    return drawn_from(before, generators())


def _versions(arguments: tuple[Any, ...]) -> list[tuple[str, int, int]]:
    """Something that changes when a tensor or a dict among the arguments does."""
    return [
        (name, id(leaf), leaf._version if isinstance(leaf, Tensor) else 0)
        for argument in arguments
        for name, leaf in leaves(argument)
    ]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _report_exception(model: CPOMDP, call: Call, error: Exception, words: str, faults: Faults) -> None:
    """Say whether it is one context that fails, or only the batch."""
    failing = []
    for c, name in enumerate(model.context_names):
        try:
            call.at(c, 0, 0).run(model)
        except Exception as alone:
            failing.append(name)
            error = alone
    if not failing:
        faults.report(
            call.program,
            "batch",
            f"works for a single episode but not in a batch{words}: its shapes do not broadcast "
            f"(is a `.to_event` missing?), or it branches on a tensor ({_first_line(error)})",
        )
    else:
        which = "" if len(failing) == model.num_contexts else f" in context '{failing[0]}'"
        faults.report(call.program, "raises", f"raises{which}{words} {_first_line(error)}")


def _check_site(model: CPOMDP, call: Call, name: str, site: Any, words: str, faults: Faults) -> bool:
    """Whether a site's value, shape and density make sense."""
    program, value, fn = call.program, site["value"], site["fn"]
    if site_is_factor(site) or site["is_observed"]:
        faults.report(
            program, f"obs {name}", f"site '{name}' is already observed; leave out `obs` and `factor`"
        )
        return False
    plates = {frame.dim: frame.size for frame in site["cond_indep_stack"]}
    expected = [*call.shape, *(plates.get(dim, 1) for dim in range(-model.max_plate_nesting, 0))]
    found = list(value.shape[: value.dim() - fn.event_dim])
    if found != expected:
        faults.report(
            program,
            f"shape {name}",
            f"site '{name}' has batch shape {found}{words}, but expected {expected} (context, episode, "
            "particle, then its own plates); is a `.to_event` or a plate missing?",
        )
        return False
    try:
        where = _first_context(model, ~fn.support.check(value))
        if where is not None:
            what = f"site '{name}' samples outside its own support{where}{words}"
            faults.report(program, f"support {name}", what)
            return False
        where = _first_context(model, fn.log_prob(value).isnan())
    except Exception as error:
        faults.report(program, f"density {name}", f"the density of site '{name}' raises {_first_line(error)}")
        return False
    if where is not None:
        faults.report(program, f"density {name}", f"the density of site '{name}' is NaN{where}{words}")
    return where is None


def _check_cells(
    model: CPOMDP, call: Call, result: Any, sites: dict[str, Any], words: str, faults: Faults
) -> None:
    """Every cell must come out as if it had been alone."""
    C, E, N = call.shape
    values = {name: site["value"] for name, site in sites.items()}
    for c, e, n in product(range(min(C, 4)), (0, E - 1), (0, N - 1)):
        try:
            result_alone, sites_alone = call.at(c, e, n).run(
                model, {name: cell(value, c, e, n) for name, value in values.items()}
            )
        except Exception as error:
            what = f"works in a batch but not for a single episode{words} ({_first_line(error)})"
            faults.report(call.program, "alone", what)
            return
        pairs = [
            (cell(sites[name]["fn"].log_prob(values[name]), c, e, n), site["fn"].log_prob(site["value"]))
            for name, site in sites_alone.items()
            if name in sites and not isinstance(base_of(site["fn"]), Delta)  # 0 or −∞, as rounding has it
        ]
        if result is not None:
            both = zip(leaves(result), leaves(result_alone), strict=False)
            pairs += [
                (_cell_of_result(x, (c, e, n)), y)
                for (_, x), (_, y) in both
                if isinstance(x, Tensor) and isinstance(y, Tensor)
            ]
        for together, by_itself in pairs:
            if together.dtype != by_itself.dtype or together.numel() != by_itself.numel():
                continue  # reported as a shape or type elsewhere
            close = torch.isclose(
                together.double().flatten(),
                by_itself.double().flatten(),
                rtol=1e-4,
                atol=1e-5,
                equal_nan=True,
            )
            if not bool(close.all()):
                faults.report(
                    call.program,
                    "cells",
                    f"what it does for one particle depends on other particles, episodes or contexts{words}; "
                    "it must not read the engine's axes",
                )
                return


def _cell_of_result(tensor: Tensor, where: tuple[int, int, int]) -> Tensor:
    """One cell of a result, whose batch axes may be missing or of size 1."""
    if tensor.dim() < 3:
        return tensor
    c, e, n = (i if size > 1 else 0 for i, size in zip(where, tensor.shape, strict=False))
    return cell(tensor, c, e, n)


def _checked_state(
    model: CPOMDP, program: str, state: Any, template: Any, S: Sequence[int], words: str, faults: Faults
) -> Any:
    """The state broadcast to the batch, or None if it is not one."""
    names, expected = [name for name, _ in leaves(state)], [name for name, _ in leaves(template)]
    if structure(state) != structure(template):
        faults.report(
            program, "structure", f"returns a state of {names}{words}, but initial returns {expected}"
        )
        return None
    found = dict(leaves(state))
    for name, leaf in leaves(template):
        tensor = found[name]
        if not isinstance(tensor, Tensor):
            faults.report(program, "type", f"'{name}' is a {type(tensor).__name__}{words}, not a tensor")
            return None
        if tensor.dtype != leaf.dtype:
            faults.report(
                program, "dtype", f"'{name}' is {tensor.dtype}{words}, but initial returns {leaf.dtype}"
            )
            return None
        full = torch.Size(S) + leaf.shape
        try:
            tensor = tensor.expand(full)
        except RuntimeError:
            faults.report(
                program,
                "shape",
                f"'{name}' has shape {list(tensor.shape)}{words}, which does not broadcast to {list(full)} "
                "(context, episode, particle, then the state's own axes)",
            )
            return None
        where = _first_context(model, ~torch.isfinite(tensor))
        if where is not None:
            faults.report(program, "finite", f"'{name}' is not finite{where}{words}")
            return None
        if model.states is not None:
            if tensor.is_floating_point() or leaf.numel() != 1:
                found_type = f"{tensor.dtype} {list(leaf.shape)}"
                faults.report(
                    program,
                    "index",
                    f"a finite model's state is an integer index or a boolean, got {found_type}{words}",
                )
                return None
            where = _first_context(model, (tensor < 0) | (tensor >= model.states))
            if where is not None:
                extremes = f"{int(tensor.min())} to {int(tensor.max())}"
                limit = model.states - 1
                faults.report(
                    program, "range", f"state index {extremes}{where}{words} is not within 0 to {limit}"
                )
                return None
    return map_state(lambda leaf, tensor: tensor.expand(torch.Size(S) + leaf.shape), template, state)


def _check_reward(model: CPOMDP, call: Call, words: str, faults: Faults) -> None:
    ran = _try(model, call, words, faults)
    if ran is None:
        return
    reward, sites = ran
    if sites:
        faults.report(
            "reward", "sites", f"has sample sites {sorted(sites)}; it must be a function of its arguments"
        )
    if not isinstance(reward, Tensor):
        faults.report("reward", "type", f"returns a {type(reward).__name__}{words}, not a tensor")
        return
    full = (*call.shape, *[1] * model.max_plate_nesting)
    try:
        reward = reward.expand(full)
    except RuntimeError:
        faults.report(
            "reward",
            "shape",
            f"has shape {list(reward.shape)}{words}, which does not broadcast to {list(full)}",
        )
        return
    where = _first_context(model, ~torch.isfinite(reward))
    if where is not None:
        faults.report("reward", "finite", f"is not finite{where}{words}")


def _check_masks(model: CPOMDP, call: Call, sites: dict[str, Any], words: str, faults: Faults) -> None:
    """With the same things seen, the same must count as seen, whatever is hidden."""
    values = {
        name: site["value"][:1, :, :1].expand(site["value"].shape)
        for name, site in sites.items()
        if site["value"].shape[:3] == call.shape
    }
    try:
        _, again = call.run(model, values)
    except Exception as error:
        faults.report("observation", "raises", f"raises{words} {_first_line(error)}")
        return
    for name, site in again.items():
        mask = mask_of(site)
        if isinstance(mask, Tensor):
            full = (*call.shape, *[1] * model.max_plate_nesting)
            mask = mask.expand(torch.broadcast_shapes(mask.shape, full))
            if not bool((mask == mask[:1, :, :1]).all()):
                faults.report(
                    "observation",
                    f"mask {name}",
                    f"the mask of site '{name}' depends on the hidden state or context{words}; "
                    "sample whether it is seen as a site of its own, and mask by that",
                )


def _check_names(
    model: CPOMDP, initial: set[str], transition: set[str], observation: set[str], faults: Faults
) -> None:
    latent = transition | (initial if model.initial_observation else set())
    if latent & observation:
        faults.report(
            "observation",
            "names",
            f"shares site names {sorted(latent & observation)} with the state's programs",
        )
    for program, names in (("initial", initial), ("transition", transition), ("observation", observation)):
        if "a" in names:
            faults.report(program, "reserved", "a site may not be called 'a'; that name is the action's")


def _check_sites_agree(observed: dict[str, tuple[str, ...]], faults: Faults) -> None:
    if observed and not any(observed.values()):
        faults.report("observation", "none", "has no sample sites; there is nothing to observe")
    first, *others = observed or [""]
    for words in others:
        if set(observed[words]) != set(observed[first]):
            faults.report(
                "observation",
                "sites",
                f"its sites differ between actions: {list(observed[first])}{first}, "
                f"but {list(observed[words])}{words}; sample every site always, and mask what is not seen",
            )
            return


def _walk(
    model: CPOMDP, state: Any, template: Any, context: Tensor, S: tuple[int, int, int], faults: Faults
) -> None:
    """Follow episodes of random actions, to find what goes wrong only later.

    A program with a known fault is not looked at again.
    """
    plate_axes = (1,) * model.max_plate_nesting
    moves = Faults() if faults.has("transition") else faults
    for t in range(min(model.horizon, MAX_STEPS)):
        action = torch.randint(model.num_actions, (1, S[1], 1, *plate_axes), device=model.device)
        later = f" at time {t + 1} of an episode of random actions"
        if not faults.has("reward"):
            words = f" at time {t} of an episode of random actions"
            _check_reward_later(model, Call("reward", state, action, context, S), words, faults)
        moved = _later(model, Call("transition", state, action, context, S), later, moves)
        if moved is None:
            return
        state = _checked_state(model, "transition", moved[0], template, S, later, moves)
        if state is None:
            return
        if not faults.has("observation"):
            call = Call("observation", state, action, context, S)
            seen = _later(model, call, later, faults)
            if seen is not None:
                _check_masks(model, call, seen[1], later, faults)


def _later(model: CPOMDP, call: Call, words: str, faults: Faults) -> tuple[Any, dict[str, Any]] | None:
    """Run a call and look at its sites; None if it raises."""
    try:
        result, sites = call.run(model)
    except Exception as error:
        faults.report(call.program, "later", f"raises{words} {_first_line(error)}")
        return None
    for name, site in sites.items():
        _check_site(model, call, name, site, words, faults)
    return result, sites


def _check_reward_later(model: CPOMDP, call: Call, words: str, faults: Faults) -> None:
    ran = _later(model, call, words, faults)
    if ran is not None:
        where = _first_context(model, ~torch.isfinite(torch.as_tensor(ran[0])))
        if where is not None:
            faults.report("reward", "finite", f"is not finite{where}{words}")


def _first_context(model: CPOMDP, bad: Tensor) -> str | None:
    """The first context in which something is wrong, in words; None if nothing is."""
    if not bool(bad.any()):
        return None
    if bad.dim() >= 3 and bad.shape[0] == model.num_contexts:
        c = int(bad.reshape(model.num_contexts, -1).any(1).nonzero()[0])
        return f" in context '{model.context_names[c]}'"
    return ""


def _attributes(model: CPOMDP) -> dict[str, Any]:
    """For every attribute, something that changes when it or its content does."""
    own = {name: value for name, value in vars(model).items() if not name.startswith("_pyro")}
    for name in ("_parameters", "_buffers", "_modules"):
        own |= own.pop(name)
    return {name: _content(value) for name, value in own.items()}


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
