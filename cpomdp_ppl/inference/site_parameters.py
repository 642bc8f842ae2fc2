"""Parameters of sample sites that make no sense, which torch would silently compute with."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from cpomdp_ppl.actions import probes
from cpomdp_ppl.errors import DensityError, ModelError
from cpomdp_ppl.handlers import Batched, base_of, is_deterministic, mask_of
from cpomdp_ppl.inference.density import unmasked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpomdp_ppl.model import CPOMDP


def require_parameters(program: str, name: str, fn: Any, mask: Tensor | bool = True) -> None:
    """Raise if a parameter makes no sense where the site counts: torch would compute with it."""
    for parameter, value, proper in parameters_of(base_of(fn)):
        if not bool(proper.all()):
            if isinstance(mask, Tensor):
                mask = mask.reshape(mask.shape + (1,) * (fn.event_dim - base_of(fn).event_dim))
            if bool((proper | ~torch.as_tensor(mask)).all()):
                continue
            raise DensityError(fault(program, name, fn, parameter, value, proper))


def fault(program: str, name: str, fn: Any, parameter: str, value: Tensor, proper: Tensor) -> str:
    """Say which site has which improper parameter, and its first improper value."""
    first = value[tuple((~proper).nonzero()[0])].tolist()
    return f"{program}: site '{name}' ({type(base_of(fn)).__name__}) has {parameter} = {first}"


def parameters_of(fn: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name and value of every parameter that a distribution was made with, and where it makes sense."""
    fn = getattr(fn, "_categorical", fn)
    if isinstance(fn, torch.distributions.TransformedDistribution):
        yield from parameters_of(base_of(fn.base_dist))
    for parameter, constraint in fn.arg_constraints.items():
        value = vars(fn).get(parameter)
        if not isinstance(value, Tensor):
            continue
        if constraint is constraints.positive:  # 0 is as good as no noise
            yield parameter, value, value >= 0
        elif constraints.is_dependent(constraint):
            yield parameter, value, ~value.isnan()
        elif constraint.event_dim > 1:  # a matrix, which torch has factorised
            yield parameter, value, ~value.flatten(-2).isnan().any(-1)
        else:
            yield parameter, value, constraint.check(value)


def require_proper_parameters(model: CPOMDP) -> None:
    """Run the programs at some draws, and raise for parameters of sites before torch draws with them."""
    plates = (1,) * model.max_plate_nesting
    context = torch.arange(model.num_contexts, device=model.device).reshape(-1, 1, 1, *plates)
    action = probes(model)
    batch = Batched((model.num_contexts, len(action), 64), model.max_plate_nesting)
    action = action.reshape(1, -1, 1, *plates, *action.shape[1:])
    with torch.no_grad(), poutine.block(), model.running(), torch_errors_as_model_errors(model), batch:
        with _ProperParameters("initial"):
            state = model.initial(context)
        with _ProperParameters("observation"):
            model.percept(state, action, context)
        with _ProperParameters("transition"):
            model.transition(state, action, context)


@contextmanager
def torch_errors_as_model_errors(model: CPOMDP) -> Iterator[None]:
    """Raise a `ModelError` inside for what torch cannot compute or draw."""
    try:
        yield
    except RuntimeError as error:
        raise ModelError(type(model).__name__, [f"a program does not run: {error}"]) from error


class _ProperParameters(Messenger):
    def __init__(self, program: str) -> None:
        super().__init__()
        self.program = program

    def _pyro_sample(self, msg: Any) -> None:
        if not (site_is_subsample(msg) or is_deterministic(msg)):
            require_parameters(self.program, msg["name"], unmasked(msg["fn"]), mask_of(msg))
