"""Clients that do not know each other, at one model instance: what one of them does, or its request, hurts no other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import InferenceError, Result, ShmClient
from shm_backend_utils.server import EmbeddedServer

from .eventually import all_memory_comes_back
from .hand_made import DATATYPES, HandMade, Tensor, hand_made
from .loading_server import LoadingServer

X = np.arange(16, dtype=np.float32)
OUTPUTS = {"Y": X.nbytes}
CONFIG = Path(__file__).resolve().parents[1] / "models" / "misbehaving" / "config.pbtxt"


@pytest.fixture
def grpc_client(triton_server: EmbeddedServer) -> Iterator[ShmClient]:
    with ShmClient(triton_server.grpc_url, timeout_s=30, inline_bytes=0) as client:
        yield client


def pass_on(client: ShmClient) -> None:
    with client.infer("misbehaving", {"X": X}, outputs=OUTPUTS, parameters={"deed": "pass it on"}) as result:
        assert result.path == "direct"
        np.testing.assert_array_equal(result["Y"], X)


# A request fails alone


@pytest.mark.parametrize("kind", ["CancelledError", "SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_what_a_model_raises_beside_exceptions_is_the_error_of_one_request(grpc_client: ShmClient, kind: str) -> None:
    with pytest.raises(InferenceError, match=f"{kind}: the model gave up"):
        grpc_client.infer("misbehaving", {"X": X}, outputs=OUTPUTS, parameters={"deed": kind})
    pass_on(grpc_client)
    all_memory_comes_back(grpc_client)


def strings_that_lie(url: str) -> contextlib.AbstractContextManager[HandMade]:
    return hand_made(url, "batch_words", {}, {"LOUD": 64, "SIZE": 4})


def test_strings_whose_lengths_lie_fail_no_stranger_of_the_same_batch(
    triton_server: EmbeddedServer, grpc_client: ShmClient
) -> None:
    words = np.array([["a", "bc"]], object)
    with strings_that_lie(triton_server.grpc_url) as liar, ThreadPoolExecutor(4) as threads:
        at = liar.table["SIZE"].offset + 4096
        liar.region.bytes()[at : at + 8] = np.frombuffer(b"\xff\xff\xff\x7fgood", np.uint8)
        liar.table.inputs = [Tensor(b"WORDS", at, 8, 0, DATATYPES["BYTES"], [1, 2])]
        lying = threads.submit(liar.infer, [liar.carrier(1)])
        honest = [threads.submit(grpc_client.infer, "batch_words", {"WORDS": words}) for _ in range(3)]
        with pytest.raises(InferenceServerException, match="shm:tensor: tensor 'WORDS' has 8 bytes"):
            lying.result()
        results: list[Result] = [each.result() for each in honest]
    assert [result["LOUD"].tolist() for result in results] == [[[b"A", b"BC"]]] * 3
    for result in results:
        result.release()


def test_an_output_that_was_not_written_is_found_with_shm_debug(loading_server: LoadingServer) -> None:
    debug = 'parameters { key: "SHM_DEBUG" value: { string_value: "true" } }\n'
    loading_server.load("debugged", "misbehaving", CONFIG.read_text() + debug)
    with ShmClient(loading_server.server.grpc_url, timeout_s=30, inline_bytes=0) as client:
        with pytest.raises(InferenceError, match="asked for output 'Y' and has not written 16 of its 16 elements"):
            client.infer("debugged", {"X": X}, outputs=OUTPUTS, parameters={"deed": "forget an output"})
        with client.infer("debugged", {"X": X}, outputs=OUTPUTS, parameters={"deed": "pass it on"}) as result:
            np.testing.assert_array_equal(result["Y"], X)
    loading_server.unload("debugged")


# Nobody waits for a stranger


def flood(url: str, ends: threading.Event, refusals: list[str]) -> None:
    """Send requests whose slot this process holds, one after another."""
    with hand_made(url, "misbehaving", {"X": X}, OUTPUTS) as locked:
        lease = locked.region.lease(0)
        assert lease.take()
        locked.parameters = {"deed": "pass it on"}
        locked.write()
        while not ends.is_set():
            with pytest.raises(InferenceServerException) as refused:
                locked.send()
            refusals.append(refused.value.message() or "")
        lease.give_back()


def test_requests_to_slots_whose_locks_their_client_holds_keep_nobody_waiting(
    triton_server: EmbeddedServer, grpc_client: ShmClient
) -> None:
    flooders, refusals, ends, times = 6, list[str](), threading.Event(), list[float]()
    with ThreadPoolExecutor(flooders) as threads:
        flooding = [threads.submit(flood, triton_server.grpc_url, ends, refusals) for _ in range(flooders)]
        try:
            while len(refusals) < flooders:
                time.sleep(0.01)
            for _ in range(100):
                begin = time.monotonic()
                pass_on(grpc_client)
                times.append(time.monotonic() - begin)
        finally:
            ends.set()
        for each in flooding:
            each.result()
    assert {text.partition(": ")[0] for text in refusals} == {"shm:busy"}
    assert sorted(times)[90] < 0.1, "as if each of the others was waited for"
