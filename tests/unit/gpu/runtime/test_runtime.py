"""Devices, contexts and errors; streams and events as users hold them, and streams that are captured into graphs."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import CallerError, MachineError
from shm_backend_utils.gpu import errors
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.mappings import device_with
from shm_backend_utils.gpu.runtime import BLOCK_BYTES, CudaRuntime, PointerFacts, whole_blocks
from shm_backend_utils.gpu.streams import NamedEvent, NamedStream, named, named_stream
from tests.unit.gpu.fakes import (
    DRIVER,
    captured_elsewhere,
    fails_by,
    held_back,
    in_another_thread,
    in_forked_child,
    recorded_calls,
    run_in_a_process,
    stream_on,
    that_nobody_loads,
)


def current(process: int = 0) -> int | None:
    error, device = DRIVER.bindings(process).cuCtxGetDevice()
    return None if error else int(device)


def test_a_device_is_current_for_its_block_and_then_the_former(gpu: CudaRuntime) -> None:
    before = current()
    with gpu.on(1):
        with gpu.on(0):
            assert current() == 0
        assert current() == 1
        with pytest.raises(ZeroDivisionError), gpu.on(0):
            print(1 / 0)
        assert current() == 1
        with fails_by("CUDA_ERROR_INVALID_DEVICE"), gpu.on(2):
            pass
        assert current() == 1
    assert current() == before


def test_inside_its_block_a_device_is_current_without_another_call(gpu: CudaRuntime) -> None:
    with gpu.on(0), gpu.current(1), recorded_calls(gpu) as calls:
        with gpu.current(1):
            assert current() == 1
            assert in_another_thread(lambda: current_in(gpu, 1)) == 1
        assert calls == []
        with pytest.raises(ZeroDivisionError), gpu.current(0), gpu.current(1):
            print(1 / 0)
        assert (calls, current()) == (["cuCtxPushCurrent"] * 2 + ["cuCtxPopCurrent"] * 2, 1)
        with gpu.on(1):
            DRIVER.bindings().cuCtxSetCurrent(gpu._context(0))  # as other libraries may
            with gpu.current(1):
                assert current() == 1
    assert DRIVER.depth() == 0


def current_in(gpu: CudaRuntime, device: int) -> int | None:
    with gpu.current(device):
        return current()


def test_a_forked_child_is_refused_in_such_a_block_too(gpu: CudaRuntime) -> None:
    def use() -> None:
        with fails_by("CUDA_ERROR_NOT_INITIALIZED"), gpu.current(0):
            pass

    with gpu.current(0):
        in_forked_child(use)


def test_each_thread_has_a_device_of_its_own_and_all_share_a_context(gpu: CudaRuntime) -> None:
    def of_another_thread() -> list[int | None]:
        found = [current()]
        gpu.make_current(0)
        with gpu.on(1):
            found.append(current())
        return [*found, current()]

    with gpu.on(0), gpu.on(1):
        retained = DRIVER.count("cuDevicePrimaryCtxRetain")
        assert in_another_thread(of_another_thread) == [None, 1, 0]
        assert current() == 1
        assert DRIVER.count("cuDevicePrimaryCtxRetain") == retained


def test_pinning_and_questions_make_no_context_of_a_gpu_that_is_not_used() -> None:
    """A context takes hundreds of megabytes of its GPU, and perhaps another process has that one for itself."""
    runtime = DRIVER.runtime(7)

    def use() -> None:
        with runtime.on(1):
            pass
        runtime.pointer(id(runtime))
        assert DRIVER.bindings(7).cuDevicePrimaryCtxGetState(0)[2] == 0

    in_another_thread(use)


# Which GPU it is, and the loading of CUDA


def test_a_device_is_found_by_its_uuid_whatever_its_number(gpu: CudaRuntime) -> None:
    uuids = [gpu.device_uuid(1), gpu.device_uuid(0)]
    assert [len(bytes.fromhex(uuid)) for uuid in uuids] == [16, 16]
    other_way: Any = SimpleNamespace(device_count=lambda: len(uuids), device_uuid=uuids.__getitem__)
    assert [device_with(other_way, uuid, "region") for uuid in uuids] == [0, 1]
    assert [device_with(gpu, uuid, "region") for uuid in uuids] == [1, 0]


def test_cuda_is_loaded_when_it_is_needed_and_once(gpu: CudaRuntime) -> None:
    with that_nobody_loads(gpu) as access:
        assert (access.collect(), access.has_retired) == (False, False)
        access.collect_now()
    outcomes: list[CudaRuntime | MachineError] = [MachineError("there is no GPU yet"), gpu]

    def load() -> CudaRuntime:
        outcome = outcomes.pop(0)
        if isinstance(outcome, MachineError):
            raise outcome
        return outcome

    access = CudaAccess(load)
    with pytest.raises(MachineError, match="there is no GPU yet"):
        access.runtime  # noqa: B018
    assert access.mappings is access.mappings
    assert access.runtime is gpu


LOADING = """
import sys
from shm_backend_utils.errors import MachineError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.mappings import device_with
from shm_backend_utils.gpu.runtime import CudaRuntime
{without}
try:
    CudaRuntime()
except MachineError as error:
    print(error)
"""


WITHOUT = {
    "the driver": """
def not_found(*_):
    raise RuntimeError("cuda is an NVIDIA driver library and can only be found via system search")

import cuda.bindings.driver
sys.modules["cuda.bindings"].driver = type("Driver", (), {"cuInit": not_found})
""",
    "the bindings": 'sys.modules["cuda.bindings"] = None',
}


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("the driver", ["its library libcuda.so.1 was not found (cuda is an NVIDIA driver library", "or check LD_"]),
        ("the bindings", ["NVIDIA's cuda-bindings, which cannot be imported", "pip install 'CHECKOUT_OR_WHEEL[gpu]'"]),
    ],
)
def test_where_something_is_missing_the_error_says_what_to_install(lacks: str, words: list[str]) -> None:
    message = run_in_a_process(LOADING.format(without=WITHOUT[lacks]))
    assert [word for word in words if word not in message] == []


def test_a_machine_without_a_gpu_is_told() -> None:
    DRIVER.fail_next("cuInit", "CUDA_ERROR_NO_DEVICE")
    with pytest.raises(MachineError, match="starting CUDA failed with CUDA_ERROR_NO_DEVICE: no GPU is visible here"):
        DRIVER.runtime()


def test_an_error_has_cudas_name_and_advice(gpu: CudaRuntime) -> None:
    DRIVER.fail_next("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError) as caught:
        gpu.allocate(1, 0)
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert str(caught.value) == (
        "allocating 2097152 bytes on GPU 0 failed with CUDA_ERROR_OUT_OF_MEMORY: the GPU has not enough memory "
        "left; make smaller calls, or fewer at once"
    )
    assert str(CudaError("x", "CUDA_ERROR_UNKNOWN")).endswith(
        ": see CUresult in CUDA's documentation of the driver API"
    )
    assert str(CudaError("x", "CUDA_ERROR_MISALIGNED_ADDRESS")).endswith("restart it, or load the model again")


def test_all_errors_with_advice_are_cudas() -> None:
    known = DRIVER.bindings().CUresult
    assert [name for name in {*errors._REMEDIES, *errors._FINAL} if not hasattr(known, name)] == []


@pytest.mark.parametrize("error", [KeyError(99999), ValueError("99999 is not a valid CUresult")])
def test_an_error_that_is_newer_than_the_bindings_is_an_error_of_cudas(error: Exception) -> None:
    class Newer:
        def __getattr__(self, name: str) -> Any:
            def fail(*_: Any) -> Any:
                raise error

            return (lambda *_: (0, 13000)) if name in ("cuInit", "cuDriverGetVersion") else fail

    with pytest.raises(CudaError, match="counting the GPUs failed with CUresult .*99999"):
        CudaRuntime(Newer()).device_count()


@pytest.mark.parametrize(
    ("byte_size", "blocks"), [(1, 1), (BLOCK_BYTES, 1), (BLOCK_BYTES + 1, 2), (5 * BLOCK_BYTES - 1, 5)]
)
def test_whole_blocks_hold_so_many_bytes(gpu: CudaRuntime, byte_size: int, blocks: int) -> None:
    """Smaller allocations share a block with others, all of which an IPC handle opens."""
    assert whole_blocks(byte_size) == blocks * BLOCK_BYTES
    address = gpu.allocate(byte_size, 1)
    assert gpu.extent(address + byte_size - 1, 1) == (address, blocks * BLOCK_BYTES)
    gpu.free(address, 1)


def test_what_is_known_of_memory_of_the_host(gpu: CudaRuntime) -> None:
    page = np.zeros(4096, np.uint8)
    assert gpu.pointer(page.ctypes.data) == PointerFacts("host")
    gpu.pin(page.ctypes.data, 4096)
    assert gpu.pointer(page.ctypes.data + 5) == PointerFacts("pinned")
    gpu.unpin(page.ctypes.data)
    assert gpu.pointer(page.ctypes.data) == PointerFacts("host")


class Protocol:
    def __init__(self, handle: int, version: int = 0) -> None:
        self._found = version, handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return self._found


class TorchStream:
    """What torch's streams have, before 2.8; ``_CudaStreamBase`` in its sources."""

    def __init__(self, handle: int, device: int) -> None:
        self.cuda_stream = handle
        self.device = SimpleNamespace(type="cuda", index=device)


def of_class(name: str, **attributes: Any) -> Any:
    return type(name, (), attributes)()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_default_stream_is_of_the_device_that_is_said_or_meant(gpu: CudaRuntime, number: int) -> None:
    """0 is what libraries mean by 1; to functions that are bound per thread, it is the thread's own."""
    for value in (number, of_class("Stream", ptr=number, device_id=-1)):
        found = named_stream(value)
        assert found == NamedStream(number or 1, None)
        assert [found.device_on(gpu, device) for device in (0, 1)] == [0, 1]
    stream, external = (of_class(name, ptr=number, device_id=1) for name in ("Stream", "ExternalStream"))
    for value in (TorchStream(number, 1), stream, external):
        found = named_stream(value)
        assert found == NamedStream(number or 1, 1)
        assert found.device_on(gpu, 0) == 1


def test_whose_a_stream_is_cuda_knows(gpu: CudaRuntime) -> None:
    with stream_on(gpu, 1) as stream:
        ways = TorchStream(stream, 0), Protocol(stream), of_class("Stream", ptr=stream, device_id=0)
        for value in (stream, np.uint64(stream), *ways):
            found = named_stream(value)
            assert (found, type(found.handle)) == (NamedStream(stream), int)
            assert found.device_on(gpu, 0) == 1


NO_STREAM = "is not a CUDA stream; expected an object with __cuda_stream__"
NO_HANDLE = "stream .* is not a CUDA stream; expected a number of 0 or more, of 64 bits"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((value, NO_STREAM) for value in (None, True, "5", 1.0, [5], np.array(5), np.bool_(True))),
        *((value, NO_STREAM) for value in (Protocol, TorchStream, threading.Event())),
        (of_class("MemoryPointer", ptr=0x1234, device_id=0), NO_STREAM),
        (of_class("Event", ptr=0x1234), NO_STREAM),
        (of_class("CUevent", __int__=lambda _: 0x1234), NO_STREAM),
        *((value, NO_HANDLE) for value in (-1, np.int64(-5), Protocol(-1), 2**64, 10**5000)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_stream_is_refused(value: Any, text: str) -> None:
    with pytest.raises(CallerError, match=text) as error:
        named_stream(value)
    assert len(str(error.value)) < 300


def test_a_stream_that_cuda_does_not_know_is_refused_without_its_number(gpu: CudaRuntime) -> None:
    DRIVER.fail_next("cuStreamGetCtx", "CUDA_ERROR_INVALID_HANDLE")
    with pytest.raises(CallerError, match="not a CUDA stream of this process; name one that this process") as error:
        named_stream(0x1234567).device_on(gpu, 0)
    assert "1234567" not in str(error.value)
    DRIVER.fail_next("cuStreamGetCtx", "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(CudaError):
        named_stream(0x1234567).device_on(gpu, 0)


def test_streams_and_events_of_libraries_are_named_in_their_order() -> None:
    bindings, event = DRIVER.bindings(), of_class("Event", ptr=7)
    assert named([5, event, Protocol(6)]) == (NamedStream(5), NamedEvent(7), NamedStream(6))
    assert named((5,)) == named(5) == (NamedStream(5),)
    assert named([]) == ()
    assert named(bindings.CUstream(0x1234)) == (NamedStream(0x1234),)
    torchs, cuda_cores = of_class("Event", cuda_event=0x1234), of_class("Event", handle=0x1234)
    runtimes = of_class("cudaEvent_t", __int__=lambda _: 0x1234)
    for event in (torchs, cuda_cores, bindings.CUevent(0x1234), runtimes):
        assert named(event) == (NamedEvent(0x1234),)
        assert named(event)[0].owner is event


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((value, "is not a CUDA stream") for value in ("55", [[5]], [5, None], threading.Event())),
        (Protocol(0x1234, 1), "has __cuda_stream__ of version 1; expected 0"),
        (of_class("Event", cuda_event=0), "was never recorded; record it on your stream first"),
    ],
    ids=["text", "lists", "None", "of threads", "newer", "not recorded"],
)
def test_what_cannot_be_named_is_refused(value: Any, text: str) -> None:
    with pytest.raises(CallerError, match=text):
        named(value)


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated:DeprecationWarning")
def test_cupys_own_streams_are_known() -> None:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.ExternalStream(0x1234, 1)
    assert (stream.ptr, stream.device_id) == (0x1234, 1)
    assert named(stream) == (NamedStream(0x1234),)
    assert named(cupy.cuda.ExternalStream(2, 1)) == (NamedStream(2, 1),)
    assert (cupy.cuda.Stream.__name__, cupy.cuda.Event.__name__) == ("Stream", "Event")
    assert named(cupy.cuda.Stream.null) == (NamedStream(1),)
    assert named(cupy.cuda.Stream.ptds) == (NamedStream(2),)


@pytest.mark.parametrize("default", [0, 1, 2])
def test_our_streams_do_not_wait_for_the_default_ones(gpu: CudaRuntime, default: int) -> None:
    with stream_on(gpu) as stream, gpu.on(0), held_back(default):
        gpu.synchronize_stream(stream, 0)


def test_a_wait_for_a_stream_sleeps(gpu: CudaRuntime) -> None:
    """cuStreamSynchronize keeps a CPU busy for the whole wait."""
    done = threading.Event()
    with stream_on(gpu, 1) as stream:
        DRIVER.launch(stream, lambda: time.sleep(0.01))
        DRIVER.launch(stream, done.set)
        gpu.synchronize_stream(stream, 1)
        assert done.is_set()
        assert [DRIVER.count(name) for name in ("cuStreamSynchronize", "cuEventSynchronize")] == [0, 1]


# Streams that are captured into graphs


def test_we_neither_fail_nor_spoil_anothers_capture(gpu: CudaRuntime) -> None:
    with captured_elsewhere("GLOBAL") as stream:
        gpu.free(gpu.allocate(1, 0), 0)
        event = gpu.create_event(0)
        with gpu.on(0):
            assert gpu.is_event_done(event)
            assert [gpu.is_capturing(each) for each in (stream, 0, 1, 2)] == [True, False, False, False]
        gpu.destroy_event(event, 0)


def test_a_threads_mode_of_capturing_is_its_own_again(gpu: CudaRuntime) -> None:
    bindings = DRIVER.bindings()
    modes = bindings.CUstreamCaptureMode

    def exchange(mode: Any) -> Any:
        return bindings.cuThreadExchangeStreamCaptureMode(mode)[1]

    for mode in (modes.CU_STREAM_CAPTURE_MODE_GLOBAL, modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL):
        former = exchange(mode)
        with gpu.on(0), gpu.on(1):
            pass
        assert exchange(former) == mode
