"""How likely what many agents observed is, each in a state of its own, under every context."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.dataflow import dependencies
from cpomdp_ppl.inference.observed import Observed, log_density_of_seen
from cpomdp_ppl.inference.sampling import draw
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.generative import Generative
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.signature import Signature


class PerceptDensity:
    """The density of percepts, as the `observation` program of a model has it.

    To be made and used inside `inference_scope`.

    Args:
        programs: The programs of the CPOMDP.

    Examples:
        >>> from cpomdp_ppl.generative import Generative
        >>> from cpomdp_ppl.inference import inference_scope
        >>> from cpomdp_ppl.models import LightDark
        >>> from cpomdp_ppl.policy import Percept
        >>> model = LightDark()
        >>> percept = Percept(torch.tensor([2]), {"z": torch.tensor([0.4])}, {"z": torch.tensor([True])})
        >>> with inference_scope(model, seed=0):
        ...     PerceptDensity(Generative(model))(torch.tensor([0.5]), percept).shape
        torch.Size([1, 2])
    """

    def __init__(self, programs: Generative) -> None:
        self.model = programs.model
        self.programs = programs

    @cached_property
    def signature(self) -> Signature:
        """The signature of the model, with what its observation sites depend on."""
        signature = self.programs.signature
        return replace(signature, dependencies=dependencies(self.model, signature))

    def __call__(self, state: Any, percept: Percept) -> Tensor:
        """`log p(o | s, a, c)` of what was observed in states with leaves `[N, …]`, by context, `[N, C]`."""
        C, N = self.model.num_contexts, len(next(iter(percept.observed.values())))
        plates = [1] * self.model.max_plate_nesting
        states = map_state(lambda leaf: leaf[None, :, None], state)  # [1, N, 1, …]
        contexts = torch.arange(C, device=self.model.device).reshape(-1, 1, 1, *plates)
        observed = Observed(0, percept.action, percept.observations, percept.observed)
        shape = torch.Size((C, N, 1, *plates))

        def draw_hidden(name: str, fn: Any) -> tuple[Tensor, Tensor]:
            return draw(fn, shape, common=True), torch.zeros((), device=self.model.device)

        density = log_density_of_seen(
            self.model, self.signature, states, contexts, observed, draw=draw_hidden
        )
        return density.expand(C, N, 1)[..., 0].T
