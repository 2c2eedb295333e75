"""What older servers cannot do, and newer ones do otherwise: markers of tests. docs/versions.md has a row for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.server import Installation
from shm_backend_utils.server.install import has_numpy_1, reads_own_numpy
from tests.conformance.backend.backend_checks.expecting import FREES_SAFELY

asks_models_whether_they_are_ready = pytest.mark.needs_triton("2.68", "2.67 asks for the model alone, older ones never")
calls_dead_models_ready = pytest.mark.until_triton("2.65", "newer ones look at the processes themselves")
carries_bf16 = pytest.mark.needs_triton("2.49", "in older ones, no request and no response carries BF16")
frees_safely = pytest.mark.needs_triton(FREES_SAFELY, "the stub of 2.51 for Python 3.12 may die as it frees a tensor")
gives_up_loading = pytest.mark.needs_triton("2.46", "older ones hang on a model that fails before initialize")
has_ensembles_that_fail = pytest.mark.needs_triton("2.51", "2.41 tells of a deadlock, and not of a step's error")
has_models_without_sessions = pytest.mark.has_models_without_sessions
knows_its_models = pytest.mark.needs_triton("2.71", "older ones call an unknown model not ready")
names_sequences = pytest.mark.needs_triton("2.45", "to older Python backends, a sequence's name is a number")
outlives_models = pytest.mark.needs_triton("2.51", "2.41 itself dies, at times, when a model's process is killed")
reads_numpy_1_alone = pytest.mark.until_triton("2.52", "the stubs of newer ones read NumPy 2, too")
refuses_an_output_twice = pytest.mark.needs_triton("2.69", "older ones allow it")
registers_a_key_again = pytest.mark.needs_triton("2.69", "older ones take a file for a key's that they have closed")
says_more = pytest.mark.needs_triton("2.55", "in older ones, a model's response has no parameters")
takes_places_of_no_bytes = pytest.mark.needs_triton("2.60", "older ones say that they lie beyond the region")
takes_floats = pytest.mark.needs_triton("2.43", "older ones refuse parameters that are floats")
tells_404 = pytest.mark.needs_triton("2.51", "2.41 answers all refusals of a model with 400 over HTTP")


def refusals(item: pytest.Item, server: Installation) -> Iterator[str]:
    """Yield why a test is not for a server: it is too old for it, or too new."""
    for marker in item.iter_markers("needs_triton"):
        version, why = marker.args
        if not server.is_at_least(version):
            yield f"needs Triton {version}, and this is {server.triton}: {why}"
    for marker in item.iter_markers("until_triton"):
        version, why = marker.args
        if server.is_at_least(version):
            yield f"until Triton {version}, and this is {server.triton}: {why}"
    if any(item.iter_markers("has_models_without_sessions")) and not (has_numpy_1() or reads_own_numpy(server)):
        yield f"the stub of Triton {server.triton} reads NumPy 1 alone, and this Python has none: such models go wrong"
