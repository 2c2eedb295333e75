"""The arrays of a session on GPUs: how calls make, copy and wait for them, and how rows are gathered where a GPU is."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.gpu.arrays.device_view import DeviceView
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.instance import InstanceGpus
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.gpu.streams import NamedStream
from shm_backend_utils.gpu.uses import DeviceUses
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model.mapping.memory import Pinning
from shm_backend_utils.model.modes.batch import Buffers, Gathering, with_rows
from shm_backend_utils.tensors.view import MemoryType, TensorView
from tests.unit.gpu.fakes import (
    DRIVER,
    INTEGERS,
    MODEL,
    array_on,
    collect_all,
    content,
    fails_by,
    held_back,
    kernel,
    left_of,
    stream_on,
    wait_until,
)

INT32 = dtypes.BY_NAME["INT32"]
DEVICE = 1
"""The instance's GPU."""
ILLEGAL = "CUDA_ERROR_ILLEGAL_ADDRESS"


@pytest.fixture
def arrays(cuda: CudaRuntime) -> Iterator[InstanceGpus]:
    arrays = InstanceGpus(CudaAccess(lambda: cuda), DEVICE)
    yield arrays
    collect_all(cuda)
    arrays.close()


@pytest.fixture
def stream(cuda: CudaRuntime) -> Iterator[int]:
    with stream_on(cuda, DEVICE) as stream:
        yield stream


@pytest.fixture
def uses(cuda: CudaRuntime, arrays: InstanceGpus) -> Iterator[DeviceUses]:
    uses = DeviceUses(arrays)
    yield uses
    for device in uses:
        cuda.synchronize_device(device)
    uses.release()


def host_view(array: npt.NDArray[Any]) -> TensorView:
    return TensorView("X", array, INT32, "direct")


def times(function: str) -> int:
    return DRIVER.count(function, MODEL)


def test_calls_of_a_batch_share_what_they_have_noted(arrays: InstanceGpus, uses: DeviceUses, stream: int) -> None:
    more = DeviceUses(arrays)
    more.name(stream)
    more.reads_host = True
    uses.add(0)
    uses.join(more)
    assert (list(uses), uses.streams[DEVICE], uses.reads_host) == ([0, 1], [NamedStream(stream, DEVICE)], True)


@pytest.mark.parametrize("device", [0, DEVICE])
def test_an_array_in_another_order_is_viewed_as_a_copy_on_its_own_gpu(arrays: InstanceGpus, device: int) -> None:
    tensor = DRIVER.tensor(np.arange(6, dtype=INTEGERS).reshape(2, 3), device=device)
    view = arrays.view("X", arrays.adopt(tensor[:, ::2]), INT32, "triton", writable=True)
    assert (view.device, content(view.array).tolist()) == (device, [[0, 2], [3, 5]])


# Memory of its own


def used_in_a_call(arrays: InstanceGpus, size: int = 3) -> int:
    """Return where a call had an array that it has dropped, and that its GPU has finished with."""
    uses = DeviceUses(arrays)
    uses.add(DEVICE)
    address: int = arrays.empty("Y", (size,), INT32, "triton", uses=uses).array.address
    uses.wait()
    uses.release()
    return address


def test_memory_of_its_own_is_on_the_instances_gpu_and_used_again(arrays: InstanceGpus) -> None:
    address = used_in_a_call(arrays)
    second = arrays.empty("Y", (2,), INT32, "triton")
    assert (second.device, second.writable, second.shape) == (DEVICE, True, (2,))
    assert second.array.address == address
    assert times("cuMemFree") == 0


@pytest.mark.parametrize("end", ["before", "while waiting", "after"])
def test_memory_is_not_used_again_if_its_call_did_not_wait_for_it(
    cuda: CudaRuntime, arrays: InstanceGpus, uses: DeviceUses, stream: int, end: str
) -> None:
    """What drops the array may have launched a kernel before, on a stream that the call did not know."""
    uses.add(DEVICE)
    if end == "while waiting":
        uses.name(stream)
    kept = [arrays.empty("Y", (3,), INT32, "triton", uses=None if end == "before" else uses)]
    address, done = kept[0].array.address, list[str]()
    with stream_on(cuda, DEVICE) as other:

        def use_and_drop() -> None:
            with cuda.on(DEVICE):
                kernel(other, lambda memory: done.append(str(memory.fill(7))), kept[0].array, late_s=0.05)
            kept.clear()

        if end == "while waiting":
            with cuda.on(DEVICE):
                DRIVER.launch(stream, lambda: time.sleep(0.05))
            dropping = threading.Timer(0.02, use_and_drop)
            dropping.start()
            uses.wait()
            dropping.join()
        else:
            uses.wait()
        uses.release()
        if end != "while waiting":
            use_and_drop()
        assert arrays.empty("Y", (3,), INT32, "triton").array.address != address
        cuda.retired.collect_now()
        assert done == ["None"], "it was freed before"


def test_memory_of_a_call_that_ends_early_is_free_when_its_streams_are_done(
    cuda: CudaRuntime, arrays: InstanceGpus, uses: DeviceUses, stream: int
) -> None:
    region, done = ManagedRegion.create(1), list[str]()
    uses.name(stream)
    address = arrays.empty("Y", (3,), INT32, "triton", uses=uses).array.address
    dropped_later = arrays.empty("Z", (10**6,), INT32, "triton", uses=uses)
    with held_back(stream):
        assert uses.leave_to_gpu(region, 0, 1, lambda: done.append("the rest"))
        del dropped_later  # it may be in use on any stream, so CUDA frees it
        other = arrays.empty("Y", (3,), INT32, "triton")
        assert (other.array.address != address, region.record(0).completed, done) == (True, 0, [])
    wait_until(lambda: region.record(0).completed == 1)
    cuda.synchronize_device(DEVICE)
    again = arrays.empty("Y", (3,), INT32, "triton")
    assert (again.array.address, done) == (address, ["the rest"])
    cuda.retired.collect_now()
    assert times("cuMemFree") == 1
    region.segment.unlink()
    region.close()


def test_memory_of_a_call_whose_work_may_never_end_goes_back_to_cuda(
    cuda: CudaRuntime, arrays: InstanceGpus, uses: DeviceUses, stream: int
) -> None:
    gone = list[str]()
    source = array_on(cuda, [7] * 3, DEVICE)
    weakref.finalize(source, gone.append, "the source")
    uses.name(stream)
    uses.keep([source])
    arrays.empty("Y", (3,), INT32, "triton", uses=uses)
    del source
    with held_back(stream):
        uses.leave()
        cuda.retired.collect_soon()
        time.sleep(0.02)
        assert (gone, left_of(MODEL).allocations) == ([], 3)  # two, and the block to wait by
    collect_all(cuda)
    assert (gone, left_of(MODEL).allocations) == (["the source"], 0)


def test_memory_that_does_not_fit_goes_back_to_cuda(cuda: CudaRuntime, arrays: InstanceGpus) -> None:
    for size in (10, 10**6, 10**7):
        used_in_a_call(arrays, size)
        collect_all(cuda)
        assert left_of(MODEL).allocations == 1


def test_where_no_memory_is_left_what_is_due_is_freed_first(cuda: CudaRuntime, arrays: InstanceGpus) -> None:
    arrays.empty("Y", (3,), INT32, "triton")
    DRIVER.fail_next("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", process=MODEL)
    arrays.empty("Y", (3,), INT32, "triton")
    assert times("cuMemFree") == 1


@pytest.mark.parametrize("way", ["its reader waits", "its reader has named the stream", "on a stream of the reader's"])
def test_pinned_copies_go_on(cuda: CudaRuntime, arrays: InstanceGpus, uses: DeviceUses, stream: int, way: str) -> None:
    host = np.array([7, 8, 9], np.int32)
    host.flags.writeable = False
    with cuda.on(DEVICE):
        cuda.pin(host.ctypes.data, host.nbytes)
    DRIVER.delay(0.02)
    if way == "its reader has named the stream":
        uses.name(stream)
    own = NamedStream(stream, DEVICE) if way == "on a stream of the reader's" else None
    copied = arrays.to_device(host_view(host), uses, own)
    assert (times("cuEventSynchronize"), times("cuCtxSynchronize")) == (0, 0)
    assert (copied.written_on is None) == (own is not None)
    seen: list[list[int]] = []
    if own is None:
        _ = copied.__dlpack__(stream=stream)
    with cuda.on(DEVICE):
        kernel(stream, lambda memory: seen.append(memory.tolist()), copied)
    cuda.synchronize_stream(stream, DEVICE)
    assert seen == [[7, 8, 9]]
    assert uses.reads_host
    uses.wait()
    uses.release()
    DRIVER.delay(0)
    cuda.unpin(host.ctypes.data)


@pytest.mark.parametrize(("function", "times"), [("cuMemAlloc", 2), ("cuMemcpyAsync", 1), ("cuStreamCreate", 1)])
def test_a_copy_that_fails_leaves_nothing(arrays: InstanceGpus, uses: DeviceUses, function: str, times: int) -> None:
    DRIVER.fail_next(function, "CUDA_ERROR_OUT_OF_MEMORY", times, process=MODEL)
    with fails_by("CUDA_ERROR_OUT_OF_MEMORY"):
        arrays.to_device(host_view(np.zeros(3, np.int32)), uses)
    assert arrays.to_device(host_view(np.ones(3, np.int32)), uses).to_host().tolist() == [1, 1, 1]


@pytest.mark.parametrize("is_closed_before", [False, True])
def test_a_kept_array_keeps_its_stream_and_its_memory(cuda: CudaRuntime, is_closed_before: bool) -> None:
    arrays = InstanceGpus(CudaAccess(lambda: cuda), DEVICE)
    uses = DeviceUses(arrays)
    kept = arrays.to_device(host_view(np.arange(3, dtype=np.int32)), uses)
    if is_closed_before:
        arrays.close()
    uses.wait()
    uses.release()
    arrays.close()
    collect_all(cuda)
    assert left_of(MODEL).allocations == 1
    with stream_on(cuda, DEVICE) as reader, cuda.on(DEVICE):
        kept.__dlpack__(stream=reader)
        assert kept.__cuda_array_interface__["data"][0] == kept.address
    assert content(kept).tolist() == [0, 1, 2]
    del kept, uses
    gc.collect()
    collect_all(cuda)
    assert (DRIVER.live(MODEL).streams, left_of(MODEL).allocations) == (0, 0)


def test_memory_that_cuda_does_not_free_keeps_no_other(cuda: CudaRuntime, arrays: InstanceGpus) -> None:
    uses = DeviceUses(arrays)
    made = [arrays.empty("X", (3,), INT32, "direct", device, uses) for device in (0, 0, 1)]
    addresses = {view.array.address for view in made}
    del made
    uses.wait()
    DRIVER.fail_next("cuMemFree", ILLEGAL, process=MODEL)
    arrays.close()
    collect_all(cuda)
    assert times("cuMemFree") == 3
    assert left_of(MODEL).allocations == 1
    for address in addresses:  # the test undoes it
        with contextlib.suppress(CudaError):
            cuda.free(address, 0)


# Rows that are gathered: on the GPU that has all of them, or on the host, in memory pinned for it


@pytest.fixture
def buffers(cuda: CudaRuntime) -> Iterator[Buffers]:
    buffers = Buffers(Pinning(CudaAccess(lambda: cuda), pytest.fail))
    yield buffers
    buffers.close()


def rows(cuda: CudaRuntime, arrays: InstanceGpus, device: int | None, value: int) -> TensorView:
    if device is None:
        return TensorView("X", np.full((2, 3), value, INTEGERS), INT32, "direct")
    return arrays.view("X", array_on(cuda, np.full((2, 3), value), device, INTEGERS), INT32, "direct", writable=True)


@pytest.mark.parametrize(
    ("devices", "is_on_gpu"),
    [((0, 0), True), ((0, 1), False), ((0, None), False), ((None, 0), False), ((None, None), False)],
    ids=str,
)
def test_rows_are_gathered_on_the_gpu_that_has_all_of_them_or_on_the_host(
    cuda: CudaRuntime, arrays: InstanceGpus, buffers: Buffers, devices: tuple[int | None, ...], is_on_gpu: bool
) -> None:
    parts = [rows(cuda, arrays, device, value) for value, device in enumerate(devices)]
    gathering = Gathering(buffers, arrays, 0)
    whole = gathering.gather(parts)
    assert isinstance(whole, DeviceView) == is_on_gpu
    found: Any = content(whole.array) if is_on_gpu else whole.numpy()
    assert found.tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
    assert is_on_gpu or not found.flags.writeable
    assert gathering.byte_count == 48


def test_rows_of_several_gpus_go_over_the_host(cuda: CudaRuntime, arrays: InstanceGpus, buffers: Buffers) -> None:
    parts = [rows(cuda, arrays, device, 0) for device in (0, 1, None)]
    gathering = Gathering(buffers, arrays, 0)
    room = gathering.room(parts)
    room.numpy()[:] = np.arange(6)[:, None]
    gathering.scatter(with_rows(room, parts))
    assert [content(part.array)[1, 0] for part in parts[:2]] == [1, 3]
    assert parts[2].numpy()[1, 0] == 5


def test_a_buffer_is_pinned_until_a_larger_one_replaces_it(cuda: CudaRuntime, buffers: Buffers) -> None:
    small, kind = buffers.get("0 input X", 8)
    assert kind is MemoryType.CPU_PINNED
    assert buffers.get("0 input X", small.nbytes)[0] is small
    large, _ = buffers.get("0 input X", small.nbytes + 1)
    assert large is not small
    collect_all(cuda)
    assert left_of(MODEL).pinned == 1
    buffers.get("0 input Z", 8)
    assert left_of(MODEL).pinned == 2
    buffers.close()
    collect_all(cuda)
    assert left_of(MODEL).pinned == 0
