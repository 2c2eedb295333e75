"""The emulated server: its models, registrations, and answers to models."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ...errors import ModelError
from ..emulator import MetricsRegistry, TritonModelException
from ..emulator.host import Faults
from .batcher import Instance, Pending
from .loaded_model import LoadedModel
from .model_folder import ModelFolder
from .regions import HttpEndpoint, RegisteredRegions
from .requests import Answer, Input, Outcome, Request, ServerError
from .stub import ModelCall, StubError

__all__ = ["EmulatedServer", "InstanceKind"]

InstanceKind = Callable[..., Instance]
"""Stub, or ChildInstance."""
MOST_LOG_LINES: Final = 10_000
_LOG: Final = logging.getLogger("shm_backend_utils.testing.harness")
_LEVELS: Final = {"VERBOSE": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}


class EmulatedServer:
    """Models of the Python backend, with instances made by ``kind``; the first is the default model. Thread-safe."""

    def __init__(self, folders: Sequence[Path], kind: InstanceKind, faults: Faults) -> None:
        self.regions = RegisteredRegions()
        self.metrics = MetricsRegistry()
        # The models' log: level and message.
        self.log_lines: deque[tuple[str, str]] = deque(maxlen=MOST_LOG_LINES)
        self._kind = kind
        self._faults = faults
        self._http = HttpEndpoint(self.regions, self.model)
        self._models: dict[str, LoadedModel] = {}
        self._folders = {folder.name: folder for folder in folders}
        self._loading = threading.RLock()
        self._streams: list[threading.Thread] = []
        self._is_closed = False
        self._not_finalized: list[ModelError] = []
        self.first = folders[0].name
        try:
            for folder in folders:
                self.load(folder)
        except BaseException:
            self.close()
            raise

    def load(self, folder: Path) -> None:
        """Load or reload a model; ModelError if it does not load, and then the one that was loaded before stays."""
        with self._loading:
            model = LoadedModel(ModelFolder.read(folder), self._make)
            previous = self._models.get(model.name)
            self._models[model.name] = model
            self._folders[model.name] = folder
        if previous is not None:
            self._finalize(previous)

    def unload(self, name: str) -> None:
        """Unload a model; ignore an unknown one."""
        with self._loading:
            model = self._models.pop(name, None)
        if model is not None:
            self._finalize(model)

    def load_by_name(self, name: str) -> None:
        """Load a model of a folder that was loaded before, or lies beside one that was; or raise ServerError."""
        beside = [folder.parent / name for folder in self._folders.values()]
        folder = self._folders.get(name) or next((each for each in beside if each.is_dir()), None)
        if folder is None:
            raise ServerError(f"failed to load '{name}', failed to poll from model repository", "INTERNAL")
        try:
            self.load(folder)
        except ModelError as error:
            raise ServerError(str(error)) from error

    def model(self, name: str, version: str = "") -> LoadedModel:
        """Return a model; ServerError for an unknown name or version."""
        model = self._models.get(name)
        if model is None:
            raise ServerError(f"Request for unknown model: '{name}' is not found", "NOT_FOUND")
        if version and version != model.version:
            if not version.lstrip("+-").isdecimal():
                raise ServerError(
                    f"failed to get model version from specified version string '{version}' (details: stol), version "
                    "should be an integral value > 0"
                )
            raise ServerError(f"Request for unknown model: '{name}' version {version} is not found", "NOT_FOUND")
        return model

    def models(self) -> list[LoadedModel]:
        """Return all models that are loaded."""
        return list(self._models.values())

    def begin(self, request: Request) -> tuple[LoadedModel, Pending]:
        """Return a request that may be executed, and its model; ServerError if the server refuses it."""
        model = self.model(request.model or self.first, request.version)
        return model, model.pending(request)

    def execute(self, request: Request) -> Answer:
        """Execute a request, and return the object that gets its responses; raises as :meth:`begin`."""
        model, pending = self.begin(request)
        model.run(pending)
        return pending.answer

    def execute_aside(self, request: Request) -> Answer:
        """Like :meth:`execute`, but in a thread, so that responses can be read while the model makes them."""
        model, pending = self.begin(request)
        thread = threading.Thread(target=_run, args=(model, pending), name="shm harness stream", daemon=True)
        thread.start()
        self._streams = [each for each in self._streams if each.is_alive()] + [thread]
        return pending.answer

    def call_model(self, call: ModelCall) -> Iterator[Outcome]:
        """Let a model execute another model's request, and return its responses as they come."""
        if not self.is_model_ready(call.model, call.version):
            raise TritonModelException(f"Failed for execute the inference request. Model '{call.model}' is not ready.")
        model = self.model(call.model, call.version)
        if model.is_decoupled and not call.takes_many:
            raise TritonModelException(
                f"Model {call.model} is using the decoupled. The current BLS request call doesn't support models using "
                "the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
                "calls for decoupled models.'"
            )
        try:
            answer = (self.execute_aside if model.is_decoupled else self.execute)(_request(call))
        except ServerError as error:
            raise TritonModelException(error.message) from None
        return answer.outcomes()

    def log(self, level: str, message: str) -> None:
        """Write to the log, which is Python's."""
        self.log_lines.append((level, message))
        _LOG.log(_LEVELS.get(level, logging.INFO), "%s", message)

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load a model at a model's request."""
        if config or files:
            raise TritonModelException(
                f"the harness loads '{name}' from its folder alone, and takes no configuration or files from the call"
            )
        try:
            self.load_by_name(name)
        except ServerError as error:
            raise TritonModelException(error.message) from None

    def unload_model(self, name: str, *, with_dependents: bool) -> None:
        """Unload a model at a model's request; no model here depends on another."""
        del with_dependents
        self.unload(name)

    def is_model_ready(self, name: str, version: str) -> bool:
        """Return whether a model can execute requests, to a model; TritonModelException for an unknown one."""
        try:
            return self.model(name, version).is_ready()
        except ServerError as error:
            raise TritonModelException(error.message) from None

    def close(self) -> None:
        """Finalize every model; ModelError if one has raised, now or when it was unloaded. It can be called again."""
        for model in reversed(list(self._models.values())):
            self._finalize(model)
        self._models = {}
        for thread in self._streams:
            thread.join(1)
        self._streams = []
        self.regions.unregister("")
        if not self._is_closed:
            self._is_closed = True
            self._http.close()
        if self._not_finalized:
            error, self._not_finalized = self._not_finalized[0], []
            raise error

    def _finalize(self, model: LoadedModel) -> None:
        """Close a model. A server only logs an error of ``finalize``; here it is reported at the end."""
        try:
            model.close()
        except StubError as error:
            self._not_finalized.append(ModelError(f"finalize of a model raised: {error}"))

    def _make(self, file: Path, name: str) -> Instance:
        return self._kind(file, name, self, self._http.url, self._faults)


def _run(model: LoadedModel, pending: Pending) -> None:
    try:
        model.run(pending)
    except ServerError as error:
        pending.answer.fail(error.message, error.code)


def _request(call: ModelCall) -> Request:
    inputs = {}
    for tensor in call.inputs:
        if tensor.array is None:
            raise ServerError(f"input '{tensor.name}' is on a GPU, and the harness has none", "UNSUPPORTED")
        inputs[tensor.name] = Input(tensor.name, tensor.datatype, tensor.shape, tensor.array)
    return Request(
        inputs,
        call.outputs,
        call.parameters,
        call.request_id,
        call.correlation_id,
        call.flags,
        call.timeout_us,
        model=call.model,
        version=call.version,
    )
