"""A server that is as small as the checks need it: models of one instance, called one by one, in this process."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.testing.emulator import (
    NAME,
    Faults,
    MetricsRegistry,
    TritonModelException,
    backend_module,
    deliver,
    deliver_response,
    sent_inputs,
    sent_outputs,
)

__all__ = ["EmulatedServer"]

_NOTHING = "explicit model load / unload is not allowed if polling is enabled"


class EmulatedServer:
    """Models of a folder, loaded into this process; the host of their emulated stub."""

    def __init__(self, folder: Path, faults: Faults = Faults()) -> None:  # noqa: B008  # it cannot be changed
        self.metrics = MetricsRegistry()
        self.lines: list[tuple[str, str]] = []
        self.backend = backend_module(self, faults)
        self._folder = folder
        self._running = threading.local()
        self._models: dict[str, Any] = {}

    def run(
        self, model: str, inputs: Any, parameters: Mapping[str, Any], outputs: Iterable[str], **more: Any
    ) -> list[Any]:
        """Have a model execute a request, and return its responses."""
        sink = _Sink()
        decoupled = self._is_decoupled(model)
        request = deliver(
            self.backend,
            model_name=model,
            model_version=1,
            inputs=inputs,
            requested_output_names=outputs,
            parameters=parameters,
            is_decoupled=decoupled,
            sink=sink,
            is_cancelled=lambda: False,
            **more,
        )
        with self._as(model):
            found = self._model(model).execute([request])
        if decoupled:
            return sink.taken
        return [(found[0], True)]

    def infer(self, request: Any) -> Any:
        self._check(request)
        if self._is_decoupled(request._model_name):
            raise TritonModelException(
                f"Model {request._model_name} is using the decoupled. The current BLS request call doesn't support "
                "models using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                "'async_exec' calls for decoupled models.'"
            )
        return self._executed(request)[0][0]

    def stream(self, request: Any) -> Iterator[tuple[Any, bool]]:
        self._check(request)
        return iter(self._executed(request))

    def cancel(self, request: Any) -> None:
        raise NotImplementedError  # no check cancels: a request of a model's own kills 24.10 that way

    def is_executing(self) -> bool:
        return True

    def model_dir(self) -> str:
        return str(self._folder / self._running.model / "1")

    def instance_name(self) -> str:
        return f"{self._running.model}_0_0"

    def log(self, level: str, message: str) -> None:
        self.lines.append((level, message))

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        raise TritonModelException(_NOTHING)

    def unload_model(self, name: str, *, with_dependents: bool) -> None:
        raise TritonModelException(_NOTHING)

    def is_model_ready(self, name: str, version: str) -> bool:
        return bool(name) and (self._folder / name).is_dir() and version in ("", "1")

    def _check(self, request: Any) -> None:
        version = "" if request._model_version < 0 else str(request._model_version)
        if not self.is_model_ready(request._model_name, version):
            raise TritonModelException(
                f"Failed for execute the inference request. Model '{request._model_name}' is not ready."
            )

        for tensor in sent_inputs(request):
            if tensor.array is not None and tensor.datatype != "BYTES":
                expected, got = math.prod(tensor.shape) * BY_NAME[tensor.datatype].itemsize, tensor.array.nbytes
                if expected != got:
                    raise TritonModelException(
                        f"[request id: <id_unknown>] input byte size mismatch for input '{tensor.name}' for model "
                        f"'{request._model_name}'. Expected {expected}, got {got}"
                    )

    def _executed(self, request: Any) -> list[tuple[Any, bool]]:
        answers = self.run(
            request._model_name,
            [(tensor.name, tensor.datatype, tensor.array) for tensor in sent_inputs(request)],
            json.loads(request.parameters()),
            request.requested_output_names() or ["Y"],
            request_id=request.request_id(),
            correlation_id=request.correlation_id(),
            flags=request.flags(),
            timeout_us=request.timeout(),
        )
        return [
            (deliver_response(self.backend, [] if said is None else sent_outputs(said), said and said.error()), is_last)
            for said, is_last in answers
        ]

    def _is_decoupled(self, model: str) -> bool:
        return "decoupled: true" in (self._folder / model / "config.pbtxt").read_text()

    def _model(self, name: str) -> Any:
        if name not in self._models:
            self._models[name] = _load(self._folder / name / "1" / "model.py", self.backend).TritonPythonModel()
            if hasattr(self._models[name], "initialize"):
                self._models[name].initialize({})
        return self._models[name]

    @contextmanager
    def _as(self, model: str) -> Iterator[None]:
        before = getattr(self._running, "model", None)
        self._running.model = model
        yield
        self._running.model = before


class _Sink:
    def __init__(self) -> None:
        self.taken: list[tuple[Any, bool]] = []

    def send(self, response: Any, *, is_final: bool) -> None:
        self.taken.append((response, is_final))


def _load(file: Path, backend: ModuleType) -> ModuleType:
    before = sys.modules.get(NAME)
    sys.modules[NAME] = backend
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        spec = importlib.util.spec_from_file_location(f"conformance_{file.parents[1].name}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(Path(__file__).parent))
        if before is None:
            del sys.modules[NAME]
        else:
            sys.modules[NAME] = before
    return module
