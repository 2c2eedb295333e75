"""Checks that memory of a GPU is shared rightly: what must be served is, where it is and in every type."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.memory import locks
from shm_backend_utils.protocol.results import OutputPlace

from ..report import require
from .client import Check, Client
from .model import BATCH_ROWS
from .slots import DeviceSlot, LentSlot

COUNT: Final = 2**19
"""FP32 numbers: 2 MiB."""

_SEED: Final = 1


def numbers() -> npt.NDArray[np.float32]:
    return np.random.default_rng(_SEED).standard_normal(COUNT, np.float32)


def serve_quickly(client: Client, slot: DeviceSlot, values: npt.NDArray[np.float32]) -> None:
    client.gpu.upload(slot.x, values)
    client.infer(slot)
    client.check_output(slot, client.gpu.kernels.after_quick(values), "the output is wrong")


def _handle_round_trip(client: Client) -> str:
    gpu = client.gpu
    with client.slot("look", COUNT) as slot:
        values = numbers()
        gpu.upload(slot.x, values)
        seen = client.infer(slot)
        require(seen["path"] == "direct" and seen["is_on_gpu"], f"the model saw an input elsewhere: {seen}")
        require(seen["handle"] == slot.allocation.handle, "the model saw another handle")
        require(seen["uuid"] == slot.allocation.device_uuid, "the model saw another GPU")
        require(seen["byte_size"] == values.nbytes, f"the model saw {seen['byte_size']} bytes of {values.nbytes}")
        require(bool((seen["values"] == values[:64]).all()), "the model saw other values")
        return f"an allocation of {slot.allocation.byte_size} bytes has {seen['extent']} in the other process"


def _small_allocations(client: Client) -> str:
    extents = set()
    with contextlib.ExitStack() as stack:
        slots = [stack.enter_context(client.slot("look", 256, out_shape=(0,))) for _ in range(8)]
        for number, slot in enumerate(slots):
            client.gpu.upload(slot.x, np.full(256, number, np.float32))
        require(len({slot.allocation.handle for slot in slots}) == len(slots), "two allocations have one handle")
        for number, slot in enumerate(slots):
            seen = client.infer(slot)
            extents.add(seen["extent"])
            is_right = bool((seen["values"] == number).all())
            require(is_right, f"the model saw the memory of another slot in slot {number}")
            require(seen["extent"] <= slot.allocation.byte_size, "the handle opens more than the slot's allocation")
    return f"1.25 KiB have {sorted(extents)} bytes in the other process"


def _mutation(client: Client) -> None:
    with client.slot("quick", COUNT) as slot:
        before = client.model.counts()["open"]
        for turn in range(3):
            serve_quickly(client, slot, numbers() + np.float32(turn))
        opened = client.model.counts()["open"] - before
        require(opened == 1, f"the model opened the memory {opened} times for 3 requests")


def _pass_through(client: Client) -> None:
    with client.slot("identity", COUNT, out_shape=(0,)) as slot:
        client.infer(slot)
        (place,) = slot.results.outputs
        expected = OutputPlace("OUTPUT0", BY_NAME["FP32"], (COUNT,), 1, 0, COUNT * 4, is_in_response=False)
        require(place == expected, f"the output is said to be {place}")


def _dlpack(client: Client) -> None:
    with client.slot("dlpack", COUNT) as slot:
        client.gpu.upload(slot.x, np.arange(COUNT, dtype=np.float32) % 1000)
        client.infer(slot)  # the model checks


def _lent(client: Client) -> str:
    gpu = client.gpu
    own = gpu.described(gpu.kernels.tensor(2 * COUNT, 0))
    tensor, values = own[COUNT // 2 :][:COUNT], numbers()
    require(gpu.runtime.pointer(tensor.address).is_exportable, "the library's memory cannot be exported")
    gpu.upload(tensor, values)
    with client.kept(LentSlot(gpu, "quick", tensor)) as slot:
        before = client.model.counts()
        for turn in range(3):
            client.infer(slot)
            is_borrowed = locks.has_borrowers(slot.region.segment.fileno(), slot.region.record_offset(0))
            require(not is_borrowed, f"the model has the tensor still mapped after turn {turn}")
            client.check_output(slot, gpu.kernels.after_quick(values), f"the output is wrong in turn {turn}")
        opened = client.model.counts()["open"] - before["open"]
        require(opened == 4, f"the model opened {opened} handles; expected 3 times the tensor's, and once the output's")
        return f"it lies {slot.offset} bytes behind the beginning of its allocation"


def _library_type(client: Client, name: str) -> str:
    dtype = BY_NAME[name].numpy
    with client.slot(f"library_{name}", COUNT, dtype=dtype) as slot:
        patterns = np.random.default_rng(_SEED).integers(0, 2, COUNT * dtype.itemsize, np.uint8)
        client.gpu.upload(slot.x, patterns.view(dtype))
        notes = client.infer(slot)
        copied = client.gpu.download(slot.y)
        require(bool((copied.view(np.uint8) == patterns).all()), "the library has written other bytes")
    return f"as {notes['type']}" if notes else ""


def _batch(client: Client) -> None:
    """Two slots of one client and one device: their rows are gathered there, and none crosses to the host."""
    gpu, rows, width = client.gpu, BATCH_ROWS, COUNT // 2
    with contextlib.ExitStack() as stack:
        slots = [stack.enter_context(client.slot("batch", rows, width)) for _ in range(2)]
        for number, slot in enumerate(slots):
            gpu.upload(slot.x, np.full((rows, width), number, np.float32))
        notes = client.infer(*slots)
        require(notes["kind"] == "DeviceView", f"the batch's input was a {notes['kind']}; expected a DeviceView")
        require(notes["rows"] == 2 * rows, f"the batch had {notes['rows']} rows; expected {2 * rows}")
        for number, slot in enumerate(slots):
            client.check_output(slot, number, f"the output of request {number} is wrong")


def _other_gpus(client: Client) -> str:
    gpu = client.gpu
    devices = range(gpu.runtime.device_count())
    with contextlib.ExitStack() as stack:
        slots = [stack.enter_context(client.slot("late", COUNT, device=device)) for device in devices]
        for slot in slots:
            gpu.upload(slot.x, np.full(COUNT, slot.x.device, np.float32))
        client.infer(*slots)  # one execute, with a stream of each
        for slot in slots:
            expected = gpu.kernels.after_late(np.full(COUNT, slot.x.device, np.float32))
            client.check_output(slot, expected, f"the output on GPU {slot.x.device} is wrong")
    return f"{len(devices)} GPUs in one execute"


CHECKS: Final[Mapping[str, Check]] = {
    "an IPC handle leads another process to the same memory": _handle_round_trip,
    "small allocations have handles of their own, and blocks of their own": _small_allocations,
    "what one process writes the other reads, without opening again": _mutation,
    "an input that is passed on stays where it is": _pass_through,
    "a tensor inside another allocation is used where it is, and unmapped before the answer": _lent,
    "DLPack hands memory from stream to stream in order": _dlpack,
    "BF16 passes without a copy": functools.partial(_library_type, name="BF16"),
    "bool passes without a copy": functools.partial(_library_type, name="BOOL"),
    "a batch on one GPU stays there": _batch,
}
OF_SEVERAL_GPUS: Final[Mapping[str, Check]] = {"several GPUs serve one execute, each in order": _other_gpus}
