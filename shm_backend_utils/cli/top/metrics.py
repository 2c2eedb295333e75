"""What Triton's metrics port says of this library's models, and how much of it there was per second."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Final, NamedTuple
from urllib.error import HTTPError

from prometheus_client.parser import text_string_to_metric_families

from ...errors import MachineError
from ...http.whole_answers import fetch

__all__ = ["ModelRates", "Reading", "Series", "rates_between", "read_metrics"]

_TIMEOUT_S: Final = 3.0
_MOST_BYTES: Final = 1 << 22  # ten thousand series, and some seconds for the parser
_NONSENSE: Final = 2.0**63  # no counter comes so far; sums of larger ones may be no numbers
_OURS: Final = "shm_backend_utils_"
_TRITONS: Final = "nv_"
_COMMON_LABELS: Final = frozenset({"model", "version", "session"})
_EXPECTED: Final = "expected Triton's metrics port as --metrics-url; it is http://HOST:8002 where nobody changed it"


class Series(NamedTuple):
    """One series of the metrics port.

    Attributes
    ----------
    name : str
        Without this library's prefix.
    model, version, session : str
    label : str
        The value of the label that only this name has, as a path; empty if it has none.
    """

    name: str
    model: str
    version: str
    session: str
    label: str


class Reading(NamedTuple):
    """What the port said at one moment.

    Attributes
    ----------
    taken_s : float
        When, by ``time.monotonic()``.
    values : mapping of Series to float
        Empty where no model publishes metrics of this library.
    """

    taken_s: float
    values: Mapping[Series, float]


@dataclass
class ModelRates:
    """What the instances of one version of a model did between two readings, together.

    Attributes
    ----------
    model, version : str
    instances : int
        That publish metrics. Those that were killed count until the server ends.
    direct_per_s, triton_per_s, refused_per_s : float or None
        Requests that were answered on the direct path and over Triton, and that were refused. None after one reading.
    zero_copy_bytes_per_s, copied_bytes_per_s : float or None
        Bytes of tensors that were used where the client has them, and that were copied.
    own_s : float or None
        The mean of what the library took for a call; None if there was none.
    refusals_per_s : dict of str to float
        By the error's class; those that there were.
    mapped_bytes, mapped_regions : int
        What the instances have mapped now.
    """

    model: str
    version: str
    instances: int = 0
    direct_per_s: float | None = None
    triton_per_s: float | None = None
    refused_per_s: float | None = None
    zero_copy_bytes_per_s: float | None = None
    copied_bytes_per_s: float | None = None
    own_s: float | None = None
    refusals_per_s: dict[str, float] = field(default_factory=dict)
    mapped_bytes: int = 0
    mapped_regions: int = 0


def read_metrics(url: str) -> Reading:
    """Ask a metrics port, which is given as ``http://HOST:PORT``.

    Raises
    ------
    MachineError
        Nobody answers there, or not as Triton does: one line for the user.
    """
    try:
        text = fetch(f"{url.rstrip('/').removesuffix('/metrics')}/metrics", _TIMEOUT_S, _MOST_BYTES).decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except HTTPError as error:
        raise MachineError(f"{url} answers {error.code} when it is asked for metrics; {_EXPECTED}") from None
    except (HTTPException, ValueError):
        raise MachineError(f"{url} does not answer with metrics; {_EXPECTED}") from None
    except OSError as error:
        raise MachineError(f"{url} does not answer ({error.strerror or 'not in time'}); {_EXPECTED}") from None
    ours = {
        _series_of(sample.name, sample.labels): sample.value
        for sample in samples
        if sample.name.startswith(_OURS) and abs(sample.value) < _NONSENSE  # which NaN is not, either
    }
    if not ours and not any(sample.name.startswith(_TRITONS) for sample in samples):
        raise MachineError(f"{url} has metrics, but none of Triton's; {_EXPECTED}")
    return Reading(time.monotonic(), ours)


def rates_between(before: Reading | None, now: Reading) -> list[ModelRates]:
    """Return what models did between two readings, by model and version; what they are now, if there is only one.

    A series that was not there before, as of an instance that was loaded since, has grown from 0; so has one that is
    less than before.
    """
    models: dict[tuple[str, str], ModelRates] = {}
    sessions = defaultdict(set)
    for series, value in now.values.items():
        model = models.setdefault((series.model, series.version), ModelRates(series.model, series.version))
        sessions[series.model, series.version].add(series.session)
        if series.name == "mapped_bytes":
            model.mapped_bytes += int(value)
        elif series.name == "mapped_regions":
            model.mapped_regions += int(value)
    for key, model in models.items():
        model.instances = len(sessions[key])
        if before is not None and now.taken_s > before.taken_s:
            _set_rates(model, dict(_growth(before, now, key)), now.taken_s - before.taken_s)
    return [models[key] for key in sorted(models)]


def _set_rates(model: ModelRates, growth: Mapping[tuple[str, str], float], elapsed_s: float) -> None:
    model.direct_per_s = growth.get(("calls_total", "direct"), 0.0) / elapsed_s
    model.triton_per_s = growth.get(("calls_total", "triton"), 0.0) / elapsed_s
    model.refusals_per_s = {
        reason: grown / elapsed_s for (name, reason), grown in growth.items() if name == "refusals_total" and grown
    }
    model.refused_per_s = sum(model.refusals_per_s.values())
    model.zero_copy_bytes_per_s = growth.get(("zero_copy_bytes_total", ""), 0.0) / elapsed_s
    model.copied_bytes_per_s = growth.get(("copied_bytes_total", ""), 0.0) / elapsed_s
    timed = growth.get(("own_seconds_count", ""), 0.0)
    model.own_s = growth.get(("own_seconds_sum", ""), 0.0) / timed if timed else None


def _growth(before: Reading, now: Reading, key: tuple[str, str]) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield what series of a model have grown by, all sessions together: by name and label."""
    grown: defaultdict[tuple[str, str], float] = defaultdict(float)
    for series, value in now.values.items():
        if (series.model, series.version) == key:
            earlier = before.values.get(series, 0.0)
            grown[series.name, series.label] += value - earlier if value >= earlier else value
    yield from grown.items()


def _series_of(name: str, labels: Mapping[str, str]) -> Series:
    name = name.removeprefix(_OURS)
    if name.startswith("own_seconds_"):  # the parser lets every counter's name end so
        name = name.removesuffix("_total")
    own = [value for key, value in sorted(labels.items()) if key not in _COMMON_LABELS]
    return Series(name, labels.get("model", ""), labels.get("version", ""), labels.get("session", ""), "".join(own))
