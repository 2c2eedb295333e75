"""Metrics."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

from .expecting import kills_the_server, refused, same

REFUSED = "Failed to process the request for model 'checks_0_0', message: "
KIND = "TRITONSERVER_METRIC_KIND_"
GONE = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object should "
    "be deleted AFTER its corresponding 'Metric' objects have been deleted."
)


def _family(pb_utils: Any, kind: str) -> Any:
    families = pb_utils.MetricFamily
    return families(name=f"checked_{kind.lower()}", description="what", kind=getattr(families, kind))


def check_a_counter_counts(pb_utils: Any, request: Any) -> None:
    family = _family(pb_utils, "COUNTER")
    metric = family.Metric(labels={"check": "counts"})
    before = metric.value()
    metric.increment(2)
    metric.increment(0.5)
    metric.increment(np.float32(1))
    metric.increment(True)
    same(metric.value() - before, 4.5)


def check_a_gauge_goes_both_ways_and_labels_tell_series_apart(pb_utils: Any, request: Any) -> None:
    family = _family(pb_utils, "GAUGE")
    one, other, again = (family.Metric(labels={"check": name}) for name in ("one", "other", "one"))
    one.set(3.5)
    other.set(2**70)
    one.increment(-5)
    same((again.value(), other.value()), (-1.5, 2.0**70))


def check_series_go_with_their_family(pb_utils: Any, request: Any) -> None:
    families = pb_utils.MetricFamily
    family = families("checked_going", "what", families.COUNTER)
    metric = family.Metric()
    metric.increment(3)
    del family
    gc.collect()
    for deed, call in (
        ("get", metric.value),
        ("increment", lambda: metric.increment(1)),
        ("set", lambda: metric.set(1)),
        ("observe", lambda: metric.observe(1)),
    ):
        refused(pb_utils.TritonModelException, f"Failed to {deed} metric value: {GONE}", call)
    family = families("checked_going", "what", families.COUNTER)
    same(family.Metric().value(), 0.0)


def check_a_histogram_observes_and_has_buckets(pb_utils: Any, request: Any) -> None:
    counter, histogram = _family(pb_utils, "COUNTER"), _family(pb_utils, "HISTOGRAM")
    assert histogram.Metric(labels={"check": "observes"}, buckets=[1, 2.5]).observe(1) is None
    histogram.Metric(labels={"check": "one bucket"}, buckets=[])
    error, start = pb_utils.TritonModelException, "Failed to create metric."
    refused(error, f"{start} Unexpected buckets found.", lambda: counter.Metric(buckets=[1]))
    refused(error, f"{start} Buckets must be a list.", lambda: counter.Metric(buckets=(1,)))
    refused(error, f"{start} Missing required buckets.", histogram.Metric)
    refused(error, f"{start} Buckets must be a list.", lambda: histogram.Metric(buckets=(1,)))
    refused(RuntimeError, None, lambda: histogram.Metric(buckets=["a"]))


@kills_the_server
def check_what_metrics_refuse(pb_utils: Any, request: Any) -> None:
    kinds = type(_family(pb_utils, "COUNTER"))
    counter, gauge, histogram = (_family(pb_utils, kind) for kind in ("COUNTER", "GAUGE", "HISTOGRAM"))
    counted, gauged, observed = counter.Metric(), gauge.Metric(), histogram.Metric(buckets=[1])
    monotonic = f"{KIND}COUNTER can only be incremented monotonically by non-negative values."
    for deed, text, call in (
        ("Failed to increment metric value", monotonic, lambda: counted.increment(-1)),
        ("Failed to set metric value", f"{KIND}COUNTER does not support Set", lambda: counted.set(1)),
        ("Failed to observe metric value", f"{KIND}COUNTER does not support Observe", lambda: counted.observe(1)),
        ("Failed to observe metric value", f"{KIND}GAUGE does not support Observe", lambda: gauged.observe(1)),
        ("Failed to set metric value", f"{KIND}HISTOGRAM does not support Set", lambda: observed.set(1)),
        (
            "Failed to increment metric value",
            f"{KIND}HISTOGRAM does not support Increment",
            lambda: observed.increment(1),
        ),
        ("Failed to get metric value", f"{KIND}HISTOGRAM does not support Value", observed.value),
        ("Error when creating MetricFamily", "Invalid metric name", lambda: kinds("9a", "d", kinds.COUNTER)),
        (
            "Error when creating MetricFamily",
            "Family name already exists with different type",
            lambda: kinds("checked_counter", "what", kinds.GAUGE),
        ),
        ("Error when creating Metric", "Invalid label name", lambda: counter.Metric(labels={1: "c"})),
        (
            "Error when creating Metric",
            "attempt to access JSON non-string as string",
            lambda: counter.Metric(labels={"a": 1}),
        ),
        (
            "Error when creating Metric",
            "Bucket Boundaries must be strictly sorted",
            lambda: histogram.Metric(labels={"q": "r"}, buckets=[1, 1]),
        ),
    ):
        refused(pb_utils.TritonModelException, f"{deed}: {REFUSED}{text}", call)
