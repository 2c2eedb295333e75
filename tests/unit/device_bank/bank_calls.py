"""Calls whose memory comes of a bank, and the sizes that the tests of this folder have in common."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from tests.unit.fake_gpu_events import PATIENCE_S

from shm_backend_utils.client.client_memory import ClientMemory
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.options import RequestOptions
from shm_backend_utils.client.paths.direct import DirectExchange
from shm_backend_utils.client.paths.opening import Opening
from shm_backend_utils.client.settings import CallSettings
from shm_backend_utils.client.steps import BlockingDriver, Steps
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.origin import Origin
from shm_backend_utils.protocol.call_layout import CallInput
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda

T = TypeVar("T")

SHM = Path("/dev/shm")
SIZE = 4096
BYTE = BY_NAME["UINT8"]
LIMIT = 2 * SIZE

MakeRegion = Callable[..., SlotRegion]


def times(cuda: FakeCuda, operation: str) -> int:
    return sum(name == operation for name, _ in cuda.log)


SPEC = ModelSpec.from_config(
    {
        "name": "m",
        "input": [{"name": name, "data_type": "TYPE_UINT8", "dims": [-1], "optional": True} for name in "AB"],
    }
)


class Calls:
    """Takes memory for calls of a model on the direct path, as a client does."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.memory = ClientMemory(PoolOptions(max_bytes=2**20, max_device_bytes=LIMIT), CudaAccess(lambda: cuda))
        self._known = KnownModel(SPEC, head_room=1)
        self._opening = Opening(cast(Any, None), self.memory, cast(Any, None), cast(Any, None))
        self._driver = BlockingDriver(cast(Any, None))

    def open(self, timeout_s: float = PATIENCE_S, **devices: int) -> DirectExchange:
        """Return a call with some inputs of 100 bytes on these GPUs."""
        given = {name: CallInput(BYTE, (100,), 100, device) for name, device in devices.items()}
        settings = CallSettings("m", "", "auto", time.monotonic() + timeout_s, RequestOptions(), Origin.here("infer"))
        layout = self._known.lay_out(given, None)
        exchange = self._driver.run(self._opening.open(settings, self._known, "direct", layout, given, None))
        assert isinstance(exchange, DirectExchange)
        return exchange

    def run(self, operation: Steps[T]) -> T:
        """Do an operation, as a client does."""
        return self._driver.run(operation)

    def close(self) -> None:
        self._driver._threads.shutdown()
        self.memory.end()


def pool_and_opening(cuda: FakeCuda) -> contextlib.closing[Calls]:
    return contextlib.closing(Calls(cuda))
