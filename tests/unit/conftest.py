"""What every unit test may ask for."""

from __future__ import annotations

from tests.unit.gpus import driver, gpu, peer

__all__ = ["driver", "gpu", "peer"]
