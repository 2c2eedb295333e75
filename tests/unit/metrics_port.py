"""As much of a server's metrics port as a session uses, as strict as the real one should be."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Final

from shm_backend_utils.errors import MachineError

__all__ = ["MetricsPort"]

_LabelSet = tuple[tuple[str, str], ...]


class MetricsPort:
    """Stands for the server, and for the backend through which a session reaches it.

    Attributes
    ----------
    failure : Exception or None
        What every change of a metric fails by.
    changes : list of str
        Every change so far: the family's name, the label that only this family has, and the amount.
    warnings : list of str
        The server's log.
    """

    def __init__(self, *, has_metrics: bool = True) -> None:
        self.failure: Exception | None = None
        self.changes: list[str] = []
        self.warnings: list[str] = []
        self.was_changed = threading.Event()
        self.was_warned = threading.Event()
        self._has_metrics = has_metrics
        self._live: weakref.WeakSet[_Metric] = weakref.WeakSet()

    def metric_family(self, kind: str, name: str, description: str) -> _Family:
        if not self._has_metrics:
            raise MachineError("no metrics here")
        assert description
        return _Family(self, kind, name)

    def log_warning(self, message: str) -> None:
        self.warnings.append(message)
        self.was_warned.set()

    def series(self) -> dict[tuple[str, _LabelSet], float]:
        """Return every series' value, by its family's name and its labels."""
        return {(metric.name, metric.labels): metric.value for metric in self._live}

    def values(self, own_label: str = "") -> dict[str, float]:
        """Return values by name, and by the value of this label; other series are left out."""
        found = {}
        for (name, labels), value in self.series().items():
            own = dict(labels).get(own_label)
            if own is not None or (not own_label and len(labels) == 3):
                found[name if own is None else f"{name} {own}"] = value
        return found

    def add(self, metric: _Metric) -> None:
        """Show a series."""
        assert (metric.name, metric.labels) not in self.series(), "two metrics of one series: the first to go ends both"
        self._live.add(metric)

    def note(self, change: str) -> None:
        """Take a change in, or fail."""
        if self.failure is not None:
            raise self.failure
        self.changes.append(change)
        self.was_changed.set()


class _Family:
    def __init__(self, port: MetricsPort, kind: str, name: str) -> None:
        self._port = port
        self._kind = kind
        self._name = name

    def Metric(self, labels: Mapping[str, str]) -> _Metric:  # the server's name for it
        return _METRICS[self._kind](self._port, self._name, tuple(labels.items()))


class _Metric:
    def __init__(self, port: MetricsPort, name: str, labels: _LabelSet) -> None:
        self.name = name
        self.labels = labels
        self.value = 0.0
        self._port = port
        port.add(self)

    def _change(self, by: float) -> None:
        own_labels = [value for _, value in self.labels[3:]]
        self._port.note(" ".join([self.name, *own_labels, f"{by:g}"]))
        self.value += by


class _Counter(_Metric):
    def increment(self, amount: float) -> None:
        assert amount >= 0
        self._change(amount)


class _Gauge(_Metric):
    def set(self, value: float) -> None:
        self._change(value - self.value)


_METRICS: Final[Mapping[str, type[_Counter | _Gauge]]] = {"COUNTER": _Counter, "GAUGE": _Gauge}
