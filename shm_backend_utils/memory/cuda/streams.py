"""Streams and events of GPUs as users hold them: those of torch, of CuPy, of cuda-bindings, or a number.

CUDA's protocol for streams in Python is ``__cuda_stream__``, which returns a version and the ``CUstream``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ...errors import CallerError
from .runtime import CudaRuntime

__all__ = ["NamedEvent", "NamedStream", "named", "named_stream"]

_DEFAULT_STREAMS: Final = frozenset({0, 1, 2})


class NamedStream(NamedTuple):
    """A stream that a user has named.

    Attributes
    ----------
    handle : int
        The ``CUstream``.
    device : int or None
        Whose it is; None if only CUDA knows. The default streams are those of whatever device is meant.
    """

    handle: int
    device: int | None = None

    def device_on(self, runtime: CudaRuntime, meant: int) -> int:
        """Return whose it is; of a default stream that does not say so, ``meant``."""
        if self.device is not None:
            return self.device
        return runtime.stream_device(self.handle, meant)


class NamedEvent(NamedTuple):
    """An event that a user has recorded, and named.

    Attributes
    ----------
    handle : int
        The ``CUevent``.
    """

    handle: int


def named_stream(value: Any) -> NamedStream:
    """Return the stream that a user means.

    Parameters
    ----------
    value : object
        What has ``__cuda_stream__``; a ``torch.cuda.Stream``, a ``cupy.cuda.Stream``, a ``CUstream``, or its number: 0
        and 1 are the legacy default stream, 2 the thread's own default stream.

    Raises
    ------
    CallerError
        It is none of these.
    """
    handle, device = _handle_of(value), None
    if handle is None:
        raise CallerError(
            f"{value!r} is no stream of a GPU; expected what has __cuda_stream__, as streams of torch, CuPy and "
            "cuda-core have, or a CUstream as a number"
        )
    if handle in _DEFAULT_STREAMS or handle < 0:
        device = _device_of(value)
    if handle < 0:
        raise CallerError(f"stream {handle} is none of CUDA's; expected a number of 0 or more")
    return NamedStream(handle, device)


def named(value: Any) -> tuple[NamedStream | NamedEvent, ...]:
    """Return the streams and events that a user means by one value: a stream, an event, or a sequence of such.

    Raises
    ------
    CallerError
        There is something else in it.
    """
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple([_named(each) for each in value])
    return (_named(value),)


def _named(value: Any) -> NamedStream | NamedEvent:
    event = _event_handle_of(value)
    return named_stream(value) if event is None else NamedEvent(event)


def _handle_of(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if hasattr(value, "__cuda_stream__"):
        _, handle = value.__cuda_stream__()
        return int(handle)
    for name in ("cuda_stream", "ptr"):  # torch's streams, and CuPy's before 14
        if hasattr(value, name):
            return int(getattr(value, name))
    try:
        return int(value)  # also a CUstream of cuda-bindings
    except (TypeError, ValueError):
        return None


def _event_handle_of(value: Any) -> int | None:
    """Return the handle of what is an event: torch's, CuPy's, or a CUevent; None of anything else."""
    if hasattr(value, "cuda_event"):
        return int(value.cuda_event)
    if type(value).__name__ in ("Event", "CUevent", "cudaEvent_t"):
        return int(value.ptr) if hasattr(value, "ptr") else int(getattr(value, "handle", value))
    return None


def _device_of(value: Any) -> int | None:
    """Return the device that a default stream says it is of; None if it does not."""
    device = getattr(value, "device_id", None)
    if device is None:
        device = getattr(getattr(value, "device", None), "index", None)
    return device if isinstance(device, int) and device >= 0 else None
