"""Which engine runs a model's programs: compiled kernels where they can be traced, else Pyro itself."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import numpy as np
import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cpomdp_ppl.actions import some_action
from cpomdp_ppl.errors import CompilerError, UnsupportedModelError, require
from cpomdp_ppl.handlers import Batched
from cpomdp_ppl.inference.backend import inference_scope, read_with_dependencies
from cpomdp_ppl.native.expressions import KIND_OF, Untraceable
from cpomdp_ppl.native.guard import Guard, Unguardable
from cpomdp_ppl.native.operations import array
from cpomdp_ppl.native.tracing import Argument
from cpomdp_ppl.native.watching import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Sequence

    from torch.nn import Module

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.native.expressions import Graph
    from cpomdp_ppl.signature import Signature

Kernel = TypeVar("Kernel")

ENGINES = ("auto", "native", "eager")

log = logging.getLogger("cpomdp_ppl.native")


def require_engine(engine: Any) -> None:
    """Raise unless this is the name of an engine."""
    require(engine in ENGINES, "engine", engine, f"one of {list(ENGINES)}")


@dataclass(frozen=True)
class Parameter:
    """A learned constant, which is an input of kernels.

    Attributes:
        module: Gives the module that it belongs to, without keeping it alive; None for one that is in Pyro's
            param store alone.
        key: Its name there.
        stored: Its name in the param store, which is asked first; None if it is not asked.
    """

    module: ref[Module] | None
    key: str
    stored: str | None

    def tensor(self) -> Tensor | None:
        """Its present value, without the constraint; None if it is gone."""
        found = None if self.stored is None else pyro.get_param_store()._params.get(self.stored)
        module = None if self.module is None else self.module()
        return found if found is not None or module is None else module._parameters.get(self.key)


class Parameters:
    """All learned constants of a model.

    Args:
        model: The model.
        known: The names that the caller's param store knows.
        asked: The names that programs ask it for.

    Attributes:
        found: The constants that kernels take as inputs.
        missing: Names that programs ask the param store for, and that it does not know yet.
    """

    def __init__(self, model: CPOMDP, known: frozenset[str], asked: Collection[str]) -> None:
        self.found: list[Parameter] = []
        of_modules = set()
        for name, module in model.named_modules():
            constrained = getattr(module, "_pyro_params", {})
            for key, value in module._parameters.items():
                plain = key.removesuffix("_unconstrained")
                stored = f"{name}.{plain}".lstrip(".") if plain in constrained else None
                of_modules.add(f"{name}.{plain}".lstrip("."))
                if value is not None:
                    self.found.append(Parameter(ref(module), key, stored))
        # Pyro also keeps the parameters of plain modules, as "layer$$$weight", but they use their own.
        others = {name for name in asked if "$$$" not in name} - of_modules
        self.found += [Parameter(None, name, name) for name in sorted(known & others)]
        self.missing = sorted(others - known)
        # What shares a parameter's memory would not go with one that takes its place.
        self._shared = _is_memory_shared(model, [each.tensor() for each in self.found])
        self._shapes = self._seen()

    def _seen(self) -> list[Any]:
        return [
            None if tensor is None else (tensor.shape, tensor.dtype, tensor.data_ptr() if self._shared else 0)
            for tensor in (each.tensor() for each in self.found)
        ]

    def hold(self) -> bool:
        """Whether they are still the same ones, whatever their values."""
        if self.missing and not pyro.get_param_store()._params.keys().isdisjoint(self.missing):
            return False
        return not self.found or self._seen() == self._shapes

    def arguments(self, graph: Graph) -> list[Argument]:
        """As inputs `("param", k)` of programs."""
        arguments, first = [], 0
        for each in self.found:
            tensor = each.tensor()
            if tensor is None or not (tensor.is_floating_point() and tensor.dtype in KIND_OF):
                raise Untraceable(f"the parameter '{each.key}' is not made of real numbers that kernels know")
            kind = KIND_OF[tensor.dtype]
            names = [graph.input("param", first + k, kind) for k in range(tensor.numel())]
            arguments.append(Argument(tensor.detach(), array(names, tuple(tensor.shape))))
            first += tensor.numel()
        return arguments

    def prior(self, model: CPOMDP) -> Tensor:
        """The model's prior over contexts, which may be learned, too."""
        if "context_prior" not in model._pyro_params:
            return model.prior().detach()
        with inference_scope(model, 0):  # where the param store is asked first
            return model.prior().detach()

    def values(self) -> np.ndarray[Any, Any]:
        """Their present values, one after the other, in float64."""
        tensors = [each.tensor() for each in self.found]
        flat = [tensor.detach().reshape(-1).double() for tensor in tensors if tensor is not None]
        return torch.cat(flat).numpy() if flat else np.zeros(0)


def _is_memory_shared(model: CPOMDP, parameters: Sequence[Tensor | None]) -> bool:
    """Whether two parameters, or a parameter and another tensor of a model, lie in the same memory."""
    places = [tensor.untyped_storage().data_ptr() for tensor in parameters if tensor is not None]
    others = [
        tensor.untyped_storage().data_ptr()
        for module in model.modules()
        for tensor in (*module._buffers.values(), *tree_leaves(vars(module)))
        if isinstance(tensor, Tensor) and not isinstance(tensor, torch.nn.Parameter)
    ]
    return len(set(places)) < len(places) or not set(places).isdisjoint(others)


@dataclass(frozen=True)
class _Entry:
    """What became of an attempt to compile a model: a kernel, or why there is none."""

    definition: tuple[Any, ...]
    guard: Guard | None = None
    parameters: Parameters | None = None
    kernel: Any = None
    refusal: Callable[[], Exception] | None = None  # an exception would keep its frames alive, and the model

    def holds(self, model: CPOMDP) -> bool:
        return (
            self.definition == _definition(model)
            and (self.guard is None or self.guard.holds())
            and (self.parameters is None or self.parameters.hold())
        )


def _definition(model: CPOMDP) -> tuple[Any, ...]:
    """What a kernel is made for, though no program might read it."""
    return (
        *(model.num_contexts, model.box or model.num_actions, model.states),
        *(model.max_plate_nesting, model.initial_observation),
    )


_entries: dict[int, tuple[ref[CPOMDP], dict[Any, _Entry]]] = {}
"""By the identity of models, which may be equal without being the same."""

_said: set[tuple[str, str]] = set()


def kernel_for(
    model: CPOMDP,
    key: Hashable,
    build: Callable[[CPOMDP, Signature, Parameters], Kernel],
    retry: bool = False,
) -> Kernel:
    """The kernel of a model, made when it is first asked for, and again when the model has changed.

    Args:
        model: The model.
        key: What tells kernels of one model apart.
        build: Makes the kernel inside `inference_scope`, from the model, its signature with dependencies, and
            its learned constants. It raises `Untraceable` if it cannot.
        retry: Whether to try again what could not be compiled before.

    Raises:
        UnsupportedModelError: If the model has none; the message says which method and line stand in the way.
        CompilerError: If there is no compiler, or it fails.
    """
    known = _entries_of(model)
    entry = known.get(key)
    if entry is None or not entry.holds(model) or (retry and entry.refusal is not None):
        entry = known[key] = _attempt(model, build)
    if entry.refusal is not None:
        raise entry.refusal()
    kernel: Kernel = entry.kernel
    return kernel


def _entries_of(model: CPOMDP) -> dict[Any, _Entry]:
    number = id(model)
    found = _entries.get(number)
    if found is None or found[0]() is not model:
        found = _entries[number] = ref(model, lambda gone: _entries.pop(number, None) and None), {}
    return found[1]


def _attempt(model: CPOMDP, build: Callable[[CPOMDP, Signature, Parameters], Any]) -> _Entry:
    stored = frozenset(pyro.get_param_store()._params)
    definition, parameters = _definition(model), None
    try:
        if model.device.type != "cpu":
            raise Untraceable(f"kernels are for the processor, and it is on {model.device}")
        if any(getattr(module, "_pyro_samples", None) for module in model.modules()):
            raise Untraceable("a PyroSample is drawn once for all particles")
        with inference_scope(model, 0):
            with _Asked() as asked:
                signature = read_with_dependencies(model)
                run_once(model, signature)
            parameters = Parameters(model, stored, asked.names)
            if parameters.missing:
                raise Untraceable(f"the param store does not know {parameters.missing} yet")
            with Watch() as watch:
                kernel = build(model, signature, parameters)
            inputs = [id(tensor) for each in parameters.found if (tensor := each.tensor()) is not None]
            return _Entry(definition, watch.guard(inputs), parameters, kernel)
    except CompilerError as error:
        return _Entry(definition, refusal=partial(CompilerError, str(error)))
    except Exception as error:  # what a program raises, it will raise again where it is run as it is
        why = error if isinstance(error, Untraceable | Unguardable) else f"{type(error).__name__}: {error}"
        message = f"{type(model).__name__} cannot be compiled: {why}"
        return _Entry(definition, parameters=parameters, refusal=partial(UnsupportedModelError, message))


class _Asked(Messenger):
    """Notes the names of params that programs ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def _pyro_param(self, msg: Any) -> None:
        self.names.add(msg["name"])


def run_once(model: CPOMDP, signature: Signature) -> None:
    """Run all programs: what they keep for later, they have then kept, and a watch sees what they read."""
    shape = torch.Size((1, 1, 1))
    zero = torch.zeros((*shape, *[1] * model.max_plate_nesting), dtype=torch.long, device=model.device)
    with Batched(shape, model.max_plate_nesting):
        state = signature.broadcast(model.initial(zero), shape)
        a = some_action(model, zero.shape)
        after = signature.broadcast(model.transition(state, a, zero), shape)
        model.reward(after, a, zero, *(after,) if model.pays_on_arrival else ())
        for action in (a, None) if model.initial_observation else (a,):
            model.percept(after, action, zero)


def native_or_none(
    engine: str, model: CPOMDP, key: Hashable, build: Callable[[CPOMDP, Signature, Parameters], Kernel]
) -> Kernel | None:
    """The kernel that an engine runs a model with; None for the eager engine.

    `auto` means what the environment variable `CPOMDP_ENGINE` says. Without it, where there is no kernel, it
    falls back on the eager one, and says so once, in the log.
    """
    if engine == "auto":
        engine = os.environ.get("CPOMDP_ENGINE", "auto")
        require(engine in ENGINES, "CPOMDP_ENGINE", engine, f"one of {list(ENGINES)}")
    if engine == "eager":
        return None
    try:
        return kernel_for(model, key, build, retry=engine == "native")
    except (UnsupportedModelError, CompilerError) as error:
        if engine == "native":
            raise
        say_once(type(model).__name__, str(error))
        return None


def say_once(model: str, reason: str) -> None:
    """Log why a model runs eagerly, the first time."""
    if (model, reason) not in _said:
        _said.add((model, reason))
        log.info("%s (the eager engine runs it)", reason)
