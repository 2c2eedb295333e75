"""Streams and events of GPUs as users pass them: objects of torch, CuPy or cuda-bindings, or a number.

CUDA's protocol for streams in Python is ``__cuda_stream__``, which returns a version and the ``CUstream``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Final

from ..errors import CallerError, shown
from .errors import CudaError
from .runtime import DEFAULT_STREAMS, LEGACY_STREAM, PER_THREAD_STREAM, CudaRuntime

__all__ = ["Named", "NamedEvent", "NamedStream", "named", "named_stream"]

_NO_STREAM: Final = frozenset({"CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_CONTEXT"})


@dataclass(frozen=True, order=True)
class NamedStream:
    """A stream that a user has named."""

    handle: int
    device: int | None = None  # None: ask CUDA; a default stream belongs to the intended device
    owner: object = field(default=None, compare=False, repr=False)  # keeps the stream; None: the user may destroy it

    @property
    def is_per_thread(self) -> bool:
        """Whether this is the per-thread default stream, which is a different stream in each thread."""
        return self.handle == PER_THREAD_STREAM

    def on_its_device(self, runtime: CudaRuntime, current: int) -> NamedStream:
        """Return the stream with its device, or unchanged if it is a default stream; raises as :meth:`device_on`."""
        if self.device is not None or self.handle in DEFAULT_STREAMS:
            return self
        return NamedStream(self.handle, self.device_on(runtime, current), self.owner)

    def device_on(self, runtime: CudaRuntime, meant: int) -> int:
        """Return the stream's device (``meant`` for a default stream without one); CallerError for unknown streams."""
        if self.device is not None:
            return self.device
        try:
            return runtime.stream_device(self.handle, meant)
        except CudaError as error:
            if error.name not in _NO_STREAM:
                raise
            raise CallerError(
                "the named stream is not a CUDA stream of this process; name one that this process made and has not "
                "destroyed"
            ) from error


@dataclass(frozen=True)
class NamedEvent:
    """An event that a user has recorded, and named."""

    handle: int
    owner: object = field(default=None, compare=False, repr=False)  # keeps the event


Named = Sequence[NamedStream | NamedEvent]
"""A user's streams and events; empty if the user named none."""


def named_stream(value: Any) -> NamedStream:
    """Return a user's stream, a number or a library's object; CallerError for anything else."""
    handle = _handle_of(value)
    if handle is None:
        raise CallerError(
            f"{shown(value)} is not a CUDA stream; expected an object with __cuda_stream__, such as a stream of torch, "
            "CuPy or cuda-core, or a CUstream as a number"
        )
    if not 0 <= handle < 2**64:
        raise CallerError(f"stream {shown(handle)} is not a CUDA stream; expected a number of 0 or more, of 64 bits")
    # These libraries write 0 for stream 1; the driver may read 0 as the per-thread default stream.
    device = _device_of(value) if handle in DEFAULT_STREAMS else None
    is_only_a_handle = isinstance(value, Integral) or _has_class(value, "CUstream", "cudaStream_t", "ExternalStream")
    return NamedStream(handle or LEGACY_STREAM, device, None if is_only_a_handle else value)


def named(value: Any) -> tuple[NamedStream | NamedEvent, ...]:
    """Return a user's streams and events; the value is one of them, or a sequence."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple([_named(each) for each in value])
    return (_named(value),)


def _named(value: Any) -> NamedStream | NamedEvent:
    event = _event_handle_of(value)
    if event is None:
        return named_stream(value)
    if event == 0:
        raise CallerError(f"{shown(value)} was never recorded; record it on your stream first")
    return NamedEvent(event, value)


def _handle_of(value: Any) -> int | None:
    if isinstance(value, type):  # a class has the attributes of its objects
        return None
    if hasattr(value, "__cuda_stream__"):
        version, handle = value.__cuda_stream__()
        if version != 0:
            raise CallerError(f"{shown(value)} has __cuda_stream__ of version {version}; expected 0")
        return int(handle)
    if hasattr(value, "cuda_stream"):  # torch's
        return int(value.cuda_stream)
    if _has_class(value, "Stream", "ExternalStream") and hasattr(value, "ptr"):  # CuPy's, before 14
        return int(value.ptr)
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    return int(value) if is_number or _has_class(value, "CUstream", "cudaStream_t") else None


def _event_handle_of(value: Any) -> int | None:
    """Return the handle of an event of torch, CuPy or cuda-core, or of a CUevent; None for anything else."""
    if _has_class(value, "Event"):
        for name in ("cuda_event", "ptr", "handle"):  # torch's, CuPy's, cuda-core's
            if hasattr(value, name):
                return int(getattr(value, name))
    return int(value) if _has_class(value, "CUevent", "cudaEvent_t") else None


def _has_class(value: object, *names: str) -> bool:
    """Return whether a value's class, or a base class, has one of these names, without importing a library."""
    return any(each.__name__ in names for each in type(value).__mro__)


def _device_of(value: Any) -> int | None:
    """Return the device that a default stream object names; None if it names none."""
    device = getattr(value, "device_id", None)
    if device is None:
        device = getattr(getattr(value, "device", None), "index", None)
    return device if isinstance(device, int) and device >= 0 else None
