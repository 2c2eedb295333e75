"""Inputs on a GPU, and the work that calls queue on GPUs for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...gpu.arrays.copies import copy
from ...gpu.arrays.device_array import DeviceArray
from ...gpu.arrays.imported import device_of, imported, is_on_gpu
from ...gpu.arrays.libraries import library_of
from ...gpu.errors import CudaError
from ...gpu.memory.bank import DeviceBank
from ...gpu.ordering import Mark, OwnStreams, order_after
from ...gpu.runtime import BLOCK_BYTES, CudaRuntime, PointerFacts
from ...gpu.streams import Named, NamedEvent, NamedStream
from .sources import Source

__all__ = ["DeviceSource", "GpuWork", "Gpus", "device_source", "inputs_on_gpus", "library_of_inputs", "work_of"]


class Gpus:
    """The GPUs of one client's calls. CUDA is loaded when a call first needs it."""

    def __init__(self, bank: DeviceBank, lend_bytes: int) -> None:
        self.bank = bank
        self.lend_bytes = lend_bytes  # an input of this size or more is used in place
        self._lock = threading.Lock()
        self._streams: OwnStreams | None = None

    @property
    def runtime(self) -> CudaRuntime:
        """The CUDA runtime; raises MachineError if CUDA or a GPU is missing."""
        return self.bank.cuda.runtime

    @property
    def streams(self) -> OwnStreams:
        with self._lock:
            if self._streams is None:
                self._streams = OwnStreams(self.runtime)
            return self._streams

    def close(self) -> None:
        """Drop the streams that no call uses. Running calls drop their streams when they end."""
        with self._lock:
            self._streams = None


class GpuWork:
    """The GPU work of one call, on one stream for each GPU. Give the streams back by :meth:`close`."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus = gpus
        self._streams: dict[int, int] = {}  # of GPUs for which the call has work
        self._followed: list[Mark] = []  # work of the user on the other GPUs
        self._lender = gpus.streams

    def stream_on(self, device: int) -> int:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self._lender.borrow(device)
        return stream

    def follow(self, named: Named, devices: Iterable[int]) -> Named:
        """Make later work wait for the streams and events in ``named``; if it is empty, for all work of these GPUs.

        Return ``named`` with the GPUs of its streams.
        """
        runtime, lender = self.gpus.runtime, self._lender
        for device in {*devices, *self._streams}:
            with runtime.current(device):
                streams = [each.on_its_device(runtime, device) for each in named if isinstance(each, NamedStream)]
                events = [each for each in named if isinstance(each, NamedEvent)]
                named = [*streams, *events]
                if events or device in self._streams:  # the host polls no event of a user, who may destroy it
                    order_after(lender, named, device, self.stream_on(device))
                    continue
                marks = [Mark.on_named(lender, each, device) for each in streams] or [Mark(lender, None, device)]
                self._followed += [mark for mark in marks if not mark.is_done()]
        return named

    def marks(self) -> list[Mark]:
        """Return marks that the GPUs pass when they have done the work so far, and the work that it follows."""
        followed, self._followed = self._followed, []
        return followed + [Mark(self._lender, stream, device) for device, stream in self._streams.items()]

    def close(self) -> None:
        """Give the streams back when their queued work is done. Twice is fine."""
        streams, self._streams = self._streams, {}
        for device, stream in streams.items():
            self._lender.give_back(stream, device)

    def __del__(self) -> None:
        self.close()


class DeviceSource(Source):
    """One input on a GPU. It is copied on the stream of ``work``."""

    __slots__ = ("_facts", "_obstacle", "array", "handle", "library", "name", "value", "work")

    def __init__(self, name: str, value: Any, work: GpuWork, gpus: Gpus, device: int) -> None:
        self.name = name
        self.value = value  # as the user gave it
        self.work = work
        self.library = library_of(value)
        self._facts: PointerFacts | None = None
        self._obstacle: str | None = None
        self.handle = b""  # CUDA's IPC handle of the allocation, when there is no obstacle
        self.array = imported(gpus.runtime, value, work.stream_on(device), tensor=name)
        array = self.array
        super().__init__(dtypes.from_numpy(array.dtype, name), array.shape, array.nbytes, (), array.device)

    @property
    def facts(self) -> PointerFacts:
        if self._facts is None:
            self._facts = self.array.runtime.pointer(self.array.address)
        return self._facts

    @property
    def obstacle(self) -> str:
        """Why a model cannot use the memory in place, and the remedy; empty if it can."""
        if self._obstacle is None:
            self._obstacle = self._obstacle_of_its_kind() or self._export()
        return self._obstacle

    def _obstacle_of_its_kind(self) -> str:
        if not self.byte_size:
            return "it has no bytes"
        if self.is_strided:
            return "it is not C-contiguous; make it so, for example by tensor.contiguous()"
        if self.facts.kind == "managed":
            return "it is managed memory, which CUDA cannot share; allocate it by cudaMalloc"
        if self.facts.base % BLOCK_BYTES:
            return "its allocation shares a memory block of CUDA with others; allocate 2 MiB or more at once"
        if not self.facts.is_exportable:
            return (
                "it lies in a memory pool of CUDA (cudaMallocAsync) or in virtual memory, which CUDA IPC cannot share; "
                "if it is a client's result, its memory is handed over by descriptor, and is lent in place if that "
                'client has PoolOptions(region="system"); else allocate it by cudaMalloc, as '
                "CuPy's own pool does, and PyTorch's without expandable_segments and cudaMallocAsync in "
                "PYTORCH_CUDA_ALLOC_CONF"
            )
        return ""

    def _export(self) -> str:
        """Export the memory; return the obstacle, or an empty string."""
        try:
            self.handle = self.array.runtime.export(self.facts.base, self.facts.device)
        except CudaError as error:
            return (
                f"CUDA refuses to export it ({error.name}), as it does with memory of another process, for example "
                "from torch.multiprocessing; allocate it in this process"
            )
        return ""

    @property
    def is_strided(self) -> bool:
        """Whether a copy of the tensor may take very many single copies."""
        return not isinstance(self.array, DeviceArray)

    def write_to(self, target: DeviceArray | npt.NDArray[Any]) -> None:
        """Copy the tensor, and wait for the copy and for all earlier work on its stream."""
        self.put(target)
        assert self.device is not None
        self.array.runtime.synchronize_stream(self.work.stream_on(self.device), self.device)

    def put(self, target: DeviceArray | npt.NDArray[Any]) -> None:
        """Queue a copy of the tensor to an array, on its stream."""
        assert self.device is not None
        with self.array.runtime.current(self.device):
            copy(self.array.runtime, target, self.array, self.work.stream_on(self.device), tensor=self.name)


def device_source(
    gpus: Gpus, name: str, value: Any, found: Mapping[str, Source], lends: bool | None = None
) -> DeviceSource | None:
    """Return an input that is on a GPU as a source; None for any other input."""
    if type(value) is np.ndarray or not is_on_gpu(value):
        return None
    work = work_of(found.values()) or GpuWork(gpus)
    source = DeviceSource(name, value, work, gpus, device_of(gpus.runtime, value))
    source.is_lent = source.byte_size >= gpus.lend_bytes and not source.obstacle if lends is None else lends
    return source


def work_of(sources: Iterable[Source]) -> GpuWork | None:
    """Return the work that a call's inputs on GPUs share; None if no input is on a GPU."""
    return next((each.work for each in sources if isinstance(each, DeviceSource)), None)


def library_of_inputs(sources: Mapping[str, DeviceSource]) -> str | None:
    """Return the array library of a call's inputs on GPUs; None without such inputs, or if they have no library."""
    return next((each.library for each in sources.values() if each.library), None)


def inputs_on_gpus(given: Mapping[str, Any]) -> dict[str, DeviceSource]:
    return {name: each for name, each in given.items() if isinstance(each, DeviceSource)}
