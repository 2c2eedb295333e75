"""Metrics that a model adds to those of its server."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from .arguments import number, refuse, text
from .asked import asked
from .enums import NumberedEnum
from .errors import TritonModelException
from .host import Host
from .metrics_registry import Series

__all__ = ["Metric", "MetricFamily", "MetricKind"]

_T = TypeVar("_T")


class MetricKind(NumberedEnum):
    """What a family's series do."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metric:
    """One series of a family; :meth:`MetricFamily.Metric` makes it.

    Every change is a round trip to the server.
    """

    __slots__ = ("__weakref__", "_host", "_series")

    _host: Host
    _series: Series | None

    def __init__(self) -> None:
        raise TypeError("c_python_backend_utils.Metric: No constructor defined!")

    @classmethod
    def _of(cls, host: Host, series: Series) -> Metric:
        made = cls.__new__(cls)
        made._host = host
        made._series = series
        return made

    def increment(self, value: float, /) -> None:
        """Add to a counter or a gauge; nothing negative to a counter.

        TritonModelException if it is a histogram, or the value is negative for a counter, or the family is gone.
        """
        value = number("increment", "value", value)
        self._do("increment", lambda series: self._host.metrics.increment(series, value))

    def set(self, value: float, /) -> None:
        """Set a gauge; TritonModelException if it is none, or the family is gone."""
        value = number("set", "value", value)
        self._do("set", lambda series: self._host.metrics.set(series, value))

    def observe(self, value: float, /) -> None:
        """Count a value, from Triton 24.08 on; TritonModelException if it is no histogram, or the family is gone."""
        value = number("observe", "value", value)
        self._do("observe", lambda series: self._host.metrics.observe(series, value))

    def value(self) -> float:
        """Return the value of a counter or gauge; TritonModelException if it is a histogram, or the family is gone."""
        return self._do("get", self._host.metrics.value)

    def _do(self, verb: str, operation: Callable[[Series], _T]) -> _T:
        series = self._series
        if series is None:
            raise TritonModelException(
                f"Failed to {verb} metric value: Invalid metric operation as the corresponding 'MetricFamily' has been "
                "deleted. The 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have "
                "been deleted."
            )
        return asked(self._host, f"Failed to {verb} metric value", lambda: operation(series))

    def _clear(self) -> None:
        if self._series is not None:
            self._host.metrics.remove_series(self._series)
            self._series = None


class MetricFamily:
    """Series of one name on the server's metrics port; from Triton 23.05 on, histograms from 24.08 on.

    It must live as long as its series, which it holds. One family of a name is shared by all models of the server.
    TritonModelException if the server refuses it.
    """

    __slots__ = ("__weakref__", "_finalizer", "_kind", "_metrics", "_name")

    _host: Host

    COUNTER: Final = MetricKind.COUNTER
    GAUGE: Final = MetricKind.GAUGE
    HISTOGRAM: Final = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._name = text("MetricFamily", "name", name)
        if not isinstance(kind, MetricKind):
            refuse("MetricFamily", "kind", kind, "a MetricKind")
        self._kind = kind
        help_text = text("MetricFamily", "description", description)
        asked(
            self._host,
            "Error when creating MetricFamily",
            lambda: self._host.metrics.add_family(self._name, help_text, kind.name),
        )
        self._metrics: list[Metric] = []
        self._finalizer = weakref.finalize(self, _clear, self._metrics)

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:  # noqa: N802
        """Return a series, which those with the same labels share.

        A histogram alone has buckets, and must: their upper bounds, in order; from Triton 24.08 on.
        TritonModelException if labels or buckets are not such, or the server refuses it.
        """
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        said = json.loads(json.dumps(labels or {}))
        is_histogram = self._kind is MetricKind.HISTOGRAM
        if buckets is None and is_histogram:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if buckets is not None and not is_histogram:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        bounds = None if buckets is None else [_bound(bucket) for bucket in buckets]
        series = asked(
            self._host,
            "Error when creating Metric",
            lambda: self._host.metrics.add_series(self._name, said, bounds),
        )
        metric = Metric._of(self._host, series)
        self._metrics.append(metric)
        return metric


def _bound(value: object) -> float:
    try:
        return number("Metric", "buckets", value)
    except TypeError as error:
        raise RuntimeError(f"Unable to cast Python instance to C++ type: {error}") from None


def _clear(metrics: list[Metric]) -> None:
    for metric in metrics:
        metric._clear()
