"""What all calls of a model instance share."""

from __future__ import annotations

from typing import NamedTuple

from ..model_spec import ModelSpec
from .device_arrays import DeviceArrays
from .forward import Forwarder
from .plans import Plans
from .triton import TritonBackend

__all__ = ["Instance"]


class Instance(NamedTuple):
    """One model instance, from ``initialize`` to ``finalize``."""

    spec: ModelSpec
    backend: TritonBackend
    plans: Plans
    arrays: DeviceArrays
    forwarder: Forwarder

    def close(self) -> None:
        """Unmap every region, and remove those of the instance's own. Arrays over them stay valid."""
        self.plans.close()
        self.forwarder.close()
