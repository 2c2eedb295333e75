"""A model's report, beside what runs here: versions, NumPy, and what registered names mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ... import __version__
from ...dtypes import BYTES
from ...model_spec import ModelSpec
from .findings import Finding
from .troubles.model import NAMES_UNUSABLE, NUMPY_2_STRINGS, OLD_STUB, OTHER_VERSION

__all__ = ["findings_in_report"]


def findings_in_report(spec: ModelSpec, report: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what the report of a model's session tells that is not as it should be; what it lacks is not judged."""
    version = report.get("version")
    if version != __version__:
        yield Finding(OTHER_VERSION, f"the model has {version}, and this is {__version__}", spec.name)
    if report.get("stub_reads_numpy") is False:
        strings = [
            name for each in (spec.inputs, spec.outputs) for name, tensor in each.items() if tensor.dtype is BYTES
        ]
        found = f"NumPy {report.get('numpy')}"
        if strings:
            yield Finding(NUMPY_2_STRINGS, f"{found}, and strings: {', '.join(strings)}", spec.name)
        else:
            yield Finding(OLD_STUB, found, spec.name)
    if report.get("knows_server") is False:
        yield Finding(NAMES_UNUSABLE, "found no address of the server in its command line", spec.name)
