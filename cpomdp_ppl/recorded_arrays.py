"""Arrays that somebody recorded, checked against the model that they are said to come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.actions import as_actions, require_actions, some_action
from cpomdp_ppl.arrays import (
    as_indices,
    as_tensor,
    as_type,
    filled,
    on_the_right,
    place_of,
    require_finite,
    without_unit_axes,
)
from cpomdp_ppl.errors import invalid, require, require_model
from cpomdp_ppl.handlers import Batched, Recorded, mask_of
from cpomdp_ppl.rng import isolated
from cpomdp_ppl.signature import ENDED, Leaf, ObservationSite, signature
from cpomdp_ppl.state import leaves, map_state, structure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.state import State

Sites = dict[str, Tensor]


class RecordedArrays:
    """What `Episodes.from_arrays` is given, argument by argument, as tensors of the right shapes and types.

    Attributes:
        actions: int64 `[B, T]`, or real numbers `[B, T, D]`.
        lengths: int64 `[B]`.
        taken: Which steps belong to their episode, bool `[B, T]`.
    """

    def __init__(self, model: CPOMDP, actions: Any, lengths: Any, observations: Any, observed: Any) -> None:
        require_model(model)
        self.model, self.signature = model, signature(model)
        self.actions = as_actions("actions", actions, model)
        shape, axes = tuple(self.actions.shape), 2 if model.box is None else 3
        require(len(shape) == axes, "actions", shape, f"an array of {axes} axes")
        B, T = shape[:2]
        require(model.horizon >= T, "actions", shape, f"at most {model.horizon} steps (the horizon)")
        ended = self._ended(observations, observed, torch.ones(B, T, dtype=torch.bool, device=model.device))
        n = until(ended) if lengths is None else as_tensor("lengths", lengths)
        require(n.shape == (B,), "lengths", tuple(n.shape), f"shape [{B}]")
        n = as_type("lengths", n, torch.long, torch.ones(B, dtype=torch.bool, device=n.device))
        require(bool(((n >= 1) & (n <= T)).all()), "lengths", n.tolist(), f"1 to {T} steps in every episode")
        self.lengths = n.to(model.device)
        self.taken = torch.arange(T, device=model.device) < self.lengths[:, None]  # [B, T]
        require_nothing_after(ended, self.lengths)
        require_actions("actions", self.actions, model, self.taken)

    def _ended(self, observations: Any, observed: Any, steps: Tensor) -> Tensor:
        """After which of all `steps [B, T]` an episode was seen to have ended, bool `[B, T]`."""
        site = self.signature.observations.get(ENDED)
        if site is None or not isinstance(observations, Mapping) or ENDED not in observations:
            return torch.zeros_like(steps)
        value, masked = _site_values(f"observations['{ENDED}']", observations[ENDED], site, steps)
        ended = (value != 0) & ~torch.isnan(value) & ~masked
        if isinstance(observed, Mapping) and ENDED in observed:
            plates = (*steps.shape, *site.plates)
            ended = ended & _site_flags(f"observed['{ENDED}']", observed[ENDED], plates, steps)
        return ended.reshape(steps.shape)

    def observations(self, values: Any, observed: Any) -> tuple[Sites, Sites]:
        """Values by site, `[B, T, …]`, and which of them were observed, bool `[B, T, *plates]`."""
        tensors, flags = self._sites("observations", values, "observed", observed, self.taken)
        if observed is None:
            self._require_unmasked("observations", values, tensors, "observed", flags)
        return tensors, flags

    def initial_observations(self, values: Any, observed: Any) -> tuple[Sites | None, Sites | None]:
        """Values by site, `[B, …]`, and which of them were observed; None, for models that have none."""
        argument, whether = "initial_observations", "initially_observed"
        needed = self.model.initial_observation
        expected = "observations at time 0" if needed else "None: this model has none"
        require((values is not None) == needed, argument, values, expected)
        if values is None:
            return None, None
        everywhere = torch.ones_like(self.lengths, dtype=torch.bool)
        if ENDED in self.signature.observations and isinstance(values, Mapping) and ENDED not in values:
            never = torch.full((len(everywhere), *self.signature.observations[ENDED].shape), torch.nan)
            values = {**values, ENDED: never}  # nothing ends before it begins
            observed = observed if observed is None else {**observed, ENDED: torch.zeros(never.shape).bool()}
        tensors, flags = self._sites(argument, values, whether, observed, everywhere)
        if observed is None:
            self._require_unmasked(argument, values, tensors, whether, flags)
        return tensors, flags

    def contexts(self, contexts: Any) -> Tensor | None:
        """Indices `[B]`."""
        if contexts is None:
            return None
        names, B = self.model.context_names, len(self.lengths)
        c = as_indices("contexts", contexts, names).to(self.model.device)
        require(c.shape == (B,), "contexts", tuple(c.shape), f"shape [{B}]")
        _require_range("contexts", c, names, torch.ones_like(c, dtype=torch.bool))
        return c

    def states(self, states: Any) -> State | None:
        """A state with leaves `[B, T + 1, …]`."""
        if states is None:
            return None
        spec = self.signature.state
        names = sorted(name for name, _ in leaves(spec))
        found = sorted(name for name, _ in leaves(states))
        require(structure(states) == structure(spec), "states", found, f"the components {names}")
        T = self.taken.shape[1]
        reached = torch.arange(T + 1, device=self.taken.device) <= self.lengths[:, None]  # [B, T+1]
        return map_state(lambda leaf, values: self._leaf(leaf, values, reached), spec, states)  # type: ignore[no-any-return]

    def rewards(self, rewards: Any) -> Tensor | None:
        """Real numbers `[B, T]`."""
        return None if rewards is None else _real_numbers("rewards", rewards, self.taken)

    def returns(self, returns: Any) -> Tensor | None:
        """Real numbers `[B]`."""
        return None if returns is None else _real_numbers("returns", returns, self.lengths > 0)

    def _leaf(self, leaf: Leaf, values: Any, reached: Tensor) -> Tensor:
        tensor = as_tensor("states", values).to(reached.device)
        shape = (*reached.shape, *leaf.shape)
        require(tensor.shape == shape, "states", tuple(tensor.shape), f"shape {list(shape)}")
        require_finite("states", tensor, reached)
        tensor = as_type("states", filled(tensor, reached), leaf.dtype, reached)
        if self.model.states is not None:
            bad = (tensor < 0) | (tensor >= self.model.states)
            if bool(bad.any()):
                where = f"{tensor[bad][0].item()} at {place_of(bad)}"
                raise invalid("states", where, f"indices 0 to {self.model.states - 1}")
        return tensor

    def _sites(
        self, argument: str, values: Any, whether: str, observed: Any, taken: Tensor
    ) -> tuple[Sites, Sites]:
        """Values and flags by site, with the axes of `taken`, `[B, T]` or `[B]`, on the left."""
        sites = self.signature.observations
        _require_sites(argument, values, sites)
        if observed is not None:
            _require_sites(whether, observed, sites)
        tensors, flags = {}, {}
        for name, site in sites.items():
            what = f"{argument}['{name}']"
            value, masked = _site_values(what, values[name], site, taken)
            plates = (*taken.shape, *site.plates)
            if observed is None:
                flag = ~(torch.isnan(value) | masked).reshape(*plates, -1).any(-1)
            else:
                flag = _site_flags(f"{whether}['{name}']", observed[name], plates, taken)
            flag = flag & on_the_right(taken, flag)
            require_finite(what, value, flag)
            value = as_type(what, filled(value, flag), site.dtype, flag)
            _require_support(what, value, site, flag)
            tensors[name], flags[name] = value, flag
        return tensors, flags

    def _require_unmasked(
        self, argument: str, given: Mapping[str, Any], values: Sites, whether: str, flags: Sites
    ) -> None:
        """Raise if integers count as observed where the program masks their site out: nobody said they do.

        Masks depend on nothing that is hidden, so that any state and context show where they are.
        """
        names = [
            name
            for name, array in given.items()
            if not isinstance(array, np.ma.MaskedArray) and not as_tensor(name, array).is_floating_point()
        ]
        if not names:
            return
        model, initially = self.model, whether == "initially_observed"
        axes = self.lengths.shape if initially else self.taken.shape
        plate_axes = (1,) * model.max_plate_nesting
        context = torch.zeros((1, *plate_axes), dtype=torch.long, device=model.device)
        taken = on_the_right(self.taken, self.actions)
        action = torch.where(taken, self.actions, some_action(model))  # nought need not be one
        action = action.reshape(-1, *plate_axes, *action.shape[2:])
        data = {name: value.flatten(0, len(axes) - 1) for name, value in values.items()}
        batched = Batched((axes.numel(),), model.max_plate_nesting)
        with isolated(0), torch.no_grad(), poutine.block(), model.running(), batched:
            state = model.initial(context)
            with poutine.condition(data=data), Recorded() as program:
                model.percept(state, None if initially else action, context)
        for name in names:
            shape = flags[name].shape
            mask = torch.as_tensor(mask_of(program.sites[name]), device=model.device)
            hidden = flags[name] & ~mask.expand(axes.numel(), *shape[len(axes) :]).reshape(shape)
            if bool(hidden.any()):
                value = values[name][hidden][0].tolist()
                raise invalid(
                    f"{argument}['{name}']",
                    f"{value} at {place_of(hidden)}, where the program masks it out",
                    f"NaN where nothing was observed, or `{whether}`, which says so: integers cannot",
                )


def until(ended: Tensor) -> Tensor:
    """How many steps there are until the first that has ended an episode, `[B]`, of bool `[B, T]`."""
    T = ended.shape[1]
    return torch.where(ended.any(1), ended.int().argmax(1) + 1, T)


def require_nothing_after(ended: Tensor, lengths: Tensor) -> None:
    """Raise if episodes have `ended`, bool `[B, T]`, before the last of the steps they are said to have."""
    steps = until(ended)
    wrong = steps < lengths
    if bool(wrong.any()):
        b = int(wrong.nonzero()[0])
        found = f"an end after {int(steps[b])} of the {int(lengths[b])} steps of episode {b}"
        raise invalid(f"observations['{ENDED}']", found, "none but at the last step; or give `lengths`")


def _site_values(what: str, given: Any, site: ObservationSite, taken: Tensor) -> tuple[Tensor, Tensor]:
    """Values of a site, `[*taken, *site]`, and where a NumPy masked array masks them."""
    masked = torch.tensor(False)
    if isinstance(given, np.ma.MaskedArray):
        given, masked = given.data, torch.from_numpy(np.array(np.ma.getmaskarray(given)))
    value = as_tensor(what, given).to(taken.device)
    axes, shape = taken.shape, (*taken.shape, *site.shape)
    inner = value.shape[len(axes) :]
    fits = value.shape[: len(axes)] == axes and without_unit_axes(inner) == without_unit_axes(site.shape)
    require(fits, what, tuple(value.shape), f"shape {list(shape)}")
    return value.reshape(shape), masked.to(value.device).reshape(shape if masked.dim() else (1,) * len(shape))


def _site_flags(what: str, given: Any, plates: tuple[int, ...], taken: Tensor) -> Tensor:
    """Whether a site was observed, `[*plates]`, given for each plate or for all of them."""
    flags = as_tensor(what, given).to(taken.device)
    require(flags.dtype == torch.bool, what, flags.dtype, "booleans")
    require(flags.shape in (plates, taken.shape), what, tuple(flags.shape), f"shape {list(plates)}")
    return on_the_right(flags, flags.new_empty(plates)).expand(plates)


def _real_numbers(argument: str, values: Any, where: Tensor) -> Tensor:
    """Real numbers `[B]` or `[B, T]`. Those that come in double precision stay so."""
    tensor = as_tensor(argument, values).to(where.device)
    require(tensor.shape == where.shape, argument, tuple(tensor.shape), f"shape {list(where.shape)}")
    dtype = torch.get_default_dtype()
    if hasattr(values, "dtype") and tensor.is_floating_point():
        dtype = torch.promote_types(dtype, tensor.dtype)
    require_finite(argument, tensor, where)
    return as_type(argument, tensor, dtype, where)


def _require_range(argument: str, indices: Tensor, names: Sequence[str], where: Tensor) -> None:
    bad = ((indices < 0) | (indices >= len(names))) & where
    if bool(bad.any()):
        found = f"{int(indices[bad][0])} at {place_of(bad)}"
        raise invalid(argument, found, f"0 to {len(names) - 1} ({', '.join(names)})")


def _require_sites(argument: str, given: Any, sites: Mapping[str, ObservationSite]) -> None:
    expected = f"the sites {sorted(sites)}"
    require(isinstance(given, Mapping), argument, given, f"a mapping from {expected} to arrays")
    require(set(given) == set(sites), argument, sorted(map(str, given)), expected)


def _require_support(argument: str, value: Tensor, site: ObservationSite, flags: Tensor) -> None:
    if site.support is None:
        return
    bad = ~site.support.check(value).reshape(flags.shape) & flags
    if bool(bad.any()):
        found = value[bad][0]
        shown = found.item() if found.numel() == 1 else found.tolist()
        raise invalid(argument, f"{shown} at {place_of(bad)}", f"values within {site.support}")
