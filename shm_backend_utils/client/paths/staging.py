"""Calls with tensors on GPUs whose way leads through the host: inputs are copied there, and outputs back."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...memory.cuda.streams import Named
from ...protocol.call_layout import AnyInput
from ...tensors.cuda.copies import copy
from ...tensors.cuda.device_array import DeviceArray
from ...tensors.cuda.libraries import as_library
from ...tensors.cuda.new_arrays import new_array
from ..inputs.devices import DeviceSource, Gpus, GpuWork, inputs_on_gpus, library_of_inputs, work_of
from ..inputs.sources import Source
from ..options import check_is_installed
from ..result import Result
from ..settings import CallSettings, left_until
from ..steps import Steps, offloaded
from .call import Call
from .on_gpus import followed, worked_off

__all__ = ["StagedOnGpus", "brought_to_gpus", "can_be_downloaded"]


class StagedOnGpus:
    """Inputs on GPUs of a call that has all tensors on the host: each request copies them there."""

    def __init__(self, gpus: Gpus, given: Mapping[str, AnyInput], settings: CallSettings) -> None:
        self.named = settings.named
        self._gpus = gpus
        self._devices = {name: each.device for name, each in given.items() if each.device is not None}
        sources = inputs_on_gpus(given)
        self._kept = {name: each for name, each in sources.items() if each.is_lent}
        self.library = settings.library or library_of_inputs(sources)
        check_is_installed(self.library)
        self._filled: dict[str, DeviceSource] = {}

    def arrays(self, call: Call) -> dict[str, Any]:
        """As of :class:`.OnGpus`."""
        arrays, work = call.arrays(), GpuWork(self._gpus)
        for name, device in self._devices.items():
            source = self._kept.get(name)
            if source is None:
                empty = new_array(self._gpus.runtime, arrays[name].shape, arrays[name].dtype, device)
                source = DeviceSource(name, _in_library(empty, self.library), work, self._gpus, device)
            self._filled[name] = source
        return {name: source.value for name, source in self._filled.items()}

    def write(self, call: Call, given: Mapping[str, Source], deadline: float) -> Steps[None]:
        """As of :class:`.OnGpus`."""
        sources, targets = inputs_on_gpus(given), call.arrays()
        yield from can_be_downloaded(sources, self.named, deadline)

        def download() -> None:
            for name, source in sources.items():
                source.write_to(targets[name])

        yield from offloaded(download, left_until(deadline), "its inputs were being copied to the host")

    def write_filled(self, call: Call, deadline: float) -> Steps[None]:
        """As of :class:`.OnGpus`."""
        yield from self.write(call, self._filled, deadline)


def can_be_downloaded(sources: Mapping[str, DeviceSource], named: Named, deadline: float) -> Steps[None]:
    """Wait until inputs on GPUs can be copied to the host without waiting for the user's work."""
    work = work_of(sources.values())
    if work is not None:
        with contextlib.closing(work):
            yield from followed(work, named, {source.array.device for source in sources.values()}, deadline)
            yield from worked_off(work, deadline)


def brought_to_gpus(
    gpus: Gpus, result: Result, devices: Mapping[str, int], library: str | None, timeout_s: float
) -> Steps[Result]:
    """Return a result whose outputs are on these GPUs: those that came back on the host are copied there."""
    arrays: dict[str, Any] = dict(result)
    on_host = {name: arrays[name] for name in devices if isinstance(arrays.get(name), np.ndarray)}
    if not on_host:
        return result

    def upload() -> None:
        for name, array in on_host.items():
            target = new_array(gpus.runtime, array.shape, array.dtype, devices[name])
            with gpus.streams.one(devices[name]) as stream:
                copy(gpus.runtime, target, array, stream)
                gpus.runtime.synchronize_stream(stream, devices[name])
            arrays[name] = _in_library(target, library)

    yield from offloaded(upload, timeout_s, "its outputs were being copied to a GPU")
    return Result(
        arrays, result.path, result.read_response, result.overflowed, result.bytes_avoided, result.in_response
    )


def _in_library(array: DeviceArray, library: str | None) -> Any:
    return array if library is None else as_library(array, library)
