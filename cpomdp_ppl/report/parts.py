"""The state, part by part, as it can be shown: where it is, and where a filter believes it to be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.report.rounding import packed, significant
from cpomdp_ppl.signature import ENDED, signature
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference import Recursion
    from cpomdp_ppl.model import CPOMDP

MAX_CLOUD_NUMBERS = 400_000
"""How many numbers all clouds may have together; of larger recordings, fewer particles are kept."""

MAX_FINITE_STATES = 64
"""How many finite states are shown one by one; more of them are shown as numbers on a line."""

MAX_COMPONENTS = 6
"""How many numbers are shown of a part of the state that has more than two."""

FREQUENCIES = 1000
"""How many draws estimate the probabilities of finite states, if the filter does not know them."""


@dataclass(frozen=True)
class Part:
    """A part of the state that can be drawn: a number, a point on a plane, or one of finitely many states.

    Attributes:
        name: `state`; or `position`, `pose.heading` and so on; with an index for one number out of many.
        kind: `"line"`, `"plane"` or `"finite"`.
        true: Where the agent is, `[B, T + 1, D]`; D is 2 on a plane, else 1.
        mean: Mean of the filter under every context, `[B, T + 1, C, D]`.
        deviation: Standard deviation of the filter under every context, `[B, T + 1, C, D]`.
        cloud: Draws from the filter under every context, `[B, T + 1, C, M, D]`; None for finite states.
        probabilities: Probabilities of finite states under every context, `[B, T + 1, C, states]`; else None.
        site: The observation site whose values can be set beside this part, if that is beyond doubt.
    """

    name: str
    kind: str
    true: Tensor
    mean: Tensor
    deviation: Tensor
    cloud: Tensor | None
    probabilities: Tensor | None
    site: str | None = None

    def first(self, number: int) -> Part:
        """The same part of the first few episodes."""
        return replace(
            self,
            true=self.true[:number],
            mean=self.mean[:number],
            deviation=self.deviation[:number],
            cloud=None if self.cloud is None else self.cloud[:number],
            probabilities=None if self.probabilities is None else self.probabilities[:number],
        )

    def as_dict(self, lengths: Sequence[int]) -> dict[str, Any]:
        """Plain numbers, to be written as JSON, up to the ends of episodes; the cloud is packed."""

        def times(values: Tensor, digits: int = 4) -> list[Any]:
            listed = significant(values, digits)
            return [each[: length + 1] for each, length in zip(listed, lengths, strict=True)]

        return {
            "name": self.name,
            "kind": self.kind,
            "site": self.site,
            "true": times(self.true),
            "mean": times(self.mean),
            "deviation": times(self.deviation, 3),
            "cloud": None if self.cloud is None else packed(self.cloud),
            "probabilities": None if self.probabilities is None else times(self.probabilities, 3),
        }


class Sketch:
    """Collects the parts of the state, as a belief changes in time."""

    def __init__(self, model: CPOMDP, episodes: Episodes, num_particles: int) -> None:
        self.episodes = episodes
        self.states = model.states if model.states is not None and model.states <= MAX_FINITE_STATES else None
        sig = signature(model)
        self.sites = {name: site for name, site in sig.observations.items() if name != ENDED}
        self.shapes = {name: leaf.shape for name, leaf in leaves(sig.state)}
        self.reals = {name: leaf.dtype.is_floating_point for name, leaf in leaves(sig.state)}
        numbers = sum(min(shape.numel(), MAX_COMPONENTS) for shape in self.shapes.values())
        each = len(episodes) * (episodes.horizon + 1) * model.num_contexts * numbers
        self.num_draws = max(1, min(num_particles, MAX_CLOUD_NUMBERS // max(each, 1)))
        self._moments: list[tuple[Any, Any]] = []
        self._draws: list[Any] = []  # leaves [C, B, M, …], or probabilities [C, B, states]

    def add(self, recursion: Recursion, belief: Any) -> None:
        """Add the belief at the next time."""
        self._moments.append(recursion.moments(belief))
        if self.states is None:
            self._draws.append(recursion.draw(belief, self.num_draws))
        elif (probabilities := recursion.probabilities(belief)) is not None:
            self._draws.append(probabilities)
        else:
            drawn: Any = recursion.draw(belief, FREQUENCIES)
            counts = torch.zeros(*drawn.shape[:2], self.states, dtype=torch.float64, device=drawn.device)
            ones = torch.ones_like(drawn, dtype=torch.float64)
            self._draws.append(counts.scatter_add(2, drawn.long(), ones) / FREQUENCIES)

    def parts(self) -> tuple[Part, ...]:
        """All of them, in the order of the state."""

        def in_time(series: Sequence[Any]) -> Any:  # T + 1 times [C, B, …] → [B, T+1, C, …]
            return map_state(lambda *x: torch.stack(x).movedim(2, 0), *series)

        mean = in_time([mean for mean, _ in self._moments])
        deviation = map_state(
            lambda x: x.clamp(min=0).sqrt(), in_time([variance for _, variance in self._moments])
        )
        drawn = in_time(self._draws)
        found = []
        for (name, true), (_, mu), (_, sd) in zip(
            *(leaves(x) for x in (self.episodes.states, mean, deviation)), strict=True
        ):
            n = self.shapes[name].numel()
            true, mu, sd = true.reshape(*true.shape[:2], n), *(x.reshape(*x.shape[:3], n) for x in (mu, sd))
            if self.states is not None:
                return (Part(name, "finite", true, mu, sd, cloud=None, probabilities=drawn),)
            cloud = dict(leaves(drawn))[name]
            cloud = cloud.reshape(*cloud.shape[:4], n)
            if n in (1, 2):
                kind = "line" if n == 1 else "plane"
                found.append(Part(name, kind, true, mu, sd, cloud, None, self._site(name)))
            for i in range(min(n, MAX_COMPONENTS) if n > 2 else 0):
                true_i, mu_i, sd_i, cloud_i = (x[..., i : i + 1] for x in (true, mu, sd, cloud))
                found.append(Part(f"{name}[{i}]", "line", true_i, mu_i, sd_i, cloud_i, None))
        return tuple(found)

    def _site(self, name: str) -> str | None:
        """The site whose values are in the units of this part, if there is but one of each."""
        if len(self.shapes) != 1 or len(self.sites) != 1 or not self.reals[name]:
            return None
        ((site, spec),) = self.sites.items()
        return site if spec.shape == self.shapes[name] and not spec.is_discrete else None
