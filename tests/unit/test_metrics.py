"""What is counted in a model's process, and how it gets to the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.errors import ModelError, ProbedError, TableError, TensorShapeError
from shm_backend_utils.model.metrics import Metrics
from tests.unit.metrics_port import MetricsPort

PREFIX = "shm_backend_utils_"


class Session:
    """Metrics, the port that they are on, and what is mapped."""

    def __init__(self, port: Any) -> None:
        self.port = port
        self.mapped = (0, 0)
        self.metrics = Metrics(port, "resize", "3", lambda: self.mapped)

    def published(self, own_label: str = "") -> dict[str, float]:
        self.metrics.publish()
        values = self.port.values(own_label)
        return {name.removeprefix(PREFIX): value for name, value in values.items() if value}


@pytest.fixture
def port() -> MetricsPort:
    return MetricsPort()


@pytest.fixture
def session(port: MetricsPort, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setattr("shm_backend_utils.model.metrics._INTERVAL_S", 3600.0)  # the tests publish by themselves
    session = Session(port)
    yield session
    session.metrics.close()


def test_answers_are_counted_by_path(session: Session) -> None:
    for path in ("direct", "triton", "direct"):
        session.metrics.answered(path, 0, 0)
    assert session.published("path") == {"calls_total direct": 2, "calls_total triton": 1}


def test_bytes_are_counted_by_whether_they_were_copied(session: Session) -> None:
    session.metrics.answered("direct", 4000, 10)
    session.metrics.answered("triton", 500, 7)
    assert session.published() == {"zero_copy_bytes_total": 4500, "copied_bytes_total": 17}


def test_refusals_are_counted_by_the_errors_class(session: Session) -> None:
    for error in (
        TableError("v", "2", "1"),
        TensorShapeError("X", "too large"),
        TableError("v", "0", "1"),
        ModelError("no output"),
    ):
        session.metrics.refused(error)
    assert session.published("reason") == {
        "refusals_total TableError": 2,
        "refusals_total TensorShapeError": 1,
        "refusals_total ModelError": 1,
    }


@pytest.mark.parametrize("error", [ValueError("the model's own"), KeyboardInterrupt(), ProbedError("the report is …")])
def test_other_errors_are_no_refusals(session: Session, error: BaseException) -> None:
    session.metrics.refused(error)
    assert session.published("reason") == {}


def test_own_time_is_a_cumulative_histogram(session: Session) -> None:
    for seconds in (1e-6, 2e-5, 3e-5, 4e-4, 2.0):  # the second is a bucket's bound, and belongs to it
        session.metrics.took(seconds)
    buckets = session.published("le")
    assert buckets == {
        "own_seconds_bucket 5e-06": 1,
        "own_seconds_bucket 1e-05": 1,
        "own_seconds_bucket 2e-05": 2,
        "own_seconds_bucket 5e-05": 3,
        "own_seconds_bucket 0.0001": 3,
        "own_seconds_bucket 0.0002": 3,
        "own_seconds_bucket 0.0005": 4,
        "own_seconds_bucket 0.001": 4,
        "own_seconds_bucket 0.01": 4,
        "own_seconds_bucket 0.1": 4,
        "own_seconds_bucket +Inf": 5,
    }
    assert session.published() == {"own_seconds_count": 5, "own_seconds_sum": pytest.approx(2.000451)}


def test_at_no_time_does_a_bucket_exceed_a_wider_one(session: Session, port: MetricsPort) -> None:
    session.metrics.took(1e-6)
    session.metrics.publish()
    changes = [change.split() for change in port.changes]
    bounds = [float(label) for name, *label_and_amount in changes if "bucket" in name for label in label_and_amount[:1]]
    assert len(bounds) == 11
    assert bounds == sorted(bounds, reverse=True)


def test_growth_adds_up(session: Session) -> None:
    for _ in range(3):
        session.metrics.answered("direct", 1, 1)
        session.metrics.took(1e-5)
        session.metrics.publish()
    assert session.published("path") == {"calls_total direct": 3}
    assert session.published("le")["own_seconds_bucket +Inf"] == 3


def test_what_is_mapped_is_told_as_it_is(session: Session) -> None:
    session.mapped = (8192, 2)
    assert session.published() == {"mapped_bytes": 8192, "mapped_regions": 2}
    session.mapped = (4096, 1)
    assert session.published() == {"mapped_bytes": 4096, "mapped_regions": 1}
    session.mapped = (0, 0)
    assert session.published() == {}


def test_calls_reach_the_server_only_when_they_are_published(session: Session, port: MetricsPort) -> None:
    session.metrics.answered("direct", 1, 1)
    session.metrics.refused(ModelError("no output"))
    session.metrics.took(1e-5)
    assert port.changes == []


def test_many_calls_cost_as_many_round_trips_as_one(session: Session, port: MetricsPort) -> None:
    for _ in range(1000):
        session.metrics.answered("direct", 1, 1)
    session.metrics.publish()
    assert sorted(port.changes) == [
        f"{PREFIX}calls_total direct 1000",
        f"{PREFIX}copied_bytes_total 1000",
        f"{PREFIX}zero_copy_bytes_total 1000",
    ]


def test_where_nothing_has_happened_nothing_is_sent(session: Session, port: MetricsPort) -> None:
    session.mapped = (8192, 2)
    session.metrics.publish()
    port.changes.clear()
    session.metrics.publish()
    assert port.changes == []


def test_threads_count_without_loss(session: Session) -> None:
    def count() -> None:
        for _ in range(2000):
            session.metrics.answered("direct", 1, 0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        session.metrics.publish()
    assert session.published("path") == {"calls_total direct": 8000}


def test_every_series_names_its_model_version_and_session(session: Session, port: MetricsPort) -> None:
    labels = [dict(labels) for _, labels in port.series()]
    assert {(found["model"], found["version"]) for found in labels} == {("resize", "3")}
    assert len({found["session"] for found in labels}) == 1


def test_sessions_of_one_model_share_no_series(session: Session, port: MetricsPort) -> None:
    other = Session(port)  # the port complains if they did
    session.metrics.answered("direct", 1, 1)
    session.metrics.publish()
    other.metrics.close()
    del other
    assert session.published("path") == {"calls_total direct": 1}


def test_a_closed_session_has_no_series(session: Session, port: MetricsPort) -> None:
    assert port.series()
    session.metrics.close()
    assert port.series() == {}


def test_closing_twice_is_fine(session: Session) -> None:
    session.metrics.close()
    session.metrics.close()


def test_sums_are_published_from_time_to_time_until_the_server_does_not_take_them(
    port: MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shm_backend_utils.model.metrics._INTERVAL_S", 0.001)
    session = Session(port)
    session.metrics.answered("direct", 1, 1)
    assert port.was_changed.wait(20)
    port.failure = RuntimeError("the server has gone")
    session.metrics.answered("direct", 1, 1)
    assert port.was_warned.wait(20)
    session.metrics.answered("direct", 1, 1)
    session.metrics.close()
    assert port.warnings == ["model 'resize' publishes its metrics no longer: the server has gone"]


def test_a_server_without_metrics_gets_a_warning_and_the_session_goes_without() -> None:
    port: Any = MetricsPort(has_metrics=False)
    assert Metrics.start_or_warn(port, "resize", "3", lambda: (0, 0)) is None
    assert port.warnings == ["model 'resize' publishes no metrics, though SHM_METRICS is true: no metrics here"]
