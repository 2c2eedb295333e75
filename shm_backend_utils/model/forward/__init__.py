"""Calls from model to model, by the Python backend's business logic scripting (BLS)."""

from __future__ import annotations

from .direct import LentMemory, lendable
from .forwarder import CALLERS_PARAMETER, Forwarder, check_all_are_over
from .ordinary import Forwarding, ForwardOutputs

__all__ = [
    "CALLERS_PARAMETER",
    "ForwardOutputs",
    "Forwarder",
    "Forwarding",
    "LentMemory",
    "check_all_are_over",
    "lendable",
]
