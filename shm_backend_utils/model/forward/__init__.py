"""Calls from model to model, by the Python backend's business logic scripting (BLS)."""

from __future__ import annotations

from .forwarder import CALLERS_PARAMETER, Forwarder
from .lending import LentMemory
from .ordinary import Forwarding, ForwardOutputs

__all__ = ["CALLERS_PARAMETER", "ForwardOutputs", "Forwarder", "Forwarding", "LentMemory"]
