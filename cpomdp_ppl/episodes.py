"""Episodes: the batch of what happened."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cpomdp_ppl.errors import EpisodesFileError, rejected, require
from cpomdp_ppl.signature import Leaf, ObservationSite, signature
from cpomdp_ppl.state import State, leaves, map_state

if TYPE_CHECKING:
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
        zeroed: Promises that unobserved values are zero already, which saves writing them.
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
                observed={site: seen & _right(taken, seen) for site, seen in self.observed.items()},
                states=map_state(lambda leaf: filled(leaf, reached), self.states),
                rewards=map_state(lambda rewards: filled(rewards, taken), self.rewards),
            )
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
        def shape(argument: str, value: Any, *expected: int) -> None:
            found = tuple(getattr(value, "shape", ()))
            require(
                isinstance(value, Tensor) and found[: len(expected)] == expected,
                argument,
                found if isinstance(value, Tensor) else value,
                f"a tensor of shape {[*expected, ...]}".replace("Ellipsis", "…"),
            )

        shape("lengths", self.lengths, B)
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
            require(
                values is not None and seen is not None and set(values) == set(seen),
                whether,
                None if seen is None else sorted(seen),
                f"the same sites as {what}, {None if values is None else sorted(values)}",
            )
            for site in values:
                shape(f"{what}['{site}']", values[site], *axes)
                shape(f"{whether}['{site}']", seen[site], *axes)
                require(seen[site].dtype == torch.bool, f"{whether}['{site}']", seen[site].dtype, "booleans")
        for name, axes in [("contexts", (B,)), ("rewards", (B, T)), ("returns", (B,))]:
            if getattr(self, name) is not None:
                shape(name, getattr(self, name), *axes)
        if self.states is not None:
            for name, leaf in leaves(self.states):
                shape(f"states ({name})", leaf, B, T + 1)

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
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"episode {index} out of {len(self)}")
            index = [index % len(self)]
        if not isinstance(index, slice):
            index = torch.as_tensor(index, device=self.device)
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
        lengths = torch.as_tensor(lengths, device=self.device).expand(len(self))
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
            observed: By site, bool `[B, T]`. Left out, a value counts as observed unless it is NaN.
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
        sig = signature(model)
        device = model.device
        a = _indices("actions", actions, model.action_names, device, dim=2)
        B, T = a.shape
        require(model.horizon >= T, "actions", tuple(a.shape), f"at most {model.horizon} steps (the horizon)")
        n = torch.full((B,), T) if lengths is None else torch.as_tensor(np.asarray(lengths), dtype=torch.long)
        n = n.to(device)
        require(n.shape == (B,), "lengths", tuple(n.shape), f"shape [{B}]")
        require(bool(((n >= 1) & (n <= T)).all()), "lengths", n.tolist(), f"1 to {T} steps in every episode")
        taken = torch.arange(T, device=device) < n[:, None]  # [B, T]
        _require_range("actions", a, model.action_names, taken)

        require(
            (initial_observations is not None) == model.initial_observation,
            "initial_observations",
            initial_observations,
            "observations at time 0" if model.initial_observation else "None: this model has none",
        )
        values, seen = _read_observations(
            "observations", observations, observed, sig.observations, (B, T), taken
        )
        first, first_seen = None, None
        if initial_observations is not None:
            everywhere = torch.ones(B, dtype=torch.bool, device=device)
            first, first_seen = _read_observations(
                "initial_observations",
                initial_observations,
                initially_observed,
                sig.observations,
                (B,),
                everywhere,
            )
        c = None
        if contexts is not None:
            c = _indices("contexts", contexts, model.context_names, device, dim=1)
            require(c.shape == (B,), "contexts", tuple(c.shape), f"shape [{B}]")
            _require_range("contexts", c, model.context_names, torch.ones_like(c, dtype=torch.bool))
        reached = torch.arange(T + 1, device=device) <= n[:, None]  # [B, T+1]
        return Episodes(
            actions=a,
            observations=values,
            observed=seen,
            lengths=n,
            contexts=c,
            states=None if states is None else _read_states(states, sig.state, reached),
            rewards=None if rewards is None else _read("rewards", rewards, torch.get_default_dtype(), taken),
            returns=None if returns is None else _read("returns", returns, torch.get_default_dtype(), n > 0),
            initial_observations=first,
            initially_observed=first_seen,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plain `.npz` file, all of it or nothing."""
        arrays = {"format": np.array(FORMAT)}
        for field in fields(self):
            arrays |= _entries(field.name, getattr(self, field.name))
        path = Path(path)
        temporary = NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False)  # noqa: SIM115
        try:
            with temporary:
                np.savez_compressed(temporary, allow_pickle=False, **arrays)
                temporary.flush()
                os.fsync(temporary.fileno())
            os.replace(temporary.name, path)
        except BaseException:
            os.unlink(temporary.name)
            raise

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


def _entries(name: str, value: Any) -> dict[str, Any]:
    """A tensor, or a tree of them, as arrays named `name/part/…`."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        parts = (_entries(f"{name}/{key}", part) for key, part in value.items())
        return {key: array for part in parts for key, array in part.items()}
    return {name: value.detach().cpu().numpy()}


def _from_entries(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `_entries` for the fields of `Episodes`."""
    known = {field.name for field in fields(Episodes)}
    values: dict[str, Any] = {"observations": {}, "observed": {}}
    for name, array in arrays.items():
        *branches, leaf = name.split("/")
        require((branches or [leaf])[0] in known, "entry", name, f"one of {sorted(known)}")
        target = values
        for branch in branches:
            target = target.setdefault(branch, {})
        target[leaf] = torch.from_numpy(array)
    return values


def _right(flags: Tensor, like: Tensor) -> Tensor:
    """Add axes on the right, so that flags `[B, T]` broadcast with `[B, T, …]`."""
    if flags.dim() == like.dim():
        return flags
    return flags.reshape(flags.shape + (1,) * (like.dim() - flags.dim()))


def filled(values: Tensor, known: Tensor) -> Tensor:
    """Zero where not known: filled values cannot leak, nor turn a gradient into NaN."""
    return torch.where(_right(known, values), values, values.new_zeros(()))


def _where(bad: Tensor) -> str:
    """The first place where something is wrong, in words."""
    place = bad.nonzero()[0].tolist()
    return ", ".join(f"{axis} {i}" for axis, i in zip(("episode", "step"), place, strict=False))


def _indices(argument: str, values: Any, names: Sequence[str], device: torch.device, dim: int) -> Tensor:
    """Indices given as numbers or as names."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    require(array.ndim == dim, argument, array.shape, f"an array of {dim} axes")
    if array.dtype.kind in "UO":
        numbers = {name: i for i, name in enumerate(names)}
        unknown = sorted({str(v) for v in array.ravel()} - set(numbers))
        require(not unknown, argument, unknown, f"names out of {list(names)}")
        array = np.vectorize(lambda v: numbers[str(v)])(array)
    finite = np.where(np.isfinite(array), array, -1) if array.dtype.kind == "f" else array
    whole = array.dtype.kind in "iu" or bool((finite == np.round(finite)).all())
    require(whole, argument, array.dtype, "integers or names")
    return torch.as_tensor(finite.astype(np.int64), device=device)


def _require_range(argument: str, indices: Tensor, names: Sequence[str], where: Tensor) -> None:
    bad = ((indices < 0) | (indices >= len(names))) & where
    if bool(bad.any()):
        value = int(indices[bad][0])
        raise rejected(argument, f"{value} at {_where(bad)}", f"0 to {len(names) - 1} ({', '.join(names)})")


def _read(argument: str, values: Any, dtype: torch.dtype, where: Tensor) -> Tensor:
    tensor = torch.as_tensor(values if isinstance(values, Tensor) else np.asarray(values)).to(
        where.device, dtype
    )
    require(tensor.shape == where.shape, argument, tuple(tensor.shape), f"shape {list(where.shape)}")
    _require_finite(argument, tensor, where)
    return tensor


def _require_finite(argument: str, tensor: Tensor, where: Tensor) -> None:
    """`where` has the leading axes of `tensor`."""
    if tensor.is_floating_point():
        bad = ~torch.isfinite(tensor) & _right(where, tensor)
        if bool(bad.any()):
            found = f"{tensor[bad][0].item()} at {_where(bad)}"
            raise rejected(argument, found, "finite values where observed")


def _read_observations(
    argument: str,
    observations: Mapping[str, Any],
    observed: Mapping[str, Any] | None,
    sites: Mapping[str, ObservationSite],
    axes: tuple[int, ...],
    taken: Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    whether = "observed" if argument == "observations" else "initially_observed"
    require(set(observations) == set(sites), argument, sorted(observations), f"the sites {sorted(sites)}")
    if observed is not None:
        require(set(observed) == set(sites), whether, sorted(observed), f"the sites {sorted(sites)}")
    values, seen = {}, {}
    for site, spec in sites.items():
        given = observations[site]
        value = torch.as_tensor(given if isinstance(given, Tensor) else np.asarray(given)).to(taken.device)
        shape = (*axes, *spec.shape)
        require(
            _squeezed(value.shape[len(axes) :]) == _squeezed(spec.shape) and value.shape[: len(axes)] == axes,
            f"{argument}['{site}']",
            tuple(value.shape),
            f"shape {list(shape)}",
        )
        value = value.reshape(shape)
        event_axes = tuple(range(len(axes) + len(spec.plates), value.dim()))
        if observed is None:
            missing = torch.isnan(value) if value.is_floating_point() else torch.zeros_like(value).bool()
            flags = ~(missing.any(event_axes) if event_axes else missing)
        else:
            given = observed[site]
            flags = torch.as_tensor(given if isinstance(given, Tensor) else np.asarray(given)).to(
                taken.device
            )
            require(flags.dtype == torch.bool, f"{whether}['{site}']", flags.dtype, "booleans")
            require(
                flags.shape == (*axes, *spec.plates) or flags.shape == axes,
                f"{whether}['{site}']",
                tuple(flags.shape),
                f"shape {[*axes, *spec.plates]}",
            )
            flags = _right(flags, flags.new_empty((*axes, *spec.plates))).expand(*axes, *spec.plates)
        flags = flags & _right(taken, flags)
        _require_finite(f"{argument}['{site}']", value, flags)
        value = torch.where(_right(flags, value), value, torch.zeros_like(value))
        values[site], seen[site] = value.to(spec.dtype), flags
    return values, seen


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _read_states(states: Any, spec: Any, reached: Tensor) -> Any:
    names = sorted(name for name, _ in leaves(spec))
    found = sorted(name for name, _ in leaves(states))
    require(found == names, "states", found, f"the components {names}")

    def read(leaf: Leaf, values: Any) -> Tensor:
        tensor = torch.as_tensor(values if isinstance(values, Tensor) else np.asarray(values))
        shape = (*reached.shape, *leaf.shape)
        require(tensor.shape == shape, "states", tuple(tensor.shape), f"shape {list(shape)}")
        tensor = tensor.to(reached.device, leaf.dtype)
        _require_finite("states", tensor, reached)
        return tensor

    return map_state(read, spec, states)
