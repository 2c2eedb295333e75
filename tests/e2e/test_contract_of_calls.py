"""What each of the four clients does with calls on the real server: their options, and how they end."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.client import (
    AsyncShmClient,
    DeadlineExceededError,
    InferenceError,
    Result,
    ServerUnavailableError,
)
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import CallerError, SlotInDoubtError
from shm_backend_utils.server import EmbeddedServer
from tests.releases import takes_floats
from tests.unit.forks.programs import run_program

from .eventually import all_memory_comes_back, eventually
from .flavours import TWO_FLAVOURS, AnyClient, AwaitedClient, Flavour
from .wiretap import Wiretap, tapped

pytestmark = pytest.mark.every_flavour

FOUR: Final = np.array([1.5, -2, 0, np.inf], np.float32)
ROWS: Final = np.arange(8, dtype=np.float32).reshape(2, 4)
QUESTION: Final = {"QUESTION": ((2,), np.int64)}
APART_S: Final = 0.3  # before 24.12, Triton may crash if an answer comes just as its call is cancelled (its issue 7368)


def facts(client: AnyClient, model: str = "request_facts", **named: Any) -> dict[str, Any]:
    with client.infer(model, {"X": FOUR}, **named) as result:
        told: dict[str, Any] = json.loads(result["FACTS"].tobytes())
        return told


@takes_floats
def test_options_alone_reach_the_model(any_client: AnyClient, path: PathName) -> None:
    parameters = {"text": "größer", "count": 3, "share": 0.25, "flag": True}
    options: dict[str, Any] = {"parameters": parameters, "request_id": "ö 7", "queue_timeout_us": 10**7, "path": path}
    for version in ("1", "2"):
        told = facts(any_client, model_version=version, **options)
        assert (told["version"], told["parameters"]) == (version, parameters)
        assert (told["request_id"], told["timeout"]) == ("ö 7", 10**7)


def test_a_call_knows_its_sequence_and_its_deadline(any_client: AnyClient, path: PathName) -> None:
    told = facts(any_client, "call_facts", sequence_id=7, sequence_start=True, queue_timeout_us=60_000_000, path=path)
    assert told["sequence"] == [7, True, False]
    assert 0 < told["left_s"] <= 60


def test_priority_and_headers_are_sent(tapped_client: AnyClient, wiretap: Wiretap, path: PathName) -> None:
    headers = {"x-tenant": "acme-and-sons"}
    facts(tapped_client, priority=1, headers=headers, path=path)
    assert b"priority" in wiretap.sent
    assert b"x-tenant" in wiretap.sent
    assert b"acme-and-sons" in wiretap.sent
    assert headers == {"x-tenant": "acme-and-sons"}


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compression_makes_what_is_sent_smaller(tapped_client: AnyClient, wiretap: Wiretap, compression: str) -> None:
    x = np.zeros(50_000, np.float32)
    with tapped_client.infer("identity", {"INPUT0": x}, compression=compression, path="inline") as result:
        np.testing.assert_array_equal(result["OUTPUT0"], x)
    assert len(wiretap.sent) < x.nbytes / 10


def test_sequences_are_kept_apart(any_client: AnyClient, path: PathName) -> None:
    sums = []
    first, second = np.random.default_rng().integers(1, 2**60, 2).tolist()  # ids are the server's, not the client's
    for sequence, value, start, end in (
        (first, 1, True, False),
        (second, 10, True, False),
        (first, 2, False, False),
        (second, 20, False, True),
        (first, 3, False, True),
    ):
        options: dict[str, Any] = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end, "path": path}
        with any_client.infer("running_sum", {"X": np.array([value], np.float32)}, **options) as result:
            sums.append(result["SUM"].item())
    assert sums == [1, 10, 3, 30, 6]


def test_a_small_call_goes_in_band_by_default_where_that_is_faster(flavour: Flavour) -> None:
    with flavour.client(inline_bytes=None) as client, client.infer("rows", {"X": ROWS}, outputs=["DOUBLED"]) as result:
        np.testing.assert_array_equal(result["DOUBLED"], ROWS * 2)
        assert result.path == ("inline" if flavour.has_streams else "direct")


def test_memory_is_not_used_again_while_a_model_may_write_to_it(any_client: AnyClient) -> None:
    with any_client.prepare("handshake", QUESTION) as call:
        call.inputs["QUESTION"][:] = [0, 1]
        call.infer().release()  # everything is warm, so that the next request is executed before its deadline
        call.inputs["QUESTION"][:] = 0
        with pytest.raises(TimeoutError):
            call.infer(timeout_s=0.5)
        with pytest.raises(SlotInDoubtError, match="infer again later, or prepare another call"):
            call.infer()
        with any_client.prepare("handshake", QUESTION) as another:
            another.inputs["QUESTION"][:] = [8, 9]
            call.inputs["QUESTION"][1] = 1  # lets the model, which still runs, come to its end
            with another.infer() as result:
                np.testing.assert_array_equal(result["ANSWER"], [9, 10])
        call.inputs["QUESTION"][:] = [5, 6]
        with call.infer() as result:
            np.testing.assert_array_equal(result["ANSWER"], [6, 7])


@pytest.mark.parametrize("when", ["before it is sent", "while it runs"])
def test_a_task_can_be_cancelled(url: str, when: str) -> None:
    async def cancel(client: AsyncShmClient) -> None:
        with await client.prepare("handshake", QUESTION) as call:
            question = call.inputs["QUESTION"]
            question[:] = [0, 1]
            answer = (await call.infer())["ANSWER"]
            question[:] = answer[:] = 0
            task = asyncio.ensure_future(call.infer())
            while when == "while it runs" and answer[0] == 0:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(APART_S)
            question[1] = 1  # lets the model, if it runs, come to its end
        for i in range(20):
            with await client.infer("handshake", {"QUESTION": np.array([i, 1])}) as result:
                assert result["ANSWER"].tolist() == [i + 1, 2]

    with AwaitedClient(url, timeout_s=30) as client:
        client.run(asyncio.wait_for(cancel(client.aio), 30))
        all_memory_comes_back(client)


@pytest.mark.parametrize("path", ["direct", "inline"])
def test_a_model_sees_that_nobody_waits(triton_server: EmbeddedServer, tmp_path: Path, path: PathName) -> None:
    note = tmp_path / "note"

    async def ask_and_cancel(client: AsyncShmClient) -> None:
        task = asyncio.ensure_future(client.infer("call_facts", {"X": FOUR}, parameters={"note": str(note)}, path=path))
        while not note.exists() or note.read_text() != "waiting":
            await asyncio.sleep(0.001)
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)

    with AwaitedClient(triton_server.grpc_url, inline_bytes=0) as client:
        client.run(asyncio.wait_for(ask_and_cancel(client.aio), 20))
        all_memory_comes_back(client)
    eventually(lambda: note.read_text() == "cancelled")


def countdown(client: AnyClient, **parameters: Any) -> Iterator[Result]:
    return client.stream("countdown", {"X": FOUR}, parameters=parameters, timeout_s=10)


def test_responses_stream_over_grpc_and_http_says_that_it_has_no_streams(flavour: Flavour) -> None:
    with flavour.client() as client:
        if not flavour.has_streams:
            with pytest.raises(CallerError, match="is HTTP, which has no streams; use a gRPC URL for decoupled models"):
                list(countdown(client, count=1))
            return
        assert [result["Y"][0] for result in countdown(client, count=100)] == [1.5 + i for i in range(100)]
        for result in countdown(client):
            assert (result["Y"] == FOUR).all()
            break  # the model has one instance, which would otherwise go on for ever
        results = countdown(client, count=10, fails_at=2)
        assert len(list(itertools.islice(results, 2))) == 2
        with pytest.raises(InferenceError, match="the model gave up half way"):
            next(results)
        late = client.stream("countdown", {"X": FOUR}, parameters={"count": 9, "stalls_at": 1}, timeout_s=0.5)
        assert next(late)["Y"][0] == 1.5
        with pytest.raises(DeadlineExceededError):
            next(late)
        assert len(list(countdown(client, count=3))) == 3


@pytest.mark.parametrize("is_aio", [False, True], ids=["blocking", "aio"])
def test_a_stream_whose_connection_breaks_is_an_error(triton_server: EmbeddedServer, is_aio: bool) -> None:
    with tapped(triton_server.grpc_url) as wiretap, Flavour(wiretap.address, is_aio).client() as client:
        results = countdown(client)
        next(results)
        wiretap.close()
        with pytest.raises(ServerUnavailableError):
            list(results)


def test_a_misbehaving_model_serves_the_next_request(any_client: AnyClient) -> None:
    for number, (deed, complaint) in enumerate(
        (
            ("raise", "RuntimeError: the model gave up"),
            ("raise after writing", "RuntimeError: the model gave up late"),
            ("write an input", "read-only"),
        ),
        1,
    ):
        with pytest.raises(InferenceError, match=complaint):
            any_client.infer("misbehaving", {"X": FOUR}, parameters={"deed": deed})
        assert any_client.stats().failures == number
        with any_client.infer("misbehaving", {"X": FOUR}, parameters={"deed": "behave"}) as result:
            np.testing.assert_array_equal(result["Y"], FOUR)


FORKED: Final = """
from shm_backend_utils.client import ForkedError
import numpy as np

X = np.ones(4, np.float32)
def check(path):
    with client.infer("identity", {"INPUT0": X}, path=path) as result:
        assert result.path == path and (result["OUTPUT0"] == X).all()

def work():
    try:
        client.infer("identity", {"INPUT0": X})
    except ForkedError:
        return
    os._exit(4)

for path in ("direct", "triton-shm", "inline"):
    check(path)
in_child(work)
for path in ("direct", "triton-shm", "inline"):
    check(path)
client.close()
"""


@pytest.mark.parametrize("flavour", TWO_FLAVOURS, indirect=True)
def test_a_forked_child_is_refused_and_the_parent_goes_on(flavour: Flavour) -> None:
    make = f"from tests.e2e.flavours import Flavour\nclient = Flavour({flavour.url!r}, {flavour.is_aio}).client()"
    run_program("os._exit", make, FORKED)
