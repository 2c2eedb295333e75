"""Checks that what must be refused is, and that the error names the cause."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

import numpy as np

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.mappings import CudaMappings
from shm_backend_utils.gpu.runtime import HANDLE_LENGTH

from ..report import CheckFailedError, require
from .client import Check, Client
from .memory import COUNT, numbers
from .slots import DeviceSlot

__all__ = ["CHECKS"]

NO_DEVICE: Final = "0123456789abcdef" * 2


def _claimed_too_large(client: Client) -> str:
    with client.slot("quick", COUNT) as slot:
        size = slot.allocation.byte_size
        for claimed in (size * 2 + 2**22, 2**50):
            reason = client.refusal("quick", slot, slot.claiming(byte_size=claimed))
            _require_words(reason, f"claims {claimed} bytes of an allocation of ")
        client.infer("quick", slot)
    return ""


def _freed(client: Client) -> str:
    with client.slot("quick", COUNT) as slot:
        slot.free_on_device()
        reason = client.refusal("quick", slot)
        _require_words(reason, "regions[1] refused", "freed")
    return _brief(reason)


def _same_process(client: Client) -> str:
    with client.slot("quick", COUNT) as slot:
        try:
            CudaMappings(client.gpu.runtime).map(slot.allocation.handle, slot.allocation.byte_size, 0, "the memory")
        except RegionRefusedError as error:
            _require_words(str(error), "exported by this very process")
            return _brief(str(error))
    raise CheckFailedError("it was mapped a second time")


def _handle_length(client: Client) -> str:
    with client.slot("quick", COUNT) as slot:
        for length in (0, HANDLE_LENGTH - 1, HANDLE_LENGTH + 1):
            handle = slot.allocation.handle.ljust(HANDLE_LENGTH + 1, b"\0")[:length]
            reason = client.refusal("quick", slot, slot.claiming_handle_length(length))
            _require_words(reason, "regions[1].name_length", "64, as a CUDA IPC handle has")
            try:
                CudaMappings(client.gpu.runtime).map(handle, 1, 0, "the memory")
            except RegionRefusedError as error:
                _require_words(str(error), f"its handle has {length} bytes; expected 64")
            else:
                raise CheckFailedError(f"a handle of {length} bytes was mapped")
    return ""


def _garbage(client: Client) -> str:
    with client.slot("quick", COUNT) as slot:
        key = slot.region.segment.key.encode().ljust(HANDLE_LENGTH, b"\0")
        for handle in (bytes(HANDLE_LENGTH), key, secrets.token_bytes(HANDLE_LENGTH)):
            reason = client.refusal("quick", slot, slot.claiming(handle=handle))
            _require_words(reason, "regions[1] refused")
            require(handle.hex() not in reason and repr(handle) not in reason, "the reason shows a handle")
    return _brief(reason)


def _garbage_event(client: Client) -> str:
    with client.slot("late_by_event", COUNT) as slot:
        reason = client.refusal("late_by_event", slot, slot.claiming(event=bytes(HANDLE_LENGTH)))
        _require_words(reason, "regions[1].event")
    return _brief(reason)


def _no_such_device(client: Client) -> str:
    runtime = client.gpu.runtime
    with client.slot("quick", COUNT) as slot:
        reason = client.refusal("quick", slot, slot.claiming(device_uuid=NO_DEVICE))
        _require_words(reason, "that this model does not see")
    try:
        runtime.make_current(runtime.device_count())
    except CudaError as error:
        require(error.name == "CUDA_ERROR_INVALID_DEVICE", f"CUDA calls it {error.name}")
        return ""
    raise CheckFailedError("a device that does not exist was made current")


def _host_memory(client: Client) -> str:
    host = np.zeros(2**20, np.uint8)
    try:
        with client.gpu.runtime.on(0):
            client.gpu.runtime.export(host.ctypes.data)
    except CudaError as error:
        return f"exporting it: {error.name}"
    raise CheckFailedError("CUDA gave a handle of host memory")


def _good_after_bad(client: Client) -> str:
    with client.slot("quick", COUNT) as slot:
        client.refusal("quick", slot, slot.claiming(byte_size=2**50))
        _check_works(client, slot)
    return ""


def _check_works(client: Client, slot: DeviceSlot) -> None:
    gpu, values = client.gpu, numbers(COUNT)
    gpu.upload(slot.x, values)
    client.infer("quick", slot)
    require(bool((gpu.download(slot.y) == gpu.kernels.after_quick(values)).all()), "the output is wrong")


def _require_words(text: str, *words: str) -> None:
    for each in words:
        require(each in text, f"the reason does not say {each!r}: {text}")


def _brief(reason: str) -> str:
    return reason if len(reason) <= 200 else f"{reason[:200]}…"


CHECKS: Final[Mapping[str, Check]] = {
    "a size beyond the allocation is refused": _claimed_too_large,
    "freed memory is refused": _freed,
    "memory of the same process is refused": _same_process,
    "a handle of a wrong length is refused": _handle_length,
    "a handle that is garbage is refused, and not shown": _garbage,
    "an event that is garbage is refused": _garbage_event,
    "a device that does not exist is refused": _no_such_device,
    "host memory has no handle": _host_memory,
    "a slot is served after it was refused": _good_after_bad,
}
