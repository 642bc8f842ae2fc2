"""What Kalman filters share: a Gaussian belief that is pushed through programs and conditioned."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import pyro
import torch
from torch import Tensor

from cpomdp_ppl.actions import some_action
from cpomdp_ppl.arrays import how_many_fit
from cpomdp_ppl.errors import DensityError, UnsupportedModelError, require_model
from cpomdp_ppl.inference.backend import Backend, Recursion, require_same_sites
from cpomdp_ppl.inference.belief import map_belief, where_alive
from cpomdp_ppl.inference.filtering import Smoothing, moments_in_time, trajectories_in_time
from cpomdp_ppl.inference.gaussian import Reparameterised, Sensed
from cpomdp_ppl.inference.gaussian_belief import (
    Coordinates,
    Expected,
    GaussianBelief,
    Transformed,
    block_diagonal,
    product,
    pseudo_inverse,
    square_root,
)
from cpomdp_ppl.inference.moment_matching import QUADRATURE_NODES, condition_on_discrete_sites, normal_points
from cpomdp_ppl.inference.observed import Observed, axes, hidden_parents, unseen
from cpomdp_ppl.inference.precision import double_precision, in_double_precision
from cpomdp_ppl.inference.scan import scan
from cpomdp_ppl.inference.site_parameters import torch_errors_as_model_errors
from cpomdp_ppl.rng import require_seed
from cpomdp_ppl.signature import signature

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.filtering import Filtering
    from cpomdp_ppl.inference.native_kalman import KalmanKernel, KalmanSettings
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.state import State

MEMORY = 2**28
"""Bytes that smoothing may keep of a batch of episodes."""

POINT_NUMBERS = 2**23
"""Numbers that the points of a batch of beliefs may have, at which functions are averaged."""

Method = TypeVar("Method", bound=Callable[..., Any])

Function: TypeAlias = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""A function of points `[C, B, K, n]` and of noise ε there, `[C, B, K, E]`, if it takes any.

It returns values `[C, B, K, m]`, and the covariance of further noise on top of them, if there is any.
"""


def _precisely(method: Method) -> Method:
    """Wrap a method so that numbers that a program writes down have the recursion's precision."""

    @wraps(method)
    def precise(self: KalmanRecursion, *arguments: Any) -> Any:
        if not self.in_double:
            return method(self, *arguments)
        with double_precision():
            return method(self, *arguments)

    return cast("Method", precise)


class KalmanRecursion(Recursion):
    """The Kalman filter's recursion; subclasses say how Gaussians are pushed through functions.

    Covariances lose half of all digits, so everything is computed in float64, unless a program insists on
    numbers of another precision, which do not mix with it.

    Attributes:
        discrete: Names of the discrete observation sites.
        in_double: Whether everything is in float64.
        initial_noise: Dimension of the noise of `initial`.
        transition_noise: Dimension of the noise of `transition`.
        num_values: How many numbers the Gaussian observation sites have together.
        normal_points: Points of a standard normal at which the reward is averaged, `[N, D]`; on arrival,
            with those of the transition's noise, `[N, D + E]`.

    Raises:
        UnsupportedModelError: If the programs cannot be read as Gaussian.
    """

    sensing = Sensed

    def __init__(self, model: CPOMDP, reward_points: int) -> None:
        self._store = pyro.get_param_store().get_state()
        self.in_double = True
        try:
            with double_precision():
                self._read(in_double_precision(model), model, reward_points)
        except RuntimeError:
            self.in_double = False
            self._read(model, model, reward_points)

    def _read(self, model: CPOMDP, given: CPOMDP, reward_points: int) -> None:
        """Run every program once, to see what it is made of."""
        _require_proper_scales(model)
        with torch_errors_as_model_errors(model):
            Recursion.__init__(self, model, given)
        self.coordinates = Coordinates(model, self.signature)
        action = self.some_action()
        with Reparameterised("initial", self.plate_axes) as initial:
            state = model.initial(self.context)
        self.initial_noise = max(initial.num_noise, 1)  # a filter needs at least one direction to look in
        state = self.signature.broadcast(state, torch.Size((model.num_contexts, 1, 1)))
        with Reparameterised("transition", self.plate_axes) as transition:
            state = model.transition(state, action, self.context)
        state = self.signature.broadcast(state, torch.Size((model.num_contexts, 1, 1)))
        self.transition_noise = transition.num_noise
        dim = self.coordinates.dim + (self.transition_noise if model.pays_on_arrival else 0)
        self.normal_points = normal_points(reward_points, dim).to(model.device, self.coordinates.dtype)
        with Reparameterised("observation", self.plate_axes) as observation:
            model.percept(state, action, self.context)
        self.discrete = observation.discrete
        sites = self.signature.observations
        self.num_values = sum(sites[name].shape.numel() for name in sites.keys() - self.discrete)
        arrival = (state,) if model.pays_on_arrival else ()
        model.reward(state, action, self.context, *arrival)  # does it mix its numbers with these?

    def some_action(self) -> Tensor:
        """An action with all of the engine's axes."""
        return self.precise(some_action(self.model, (1, 1, 1, *[1] * self.plate_axes)))

    def precise(self, action: Tensor) -> Tensor:
        """An action as programs get it: a continuous one in the precision of everything else."""
        return action.to(self.coordinates.dtype) if action.is_floating_point() else action

    @cached_property
    def _own_types(self) -> Any:
        """As in `Recursion`, with the param store as it was: modules take over what they find there."""
        with pyro.get_param_store().scope(self._store):
            return signature(self._given).state

    @abstractmethod
    def transform(
        self, function: Function, size: int, belief: GaussianBelief, num_noise: int = 0
    ) -> Transformed:
        """Push a Gaussian, and independent standard normal noise, through a function of `size` values."""

    @_precisely
    def start(self, num_episodes: int) -> GaussianBelief:
        """The belief about `s_0`, from the `initial` program as a function of its noise."""
        C, E = self.model.num_contexts, self.initial_noise

        def initial(noise: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
            with Reparameterised("initial", self.plate_axes, noise):
                return self.coordinates.vector(self.model.initial(self.context), noise.shape[:-1]), None

        unit = torch.eye(E, dtype=self.coordinates.dtype, device=self.context.device)
        standard = GaussianBelief(unit.new_zeros(C, 1, E), unit.expand(C, 1, E, E))
        moved = self.transform(initial, self.coordinates.dim, standard)
        mean, root = moved.mean, square_root(moved.covariance(moved.outputs, moved.outputs))
        return GaussianBelief(mean.repeat(1, num_episodes, 1), root.repeat(1, num_episodes, 1, 1))

    @_precisely
    def moved(self, points: Tensor, noise: Tensor | None, action: Tensor) -> Tensor:
        """The `transition` program as a function of points `[C, B, K, D]` and noise `[C, B, K, E]`."""
        action = axes(self.precise(action), self.plate_axes)
        with Reparameterised("transition", self.plate_axes, noise):
            state = self.model.transition(self.coordinates.state(points), action, self.context)
        return self.coordinates.vector(state, points.shape[:-1])

    def predict(self, belief: GaussianBelief, action: Tensor) -> tuple[GaussianBelief, Transformed]:
        """Move by an action `[B]`. Returns the belief about the next state, and how it came about."""

        def transition(points: Tensor, noise: Tensor | None) -> tuple[Tensor, None]:
            return self.moved(points, noise, action), None

        moved = self.transform(transition, self.coordinates.dim, belief, self.transition_noise)
        root = square_root(moved.covariance(moved.outputs, moved.outputs))
        return GaussianBelief(moved.mean, root), moved

    def move(self, belief: GaussianBelief, action: Tensor) -> GaussianBelief:
        """The belief about the next state."""
        return self.predict(belief, action)[0]

    @_precisely
    def condition(self, belief: GaussianBelief, seen: Observed) -> tuple[GaussianBelief, Tensor]:
        """Update the episodes in which anything was observed; the others do not change at all."""
        rows = seen.rows
        if rows is None:
            return self._update(belief, seen)
        increment = belief.mean.new_zeros(belief.mean.shape[:2], dtype=torch.float64)
        if not len(rows):
            return belief, increment
        before = GaussianBelief(belief.mean.index_select(1, rows), belief.root.index_select(1, rows))
        after, gained = self._update(before, seen.select(rows))
        updated = GaussianBelief(
            belief.mean.index_copy(1, rows, after.mean), belief.root.index_copy(1, rows, after.root)
        )
        return updated, increment.index_copy_(1, rows, gained)

    def _update(self, belief: GaussianBelief, seen: Observed) -> tuple[GaussianBelief, Tensor]:
        """Condition on the Gaussian sites first, which leaves a narrower belief for the discrete ones."""
        increment = belief.mean.new_zeros((), dtype=torch.float64)
        if self.num_values:
            belief, increment = self._update_by_gaussian_sites(belief, seen)
        if any(bool(seen.observed[name].any()) for name in self.discrete):
            belief, gained = condition_on_discrete_sites(self, belief, seen)
            increment = increment + gained
        return belief, increment.expand(belief.mean.shape[:2])

    def _update_by_gaussian_sites(
        self, belief: GaussianBelief, seen: Observed
    ) -> tuple[GaussianBelief, Tensor]:
        """The Kalman update, in which what was not observed takes no part."""
        expected: Expected
        sites = self.signature.observations
        hidden = hidden_parents(self.signature, seen, sites.keys() - self.discrete)
        gates = frozenset().union(*self.signature.dependencies.mask_parents.values())
        for name in hidden & gates.union(self.discrete):
            raise unseen(name, seen.time, "whatever it was, the others are Gaussian only if it is known")
        num_noise = sum(sites[name].shape.numel() for name in hidden)

        def observation(points: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
            nonlocal expected
            expected = self.expected(points, noise, seen)
            return expected.mean, expected.noise

        sensed = self.transform(observation, self.num_values, belief, num_noise)
        values, observed = expected.values, expected.observed
        assert sensed.noise is not None
        R = sensed.noise  # [C, B, m, m]
        innovation = values - sensed.mean  # [C, B, m]
        if observed is not None:
            # What was not observed becomes an independent number of variance 1 that was just as expected.
            sensed = replace(sensed, outputs=torch.where(observed[:, None], sensed.outputs, 0.0))
            innovation = torch.where(observed, innovation, 0.0)
            pairs = observed[:, :, None] & observed[:, None]  # [B, m, m]
            R = torch.where(pairs, R, torch.eye(self.num_values, dtype=R.dtype, device=R.device))
        S = sensed.covariance(sensed.outputs, sensed.outputs) + R

        scores, log_det, gain = self._solve(S, innovation, sensed.cross.mT, seen)
        number = self.num_values if observed is None else observed.sum(-1).double()  # of values seen, [B]
        distance = (innovation * scores).sum(-1) + log_det  # [C, B]
        increment = -0.5 * (distance.double() + math.log(2 * math.pi) * number)

        mean = belief.mean + product(gain.mT, innovation[..., None])[..., 0]
        covariance = sensed.unexplained(gain.mT) + product(product(gain.mT, R), gain)  # Joseph's form
        return GaussianBelief(mean, square_root(covariance)), increment

    def expected(self, points: Tensor, noise: Tensor | None, seen: Observed) -> Expected:
        """The `observation` program as a function of points `[C, B, K, D]` and noise of hidden sites."""
        a = None if seen.action is None else axes(self.precise(seen.action), self.plate_axes)
        with self.sensing(seen, self.signature, points.shape[:-1], self.discrete, noise) as sensed:
            self.model.percept(self.coordinates.state(points), a, self.context)
        dtype = self.coordinates.dtype
        return Expected(
            _joined(sensed.means).to(dtype),
            block_diagonal(sensed.covariances).to(dtype),
            _joined(sensed.values).to(dtype),
            None if seen.everything else _joined(sensed.observed),
        )

    def _solve(
        self, S: Tensor, innovation: Tensor, cross: Tensor, seen: Observed
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`S⁻¹ ν`, `log |S|`, and the transposed gain `S⁻¹ cov(z, x)`, `[C, B, m, D]`."""
        if S.shape[-1] == 1:  # by far the most common case; LAPACK would take most of the update's time
            if not float(S.min()) > 0:  # NaN, if any is
                self._require_positive(S[..., 0, 0] > 0, seen)
            return innovation / S[..., 0], S[..., 0, 0].log(), cross / S
        factor, info = torch.linalg.cholesky_ex(S)
        self._require_positive(info == 0, seen)
        # Not `cholesky_solve`, which takes four times as long on many small matrices.
        solved, _ = torch.linalg.solve_ex(S, torch.cat([innovation[..., None], cross], -1))
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return solved[..., 0], log_det, solved[..., 1:]

    def _require_positive(self, positive: Tensor, seen: Observed) -> None:
        if not bool(positive.all()):
            c, b = (~positive).nonzero()[0].tolist()
            sites = ", ".join(f"'{site}'" for site in seen.observations)
            raise DensityError(
                f"time {seen.time} of episode {seen.episode(b)} in context '{self.model.context_names[c]}': "
                f"the covariance of what site {sites} should show is not positive definite"
            )

    @_precisely
    def expected_reward(self, belief: GaussianBelief, action: Tensor) -> Tensor:
        """The mean of `r` over points that are spread out as the belief is.

        On arrival, the noise of the transition is spread out with them: what is quadratic in both is exact.
        """
        D, spread = self.coordinates.dim, belief.root.mT
        points = belief.mean[:, :, None] + product(self.normal_points[:, :D], spread)  # [C, B, N, D]
        shape = points.shape[:3]
        after = None
        if self.model.pays_on_arrival:
            noise = self.normal_points[:, D:].expand(*shape, -1) if self.transition_noise else None
            after = self.coordinates.state(self.moved(points, noise, action))
        action = self.precise(action)
        return self.reward(self.coordinates.state(points), action, tuple(shape), after).mean(-1)

    def moments(self, belief: GaussianBelief) -> tuple[Any, Any]:
        """Mean and variance of every number in the state."""
        return self.as_state(belief.mean), self.as_state(belief.root.square().sum(-1))

    def draw(self, belief: GaussianBelief, num_draws: int) -> State:
        """Draw states from the Gaussian."""
        return self.as_state(belief.draw(num_draws))

    def as_state(self, x: Tensor) -> State:
        """Vectors `[…, D]` as states, in the types of the model."""
        return self.in_own_types(self.coordinates.state(x))

    def smooth(self, episodes: Episodes, num_trajectories: int, offset: int) -> Smoothing:
        """Smooth by the pass of Rauch, Tung and Striebel back through the filter."""
        return rauch_tung_striebel(self, episodes, num_trajectories, offset)


@dataclass(frozen=True)
class KalmanFilter(Backend):
    """A backend whose belief is Gaussian."""

    @abstractmethod
    def recursion(self, model: CPOMDP) -> KalmanRecursion:
        """The filter at work on a model."""

    def kernel(self, model: CPOMDP) -> KalmanKernel | None:
        """The compiled filter of a model as it is now; None if the eager engine serves it."""
        return None

    def settings(self) -> KalmanSettings:
        """What the compiled filter is told when it runs."""
        raise NotImplementedError

    def _run(
        self, model: CPOMDP, episodes: Episodes, seed: int | None, moments: bool, allow_lost: bool
    ) -> Filtering:
        """As `Backend._run`, by the compiled filter where there is one.

        What that finds amiss is run again eagerly, which says what it is, or does without.
        """
        require_model(model)
        kernel = self.kernel(model)
        if kernel is not None:
            require_seed(seed)
            require_same_sites(model, kernel.signature, episodes)
            found = kernel.run(self.settings(), model, episodes, moments)
            if found is not None:
                return found
        return super()._run(model, episodes, seed, moments, allow_lost)

    def episodes_at_once(self, model: CPOMDP, recursion: Recursion) -> int:
        """As many as have `POINT_NUMBERS` numbers in the points at which functions are averaged."""
        assert isinstance(recursion, KalmanRecursion)
        points = len(recursion.normal_points) + 4 * QUADRATURE_NODES * bool(recursion.discrete)
        return how_many_fit(POINT_NUMBERS, model.num_contexts * points * recursion.coordinates.dim)

    def episodes_smoothed_at_once(
        self, model: CPOMDP, recursion: Recursion, horizon: int, num_trajectories: int
    ) -> int:
        """As many as keep the way back and the trajectories within `MEMORY`."""
        assert isinstance(recursion, KalmanRecursion)
        D = recursion.coordinates.dim
        numbers = (horizon + 1) * model.num_contexts * D * (6 * (D + 1) + 3 * num_trajectories)
        return how_many_fit(MEMORY, 8 * numbers)


def _require_proper_scales(model: CPOMDP) -> None:
    """Look at the scales of sites at the mean of the first state, before torch draws with them."""
    plates = (1,) * model.max_plate_nesting
    context = torch.arange(model.num_contexts, device=model.device).reshape(-1, 1, 1, *plates)
    refused = (UnsupportedModelError, NotImplementedError)  # what is not Gaussian is refused later
    with torch.no_grad(), model.running(), suppress(*refused):
        with Reparameterised("initial", len(plates)):
            state = model.initial(context)
        with Reparameterised("observation", len(plates)):
            model.percept(state, some_action(model, (1, 1, 1, *plates)), context)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def rauch_tung_striebel(
    recursion: KalmanRecursion, episodes: Episodes, num_trajectories: int, offset: int
) -> Smoothing:
    """Moments by the pass of Rauch, Tung and Striebel, trajectories by backward simulation."""
    backwards: list[Backward] = []

    def step_noting_the_way_back(belief: GaussianBelief, seen: Observed) -> tuple[GaussianBelief, Tensor]:
        assert seen.action is not None
        predicted, moved = recursion.predict(belief, seen.action)
        backward = Backward.through(moved, belief, predicted)
        if seen.alive is not None:  # an episode that is over stands still
            backward = where_alive(seen.alive, backward, backward.stood_still())
        backwards.append(backward)
        return recursion.condition(predicted, seen)

    for step in scan(recursion, episodes, offset, step_by=step_noting_the_way_back):
        last = step.after
    last = map_belief(torch.Tensor.double, last)
    mean, P, drawn = last.mean, last.covariance, last.draw(num_trajectories)
    moments, draws = [(mean, P)], [drawn]
    for backward in reversed(backwards):
        mean, P = backward.moments(mean, P)
        drawn = backward.draw(drawn)
        moments.append((mean, P))
        draws.append(drawn)
    as_state = recursion.as_state
    means, variances = moments_in_time(
        [
            (as_state(mean), as_state(P.diagonal(dim1=-2, dim2=-1).clamp(min=0)))
            for mean, P in reversed(moments)
        ]
    )
    trajectories = trajectories_in_time([as_state(x) for x in reversed(draws)])
    return Smoothing("RTS", means, variances, trajectories)


@dataclass(frozen=True)
class Backward:
    """How a state follows from the next: `s_t = μ + J (s_{t+1} - ν) + ε` with `ε ~ N(0, Λ)`, in float64.

    Attributes:
        mean: μ, the filtered mean of `s_t`, `[C, B, D]`.
        ahead: ν, the mean of `s_{t+1}` that this predicts, `[C, B, D]`.
        gain: J, `[C, B, D, D]`.
        unexplained: Λ, `[C, B, D, D]`.
    """

    mean: Tensor
    ahead: Tensor
    gain: Tensor
    unexplained: Tensor

    @staticmethod
    def through(moved: Transformed, before: GaussianBelief, after: GaussianBelief) -> Backward:
        """The way back through a move from one belief to another."""
        rounding = 8 * after.root.shape[-1] * torch.finfo(after.root.dtype).eps
        J = moved.cross.double() @ pseudo_inverse(after.covariance.double(), rounding)
        return Backward(before.mean.double(), after.mean.double(), J, moved.unexplained(J))

    def stood_still(self) -> Backward:
        """The same for a state that did not move at all."""
        nowhere, nothing = torch.zeros_like(self.mean), torch.zeros_like(self.gain)
        unit = torch.eye(nothing.shape[-1], dtype=nothing.dtype, device=nothing.device)
        return Backward(nowhere, nowhere, nothing + unit, nothing)

    def moments(self, mean: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
        """Mean `[C, B, D]` and covariance `[C, B, D, D]` of `s_t` out of those of `s_{t+1}`."""
        J = self.gain
        return self.mean + (J @ (mean - self.ahead)[..., None])[..., 0], J @ P @ J.mT + self.unexplained

    def draw(self, later: Tensor) -> Tensor:
        """Draw a state `s_t` for each of the states `s_{t+1}`, `[C, B, M, D]`."""
        noisy = GaussianBelief(self.mean, square_root(self.unexplained)).draw(later.shape[2])
        return noisy + product(later - self.ahead[:, :, None], self.gain.mT)
