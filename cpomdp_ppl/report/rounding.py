"""Numbers for a page, with no more digits than can be seen."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = 2**16 - 1
"""The highest level of a packed number; the lowest is 0."""


def significant(values: Tensor | np.ndarray[Any, Any], digits: int = 4) -> Any:
    """Nested lists of numbers with a few significant digits; None for what is not finite.

    Examples:
        >>> significant(np.array([[1234.56, 0.00123456], [np.nan, 0.0]]))
        [[1235.0, 0.001235], [None, 0.0]]
    """
    array = np.asarray(values.detach().cpu().numpy() if not isinstance(values, np.ndarray) else values)
    array = array.astype(np.float64)
    finite = np.isfinite(array)
    size = np.abs(np.where(finite & (array != 0), array, 1.0))
    # Only integer powers of ten, to multiply or divide by: 0.1 is not exact in binary.
    places = digits - 1 - np.floor(np.log10(size)).astype(int)
    up, down = 10.0 ** np.clip(places, 0, 300), 10.0 ** np.clip(-places, 0, 300)
    rounded = np.round(np.where(finite, array, 0.0) * up / down) * down / up
    listed: Any = np.where(finite, rounded.astype(object), np.array(None))
    return listed.tolist()


def packed(values: Tensor) -> dict[str, Any]:
    """Numbers as 16-bit levels between their extremes, in base 64, a fifth as long as in decimals.

    Examples:
        >>> import torch
        >>> packed(torch.tensor([[0.0, 1.0]]))
        {'shape': [1, 2], 'low': 0.0, 'high': 1.0, 'levels': 'AAD//w=='}
    """
    array = values.detach().cpu().numpy().astype(np.float64)
    low, high = float(array.min()), float(array.max())
    unit = (high - low) / LEVELS or 1.0
    levels = np.round((array - low) / unit).astype("<u2")
    return {
        "shape": list(array.shape),
        "low": low,
        "high": high,
        "levels": base64.b64encode(levels.tobytes()).decode("ascii"),
    }
