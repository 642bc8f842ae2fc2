"""Adding a backend: importance sampling, a particle filter that never resamples.

python -m examples.extending.backend
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, simulate
from cpomdp_ppl.arrays import how_many_fit
from cpomdp_ppl.handlers import Batched
from cpomdp_ppl.inference import Backend, ObservableOperator, Observed, Recursion, Smoothing, scan
from cpomdp_ppl.inference.filtering import moments_in_time, trajectories_in_time
from cpomdp_ppl.inference.observed import axes, log_density_of_seen
from cpomdp_ppl.models import ContextualTiger
from cpomdp_ppl.state import map_state


@dataclass(frozen=True)
class WeightedStates:
    """A belief: a dataclass of tensors that begin with `[C, B]`.

    Attributes:
        state: Leaves `[C, B, N, …]`.
        weights: Normalised, float64 `[C, B, N]`.
    """

    state: Any
    weights: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Weighted mean of values `[C, B, N, …]` over the particles."""
        weights = self.weights.reshape(self.weights.shape + (1,) * (values.dim() - 3))
        return (weights * values).sum(2)


@dataclass(frozen=True)
class ImportanceSampling(Backend):
    """The settings of the backend; `run`, `smooth`, `online` and so on come with the base class.

    Args:
        num_particles: Number of particles N for each context and episode.
    """

    num_particles: int = 10_000
    name: ClassVar[str] = "importance"

    def recursion(self, model: CPOMDP) -> WeightingRecursion:
        """The backend at work on a model; one that it cannot serve would be an `UnsupportedModelError`."""
        return WeightingRecursion(model, self.num_particles)

    def episodes_at_once(self, model: CPOMDP, recursion: Recursion) -> int:
        """As many as keep a belief within some 100 MB."""
        return how_many_fit(2**23, model.num_contexts * self.num_particles)


class WeightingRecursion(Recursion):
    """How a belief starts, moves and is conditioned. No method changes a belief that it is given."""

    def __init__(self, model: CPOMDP, num_particles: int) -> None:
        super().__init__(model)
        self.N = num_particles

    def start(self, num_episodes: int) -> WeightedStates:
        """States drawn by `initial`, all of the same weight."""
        shape = (self.model.num_contexts, num_episodes, self.N)
        with Batched(shape, self.plate_axes):
            state = self.model.initial(self.context)
        weights = torch.full(shape, 1 / self.N, dtype=torch.float64, device=self.context.device)
        return WeightedStates(self.signature.broadcast(state, torch.Size(shape)), weights)

    def move(self, belief: WeightedStates, action: Tensor) -> WeightedStates:
        """Each particle moves by `transition`."""
        shape = belief.weights.shape
        with Batched(shape, self.plate_axes):
            state = self.model.transition(belief.state, axes(action, self.plate_axes), self.context)
        return WeightedStates(self.signature.broadcast(state, shape), belief.weights)

    def condition(self, belief: WeightedStates, observed: Observed) -> tuple[WeightedStates, Tensor]:
        """Multiply weights by the density of what was observed; the increment is their sum's logarithm."""
        density = log_density_of_seen(self.model, self.signature, belief.state, self.context, observed)
        joint = belief.weights.log() + density  # [C, B, N]
        increment = joint.logsumexp(-1)  # [C, B]
        possible = (increment > -torch.inf)[..., None]  # what is impossible must not become NaN
        weights = torch.where(possible, joint.softmax(-1), belief.weights)
        return WeightedStates(belief.state, weights), increment

    def expected_reward(self, belief: WeightedStates, action: Tensor) -> Tensor:
        """Weighted mean of the rewards."""
        after = self.move(belief, action).state if self.model.pays_on_arrival else None
        return belief.mean(self.reward(belief.state, action, belief.weights.shape, after))

    def moments(self, belief: WeightedStates) -> tuple[Any, Any]:
        """Weighted means and variances."""
        mean = map_state(belief.mean, belief.state)
        variance = map_state(lambda x, m: belief.mean((x.double() - m.unsqueeze(2)) ** 2), belief.state, mean)
        return mean, variance

    def draw(self, belief: WeightedStates, num_draws: int) -> Any:
        """States by their weights."""
        return self._at(belief.state, self._indices(belief, num_draws))

    def smooth(self, episodes: Episodes, num_trajectories: int, offset: int) -> Smoothing:
        """As no particle is ever replaced, paths of particles are trajectories, weighted as at the end."""
        beliefs = [step.after for step in scan(self, episodes, offset)]  # times 0 … T
        last = beliefs[-1]
        hindsight = [WeightedStates(belief.state, last.weights) for belief in beliefs]
        mean, variance = moments_in_time([self.moments(belief) for belief in hindsight])
        indices = self._indices(last, num_trajectories)
        drawn = trajectories_in_time([self._at(belief.state, indices) for belief in beliefs])
        return Smoothing("importance sampling", mean, variance, drawn)

    def _indices(self, belief: WeightedStates, num_draws: int) -> Tensor:
        """Particles drawn by their weights, `[C, B, M]`."""
        drawn: Tensor = torch.distributions.Categorical(belief.weights).sample((num_draws,))
        return drawn.movedim(0, -1)

    def _at(self, state: Any, indices: Tensor) -> Any:
        """The states of some of the particles, leaves `[C, B, M, …]`."""
        C, B, _ = indices.shape
        c, b = torch.arange(C)[:, None, None], torch.arange(B)[:, None]
        return map_state(lambda leaf: leaf[c, b, indices], state)


def main() -> None:
    """Compare with the exact filter of a finite model."""
    model = ContextualTiger()
    episodes = simulate(model, RandomPolicy(model.num_actions), 5, seed=0)
    print("importance sampling", ImportanceSampling().run(model, episodes, seed=0).log_likelihood, sep="\n")
    print("exact", ObservableOperator().run(model, episodes).log_likelihood, sep="\n")


if __name__ == "__main__":
    main()
