"""The half that ``model.py`` imports. It needs numpy and the standard library, nothing else."""

from __future__ import annotations

from .call import Call
from .session import ShmSession

__all__ = ["Call", "ShmSession"]
