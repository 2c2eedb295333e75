"""Photographs for gpu_normalize, and what must come out."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .report import require

SHAPE: Final = (2, 48, 64, 3)
NORMALIZED_SHAPE: Final = (2, 3, 48, 64)
_MEAN: Final = np.array([0.485, 0.456, 0.406])
_STD: Final = np.array([0.229, 0.224, 0.225])
_MOST: Final = 1e-5


def noise() -> npt.NDArray[np.uint8]:
    """Return some: always the same, and all noise."""
    return np.random.default_rng(1).integers(0, 256, SHAPE, np.uint8)


def compared(normalized: npt.NDArray[Any]) -> str:
    """Return in words how far this is from what NumPy makes of them; raises CheckFailedError if that is too far."""
    expected = ((noise() / 255 - _MEAN) / _STD).transpose(0, 3, 1, 2)
    error = float(np.abs(normalized - expected).max())
    require(error < _MOST, f"the results differ by up to {error:g}")
    return f"they differ by at most {error:.1e}"
