"""A session and a client of it in one process, virtual processes of the fake driver, and no server between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.config import Config
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.parameters import encode_descriptor
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.response import InferenceResponse
from tests.unit.claims_of import claim_of_allocation
from tests.unit.emulated import delivered, message_of, start_server
from tests.unit.gpu.fakes import DRIVER, stream_on, wait_until
from tests.unit.table_client import Client as HostClient

SHORTER_NAME: Final = "L" * 1448
LONG_NAME: Final = f"{SHORTER_NAME}L"
LONG_SHAPE: Final = (*(1,) * 31, 4)
"""Those of outputs that, beside WIDE, leave room for events in a slot's record to the byte, and for none."""
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
        "output": [
            *({"name": name, **_TENSOR} for name in ("Y", "Z")),
            {"name": "WORDS", **_TENSOR, "data_type": "TYPE_STRING"},
            *({"name": name, **_TENSOR, "dims": [-1] * len(LONG_SHAPE)} for name in ("WIDE", SHORTER_NAME, LONG_NAME)),
        ],
        "model_transaction_policy": {"decoupled": True},  # so that tests may serve streams, too
    }
)


def session_on(
    cuda: CudaRuntime | Callable[[], CudaRuntime], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> ShmSession:
    """Return a session of model `m`, with input X and outputs Y and Z of FP32, and WORDS; its instance is on GPU 0."""
    start_server(monkeypatch)
    load = (lambda: cuda) if isinstance(cuda, CudaRuntime) else cuda
    return ShmSession(_SPEC, Config(**settings), CudaAccess(load), DEVICE)


class Calls:
    def __init__(self, cuda: CudaRuntime, client: Client, session: ShmSession, stream: int) -> None:
        self.cuda, self.client, self.session, self.stream = cuda, client, session, stream

    def response(
        self, infer: Callable[[Call], object], outputs: Mapping[str, int] | None = None, slot: int = 0, **claimed: Any
    ) -> InferenceResponse:
        (response,) = self.session.serve([self.client.request(slot, outputs or {}, **claimed)], infer)
        assert isinstance(response, InferenceResponse)
        return response

    def serve(self, infer: Callable[[Call], object], *outputs: Any, **claimed: Any) -> InferenceResponse:
        response = self.response(infer, *outputs, **claimed)
        assert response.error() is None
        return response

    def refusal(self, infer: Callable[[Call], object], *outputs: Any, **claimed: Any) -> str:
        return message_of(self.response(infer, *outputs, **claimed))

    def collect(self) -> None:
        collect(self.session)


def collect(session: ShmSession) -> None:
    wait_until(lambda: not session._open_context().resolver._cuda.collect())


@contextlib.contextmanager
def calls_of(cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Calls]:
    with stream_on(cuda) as stream, contextlib.closing(session_on(cuda, monkeypatch, **settings)) as session:
        yield Calls(cuda, client, session, stream)


class Client:
    def __init__(self, cuda: CudaRuntime) -> None:
        self.cuda = cuda
        self.host = HostClient(slots=SLOTS, share=_SHARE)
        self.region = self.host.region
        self.allocations = [CudaAllocation(cuda, SLOTS * _SHARE, device) for device in range(cuda.device_count())]

    def request(
        self, slot: int, outputs: Mapping[str, int], room: int = 16, *, fenced: bool = True, **claimed: Any
    ) -> InferenceRequest:
        fence = 0 if fenced else None
        on_gpus = tuple([claim_of_allocation(each, fence=fence, **claimed) for each in self.allocations])
        begins = {name: slot * _SHARE + 512 * index for index, name in enumerate(("X", *outputs))}
        begins |= {name: self.host.data + begins[name] for name, device in outputs.items() if device == HOST}
        x = InputSpan(_FP32, (4,), 1 + DEVICE, begins["X"], 16)
        rooms = {
            name: OutputSpan(0 if device == HOST else 1 + device, begins[name], room)
            for name, device in outputs.items()
        }
        said = Table({"X": x}, rooms, on_gpus)
        if fenced:
            return delivered(self.host.begin(said, slot), list(outputs))
        return delivered({"shm_io": encode_descriptor("m", said)}, list(outputs))

    def write(self, slot: int, value: float) -> None:
        self.floats(DEVICE, slot * _SHARE)[:] = value

    def places(self, slot: int) -> dict[str, OutputPlace]:
        return self.host.places(slot, [each.byte_size for each in self.allocations])

    def events(self, slot: int = 0) -> tuple[int, ...]:
        sizes = [self.region.header.byte_size, *[each.byte_size for each in self.allocations]]
        return results.decode(bytes(self.region.record(slot).results), sizes).events

    def wait_for_gpus(self, slot: int = 0) -> None:
        wait_until(lambda: self.is_over(slot))

    def output(self, slot: int = 0, name: str = "Y") -> list[float]:
        place = self.places(slot)[name]
        if place.region == 0:
            values: list[float] = self.region.bytes()[place.offset : place.offset + 16].view(np.float32).tolist()
            return values
        now: list[float] = self.floats(place.region - 1, place.offset).tolist()
        return now

    def is_over(self, slot: int = 0) -> bool:
        return self.host.is_over(slot)

    def close(self) -> None:
        self.host.close()
        for allocation in self.allocations:
            allocation.free()

    def floats(self, device: int, offset: int) -> npt.NDArray[Any]:
        return DRIVER.memory(self.allocations[device].address + offset, (4,), _FP32.numpy)


@pytest.fixture
def client(client_cuda: CudaRuntime) -> Iterator[Client]:
    with contextlib.closing(Client(client_cuda)) as client:
        yield client


@pytest.fixture
def calls(cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    with calls_of(cuda, client, monkeypatch) as calls:
        yield calls


@pytest.fixture
def early_calls(cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Calls of a session that leaves waiting to its client, and has served before."""
    with calls_of(cuda, client, monkeypatch, gpu_events=True) as calls:
        calls.serve(lambda call: None)
        DRIVER.forget()
        yield calls
