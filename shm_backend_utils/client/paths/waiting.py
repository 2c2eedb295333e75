"""Waiting for GPUs: never in a call of CUDA's, but by looking from time to time, until the call's deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ...memory.cuda.ordering import Mark, Named
from ..errors import out_of_time
from ..inputs.devices import DeviceSource
from ..inputs.gpus import GpuWork
from ..inputs.sources import Source
from ..settings import left_until
from ..steps import Pause, Steps, offloaded

__all__ = ["are_done", "followed", "inputs_on_gpus", "library_of_inputs", "until", "work_of", "worked_off"]

_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
_COMES_BEFORE: Final = "its GPU was still at work on what comes before it"


def until(is_done: Callable[[], bool], deadline: float, state: str) -> Steps[None]:
    """Look until something is done.

    Raises
    ------
    DeadlineExceededError
        It takes longer; ``state`` says what was still to be done.
    """
    pause_s = _FIRST_PAUSE_S
    while not is_done():
        if time.monotonic() > deadline:
            raise out_of_time(state)
        yield Pause(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def followed(work: GpuWork, named: Named, devices: Iterable[int], deadline: float) -> Steps[None]:
    """Have a call's work on GPUs come behind what the user has named there, or behind all that these GPUs do.

    Raises
    ------
    DeadlineExceededError
        The driver has to wait for that, and it takes longer.
    CudaError
        There is no such stream, for example.
    """
    if not work.may_block(named):
        work.follow(named, devices)
    else:
        yield from offloaded(lambda: work.follow(named, devices), left_until(deadline), _COMES_BEFORE)


def worked_off(work: GpuWork, deadline: float) -> Steps[None]:
    """Wait until a call's work on GPUs is done as far as it is there now, and the user's that it comes behind.

    Raises
    ------
    DeadlineExceededError
        It takes longer.
    CudaError
        It has failed.
    """
    marks = work.marks()
    try:
        yield from until(lambda: are_done(marks), deadline, _COMES_BEFORE)
    finally:
        for mark in marks:
            mark.close()


def work_of(sources: Iterable[Source]) -> GpuWork | None:
    """Return the work that a call's inputs on GPUs share; None if there are none."""
    return next((each.work for each in sources if isinstance(each, DeviceSource)), None)


def library_of_inputs(sources: Mapping[str, DeviceSource]) -> str | None:
    """Return the array library that a call's inputs on GPUs are of; None if there are none, or they are of none."""
    return next((each.library for each in sources.values() if each.library), None)


def inputs_on_gpus(given: Mapping[str, Any]) -> dict[str, DeviceSource]:
    """Return those of a call's inputs that are on GPUs."""
    return {name: each for name, each in given.items() if isinstance(each, DeviceSource)}


def are_done(marks: list[Mark]) -> bool:
    """Return whether all of them are done; those that are, are closed and taken out."""
    while marks:
        if not marks[-1].is_done():
            return False
        marks.pop().close()
    return True
