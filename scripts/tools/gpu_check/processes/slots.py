"""Memory for the calls of the check: of a GPU or of the host, and one request in it at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils import dtypes
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.pinned import PinnedRecords
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol import results, table
from shm_backend_utils.protocol.claims import CudaRegionClaim, RegionClaim, claimed_size
from shm_backend_utils.protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER, SlotAddress
from shm_backend_utils.protocol.results import Results
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table

from ..gpu import Gpu
from ..report import require

_ALIGNMENT: Final = 256
_FP32: Final = np.dtype(np.float32)
_NAME_LENGTH: Final = struct.Struct("<H")
_NAME_LENGTH_OFFSET: Final = table.HEAD_LENGTH - 8 + 6
"""Of the first further region; the generation is not in the table."""


class Slot:
    """A managed region, through which requests to a model are fenced one from the next."""

    def __init__(self, model: str, byte_size: int = 0) -> None:
        self.model = model
        self.region = ManagedRegion.create(byte_size)
        self._address = str(SlotAddress(model, self.region.segment.key, self.region.header.token.hex(), 0))
        self._record = self.region.record(0)
        self._generation = 0
        self.describe({}, {})

    def describe(
        self, inputs: Mapping[str, InputSpan], outputs: Mapping[str, OutputSpan], *others: RegionClaim
    ) -> None:
        """Say what all requests from now on are; the regions of their spans are this one, and then the others."""
        self._table = Table(dict(inputs), dict(outputs), others)
        self._encoded = table.encode(self._table)

    def next_request(self, encoded: bytes | None = None) -> dict[str, Any]:
        """Begin a generation and return the parameters of its request; with another table if one is given."""
        self._generation += 1
        self._record.begin(self._generation, self._encoded if encoded is None else encoded)
        return {SLOT_PARAMETER: self._address, GENERATION_PARAMETER: self._generation}

    @property
    def is_answered(self) -> bool:
        """Whether the model has finished with the slot, or leaves the end to its GPU."""
        is_early = self._record.started == self._generation and bool(self.results.events)
        return is_early or self._record.completed == self._generation

    @property
    def results(self) -> Results:
        further = [claimed_size(claim) for claim in self._table.regions]
        return results.decode(bytes(self._record.results), [self.region.header.byte_size, *further])

    def unlink(self) -> None:
        """Give the memory up: models let go of it now."""
        self.region.segment.unlink()

    def free(self) -> None:
        """Free everything; no process may have memory of a GPU mapped."""
        del self._record
        self.region.close()


class DeviceSlot(Slot):
    """Memory of a GPU for one input and one output, which is as large as the input if it is not told."""

    def __init__(
        self,
        gpu: Gpu,
        model: str,
        shape: tuple[int, ...],
        out_shape: tuple[int, ...] | None = None,
        *,
        dtype: np.dtype[Any] = _FP32,
        device: int = 0,
    ) -> None:
        super().__init__(model)
        out_shape = shape if out_shape is None else out_shape
        sizes = [math.prod(each) * dtype.itemsize for each in (shape, out_shape)]
        y_begin = -(-sizes[0] // _ALIGNMENT) * _ALIGNMENT
        self.allocation = CudaAllocation(gpu.runtime, y_begin + max(sizes[1], _ALIGNMENT), device)
        address, keeper = self.allocation.address, self.allocation.keeper
        self.x = DeviceArray(gpu.runtime, address, shape, dtype, device, keeper)  # input and output
        self.y = DeviceArray(gpu.runtime, address + y_begin, out_shape, dtype, device, keeper)
        x = InputSpan(dtypes.from_numpy(dtype, "INPUT0"), shape, 1, 0, sizes[0])
        self.describe({"INPUT0": x}, {"OUTPUT0": OutputSpan(1, y_begin, sizes[1])}, _claim(self.allocation))

    def let_wait(self, gpu: Gpu) -> None:
        """Make the stream wait until the model's GPU has finished with the slot."""
        address = PinnedRecords.of(gpu.runtime, self.region).completed(0, 0)
        require(address is not None, "streams cannot wait for words in host memory")
        assert address is not None
        with gpu.runtime.on(0):
            gpu.runtime.wait_for_word(address, self._generation, gpu.stream)

    def claiming(self, **changes: Any) -> bytes:
        (claim,) = self._table.regions
        return table.encode(self._table._replace(regions=(replace(claim, **changes),)))

    def claiming_handle_length(self, length: int) -> bytes:
        """Return the table with a handle that is said to have so many bytes."""
        encoded = bytearray(self._encoded)
        _NAME_LENGTH.pack_into(encoded, _NAME_LENGTH_OFFSET, length)
        return bytes(encoded)

    def free_on_device(self) -> None:
        self.x = self.y = None  # type: ignore[assignment]  # they keep it
        self.allocation.free()
        runtime = self.allocation.runtime
        while runtime.retired.collect():  # it is freed when its device is done
            runtime.synchronize_device(self.allocation.device)

    def free(self) -> None:
        self.free_on_device()
        super().free()


class LentSlot(DeviceSlot):
    """A slot whose input lies in another allocation, at an offset, and is lent for one request: a user's own tensor."""

    def __init__(self, gpu: Gpu, model: str, tensor: DeviceArray) -> None:
        super().__init__(gpu, model, (1,), tensor.shape, device=tensor.device)
        runtime, address = gpu.runtime, tensor.address
        facts = runtime.pointer(address)
        with runtime.on(tensor.device):
            handle = runtime.export(facts.base, facts.device)
        lent = CudaRegionClaim(handle, facts.byte_size, runtime.device_uuid(tensor.device), 0, is_for_one_request=True)
        self.offset = address - facts.base
        x = InputSpan(dtypes.BY_NAME["FP32"], tensor.shape, 2, self.offset, tensor.nbytes)
        self.describe({"INPUT0": x}, self._table.outputs, _claim(self.allocation), lent)


class HostSlot(Slot):
    """Memory of the host with one input, INPUT0, and room for no output."""

    def __init__(self, model: str, values: npt.NDArray[np.generic]) -> None:
        super().__init__(model, values.nbytes)
        begin = self.region.data_offset
        self.region.bytes()[begin : begin + values.nbytes] = values.view(np.uint8)
        dtype = dtypes.from_numpy(values.dtype, "INPUT0")
        self.describe({"INPUT0": InputSpan(dtype, values.shape, 0, begin, values.nbytes)}, {})


def _claim(allocation: CudaAllocation) -> CudaRegionClaim:
    return CudaRegionClaim(allocation.handle, allocation.byte_size, allocation.device_uuid, 0, waits=True)
