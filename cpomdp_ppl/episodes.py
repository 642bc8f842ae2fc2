"""Episodes: the batch of what happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.arrays import as_tensor, filled, on_the_right, require_finite
from cpomdp_ppl.errors import as_integer, require
from cpomdp_ppl.recorded_arrays import RecordedArrays, require_nothing_after
from cpomdp_ppl.signature import ENDED, ended_in
from cpomdp_ppl.state import State, leaves, map_state

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike

    from cpomdp_ppl.model import CPOMDP


@dataclass(frozen=True, eq=False)
class Episodes:
    """B episodes of up to T steps: what the agent did and saw and, where known, what was hidden.

    Step t (from 0) holds action `a_t`, reward `r_t` and what was seen after it, `o_{t+1}`; `states[:, t]`
    is `s_t`. Episodes may be ragged: steps from `lengths` on do not count, nor does an
    observation where `observed` is false. Whatever a caller left there is overwritten with zeros.

    Attributes:
        actions: int64 `[B, T]`; continuous ones are real numbers `[B, T, D]`.
        observations: By site, `[B, T, …]`.
        observed: By site, bool `[B, T]` (`[B, T, …]` for sites in plates of the program).
        lengths: int64 `[B]`; None means T for all.
        contexts: int64 `[B]`, if known.
        states: A state with leaves `[B, T + 1, …]`, if known.
        rewards: `[B, T]`, if known.
        returns: `[B]`, if known; computed from `rewards` if those are: `Σ_t γ^t r_t`.
        initial_observations: By site, `[B, …]`: what was seen before the first action, for models that
            ask for it.
        initially_observed: By site, bool `[B]`.
        discount: What a reward is worth a step later, γ.

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
    discount: float = 1.0
    zeroed: InitVar[bool] = False

    def __post_init__(self, zeroed: bool) -> None:
        require(
            isinstance(self.actions, Tensor) and self.actions.dim() in (2, 3),
            "actions",
            getattr(self.actions, "shape", self.actions),
            "a tensor of shape [B, T], or [B, T, D] of continuous actions",
        )
        continuous = self.actions.dim() == 3
        proper = self.actions.is_floating_point() if continuous else self.actions.dtype == torch.long
        require(proper, "actions", self.actions.dtype, "real numbers" if continuous else "torch.int64")
        require(0 < self.discount <= 1, "discount", self.discount, "a number above 0 and at most 1")
        B, T = self.actions.shape[:2]
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
            self._set(returns=discounted(self.rewards, self.discount).sum(1))

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
        if ENDED in self.observations:
            require_nothing_after(ended_in(self.observations, self.observed, 2), self.lengths)

    def __len__(self) -> int:
        return self.actions.shape[0]

    @property
    def horizon(self) -> int:
        """Number of steps T that there is room for."""
        return self.actions.shape[1]

    @property
    def alive(self) -> Tensor:
        """Which steps belong to their episode, bool `[B, T]`."""
        return torch.arange(self.horizon, device=self.device) < self.lengths[:, None]

    @property
    def lasting_actions(self) -> Tensor:
        """Actions to run programs with: the last stays past the end, where zeros need not be in a box."""
        if self.actions.dim() == 2:
            return self.actions
        steps = torch.arange(self.horizon, device=self.device)
        last = torch.minimum(steps, self.lengths[:, None] - 1)  # [B, T]
        return self.actions.take_along_dim(last[..., None], 1)

    @property
    def lasting_states(self) -> Any:
        """States, leaves `[B, T + 1, …]`, that stay where they were when the episode ended."""
        time = torch.arange(self.horizon + 1, device=self.device).minimum(self.lengths[:, None])  # [B, T + 1]
        episode = torch.arange(len(self), device=self.device)[:, None]
        return map_state(lambda leaf: leaf[episode, time], self.states)

    @property
    def ended(self) -> Tensor:
        """Which episodes the model has ended, bool `[B]`; none, for models that cannot end."""
        if ENDED not in self.observations:
            return torch.zeros_like(self.lengths, dtype=torch.bool)
        return ended_in(self.observations, self.observed, 2).any(1)

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
        parts = {name: map_state(function, getattr(self, name)) for name in ARRAYS}
        return replace(self, **parts, zeroed=True)  # nothing is left to be looked for, or filled

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

        Contexts, states, rewards and returns are known in the result only if every part knows them.
        """
        parts = list(parts)
        require(len(parts) > 0, "parts", parts, "at least one batch of episodes")
        sites = list(parts[0].observations)
        for part in parts:
            require(set(part.observations) == set(sites), "parts", list(part.observations), f"sites {sites}")
            same = part.discount == parts[0].discount
            require(same, "parts", f"discount {part.discount}", f"{parts[0].discount}, as of the first")
            axes = [tuple(each.actions.shape[2:]) for each in (part, parts[0])]
            require(axes[0] == axes[1], "parts", f"actions of axes {axes[0]}", f"{axes[1]}, as of the first")
        T = max(part.horizon for part in parts)
        padded = [part._padded(T) for part in parts]

        def joined(name: str) -> Any:
            values = [getattr(part, name) for part in padded]
            if any(value is None for value in values):
                return None
            return map_state(lambda *tensors: torch.cat(tensors), *values)

        return Episodes(**{name: joined(name) for name in ARRAYS}, discount=parts[0].discount)

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
            actions: `[B, T]`, indices or names; `[B, T, D]`, if they are continuous.
            observations: By site, `[B, T, …]`.
            observed: By site, bool `[B, T]`. Left out, a value counts as observed unless it is NaN, or masked
                in a NumPy masked array. Integers and booleans have no NaN: of a site that the program masks
                out somewhere in these episodes, they need one of the others, or `observed`.
            lengths: `[B]`; left out, every episode has T steps, or fewer if the site `ended` says so. An
                episode that stops without having `ended` was cut short.
            contexts: `[B]`, indices or names, if known.
            states: `[B, T + 1, …]`, or a dict of such, if known.
            rewards: `[B, T]`, if known.
            returns: `[B]`, if known.
            initial_observations: By site, `[B, …]`, for models that ask for them.
            initially_observed: By site, bool `[B]`; left out, as for `observed`.

        Raises:
            ValueError: Naming the argument, what was found and what was expected.

        Examples:
            >>> from cpomdp_ppl.models import LightDark
            >>> nan = float("nan")
            >>> Episodes.from_arrays(LightDark(), [["right", "observe"]], {"z": [[nan, 0.7]]})
            Episodes(B=1, T=2, sites=['z'], known=[], device='cpu')
        """
        arrays = RecordedArrays(model, actions, lengths, observations, observed)
        first, first_seen = arrays.initial_observations(initial_observations, initially_observed)
        values, seen = arrays.observations(observations, observed)
        return Episodes(
            actions=arrays.actions,
            observations=values,
            observed=seen,
            lengths=arrays.lengths,
            contexts=arrays.contexts(contexts),
            states=arrays.states(states),
            rewards=arrays.rewards(rewards),
            returns=arrays.returns(returns),
            initial_observations=first,
            initially_observed=first_seen,
            discount=model.discount,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plain `.npz` file, all of it or nothing."""
        from cpomdp_ppl.episodes_file import save_episodes

        save_episodes(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Episodes:
        """Read a file written by `save`. Nothing in the file is ever run.

        Raises:
            FileNotFoundError: If there is no such file.
            EpisodesFileError: If the file is corrupt, or holds something else.
        """
        from cpomdp_ppl.episodes_file import load_episodes

        return load_episodes(path)


ARRAYS = tuple(field.name for field in fields(Episodes) if field.name != "discount")
"""The fields of `Episodes` that are tensors, or trees of them."""


def discounted(rewards: Tensor, discount: float) -> Tensor:
    """Rewards `[B, T]` as they are worth at the start, `γ^t r_t`."""
    return rewards if discount == 1 else rewards * discount_factors(discount, rewards)


def discount_factors(discount: float, like: Tensor) -> Tensor:
    """`γ^t` for t = 0 … T − 1, `[T]`, of the type and on the device of a series `[B, T]`."""
    steps = torch.arange(like.shape[1], dtype=torch.float64, device=like.device)
    return torch.as_tensor(discount, dtype=torch.float64, device=like.device).pow(steps).to(like.dtype)
