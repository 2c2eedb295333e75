"""The end of calls whose outputs a GPU may still be writing: it is waited for once, not for each tensor or call."""

from __future__ import annotations

from collections.abc import Iterable

from ..call import Call
from ..devices.arrays import DeviceArrays

__all__ = ["complete", "complete_by_events"]


def complete(calls: Iterable[Call], arrays: DeviceArrays) -> None:
    """Wait for GPUs and end calls that were committed: all well, or all by an error, as nobody knows whose has failed.

    Raises nothing: each call has its response then.
    """
    waiting = list(calls)
    try:
        arrays.wait([call.devices for call in waiting if call.devices is not None])
    except BaseException as error:  # whatever it is, every call needs its response
        for call in waiting:
            call.fail(error)
        return
    for call in waiting:
        if call.devices is not None:
            call.devices.release()
        call.end()


def complete_by_events(calls: Iterable[Call], arrays: DeviceArrays) -> None:
    """End calls as :func:`complete` does, but wait for none that its client can wait for by events of its own."""
    later: list[Call] = []
    now: list[Call] = []
    for call in calls:
        (later if call.can_end_by_event else now).append(call)
    for call in later:
        assert call.devices is not None
        regions = call.event_regions
        try:
            arrays.record(call.devices, regions.values())
        except BaseException as error:  # whatever it is, the call needs its response
            call.fail(error)
        else:
            call.devices.leave()
            call.end(list(regions))
    if now:
        complete(now, arrays)
