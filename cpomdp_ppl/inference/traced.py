"""The programs of a model as expressions: sites become functions of noise, or densities of observations."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from cpomdp_ppl.actions import probes
from cpomdp_ppl.handlers import Batched, Recorded, expanded, is_deterministic, mask_of
from cpomdp_ppl.inference.density import log_density, unfit, unmasked
from cpomdp_ppl.inference.enumeration import Enumerated
from cpomdp_ppl.inference.observed import MOST_VALUES, Scored, marginalised, unexpanded
from cpomdp_ppl.inference.sampling import from_noise
from cpomdp_ppl.native.expressions import PARTICLE, Graph, Untraceable
from cpomdp_ppl.native.tracing import ENGINE_AXES, Argument, Traced, argument, trace
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.native.expressions import Bounds
    from cpomdp_ppl.signature import Signature
    from cpomdp_ppl.state import State

STEPS_AHEAD = 3
"""Steps from the start after which programs are looked at: states have spread out by then."""

WIDENINGS = 4
"""How often the bounds of whole numbers in the state are widened before they are given up."""


@dataclass(frozen=True)
class Site:
    """Where an observation site's values and flags are among all."""

    shape: torch.Size
    plates: torch.Size
    dtype: torch.dtype
    first_value: int
    first_flag: int


@dataclass(frozen=True)
class TracedObservation:
    """The `observation` program after an action, or before the first.

    Attributes:
        complete: The log-density, if everything was observed that others depend on, then masks.
        partial: Likewise, whatever was observed; None if that cannot be traced, or is never needed.
    """

    complete: Traced
    partial: Traced | None


@dataclass(frozen=True)
class TracedModel:
    """All programs of a model.

    Attributes:
        graph: Where the expressions are.
        leaves: Shape and type of every leaf of the state.
        sites: The observation sites.
        parents: The flags of sites that others depend on.
        initial: The first state.
        transition: The next state.
        reward: The reward.
        observation: What is observed after an action.
        first_observation: What is observed before the first; None for models that show nothing then.
        action_dim: How many numbers an action is; None for the index of one.
    """

    graph: Graph
    leaves: tuple[tuple[torch.Size, torch.dtype], ...]
    bounds: tuple[Bounds, ...]
    sites: dict[str, Site]
    parents: tuple[int, ...]
    initial: Traced
    transition: Traced
    reward: Traced
    observation: TracedObservation
    first_observation: TracedObservation | None
    action_dim: int | None
    num_values: int = field(default=0)
    num_flags: int = field(default=0)


class TracedDraws(Messenger):
    """Draw every site from noise that is noted.

    Attributes:
        conditions: What must be true of every particle, `[C, B, N]`.
    """

    def __init__(self, size: int, max_plate_nesting: int) -> None:
        super().__init__()
        self.shape = torch.Size((*[size] * ENGINE_AXES, *[1] * max_plate_nesting))
        self.conditions: list[Tensor] = []

    def _pyro_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg) and msg["value"] is None:
            msg["value"] = self.draw(unmasked(msg["fn"]))

    def draw(self, fn: Any) -> Tensor:
        """Draw for every particle."""
        base, event = fn, torch.Size()
        while isinstance(base, dist.Independent):
            event = base.base_dist.batch_shape[len(base.batch_shape) :] + event
            base = base.base_dist
        self._require_probabilities(base, len(event))
        batch = torch.broadcast_shapes(self.shape, fn.batch_shape)
        if isinstance(base, torch.distributions.MixtureSameFamily):
            return self._mixed(base, batch + event)
        why = unfit(base)
        if why is not None:
            raise Untraceable(why)
        value: Tensor | None = from_noise(base, batch + event)
        return expanded(fn, batch)() if value is None else value

    def _mixed(self, fn: Any, batch: torch.Size) -> Tensor:
        """Draw a component, and from all of them."""
        weights, components = fn.mixture_distribution, fn.component_distribution
        K, event = components.batch_shape[-1], components.event_shape
        self._require_probabilities(weights, 0)
        which = from_noise(weights, batch)
        draws = TracedDraws.draw(self._with_axis(K), components)
        index = which.reshape(*which.shape, 1, *[1] * len(event)).expand(*which.shape, 1, *event)
        return draws.gather(len(batch), index).squeeze(len(batch))

    def _with_axis(self, size: int) -> TracedDraws:
        inner = TracedDraws(self.shape[0], 0)
        inner.shape, inner.conditions = torch.Size((*self.shape, size)), self.conditions
        return inner

    def _require_probabilities(self, fn: Any, independent: int) -> None:
        if isinstance(fn, dist.Bernoulli | dist.Categorical):
            proper = (fn.probs >= 0) & (fn.probs <= 1)
            proper = proper.all(-1) if isinstance(fn, dist.Categorical) else proper
            missing = len(self.shape) + independent - proper.dim()
            proper = proper.reshape((1,) * missing + proper.shape)
            self.conditions.append(
                proper.flatten(ENGINE_AXES).all(-1) if proper.dim() > ENGINE_AXES else proper
            )


class TracedScores(Scored):
    """Score what was observed, which is an input, and keep the masks.

    Attributes:
        visible: By site, where it is seen.
    """

    def __init__(
        self,
        values: dict[str, Tensor],
        flags: dict[str, Tensor],
        signature: Signature,
        hidden: frozenset[str],
        draws: TracedDraws,
    ) -> None:
        own = next(len(site.plates) for site in signature.observations.values())
        Enumerated.__init__(self, "observation", own)
        self.values, self.flags, self.signature, self.hidden = values, flags, signature, hidden
        self.left = MOST_VALUES  # of all sites that may be hidden, though seldom all are
        self.draw = lambda name, fn: (draws.draw(fn), torch.zeros(()))
        self.log_prob: Tensor | None = None
        self.visible: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg):
            return
        name, fn = msg["name"], unmasked(msg["fn"])
        spec, value, seen = self.signature.observations[name], self.values[name], self.flags[name]
        visible = unexpanded(torch.as_tensor(mask_of(msg)))
        if math.prod(visible.shape[: max(visible.dim() - seen.dim(), 0)]) > 1:
            raise Untraceable(f"the mask of site '{name}' depends on a site that was not observed")
        visible = visible.reshape(((1,) * seen.dim() + visible.shape)[-seen.dim() :])
        self.visible[name] = visible.expand(*visible.shape[:ENGINE_AXES], *spec.plates)
        log_prob = torch.where(seen, log_density(fn, value, name), 0.0)
        msg["value"] = value
        if name in self.hidden:
            others, log_prior = self.others(name, fn, seen)
            event = (1,) * (value.dim() - seen.dim())
            msg["value"] = torch.where(seen.reshape(seen.shape + event), value, others)
            log_prob = log_prob + log_prior
        if spec.plates:
            log_prob = log_prob.flatten(-self.plate_axes).sum(-1)
        self.log_prob = log_prob if self.log_prob is None else self.log_prob + log_prob


class _Tracing:
    """One model being traced."""

    def __init__(
        self, model: CPOMDP, signature: Signature, parameters: Sequence[Argument], graph: Graph
    ) -> None:
        self.model, self.signature, self.graph, self.parameters = model, signature, graph, parameters
        self.plates = model.max_plate_nesting
        self.context = self._axis(0, torch.tensor([0, model.num_contexts - 1]))
        self.actions = probes(model)
        self.action = self._axis(1, self.actions[[0, -1]])
        self.state = self._some_state()
        self.sites, self.num_values, self.num_flags = self._layout()

    def _axis(self, axis: int, values: Tensor) -> Tensor:
        """Two contexts, `[2]`, or two actions, `[2]` or `[2, D]`, along one of the engine's axes."""
        shape = [1] * (ENGINE_AXES + self.plates)
        shape[axis] = 2
        return values.to(self.model.device).reshape(*shape, *values.shape[1:])

    def _some_state(self) -> State:
        """A state after some steps."""
        shape = torch.Size((2,) * ENGINE_AXES)
        A, model = len(self.actions), self.model
        with Batched(shape, self.plates):
            state = model.initial(self.context)
            for step in range(
                min(STEPS_AHEAD, model.horizon - 1)
            ):  # further ahead, programs may know nothing
                action = self._axis(1, self.actions[[step % A, (step + 1) % A]])
                state = model.transition(self.signature.broadcast(state, shape), action, self.context)
        full: State = map_state(lambda leaf: leaf.contiguous(), self.signature.broadcast(state, shape))
        return map_state(lambda leaf, like: leaf.to(like.dtype), full, self.signature.state)  # type: ignore[no-any-return]

    def _layout(self) -> tuple[dict[str, Site], int, int]:
        sites, values, flags = {}, 0, 0
        for name, spec in self.signature.observations.items():
            sites[name] = Site(spec.shape, spec.plates, spec.dtype, values, flags)
            values, flags = values + spec.shape.numel(), flags + spec.plates.numel()
        return sites, values, flags

    def _given(self) -> list[Argument]:
        """Action and context."""
        c = argument(self.graph, "context", 0, self.context, [(0, self.model.num_contexts - 1)])
        limits = [(0, len(self.actions) - 1)] if self.model.box is None else None
        return [argument(self.graph, "action", 0, self.action, limits), c]

    def _states(self, bounds: Sequence[Bounds]) -> list[Argument]:
        found, first = [], 0
        for _, leaf in leaves(self.state):
            size = math.prod(leaf.shape[ENGINE_AXES:])
            found.append(argument(self.graph, "state", first, leaf, bounds[first : first + size]))
            first += size
        return found

    def _as_state(self, parts: Sequence[Tensor]) -> State:
        rest = iter(parts)
        state: State = map_state(lambda leaf: next(rest), self.signature.state)
        return state

    def _flat(self, state: Any, size: int) -> list[Tensor]:
        full = self.signature.broadcast(state, torch.Size((size,) * ENGINE_AXES))
        for (name, leaf), (_, own) in zip(leaves(full), leaves(self.signature.state), strict=True):
            if leaf.dtype != own.dtype:
                raise Untraceable(f"'{name}' in the state is {leaf.dtype}, but {own.dtype} at first")
        return [leaf for _, leaf in leaves(full)]

    def _split(self, traced: Traced, outputs: int) -> Traced:
        """What follows the outputs are conditions."""
        checks = list(traced.checks)
        for condition in traced.outputs[outputs:]:
            if condition.op != "const" or not condition.value:
                checks.append((condition, "a probability is not from 0 to 1"))
        return Traced(traced.outputs[:outputs], traced.noise, tuple(checks))

    def initial(self) -> Traced:
        """The first state."""

        def program(context: Tensor) -> list[Tensor]:
            with TracedDraws(len(context), self.plates) as draws:
                state = self.model.initial(context)
            return [*self._flat(state, len(context)), *draws.conditions]

        traced = trace(self.graph, "initial", program, self._given()[1:], self.parameters)
        return self._split(traced, self.dim)

    @property
    def dim(self) -> int:
        """How many numbers a state has."""
        return sum(leaf.shape.numel() for _, leaf in leaves(self.signature.state))

    def transition(self, bounds: Sequence[Bounds]) -> Traced:
        """The next state."""

        def program(action: Tensor, context: Tensor, *state: Tensor) -> list[Tensor]:
            with TracedDraws(len(context), self.plates) as draws:
                moved = self.model.transition(self._as_state(state), action, context)
            return [*self._flat(moved, len(context)), *draws.conditions]

        arguments = [*self._given(), *self._states(bounds)]
        return self._split(trace(self.graph, "transition", program, arguments, self.parameters), self.dim)

    def reward(self, bounds: Sequence[Bounds], num_noise: int) -> Traced:
        """The reward; on arrival, that of a transition which takes so many random numbers."""
        pays_on_arrival = self.model.pays_on_arrival

        def program(action: Tensor, context: Tensor, *parts: Tensor) -> list[Tensor]:
            state, conditions = self._as_state(parts), []
            arrival: tuple[State, ...] = ()
            if pays_on_arrival:
                with TracedDraws(len(context), self.plates) as draws:
                    moved = self.model.transition(state, action, context)
                arrival, conditions = (self._as_state(self._flat(moved, len(context))),), draws.conditions
            reward = torch.as_tensor(self.model.reward(state, action, context, *arrival))
            reward = reward if reward.is_floating_point() else reward.to(torch.get_default_dtype())
            return [reward.expand(*[len(context)] * ENGINE_AXES, *[1] * self.plates), *conditions]

        arguments = [*self._given(), *self._states(bounds)]
        traced = self._split(trace(self.graph, "reward", program, arguments, self.parameters), 1)
        if len(traced.noise) != (num_noise if pays_on_arrival else 0):
            raise Untraceable("reward: random numbers are drawn that are no sample site")
        return traced

    def observation(self, bounds: Sequence[Bounds], first: bool) -> TracedObservation:
        """What is observed."""
        parents = frozenset().union(*self.signature.dependencies.parents.values())
        complete = self._scored(bounds, first, frozenset())
        if not parents:
            return TracedObservation(complete, None)
        try:
            return TracedObservation(complete, self._scored(bounds, first, parents))
        except Untraceable:
            return TracedObservation(complete, None)

    def _scored(self, bounds: Sequence[Bounds], first: bool, hidden: frozenset[str]) -> Traced:
        names, n = list(self.sites), len(list(leaves(self.state)))

        def program(action: Tensor, context: Tensor, *rest: Tensor) -> list[Tensor]:
            state, values, flags = rest[:n], rest[n : n + len(names)], rest[n + len(names) :]
            draws = TracedDraws(len(context), self.plates)
            by_name, seen = (dict(zip(names, each, strict=True)) for each in (values, flags))
            with TracedScores(by_name, seen, self.signature, hidden, draws) as scored:
                self.model.percept(self._as_state(state), None if first else action, context)
            assert scored.log_prob is not None
            visible = [scored.visible[name] for name in names]
            return [marginalised(scored.log_prob), *visible, *draws.conditions]

        arguments = [*self._given(), *self._states(bounds), *self._observed(first)]
        traced = self._split(
            trace(self.graph, "observation", program, arguments, self.parameters), 1 + self.num_flags
        )
        if any(e.level == PARTICLE for e in traced.outputs[1:]):
            raise Untraceable("observation: whether something is seen depends on the state, or on chance")
        return traced

    def _observed(self, first: bool) -> list[Argument]:
        """Values and flags of every site: something that the program itself shows."""
        with Batched(torch.Size((2,) * ENGINE_AXES), self.plates), Recorded() as program:
            self.model.percept(self.state, None if first else self.action, self.context)
        values, flags = [], []
        for name, site in self.sites.items():
            value = program.sites[name]["value"].expand(*[2] * ENGINE_AXES, *site.shape)
            value = value[:1, :, :1].to(site.dtype).contiguous()
            values.append(argument(self.graph, "value", site.first_value, value))
            flag = torch.tensor([True, False]).reshape(1, 2, 1, *[1] * len(site.plates))
            flag = flag.expand(1, 2, 1, *site.plates).contiguous()
            flags.append(argument(self.graph, "flag", site.first_flag, flag))
        return [*values, *flags]


def trace_model(
    model: CPOMDP, signature: Signature, parameters: Sequence[Argument] = (), graph: Graph | None = None
) -> TracedModel:
    """Write all programs of a model out; to be called inside `inference_scope`.

    Raises:
        Untraceable: If that cannot be done; the message says which method and line stand in the way.
    """
    tracing = _Tracing(model, signature, parameters, Graph() if graph is None else graph)
    if not tracing.dim:
        raise Untraceable("its state has no numbers")
    initial = tracing.initial()
    transition, bounds = _closed(tracing, initial)
    if model.states is not None:
        initial, transition = (_within(tracing.graph, each, bounds[0]) for each in (initial, transition))
    parents = frozenset().union(*signature.dependencies.parents.values())
    return TracedModel(
        graph=tracing.graph,
        leaves=tuple((leaf.shape, leaf.dtype) for _, leaf in leaves(signature.state)),
        bounds=bounds,
        sites=tracing.sites,
        parents=tuple(
            site.first_flag + k
            for name, site in tracing.sites.items()
            if name in parents
            for k in range(site.plates.numel())
        ),
        initial=initial,
        transition=transition,
        reward=tracing.reward(bounds, len(transition.noise)),
        action_dim=None if model.box is None else model.box.dim,
        observation=tracing.observation(bounds, first=False),
        first_observation=tracing.observation(bounds, first=True) if model.initial_observation else None,
        num_values=tracing.num_values,
        num_flags=tracing.num_flags,
    )


def _closed(tracing: _Tracing, initial: Traced) -> tuple[Traced, tuple[Bounds, ...]]:
    """The transition, with bounds of whole numbers in the state that it does not leave; None for none."""
    if tracing.model.states is not None:
        states: tuple[Bounds, ...] = ((0, tracing.model.states - 1),)
        return tracing.transition(states), states
    bounds = tuple(e.bounds for e in initial.outputs)
    for widening in itertools.count():  # that ends: bounds that are given up stay so
        transition = tracing.transition(bounds)
        moved = (e.bounds for e in transition.outputs)
        wider = tuple(_union(*pair) for pair in zip(bounds, moved, strict=True))
        if wider == bounds:
            return transition, bounds
        given_up = widening >= WIDENINGS - 1
        bounds = tuple(
            new if new == old or not given_up else None for old, new in zip(bounds, wider, strict=True)
        )
    raise AssertionError


def _within(graph: Graph, traced: Traced, bounds: Bounds) -> Traced:
    """The same, with a check that the state of a finite model is one of its states."""
    (e,) = traced.outputs
    if bounds is None or (e.bounds is not None and bounds[0] <= e.bounds[0] and e.bounds[1] <= bounds[1]):
        return traced
    ends = ("ge", bounds[0]), ("le", bounds[1])
    inside = graph.op(
        "and", [graph.op(op, [e, graph.const(end, e.kind)], "bool") for op, end in ends], "bool"
    )
    return Traced(
        traced.outputs, traced.noise, (*traced.checks, (inside, "a state is not one of the model's"))
    )


def _union(one: Bounds, other: Bounds) -> Bounds:
    return None if one is None or other is None else (min(one[0], other[0]), max(one[1], other[1]))
