"""Random numbers: seeds for every purpose, and programs that leave the caller's generators alone."""

from __future__ import annotations

import random
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyro
import torch
from torch import Tensor

from cpomdp_ppl.errors import as_integer, invalid

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def isolated(seed: int | None, *, validate: bool = False) -> Iterator[None]:
    """Seed every random number generator inside, and put everything back outside.

    Restored on exit: the generators of torch, NumPy and `random`, Pyro's param store (which can be
    read inside), and the validation flags of Pyro and torch.

    Args:
        seed: Seed for all three generators; None takes fresh entropy.
        validate: Whether distributions check their arguments inside.
    """
    number = fresh_seed(seed)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_validates = pyro.settings.get("validate_distributions_torch")  # Pyro would set it to its flag
    store = pyro.get_param_store()
    try:
        with torch.random.fork_rng(), store.scope(store.get_state()), pyro.validation_enabled(validate):
            _seed(number)
            yield
    finally:
        pyro.settings.set(validate_distributions_torch=torch_validates)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def require_seed(seed: Any) -> None:
    """Raise unless this is a seed, or None."""
    number = as_integer(seed)
    if seed is not None and (number is None or not 0 <= number < 2**32):
        raise invalid("seed", seed, "None or an integer from 0 to 2**32 - 1")


def fresh_seed(seed: int | None) -> int:
    """The seed itself, if it is a valid one; None takes fresh entropy."""
    require_seed(seed)
    return secrets.randbits(32) if seed is None else int(seed)


@overload
def seed_for(seed: int, *purpose: int) -> int: ...


@overload
def seed_for(seed: int | None, *purpose: int) -> int | None: ...


def seed_for(seed: int | None, *purpose: int) -> int | None:
    """A seed for each purpose of random numbers, derived from one seed; None stays None.

    Examples:
        >>> seed_for(0, 1) == seed_for(0, 1), seed_for(0, 1) == seed_for(0, 2)
        (True, False)
    """
    if seed is None:
        return None
    # The number of purposes goes in, too, as a SeedSequence pads what it is given with zeros.
    return int(np.random.SeedSequence([int(seed), len(purpose), *purpose]).generate_state(1)[0])


def seeds_for(seed: int, number: int) -> list[int]:
    """So many seeds, each for another use of random numbers."""
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(number)]


def generators() -> tuple[Any, ...]:
    """The states of all generators, to compare: as long as nothing is drawn, they stay the same."""
    python, (kind, keys, *rest), of_torch = _states()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = [bytes(state.numpy()) for state in (of_torch, *on_devices)]
    return python, kind, keys.tobytes(), *rest, *states


def drawn_from(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[str]:
    """The generators whose states differ, by the module that draws from them."""
    parts = {"torch": slice(6, None), "numpy.random": slice(1, 6), "random": slice(0, 1)}
    return [name for name, part in parts.items() if before[part] != after[part]]


def inverse_cdf(weights: Tensor, levels: Tensor) -> Tensor:
    """The indices at which the distribution functions of weights `[…, N]` pass levels `[…, M]` in [0, 1).

    An index of weight 0 is never among them.

    Examples:
        >>> inverse_cdf(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0.0, 0.2, 0.3, 0.9]))
        tensor([0, 0, 2, 2])
    """
    total = weights.cumsum(-1)
    return first_above(total / total[..., -1:], levels)


def index_at(weights: Tensor, level: Tensor) -> Tensor:
    """As `inverse_cdf`, of a single level `[…, 1]` for weights `[…, N]` that broadcast with it: `[…]`."""
    total = weights.cumsum(-1)
    total = total[..., :-1] / total[..., -1:]  # exactly 1 from the last possible index on
    return (total <= level).sum(-1)


def first_above(cumulative: Tensor, levels: Tensor) -> Tensor:
    """The first index whose cumulative weight `[…, N]` is above each level `[…, M]`; the last, if none is."""
    return torch.searchsorted(cumulative, levels, right=True).clamp_(max=cumulative.shape[-1] - 1)


class RandomStream:
    """A separate stream of random numbers: inside, generators go on from where it stopped the last time.

    What runs inside draws the same whatever is drawn outside, and the other way round.

    Args:
        seed: Where the stream begins.

    Examples:
        >>> stream = RandomStream(0)
        >>> with stream:
        ...     first = torch.rand(())
        >>> with isolated(0):
        ...     bool(first == torch.rand(()))
        True
    """

    def __init__(self, seed: int) -> None:
        outside = _states()
        _seed(seed)
        self._inside = _states()
        _restore(outside)

    def __enter__(self) -> None:
        self._outside = _states()
        _restore(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = _states()
        _restore(self._outside)


def _states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _seed(seed: int) -> None:
    # Not pyro.set_rng_seed: without CUDA, torch.manual_seed puts a stack trace on a list, for ever.
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
