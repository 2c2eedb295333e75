"""What all calls of a session share, and what a request says beside tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..model_spec import ModelSpec
from .devices.arrays import DeviceArrays
from .forward import Forwarder
from .mapping.mapped import Slot
from .mapping.resolver import Resolver
from .triton import TritonBackend

__all__ = ["Context", "SequencePart", "sequence_of"]

_START: Final = 1  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
_END: Final = 2  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_END


class SequencePart(NamedTuple):
    """The sequence that a request is part of.

    Attributes
    ----------
    correlation_id : int or str
        As the client chose it.
    is_start, is_end : bool
        Whether the request is the sequence's first, or its last.
    """

    correlation_id: int | str
    is_start: bool
    is_end: bool


@dataclass(frozen=True, slots=True)
class Context:
    """What all calls of a session share.

    Attributes
    ----------
    spec : ModelSpec
        The model's.
    backend : TritonBackend
    resolver : Resolver
        Finds memory.
    slots : mapping of str to Slot
        The registry's: what is mapped already.
    arrays : DeviceArrays
        For GPUs.
    forwarder : Forwarder
        For calls of other models.
    takes_delivered : bool
        Whether requests may come that name no memory.
    stream_patience_s : float
        How long a stream waits for its client to release a frame.
    """

    spec: ModelSpec
    backend: TritonBackend
    resolver: Resolver
    slots: Mapping[str, Slot]
    arrays: DeviceArrays
    forwarder: Forwarder
    takes_delivered: bool
    stream_patience_s: float


def sequence_of(request: Any) -> SequencePart | None:
    """Return the sequence that an InferenceRequest is part of; None if it is none."""
    correlation_id: int | str = request.correlation_id()
    if not correlation_id:
        return None
    flags = request.flags()
    return SequencePart(correlation_id, bool(flags & _START), bool(flags & _END))
