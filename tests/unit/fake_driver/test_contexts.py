"""Devices, contexts, and what the driver says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from tests.unit.fake_driver.asked import done, told


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
