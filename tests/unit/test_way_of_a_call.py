"""How many of the package's functions a warm call of the shortest kind takes, on the direct path.

One input, one output, no hint for it. `scripts/bench --functions` counts a call that names its output and hints its
size, and the transport as well: those are more.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import shm_backend_utils
from shm_backend_utils.client import ShmClient
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

PACKAGE = str(Path(shm_backend_utils.__file__).parent)
MOST = 25
X = np.arange(256, dtype=np.float32)


def functions_called(work: Callable[[], object], transport: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """Return the package's functions that work calls, in order; not the transport's, which is a fake.

    A generator that goes on is not called again.
    """
    frames: list[FrameType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and frame not in frames:
            frames.append(frame)

    send = transport.send

    def send_unseen(message: Any, timeout_s: float) -> Any:
        sys.setprofile(None)
        answer = send(message, timeout_s)
        sys.setprofile(note)
        return answer

    with patch.context() as patched:
        patched.setattr(transport, "send", send_unseen)
        gc.disable()  # finalizers of what earlier tests have left are none of the call's functions
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
            gc.enable()
    return [f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}" for frame in frames]


def test_a_warm_call_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(client: ShmClient) -> None:
        np.testing.assert_array_equal(client.infer("m", {"IN0": X})["OUT0"], 2 * X)

    with FakeServer(config("m")) as server, client_of(server) as client:
        for _ in range(3):
            call(client)
        inputs = {"IN0": X}
        found = functions_called(lambda: client.infer("m", inputs), client._driver.transport, monkeypatch)
    print(f"{len(found)} functions:", *found, sep="\n  ")
    assert len(found) <= MOST
