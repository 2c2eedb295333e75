"""A model that the emulated server serves: checked, batched and executed requests, one version."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tritonclient.grpc import service_pb2

from ...errors import ModelError
from ...repository.config import check_tensors
from .batcher import Batcher, Instance, Pending
from .checks import RequestChecks
from .model_folder import ModelFolder, as_json, debugged, with_auto_completed
from .requests import Answer, Request, ServerError
from .stub import StubError

__all__ = ["LoadedModel", "ModelStatistics"]

MakeInstance = Callable[[Path, str], Instance]
"""Takes model.py and the model's name."""

_REMEDIES: Final = (
    ("ModuleNotFoundError", "install it where these tests run, or correct its name in model.py's imports"),
    ("no attribute 'TritonPythonModel'", "model.py needs a class of that name"),
    (
        "module 'triton_python_backend_utils' has no attribute '",
        "use it in methods only: a server adds Tensor, InferenceRequest and others to triton_python_backend_utils only "
        "after it has imported model.py",
    ),
    ("cannot import name", "use it as pb_utils.NAME in methods: a server puts such names in after the import"),
    ("auto_complete_config", "end auto_complete_config with return auto_complete_model_config"),
)


class ModelStatistics:
    """Statistics of one model. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = self._rows = self._executions = self._failures = 0
        self._ns = self._failed_ns = 0
        self._last_ms = 0
        self._batches: dict[int, tuple[int, int]] = {}

    def executed(self, requests: int, rows: int, ns: int) -> None:
        """Count one ``execute``."""
        with self._lock:
            self._executions += 1
            self._requests += requests
            self._rows += rows
            self._ns += ns * requests
            count, before = self._batches.get(rows, (0, 0))
            self._batches[rows] = (count + 1, before + ns)
            self._last_ms = time.time_ns() // 1_000_000

    def failed(self, ns: int) -> None:
        """Count a request that was answered with an error."""
        with self._lock:
            self._failures += 1
            self._failed_ns += ns

    def message(self, name: str, version: str) -> Any:
        """Return the statistics as the server reports them."""
        with self._lock:
            statistics = service_pb2.ModelStatistics(
                name=name,
                version=version,
                last_inference=self._last_ms,
                inference_count=self._rows,
                execution_count=self._executions,
            )
            statistics.inference_stats.success.count = self._requests - self._failures
            statistics.inference_stats.success.ns = max(self._ns - self._failed_ns, 0)
            statistics.inference_stats.fail.count = self._failures
            statistics.inference_stats.fail.ns = self._failed_ns
            statistics.inference_stats.compute_infer.count = self._requests
            statistics.inference_stats.compute_infer.ns = self._ns
            for rows, (count, ns) in sorted(self._batches.items()):
                batch = statistics.batch_stats.add(batch_size=rows)
                batch.compute_infer.count = count
                batch.compute_infer.ns = ns
        return statistics


class LoadedModel:
    """A model whose instances are initialized; ModelError, with the remedy, if the server would not load it."""

    def __init__(self, folder: ModelFolder, make: MakeInstance) -> None:
        self.name = folder.name
        self.version = folder.version
        self._folder = folder
        self.instances: list[Instance] = []
        try:
            first = self._loaded(make)
            completed = first.auto_complete(as_json(folder.config))
            self.config = folder.config
            if completed is not None:  # the server does it in a process that it then ends
                self.instances.remove(first)
                first.finalize()
                self.config = with_auto_completed(folder.config, completed)
                first = self._loaded(make)
            check_tensors(self.config)
            self.is_decoupled = bool(self.config.model_transaction_policy.decoupled)
            names = [f"{group.name}_{number}" for group in self.config.instance_group for number in range(group.count)]
            for number, name in enumerate(names):
                instance = first if number == 0 else self._loaded(make)
                instance.initialize(self._args(name), self.is_decoupled)
        except (StubError, ModelError) as error:
            self._end()
            text = f"load failed for model '{self.name}': version {self.version} is at UNAVAILABLE state: "
            internal = "Internal: " if isinstance(error, StubError) else ""
            raise ModelError(f"{text}{internal}{error}{_remedy(str(error))}") from error
        except BaseException:
            self._end()
            raise
        self.statistics = ModelStatistics()
        self._lock = threading.Lock()
        self._answers: weakref.WeakSet[Answer] = weakref.WeakSet()
        self._checks = RequestChecks(self.config)
        self.batcher = Batcher(self.config, self.instances, self._execute)

    def is_ready(self) -> bool:
        """Return whether each instance is alive, and says itself that it is ready."""
        return all(instance.is_ready() for instance in self.instances)

    def pending(self, request: Request) -> Pending:
        """Return a request that may be executed; ServerError if the server refuses it."""
        delivery, batch_size = self._checks.check(request)
        answer = Answer(self.name, self._checks.restored)
        with self._lock:
            self._answers.add(answer)
        return Pending(delivery, batch_size, answer)

    def run(self, pending: Pending) -> None:
        """Execute a request, maybe together with others; ServerError if the model would wait for itself."""
        try:
            self.batcher.run(pending)
        except RecursionError as error:
            raise ServerError(str(error), "INTERNAL") from None

    def close(self) -> None:
        """Finalize the instances, after their last requests; StubError if a model's ``finalize`` raised."""
        self.batcher.drain()
        try:
            self._end()
        finally:
            with self._lock:
                answers = list(self._answers)
            for answer in answers:
                answer.fail(f"model {self.name!r} was unloaded before it answered", "UNAVAILABLE")

    def _execute(self, instance: Instance, batch: Sequence[Pending]) -> None:
        started = time.monotonic_ns()
        try:
            instance.execute([pending.delivery for pending in batch], [pending.answer for pending in batch])
        except BaseException:  # an interrupt, which only this thread gets
            for pending in batch:
                pending.answer.fail(f"execute of model {self.name!r} was interrupted")
            raise
        self.statistics.executed(
            len(batch), sum(pending.batch_size for pending in batch), time.monotonic_ns() - started
        )

    def _loaded(self, make: MakeInstance) -> Instance:
        instance = make(self._folder.code, self.name)
        self.instances.append(instance)
        instance.load()
        return instance

    def _args(self, instance_name: str) -> dict[str, str]:
        return {
            "model_config": as_json(debugged(self.config)),
            "model_instance_kind": "CPU",
            "model_instance_name": instance_name,
            "model_instance_device_id": "0",
            "model_repository": str(self._folder.path),
            "model_version": self.version,
            "model_name": self.name,
        }

    def _end(self) -> None:
        failures: list[StubError] = []
        while self.instances:
            try:
                self.instances.pop().finalize()
            except StubError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def _remedy(message: str) -> str:
    return next((f"; what to do: {remedy}." for sign, remedy in _REMEDIES if sign in message), "")
