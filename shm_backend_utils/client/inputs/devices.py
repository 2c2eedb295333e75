"""What users pass as inputs that are on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...memory.cuda.runtime import BLOCK_BYTES, PointerFacts
from ...tensors.cuda.copies import copy
from ...tensors.cuda.device_array import DeviceArray
from ...tensors.cuda.imported import device_of, imported, is_on_gpu
from ...tensors.cuda.libraries import library_of
from .gpus import Gpus, GpuWork
from .sources import Source

__all__ = [
    "DeviceSource",
    "copied_source",
    "device_source",
    "inputs_on_gpus",
    "kept_source",
    "library_of_inputs",
    "work_of",
]


class DeviceSource(Source):
    """One input on a GPU. Copies of it are made where ``work`` is."""

    __slots__ = ("_facts", "array", "library", "value", "work")

    def __init__(self, name: str, value: Any, work: GpuWork, gpus: Gpus, device: int) -> None:
        self.value = value  # as the user gave it
        self.work = work
        self.library = library_of(value)
        self._facts: PointerFacts | None = None
        self.array = imported(gpus.runtime, value, work.stream_on(device), tensor=name)
        array = self.array
        super().__init__(dtypes.from_numpy(array.dtype, name), array.shape, array.nbytes, (), array.device)

    @property
    def facts(self) -> PointerFacts:
        """What CUDA knows of the memory."""
        if self._facts is None:
            self._facts = self.array.runtime.pointer(self.array.address)
        return self._facts

    @property
    def obstacle(self) -> str:
        """Why a model cannot be given the memory as it is, and what to do; empty if it can."""
        if not self.byte_size:
            return "it has no bytes"
        if self.is_strided:
            return "it is not C-contiguous; make it so, for example by tensor.contiguous()"
        if self.facts.kind == "managed":
            return "it is managed memory, which CUDA cannot share; allocate it by cudaMalloc"
        if self.facts.base % BLOCK_BYTES:
            return "its allocation shares a block of CUDA's with others; allocate larger ones, of 2 MiB or more"
        if not self.facts.is_exportable:
            return (
                "it lies in a memory pool of CUDA (cudaMallocAsync) or in virtual memory, which CUDA IPC cannot share; "
                "allocate it by cudaMalloc, as CuPy's own pool does, and PyTorch's without expandable_segments and "
                "cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF"
            )
        return ""

    @property
    def is_strided(self) -> bool:
        """Whether to copy it may take very many copies."""
        return not isinstance(self.array, DeviceArray)

    def write_to(self, target: DeviceArray | npt.NDArray[Any]) -> None:
        """Copy the tensor. It is complete then, and this has waited for what its stream waits for."""
        self.put(target)
        assert self.device is not None
        self.array.runtime.synchronize_stream(self.work.stream_on(self.device), self.device)

    def put(self, target: DeviceArray | npt.NDArray[Any]) -> None:
        """Have the tensor copied to an array, on its stream."""
        assert self.device is not None
        copy(self.array.runtime, target, self.array, self.work.stream_on(self.device))


def device_source(gpus: Gpus, name: str, value: Any, found: Mapping[str, Source]) -> DeviceSource | None:
    """Return an input that is on a GPU as a source, lent where that is possible and pays; None for what is not on one.

    ``found`` has the call's other inputs so far: those on one GPU share its stream.
    """
    source = copied_source(gpus, name, value, found)
    if source is not None:
        source.is_lent = source.byte_size >= gpus.lend_bytes and not source.obstacle
    return source


def copied_source(gpus: Gpus, name: str, value: Any, found: Mapping[str, Source]) -> DeviceSource | None:
    """As :func:`device_source`, of what is to be copied in any case."""
    if type(value) is np.ndarray or not is_on_gpu(value):
        return None
    work = work_of(found.values()) or GpuWork(gpus)
    return DeviceSource(name, value, work, gpus, device_of(gpus.runtime, value))


def kept_source(gpus: Gpus, name: str, value: Any, found: Mapping[str, Source]) -> DeviceSource | None:
    """As :func:`device_source`, of what is to be the memory of more requests than one."""
    source = copied_source(gpus, name, value, found)
    if source is not None:
        source.is_lent = True
    return source


def work_of(sources: Iterable[Source]) -> GpuWork | None:
    """Return the work that a call's inputs on GPUs share; None if there are none."""
    return next((each.work for each in sources if isinstance(each, DeviceSource)), None)


def library_of_inputs(sources: Mapping[str, DeviceSource]) -> str | None:
    """Return the array library that a call's inputs on GPUs are of; None if there are none, or they are of none."""
    return next((each.library for each in sources.values() if each.library), None)


def inputs_on_gpus(given: Mapping[str, Any]) -> dict[str, DeviceSource]:
    """Return those of a call's inputs that are on GPUs."""
    return {name: each for name, each in given.items() if isinstance(each, DeviceSource)}
