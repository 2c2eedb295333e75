"""Tensors of an array library that is nobody's, on the fake driver: what a user of torch, CuPy or JAX would pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

if TYPE_CHECKING:
    from .driver import FakeDriver

__all__ = ["Tensor", "new_tensor"]


class Tensor:
    """A tensor on the fake driver."""


def new_tensor(driver: FakeDriver, values: npt.ArrayLike, **options: Any) -> Tensor:
    """Return a tensor with these values."""
    raise NotImplementedError
