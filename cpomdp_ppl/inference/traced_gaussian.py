"""The programs of a Gaussian model as expressions: sites become `loc + scale·ε`, or mean and covariance."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from cpomdp_ppl.actions import probes
from cpomdp_ppl.handlers import base_of, is_deterministic, mask_of
from cpomdp_ppl.inference.enumeration import Enumerated
from cpomdp_ppl.inference.gaussian import (
    GaussianSite,
    Reparameterised,
    Sensed,
    gaussian_site,
    is_discrete_site,
)
from cpomdp_ppl.inference.gaussian_belief import Coordinates, block_diagonal
from cpomdp_ppl.native.derivatives import derivatives
from cpomdp_ppl.native.expressions import PARTICLE, Graph, Untraceable, evaluate, inputs_of
from cpomdp_ppl.native.recording import Recorder
from cpomdp_ppl.native.tracing import ENGINE_AXES, Argument, Traced, argument, trace
from cpomdp_ppl.signature import read_signature

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.native.expressions import Expr
    from cpomdp_ppl.signature import Signature

STEPS_AHEAD = 3
"""Steps from the start after which programs are looked at: states have spread out by then."""

SAME_SLOPE = 1e-6
"""Relative difference that rounding may make between a derivative by torch and its expression."""

STOPS = ("detach", "detach_", "_set_grad_enabled")
"""Functions of torch that stop derivatives, which expressions do not show."""


@dataclass(frozen=True)
class GaussianProgram:
    """A program as a function of a point and of noise ε.

    Attributes:
        values: What it returns.
        slopes: Derivatives of these, by every number of the point and then by every ε; or none at all.
        checks: What must hold at every point.
        central: What must hold at the first of several points.
    """

    values: tuple[Expr, ...]
    slopes: tuple[tuple[Expr, ...], ...]
    checks: tuple[Expr, ...]
    central: tuple[Expr, ...] = ()


@dataclass(frozen=True)
class GaussianObservation:
    """The `observation` program as mean and covariance of what is seen.

    Attributes:
        program: Its values are the means.
        covariance: The covariance of the noise, row by row.
        visible: For every flag, whether that is seen.
    """

    program: GaussianProgram
    covariance: tuple[Expr, ...]
    visible: tuple[Expr, ...]


@dataclass(frozen=True)
class GaussianModel:
    """All programs of a model whose sites are Gaussian.

    Attributes:
        graph: Where the expressions are.
        dim: How many numbers a state has.
        initial_noise: How many numbers ε `initial` takes; one at least.
        transition_noise: How many `transition` takes.
        initial: The first state; its point is the noise.
        transition: The next state.
        reward: The reward.
        reward_noise: How many numbers ε it takes.
        reward_type: Its type.
        observation: What is observed after an action.
        first_observation: What is observed before the first; None for models that show nothing then.
        flag_of: For every number that is observed, which flag says whether it is.
    """

    graph: Graph
    dim: int
    initial_noise: int
    transition_noise: int
    initial: GaussianProgram
    transition: GaussianProgram
    reward: GaussianProgram
    reward_noise: int
    reward_type: torch.dtype
    observation: GaussianObservation
    first_observation: GaussianObservation | None
    flag_of: tuple[int, ...]


class _ProperScales(Messenger):
    """Note that the scale of every Gaussian site must be one where the site counts.

    Attributes:
        conditions: Each `[C, B, N]`.
    """

    def __init__(self, plate_axes: int) -> None:
        super().__init__()
        self.plate_axes = plate_axes
        self.conditions: list[Tensor] = []

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg):
            return
        fn, base = msg["fn"], base_of(msg["fn"])
        if isinstance(base, torch.distributions.Normal):
            proper = base.scale >= 0
        elif isinstance(base, torch.distributions.MultivariateNormal):
            proper = ~base._unbroadcasted_scale_tril.isnan().flatten(-2).any(-1)
        else:
            return
        reinterpreted = len(base.batch_shape) - len(fn.batch_shape)
        proper = proper.expand(base.batch_shape)
        proper = proper.flatten(-reinterpreted).all(-1) if reinterpreted else proper
        mask = mask_of(msg)
        proper = proper if mask is True else proper | ~torch.as_tensor(mask)
        proper = proper.reshape((1,) * (ENGINE_AXES + self.plate_axes - proper.dim()) + proper.shape)
        self.conditions.append(proper.flatten(ENGINE_AXES).all(-1) if self.plate_axes else proper)


class _NoStops(TorchFunctionMode):
    """Refuse what would stop a derivative."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in STOPS or (name == "__get__" and func == torch.Tensor.data.__get__):  # type: ignore[attr-defined]
            recorder = _get_current_dispatch_mode()
            tensors = [each for each in args if isinstance(each, Tensor)]
            if isinstance(recorder, Recorder) and (
                not tensors or any(map(_moves, map(recorder.of, tensors)))
            ):
                raise Untraceable(f"a derivative is stopped ('{name.strip('_')}')")
        return func(*args, **(kwargs or {}))


def _moves(expressions: Any) -> bool:
    return any(e.level == PARTICLE for e in expressions.ravel())


class TracedSensed(Sensed):
    """Keeps mean and covariance of every site, and its mask; what was observed is an input.

    Attributes:
        visible: By site, where it is seen, `[C, B, N, *plates]`.
    """

    def __init__(
        self,
        values: dict[str, Tensor],
        flags: dict[str, Tensor],
        signature: Signature,
        batch_shape: torch.Size,
    ) -> None:
        own = next(len(site.plates) for site in signature.observations.values())
        Enumerated.__init__(self, "observation", own)
        self.given, self.flags, self.signature, self.batch_shape = values, flags, signature, batch_shape
        self.means: list[Tensor] = []
        self.covariances: list[Tensor] = []
        self.visible: list[Tensor] = []

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg):
            return
        name = msg["name"]
        spec, value, seen = self.signature.observations[name], self.given[name], self.flags[name]
        if is_discrete_site(msg) or not value.is_floating_point():
            raise Untraceable(f"site '{name}' is discrete, and a kernel conditions on Gaussian sites alone")
        visible = torch.as_tensor(mask_of(msg))
        visible = visible.reshape((1,) * (seen.dim() - visible.dim()) + visible.shape)
        self.visible.append(visible.expand(*visible.shape[:ENGINE_AXES], *spec.plates))
        site = gaussian_site("observation", msg, len(spec.plates))
        mean = site.loc.expand(self.batch_shape + spec.shape)
        self.means.append(mean.reshape(*self.batch_shape, -1))
        self.covariances.append(self._covariance(site, spec.shape))
        event = (1,) * (value.dim() - seen.dim())
        msg["value"] = torch.where(seen.reshape(seen.shape + event), value, mean)

    def scale_of(self, site: GaussianSite) -> Tensor | None:
        """The scale of a site's noise, which is not differentiated."""
        return site.scale


class _GaussianTracing:
    """One model, in double precision, being traced.

    Args:
        model: The model.
        given: Signature of the model as it was given, with dependencies.
        parameters: Its learned constants.
        differentiate: Whether to differentiate programs.
    """

    def __init__(
        self,
        model: CPOMDP,
        given: Signature,
        parameters: Sequence[Argument],
        graph: Graph,
        differentiate: bool,
    ) -> None:
        self.model, self.parameters, self.graph, self.differentiate = model, parameters, graph, differentiate
        self.given = given
        self.signature = replace(read_signature(model), dependencies=given.dependencies)
        self.coordinates = Coordinates(model, self.signature)
        self.plates = model.max_plate_nesting
        self.context = self._axis(0, torch.tensor([0, model.num_contexts - 1]))
        self.actions = probes(model)
        self.action = self._axis(1, self.actions[[0, -1]])
        with Reparameterised("initial", self.plates) as initial:
            state = model.initial(self.context)
        state = self.signature.broadcast(state, torch.Size((2, 1, 1)))
        with Reparameterised("transition", self.plates) as transition:
            model.transition(state, self.action, self.context)
        self.initial_noise, self.transition_noise = max(initial.num_noise, 1), transition.num_noise
        self.point = self._some_point()

    def _axis(self, axis: int, values: Tensor) -> Tensor:
        """Two contexts, `[2]`, or two actions, `[2]` or `[2, D]`, along one of the engine's axes."""
        shape = [1] * (ENGINE_AXES + self.plates)
        shape[axis] = 2
        return values.to(self.model.device).reshape(*shape, *values.shape[1:])

    def _noise(self, size: int) -> Tensor:
        return torch.randn(2, 2, 2, size, dtype=torch.float64)

    def _some_point(self) -> Tensor:
        """A state after some steps, as a vector."""
        x, A = self._started(self.context, self._noise(self.initial_noise)), len(self.actions)
        for step in range(min(STEPS_AHEAD, self.model.horizon - 1)):
            action = self._axis(1, self.actions[[step % A, (step + 1) % A]])
            x = self._moved(action, self.context, x, self._noise(self.transition_noise))
        return x.contiguous()

    def _started(self, context: Tensor, noise: Tensor) -> Tensor:
        with Reparameterised("initial", self.plates, noise):
            return self.coordinates.vector(self.model.initial(context), noise.shape[:-1])

    def _moved(self, action: Tensor, context: Tensor, x: Tensor, noise: Tensor) -> Tensor:
        with Reparameterised("transition", self.plates, noise if self.transition_noise else None):
            state = self.model.transition(self.coordinates.state(x), action, context)
        return self.coordinates.vector(state, x.shape[:-1])

    # ------------------------------------------------------------------------------------------- arguments

    def _given_numbers(self) -> list[Argument]:
        """Action and context."""
        c = argument(self.graph, "context", 0, self.context, [(0, self.model.num_contexts - 1)])
        limits = [(0, len(self.actions) - 1)] if self.model.box is None else None
        return [argument(self.graph, "action", 0, self.action, limits), c]

    def _points(self, *noise: Tensor) -> list[Argument]:
        named = zip(("state", *["noise"] * len(noise)), (self.point, *noise), strict=True)
        return [argument(self.graph, what, 0, values) for what, values in named]

    def _observed(self) -> list[Argument]:
        """Values, in the types of the model as it was given, and flags of every site."""
        values, flags, first, flag = [], [], 0, 0
        for spec in self.given.observations.values():
            value = torch.randn(1, 2, 1, *spec.shape).to(spec.dtype)
            values.append(argument(self.graph, "value", first, value))
            seen = torch.tensor([True, False]).reshape(1, 2, 1, *[1] * len(spec.plates))
            flags.append(argument(self.graph, "flag", flag, seen.expand(1, 2, 1, *spec.plates).contiguous()))
            first, flag = first + spec.shape.numel(), flag + spec.plates.numel()
        return [*values, *flags]

    # -------------------------------------------------------------------------------------------- programs

    def _trace(
        self, method: str, function: Callable[..., list[Tensor]], arguments: Sequence[Argument], size: int
    ) -> tuple[GaussianProgram, tuple[Expr, ...]]:
        """A function of points whose first `size` numbers are values, and what else it returns.

        The last it returns are conditions at the first point, as many as its scales have.
        """
        scales: list[_ProperScales] = []

        def program(*given: Tensor) -> list[Tensor]:
            with _ProperScales(self.plates) as proper:
                results = function(*given)
            scales.append(proper)
            return [*results, *proper.conditions]

        with _NoStops() if self.differentiate else nullcontext():
            traced = trace(self.graph, method, program, arguments, self.parameters)
        if traced.noise:
            raise Untraceable(f"{method}: random numbers are drawn that are no sample site")
        count = len(traced.outputs) - len(scales[-1].conditions)
        values, others, central = traced.outputs[:size], traced.outputs[size:count], traced.outputs[count:]
        return self._differentiated(method, function, arguments, traced, values, central), others

    def _differentiated(
        self,
        method: str,
        function: Callable[..., list[Tensor]],
        arguments: Sequence[Argument],
        traced: Traced,
        values: tuple[Expr, ...],
        central: tuple[Expr, ...],
    ) -> GaussianProgram:
        checks, slopes = [check for check, _ in traced.checks], []
        moving = [each for each in arguments if any(e.level == PARTICLE for e in each.expressions.ravel())]
        if self.differentiate and method != "reward":
            inputs = [e for each in moving for e in each.expressions.ravel()]
            slopes = derivatives(self.graph, values, inputs, checks)
            self._compare(method, function, arguments, slopes)
        return GaussianProgram(values, tuple(map(tuple, slopes)), tuple(checks), central)

    def _compare(
        self,
        method: str,
        function: Callable[..., list[Tensor]],
        arguments: Sequence[Argument],
        slopes: Sequence[Sequence[Expr]],
    ) -> None:
        """Raise unless derivatives are those that torch has, wherever it has any."""
        tensors = [each.values.clone() for each in arguments]
        moving = [k for k, each in enumerate(arguments) if each.expressions.ravel()[0].level == PARTICLE]
        with torch.enable_grad():
            by = [tensors[k].requires_grad_() for k in moving]
            values = function(*tensors)[0]
            found = [_gradients(values[..., k], by) for k in range(values.shape[-1])]  # m times [2, 2, 2, n]
        used = inputs_of([e for row in slopes for e in row])
        for place in np.ndindex(2, 2, 2):
            inputs = _inputs_at(place, zip(tensors, arguments, strict=True), used)
            inputs |= _inputs_at((), ((each.values, each) for each in self.parameters), used)
            for row, expected in zip(slopes, found, strict=True):
                computed = torch.tensor(
                    [float(x) for x in evaluate(self.graph, row, inputs)], dtype=torch.float64
                )
                theirs = expected[place]
                both = computed.isfinite() & theirs.isfinite()
                if not torch.allclose(computed[both], theirs[both], rtol=SAME_SLOPE, atol=SAME_SLOPE):
                    raise Untraceable(
                        f"{method}: its derivative is not that of torch; is one stopped, or its own?"
                    )

    def initial(self) -> GaussianProgram:
        """The first state, whose point is the noise."""

        def program(context: Tensor, noise: Tensor) -> list[Tensor]:
            return [self._started(context, noise)]

        noise = argument(self.graph, "noise", 0, self._noise(self.initial_noise))
        arguments = [self._given_numbers()[1], noise]
        return self._trace("initial", program, arguments, self.coordinates.dim)[0]

    def transition(self) -> GaussianProgram:
        """The next state."""

        def program(action: Tensor, context: Tensor, x: Tensor, noise: Tensor | None = None) -> list[Tensor]:
            return [self._moved(action, context, x, x if noise is None else noise)]

        noise = [self._noise(self.transition_noise)] if self.transition_noise else []
        arguments = [*self._given_numbers(), *self._points(*noise)]
        return self._trace("transition", program, arguments, self.coordinates.dim)[0]

    def reward(self) -> GaussianProgram:
        """The reward; on arrival, a function of the noise of the transition, too."""
        arrives = self.model.pays_on_arrival
        noise = [self._noise(self.transition_noise)] if arrives and self.transition_noise else []

        def program(action: Tensor, context: Tensor, x: Tensor, noise: Tensor | None = None) -> list[Tensor]:
            arrival: tuple[Any, ...] = ()
            if arrives:
                moved = self._moved(action, context, x, x if noise is None else noise)
                arrival = (self.coordinates.state(moved),)
            reward = self.model.reward(self.coordinates.state(x), action, context, *arrival)
            if not isinstance(reward, Tensor):
                raise Untraceable("it returns no tensor")
            reward = reward if reward.is_floating_point() else reward.to(torch.get_default_dtype())
            return [reward.expand(*x.shape[:-1], *[1] * self.plates)]

        return self._trace("reward", program, [*self._given_numbers(), *self._points(*noise)], 1)[0]

    def observation(self, first: bool) -> GaussianObservation:
        """What is observed."""
        names, specs = list(self.given.observations), self.given.observations.values()
        size, n = sum(spec.shape.numel() for spec in specs), len(names)

        def program(action: Tensor, context: Tensor, x: Tensor, *observed: Tensor) -> list[Tensor]:
            values, flags = (dict(zip(names, each, strict=True)) for each in (observed[:n], observed[n:]))
            with TracedSensed(values, flags, self.signature, x.shape[:-1]) as sensed:
                self.model.percept(self.coordinates.state(x), None if first else action, context)
            covariance = block_diagonal(sensed.covariances)
            means = torch.cat(sensed.means, -1)
            return [means.double(), covariance.double().flatten(-2), *sensed.visible]

        arguments = [*self._given_numbers(), *self._points(), *self._observed()]
        traced, others = self._trace("observation", program, arguments, size)
        covariance, visible = others[: size * size], others[size * size :]
        if any(e.level == PARTICLE for e in visible):
            raise Untraceable("observation: whether something is seen depends on the state")
        return GaussianObservation(traced, covariance, visible)

    def flag_of(self) -> tuple[int, ...]:
        """For every number that is observed, which flag says whether it is."""
        found, first = [], 0
        for spec in self.given.observations.values():
            cells, event = spec.plates.numel(), spec.shape[len(spec.plates) :].numel()
            found += [first + cell for cell in range(cells) for _ in range(event)]
            first += cells
        return tuple(found)


def _gradients(value: Tensor, by: Sequence[Tensor]) -> Tensor:
    """The derivatives of one value everywhere, side by side."""
    found: Sequence[Tensor | None] = [None] * len(by)
    if value.requires_grad:
        found = torch.autograd.grad(value.sum(), by, allow_unused=True, retain_graph=True)
    pairs = zip(by, found, strict=True)
    return torch.cat([torch.zeros_like(x) if each is None else each for x, each in pairs], -1)


def _inputs_at(place: tuple[int, ...], given: Any, used: set[tuple[str, int]]) -> dict[Any, Any]:
    """The values of inputs at a place along the engine's axes."""
    inputs: dict[Any, Any] = {}
    for tensor, each in given:
        sizes = (2,) * len(place)
        here = tensor.detach().expand((*sizes, *tensor.shape[len(place) :]))[place].reshape(-1).tolist()
        inputs |= {e.value: x for e, x in zip(each.expressions.ravel(), here, strict=True) if e.value in used}
    return inputs


def trace_gaussian(
    model: CPOMDP, given: Signature, parameters: Sequence[Argument], graph: Graph, differentiate: bool
) -> GaussianModel:
    """Write all programs of a Gaussian model out, inside `inference_scope` and `double_precision`.

    Args:
        model: The model in double precision.
        given: Signature of the model as it was given, with dependencies.
        parameters: Learned constants of the model.
        graph: Where to make expressions.
        differentiate: Whether derivatives are needed.

    Raises:
        Untraceable: If that cannot be done; the message says which method and line stand in the way.
        UnsupportedModelError: If a site or state is not Gaussian.
    """
    tracing = _GaussianTracing(model, given, parameters, graph, differentiate)
    if tracing.coordinates.dtype != torch.float64:
        raise Untraceable(f"the state is of {tracing.coordinates.dtype}")
    reward = tracing.reward()
    return GaussianModel(
        graph=graph,
        dim=tracing.coordinates.dim,
        initial_noise=tracing.initial_noise,
        transition_noise=tracing.transition_noise,
        initial=tracing.initial(),
        transition=tracing.transition(),
        reward=reward,
        reward_noise=tracing.transition_noise if model.pays_on_arrival else 0,
        reward_type=torch.float32 if reward.values[0].kind == "f32" else torch.float64,
        observation=tracing.observation(first=False),
        first_observation=tracing.observation(first=True) if model.initial_observation else None,
        flag_of=tracing.flag_of(),
    )
