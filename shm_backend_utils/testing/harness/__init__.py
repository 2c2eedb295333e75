"""A model's folder, loaded and run without a server."""

from ..emulator.host import Faults
from .harness import ModelHarness
from .requests import Request

__all__ = ["Faults", "ModelHarness", "Request"]
