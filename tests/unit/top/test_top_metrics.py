"""What ``top`` makes of a metrics port: rates by the difference of two readings."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shm_backend_utils.cli.top import metrics
from shm_backend_utils.cli.top.metrics import ModelRates, Reading, Series, rates_between, read_metrics
from shm_backend_utils.errors import MachineError
from tests.unit.top.metrics_text import TRITONS_OWN, calls, metrics_server, series


def reading(taken_s: float, values: dict[tuple[str, str], float], session: str = "1-a") -> Reading:
    """Return a reading of one model: by name and label."""
    named = {Series(name, "multiply", "1", session, label): value for (name, label), value in values.items()}
    return Reading(taken_s, named)


def test_everything_of_a_model_is_read() -> None:
    with metrics_server() as server:
        server.text += calls("direct", 5) + calls("triton", 2)
        server.text += series("refusals_total", 1, own='reason="TableError",')
        server.text += series("own_seconds_sum", 0.5) + series("own_seconds_count", 7)
        server.text += series("mapped_bytes", 4096, kind="gauge")
        values = {(each.name, each.label): value for each, value in read_metrics(server.url).values.items()}
    assert values == {
        ("calls_total", "direct"): 5,
        ("calls_total", "triton"): 2,
        ("refusals_total", "TableError"): 1,
        ("own_seconds_sum", ""): 0.5,
        ("own_seconds_count", ""): 7,
        ("mapped_bytes", ""): 4096,
    }


@pytest.mark.parametrize("ending", ["", "/", "/metrics"])
def test_an_address_may_be_that_of_the_page(ending: str) -> None:
    with metrics_server() as server:
        assert read_metrics(server.url + ending).values == {}


def test_rates_are_differences_over_time() -> None:
    before = reading(10.0, {("calls_total", "direct"): 100, ("copied_bytes_total", ""): 5})
    now = reading(
        12.0,
        {
            ("calls_total", "direct"): 150,
            ("calls_total", "triton"): 6,
            ("refusals_total", "TableError"): 4,
            ("zero_copy_bytes_total", ""): 2048,
            ("copied_bytes_total", ""): 5,
            ("own_seconds_sum", ""): 0.002,
            ("own_seconds_count", ""): 40,
            ("mapped_bytes", ""): 4096,
            ("mapped_regions", ""): 2,
        },
    )
    assert rates_between(before, now) == [
        ModelRates(
            "multiply",
            "1",
            instances=1,
            direct_per_s=25,
            triton_per_s=3,
            refused_per_s=2,
            zero_copy_bytes_per_s=1024,
            copied_bytes_per_s=0,
            own_s=0.00005,
            refusals_per_s={"TableError": 2},
            mapped_bytes=4096,
            mapped_regions=2,
        )
    ]


def test_after_one_reading_there_are_no_rates() -> None:
    (model,) = rates_between(None, reading(1.0, {("calls_total", "direct"): 100, ("mapped_bytes", ""): 5}))
    assert (model.direct_per_s, model.refused_per_s, model.own_s, model.mapped_bytes) == (None, None, None, 5)


def test_a_counter_that_went_back_has_grown_from_zero() -> None:
    before = reading(1.0, {("calls_total", "direct"): 1000})
    (model,) = rates_between(before, reading(2.0, {("calls_total", "direct"): 30}))
    assert model.direct_per_s == 30


def test_a_model_that_was_loaded_anew_has_grown_from_zero() -> None:
    before = reading(1.0, {("calls_total", "direct"): 1000})
    (model,) = rates_between(before, reading(2.0, {("calls_total", "direct"): 30}, session="2-b"))
    assert model.direct_per_s == 30
    assert model.instances == 1


def test_instances_add_up() -> None:
    first = reading(2.0, {("calls_total", "direct"): 10, ("mapped_bytes", ""): 1}, session="1-a")
    second = reading(2.0, {("calls_total", "direct"): 20, ("mapped_bytes", ""): 2}, session="2-b")
    (model,) = rates_between(Reading(1.0, {}), Reading(2.0, {**first.values, **second.values}))
    assert (model.instances, model.direct_per_s, model.mapped_bytes) == (2, 30, 3)


def test_a_figure_that_is_none_does_not_count() -> None:
    with metrics_server() as server:
        server.text += series("mapped_bytes", "NaN", kind="gauge") + calls("direct", math.inf)
        assert read_metrics(server.url).values == {}


@pytest.mark.parametrize("text", ["", "<html>no metrics</html>", "up 1\n", "a b c\n", "\udcff", "nv_x{"])
def test_what_is_not_tritons_is_told(text: str) -> None:
    with metrics_server() as server:
        server.text = text
        with pytest.raises(MachineError, match="expected Triton's metrics port") as caught:
            read_metrics(server.url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1", "http://", "http://localhost:99999", "ftp://localhost", "http://[", "localhost:8002", ""],
)
def test_who_does_not_answer_is_told(url: str) -> None:
    with pytest.raises(MachineError, match="expected Triton's metrics port"):
        read_metrics(url)


def test_another_port_of_the_server_is_told() -> None:
    with metrics_server() as server, pytest.raises(MachineError, match="answers 404 when it is asked for metrics"):
        read_metrics(f"{server.url}/v2")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.text(), st.text(alphabet='#{}="\\ \n\tTYPEHLPnv_a1.', max_size=60)))
def test_whatever_is_answered_it_is_read_or_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(metrics, "fetch", lambda *_: (TRITONS_OWN + text).encode(errors="replace"))
    with contextlib.suppress(MachineError):
        read_metrics("http://localhost")


@pytest.mark.parametrize("value", ["1e308", "-1e308", "+Inf", "NaN", "1e19"])
def test_numbers_that_no_counter_comes_to_do_not_count(value: str) -> None:
    with metrics_server() as server:
        server.text += series("mapped_bytes", value, kind="gauge") + calls("direct", 5)
        assert {each.name for each in read_metrics(server.url).values} == {"calls_total"}


def test_a_page_that_is_longer_than_any_is_not_read() -> None:
    with metrics_server() as server:
        server.text += "# a comment\n" * 400_000
        with pytest.raises(MachineError, match="does not answer with metrics"):
            read_metrics(server.url)
