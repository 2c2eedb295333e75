"""The end of calls whose outputs a GPU may still be writing: it is waited for once, not for each tensor or call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .device_arrays import DeviceArrays

if TYPE_CHECKING:
    from .call import Call

__all__ = ["Completion"]


class Completion:
    """Ends the calls of one ``execute``."""

    def __init__(self, arrays: DeviceArrays) -> None:
        self._arrays = arrays
        self._waiting: list[Call] = []

    def add(self, call: Call) -> None:
        """Take a call that the model has left, and that :meth:`finish` is to end."""
        self._waiting.append(call)

    def finish(self) -> None:
        """Wait for the GPUs and end the calls: all well, or all by the error, for nobody knows whose work has failed.

        Raises nothing: each call has its response then.
        """
        calls, self._waiting = self._waiting, []
        if not calls:
            return
        try:
            self._arrays.synchronize(sorted({device for call in calls for device in call.devices}))
        except Exception as error:
            for call in calls:
                call.end_by(error)
            return
        for call in calls:
            call.end()
