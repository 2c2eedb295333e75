"""The model's process: real models, and some for this level alone, behind a pipe instead of a server."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

from shm_backend_utils.cli.common.server import REPOSITORY
from shm_backend_utils.errors import MachineError
from shm_backend_utils.model import BatchCall, Call, ShmSession
from shm_backend_utils.tensors.attributes import MemoryType
from shm_backend_utils.testing.emulator import NAME

from ...lone_emulator import KeptAnswers, LoneServer, deliver_alone
from ..gpu import Gpu, LoadGpu
from .consumers import hand_over, library_arrays

_OWN_MODELS: Final = Path(__file__).resolve().parents[1] / "models"
_OUTPUT: Final = ("OUTPUT0",)
BATCH_ROWS: Final = 2
"""How many rows each request to the model for batches has."""


class Answer(NamedTuple):
    """What comes back: why a request failed, or nothing; and what the model has to say."""

    error: str
    notes: dict[str, Any]


def serve(connection: Connection, load_gpu: LoadGpu) -> None:
    """Serve until the pipe is closed: a model's name and the texts of its requests' parameters come, an answer goes.

    No name at all asks how often the runtime has done what.
    """
    backend = LoneServer().backend
    sys.modules[NAME] = backend
    gpu = load_gpu()
    counts = gpu.counts
    models = _Models(gpu, backend)
    connection.send("ready")
    while True:
        try:
            name, parameters = connection.recv()
        except (EOFError, OSError):
            break
        connection.send(models.answer(name, parameters) if name else Answer("", counts.so_far()))
    models.close()


class _Models:
    def __init__(self, gpu: Gpu, backend: ModuleType) -> None:
        self._gpu = gpu
        self._backend = backend
        self._notes: dict[str, Any] = {}
        self._models: dict[str, Any] = {
            "empty": _Empty(backend),
            "identity": self._own("identity", self._identity),
            "look": self._own("look", self._look),
            "dlpack": self._own("dlpack", self._dlpack),
            "names_foreign": self._own("names_foreign", self._names_foreign),
            "to_device": self._own("to_device", self._to_device),
            "to_device_pinned": self._own("to_device_pinned", self._to_device, SHM_PIN_HOST_MEMORY="true"),
        }
        for name in ("BF16", "BOOL"):
            self._models[f"library_{name}"] = self._own(f"library_{name}", self._library, data_type=name)
        for name, work, stream, more in (
            ("quick", "quick", "named", {}),
            ("late", "late", "named", {}),
            ("late_unnamed", "late", "unnamed", {}),
            ("late_by_event", "late", "named", {"SHM_GPU_EVENTS": "true"}),
        ):
            parameters = {"LIBRARY": gpu.kernels.name, "WORK": work, "STREAM": stream, **more}
            self._models[name] = _loaded(_OWN_MODELS / "gpu_work", name, gpu, parameters)
        self._models["batch"] = _OwnModel("batch", self._batch, gpu, "FP32", {}, max_batch_size=8)
        if gpu.kernels.name == "cupy":
            for name in ("gpu_multiply", "gpu_normalize"):
                self._models[name] = _loaded(REPOSITORY / name, name, gpu, {})
        self._outputs: dict[str, tuple[str, ...]] = {
            "empty": (),
            "to_device": (),
            "to_device_pinned": (),
            "gpu_normalize": ("NORMALIZED",),
        }

    def answer(self, name: str, parameters: tuple[str, ...]) -> Answer:
        self._notes = {}
        outputs = self._outputs.get(name, _OUTPUT)
        carried = {"SHM": np.empty((BATCH_ROWS, 0), np.uint8)} if name == "batch" else {}
        requests = [
            deliver_alone(self._backend, json.loads(each or "{}"), outputs, carried, KeptAnswers())
            for each in parameters
        ]
        errors = [response.error() for response in self._models[name].execute(requests) if response.has_error()]
        told = [f"[{error.code().name}] {error.message()}" for error in errors]
        return Answer("; ".join(told), self._notes)

    def close(self) -> None:
        for model in self._models.values():
            model.finalize()

    def _own(self, name: str, infer: Callable[[Call], None], data_type: str = "FP32", **parameters: str) -> _OwnModel:
        return _OwnModel(name, infer, self._gpu, data_type, parameters)

    def _identity(self, call: Call) -> None:
        call.put("OUTPUT0", call.input("INPUT0"))

    def _look(self, call: Call) -> None:
        """Tell what the input is, and give it back."""
        x = call.input("INPUT0")
        attributes, runtime = x.attributes, self._gpu.runtime
        self._notes = {
            "is_on_gpu": attributes.memory_type is MemoryType.GPU,
            "device": attributes.memory_type_id,
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
        x = call.input("INPUT0")
        y = call.device_output("OUTPUT0", x.shape, x.dtype)
        self._notes = hand_over(self._gpu, call.to_device(x), y)

    def _library(self, call: Call) -> None:
        """Take input and output as arrays of the library, and let that copy one to the other."""
        x = call.input("INPUT0")
        y = call.device_output("OUTPUT0", x.shape, x.dtype)
        self._notes = library_arrays(self._gpu, x.array, y.array)

    def _batch(self, batch: BatchCall) -> None:
        """Give the batch back, and tell where it was."""
        x = batch.input("INPUT0")
        self._notes = {"kind": type(x).__name__, "rows": x.shape[0]}
        batch.put("OUTPUT0", x)

    def _names_foreign(self, call: Call) -> None:
        """Name a stream of a GPU that the call does not use."""
        call.input("INPUT0")
        call.ready_on(self._gpu.runtime.create_stream(self._gpu.runtime.device_count() - 1))
        call.put("OUTPUT0", call.input("INPUT0"))

    def _to_device(self, call: Call) -> None:
        """Copy the input, which is on the host, and tell how long that took."""
        gpu = self._gpu
        x = call.input("INPUT0")
        gpu.runtime.synchronize_device(0)
        begin = time.perf_counter()
        copied = call.to_device(x)
        gpu.runtime.synchronize_device(0)
        self._notes = {
            "seconds": time.perf_counter() - begin,
            "memory_type": x.attributes.memory_type.name,
            "is_right": bool((gpu.download(copied[-64:]) == x.numpy()[-64:]).all()),
        }


class _Empty:
    """A model that does nothing, without this library."""

    def __init__(self, backend: ModuleType) -> None:
        self._backend = backend

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._backend.InferenceResponse([]) for _ in requests]

    def finalize(self) -> None:
        pass


class _OwnModel:
    """A model of this level's own. One that takes batches is called for a batch, else for each request."""

    def __init__(
        self,
        name: str,
        infer: Callable[[Any], None],
        gpu: Gpu,
        data_type: str,
        parameters: Mapping[str, str],
        max_batch_size: int = 0,
    ) -> None:
        tensor = {"data_type": f"TYPE_{data_type}", "dims": [-1]}
        inputs = {"INPUT0": tensor}
        if max_batch_size:
            inputs["SHM"] = {"data_type": "TYPE_UINT8", "dims": [-1]}
        arguments = _arguments(name, inputs, {"OUTPUT0": tensor}, parameters, max_batch_size)
        self._session = ShmSession.from_args(arguments, gpu.access)
        self._serve: Any = self._session.serve_batch if max_batch_size else self._session.serve
        self._infer = infer

    def execute(self, requests: list[Any]) -> list[Any]:
        responses: list[Any] = self._serve(requests, self._infer)
        return responses

    def finalize(self) -> None:
        self._session.close()


_FP32: Final = {"data_type": "TYPE_FP32", "dims": [-1]}
_IMAGES: Final = {"data_type": "TYPE_UINT8", "dims": [-1, -1, -1, 3]}
_NORMALIZED: Final = {"data_type": "TYPE_FP32", "dims": [-1, 3, -1, -1]}


def _loaded(folder: Path, name: str, gpu: Gpu, parameters: Mapping[str, str]) -> Any:
    """Load a model as Triton does, but with this process' CUDA, whose calls are counted."""
    spec = importlib.util.spec_from_file_location(name, folder / "1" / "model.py")
    if spec is None or spec.loader is None:
        raise MachineError(f"model {name!r} cannot be loaded; is the checkout whole?")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["CudaAccess"] = lambda: gpu.access
    model = module.TritonPythonModel()
    inputs, outputs = {"INPUT0": _FP32}, {"OUTPUT0": _FP32}
    if name == "gpu_normalize":
        inputs, outputs = {"IMAGES": _IMAGES}, {"NORMALIZED": _NORMALIZED}
    model.initialize(_arguments(name, inputs, outputs, parameters, 0))
    return model


def _arguments(
    name: str, inputs: dict[str, Any], outputs: dict[str, Any], parameters: Mapping[str, str], max_batch_size: int
) -> dict[str, str]:
    """Return what Triton passes to initialize."""
    config = {
        "name": name,
        "max_batch_size": max_batch_size,
        "input": [{"name": tensor, "optional": True, **what} for tensor, what in inputs.items()],
        "output": [{"name": tensor, **what} for tensor, what in outputs.items()],
        "parameters": {
            key: {"string_value": value}
            for key, value in {"SHM_PATHS": "direct,triton-shm,inline", **parameters}.items()
        },
    }
    return {"model_config": json.dumps(config), "model_instance_kind": "GPU", "model_instance_device_id": "0"}
