"""Calls with tensors on GPUs whose way leads through the host: inputs are copied there, and outputs back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np

from ...memory.cuda.streams import Named
from ...protocol.call_layout import AnyInput
from ...tensors.cuda.copies import copy
from ...tensors.cuda.device_array import DeviceArray
from ...tensors.cuda.libraries import as_library
from ...tensors.cuda.new_arrays import new_array
from ..inputs.devices import DeviceSource, inputs_on_gpus, library_of_inputs, work_of
from ..inputs.gpus import Gpus, GpuWork
from ..inputs.sources import Source
from ..options import check_is_installed
from ..result import Result
from ..settings import left_until
from ..steps import Steps, offloaded
from .call import Call
from .waiting import followed, worked_off

__all__ = ["StagedCall", "brought_to_gpus", "can_be_downloaded"]


@dataclass(eq=False, repr=False)
class StagedCall(Call):
    """A call with inputs on GPUs: each request copies them to the host, and another call takes them to the model.

    ``inner`` has all tensors of the call on the host; the arrays that the user fills are the library's.
    """

    inner: Call
    gpus: Gpus
    given: InitVar[Mapping[str, AnyInput]]

    def __post_init__(self, given: Mapping[str, AnyInput]) -> None:
        self.path = self.inner.path
        self._named = self.settings.named
        self._devices = {name: each.device for name, each in given.items() if each.device is not None}
        sources = inputs_on_gpus(given)
        self._kept = {name: each for name, each in sources.items() if each.is_lent}
        self.library = self.settings.library or library_of_inputs(sources)
        check_is_installed(self.library)
        self._filled: dict[str, DeviceSource] = {}

    @property
    def has_gpus(self) -> bool:
        return True

    def arrays(self) -> dict[str, Any]:
        """As of :class:`Call`. Each request copies those on GPUs to the host from now on."""
        arrays = self.inner.arrays()
        work = GpuWork(self.gpus)
        for name, device in self._devices.items():
            source = self._kept.get(name)
            if source is None:
                empty = _in_library(
                    new_array(self.gpus.runtime, arrays[name].shape, arrays[name].dtype, device), self.library
                )
                source = DeviceSource(name, empty, work, self.gpus, device)
            self._filled[name] = source
            arrays[name] = source.value
        return arrays

    def write(self, given: Mapping[str, Source]) -> None:
        self.inner.write({name: source for name, source in given.items() if source.device is None})

    def write_from_gpus(self, given: Mapping[str, Source], deadline: float) -> Steps[None]:
        sources = inputs_on_gpus(given)
        yield from can_be_downloaded(sources, self._named, deadline)
        targets = self.inner.arrays()

        def download() -> None:
            for name, source in sources.items():
                source.write_to(targets[name])

        yield from offloaded(download, left_until(deadline), "its inputs were being copied to the host")

    def name_work(self, named: Named) -> None:
        self._named = named

    def sources(self) -> dict[str, Source]:
        return self.inner.sources()

    def did_not_start(self, error: BaseException) -> bool:
        return self.inner.did_not_start(error)

    def send(self, timeout_s: float) -> Steps[Result]:
        self._check_is_open()
        if self._filled:
            deadline = time.monotonic() + timeout_s
            yield from self.write_from_gpus(self._filled, deadline)
            timeout_s = left_until(deadline)
        return (yield from self.inner.send(timeout_s))

    def close(self) -> None:
        super().close()
        self.inner.close()
        self._filled, self._kept = {}, {}


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
