"""Models that keep a request and never answer it: nobody waits longer for them than they like."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, ShmClient
from shm_backend_utils.client.errors import DeadlineExceededError, InferenceError
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.testing.harness import ModelHarness
from tests.unit.fake_gpu import wait_until
from tests.unit.harness.folders import folder_of

KEEPING = """
    import pathlib
    import triton_python_backend_utils as pb_utils
    NOTES = pathlib.Path(__file__).parent
    class TritonPythonModel:
        def initialize(self, args):
            self.kept = []
        def execute(self, requests):
            if any(request.is_cancelled() for request in self.kept):
                (NOTES / "cancelled").touch()
            self.kept += requests
            self.senders = [request.get_response_sender() for request in self.kept]
            (NOTES / "executed").touch()
"""
X = {"X": np.arange(4, dtype=np.float32)}
ENOUGH_S = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path, KEEPING)


@pytest.fixture(params=[ModelHarness, ModelHarness.in_child], ids=["here", "child"])
def harness(request: pytest.FixtureRequest, folder: Path) -> Iterator[ModelHarness]:
    with request.param(folder, patience_s=0.2) as made:
        yield made


def in_time(act: Callable[[], object]) -> None:
    """Do something that may not hang."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(ENOUGH_S)
    assert not thread.is_alive()


def test_a_client_closes_after_its_deadline(harness: ModelHarness) -> None:
    client = ShmClient(harness)
    with pytest.raises(DeadlineExceededError):
        client.infer("m", X, path="inline", timeout_s=0.2)
    in_time(client.close)


def test_a_client_that_closes_ends_its_calls(harness: ModelHarness, folder: Path) -> None:
    client = ShmClient(harness)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.infer, "m", X, path="inline", timeout_s=60)
        wait_until((folder / "1" / "executed").exists)
        in_time(client.close)
        assert isinstance(call.exception(ENOUGH_S), ClosedError)


def test_an_asynchronous_client_closes_after_its_deadline(harness: ModelHarness) -> None:
    async def call() -> None:
        async with AsyncShmClient(harness) as client:
            with pytest.raises(DeadlineExceededError):
                await client.infer("m", X, path="inline", timeout_s=0.2)

    in_time(lambda: asyncio.run(call()))


def test_the_model_knows_that_nobody_waits(harness: ModelHarness, folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(DeadlineExceededError):
            harness.infer(X)
    assert (folder / "1" / "cancelled").exists()


def test_a_model_that_is_unloaded_answers_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        import kept
        class TritonPythonModel:
            def execute(self, requests):
                kept.senders.put([request.get_response_sender() for request in requests])
    """
    kept: Any = ModuleType("kept")
    kept.senders = queue.SimpleQueue()
    monkeypatch.setitem(sys.modules, "kept", kept)
    with ThreadPoolExecutor(1) as threads, ModelHarness(folder_of(tmp_path, code)) as harness:
        call = threads.submit(harness.infer, X)
        _senders = kept.senders.get(timeout=ENOUGH_S)
        harness._open().unload("m")
        with pytest.raises(InferenceError, match="model 'm' was unloaded before it answered"):
            call.result(ENOUGH_S)
