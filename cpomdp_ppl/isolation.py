"""Running user programs without leaving a trace in the caller's process."""

from __future__ import annotations

import random
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pyro
import torch

from cpomdp_ppl.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def isolated(seed: int | None, *, validate: bool = False) -> Iterator[None]:
    """Seed every random number generator inside, and put everything back outside.

    Restored on exit: the generators of torch, NumPy and `random`, Pyro's param store (which can be
    read inside) and its validation flag.

    Args:
        seed: Seed for all three generators; None takes fresh entropy.
        validate: Whether distributions check their arguments inside.
    """
    if seed is None:
        seed = secrets.randbits(32)
    require(
        isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**32,
        "seed",
        seed,
        "None or an integer from 0 to 2**32 - 1",
    )
    python_state, numpy_state = random.getstate(), np.random.get_state()
    store = pyro.get_param_store()
    try:
        with torch.random.fork_rng(), store.scope(store.get_state()), pyro.validation_enabled(validate):
            _seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _seed(seed: int) -> None:
    # Not pyro.set_rng_seed: without CUDA, torch.manual_seed puts a stack trace on a list, for ever.
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
