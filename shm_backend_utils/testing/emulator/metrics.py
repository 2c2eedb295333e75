"""Metrics that a model adds to those of its server: families by their names, series by their labels."""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NoReturn, TypeVar

from .host import Host, asked
from .pybind import NumberedEnum, TritonModelException, number, refuse, text

__all__ = ["Metric", "MetricFamily", "MetricsRegistry", "Series"]

_METRIC_NAME: Final = re.compile("[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME: Final = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")

_T = TypeVar("_T")


@dataclass
class Series:
    """A series of a family."""

    kind: str
    bounds: tuple[float, ...]  # the upper bounds of a histogram's buckets; the last bucket has none
    value: float = 0.0  # of a counter or a gauge; of a histogram the sum of the observed values
    counts: list[int] = field(default_factory=list)  # how many observations fell into each bucket
    users: int = 0  # how many Metric objects refer to it


@dataclass
class _Family:
    kind: str
    description: str
    series: dict[tuple[tuple[str, str], ...], Series] = field(default_factory=dict)


class MetricsRegistry:
    """The metrics of a server: a family stays, and a series goes with the last Metric that refers to it."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._lock = threading.Lock()

    def add_family(self, name: str, description: str, kind: str) -> None:
        """Register a family, unless it is registered; TritonModelException for a wrong name or kind."""
        with self._lock:
            if not _METRIC_NAME.fullmatch(name) or name.startswith("__"):
                raise TritonModelException("Invalid metric name")
            found = self._families.setdefault(name, _Family(kind, description))
            if found.kind != kind:
                raise TritonModelException("Family name already exists with different type")

    def add_series(self, family: str, labels: Mapping[str, str], buckets: Sequence[float] | None) -> Series:
        """Return the series of a family with these labels, which all callers share."""
        with self._lock:
            for label, value in labels.items():
                if not isinstance(value, str):
                    raise TritonModelException("attempt to access JSON non-string as string")
                if not _LABEL_NAME.fullmatch(label) or label.startswith("__"):
                    raise TritonModelException("Invalid label name")
            found = self._families[family]
            bounds = tuple(buckets or ())
            if any(below >= above for below, above in pairwise(bounds)):
                raise TritonModelException("Bucket Boundaries must be strictly sorted")
            made = Series(found.kind, bounds, counts=[0] * (len(bounds) + 1))
            series = found.series.setdefault(tuple(sorted(labels.items())), made)
            series.users += 1
            return series

    def remove_series(self, series: Series) -> None:
        """Release a series."""
        with self._lock:
            series.users -= 1
            if series.users == 0:
                for family in self._families.values():
                    family.series = {labels: found for labels, found in family.series.items() if found is not series}

    def increment(self, series: Series, value: float) -> None:
        """Add to a counter or a gauge."""
        if series.kind == "HISTOGRAM":
            _refuse(series, "Increment")
        if series.kind == "COUNTER" and value < 0:
            raise TritonModelException(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            )
        with self._lock:
            series.value += value

    def set(self, series: Series, value: float) -> None:
        """Set a gauge."""
        if series.kind != "GAUGE":
            _refuse(series, "Set")
        with self._lock:
            series.value = value

    def observe(self, series: Series, value: float) -> None:
        """Count a value in a histogram."""
        if series.kind != "HISTOGRAM":
            _refuse(series, "Observe")
        with self._lock:
            bucket = sum(bound < value for bound in series.bounds)
            series.counts[bucket] += 1
            series.value += value

    def value(self, series: Series) -> float:
        """Return the value of a counter or a gauge."""
        if series.kind == "HISTOGRAM":
            _refuse(series, "Value")
        return series.value

    def series(self, family: str) -> dict[tuple[tuple[str, str], ...], Series]:
        """Return a family's series by their labels, sorted; empty for an unknown family."""
        with self._lock:
            found = self._families.get(family)
            return {} if found is None else dict(found.series)


def _refuse(series: Series, operation: str) -> NoReturn:
    raise TritonModelException(f"TRITONSERVER_METRIC_KIND_{series.kind} does not support {operation}")


class MetricKind(NumberedEnum):
    """The behaviour of a family's series."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metric:
    """One series of a family; :meth:`MetricFamily.Metric` makes it."""

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
        """Add to a counter or a gauge; nothing negative to a counter."""
        value = number("increment", "value", value)
        self._do("increment", lambda series: self._host.metrics.increment(series, value))

    def set(self, value: float, /) -> None:
        """Set a gauge."""
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
    """Series of one name, for all models, which live as long as it; from Triton 23.05 on, histograms from 24.08 on."""

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
        """Return a series, shared by all with the same labels; a histogram needs buckets' upper bounds, in order."""
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        copied = json.loads(json.dumps(labels or {}))
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
            lambda: self._host.metrics.add_series(self._name, copied, bounds),
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
