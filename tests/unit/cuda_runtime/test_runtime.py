"""CUDA's runtime: devices and their contexts, the loading of the bindings, errors, and memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.runtime import BLOCK_BYTES, CudaRuntime, PointerFacts, whole_blocks
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
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


# Loading


BEGIN = """
import sys
from shm_backend_utils.errors import MachineError
from shm_backend_utils.gpu.runtime import CudaRuntime
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
    from shm_backend_utils.gpu import errors

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


# Memory: allocated, shared, asked about, pinned and copied


PAGE = 4096


@pytest.fixture
def stream(gpu: CudaRuntime) -> Iterator[int]:
    """A stream of device 0, which is current."""
    stream = gpu.create_stream(0)
    with gpu.on(0):
        yield stream
    gpu.destroy_stream(stream, 0)


def bytes_at(driver: FakeDriver, address: int, byte_size: int) -> npt.NDArray[np.uint8]:
    return driver.memory(address, (byte_size,), np.dtype(np.uint8))


def host_pages(count: int) -> npt.NDArray[np.uint8]:
    """Return whole pages of the host's memory."""
    room = np.zeros((count + 1) * PAGE, np.uint8)
    begin = -room.ctypes.data % PAGE
    return room[begin : begin + count * PAGE]


@pytest.mark.parametrize(
    ("byte_size", "blocks"), [(1, 1), (BLOCK_BYTES, 1), (BLOCK_BYTES + 1, 2), (5 * BLOCK_BYTES - 1, 5)]
)
def test_whole_blocks_hold_so_many_bytes(gpu: CudaRuntime, byte_size: int, blocks: int) -> None:
    assert whole_blocks(byte_size) == blocks * BLOCK_BYTES
    address = gpu.allocate(byte_size, 1)
    assert gpu.extent(address + byte_size - 1, 1) == (address, blocks * BLOCK_BYTES)
    gpu.free(address, 1)


def test_memory_is_opened_twice_at_one_address_and_closed_twice(
    driver: FakeDriver, gpu: CudaRuntime, peer: CudaRuntime
) -> None:
    address = gpu.allocate(1, 1)
    handle = gpu.export(address)
    opened = [peer.open(handle, 1) for _ in range(2)]
    assert opened[0] == opened[1]
    assert driver.live(1) == LiveCounts(opened=2)
    bytes_at(driver, address, 3)[2] = 77
    assert bytes_at(driver, opened[0], 3)[2] == 77
    for each in opened:
        peer.close(each, 1)
    with fails_by("CUDA_ERROR_INVALID_VALUE"):
        peer.close(opened[0], 1)
    gpu.free(address, 1)


# What CUDA knows of an address


@pytest.mark.parametrize(
    ("kind", "found", "is_exportable"),
    [("device", "device", True), ("pool", "device", False), ("vmm", "device", False), ("managed", "managed", False)],
)
def test_what_is_known_of_a_users_tensor(
    driver: FakeDriver, gpu: CudaRuntime, kind: str, found: str, is_exportable: bool
) -> None:
    tensor = driver.tensor(np.zeros(BLOCK_BYTES, np.uint8), device=1, kind=kind, offset=512)
    facts = gpu.pointer(tensor.address)
    assert (facts.kind, facts.device, facts.is_exportable) == (found, 1, is_exportable)
    assert (facts.base, facts.byte_size >= BLOCK_BYTES + 512) == (tensor.address - 512, True)
    if is_exportable:
        assert len(gpu.export(facts.base)) == 64


def test_memory_inside_of_a_block_of_others_is_not_exportable(driver: FakeDriver, gpu: CudaRuntime) -> None:
    """Where such a handle opens, the block begins, says CUDA's documentation; not where the memory does."""
    tensors = [driver.tensor(np.zeros(1000, np.uint8)) for _ in range(3)]
    facts = [gpu.pointer(each.address) for each in tensors]
    assert [each.is_exportable for each in facts] == [each.base % BLOCK_BYTES == 0 for each in facts]
    assert not all(each.is_exportable for each in facts)


def test_what_is_known_of_memory_of_the_host(gpu: CudaRuntime) -> None:
    pages = host_pages(1)
    assert gpu.pointer(pages.ctypes.data) == PointerFacts("host")
    gpu.pin(pages.ctypes.data, PAGE)
    assert gpu.pointer(pages.ctypes.data + 5) == PointerFacts("pinned")
    gpu.unpin(pages.ctypes.data)
    assert gpu.pointer(pages.ctypes.data) == PointerFacts("host")


def test_what_another_process_has_is_not_known_here(gpu: CudaRuntime, peer: CudaRuntime) -> None:
    address = gpu.allocate(1, 0)
    assert peer.pointer(address) == PointerFacts("host")
    opened = peer.open(gpu.export(address), 0)
    assert (peer.pointer(opened).kind, peer.pointer(opened).base) == ("device", opened)
    peer.close(opened, 0)
    gpu.free(address, 0)


# Copies


@pytest.mark.parametrize("is_pinned", [False, True])
def test_bytes_come_to_the_gpu_and_back(gpu: CudaRuntime, stream: int, is_pinned: bool) -> None:
    there, back = host_pages(1), host_pages(1)
    there[:] = np.arange(PAGE) % 251
    for each in (there, back):
        if is_pinned:
            gpu.pin(each.ctypes.data, PAGE)
    address = gpu.allocate(PAGE, 0)
    gpu.copy(address + 100, there.ctypes.data, 1000, stream)
    gpu.copy(back.ctypes.data, address + 100, 1000, stream)
    gpu.synchronize_stream(stream, 0)
    assert back[:1000].tobytes() == there[:1000].tobytes()
    assert not back[1000:].any()
    for each in (there, back):
        if is_pinned:
            gpu.unpin(each.ctypes.data)
    gpu.free(address, 0)


def test_copies_are_done_late_and_in_order(driver: FakeDriver, gpu: CudaRuntime, stream: int) -> None:
    driver.delay(0.02)
    one, two = driver.tensor([1, 2]), driver.tensor([3, 4])
    gpu.copy(two.address, one.address, 16, stream)
    gpu.copy(one.address + 8, two.address, 8, stream)
    assert two.peek().tolist() == [3, 4]
    gpu.synchronize_stream(stream, 0)
    assert (one.peek().tolist(), two.peek().tolist()) == ([1, 1], [1, 2])


@pytest.mark.parametrize("to_host", [False, True])
def test_rows_are_copied_between_host_and_gpu(driver: FakeDriver, gpu: CudaRuntime, stream: int, to_host: bool) -> None:
    tensor = driver.tensor(np.arange(12, dtype=np.uint8).reshape(3, 4))
    pages = host_pages(1)
    pages[:12] = np.arange(100, 112)
    ends = [(pages.ctypes.data, 4), (tensor.address, 4)]
    (target, target_pitch), (source, source_pitch) = ends if to_host else ends[::-1]
    gpu.copy_rows(target, target_pitch, source, source_pitch, 2, 3, stream)
    gpu.synchronize_stream(stream, 0)
    moved = pages[:12].reshape(3, 4) if to_host else tensor.get()
    first = 0 if to_host else 100
    assert moved[:, :2].tolist() == [[first + 4 * row, first + 4 * row + 1] for row in range(3)]
