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

from ...figures import in_words
from ..report import Amounts, Figure, in_turns, raised, ratio, require
from .client import Check, Client, worded
from .memory import COUNT, numbers, serve_quickly
from .slots import HostSlot

_REQUESTS: Final = 3
_TIMES_AS_FAST: Final = 3.0
_UNPINNED_S: Final = 20.0
_PAUSE_S: Final = 0.05

_NO_DEVICE: Final = "0123456789abcdef" * 2


def _pinned_once(client: Client) -> None:
    before = client.model.counts()
    with client.kept(HostSlot("to_device_pinned", np.arange(COUNT, dtype=np.float32))) as slot:
        for _ in range(_REQUESTS):
            _copy(client, slot, "CPU_PINNED")
        pinned = client.model.counts()["pin"] - before["pin"]
        require(pinned == 1, f"the model pinned memory {pinned} times for {_REQUESTS} requests")
    deadline = time.monotonic() + _UNPINNED_S
    while client.model.counts()["unpin"] == before["unpin"]:
        require(time.monotonic() < deadline, f"the model has not undone it {_UNPINNED_S:g} s after it was given up")
        time.sleep(_PAUSE_S)
    unpinned = client.model.counts()["unpin"] - before["unpin"]
    require(unpinned == 1, f"the model has undone it {unpinned} times; expected once")


def _pageable_otherwise(client: Client) -> None:
    before = client.model.counts()["pin"]
    with client.kept(HostSlot("to_device", np.arange(COUNT, dtype=np.float32))) as slot:
        _copy(client, slot, "CPU")
    require(client.model.counts()["pin"] == before, "the model has pinned memory that it was not asked to")


def measure(client: Client, amounts: Amounts) -> list[Figure]:
    values = np.arange(amounts.large_bytes // 4, dtype=np.float32)
    pageable, pinned = HostSlot("to_device", values), HostSlot("to_device_pinned", values)
    with client.kept(pageable), client.kept(pinned):
        seconds = in_turns(
            {
                "pageable": lambda _: _copy(client, pageable, "CPU"),
                "pinned": lambda _: _copy(client, pinned, "CPU_PINNED"),
            },
            amounts.slow_rounds,
        )
    slow, fast = (statistics.median(each) * 1e3 for each in seconds.values())
    name, unit = f"pinned to_device of {in_words(amounts.large_bytes)}", "times as fast as from pageable memory"
    return [ratio(name, slow, fast, unit, at_least=_TIMES_AS_FAST)]


def _copy(client: Client, slot: HostSlot, kind: str) -> float:
    notes: dict[str, Any] = client.infer(slot)
    require(notes["memory_type"] == kind, f"the model's memory is {notes['memory_type']}; expected {kind}")
    return float(notes["seconds"])


def _claimed_too_large(client: Client) -> None:
    with client.slot("quick", COUNT) as slot:
        size = slot.allocation.byte_size
        for claimed in (size * 2 + 2**22, 2**50):
            client.refusal(slot, slot.claiming(byte_size=claimed), f"claims {claimed} bytes of an allocation of ")
        client.infer(slot)


def _freed(client: Client) -> str:
    with client.slot("quick", COUNT) as slot:
        slot.free_on_device()
        return client.refusal(slot, None, "regions[1] refused", "freed")


def _same_process(client: Client) -> str:
    with client.slot("quick", COUNT) as slot:
        return _unmappable(client, slot.allocation.handle, slot.allocation.byte_size, "exported by this very process")


def _handle_length(client: Client) -> None:
    with client.slot("quick", COUNT) as slot:
        for length in (0, HANDLE_LENGTH - 1, HANDLE_LENGTH + 1):
            handle = slot.allocation.handle.ljust(HANDLE_LENGTH + 1, b"\0")[:length]
            encoded = slot.claiming_handle_length(length)
            client.refusal(slot, encoded, "regions[1].name_length", "64, as a CUDA IPC handle has")
            _unmappable(client, handle, 1, f"its handle has {length} bytes; expected 64")


def _unmappable(client: Client, handle: bytes, byte_size: int, words: str) -> str:
    mappings = CudaMappings(client.gpu.runtime)
    error = raised(RegionRefusedError, "it was mapped", mappings.map, handle, byte_size, 0, "the memory")
    return worded(str(error), words)


def _garbage(client: Client) -> str:
    with client.slot("quick", COUNT) as slot:
        key = slot.region.segment.key.encode().ljust(HANDLE_LENGTH, b"\0")
        for handle in (bytes(HANDLE_LENGTH), key, secrets.token_bytes(HANDLE_LENGTH)):
            reason = client.refusal(slot, slot.claiming(handle=handle), "regions[1] refused")
            require(handle.hex() not in reason and repr(handle) not in reason, "the reason shows a handle")
    return reason


def _no_such_device(client: Client) -> None:
    runtime = client.gpu.runtime
    with client.slot("quick", COUNT) as slot:
        client.refusal(slot, slot.claiming(device_uuid=_NO_DEVICE), "that this model does not see")
    otherwise = "a device that does not exist was made current"
    error = raised(CudaError, otherwise, runtime.make_current, runtime.device_count())
    require(error.name == "CUDA_ERROR_INVALID_DEVICE", f"CUDA calls it {error.name}")


def _host_memory(client: Client) -> str:
    host, runtime = np.zeros(2**20, np.uint8), client.gpu.runtime
    with runtime.on(0):
        error = raised(CudaError, "CUDA gave a handle of host memory", runtime.export, host.ctypes.data)
    return f"exporting it: {error.name}"


def _good_after_bad(client: Client) -> None:
    with client.slot("quick", COUNT) as slot:
        client.refusal(slot, slot.claiming(byte_size=2**50))
        serve_quickly(client, slot, numbers())


CHECKS: Final[Mapping[str, Check]] = {
    "SHM_PIN_HOST_MEMORY pins a region once, and undoes it": _pinned_once,
    "without it memory stays pageable": _pageable_otherwise,
    "a size beyond the allocation is refused": _claimed_too_large,
    "freed memory is refused": _freed,
    "memory of the same process is refused": _same_process,
    "a handle of a wrong length is refused": _handle_length,
    "a handle that is garbage is refused, and not shown": _garbage,
    "a device that does not exist is refused": _no_such_device,
    "host memory has no handle": _host_memory,
    "a slot is served after it was refused": _good_after_bad,
}
