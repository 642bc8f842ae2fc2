"""What Kalman filters share: a Gaussian belief, pushed through programs, conditioned, and smoothed."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from cpomdp_ppl.errors import DensityError, UnsupportedModelError
from cpomdp_ppl.inference.backend import Backend, Recursion
from cpomdp_ppl.inference.belief import map_belief, where_alive
from cpomdp_ppl.inference.enumeration import double_precision, drawing, in_double_precision
from cpomdp_ppl.inference.gaussian import Coordinates, Reparameterised, Sensed, block_diagonal
from cpomdp_ppl.inference.observed import Observed, Scored, axes, hidden_parents, marginalised, unseen
from cpomdp_ppl.inference.scan import scan
from cpomdp_ppl.inference.smoothing import Smoothing, moments_in_time, trajectories_in_time
from cpomdp_ppl.inference.weighing import NODES, TOO_FEW, Weighed, in_space, normal_points, on_a_line

if TYPE_CHECKING:
    from collections.abc import Collection

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Signature
    from cpomdp_ppl.state import State

MEMORY = 2**28
"""Bytes that smoothing may keep of a batch of episodes."""

Method = TypeVar("Method", bound=Callable[..., Any])

Function: TypeAlias = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""Of points `[C, B, K, n]` and noise ε there, `[C, B, K, E]`, if it takes any.

Gives values `[C, B, K, m]`, and the covariance of further noise on top of them, if there is any.
"""


@dataclass(frozen=True)
class GaussianBelief:
    """`N(μ, L Lᵀ)` over the state vector.

    Attributes:
        mean: μ, `[C, B, D]`.
        root: L, `[C, B, D, D]`; any square root of the covariance, which may be singular.
    """

    mean: Tensor
    root: Tensor

    @property
    def covariance(self) -> Tensor:
        """`[C, B, D, D]`."""
        return product(self.root, self.root.mT)

    def draw(self, num_draws: int) -> Tensor:
        """Independent draws, `[C, B, M, D]`."""
        C, B, D = self.mean.shape
        noise = torch.randn(C, B, num_draws, D, dtype=self.mean.dtype, device=self.mean.device)
        return self.mean[:, :, None] + product(noise, self.root.mT)


@dataclass(frozen=True)
class Transformed:
    """A Gaussian pushed through a function, as far as first and second moments tell.

    Attributes:
        mean: Of the values, `[C, B, m]`.
        inputs: Deviations of the Gaussian's points from its mean, `[C, B, K', n]`; those from K' to K, where
            only the noise deviates, are zero.
        outputs: The values' deviations from theirs, `[C, B, K, m]`.
        weights: Of the K deviations in a covariance, `[K]`; None if all are 1.
        noise: Mean covariance of the noise on top of the values, `[C, B, m, m]`, if there is any.
    """

    mean: Tensor
    inputs: Tensor
    outputs: Tensor
    weights: Tensor | None
    noise: Tensor | None

    def covariance(self, left: Tensor, right: Tensor) -> Tensor:
        """Of two families of deviations `[C, B, K, ·]`."""
        return product((left if self.weights is None else left * self.weights[:, None]).mT, right)

    @property
    def cross(self) -> Tensor:
        """Covariance of points and values, `[C, B, n, m]`."""
        return self.covariance(self.outputs[:, :, : self.inputs.shape[2]], self.inputs).mT

    def unexplained(self, J: Tensor) -> Tensor:
        """Covariance of what J times the values' deviations leave of the points', `[C, B, n, n]`."""
        nothing = self.outputs.shape[2] - self.inputs.shape[2]
        inputs = torch.nn.functional.pad(self.inputs, (0, 0, 0, nothing)) if nothing else self.inputs
        inputs = inputs.to(J.dtype)
        left = inputs - product(self.outputs.to(J.dtype), J.mT)  # a sum of squares, whatever the rounding
        return self.covariance(left, left)


@dataclass(frozen=True)
class Expected:
    """What is to be seen from points of the state, and what was.

    Attributes:
        mean: Of the observation, `[C, B, K, m]`.
        noise: Its covariance, `[C, B, K, m, m]`.
        values: What was seen, `[B, m]`.
        observed: Whether it was, bool `[B, m]`; None for all of it.
    """

    mean: Tensor
    noise: Tensor
    values: Tensor
    observed: Tensor | None


class _Discrete(Scored):
    """Score the discrete sites alone."""

    def __init__(self, seen: Observed, signature: Signature, discrete: Collection[str]) -> None:
        super().__init__(seen, signature)
        self.discrete = discrete
        self.hidden = hidden_parents(signature, seen, discrete)

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if name in self.discrete:
            super()._pyro_sample(msg)
        elif name in self.hidden:
            raise unseen(name, self.seen.time, "they are discrete, which a Gaussian filter cannot average")
        elif name in self.signature.observations:
            value = self.seen.observations[name]
            msg["value"] = value.reshape(1, len(value), 1, *value.shape[1:])


def _precisely(method: Method) -> Method:
    """A method in which numbers that a program writes down are of the recursion's precision."""

    @wraps(method)
    def precise(self: KalmanRecursion, *arguments: Any) -> Any:
        if not self.in_double:
            return method(self, *arguments)
        with double_precision():
            return method(self, *arguments)

    return cast("Method", precise)


class KalmanRecursion(Recursion):
    """A Gaussian belief, by whatever way of pushing Gaussians through functions a subclass brings.

    Covariances lose half of all digits, so that everything is computed in float64; unless programs have it
    that numbers are of another precision, and do not mix.

    Attributes:
        discrete: Names of the discrete observation sites.
        in_double: Whether everything is in float64.

    Raises:
        UnsupportedModelError: If the programs cannot be read as Gaussian.
    """

    sensing = Sensed

    def __init__(self, model: CPOMDP, reward_points: int) -> None:
        self.in_double = True
        try:
            with double_precision():
                self._read(in_double_precision(model), model, reward_points)
        except RuntimeError:
            self.in_double = False
            self._read(model, model, reward_points)

    def _read(self, model: CPOMDP, given: CPOMDP, reward_points: int) -> None:
        """Run every program once, to see what it is made of."""
        _require_sensible(model)
        with drawing(model):
            Recursion.__init__(self, model, given)
        self.coordinates = Coordinates(model, self.signature)
        points = normal_points(reward_points, self.coordinates.dim)  # [N, D]
        self.normal_points = points.to(model.device, self.coordinates.dtype)
        action = torch.zeros_like(self.context[:1])
        with Reparameterised("initial", self.plate_axes) as initial:
            state = model.initial(self.context)
        self.initial_noise = max(initial.num_noise, 1)  # a filter needs at least one direction to look in
        state = self.signature.broadcast(state, torch.Size((model.num_contexts, 1, 1)))
        with Reparameterised("transition", self.plate_axes) as transition:
            state = model.transition(state, action, self.context)
        state = self.signature.broadcast(state, torch.Size((model.num_contexts, 1, 1)))
        self.transition_noise = transition.num_noise
        with Reparameterised("observation", self.plate_axes) as observation:
            model.observation(state, action, self.context)
        self.discrete = observation.discrete
        sites = self.signature.observations
        self.num_values = sum(sites[name].shape.numel() for name in sites.keys() - self.discrete)
        model.reward(state, action, self.context)  # does it mix its numbers with these?

    @abstractmethod
    def transform(
        self, function: Function, size: int, belief: GaussianBelief, num_noise: int = 0
    ) -> Transformed:
        """Push a Gaussian, and standard normal noise independent of it, through a function.

        Args:
            function: Of points on the particle axis.
            size: How many values m it has.
            belief: The Gaussian.
            num_noise: Dimension E of the noise that the function takes besides.
        """

    @_precisely
    def start(self, num_episodes: int) -> GaussianBelief:
        """The belief about `s_0`: the `initial` program as a function of its noise."""
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
        action = axes(action, self.plate_axes)
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

    def step(self, belief: GaussianBelief, seen: Observed) -> tuple[GaussianBelief, Tensor]:
        """Predict, then update."""
        assert seen.action is not None
        predicted, _ = self.predict(belief, seen.action)
        return self.condition(predicted, seen)

    @_precisely
    def condition(self, belief: GaussianBelief, seen: Observed) -> tuple[GaussianBelief, Tensor]:
        """The Kalman update of the episodes in which anything was observed; others do not change at all."""
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
        """Condition on the Gaussian sites, which leaves a narrower belief, then on the discrete ones."""
        increment = belief.mean.new_zeros((), dtype=torch.float64)
        if self.num_values:
            belief, increment = self._condition(belief, seen)
        if any(bool(seen.observed[name].any()) for name in self.discrete):
            belief, gained = self._weigh(belief, seen)
            increment = increment + gained
        return belief, increment.expand(belief.mean.shape[:2])

    def _condition(self, belief: GaussianBelief, seen: Observed) -> tuple[GaussianBelief, Tensor]:
        """The Kalman update; what was not observed takes no part in it."""
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
            # What was not observed becomes a number of its own, of variance 1, that was just as expected.
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

    def _weigh(self, belief: GaussianBelief, seen: Observed) -> tuple[GaussianBelief, Tensor]:
        """Condition on the discrete sites: on a line, if they depend on one direction alone, or in space."""
        v = self._direction(belief, seen)  # [C, B, D]
        on_line = torch.linalg.vector_norm(v, dim=-1) > 0  # [C, B]

        def log_p(u: Tensor) -> Tensor:
            x = belief.mean[:, :, None] + product(u, belief.root.mT)
            return self.log_density_of_discrete(x, seen).expand(u.shape[:3])

        D, found = v.shape[-1], None
        unit = torch.eye(D, dtype=v.dtype, device=v.device)
        if bool(on_line.any()):
            line = on_a_line(lambda u: log_p(u * v[:, :, None]), v)
            # Along v, the unit variance becomes that on the line; across, nothing is learned.
            learned = (line.covariance - 1) * v[..., :, None] * v[..., None, :]
            found = replace(line, mean=line.mean * v, covariance=unit + learned)
        if not bool(on_line.all()):
            space = in_space(log_p, v)
            found = space if found is None else space.where(on_line, found)
        assert found is not None
        self._require_settled(found, seen)
        mean = belief.mean + product(belief.root, found.mean[..., None])[..., 0]
        root = product(belief.root, square_root(found.covariance))
        impossible = (found.log_mean == -torch.inf)[..., None]
        return GaussianBelief(
            torch.where(impossible, belief.mean, mean), torch.where(impossible[..., None], belief.root, root)
        ), found.log_mean

    def _direction(self, belief: GaussianBelief, seen: Observed) -> Tensor:
        """The unit vector in the belief's own coordinates that the discrete sites depend on, `[C, B, D]`.

        All gradients are along it, if there is such a direction; that nothing else matters is seen by leaving
        all else out. It is zero where there is none.
        """
        C, B, D = belief.mean.shape
        if D == 1:
            return torch.ones_like(belief.mean)
        mean, root = belief.mean.detach(), belief.root.detach()
        u = 2 * normal_points(64, D).to(mean).expand(C, B, -1, D)  # [C, B, P, D]
        with torch.enable_grad():
            u = u.clone().requires_grad_()
            log_p = self.log_density_of_discrete(mean[:, :, None] + product(u, root.mT), seen)
            log_p = log_p.expand(u.shape[:3])
            if not log_p.requires_grad:
                return torch.zeros_like(mean)
            (g,) = torch.autograd.grad(torch.where(log_p > -torch.inf, log_p, 0.0).sum(), u)
        size = torch.linalg.vector_norm(g, dim=-1, keepdim=True)  # [C, B, P, 1]
        g = torch.where(size > 0, g / size, 0.0).nan_to_num(0.0)  # no place drowns another
        v = torch.linalg.eigh(product(g.mT, g))[1][..., -1]  # [C, B, D]
        along = product(u.detach(), v[..., None]) * v[:, :, None]
        same = self.log_density_of_discrete(mean[:, :, None] + product(along, root.mT), seen)
        close = torch.isclose(same.expand_as(log_p), log_p.detach(), rtol=1e-6, atol=1e-6).all(-1)
        known = close & (size.squeeze(-1) > 0).any(-1)
        return torch.where(known[..., None], v, 0.0)

    def _require_settled(self, found: Weighed, seen: Observed) -> None:
        poor = ~(found.error <= TOO_FEW)
        if bool(poor.any()):
            c, b = poor.nonzero()[0].tolist()
            sites = ", ".join(f"'{site}'" for site in self.discrete)
            raise DensityError(
                f"time {seen.time} of episode {seen.episode(b)} in context '{self.model.context_names[c]}': "
                f"points of a Gaussian belief do not settle how likely site {sites} was, as few of them "
                'count; "smc" does not depend on that'
            )

    def log_density_of_discrete(self, points: Tensor, seen: Observed) -> Tensor:
        """`log p` of the discrete sites as a function of points `[C, B, P, D]`, `[C, B, P]`."""
        a = None if seen.action is None else axes(seen.action, self.plate_axes)
        with _Discrete(seen, self.signature, self.discrete) as scored:
            self.model.observation(self.coordinates.state(points), a, self.context)
        assert scored.log_prob is not None
        return marginalised(scored.log_prob).to(points.dtype)

    def expected(self, points: Tensor, noise: Tensor | None, seen: Observed) -> Expected:
        """The `observation` program as a function of points `[C, B, K, D]`, and of noise of hidden sites."""
        a = None if seen.action is None else axes(seen.action, self.plate_axes)
        with self.sensing(seen, self.signature, points.shape[:-1], self.discrete, noise) as sensed:
            self.model.observation(self.coordinates.state(points), a, self.context)
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
        """`S⁻¹ ν`, `log |S|`, and the gain transposed, `S⁻¹ cov(z, x)` `[C, B, m, D]`."""
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
        """The mean of `r` over points that are spread out as the belief is."""
        spread = belief.root.mT
        points = belief.mean[:, :, None] + product(self.normal_points, spread)  # [C, B, N, D]
        shape = tuple(points.shape[:3])
        return self.reward(self.coordinates.state(points), action, shape).mean(-1)

    def moments(self, belief: GaussianBelief) -> tuple[Any, Any]:
        """Mean and variance of every number in the state."""
        return self._own(belief.mean), self._own(belief.root.square().sum(-1))

    def draw(self, belief: GaussianBelief, num_draws: int) -> State:
        """Draws of the Gaussian."""
        return self._own(belief.draw(num_draws))

    def _own(self, x: Tensor) -> State:
        """Vectors `[…, D]` as states of the model's own types."""
        return self.in_own_types(self.coordinates.state(x))

    def smooth(self, episodes: Episodes, num_trajectories: int, offset: int) -> Smoothing:
        """Rauch, Tung and Striebel's pass back through the filter; trajectories by backward simulation."""
        last, backwards = forward(self, episodes, offset)
        mean, P, drawn = last.mean, last.covariance, last.draw(num_trajectories)
        moments, draws = [(mean, P)], [drawn]
        for backward in reversed(backwards):
            mean, P = backward.moments(mean, P)
            drawn = backward.draw(drawn)
            moments.append((mean, P))
            draws.append(drawn)
        as_state = self._own
        means, variances = moments_in_time(
            [
                (as_state(mean), as_state(P.diagonal(dim1=-2, dim2=-1).clamp(min=0)))
                for mean, P in reversed(moments)
            ]
        )
        trajectories = trajectories_in_time([as_state(x) for x in reversed(draws)])
        return Smoothing("RTS", means, variances, trajectories)


@dataclass(frozen=True)
class KalmanFilter(Backend):
    """A backend whose belief is Gaussian."""

    @abstractmethod
    def recursion(self, model: CPOMDP) -> KalmanRecursion:
        """The filter at work on a model."""

    def episodes_at_once(self, model: CPOMDP, recursion: Recursion) -> int:
        """As many as have 2²³ numbers in the points at which rewards are averaged."""
        assert isinstance(recursion, KalmanRecursion)
        points = len(recursion.normal_points) + 4 * NODES * bool(recursion.discrete)
        return max(1, 2**23 // (model.num_contexts * points * recursion.coordinates.dim))

    def episodes_smoothed_at_once(
        self, model: CPOMDP, recursion: Recursion, horizon: int, num_trajectories: int
    ) -> int:
        """As many as keep what is needed for the way back, and the trajectories, within `MEMORY`."""
        assert isinstance(recursion, KalmanRecursion)
        D = recursion.coordinates.dim
        numbers = (horizon + 1) * model.num_contexts * D * (6 * (D + 1) + 3 * num_trajectories)
        return max(1, MEMORY // (8 * numbers))


@dataclass(frozen=True)
class Backward:
    """Where a state came from: `s_t = μ + J (s_{t+1} - ν) + ε` with `ε ~ N(0, Λ)`, all in float64.

    Attributes:
        mean: μ, the filtered mean of `s_t`, `[C, B, D]`.
        ahead: ν, the mean of `s_{t+1}` that it predicts, `[C, B, D]`.
        gain: J, `[C, B, D, D]`.
        unexplained: Λ, `[C, B, D, D]`.
    """

    mean: Tensor
    ahead: Tensor
    gain: Tensor
    unexplained: Tensor

    @staticmethod
    def through(moved: Transformed, before: GaussianBelief, after: GaussianBelief) -> Backward:
        """Back through a move from one belief to another."""
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
        """A state `s_t` for each of the states `s_{t+1}`, `[C, B, M, D]`."""
        noisy = GaussianBelief(self.mean, square_root(self.unexplained)).draw(later.shape[2])
        return noisy + product(later - self.ahead[:, :, None], self.gain.mT)


class _WayBack:
    """A recursion that notes how every step of a pass came about.

    Attributes:
        backwards: The steps so far, in time.
    """

    def __init__(self, recursion: KalmanRecursion) -> None:
        self.model = recursion.model
        self.recursion = recursion
        self.backwards: list[Backward] = []

    def start(self, num_episodes: int) -> GaussianBelief:
        return self.recursion.start(num_episodes)

    def condition(self, belief: GaussianBelief, observed: Observed) -> tuple[GaussianBelief, Tensor]:
        return self.recursion.condition(belief, observed)

    def step(self, belief: GaussianBelief, observed: Observed) -> tuple[GaussianBelief, Tensor]:
        assert observed.action is not None
        predicted, moved = self.recursion.predict(belief, observed.action)
        backward = Backward.through(moved, belief, predicted)
        if observed.alive is not None:  # an episode that is over stands still
            backward = where_alive(observed.alive, backward, backward.stood_still())
        self.backwards.append(backward)
        return self.recursion.condition(predicted, observed)


def forward(
    recursion: KalmanRecursion, episodes: Episodes, offset: int
) -> tuple[GaussianBelief, list[Backward]]:
    """Filter, and note the way back. Returns the last belief, in float64, and how each step came about."""
    way_back = _WayBack(recursion)
    for step in scan(way_back, episodes, offset):
        last = step.after
    return map_belief(torch.Tensor.double, last), way_back.backwards


def product(A: Tensor, B: Tensor) -> Tensor:
    """`A @ B`; over a single number, by broadcasting, which is up to twenty times faster."""
    return A * B if A.shape[-1] == 1 else A @ B


def square_root(P: Tensor) -> Tensor:
    """Some L with `L Lᵀ = P` for a covariance `[…, D, D]` that may be singular: a Cholesky factor.

    One column at a time, batched, because torch's own refuses singular matrices; where there is no
    variance left in a coordinate, its column is zero.
    """
    D = P.shape[-1]
    if D == 1:
        return P.clamp(min=0).sqrt()
    nothing = 8 * D * torch.finfo(P.dtype).eps * P.diagonal(dim1=-2, dim2=-1)  # [..., D]
    columns = []
    for j in range(D):
        pivot = P[..., j, j]
        empty = pivot <= nothing[..., j]
        column = P[..., j] * torch.where(empty, 0.0, torch.where(empty, 1.0, pivot).rsqrt())[..., None]
        columns.append(column)
        P = P - column[..., :, None] * column[..., None, :]
    return torch.stack(columns, -1)


def pseudo_inverse(P: Tensor, rtol: float) -> Tensor:
    """Of a covariance `[…, D, D]`, scaled so that units of measurement do not decide what counts as zero.

    That is a part of less than `rtol` of the largest.
    """
    sd = P.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    scale = torch.where(sd > 0, sd, 1.0).reciprocal()
    scale = scale[..., :, None] * scale[..., None, :]
    inverse: Tensor = torch.linalg.pinv(P * scale, rtol=rtol, hermitian=True) * scale
    return inverse


def _require_sensible(model: CPOMDP) -> None:
    """Look at scales, at the mean of the first state, before torch draws with them."""
    own = (1,) * model.max_plate_nesting
    context = torch.arange(model.num_contexts, device=model.device).reshape(-1, 1, 1, *own)
    refused = (UnsupportedModelError, NotImplementedError)  # which have their turn later
    with torch.no_grad(), model.running(), suppress(*refused):
        with Reparameterised("initial", len(own)):
            state = model.initial(context)
        with Reparameterised("observation", len(own)):
            model.observation(state, torch.zeros_like(context[:1]), context)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
