"""A client of the direct path for tests of the model half, and memory that tells when it is read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils import dtypes
from shm_backend_utils.memory.managed import ManagedRegion, RegionKind
from shm_backend_utils.protocol import results, table
from shm_backend_utils.protocol.claims import RegionClaim
from shm_backend_utils.protocol.parameters import SlotAddress
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Ring, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit import emulated

__all__ = ["Client", "Watched"]

ALIGNMENT = 256


class Client:
    """A region with slots, each of which has as much of the data; and the slots' generations."""

    def __init__(
        self,
        model: str = "m",
        slots: int = 1,
        share: int = 1 << 16,
        record_byte_size: int = 4096,
        kind: RegionKind = RegionKind.SYSTEM,
    ) -> None:
        self.model = model
        self.region = ManagedRegion.create(share * slots, slots, record_byte_size=record_byte_size, kind=kind)
        self.generations = [0] * slots
        self._share = share

    @property
    def data(self) -> int:
        return self.region.data_offset

    def address(self, slot: int = 0) -> str:
        token = self.region.header.token.hex()
        return str(SlotAddress(self.model, self.region.segment.key, token, slot))

    def laid_out(
        self, inputs: Mapping[str, npt.NDArray[Any]], outputs: Mapping[str, int], slot: int = 0, **more: Any
    ) -> Table:
        at = self.data + slot * self._share
        spans: dict[str, InputSpan] = {}
        rooms: dict[str, OutputSpan] = {}
        for name, array in inputs.items():
            spans[name] = InputSpan(dtypes.from_numpy(array.dtype, name), array.shape, 0, at, array.nbytes)
            np.ndarray(array.shape, array.dtype, self.region.bytes(), at)[...] = array
            at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        for name, byte_size in outputs.items():
            rooms[name] = OutputSpan(0, at, byte_size)
            at += -(-byte_size // ALIGNMENT) * ALIGNMENT
        return Table(spans, rooms, **more)

    def begin(self, said: Table | bytes, slot: int = 0) -> dict[str, Any]:
        self.generations[slot] += 1
        text = said if isinstance(said, bytes) else table.encode(said)
        self.region.record(slot).begin(self.generations[slot], text)
        return {"shm_slot": self.address(slot), "shm_generation": self.generations[slot]}

    def request(
        self,
        inputs: Mapping[str, npt.NDArray[Any]],
        outputs: Mapping[str, int],
        slot: int = 0,
        *,
        regions: tuple[RegionClaim, ...] = (),
        ring: Ring | None = None,
        delivered: Mapping[str, npt.NDArray[Any]] | None = None,
        **parameters: Any,
    ) -> InferenceRequest:
        said = self.laid_out(inputs, outputs, slot, regions=regions, ring=ring)
        return emulated.delivered({**self.begin(said, slot), **parameters}, list(outputs), delivered)

    def places(self, slot: int = 0, byte_sizes: Sequence[int] = ()) -> dict[str, OutputPlace]:
        data = self._model_half(slot)
        found = results.decode(data, [self.region.header.byte_size, *byte_sizes])
        return {place.name: place for place in found.outputs}

    def output(self, name: str, slot: int = 0) -> npt.NDArray[Any]:
        place = self.places(slot)[name]
        assert not place.is_in_response
        view: npt.NDArray[Any] = np.ndarray(place.shape, place.dtype.numpy, self.region.bytes(), place.offset)
        copied: npt.NDArray[Any] = view.copy()
        return copied

    def has_results(self, slot: int = 0) -> bool:
        return self._model_half(slot)[16:20] != bytes(4)

    def is_over(self, slot: int = 0) -> bool:
        lease = self.region.lease(slot)
        if self.region.record(slot).completed != self.generations[slot] or not lease.take():
            return False
        lease.give_back()
        return True

    def is_free(self, slot: int = 0) -> bool:
        lease = self.region.lease(slot)
        if not lease.take_back():
            return False
        lease.give_back()
        return True

    def close(self) -> None:
        self.region.segment.unlink()
        self.region.close()

    def _model_half(self, slot: int) -> bytes:
        return bytes(self.region.record(slot).results)


class Watched:
    """A part of shared memory in the place of its view; something is called before each read and each write."""

    def __init__(
        self,
        view: memoryview,
        before_read: Callable[[], object] = lambda: None,
        before_write: Callable[[], object] = lambda: None,
    ) -> None:
        self._view = view
        self._before_read = before_read
        self._before_write = before_write

    def __getitem__(self, key: Any) -> Any:
        self._before_read()
        return self._view[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._before_write()
        self._view[key] = value

    def __bytes__(self) -> bytes:
        self._before_read()
        return bytes(self._view)
