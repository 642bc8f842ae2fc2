"""Programs without chance: every sample site takes all its values at once, each with its probability."""

from __future__ import annotations

import math
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints
from torch.nn import Parameter

from cpomdp_ppl.errors import DensityError, ModelError, UnsupportedModelError
from cpomdp_ppl.handlers import Batched, base_of, is_deterministic, mask_of, support_of
from cpomdp_ppl.inference.density import log_density, unfit, unmasked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cpomdp_ppl.model import CPOMDP

ENGINE_AXES = 3
"""`[context, episode, particle]`."""


@contextmanager
def double_precision() -> Iterator[None]:
    """Python numbers inside become float64 tensors: a program's constants are then exact."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_double_precision(model: CPOMDP) -> CPOMDP:
    """The model itself, or a copy with float64 constants if it has others: those would not mix with ours."""
    plain = [x for x in _plain_tensors(model) if x.is_floating_point()]
    constants = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    if all(x.dtype == torch.float64 for x in (*constants, *plain)):
        return model
    # What the memo knows is not copied but replaced, wherever it comes up.
    return deepcopy(model, {id(x): x.detach().double() for x in plain}).double()


def _plain_tensors(model: CPOMDP) -> Iterator[Tensor]:
    """Tensors that a model has as plain attributes, or in a list, tuple or dict that is one."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            members = value.values() if isinstance(value, dict) else value
            several = members if isinstance(value, (dict, list, tuple)) else (value,)
            yield from (x for x in several if isinstance(x, Tensor) and not isinstance(x, Parameter))


def require_parameters(program: str, name: str, fn: Any, mask: Tensor | bool = True) -> None:
    """Raise if the parameters of a site's distribution make no sense: torch would compute with them.

    Args:
        program: Where the site is.
        name: Of the site.
        fn: Its distribution.
        mask: Where it counts, `[…]` like the distribution's batch.

    Raises:
        DensityError: If there are such, naming program, site and parameter.
    """
    for parameter, value, proper in _parameters(base_of(fn)):
        if not bool(proper.all()):
            if isinstance(mask, Tensor):
                mask = mask.reshape(mask.shape + (1,) * (fn.event_dim - base_of(fn).event_dim))
            if bool((proper | ~torch.as_tensor(mask)).all()):
                continue
            raise DensityError(_fault(program, name, fn, parameter, value, proper))


def _fault(program: str, name: str, fn: Any, parameter: str, value: Tensor, proper: Tensor) -> str:
    first = value[tuple((~proper).nonzero()[0])].tolist()
    return f"{program}: site '{name}' ({type(base_of(fn)).__name__}) has {parameter} = {first}"


def _parameters(fn: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The parameters that a distribution was made with, and where they make sense."""
    fn = getattr(fn, "_categorical", fn)
    if isinstance(fn, torch.distributions.TransformedDistribution):
        yield from _parameters(base_of(fn.base_dist))
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


def require_sensible(model: CPOMDP) -> None:
    """Run the programs at some draws, and look at parameters before torch draws with them.

    Raises:
        DensityError: If some make no sense, naming program, site and parameter.
    """
    own = (1,) * model.max_plate_nesting
    context = torch.arange(model.num_contexts, device=model.device).reshape(-1, 1, 1, *own)
    action = torch.arange(model.num_actions, device=model.device).reshape(1, -1, 1, *own)
    batch = Batched((model.num_contexts, model.num_actions, 64), model.max_plate_nesting)
    with torch.no_grad(), poutine.block(), model.running(), drawing(model), batch:
        with _Required("initial"):
            state = model.initial(context)
        with _Required("observation"):
            model.observation(state, action, context)
        with _Required("transition"):
            model.transition(state, action, context)


@contextmanager
def drawing(model: CPOMDP) -> Iterator[None]:
    """Inside, what torch cannot compute or draw is a `ModelError`."""
    try:
        yield
    except RuntimeError as error:
        raise ModelError(type(model).__name__, [f"a program does not run: {error}"]) from error


class _Required(Messenger):
    def __init__(self, program: str) -> None:
        super().__init__()
        self.program = program

    def _pyro_sample(self, msg: Any) -> None:
        if not (site_is_subsample(msg) or is_deterministic(msg)):
            require_parameters(self.program, msg["name"], unmasked(msg["fn"]), mask_of(msg))


class Sensible(Messenger):
    """Note where the parameters of a program's sites make no sense, though a density comes out.

    A normal density says so by itself: it is NaN then.

    Args:
        program: Its name, for messages.
        max_plate_nesting: How many axes on the right belong to the program's own plates.

    Attributes:
        wrong: Where, `[context, episode, particle]` or a shape that broadcasts to it; None if nowhere.
        message: Names the first such site.
    """

    def __init__(self, program: str, max_plate_nesting: int) -> None:
        super().__init__()
        self.program = program
        self.plate_axes = max_plate_nesting
        self.wrong: Tensor | None = None
        self.message = ""

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg) or isinstance(base_of(msg["fn"]), dist.Normal):
            return
        fn, depth = msg["fn"], ENGINE_AXES + self.plate_axes
        for parameter, value, proper in _parameters(base_of(fn)):
            if bool(proper.all()):
                continue
            # Below an event, any wrong component will do; so will any value of a hidden site.
            event = max(0, proper.dim() - len(fn.batch_shape))
            wrong = (~proper).flatten(-event).any(-1) if event else ~proper
            mask = mask_of(msg)
            wrong = wrong & mask if isinstance(mask, Tensor) else wrong
            wrong = wrong.reshape((1,) * (depth - wrong.dim()) + wrong.shape)
            wrong = wrong.flatten(0, wrong.dim() - depth - 1).any(0) if wrong.dim() > depth else wrong
            wrong = wrong.flatten(ENGINE_AXES).any(-1) if self.plate_axes else wrong
            self.wrong = wrong if self.wrong is None else self.wrong | wrong
            self.message = self.message or _fault(self.program, msg["name"], fn, parameter, value, proper)


class Nodes:
    """Points ε and weights that stand for a standard normal variable: the trapezoidal rule.

    For smooth functions of ε the rule converges faster than any power of the number of points.

    Args:
        number: How many points.
        reach: The largest ε.
    """

    def __init__(self, number: int, reach: float = 6.5) -> None:
        self.epsilon = torch.linspace(-reach, reach, number, dtype=torch.float64)
        density = (-0.5 * self.epsilon**2).exp()
        self.weights = density / density.sum()

    def __len__(self) -> int:
        return len(self.epsilon)


class Enumerated(Messenger):
    """Give every sample site all its values in parallel, on new axes left of the engine's.

    A site in the program's own plates, or with independent components, is a product: each component has
    an axis of its own. So after the program has run, its result has the axes
    `[last component, …, first component, context, episode, particle, …]`, and so has `weights`.

    Args:
        program: Its name, for messages.
        max_plate_nesting: How many axes on the right belong to the program's own plates.
        nodes: Stand in for the noise of continuous sites; None refuses these.

    Attributes:
        weights: Joint probability of the values so far; it broadcasts with `[…, context, episode, particle]`.
        axes: How many axes have been added so far.
        noise_axes: Which of them, counted from the right, are of `nodes`; the others are of discrete values.
    """

    def __init__(self, program: str, max_plate_nesting: int, nodes: Nodes | None = None) -> None:
        super().__init__()
        self.program = program
        self.plate_axes = max_plate_nesting
        self.nodes = nodes
        self.weights = torch.ones((1,) * ENGINE_AXES, dtype=torch.float64)
        self.axes = 0
        self.noise_axes: list[int] = []

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg):
            return
        fn, name = unmasked(msg["fn"]), msg["name"]
        if msg["is_observed"]:
            if isinstance(fn, dist.Delta):
                return
            raise UnsupportedModelError(f"{self.program}: site '{name}' is observed already")
        msg["value"] = fn.v if isinstance(fn, dist.Delta) else self._values(fn, name)
        msg["stop"] = True

    def _values(self, fn: Any, name: str) -> Tensor:
        base = fn
        while isinstance(base, dist.Independent):
            base = base.base_dist
        require_parameters(self.program, name, base)
        why = unfit(base)
        if why is not None:
            raise self._unsupported(fn, name, f"cannot be followed: {why}")
        if base.has_enumerate_support:
            return self._enumerated(fn, base, name)
        if self.nodes is None:
            raise self._unsupported(fn, name, "has no finite support")
        if isinstance(base, dist.Normal):
            return base.loc + base.scale * self._noise(fn)
        if isinstance(base, dist.MultivariateNormal):
            noise = self._noise(fn)[..., None]
            return base.loc + (base.scale_tril @ noise).squeeze(-1)
        # Any other distribution of one real number is a function of a normal one: its quantiles.
        try:
            levels = torch.special.ndtr(self._noise(fn)).clamp(2**-50, 1 - 2**-50)  # 8 standard deviations
            quantiles: Tensor = base.icdf(levels)
        except (NotImplementedError, AttributeError):
            reason = "has neither finitely many values nor an inverse distribution function"
            raise self._unsupported(fn, name, reason) from None
        return quantiles

    def _enumerated(self, fn: Any, base: Any, name: str) -> Tensor:
        support = support_of(base)
        if support is None:
            raise self._unsupported(fn, name, "cannot be enumerated")
        independent = fn.event_dim - base.event_dim
        cells = (*self._plates(fn), *fn.event_shape[:independent])
        value = support[self._grid(torch.arange(len(support), device=support.device), cells)]
        self.axes += math.prod(cells)
        probability = log_density(base, value, name).double().exp()  # […, *cells]
        self._weigh(probability.flatten(-independent).prod(-1) if independent else probability)
        return value

    def _noise(self, fn: Any) -> Tensor:
        """ε for every component of a site."""
        assert self.nodes is not None
        cells = (*self._plates(fn), *fn.event_shape)
        epsilon, weights = self._grid(self.nodes.epsilon, cells), self._grid(self.nodes.weights, cells)
        self.noise_axes += range(self.axes, self.axes + math.prod(cells))
        self.axes += math.prod(cells)
        self._weigh(weights.flatten(-fn.event_dim).prod(-1) if fn.event_dim else weights)
        return epsilon

    def _grid(self, points: Tensor, cells: Sequence[int]) -> Tensor:
        """All combinations of K points for independent cells: `[K, …, K, 1, …, 1, *cells]`."""
        n, depth = math.prod(cells), self.axes + ENGINE_AXES
        combinations = torch.stack(torch.meshgrid(*[points] * n, indexing="ij"), -1)
        return combinations.reshape(*[len(points)] * n, *[1] * depth, *cells)

    def _plates(self, fn: Any) -> tuple[int, ...]:
        """The program's own plates around a site, `own` axes."""
        return (
            tuple(((1,) * self.plate_axes + tuple(fn.batch_shape))[-self.plate_axes :])
            if self.plate_axes
            else ()
        )

    def _weigh(self, weights: Tensor) -> None:
        """Multiply by a site's weights `[…, context, episode, particle, *plates]`."""
        self.weights = self.weights * (
            weights.flatten(-self.plate_axes).prod(-1) if self.plate_axes else weights
        )

    def _unsupported(self, fn: Any, name: str, reason: str) -> UnsupportedModelError:
        base = fn.base_dist if isinstance(fn, dist.Independent) else fn
        return UnsupportedModelError(f"{self.program}: site '{name}' ({type(base).__name__}) {reason}")
