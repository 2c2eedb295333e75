"""The model's process: the real sample models, and some for the check alone, behind a pipe instead of a server."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import numpy as np

from shm_backend_utils.errors import MachineError
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.tensors.attributes import MemoryType
from shm_backend_utils.testing import fake_backend

from ...common.sample_models import REPOSITORY
from ..gpu import Gpu, LoadGpu

__all__ = ["ADDITIONS", "Answer", "serve"]

ADDITIONS: Final = 200
"""Kernels of one request to count_up: fewer than CUDA lets a stream have waiting."""

_FLOATS: Final = {"data_type": "TYPE_FP32", "dims": [-1]}
_IMAGES: Final = {"data_type": "TYPE_UINT8", "dims": [-1, -1, -1, 3]}
_NORMALIZED: Final = {"data_type": "TYPE_FP32", "dims": [-1, 3, -1, -1]}


class Answer(NamedTuple):
    """What comes back: why the request failed, or nothing; and what the model has to say."""

    error: str
    notes: dict[str, Any]


def serve(connection: Connection, load_gpu: LoadGpu) -> None:
    """Serve until the pipe is closed: a model's name and the text of its parameters come, an answer goes.

    No name at all asks how often the runtime has done what.
    """
    sys.modules[fake_backend.NAME] = fake_backend.module()
    gpu = load_gpu()
    sys.modules["cupy"] = gpu.cupy  # the very same, unless it stands for CuPy
    counts = gpu.counts
    models = _Models(gpu)
    connection.send("ready")
    while True:
        try:
            name, parameters = connection.recv()
        except (EOFError, OSError):
            break
        connection.send(models.answer(name, parameters) if name else Answer("", counts.so_far()))
    models.close()


class _Models:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._notes: dict[str, Any] = {}
        by_event, pinned = {"SHM_GPU_EVENTS": "true"}, {"SHM_PIN_HOST_MEMORY": "true"}
        self._models: dict[str, Any] = {
            "empty": _Empty(),
            "identity": _OwnModel("identity", self._identity, gpu),
            "look": _OwnModel("look", self._look, gpu),
            "dlpack": _OwnModel("dlpack", self._dlpack, gpu),
            "torch": _OwnModel("torch", self._torch, gpu),
            "count_up": _OwnModel("count_up", self._count_up, gpu),
            "count_up_by_event": _OwnModel("count_up_by_event", self._count_up, gpu, by_event),
            "to_device": _OwnModel("to_device", self._to_device, gpu),
            "to_device_pinned": _OwnModel("to_device_pinned", self._to_device, gpu, pinned),
        }
        self._models["gpu_multiply"] = _sample("gpu_multiply", {"INPUT0": _FLOATS}, {"OUTPUT0": _FLOATS}, gpu)
        self._models["gpu_normalize"] = _sample("gpu_normalize", {"IMAGES": _IMAGES}, {"NORMALIZED": _NORMALIZED}, gpu)
        self._outputs: dict[str, tuple[str, ...]] = {
            "empty": (),
            "to_device": (),
            "to_device_pinned": (),
            "gpu_normalize": ("NORMALIZED",),
        }

    def answer(self, name: str, parameters: str) -> Answer:
        self._notes = {}
        outputs = self._outputs.get(name, ("OUTPUT0",))
        (response,) = self._models[name].execute([fake_backend.Request(parameters, outputs)])
        return Answer("" if response.error is None else f"[{response.error.code}] {response.error}", self._notes)

    def close(self) -> None:
        for model in self._models.values():
            model.finalize()

    def _identity(self, call: Call) -> None:
        call.put("OUTPUT0", call.input("INPUT0"))

    def _look(self, call: Call) -> None:
        """Tell what the input is, and give it back."""
        x = call.input("INPUT0")
        attributes, runtime = x.attributes, self._gpu.runtime
        self._notes = {
            "is_on_gpu": attributes.memory_type is MemoryType.GPU,
            "byte_size": attributes.byte_size,
            "handle": attributes.cuda_ipc_handle,
            "uuid": runtime.device_uuid(attributes.memory_type_id),
            "extent": runtime.extent(runtime.address_of(call.to_device(x)))[1],
            "path": call.path,
            "current_device": runtime.current_device(),
            "values": call.to_host(x)[:64].copy(),
        }
        call.put("OUTPUT0", x)
        self._notes["current_device_after"] = runtime.current_device()

    def _dlpack(self, call: Call) -> None:
        """Write the output on one stream, hand it to another by DLPack, and read it there; the host waits for none."""
        gpu, runtime = self._gpu, self._gpu.runtime
        x = call.to_device(call.input("INPUT0"))
        y = call.device_output("OUTPUT0", x.shape, x.dtype)
        first, second = gpu.cupy.cuda.Stream(non_blocking=True), gpu.cupy.cuda.Stream(non_blocking=True)
        with first:
            self._add_up(x, y.cupy())
            capsule = y.__dlpack__(stream=second.ptr)
        with second:
            consumed = runtime.adopt(capsule)
            result = runtime.empty(x.shape, np.dtype(np.float32))
            gpu.double(consumed, result)
            expected = (gpu.download(x) + ADDITIONS) * 2
            is_right = bool((gpu.download(result) == expected).all())
        self._notes = {
            "is_right": is_right,
            "is_same_memory": runtime.address_of(consumed) == runtime.address_of(y.cupy()),
            "device": y.__dlpack_device__(),
            "refused": [_refuses(lambda given=given: y.__dlpack__(**given)) for given in _REFUSED],  # type: ignore[misc]
            "accepted": [y.__dlpack__(stream=stream) is not None for stream in (None, -1, 1, 2)],
        }

    def _torch(self, call: Call) -> None:
        """Let PyTorch write the output."""
        try:
            torch = self._gpu.import_torch()
        except ImportError as error:
            self._notes = {"missing": str(error)}
            call.put("OUTPUT0", call.input("INPUT0"))
            return
        x = call.input("INPUT0")
        y = call.device_output("OUTPUT0", x.shape, x.dtype)
        source, target = torch.from_dlpack(x), torch.from_dlpack(y)
        target.copy_(source * 2)
        self._notes = {"is_same_memory": target.data_ptr() == self._gpu.runtime.address_of(y.cupy())}

    def _count_up(self, call: Call) -> None:
        x = call.to_device(call.input("INPUT0"))
        self._add_up(x, call.device_output("OUTPUT0", x.shape, x.dtype).cupy())

    def _to_device(self, call: Call) -> None:
        """Copy the input, which is on the host, and tell how long that took."""
        runtime = self._gpu.runtime
        x = call.input("INPUT0")
        stream = runtime.stream_address(call.stream)
        runtime.synchronize(stream)
        begin = time.perf_counter()
        copied = call.to_device(x)
        runtime.synchronize(stream)
        self._notes = {
            "seconds": time.perf_counter() - begin,
            "memory_type": x.attributes.memory_type.name,
            "is_right": bool((self._gpu.download(copied[-64:]) == x.numpy()[-64:]).all()),
        }

    def _add_up(self, x: Any, y: Any) -> None:
        """Let y be x + 1, and add 1 again and again: who reads it too early sees too little. Wait for nothing."""
        self._gpu.add_one(x, y)
        for _ in range(ADDITIONS - 1):
            self._gpu.add_one(y, y)


_REFUSED: Final[list[dict[str, Any]]] = [
    {"stream": 0},
    {"stream": -2},
    {"stream": "1"},
    {"stream": True},
    {"dl_device": (1, 0)},
    {"copy": True},
]


def _refuses(export: Callable[[], object]) -> bool:
    try:
        export()
    except BufferError:
        return True
    return False


class _Empty:
    """A model that does nothing, without this library."""

    def execute(self, requests: list[Any]) -> list[Any]:
        return [fake_backend.Response() for _ in requests]

    def finalize(self) -> None:
        pass


class _OwnModel:
    """A model of the check's own."""

    def __init__(
        self, name: str, infer: Callable[[Call], None], gpu: Gpu, parameters: Mapping[str, str] | None = None
    ) -> None:
        arguments = _arguments(name, {"INPUT0": _FLOATS}, {"OUTPUT0": _FLOATS}, parameters or {})
        self._session = ShmSession.from_args(arguments, gpu.access)
        self._infer = infer

    def execute(self, requests: list[Any]) -> list[Any]:
        return self._session.serve(requests, self._infer)

    def finalize(self) -> None:
        self._session.close()


def _sample(name: str, inputs: dict[str, Any], outputs: dict[str, Any], gpu: Gpu) -> Any:
    """Load a sample model as Triton does, but with this process' CUDA."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / name / "1" / "model.py")
    if spec is None or spec.loader is None:
        raise MachineError(f"sample model {name!r} cannot be loaded; is the checkout whole?")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["CudaAccess"] = lambda: gpu.access
    model = module.TritonPythonModel()
    model.initialize(_arguments(name, inputs, outputs, {}))
    return model


def _arguments(
    name: str, inputs: dict[str, Any], outputs: dict[str, Any], parameters: Mapping[str, str]
) -> dict[str, str]:
    """Return what Triton passes to initialize."""
    config = {
        "name": name,
        "max_batch_size": 0,
        "input": [{"name": tensor, "optional": True, **what} for tensor, what in inputs.items()],
        "output": [{"name": tensor, **what} for tensor, what in outputs.items()],
        "parameters": {
            key: {"string_value": value}
            for key, value in {"SHM_PATHS": "direct,triton-shm,inline", **parameters}.items()
        },
    }
    return {"model_config": json.dumps(config), "model_instance_kind": "GPU", "model_instance_device_id": "0"}
