"""The metrics of a server: families by their names, series by their labels."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NoReturn

from .errors import TritonModelException

__all__ = ["MetricsRegistry", "Series"]

_METRIC_NAME: Final = re.compile("[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME: Final = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass
class Series:
    """A series of a family."""

    kind: str
    bounds: tuple[float, ...]  # the upper ones of a histogram's buckets, without the last one, which has none
    value: float = 0.0  # of a counter or a gauge; of a histogram the sum of what was observed
    counts: list[int] = field(default_factory=list)  # how many observations fell into each bucket
    users: int = 0  # how many objects of models stand for it


@dataclass
class _Family:
    kind: str
    description: str
    series: dict[tuple[tuple[str, str], ...], Series] = field(default_factory=dict)


class MetricsRegistry:
    """The metrics of a server, which models of any of its stubs add to.

    A family stays when nobody uses it any more; a series goes with the last object that stands for it.
    """

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._lock = threading.Lock()

    def add_family(self, name: str, description: str, kind: str) -> None:
        """Register a family, if there is none of this name.

        TritonModelException if it is no name for a metric, or that of a family of another kind.
        """
        with self._lock:
            if not _METRIC_NAME.fullmatch(name) or name.startswith("__"):
                raise TritonModelException("Invalid metric name")
            found = self._families.setdefault(name, _Family(kind, description))
            if found.kind != kind:
                raise TritonModelException("Family name already exists with different type")

    def add_series(self, family: str, labels: Mapping[str, str], buckets: Sequence[float] | None) -> Series:
        """Return the series of a family that has these labels, which all that ask for it share.

        TritonModelException if a label has a name that none can have, or a value that is no text, or the bounds are not
        sorted.
        """
        with self._lock:
            for label, said in labels.items():
                if not isinstance(said, str):
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
        """Let go of a series."""
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
        """Return a family's series by their labels, sorted; none if there is no such family."""
        with self._lock:
            found = self._families.get(family)
            return {} if found is None else dict(found.series)


def _refuse(series: Series, operation: str) -> NoReturn:
    raise TritonModelException(f"TRITONSERVER_METRIC_KIND_{series.kind} does not support {operation}")
