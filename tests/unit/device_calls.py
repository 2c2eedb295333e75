"""A session and a client of it in one process, each with a fake GPU of its own, and no server between them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest
from shm_backend_utils.model.settings import Settings
from shm_backend_utils.protocol.descriptor import Descriptor, InputSpan, OutputSpan, RegionClaim

from scripts.tools.gpu_check.processes import backend
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.memory.cuda.events import Event
from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaAllocation
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import ShmSession
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import descriptor
from shm_backend_utils.protocol.results import OutputPlace, parse_events, parse_results
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, FakeDeviceArray
from tests.unit.claims_of import claim_of_allocation, claim_of_region

__all__ = ["DEVICE", "HOST", "LONG_NAME", "Client", "session_on"]

LONG_NAME: Final = "L" * 3800
"""An output whose name leaves room for nothing else in a slot's record."""
DEVICE: Final = 0
HOST: Final = -1
SLOTS: Final = 4
_SHARE: Final = 4096
_FP32: Final = BY_NAME["FP32"]
_TENSOR: Final = {"data_type": "TYPE_FP32", "dims": [-1], "optional": True}
_SPEC: Final = ModelSpec.from_config(
    {
        "name": "m",
        "input": [{"name": "X", **_TENSOR}],
        "output": [{"name": name, **_TENSOR} for name in ("Y", "Z", LONG_NAME)],
    }
)


def session_on(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> ShmSession:
    """Return a session of model `m`, with input X and outputs Y and Z of FP32, and of an instance on GPU 0."""
    name = "triton_python_backend_utils"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that it is taken away again
    backend.put_in_place()
    return ShmSession(_SPEC, Settings(**settings), CudaAccess(lambda: cuda), DEVICE)


class Client:
    """Has a region of some slots, and a share of an allocation on each GPU for each of them."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.region = ManagedRegion.create(SLOTS * _SHARE, SLOTS)
        self._allocations = [CudaAllocation(cuda, SLOTS * _SHARE, device) for device in range(cuda.device_count())]
        self._generations = [0] * SLOTS

    def request(self, slot: int, outputs: Mapping[str, int], room: int = 16, *, fenced: bool = True) -> backend.Request:
        """Return a request whose X is on the instance's GPU, and whose outputs are where it is said."""
        host: list[RegionClaim] = [claim_of_region(self.region, slot)] if fenced else []
        slot_region = 0 if fenced else None
        on_gpus = [claim_of_allocation(each, slot_region=slot_region) for each in self._allocations]
        first = len(host)
        begins = {name: slot * _SHARE + 512 * index for index, name in enumerate(("X", *outputs))}
        begins |= {name: self.region.data_offset + begins[name] for name, device in outputs.items() if device == HOST}
        x = InputSpan(first + DEVICE, begins["X"], 16, _FP32, (4,))
        rooms = {
            name: OutputSpan(0 if device == HOST else first + device, begins[name], room)
            for name, device in outputs.items()
        }
        text = descriptor.encode(Descriptor("m", (*host, *on_gpus), {"X": x}, rooms))
        self._generations[slot] += 1
        self.region.record(slot).generation = self._generations[slot]
        parameters = {"shm_io": text, "shm_generation": self._generations[slot]}
        return backend.Request(json.dumps(parameters), list(outputs))

    def write(self, slot: int, value: float) -> None:
        """Fill a request's X."""
        self._floats(DEVICE, slot * _SHARE).peek()[:] = value

    def places(self, slot: int) -> dict[str, OutputPlace]:
        """Return where the results say that a call's outputs are."""
        sizes = [self.region.header.byte_size, *[each.byte_size for each in self._allocations]]
        return {place.name: place for place in parse_results(self.region.record(slot).results(), sizes)}

    def events(self, slot: int) -> tuple[Event, ...]:
        return parse_events(self.region.record(slot).results())

    def output(self, slot: int, name: str) -> list[float]:
        """Return what an output of a call is now, whatever is on streams."""
        place = self.places(slot)[name]
        if place.region == 0:
            values: list[float] = self.region.bytes()[place.offset : place.offset + 16].view(np.float32).tolist()
            return values
        now: list[float] = self._floats(place.region - 1, place.offset).peek().tolist()
        return now

    def is_over(self, slot: int) -> bool:
        """Return whether the model has given a slot back."""
        if self.region.record(slot).completed != self._generations[slot] or not self.region.lease(slot).take():
            return False
        self.region.lease(slot).give_back()
        return True

    def close(self) -> None:
        self.region.segment.unlink()
        self.region.close()
        for allocation in self._allocations:
            allocation.free()

    def _floats(self, device: int, offset: int) -> FakeDeviceArray:
        array = self._allocations[device].array_at(offset, _FP32.numpy, (4,), 16)
        assert array is not None
        found: FakeDeviceArray = array
        return found
