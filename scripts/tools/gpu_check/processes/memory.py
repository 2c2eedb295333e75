"""Checks that memory of a GPU is shared rightly: what must be served is, and what must be refused is."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory.cuda.memory import CudaMappings
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH, CudaError, device_guard
from shm_backend_utils.protocol.results import OutputPlace

from .. import photographs
from ..report import CheckFailedError, SkippedError, require
from .client import Check, Client
from .slots import DeviceSlot

__all__ = ["CHECKS"]

COUNT: Final = 2**19
"""FP32 numbers: 2 MiB. CUDA may put smaller allocations into one block, and then a claim reaches its neighbours."""

NO_DEVICE: Final = "0123456789abcdef" * 2
SEED: Final = 1


def _numbers(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(SEED).standard_normal(count, np.float32)


def _handle_round_trip(client: Client) -> str:
    gpu = client.gpu
    with client.slot("look", COUNT) as slot:
        numbers = _numbers(COUNT)
        gpu.upload(slot.x, numbers)
        seen = client.infer("look", slot)
        require(seen["path"] == "direct" and seen["is_on_gpu"], f"the model saw an input elsewhere: {seen}")
        require(seen["handle"] == slot.allocation.handle, "the model saw another handle")
        require(seen["uuid"] == slot.allocation.device_uuid, "the model saw another GPU")
        require(seen["byte_size"] == numbers.nbytes, f"the model saw {seen['byte_size']} bytes of {numbers.nbytes}")
        require(bool((seen["values"] == numbers[:64]).all()), "the model saw other values")
        return f"an allocation of {slot.allocation.byte_size} bytes has {seen['extent']} in the other process"


def _small_allocations(client: Client) -> str:
    extents = set()
    with contextlib.ExitStack() as stack:
        slots = [stack.enter_context(client.slot("look", 256, room=0)) for _ in range(8)]
        for number, slot in enumerate(slots):
            client.gpu.upload(slot.x, np.full(256, number, np.float32))
        require(len({slot.allocation.handle for slot in slots}) == len(slots), "two allocations have one handle")
        for number, slot in enumerate(slots):
            seen = client.infer("look", slot)
            extents.add(seen["extent"])
            require(
                bool((seen["values"] == number).all()), f"the model saw the memory of another slot in slot {number}"
            )
    return f"1.25 KiB have {sorted(extents)} bytes in the other process"


def _mutation(client: Client) -> str:
    gpu = client.gpu
    with client.slot("gpu_multiply", COUNT) as slot:
        before = client.model.counts()["open"]
        for turn in range(3):
            numbers = _numbers(COUNT) + np.float32(turn)
            gpu.upload(slot.x, numbers)
            client.infer("gpu_multiply", slot)
            require(bool((gpu.download(slot.y) == numbers * 2).all()), f"the output is wrong in turn {turn}")
        opened = client.model.counts()["open"] - before
        require(opened == 1, f"the model opened the memory {opened} times for 3 requests")
    return ""


def _pass_through(client: Client) -> str:
    with client.slot("identity", COUNT, room=0) as slot:
        client.infer("identity", slot)
        (place,) = slot.results().outputs
        expected = OutputPlace("OUTPUT0", BY_NAME["FP32"], (COUNT,), 1, 0, COUNT * 4, is_in_response=False)
        require(place == expected, f"the output is said to be {place}")
    return ""


def _normalize(client: Client) -> str:
    with client.image_slot(photographs.COUNT, photographs.HEIGHT, photographs.WIDTH) as slot:
        client.gpu.upload(slot.x, photographs.noise())
        client.infer("gpu_normalize", slot)
        return photographs.compared(client.gpu.download(slot.y))


def _dlpack(client: Client) -> str:
    with client.slot("dlpack", COUNT) as slot:
        client.gpu.upload(slot.x, np.arange(COUNT, dtype=np.float32) % 1000)
        found = client.infer("dlpack", slot)
        require(found["is_same_memory"], "the consumer got a copy")
        require(found["is_right"], "the consumer read before the producer had written")
        require(tuple(found["device"]) == (2, 0), f"__dlpack_device__ returned {found['device']}")
        require(all(found["refused"]), f"a wrong argument of __dlpack__ was taken: {found['refused']}")
        require(all(found["accepted"]), f"a stream was refused: {found['accepted']}")
    return ""


def _torch(client: Client) -> str:
    with client.slot("torch", COUNT) as slot:
        numbers = _numbers(COUNT)
        client.gpu.upload(slot.x, numbers)
        found = client.infer("torch", slot)
        if "missing" in found:
            raise SkippedError(found["missing"])
        require(found["is_same_memory"], "PyTorch got a copy")
        require(bool((client.gpu.download(slot.y) == numbers * 2).all()), "the output is wrong")
    return ""


def _device_guard(client: Client) -> str:
    runtime = client.gpu.runtime
    last = runtime.device_count() - 1
    with client.slot("look", COUNT, device=last) as slot, device_guard(runtime, 0):
        seen = client.infer("look", slot)
        require(seen["uuid"] == slot.allocation.device_uuid, "the model saw another GPU")
        during, after = seen["current_device"], seen["current_device_after"]
        require(during == after == 0, f"the model's device was {during}, and then {after}; expected 0 and 0")
    require(runtime.current_device() == 0, f"the client's device is {runtime.current_device()} now; expected 0")
    return "there is one GPU only" if last == 0 else f"the memory was on GPU {last}"


def _claimed_too_large(client: Client) -> str:
    with client.slot("gpu_multiply", COUNT) as slot:
        size = slot.allocation.byte_size
        for claimed in (size * 2 + 2**22, 2**50):  # the extent may be rounded up to pages of 2 MiB
            reason = client.refusal("gpu_multiply", slot, slot.claiming(byte_size=claimed))
            _require_words(reason, f"claims {claimed} bytes of an allocation of ")
        client.infer("gpu_multiply", slot)
    return ""


def _freed(client: Client) -> str:
    with client.slot("gpu_multiply", COUNT) as slot:
        slot.free_on_device()
        reason = client.refusal("gpu_multiply", slot)
        _require_words(reason, "regions[1] refused", "freed")
    return _brief(reason)


def _same_process(client: Client) -> str:
    with client.slot("gpu_multiply", COUNT) as slot:
        try:
            CudaMappings(client.gpu.runtime).map(slot.allocation.handle, slot.allocation.byte_size, 0, "the memory")
        except RegionRefusedError as error:
            _require_words(str(error), "exported by this very process")
            return _brief(str(error))
    raise CheckFailedError("it was mapped a second time")


def _handle_length(client: Client) -> str:
    with client.slot("gpu_multiply", COUNT) as slot:
        for length in (0, HANDLE_LENGTH - 1, HANDLE_LENGTH + 1):
            handle = slot.allocation.handle.ljust(HANDLE_LENGTH + 1, b"\0")[:length]
            reason = client.refusal("gpu_multiply", slot, slot.claiming_handle_length(length))
            _require_words(reason, "regions[1].name_length", "64, as a CUDA IPC handle has")
            try:
                CudaMappings(client.gpu.runtime).map(handle, 1, 0, "the memory")
            except RegionRefusedError as error:
                _require_words(str(error), f"its handle has {length} bytes; expected 64")
            else:
                raise CheckFailedError(f"a handle of {length} bytes was mapped")
    return ""


def _no_such_device(client: Client) -> str:
    runtime = client.gpu.runtime
    with client.slot("gpu_multiply", COUNT) as slot:
        reason = client.refusal("gpu_multiply", slot, slot.claiming(device_uuid=NO_DEVICE))
        _require_words(reason, "it is on a GPU that this model does not see")
    try:
        runtime.set_device(runtime.device_count())
    except CudaError as error:
        require(error.name == "cudaErrorInvalidDevice", f"CUDA calls it {error.name}; expected cudaErrorInvalidDevice")
        return ""
    runtime.set_device(0)
    raise CheckFailedError("a device that does not exist was made current")


def _host_memory(client: Client) -> str:
    host = np.zeros(2**20, np.uint8)
    try:
        client.gpu.runtime.export(host.ctypes.data)
    except CudaError as error:
        exporting = error.name
    else:
        raise CheckFailedError("CUDA gave a handle of host memory")
    with client.slot("gpu_multiply", COUNT) as slot:
        key = slot.region.segment.key.encode().ljust(HANDLE_LENGTH, b"\0")
        for handle in (bytes(HANDLE_LENGTH), key):
            reason = client.refusal("gpu_multiply", slot, slot.claiming(handle=handle))
            _require_words(reason, "regions[1] refused")
    return f"exporting it: {exporting}; claiming it: {_brief(reason)}"


def _good_after_bad(client: Client) -> str:
    with client.slot("gpu_multiply", COUNT) as slot:
        client.refusal("gpu_multiply", slot, slot.claiming(byte_size=2**50))
        _check_doubles(client, slot)
    return ""


def _check_doubles(client: Client, slot: DeviceSlot) -> None:
    numbers = _numbers(COUNT)
    client.gpu.upload(slot.x, numbers)
    client.infer("gpu_multiply", slot)
    require(bool((client.gpu.download(slot.y) == numbers * 2).all()), "the output is wrong")


def _require_words(text: str, *words: str) -> None:
    for each in words:
        require(each in text, f"the reason does not say {each!r}: {text}")


def _brief(reason: str) -> str:
    return reason if len(reason) <= 200 else f"{reason[:200]}…"


CHECKS: Final[Mapping[str, Check]] = {
    "an IPC handle leads another process to the same memory": _handle_round_trip,
    "small allocations have handles of their own": _small_allocations,
    "what one process writes the other reads, without opening again": _mutation,
    "an input that is passed on stays where it is": _pass_through,
    "gpu_normalize gives what NumPy gives": _normalize,
    "DLPack hands memory from stream to stream in order": _dlpack,
    "PyTorch writes to the client's memory by DLPack": _torch,
    "calls leave the current device as it was": _device_guard,
    "a size beyond the allocation is refused": _claimed_too_large,
    "freed memory is refused": _freed,
    "memory of the same process is refused": _same_process,
    "a handle of a wrong length is refused": _handle_length,
    "a device that does not exist is refused": _no_such_device,
    "host memory that is claimed to be a GPU's is refused": _host_memory,
    "a slot is served after it was refused": _good_after_bad,
}
