"""The constants of a model that are to be learned: its `PyroParam`s, by name."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import biject_to

from cpomdp_ppl.errors import invalid, require, require_model
from cpomdp_ppl.rng import isolated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cpomdp_ppl.model import CPOMDP


@dataclass(frozen=True, eq=False)
class Learnable:
    """A `PyroParam` of a model.

    Attributes:
        name: Name with the names of the modules that it is in, as in Pyro's param store: `sensor.accuracy`.
        value: Value on its own scale, with a graph to the leaf that Pyro keeps.
        constraint: Where the value may lie.
    """

    name: str
    value: Tensor
    constraint: Any


def learnable(model: CPOMDP) -> list[Learnable]:
    """The `PyroParam`s of a model, with the values that its programs see now.

    Raises:
        ValueError: If there are none.

    Examples:
        >>> from torch.distributions import constraints
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark(dark_variance=PyroParam(torch.tensor(5.0), constraints.positive))
        >>> [(one.name, round(one.value.item(), 3)) for one in learnable(model)]
        [('dark_variance', 5.0)]
    """
    require_model(model)
    found = []
    with isolated(0), torch.enable_grad(), model.running():
        for prefix, module in model.named_modules():
            if not isinstance(module, PyroModule):
                continue
            for name in _names(module):
                value = getattr(module, name)  # the first access makes a decorated one
                constraint, _ = module._pyro_params[name]
                found.append(Learnable(f"{prefix}.{name}" if prefix else name, value, constraint))
    none = f"{type(model).__name__} without any"
    require(bool(found), "model", none, "a CPOMDP with constants that are a `PyroParam`, to be learned")
    return found


def _names(module: PyroModule) -> list[str]:
    decorated = [n for c in type(module).__mro__ for n, v in vars(c).items() if isinstance(v, PyroParam)]
    return list(dict.fromkeys([*module._pyro_params, *decorated]))


def with_parameters(model: CPOMDP, values: Mapping[str, Any]) -> CPOMDP:
    """A copy of a model in which parameters are constants of given values.

    They are no longer `PyroParam`s, so nothing in Pyro's param store can take their place, and a solver that
    is given the copy does not move them. Parameters that are not named stay what they are.

    Args:
        model: The CPOMDP, which is left alone.
        values: Numbers or tensors by parameter, on its own scale: an estimate, or one draw of a posterior.

    Raises:
        ValueError: On names that are none of a parameter, and on values of another shape or out of bounds.

    Examples:
        >>> from torch.distributions import constraints
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark(dark_variance=PyroParam(torch.tensor(5.0), constraints.positive))
        >>> with_parameters(model, {"dark_variance": 8.0}).dark_variance
        tensor(8.)
    """
    known = {one.name: one for one in learnable(model)}
    require_names("values", values, known)
    fixed = {name: proper_value("values", known[name], value) for name, value in values.items()}
    copy = constant_copy(model, fixed)
    for (module, name), value in zip(_places(copy, fixed), fixed.values(), strict=True):
        if hasattr(type(module), name):  # a decorated one would hide a buffer
            vars(module)[name] = value
        else:
            module.register_buffer(name, value)
    return copy


def set_constants(copy: CPOMDP, values: Mapping[str, Tensor]) -> None:
    """Give a `constant_copy` tensors in place of its parameters, which may have a graph."""
    for (module, name), value in zip(_places(copy, values), values.values(), strict=True):
        vars(module)[name] = value  # a PyroModule does not intercept what is in its dict


def constant_copy(model: CPOMDP, names: Iterable[str]) -> CPOMDP:
    """A copy without the named parameters, for `set_constants` to fill."""
    copy = deepcopy(model)
    for module, name in _places(copy, names):
        # By hand: `delattr` of a module that has run would delete from Pyro's param store.
        module._pyro_params.pop(name)
        module._parameters.pop(f"{name}_unconstrained")
    return copy


def _places(model: CPOMDP, names: Iterable[str]) -> Iterator[tuple[Any, str]]:
    for path in names:
        prefix, _, name = path.rpartition(".")
        yield model.get_submodule(prefix), name


def require_names(argument: str, given: Any, known: Mapping[str, Any]) -> None:
    """Raise unless `given` is a mapping from names that are known."""
    require(hasattr(given, "items"), argument, given, "a mapping from parameters")
    for name in given:
        if name not in known:
            raise invalid(argument, name, f"parameters of the model, {sorted(known)}")


def proper_value(argument: str, parameter: Learnable, value: Any) -> Tensor:
    """A value for a parameter as a tensor of its type; raises on another shape, or out of bounds."""
    like = parameter.value
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device).detach().clone()
    where = f"{argument}['{parameter.name}']"
    require(tensor.shape == like.shape, where, list(tensor.shape), f"a value of shape {list(like.shape)}")
    inside = bool(torch.isfinite(tensor).all()) and bool(parameter.constraint.check(tensor).all())
    require(inside, where, tensor.tolist(), f"a finite value that is {parameter.constraint}")
    return tensor


class Unconstrained:
    """All parameters as one vector u of real numbers, by Pyro's bijections to their constraints.

    Args:
        parameters: The parameters.
        initial: Values to start from, for some or all of them, in place of those that they have.

    Attributes:
        start: Where the parameters are now, float64 `[P]`.
        labels: A name for every number on the constrained scale.
    """

    def __init__(self, parameters: Sequence[Learnable], initial: Mapping[str, Any] | None = None) -> None:
        # Without the graph, and what else Pyro ties to a value: this is sent to other processes, too.
        self.parameters = [replace(one, value=one.value.detach()) for one in parameters]
        known = {one.name: one for one in self.parameters}
        require_names("initial", initial or {}, known)
        self.transforms, starts, self.labels = [], [], []
        self.shapes = []
        for one in self.parameters:
            try:
                transform: Any = biject_to(one.constraint)
            except NotImplementedError:
                kind = f"a constraint that has a bijection to the reals, for '{one.name}'"
                raise invalid("model", str(one.constraint), kind) from None
            given = (initial or {}).get(one.name, one.value)
            value = proper_value("initial", one, given).double()
            u = transform.inv(value)
            require(bool(torch.isfinite(u).all()), "initial", value.tolist(), f"an inner '{one.name}'")
            self.transforms.append(transform)
            self.shapes.append(u.shape)
            starts.append(u.reshape(-1))
            self.labels += [f"{one.name}{list(index) or ''}" for index in _indices(value.shape)]
        self.start = torch.cat(starts)

    def __len__(self) -> int:
        return len(self.start)

    def _parts(self, u: Tensor) -> Iterator[tuple[Learnable, Any, Tensor]]:
        pieces = u.split([shape.numel() for shape in self.shapes])
        for one, transform, shape, piece in zip(
            self.parameters, self.transforms, self.shapes, pieces, strict=True
        ):
            yield one, transform, piece.reshape(shape)

    def values(self, u: Tensor) -> dict[str, Tensor]:
        """The parameters at u, each on its own scale, float64."""
        return {one.name: transform(part) for one, transform, part in self._parts(u)}

    def vector(self, u: Tensor) -> Tensor:
        """The parameters at u as one vector."""
        return torch.cat([value.reshape(-1) for value in self.values(u).values()])

    def log_jacobian(self, u: Tensor) -> Tensor:
        """`log |dθ / du|`."""
        terms = [
            transform.log_abs_det_jacobian(part, transform(part)).sum()
            for _, transform, part in self._parts(u)
        ]
        return torch.stack(terms).sum()


def _indices(shape: torch.Size) -> list[tuple[int, ...]]:
    return [tuple(index) for index in torch.ones(shape).nonzero().tolist()] if shape else [()]
