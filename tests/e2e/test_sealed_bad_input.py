"""What a client may say and hand over, at a real server: all of it is refused in time, and nothing is left of it.

The model's process lives on, has nothing more mapped or open than before, and serves an honest client as before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from scripts.tools.processes import mappings, open_files
from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory.descriptors import Descriptor
from tests.crash.processes import stub_of
from tests.unit.fetching.conftest import Script, ScriptedServer, give, memfd, say_nothing

from .eventually import eventually
from .loading_server import LoadingServer

MODEL = "fetching"
BOUND_S = 0.5
CONFIG = (Path(__file__).resolve().parents[1] / "models" / "direct_only" / "config.pbtxt").read_text()
BOUND = f'parameters {{ key: "SHM_HANDOVER_S" value: {{ string_value: "{BOUND_S}" }} }}\n'
X = np.arange(64, dtype=np.float32)
A_BUSY_MACHINE_S = 10.0


def pipe() -> Descriptor:
    reads, writes = os.pipe()
    os.close(writes)
    try:
        return Descriptor(os.dup, reads)
    finally:
        os.close(reads)


HAND_OVERS: Final[dict[str, tuple[Callable[[], Script], str]]] = {
    "no descriptor": (give, "its client's answer contradicts the descriptors that came with it"),
    "two descriptors": (lambda: give(memfd(), memfd()), "has handed over more than one descriptor"),
    "a pipe": (lambda: give(pipe()), "handed over no memfd; expected a sealed one"),
    "no header": (lambda: give(memfd()), "has no header of a managed"),
    "silence": (lambda: say_nothing, "shm:refused: shm_slot"),  # the last one, as it uses up this user's time
}


def test_what_is_no_region_is_refused_in_time(loading_server: LoadingServer) -> None:
    loading_server.load(MODEL, "direct_only", CONFIG + BOUND)
    stub = stub_of(loading_server.server, MODEL)
    assert stub is not None

    def held() -> tuple[list[str], int]:
        """Return which memfds are mapped in the model, and how much is open there."""
        return [line.split()[4] for line in mappings(stub) if "/memfd:" in line], len(open_files(stub))

    def at_rest() -> Any:
        before = held()
        time.sleep(0.2)
        return before if len(before[0]) == 1 and held() == before else None

    url = loading_server.server.grpc_url
    with (
        ShmClient(url, timeout_s=30, pool=PoolOptions(region="sealed")) as client,
        client.prepare(MODEL, {"X": (X.shape, X.dtype)}, outputs={"Y": X.nbytes}) as call,
    ):
        call.inputs["X"][:] = X
        call.infer().release()
        before = eventually(at_rest)
        for script, complaint in HAND_OVERS.values():
            with ScriptedServer(script()) as server:
                slot = f"2/{MODEL}/{server.key}/{bytes(16).hex()}/0"
                begin = time.monotonic()
                with pytest.raises(InferenceServerException, match=complaint) as refused:
                    loading_server.grpc.infer(MODEL, [], parameters={"shm_slot": slot, "shm_generation": 5})
                assert time.monotonic() - begin < BOUND_S + A_BUSY_MACHINE_S
            assert str(server.key) not in str(refused.value)
            with call.infer() as result:
                np.testing.assert_array_equal(result["Y"], X)
            eventually(lambda: held() == before)  # a thread of its own closes what was handed over
    assert stub_of(loading_server.server, MODEL) == stub
