"""One call of one of a model's programs on a small batch, and the faults that calls bring to light."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch

from cpomdp_ppl.handlers import Batched, Recorded
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.model import CPOMDP


@dataclass
class Faults:
    """The faults found so far, at most one of a kind for each program."""

    found: dict[tuple[str, str], str] = field(default_factory=dict)

    def report(self, program: str, kind: str, sentence: str) -> None:
        """Add a fault, unless one of this kind is known already."""
        self.found.setdefault((program, kind), f"{program}: {sentence}")

    def has(self, program: str) -> bool:
        """Whether anything is wrong with a program."""
        return any(name == program for name, _ in self.found)


def first_line(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


Sites = dict[str, Any]
"""Pyro's messages of the sample sites that a program visited, by name."""


@dataclass(frozen=True)
class Call:
    """One call of one program on a batch `[context, episode, particle]`."""

    model: CPOMDP
    program: str
    state: Any  # None for `initial`
    action: Tensor | None  # [1, episode or 1, 1], or [1, episode or 1, 1, …, D]
    context: Tensor  # [C, 1, 1]
    shape: tuple[int, int, int]
    when: str = ""  # in words that can end a sentence: " for action 'left'"
    arrival: Any = None  # the next state, for rewards that depend on it

    def arguments(self) -> tuple[Any, ...]:
        """Copies of the arguments, which a program may spoil."""
        context = self.context.clone()
        if self.program == "initial":
            return (context,)
        action = None if self.action is None else self.action.clone()
        arrival = () if self.arrival is None else (map_state(torch.clone, self.arrival),)
        return map_state(torch.clone, self.state), action, context, *arrival

    def run(
        self, values: dict[str, Tensor] | None = None, arguments: tuple[Any, ...] | None = None
    ) -> tuple[Any, Sites]:
        """Result and sites; with `values`, sites take these instead of being drawn."""
        with (
            poutine.condition(data=values or {}),
            Batched(self.shape, self.model.max_plate_nesting),
            Recorded() as seen,
        ):
            return getattr(self.model, self.program)(*(arguments or self.arguments())), seen.sites

    def at(self, c: int, e: int, n: int) -> Call:
        """The same call for one cell of the batch."""
        action = self.action
        if action is not None and action.shape[1] > 1:
            action = action[:, e : e + 1]
        state, arrival = (
            None if state is None else map_state(lambda leaf: cell(leaf, c, e, n), state)
            for state in (self.state, self.arrival)
        )
        context = self.context[c : c + 1]
        return Call(self.model, self.program, state, action, context, (1, 1, 1), self.when, arrival)

    def full_shape(self) -> tuple[int, ...]:
        """The batch, and an axis of size 1 for each of the programs' plates."""
        return (*self.shape, *[1] * self.model.max_plate_nesting)


def cell(tensor: Tensor, c: int, e: int, n: int) -> Tensor:
    """One cell of `[C, E, N, …]`, with its axes kept."""
    return tensor[c : c + 1, e : e + 1, n : n + 1]
