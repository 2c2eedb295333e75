"""The memory and work of calls on GPUs, for every path. Waits poll CUDA; they never block in a CUDA function."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ...errors import PeerError, TensorError
from ...gpu.arrays.copies import copy, new_array
from ...gpu.arrays.device_array import DeviceArray
from ...gpu.arrays.libraries import as_library
from ...gpu.errors import CudaError
from ...gpu.memory.allocations import CudaAllocation
from ...gpu.ordering import Mark
from ...gpu.runtime import CudaRuntime
from ...gpu.streams import Named, NamedStream
from ...memory import locks
from ...memory.pool.slot import Memory, SlotRegion
from ...protocol.claims import CudaRegionClaim
from ...protocol.results import OutputPlace, broken_results
from ...protocol.spans import InputSpan, Table
from ..errors import out_of_time
from ..inputs.devices import DeviceSource, Gpus, GpuWork, inputs_on_gpus, library_of_inputs, work_of
from ..options import check_is_installed
from ..result import Result
from ..settings import CallSettings
from ..steps import Pause, Steps, offloaded
from .call import COPYING, Plan

__all__ = [
    "CallOnGpus",
    "GpuBuffer",
    "LostMemoryError",
    "StagedOnGpus",
    "brought_to_gpus",
    "can_be_downloaded",
    "models_are_done",
]

_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
_COMES_BEFORE: Final = "its GPU was still at work on what comes before it"


class LostMemoryError(PeerError):
    """A model died while its GPU was at work in a region's memory; the memory's state is unknown from then on."""

    def __init__(self) -> None:
        super().__init__(
            "a model's process ended while its GPU was at work in this call's memory, which is not used again; call "
            "again, or prepare another call if this was a prepared one"
        )


def _until(is_done: Callable[[], bool], deadline: float, state: str) -> Steps[None]:
    """Poll until ``is_done``; ``state`` names the missing work in the DeadlineExceededError."""
    pause_s = _FIRST_PAUSE_S
    while not is_done():
        if time.monotonic() > deadline:
            raise out_of_time(state)
        yield Pause(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _followed(work: GpuWork, named: Named, devices: Iterable[int], deadline: float) -> Steps[None]:
    """Order a call's work on GPUs behind the streams that the user named, or behind all work of these GPUs."""
    if named or work.gpus.runtime.records_devices:
        work.follow(named, devices)
    else:  # the host waits
        yield from offloaded(lambda: work.follow(named, devices), deadline, _COMES_BEFORE)


def _worked_off(work: GpuWork, deadline: float) -> Steps[None]:
    """Wait until a call's work on GPUs that is queued now is done, and the user's work before it."""
    marks = work.marks()
    yield from _until(lambda: _are_done(marks), deadline, _COMES_BEFORE)


def _are_done(marks: list[Mark]) -> bool:
    """Return whether all of them are done; close and remove those that are."""
    while marks and marks[-1].is_done():
        marks.pop().close()
    return not marks


def _are_at_work(marks: list[Mark]) -> bool:
    try:
        return not _are_done(marks)
    except CudaError:
        return True  # their state cannot be known any more


def models_are_done(region: SlotRegion, allocations: Sequence[CudaAllocation], deadline: float) -> Steps[None]:
    """Wait until models' GPUs have done their queued work in a region's memory; LostMemoryError if one died first."""
    left = list(allocations)

    def have_all() -> bool:
        had_users = region.has_users  # read first: a model waits for its GPU before it releases memory
        while left:
            with left[-1].runtime.on(left[-1].device):
                if not left[-1].runtime.is_event_done(left[-1].event):
                    break
            left.pop()
        if region.slots[0].was_left or (left and not had_users):
            region.spoil("lost")
            raise LostMemoryError
        return not left

    yield from _until(have_all, deadline, "a model's GPU was still at work in its memory")


class GpuBuffer:
    """Memory on a GPU, the slot's or a user's. ``keeper`` keeps it; without a library, arrays are DeviceArrays."""

    def __init__(
        self, runtime: CudaRuntime, address: int, byte_size: int, device: int, keeper: object, library: str | None
    ) -> None:
        self.address, self.byte_size = address, byte_size
        self._runtime, self._device = runtime, device
        self._keeper, self._library = keeper, library

    def array_at(self, owner: object, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """Return an array over the memory, which keeps ``owner``, too; ValueError if it would end beyond it."""
        return _in_library(self.plain_array_at(owner, offset, dtype, shape), self._library)

    def plain_array_at(self, owner: object, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """As :meth:`array_at`, but always a DeviceArray."""
        size = self.byte_size - offset
        if math.prod(shape) * dtype.itemsize > size:
            raise ValueError(f"a tensor of shape {shape} in {size} bytes")
        return DeviceArray(self._runtime, self.address + offset, shape, dtype, self._device, (self._keeper, owner))


class OnGpus(ABC):
    """A call's memory on GPUs, and the order between its requests and the work there."""

    filled: Mapping[str, DeviceSource] = MappingProxyType({})  # by the user: copied for each request

    def __init__(self, gpus: Gpus, given: Mapping[str, DeviceSource], settings: CallSettings) -> None:
        self._gpus = gpus
        self.named = settings.named  # the next request waits for these; if empty, for all work of the GPUs
        self.library = settings.library or library_of_inputs(given)  # of outputs, and of inputs to be filled
        check_is_installed(self.library)

    @abstractmethod
    def arrays(self, call: Any) -> dict[str, Any]:
        """Return the inputs on GPUs: arrays to be filled, and the user's own tensors."""

    @abstractmethod
    def write(self, call: Any, given: Mapping[str, Any], deadline: float) -> Steps[None]:
        """Copy inputs on GPUs to their place, unless they are lent, and wait for all work that comes before that."""


class CallOnGpus(OnGpus):
    """The part of a call on GPUs, in a region that has the GPU memory that the layout needs."""

    def __init__(self, gpus: Gpus, region: SlotRegion, plan: Plan, *, is_prepared: bool) -> None:
        sources = inputs_on_gpus(plan.given)
        super().__init__(gpus, sources, plan.settings)
        runtime, layout = gpus.runtime, plan.layout
        self._region = region
        self._is_prepared = is_prepared
        self._allocations: Sequence[CudaAllocation] = [region.device_memory[device] for device in layout.devices]
        self._lent = {name: sources[name] for name in layout.lent}
        self.is_lost = False  # a model ended while its GPU was at work here
        self._has_waited_for_others = False
        claims = [
            CudaRegionClaim(each.handle, each.byte_size, each.device_uuid, 0, each.event_handle)
            for each in self._allocations
        ]
        buffers = [
            GpuBuffer(runtime, each.address, each.byte_size, each.device, each.keeper, self.library)
            for each in self._allocations
        ]
        inputs, numbers = dict(layout.table.inputs), dict[int, int]()
        for name, source in self._lent.items():
            base, byte_size, device = source.facts.base, source.facts.byte_size, source.facts.device
            if source.obstacle:
                described = f"({source.shape}, {str(source.array.dtype)!r}, 'cuda:{source.device}')"
                raise TensorError(
                    name,
                    f"input {name!r} cannot be a prepared call's memory: {source.obstacle}; or describe it, as "
                    f"{described}, and fill inputs[{name!r}]",
                )
            if base not in numbers:
                handle, uuid = runtime.export(base), runtime.device_uuid(device)
                claims.append(CudaRegionClaim(handle, byte_size, uuid, 0, b"", not is_prepared))
                buffers.append(GpuBuffer(runtime, base, byte_size, device, source.value, self.library))
                numbers[base] = len(claims)
            span = inputs[name]
            inputs[name] = InputSpan(span.dtype, span.shape, numbers[base], source.array.address - base, span.byte_size)
        self.table = Table(inputs, layout.table.outputs, tuple(claims), layout.table.ring)
        self.buffers: Sequence[GpuBuffer] = buffers
        if self._lent:
            gpus.bank.take_care_of(region)
        if is_prepared:  # tensors serve as long as it lives: models keep them mapped until the region is gone
            region.borrowed += [source.value for source in self._lent.values()]

    def write(self, call: Any, given: Mapping[str, Any], deadline: float) -> Steps[None]:
        """Copy the inputs on GPUs that are not lent, behind the streams that the user named; wait for the copies."""
        memory = call.memory
        sources = inputs_on_gpus(given)
        work = work_of(sources.values()) or GpuWork(self._gpus)
        with contextlib.closing(work):
            devices = {each.device for each in self._allocations}
            lent = {each.facts.device for each in self._lent.values()}
            yield from _followed(work, self.named, devices | lent, deadline)
            # The streams that were named, and None if there are others: an event, say, tells of no later reader.
            streams = {
                each if isinstance(each, NamedStream) and not each.is_the_threads else None
                for each in self.named or (None,)
            }
            others = self._region.worked_on  # may still read their results here, on other streams
            if self.named and not self._has_waited_for_others and (None in others or others - streams):
                yield from _followed(work, (), devices, deadline)
            self._region.worked_on |= streams  # replaced once all of that is done
            if any(source.is_strided for source in sources.values()):
                yield from _worked_off(work, deadline)  # a stream has no room for very many copies that have to wait
            try:
                for name, source in sources.items():
                    if name not in self._lent:
                        source.put(self._plain_array(self.table.inputs[name], memory))
                yield from _worked_off(work, deadline)
            except BaseException:
                marks = work.marks()  # memory that GPUs may be copying from, or to, is kept until they are done
                self._gpus.bank.keep_while(lambda: _are_at_work(marks), (sources, memory))
                raise
        self._has_waited_for_others = True
        self._region.worked_on = streams

    def arrays(self, call: Any) -> dict[str, Any]:
        memory = call.memory
        found: dict[str, Any] = {name: source.value for name, source in self._lent.items()}
        for name, span in self.table.inputs.items():
            if span.region and name not in self._lent:
                found[name] = self.buffers[span.region - 1].array_at(memory, span.offset, span.dtype.numpy, span.shape)
        return found

    def sources(self, memory: Memory) -> dict[str, DeviceSource]:
        """Return the inputs on GPUs as they lie here, to be written elsewhere, or lent again."""
        found: dict[str, DeviceSource] = dict(self._lent)
        work = GpuWork(self._gpus)
        for name, span in self.table.inputs.items():
            if span.region and name not in found:
                array = self._plain_array(span, memory)
                found[name] = DeviceSource(name, array, work, self._gpus, array.device)
                found[name].library = self.library
        return found

    def _plain_array(self, span: InputSpan, memory: Memory) -> DeviceArray:
        return self.buffers[span.region - 1].plain_array_at(memory, span.offset, span.dtype.numpy, span.shape)

    def models_are_done(self, deadline: float, where: Sequence[CudaAllocation] | None = None) -> Steps[None]:
        """Wait until no model's GPU is at work in this memory, or in some of it; LostMemoryError if it is lost."""
        try:
            yield from models_are_done(self._region, self._allocations if where is None else where, deadline)
        except LostMemoryError:
            self.is_lost = True
            raise

    def outputs_are_ready(self, outputs: Sequence[OutputPlace], events: Sequence[int], deadline: float) -> Steps[None]:
        """Wait for the events of models' GPUs that a request's answer names, or make the user's streams wait."""
        if max(events) > len(self._allocations):
            raise broken_results("an event of memory that has none")
        if not all(place.region for place in outputs):  # streams may wait for the events; the host's would go unawaited
            raise broken_results("an event, though an output is on the host")
        waiting = [self._allocations[number - 1] for number in events]
        streams = [each for each in self.named if isinstance(each, NamedStream)]
        if not streams or any(each.is_the_threads for each in streams):  # a submitted call goes on in another thread
            yield from self.models_are_done(deadline, waiting)
            return
        runtime = self._gpus.runtime
        for each in waiting:
            for stream in streams:
                with runtime.on(stream.device_on(runtime, each.device)):
                    runtime.wait_for_event(each.event, stream.handle)

    @property
    def are_lent_in_use(self) -> bool:
        """Whether a model still has tensors mapped that are lent for one request, though it has answered."""
        is_lent = bool(self._lent) and not self._is_prepared
        return is_lent and locks.has_borrowers(self._region.fd, self._region.slots[0].record_offset)


class StagedOnGpus(OnGpus):
    """Inputs on GPUs of a call whose tensors all lie on the host: each request copies them there."""

    def __init__(self, gpus: Gpus, given: Mapping[str, Any], settings: CallSettings) -> None:
        sources = inputs_on_gpus(given)
        super().__init__(gpus, sources, settings)
        self._devices = {name: each.device for name, each in given.items() if each.device is not None}
        self._lent = {name: each for name, each in sources.items() if each.is_lent}

    def arrays(self, call: Any) -> dict[str, Any]:
        arrays, work, filled = call.arrays(), GpuWork(self._gpus), dict(self._lent)
        for name, device in self._devices.items():
            if name not in filled:
                empty = new_array(self._gpus.runtime, arrays[name].shape, arrays[name].dtype, device)
                filled[name] = DeviceSource(name, _in_library(empty, self.library), work, self._gpus, device)
        self.filled = filled
        return {name: source.value for name, source in filled.items()}

    def write(self, call: Any, given: Mapping[str, Any], deadline: float) -> Steps[None]:
        sources = inputs_on_gpus(given)
        yield from can_be_downloaded(sources, self.named, deadline)
        yield from offloaded(lambda: call.write(sources), deadline, COPYING)


def can_be_downloaded(sources: Mapping[str, DeviceSource], named: Named, deadline: float) -> Steps[None]:
    """Wait until inputs on GPUs can be copied to the host without waiting for the user's work."""
    work = work_of(sources.values())
    if work is not None:
        with contextlib.closing(work):
            yield from _followed(work, named, {source.array.device for source in sources.values()}, deadline)
            yield from _worked_off(work, deadline)


def brought_to_gpus(
    gpus: Gpus, result: Result, devices: Mapping[str, int], library: str | None, deadline: float
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

    yield from offloaded(upload, deadline, "its outputs were being copied to a GPU")
    return dataclasses.replace(result, _arrays=arrays)


def _in_library(array: DeviceArray, library: str | None) -> Any:
    return array if library is None else as_library(array, library)
