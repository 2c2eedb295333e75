"""Waits of calls for GPUs, and for models whose GPUs are at work. They poll; no calling thread blocks in CUDA."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from ...errors import CallerError, PeerError, translate
from ...gpu.errors import CudaError
from ...gpu.memory.pinned import PinnedRecords
from ...gpu.ordering import Mark
from ...gpu.runtime import DEFAULT_STREAMS
from ...gpu.streams import Named, NamedStream
from ...memory.descriptors import Descriptor
from ...memory.pool.slot import SlotRegion, is_left
from ...protocol.layout import COMPLETED, LOST
from ..errors import NOT_SENT, out_of_time
from ..inputs.devices import GpuWork
from ..steps import Pause, Steps, offloaded

__all__ = ["Awaited", "LostMemoryError", "are_at_work", "followed", "followed_others", "models_are_done", "worked_off"]

_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
_COMES_BEFORE: Final = "earlier work on its GPU, or the copy of its inputs, was not done"


class LostMemoryError(PeerError):
    """A model, or its GPU, died at work in a region's memory; the memory's state is unknown from then on."""

    def __init__(self) -> None:
        super().__init__(
            "a model's process ended, or its GPU failed, before the work in this call's memory was done; that memory "
            "is not used again; call again, or prepare another call if this was a prepared one"
        )


def _until(is_done: Callable[[], bool], deadline: float, doing: str, request: str = NOT_SENT) -> Steps[None]:
    """Poll until ``is_done``; raises :func:`out_of_time` with ``doing`` and ``request``."""
    pause_s = _FIRST_PAUSE_S
    while not is_done():
        if time.monotonic() > deadline:
            raise out_of_time(doing, request)
        yield Pause(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def followed(work: GpuWork, named: Named, devices: Iterable[int], deadline: float) -> Steps[Named]:
    """Make a call's GPU work wait for the streams that the user named, or without such streams for all work.

    Return these streams with their GPUs.
    """
    with translate(CudaError, functools.partial(_refusal, bool(named))):
        if named or work.gpus.runtime.records_devices:
            return work.follow(named, devices)
        else:  # a driver before CUDA 12.5 cannot record the work of a whole GPU, so the host waits
            return (yield from offloaded(lambda: work.follow((), devices), deadline, _COMES_BEFORE))


def _refusal(names_streams: bool, error: CudaError) -> CallerError | None:
    """Return the error of a call that cannot wait beside a graph capture; None for other errors."""
    if not error.is_capture:
        return None
    if names_streams:
        return CallerError(
            f"a stream that cuda_stream names is being captured into a graph ({error.name}), so the call cannot wait "
            "for it; end the capture first, or name the stream that the graph is launched on"
        )
    return CallerError(
        "this call names no stream, so it must wait for all work of this process on its GPUs; but a stream of this "
        f"process is being captured into a graph, and that wait would end the capture ({error.name}); name the call's "
        "streams by cuda_stream, or capture no graph meanwhile"
    )


def followed_others(work: GpuWork, others: set[NamedStream | None], devices: set[int], deadline: float) -> Steps[None]:
    """Make a call's GPU work wait for streams that earlier calls named; None stands for unknown streams.

    Those calls may belong to other threads, which may capture graphs meanwhile.
    """
    streams = [
        each for each in others if each is not None and (each.owner is not None or each.handle in DEFAULT_STREAMS)
    ]
    if len(streams) == len(others):
        with contextlib.suppress(CallerError, CudaError):  # for example, one of them is being captured
            work.follow(streams, devices)
            return
    runtime, errors = work.gpus.runtime, list[CudaError]()

    def wait() -> None:
        try:
            for device in devices:
                runtime.wait_beside_captures(device)
        except CudaError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, name="shm waits for GPUs", daemon=True)  # the deadline may end first
    waiting.start()
    yield from _until(lambda: not waiting.is_alive(), deadline, _COMES_BEFORE)
    if errors:
        raise errors[0]


def worked_off(work: GpuWork, deadline: float) -> Steps[None]:
    """Wait until the GPUs have done the work that the call has queued so far, and the user's work before it."""
    marks = work.marks()
    yield from _until(lambda: _are_done(marks), deadline, _COMES_BEFORE)


def _are_done(marks: list[Mark]) -> bool:
    """Return whether the GPUs have passed all marks; close and remove the marks that they have passed."""
    while marks and marks[-1].is_done():
        marks.pop().close()
    return not marks


def are_at_work(marks: list[Mark]) -> bool:
    try:
        return not _are_done(marks)
    except CudaError:
        return True  # a CUDA error hides the GPU's state, so assume that they still are


def models_are_done(region: SlotRegion, deadline: float, request: str = NOT_SENT) -> Steps[None]:
    """Wait until models and their GPUs have finished with a region's memory; LostMemoryError if a model died first."""
    slot = region.slots[0]

    def are_done() -> bool:
        if slot.is_at_rest:
            return True
        if slot.was_left:
            region.spoil("lost")
            raise LostMemoryError
        return False

    yield from _until(are_done, deadline, "a model's GPU was still at work in its memory", request)


class Awaited:
    """A request that streams wait for. If its model dies, the client itself writes ``completed``, so they go on."""

    def __init__(self, region: SlotRegion, records: PinnedRecords) -> None:
        slot = region.slots[0]
        self._region, self._record, self._generation = region, slot.record, slot.sent
        self._descriptor = Descriptor(os.dup, region.fd)  # the region may be destroyed meanwhile
        self._offset = slot.record_offset
        self._records = records  # registered as long as streams wait

    def goes_on(self) -> bool:
        """Return whether streams still wait; let them go on if the model is dead."""
        if self._record.completed >= self._generation:
            return False
        if not is_left(self._descriptor.fileno(), self._offset, self._record):
            return True
        self._region.spoil("lost")
        self._record.model_words[COMPLETED] = LOST
        return False
