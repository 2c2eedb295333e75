"""CupyRuntime: what it asks of CuPy and of the driver, and what it makes of the answers. No GPU, and no CuPy."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.cupy_runtime import CupyRuntime
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH, CudaError, device_guard

HANDLE = bytes(range(HANDLE_LENGTH))
NAMES = {2: "cudaErrorMemoryAllocation", 35: "cudaErrorInsufficientDriver", 700: "cudaErrorIllegalAddress"}
STREAM = 5
F32 = np.dtype(np.float32)


class FakeCudaRuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"{NAMES[status]}: in CUDA's words: so and so")


class FakeCudaDriverError(RuntimeError):
    status = 700


class FakeOutOfMemoryError(MemoryError):
    pass


class FakeArray:
    """``cupy.ndarray``, over host memory."""

    def __init__(self, memory: npt.NDArray[Any], device: int = 0) -> None:
        self.memory = memory
        self.shape, self.dtype, self.nbytes, self.flags = memory.shape, memory.dtype, memory.nbytes, memory.flags
        self.data = SimpleNamespace(ptr=memory.ctypes.data, device_id=device)

    def __getitem__(self, key: Any) -> FakeArray:
        return FakeArray(self.memory[key], self.data.device_id)


class FakeCudaCalls:
    """``cupy.cuda.runtime``: notes every call, carries out copies, and fails where it is told to."""

    CUDARuntimeError = FakeCudaRuntimeError
    cudaIpcMemLazyEnablePeerAccess = 1
    eventDisableTiming = 2
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3
    memoryTypeHost = 1

    def __init__(self) -> None:
        self.noted: list[tuple[Any, ...]] = []
        self.failing = ""
        self.device = 0
        self.pinned: set[int] = set()
        self.devices_by_address: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.noted.append((name, *arguments))
            if name == self.failing:
                raise FakeCudaRuntimeError(700)
            return getattr(self, f"_{name}", lambda *_: 42)(*arguments)

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _getDevice(self) -> int:
        return self.device

    def _setDevice(self, device: int) -> None:
        self.device = device

    def _ipcGetMemHandle(self, address: int) -> bytes:
        return HANDLE

    def _pointerGetAttributes(self, address: int) -> SimpleNamespace:
        return SimpleNamespace(type=int(address in self.pinned), device=self.devices_by_address.get(address))

    def _memcpyAsync(self, target: int, source: int, byte_size: int, kind: int, stream: int) -> None:
        ctypes.memmove(target, source, byte_size)

    def _memcpyPeerAsync(self, target: int, to: int, source: int, of: int, byte_size: int, stream: int) -> None:
        ctypes.memmove(target, source, byte_size)

    def _check_status(self, status: int) -> None:
        if status:
            raise FakeCudaRuntimeError(status)

    def names(self) -> list[str]:
        return [name for name, *_ in self.noted]


class FakeCupy(types.ModuleType):
    """``cupy``; what works on arrays notes the device and the stream on which it does."""

    def __init__(self, calls: FakeCudaCalls) -> None:
        super().__init__("cupy")
        self.calls = calls
        self.worked: list[tuple[str, int, int]] = []
        self.stream = 0
        self.ndarray = FakeArray
        self.cuda = SimpleNamespace(
            runtime=calls,
            driver=SimpleNamespace(CUDADriverError=FakeCudaDriverError),
            memory=SimpleNamespace(OutOfMemoryError=FakeOutOfMemoryError),
            Stream=SimpleNamespace(from_external=lambda stream: self.on(stream.__cuda_stream__()[1])),
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
        )

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        former, self.stream = self.stream, stream
        yield
        self.stream = former

    def note(self, what: str) -> None:
        self.worked.append((what, self.calls.device, self.stream))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> FakeArray:
        self.note("empty")
        return FakeArray(np.empty(shape, dtype), self.calls.device)

    def ascontiguousarray(self, array: FakeArray) -> FakeArray:
        self.note("pack")
        return FakeArray(np.ascontiguousarray(array.memory), array.data.device_id)

    def copyto(self, target: FakeArray, source: FakeArray) -> None:
        self.note("copyto")
        np.copyto(target.memory, source.memory)

    def from_dlpack(self, value: Any) -> tuple[str, Any]:
        return ("from_dlpack", value)

    def asarray(self, value: Any) -> tuple[str, int]:
        return ("asarray", self.calls.device)


class FakeDriver:
    """``libcuda.so.1``, with one GPU, whose UUID has zeros in it."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, number: Any, device: int) -> int:
        number._obj.value = device + 7
        return 0

    def cuDeviceGetUuid(self, octets: Any, number: Any) -> int:
        octets._obj[:] = [number.value, 0, 0xAB, *range(13)]
        return 0

    def cuMemGetAddressRange_v2(self, begin: Any, byte_size: Any, address: Any) -> int:
        begin._obj.value, byte_size._obj.value = address.value & ~0xFFFF, 1 << 33
        return 0


@pytest.fixture
def calls() -> FakeCudaCalls:
    return FakeCudaCalls()


@pytest.fixture
def cupy(calls: FakeCudaCalls, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy(calls)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": FakeDriver()}.__getitem__)
    return fake


@pytest.fixture
def runtime(cupy: FakeCupy) -> CupyRuntime:
    return CupyRuntime()


def host(*shape: int) -> npt.NDArray[Any]:
    return np.arange(1, 1 + np.prod(shape), dtype=F32).reshape(shape)


def on_device(*shape: int, device: int = 0) -> FakeArray:
    return FakeArray(np.zeros(shape, F32), device)


# --- CuPy, there or not


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        MachineError, match=r"not installed; install triton-shm-backend-utils\[cuda\], which brings cupy-cuda12x"
    ):
        CupyRuntime()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "raise ImportError('many lines') from ImportError('libcuda.so.1: no file')",
            "imported: libcuda.so.1: no file; ",
        ),
        ("raise ImportError('one line')", "cannot be imported: one line; it must be the CuPy for this machine's CUDA"),
        ("import no_such_module", "CuPy cannot be imported, as it lacks no_such_module; install that"),
    ],
)
def test_a_cupy_that_cannot_be_imported_is_told_from_one_that_is_missing(
    program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cupy.py").write_text(program)
    with pytest.raises(MachineError, match=message):
        CupyRuntime()


def test_making_a_runtime_asks_nothing_of_the_gpu(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    assert calls.noted == []


# --- errors

EVERY_CALL: list[tuple[str, str, Callable[[CupyRuntime], Any]]] = [
    ("getDeviceCount", "counting the GPUs", lambda runtime: runtime.device_count()),
    ("check_status", "asking for the UUID of GPU 3", lambda runtime: runtime.device_uuid(3)),
    ("getDevice", "asking for the current GPU", lambda runtime: runtime.current_device()),
    ("setDevice", "making GPU 3 current", lambda runtime: runtime.set_device(3)),
    ("malloc", "allocating 9 bytes of GPU memory", lambda runtime: runtime.allocate(9)),
    ("free", "freeing GPU memory", lambda runtime: runtime.free(9)),
    ("ipcGetMemHandle", "exporting GPU memory", lambda runtime: runtime.export(9)),
    ("ipcOpenMemHandle", "opening another process' GPU memory", lambda runtime: runtime.open(HANDLE)),
    ("ipcCloseMemHandle", "closing another process' GPU memory", lambda runtime: runtime.close(9)),
    ("check_status", "asking for the extent of GPU memory", lambda runtime: runtime.extent(9)),
    ("hostRegister", "pinning 9 bytes of host memory", lambda runtime: runtime.pin(9, 9)),
    ("hostUnregister", "unpinning host memory", lambda runtime: runtime.unpin(9)),
    ("streamSynchronize", "waiting for the GPU", lambda runtime: runtime.synchronize(9)),
    ("eventRecord", "ordering two streams", lambda runtime: runtime.order(8, 9)),
    ("memcpyAsync", "copying 24 bytes", lambda runtime: runtime.copy(on_device(6), host(6), STREAM)),
]


@pytest.mark.parametrize(("cuda_call", "doing", "ask"), EVERY_CALL, ids=[doing for _, doing, _ in EVERY_CALL])
def test_an_error_of_cuda_says_what_was_being_done(
    cuda_call: str, doing: str, ask: Callable[[CupyRuntime], Any], calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    calls.failing = cuda_call
    with pytest.raises(CudaError, match=f"^{doing} failed with cudaErrorIllegalAddress: a kernel has") as caught:
        ask(runtime)
    assert caught.value.name == "cudaErrorIllegalAddress"


@pytest.mark.parametrize(
    ("error", "name"),
    [(FakeCudaDriverError("CUDA_ERROR_X"), "cudaErrorIllegalAddress"), (FakeOutOfMemoryError(), NAMES[2])],
)
def test_errors_of_the_driver_and_of_cupys_pool_have_the_runtimes_names(
    error: Exception, name: str, cupy: FakeCupy, runtime: CupyRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(cupy, "empty", fail)
    with pytest.raises(CudaError) as caught:
        runtime.empty((2, 3), F32)
    assert caught.value.name == name
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("driver", [{}, {"libcuda.so.1": object()}], ids=["no driver", "a driver without the function"])
def test_what_the_driver_lacks_is_an_old_driver(
    driver: dict[str, Any], runtime: CupyRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        if name not in driver:
            raise OSError(f"{name}: cannot open shared object file")
        return driver[name]

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(
        CudaError, match="failed with cudaErrorInsufficientDriver: the NVIDIA driver is missing, or old"
    ):
        runtime.extent(9)


# --- devices


@pytest.mark.parametrize("ask", [ask for name, _, ask in EVERY_CALL if name != "setDevice"])
def test_no_call_but_one_changes_the_device(
    ask: Callable[[CupyRuntime], Any], calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    ask(runtime)
    assert "setDevice" not in calls.names()


def test_a_guard_sets_the_device_by_the_runtime_and_back(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    with device_guard(runtime, 1):
        assert runtime.current_device() == 1
    assert [call for call in calls.noted if call[0] == "setDevice"] == [("setDevice", 1), ("setDevice", 0)]


def test_a_uuid_is_32_lowercase_digits_with_its_zeros(runtime: CupyRuntime) -> None:
    assert runtime.device_uuid(0) == "0700ab000102030405060708090a0b0c"
    assert runtime.device_uuid(1) == "0800ab000102030405060708090a0b0c"


def test_a_uuid_is_asked_for_once(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    first = runtime.device_uuid(0)
    calls.failing = "check_status"
    assert runtime.device_uuid(0) == first


# --- memory


def test_memory_comes_from_plain_malloc_and_never_from_a_pool(
    calls: FakeCudaCalls, cupy: FakeCupy, runtime: CupyRuntime
) -> None:
    assert runtime.allocate(4096) == 42
    assert (calls.noted, cupy.worked) == ([("malloc", 4096)], [])


def test_memory_is_freed_when_the_device_is_done(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    runtime.free(9)
    assert calls.noted == [("deviceSynchronize",), ("free", 9)]


def test_an_exported_handle_is_its_bytes(runtime: CupyRuntime) -> None:
    assert runtime.export(9) == HANDLE


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_handle_is_opened_as_bytes_with_peer_access(
    kind: Callable[[bytes], Any], calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    assert runtime.open(kind(HANDLE)) == 42
    ((_, handle, flags),) = calls.noted
    assert (type(handle), handle, flags) == (bytes, HANDLE, 1)


def test_the_extent_is_that_of_the_whole_allocation(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    assert runtime.extent(0x7F00_0001_2345) == (0x7F00_0001_0000, 1 << 33)
    assert calls.noted[0] == ("free", 0)  # which makes CUDA ready for this thread


def test_host_memory_is_pinned_and_unpinned(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    runtime.pin(4096, 8192)
    runtime.unpin(4096)
    assert calls.noted == [("hostRegister", 4096, 8192, 0), ("hostUnregister", 4096)]


# --- streams


def test_the_current_stream_is_cupys(cupy: FakeCupy, runtime: CupyRuntime) -> None:
    with cupy.on(STREAM):
        assert runtime.stream_address(runtime.current_stream()) == STREAM


def test_a_stream_waits_for_an_event_of_the_other(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    runtime.order(8, 9)
    assert calls.noted == [
        ("eventCreateWithFlags", 2),
        ("eventRecord", 42, 8),
        ("streamWaitEvent", 9, 42),
        ("eventDestroy", 42),
    ]


@pytest.mark.parametrize("failing", ["eventRecord", "streamWaitEvent"])
def test_the_event_is_destroyed_also_if_ordering_fails(
    failing: str, calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    calls.failing = failing
    with pytest.raises(CudaError):
        runtime.order(8, 9)
    assert calls.noted[-1] == ("eventDestroy", 42)


def test_a_stream_is_in_order_with_itself(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    runtime.order(8, 8)
    assert calls.noted == []


# --- arrays


def test_an_array_lies_over_the_memory_and_keeps_its_owner(
    cupy: FakeCupy, runtime: CupyRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupy, "ndarray", lambda *arguments: arguments)
    cupy.cuda.UnownedMemory = lambda *arguments: arguments
    cupy.cuda.MemoryPointer = lambda memory, offset: (memory, offset)
    owner = object()
    assert runtime.array(4096, (2, 3), F32, 1, owner) == ((2, 3), F32, ((4096, 24, owner, 1), 0))


def test_an_array_knows_where_it_begins_and_whether_it_is_contiguous(runtime: CupyRuntime) -> None:
    array = on_device(4, 6)
    assert runtime.address_of(array[1:]) == array.data.ptr + 24
    assert runtime.is_contiguous(array[1:])
    assert not runtime.is_contiguous(array[:, 1:])


def test_an_array_of_cupy_is_adopted_as_it_is(runtime: CupyRuntime) -> None:
    array = on_device(3)
    assert runtime.adopt(array) is array


@pytest.mark.parametrize(
    "value",
    [
        SimpleNamespace(__dlpack__=None),
        SimpleNamespace(__dlpack__=None, __cuda_array_interface__={}),
        np.zeros(3).__dlpack__(),
    ],
    ids=["a producer", "a producer with both protocols", "a capsule"],
)
def test_dlpack_is_adopted_by_dlpack(value: Any, runtime: CupyRuntime) -> None:
    assert runtime.adopt(value) == ("from_dlpack", value)


@pytest.mark.parametrize(("address", "device"), [(4096, 1), (0, 0)], ids=["memory of GPU 1", "no memory"])
def test_what_has_only_cudas_interface_is_adopted_on_its_own_device(
    address: int, device: int, calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    calls.devices_by_address = {4096: 1}
    value = SimpleNamespace(__cuda_array_interface__={"data": (address, False)})
    assert runtime.adopt(value) == ("asarray", device)
    assert runtime.current_device() == 0


@pytest.mark.parametrize(
    ("max_version", "given"),
    [(None, {"stream": 7}), ((1, 0), {"stream": 7, "max_version": (1, 0)})],
    ids=["a consumer of old", "a consumer that knows versions"],
)
def test_cupy_makes_the_capsules(max_version: Any, given: dict[str, Any], runtime: CupyRuntime) -> None:
    assert runtime.capsule(array_on(0, lambda **arguments: arguments), 7, max_version) == given


def test_a_capsule_is_made_on_the_device_of_its_array(runtime: CupyRuntime) -> None:
    runtime.set_device(0)
    assert runtime.capsule(array_on(1, lambda **_: runtime.current_device()), 7, None) == 1
    assert runtime.current_device() == 0


def array_on(device: int, export: Any) -> Any:
    return SimpleNamespace(data=SimpleNamespace(device_id=device), __dlpack__=export)


def test_a_cupy_that_knows_no_versions_makes_capsules_without(runtime: CupyRuntime) -> None:
    array = array_on(0, lambda stream: ("capsule", stream))
    assert runtime.capsule(array, 7, (1, 0)) == ("capsule", 7)


# --- copies


def transfers(calls: FakeCudaCalls) -> list[tuple[Any, ...]]:
    """Return what was transferred and waited for: names, and arguments that are no addresses."""
    return [
        (name, *(arguments[2:] if name == "memcpyAsync" else arguments))
        for name, *arguments in calls.noted
        if name in {"memcpyAsync", "streamSynchronize"}
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.bool_, np.int64])
def test_pageable_host_memory_may_be_reused_when_a_copy_returns(
    dtype: npt.DTypeLike, calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    there, back = FakeArray(np.zeros((4, 6), dtype)), np.zeros((4, 6), dtype)
    runtime.copy(there, host(4, 6).astype(dtype), STREAM)
    runtime.copy(back, there, STREAM)
    np.testing.assert_array_equal(back, host(4, 6).astype(dtype))
    waited = ("streamSynchronize", STREAM)
    assert transfers(calls) == [
        ("memcpyAsync", back.nbytes, 1, STREAM),
        waited,
        ("memcpyAsync", back.nbytes, 2, STREAM),
        waited,
    ]


def test_copies_from_and_to_pinned_memory_are_not_waited_for(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    array, pinned = on_device(4, 6), host(4, 6)
    calls.pinned = {pinned.ctypes.data}
    runtime.copy(array, pinned, STREAM)
    runtime.copy(pinned, array, STREAM)
    assert transfers(calls) == [("memcpyAsync", 96, 1, STREAM), ("memcpyAsync", 96, 2, STREAM)]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_strided_host_memory_is_packed_and_waited_for(
    is_pinned: bool, calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    array, strided, target = on_device(6, 4), host(4, 6).T, np.zeros((6, 8), F32)
    calls.pinned = {strided.ctypes.data, target.ctypes.data} if is_pinned else set()
    runtime.copy(array, strided, STREAM)
    runtime.copy(target[:, ::2], array, STREAM)
    np.testing.assert_array_equal(target[:, ::2], strided)
    np.testing.assert_array_equal(target[:, 1::2], 0)
    assert calls.names().count("streamSynchronize") == 2


def test_strided_device_memory_is_rearranged_on_the_stream(
    calls: FakeCudaCalls, cupy: FakeCupy, runtime: CupyRuntime
) -> None:
    wide, back = on_device(4, 12), np.zeros((4, 6), F32)
    runtime.copy(wide[:, ::2], host(4, 6), STREAM)
    runtime.copy(back, wide[:, ::2], STREAM)
    np.testing.assert_array_equal(back, host(4, 6))
    np.testing.assert_array_equal(wide.memory[:, 1::2], 0)
    assert cupy.worked == [("empty", 0, STREAM), ("copyto", 0, STREAM), ("pack", 0, STREAM)]
    assert "setDevice" not in calls.names()


def test_a_cupy_that_knows_no_foreign_streams_has_its_older_class_used(cupy: FakeCupy, runtime: CupyRuntime) -> None:
    cupy.cuda.Stream = object
    cupy.cuda.ExternalStream = cupy.on
    runtime.copy(on_device(4, 6)[:, ::2], on_device(4, 3), STREAM)
    assert cupy.worked == [("copyto", 0, STREAM)]


def test_on_one_device_nothing_is_waited_for(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    target, source = on_device(4, 6), FakeArray(host(4, 6))
    runtime.copy(target, source, STREAM)
    np.testing.assert_array_equal(target.memory, source.memory)
    assert transfers(calls) == [("memcpyAsync", 96, 3, STREAM)]


def test_between_devices_the_devices_are_named_and_nothing_is_waited_for(
    calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    target, source = on_device(4, 6, device=1), FakeArray(host(4, 6))
    runtime.copy(target, source, STREAM)
    np.testing.assert_array_equal(target.memory, source.memory)
    assert calls.noted == [("memcpyPeerAsync", target.data.ptr, 1, source.data.ptr, 0, 96, STREAM)]


def test_strided_memory_of_two_devices_is_rearranged_on_each_one_its_own(
    calls: FakeCudaCalls, cupy: FakeCupy, runtime: CupyRuntime
) -> None:
    wide, source = on_device(6, 8, device=1), FakeArray(host(4, 6).T)
    runtime.copy(wide[:, ::2], source, STREAM)
    np.testing.assert_array_equal(wide.memory[:, ::2], source.memory)
    assert cupy.worked == [("pack", 0, 0), ("empty", 1, 0), ("copyto", 1, 0)]
    assert runtime.current_device() == 0
    order = [name for name in calls.names() if name in {"streamSynchronize", "memcpyPeerAsync"}]
    assert order == ["streamSynchronize"] * 3 + ["memcpyPeerAsync"] + ["streamSynchronize"] * 2


@pytest.mark.parametrize(
    ("target", "source"),
    [(on_device(0, 3), host(0, 3)), (host(0, 3), on_device(0, 3)), (on_device(0), on_device(0, device=1))],
)
def test_nothing_is_copied_without_a_call(target: Any, source: Any, calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    runtime.copy(target, source, STREAM)
    assert calls.noted == []
