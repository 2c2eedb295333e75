"""The fake driver keeps CUDA's rules where code could break them. What other tests need of it anyway, they show."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda import driver
from tests.unit.gpu.fakes import BLOCK, CLIENT, DRIVER, MODES, captured_elsewhere, stream_on

LATE_S = 0.05
BLOCKING, NON_BLOCKING = 0, 1
PRELUDE = """
import ctypes, os, sys
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
driver = FakeDriver.load()
cuda = driver.bindings()
cuda.cuInit(0)
cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])
"""


@pytest.fixture
def cuda() -> Iterator[Any]:
    yield from _current(0)


@pytest.fixture
def other(cuda: Any) -> Iterator[Any]:
    yield from _current(CLIENT)


def _current(process: int) -> Iterator[Any]:
    bindings = DRIVER.bindings(process)
    with bindings.context(0):
        yield bindings
        bindings.cuCtxSynchronize()
        for device in range(2):
            bindings.cuDevicePrimaryCtxReset(device)


@pytest.fixture(params=[BLOCKING, NON_BLOCKING])
def stream(cuda: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    stream = done(cuda.cuStreamCreate(request.param))
    yield stream
    cuda.cuStreamEndCapture(stream)
    done(cuda.cuStreamDestroy(stream))


def done(result: tuple[Any, ...]) -> Any:
    error, *found = result
    assert not error, error.name
    return found[0] if len(found) == 1 else tuple(found)


def name_of(result: tuple[Any, ...]) -> str:
    return str(result[0].name).replace("CUDA_ERROR_", "")


def numbers(address: Any) -> npt.NDArray[np.int32]:
    return DRIVER.memory(int(address), (4,), np.int32)


def violations() -> list[str]:
    """Return what was undefined, and forget it: that is what the test is about."""
    found = DRIVER.violations()
    DRIVER.forget()
    return found


def told(program: str, **environment: str) -> list[str]:
    """Return what code prints in a process where the fake is the driver, and device 0 current for `cuda`."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_the_environment_says_what_there_is_and_what_fails(tmp_path: Path) -> None:
    program = """
    name = "cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    print(cuda.cuDeviceGetCount()[1], *[bytes(getattr(cuda, name)(device)[1].bytes).hex() for device in range(3)])
    print(*[cuda.cuMemAlloc(4)[0].name for _ in range(2)], cuda.cuStreamCreate(0)[0].name)
    attributes = cuda.CUdevice_attribute
    print(cuda.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0)[1])
    descriptors = attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    print(cuda.cuDeviceGetAttribute(descriptors, 0)[1])
    cuda.cuStreamSynchronize(0x1230)
    stream = int(cuda.cuStreamCreate(1)[1])
    driver.delay(3)
    driver.launch(stream, lambda: None)  # is never done, and the process ends
    try:
        cuda.cuCtxRecordEvent(cuda.cuCtxGetCurrent()[1], cuda.cuEventCreate(2)[1])
    except RuntimeError:
        print("came later than", cuda.cuDriverGetVersion()[1])
    """
    uuids = ["00112233445566778899aabbccddeeff", "ff" * 16, "01" * 16]
    assert told(
        program,
        SHM_FAKE_CUDA_DEVICES="3",
        SHM_FAKE_CUDA_UUIDS=",".join(uuids),
        SHM_FAKE_CUDA_DRIVER_VERSION="12040",
        SHM_FAKE_CUDA_LACKS="descriptors",
        SHM_FAKE_CUDA_FAIL="cuMemAlloc:CUDA_ERROR_OUT_OF_MEMORY:2,cuStreamCreate:CUDA_ERROR_UNKNOWN:1",
        SHM_FAKE_CUDA_VIOLATIONS=str(tmp_path / "violations"),
    ) == [
        " ".join(["3", *uuids]),
        "CUDA_ERROR_OUT_OF_MEMORY CUDA_ERROR_OUT_OF_MEMORY CUDA_ERROR_UNKNOWN",
        *("1", "0"),
        "came later than 12040",
    ]
    written = (tmp_path / "violations").read_text()
    assert written.endswith(": a stream was used that is destroyed, or never was\n")


def test_several_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "bin" / "gcc"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.1\necho built > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: driver.library(), range(2))
    assert first == second
    assert [path.name for path in first.parent.iterdir()] == ["libcuda.so.1"]


@pytest.mark.parametrize(("mode", "reason"), [(0o700, "neither gcc nor cc"), (0o777, "not this user's alone")])
def test_no_other_library_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, reason: str) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    driver._own_folder().chmod(mode)
    with pytest.raises(MachineError, match=reason):
        driver.library()


def test_another_driver_that_is_loaded_already_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.c").write_text("int cuInit(unsigned flags) { return (int)flags; }")
    library = tmp_path / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(tmp_path / "none.c")]
    subprocess.run(command, check=True)
    load = "from shm_backend_utils.testing.fake_cuda.driver import FakeDriver as F; F.load()"
    code = f"import ctypes; ctypes.CDLL({str(library)!r}); {load}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MachineError: this process has loaded another libcuda.so.1" in run.stderr


def test_new_memory_is_full_of_rubbish_and_crashes_host_code_that_touches_it() -> None:
    program = """
    address = int(cuda.cuMemAlloc(64)[1])
    print(driver.memory(address, (16,), "i4").all())
    pid = os.fork()
    if not pid:
        ctypes.string_at(address, 4)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert told(program) == ["True", "-11"]


def test_a_handle_opens_the_whole_block_and_to_free_it_meanwhile_is_told(cuda: Any, other: Any) -> None:
    first, second = (int(done(cuda.cuMemAlloc(512))) for _ in range(2))
    numbers(second)[:] = 7
    opened = int(done(other.cuIpcOpenMemHandle(done(cuda.cuIpcGetMemHandle(second)), 1)))
    base, size = (int(number) for number in done(other.cuMemGetAddressRange(opened)))
    assert (size, opened - base, numbers(opened).tolist()) == (BLOCK, second % BLOCK, [7] * 4)
    done(cuda.cuMemFree(first))  # a neighbour, that nobody has opened
    assert violations() == []
    done(cuda.cuMemFree(second))
    assert violations() == ["memory was freed that others have open (1)"]
    words = np.zeros(4, np.int32)
    assert name_of(other.cuMemcpyDtoH(words.ctypes.data, opened, 16)) == "ILLEGAL_ADDRESS"
    done(other.cuDevicePrimaryCtxReset(0))
    done(other.cuIpcCloseMemHandle(opened))
    assert violations() == [
        "memory was used that its owner has freed",
        "memory was closed after its owner had freed it",
    ]


@pytest.mark.parametrize("waits", [True, False])
def test_unmapping_while_the_device_is_at_work_is_told(gpu: CudaRuntime, waits: bool) -> None:
    made = gpu.create_shareable(BLOCK, 0)
    assert made is not None
    with stream_on(gpu) as stream, contextlib.closing(made[1]):
        DRIVER.launch(stream, lambda: time.sleep(LATE_S))
        if waits:
            gpu.wait_beside_captures(0)
        gpu.unmap(made[0], BLOCK, 0)
        told = [each.startswith("memory was unmapped while its device was at work") for each in violations()]
    assert told == ([] if waits else [True])


def test_a_copy_beyond_its_allocation_or_in_closed_memory_spoils_the_context(cuda: Any, other: Any) -> None:
    address, target = done(cuda.cuMemAlloc(BLOCK)), done(cuda.cuMemAlloc(2 * BLOCK))
    done(cuda.cuMemcpyDtoDAsync(target, address, BLOCK + 1, 0))
    assert name_of(cuda.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"
    assert name_of(cuda.cuMemAlloc(4)) == name_of(cuda.cuStreamQuery(0)) == "ILLEGAL_ADDRESS"
    done(cuda.cuDevicePrimaryCtxReset(0))
    DRIVER.delay(LATE_S)
    opened = done(other.cuIpcOpenMemHandle(done(cuda.cuIpcGetMemHandle(address)), 1))
    done(other.cuIpcCloseMemHandle(opened))
    done(other.cuMemsetD8Async(opened, 0, 16, 0))
    assert name_of(other.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"
    done(other.cuDevicePrimaryCtxReset(0))
    for memory in (address, target):
        done(cuda.cuMemFree(memory))


@pytest.mark.parametrize(("is_pinned", "read"), [(False, [0, 1, 2, 3]), (True, [9] * 4)])
def test_pinned_memory_is_read_late(cuda: Any, stream: Any, is_pinned: bool, read: list[int]) -> None:
    DRIVER.delay(LATE_S)
    address, words = done(cuda.cuMemAlloc(16)), np.arange(4, dtype=np.int32)
    if is_pinned:
        done(cuda.cuMemHostRegister(words.ctypes.data, 16, 0))
    done(cuda.cuMemcpyHtoDAsync(address, words.ctypes.data, 16, stream))
    words[:] = 9
    assert name_of(cuda.cuStreamQuery(stream)) == "NOT_READY"
    assert numbers(address).tolist() != read
    done(cuda.cuStreamSynchronize(stream))
    assert numbers(address).tolist() == read
    if is_pinned:
        done(cuda.cuMemHostUnregister(words.ctypes.data))
    done(cuda.cuMemFree(address))


@pytest.mark.parametrize("default", [0, 1])
def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(cuda: Any, default: int) -> None:
    order: list[str] = []
    first, second = (done(cuda.cuStreamCreate(BLOCKING)) for _ in range(2))
    gate = threading.Event()
    DRIVER.launch(int(first), lambda: order.append(str(gate.wait(10))))
    DRIVER.launch(default, lambda: order.append("default"))
    DRIVER.launch(int(second), lambda: order.append("second"))
    time.sleep(LATE_S)
    assert order == []
    gate.set()
    done(cuda.cuStreamSynchronize(second))
    assert order == ["True", "default", "second"]
    done(cuda.cuStreamBeginCapture(first, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    assert name_of(cuda.cuStreamIsCapturing(1)) == "STREAM_CAPTURE_IMPLICIT"  # to ask ends no capture
    done(cuda.cuStreamEndCapture(first))
    for stream in (first, second):
        done(cuda.cuStreamDestroy(stream))


def test_a_stream_or_an_event_that_is_destroyed_is_not_used(cuda: Any) -> None:
    order: list[str] = []
    stream, event = done(cuda.cuStreamCreate(NON_BLOCKING)), done(cuda.cuEventCreate(2))
    DRIVER.launch(int(stream), lambda: order.append("done"))
    done(cuda.cuStreamDestroy(stream))
    done(cuda.cuEventDestroy(event))
    done(cuda.cuCtxSynchronize())
    assert (order, DRIVER.violations()) == (["done"], [])
    assert name_of(cuda.cuStreamQuery(stream)) == "INVALID_HANDLE"
    assert name_of(cuda.cuEventRecord(event, 0)) == "INVALID_HANDLE"
    assert name_of(cuda.cuStreamWaitEvent(0, event, 0)) == "INVALID_HANDLE"
    assert violations() == [
        "a stream was used that is destroyed, or never was",
        *["an event was used that is destroyed, or never was"] * 2,
    ]


@pytest.fixture
def words(cuda: Any) -> Iterator[npt.NDArray[np.uint64]]:
    """A page of words, registered."""
    page = np.frombuffer(mmap.mmap(-1, 4096), np.uint64)
    done(cuda.cuMemHostRegister(page.ctypes.data, 4096, 0))
    yield page
    done(cuda.cuMemHostUnregister(page.ctypes.data))


def test_a_stream_writes_a_word_and_another_waits_for_it(cuda: Any, stream: Any, words: npt.NDArray[np.uint64]) -> None:
    order: list[str] = []
    writer, address, gate = done(cuda.cuStreamCreate(NON_BLOCKING)), words.ctypes.data, threading.Event()
    done(cuda.cuStreamWaitValue64(stream, address, 7, 0))
    DRIVER.launch(int(stream), lambda: order.append(f"read {words[0]}"))
    DRIVER.launch(int(writer), lambda: order.append(str(gate.wait(10))))
    done(cuda.cuStreamWriteValue64(writer, address, 9, 0))
    time.sleep(LATE_S)
    assert (order, words[0]) == ([], 0)
    gate.set()
    done(cuda.cuStreamSynchronize(stream))
    assert order == ["True", "read 9"]
    done(cuda.cuStreamWaitValue64(stream, address, 2**64 - 1, 0))  # a cyclic comparison: 9 comes after that
    done(cuda.cuStreamSynchronize(stream))
    done(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    done(cuda.cuStreamWriteValue64(stream, address, 1, 0))
    done(cuda.cuGraphDestroy(done(cuda.cuStreamEndCapture(stream))))
    done(cuda.cuStreamSynchronize(stream))
    assert words[0] == 9, "a word that is captured is not written"
    done(cuda.cuStreamDestroy(writer))


@pytest.mark.parametrize("name", ["cuStreamWriteValue64", "cuStreamWaitValue64"])
def test_words_lie_in_registered_memory(cuda: Any, stream: Any, words: npt.NDArray[np.uint64], name: str) -> None:
    call, pageable, device = getattr(cuda, name), np.zeros(512, np.uint64), done(cuda.cuMemAlloc(8))
    for address in (pageable.ctypes.data, words.ctypes.data + 4, words.ctypes.data + 4096):
        assert name_of(call(stream, address, 0, 0)) == "INVALID_VALUE"
    DRIVER.memory(int(device), (1,), np.uint64)[:] = 0
    done(call(stream, device, 0, 0))
    done(cuda.cuStreamSynchronize(stream))
    done(cuda.cuMemFree(device))
    read_only = np.frombuffer(mmap.mmap(-1, 4096, prot=mmap.PROT_READ), np.uint8)
    assert name_of(cuda.cuMemHostRegister(read_only.ctypes.data, 4096, 0)) == "INVALID_VALUE"
    done(cuda.cuMemHostRegister(read_only.ctypes.data, 4096, 8))
    done(cuda.cuMemHostUnregister(read_only.ctypes.data))


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery", "cuCtxSynchronize", "cuMemAlloc"])
def test_what_would_wait_or_allocate_spoils_the_capture(cuda: Any, stream: Any, call: str) -> None:
    done(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    arguments = {"cuCtxSynchronize": (), "cuMemAlloc": (4,)}.get(call, (stream,))
    assert name_of(getattr(cuda, call)(*arguments)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert name_of(cuda.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", ["cuCtxSynchronize", "cuCtxRecordEvent"])
def test_beside_a_capture_a_relaxed_thread_may_not_wait_for_a_context(cuda: Any, call: str, mode: str) -> None:
    event, relaxed = done(cuda.cuEventCreate(2)), cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    arguments = (done(cuda.cuCtxGetCurrent()), event) if call == "cuCtxRecordEvent" else ()
    before = done(cuda.cuThreadExchangeStreamCaptureMode(relaxed))
    with pytest.raises(AssertionError, match="STREAM_CAPTURE_INVALIDATED"), captured_elsewhere(mode):
        assert name_of(getattr(cuda, call)(*arguments)) == "STREAM_CAPTURE_UNSUPPORTED"
    cuda.cuThreadExchangeStreamCaptureMode(before)
    done(cuda.cuEventDestroy(event))


@pytest.mark.parametrize("is_forgiven", [False, True])
def test_closing_a_handle_takes_time_and_waits_for_the_device(cuda: Any, other: Any, is_forgiven: bool) -> None:
    address, finished = done(cuda.cuMemAlloc(BLOCK)), threading.Event()
    opened = done(other.cuIpcOpenMemHandle(done(cuda.cuIpcGetMemHandle(address)), 1))
    DRIVER.forgive(*["waits"] * is_forgiven)
    DRIVER.launch(0, lambda: time.sleep(LATE_S), CLIENT)
    DRIVER.launch(0, finished.set, CLIENT)
    done(other.cuIpcCloseMemHandle(opened))
    is_finished = finished.is_set()
    DRIVER.forgive()
    assert is_finished != is_forgiven
    done(cuda.cuMemFree(address))


@pytest.mark.parametrize(
    ("environment", "taken"),
    [
        ({"SHM_FAKE_CUDA_CONTEXT_BYTES": str(7 << 20)}, "7 14 True"),
        ({"SHM_FAKE_CUDA_FORGIVES": "openings,contexts"}, "0 0 False"),
    ],
)
def test_what_contexts_take_and_what_is_forgiven_is_said(environment: dict[str, str], taken: str) -> None:
    program = """
    import time
    def used():
        free, total = cuda.cuMemGetInfo()[1:]
        return int(total - free) >> 20
    client = driver.bindings(1)
    before = used()
    with client.context(0):
        both = used()
        handle = cuda.cuIpcGetMemHandle(cuda.cuMemAlloc(1 << 21)[1])[1]
        begin = time.monotonic()
        client.cuIpcOpenMemHandle(handle, 1)
        took = time.monotonic() - begin
    print(before, both, took > 0.05)
    try:
        driver.forgive("waits", "everything")
    except ValueError as error:
        print(error)
    """
    unknown = "the fake driver does not know all of ('waits', 'everything')"
    assert told(program, SHM_FAKE_CUDA_IPC_US="60000", **environment) == [taken, unknown]
