"""Numbers of a whole batch, where a process may have only some of its episodes."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager


class Batchwide(Protocol):
    """Those who have a batch between them. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Which of them this process is, from 0; the first writes files, and speaks for all."""
        ...

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """Sum, element by element, of what each of them has."""
        ...

    def mean(self, *values: Tensor) -> Tensor:
        """Mean of all numbers of all episodes, for each of some `[B, …]`."""
        ...

    def std_mean(self, values: Tensor, axes: int | None = None) -> tuple[Tensor, Tensor]:
        """Spread (without a correction) and mean of all numbers of all episodes.

        Args:
            values: `[B, …]`.
            axes: How many axes to go over, from the first on; all if left out.
        """
        ...

    def average(
        self, losses: Tensor, weights: Sequence[nn.Parameter], share: float, names: Sequence[str] = ()
    ) -> Tensor:
        """The batch's losses, from those of a share of its episodes; weights get the batch's gradients, too.

        Args:
            losses: Means over this process's episodes, `[n]`.
            weights: With the gradients of those.
            share: How much of the batch this process has.
            names: Of the losses; the same for all of them.
        """
        ...

    def heard(self, words: str | None) -> str | None:
        """What the first of those says that have something to say; None if none has."""
        ...

    def shared(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the first process has: tensors, plain numbers and words."""
        ...

    def agree(self) -> None:
        """Wait for all.

        Raises:
            KeyboardInterrupt: If one of them was interrupted.
            ProcessFailedError: If one of them failed.
        """
        ...

    def finish(self) -> None:
        """From here on, Ctrl-C comes too late: there is a result."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Where an error of one process, or Ctrl-C, is the end for all, at the next call from here."""
        ...


class Alone:
    """One process that has all episodes.

    Example:
        >>> float(Alone().mean(torch.tensor([[1.0, 2.0], [3.0, 6.0]])))
        3.0
    """

    rank, size = 0, 1

    def total(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def mean(self, *values: Tensor) -> Tensor:
        """Means of all numbers."""
        return torch.stack([each.mean() for each in values])

    def std_mean(self, values: Tensor, axes: int | None = None) -> tuple[Tensor, Tensor]:
        """Spread and mean, over all axes or the first few."""
        if axes is None:
            return values.std(correction=0), values.mean()
        spread, mean = torch.std_mean(values, tuple(range(axes)), correction=0)
        return spread, mean

    def average(
        self, losses: Tensor, weights: Sequence[nn.Parameter], share: float, names: Sequence[str] = ()
    ) -> Tensor:
        """The losses themselves; gradients are the batch's already."""
        return losses.detach()

    def heard(self, words: str | None) -> str | None:
        """One's own words."""
        return words

    def shared(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The content itself."""
        return content

    def agree(self) -> None:
        """With oneself, at once."""

    def finish(self) -> None:
        """With oneself, at once."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Errors go their usual way."""
        yield


ALONE = Alone()


def takes_whole(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `whole`, for those who have the batch between them.

    Example:
        >>> takes_whole(lambda payoffs, whole: None), takes_whole(lambda payoffs, **further: None)
        (True, True)
        >>> takes_whole(lambda payoffs: None)
        False
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return False
    named = any(each.name == "whole" and each.kind is not each.POSITIONAL_ONLY for each in parameters)
    return named or any(each.kind is each.VAR_KEYWORD for each in parameters)
