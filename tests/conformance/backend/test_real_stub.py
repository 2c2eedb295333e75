"""Every check, in the stub of a real server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from shm_backend_utils.server import EmbeddedServer, Installation, install
from tests.conformance.backend.asking import ask, models_in
from tests.conformance.backend.backend_checks import CHECKS, FAULT_CHECKS
from tests.releases import has_models_without_sessions, reads_numpy_1_alone
from tests.unit.harness.wires import ServerWire

pytestmark = pytest.mark.needs_triton("2.51", "the checks say what 2.51 does, and are asked with BF16 and a float")


@pytest.fixture(scope="module")
def installation() -> Installation:
    """The server, which tells its version once: it takes a second to."""
    return install()


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerWire]:
    """A way to a server whose stubs have the NumPy that they were built for."""
    with _served(tmp_path_factory.mktemp("conformance"), "server") as found:
        yield found


@pytest.fixture(scope="module")
def wire_of_numpy_2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerWire]:
    """A way to a server whose stubs have the NumPy of this process, which is 2."""
    with _served(tmp_path_factory.mktemp("conformance"), "own") as found:
        yield found


@has_models_without_sessions
@pytest.mark.parametrize("check", CHECKS)
def test_the_real_stub_behaves_as_the_check_says(wire: ServerWire, installation: Installation, check: str) -> None:
    marks = vars(CHECKS[check])
    if not installation.is_at_least(marks.get("since", "2")):
        pytest.skip(f"from Triton {marks['since']} on; this is {installation.triton}")
    if "kills_the_server" in marks:
        pytest.skip("real servers die of refusing it, two times out of three, or tell garbage")
    report = ask(wire, check)
    assert not report, report


@reads_numpy_1_alone
@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="the stub was built for NumPy 1")
@pytest.mark.parametrize("check", FAULT_CHECKS)
def test_a_real_stub_for_numpy_1_has_the_fault(wire_of_numpy_2: ServerWire, check: str) -> None:
    report = ask(wire_of_numpy_2, check)
    assert not report, report


@contextmanager
def _served(folder: Path, numpy: Literal["server", "own"]) -> Iterator[ServerWire]:
    with EmbeddedServer.start(models_in(folder / "models"), log_file=folder / "server.log", numpy=numpy) as server:
        wire = ServerWire(server.grpc_url)
        yield wire
        wire.close()
        os.kill(server.pid, signal.SIGKILL)  # with a dead stub, it would take seconds to stop
