"""Devices, contexts, and what the driver says of itself."""

from __future__ import annotations

import threading
from typing import Any

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.fake_driver.asked import done, name_of, primary, told


def test_it_never_calls_itself_a_gpu(cuda: Any) -> None:
    assert done(cuda.cuDeviceGetName(64, 0)).rstrip(b"\0 ") == b"fake CUDA driver, no GPU"


def test_two_devices_with_uuids_of_their_own(cuda: Any) -> None:
    assert done(cuda.cuDeviceGetCount()) == 2
    name = "cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    uuids = [bytes(done(getattr(cuda, name)(device)).bytes) for device in range(2)]
    assert len(set(uuids)) == 2
    assert name_of(cuda.cuDeviceGet(2)) == "INVALID_DEVICE"


def test_a_thread_without_a_context_can_do_little(cuda: Any) -> None:
    found: list[str] = []

    def ask() -> None:
        calls = [cuda.cuMemAlloc(4), cuda.cuStreamCreate(0), cuda.cuEventCreate(0), cuda.cuCtxSynchronize()]
        found.extend(name_of(call) for call in [*calls, cuda.cuMemcpyAsync(0, 0, 4, 0), cuda.cuCtxGetDevice()])

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == ["INVALID_CONTEXT"] * 6


def test_contexts_are_a_stack_of_the_thread(cuda: Any) -> None:
    second = done(cuda.cuDevicePrimaryCtxRetain(1))
    done(cuda.cuCtxPushCurrent(second))
    assert int(done(cuda.cuCtxGetDevice())) == 1
    done(cuda.cuCtxPopCurrent())
    assert int(done(cuda.cuCtxGetDevice())) == 0


def test_contexts_of_virtual_processes_are_their_own(cuda: Any, driver: FakeDriver) -> None:
    stranger = driver.bindings(15)
    assert name_of(stranger.cuCtxGetDevice()) == "INVALID_CONTEXT"
    assert name_of(stranger.cuCtxSetCurrent(done(cuda.cuCtxGetCurrent()))) == "INVALID_CONTEXT"


def test_a_forked_child_cannot_use_it() -> None:
    program = """
    pid = os.fork()
    if not pid:
        os._exit(int(cuda.cuMemAlloc(4)[0]))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), name_of(cuda.cuMemFree(done(cuda.cuMemAlloc(4)))))
    """
    assert told(program) == "3 CUDA_SUCCESS"  # CUDA_ERROR_NOT_INITIALIZED is 3


def test_nothing_works_before_it_is_initialized() -> None:
    program = """
    import subprocess
    code = "from shm_backend_utils.testing.fake_cuda.driver import FakeDriver as F; " \\
           "c = F.load().bindings(); print(c.cuDeviceGetCount()[0].name, c.cuDriverGetVersion()[1])"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    """
    assert told(program) == "CUDA_ERROR_NOT_INITIALIZED 13000"


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
    program = """
    import subprocess
    code = "from shm_backend_utils.testing.fake_cuda.driver import FakeDriver as F; " \\
           "print(F.load().bindings().cuInit(0)[0].name)"
    os.environ["SHM_FAKE_CUDA_DEVICES"] = "0"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    """
    assert told(program) == "CUDA_ERROR_NO_DEVICE"


def test_a_process_that_ends_with_work_on_streams_ends_at_once() -> None:
    program = """
    driver.delay(3)
    stream = done(cuda.cuStreamCreate(1))
    driver.launch(int(stream), lambda: None)
    print("ends")
    """
    assert told(program) == "ends"


def test_the_runtime_of_a_virtual_process(driver: FakeDriver) -> None:
    runtime = driver.runtime(3)
    address = runtime.allocate(100, 1)
    assert driver.live(3).allocations == 1
    assert runtime.pointer(address).device == 1
    runtime.free(address, 1)


def test_current_contexts_are_not_changed_by_another_virtual_process(cuda: Any, other: Any) -> None:
    primary(other, 1)
    assert int(done(cuda.cuCtxGetDevice())) == 0
