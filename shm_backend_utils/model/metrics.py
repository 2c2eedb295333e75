"""A session's numbers on Triton's metrics port.

Each change of a server metric is a round trip: 15 µs with Triton 2.51, as much as the library needs for a whole call.
So calls only count in this process, and a thread sends the sums to the server twice a second.

The design follows from two properties of Triton 2.51, found by experiment:

- If two processes make the same series, it is freed when the first of them drops it. The server then writes the other
  process' values to freed memory. So the label ``session`` gives every session series of its own. Otherwise the
  instances of a model would share them, and also the old and the new model during a reload.
- The server crashes if two threads change a metric at once. So one thread changes all metrics.

The histogram consists of counters, with the names and labels that Prometheus expects: Triton's own histogram takes one
value in each round trip.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, NamedTuple

from ..dtypes import BYTES
from ..errors import ProbedError, RequestRefusedError, ShmError
from ..memory.repeater import Repeater
from ..tensors.view import DIRECT, TRITON
from .call import Call
from .triton import TritonBackend

__all__ = ["MeasuredCall", "Metrics"]

_INTERVAL_S: Final = 0.5
_PREFIX: Final = "shm_backend_utils_"
_BOUNDS_S: Final = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 1e-1)
_BUCKETS: Final = (*(f"{bound:g}" for bound in _BOUNDS_S), "+Inf")


class _Family(NamedTuple):
    """The properties that all series of a name share; the series of ``label``'s ``values`` exist from the start."""

    kind: str
    description: str
    label: str = ""
    values: tuple[str, ...] = ("",)


_FAMILIES: Final = {
    "calls_total": _Family("COUNTER", "Requests that were answered", "path", (DIRECT, TRITON)),
    "refusals_total": _Family("COUNTER", "Requests that were refused, by the error's class", "reason", ()),
    "zero_copy_bytes_total": _Family("COUNTER", "Bytes of tensors that were used in place, without a copy"),
    "copied_bytes_total": _Family("COUNTER", "Bytes of tensors that were copied on their way to or from the model"),
    "own_seconds_bucket": _Family("COUNTER", "Calls whose begin and end took at most this long", "le", _BUCKETS),
    "own_seconds_sum": _Family("COUNTER", "Time that the library took to begin and to end calls"),
    "own_seconds_count": _Family("COUNTER", "Calls whose begin and end were timed"),
    "mapped_bytes": _Family("GAUGE", "Bytes of shared memory that are mapped"),
    "mapped_regions": _Family("GAUGE", "Regions of shared memory that are mapped"),
}

_Series = tuple[str, str]
"""A family's name, and the value of the label that its series differ in."""


class Metrics:
    """The metrics of one session; ``mapped`` returns the numbers of mapped bytes and regions. Thread-safe."""

    def __init__(self, backend: TritonBackend, model: str, version: str, mapped: Callable[[], tuple[int, int]]) -> None:
        self._backend = backend
        self._mapped = mapped
        self._labels = {"model": model, "version": version, "session": f"{os.getpid()}-{secrets.token_hex(4)}"}
        self._lock = threading.Lock()
        self._counts = defaultdict[_Series, float](int)  # since the last publish()
        self._gauges: dict[str, int] = {}
        self._families = {
            name: backend.metric_family(family.kind, _PREFIX + name, family.description)
            for name, family in _FAMILIES.items()
        }
        self._metrics: dict[_Series, Any] = {}
        for name, family in _FAMILIES.items():
            for value in family.values:
                self._metric((name, value))
        self._repeater = Repeater(self._publish_or_stop, _INTERVAL_S, "shm metrics")

    @classmethod
    def start_or_warn(
        cls, backend: TritonBackend, model: str, version: str, mapped: Callable[[], tuple[int, int]]
    ) -> Metrics | None:
        """Return metrics; if the server does not support them, log a warning and return None: the model serves on."""
        try:
            return cls(backend, model, version, mapped)
        except Exception as error:  # whatever fails in the server
            backend.log_warning(f"model {model!r} publishes no metrics, though SHM_METRICS is true: {error}")
            return None

    def answered(self, path: str, zero_copy_bytes: int, copied_bytes: int) -> None:
        """Count a request that was answered on the path ``"direct"`` or ``"triton"``, and the bytes of its tensors."""
        with self._lock:
            self._counts["calls_total", path] += 1
            self._counts["zero_copy_bytes_total", ""] += zero_copy_bytes
            self._counts["copied_bytes_total", ""] += copied_bytes

    def refused(self, error: BaseException) -> None:
        """Count a refused request, if the error is the library's own; answers to probes do not count."""
        if isinstance(error, ShmError) and not isinstance(error, ProbedError | RequestRefusedError):
            with self._lock:
                self._counts["refusals_total", type(error).__name__] += 1

    def took(self, own_s: float) -> None:
        with self._lock:
            self._counts["own_seconds_bucket", _BUCKETS[bisect_left(_BOUNDS_S, own_s)]] += 1
            self._counts["own_seconds_count", ""] += 1
            self._counts["own_seconds_sum", ""] += own_s

    def publish(self) -> None:
        """Send the counts since the last time to the server. Only one thread may do so."""
        with self._lock:
            counts, self._counts = self._counts, defaultdict(int)
        faster = counts["own_seconds_count", ""]
        for series in [("own_seconds_bucket", bucket) for bucket in reversed(_BUCKETS)]:
            # A bucket also counts all faster calls. The widest grows first, as no bucket may exceed a wider one.
            counts[series], faster = faster, faster - counts.pop(series, 0)
        for series, amount in counts.items():
            if amount:
                self._metric(series).increment(amount)
        for name, value in zip(("mapped_bytes", "mapped_regions"), self._mapped(), strict=True):
            if self._gauges.get(name, 0) != value:
                self._gauges[name] = value
                self._metric((name, "")).set(value)

    def close(self) -> None:
        """Remove the session's series from the server. Twice is fine."""
        self._repeater.stop()
        self._metrics.clear()
        self._families.clear()  # only after the metrics of these families

    def _metric(self, series: _Series) -> Any:
        metric = self._metrics.get(series)
        if metric is None:
            name, value = series
            label = _FAMILIES[name].label
            labels = self._labels | {label: value} if label else self._labels
            metric = self._metrics[series] = self._families[name].Metric(labels=labels)
        return metric

    def _publish_or_stop(self) -> float:
        try:
            self.publish()
        except Exception as error:  # whatever fails in the server: the model serves on
            self._backend.log_warning(f"model {self._labels['model']!r} no longer publishes its metrics: {error}")
            self._repeater.stop_some_time()
        return _INTERVAL_S


class MeasuredCall(Call):
    """A call that counts its tensors' bytes and the library's own time, without ``model.py`` and waits for GPUs."""

    __slots__ = ("_metrics", "_own_s")

    def __init__(self, metrics: Metrics, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._metrics = metrics
        self._own_s = 0.0

    def begin(self) -> None:
        begin = perf_counter()
        super().begin()
        self._own_s = perf_counter() - begin

    def commit(self, *, needs_all: bool = True) -> None:
        begin = perf_counter()
        super().commit(needs_all=needs_all)
        self._own_s += perf_counter() - begin

    def end(self) -> None:
        begin, counted = perf_counter(), self._bytes() if self._is_open else None
        super().end()
        if counted is not None:
            self._count(begin, counted)

    def end_early(self) -> bool:
        begin, counted = perf_counter(), self._bytes()
        has_ended = super().end_early()
        if has_ended:
            self._count(begin, counted)
        return has_ended

    def _count(self, begin: float, counted: tuple[int, int]) -> None:
        self._metrics.took(self._own_s + perf_counter() - begin)
        self._metrics.answered(self.path, *counted)

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._metrics.refused(error)

    def _abort(self) -> None:
        self._is_open = False  # so that end() does not count this call as answered
        super()._abort()

    def _bytes(self) -> tuple[int, int]:
        """Return how many tensor bytes were used in place, and how many copied; without strings from Triton."""
        zero_copy = copied = 0
        spec = self._context.spec
        if self.table is not None:
            zero_copy += sum(span.byte_size for span in self.table.inputs.values())
        for name, tensor in self._tensors_in_band().items():
            dtype = spec.inputs[name].dtype if name in spec.inputs else None
            if dtype is not None and dtype is not BYTES:
                size = math.prod(tensor.shape()) * dtype.itemsize
                copied += size if tensor.is_cpu() else 0
                zero_copy += 0 if tensor.is_cpu() else size
        requested = self._request.requested_output_names()
        for name, output in self.outputs.items():
            if name in requested:
                size = output.view.attributes.byte_size
                copied += size if output.was_copied else 0
                zero_copy += 0 if output.was_copied else size
        return zero_copy, copied
