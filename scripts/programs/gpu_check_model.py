"""The model's process: the real sample models, and some for the check alone, behind a pipe instead of a server."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import gpu_check_backend
import numpy as np
from gpu_check_gpu import Gpu, LoadGpu
from sample_models import REPOSITORY

from shm_backend_utils.attributes import MemoryType
from shm_backend_utils.errors import MachineError
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.region.cuda_runtime import CudaRuntime

__all__ = ["Answer", "serve"]

_SLOW: Final = 20
_FLOATS: Final = {"data_type": "TYPE_FP32", "dims": [-1]}
_IMAGES: Final = {"data_type": "TYPE_UINT8", "dims": [-1, -1, -1, 3]}
_NORMALIZED: Final = {"data_type": "TYPE_FP32", "dims": [-1, 3, -1, -1]}


class Answer(NamedTuple):
    """What comes back: why the request failed, or nothing; and what the model has to say."""

    error: str
    notes: dict[str, Any]


class CountedOpens:
    """Counts how often a runtime opens and closes other processes' memory."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.opened = 0
        self.closed = 0
        self._open, self._close = runtime.open, runtime.close
        vars(runtime).update(open=self.open, close=self.close)

    def open(self, handle: bytes) -> int:
        """Open and count."""
        address = self._open(handle)
        self.opened += 1
        return address

    def close(self, address: int) -> None:
        """Close and count."""
        self._close(address)
        self.closed += 1


def serve(connection: Connection, load_gpu: LoadGpu) -> None:
    """Serve until the pipe is closed: a model's name and the text of its parameters come, an answer goes."""
    gpu_check_backend.put_in_place()
    gpu = load_gpu()
    sys.modules["cupy"] = gpu.cupy  # the very same, unless it stands for CuPy
    opens = CountedOpens(gpu.runtime)
    models = _Models(gpu)
    connection.send("ready")
    while True:
        try:
            name, parameters = connection.recv()
        except (EOFError, OSError):
            break
        answer = (
            models.answer(name, parameters) if name else Answer("", {"opened": opens.opened, "closed": opens.closed})
        )
        connection.send(answer)
    models.close()


class _Models:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._notes: dict[str, Any] = {}
        own = {"identity": self._identity, "look": self._look, "dlpack": self._dlpack, "torch": self._torch}
        self._models: dict[str, Any] = {name: _OwnModel(name, infer, gpu) for name, infer in own.items()}
        self._models["empty"] = _OwnModel("empty", lambda call: None, gpu, {}, {})
        self._models["gpu_multiply"] = _sample("gpu_multiply", {"INPUT0": _FLOATS}, {"OUTPUT0": _FLOATS}, gpu)
        self._models["gpu_normalize"] = _sample("gpu_normalize", {"IMAGES": _IMAGES}, {"NORMALIZED": _NORMALIZED}, gpu)
        self._outputs = dict.fromkeys(self._models, ("OUTPUT0",)) | {"empty": (), "gpu_normalize": ("NORMALIZED",)}

    def answer(self, name: str, parameters: str) -> Answer:
        self._notes = {}
        (response,) = self._models[name].execute([gpu_check_backend.Request(parameters, self._outputs[name])])
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
            for _ in range(_SLOW):  # so that a consumer that did not wait would be too early
                gpu.double(x, y.cupy())
            capsule = y.__dlpack__(stream=second.ptr)
        with second:
            consumed = runtime.adopt(capsule)
            result = runtime.empty(x.shape, np.dtype(np.float32))
            gpu.double(consumed, result)
            expected = gpu.download(x) * 4
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


class _OwnModel:
    """A model of the check's own."""

    def __init__(
        self,
        name: str,
        infer: Callable[[Call], None],
        gpu: Gpu,
        inputs: dict[str, Any] | None = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        given = {"INPUT0": _FLOATS} if inputs is None else inputs
        made = {"OUTPUT0": _FLOATS} if outputs is None else outputs
        self._session = ShmSession.from_args(_arguments(name, given, made), gpu.access)
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
    model.initialize(_arguments(name, inputs, outputs))
    return model


def _arguments(name: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, str]:
    """Return what Triton passes to initialize."""
    config = {
        "name": name,
        "max_batch_size": 0,
        "input": [{"name": tensor, "optional": True, **what} for tensor, what in inputs.items()],
        "output": [{"name": tensor, **what} for tensor, what in outputs.items()],
        "parameters": {"SHM_PATHS": {"string_value": "direct,triton-shm,inline"}},
    }
    return {"model_config": json.dumps(config), "model_instance_kind": "GPU", "model_instance_device_id": "0"}
