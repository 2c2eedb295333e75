"""What the docstrings of the stubs say can be found and read, by people and by the other tests."""

from __future__ import annotations

import pytest

from .declared import MODULES, STUBS, declarations
from .releases import Release, release_of, releases_in, releases_of_parameters

FIRST_YEAR, FIRST_MINOR = 22, 18
"""Triton 22.01 is 2.18; from then on every month had its own, until 25.07, which was 2.59 again."""


def minor_of(release: str) -> int:
    year, month = map(int, release.split("."))
    months = 12 * (year - FIRST_YEAR) + month - 1
    return FIRST_MINOR + months - (release >= "25.07")


@pytest.mark.parametrize(
    ("release", "minor"), [("22.01", 18), ("23.12", 41), ("24.10", 51), ("25.06", 59), ("25.08", 60), ("26.07", 71)]
)
def test_versions_are_counted_by_months(release: str, minor: int) -> None:
    assert minor_of(release) == minor


@pytest.mark.parametrize("module", MODULES)
def test_every_release_is_named_with_its_version(module: str) -> None:
    text = (STUBS / f"{module}-stubs" / "__init__.pyi").read_text()
    found = releases_in(" ".join(text.split()))
    assert found
    assert [(release, version) for release, version in found if version != (2, minor_of(release))] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_function_and_class_has_a_docstring(module: str) -> None:
    declared = declarations(module)
    without = {
        name
        for name, declaration in declared.items()
        if declaration.described.kind in ("class", "function")
        and not declaration.docstring
        # How all enumerations are made and compared is said once, and arguments of __init__ are in the class's.
        and not name.rpartition(".")[2].startswith("__")
    }
    assert without == set()


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("Tensor", (2, 0)),
        ("Tensor.shape", (2, 25)),
        ("MetricFamily.Metric", (2, 34)),
        ("MetricFamily.HISTOGRAM", (2, 49)),
        ("TritonError.__ErrorCode.CANCELLED", (2, 39)),
        ("TRITONSERVER_MEMORY_GPU", (2, 33)),
        ("InferenceResponse.parameters", (2, 55)),
        ("ResponseIterator.cancel", (2, 57)),
    ],
)
def test_the_release_of_a_name_is_its_own_or_that_of_its_class(name: str, release: Release) -> None:
    assert release_of(name, declarations("c_python_backend_utils")) == release


def test_the_release_of_a_parameter_is_found_in_its_class() -> None:
    releases = releases_of_parameters("InferenceResponse.__init__", declarations("c_python_backend_utils"))
    assert releases == {"parameters": (2, 55)}
