"""What is counted in a model's process, how it gets to the server, and what docs/monitoring.md says of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.tools.lone_emulator import LoneServer
from shm_backend_utils import errors
from shm_backend_utils.errors import MachineError, ModelError, ProbedError, ShmError, TableError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.debug import MeasuredDebugCall
from shm_backend_utils.model.metrics import _BUCKETS, _FAMILIES, _PREFIX, MeasuredCall, Metrics
from shm_backend_utils.model.triton import TritonBackend
from shm_backend_utils.testing.emulator.metrics import MetricsRegistry, Series
from tests.e2e.eventually import eventually
from tests.unit.emulated import delivered, error_code, start_server
from tests.unit.gpu.fakes import DRIVER, MODEL
from tests.unit.sessions import double, session_of, tensor
from tests.unit.table_client import Client


class Counted:
    def __init__(self, server: LoneServer) -> None:
        self.mapped = (0, 0)
        self.metrics = Metrics(TritonBackend(), "resize", "3", lambda: self.mapped)
        self._registry = server.metrics

    def series(self, *names: str) -> list[tuple[str, dict[str, str], float]]:
        return [
            (name, dict(labels), series.value)
            for name in names or _FAMILIES
            for labels, series in self._registry.series(_PREFIX + name).items()
        ]

    def published(self, own_label: str = "") -> dict[str, float]:
        """Publish; return values that are not 0 by name and the value of this label; other series are left out."""
        self.metrics.publish()
        found = {}
        for name, labels, value in self.series():
            if value and (own_label in labels or (not own_label and len(labels) == 3)):
                found[f"{name} {labels[own_label]}" if own_label else name] = value
        return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    monkeypatch.setattr("shm_backend_utils.model.metrics._INTERVAL_S", 3600.0)  # the tests publish by themselves
    counted = Counted(start_server(monkeypatch))
    yield counted
    counted.metrics.close()


@pytest.fixture
def changes(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was added at the server so far; at no time does a bucket exceed a wider one there."""
    made: list[float] = []
    increment = MetricsRegistry.increment

    def noting(registry: MetricsRegistry, series: Series, value: float) -> None:
        made.append(value)
        increment(registry, series, value)
        buckets = {float(labels["le"]): value for _, labels, value in counted.series("own_seconds_bucket")}
        assert [buckets[bound] for bound in sorted(buckets)] == sorted(buckets.values())

    monkeypatch.setattr(MetricsRegistry, "increment", noting)
    return made


def test_answers_are_counted_by_path_and_growth_adds_up(counted: Counted, changes: list[float]) -> None:
    for _ in range(1000):
        counted.metrics.answered("direct", 2, 1)
    assert changes == [], "calls reach the server only when they are published"
    assert counted.published() == {"copied_bytes_total": 1000, "zero_copy_bytes_total": 2000}
    assert sorted(changes) == [1000, 1000, 2000], "many cost as many round trips as one"
    for path in ("triton", "direct"):
        counted.metrics.answered(path, 0, 0)
        counted.metrics.took(1e-5)
        counted.metrics.publish()
    changes.clear()
    assert counted.published("path") == {"calls_total direct": 1001, "calls_total triton": 1}
    assert changes == [], "where nothing has happened, nothing is sent"
    assert counted.published("le")["own_seconds_bucket +Inf"] == 2
    assert {(labels["model"], labels["version"]) for _, labels, _ in counted.series()} == {("resize", "3")}


def test_own_time_is_a_cumulative_histogram(counted: Counted, changes: list[float]) -> None:
    for seconds in (1e-6, 2e-5, 3e-5, 4e-4, 2.0):  # the second is a bucket's bound, and belongs to it
        counted.metrics.took(seconds)
    buckets = counted.published("le")
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
    assert counted.published() == {"own_seconds_count": 5, "own_seconds_sum": pytest.approx(2.000451)}
    assert len(changes) == 2 + 11


def test_what_is_mapped_is_told_as_it_is(counted: Counted) -> None:
    for byte_size, count in ((8192, 2), (4096, 1)):
        counted.mapped = (byte_size, count)
        assert counted.published() == {"mapped_bytes": byte_size, "mapped_regions": count}
    counted.mapped = (0, 0)
    assert counted.published() == {}


def test_sums_are_published_until_the_server_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise RuntimeError("the server has gone")

    monkeypatch.setattr("shm_backend_utils.model.metrics._INTERVAL_S", 0.001)
    server = start_server(monkeypatch)
    counted = Counted(server)
    counted.metrics.answered("direct", 1, 1)
    eventually(lambda: sum(value for *_, value in counted.series("calls_total")) == 1)
    with monkeypatch.context() as patch:
        patch.setattr(MetricsRegistry, "increment", gone)
        counted.metrics.answered("direct", 1, 1)
        eventually(lambda: server.lines)
        counted.metrics.answered("direct", 1, 1)
        counted.metrics.close()
    assert server.lines == ["model 'resize' no longer publishes its metrics: the server has gone"]


def test_a_server_without_metrics_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(monkeypatch)
    monkeypatch.delattr(server.backend, "MetricFamily")
    assert Metrics.start_or_warn(TritonBackend(), "resize", "3", lambda: (0, 0)) is None
    (line,) = server.lines
    assert line.startswith("model 'resize' publishes no metrics, though SHM_METRICS is true: this server's Python back")


def test_every_class_of_refusals_has_a_series_however_many_refusals_there_are(counted: Counted) -> None:
    counted.metrics.publish()
    before = len(counted.series())
    for error in (ValueError("the model's own"), KeyboardInterrupt(), ProbedError("the report is …")):
        counted.metrics.refused(error)
    assert counted.published("reason") == {}
    for number in range(1000):
        counted.metrics.refused(TableError(f"inputs[{number}]", str(number), "another"))
        counted.metrics.publish()
    counted.metrics.refused(ModelError("no output"))
    assert counted.published("reason") == {"refusals_total TableError": 1000, "refusals_total ModelError": 1}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ShmError)]
    for kind in kinds:
        counted.metrics.refused(kind.__new__(kind))
    counted.metrics.publish()
    names = {kind.__name__ for kind in kinds} - {"ProbedError", "RequestRefusedError"}
    assert len(counted.series()) == before + len(names)


X = np.arange(4, dtype=np.float32)


class Told(list[Any]):
    """What a call tells the metrics."""

    def answered(self, *counts: Any) -> None:
        self.append(counts)

    def refused(self, error: BaseException) -> None:
        self.append(type(error))

    def took(self, own_s: float) -> None:
        assert own_s > 0
        self.append("time")


@pytest.fixture
def metrics() -> Told:
    return Told()


@pytest.fixture
def session(cuda: CudaRuntime, metrics: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    access = CudaAccess(lambda: cuda)
    with session_of(monkeypatch, [tensor("X"), tensor("W")], [tensor("Y"), tensor("Z")], cuda=access) as session:
        monkeypatch.setattr(session, "_new_call", lambda *arguments: MeasuredCall(metrics, *arguments))
        yield session


def test_what_is_copied_and_calls_that_fail_are_counted(session: ShmSession, metrics: Told, client: Client) -> None:
    def infer(call: Call) -> None:
        call.put("Y", np.ones(4, np.float32))
        call.put("Z", np.ones(2, np.float32))

    session.serve([client.request({"X": X}, {"Y": 16, "Z": 4}, delivered={"W": X})], infer)
    assert metrics == ["time", ("direct", 16, 16 + 16 + 8)]
    del metrics[:]
    session.serve([delivered({}, ["Y"], {"X": X})], double)
    assert metrics == ["time", ("triton", 0, 32)], "what Triton delivers was copied"
    del metrics[:]
    session.serve([client.request({}, {"Y": 16})], double)
    session.serve([client.request({"X": X}, {"Y": 16})], lambda call: None)
    assert [kind.__name__ for kind in metrics] == ["MissingTensorError", "ModelError"]


def test_a_call_that_a_gpu_works_for_is_counted_as_it_ends(session: ShmSession, metrics: Told, client: Client) -> None:
    def infer(call: Call) -> None:
        double(call)
        call.ready_on(0)

    session.serve([client.request({"X": X}, {"Y": 16})], infer)
    assert metrics == ["time", ("direct", 32, 0)]
    del metrics[:]

    def infer_and_fail(call: Call) -> None:
        infer(call)
        DRIVER.fail_next("cuEventSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS", process=MODEL)

    (response,) = session.serve([client.request({"X": X}, {"Y": 16})], infer_and_fail)
    assert error_code(response) == "UNAVAILABLE"
    (kind,) = metrics
    assert issubclass(kind, MachineError)


@pytest.mark.parametrize("kind", [MeasuredCall, MeasuredDebugCall])
def test_a_call_outside_of_serve_is_counted_once_with_shm_debug_too(
    session: ShmSession, metrics: Any, client: Client, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(session, "_new_call", lambda *arguments: kind(metrics, *arguments))
    with session.open(client.request({"X": X}, {"Y": 16})) as call:
        double(call)
    assert metrics == ["time", ("direct", 32, 0)]
    del metrics[:]
    with pytest.raises(ValueError, match="no"), session.open(client.request({"X": X}, {"Y": 16})):
        raise ValueError("no")
    assert metrics == [ValueError]


TEXT = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
QUERIES = re.findall(r"^```promql\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_table_has_every_metric_and_its_label() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (?:`(\w+)`)?", TEXT, re.MULTILINE)
    told = {name: label for names, label in rows for name in re.findall(r"\w+", names)}
    known = {name: family.label for name, family in _FAMILIES.items()}
    assert set(re.findall(rf"{_PREFIX}\w+", TEXT)) <= {f"{_PREFIX}{name}" for name in known}
    assert told.keys() == known.keys()
    assert {name: told[name] for name in told if not name.startswith("own_seconds_")} == {
        name: known[name] for name in known if not name.startswith("own_seconds_")
    }


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_has_the_labels_of_its_metrics(query: str) -> None:
    assert [query.count(bracket) for bracket in "({["] == [query.count(bracket) for bracket in ")}]"]
    if _PREFIX in query:
        grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
        own = {_FAMILIES[name].label for name in re.findall(rf"{_PREFIX}(\w+)", query)}
        assert grouped <= {"model", "version"} | own
        assert "sum by (" in query  # over the label session
        for path in re.findall(r'path="(\w+)"', query):
            assert path in _FAMILIES["calls_total"].values
    assert ("histogram_quantile" in query) == ("_bucket" in query) == ("le)" in query)
    assert _BUCKETS[-1] == "+Inf"  # without which there is no quantile
