"""Waiting for GPUs: never in a call of CUDA's, but by looking from time to time, until the call's deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ...errors import PeerError
from ...memory.cuda.allocations import CudaAllocation
from ...memory.cuda.ordering import Mark
from ...memory.cuda.streams import Named
from ...memory.pool.slot import SlotRegion
from ..errors import out_of_time
from ..inputs.gpus import GpuWork
from ..settings import left_until
from ..steps import Pause, Steps, offloaded

__all__ = ["LostMemoryError", "are_done", "followed", "models_are_done", "worked_off"]

_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
_COMES_BEFORE: Final = "its GPU was still at work on what comes before it"


class LostMemoryError(PeerError):
    """A model died while its GPU was at work in a region's memory: nobody knows any more what happens there."""

    def __init__(self) -> None:
        super().__init__(
            "a model ended while its GPU was at work for this call, whose memory there is not used again; call again, "
            "and prepare another call where this was a prepared one"
        )


def _until(is_done: Callable[[], bool], deadline: float, state: str) -> Steps[None]:
    """Look until something is done; ``state`` says in the DeadlineExceededError what was still to be done."""
    pause_s = _FIRST_PAUSE_S
    while not is_done():
        if time.monotonic() > deadline:
            raise out_of_time(state)
        yield Pause(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def followed(work: GpuWork, named: Named, devices: Iterable[int], deadline: float) -> Steps[None]:
    """Have a call's work on GPUs come behind what the user has named there, or behind all that these GPUs do.

    DeadlineExceededError if the driver has to wait for that, and it takes longer; CudaError if there is no such stream.
    """
    if not work.may_block(named):
        work.follow(named, devices)
    else:
        yield from offloaded(lambda: work.follow(named, devices), left_until(deadline), _COMES_BEFORE)


def worked_off(work: GpuWork, deadline: float) -> Steps[None]:
    """Wait until a call's work on GPUs is done as far as it is there now, and the user's that it comes behind."""
    marks = work.marks()
    try:
        yield from _until(lambda: are_done(marks), deadline, _COMES_BEFORE)
    finally:
        for mark in marks:
            mark.close()


def are_done(marks: list[Mark]) -> bool:
    """Return whether all of them are done; those that are, are closed and taken out."""
    while marks:
        if not marks[-1].is_done():
            return False
        marks.pop().close()
    return True


def models_are_done(region: SlotRegion, allocations: Sequence[CudaAllocation], deadline: float) -> Steps[None]:
    """Wait until models' GPUs have done what they were given to do in a region's memory.

    LostMemoryError if no model has the memory any more, and a GPU has not said that it is done: the region is spoiled.
    """
    left = list(allocations)

    def have_all() -> bool:
        had_users = region.has_users  # looked at first: a model that lets go of memory has waited for its GPU
        while left:
            allocation = left[-1]
            with allocation.runtime.on(allocation.device):
                is_done = allocation.runtime.is_event_done(allocation.event)
            if not is_done:
                break
            left.pop()
        if left and not had_users:
            region.spoil("lost")
            raise LostMemoryError
        return not left

    yield from _until(have_all, deadline, "a model's GPU was still at work in its memory")
