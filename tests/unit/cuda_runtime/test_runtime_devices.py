"""Devices, their contexts in each thread, and the loading of the bindings."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.errors import CudaError
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.gpus import fails_by, in_another_thread


def current(driver: FakeDriver, process: int = 0) -> int | None:
    """Return the calling thread's device; None if it has none."""
    error, device = driver.bindings(process).cuCtxGetDevice()
    return None if error else int(device)


def test_devices_are_counted_and_have_uuids(gpu: CudaRuntime) -> None:
    assert gpu.device_count() == 2
    uuids = [gpu.device_uuid(device) for device in range(2)]
    assert len(set(uuids)) == 2
    assert all(len(uuid) == 32 and bytes.fromhex(uuid) for uuid in uuids)


@pytest.mark.parametrize("device", [2, -1])
def test_a_device_that_there_is_not_is_an_error(gpu: CudaRuntime, device: int) -> None:
    with fails_by("CUDA_ERROR_INVALID_DEVICE"):
        gpu.device_uuid(device)
    with fails_by("CUDA_ERROR_INVALID_DEVICE"), gpu.on(device):
        pytest.fail("there is none")


def test_a_device_is_current_for_its_block_and_then_the_former(driver: FakeDriver, gpu: CudaRuntime) -> None:
    before = current(driver)
    with gpu.on(1):
        assert current(driver) == 1
        with gpu.on(0):
            assert current(driver) == 0
        assert current(driver) == 1
        with pytest.raises(ZeroDivisionError), gpu.on(0):
            print(1 / 0)
        assert current(driver) == 1
        with fails_by("CUDA_ERROR_INVALID_DEVICE"), gpu.on(2):
            pass
        assert current(driver) == 1
    assert current(driver) == before


def test_each_thread_has_a_device_of_its_own(driver: FakeDriver, gpu: CudaRuntime) -> None:
    def of_another_thread() -> list[int | None]:
        found = [current(driver)]
        gpu.make_current(0)
        with gpu.on(1):
            found.append(current(driver))
        return [*found, current(driver)]

    with gpu.on(1):
        assert in_another_thread(of_another_thread) == [None, 1, 0]
        assert current(driver) == 1


def test_a_context_is_made_once_for_all_threads(driver: FakeDriver, gpu: CudaRuntime) -> None:
    retained = driver.count("cuDevicePrimaryCtxRetain")
    for _ in range(3):
        with gpu.on(1):
            pass
        in_another_thread(lambda: gpu.make_current(1))
    assert driver.count("cuDevicePrimaryCtxRetain") == retained + 1


def test_pinning_and_questions_make_no_context_of_a_gpu_that_is_not_used(driver: FakeDriver) -> None:
    """A context takes hundreds of megabytes of its GPU, and perhaps another process has that one for itself."""
    runtime = driver.runtime(7)
    bindings = driver.bindings(7)

    def use() -> None:
        with runtime.on(1):
            pass
        runtime.pointer(id(runtime))
        assert bindings.cuDevicePrimaryCtxGetState(0)[2] == 0

    in_another_thread(use)


def test_what_a_library_made_current_is_enough_for_questions(driver: FakeDriver) -> None:
    bindings = driver.bindings(8)

    def use() -> None:
        runtime = driver.runtime(8)
        with bindings.context(1):
            runtime.pointer(id(runtime))
        assert bindings.cuDevicePrimaryCtxGetState(0)[2] == 0

    in_another_thread(use)


# Loading


BEGIN = """
import sys
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
"""


def printed_by(program: str) -> str:
    """Return what a program prints."""
    run = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_without_a_driver_the_error_says_what_to_install() -> None:
    message = printed_by("""
import cuda.bindings.driver

def not_found(*_):
    raise RuntimeError("cuda is an NVIDIA driver library and can only be found via system search")

cuda.bindings.driver = type("Driver", (), {"cuInit": not_found})
sys.modules["cuda.bindings"].driver = cuda.bindings.driver
try:
    CudaRuntime()
except MachineError as error:
    print(error)
""")
    assert "its library libcuda.so.1 was not found (cuda is an NVIDIA driver library" in message
    assert "start the container with --gpus; see LD_LIBRARY_PATH" in message


def test_without_the_bindings_the_error_says_what_to_install() -> None:
    message = printed_by("""
sys.modules["cuda.bindings"] = None
try:
    CudaRuntime()
except MachineError as error:
    print(error)
""")
    assert "needs NVIDIA's cuda-bindings, which cannot be imported" in message
    assert "install triton-shm-backend-utils[gpu]" in message


def test_a_machine_without_a_gpu_is_told(driver: FakeDriver) -> None:
    driver.fail_next("cuInit", "CUDA_ERROR_NO_DEVICE")
    with pytest.raises(MachineError, match="starting CUDA failed with CUDA_ERROR_NO_DEVICE: no GPU is visible here"):
        driver.runtime()


# Errors


def test_an_error_has_cudas_name_and_advice(driver: FakeDriver, gpu: CudaRuntime) -> None:
    driver.fail_next("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError) as caught:
        gpu.allocate(1, 0)
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert str(caught.value) == (
        "allocating 2097152 bytes on GPU 0 failed with CUDA_ERROR_OUT_OF_MEMORY: the GPU has not that much memory "
        "left; use smaller or fewer calls at once"
    )


def test_all_errors_with_advice_are_cudas(driver: FakeDriver) -> None:
    from shm_backend_utils.memory.cuda import errors

    known = driver.bindings().CUresult
    assert [name for name in {*errors._ADVICE, *errors._FINAL} if not hasattr(known, name)] == []


@pytest.mark.parametrize("error", [KeyError(99999), ValueError("99999 is not a valid CUresult")])
def test_an_error_that_is_newer_than_the_bindings_is_an_error_of_cudas(gpu: CudaRuntime, error: Exception) -> None:
    class Newer:
        def __getattr__(self, name: str) -> Any:
            def fail(*_: Any) -> Any:
                raise error

            return (lambda *_: (0, 13000)) if name in ("cuInit", "cuDriverGetVersion") else fail

    with pytest.raises(CudaError, match="counting the GPUs failed with CUresult .*99999"):
        CudaRuntime(Newer()).device_count()
