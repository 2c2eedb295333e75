"""Streams and events of GPUs as users hold them: those of torch, of CuPy, of cuda-bindings, or a number.

CUDA's protocol for streams in Python is ``__cuda_stream__``, which returns a version and the ``CUstream``.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Final, NamedTuple

from ..errors import CallerError, shown
from .errors import CudaError
from .runtime import DEFAULT_STREAMS, LEGACY_STREAM, PER_THREAD_STREAM, CudaRuntime

__all__ = ["Named", "NamedEvent", "NamedStream", "named", "named_stream"]

_NO_STREAM: Final = frozenset({"CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_CONTEXT"})


class NamedStream(NamedTuple):
    """A stream that a user has named."""

    handle: int
    device: int | None = None  # None: CUDA knows it, and a default stream is of the device that is meant

    @property
    def is_the_threads(self) -> bool:
        """Whether it is the per-thread default stream, which is another one in another thread."""
        return self.handle == PER_THREAD_STREAM

    def device_on(self, runtime: CudaRuntime, meant: int) -> int:
        """Return its device, ``meant`` for a default stream that has none; CallerError if CUDA knows no such stream."""
        if self.device is not None:
            return self.device
        try:
            return runtime.stream_device(self.handle, meant)
        except CudaError as error:
            if error.name not in _NO_STREAM:
                raise
            raise CallerError(
                "the stream that was named is none of this process' on a GPU; name one that was made here, and is not "
                "destroyed"
            ) from error


class NamedEvent(NamedTuple):
    """An event that a user has recorded, and named: the ``CUevent``."""

    handle: int


Named = Sequence[NamedStream | NamedEvent]
"""A user's streams and events; empty if the user named none."""


def named_stream(value: Any) -> NamedStream:
    """Return a user's stream, which is a number or some library's object; CallerError if it is none."""
    handle = _handle_of(value)
    if handle is None:
        raise CallerError(
            f"{shown(value)} is no stream of a GPU; expected what has __cuda_stream__, as streams of torch, CuPy and "
            "cuda-core have, or a CUstream as a number"
        )
    if not 0 <= handle < 2**64:
        raise CallerError(f"stream {shown(handle)} is none of CUDA's; expected a number of 0 or more, of 64 bits")
    # These libraries mean 1 by 0; the driver's functions may read 0 as a default stream of each thread.
    return NamedStream(handle or LEGACY_STREAM, _device_of(value) if handle in DEFAULT_STREAMS else None)


def named(value: Any) -> tuple[NamedStream | NamedEvent, ...]:
    """Return a user's streams and events: the value is one of them, or a sequence."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple([_named(each) for each in value])
    return (_named(value),)


def _named(value: Any) -> NamedStream | NamedEvent:
    event = _event_handle_of(value)
    if event is None:
        return named_stream(value)
    if event == 0:
        raise CallerError(f"{shown(value)} was never recorded, and stands for nothing; record it on your stream first")
    return NamedEvent(event)


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
    """Return whether a value's class, or a base of it, has such a name; so no library has to be imported."""
    return any(each.__name__ in names for each in type(value).__mro__)


def _device_of(value: Any) -> int | None:
    """Return the device that a default stream says it is of; None if it does not."""
    device = getattr(value, "device_id", None)
    if device is None:
        device = getattr(getattr(value, "device", None), "index", None)
    return device if isinstance(device, int) and device >= 0 else None
