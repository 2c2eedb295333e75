"""How often a model was called, and for how long."""

from __future__ import annotations

import threading
import time
from typing import Any

from tritonclient.grpc import service_pb2

__all__ = ["ModelStatistics"]


class ModelStatistics:
    """Of one model. Thread-safe."""

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
        """Return them as the server tells them."""
        with self._lock:
            told = service_pb2.ModelStatistics(
                name=name,
                version=version,
                last_inference=self._last_ms,
                inference_count=self._rows,
                execution_count=self._executions,
            )
            told.inference_stats.success.count = self._requests - self._failures
            told.inference_stats.success.ns = max(self._ns - self._failed_ns, 0)
            told.inference_stats.fail.count = self._failures
            told.inference_stats.fail.ns = self._failed_ns
            told.inference_stats.compute_infer.count = self._requests
            told.inference_stats.compute_infer.ns = self._ns
            for rows, (count, ns) in sorted(self._batches.items()):
                batch = told.batch_stats.add(batch_size=rows)
                batch.compute_infer.count = count
                batch.compute_infer.ns = ns
        return told
