"""Episodes: the batch of what happened."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, unquote

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.arrays import as_indices, as_tensor, as_type, on_the_right, place_of
from cpomdp_ppl.errors import EpisodesFileError, as_integer, invalid, require, require_model
from cpomdp_ppl.experiments.files import write_atomic
from cpomdp_ppl.handlers import Batched, Recorded, mask_of
from cpomdp_ppl.rng import isolated
from cpomdp_ppl.signature import Leaf, ObservationSite, signature
from cpomdp_ppl.state import State, leaves, map_state, structure

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import ArrayLike

    from cpomdp_ppl.model import CPOMDP

FORMAT = "cpomdp_ppl.Episodes 1"
"""First entry of every file, so that a foreign one is told apart."""


@dataclass(frozen=True, eq=False)
class Episodes:
    """B episodes of up to T steps: what the agent did and saw and, where known, what was hidden.

    Step t (from 0) holds action `a_t`, reward `r_t` and what was seen after it, `o_{t+1}`; `states[:, t]`
    is `s_t`. Episodes may be ragged: steps from `lengths` on count for nothing, and so does an
    observation where `observed` is false. Whatever a caller left there is overwritten with zeros.

    Attributes:
        actions: int64 `[B, T]`.
        observations: By site, `[B, T, …]`.
        observed: By site, bool `[B, T]` (`[B, T, …]` for sites in the program's own plates).
        lengths: int64 `[B]`; None means T for all.
        contexts: int64 `[B]`, if known.
        states: A state with leaves `[B, T + 1, …]`, if known.
        rewards: `[B, T]`, if known.
        returns: `[B]`, if known; computed from `rewards` if those are.
        initial_observations: By site, `[B, …]`: what was seen before the first action, for models that
            ask for it.
        initially_observed: By site, bool `[B]`.

    Args:
        zeroed: Promises that unobserved values are zero already and all others are finite, which saves
            looking. Not kept as an attribute.
    """

    actions: Tensor
    observations: Mapping[str, Tensor]
    observed: Mapping[str, Tensor]
    lengths: Tensor = None  # type: ignore[assignment]  # filled in below
    contexts: Tensor | None = None
    states: State | None = None
    rewards: Tensor | None = None
    returns: Tensor | None = None
    initial_observations: Mapping[str, Tensor] | None = None
    initially_observed: Mapping[str, Tensor] | None = None
    zeroed: InitVar[bool] = False

    def __post_init__(self, zeroed: bool) -> None:
        require(
            isinstance(self.actions, Tensor) and self.actions.dim() == 2,
            "actions",
            getattr(self.actions, "shape", self.actions),
            "a tensor of shape [B, T]",
        )
        require(self.actions.dtype == torch.long, "actions", self.actions.dtype, "torch.int64")
        B, T = self.actions.shape
        require(B > 0 and T > 0, "actions", tuple(self.actions.shape), "at least one episode and one step")
        if self.lengths is None:
            self._set(lengths=torch.full((B,), T, device=self.actions.device))
        self._require_shapes(B, T)

        ragged = bool((self.lengths < T).any())
        if ragged:
            steps = torch.arange(T + 1, device=self.actions.device)
            taken = steps[:T] < self.lengths[:, None]  # [B, T]
            reached = steps <= self.lengths[:, None]  # [B, T+1]
            self._set(
                actions=filled(self.actions, taken),
                observed={site: seen & on_the_right(taken, seen) for site, seen in self.observed.items()},
                states=map_state(lambda leaf: filled(leaf, reached), self.states),
                rewards=map_state(lambda rewards: filled(rewards, taken), self.rewards),
            )
        if not zeroed:
            self._require_numbers()
        if ragged or not zeroed:
            self._set(
                observations=map_state(filled, self.observations, self.observed),
                initial_observations=map_state(filled, self.initial_observations, self.initially_observed),
            )
        if self.rewards is not None:
            self._set(returns=self.rewards.sum(1))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _require_shapes(self, B: int, T: int) -> None:
        def shape(argument: str, value: Any, *expected: int, more: bool = True) -> None:
            found = tuple(getattr(value, "shape", ()))
            fits = found[: len(expected)] == expected and (more or len(found) == len(expected))
            wanted = ", ".join([*map(str, expected), *["…"] * more])
            require(
                isinstance(value, Tensor) and fits,
                argument,
                found if isinstance(value, Tensor) else value,
                f"a tensor of shape [{wanted}]",
            )

        for name, axes in [("lengths", (B,)), ("contexts", (B,)), ("rewards", (B, T)), ("returns", (B,))]:
            value = getattr(self, name)
            if value is not None:
                shape(name, value, *axes, more=False)
                real = name in ("rewards", "returns")
                proper = value.is_floating_point() if real else value.dtype == torch.long
                require(proper, name, value.dtype, "real numbers" if real else "torch.int64")
        require(
            bool(((self.lengths >= 1) & (self.lengths <= T)).all()),
            "lengths",
            self.lengths.tolist(),
            f"one step to {T} steps in every episode",
        )
        pairs = [("observations", "observed", (B, T)), ("initial_observations", "initially_observed", (B,))]
        for what, whether, axes in pairs:
            values, seen = getattr(self, what), getattr(self, whether)
            if values is None and seen is None:
                continue
            for name, given in ((what, values), (whether, seen)):
                proper = given is None or isinstance(given, Mapping)
                require(proper, name, given, "a mapping from sites to tensors")
            require(
                values is not None and seen is not None and set(values) == set(seen),
                whether,
                None if seen is None else sorted(seen),
                f"the same sites as {what}, {None if values is None else sorted(values)}",
            )
            for site in values:
                shape(f"{what}['{site}']", values[site], *axes)
                shape(f"{whether}['{site}']", seen[site], *axes)
                flags = seen[site]
                require(flags.dtype == torch.bool, f"{whether}['{site}']", flags.dtype, "booleans")
                require(
                    flags.shape == values[site].shape[: flags.dim()],
                    f"{whether}['{site}']",
                    tuple(flags.shape),
                    f"the leading axes of {what}['{site}'], {tuple(values[site].shape)}",
                )
        if self.states is not None:
            for name, leaf in leaves(self.states):
                shape(f"states ({name})", leaf, B, T + 1)

    def _require_numbers(self) -> None:
        """What was observed is finite."""
        pairs = [("observations", self.observations, self.observed)]
        if self.initial_observations is not None and self.initially_observed is not None:
            pairs.append(("initial_observations", self.initial_observations, self.initially_observed))
        for what, values, seen in pairs:
            for site, value in values.items():
                require_finite(f"{what}['{site}']", value, seen[site])

    def __len__(self) -> int:
        return self.actions.shape[0]

    @property
    def horizon(self) -> int:
        """Number of steps T that there is room for."""
        return self.actions.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.actions.device

    def __repr__(self) -> str:
        known = [
            name for name in ("contexts", "states", "rewards", "returns") if getattr(self, name) is not None
        ]
        return (
            f"Episodes(B={len(self)}, T={self.horizon}, sites={list(self.observations)}, "
            f"known={known}, device='{self.device}')"
        )

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Episodes:
        """Some of the episodes: an index, a slice, a list or tensor of indices, or a boolean mask."""
        number = None if isinstance(index, slice) else as_integer(index)
        if number is not None:
            if not -len(self) <= number < len(self):
                raise IndexError(f"episode {number} out of {len(self)}")
            index = slice(number % len(self), number % len(self) + 1)
        if not isinstance(index, slice):
            given = index
            try:
                index = torch.as_tensor(index, device=self.device)
            except (TypeError, ValueError, RuntimeError):
                index = torch.zeros((), device=self.device)
            if index.dim() != 1:
                raise IndexError(f"expected an index, a slice, or indices in one axis, got {given!r}")
            if not len(index):
                index = index.long()
        if not len(self.lengths[index]):
            raise IndexError(f"no episode out of {len(self)} is selected")
        return self._map(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> Episodes:
        """The same episodes on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Any) -> Episodes:
        return Episodes(
            **{field.name: map_state(function, getattr(self, field.name)) for field in fields(self)}
        )

    def truncated(self, lengths: Tensor | int) -> Episodes:
        """The same episodes cut short: no longer than `lengths` (a number, or `[B]`)."""
        lengths = as_tensor("lengths", lengths).to(self.device)
        expected = f"a number, or shape [{len(self)}]"
        require(lengths.shape in ((), (len(self),)), "lengths", tuple(lengths.shape), expected)
        lengths = lengths.expand(len(self))
        returns = self.returns if bool((lengths >= self.lengths).all()) else None
        return replace(self, lengths=torch.minimum(self.lengths, lengths), returns=returns)

    @staticmethod
    def concatenate(parts: Iterable[Episodes]) -> Episodes:
        """All episodes of several batches; shorter horizons are padded.

        What is hidden (contexts, states, rewards, returns) is known of the whole only if it is known of
        every part.
        """
        parts = list(parts)
        require(len(parts) > 0, "parts", parts, "at least one batch of episodes")
        sites = list(parts[0].observations)
        for part in parts:
            require(set(part.observations) == set(sites), "parts", list(part.observations), f"sites {sites}")
        T = max(part.horizon for part in parts)
        padded = [part._padded(T) for part in parts]

        def joined(name: str) -> Any:
            values = [getattr(part, name) for part in padded]
            if any(value is None for value in values):
                return None
            return map_state(lambda *tensors: torch.cat(tensors), *values)

        return Episodes(**{field.name: joined(field.name) for field in fields(Episodes)})

    def _padded(self, T: int) -> Episodes:
        extra = T - self.horizon
        if not extra:
            return self

        def pad(tensor: Tensor) -> Tensor:
            return torch.cat([tensor, tensor.new_zeros(len(self), extra, *tensor.shape[2:])], 1)

        return replace(
            self,
            actions=pad(self.actions),
            observations=map_state(pad, self.observations),
            observed=map_state(pad, self.observed),
            states=map_state(pad, self.states),
            rewards=map_state(pad, self.rewards),
        )

    @staticmethod
    def from_arrays(
        model: CPOMDP,
        actions: ArrayLike,
        observations: Mapping[str, ArrayLike],
        *,
        observed: Mapping[str, ArrayLike] | None = None,
        lengths: ArrayLike | None = None,
        contexts: ArrayLike | None = None,
        states: Any = None,
        rewards: ArrayLike | None = None,
        returns: ArrayLike | None = None,
        initial_observations: Mapping[str, ArrayLike] | None = None,
        initially_observed: Mapping[str, ArrayLike] | None = None,
    ) -> Episodes:
        """Recorded data as episodes of a model.

        Args:
            model: The model that the data are said to come from; shapes and ranges are checked against it.
            actions: `[B, T]`, indices or names.
            observations: By site, `[B, T, …]`.
            observed: By site, bool `[B, T]`. Left out, a value counts as observed unless it is NaN, or masked
                in a NumPy masked array. Integers and booleans have no NaN: of a site that the program masks
                out somewhere in these episodes, they need one of the others, or `observed`.
            lengths: `[B]`; left out, every episode has T steps.
            contexts: `[B]`, indices or names, if known.
            states: `[B, T + 1, …]`, or a dict of such, if known.
            rewards: `[B, T]`, if known.
            returns: `[B]`, if known.
            initial_observations: By site, `[B, …]`, for models that ask for them.
            initially_observed: By site, bool `[B]`; left out, as for `observed`.

        Raises:
            ValueError: Naming the argument, what was found and what was expected.

        Example:
            >>> from cpomdp_ppl.models import LightDark
            >>> nan = float("nan")
            >>> Episodes.from_arrays(LightDark(), [["right", "observe"]], {"z": [[nan, 0.7]]})
            Episodes(B=1, T=2, sites=['z'], known=[], device='cpu')
        """
        require_model(model)
        sig = signature(model)
        device = model.device
        a = as_indices("actions", actions, model.action_names).to(device)
        require(a.dim() == 2, "actions", tuple(a.shape), "an array of 2 axes")
        B, T = a.shape
        require(model.horizon >= T, "actions", tuple(a.shape), f"at most {model.horizon} steps (the horizon)")
        n = torch.full((B,), T) if lengths is None else as_tensor("lengths", lengths)
        require(n.shape == (B,), "lengths", tuple(n.shape), f"shape [{B}]")
        n = as_type("lengths", n, torch.long, torch.ones(B, dtype=torch.bool, device=n.device)).to(device)
        require(bool(((n >= 1) & (n <= T)).all()), "lengths", n.tolist(), f"1 to {T} steps in every episode")
        taken = torch.arange(T, device=device) < n[:, None]  # [B, T]
        _require_range("actions", a, model.action_names, taken)

        require(
            (initial_observations is not None) == model.initial_observation,
            "initial_observations",
            initial_observations,
            "observations at time 0" if model.initial_observation else "None: this model has none",
        )
        values, seen = _read_observations("observations", observations, observed, sig.observations, taken)
        if observed is None:
            _require_told(model, "observations", observations, values, seen, torch.where(taken, a, 0))
        first, first_seen = None, None
        if initial_observations is not None:
            everywhere = torch.ones(B, dtype=torch.bool, device=device)
            first, first_seen = _read_observations(
                "initial_observations",
                initial_observations,
                initially_observed,
                sig.observations,
                everywhere,
            )
            if initially_observed is None:
                _require_told(model, "initial_observations", initial_observations, first, first_seen, None)
        c = None
        if contexts is not None:
            c = as_indices("contexts", contexts, model.context_names).to(device)
            require(c.shape == (B,), "contexts", tuple(c.shape), f"shape [{B}]")
            _require_range("contexts", c, model.context_names, torch.ones_like(c, dtype=torch.bool))
        reached = torch.arange(T + 1, device=device) <= n[:, None]  # [B, T+1]
        return Episodes(
            actions=a,
            observations=values,
            observed=seen,
            lengths=n,
            contexts=c,
            states=None if states is None else _read_states(states, model, sig.state, reached),
            rewards=None if rewards is None else _read("rewards", rewards, taken),
            returns=None if returns is None else _read("returns", returns, n > 0),
            initial_observations=first,
            initially_observed=first_seen,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plain `.npz` file, all of it or nothing."""
        arrays: dict[str, Any] = {"format": np.array(FORMAT)}
        for field in fields(self):
            arrays |= _entries(field.name, getattr(self, field.name))

        def save(place: Path) -> None:
            with place.open("xb") as file:  # by its name alone, NumPy would add a suffix to it
                np.savez_compressed(file, **arrays)

        write_atomic(path, save)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Episodes:
        """Read a file written by `save`. Nothing in the file is ever run.

        Raises:
            FileNotFoundError: If there is no such file.
            EpisodesFileError: If the file is corrupt, or holds something else.
        """
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
                _require_all(file, len(arrays))
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            raise
        except Exception as error:  # NumPy and zipfile raise a dozen kinds on a damaged file
            raise EpisodesFileError(f"{path}: expected an .npz file of episodes, but {error}") from error
        found = arrays.pop("format", None)
        if found is None or str(found) != FORMAT:
            raise EpisodesFileError(f"{path}: expected format '{FORMAT}', found '{found}'")
        try:
            return Episodes(**_from_entries(arrays))
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise EpisodesFileError(f"{path}: {error}") from error


def _require_all(file: BinaryIO, number: int) -> None:
    """Raise unless an archive ends with the number of its entries.

    Entries have checksums, but their directory has none, and `zipfile` takes a damaged one that lists fewer
    for the whole.
    """
    file.seek(-22, os.SEEK_END)
    end = file.read()
    complete = end[:4] == b"PK\5\6" and int.from_bytes(end[10:12], "little") == number
    require(complete, "directory", f"{number} entries", "as many entries as the end of the file tells")


def _entries(name: str, value: Any) -> dict[str, Any]:
    """A tensor, or a tree of them, as arrays named `name/part/…`; a `/` in a part is written as in a URL."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        parts = (_entries(f"{name}/{quote(key, safe=' ')}", part) for key, part in value.items())
        return {key: array for part in parts for key, array in part.items()}
    return {name: value.detach().cpu().numpy()}


def _from_entries(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `_entries` for the fields of `Episodes`."""
    known = {field.name for field in fields(Episodes)}
    values: dict[str, Any] = {"observations": {}, "observed": {}}
    for name, array in arrays.items():
        *branches, leaf = map(unquote, name.split("/"))
        require((branches or [leaf])[0] in known, "entry", name, f"one of {sorted(known)}")
        target = values
        for branch in branches:
            target = target.setdefault(branch, {})
        target[leaf] = torch.from_numpy(array)
    return values


def filled(values: Tensor, known: Tensor) -> Tensor:
    """Zero where not known: filled values cannot leak, nor turn a gradient into NaN."""
    return torch.where(on_the_right(known, values), values, values.new_zeros(()))


def _require_range(argument: str, indices: Tensor, names: Sequence[str], where: Tensor) -> None:
    bad = ((indices < 0) | (indices >= len(names))) & where
    if bool(bad.any()):
        found = f"{int(indices[bad][0])} at {place_of(bad)}"
        raise invalid(argument, found, f"0 to {len(names) - 1} ({', '.join(names)})")


def require_finite(argument: str, tensor: Tensor, where: Tensor) -> None:
    """Raise unless a tensor is finite where it counts; `where` has its leading axes."""
    if tensor.is_floating_point():
        bad = ~torch.isfinite(tensor) & on_the_right(where, tensor)
        if bool(bad.any()):
            found = f"{tensor[bad][0].item()} at {place_of(bad)}"
            raise invalid(argument, found, "finite values where observed")


def _read(argument: str, values: Any, where: Tensor) -> Tensor:
    """Real numbers `[B]` or `[B, T]`. Those that come as double precision stay so."""
    tensor = as_tensor(argument, values).to(where.device)
    require(tensor.shape == where.shape, argument, tuple(tensor.shape), f"shape {list(where.shape)}")
    dtype = torch.get_default_dtype()
    if hasattr(values, "dtype") and tensor.is_floating_point():
        dtype = torch.promote_types(dtype, tensor.dtype)
    require_finite(argument, tensor, where)
    return as_type(argument, tensor, dtype, where)


def _read_observations(
    argument: str,
    observations: Mapping[str, Any],
    observed: Mapping[str, Any] | None,
    sites: Mapping[str, ObservationSite],
    taken: Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    whether = "observed" if argument == "observations" else "initially_observed"
    _require_sites(argument, observations, sites)
    if observed is not None:
        _require_sites(whether, observed, sites)
    axes = taken.shape  # [B, T] or [B]
    values, seen = {}, {}
    for site, spec in sites.items():
        what = f"{argument}['{site}']"
        given, masked = _unmasked(observations[site])
        value = as_tensor(what, given).to(taken.device)
        shape = (*axes, *spec.shape)
        require(
            squeezed(value.shape[len(axes) :]) == squeezed(spec.shape) and value.shape[: len(axes)] == axes,
            what,
            tuple(value.shape),
            f"shape {list(shape)}",
        )
        value = value.reshape(shape)
        plates = (*axes, *spec.plates)
        if observed is None:
            missing = torch.isnan(value) | masked.to(value.device).reshape(masked.shape or (1,) * len(shape))
            flags = ~missing.reshape(*plates, -1).any(-1)
        else:
            flags = as_tensor(f"{whether}['{site}']", observed[site]).to(taken.device)
            require(flags.dtype == torch.bool, f"{whether}['{site}']", flags.dtype, "booleans")
            require(
                flags.shape in (plates, axes),
                f"{whether}['{site}']",
                tuple(flags.shape),
                f"shape {list(plates)}",
            )
            flags = on_the_right(flags, flags.new_empty(plates)).expand(plates)
        flags = flags & on_the_right(taken, flags)
        require_finite(what, value, flags)
        value = as_type(what, filled(value, flags), spec.dtype, flags)
        _require_support(what, value, spec, flags)
        values[site], seen[site] = value, flags
    return values, seen


def _unmasked(given: Any) -> tuple[Any, Tensor]:
    """What is in a NumPy masked array, and where it is masked; nowhere, for all else."""
    if not isinstance(given, np.ma.MaskedArray):
        return given, torch.tensor(False)
    return given.data, torch.from_numpy(np.array(np.ma.getmaskarray(given)))


def _require_told(
    model: CPOMDP,
    argument: str,
    given: Mapping[str, Any],
    values: Mapping[str, Tensor],
    seen: Mapping[str, Tensor],
    actions: Tensor | None,
) -> None:
    """Raise if integers count as observed where the program masks their site out: nobody said they do.

    Args:
        model: The CPOMDP, whose masks depend on nothing that is hidden.
        argument: What to call the observations.
        given: As the caller gave them, by site.
        values: As tensors, `[B, T, …]` or `[B, …]`.
        seen: Which of them are taken for observed.
        actions: `[B, T]`, or None before the first.
    """
    untold = [
        site
        for site, array in given.items()
        if not isinstance(array, np.ma.MaskedArray) and not as_tensor(site, array).is_floating_point()
    ]
    if not untold:
        return
    axes = seen[untold[0]].shape[: 1 if actions is None else 2]
    plate_axes = (1,) * model.max_plate_nesting
    context = torch.zeros((1, *plate_axes), dtype=torch.long, device=model.device)
    action = None if actions is None else actions.reshape(-1, *plate_axes)
    data = {site: value.flatten(0, len(axes) - 1) for site, value in values.items()}
    batched = Batched((axes.numel(),), model.max_plate_nesting)
    with isolated(0), torch.no_grad(), poutine.block(), model.running(), batched:
        state = model.initial(context)
        with poutine.condition(data=data), Recorded() as program:
            model.observation(state, action, context)
    for site in untold:
        mask = torch.as_tensor(mask_of(program.sites[site]), device=model.device)
        hidden = seen[site] & ~mask.expand(axes.numel(), *seen[site].shape[len(axes) :]).reshape(
            seen[site].shape
        )
        if bool(hidden.any()):
            whether = "observed" if actions is not None else "initially_observed"
            value = values[site][hidden][0].tolist()
            raise invalid(
                f"{argument}['{site}']",
                f"{value} at {place_of(hidden)}, where the program masks it out",
                f"NaN where nothing was observed, or `{whether}`, which says so: integers cannot",
            )


def _require_sites(argument: str, given: Any, sites: Mapping[str, ObservationSite]) -> None:
    expected = f"the sites {sorted(sites)}"
    require(isinstance(given, Mapping), argument, given, f"a mapping from {expected} to arrays")
    require(set(given) == set(sites), argument, sorted(map(str, given)), expected)


def _require_support(argument: str, value: Tensor, spec: ObservationSite, flags: Tensor) -> None:
    if spec.support is None:
        return
    bad = ~spec.support.check(value).reshape(flags.shape) & flags
    if bool(bad.any()):
        found = value[bad][0]
        shown = found.item() if found.numel() == 1 else found.tolist()
        raise invalid(argument, f"{shown} at {place_of(bad)}", f"values within {spec.support}")


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without its axes of size 1."""
    return tuple(size for size in shape if size != 1)


def _read_states(states: Any, model: CPOMDP, spec: Any, reached: Tensor) -> Any:
    names = sorted(name for name, _ in leaves(spec))
    found = sorted(name for name, _ in leaves(states))
    require(structure(states) == structure(spec), "states", found, f"the components {names}")

    def read(leaf: Leaf, values: Any) -> Tensor:
        tensor = as_tensor("states", values).to(reached.device)
        shape = (*reached.shape, *leaf.shape)
        require(tensor.shape == shape, "states", tuple(tensor.shape), f"shape {list(shape)}")
        require_finite("states", tensor, reached)
        tensor = as_type("states", filled(tensor, reached), leaf.dtype, reached)
        if model.states is not None:
            bad = (tensor < 0) | (tensor >= model.states)
            if bool(bad.any()):
                where = f"{tensor[bad][0].item()} at {place_of(bad)}"
                raise invalid("states", where, f"indices 0 to {model.states - 1}")
        return tensor

    return map_state(read, spec, states)
