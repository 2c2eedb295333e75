"""The end of calls whose outputs a GPU may still be writing: it is waited for once, not for each tensor or call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ...memory.cuda.events import Event, EventRecorder
from .arrays import DeviceArrays

__all__ = ["Committed", "complete"]


class Committed(Protocol):
    """As much of a call as is needed to end it."""

    @property
    def devices(self) -> set[int] | None:
        """The GPUs that it uses."""

    @property
    def can_end_by_event(self) -> bool:
        """Whether its client can wait for events."""

    def end(self, events: Sequence[Event] = ()) -> None:
        """Write its results."""

    def fail(self, error: BaseException) -> None:
        """Fail it."""


def complete(calls: Iterable[Committed], arrays: DeviceArrays, recorder: EventRecorder | None) -> None:
    """Wait for GPUs and end calls that were committed: all well, or all by an error, as nobody knows whose has failed.

    Raises nothing: each call has its response then.

    Parameters
    ----------
    calls : iterable of Committed
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
    except Exception as error:  # whatever CUDA has against it
        for call in waiting:
            call.fail(error)
        return
    for call in now:
        call.end()
    for call in later:
        call.end([events[device] for device in sorted(call.devices or ())])


def _devices_of(calls: Iterable[Committed]) -> list[int]:
    return sorted({device for call in calls for device in call.devices or ()})
