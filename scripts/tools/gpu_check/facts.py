"""What the library relies on and only the driver can tell: what waits for a GPU, and who may open its memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Final

import numpy as np

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.runtime import BLOCK_BYTES, CudaRuntime

from ..figures import Figure
from .gpu import Gpu, LoadGpu, used_bytes
from .kernels import Gate, ask
from .report import NotOnAFakeError, Report, require

_HELD_S: Final = 0.2
_COUNT: Final = BLOCK_BYTES // 4
_NUMBERS: Final = np.arange(_COUNT, dtype=np.float32)


@contextlib.contextmanager
def another_process(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Run a function in a new process, with a connection to it for the block, at whose end the process ends."""
    context = multiprocessing.get_context("spawn")  # a forked child can use no CUDA
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(20.0)
        process.kill()
        process.join()


class VirtualMemory:
    """One block of GPU 0 by ``cuMemCreate``, mapped: new, or of a descriptor. CUDA IPC has no handle of it."""

    def __init__(self, runtime: CudaRuntime, descriptor: int | None = None, *, is_shared: bool = True) -> None:
        from cuda.bindings import driver  # noqa: PLC0415  # where the runtime is, it is too

        self.runtime = runtime
        self._kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        access = driver.CUmemAccessDesc()
        access.location.type, access.location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with runtime.on(0):
            if descriptor is None:
                properties = driver.CUmemAllocationProp()
                properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
                properties.location.type, properties.location.id = access.location.type, 0
                if is_shared:
                    properties.requestedHandleTypes = self._kind
                self._handle = ask("cuMemCreate", BLOCK_BYTES, properties, 0)
            else:
                self._handle = ask("cuMemImportFromShareableHandle", descriptor, self._kind)
            self.address = int(ask("cuMemAddressReserve", BLOCK_BYTES, 0, 0, 0))
            ask("cuMemMap", self.address, BLOCK_BYTES, 0, self._handle, 0)
            ask("cuMemSetAccess", self.address, BLOCK_BYTES, [access], 1)

    def array(self) -> DeviceArray:
        return DeviceArray(self.runtime, self.address, (_COUNT,), np.dtype(np.float32), 0, self)

    def export(self) -> int:
        with self.runtime.on(0):
            return int(ask("cuMemExportToShareableHandle", self._handle, self._kind, 0))

    def free(self) -> None:
        with self.runtime.on(0):
            ask("cuMemUnmap", self.address, BLOCK_BYTES)
            ask("cuMemAddressFree", self.address, BLOCK_BYTES)
            ask("cuMemRelease", self._handle)


def lend(connection: Connection, load: LoadGpu) -> None:
    """Send the IPC handle of a tensor with numbers, or the tensor as PyTorch's ``multiprocessing`` sends it."""
    gpu = load()
    tensor = gpu.kernels.tensor(_COUNT, 0)
    array = gpu.described(tensor)
    gpu.upload(array, _NUMBERS)
    if gpu.kernels.name == "torch" and not gpu.is_fake:
        import torch.multiprocessing  # noqa: F401, PLC0415  # teaches connections to send tensors

        connection.send(tensor)
    else:
        facts = gpu.runtime.pointer(array.address)
        connection.send((gpu.runtime.export(facts.base, facts.device), array.address - facts.base))
    with contextlib.suppress(EOFError):
        connection.recv()  # it lives until the receiver is done


def _look(connection: Connection, load: LoadGpu, user: int | None) -> None:
    """Open a handle and a descriptor, as another user if one is given, and tell what each gave."""
    handle, descriptor = connection.recv(), recv_handle(connection)
    if user is not None:
        os.setuid(user)
    told = []
    runtime = load().runtime
    openings: list[Callable[[], int]] = [
        lambda: runtime.open(handle, 0),
        lambda: VirtualMemory(runtime, descriptor).address,
    ]
    for opening in openings:
        try:
            array = DeviceArray(runtime, opening(), (_COUNT,), np.dtype(np.float32), 0, None)
            told.append("" if (array.to_host() == _NUMBERS).all() else "other numbers")
        except CudaError as error:
            told.append(str(error))
    connection.send(told)


def _make_context(connection: Connection, load: LoadGpu) -> None:
    load().runtime.make_current(0)
    connection.send(None)
    with contextlib.suppress(EOFError):
        connection.recv()


def _what_waits(gpu: Gpu, load: LoadGpu, gate: Gate) -> None:
    """The library frees and closes memory without another wait, and waits by itself before it unmaps."""
    runtime, stream = gpu.runtime, gpu.runtime.create_stream(0)
    target = runtime.allocate(BLOCK_BYTES, 0)
    with another_process(lend, load) as lender:
        handle, _ = lender.recv()
        for name, is_waiting, address in (
            ("cuMemFree", True, runtime.allocate(BLOCK_BYTES, 0)),
            ("cuIpcCloseMemHandle", True, runtime.open(handle, 0)),
            ("cuMemUnmap", False, None),
        ):
            if address is None and gpu.is_fake:
                raise NotOnAFakeError("a fake driver takes it for a violation to unmap memory beside work")
            end = VirtualMemory(runtime).free if address is None else partial(_end_of_memory, runtime, name, address)
            ending = threading.Thread(target=end)
            with gate.closed():
                gate.hold(runtime, stream, 0)
                with runtime.on(0):
                    ask("cuMemsetD32Async", target, 1, 1, stream)
                ending.start()
                ending.join(_HELD_S if is_waiting else 5.0)
                does_wait = ending.is_alive()
            ending.join()
            require(does_wait == is_waiting, f"{name} {'does not wait' if is_waiting else 'waits'} for the GPU")
    runtime.free(target, 0)
    runtime.destroy_stream(stream, 0)


def _end_of_memory(runtime: CudaRuntime, name: str, address: int) -> None:
    with runtime.on(0):
        ask(name, address)


def _opened(gpu: Gpu, load: LoadGpu, *, user: int | None = None) -> str:
    """Memory by a descriptor is opened in this process and in another one; memory by CUDA IPC in another one alone."""
    if user is not None and gpu.is_fake:
        raise NotOnAFakeError("another user cannot read the fake driver")
    runtime, memory = gpu.runtime, VirtualMemory(gpu.runtime)
    gpu.upload(memory.array(), _NUMBERS)
    own = gpu.described(gpu.kernels.tensor(_COUNT, 0))
    gpu.upload(own, _NUMBERS)
    descriptor = memory.export()
    try:
        again = VirtualMemory(runtime, descriptor)
        require(bool((gpu.download(again.array()) == _NUMBERS).all()), "this process has found other numbers there")
        again.free()
        with another_process(_look, load, user) as looker:
            looker.send(runtime.export(own.address, own.device))
            send_handle(looker, descriptor, None)
            told = looker.recv()
        require(not any(told), f"by its handle: {told[0] or 'right'}; by its descriptor: {told[1] or 'right'}")
    finally:
        os.close(descriptor)
        gpu.settle()
        memory.free()
    return "by a handle and by a descriptor"


def _context_bytes(gpu: Gpu, load: LoadGpu) -> list[Figure]:
    before = used_bytes(gpu.runtime)
    with another_process(_make_context, load) as other:
        other.recv()
        time.sleep(_HELD_S)
        size = used_bytes(gpu.runtime) - before
    return [Figure("the context of one more process", size / 2**20, "MiB", f"{size} bytes")]


def check_driver(report: Report, gpu: Gpu, load: LoadGpu, gate: Gate) -> None:
    checks: dict[str, Callable[[Gpu, LoadGpu], str | None]] = {
        "cuMemFree and cuIpcCloseMemHandle wait for the GPU, and cuMemUnmap does not": partial(_what_waits, gate=gate),
        "another process opens memory, and by a descriptor its own does, too": _opened,
    }
    if os.getuid() == 0:
        checks["a process of another user opens memory, too"] = partial(_opened, user=65_534)
    for name, check in checks.items():
        report.run("the driver", name, partial(check, gpu, load))
    report.measure("the driver", "bytes of a context", partial(_context_bytes, gpu, load))
