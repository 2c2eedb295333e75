"""The model's process: real models, and some for this level alone, behind a pipe instead of a server."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.imported import imported
from shm_backend_utils.gpu.arrays.libraries import as_library
from shm_backend_utils.model import BatchCall, Call, ShmSession
from shm_backend_utils.tensors.dlpack import VERSION
from shm_backend_utils.tensors.view import MemoryType
from shm_backend_utils.testing.emulator import NAME

from ...lone_emulator import KeptAnswers, LoneServer, deliver_alone
from ..gpu import Gpu, LoadGpu
from ..report import raised, require

_WITHOUT_OUTPUTS: Final = ("to_device", "to_device_pinned")
BATCH_ROWS: Final = 2
"""How many rows each request to the model for batches has."""

_STEPS_BEFORE: Final = 50  # so that who does not wait is too early
_WRONG: Final[tuple[dict[str, Any], ...]] = (
    *({"stream": stream} for stream in (0, -2, "1", True)),
    {"dl_device": (1, 0)},
    {"copy": True},
)
"""Arguments of ``__dlpack__`` that it refuses."""

Answer = tuple[str, dict[str, Any]]
"""Why a request failed, or nothing; and what the model has to say."""


def serve(connection: Connection, load_gpu: LoadGpu) -> None:
    """Serve until the pipe is closed; no model's name at all asks how often the runtime has done what."""
    backend = LoneServer().backend
    sys.modules[NAME] = backend
    gpu = load_gpu()
    counts = gpu.counts
    models = _Models(gpu, backend)
    connection.send("ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, parameters = connection.recv()
            connection.send(models.answer(name, parameters) if name else ("", counts))
    models.close()


class _Models:
    def __init__(self, gpu: Gpu, backend: ModuleType) -> None:
        self._gpu = gpu
        self._backend = backend
        self._notes: dict[str, Any] = {}
        self._models: dict[str, Any] = {
            "look": self._own("look", self._look),
            "dlpack": self._own("dlpack", self._dlpack),
            "names_foreign": self._own("names_foreign", self._names_foreign),
            "to_device": self._own("to_device", self._to_device),
            "to_device_pinned": self._own("to_device_pinned", self._to_device, SHM_PIN_HOST_MEMORY="true"),
            "batch": self._own("batch", self._batch, max_batch_size=8),
        }
        for name in ("BF16", "BOOL"):
            self._models[f"library_{name}"] = self._own(f"library_{name}", self._library, name)
        for name, work, stream, more in (
            ("identity", "none", "unnamed", {}),
            ("quick", "quick", "named", {}),
            ("late", "late", "named", {}),
            ("late_unnamed", "late", "unnamed", {}),
            ("late_by_event", "late", "named", {"SHM_GPU_EVENTS": "true"}),
        ):
            parameters = {"LIBRARY": gpu.kernels.name, "WORK": work, "STREAM": stream, **more}
            self._models[name] = _gpu_work(name, gpu, parameters)

    def answer(self, name: str, parameters: tuple[Mapping[str, Any], ...]) -> Answer:
        self._notes = {}
        outputs = () if name in _WITHOUT_OUTPUTS else ("OUTPUT0",)
        carried = {"SHM": np.empty((BATCH_ROWS, 0), np.uint8)} if name == "batch" else {}
        requests = [deliver_alone(self._backend, each, outputs, carried, KeptAnswers()) for each in parameters]
        errors = [response.error() for response in self._models[name].execute(requests) if response.has_error()]
        told = [f"[{error.code().name}] {error.message()}" for error in errors]
        return "; ".join(told), self._notes

    def close(self) -> None:
        for model in self._models.values():
            model.finalize()

    def _own(
        self, name: str, infer: Callable[[Any], None], data_type: str = "FP32", max_batch_size: int = 0, **more: str
    ) -> SimpleNamespace:
        tensor = {"data_type": f"TYPE_{data_type}", "dims": [-1]}
        inputs = {"INPUT0": tensor, **({"SHM": {"data_type": "TYPE_UINT8", "dims": [-1]}} if max_batch_size else {})}
        arguments = _arguments(name, inputs, more, max_batch_size)
        session = ShmSession.from_args(arguments, self._gpu.access)
        serve = session.serve_batch if max_batch_size else session.serve
        return SimpleNamespace(execute=lambda requests: serve(requests, infer), finalize=session.close)

    def _look(self, call: Call) -> None:
        x = call.input("INPUT0")
        attributes, runtime = x.attributes, self._gpu.runtime
        self._notes = {
            "is_on_gpu": attributes.memory_type is MemoryType.GPU,
            "byte_size": attributes.byte_size,
            "handle": attributes.cuda_ipc_handle,
            "uuid": runtime.device_uuid(attributes.memory_type_id),
            "extent": runtime.extent(x.array.address, x.array.device)[1],
            "path": call.path,
            "values": call.to_host(x)[:64].copy(),
        }
        call.put("OUTPUT0", x)

    def _dlpack(self, call: Call) -> None:
        """Write the output on one stream, hand it to another by DLPack, and read it there; the host waits for none."""
        gpu, given = self._gpu, call.input("INPUT0")
        y = call.device_output("OUTPUT0", given.shape, given.dtype)
        x = call.to_device(given)
        runtime, device, array = gpu.runtime, y.device, y.array
        first, second = runtime.create_stream(device), runtime.create_stream(device)
        target, scratch = (gpu.described(gpu.kernels.tensor(x.size, device)) for _ in range(2))
        with runtime.on(device):
            x.let_wait(first, device)
            for _ in range(_STEPS_BEFORE):
                runtime.copy(scratch.address, x.address, array.nbytes, first)
            runtime.copy(array.address, x.address, array.nbytes, first)
        written = DeviceArray(runtime, array.address, array.shape, array.dtype, device, array, written_on=first)
        with runtime.on(device):
            capsule = written.__dlpack__(stream=second, max_version=VERSION)  # as another library takes it
        consumed = imported(runtime, capsule, second)
        with runtime.on(device):
            runtime.copy(target.address, consumed.address, x.nbytes, second)
        runtime.synchronize_stream(second, device)
        is_right = bool((gpu.download(target) == gpu.download(x)).all())
        require(is_right, "the consumer read before the producer had written")
        require(consumed.address == array.address, "the consumer got a copy")
        require(y.__dlpack_device__() == (2, 0), f"__dlpack_device__ returned {y.__dlpack_device__()}")
        for wrong in _WRONG:
            raised(BufferError, f"a wrong argument of __dlpack__ was taken: {wrong}", y.__dlpack__, **wrong)
        for stream in (None, -1, 1, 2):
            y.__dlpack__(stream=stream)

    def _library(self, call: Call) -> None:
        """Take input and output as arrays of the library, of whatever type, and let that copy one to the other."""
        gpu, x = self._gpu, call.input("INPUT0").array
        y = call.device_output("OUTPUT0", x.shape, x.dtype).array
        if gpu.kernels.name == "neither":
            gpu.kernels.quick(x, y, gpu.stream)
            gpu.runtime.synchronize_stream(gpu.stream, y.device)
            return
        source, target = as_library(x, gpu.kernels.name), as_library(y, gpu.kernels.name)
        addresses = [imported(gpu.runtime, array, gpu.stream).address for array in (source, target)]
        if gpu.kernels.name == "torch":
            target.copy_(source)
        else:
            target[...] = source
        require(addresses == [x.address, y.address], "the library got a copy")
        self._notes = {"type": str(target.dtype)}

    def _batch(self, batch: BatchCall) -> None:
        x = batch.input("INPUT0")
        self._notes = {"kind": type(x).__name__, "rows": x.shape[0]}
        batch.put("OUTPUT0", x)

    def _names_foreign(self, call: Call) -> None:
        call.input("INPUT0")
        call.ready_on(self._gpu.runtime.create_stream(self._gpu.runtime.device_count() - 1))
        call.put("OUTPUT0", call.input("INPUT0"))

    def _to_device(self, call: Call) -> None:
        gpu = self._gpu
        x = call.input("INPUT0")
        gpu.runtime.synchronize_device(0)
        begin = time.perf_counter()
        copied = call.to_device(x)
        gpu.runtime.synchronize_device(0)
        self._notes = {"seconds": time.perf_counter() - begin, "memory_type": x.attributes.memory_type.name}
        require(bool((gpu.download(copied[-64:]) == x.numpy()[-64:]).all()), "the copy differs from what was copied")


def _gpu_work(name: str, gpu: Gpu, parameters: Mapping[str, str]) -> Any:
    """Load a model as Triton does, but with this process' CUDA, whose calls are counted."""
    module = importlib.import_module("scripts.tools.gpu_check.models.gpu_work.1.model")
    vars(module)["CudaAccess"] = lambda: gpu.access
    model = module.TritonPythonModel()
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    model.initialize(_arguments(name, {"INPUT0": tensor}, parameters, 0))
    return model


def _arguments(name: str, inputs: dict[str, Any], parameters: Mapping[str, str], max_batch_size: int) -> dict[str, str]:
    settings = {"SHM_PATHS": "direct,triton-shm,inline", **parameters}
    config = {
        "name": name,
        "max_batch_size": max_batch_size,
        "input": [{"name": tensor, "optional": True, **what} for tensor, what in inputs.items()],
        "output": [{"name": "OUTPUT0", **inputs["INPUT0"]}],
        "parameters": {key: {"string_value": value} for key, value in settings.items()},
    }
    return {"model_config": json.dumps(config), "model_instance_kind": "GPU", "model_instance_device_id": "0"}
