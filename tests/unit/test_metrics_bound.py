"""Series of metrics: there is one for each class of errors that there is, however many errors there are."""

from __future__ import annotations

from shm_backend_utils import errors
from shm_backend_utils.errors import ProbedError, ShmError, TableError
from shm_backend_utils.model.metrics import Metrics
from tests.unit.metrics_port import MetricsPort


def test_errors_without_end_make_one_series() -> None:
    port = MetricsPort()
    metrics = Metrics(port, "resize", "3", lambda: (0, 0))  # type: ignore[arg-type]
    metrics.publish()
    before = len(port.series())
    for number in range(1000):
        metrics.refused(TableError(f"inputs[{number}]", str(number), "another"))
        metrics.publish()
    assert len(port.series()) == before + 1
    metrics.close()


def test_every_class_of_refusals_has_a_series_of_its_own() -> None:
    """A probe's answer is no refusal."""
    port = MetricsPort()
    metrics = Metrics(port, "resize", "3", lambda: (0, 0))  # type: ignore[arg-type]
    metrics.publish()
    before = len(port.series())
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ShmError)]
    for kind in kinds:
        metrics.refused(kind.__new__(kind))
    metrics.publish()
    assert len(port.series()) == before + len({kind.__name__ for kind in kinds} - {ProbedError.__name__})
    metrics.close()
