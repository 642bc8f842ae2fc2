"""Adding a model: a room with a heater of unknown power.

python -m examples.extending.model
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl import CPOMDP, RandomPolicy, evaluate

HEAT, WAIT, READ = range(3)


class Heater(CPOMDP):
    """Keep a room warm with a heater that is weak or strong, and a thermometer that has to be read.

    The state is the temperature above that outside. Programs broadcast: the engine adds axes for contexts,
    episodes and particles on the left, so that nothing here may depend on the shapes of the arguments.

    Args:
        horizon: Number of steps T.
        powers: By how much a weak and a strong heater raise the temperature in a step.
        kept: The share of the temperature that the room keeps in a step.
        drift: Standard deviation of the weather.
        noise: Standard deviation of the thermometer.
        comfort: The temperature that is best.
        fuel: Cost of heating for a step.
    """

    contexts = ("weak", "strong")
    actions = ("heat", "wait", "read")

    def __init__(
        self,
        horizon: int = 12,
        *,
        powers: tuple[float, float] = (0.5, 1.5),
        kept: float = 0.8,
        drift: float = 0.2,
        noise: float = 0.3,
        comfort: float = 2.0,
        fuel: float = 0.1,
    ) -> None:
        super().__init__()
        self.horizon = horizon
        self.register_buffer("powers", torch.tensor(powers))  # [C]; a buffer follows `model.to(device)`
        self.kept, self.drift, self.noise = kept, drift, noise
        self.comfort, self.fuel = comfort, fuel

    def initial(self, context: Tensor) -> Tensor:
        """About as cold as it is outside."""
        return pyro.sample("temperature", dist.Normal(0.0, 0.5))

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """The room cools, and the heater warms it."""
        warmth = self.powers[context] * (action == HEAT)
        return pyro.sample("temperature", dist.Normal(self.kept * state + warmth, self.drift))

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """The thermometer shows something only if it is read."""
        pyro.sample("reading", dist.Normal(state, self.noise).mask(action == READ))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """Discomfort, and the cost of fuel."""
        return -(state - self.comfort).abs() - self.fuel * (action == HEAT)


def main() -> None:
    """Check the model, and play it."""
    model = Heater()
    model.check()  # raises a ModelError that names everything that is wrong
    print(evaluate(model, RandomPolicy(model.num_actions), 1000))


if __name__ == "__main__":
    main()
