"""States in which the density of an observation makes no sense."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from cpomdp_ppl.handlers import base_of, is_deterministic, mask_of
from cpomdp_ppl.inference.enumeration import ENGINE_AXES
from cpomdp_ppl.inference.site_parameters import fault, parameters_of


class ImproperSites(Messenger):
    """Notes where the parameters of a program's sites make no sense, though a density comes out.

    A normal density says so by itself: it is NaN then.

    Args:
        program: Name of the program, for messages.
        max_plate_nesting: Number of axes on the right that belong to the program's own plates.

    Attributes:
        wrong: Where that is, bool `[context, episode, particle]` or a shape that broadcasts to it; None if
            nowhere.
        message: A description of the first such site.
    """

    def __init__(self, program: str, max_plate_nesting: int) -> None:
        super().__init__()
        self.program = program
        self.plate_axes = max_plate_nesting
        self.wrong: Tensor | None = None
        self.message = ""

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg) or isinstance(base_of(msg["fn"]), dist.Normal):
            return
        fn, depth = msg["fn"], ENGINE_AXES + self.plate_axes
        for parameter, value, proper in parameters_of(base_of(fn)):
            if bool(proper.all()):
                continue
            # Below an event, any wrong component will do; so will any value of a hidden site.
            event = max(0, proper.dim() - len(fn.batch_shape))
            wrong = (~proper).flatten(-event).any(-1) if event else ~proper
            mask = mask_of(msg)
            wrong = wrong & mask if isinstance(mask, Tensor) else wrong
            wrong = wrong.reshape((1,) * (depth - wrong.dim()) + wrong.shape)
            wrong = wrong.flatten(0, wrong.dim() - depth - 1).any(0) if wrong.dim() > depth else wrong
            wrong = wrong.flatten(ENGINE_AXES).any(-1) if self.plate_axes else wrong
            self.wrong = wrong if self.wrong is None else self.wrong | wrong
            self.message = self.message or fault(self.program, msg["name"], fn, parameter, value, proper)
