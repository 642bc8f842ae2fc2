"""Running a model in double precision."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpomdp_ppl.model import CPOMDP


@contextmanager
def double_precision() -> Iterator[None]:
    """Python numbers inside become float64 tensors: a program's constants are then exact."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_double_precision(model: CPOMDP) -> CPOMDP:
    """The model itself, or a copy with float64 constants if it has others: those would not mix with ours."""
    plain = [x for x in _plain_tensors(model) if x.is_floating_point()]
    constants = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    if all(x.dtype == torch.float64 for x in (*constants, *plain)):
        return model
    # What the memo knows is not copied but replaced, wherever it comes up.
    return deepcopy(model, {id(x): x.detach().double() for x in plain}).double()


def _plain_tensors(model: CPOMDP) -> Iterator[Tensor]:
    """Tensors that a model has as plain attributes, or in a list, tuple or dict that is one."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            members = value.values() if isinstance(value, dict) else value
            several = members if isinstance(value, (dict, list, tuple)) else (value,)
            yield from (x for x in several if isinstance(x, Tensor) and not isinstance(x, Parameter))
