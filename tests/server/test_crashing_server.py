"""A real tritonserver that crashes is known by its log, and the tests go on with another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.plugin.outcomes import outcome_of

pytestmark = pytest.mark.long

MODEL = Path(__file__).resolve().parents[1] / "models" / "ordinary"


def test_a_test_that_meets_a_crash_is_run_once_more(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model_repository" / MODEL.name, ignore=shutil.ignore_patterns("__pycache__"))
    status, printed = outcome_of(
        tmp_path,
        """
        import os
        import signal

        import pytest
        from shm_backend_utils.client import ShmClient

        crashed = []

        @pytest.fixture(scope="module")
        def client(triton_server):
            with ShmClient(triton_server.grpc_url, timeout_s=30) as client:
                yield client

        def test_it(client, triton_server):
            if not crashed:
                crashed.append(triton_server.pid)
                os.kill(triton_server.pid, signal.SIGSEGV)
            while triton_server.pid == crashed[0]:
                assert client.is_model_ready("ordinary")
            assert client.is_model_ready("ordinary")

        def test_after(client, triton_server):
            assert triton_server.pid != crashed[0]
            assert client.is_model_ready("ordinary")
        """,
    )
    assert (status, "2 passed, 1 server died" in printed) == (0, True), printed
    assert "test_it.py::test_it: failed as Triton itself crashed, and was run once more\nSignal (11)" in printed
