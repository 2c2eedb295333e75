"""What a request says of memory, and of the trace that it belongs to."""

from __future__ import annotations

from .arguments import refuse, signed
from .enums import NumberedEnum

__all__ = ["InferenceTrace", "MemoryType", "PreferredMemory"]


class MemoryType(NumberedEnum):
    """Where outputs of another model should lie."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """Where outputs of another model should lie: memory of the CPU, or of which GPU. From Triton 23.04 on."""

    __slots__ = ("_device", "_kind")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            refuse("PreferredMemory", "preferred_memory_type", preferred_memory_type, "a MemoryType")
        self._kind: MemoryType | None = preferred_memory_type
        self._device = signed("PreferredMemory", "preferred_device_id", preferred_device_id, 64)

    @classmethod
    def _unsaid(cls) -> PreferredMemory:
        """Return what a request has that says nothing of it."""
        made = cls.__new__(cls)
        made._kind = None
        made._device = 0
        return made


class InferenceTrace:
    """The trace of a request, to be handed to requests for other models; models do not make it.

    From Triton 23.08 on.
    """

    __slots__ = ("_context",)

    def __init__(self) -> None:
        self._context = ""

    def get_context(self) -> str | None:
        """Return the context of an OpenTelemetry trace as JSON, if there is one; from Triton 24.03 on."""
        return self._context or None

    @classmethod
    def _of(cls, context: str) -> InferenceTrace:
        made = cls()
        made._context = context
        return made
