"""Calls from model to model, by the Python backend's business logic scripting (BLS)."""

from __future__ import annotations

from .forwarder import CALLERS_PARAMETER, Forwarder
from .ordinary import Forwarding, ForwardOutputs

__all__ = ["CALLERS_PARAMETER", "ForwardOutputs", "Forwarder", "Forwarding"]
