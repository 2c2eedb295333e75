"""Regions on a GPU around an inference, on the fake driver; the server is another process."""

from __future__ import annotations

import base64
import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.compat.shm_util import ShmRegions, create_set_cuda_shm_regions, unregister_cleanup_shm_regions
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import HANDLE_LENGTH, CudaRuntime
from tests.unit.gpu.arrays.test_device_array import WithInterfaceAlone
from tests.unit.gpu.fakes import CLIENT, DRIVER, NOTHING, collect_all, left_of, stream_on

X: Final = np.arange(1, 6, dtype=np.float32)
WORDS: Final = np.array([["a", ""], ["ü", "nul\0"]], object)


class LostError(Exception):
    """What tests let happen."""


class Registrations:
    """The two methods of tritonclient that speak of CUDA, and what a server does for them: it maps what it is told."""

    def __init__(self, cuda: CudaRuntime, client_cuda: CudaRuntime) -> None:
        self.cuda, self.client_cuda = cuda, client_cuda
        self.registered: dict[str, tuple[int, int]] = {}
        self.contents: dict[str, bytes] = {}  # of each region when it was registered
        self.calls: list[tuple[str, str, int, int]] = []
        self.refuses_to_unregister: set[str] = set()

    def register_cuda_shared_memory(self, name: str, raw_handle: str, device_id: int, byte_size: int) -> None:
        self.calls.append((name, raw_handle, device_id, byte_size))
        handle = base64.b64decode(raw_handle, validate=True)
        assert len(handle) == HANDLE_LENGTH
        self.registered[name] = self.cuda.open(handle, device_id), device_id
        self.contents[name] = self.memory(name, byte_size, np.uint8).tobytes()

    def unregister_cuda_shared_memory(self, name: str) -> None:
        if name in self.refuses_to_unregister:
            raise LostError
        if name in self.registered:
            self.cuda.close(*self.registered.pop(name))

    def memory(self, name: str, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return DRIVER.memory(self.registered[name][0], (count,), dtype)


@pytest.fixture
def server(cuda: CudaRuntime, client_cuda: CudaRuntime) -> Registrations:
    return Registrations(cuda, client_cuda)


def create(server: Registrations, inputs: Any, outputs: Any = (), **named: Any) -> ShmRegions:
    access = CudaAccess(lambda: server.client_cuda)
    return create_set_cuda_shm_regions(inputs, outputs, None, None, server, "grpc", cuda=access, **named)


def two_and_one(server: Registrations) -> ShmRegions:
    return create(server, [("X", X), ("WORDS", WORDS)], [("Y", 20)])


def clean_up(regions: ShmRegions, server: Registrations) -> None:
    unregister_cleanup_shm_regions(regions.shm_handles, server, "grpc")
    assert server.registered == {}


@pytest.mark.parametrize("device", [0, 1])
def test_what_a_server_is_told(server: Registrations, device: int, protocol: str) -> None:
    access, names, sizes = CudaAccess(lambda: server.client_cuda), ["a", "b"], [32, 64]
    regions = create_set_cuda_shm_regions(
        [("X", X)], [("Y", 20)], names, sizes, server, protocol, device_id=device, cuda=access
    )
    assert [(name, *what) for name, _, *what in server.calls] == [("a", device, 32), ("b", device, 64)]
    assert all(isinstance(raw_handle, str) for _, raw_handle, _, _ in server.calls)  # JSON takes no bytes
    assert left_of(CLIENT) == NOTHING._replace(allocations=2)
    clean_up(regions, server)


@pytest.mark.parametrize(
    ("array", "name"),
    [(X, "FP32"), (X[::-2], "FP32"), (X.astype(">f4"), "FP32"), (X[:0], "FP32"), (WORDS, "BYTES"), (X > 2, "BOOL")],
    ids=["plain", "reversed", "big-endian", "empty", "strings", "bool"],
)
def test_what_was_written_is_read(server: Registrations, array: npt.NDArray[Any], name: str) -> None:
    regions = create(server, [("X", array)])
    assert regions.inputs[0].datatype() == name
    found = regions.shm_handles[0].read(dtypes.BY_NAME[name].numpy, array.shape)
    clean_up(regions, server)
    expected = [[word.encode() for word in row] for row in WORDS] if array is WORDS else array.tolist()
    assert found.tolist() == expected


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("library", ["DLPack", "interface", "neither"])
def test_an_array_is_copied_when_it_is_filled(server: Registrations, device: int, library: str) -> None:
    with stream_on(server.client_cuda, device) as stream:
        array = DRIVER.tensor(X.reshape(5, 1), device=device, process=CLIENT)
        array.write(X.reshape(5, 1) * 3, stream)
        if library == "neither":
            array.stream = None  # nobody knows that it is late
        regions = create(server, [("X", WithInterfaceAlone(array) if library == "interface" else array)])
    assert server.contents["input0"] == (X * 3).tobytes()
    assert (regions.inputs[0].shape(), regions.inputs[0].datatype()) == ([5, 1], "FP32")
    clean_up(regions, server)


def test_what_is_late_on_a_stream_that_nobody_names_is_read(server: Registrations) -> None:
    regions = create(server, [X])
    memory = server.memory("input0", 5, X.dtype)
    with stream_on(server.client_cuda) as stream:
        DRIVER.launch(stream, functools.partial(memory.fill, 9), CLIENT)
        assert regions.shm_handles[0].read(np.float32, 5).tolist() == [9] * 5
        DRIVER.launch(stream, functools.partial(memory.fill, 8), CLIENT)
        regions.shm_handles[0].write(X.view(np.uint8))
        assert memory.tolist() == X.tolist()
    clean_up(regions, server)


@pytest.mark.parametrize(("method", "turn"), [("allocate", 1), ("export", 2), ("device_uuid", 1), ("copy", 1)])
def test_failures_leave_nothing(server: Registrations, monkeypatch: pytest.MonkeyPatch, method: str, turn: int) -> None:
    original, calls = getattr(server.client_cuda, method), iter(range(100))

    def fail_or_call(*arguments: Any) -> Any:
        if next(calls) == turn:
            raise CudaError(method, "CUDA_ERROR_OUT_OF_MEMORY")
        return original(*arguments)

    monkeypatch.setattr(server.client_cuda, method, fail_or_call)
    with pytest.raises(CudaError, match=f"{method} failed"):
        two_and_one(server)
    collect_all(server.client_cuda)
    assert left_of(CLIENT) == NOTHING
    assert server.calls == []


@pytest.mark.parametrize("name", ["input0", "input1", "output0"])
def test_a_region_that_stays_registered_keeps_no_other(server: Registrations, name: str) -> None:
    regions = two_and_one(server)
    server.refuses_to_unregister = {name}
    with pytest.raises(LostError):
        unregister_cleanup_shm_regions(regions.shm_handles, server, "grpc")
    assert set(server.registered) == {name}
    assert left_of(CLIENT) == NOTHING._replace(allocations=1)  # what the server has mapped
    server.refuses_to_unregister = set()
    clean_up(regions, server)
