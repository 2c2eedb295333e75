"""The memory and work of calls on GPUs, for every path. Waits poll; no calling thread blocks in a CUDA function."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ...errors import TensorError
from ...gpu.arrays.copies import copy, new_array
from ...gpu.arrays.device_array import DeviceArray
from ...gpu.arrays.libraries import as_library
from ...gpu.errors import CudaError
from ...gpu.memory.allocations import Allocation
from ...gpu.memory.pinned import PinnedRecords
from ...gpu.runtime import CudaRuntime
from ...gpu.streams import Named, NamedStream
from ...memory import locks
from ...memory.pool.slot import Memory, SlotRegion
from ...protocol.claims import CudaDescriptorClaim, CudaRegionClaim
from ...protocol.results import OutputPlace, broken_results
from ...protocol.spans import InputSpan, Table
from ..errors import ANSWERED, NOT_SENT
from ..inputs.devices import DeviceSource, Gpus, GpuWork, inputs_on_gpus, library_of_inputs, work_of
from ..options import check_is_installed
from ..result import Result
from ..settings import CallSettings
from ..steps import Steps, offloaded
from .call import COPYING, Plan
from .gpu_waits import Awaited, LostMemoryError, are_at_work, followed, followed_others, models_are_done, worked_off

__all__ = ["CallOnGpus", "GpuBuffer", "StagedOnGpus", "brought_to_gpus", "can_be_downloaded"]


class GpuBuffer:
    """GPU memory of a slot or a user, which ``keeper`` keeps alive. Without a library, its arrays are DeviceArrays."""

    def __init__(
        self, runtime: CudaRuntime, address: int, byte_size: int, device: int, keeper: object, library: str | None
    ) -> None:
        self.address, self.byte_size = address, byte_size
        self._runtime, self._device = runtime, device
        self._keeper, self._library = keeper, library

    def array_at(self, owner: object, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """Return an array over the memory that also keeps ``owner`` alive; ValueError if the memory is too small."""
        return _in_library(self.plain_array_at(owner, offset, dtype, shape), self._library)

    def plain_array_at(self, owner: object, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """As :meth:`array_at`, but always a DeviceArray."""
        size = self.byte_size - offset
        if math.prod(shape) * dtype.itemsize > size:
            raise ValueError(f"a tensor of shape {shape} in {size} bytes")
        return DeviceArray(self._runtime, self.address + offset, shape, dtype, self._device, (self._keeper, owner))


class OnGpus(ABC):
    """A call's memory on GPUs, and the order between its requests and the work there."""

    filled: Mapping[str, DeviceSource] = MappingProxyType({})  # the inputs that the user fills, copied for each request

    def __init__(self, gpus: Gpus, given: Mapping[str, DeviceSource], settings: CallSettings) -> None:
        self._gpus = gpus
        self.named = settings.named  # the next request waits for these, or if empty, for all work of the GPUs
        self.library = settings.library or library_of_inputs(given)  # its arrays hold outputs, and inputs to fill
        check_is_installed(self.library)

    @abstractmethod
    def arrays(self, call: Any) -> dict[str, Any]:
        """Return the inputs on GPUs: arrays for the user to fill, and the user's own tensors."""

    @abstractmethod
    def write(self, call: Any, given: Mapping[str, Any], deadline: float) -> Steps[None]:
        """Copy inputs on GPUs, except lent ones, to the call's memory; wait for the copies and all work before them."""


class CallOnGpus(OnGpus):
    """The part of a direct call that is on GPUs; the region already has the GPU memory that the layout needs."""

    def __init__(self, gpus: Gpus, region: SlotRegion, plan: Plan, *, is_prepared: bool) -> None:
        sources = inputs_on_gpus(plan.given)
        super().__init__(gpus, sources, plan.settings)
        runtime, layout = gpus.runtime, plan.layout
        self._region = region
        self._is_prepared = is_prepared
        self._allocations: Sequence[Allocation] = [region.device_memory[device] for device in layout.devices]
        self._lent = {name: sources[name] for name in layout.lent}
        self._devices = {*layout.devices, *[each.facts.device for each in self._lent.values()]}
        self.is_lost = False  # True once a model has ended while its GPU worked in this memory
        self._has_waited_for_others = False
        claims: list[CudaRegionClaim | CudaDescriptorClaim] = [each.claim for each in self._allocations]
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
                uuid = runtime.device_uuid(device)
                claim = CudaRegionClaim(
                    source.handle, byte_size, uuid, 0, waits=is_prepared, is_for_one_request=not is_prepared
                )
                claims.append(claim)
                buffers.append(GpuBuffer(runtime, base, byte_size, device, source.value, self.library))
                numbers[base] = len(claims)
            span = inputs[name]
            inputs[name] = InputSpan(span.dtype, span.shape, numbers[base], source.array.address - base, span.byte_size)
        self._claims = claims
        self.table = Table(inputs, layout.table.outputs, tuple(claims), layout.table.ring)
        self.buffers: Sequence[GpuBuffer] = buffers
        if self._lent:
            gpus.bank.take_care_of(region)
        if is_prepared:  # models keep the tensors that such a call lends mapped until the region is gone
            region.borrowed += [source.value for source in self._lent.values()]

    def write(self, call: Any, given: Mapping[str, Any], deadline: float) -> Steps[None]:
        memory = call.memory
        sources = inputs_on_gpus(given)
        work = work_of(sources.values()) or GpuWork(self._gpus)
        with contextlib.closing(work):
            self.named = yield from followed(work, self.named, self._devices, deadline)
            # None in this set means an unknown stream: an event, for example, does not show which stream reads later.
            streams = {
                each if isinstance(each, NamedStream) and not each.is_per_thread else None
                for each in self.named or (None,)
            }
            # Earlier requests' streams may still read results here.
            others = self._region.worked_on - (streams - {None})
            if self.named and not self._has_waited_for_others and others:
                yield from followed_others(work, others, {each.device for each in self._allocations}, deadline)
            self._region.worked_on |= streams  # the last line replaces the set, when all this work is done
            if any(source.is_strided for source in sources.values()):
                yield from worked_off(work, deadline)  # a waiting stream has no room for so many single copies
            try:
                for name in sources.keys() - self._lent.keys():
                    sources[name].put(self._plain_array(self.table.inputs[name], memory))
                yield from worked_off(work, deadline)
            except BaseException:
                marks = work.marks()  # keep the memory while GPUs may still copy from it or to it
                self._gpus.bank.keep_while(lambda: are_at_work(marks), (sources, memory))
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
        """Return the inputs that this call has on GPUs, so that another call can copy them or lend them again."""
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

    def models_are_done(self, deadline: float, request: str = NOT_SENT) -> Steps[None]:
        """Wait until no model's GPU works in the call's memory; LostMemoryError if a model died."""
        try:
            yield from models_are_done(self._region, deadline, request)
        except LostMemoryError:
            self.is_lost = True
            raise

    def outputs_are_ready(self, outputs: Sequence[OutputPlace], events: Sequence[int], deadline: float) -> Steps[None]:
        """Make the user's streams wait for a GPU that works on after the answer; if they cannot, wait here."""
        slot = self._region.slots[0]
        if not all(self._claims[number - 1].waits for number in events):
            raise broken_results("an event of memory that has none")
        if not all(place.region for place in outputs):  # a stream waits for the GPU, but the host would not
            raise broken_results("an event, though an output is on the host")
        slot.become_free("answer")
        if not slot.is_completed and not self._let_streams_wait():
            yield from self.models_are_done(deadline, ANSWERED)

    def _let_streams_wait(self) -> bool:
        """Make the user's streams wait until the model's GPU has written ``completed``; return False if one cannot."""
        streams = [each for each in self.named if isinstance(each, NamedStream)]
        if not streams or any(each.is_per_thread for each in streams):  # a submitted call ends in another thread
            return False
        runtime, slot = self._gpus.runtime, self._region.slots[0]
        records = PinnedRecords.of(runtime, self._region.managed)
        places = {(each.device_on(runtime, meant), each.handle) for meant in self._devices for each in streams}
        try:
            waits = [(device, stream, records.completed(slot.index, device)) for device, stream in places]
            with runtime.current(waits[0][0]):
                for device, stream, address in waits:
                    with runtime.current(device):
                        if address is None or runtime.is_capturing(stream):  # a graph would wait at each launch
                            return False
                awaited = Awaited(self._region, records)
                self._gpus.bank.keep_while(awaited.goes_on, awaited)
                for device, stream, address in waits:
                    with runtime.current(device):
                        assert address is not None
                        runtime.wait_for_word(address, slot.sent, stream)
        except CudaError as error:
            if error.is_final:
                raise
            return False
        return True

    @property
    def are_lent_in_use(self) -> bool:
        """Whether a model that has answered still has tensors mapped that the user lent for one request."""
        is_lent = bool(self._lent) and not self._is_prepared
        return is_lent and locks.has_borrowers(self._region.fd, self._region.slots[0].record_offset)


class StagedOnGpus(OnGpus):
    """The GPU inputs of a call whose own memory is all on the host: each request copies the inputs to the host."""

    def __init__(self, gpus: Gpus, given: Mapping[str, Any], settings: CallSettings) -> None:
        sources = inputs_on_gpus(given)
        super().__init__(gpus, sources, settings)
        self._device_of = {name: each.device for name, each in given.items() if each.device is not None}
        self._lent = {name: each for name, each in sources.items() if each.is_lent}

    def arrays(self, call: Any) -> dict[str, Any]:
        arrays, work, filled = call.arrays(), GpuWork(self._gpus), dict(self._lent)
        for name, device in self._device_of.items():
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
    """Wait until the user's work that writes inputs on GPUs is done, so that a copy to the host need not wait."""
    work = work_of(sources.values())
    if work is not None:
        with contextlib.closing(work):
            yield from followed(work, named, {source.array.device for source in sources.values()}, deadline)
            yield from worked_off(work, deadline)


def brought_to_gpus(
    gpus: Gpus, result: Result, devices: Mapping[str, int], library: str | None, deadline: float
) -> Steps[Result]:
    """Return a result with the outputs in ``devices`` on their GPUs; copy outputs that came back on the host."""
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

    yield from offloaded(upload, deadline, "its outputs were being copied to a GPU", ANSWERED)
    return dataclasses.replace(result, _arrays=arrays)


def _in_library(array: DeviceArray, library: str | None) -> Any:
    return array if library is None else as_library(array, library)
