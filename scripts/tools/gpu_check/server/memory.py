"""Checks of memory of every kind: strided, virtual, another process', and what is alive when a process ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from shm_backend_utils.client import CopyWarning, ShmClient
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.testing.harness import ModelHarness

from ... import ROOT
from ..facts import VirtualMemory, another_process, lend
from ..gpu import load_fake_gpu, load_gpu
from ..kernels import Gate, Pitched, ask
from ..report import require
from .client import COUNT, NUMBERS, Check, ServerClient, write_models

_ROWS: Final = np.array([1, 2, 3], np.float32)


def _require_copied(client: ServerClient, x: Any, numbers: Any = NUMBERS) -> str:
    """Check that a call with this input is right, and tells that the input was copied; return what it tells."""
    with warnings.catch_warnings(record=True) as caught, client.renewed() as fresh:  # each client tells it once
        warnings.simplefilter("always", CopyWarning)
        fresh.require_quick(fresh.infer(x, count=numbers.size), numbers)
    warned = [str(each.message) for each in caught if issubclass(each.category, CopyWarning)]
    require(bool(warned), "no CopyWarning told that it was copied")
    return warned[0]


def _strided_inputs(client: ServerClient) -> str:
    for pitch in client.pitches:
        memory = client.gpu.new(2 * pitch // 4 + 1)
        for number, value in enumerate(_ROWS):
            client.gpu.upload(memory[number * pitch // 4 :][:1], np.array([value]))
        pitched = Pitched(memory, memory.address, _ROWS.size, pitch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CopyWarning)
            client.require_quick(client.infer(pitched, count=_ROWS.size), _ROWS, f"the output with pitch {pitch}")
    return f"pitches of {', '.join(map(str, client.pitches))} bytes"


def _strided_outputs(client: ServerClient) -> None:
    for pitch in client.pitches:
        x = client.filled(_ROWS)
        stream = client.gpu.kernels.stream(0)
        result = client.infer(x, count=_ROWS.size, cuda_stream=stream, parameters={"pitch": pitch})
        client.require_values(result["OUTPUT0"], _ROWS, f"the output with pitch {pitch}")


def _of_the_drivers_pool(client: ServerClient) -> str:
    runtime = client.gpu.runtime
    with runtime.on(0):
        address = int(ask("cuMemAllocAsync", COUNT * 4, 0))
    client.gpu.settle()
    array = DeviceArray(runtime, address, (COUNT,), np.dtype(np.float32), 0, None)
    client.gpu.upload(array, NUMBERS)
    try:
        return _require_copied(client, array)
    finally:
        client.gpu.settle()
        with runtime.on(0):
            ask("cuMemFreeAsync", address, 0)
        client.gpu.settle()


def _virtual(client: ServerClient) -> str:
    """Take memory of PyTorch's ``expandable_segments``, or of the driver's calls that these use."""
    if client.gpu.kernels.name != "torch" or client.gpu.is_fake:
        memory = VirtualMemory(client.gpu.runtime, is_shared=False)
        client.gpu.upload(memory.array(), NUMBERS)
        warned = _require_copied(client, memory.array())
        client.gpu.settle()
        memory.free()
        return warned
    import torch  # noqa: PLC0415  # it is loaded

    torch.cuda.empty_cache()  # or the tensor could lie in memory of before
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        tensor = client.filled()
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    return _require_copied(client, tensor)


def _of_another_process(client: ServerClient) -> str:
    load = partial(load_fake_gpu if client.gpu.is_fake else load_gpu, client.gpu.kernels.name)
    runtime = client.gpu.runtime
    with another_process(lend, load) as lender:
        received = lender.recv()
        if not isinstance(received, tuple):
            return _require_copied(client, received)
        handle, offset = received
        address = runtime.open(handle, 0)
        try:
            array = DeviceArray(runtime, address + offset, (COUNT,), np.dtype(np.float32), 0, None)
            return _require_copied(client, array)
        finally:
            client.gpu.settle()
            runtime.close(address, 0)


def alive_at_exit(client: ServerClient) -> None:
    library = client.gpu.kernels.name
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        gate, is_fake = Gate.create(), client.gpu.is_fake
        write_models(Path(folder), libraries=[library], gate=gate, is_fake=is_fake, is_served=False)
        model = Path(folder) / client.model("work")
        arguments = [str(model), library, "fake" if is_fake else "real"]
        command = [sys.executable, "-m", f"{__package__.rpartition('.')[0]}.leaving", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    wrong = f"it ended with {done.returncode}, and wrote: {done.stderr[-500:]}"
    require(done.returncode == 0 and done.stdout == "all alive\n" and "Traceback" not in done.stderr, wrong)


def in_one_process(client: ServerClient) -> None:
    """Client and model are one process, which shares its own memory with itself."""
    library = client.gpu.kernels.name
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        write_models(Path(folder), libraries=[library], gate=Gate.create(), is_fake=False, is_served=False)
        with (
            ModelHarness(Path(folder) / client.model("work")) as harness,
            ShmClient(harness, cuda=client.gpu.access) as shm,
        ):
            room = {"OUTPUT0": (NUMBERS.shape, np.float32, "cuda:0")}
            result = shm.infer(client.model("work"), {"INPUT0": client.filled()}, outputs=room, path="direct")
            client.require_quick(result)


CHECKS: Final[Mapping[str, Check]] = {
    "strided inputs are copied": _strided_inputs,
    "strided outputs are copied": _strided_outputs,
    "memory of the driver's pool is copied, and that is told": _of_the_drivers_pool,
    "virtual memory, as of expandable_segments, is copied, and that is told": _virtual,
    "memory of another process, as of torch.multiprocessing, is copied, and that is told": _of_another_process,
}
