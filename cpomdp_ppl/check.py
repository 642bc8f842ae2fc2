"""Finding what is wrong with a model before anything long runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_factor
from torch import Tensor

from cpomdp_ppl.handlers import Batched, Recorded, mask_of
from cpomdp_ppl.isolation import isolated
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.model import CPOMDP

NUM_PARTICLES = 3
"""Particles per context and episode in a trial run: enough to tell one from the others."""

MAX_STEPS = 200
"""How far a trial episode is followed."""


def definition_faults(model: CPOMDP) -> list[str]:
    """What is missing or makes no sense among a model's attributes and methods. Runs no program."""
    faults = []
    for program in ("initial", "transition", "observation", "reward"):
        if getattr(getattr(model, program), "__isabstractmethod__", False):
            faults.append(f"{program}: this method is missing")
    for name in ("contexts", "actions"):
        value = getattr(model, name, None)
        if value is None:
            faults.append(f"{name}: this attribute is missing; give names, or how many there are")
        elif isinstance(value, int):
            if isinstance(value, bool) or value < 1:
                faults.append(f"{name}: expected names or a positive number, got {value!r}")
        elif isinstance(value, str) or not all(isinstance(entry, str) for entry in value) or not len(value):
            faults.append(f"{name}: expected a sequence of names or a positive number, got {value!r}")
        elif len(set(value)) < len(value):
            faults.append(f"{name}: expected different names, got {tuple(value)!r}")
    horizon = getattr(model, "horizon", None)
    if not isinstance(horizon, int) or isinstance(horizon, bool) or horizon < 1:
        faults.append(f"horizon: expected a positive number of steps, got {horizon!r}")
    if model.states is not None and not (isinstance(model.states, int) and model.states >= 1):
        faults.append(f"states: expected None or a positive number of states, got {model.states!r}")
    if not isinstance(model.max_plate_nesting, int) or model.max_plate_nesting < 0:
        faults.append(f"max_plate_nesting: expected a number of axes, got {model.max_plate_nesting!r}")
    if not faults and model.context_prior is not None:
        faults += _prior_faults(model)
    return faults


def _prior_faults(model: CPOMDP) -> Iterator[str]:
    try:
        prior = model.prior()
    except (TypeError, ValueError, RuntimeError) as error:
        yield f"context_prior: expected probabilities, got {model.context_prior!r} ({error})"
        return
    if prior.shape != (model.num_contexts,):
        expected = f"shape [{model.num_contexts}], one for each context"
        yield f"context_prior: expected {expected}, got {list(prior.shape)}"
    elif not bool((prior >= 0).all()) or abs(float(prior.sum()) - 1) > 1e-5:
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

    def run(self, model: CPOMDP, values: dict[str, Tensor] | None = None) -> tuple[Any, dict[str, Any]]:
        """Result and sites; with `values`, sites take these instead of being drawn."""
        program = getattr(model, self.program)
        arguments = (self.context,) if self.program == "initial" else (self.state, self.action, self.context)
        with (
            poutine.condition(data=values or {}),
            Batched(self.shape, model.max_plate_nesting),
            Recorded() as seen,
        ):
            return program(*arguments), seen.sites

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
    faults: dict[tuple[str, str], str] = {}

    def report(program: str, kind: str, sentence: str) -> None:
        faults.setdefault((program, kind), f"{program}: {sentence}")

    with isolated(0, validate=True), torch.no_grad(), poutine.block():
        _check_programs(model, report)
    return list(faults.values())


Report = Callable[[str, str, str], None]


def _check_programs(model: CPOMDP, report: Report) -> None:
    C, A, E = model.num_contexts, model.num_actions, max(2, model.num_actions)
    S = (C, E, NUM_PARTICLES)
    own = (1,) * model.max_plate_nesting
    context = torch.arange(C, device=model.device).reshape(C, 1, 1, *own)
    mixed = (torch.arange(E, device=model.device) % A).reshape(1, E, 1, *own)
    single = {name: torch.full((1, 1, 1, *own), a) for a, name in enumerate(model.action_names)}

    initial = _try(model, Call("initial", None, None, context, S), "", report)
    if initial is None:
        return
    state, latents = initial
    template = _state_template(model, report)
    if template is None:
        return
    state = _checked_state(model, "initial", state, template, S, "", report)
    if state is None:
        return
    if model.initial_observation:
        _try(model, Call("observation", state, None, context, S), " before the first action", report)

    actions = {f" for action '{name}'": action for name, action in single.items()}
    actions[" for a batch of different actions"] = mixed
    observed: dict[str, tuple[str, ...]] = {}
    next_state = None
    for words, action in actions.items():
        _check_reward(model, Call("reward", state, action, context, S), words, report)
        moved = _try(model, Call("transition", state, action, context, S), words, report)
        if moved is None:
            continue
        next_state = _checked_state(model, "transition", moved[0], template, S, words, report)
        if next_state is None:
            continue
        seen = _try(model, Call("observation", next_state, action, context, S), words, report)
        if seen is not None:
            observed[words] = tuple(seen[1])
            _check_masks(model, Call("observation", next_state, action, context, S), seen[1], words, report)
            _check_names(model, set(latents), set(moved[1]), set(seen[1]), report)
    _check_sites_agree(observed, report)
    if next_state is not None:
        _walk(model, state, template, context, S, report)


def _try(model: CPOMDP, call: Call, words: str, report: Report) -> tuple[Any, dict[str, Any]] | None:
    """Run a call, and report what goes wrong in it; None if it did not run at all."""
    before = _attributes(model)
    try:
        result, sites = call.run(model)
    except Exception as error:  # whatever a user's program may raise
        _report_exception(model, call, error, words, report)
        return None
    if _attributes(model) != before:
        changed = sorted({name for name, *_ in _attributes(model) ^ before})
        report(call.program, "self", f"changes the model itself ({', '.join(changed)}) while it runs")
    sound = [_check_site(model, call.program, name, site, words, report) for name, site in sites.items()]
    if call.program != "observation" and result is None:
        report(call.program, "None", f"returns None{words}; is a return missing?")
        return None
    if all(sound):
        _check_cells(model, call, result, sites, words, report)
    return result, sites


def _report_exception(model: CPOMDP, call: Call, error: Exception, words: str, report: Report) -> None:
    """Say whether it is one context that fails, or only the batch."""
    failing = []
    for c, name in enumerate(model.context_names):
        try:
            call.at(c, 0, 0).run(model)
        except Exception as alone:
            failing.append(name)
            error = alone
    what = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"
    if not failing:
        report(
            call.program,
            "batch",
            f"works for a single episode but not in a batch{words}: its shapes do not broadcast, "
            f"or it branches on a tensor ({what})",
        )
    else:
        which = "" if len(failing) == model.num_contexts else f" in context '{failing[0]}'"
        report(call.program, "raises", f"raises{which}{words} {what}")


def _check_site(model: CPOMDP, program: str, name: str, site: Any, words: str, report: Report) -> bool:
    """Whether a site's value and density make sense."""
    if site_is_factor(site) or site["is_observed"]:
        report(program, f"obs {name}", f"site '{name}' is already observed; leave out `obs` and `factor`")
        return False
    value, fn = site["value"], site["fn"]
    where = _first_context(model, ~fn.support.check(value))
    if where is not None:
        report(program, f"support {name}", f"site '{name}' samples outside its own support{where}{words}")
        return False
    where = _first_context(model, fn.log_prob(value).isnan())
    if where is not None:
        report(program, f"density {name}", f"the density of site '{name}' is NaN{where}{words}")
    return where is None


def _check_cells(
    model: CPOMDP, call: Call, result: Any, sites: dict[str, Any], words: str, report: Report
) -> None:
    """Every cell must come out as if it had been alone."""
    C, E, N = call.shape
    values = {name: site["value"] for name, site in sites.items()}
    if any(value.shape[:3] != call.shape for value in values.values()):
        return
    for c, e, n in product(range(min(C, 4)), (0, E - 1), (0, N - 1)):
        alone = call.at(c, e, n)
        try:
            result_alone, sites_alone = alone.run(
                model, {name: cell(value, c, e, n) for name, value in values.items()}
            )
        except Exception as error:
            report(call.program, "alone", f"works in a batch but not for a single episode{words} ({error})")
            return
        pairs = [
            (cell(sites[name]["fn"].log_prob(values[name]), c, e, n), site["fn"].log_prob(site["value"]))
            for name, site in sites_alone.items()
            if name in sites
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
                report(
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


def _state_template(model: CPOMDP, report: Report) -> Any:
    """The first state with no batch: which axes are its own is then certain."""
    own = (1,) * model.max_plate_nesting
    with Batched((), model.max_plate_nesting):
        state = model.initial(torch.zeros(own, dtype=torch.long, device=model.device))
    for name, leaf in leaves(state):
        if not isinstance(leaf, Tensor):
            report(
                "initial",
                "type",
                f"'{name}' is a {type(leaf).__name__}; a state is a tensor or a dict of them",
            )
            return None
    return state


def _checked_state(
    model: CPOMDP, program: str, state: Any, template: Any, S: Sequence[int], words: str, report: Report
) -> Any:
    """The state broadcast to the batch, or None if it is not one."""
    names, expected = [name for name, _ in leaves(state)], [name for name, _ in leaves(template)]
    if sorted(names) != sorted(expected):
        report(program, "structure", f"returns a state of {names}{words}, but initial returns {expected}")
        return None
    found = dict(leaves(state))
    for name, leaf in leaves(template):
        tensor = found[name]
        if not isinstance(tensor, Tensor):
            report(program, "type", f"'{name}' is a {type(tensor).__name__}{words}, not a tensor")
            return None
        if tensor.dtype != leaf.dtype:
            report(program, "dtype", f"'{name}' is {tensor.dtype}{words}, but initial returns {leaf.dtype}")
            return None
        full = torch.Size(S) + leaf.shape
        try:
            tensor = tensor.expand(full)
        except RuntimeError:
            report(
                program,
                "shape",
                f"'{name}' has shape {list(tensor.shape)}{words}, which does not broadcast to {list(full)} "
                "(context, episode, particle, then the state's own axes)",
            )
            return None
        where = _first_context(model, ~torch.isfinite(tensor))
        if where is not None:
            report(program, "finite", f"'{name}' is not finite{where}{words}")
            return None
        if model.states is not None:
            if tensor.is_floating_point() or tensor.dtype == torch.bool or leaf.numel() != 1:
                found_type = f"{tensor.dtype} {list(leaf.shape)}"
                report(
                    program, "index", f"a finite model's state is an integer index, got {found_type}{words}"
                )
                return None
            where = _first_context(model, (tensor < 0) | (tensor >= model.states))
            if where is not None:
                extremes = f"{int(tensor.min())} to {int(tensor.max())}"
                limit = model.states - 1
                report(program, "range", f"state index {extremes}{where}{words} is not within 0 to {limit}")
                return None
    return map_state(lambda leaf, tensor: tensor.expand(torch.Size(S) + leaf.shape), template, state)


def _check_reward(model: CPOMDP, call: Call, words: str, report: Report) -> None:
    ran = _try(model, call, words, report)
    if ran is None:
        return
    reward, sites = ran
    if sites:
        report("reward", "sites", f"has sample sites {sorted(sites)}; it must be a function of its arguments")
    if not isinstance(reward, Tensor):
        report("reward", "type", f"returns a {type(reward).__name__}{words}, not a tensor")
        return
    full = (*call.shape, *[1] * model.max_plate_nesting)
    try:
        reward = reward.expand(full)
    except RuntimeError:
        report(
            "reward",
            "shape",
            f"has shape {list(reward.shape)}{words}, which does not broadcast to {list(full)}",
        )
        return
    where = _first_context(model, ~torch.isfinite(reward))
    if where is not None:
        report("reward", "finite", f"is not finite{where}{words}")


def _check_masks(model: CPOMDP, call: Call, sites: dict[str, Any], words: str, report: Report) -> None:
    """With the same things seen, the same must count as seen, whatever is hidden."""
    values = {
        name: site["value"][:1, :, :1].expand(site["value"].shape)
        for name, site in sites.items()
        if site["value"].shape[:3] == call.shape
    }
    _, again = call.run(model, values)
    for name, site in again.items():
        mask = mask_of(site)
        if isinstance(mask, Tensor):
            full = (*call.shape, *[1] * model.max_plate_nesting)
            mask = mask.expand(torch.broadcast_shapes(mask.shape, full))
            if not bool((mask == mask[:1, :, :1]).all()):
                report(
                    "observation",
                    f"mask {name}",
                    f"the mask of site '{name}' depends on the hidden state or context{words}; "
                    "sample whether it is seen as a site of its own, and mask by that",
                )


def _check_names(
    model: CPOMDP, initial: set[str], transition: set[str], observation: set[str], report: Report
) -> None:
    latent = transition | (initial if model.initial_observation else set())
    if latent & observation:
        report(
            "observation",
            "names",
            f"shares site names {sorted(latent & observation)} with the state's programs",
        )
    for program, names in (("initial", initial), ("transition", transition), ("observation", observation)):
        if "a" in names:
            report(program, "reserved", "a site may not be called 'a'; that name is the action's")


def _check_sites_agree(observed: dict[str, tuple[str, ...]], report: Report) -> None:
    if observed and not any(observed.values()):
        report("observation", "none", "has no sample sites; there is nothing to observe")
    first, *others = observed or [""]
    for words in others:
        if set(observed[words]) != set(observed[first]):
            report(
                "observation",
                "sites",
                f"its sites differ between actions: {list(observed[first])}{first}, "
                f"but {list(observed[words])}{words}; sample every site always, and mask what is not seen",
            )
            return


def _walk(
    model: CPOMDP, state: Any, template: Any, context: Tensor, S: Sequence[int], report: Report
) -> None:
    """Follow episodes of random actions, to find states that go wrong only later."""
    own = (1,) * model.max_plate_nesting
    for t in range(min(model.horizon, MAX_STEPS)):
        action = torch.randint(model.num_actions, (1, S[1], 1, *own), device=model.device)
        words = f" at time {t + 1} of an episode of random actions"
        try:
            with Batched(S, model.max_plate_nesting):
                moved = model.transition(state, action, context)
                state = _checked_state(model, "transition", moved, template, S, words, report)
                if state is None:
                    return
                model.observation(state, action, context)
                reward = model.reward(state, action, context)
        except Exception as error:
            if not isinstance(error, RuntimeError) or "ambiguous" not in str(error):  # reported already
                report("transition", "walk", f"an episode fails{words}: {type(error).__name__}: {error}")
            return
        where = _first_context(model, ~torch.isfinite(torch.as_tensor(reward)))
        if where is not None:
            report("reward", "finite", f"is not finite{where}{words}")
            return


def _first_context(model: CPOMDP, bad: Tensor) -> str | None:
    """The first context in which something is wrong, in words; None if nothing is."""
    if not bool(bad.any()):
        return None
    if bad.dim() >= 3 and bad.shape[0] == model.num_contexts:
        c = int(bad.reshape(model.num_contexts, -1).any(1).nonzero()[0])
        return f" in context '{model.context_names[c]}'"
    return ""


def _attributes(model: CPOMDP) -> set[tuple[str, int, int]]:
    """Every attribute with its identity, and a number that changes when its content does."""

    def version(value: Any) -> int:
        if isinstance(value, Tensor):
            return value._version
        return len(value) if isinstance(value, list | dict | set) else 0

    own = dict(vars(model)) | {**model._buffers, **model._parameters}
    return {(name, id(value), version(value)) for name, value in own.items()}
