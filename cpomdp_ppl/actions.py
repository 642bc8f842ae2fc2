"""What an agent may do: one of a list, or any point of a box."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl.arrays import as_indices, as_tensor, place_of
from cpomdp_ppl.errors import UnsupportedModelError, invalid, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.model import CPOMDP


@dataclass(frozen=True, init=False)
class Box:
    """Continuous actions: all real vectors between two bounds.

    Programs get an action with an axis of size D on the right, `[…, D]`, also if D is 1.

    Args:
        low: The lowest value on each axis, or one number.
        high: The highest, likewise.
        names: Names of the axes; their numbers if left out.

    Attributes:
        low: D numbers.
        high: D numbers.
        names: D names.

    Examples:
        >>> Box([-1.0, 0.0], 1.0, names=("steer", "throttle"))
        Box(low=(-1.0, 0.0), high=(1.0, 1.0), names=('steer', 'throttle'))
        >>> Box(-1.0, 1.0).dim
        1
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    names: tuple[str, ...]

    def __init__(
        self,
        low: float | Sequence[float] | Tensor,
        high: float | Sequence[float] | Tensor,
        names: Sequence[str] | None = None,
    ) -> None:
        lows, highs = _numbers("low", low), _numbers("high", high)
        D = max(len(lows), len(highs))
        for argument, values in (("low", lows), ("high", highs)):
            require(len(values) in (1, D), argument, values, f"1 number or {D}")
        lows, highs = (values * (D // len(values)) for values in (lows, highs))
        for bounds in (np.array([lows, highs]), np.array([lows, highs], np.float32)):  # as programs get them
            with np.errstate(over="ignore"):
                width = bounds[1] - bounds[0]
            proper = bool(((width > 0) & np.isfinite(width)).all())
            require(proper, "high", highs, f"numbers above low = {lows}, also in single precision")
        given = tuple(map(str, range(D))) if names is None else names
        proper = not isinstance(given, str) and all(isinstance(name, str) for name in given)
        require(proper and len(set(given)) == len(given) == D, "names", names, f"{D} different names")
        object.__setattr__(self, "low", lows)
        object.__setattr__(self, "high", highs)
        object.__setattr__(self, "names", tuple(given))

    @property
    def dim(self) -> int:
        """Number of axes D."""
        return len(self.low)

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and the highest values, `[D]` each, of the type and on the device of `like`."""
        low, high = (
            torch.tensor(bound, dtype=like.dtype, device=like.device) for bound in (self.low, self.high)
        )
        return low, high

    def contains(self, actions: Tensor) -> Tensor:
        """Which of actions `[…, D]` are inside, or on the boundary, bool `[…]`."""
        low, high = self.bounds(actions)
        inside: Tensor = ((actions >= low) & (actions <= high)).all(-1)
        return inside

    def to_units(self, actions: Tensor) -> Tensor:
        """Actions `[…, D]` as numbers from -1, at the lower end of an axis, to 1 at the upper."""
        low, high = self.bounds(actions)
        return (2 * actions - low - high) / (high - low)

    def from_units(self, units: Tensor) -> Tensor:
        """Numbers `[…, D]` as the actions that they stand for; what is beyond -1 or 1 is at that end."""
        low, high = self.bounds(units)
        return (low + (high - low) * (units + 1) / 2).clamp(low, high)

    def uniform(self, like: Tensor) -> Any:
        """The uniform distribution over the box."""
        return dist.Uniform(*self.bounds(like), validate_args=False).to_event(1)

    def probes(self, like: Tensor) -> Tensor:
        """A few actions that stand for all: the middle, then either end of every axis, `[2 D + 1, D]`."""
        low, high = self.bounds(like)
        middle = (low + high) / 2
        ends = [
            torch.where(torch.eye(self.dim, device=like.device).bool(), end, middle) for end in (low, high)
        ]
        return torch.cat([middle[None], torch.stack(ends, 1).flatten(0, 1)])

    @property
    def probe_names(self) -> tuple[str, ...]:
        """What to call the probes."""
        return ("middle", *(f"{name} {end}" for name in self.names for end in ("lowest", "highest")))


class Reshaped(dist.TorchDistribution):
    """A distribution over actions `[B, D]`, of Pyro or of torch, with other axes in the place of B."""

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, base: torch.distributions.Distribution, batch_shape: Sequence[int]) -> None:
        self.base = base
        super().__init__(torch.Size(batch_shape), base.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the distribution."""
        return self.base.support

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """A draw `[…, D]`."""
        shape = (*sample_shape, *self.batch_shape, *self.event_shape)
        return self.base.sample(sample_shape).to(torch.get_default_dtype()).reshape(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density of actions `[…, D]`."""
        values = value.reshape(*self.base.batch_shape, *self.event_shape)
        return self.base.log_prob(values).reshape(self.batch_shape)


def _numbers(argument: str, values: Any) -> tuple[float, ...]:
    try:
        given = values.detach().cpu() if isinstance(values, Tensor) else values
        numbers = tuple(map(float, np.asarray(given, dtype=float).reshape(-1)))
    except (TypeError, ValueError) as error:
        raise invalid(argument, values, "a number, or a number for every axis") from error
    require(bool(numbers) and all(map(math.isfinite, numbers)), argument, values, "finite numbers")
    return numbers


def require_finite_actions(model: CPOMDP, who: str) -> None:
    """Raise unless a model has finitely many actions.

    Raises:
        UnsupportedModelError: Naming who needs that.
    """
    if model.box is not None:
        name = type(model).__name__
        raise UnsupportedModelError(f"{who}: {name} has continuous actions; only a list of them is served")


def as_actions(argument: str, values: Any, model: CPOMDP) -> Tensor:
    """Actions in a form that callers pass: indices `[…]` out of numbers or names, or real vectors `[…, D]`.

    Whether all of them are actions of the model is not looked at; see `require_actions`.
    """
    box = model.box
    if box is None:
        return as_indices(argument, values, model.action_names).to(model.device)
    actions = as_tensor(argument, values).to(model.device, torch.get_default_dtype())
    if box.dim == 1 and not actions.dim():
        actions = actions[None]
    require(actions.shape[-1:] == (box.dim,), argument, values, f"{box.dim} numbers on the last axis")
    return actions


def require_actions(argument: str, actions: Tensor, model: CPOMDP, where: Tensor | None = None) -> None:
    """Raise unless actions, `[…]` or `[…, D]`, are actions of a model, wherever they count."""
    box = model.box
    if box is None:
        names = model.action_names
        proper, expected = (
            (actions >= 0) & (actions < len(names)),
            f"0 to {len(names) - 1} ({', '.join(names)})",
        )
    else:
        proper, expected = box.contains(actions), f"within {box}"
    bad = ~proper if where is None else ~proper & where
    if bool(bad.any()):
        at = f" at {place_of(bad)}" if bad.dim() else ""
        raise invalid(argument, f"{actions[bad][0].tolist()}{at}", expected)


def probes(model: CPOMDP) -> Tensor:
    """All actions, `[A]`; of continuous ones, a few that stand for all, `[A, D]`."""
    if model.box is None:
        return torch.arange(model.num_actions, device=model.device)
    return model.box.probes(torch.zeros((), device=model.device))


def probe_names(model: CPOMDP) -> tuple[str, ...]:
    """What to call the `probes` of a model."""
    return model.action_names if model.box is None else model.box.probe_names


def some_action(model: CPOMDP, shape: Sequence[int] = ()) -> Tensor:
    """The first of the `probes`, for a batch of a shape: `[*shape]`, or `[*shape, D]`."""
    action = probes(model)[0]
    return action.expand((*shape, *action.shape))


def random_actions(model: CPOMDP, shape: Sequence[int]) -> Tensor:
    """Actions drawn uniformly, `[*shape]`, or `[*shape, D]` of continuous ones."""
    if model.box is None:
        return torch.randint(model.num_actions, tuple(shape), device=model.device)
    drawn: Tensor = model.box.uniform(torch.zeros((), device=model.device)).sample(tuple(shape))
    return drawn
