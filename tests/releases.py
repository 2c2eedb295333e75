"""What older servers cannot do, as markers of the tests that need it. docs/versions.md has a row for each."""

from __future__ import annotations

import pytest

__all__ = [
    "carries_bf16",
    "gives_up_loading",
    "has_ensembles_that_fail",
    "names_sequences",
    "outlives_models",
    "says_more",
    "takes_floats",
    "tells_404",
]

carries_bf16 = pytest.mark.needs_triton("2.49", "in older ones, no request and no response carries BF16")
gives_up_loading = pytest.mark.needs_triton(
    "2.46", "older ones wait for ever for a model that fails before it is initialized"
)
has_ensembles_that_fail = pytest.mark.needs_triton(
    "2.51", "2.41 loses the error of an ensemble's step, and tells of a deadlock"
)
names_sequences = pytest.mark.needs_triton("2.45", "to older Python backends, a sequence's name is a number")
outlives_models = pytest.mark.needs_triton("2.51", "2.41 itself dies, at times, when a model's process is killed")
says_more = pytest.mark.needs_triton("2.55", "in older ones, a model's response has no parameters")
takes_floats = pytest.mark.needs_triton("2.43", "older ones refuse parameters that are floats")
tells_404 = pytest.mark.needs_triton("2.51", "2.41 answers all refusals of a model with 400 over HTTP")
