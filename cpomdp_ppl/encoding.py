"""What an agent learns in a step, as numbers for a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, one_hot, pad

from cpomdp_ppl.arrays import on_the_right
from cpomdp_ppl.errors import ModelError, require_model
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.signature import ENDED, signature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.signature import ObservationSite

SPREAD = 3.0
"""Standard deviation of an observed number, as a network gets it.

With 1, observations drown in the one-hot actions beside them, and the gradient as printed in the paper
settles for "always one way" before it notices them.
"""

CALIBRATION_EPISODES = 256
"""Number of episodes of random actions whose observations set the scale of a network's inputs."""


class Encoding(nn.Module):
    """What an agent learns in a step, as numbers for a network.

    The previous action (one-hot, with a separate class before the first; continuous ones as numbers from -1
    to 1, with a flag before the first), the time, and for every observation site whether it was seen and its
    value: one-hot where the model's program says that it is one of a few integers, and standardised
    otherwise, by what random actions get to see. The site `ended` is left out: whoever still acts has not
    seen it.

    Args:
        model: The model whose percepts are encoded.
        seed: Seed of the episodes that set the scale.

    Attributes:
        size: Number F of features.
    """

    identity: Tensor

    def __init__(self, model: CPOMDP, seed: int = 0) -> None:
        super().__init__()
        require_model(model)
        self.box = model.box
        identity = torch.eye(1 + (self.box.dim if self.box else model.num_actions), device=model.device)
        self.register_buffer("identity", identity, persistent=False)
        self.horizon = model.horizon
        sites = signature(model).observations
        if not sites:
            raise ModelError(type(model).__name__, ["observation: has no sample site: nothing is seen"])
        self.sites = {name: site for name, site in sites.items() if name != ENDED}
        episodes = simulate(model, RandomPolicy(model.actions), CALIBRATION_EPISODES, seed=seed)
        for i, name in enumerate(self.sites):
            shift, scale = self._units(episodes, name)
            self.register_buffer(f"shift_{i}", shift)
            self.register_buffer(f"scale_{i}", scale)
        self.size = self.sequence(episodes).shape[-1]

    def _units(self, episodes: Episodes, name: str) -> tuple[Tensor, Tensor]:
        """Mean, and standard deviation over `SPREAD`, of a site's numbers where they were seen, `[width]`."""
        site, dtype = self.sites[name], torch.get_default_dtype()
        if _is_index(site):
            return torch.zeros((), device=episodes.device), torch.ones((), device=episodes.device)
        values, flags = episodes.observations[name].flatten(0, 1), episodes.observed[name].flatten(0, 1)
        if episodes.initial_observations is not None and episodes.initially_observed is not None:
            values = torch.cat([values, episodes.initial_observations[name]])
            flags = torch.cat([flags, episodes.initially_observed[name]])
        x = _flat(values, 1).double()  # [n, width]
        seen = _flat(on_the_right(flags, values).expand_as(values), 1).double()
        n = seen.sum(0).clamp(min=1)
        mean = (x * seen).sum(0) / n
        sd = ((x - mean).square() * seen).sum(0).div(n).sqrt()
        return mean.to(dtype), torch.where(sd > 0, sd / SPREAD, 1.0).to(dtype)

    def step(self, percept: Percept, time: int) -> Tensor:
        """Encode one percept, `[B, F]`."""
        flags = next(iter(percept.observed.values()))
        B = flags.shape[0]
        at = torch.full((B,), time / self.horizon, device=flags.device)
        action = self._none(B) if percept.action is None else self._action(percept.action)
        return self._numbers(action, at, percept.observations, percept.observed)

    def sequence(self, episodes: Episodes) -> Tensor:
        """Encode everything that is known at times 0 … T - 1, `[B, T, F]`."""
        return self._numbers(*self._sequence(episodes))

    def _action(self, action: Tensor, *, later: bool = False) -> Tensor:
        """Actions `[B, …]`: rows of the identity, or 0 and numbers from -1 to 1; `later` by one step."""
        if self.box is None:  # to look rows up is quicker than `one_hot`, which goes through integers
            row = action + 1
            return embedding(pad(row[:, :-1], (1, 0)) if later else row, self.identity)
        numbers = pad(self.box.to_units(action), (1, 0))
        return torch.cat([self._none(len(action), 1), numbers[:, :-1]], 1) if later else numbers

    def _none(self, *axes: int) -> Tensor:
        """No action as yet, `[*axes, …]`."""
        return self.identity[0].expand(*axes, -1)

    def _sequence(self, episodes: Episodes) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Previous actions, times, observations and flags, one step later than episodes have them."""
        B, T = episodes.actions.shape[:2]
        actions = self._action(episodes.actions, later=True)
        time = (torch.arange(T, device=actions.device) / self.horizon).expand(B, T)

        def later(values: Mapping[str, Tensor], first: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
            return {
                name: torch.cat(
                    [
                        torch.zeros_like(value[:, :1]) if first is None else first[name][:, None],
                        value[:, :-1],
                    ],
                    1,
                )
                for name, value in values.items()
            }

        observations = later(episodes.observations, episodes.initial_observations)
        return actions, time, observations, later(episodes.observed, episodes.initially_observed)

    def _numbers(
        self, action: Tensor, time: Tensor, observations: Mapping[str, Tensor], observed: Mapping[str, Tensor]
    ) -> Tensor:
        axes = time.dim()
        parts = [action, time[..., None]]
        for i, (name, site) in enumerate(self.sites.items()):
            flags, values = observed[name], observations[name]
            if _is_index(site):
                lowest, n = site.classes or (0, 0)
                values = one_hot((values.long() - lowest).clamp(min=0), n)
            seen = _flat(on_the_right(flags, values).expand_as(values), axes)
            numbers = (_flat(values, axes) - getattr(self, f"shift_{i}")) / getattr(self, f"scale_{i}")
            parts += [_flat(flags, axes), numbers * seen]  # zero where nothing was seen
        return torch.cat([part.to(torch.get_default_dtype()) for part in parts], -1)


def _flat(values: Tensor, axes: int) -> Tensor:
    return values.flatten(axes) if values.dim() > axes else values[..., None]


def _is_index(site: ObservationSite) -> bool:
    """Whether values are one of a few integers, of more than two: bits are numbers already."""
    return site.classes is not None and site.classes[1] > 2
