"""Streams on the direct path: each response in the next place of a ring, which the next stream makes large enough."""

from __future__ import annotations

import itertools
import os
import queue
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import DeadlineExceededError, InferenceError, PoolOptions, Result, ShmClient
from shm_backend_utils.client.paths.triton_shm import unregister_when_free
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.protocol.claims import NamedRegionClaim
from shm_backend_utils.protocol.spans import OutputSpan, Ring
from shm_backend_utils.server import EmbeddedServer

from .eventually import all_memory_comes_back
from .flavours import AnyClient, Flavour, url_of
from .hand_made import HandMade, hand_made
from .own_regions import lies_in_shared_memory

X = np.array([1, 2, 3, 4], np.float32)
ROOM = {"Y": X.nbytes}
STEP = 4096


@pytest.fixture(params=[False, True], ids=["blocking", "aio"])
def client(request: pytest.FixtureRequest, triton_server: EmbeddedServer, region: RegionName) -> Iterator[AnyClient]:
    with Flavour(url_of(triton_server, "grpc"), request.param, region).client() as client:
        yield client


def frames_of(client: AnyClient, count: int | None = None, *, way: str = "count", **named: Any) -> Iterator[Result]:
    parameters = {"way": way} if count is None else {"way": way, "count": count}
    named = {"outputs": ROOM, "timeout_s": 10, **named}
    return client.stream("frames_of", {"X": X}, parameters=parameters, **named)


def begun_and_ended(client: AnyClient) -> list[int]:
    """Ask the model, which has one instance: it answers when the stream before has ended."""
    (result,) = frames_of(client, way="ask", outputs=["BEGUN_AND_ENDED"])
    told: list[int] = result["BEGUN_AND_ENDED"].tolist()
    return told


@pytest.mark.parametrize("frames", [1, 4])
def test_frames_come_in_order_through_a_ring_of_any_size(client: AnyClient, frames: int) -> None:
    for count in (0, 1, 4, 5, 100):
        values = []
        for result in frames_of(client, count, frames=frames):
            assert result.path == "direct"
            values.append(result.copy()["Y"].tolist())
            del result
        assert values == [(X + index).tolist() for index in range(count)]
        all_memory_comes_back(client)


def test_a_frame_lies_in_shared_memory_and_places_are_used_again(client: AnyClient) -> None:
    places = []
    for result in frames_of(client, 6, frames=2):
        assert lies_in_shared_memory(result["Y"])
        assert not result.overflowed
        places.append(result["Y"].ctypes.data)
        del result
    assert places == places[:2] * 3
    assert len(set(places)) == 2


def test_frames_are_never_written_over_while_an_array_of_each_is_kept(client: AnyClient) -> None:
    results = frames_of(client, frames=3)
    kept = [result["Y"] for result in itertools.islice(results, 3)]
    with pytest.raises(InferenceError, match="release results, or copy the values to keep, or ask for more frames"):
        next(results)
    assert next(results, None) is None
    assert sum(1 for _ in frames_of(client, 20, frames=3)) == 20  # in another slot
    assert [array.tolist() for array in kept] == [(X + index).tolist() for index in range(3)]
    assert client.stats().slots_held == 1
    kept.clear()
    all_memory_comes_back(client)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "forgotten"])
def test_stopping_early_ends_the_models_generator_and_gives_the_memory_back(client: AnyClient, is_closed: bool) -> None:
    begun, ended = begun_and_ended(client)
    results = frames_of(client)
    for _ in range(2):
        next(results).release()
    if is_closed:
        results.close()  # type: ignore[attr-defined]  # it is a generator
    del results
    assert begun_and_ended(client) == [begun + 1, ended + 1]
    all_memory_comes_back(client)


def side_by_side(client: AnyClient, value: float, **parameters: Any) -> Iterator[Result]:
    return client.stream(
        "frames_side_by_side", {"X": np.full((1, 4), value, np.float32)}, parameters=parameters, frames=1, timeout_s=20
    )


def firsts(*streams: Iterator[Result]) -> list[Any]:
    """Begin streams together, and return the first result of each, or its error."""
    with ThreadPoolExecutor(len(streams)) as threads:
        futures = [threads.submit(next, stream) for stream in streams]
    return [future.exception() or future.result() for future in futures]


def test_streams_of_one_execute_go_on_side_by_side(grpc_client: ShmClient) -> None:
    """Were one served after the other, it would wait for its only frame, which is held until the other has one too."""
    streams = [side_by_side(grpc_client, value, count=10) for value in (0, 100)]
    results = firsts(*streams)
    for step in range(10):
        assert [result["Y"][0, 0] for result in results] == [step, 100 + step]
        results.clear()
        results += [next(stream, None) for stream in streams]
    assert results == [None, None]


def test_a_stream_that_fails_does_not_end_the_one_beside_it(grpc_client: ShmClient) -> None:
    good, bad = side_by_side(grpc_client, 7, count=5), side_by_side(grpc_client, 8, fail=True)
    first, error = firsts(good, bad)
    assert isinstance(error, InferenceError)
    assert "the model gave up on one stream" in str(error)
    assert first["Y"][0, 0] == 7
    del first
    values = []
    for result in good:
        with result:
            values.append(result["Y"][0, 0])
    assert values == [8, 9, 10, 11]


@pytest.fixture(params=[False, True], ids=["blocking", "aio"])
def unguessing(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Iterator[AnyClient]:
    """It has no room for outputs whose size nobody knows yet."""
    grpc = Flavour(url_of(triton_server, "grpc"), request.param)
    with grpc.client(pool=PoolOptions(stream_guess_bytes=0)) as client:
        yield client


def sized(client: AnyClient, lengths: Sequence[int], *, stalls: bool = False, **named: Any) -> Iterator[Result]:
    parameters = {"way": "sized", "lengths": " ".join(map(str, lengths)), "stalls": stalls}
    named = {"outputs": ["Y"], "timeout_s": 10, **named}
    return client.stream("frames_of", {"X": np.ones(4, np.float32)}, parameters=parameters, **named)


def overflows(results: Iterator[Result], lengths: Sequence[int]) -> list[int]:
    """Return which responses came back through Triton. The others lie in shared memory; all are what they should be."""
    found = []
    come = 0
    for result in results:
        with result:
            assert result.path == "direct"
            assert result["Y"].tolist() == [come] * lengths[come]
            assert lies_in_shared_memory(result["Y"]) is not bool(result.overflowed) or not lengths[come]
            if result.overflowed:
                found.append(come)
        come += 1
    assert come == len(lengths)
    return found


def test_frames_that_find_no_room_are_right_and_the_next_stream_has_room(unguessing: AnyClient) -> None:
    lengths = [10, 1000, 5000]
    assert overflows(sized(unguessing, lengths, frames=2), lengths) == [0, 1, 2]
    assert overflows(sized(unguessing, lengths, frames=2), lengths) == []
    all_memory_comes_back(unguessing)


def test_a_response_that_does_not_come_in_time_leaves_no_memory_in_doubt_for_ever(unguessing: AnyClient) -> None:
    results = sized(unguessing, [1000] * 2, frames=1, stalls=True, timeout_s=0.5)
    for _ in range(2):
        with next(results) as result:
            assert result.overflowed
        del result
    with pytest.raises(DeadlineExceededError):
        next(results)
    all_memory_comes_back(unguessing)


@pytest.fixture
def by_hand(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    with hand_made(triton_server.grpc_url, "frames_of", {"X": X}, {"Y": X.nbytes}, slots=5) as request:
        request.said = request.table = request.table._replace(ring=Ring(1, 4, STEP))
        yield request


def last_error(request: HandMade) -> str:
    """Send it, and return its error; empty if its stream ends well."""
    answers: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
    request.stream(lambda result, error: answers.put((result, error)))
    while True:
        result, error = answers.get(timeout=20)
        if error is not None:
            return str(error.message())
        if result.get_response().parameters["triton_final_response"].bool_param:
            return ""


def test_a_ring_made_by_hand_works_as_long_as_nothing_breaks_it(by_hand: HandMade) -> None:
    by_hand.parameters.update(count=3)
    before = by_hand.content()
    for field, ring in (("frame_slot", Ring(2, 4, STEP)), ("frame_stride", Ring(1, 4, (1 << 63) - 1))):
        by_hand.said = by_hand.table._replace(ring=ring)
        assert last_error(by_hand).startswith(f"shm:table: {field}")
        by_hand.client(by_hand.url).stop_stream()
        assert by_hand.content() == before
    by_hand.said = by_hand.table
    assert last_error(by_hand) == ""
    begin, generation = by_hand.table.outputs["Y"].offset, by_hand.generations[0]
    frames = [np.frombuffer(by_hand.region.bytes(), np.float32, 4, begin + place * STEP) for place in range(3)]
    assert [frame.tolist() for frame in frames] == [(X + index).tolist() for index in range(3)]
    completed = [by_hand.region.record(slot).completed for slot in range(5)]
    assert completed == [generation, *((generation << 32) + n for n in (1, 2, 3)), 0]
    del frames


def test_a_ring_that_leaves_a_registered_region_is_refused(by_hand: HandMade) -> None:
    """How large it is the model alone knows; behind what is registered, the object goes on."""
    path = Path("/dev/shm") / f"foreign-{os.getpid()}-{secrets.token_hex(4)}"
    path.write_bytes(bytes(8 * STEP))
    client = by_hand.client(by_hand.url)
    client.register_system_shared_memory(path.name, path.name, 3 * STEP)
    try:
        regions, outputs = (NamedRegionClaim(path.name),), {"Y": OutputSpan(1, 0, X.nbytes)}
        by_hand.said = by_hand.table._replace(regions=regions, outputs=outputs)
        by_hand.parameters.update(count=4)
        assert last_error(by_hand).startswith("shm:table: outputs.Y: found 12304 bytes at offset 0")
        assert not any(path.read_bytes())
        client.stop_stream()
        by_hand.said = by_hand.said._replace(ring=Ring(1, 3, STEP))
        by_hand.parameters.update(count=3)
        assert last_error(by_hand) == ""
        frames = [np.frombuffer(path.read_bytes(), np.float32, 4, place * STEP).tolist() for place in range(3)]
        assert frames == [(X + index).tolist() for index in range(3)]
    finally:
        unregister_when_free(lambda: client.unregister_system_shared_memory(path.name))
        path.unlink()


def test_a_client_that_gives_back_what_it_has_not_got_breaks_its_own_frames_alone(by_hand: HandMade) -> None:
    for slot in range(1, 5):
        by_hand.region.record(slot).generation = (1 << 63) - 1
    by_hand.parameters.update(count=20)
    assert last_error(by_hand) == ""
    with ShmClient(by_hand.url, timeout_s=20) as client:
        results = client.stream("frames_of", {"X": X}, outputs=ROOM, parameters={"count": 3})
        assert [result.copy()["Y"].tolist() for result in results] == [(X + index).tolist() for index in range(3)]
