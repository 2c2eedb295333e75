"""Checks that what must be refused is, with its cause named, and that host memory is pinned where it is to be."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.mappings import CudaMappings
from shm_backend_utils.gpu.runtime import HANDLE_LENGTH

from ..report import Amounts, CheckFailedError, Figure, Report, name_of, require
from .client import Check, Client
from .memory import COUNT, numbers
from .slots import DeviceSlot, HostSlot

PINNED_COUNT: Final = 2**19
REQUESTS: Final = 3
TIMES_AS_FAST: Final = 3.0
_UNPINNED_S: Final = 20.0
_PAUSE_S: Final = 0.05
_WARM_UP_ROUNDS: Final = 3

NO_DEVICE: Final = "0123456789abcdef" * 2


def _pinned_once(client: Client) -> str:
    model = "to_device_pinned"
    before = client.model.counts()
    with client.host_slot(model, np.arange(PINNED_COUNT, dtype=np.float32)) as slot:
        for _ in range(REQUESTS):
            _copy(client, model, slot, "CPU_PINNED")
        pinned = client.model.counts()["pin"] - before["pin"]
        require(pinned == 1, f"the model pinned memory {pinned} times for {REQUESTS} requests")
    deadline = time.monotonic() + _UNPINNED_S
    while client.model.counts()["unpin"] == before["unpin"]:
        require(time.monotonic() < deadline, f"the model has not undone it {_UNPINNED_S:g} s after it was given up")
        time.sleep(_PAUSE_S)
    unpinned = client.model.counts()["unpin"] - before["unpin"]
    require(unpinned == 1, f"the model has undone it {unpinned} times; expected once")
    return ""


def _pageable_otherwise(client: Client) -> str:
    before = client.model.counts()["pin"]
    with client.host_slot("to_device", np.arange(PINNED_COUNT, dtype=np.float32)) as slot:
        _copy(client, "to_device", slot, "CPU")
    require(client.model.counts()["pin"] == before, "the model has pinned memory that it was not asked to")
    return ""


PINNED: Final[Mapping[str, Check]] = {
    "SHM_PIN_HOST_MEMORY pins a region once, and undoes it": _pinned_once,
    "without it memory stays pageable": _pageable_otherwise,
}


def measure(report: Report, group: str, client: Client, amounts: Amounts) -> str:
    """Measure what to_device takes inside the model, from pinned and from pageable memory."""
    values = np.arange(amounts.large_bytes // 4, dtype=np.float32)
    seconds: dict[str, list[float]] = {"CPU": [], "CPU_PINNED": []}
    with client.host_slot("to_device", values) as pageable, client.host_slot("to_device_pinned", values) as pinned:
        for round_number in range(-min(_WARM_UP_ROUNDS, amounts.slow_rounds), amounts.slow_rounds):
            for model, slot, kind in (("to_device", pageable, "CPU"), ("to_device_pinned", pinned, "CPU_PINNED")):
                taken = _copy(client, model, slot, kind)["seconds"]
                if round_number >= 0:
                    seconds[kind].append(taken)
    slow, fast = (statistics.median(seconds[kind]) * 1e3 for kind in ("CPU", "CPU_PINNED"))
    name = f"pinned to_device of {name_of(amounts.large_bytes)}"
    basis = f"{slow:.4f} ms / {fast:.4f} ms"
    return report.measured(
        Figure(name, slow / fast, "times as fast as from pageable memory", basis, at_least=TIMES_AS_FAST, group=group)
    )


def _copy(client: Client, model: str, slot: HostSlot, kind: str) -> dict[str, Any]:
    notes = client.infer(model, slot)
    require(notes["memory_type"] == kind, f"the model's memory is {notes['memory_type']}; expected {kind}")
    require(notes["is_right"], "the copy differs from what was copied")
    return notes


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
    client.check_output(slot, gpu.kernels.after_quick(values), "the output is wrong")


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
