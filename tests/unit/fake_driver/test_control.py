"""What the fake says of itself, and errors on demand; its streams, events and captures, whose work is done in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.testing.fake_cuda import build
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
from tests.unit.fake_driver.asked import done, name_of, told


def test_it_never_calls_itself_a_gpu(cuda: Any) -> None:
    assert done(cuda.cuDeviceGetName(64, 0)).rstrip(b"\0 ") == b"fake CUDA driver, no GPU"


def test_a_forked_child_cannot_use_it() -> None:
    program = """
    pid = os.fork()
    if not pid:
        os._exit(int(cuda.cuMemAlloc(4)[0]))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), name_of(cuda.cuMemFree(done(cuda.cuMemAlloc(4)))))
    """
    assert told(program) == "3 CUDA_SUCCESS"  # CUDA_ERROR_NOT_INITIALIZED is 3


def test_an_older_driver_lacks_what_came_later() -> None:
    program = """
    event = done(cuda.cuEventCreate(2))
    try:
        cuda.cuCtxRecordEvent(done(cuda.cuCtxGetCurrent()), event)
    except RuntimeError as error:
        print(type(error).__name__)
    print(done(cuda.cuDriverGetVersion()))
    """
    text = told(program, SHM_FAKE_CUDA_DRIVER_VERSION="12040")
    assert text.splitlines()[-1] == "12040"
    assert len(text.splitlines()) == 2


def test_devices_and_uuids_are_what_the_environment_says() -> None:
    program = """
    name = "cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    print(done(cuda.cuDeviceGetCount()), [bytes(done(getattr(cuda, name)(device)).bytes).hex() for device in range(3)])
    """
    uuids = ["00112233445566778899aabbccddeeff", "ff" * 16, "01" * 16]
    text = told(program, SHM_FAKE_CUDA_DEVICES="3", SHM_FAKE_CUDA_UUIDS=",".join(uuids))
    assert text == f"3 {uuids}"


def test_a_machine_without_devices() -> None:
    code = (
        "from shm_backend_utils.testing.fake_cuda.driver import FakeDriver as F; "
        "print(F.load().bindings().cuInit(0)[0].name)"
    )
    environment = {**os.environ, "SHM_FAKE_CUDA_DEVICES": "0"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "CUDA_ERROR_NO_DEVICE\n"


def test_a_process_that_ends_with_work_on_streams_ends_at_once() -> None:
    program = """
    driver.delay(3)
    stream = done(cuda.cuStreamCreate(1))
    driver.launch(int(stream), lambda: None)
    print("ends")
    """
    assert told(program) == "ends"


# Beside CUDA


SOURCES = Path(build.__file__).parent / "libcuda"


def test_errors_on_demand(cuda: Any, other: Any, driver: FakeDriver) -> None:
    driver.fail_next("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", times=2, process=1)
    done(cuda.cuMemFree(done(cuda.cuMemAlloc(4))))
    assert [name_of(other.cuMemAlloc(4)) for _ in range(2)] == ["OUT_OF_MEMORY"] * 2
    done(other.cuMemFree(done(other.cuMemAlloc(4))))
    assert (driver.count("cuMemAlloc"), driver.count("cuMemAlloc", 1)) == (4, 3)


def test_every_function_can_be_told_to_fail(driver: FakeDriver) -> None:
    named = set(re.findall(r"X\((cu\w+),", (SOURCES / "functions.c").read_text()))
    entered = set(re.findall(r'ENTER\("(cu\w+)"\)', "".join(source.read_text() for source in SOURCES.glob("*.c"))))
    assert named - entered == {"cuGetErrorName", "cuGetErrorString"}
    for name in entered:
        driver.fail_next(name, "CUDA_ERROR_UNKNOWN")
    driver.forget()


def test_a_virtual_process_ends_as_one_that_is_killed(cuda: Any, driver: FakeDriver) -> None:
    dying = driver.bindings(9)
    with dying.context(0):
        theirs = done(dying.cuMemAlloc(2 << 20))
        driver.memory(int(theirs), (4,), np.int32)[:] = 6
        opened = done(cuda.cuIpcOpenMemHandle(done(dying.cuIpcGetMemHandle(theirs)), 1))
        ours = done(cuda.cuMemAlloc(2 << 20))
        done(dying.cuIpcOpenMemHandle(done(cuda.cuIpcGetMemHandle(ours)), 1))
        event = done(cuda.cuEventCreate(6))
        theirs_too = done(dying.cuIpcOpenEventHandle(done(cuda.cuIpcGetEventHandle(event))))
        driver.delay(0.05)
        done(dying.cuMemsetD8(theirs, 0, 16))
        done(dying.cuEventRecord(theirs_too, 0))
    driver.end(9)
    time.sleep(0.1)
    assert driver.live(9) == LiveCounts()
    assert name_of(cuda.cuEventQuery(event)) == "NOT_READY"  # for ever
    assert driver.memory(int(opened), (4,), np.int32).tolist() == [6] * 4
    done(cuda.cuIpcCloseMemHandle(opened))
    done(cuda.cuMemFree(ours))
    done(cuda.cuEventDestroy(event))


def test_violations_of_other_processes_are_written_down(tmp_path: Path) -> None:
    told("cuda.cuStreamSynchronize(0x1230)", SHM_FAKE_CUDA_VIOLATIONS=str(tmp_path / "told"))
    assert (tmp_path / "told").read_text().endswith(": a stream was used that is destroyed, or never was\n")


def test_errors_on_demand_in_other_processes() -> None:
    program = """
    print([name_of(cuda.cuMemAlloc(4)) for _ in range(2)], name_of(cuda.cuStreamCreate(0)))
    """
    demanded = "cuMemAlloc:CUDA_ERROR_OUT_OF_MEMORY:2,cuStreamCreate:CUDA_ERROR_UNKNOWN:1"
    assert told(program, SHM_FAKE_CUDA_FAIL=demanded) == "['OUT_OF_MEMORY', 'OUT_OF_MEMORY'] UNKNOWN"


def test_several_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "bin" / "gcc"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.1\necho built > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build.library(), range(2))
    assert first == second
    assert [path.name for path in first.parent.iterdir()] == ["libcuda.so.1"]


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="neither gcc nor cc"):
        build.library()


def test_a_folder_of_somebody_else_is_not_loaded_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    build._own_folder().chmod(0o777)
    with pytest.raises(MachineError, match="not this user's alone"):
        build.library()


def test_another_driver_that_is_loaded_already_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.c").write_text("int cuInit(unsigned flags) { return (int)flags; }")
    library = tmp_path / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(tmp_path / "none.c")]
    subprocess.run(command, check=True)
    load = "from shm_backend_utils.testing.fake_cuda.driver import FakeDriver as F; F.load()"
    code = f"import ctypes; ctypes.CDLL({str(library)!r}); {load}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MachineError: this process has loaded another libcuda.so.1" in done.stderr


def test_a_process_that_has_it_in_its_path_needs_no_loading() -> None:
    code = "from cuda.bindings import driver as c; print(c.cuInit(0)[0].name, c.cuDeviceGetName(30, 0)[1])"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(build.library().parent)}
    said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert said.startswith("CUDA_SUCCESS b'fake CUDA driver, no GPU")


LATE = 0.05
BLOCKING, NON_BLOCKING = 0, 1
PLAIN, SHARED = 2, 6


def test_what_is_on_a_stream_is_done_late(cuda: Any, driver: FakeDriver) -> None:
    driver.delay(LATE)
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    address = done(cuda.cuMemAlloc(16))
    words = np.arange(4, dtype=np.int32)
    done(cuda.cuMemcpyHtoDAsync(address, words.ctypes.data, 16, stream))
    words[:] = 9  # pageable memory was read already
    assert name_of(cuda.cuStreamQuery(stream)) == "NOT_READY"
    assert driver.memory(int(address), (4,), np.int32).tolist() != [0, 1, 2, 3]
    done(cuda.cuStreamSynchronize(stream))
    assert driver.memory(int(address), (4,), np.int32).tolist() == [0, 1, 2, 3]
    assert name_of(cuda.cuStreamQuery(stream)) == "CUDA_SUCCESS"
    done(cuda.cuMemFree(address))
    done(cuda.cuStreamDestroy(stream))


def test_pinned_memory_is_read_when_the_copy_is_done(cuda: Any, driver: FakeDriver) -> None:
    driver.delay(LATE)
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    address, words = done(cuda.cuMemAlloc(16)), np.arange(4, dtype=np.int32)
    done(cuda.cuMemHostRegister(words.ctypes.data, 16, 0))
    done(cuda.cuMemcpyHtoDAsync(address, words.ctypes.data, 16, stream))
    words[:] = 9
    done(cuda.cuStreamSynchronize(stream))
    assert driver.memory(int(address), (4,), np.int32).tolist() == [9] * 4
    done(cuda.cuMemHostUnregister(words.ctypes.data))
    done(cuda.cuMemFree(address))
    done(cuda.cuStreamDestroy(stream))


@pytest.mark.parametrize("default", [0, 1])
def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(
    cuda: Any, driver: FakeDriver, default: int
) -> None:
    order: list[str] = []
    driver.delay(0.01)
    first, second = (done(cuda.cuStreamCreate(BLOCKING)) for _ in range(2))
    gate = threading.Event()
    driver.launch(int(first), lambda: order.append(str(gate.wait(10))))
    driver.launch(default, lambda: order.append("default"))
    driver.launch(int(second), lambda: order.append("second"))
    time.sleep(0.05)
    assert order == []
    gate.set()
    done(cuda.cuStreamSynchronize(second))
    assert order == ["True", "default", "second"]
    for stream in (first, second):
        done(cuda.cuStreamDestroy(stream))


def test_a_destroyed_stream_does_what_was_on_it(cuda: Any, driver: FakeDriver) -> None:
    order: list[str] = []
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    driver.launch(int(stream), lambda: order.append("done"))
    done(cuda.cuStreamDestroy(stream))
    done(cuda.cuCtxSynchronize())
    assert order == ["done"]
    assert name_of(cuda.cuStreamQuery(stream)) == "INVALID_HANDLE"
    assert driver.violations() == ["a stream was used that is destroyed, or never was"]
    driver.forget()


def test_a_kernel_must_not_call_the_driver(cuda: Any, driver: FakeDriver) -> None:
    found: list[str] = []
    driver.launch(0, lambda: found.append(name_of(cuda.cuMemAlloc(4))))
    done(cuda.cuCtxSynchronize())
    assert found == ["NOT_PERMITTED"]


def test_freeing_waits_for_what_uses_the_memory(cuda: Any, driver: FakeDriver) -> None:
    driver.delay(LATE)
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    address = done(cuda.cuMemAlloc(16))
    done(cuda.cuMemsetD8Async(address, 1, 16, stream))
    done(cuda.cuMemFree(address))
    assert name_of(cuda.cuStreamQuery(stream)) == "CUDA_SUCCESS"
    done(cuda.cuStreamDestroy(stream))


# Events


def test_a_wait_is_for_the_record_of_its_time(cuda: Any, driver: FakeDriver) -> None:
    order: list[str] = []
    gate = threading.Event()
    first, second, waiting = (done(cuda.cuStreamCreate(1)) for _ in range(3))
    event = done(cuda.cuEventCreate(PLAIN))
    driver.launch(int(first), lambda: order.append(str(gate.wait(10))))
    done(cuda.cuEventRecord(event, first))
    done(cuda.cuStreamWaitEvent(waiting, event, 0))
    done(cuda.cuEventRecord(event, second))
    done(cuda.cuEventSynchronize(event))  # of what is recorded now
    driver.launch(int(waiting), lambda: order.append("waited"))
    done(cuda.cuEventDestroy(event))  # at once, though a stream waits
    gate.set()
    done(cuda.cuStreamSynchronize(waiting))
    assert order == ["True", "waited"]
    for stream in (first, second, waiting):
        done(cuda.cuStreamDestroy(stream))


def test_a_destroyed_event_is_not_used(cuda: Any, driver: FakeDriver) -> None:
    event = done(cuda.cuEventCreate(PLAIN))
    done(cuda.cuEventDestroy(event))
    assert name_of(cuda.cuEventRecord(event, 0)) == "INVALID_HANDLE"
    assert name_of(cuda.cuStreamWaitEvent(0, event, 0)) == "INVALID_HANDLE"
    assert driver.violations() == ["an event was used that is destroyed, or never was"] * 2
    driver.forget()


def test_what_the_exporter_has_destroyed_is_not_used(cuda: Any, other: Any, driver: FakeDriver) -> None:
    event = done(cuda.cuEventCreate(SHARED))
    handle = done(cuda.cuIpcGetEventHandle(event))
    opened = done(other.cuIpcOpenEventHandle(handle))
    done(cuda.cuEventDestroy(event))
    assert driver.violations() == []
    assert name_of(other.cuStreamWaitEvent(0, opened, 0)) == "INVALID_HANDLE"
    assert name_of(other.cuEventRecord(opened, 0)) == "INVALID_HANDLE"
    assert driver.violations() == ["an event was used that its exporter has destroyed"] * 2
    driver.forget()
    done(other.cuEventDestroy(opened))
    assert name_of(other.cuIpcOpenEventHandle(handle)) == "INVALID_HANDLE"


# Capture


@pytest.fixture(params=[0, 1])
def stream(cuda: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    stream = done(cuda.cuStreamCreate(request.param))
    yield stream
    cuda.cuStreamEndCapture(stream)
    done(cuda.cuStreamDestroy(stream))


def begin(cuda: Any, stream: Any, mode: str = "GLOBAL") -> None:
    done(cuda.cuStreamBeginCapture(stream, getattr(cuda.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")))


def test_what_is_captured_is_not_done(cuda: Any, driver: FakeDriver, stream: Any) -> None:
    order: list[str] = []
    begin(cuda, stream)
    assert int(done(cuda.cuStreamIsCapturing(stream))) == 1
    assert int(done(cuda.cuStreamGetCaptureInfo(stream))[0]) == 1
    driver.launch(int(stream), lambda: order.append("done"))
    done(cuda.cuGraphDestroy(done(cuda.cuStreamEndCapture(stream))))
    done(cuda.cuStreamSynchronize(stream))
    assert int(done(cuda.cuStreamIsCapturing(stream))) == 0
    assert order == []


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery", "cuCtxSynchronize", "cuMemAlloc"])
def test_what_would_wait_or_allocate_spoils_the_capture(cuda: Any, stream: Any, call: str) -> None:
    begin(cuda, stream)
    arguments = {"cuCtxSynchronize": (), "cuMemAlloc": (4,)}.get(call, (stream,))
    assert name_of(getattr(cuda, call)(*arguments)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert name_of(cuda.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"


def test_events_of_a_capture(cuda: Any, stream: Any) -> None:
    outside, event, second = done(cuda.cuEventCreate(2)), done(cuda.cuEventCreate(2)), done(cuda.cuStreamCreate(1))
    begin(cuda, stream)
    done(cuda.cuEventRecord(event, stream))
    assert name_of(cuda.cuEventQuery(event)) == "CAPTURED_EVENT"
    assert name_of(cuda.cuEventSynchronize(event)) == "CAPTURED_EVENT"
    assert name_of(cuda.cuStreamWaitEvent(stream, outside, 0)) == "STREAM_CAPTURE_ISOLATION"
    done(cuda.cuStreamWaitEvent(second, event, 0))  # it joins
    assert int(done(cuda.cuStreamIsCapturing(second))) == 1
    done(cuda.cuStreamEndCapture(stream))
    assert int(done(cuda.cuStreamIsCapturing(second))) == 0
    for one in (outside, event):
        done(cuda.cuEventDestroy(one))
    done(cuda.cuStreamDestroy(second))
