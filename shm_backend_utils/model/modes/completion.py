"""The end of calls whose outputs a GPU may still be writing: it is waited for once, not for each tensor or call."""

from __future__ import annotations

from collections.abc import Iterable

from ...memory.cuda.events import EventRecorder
from ...memory.cuda.memory import CudaAccess
from ..call import Call
from ..devices.arrays import DeviceArrays

__all__ = ["Completion", "complete"]


class Completion:
    """How the calls of one session that use GPUs end.

    Parameters
    ----------
    arrays : DeviceArrays
        Waits for the GPUs.
    cuda : CudaAccess
        For events, if a GPU is in use.
    by_events : bool
        Whether clients wait for events, where they can.
    """

    def __init__(self, arrays: DeviceArrays, cuda: CudaAccess, *, by_events: bool) -> None:
        self._arrays = arrays
        self._cuda = cuda
        self._by_events = by_events
        self._recorder: EventRecorder | None = None

    def complete(self, calls: Iterable[Call]) -> None:
        """End the calls of one ``execute`` that were committed, as :func:`complete` does."""
        if self._by_events and self._recorder is None:
            self._recorder = EventRecorder(self._cuda.runtime)
        complete(calls, self._arrays, self._recorder)

    def close(self) -> None:
        """Let go of the events."""
        self._recorder = None


def complete(calls: Iterable[Call], arrays: DeviceArrays, recorder: EventRecorder | None) -> None:
    """Wait for GPUs and end calls that were committed: all well, or all by an error, as nobody knows whose has failed.

    Raises nothing: each call has its response then.

    Parameters
    ----------
    calls : iterable of Call
        Those of one ``execute`` that use a GPU.
    arrays : DeviceArrays
        Waits for the GPUs.
    recorder : EventRecorder or None
        Records events for clients to wait for, instead, where all that a call has written is on GPUs.
    """
    waiting = list(calls)
    later = [] if recorder is None else [call for call in waiting if call.can_end_by_event]
    now = [call for call in waiting if call not in later]
    try:
        events = {} if recorder is None else {device: recorder.record(device) for device in _devices_of(later)}
        arrays.synchronize(_devices_of(now))
    except BaseException as error:  # whatever it is, every call needs its response
        for call in waiting:
            call.fail(error)
        return
    for call in now:
        call.end()
    for call in later:
        call.end([events[device] for device in sorted(call.devices or ())])


def _devices_of(calls: Iterable[Call]) -> list[int]:
    return sorted({device for call in calls for device in call.devices or ()})
