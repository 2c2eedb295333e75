"""CUDA's runtime: devices and their contexts, the loading of the bindings, errors, and memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.gpu import errors
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.mappings import device_with
from shm_backend_utils.gpu.runtime import BLOCK_BYTES, CudaRuntime, PointerFacts, whole_blocks
from tests.unit.gpu.fakes import DRIVER, fails_by, in_another_thread, run_in_a_process, that_nobody_loads


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
        access.collect_idle()
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


WITHOUT = {
    "the driver": """
def not_found(*_):
    raise RuntimeError("cuda is an NVIDIA driver library and can only be found via system search")

import cuda.bindings.driver
sys.modules["cuda.bindings"].driver = type("Driver", (), {"cuInit": not_found})
""",
    "the bindings": 'sys.modules["cuda.bindings"] = None',
}
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


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("the driver", ["its library libcuda.so.1 was not found (cuda is an NVIDIA driver library", "--gpus; see LD_"]),
        ("the bindings", ["NVIDIA's cuda-bindings, which cannot be imported", "triton-shm-backend-utils[gpu]"]),
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
        "allocating 2097152 bytes on GPU 0 failed with CUDA_ERROR_OUT_OF_MEMORY: the GPU has not that much memory "
        "left; use smaller or fewer calls at once"
    )
    assert str(CudaError("x", "CUDA_ERROR_UNKNOWN")).endswith(
        ": see CUresult in CUDA's documentation of the driver API"
    )


def test_all_errors_with_advice_are_cudas() -> None:
    known = DRIVER.bindings().CUresult
    assert [name for name in {*errors._ADVICE, *errors._FINAL} if not hasattr(known, name)] == []


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
