"""Faults that real stubs have, and that emulated ones have where they are switched on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Faults"]


@dataclass(frozen=True)
class Faults:
    """Which faults of real stubs an emulated one has; none by default.

    Attributes
    ----------
    is_stub_for_numpy_1 : bool
        The stub was built for NumPy 1, as that of Triton 24.10 and before, and its interpreter has NumPy 2. Without an
        error, arrays over the backend's memory have the first element everywhere, and tensors made of arrays leave
        without a byte. DLPack is not affected.
    """

    is_stub_for_numpy_1: bool = False
