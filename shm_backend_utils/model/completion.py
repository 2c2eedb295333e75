"""The end of calls whose outputs a GPU may still be writing: it is waited for once, not for each tensor or call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..memory.cuda.events import Event, EventRecorder
from .device_arrays import DeviceArrays

if TYPE_CHECKING:
    from .served import Served

__all__ = ["Completion"]


class Completion:
    """Ends the calls of one ``execute``.

    Parameters
    ----------
    arrays : DeviceArrays
        Waits for the GPUs.
    recorder : EventRecorder, optional
        Records events for clients to wait for, instead, where all that a call has written is on GPUs.
    """

    def __init__(self, arrays: DeviceArrays, recorder: EventRecorder | None = None) -> None:
        self._arrays = arrays
        self._recorder = recorder
        self._waiting: list[Served] = []

    def add(self, call: Served) -> None:
        """Take a call that the model has left, and that :meth:`finish` is to end."""
        self._waiting.append(call)

    def finish(self) -> None:
        """Wait for the GPUs and end the calls: all well, or all by the error, for nobody knows whose work has failed.

        Raises nothing: each call has its response then.
        """
        calls, self._waiting = self._waiting, []
        if not calls:
            return
        later = [] if self._recorder is None else [call for call in calls if call.can_end_by_event]
        now = [call for call in calls if call not in later]
        try:
            events = {device: self._record(device) for device in _devices_of(later)}
            self._arrays.synchronize(_devices_of(now))
        except Exception as error:
            for call in calls:
                call.end_by(error)
            return
        for call in now:
            call.end()
        for call in later:
            call.end([events[device] for device in sorted(call.devices)])

    def _record(self, device: int) -> Event:
        assert self._recorder is not None
        return self._recorder.record(device)


def _devices_of(calls: list[Served]) -> list[int]:
    return sorted({device for call in calls for device in call.devices})
