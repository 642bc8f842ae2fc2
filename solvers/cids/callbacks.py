"""Watching a fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


class Callback(Protocol):
    """Called after every iteration."""

    def __call__(self, iteration: int, measured: Mapping[str, float], policy: Any) -> None:
        """Take note.

        Args:
            iteration: How many are over, from 1.
            measured: What was measured on the batch, by the names of `Solution.history`.
            policy: As it is now; not to be changed.
        """
        ...


class TensorBoard:
    """Write every measurement to TensorBoard; needs the extra `tensorboard`.

    Args:
        directory: Directory of the event files.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> from solvers import cids
        >>> cids.fit(LineGrid(), callbacks=[TensorBoard("runs/line_grid")])  # doctest: +SKIP
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory))

    def __call__(self, iteration: int, measured: Mapping[str, float], policy: Any) -> None:
        """Write one iteration."""
        for name, value in measured.items():
            self.writer.add_scalar(name, value, iteration)
        self.writer.flush()
